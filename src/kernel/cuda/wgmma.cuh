/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.cuh - the products of a warpgroup: wgmma.mma_async of 16-bit operands with fp32 accumulators.
 *
 *     D = A B + (add ? D : 0)        64 x N += 64 x 16 x N        d[N / 2], see below
 *
 * The letters of wgmma_N_xy tell where A and B are: s in shared memory, along k (rows of 16 consecutive elements of k); t in
 * shared memory, across k (transposed as it is read); r in registers.
 *
 * Thread t of warp w holds of columns 8 i + 2 (t % 4) + {0, 1}: d[4 i + {0, 1}] in row 16 w + t / 4 and d[4 i + {2, 3}]
 * eight rows below.  A from registers: a[{0, 2}] in the first of these rows, a[{1, 3}] in the second, of columns
 * 2 (t % 4) + {0, 1} and those 8 to the right.
 *
 * Tiles in shared memory lie as told in ptx.cuh.  Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
 * Instructions".  A file that includes this has defined TYPE as "bf16" or "f16".
 */
#ifndef ATTN_WGMMA_CUH
#define ATTN_WGMMA_CUH

#include "kernel/cuda/ptx.cuh"

/* registers written before, the products after */
PTX_INLINE void ptx_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PTX_INLINE void ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
#define PTX_WGMMA_WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")

/* Keeps the compiler from moving reads of an accumulator, `count` registers, above this point. */
PTX_INLINE void ptx_hold(float *accumulator, int count)
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(accumulator[i])::"memory");
    }
}

/* The high word of an operand's descriptor (128-byte swizzle), from the bytes between groups of 8 rows. */
#define PTX_PANEL_ROWS_HIGH (0x40000000u | 1024u >> 4)
/*
 * A descriptor.  Along k: address of the panel's first row, plus 32 bytes for each 16 columns.  Across k (the
 * matrix is transposed as it is read): address of the first row, plus 2048 bytes for each 16 rows; `panel` is then
 * the bytes from a panel to the next.
 */
PTX_INLINE uint64_t ptx_operand(uint32_t shared, uint32_t panel)
{
    uint32_t low = (shared & 0x3ffffu) >> 4 | panel >> 4 << 16;
    return (uint64_t)PTX_PANEL_ROWS_HIGH << 32 | low;
}
/* the same, `bytes` further on in shared memory */
PTX_INLINE uint64_t ptx_operand_at(uint64_t operand, uint32_t bytes)
{
    return (uint64_t)PTX_PANEL_ROWS_HIGH << 32 | ((uint32_t)operand + (bytes >> 4));
}

/* clang-format off */
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define N0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define N8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define N16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define N24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define N32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define N40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define N48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define N56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define N64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define N72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define N80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define N88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define N96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define N104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define N112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define N120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define D_32 D8(0), D8(8)
#define N_32 N0 ", " N8
#define D_64 D8(0), D8(8), D8(16), D8(24)
#define N_64 N0 ", " N8 ", " N16 ", " N24
#define D_80 D8(0), D8(8), D8(16), D8(24), D8(32)
#define N_80 N0 ", " N8 ", " N16 ", " N24 ", " N32
#define D_128 D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
#define N_128 N0 ", " N8 ", " N16 ", " N24 ", " N32 ", " N40 ", " N48 ", " N56
#define D_176 D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72), D8(80)
#define N_176 N0 ", " N8 ", " N16 ", " N24 ", " N32 ", " N40 ", " N48 ", " N56 ", " N64 ", " N72 ", " N80
#define D_256 D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72), D8(80), D8(88), D8(96), D8(104), D8(112), D8(120)
#define N_256 N0 ", " N8 ", " N16 ", " N24 ", " N32 ", " N40 ", " N48 ", " N56 ", " N64 ", " N72 ", " N80 ", " N88 ", " N96 ", " N104 ", " N112 ", " N120
/* clang-format on */

#define SHARED_A(n, letters, across_a, across_b, at_a, at_b, at_add)                                         \
    PTX_INLINE void wgmma_##n##_##letters(float *d, uint64_t a, uint64_t b, int add)                         \
    {                                                                                                        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #at_add ", 0;\n"                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." TYPE "." TYPE " {" N_##n "}, %" #at_a  \
                     ", %" #at_b ", p, 1, 1, " #across_a ", " #across_b ";\n}"                               \
                     : D_##n                                                                                 \
                     : "l"(a), "l"(b), "r"(add)                                                              \
                     : "memory");                                                                            \
    }
#define REGISTERS_A(n, a0, a1, a2, a3, at_b)                                                                 \
    PTX_INLINE void wgmma_##n##_rt(float *d, const uint32_t *a, uint64_t b)                                  \
    {                                                                                                        \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." TYPE "." TYPE " {" N_##n "}, {%" #a0  \
                     ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b ", 1, 1, 1, 1;"                              \
                     : D_##n                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                    \
                     : "memory");                                                                            \
    }

SHARED_A(32, ss, 0, 0, 16, 17, 18)
SHARED_A(64, ss, 0, 0, 32, 33, 34)
SHARED_A(80, ss, 0, 0, 40, 41, 42)
SHARED_A(128, ss, 0, 0, 64, 65, 66)
SHARED_A(176, ss, 0, 0, 88, 89, 90)
SHARED_A(64, tt, 1, 1, 32, 33, 34)
SHARED_A(64, st, 0, 1, 32, 33, 34)
SHARED_A(128, st, 0, 1, 64, 65, 66)
REGISTERS_A(64, 32, 33, 34, 35, 36)
REGISTERS_A(128, 64, 65, 66, 67, 68)
REGISTERS_A(256, 128, 129, 130, 131, 132)

/*
 * The product of a warp: d[16 x 8] += a[16 x 16] b[16 x 8].  Lane 4 g + t holds of d what it holds of one above, of a as
 * above, and of b in column g rows 2 t + {0, 1} and those 8 below.
 */
PTX_INLINE void mma_16(float *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#undef D8
#undef SHARED_A
#undef REGISTERS_A

#endif
