/* SPDX-License-Identifier: Apache-2.0 */
/* tensors.c - rows of strided arrays in memory. */
#include "tensors.h"

#include <math.h>
#include <string.h>

static cli_tensor with_strides(cli_tensor t)
{
    int64_t *s = t.at.stride;
    if (s[0] == 0 && s[1] == 0 && s[2] == 0 && s[3] == 0) {
        s[3] = 1;
        s[2] = t.dim;
        s[1] = t.tokens * t.dim;
        s[0] = t.heads * t.tokens * t.dim;
    }
    return t;
}

cli_tensor cli_tensor_of(const attn_problem *p, attn_operand x, attn_tensor tensor)
{
    return with_strides((cli_tensor){
        .at = tensor,
        .dtype = p->dtype,
        .batch = p->batch,
        .heads = x == ATTN_Q ? p->heads_q : p->heads_kv,
        .tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv,
        .dim = x == ATTN_V ? p->dim_v : p->dim_qk,
    });
}

cli_tensor cli_tensor_out(const attn_problem *p, attn_dtype dtype, attn_tensor tensor)
{
    return with_strides((cli_tensor){
        .at = tensor,
        .dtype = dtype,
        .batch = p->batch,
        .heads = p->heads_q,
        .tokens = p->tokens_q,
        .dim = p->dim_v,
    });
}

static char *row_of(const cli_tensor *t, int64_t batch, int64_t head, int64_t token)
{
    const int64_t *s = t->at.stride;
    int64_t offset = batch * s[0] + head * s[1] + token * s[2];
    return (char *)t->at.data + offset * (int64_t)attn_dtype_size(t->dtype);
}

void cli_tensor_row(const cli_tensor *t, int64_t batch, int64_t head, int64_t token, float *row)
{
    attn_to_f32(row, row_of(t, batch, head, token), t->dtype, t->at.stride[3], t->dim);
}

void cli_tensor_set(const cli_tensor *t, int64_t batch, int64_t head, int64_t token, const float *row)
{
    attn_from_f32(row_of(t, batch, head, token), t->dtype, t->at.stride[3], row, t->dim);
}

attn_status cli_tensors_read(void *data, attn_operand x, int64_t batch, int64_t first, int64_t count,
                             void *dst, int64_t head_stride)
{
    const cli_tensor *t = (const cli_tensor *)data + x;
    size_t size = attn_dtype_size(t->dtype);
    for (int64_t head = 0; head < t->heads; head++) {
        for (int64_t i = 0; i < count; i++) {
            const char *from = row_of(t, batch, head, first + i);
            char *to = (char *)dst + (size_t)(head * head_stride + i * t->dim) * size;
            if (t->at.stride[3] == 1) {
                memcpy(to, from, (size_t)t->dim * size);
                continue;
            }
            for (int64_t c = 0; c < t->dim; c++) {
                memcpy(to + (size_t)c * size, from + c * t->at.stride[3] * (int64_t)size, size);
            }
        }
    }
    return ATTN_OK;
}

cli_extent cli_tensor_extent(const cli_tensor *t)
{
    cli_extent extent = {0};
    double all = 0;
    float row[512]; /* the most that a problem may have */
    for (int64_t i = 0; i < t->batch * t->heads * t->tokens; i++) {
        double sum = 0;
        cli_tensor_row(t, i / t->tokens / t->heads, i / t->tokens % t->heads, i % t->tokens, row);
        for (int64_t c = 0; c < t->dim; c++) {
            double x = isfinite(row[c]) ? fabs((double)row[c]) : 0;
            sum += x * x;
            extent.element = x > extent.element ? x : extent.element;
        }
        extent.row = sum > extent.row * extent.row ? sqrt(sum) : extent.row;
        all += sum;
    }
    extent.rms = sqrt(all / (double)(t->batch * t->heads * t->tokens * t->dim));
    return extent;
}
