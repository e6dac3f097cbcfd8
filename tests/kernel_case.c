/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_case.c - see kernel_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernel_case.h"

enum { OPEN_END = 1 << 20 };

/* ---- making cases ---- */

/* Mostly small, sometimes large, often a multiple of 8. */
static int64_t random_dim(uint64_t *seed)
{
    switch (check_between(seed, 0, 3)) {
    case 0:
        return check_between(seed, 1, 512);
    case 1:
        return 8 * check_between(seed, 1, 16);
    default:
        return check_between(seed, 1, 70);
    }
}

/* Bands of every kind: open, one-sided, both, narrow, empty. */
static void random_band(kernel_case *c, uint64_t *seed, int64_t reach)
{
    c->lo = check_between(seed, 0, 2) > 0 ? -OPEN_END : check_between(seed, -reach, reach);
    c->hi = check_between(seed, 0, 2) == 0 ? OPEN_END : check_between(seed, -reach, reach);
    if (check_between(seed, 0, 9) == 0) {
        c->hi = c->lo + check_between(seed, -1, 20);
    }
}

kernel_case kernel_case_random(uint64_t *seed, int64_t most_keys)
{
    kernel_case c = {.dtype = (attn_dtype)check_between(seed, 0, 2)};
    c.dim_qk = random_dim(seed);
    c.dim_v = check_between(seed, 0, 1) == 0 ? c.dim_qk : random_dim(seed);
    c.scale = check_between(seed, 0, 4) == 0 ? check_normal(seed) * 0.2 : 1.0 / sqrt((double)c.dim_qk);
    c.rows = check_between(seed, 0, 2) == 0 ? check_between(seed, 1, 200) : check_between(seed, 1, 40);
    c.first = check_between(seed, 0, 1) == 0 ? 0 : check_between(seed, 0, most_keys);
    c.span_count = check_between(seed, 0, KERNEL_SPANS - 1);
    int64_t position = check_between(seed, 0, 30), left = check_between(seed, 0, most_keys);
    for (int64_t s = 0; s < c.span_count; s++) {
        c.span_first[s] = position;
        c.span_keys[s] = check_between(seed, 0, 5) == 0 ? 0 : check_between(seed, 0, left);
        left -= c.span_keys[s];
        position += c.span_keys[s] + (check_between(seed, 0, 1) == 0 ? 0 : check_between(seed, 0, 90));
    }
    random_band(&c, seed, most_keys);
    c.q_layout = (kernel_layout)check_between(seed, 0, LAYOUT_COUNT - 1);
    c.k_layout = (kernel_layout)check_between(seed, 0, LAYOUT_COUNT - 1);
    c.v_layout = (kernel_layout)check_between(seed, 0, LAYOUT_COUNT - 1);
    return c;
}

kernel_case kernel_case_plain(int64_t rows, int64_t keys, int64_t dim, bool causal)
{
    kernel_case c = {.dim_qk = dim, .dim_v = dim, .rows = rows, .span_count = 1};
    c.scale = 1.0 / sqrt((double)dim);
    c.first = attn__max(0, keys - rows);
    c.span_keys[0] = keys;
    c.lo = -OPEN_END;
    c.hi = causal ? 0 : OPEN_END;
    return c;
}

/* ---- arrays ---- */

void kernel_array_open(const kernel_case *c, kernel_array *a, kernel_layout layout, int64_t tokens,
                       int64_t dim, uint64_t *seed)
{
    a->token = layout == LAYOUT_PADDED       ? dim + check_between(seed, 1, 9)
               : layout == LAYOUT_TRANSPOSED ? 1
                                             : dim;
    a->dim = layout == LAYOUT_TRANSPOSED ? attn__max(1, tokens) : 1;
    if (layout == LAYOUT_BACKWARD) {
        a->token = -a->token;
    }
    if (layout == LAYOUT_REVERSED) {
        a->dim = -a->dim;
    }
    int64_t reach_t = (tokens - 1) * a->token, reach_d = (dim - 1) * a->dim;
    int64_t extent = tokens == 0 ? 0 : llabs(reach_t) + llabs(reach_d) + 1;
    size_t size = attn_dtype_size(c->dtype);
    check_buffer_open(&a->buffer, (size_t)extent * size, size, check_between(seed, 0, 1) == 0);
    int64_t origin = (reach_t < 0 ? -reach_t : 0) + (reach_d < 0 ? -reach_d : 0);
    a->base = (char *)a->buffer.data + origin * (int64_t)size;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t d = 0; d < dim; d++) {
            kernel_set(c, a, t, d, check_normal(seed));
        }
    }
}

