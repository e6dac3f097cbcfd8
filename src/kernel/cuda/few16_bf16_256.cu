/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few16_bf16_256.cu - few.cuh for up to 16 rows of bf16 and heads of up to 256 dims.
 */
#define TYPE         "bf16"
#define FEW_DIM      256
#define FEW_HEIGHT   16
#define FEW_PACK     ptx_pack_bf16
#define FEW_EXPONENT 0x7f80u
#define FEW_WIDEN    ptx_unpack_bf16
#include "kernel/cuda/few.cuh"
