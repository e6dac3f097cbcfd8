/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few16_f16_256.cu - few.cuh for up to 16 rows of fp16 and heads of up to 256 dims.
 */
#define TYPE         "f16"
#define FEW_DIM      256
#define FEW_HEIGHT   16
#define FEW_PACK     ptx_pack_f16
#define FEW_EXPONENT 0x7c00u
#define FEW_WIDEN    ptx_unpack_f16
#include "kernel/cuda/few.cuh"
