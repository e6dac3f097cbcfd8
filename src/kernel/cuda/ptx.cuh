/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx.cuh - the instructions of sm_90a that CUDA C has no words for, one small function each.
 *
 * Source: the PTX ISA manual, version 9.0; "wgmma" (asynchronous products of a warpgroup), "mbarrier", and the
 * bulk copies.  A shared address is 32 bits wide.
 *
 * TILES IN SHARED MEMORY.  All tiles are panels of 64 columns of 16 bits, 128 bytes a row, 1024-byte aligned, with
 * the 16-byte chunks of row r at chunk ^ (r & 7): the tensor maps' and the descriptors' 128-byte swizzle.
 */
#ifndef ATTN_PTX_CUH
#define ATTN_PTX_CUH

#include <stdint.h>

#define PTX_INLINE static __device__ __forceinline__

/* what lies in memory is read again after this, and not kept in registers */
#define PTX_FORGET() asm volatile("" ::: "memory")

PTX_INLINE uint32_t ptx_shared(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* threadIdx.x, read anew: what is made of it takes no register in between.  Signed or not is a matter of registers, too. */
PTX_INLINE uint32_t ptx_thread(void)
{
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
PTX_INLINE int ptx_thread_signed(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* ---- mbarriers ---- */

PTX_INLINE void ptx_barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* after the inits, before any other thread or the copy engine uses them */
PTX_INLINE void ptx_barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
PTX_INLINE void ptx_barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
PTX_INLINE void ptx_barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
PTX_INLINE void ptx_barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
/* a named barrier among `threads` threads */
PTX_INLINE void ptx_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
PTX_INLINE void ptx_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- copies ---- */

PTX_INLINE void ptx_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
PTX_INLINE void ptx_load_tile_5d(uint32_t shared, const void *map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                 int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
/* bytes: a multiple of 16; both addresses 16-byte aligned */
PTX_INLINE void ptx_load_bulk(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}
PTX_INLINE void ptx_add_bulk_f32(void *global, uint32_t shared, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}
PTX_INLINE void ptx_bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* this thread's bulk stores have read their shared memory */
PTX_INLINE void ptx_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* this thread's bulk stores are done */
PTX_INLINE void ptx_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* ordinary writes to shared memory, before the copy engine or the tensor cores read it */
PTX_INLINE void ptx_fence_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PTX_INLINE void ptx_add_f32x4(float *global, float a, float b, float c, float d)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
}
PTX_INLINE int ptx_load_acquire(const int *global)
{
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
    return value;
}
PTX_INLINE void ptx_store_release(int *global, int value)
{
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

/* Four 8 x 8 matrices of 16 bits; lane l gives the address of row l % 8 of matrix l / 8. */
PTX_INLINE void ptx_store_matrices(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
PTX_INLINE void ptx_store_f32x4(uint32_t shared, float a, float b, float c, float d)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

PTX_INLINE void ptx_read_f32x4(float *x, uint32_t shared)
{
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(shared)
                 : "memory");
}

/* ---- launches ---- */

PTX_INLINE void ptx_grid_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
PTX_INLINE void ptx_grid_go(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- arithmetic ---- */

PTX_INLINE float ptx_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* two rounded to nearest even, `low` in the low half */
PTX_INLINE uint32_t ptx_pack_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
PTX_INLINE uint32_t ptx_pack_f16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

PTX_INLINE float ptx_unpack_bf16(uint16_t half)
{
    return __uint_as_float((uint32_t)half << 16);
}
PTX_INLINE float ptx_unpack_f16(uint16_t half)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

/* ---- warpgroups ---- */

#define PTX_REGISTERS_MORE(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 " #n ";")
#define PTX_REGISTERS_LESS(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 " #n ";")

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

/*
 * D = A B + (add ? D : 0), 64 x N += 64 x 16 x N, fp32 accumulators.
 * Thread t of warp w holds of columns 8 i + 2 (t % 4) + {0, 1}: d[4 i + {0, 1}] in row 16 w + t / 4, d[4 i + {2, 3}]
 * eight rows below.  A from registers: a[{0, 2}] in the first of these rows, a[{1, 3}] in the second, columns
 * 2 (t % 4) and 8 more.
 * across_a, across_b: the operand's panels are read across k.
 */
#define PTX_ACCUMULATORS_16(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define PTX_ACCUMULATORS_32(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define PTX_ACCUMULATORS_64(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PTX_NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define PTX_NAMES_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PTX_NAMES_64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define PTX_WGMMA_SHARED_32(type, across_a, across_b)                        \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %18, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " PTX_NAMES_16   \
                 ", %16, %17, p, 1, 1, " #across_a ", " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_16(d)                                     \
                 : "l"(a), "l"(b), "r"(add)                                    \
                 : "memory")
#define PTX_WGMMA_REGISTERS_32(type, across_b)                             \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %21, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " PTX_NAMES_16   \
                 ", {%16, %17, %18, %19}, %20, p, 1, 1, " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_16(d)                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)                                    \
                 : "memory")
#define PTX_WGMMA_SHARED_64(type, across_a, across_b)                        \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %34, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " PTX_NAMES_32   \
                 ", %32, %33, p, 1, 1, " #across_a ", " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_32(d)                                     \
                 : "l"(a), "l"(b), "r"(add)                                    \
                 : "memory")
#define PTX_WGMMA_REGISTERS_64(type, across_b)                             \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %37, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " PTX_NAMES_32   \
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_32(d)                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)                                    \
                 : "memory")
#define PTX_WGMMA_SHARED_128(type, across_a, across_b)                        \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %66, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " PTX_NAMES_64   \
                 ", %64, %65, p, 1, 1, " #across_a ", " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_64(d)                                     \
                 : "l"(a), "l"(b), "r"(add)                                    \
                 : "memory")
#define PTX_WGMMA_REGISTERS_128(type, across_b)                             \
    asm volatile("{\n"                                                       \
                 ".reg .pred p;\n"                                            \
                 "setp.ne.b32 p, %69, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " PTX_NAMES_64   \
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, " #across_b ";\n"   \
                 "}"                                                          \
                 : PTX_ACCUMULATORS_64(d)                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)                                    \
                 : "memory")

/* threadIdx.x, read anew each time: what follows from it need not stay in registers from one use to the next */
/* ---- copies of a thread from global to shared memory, without a register ---- */
/* `bytes` of 16, the rest becomes 0; from 16-byte aligned memory */
PTX_INLINE void ptx_copy_16(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
PTX_INLINE void ptx_copy_4(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
PTX_INLINE void ptx_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* until all but the latest n groups of this thread are there */
#define PTX_COPY_WAIT(n) asm volatile("cp.async.wait_group " #n ";" ::: "memory")
/* ---- products of a warp ---- */
/* d[16 x 8] += a[16 x 8] b[8 x 8].  Lane 4 g + t holds of a (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); of b (t, g),
 * (t + 4, g); of d (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).  The last 13 bits of a and b are cut off. */
PTX_INLINE void ptx_mma_tf32(float *d, const uint32_t *a, const uint32_t *b)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* ---- numbers ---- */
/* the lesser, NaN if one is */
PTX_INLINE float ptx_min_nan(float a, float b)
{
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
PTX_INLINE float ptx_from_f16(uint16_t x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
PTX_INLINE uint16_t ptx_to_f16(float x)
{
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
PTX_INLINE uint16_t ptx_to_bf16(float x)
{
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

#endif
