/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few64_f16_256.cu - few.cuh for up to 64 rows of fp16 and heads of up to 256 dims.
 */
#define FEW_HEIGHT   64
#define TYPE         "f16"
#define FEW_DIM      256
#define FEW_WGMMA_S  wgmma_32_ss
#define FEW_WGMMA_O  wgmma_256_rt
#define FEW_PACK     ptx_pack_f16
#define FEW_EXPONENT 0x7c00u
#define FEW_WIDEN    ptx_unpack_f16
#include "kernel/cuda/few.cuh"
