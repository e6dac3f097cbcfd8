/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward.h - the launcher of the gradients on Hopper, for the row "flash-sm90".
 */
#ifndef ATTN_FLASH_BACKWARD_H
#define ATTN_FLASH_BACKWARD_H

#include "kernel/cuda/cuda.h"

/* As the slots of attn__cuda_kernel. */
const char *attn__flash_backward_rejects(const attn__cuda_call *call);
size_t attn__flash_backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device);
attn_status attn__flash_backward(const attn__cuda_call *call, const attn__cuda_device *device,
                                 void *workspace, void *stream);

#endif
