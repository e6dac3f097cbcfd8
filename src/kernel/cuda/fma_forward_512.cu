/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward_512.cu - fp32 attention, dims up to 512.
 */
#define NAME       fma_forward_512
#define HEAD_DIM   512
#define WARPS      8
#define BLOCKS     1
#define ROWS       4
#define BLOCK_K    32
#define SHARES     2
#define ONE_BUFFER 1
#include "kernel/cuda/fma_forward.cuh"
