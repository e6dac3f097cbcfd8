/* SPDX-License-Identifier: Apache-2.0 */
/* gradient_case.c - see gradient_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gradient_case.h"

enum { GAP = 3 };

/* ---- making cases ---- */

gradient_case gradient_case_random(uint64_t *seed, int64_t most_keys)
{
    gradient_case g = {.base = kernel_case_random(seed, most_keys)};
    g.dout_layout = (kernel_layout)check_between(seed, 0, LAYOUT_COUNT - 1);
    g.apart = check_between(seed, 0, 3) == 0;
    return g;
}

gradient_case gradient_case_plain(int64_t rows, int64_t keys, int64_t dim, bool causal)
{
    return (gradient_case){.base = kernel_case_plain(rows, keys, dim, causal)};
}

/* ---- arrays ---- */

static void *allocate(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    assert_non_null(memory);
    return memory;
}

static void fill(gradient_array *a, uint64_t *seed)
{
    for (int64_t i = 0; i < a->rows * a->dim; i++) {
        a->before[i] = (float)(0.5 * check_normal(seed));
        a->want[i] = (double)a->before[i];
    }
    memset(a->touched, 0, (size_t)a->rows * sizeof *a->touched);
}

static void gradient_open(gradient_array *a, int64_t rows, int64_t dim, uint64_t *seed)
{
    a->rows = rows, a->dim = dim, a->token = dim + GAP;
    check_buffer_open(&a->buffer, (size_t)attn__max(0, rows * a->token - GAP) * sizeof(float), sizeof(float),
                      check_between(seed, 0, 1) == 0);
    a->before = allocate(rows * dim, sizeof(float));
    a->want = allocate(rows * dim, sizeof(double));
    a->touched = allocate(rows, sizeof(bool));
    fill(a, seed);
}

static void gradient_close(gradient_array *a)
{
    check_buffer_close(&a->buffer);
    free(a->before);
    free(a->want);
    free(a->touched);
}

void gradient_case_open(gradient_case *g, uint64_t *seed)
{
    kernel_case *c = &g->base;
    kernel_case_open(c, seed);
    kernel_array_open(c, &g->dout, g->dout_layout, c->rows, c->dim_v, seed);
    gradient_open(&g->dq, c->rows, c->dim_qk, seed);
    for (int64_t s = 0; s < c->span_count; s++) {
        gradient_open(&g->dk[s], c->span_keys[s], c->dim_qk, seed);
        gradient_open(&g->dv[s], c->span_keys[s], c->dim_v, seed);
    }
    g->lse = allocate(c->rows, sizeof(float));
    g->delta = allocate(c->rows, sizeof(float));
    g->column = allocate(kernel_case_shape(c).keys, sizeof(double));
    g->slope = (check_slope){.before = 2.5};
    gradient_case_reset(g);
}

void gradient_case_close(gradient_case *g)
{
    check_buffer_close(&g->dout.buffer);
    gradient_close(&g->dq);
    for (int64_t s = 0; s < g->base.span_count; s++) {
        gradient_close(&g->dk[s]);
        gradient_close(&g->dv[s]);
    }
    free(g->lse);
    free(g->delta);
    free(g->column);
    kernel_case_close(&g->base);
}

static void refill(const kernel_case *c, kernel_array *a, int64_t dim, uint64_t *seed)
{
    for (int64_t i = 0; i < c->rows; i++) {
        for (int64_t d = 0; d < dim; d++) {
            kernel_set(c, a, i, d, check_normal(seed));
        }
    }
}

static void put_before(gradient_array *a)
{
    check_poison(a->buffer.data, a->buffer.bytes);
    for (int64_t i = 0; i < a->rows; i++) {
        memcpy((float *)a->buffer.data + i * a->token, a->before + i * a->dim,
               (size_t)a->dim * sizeof(float));
    }
}

void gradient_case_next_head(gradient_case *g, uint64_t *seed)
{
    refill(&g->base, &g->base.q, g->base.dim_qk, seed);
    refill(&g->base, &g->dout, g->base.dim_v, seed);
    fill(&g->dq, seed);
    put_before(&g->dq);
}

