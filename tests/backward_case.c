/* SPDX-License-Identifier: Apache-2.0 */
/* backward_case.c - see backward_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backward_case.h"
#include "engine_case.h"

/* ---- tensors ---- */

enum { ZEROS, PLAIN, INTERLEAVED, SPREAD, LAYOUTS };

void case_tensor_open(case_tensor *x, attn_dtype dtype, int64_t batch, int64_t heads, int64_t tokens,
                      int64_t dim, uint64_t *seed)
{
    int layout = (int)case_random(seed, LAYOUTS);
    int64_t step = layout == SPREAD ? 2 : 1, row = dim * step;
    *x = (case_tensor){.size = {batch, heads, tokens, dim}, .dtype = dtype};
    int64_t plain[] = {heads * tokens * row, tokens * row, row, step};
    int64_t interleaved[] = {heads * tokens * row, row, heads * row, step};
    memcpy(x->stride, layout == INTERLEAVED ? interleaved : plain, sizeof x->stride);
    int64_t count = batch * heads * tokens * row;
    check_buffer_open(&x->buffer, (size_t)count * attn_dtype_size(dtype), attn_dtype_size(dtype),
                      case_random(seed, 4) > 0);
    x->t.data = x->buffer.data;
    if (layout != ZEROS) {
        memcpy(x->t.stride, x->stride, sizeof x->stride);
    }
}

void case_tensor_close(case_tensor *x)
{
    check_buffer_close(&x->buffer);
}

static char *element(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d)
{
    const int64_t *s = x->stride;
    int64_t at = batch * s[0] + head * s[1] + token * s[2] + d * s[3];
    return (char *)x->buffer.data + at * (int64_t)attn_dtype_size(x->dtype);
}

double case_tensor_get(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d)
{
    float value;
    attn_to_f32(&value, element(x, batch, head, token, d), x->dtype, 1, 1);
    return (double)value;
}

void case_tensor_set(case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d, double value)
{
    float rounded = (float)value;
    attn_from_f32(element(x, batch, head, token, d), x->dtype, 1, &rounded, 1);
}

/* Every row of a tensor in turn. */
typedef struct row {
    int64_t batch, head, token;
} row;

static int64_t count_rows(const case_tensor *x)
{
    return x->size[0] * x->size[1] * x->size[2];
}

static row row_at(const case_tensor *x, int64_t i)
{
    return (row){i / x->size[2] / x->size[1], i / x->size[2] % x->size[1], i % x->size[2]};
}

void case_tensor_fill(case_tensor *x, uint64_t *seed)
{
    for (int64_t i = 0; i < count_rows(x); i++) {
        row at = row_at(x, i);
        double square = 0;
        for (int64_t d = 0; d < x->size[3]; d++) {
            case_tensor_set(x, at.batch, at.head, at.token, d, check_normal(seed));
            double value = case_tensor_get(x, at.batch, at.head, at.token, d);
            x->most = fmax(x->most, fabs(value));
            square += value * value;
        }
        x->norm = fmax(x->norm, sqrt(square));
    }
}

/* ---- making cases ---- */

static int64_t *random_lengths(uint64_t *seed, int64_t batch, int64_t most)
{
    int64_t *list = calloc((size_t)batch + 1, sizeof *list);
    assert_non_null(list);
    for (int64_t b = 0; b < batch; b++) {
        list[b + 1] = list[b] + (case_random(seed, 4) == 0 ? 0 : case_random(seed, most + 1));
    }
    return list;
}

backward_case backward_case_random(uint64_t *seed, int64_t most_tokens)
{
    backward_case c = {.problem = case_problem(seed, most_tokens)};
    attn_problem *p = &c.problem;
    p->dtype_out = case_random(seed, 3) > 0 ? ATTN_F32 : (attn_dtype)case_random(seed, 3);
    if (case_random(seed, 3) == 0) {
        p->batch = 1 + case_random(seed, 5);
        c.cu_q = random_lengths(seed, p->batch, p->tokens_q);
        c.cu_kv = random_lengths(seed, p->batch, p->tokens_kv);
    }
    c.no_dq = case_random(seed, 6) == 0;
    c.no_dk = case_random(seed, 6) == 0;
    c.no_dv = case_random(seed, 6) == 0;
    c.accumulate = case_random(seed, 3) == 0;
    c.give_delta = case_random(seed, 3) == 0;
    return c;
}

