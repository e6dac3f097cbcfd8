/* SPDX-License-Identifier: Apache-2.0 */
/* bf16, dims padded to 64, tiles of 256 rows. */
#define HEAD_DIM 64
#define GROUPS   4
#define KEYS     64
#define SHARED   ATTN__FORWARD_SHARED_64_256
#define TYPE     "bf16"
#define pack     ptx_pack_bf16
#define unpack   ptx_unpack_bf16
#include "kernel/cuda/flash_forward.cuh"
