/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - the one ordered table of kernels and the choice of one.
 *
 * The first row that neither refuses nor declines the shape is taken.  A new kernel is a new line here, see
 * docs/add-a-kernel.md.  What every kernel shares (dims, dtype, CPU features) is judged here, the rest by the
 * row itself.
 */
#include <stdio.h>
#include <string.h>

#include "kernel/rows.h"

enum { MAX_DIM = 512 };

const attn__kernel *const attn__kernels[] = {
    &attn__flash_amx,        &attn__flash_avx512bf16, &attn__flash_avx512,
    &attn__flash_avx2,       &attn__flash_neon,       &attn__flash_portable,
    &attn__kernel_reference, &attn__kernel_naive,     NULL,
};

static const char *missing_feature(uint32_t needs)
{
    uint32_t missing = needs & ~attn__cpu();
    if ((missing & ATTN__CPU_AMX) != 0) {
        return "needs AMX (TILE, BF16), which this CPU or system lacks or ATTN_ISA hides";
    }
    if ((missing & ATTN__CPU_AVX512_BF16) != 0) {
        return "needs AVX512-BF16, which this CPU lacks or ATTN_ISA hides";
    }
    if ((missing & ATTN__CPU_AVX512) != 0) {
        return "needs AVX-512 (F, BW, DQ, VL), which this CPU lacks or ATTN_ISA hides";
    }
    if ((missing & ATTN__CPU_AVX2) != 0) {
        return "needs AVX2, FMA and F16C, which this CPU lacks or ATTN_ISA hides";
    }
    if ((missing & ATTN__CPU_NEON) != 0) {
        return "needs a 64-bit ARM processor, which this is not or ATTN_ISA hides";
    }
    return missing == 0 ? NULL : "needs a CPU feature that is not here";
}

const char *attn__kernel_refusal(const attn__kernel *kernel, const attn__shape *shape)
{
    if (shape->dim_qk < 1 || shape->dim_qk > MAX_DIM || shape->dim_v < 1 || shape->dim_v > MAX_DIM) {
        return "takes head dimensions from 1 to 512";
    }
    if (attn_dtype_size(shape->dtype) == 0) {
        return "takes fp32, fp16 and bf16";
    }
    if (shape->rows < 1 || shape->keys < 0) {
        return "takes at least one query row";
    }
    if (shape->backward && kernel->backward == NULL) {
        return "computes no gradients";
    }
    const char *reason = missing_feature(kernel->needs);
    return reason != NULL ? reason : kernel->rejects(shape);
}

const char *attn__kernel_reluctance(const attn__kernel *kernel, const attn__shape *shape)
{
    return kernel->declines == NULL ? NULL : kernel->declines(shape);
}

/* Appends "; name: reason" for every row that could have been taken; cut off where `text` ends. */
static void list_refusals(char *text, size_t size, const attn__shape *shape)
{
    size_t used = 0;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL && used < size; row++) {
        const char *reason = attn__kernel_refusal(*row, shape);
        reason = reason != NULL ? reason : attn__kernel_reluctance(*row, shape);
        int wrote =
            snprintf(text + used, size - used, "%s%s: %s", used == 0 ? "" : "; ", (*row)->name, reason);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
}

static void list_names(char *text, size_t size)
{
    size_t used = 0;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL && used < size; row++) {
        int wrote = snprintf(text + used, size - used, "%s%s", used == 0 ? "" : ", ", (*row)->name);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
}

static attn_status choose_by_name(const attn__kernel **kernel, const attn__shape *shape, const char *name)
{
    char names[256];
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (strcmp((*row)->name, name) != 0) {
            continue;
        }
        const char *reason = attn__kernel_refusal(*row, shape);
        if (reason != NULL) {
            return attn__fail(ATTN_EUNSUPPORTED, "kernel '%s' does not take this problem: %s", name, reason);
        }
        *kernel = *row;
        return ATTN_OK;
    }
    list_names(names, sizeof names);
    return attn__fail(ATTN_EINVAL, "there is no kernel '%s'; the kernels are %s", name, names);
}

attn_status attn__kernel_choose(const attn__kernel **kernel, const attn__shape *shape, const char *name)
{
    char reasons[768];
    if (name != NULL) {
        return choose_by_name(kernel, shape, name);
    }
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (attn__kernel_refusal(*row, shape) == NULL && attn__kernel_reluctance(*row, shape) == NULL) {
            *kernel = *row;
            return ATTN_OK;
        }
    }
    list_refusals(reasons, sizeof reasons, shape);
    return attn__fail(ATTN_EUNSUPPORTED, "no kernel takes this problem: %s", reasons);
}