const void *kernel_element(const kernel_case *c, const kernel_array *a, int64_t token, int64_t d)
{
    return attn__element(a->base, c->dtype, token * a->token + d * a->dim);
}

double kernel_get(const kernel_case *c, const kernel_array *array, int64_t token, int64_t d)
{
    float x;
    attn_to_f32(&x, kernel_element(c, array, token, d), c->dtype, 1, 1);
    return (double)x;
}

double *kernel_dense(const kernel_case *c, const kernel_array *array, int64_t tokens, int64_t dim)
{
    double *x = calloc((size_t)(tokens * dim) + 1, sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < tokens * dim; i++) {
        x[i] = kernel_get(c, array, i / dim, i % dim);
    }
    return x;
}

void kernel_set(const kernel_case *c, kernel_array *array, int64_t token, int64_t d, double x)
{
    const float value = (float)x;
    const int64_t at = token * array->token + d * array->dim;
    attn_from_f32((char *)array->base + at * (int64_t)attn_dtype_size(c->dtype), c->dtype, 1, &value, 1);
}

void kernel_case_open(kernel_case *c, uint64_t *seed)
{
    kernel_array_open(c, &c->q, c->q_layout, c->rows, c->dim_qk, seed);
    for (int64_t s = 0; s < c->span_count; s++) {
        kernel_array_open(c, &c->k[s], c->k_layout, c->span_keys[s], c->dim_qk, seed);
        kernel_array_open(c, &c->v[s], c->v_layout, c->span_keys[s], c->dim_v, seed);
        c->spans[s] = (attn__span){c->span_first[s], c->span_keys[s], c->k[s].base,  c->v[s].base,
                                   c->k[s].token,    c->k[s].dim,     c->v[s].token, c->v[s].dim};
    }
    c->o_stride = c->dim_v + 3;
    check_buffer_open(&c->o, (size_t)(c->rows * c->o_stride - 3) * sizeof(float), sizeof(float), true);
    check_buffer_open(&c->lse, (size_t)c->rows * sizeof(float), sizeof(float), true);
    c->want_o = malloc((size_t)(c->rows * c->dim_v) * sizeof(double));
    c->want_lse = malloc((size_t)c->rows * sizeof(double));
    assert_true(c->want_o != NULL && c->want_lse != NULL);
}

void kernel_case_close(kernel_case *c)
{
    check_buffer_close(&c->q.buffer);
    for (int64_t s = 0; s < c->span_count; s++) {
        check_buffer_close(&c->k[s].buffer);
        check_buffer_close(&c->v[s].buffer);
    }
    check_buffer_close(&c->o);
    check_buffer_close(&c->lse);
    free(c->want_o);
    free(c->want_lse);
}

/* ---- the answer ---- */

bool kernel_sees(const kernel_case *c, int64_t row, int64_t position)
{
    int64_t apart = position - (c->first + row);
    return c->lo <= apart && apart <= c->hi;
}

/* What the arrays hold, widened once: a solution reads each row many times. */
typedef struct kernel_numbers {
    double *q, *k[KERNEL_SPANS], *v[KERNEL_SPANS];
    double *scores; /* of one row */
} kernel_numbers;

