/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_backward_64.cu - gradients of fp32 attention, dims up to 64.
 */
#define NAME      fma_backward_64
#define HEAD_DIM  64
#define BLOCK_K   256
#define BLOCK_Q   64
#define S_ROWS    8
#define S_COLUMNS 8
#define PARTS     4
#define Q_COLUMNS 8
#define AT_SUM    AT_P
#include "kernel/cuda/fma_backward.cuh"