void gradient_case_reset(gradient_case *g)
{
    put_before(&g->dq);
    for (int64_t s = 0; s < g->base.span_count; s++) {
        put_before(&g->dk[s]);
        put_before(&g->dv[s]);
    }
}

/* ---- the answer ---- */

/* Raises *most to |x|, unless that is not a number. */
static void raise(double *most, double x)
{
    *most = isfinite(x) ? fmax(*most, fabs(x)) : *most;
}

static double *dense(const kernel_case *c, const kernel_array *a, int64_t tokens, int64_t dim, double *most)
{
    double *x = kernel_dense(c, a, tokens, dim);
    for (int64_t i = 0; i < tokens * dim; i++) {
        raise(most, x[i]);
    }
    return x;
}

static double dot(const double *a, const double *b, int64_t dim)
{
    double sum = 0.0;
    for (int64_t d = 0; d < dim; d++) {
        sum += a[d] * b[d];
    }
    return sum;
}

static void add(double *to, double factor, const double *x, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        to[d] += factor * x[d];
    }
}

/* What one row and one key owe to each other; returns the weight. */
static double solve_cell(gradient_case *g, int64_t row, int64_t s, int64_t j, const double *q,
                         const double *dout, const double *k, const double *v, double delta)
{
    const kernel_case *c = &g->base;
    const double scale = (double)(float)c->scale;
    const double p = exp(scale * dot(q, k, c->dim_qk) - c->want_lse[row]);
    const double dp = dot(dout, v, c->dim_v), ds = scale * p * (dp - delta);
    raise(&g->slope.slope, dp);
    raise(&g->slope.slope, sqrt(dot(dout, dout, c->dim_v) * dot(v, v, c->dim_v) / (double)c->dim_v));
    add(g->dq.want + row * c->dim_qk, ds, k, c->dim_qk);
    add(g->dk[s].want + j * c->dim_qk, ds, q, c->dim_qk);
    add(g->dv[s].want + j * c->dim_v, p, dout, c->dim_v);
    g->dq.touched[row] = g->dk[s].touched[j] = g->dv[s].touched[j] = true;
    return p;
}

static void solve_span(gradient_case *g, int64_t s, const double *q, const double *dout, double *column)
{
    const kernel_case *c = &g->base;
    double *k = dense(c, &c->k[s], c->span_keys[s], c->dim_qk, &g->slope.k), ignored = 0.0;
    double *v = dense(c, &c->v[s], c->span_keys[s], c->dim_v, &ignored);
    for (int64_t i = 0; i < c->rows; i++) {
        const double delta = dot(c->want_o + i * c->dim_v, dout + i * c->dim_v, c->dim_v);
        g->lse[i] = (float)c->want_lse[i];
        g->delta[i] = (float)delta;
        raise(&g->slope.lse, c->want_lse[i]);
        for (int64_t j = 0; j < c->span_keys[s] && c->want_lse[i] != -INFINITY; j++) {
            if (kernel_sees(c, i, c->span_first[s] + j)) {
                column[j] += solve_cell(g, i, s, j, q + i * c->dim_qk, dout + i * c->dim_v, k + j * c->dim_qk,
                                        v + j * c->dim_v, delta);
                raise(&g->slope.column, column[j]);
            }
        }
    }
    free(k);
    free(v);
}

void gradient_case_solve(gradient_case *g)
{
    kernel_case *c = &g->base;
    kernel_case_solve(c);
    double *q = dense(c, &c->q, c->rows, c->dim_qk, &g->slope.q);
    double *dout = dense(c, &g->dout, c->rows, c->dim_v, &g->slope.dout), *column = g->column;
    g->slope.bound = (check_bound){
        .score = fmax(g->slope.bound.score, c->bound.score), .dim_qk = c->dim_qk, .keys = c->bound.keys};
    g->slope.scale = fabs(c->scale);
    g->slope.dim_v = c->dim_v;
    g->slope.rows += c->rows;
    for (int64_t i = 0; i < c->rows; i++) {
        if (g->mute > 0 && i % g->mute == 0) {
            c->want_lse[i] = -INFINITY;
        }
        g->lse[i] = (float)c->want_lse[i]; /* also without a span */
        g->delta[i] = 0.0f;
    }
    for (int64_t s = 0; s < c->span_count; s++) {
        solve_span(g, s, q, dout, column);
        column += c->span_keys[s];
    }
    free(q);
    free(dout);
}

