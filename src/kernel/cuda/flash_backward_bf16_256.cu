/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_bf16_256.cu - gradients, bf16, dims of 136 to 256. */
#include "kernel/cuda/flash_backward_256.cuh"
