/* SPDX-License-Identifier: Apache-2.0 */
/*
 * naive.c - attention as the textbook has it: the whole score matrix, then softmax, then the second product.
 *
 * For comparison only (`attn bench cqs` shows what the published scheme gains over it), and never chosen
 * unless asked for by name: it keeps rows x keys fp32 scores of a task in memory.  The matrix lies
 * transposed, [key][row], so that the products are plain loops over contiguous rows, which compilers
 * vectorise.
 *
 * COST.  The usual 2 * (d_qk + d_v) FLOPs a cell, masked cells included in the first product, and about six
 * passes over the matrix through memory.
 */
#include <math.h>
#include <string.h>

#include "kernel/rows.h"

enum {
    SCRATCH_ALIGN = 16, /* floats */
    STRIP = 64,         /* rows that the products take at a time, so that q and o stay in the L1 cache */
};

typedef struct areas {
    float *q;         /* [dim_qk][rows], times scale */
    float *k, *v;     /* one key, one value */
    float *max, *sum; /* [rows] */
    float *s;         /* [keys][rows] */
} areas;

static bool count_floats(const attn__shape *shape, int64_t *floats)
{
    int64_t q, s, total;
    return attn__mul(shape->rows, shape->dim_qk + 2, &q) && attn__mul(shape->rows, shape->keys, &s) &&
           attn__add(q, s, &total) &&
           attn__add(total, shape->dim_qk + shape->dim_v + SCRATCH_ALIGN, floats) &&
           *floats <= (int64_t)(PTRDIFF_MAX / sizeof(float));
}

static areas lay_out(float *scratch, const attn__block *block)
{
    areas at;
    at.k = scratch;
    at.v = at.k + block->dim_qk;
    at.max = at.v + block->dim_v;
    at.sum = at.max + block->count;
    at.q = at.sum + block->count;
    at.s = at.q + block->count * block->dim_qk;
    return at;
}

/* count elements, `stride` apart, from element `offset` of src on, to dense fp32 */
static void widen(float *dst, const void *src, int64_t offset, attn_dtype dtype, int64_t stride,
                  int64_t count)
{
    attn_to_f32(dst, attn__element(src, dtype, offset), dtype, stride, count);
}

/* Rows of the block that see the key at `position`: [*from, *to). */
static void rows_that_see(const attn__block *block, int64_t position, int64_t *from, int64_t *to)
{
    *from = attn__max(0, position - block->hi - block->first);
    *to = attn__min(block->count, position - block->lo - block->first + 1);
}

/* y[i] += a * x[i] */
static void add_scaled(float *restrict y, float a, const float *restrict x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        y[i] += a * x[i];
    }
}

/* First product, for the rows first .. first + count: s[key][row] = scale * k.q over all keys, -inf where the
 * row does not see the key. */
static void scores(const attn__block *block, const areas *at, int64_t first, int64_t count)
{
    float *s = at->s + first;
    for (int64_t n = 0; n < block->span_count; n++) {
        const attn__span *span = &block->spans[n];
        for (int64_t j = 0; j < span->count; j++, s += block->count) {
            int64_t from, to;
            widen(at->k, span->k, j * span->k_token, block->dtype, span->k_dim, block->dim_qk);
            memset(s, 0, sizeof(float) * (size_t)count);
            for (int64_t d = 0; d < block->dim_qk; d++) {
                add_scaled(s, at->k[d], at->q + d * block->count + first, count);
            }
            rows_that_see(block, span->first + j, &from, &to);
            for (int64_t i = 0; i < count; i++) {
                s[i] = from <= first + i && first + i < to ? s[i] : -INFINITY;
            }
        }
    }
}

/* s becomes exp(s - max); max and sum of each row. */
static void softmax(const attn__block *block, const areas *at, int64_t keys)
{
    const int64_t rows = block->count;
    for (int64_t i = 0; i < rows; i++) {
        at->max[i] = -INFINITY;
        at->sum[i] = 0.0f;
    }
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t i = 0; i < rows; i++) {
            float s = at->s[j * rows + i];
            at->max[i] = s > at->max[i] ? s : at->max[i];
        }
    }
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t i = 0; i < rows; i++) {
            float *s = &at->s[j * rows + i];
            *s = *s == -INFINITY ? 0.0f : expf(*s - at->max[i]);
            at->sum[i] += *s;
        }
    }
}

/* Second product, for the rows first .. first + count: o[row] = sum of p[key][row] * v[key] over the keys
 * that the row sees. */
static void values(const attn__block *block, const areas *at, int64_t first, int64_t count)
{
    const float *p = at->s;
    for (int64_t i = first; i < first + count; i++) {
        memset(block->o + i * block->o_stride, 0, sizeof(float) * (size_t)block->dim_v);
    }
    for (int64_t n = 0; n < block->span_count; n++) {
        const attn__span *span = &block->spans[n];
        for (int64_t j = 0; j < span->count; j++, p += block->count) {
            int64_t from, to;
            widen(at->v, span->v, j * span->v_token, block->dtype, span->v_dim, block->dim_v);
            rows_that_see(block, span->first + j, &from, &to);
            for (int64_t i = attn__max(from, first); i < attn__min(to, first + count); i++) {
                add_scaled(block->o + i * block->o_stride, p[i], at->v, block->dim_v);
            }
        }
    }
}

static void forward(const attn__block *block, void *scratch)
{
    const areas at = lay_out(scratch, block);
    int64_t keys = 0;
    for (int64_t n = 0; n < block->span_count; n++) {
        keys += block->spans[n].count;
    }
    for (int64_t i = 0; i < block->count; i++) {
        widen(at.k, block->q, i * block->q_token, block->dtype, block->q_dim, block->dim_qk);
        for (int64_t d = 0; d < block->dim_qk; d++) {
            at.q[d * block->count + i] = at.k[d] * block->scale;
        }
    }
    for (int64_t i = 0; i < block->count; i += STRIP) {
        scores(block, &at, i, attn__min(STRIP, block->count - i));
    }
    softmax(block, &at, keys);
    for (int64_t i = 0; i < block->count; i += STRIP) {
        values(block, &at, i, attn__min(STRIP, block->count - i));
    }
    for (int64_t i = 0; i < block->count; i++) {
        float sum = at.sum[i];
        for (int64_t d = 0; d < block->dim_v; d++) {
            block->o[i * block->o_stride + d] *= sum == 0.0f ? 0.0f : 1.0f / sum;
        }
        block->lse[i] = sum == 0.0f ? -INFINITY : at.max[i] + logf(sum);
    }
}

static int64_t tile_q(const attn__shape *shape)
{
    return shape->rows;
}

static const char *rejects(const attn__shape *shape)
{
    int64_t floats;
    return count_floats(shape, &floats) ? NULL
                                        : "the score matrix of a task is larger than the address space";
}

/* SIZE_MAX where rejects refuses. */
static size_t scratch_bytes(const attn__shape *shape)
{
    int64_t floats;
    return count_floats(shape, &floats) ? sizeof(float) * (size_t)floats : SIZE_MAX;
}

static const char *declines(const attn__shape *shape)
{
    (void)shape;
    return "taken only when asked for by name";
}

const attn__kernel attn__kernel_naive = {
    .name = "naive",
    .summary = "keeps the whole score matrix, for comparison",
    .tile_q = tile_q,
    .rejects = rejects,
    .declines = declines,
    .scratch = scratch_bytes,
    .forward = forward,
};
