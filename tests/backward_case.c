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
#include "engine/engine.h"
#include "engine_case.h"

/* ---- making cases ---- */

backward_case backward_case_long(const char *text, int unequal, int accumulate)
{
    backward_case c = {.accumulate = accumulate};
    assert_int_equal(attn_problem_parse(&c.problem, text), ATTN_OK);
    if (unequal) {
        static const int64_t q[] = {0, 300, 300, 800, 801}, kv[] = {0, 500, 900, 1900, 1900};
        c.problem.batch = 4;
        c.cu_q = malloc(sizeof q);
        c.cu_kv = malloc(sizeof kv);
        assert_true(c.cu_q != NULL && c.cu_kv != NULL);
        memcpy(c.cu_q, q, sizeof q);
        memcpy(c.cu_kv, kv, sizeof kv);
    }
    return c;
}

backward_case backward_case_random(uint64_t *seed, int64_t most_tokens)
{
    backward_case c = {.problem = case_problem(seed, most_tokens)};
    attn_problem *p = &c.problem;
    p->dtype_out = case_random(seed, 3) > 0 ? ATTN_F32 : (attn_dtype)case_random(seed, 3);
    if (case_random(seed, 3) == 0) {
        p->batch = 1 + case_random(seed, 5);
        c.cu_q = case_lengths(seed, p->batch, p->tokens_q);
        c.cu_kv = case_lengths(seed, p->batch, p->tokens_kv);
    }
    c.no_dq = case_random(seed, 6) == 0;
    c.no_dk = case_random(seed, 6) == 0;
    c.no_dv = case_random(seed, 6) == 0;
    c.accumulate = case_random(seed, 3) == 0;
    c.give_delta = case_random(seed, 3) == 0;
    return c;
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
        case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, plane / p->heads_q);
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
        case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, b);
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
    int64_t count = case_tensor_rows(&c->dv) * p->dim_v;
    double *dq = doubles(case_tensor_rows(&c->dq) * p->dim_qk),
           *dk = doubles(case_tensor_rows(&c->dk) * p->dim_qk);
    double *dv = doubles(count), most = 0;
    case_tensor flat;
    uint64_t seed = 1;
    case_tensor_open(&flat, p->dtype, c->dout.size[0], c->dout.size[1], c->dout.size[2], p->dim_v, &seed);
    for (int64_t i = 0; i < case_tensor_rows(&flat); i++) {
        case_row at = case_tensor_row(&flat, i);
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
    c->want_dq = doubles(case_tensor_rows(&c->dq) * p->dim_qk);
    c->want_dk = doubles(case_tensor_rows(&c->dk) * p->dim_qk);
    c->want_dv = doubles(case_tensor_rows(&c->dv) * p->dim_v);
    attn_gradients io = backward_case_io(c);
    if (c->give_delta || p->dtype_out == ATTN_F32) {
        io.lse.data = NULL; /* everything in fp64; o of 16 bits is another delta, though */
    }
    solve_gradients(c, &io, c->want_dq, c->want_dk, c->want_dv);
    c->slope.column = column_sum(c, &io);
    c->slope.bound = (check_bound){.score = fabs(p->scale) * c->q.norm * c->k.norm,
                                   .round = p->dtype == ATTN_BF16 ? 0x1p-8 : 0, /* whichever kernel it is */
                                   .dim_qk = p->dim_qk,
                                   .keys = p->tokens_kv};
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
    for (int64_t i = 0; c->accumulate && i < case_tensor_rows(x); i++) {
        case_row at = case_tensor_row(x, i);
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
    case_tensor_padding(x);
    for (int64_t i = 0; i < case_tensor_rows(x); i++) {
        case_row at = case_tensor_row(x, i);
        for (int64_t d = 0; d < x->size[3]; d++) {
            double got = case_tensor_get(x, at.batch, at.head, at.token, d);
            double sum = want[i * x->size[3] + d];
            sum += c->accumulate ? case_tensor_get(before, at.batch, at.head, at.token, d) : 0;
            if (!(fabs(got - sum) <= tolerance + check_half_unit(x->dtype, fabs(sum) + tolerance))) {
                fail_msg("%s[%lld][%lld][%lld][%lld] = %.9g, not %.9g +- %.2g", what, (long long)at.batch,
                         (long long)at.head, (long long)at.token, (long long)d, got, sum, tolerance);
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

void backward_case_describe(char *text, size_t capacity, const backward_case *c, const attn_options *o)
{
    char problem[512];
    attn_problem_print(&c->problem, problem, sizeof problem);
    snprintf(text, capacity, "%s threads=%d kernel=%s varlen=%d accumulate=%d delta=%d", problem, o->threads,
             o->kernel == NULL ? "" : o->kernel, c->cu_q != NULL, c->accumulate, c->give_delta);
}

const char *backward_case_kernel(const attn_problem *p, uint64_t *seed)
{
    const attn__shape shape = {.dtype = p->dtype,
                               .dim_qk = p->dim_qk,
                               .dim_v = p->dim_v,
                               .rows = p->tokens_q,
                               .keys = p->tokens_kv,
                               .backward = true};
    const char *names[16];
    int64_t count = 0;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (attn__kernel_refusal(*row, &shape) == NULL) {
            names[count++] = (*row)->name;
        }
    }
    return names[case_random(seed, count)];
}
