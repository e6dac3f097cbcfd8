/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward_64.cu - fp32 attention, dims up to 64.
 */
#define NAME       fma_forward_64
#define HEAD_DIM   64
#define WARPS      4
#define BLOCKS     2
#define ROWS       8
#define BLOCK_K    64
#define SHARES     1
#define ONE_BUFFER 0
#include "kernel/cuda/fma_forward.cuh"
