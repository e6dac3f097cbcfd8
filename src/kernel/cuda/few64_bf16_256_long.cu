/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few64_bf16_256_long.cu - few.cuh for up to 64 rows of bf16, heads of up to 256 dims and long shares.
 */
#define FEW_HEIGHT   64
#define FEW_SPLIT    1
#define TYPE         "bf16"
#define FEW_DIM      256
#define FEW_WGMMA_S  wgmma_32_ss
#define FEW_WGMMA_O  wgmma_128_st
#define FEW_PACK     ptx_pack_bf16
#define FEW_EXPONENT 0x7f80u
#define FEW_WIDEN    ptx_unpack_bf16
#include "kernel/cuda/few.cuh"
