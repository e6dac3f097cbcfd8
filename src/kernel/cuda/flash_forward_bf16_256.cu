/* SPDX-License-Identifier: Apache-2.0 */
/* bf16, dims padded to 256. */
#define HEAD_DIM 256
#define GROUPS   2
#define KEYS     80
#define SHARED   ATTN__FORWARD_SHARED_256
#define TYPE     "bf16"
#define pack     ptx_pack_bf16
#define unpack   ptx_unpack_bf16
#include "kernel/cuda/flash_forward.cuh"
