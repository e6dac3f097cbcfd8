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

/* What lane 0 has, to all lanes: the same number where all have it, but the compiler learns that they do, and not from where. */
PTX_INLINE uint32_t ptx_uniform(uint32_t x)
{
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, -1;" : "+r"(x));
    return x;
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

/* Waits for all of them; true for all if `flag` was for one. */
PTX_INLINE bool ptx_sync_or(int id, int threads, bool flag)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred in, out;\n"
                 "setp.ne.u32 in, %3, 0;\n"
                 "barrier.red.or.pred.aligned out, %1, %2, in;\n"
                 "selp.u32 %0, 1, 0, out;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)flag)
                 : "memory");
    return any != 0;
}

/* ---- copies ---- */

PTX_INLINE void ptx_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Policies of the second-level cache; the first is for what is read once. */
PTX_INLINE uint64_t ptx_evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
PTX_INLINE uint64_t ptx_evict_normal(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
PTX_INLINE void ptx_load_tile_5d(uint32_t shared, const void *map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                 int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
/* What is read once: the second-level cache gives it up first. */
PTX_INLINE void ptx_load_tile_5d_once(uint32_t shared, const void *map, uint32_t barrier, int c0, int c1, int c2,
                                      int c3, int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(ptx_evict_first())
                 : "memory");
}
/* A box of a tensor of 4 dimensions to shared memory; policy: of the second-level cache, as made above. */
PTX_INLINE void ptx_load_tile_4d(uint32_t to, const void *map, uint32_t barrier, int x, int y, int z, int w, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
                 : "memory");
}
/* Asks for a box, to the second-level cache. */
PTX_INLINE void ptx_prefetch_tile_4d(const void *map, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z), "r"(w)
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
PTX_INLINE void ptx_add_release(int *global, int value)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
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

PTX_INLINE uint32_t ptx_read_u32(uint32_t shared)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
    return x;
}
PTX_INLINE void ptx_read_f32x4(float *x, uint32_t shared)
{
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(shared)
                 : "memory");
}

/* ---- clusters: blocks that read and write each other's shared memory ---- */

PTX_INLINE uint32_t ptx_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* the address in a block of the cluster that a shared address of this one has there */
PTX_INLINE uint32_t ptx_remote(uint32_t shared, uint32_t rank)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    return remote;
}
/* all threads of the cluster that have not ended */
PTX_INLINE void ptx_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::: "memory");
}
/* Says that this block's products and copies have read what they had to.  It does not wait for its writes to be seen by the
 * other block: that would be a wait for all its writes to memory. */
PTX_INLINE void ptx_barrier_arrive_remote(uint32_t remote)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
/* The same place in the shared memory of all blocks of `mask`, and their barriers. */
PTX_INLINE void ptx_load_tile_5d_all(uint32_t shared, const void *map, uint32_t barrier, uint16_t mask, int c0, int c1,
                                     int c2, int c3, int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(mask)
                 : "memory");
}
/* From this block's shared memory to another's, whose barrier counts the bytes. */
PTX_INLINE void ptx_copy_remote(uint32_t remote, uint32_t shared, uint32_t bytes, uint32_t remote_barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     remote),
                 "r"(shared), "r"(bytes), "r"(remote_barrier)
                 : "memory");
}
PTX_INLINE void ptx_store_remote(uint32_t remote, int value, uint32_t remote_barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(value),
                 "r"(remote_barrier)
                 : "memory");
}
PTX_INLINE void ptx_store_remote_f32x4(uint32_t remote, float a, float b, float c, float d, uint32_t remote_barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote_barrier)
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
/* of positive numbers: off by 2^-22 at most, from 1/2 to 2, and by as much of the result elsewhere */
PTX_INLINE float ptx_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* off by one unit in the last place at most */
PTX_INLINE float ptx_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
PTX_INLINE void ptx_copy_wait_all(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- products of a warp ---- */

/* Four 8 x 8 matrices of 16 bits; lane 8 i + j gives the address of row j of matrix i. */
PTX_INLINE void ptx_load_matrices(uint32_t *x, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
PTX_INLINE void ptx_load_matrices_transposed(uint32_t *x, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

/* d[16 x 8] += a[16 x 16] b[16 x 8], of TYPE */
#ifdef TYPE
PTX_INLINE void ptx_mma_16(float *d, const uint32_t *a, const uint32_t *b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

/* ---- numbers ---- */
/* the lesser, NaN if one is */
PTX_INLINE float ptx_min_nan(float a, float b)
{
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
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
