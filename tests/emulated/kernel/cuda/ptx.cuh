/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx.cuh - in place of the header of this name: its functions, as far as the kernels that machine.h runs use them.
 */
#ifndef ATTN_TESTS_PTX_CUH
#define ATTN_TESTS_PTX_CUH

#define PTX_INLINE static inline

extern "C" {
float attn__f16_to_f32(uint16_t half);
uint16_t attn__f32_to_f16(float x);
uint16_t attn__f32_to_bf16(float x);
}

/* What the GPU would refuse. */
PTX_INLINE void machine_aligned(uintptr_t address)
{
    if (address % 16 != 0) {
        fprintf(stderr, "a copy of 16 bytes that is not aligned\n");
        abort();
    }
}

PTX_INLINE uint32_t ptx_shared(const void *pointer)
{
    return (uint32_t)((const char *)pointer - shared);
}
PTX_INLINE void ptx_add_f32x4(float *global, float a, float b, float c, float d)
{
    machine_aligned((uintptr_t)global);
    global[0] += a, global[1] += b, global[2] += c, global[3] += d;
}
PTX_INLINE int ptx_load_acquire(const int *global)
{
    return *global;
}
PTX_INLINE float ptx_exp2(float x)
{
    return exp2f(x);
}
PTX_INLINE int ptx_thread(void)
{
    return (int)machine_thread();
}
PTX_INLINE int ptx_thread_signed(void)
{
    return (int)machine_thread();
}
PTX_INLINE uint32_t ptx_uniform(uint32_t x)
{
    return x;
}
PTX_INLINE void ptx_copy_16(uint32_t to, const void *global, int bytes)
{
    machine_aligned((uintptr_t)global | to);
    machine_copy(to, global, bytes, 16);
}
PTX_INLINE void ptx_copy_4(uint32_t to, const void *global, int bytes)
{
    machine_copy(to, global, bytes, 4);
}
PTX_INLINE void ptx_copy_commit(void)
{
    machine_commit();
}
#define PTX_COPY_WAIT(n) machine_wait(n)

/* registers are as many as the CPU has, and ordinary writes are seen at once */
#define PTX_REGISTERS_MORE(n)
#define PTX_REGISTERS_LESS(n)
PTX_INLINE void ptx_fence_async(void)
{
}
PTX_INLINE void ptx_barrier_init(uint32_t barrier, uint32_t arrivals)
{
    machine_barrier_init(barrier, arrivals);
}
PTX_INLINE void ptx_barrier_init_fence(void)
{
}
PTX_INLINE void ptx_barrier_arrive(uint32_t barrier)
{
    machine_barrier_arrive(barrier, 0);
}
PTX_INLINE void ptx_barrier_wait(uint32_t barrier, uint32_t parity)
{
    machine_barrier_wait(barrier, parity);
}
PTX_INLINE void ptx_barrier_expect(uint32_t barrier, uint32_t bytes)
{
    machine_barrier_arrive(barrier, bytes);
}
PTX_INLINE void ptx_load_bulk(uint32_t to, const void *global, uint32_t bytes, uint32_t barrier)
{
    machine_aligned((uintptr_t)global | to | bytes);
    memcpy(machine_at(to), global, bytes);
    machine_barrier_bytes(barrier, bytes);
}
PTX_INLINE void ptx_sync(int id, int threads)
{
    machine_sync_some((unsigned)id, (unsigned)threads);
}

PTX_INLINE uint32_t ptx_rank(void)
{
    return machine_rank();
}
PTX_INLINE uint32_t ptx_remote(uint32_t at, uint32_t rank)
{
    return machine_remote(at, rank);
}
PTX_INLINE void ptx_cluster_sync(void)
{
    machine_sync_cluster();
}
PTX_INLINE void ptx_barrier_arrive_remote(uint32_t remote)
{
    machine_barrier_arrive(remote, 0);
}
PTX_INLINE void ptx_store_remote_f32x4(uint32_t remote, float a, float b, float c, float d, uint32_t remote_barrier)
{
    const float x[4] = {a, b, c, d};
    machine_aligned(remote);
    memcpy(machine_at(remote), x, sizeof x);
    machine_barrier_bytes(remote_barrier, sizeof x);
}

PTX_INLINE uint32_t ptx_pack_bf16(float low, float high)
{
    return (uint32_t)attn__f32_to_bf16(high) << 16 | attn__f32_to_bf16(low);
}
PTX_INLINE float ptx_min_nan(float a, float b)
{
    return a != a ? a : b != b || b < a ? b : a;
}
PTX_INLINE float ptx_unpack_f16(uint16_t x)
{
    return attn__f16_to_f32(x);
}
PTX_INLINE uint16_t ptx_to_f16(float x)
{
    return attn__f32_to_f16(x);
}
PTX_INLINE uint16_t ptx_to_bf16(float x)
{
    return attn__f32_to_bf16(x);
}

#endif
