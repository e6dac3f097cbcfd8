/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_bf16_64.cu - gradients, bf16, dims up to 64. */
#define DIM 64
#include "kernel/cuda/flash_backward.cuh"
