/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_f16_128.cu - gradients, fp16, dims of 72 to 128. */
#define F16
#define DIM 128
#include "kernel/cuda/flash_backward.cuh"
