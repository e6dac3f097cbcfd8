/* SPDX-License-Identifier: Apache-2.0 */
/* flash_backward_f16_rows.cu - before and after the gradients, fp16. */
#define F16
#include "kernel/cuda/flash_backward_rows.cuh"
