/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.c - delta = rowsum(o * dO), the part of the softmax's gradient that all keys of a query share (Dao et
 * al., arXiv 2205.14135, section 3.1 calls it D).
 *
 * Eight sums side by side, always in the same order, so that compilers can vectorise and every machine level
 * gives the same bits.  COST: 2 FLOPs and 2 reads an element, bound by memory.
 */
#include "kernel/rows.h"

#if defined(__clang__) || !defined(__GNUC__)
#pragma STDC FP_CONTRACT OFF /* gcc does not know it, and does not contract under -std=c11 */
#endif

enum { SUMS = 8, CHUNK = 128 };

/* `count` elements of a row from dim `d` on as dense fp32: where they lie, or in `copy`. */
static const float *piece(const attn__rows *rows, int64_t row, int64_t d, int64_t count, float *copy)
{
    const void *from = attn__element(rows->data, rows->dtype, row * rows->token + d * rows->dim);
    if (rows->dtype == ATTN_F32 && rows->dim == 1) {
        return from;
    }
    attn_to_f32(copy, from, rows->dtype, rows->dim, count);
    return copy;
}

static void add_products(float *sum, const float *a, const float *b, int64_t count)
{
    int64_t d = 0;
    for (; d + SUMS <= count; d += SUMS) {
        for (int i = 0; i < SUMS; i++) {
            sum[i] += a[d + i] * b[d + i];
        }
    }
    for (int i = 0; d + i < count; i++) {
        sum[i] += a[d + i] * b[d + i];
    }
}

void attn__delta(float *delta, const attn__rows *o, const attn__rows *dout, int64_t rows, int64_t dim_v)
{
    float a[CHUNK], b[CHUNK];
    for (int64_t i = 0; i < rows; i++) {
        float sum[SUMS] = {0.0f};
        for (int64_t d = 0; d < dim_v; d += CHUNK) {
            int64_t count = attn__min(CHUNK, dim_v - d);
            add_products(sum, piece(o, i, d, count, a), piece(dout, i, d, count, b), count);
        }
        delta[i] = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
    }
}