/* scale * q.k of one cell; widens the bound. */
static double score(kernel_case *c, const double *q, const double *k)
{
    double dot = 0.0, qq = 0.0, kk = 0.0;
    for (int64_t d = 0; d < c->dim_qk; d++) {
        dot += q[d] * k[d];
        qq += q[d] * q[d];
        kk += k[d] * k[d];
    }
    const double scale = (double)(float)c->scale;
    double size = fabs(scale) * fmax(fabs(dot), sqrt(qq * kk / (double)c->dim_qk));
    c->bound.score = isfinite(size) ? fmax(c->bound.score, size) : c->bound.score;
    return scale * dot;
}

static void solve_row(kernel_case *c, const kernel_numbers *x, int64_t row)
{
    double *o = c->want_o + row * c->dim_v, max = -INFINITY, sum = 0.0;
    int64_t n = 0;
    memset(o, 0, (size_t)c->dim_v * sizeof *o);
    for (int64_t s = 0; s < c->span_count; s++) {
        for (int64_t j = 0; j < c->span_keys[s]; j++) {
            if (kernel_sees(c, row, c->span_first[s] + j)) {
                x->scores[n] = score(c, x->q + row * c->dim_qk, x->k[s] + j * c->dim_qk);
                max = fmax(max, x->scores[n++]); /* passes NaN over */
            }
        }
    }
    n = 0;
    for (int64_t s = 0; s < c->span_count; s++) {
        for (int64_t j = 0; j < c->span_keys[s]; j++) {
            if (!kernel_sees(c, row, c->span_first[s] + j)) {
                continue;
            }
            const double *v = x->v[s] + j * c->dim_v;
            const double weight = x->scores[n] == -INFINITY ? 0.0 : exp(x->scores[n] - max);
            n++;
            sum += weight;
            for (int64_t d = 0; d < c->dim_v; d++) {
                o[d] += weight * v[d];
            }
        }
    }
    for (int64_t d = 0; d < c->dim_v && sum != 0.0; d++) {
        o[d] /= sum;
    }
    c->want_lse[row] = sum == 0.0 ? -INFINITY : max + log(sum);
}

/* The greatest value that some row sees. */
static void bound_values(kernel_case *c, const kernel_numbers *x)
{
    for (int64_t s = 0; s < c->span_count; s++) {
        for (int64_t j = 0; j < c->span_keys[s]; j++) {
            bool seen = false;
            for (int64_t i = 0; i < c->rows && !seen; i++) {
                seen = kernel_sees(c, i, c->span_first[s] + j);
            }
            for (int64_t d = 0; d < c->dim_v && seen; d++) {
                const double v = fabs(x->v[s][j * c->dim_v + d]);
                c->bound.value = isfinite(v) ? fmax(c->bound.value, v) : c->bound.value;
            }
        }
    }
}

attn__shape kernel_case_shape(const kernel_case *c)
{
    attn__shape shape = {.dtype = c->dtype, .dim_qk = c->dim_qk, .dim_v = c->dim_v, .rows = c->rows};
    for (int64_t s = 0; s < c->span_count; s++) {
        shape.keys += c->span_keys[s];
    }
    return shape;
}

void kernel_case_solve(kernel_case *c)
{
    const int64_t keys = kernel_case_shape(c).keys;
    kernel_numbers x = {.q = kernel_dense(c, &c->q, c->rows, c->dim_qk)};
    for (int64_t s = 0; s < c->span_count; s++) {
        x.k[s] = kernel_dense(c, &c->k[s], c->span_keys[s], c->dim_qk);
        x.v[s] = kernel_dense(c, &c->v[s], c->span_keys[s], c->dim_v);
    }
    x.scores = malloc((size_t)(keys + 1) * sizeof *x.scores);
    assert_non_null(x.scores);
    c->bound = (check_bound){.dim_qk = c->dim_qk, .keys = keys};
    for (int64_t i = 0; i < c->rows; i++) {
        solve_row(c, &x, i);
    }
    bound_values(c, &x);
    for (int64_t s = 0; s < c->span_count; s++) {
        free(x.k[s]);
        free(x.v[s]);
    }
    free(x.q);
    free(x.scores);
}

/* ---- running a kernel ---- */

