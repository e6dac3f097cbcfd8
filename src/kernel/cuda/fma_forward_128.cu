/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward_128.cu - fp32 attention, dims up to 128.
 */
#define NAME       fma_forward_128
#define HEAD_DIM   128
#define WARPS      4
#define BLOCKS     2
#define ROWS       4
#define BLOCK_K    64
#define SHARES     1
#define ONE_BUFFER 0
#include "kernel/cuda/fma_forward.cuh"
