/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_f16_64.cu - gradients, fp16, dims up to 64. */
#define F16
#define DIM 64
#include "kernel/cuda/flash_backward.cuh"
