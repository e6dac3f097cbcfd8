/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_backward_256.cu - gradients of fp32 attention, dims up to 256.
 */
#define NAME      fma_backward_256
#define HEAD_DIM  256
#define BLOCK_K   64
#define BLOCK_Q   32
#define S_ROWS    4
#define S_COLUMNS 4
#define PARTS     1
#define Q_COLUMNS 4
#define AT_SUM    AT_DOUT
#include "kernel/cuda/fma_backward.cuh"
