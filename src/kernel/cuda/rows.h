/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - the rows of the CUDA kernel table, for table.c and for tests and benchmarks of one row alone.
 */
#ifndef ATTN_CUDA_ROWS_H
#define ATTN_CUDA_ROWS_H

#include "kernel/cuda/cuda.h"

extern const attn__cuda_kernel attn__cuda_few_sm90, attn__cuda_flash_sm90;
extern const attn__cuda_kernel attn__cuda_fma_sm90, attn__cuda_bf16x3_sm90; /* fma_launch.c */

#endif