static attn__block block_of(const kernel_case *c, int64_t first, int64_t count)
{
    return (attn__block){
        .dtype = c->dtype,
        .dim_qk = c->dim_qk,
        .dim_v = c->dim_v,
        .scale = (float)c->scale,
        .lo = c->lo,
        .hi = c->hi,
        .first = c->first + first,
        .count = count,
        .q = kernel_element(c, &c->q, first, 0),
        .q_token = c->q.token,
        .q_dim = c->q.dim,
        .next_q =
            kernel_element(c, &c->q, first + count, 0), /* behind the last rows, which must not matter */
        .spans = c->span_count == 0 ? NULL : c->spans,
        .span_count = c->span_count,
        .o = (float *)c->o.data + first * c->o_stride,
        .o_stride = c->o_stride,
        .lse = (float *)c->lse.data + first,
    };
}

void kernel_case_run(kernel_case *c, const attn__kernel *kernel)
{
    const attn__shape shape = kernel_case_shape(c);
    const int64_t tile = kernel->tile_q(&shape);
    assert_null(attn__kernel_refusal(kernel, &shape));
    assert_true(tile >= 1);
    check_buffer scratch;
    check_buffer_open(&scratch, kernel->scratch(&shape), 64, true);
    if (shape.keys % 2 == 0) { /* by what no kernel chooses its path */
        /* a path that falls back on another where its result is not finite hides what NaN would show: 12.08
         */
        memset(scratch.data, 0x41, scratch.bytes);
    }
    check_poison(c->o.data, c->o.bytes);
    check_poison(c->lse.data, c->lse.bytes);
    for (int64_t first = 0; first < c->rows; first += tile) {
        attn__block block = block_of(c, first, attn__min(tile, c->rows - first));
        kernel->forward(&block, scratch.data);
    }
    check_buffer_close(&scratch);
    for (int64_t i = 0; i + 1 < c->rows; i++) {
        assert_true(check_poisoned((float *)c->o.data + i * c->o_stride + c->dim_v, 3 * sizeof(float)));
    }
}

/* What a row that rounds_results gives in 16 bits is what it gave in fp32, rounded. */
static void try_halves(kernel_case *c, const attn__kernel *kernel)
{
    const attn__shape shape = kernel_case_shape(c);
    const int64_t tile = kernel->tile_q(&shape), o_stride = c->o_stride;
    const attn_dtype dtype = c->dtype == ATTN_F16 ? ATTN_F16 : ATTN_BF16;
    check_buffer scratch, half, lse = c->lse;
    uint16_t *want = malloc(sizeof *want * (size_t)c->dim_v);
    assert_non_null(want);
    check_buffer_open(&scratch, kernel->scratch(&shape), 64, true);
    check_buffer_open(&half, c->o.bytes / 2, 2, true);
    check_buffer_open(&c->lse, lse.bytes, 4, true);
    check_poison(half.data, half.bytes);
    check_poison(scratch.data, scratch.bytes);
    for (int64_t first = 0; first < c->rows; first += tile) {
        attn__block block = block_of(c, first, attn__min(tile, c->rows - first));
        block.o = NULL;
        block.half_o = (uint16_t *)half.data + first * o_stride;
        block.half_dtype = dtype;
        kernel->forward(&block, scratch.data);
    }
    assert_memory_equal(c->lse.data, lse.data, lse.bytes);
    for (int64_t i = 0; i < c->rows; i++) {
        const uint16_t *row = (uint16_t *)half.data + i * o_stride;
        attn_from_f32(want, dtype, 1, (float *)c->o.data + i * o_stride, c->dim_v);
        assert_memory_equal(row, want, sizeof *want * (size_t)c->dim_v);
        assert_true(i + 1 == c->rows || check_poisoned(row + c->dim_v, 3 * sizeof *row));
    }
    check_buffer_close(&c->lse);
    check_buffer_close(&half);
    check_buffer_close(&scratch);
    c->lse = lse;
    free(want);
}

