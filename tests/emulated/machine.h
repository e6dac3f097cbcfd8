/* SPDX-License-Identifier: Apache-2.0 */
/*
 * machine.h - one multiprocessor, or two of a cluster, played by the CPU: runs the source of a CUDA kernel
 * thread by thread, so that kernels are tested where there is no GPU.
 *
 * METHOD.  The kernel is compiled as C++ with CUDA's words as macros (this header) and PTX's as functions
 * (kernel/cuda/ptx.cuh and wgmma.cuh beside this).  Each thread of a block is a coroutine that runs until a
 * barrier; the order in which they go on changes all the time.  Copies to shared memory arrive when the
 * thread waits for them, and not before; what is counted by a barrier, at once.  Blocks run one after the
 * other, those of a cluster side by side.  So what is found is wrong indices, wrong sums, wrong counts of
 * arrivals and bytes, and most missing barriers and waits; not what happens between other blocks, nor
 * alignment of plain loads.
 *
 * COST.  About 10^8 multiply-adds a second.
 */
#ifndef ATTN_TESTS_MACHINE_H
#define ATTN_TESTS_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A kernel by name, NULL if there is none; and its run. */
typedef struct machine_kernel machine_kernel;
const machine_kernel *machine_find(const char *name);
/* cluster: blocks of one, 1 or 2 */
void machine_run(const machine_kernel *kernel, unsigned grid, unsigned block, unsigned cluster,
                 const void *params);

#ifdef __cplusplus
}

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernel/cuda/fma_params.h"

/* ---- CUDA's words ---- */

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define threadIdx        (machine_index{machine_thread()})

struct machine_index {
    unsigned x;
};
extern machine_index blockIdx, gridDim;
/* The block's shared memory; so a kernel's declaration of it declares the pointer once more. */
extern char (*machine_memory)[];
#define shared (*machine_memory)

unsigned machine_thread();
unsigned machine_rank(); /* of the block in its cluster */
void machine_sync();
void machine_sync_cluster();
bool machine_any(bool value); /* of the block */
void machine_sync_warp();
/* What all lanes of the warp gave, 64 bytes apart; until the lane's next machine_sync_warp(). */
const char *machine_exchange(const void *mine, size_t bytes);
/* bytes of `from`, then zeros up to `size`, to shared memory */
void machine_copy(uint32_t to, const void *from, int bytes, int size);
void machine_commit();
void machine_wait(size_t groups);
/* The named barrier `id` of so many threads. */
void machine_sync_some(unsigned id, unsigned count);
/* An address in shared memory, as a block of the cluster has it; and what lies there. */
uint32_t machine_remote(uint32_t at, unsigned rank);
char *machine_at(uint32_t at);
/* A barrier in shared memory: each `count` arrivals end a phase, when as many bytes are there as they say.
 * bytes: so many are.  wait: until a phase of this parity has ended; the one before the first is odd. */
void machine_barrier_init(uint32_t at, unsigned count);
void machine_barrier_arrive(uint32_t at, uint32_t bytes);
void machine_barrier_bytes(uint32_t at, uint32_t bytes);
void machine_barrier_wait(uint32_t at, unsigned parity);

struct float4 {
    float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w)
{
    return float4{x, y, z, w};
}
struct float2 {
    float x, y;
};
static inline float2 make_float2(float x, float y)
{
    return float2{x, y};
}
struct uint4 {
    uint32_t x, y, z, w;
};
static inline int min(int a, int b)
{
    return a < b ? a : b;
}
static inline int max(int a, int b)
{
    return a > b ? a : b;
}
static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float __shfl_xor_sync(unsigned, float x, unsigned mask)
{
    float other;
    memcpy(&other, machine_exchange(&x, sizeof x) + ((machine_thread() % 32) ^ mask) * 64, sizeof other);
    machine_sync_warp();
    return other;
}
static inline void __syncthreads()
{
    machine_sync();
}
static inline int __syncthreads_or(bool value)
{
    return machine_any(value);
}
static inline void __syncwarp()
{
    machine_sync_warp();
}
static inline void __threadfence() {}
static inline void __nanosleep(unsigned) {}
template <class T, class U> static inline T atomicAdd(T *to, U x)
{
    const T before = *to;
    *to = (T)(before + (T)x);
    return before;
}

#endif
#endif
