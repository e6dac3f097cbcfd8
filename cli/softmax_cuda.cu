/* SPDX-License-Identifier: Apache-2.0 */
/* softmax_cuda.cu - the softmax of the contestant naive on a GPU, for fp32, fp16 and bf16 (softmax_cuda.cuh). */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { BLOCK = 256, WARPS = BLOCK / 32 };

/* Joins a maximum and a sum of exponentials with another. */
static __device__ __forceinline__ void join(float *most, float *sum, float other, float other_sum)
{
    const float peak = fmaxf(*most, other);
    *sum = (*most == peak ? *sum : *sum * __expf(*most - peak)) +
           (other == peak ? other_sum : other_sum * __expf(other - peak));
    *most = peak;
}

/* Over the threads of a row: a warp, or the block. */
static __device__ void join_row(float *most, float *sum)
{
    __shared__ float mosts[WARPS], sums[WARPS];
    for (int away = 16; away > 0; away /= 2) {
        const float other = __shfl_xor_sync(~0u, *most, away), other_sum = __shfl_xor_sync(~0u, *sum, away);
        join(most, sum, other, other_sum);
    }
    if (blockDim.x == 32) {
        return;
    }
    if (threadIdx.x % 32 == 0) {
        mosts[threadIdx.x / 32] = *most;
        sums[threadIdx.x / 32] = *sum;
    }
    __syncthreads();
    *most = mosts[0];
    *sum = sums[0];
    for (int i = 1; i < WARPS; i++) {
        join(most, sum, mosts[i], sums[i]);
    }
}

static __device__ float add_row(float x)
{
    __shared__ float sums[WARPS];
    for (int away = 16; away > 0; away /= 2) {
        x += __shfl_xor_sync(~0u, x, away);
    }
    if (blockDim.x == 32) {
        return x;
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = 0;
    for (int i = 0; i < WARPS; i++) {
        x += sums[i];
    }
    return x;
}

#define ELEMENT float
#define WIDEN(x)  (x)
#define NARROW(x) (x)
#define ROWS      softmax_rows_f32
#define SLOPES    softmax_slopes_f32
#include "softmax_cuda.cuh"

#define ELEMENT __half
#define WIDEN(x)  __half2float(x)
#define NARROW(x) __float2half_rn(x)
#define ROWS      softmax_rows_f16
#define SLOPES    softmax_slopes_f16
#include "softmax_cuda.cuh"

#define ELEMENT __nv_bfloat16
#define WIDEN(x)  __bfloat162float(x)
#define NARROW(x) __float2bfloat16_rn(x)
#define ROWS      softmax_rows_bf16
#define SLOPES    softmax_slopes_bf16
#include "softmax_cuda.cuh"
