/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - the CUDA kernels, best first.
 */
#include <stddef.h>

#include "kernel/cuda/rows.h"

const attn__cuda_kernel *const attn__cuda_kernels[] = {
    &attn__cuda_few_sm90, &attn__cuda_flash_sm90, &attn__cuda_bf16x3_sm90, &attn__cuda_fma_sm90, NULL,
};
