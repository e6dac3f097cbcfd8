/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_choose.c - the choice of a CUDA kernel, by the rules of the CPU's table: the first row that neither
 * refuses nor declines a problem.
 */
#include <stdio.h>
#include <string.h>

#include "kernel/cuda/cuda.h"

enum { MAX_DIM = 512 };

const char *attn__cuda_refusal(const attn__cuda_kernel *kernel, const attn__cuda_call *call, bool backward)
{
    if (call->dim_qk < 1 || call->dim_qk > MAX_DIM || call->dim_v < 1 || call->dim_v > MAX_DIM) {
        return "takes head dimensions from 1 to 512";
    }
    if (backward && kernel->backward == NULL) {
        return "computes no gradients";
    }
    if (!backward && kernel->forward == NULL) {
        return "computes gradients only";
    }
    return kernel->rejects(call, backward);
}

const char *attn__cuda_reluctance(const attn__cuda_kernel *kernel, const attn__cuda_call *call, bool backward)
{
    return kernel->declines == NULL ? NULL : kernel->declines(call, backward);
}

/* Appends "name: reason" or, without a call, names; cut off where `text` ends. */
static void list_rows(char *text, size_t size, const attn__cuda_call *call, bool backward)
{
    size_t used = 0;
    text[0] = '\0';
    for (const attn__cuda_kernel *const *row = attn__cuda_kernels; *row != NULL && used < size; row++) {
        const char *reason = call != NULL ? attn__cuda_refusal(*row, call, backward) : "";
        if (reason == NULL) {
            reason = attn__cuda_reluctance(*row, call, backward);
        }
        int wrote = snprintf(text + used, size - used, "%s%s%s%s", used == 0 ? "" : "; ", (*row)->name,
                             call != NULL ? ": " : "", reason);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
}

static attn_status choose_by_name(const attn__cuda_kernel **kernel, const attn__cuda_call *call,
                                  bool backward, const char *name)
{
    char names[256];
    for (const attn__cuda_kernel *const *row = attn__cuda_kernels; *row != NULL; row++) {
        if (strcmp((*row)->name, name) != 0) {
            continue;
        }
        const char *reason = attn__cuda_refusal(*row, call, backward);
        if (reason != NULL) {
            return attn__fail(ATTN_EUNSUPPORTED, "kernel '%s' does not take this problem: %s", name, reason);
        }
        *kernel = *row;
        return ATTN_OK;
    }
    list_rows(names, sizeof names, NULL, backward);
    return attn__fail(ATTN_EINVAL, "there is no CUDA kernel '%s'; the kernels are %s", name, names);
}

attn_status attn__cuda_choose(const attn__cuda_kernel **kernel, const attn__cuda_call *call, bool backward,
                              const char *name)
{
    char reasons[768];
    if (name != NULL) {
        return choose_by_name(kernel, call, backward, name);
    }
    for (const attn__cuda_kernel *const *row = attn__cuda_kernels; *row != NULL; row++) {
        if (attn__cuda_refusal(*row, call, backward) == NULL &&
            attn__cuda_reluctance(*row, call, backward) == NULL) {
            *kernel = *row;
            return ATTN_OK;
        }
    }
    list_rows(reasons, sizeof reasons, call, backward);
    return attn__fail(ATTN_EUNSUPPORTED, "no CUDA kernel takes this problem: %s", reasons);
}
