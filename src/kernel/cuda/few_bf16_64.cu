/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_bf16_64.cu - few.cuh for bf16 and heads of up to 64 dims.
 */
#define FEW_DIM      64
#define FEW_WGMMA_S  wgmma_bf16_64x64_shared
#define FEW_WGMMA_O  wgmma_bf16_64x64_rows
#define FEW_PACK     pack_bf16
#define FEW_EXPONENT 0x7f80u
#define FEW_WIDEN(x) __uint_as_float((uint32_t)(x) << 16)
#include "kernel/cuda/few.cuh"
