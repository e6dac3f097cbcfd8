/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward_256.cu - fp32 attention, dims up to 256.
 */
#define NAME       fma_forward_256
#define HEAD_DIM   256
#define WARPS      8
#define BLOCKS     1
#define ROWS       4
#define BLOCK_K    32
#define SHARES     1
#define ONE_BUFFER 0
#include "kernel/cuda/fma_forward.cuh"
