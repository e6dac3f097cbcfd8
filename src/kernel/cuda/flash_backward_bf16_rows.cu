/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_bf16_rows.cu - before and after the gradients, bf16. */
#include "kernel/cuda/flash_backward_rows.cuh"