case_piece backward_case_piece(const backward_case *c, int64_t b)
{
    const attn_problem *p = &c->problem;
    if (c->cu_q == NULL) {
        return (case_piece){b, 0, p->tokens_q, 0, p->tokens_kv};
    }
    return (case_piece){0, c->cu_q[b], c->cu_q[b + 1] - c->cu_q[b], c->cu_kv[b],
                        c->cu_kv[b + 1] - c->cu_kv[b]};
}

static void open_tensors(backward_case *c, uint64_t *seed)
{
    const attn_problem *p = &c->problem;
    int64_t batch = c->cu_q == NULL ? p->batch : 1, hq = p->heads_q, hkv = p->heads_kv;
    int64_t nq = c->cu_q == NULL ? p->tokens_q : c->cu_q[p->batch];
    int64_t nkv = c->cu_kv == NULL ? p->tokens_kv : c->cu_kv[p->batch];
    case_tensor_open(&c->q, p->dtype, batch, hq, nq, p->dim_qk, seed);
    case_tensor_open(&c->k, p->dtype, batch, hkv, nkv, p->dim_qk, seed);
    case_tensor_open(&c->v, p->dtype, batch, hkv, nkv, p->dim_v, seed);
    case_tensor_open(&c->dout, p->dtype, batch, hq, nq, p->dim_v, seed);
    case_tensor_open(&c->o, p->dtype_out, batch, hq, nq, p->dim_v, seed);
    case_tensor_open(&c->lse, ATTN_F32, batch, hq, nq, 1, seed);
    case_tensor_open(&c->delta, ATTN_F32, batch, hq, nq, 1, seed);
    case_tensor *out[] = {&c->dq, &c->dk, &c->dv, &c->dq0, &c->dk0, &c->dv0};
    for (int i = 0; i < 6; i++) {
        bool of_q = i % 3 == 0;
        case_tensor_open(out[i], p->dtype_out, batch, of_q ? hq : hkv, of_q ? nq : nkv,
                         i % 3 == 2 ? p->dim_v : p->dim_qk, seed);
        case_tensor_fill(out[i], seed);
    }
    case_tensor_fill(&c->q, seed);
    case_tensor_fill(&c->k, seed);
    case_tensor_fill(&c->v, seed);
    case_tensor_fill(&c->dout, seed);
}

static int64_t *count_up(int64_t count)
{
    int64_t *list = malloc((size_t)(count + 1) * sizeof *list);
    assert_non_null(list);
    for (int64_t i = 0; i < count; i++) {
        list[i] = i;
    }
    return list;
}

static double *doubles(int64_t count)
{
    double *x = calloc((size_t)count + 1, sizeof *x);
    assert_non_null(x);
    return x;
}

/* o, lse and delta from the fp64 forward, rounded to what they are stored in. */
static void solve_forward(backward_case *c)
{
    const attn_problem *p = &c->problem;
    attn_io io = ATTN_INIT(attn_io);
    io.q = c->q.t, io.k = c->k.t, io.v = c->v.t;
    io.cu_seqlens_q = c->cu_q, io.cu_seqlens_kv = c->cu_kv;
    int64_t *rows = count_up(p->tokens_q);
    double *o = doubles(p->tokens_q * p->dim_v), *lse = doubles(p->tokens_q);
    for (int64_t plane = 0; plane < p->batch * p->heads_q; plane++) {
        int64_t h = plane % p->heads_q;
        case_piece s = backward_case_piece(c, plane / p->heads_q);
        assert_int_equal(attn_reference(p, &io, plane / p->heads_q, h, rows, s.q_count, o, lse), ATTN_OK);
        for (int64_t i = 0; i < s.q_count; i++) {
            double delta = 0;
            for (int64_t d = 0; d < p->dim_v; d++) {
                case_tensor_set(&c->o, s.batch, h, s.q_first + i, d, o[i * p->dim_v + d]);
                delta += o[i * p->dim_v + d] * case_tensor_get(&c->dout, s.batch, h, s.q_first + i, d);
            }
            case_tensor_set(&c->lse, s.batch, h, s.q_first + i, 0, lse[i]);
            case_tensor_set(&c->delta, s.batch, h, s.q_first + i, 0, delta);
            c->slope.lse = isfinite(lse[i]) ? fmax(c->slope.lse, fabs(lse[i])) : c->slope.lse;
        }
    }
    free(rows);
    free(o);
    free(lse);
}

