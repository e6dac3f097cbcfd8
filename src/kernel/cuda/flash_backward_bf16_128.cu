/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_bf16_128.cu - gradients, bf16, dims of 72 to 128. */
#define DIM 128
#include "kernel/cuda/flash_backward.cuh"
