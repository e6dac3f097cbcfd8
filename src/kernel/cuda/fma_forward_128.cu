/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward_128.cu - fp32 attention, dims up to 128.
 */
#define NAME       fma_forward_128
#define HEAD_DIM   128
#define WARPS      8
#define BLOCKS     1
#define ROWS       8
#define BLOCK_K    128
#define SHARES     1
#define ONE_BUFFER 0
#define FMA_DOWN   2
#include "kernel/cuda/fma_forward.cuh"