/* Where the answers of a token are kept. */
static double *want_at(double *want, const case_tensor *x, int64_t batch, int64_t head, int64_t token)
{
    return want + ((batch * x->size[1] + head) * x->size[2] + token) * x->size[3];
}

/* The reference's gradients; with lse it reads o or delta too, without it makes all anew. */
static void solve_gradients(backward_case *c, const attn_gradients *io, double *dq, double *dk, double *dv)
{
    const attn_problem *p = &c->problem;
    int64_t *rows = count_up(p->tokens_q), *keys = count_up(p->tokens_kv);
    for (int64_t plane = 0; plane < p->batch * p->heads_q; plane++) {
        int64_t b = plane / p->heads_q, h = plane % p->heads_q, group = p->heads_q / p->heads_kv;
        case_piece s = backward_case_piece(c, b);
        int64_t key_count = h % group == 0 ? s.kv_count : 0;
        assert_int_equal(attn_reference_backward(p, io, b, h, rows, s.q_count,
                                                 want_at(dq, &c->dq, s.batch, h, s.q_first), keys, key_count,
                                                 want_at(dk, &c->dk, s.batch, h / group, s.kv_first),
                                                 want_at(dv, &c->dv, s.batch, h / group, s.kv_first)),
                         ATTN_OK);
    }
    free(rows);
    free(keys);
}

/* The largest weight that a key gets from all rows: dv where dO is 1 throughout. */
static double column_sum(backward_case *c, const attn_gradients *io)
{
    const attn_problem *p = &c->problem;
    attn_gradients ones = *io;
    int64_t count = count_rows(&c->dv) * p->dim_v;
    double *dq = doubles(count_rows(&c->dq) * p->dim_qk), *dk = doubles(count_rows(&c->dk) * p->dim_qk);
    double *dv = doubles(count), most = 0;
    case_tensor flat;
    uint64_t seed = 1;
    case_tensor_open(&flat, p->dtype, c->dout.size[0], c->dout.size[1], c->dout.size[2], p->dim_v, &seed);
    for (int64_t i = 0; i < count_rows(&flat); i++) {
        row at = row_at(&flat, i);
        for (int64_t d = 0; d < p->dim_v; d++) {
            case_tensor_set(&flat, at.batch, at.head, at.token, d, 1.0);
        }
    }
    ones.dout = flat.t;
    solve_gradients(c, &ones, dq, dk, dv);
    for (int64_t i = 0; i < count; i++) {
        most = fmax(most, dv[i]);
    }
    case_tensor_close(&flat);
    free(dq);
    free(dk);
    free(dv);
    return most;
}

void backward_case_open(backward_case *c, uint64_t seed)
{
    const attn_problem *p = &c->problem;
    open_tensors(c, &seed);
    solve_forward(c);
    c->want_dq = doubles(count_rows(&c->dq) * p->dim_qk);
    c->want_dk = doubles(count_rows(&c->dk) * p->dim_qk);
    c->want_dv = doubles(count_rows(&c->dv) * p->dim_v);
    attn_gradients io = backward_case_io(c);
    if (c->give_delta || p->dtype_out == ATTN_F32) {
        io.lse.data = NULL; /* everything in fp64; o of 16 bits is another delta, though */
    }
    solve_gradients(c, &io, c->want_dq, c->want_dk, c->want_dv);
    c->slope.column = column_sum(c, &io);
    c->slope.bound = (check_bound){
        .score = fabs(p->scale) * c->q.norm * c->k.norm, .dim_qk = p->dim_qk, .keys = p->tokens_kv};
    c->slope.slope = c->v.norm * c->dout.norm;
    c->slope.scale = fabs(p->scale);
    c->slope.q = c->q.most, c->slope.k = c->k.most, c->slope.dout = c->dout.most;
    c->slope.dim_v = p->dim_v;
    c->slope.rows = p->tokens_q * (p->heads_q / p->heads_kv);
    c->slope.before = c->accumulate ? fmax(c->dq0.most, fmax(c->dk0.most, c->dv0.most)) : 0;
}

