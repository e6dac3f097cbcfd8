/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_f16_64.cu - few.cuh for fp16 and heads of up to 64 dims.
 */
#include <cuda_fp16.h>

#define FEW_DIM      64
#define FEW_WGMMA_S  wgmma_f16_64x64_shared
#define FEW_WGMMA_O  wgmma_f16_64x64_rows
#define FEW_PACK     pack_f16
#define FEW_EXPONENT 0x7c00u
#define FEW_WIDEN(x) __half2float(__ushort_as_half(x))
#include "kernel/cuda/few.cuh"