/* All rows in blocks of 32, each by itself, or from the first to the last, back and forth again, the kernel
 * being told that the keys are the same. */
static void run_blocks(kernel_case *c, const attn__kernel *kernel, void *scratch, bool keep_keys,
                       bool same_keys)
{
    enum { ROWS = 32 };
    const int64_t blocks = attn__ceil_div(c->rows, ROWS);
    check_poison(c->o.data, c->o.bytes);
    check_poison(c->lse.data, c->lse.bytes);
    for (int64_t i = 0; i < (same_keys ? 3 : 1) * blocks; i++) {
        const int64_t at = i % blocks, first = ROWS * (i / blocks == 1 ? blocks - 1 - at : at);
        attn__block block = block_of(c, first, attn__min(ROWS, c->rows - first));
        block.keep_keys = keep_keys;
        block.same_keys = same_keys && i > 0;
        kernel->forward(&block, scratch);
    }
}

/* What a kernel keeps of the keys changes nothing. */
static void try_kept(kernel_case *c, const attn__kernel *kernel)
{
    attn__shape shape = kernel_case_shape(c);
    shape.keep_keys = kernel->keeps_keys != NULL && kernel->keeps_keys(&shape);
    check_buffer scratch, o = c->o, lse = c->lse;
    check_buffer_open(&scratch, kernel->scratch(&shape), 64, true);
    check_poison(scratch.data, scratch.bytes);
    check_buffer_open(&c->o, o.bytes, 4, true);
    check_buffer_open(&c->lse, lse.bytes, 4, true);
    run_blocks(c, kernel, scratch.data, shape.keep_keys, true);
    check_buffer kept_o = c->o, kept_lse = c->lse;
    c->o = o, c->lse = lse;
    run_blocks(c, kernel, scratch.data, false, false);
    assert_memory_equal(kept_o.data, o.data, o.bytes);
    assert_memory_equal(kept_lse.data, lse.data, lse.bytes);
    check_buffer_close(&kept_o);
    check_buffer_close(&kept_lse);
    check_buffer_close(&scratch);
}

check_bound kernel_case_bound(const kernel_case *c, const attn__kernel *kernel)
{
    check_bound bound = c->bound;
    bound.round = kernel->rounds_weights && c->dtype == ATTN_BF16 ? 0x1p-8 : 0.0;
    return bound;
}

void kernel_case_compare(const kernel_case *c, const attn__kernel *kernel)
{
    const check_bound bound = kernel_case_bound(c, kernel);
    char what[160];
    snprintf(what, sizeof what, "%s, %s, d %lld/%lld, %lld rows from %lld, %lld keys, band %lld..%lld",
             kernel->name, attn_dtype_name(c->dtype), (long long)c->dim_qk, (long long)c->dim_v,
             (long long)c->rows, (long long)c->first, (long long)kernel_case_shape(c).keys, (long long)c->lo,
             (long long)c->hi);
    check_rows(what, &bound, c->rows, c->dim_v, c->o.data, c->o_stride, c->lse.data, c->want_o, c->want_lse);
}

const attn__kernel *const *kernel_rows(const kernel_case *c)
{
    static const attn__kernel *rows[16];
    const attn__shape shape = kernel_case_shape(c);
    size_t count = 0;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (attn__kernel_refusal(*row, &shape) == NULL) {
            assert_true(count + 1 < sizeof rows / sizeof rows[0]);
            rows[count++] = *row;
        }
    }
    rows[count] = NULL;
    return rows;
}

void kernel_case_try(kernel_case *c)
{
    KERNEL_CASE_ROWS(c, row)
    {
        kernel_case_run(c, *row);
        kernel_case_compare(c, *row);
        if ((*row)->rounds_results) {
            try_halves(c, *row);
        }
        if (c->rows > 1) {
            try_kept(c, *row);
        }
    }
}

void kernel_case_open_and_try(kernel_case *c, uint64_t *seed)
{
    kernel_case_open(c, seed);
    kernel_case_solve(c);
    kernel_case_try(c);
    kernel_case_close(c);
}