/* ---- running a kernel ---- */

/* Rows of dq that are EARLY until their turn comes, and after the call if it never does. */
typedef struct dq_turn {
    attn__turn turn;
    float *rows, *held; /* held: what they are then */
    size_t bytes;
    bool never, here;
} dq_turn;

enum {
    EARLY = 0x2b
}; /* bytes of 6.1e-13: unlike a NaN, it is another number when something is added to it */

static bool untouched(const dq_turn *turn)
{
    const unsigned char *at = (const unsigned char *)turn->rows;
    for (size_t i = 0; i < turn->bytes; i++) {
        if (at[i] != EARLY) {
            return false;
        }
    }
    return true;
}

static bool turn_comes(attn__turn *base)
{
    dq_turn *turn = (dq_turn *)base;
    if (!turn->here && !turn->never) {
        assert_true(untouched(turn));
        memcpy(turn->rows, turn->held, turn->bytes);
        turn->here = true;
    }
    return turn->here;
}

static void turn_open(dq_turn *turn, const gradient_case *g, int64_t first, int64_t count)
{
    *turn = (dq_turn){.turn = {turn_comes}, .never = g->never};
    turn->rows = (float *)g->dq.buffer.data + first * g->dq.token;
    turn->bytes = count == 0 ? 0 : (size_t)(count * g->dq.token - GAP) * sizeof(float);
    turn->held = allocate((int64_t)turn->bytes, 1);
    memcpy(turn->held, turn->rows, turn->bytes);
    memset(turn->rows, EARLY, turn->bytes);
}

static void turn_close(dq_turn *turn)
{
    if (turn->never) {
        assert_true(untouched(turn));
        memcpy(turn->rows, turn->held, turn->bytes);
    }
    assert_true(turn->never || turn_comes(&turn->turn)); /* a call that adds nothing need not ask */
    free(turn->held);
}

static void run_tile(gradient_case *g, const attn__kernel *kernel, const attn__gradient_span *spans,
                     int64_t span_count, int64_t first, int64_t count, void *scratch)
{
    const kernel_case *c = &g->base;
    dq_turn turn;
    attn__gradient gradient = {
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
        .dout = kernel_element(c, &g->dout, first, 0),
        .dout_token = g->dout.token,
        .dout_dim = g->dout.dim,
        .lse = g->lse + first,
        .delta = g->delta + first,
        .dq_token = g->dq.token,
        .spans = span_count == 0 ? NULL : spans,
        .span_count = span_count,
    };
    if (g->no_dq) {
        kernel->backward(&gradient, scratch);
        return;
    }
    turn_open(&turn, g, first, count);
    gradient.dq = turn.rows;
    gradient.turn = &turn.turn;
    kernel->backward(&gradient, scratch);
    turn_close(&turn);
}

/* `keys` keys of a span, `skip` behind its first. */
static attn__gradient_span cut(const kernel_case *c, const attn__gradient_span *span, int64_t skip,
                               int64_t keys)
{
    attn__gradient_span piece = *span;
    piece.first += skip, piece.count = keys;
    piece.k = attn__element(span->k, c->dtype, skip * span->k_token);
    piece.v = attn__element(span->v, c->dtype, skip * span->v_token);
    piece.dk = span->dk == NULL ? NULL : span->dk + skip * span->dk_token;
    piece.dv = span->dv == NULL ? NULL : span->dv + skip * span->dv_token;
    return piece;
}

/* One span in pieces that end at multiples of `size`. */
static void run_pieces(gradient_case *g, const attn__kernel *kernel, const attn__gradient_span *span,
                       int64_t size, int64_t first, int64_t count, const check_buffer *scratch)
{
    for (int64_t at = 0, keys; at < span->count; at += keys) {
        keys = attn__min(size - (span->first + at) % size, span->count - at);
        const attn__gradient_span piece = cut(&g->base, span, at, keys);
        check_poison(scratch->data, scratch->bytes);
        run_tile(g, kernel, &piece, 1, first, count, scratch->data);
    }
}

