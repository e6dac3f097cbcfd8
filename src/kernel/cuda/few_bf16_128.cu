/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_bf16_128.cu - few.cuh for bf16 and heads of up to 128 dims.
 */
#define FEW_DIM      128
#define FEW_WGMMA_S  wgmma_bf16_64x32_shared
#define FEW_WGMMA_O  wgmma_bf16_64x128_rows
#define FEW_PACK     pack_bf16
#define FEW_EXPONENT 0x7f80u
#define FEW_WIDEN(x) __uint_as_float((uint32_t)(x) << 16)
#include "kernel/cuda/few.cuh"
