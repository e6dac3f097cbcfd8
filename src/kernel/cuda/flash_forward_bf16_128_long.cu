/* SPDX-License-Identifier: Apache-2.0 */
/* bf16, dims padded to 128, many keys. */
#define HEAD_DIM 128
#define GROUPS   2
#define KEYS     176
#define SHARED   ATTN__FORWARD_SHARED_128_LONG
#define TYPE     "bf16"
#define pack     ptx_pack_bf16
#define unpack   ptx_unpack_bf16
#include "kernel/cuda/flash_forward.cuh"