static void assert_padding(const gradient_array *a)
{
    for (int64_t i = 0; i + 1 < a->rows; i++) {
        assert_true(check_poisoned((float *)a->buffer.data + i * a->token + a->dim, GAP * sizeof(float)));
    }
}

void gradient_case_run(gradient_case *g, const attn__kernel *kernel)
{
    const kernel_case *c = &g->base;
    attn__shape shape = kernel_case_shape(c);
    attn__gradient_span spans[KERNEL_SPANS];
    check_buffer scratch;
    shape.backward = true;
    assert_null(attn__kernel_refusal(kernel, &shape));
    const int64_t tile = kernel->backward_tile_q(&shape);
    assert_true(tile >= 1);
    check_buffer_open(&scratch, kernel->backward_scratch(&shape), 64, true);
    for (int64_t s = 0; s < c->span_count; s++) {
        const attn__span *from = &c->spans[s];
        spans[s] = (attn__gradient_span){from->first,
                                         from->count,
                                         from->k,
                                         from->v,
                                         from->k_token,
                                         from->k_dim,
                                         from->v_token,
                                         from->v_dim,
                                         g->no_dk ? NULL : g->dk[s].buffer.data,
                                         g->no_dv ? NULL : g->dv[s].buffer.data,
                                         g->dk[s].token,
                                         g->dv[s].token};
    }
    for (int64_t first = 0; first < c->rows; first += tile) {
        const int64_t count = attn__min(tile, c->rows - first), step = g->apart ? 1 : c->span_count;
        if (g->steps > 0) {
            run_pieces(g, kernel, spans, g->steps * kernel->backward_step(&shape), first, count, &scratch);
            continue;
        }
        for (int64_t s = 0; s < c->span_count || s == 0; s += attn__max(1, step)) {
            check_poison(scratch.data, scratch.bytes);
            run_tile(g, kernel, spans + s, attn__min(step, c->span_count), first, count, scratch.data);
        }
    }
    check_buffer_close(&scratch);
    assert_padding(&g->dq);
    for (int64_t s = 0; s < c->span_count; s++) {
        assert_padding(&g->dk[s]);
        assert_padding(&g->dv[s]);
    }
}

static void compare(const gradient_array *a, const char *what, double tolerance)
{
    for (int64_t i = 0; i < a->rows; i++) {
        check_gradient(what, i, a->dim, (const float *)a->buffer.data + i * a->token, a->want + i * a->dim,
                       a->touched[i] ? tolerance : 0.0);
    }
}

void gradient_case_compare(const gradient_case *g, const attn__kernel *kernel)
{
    const kernel_case *c = &g->base;
    check_slope slope = g->slope;
    char where[160], what[200];
    slope.bound.round = kernel_case_bound(c, kernel).round;
    snprintf(where, sizeof where, "%s, %s, d %lld/%lld, %lld rows from %lld, %lld keys, band %lld..%lld",
             kernel->name, attn_dtype_name(c->dtype), (long long)c->dim_qk, (long long)c->dim_v,
             (long long)c->rows, (long long)c->first, (long long)kernel_case_shape(c).keys, (long long)c->lo,
             (long long)c->hi);
    snprintf(what, sizeof what, "%s: dq", where);
    compare(&g->dq, what, check_bound_dq(&slope));
    for (int64_t s = 0; s < c->span_count; s++) {
        snprintf(what, sizeof what, "%s: span %d, dk", where, (int)s);
        compare(&g->dk[s], what, check_bound_dk(&slope));
        snprintf(what, sizeof what, "%s: span %d, dv", where, (int)s);
        compare(&g->dv[s], what, check_bound_dv(&slope));
    }
}

const attn__kernel *const *gradient_rows(const gradient_case *g)
{
    static const attn__kernel *rows[16];
    attn__shape shape = kernel_case_shape(&g->base);
    size_t count = 0;
    shape.backward = true;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (attn__kernel_refusal(*row, &shape) == NULL) {
            assert_true(count + 1 < sizeof rows / sizeof rows[0]);
            rows[count++] = *row;
        }
    }
    rows[count] = NULL;
    return rows;
}
