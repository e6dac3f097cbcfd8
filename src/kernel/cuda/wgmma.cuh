/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.cuh - the products of a warpgroup: wgmma.mma_async of 16-bit operands with fp32 accumulators.
 *
 *     D = A B + (add ? D : 0)        64 x N += 64 x 16 x N        d[N / 2], see below
 *
 * wgmma_N_ss: A and B from shared memory, both along k (rows of 16 consecutive elements of k).
 * wgmma_N_rs: A from registers; B from shared memory across k (transposed as it is read): V as it lies.
 *
 * Thread t of warp w holds of columns 8 i + 2 (t % 4) + {0, 1}: d[4 i + {0, 1}] in row 16 w + t / 4 and d[4 i + {2, 3}]
 * eight rows below.  A from registers: a[{0, 2}] in the first of these rows, a[{1, 3}] in the second, of columns
 * 2 (t % 4) + {0, 1} and those 8 to the right.
 *
 * Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions".  A file that includes this has defined TYPE
 * as "bf16" or "f16".
 */
#ifndef ATTN_WGMMA_CUH
#define ATTN_WGMMA_CUH

#include "kernel/cuda/ptx.cuh"

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

#define SS(n, at_a, at_b, at_add)                                                                            \
    PTX_INLINE void wgmma_##n##_ss(float *d, uint64_t a, uint64_t b, int add)                                \
    {                                                                                                        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #at_add ", 0;\n"                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." TYPE "." TYPE " {" N_##n "}, %" #at_a  \
                     ", %" #at_b ", p, 1, 1, 0, 0;\n}"                                                       \
                     : D_##n                                                                                 \
                     : "l"(a), "l"(b), "r"(add)                                                              \
                     : "memory");                                                                            \
    }
#define RS(n, a0, a1, a2, a3, at_b)                                                                          \
    PTX_INLINE void wgmma_##n##_rs(float *d, const uint32_t *a, uint64_t b)                                  \
    {                                                                                                        \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." TYPE "." TYPE " {" N_##n "}, {%" #a0  \
                     ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b ", 1, 1, 1, 1;"                              \
                     : D_##n                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                    \
                     : "memory");                                                                            \
    }

SS(64, 32, 33, 34)
SS(80, 40, 41, 42)
SS(128, 64, 65, 66)
SS(176, 88, 89, 90)
RS(64, 32, 33, 34, 35, 36)
RS(128, 64, 65, 66, 67, 68)
RS(256, 128, 129, 130, 131, 132)

#undef D8
#undef SS
#undef RS

#endif
