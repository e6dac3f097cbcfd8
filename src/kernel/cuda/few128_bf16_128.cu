/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few128_bf16_128.cu - few.cuh for tiles of 128 rows of bf16 and heads of up to 128 dims.
 */
#define FEW_HEIGHT   128
#define TYPE         "bf16"
#define FEW_DIM      128
#define FEW_WGMMA_S  wgmma_128_ss
#define FEW_WGMMA_O  wgmma_128_rt
#define FEW_PACK     ptx_pack_bf16
#define FEW_EXPONENT 0x7f80u
#define FEW_WIDEN    ptx_unpack_bf16
#include "kernel/cuda/few.cuh"