void backward_case_close(backward_case *c)
{
    case_tensor *all[] = {&c->q,  &c->k,  &c->v,  &c->o,   &c->lse, &c->delta, &c->dout,
                          &c->dq, &c->dk, &c->dv, &c->dq0, &c->dk0, &c->dv0};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        case_tensor_close(all[i]);
    }
    free(c->cu_q);
    free(c->cu_kv);
    free(c->want_dq);
    free(c->want_dk);
    free(c->want_dv);
}

/* ---- running ---- */

attn_gradients backward_case_io(const backward_case *c)
{
    attn_gradients io = ATTN_INIT(attn_gradients);
    io.q = c->q.t, io.k = c->k.t, io.v = c->v.t;
    io.lse = c->lse.t, io.dout = c->dout.t;
    if (c->give_delta) {
        io.delta = c->delta.t;
    } else {
        io.o = c->o.t;
    }
    if (!c->no_dq) {
        io.dq = c->dq.t;
    }
    if (!c->no_dk) {
        io.dk = c->dk.t;
    }
    if (!c->no_dv) {
        io.dv = c->dv.t;
    }
    io.accumulate = c->accumulate;
    io.cu_seqlens_q = c->cu_q, io.cu_seqlens_kv = c->cu_kv;
    return io;
}

static void reset(const backward_case *c, case_tensor *x, const case_tensor *before)
{
    check_poison(x->buffer.data, x->buffer.bytes);
    for (int64_t i = 0; c->accumulate && i < count_rows(x); i++) {
        row at = row_at(x, i);
        for (int64_t d = 0; d < x->size[3]; d++) {
            case_tensor_set(x, at.batch, at.head, at.token, d,
                            case_tensor_get(before, at.batch, at.head, at.token, d));
        }
    }
}

attn_status backward_case_run(backward_case *c, const attn_options *options)
{
    attn_options o = *options;
    attn_plan *plan;
    attn_gradients io = backward_case_io(c);
    check_buffer workspace;
    reset(c, &c->dq, &c->dq0);
    reset(c, &c->dk, &c->dk0);
    reset(c, &c->dv, &c->dv0);
    o.backward = 1;
    attn_status status = attn_plan_create(&plan, &c->problem, &o);
    if (status != ATTN_OK) {
        return status;
    }
    check_buffer_open(&workspace, attn_plan_workspace(plan), 1, true);
    status = attn_execute_backward(plan, &io, workspace.data);
    check_buffer_close(&workspace);
    attn_plan_destroy(plan);
    return status;
}

/* ---- comparing ---- */

static void compare(const backward_case *c, const char *what, const case_tensor *x, const case_tensor *before,
                    const double *want, double tolerance)
{
    for (int64_t i = 0; i < count_rows(x); i++) {
        row at = row_at(x, i);
        for (int64_t d = 0; d < x->size[3]; d++) {
            double got = case_tensor_get(x, at.batch, at.head, at.token, d);
            double sum = want[i * x->size[3] + d];
            sum += c->accumulate ? case_tensor_get(before, at.batch, at.head, at.token, d) : 0;
            if (!(fabs(got - sum) <= tolerance + check_half_unit(x->dtype, fabs(sum) + tolerance))) {
                fail_msg("%s[%lld][%lld][%lld][%lld] = %.9g, not %.9g +- %.2g", what, (long long)at.batch,
                         (long long)at.head, (long long)at.token, (long long)d, got, sum, tolerance);
            }
            if (x->stride[3] == 2) {
                assert_true(
                    check_poisoned(element(x, at.batch, at.head, at.token, d) + attn_dtype_size(x->dtype),
                                   attn_dtype_size(x->dtype)));
            }
        }
    }
}

void backward_case_compare(const backward_case *c, const char *what)
{
    char text[1100];
    if (!c->no_dq) {
        snprintf(text, sizeof text, "%s: dq", what);
        compare(c, text, &c->dq, &c->dq0, c->want_dq, check_bound_dq(&c->slope));
    }
    if (!c->no_dk) {
        snprintf(text, sizeof text, "%s: dk", what);
        compare(c, text, &c->dk, &c->dk0, c->want_dk, check_bound_dk(&c->slope));
    }
    if (!c->no_dv) {
        snprintf(text, sizeof text, "%s: dv", what);
        compare(c, text, &c->dv, &c->dv0, c->want_dv, check_bound_dv(&c->slope));
    }
}
