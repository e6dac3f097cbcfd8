/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_backward_128.cu - gradients of fp32 attention, dims up to 128.
 */
#define NAME      fma_backward_128
#define HEAD_DIM  128
#define BLOCK_K   128
#define BLOCK_Q   64
#define S_ROWS    8
#define S_COLUMNS 8
#define PARTS     2
#define Q_COLUMNS 8
#define AT_SUM    AT_DOUT
#include "kernel/cuda/fma_backward.cuh"
