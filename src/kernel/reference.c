/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference.c - attention in double precision and plain C: what every other kernel is measured against.
 *
 * METHOD.  The running maximum and sum of Milakov & Gimelshein (arXiv 1805.02867), one key after the other,
 * in fp64.  The state of a row takes its keys in pieces, so that long inputs are read in pieces too.  COST:
 * about 2 * (d_qk + d_v) FLOPs and one exp a cell; d_v more when the maximum rises.  Gradients take 2.5 times
 * that.
 *
 * It is also a row of the table: inputs are widened to fp64 a piece at a time, results rounded to fp32 once.
 */
#include <math.h>
#include <string.h>

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

/* ---- gradients of one query ---------------------------------------------------------------------- */

static void add_scaled(double *out, double factor, const double *x, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        out[d] += factor * x[d];
    }
}

void attn__reference_backward(const attn__reference_query *query, const double *k, const double *v,
                              int64_t first, int64_t count, double *dk, double *dv)
{
    const int64_t from = attn__max(0, query->pos + query->lo - first);
    const int64_t to = attn__min(count, query->pos + query->hi + 1 - first);
    if (query->lse == -INFINITY) {
        return;
    }
    for (int64_t j = from; j < to; j++) {
        const double *kj = k + j * query->dim_qk, *vj = v + j * query->dim_v;
        double power = query->scale * dot(query->q, kj, query->dim_qk) - query->lse;
        double p = exp(power > 0.0 ? 0.0 : power); /* NaN stays */
        double ds = query->scale * p * (dot(query->dout, vj, query->dim_v) - query->delta);
        add_scaled(dv + j * query->dim_v, p, query->dout, query->dim_v);
        add_scaled(dk + j * query->dim_qk, ds, query->q, query->dim_qk);
        add_scaled(query->dq, ds, kj, query->dim_qk);
    }
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

/* ---- the row's gradients ------------------------------------------------------------------------- */

typedef struct gradient_areas {
    double *q, *dout, *dq; /* of one query */
    double *k, *v, *dk, *dv;
} gradient_areas;

/* One query at a time against a tile of keys; returns the bytes. */
static size_t lay_out_gradient(gradient_areas *areas, double *memory, int64_t dim_qk, int64_t dim_v)
{
    *areas = (gradient_areas){0};
    if (memory != NULL) {
        areas->q = memory;
        areas->dq = areas->q + dim_qk;
        areas->dout = areas->dq + dim_qk;
        areas->k = areas->dout + dim_v;
        areas->dk = areas->k + TILE_K * dim_qk;
        areas->v = areas->dk + TILE_K * dim_qk;
        areas->dv = areas->v + TILE_K * dim_v;
    }
    return sizeof(double) * (size_t)((2 + 2 * TILE_K) * dim_qk + (1 + 2 * TILE_K) * dim_v);
}

/* out (if there is one) += sum, which becomes 0 */
static void hand_out(float *out, double *sum, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        if (out != NULL) {
            out[d] = (float)((double)out[d] + sum[d]);
        }
        sum[d] = 0.0;
    }
}

static void backward_piece(const attn__gradient *g, const gradient_areas *areas,
                           const attn__gradient_span *span, int64_t first, int64_t count)
{
    const int64_t skip = first - span->first;
    for (int64_t j = 0; j < count; j++) {
        int64_t token = skip + j;
        widen(areas->k + j * g->dim_qk, span->k, token * span->k_token, g->dtype, span->k_dim, g->dim_qk);
        widen(areas->v + j * g->dim_v, span->v, token * span->v_token, g->dtype, span->v_dim, g->dim_v);
    }
    for (int64_t i = 0; i < g->count; i++) {
        const attn__reference_query query = {.q = areas->q,
                                             .dout = areas->dout,
                                             .lse = (double)g->lse[i],
                                             .delta = (double)g->delta[i],
                                             .pos = g->first + i,
                                             .lo = g->lo,
                                             .hi = g->hi,
                                             .scale = (double)g->scale,
                                             .dim_qk = g->dim_qk,
                                             .dim_v = g->dim_v,
                                             .dq = areas->dq};
        widen(areas->q, g->q, i * g->q_token, g->dtype, g->q_dim, g->dim_qk);
        widen(areas->dout, g->dout, i * g->dout_token, g->dtype, g->dout_dim, g->dim_v);
        attn__reference_backward(&query, areas->k, areas->v, first, count, areas->dk, areas->dv);
        hand_out(attn__dq_open(g) ? g->dq + i * g->dq_token : NULL, areas->dq, g->dim_qk);
    }
    for (int64_t j = 0; j < count; j++) {
        hand_out(span->dk == NULL ? NULL : span->dk + (skip + j) * span->dk_token, areas->dk + j * g->dim_qk,
                 g->dim_qk);
        hand_out(span->dv == NULL ? NULL : span->dv + (skip + j) * span->dv_token, areas->dv + j * g->dim_v,
                 g->dim_v);
    }
}

static void backward(const attn__gradient *gradient, void *scratch)
{
    gradient_areas areas;
    size_t bytes = lay_out_gradient(&areas, scratch, gradient->dim_qk, gradient->dim_v);
    memset(scratch, 0, bytes);
    for (int64_t s = 0; s < gradient->span_count; s++) {
        const attn__gradient_span *span = &gradient->spans[s];
        int64_t first = attn__max(span->first, gradient->first + gradient->lo);
        int64_t end = attn__min(span->first + span->count, gradient->first + gradient->count + gradient->hi);
        for (int64_t count; first < end; first += count) {
            count = attn__min(TILE_K - first % TILE_K, end - first);
            backward_piece(gradient, &areas, span, first, count);
        }
    }
}

static int64_t backward_tile_k(const attn__shape *shape)
{
    return attn__max(1, shape->keys);
}

static int64_t backward_step(const attn__shape *shape)
{
    (void)shape;
    return TILE_K;
}

static size_t backward_scratch(const attn__shape *shape)
{
    gradient_areas areas;
    return lay_out_gradient(&areas, NULL, shape->dim_qk, shape->dim_v);
}

const attn__kernel attn__kernel_reference = {
    .name = "reference",
    .summary = "fp64 throughout, plain C, any processor",
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = tile_q,
    .backward_tile_k = backward_tile_k,
    .backward_step = backward_step,
    .backward_scratch = backward_scratch,
    .backward = backward,
};
