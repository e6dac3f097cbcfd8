/* SPDX-License-Identifier: Apache-2.0 */
/* flash_forward.h - the forward half of the row "flash-sm90". */
#ifndef ATTN_FLASH_FORWARD_H
#define ATTN_FLASH_FORWARD_H

#include "kernel/cuda/cuda.h"

const char *attn__flash_forward_rejects(const attn__cuda_call *call);

/* What a call that is not refused takes on a GPU of so many multiprocessors, ns, about. */
double attn__flash_forward_time(const attn__cuda_call *call, int sms);

size_t attn__flash_forward_workspace(const attn__cuda_call *call, const attn__cuda_device *device);
attn_status attn__flash_forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                                void *stream);

#endif
