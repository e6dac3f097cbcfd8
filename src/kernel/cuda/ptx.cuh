/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx.cuh - the instructions of sm_90a that CUDA C has no words for, one small function each.
 *
 * Source: the PTX ISA manual, version 9.0.  A shared address is 32 bits wide.
 */
#ifndef ATTN_PTX_CUH
#define ATTN_PTX_CUH

#include <stdint.h>

#define PTX_INLINE static __device__ __forceinline__

PTX_INLINE uint32_t ptx_shared(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
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
PTX_INLINE float ptx_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* threadIdx.x, read anew each time: what follows from it need not stay in registers from one use to the next */
PTX_INLINE int ptx_thread(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

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
