/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference.c - attention in double precision and plain C: what every other kernel is measured against.
 *
 * METHOD.  The running maximum and sum of Milakov & Gimelshein (arXiv 1805.02867), one key after the other,
 * in fp64.  The state of a row takes its keys in pieces, so that long inputs are read in pieces too.  COST:
 * about 2 * (d_qk + d_v) FLOPs and one exp a cell; d_v more when the maximum rises.
 *
 * It is also a row of the table: inputs are widened to fp64 a piece at a time, results rounded to fp32 once.
 */
#include <math.h>

#include "kernel/rows.h"

/* ---- one row ------------------------------------------------------------------------------------- */

void attn__reference_begin(attn__reference_row *row, int64_t dim_v)
{
    row->max = -INFINITY;
    row->sum = 0.0;
    for (int64_t d = 0; d < dim_v; d++) {
        row->acc[d] = 0.0;
    }
}

/* Four sums side by side: a fixed order that compilers can vectorise. */
static double dot(const double *a, const double *b, int64_t dim)
{
    double sum[4] = {0.0, 0.0, 0.0, 0.0};
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
        for (int i = 0; i < 4; i++) {
            sum[i] += a[d + i] * b[d + i];
        }
    }
    for (; d < dim; d++) {
        sum[d % 4] += a[d] * b[d];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void add_key(attn__reference_row *row, double score, const double *v, int64_t dim_v)
{
    if (score > row->max) {
        double fade = exp(row->max - score); /* 0 for the first key */
        row->sum *= fade;
        for (int64_t d = 0; d < dim_v; d++) {
            row->acc[d] *= fade;
        }
        row->max = score;
    }
    /* A score of -inf weighs nothing, also while the maximum is -inf itself; its value may still be NaN. */
    double weight = score == -INFINITY ? 0.0 : exp(score - row->max);
    row->sum += weight;
    for (int64_t d = 0; d < dim_v; d++) {
        row->acc[d] += weight * v[d];
    }
}

void attn__reference_add(attn__reference_row *row, const double *q, const double *k, const double *v,
                         int64_t first, int64_t count, int64_t pos, int64_t lo, int64_t hi, double scale,
                         int64_t dim_qk, int64_t dim_v)
{
    int64_t from = attn__max(0, pos + lo - first);
    int64_t to = attn__min(count, pos + hi + 1 - first);
    for (int64_t j = from; j < to; j++) {
        add_key(row, scale * dot(q, k + j * dim_qk, dim_qk), v + j * dim_v, dim_v);
    }
}

double attn__reference_end(attn__reference_row *row, int64_t dim_v)
{
    if (row->sum == 0.0) {
        return -INFINITY; /* acc is 0, or NaN where a value of weight 0 was */
    }
    for (int64_t d = 0; d < dim_v; d++) {
        row->acc[d] /= row->sum;
    }
    return row->max + log(row->sum);
}

/* ---- the row of the table ------------------------------------------------------------------------ */

enum { TILE_Q = 32, TILE_K = 32, CHUNK = 64 };

typedef struct scratch_areas {
    double *q, *k, *v, *acc;
    attn__reference_row *rows;
} scratch_areas;

/* The areas one after the other; returns the bytes.  memory may be NULL: only counts. */
static size_t lay_out(scratch_areas *areas, void *memory, int64_t rows, int64_t dim_qk, int64_t dim_v)
{
    int64_t q = rows * dim_qk, k = TILE_K * dim_qk, v = TILE_K * dim_v, acc = rows * dim_v;
    *areas = (scratch_areas){0};
    if (memory != NULL) {
        areas->q = memory;
        areas->k = areas->q + q;
        areas->v = areas->k + k;
        areas->acc = areas->v + v;
        areas->rows = (void *)(areas->acc + acc);
    }
    return sizeof(double) * (size_t)(q + k + v + acc) + sizeof(attn__reference_row) * (size_t)rows;
}

/* count elements, `stride` apart, from element `offset` of src on, to dense fp64 */
static void widen(double *dst, const void *src, int64_t offset, attn_dtype dtype, int64_t stride,
                  int64_t count)
{
    float chunk[CHUNK];
    for (int64_t i = 0; i < count; i += CHUNK) {
        int64_t n = attn__min(CHUNK, count - i);
        attn_to_f32(chunk, attn__element(src, dtype, offset + i * stride), dtype, stride, n);
        for (int64_t j = 0; j < n; j++) {
            dst[i + j] = (double)chunk[j];
        }
    }
}

static void add_piece(const attn__block *block, const scratch_areas *areas, const attn__span *span,
                      int64_t first, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        int64_t token = first - span->first + j;
        widen(areas->k + j * block->dim_qk, span->k, token * span->k_token, block->dtype, span->k_dim,
              block->dim_qk);
        widen(areas->v + j * block->dim_v, span->v, token * span->v_token, block->dtype, span->v_dim,
              block->dim_v);
    }
    for (int64_t i = 0; i < block->count; i++) {
        attn__reference_add(&areas->rows[i], areas->q + i * block->dim_qk, areas->k, areas->v, first, count,
                            block->first + i, block->lo, block->hi, (double)block->scale, block->dim_qk,
                            block->dim_v);
    }
}

static void forward(const attn__block *block, void *scratch)
{
    scratch_areas areas;
    lay_out(&areas, scratch, block->count, block->dim_qk, block->dim_v);
    for (int64_t i = 0; i < block->count; i++) {
        widen(areas.q + i * block->dim_qk, block->q, i * block->q_token, block->dtype, block->q_dim,
              block->dim_qk);
        areas.rows[i].acc = areas.acc + i * block->dim_v;
        attn__reference_begin(&areas.rows[i], block->dim_v);
    }
    for (int64_t s = 0; s < block->span_count; s++) {
        const attn__span *span = &block->spans[s];
        int64_t first = attn__max(span->first, block->first + block->lo);
        int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
        for (; first < end; first += TILE_K) {
            add_piece(block, &areas, span, first, attn__min(TILE_K, end - first));
        }
    }
    for (int64_t i = 0; i < block->count; i++) {
        block->lse[i] = (float)attn__reference_end(&areas.rows[i], block->dim_v);
        for (int64_t d = 0; d < block->dim_v; d++) {
            block->o[i * block->o_stride + d] = (float)areas.rows[i].acc[d];
        }
    }
}

static int64_t tile_q(const attn__shape *shape)
{
    return attn__min(TILE_Q, shape->rows);
}

static const char *rejects(const attn__shape *shape)
{
    (void)shape;
    return NULL;
}

static size_t scratch_bytes(const attn__shape *shape)
{
    scratch_areas areas;
    return lay_out(&areas, NULL, tile_q(shape), shape->dim_qk, shape->dim_v);
}

const attn__kernel attn__kernel_reference = {
    .name = "reference",
    .summary = "fp64 throughout, plain C, any processor",
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
};
