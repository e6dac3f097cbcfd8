/* SPDX-License-Identifier: Apache-2.0 */
/* f16, dims padded to 64, tiles of 128 rows. */
#define HEAD_DIM 64
#define GROUPS   2
#define KEYS     128
#define SHARED   ATTN__FORWARD_SHARED_64_128
#define TYPE     "f16"
#define pack     ptx_pack_f16
#define unpack   ptx_unpack_f16
#include "kernel/cuda/flash_forward.cuh"
