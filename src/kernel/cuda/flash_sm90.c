/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_sm90.c - the row "flash-sm90": gradients in bf16 and fp16 on Hopper.
 */
#include "kernel/cuda/flash_backward.h"
#include "kernel/cuda/rows.h"

static const char *rejects(const attn__cuda_call *call, bool backward)
{
    return backward ? attn__flash_backward_rejects(call) : "it has gradients only";
}

const attn__cuda_kernel attn__cuda_flash_sm90 = {
    .name = "flash-sm90",
    .summary = "flash attention on Hopper's tensor cores",
    .rounds_weights = true,
    .rejects = rejects,
    .backward_workspace = attn__flash_backward_workspace,
    .backward = attn__flash_backward,
};
