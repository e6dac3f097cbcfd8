/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_f16_256.cu - gradients, fp16, dims of 136 to 256. */
#define F16
#include "kernel/cuda/flash_backward_256.cuh"
