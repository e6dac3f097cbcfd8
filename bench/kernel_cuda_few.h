/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_few.h - what kernel_cuda_few.c and kernel_cuda_few_check.c share.
 */
#ifndef ATTN_BENCH_KERNEL_CUDA_FEW_H
#define ATTN_BENCH_KERNEL_CUDA_FEW_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attn/cuda.h"
#include "kernel/cuda/rows.h"

static const attn__cuda_kernel *const kernel = &attn__cuda_few_sm90;

static inline void must(attn_status status)
{
    if (status != ATTN_OK) {
        fprintf(stderr, "%s\n", attn_last_error());
        exit(1);
    }
}

static inline void *device_memory(size_t bytes)
{
    void *memory;
    must(attn_cuda_alloc(0, &memory, bytes > 0 ? bytes : 16));
    return memory;
}

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline float normal(uint64_t *state)
{
    double u = ((double)(next_random(state) >> 11) + 1.0) * 0x1p-53,
           v = (double)(next_random(state) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

#endif
