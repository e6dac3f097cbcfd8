/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_sm90.c - the row "flash-sm90" of the CUDA table: attention and its gradients by Hopper's asynchronous
 * matrix products of 16-bit operands.
 */
#include "kernel/cuda/flash_backward.h"
#include "kernel/cuda/flash_forward.h"
#include "kernel/cuda/rows.h"

static const char *rejects(const attn__cuda_call *call, bool backward)
{
    return backward ? attn__flash_backward_rejects(call) : attn__flash_forward_rejects(call);
}

const attn__cuda_kernel attn__cuda_flash_sm90 = {
    .name = "flash-sm90",
    .summary = "tiled, asynchronous matrix products (wgmma) fed by the copy engine; bf16 and fp16",
    .rounds_weights = true,
    .rejects = rejects,
    .forward_workspace = attn__flash_forward_workspace,
    .forward = attn__flash_forward,
    .backward_workspace = attn__flash_backward_workspace,
    .backward = attn__flash_backward,
};
