/* SPDX-License-Identifier: Apache-2.0 */
/* sequence_case.c - see sequence_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_case.h"
#include "sequence_case.h"

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

void case_tensor_place(case_tensor *x, attn_dtype dtype, const int64_t size[4], const int64_t stride[4])
{
    const int64_t plain[] = {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
    const bool dense = stride[3] == 0;
    int64_t span = size[3];
    *x = (case_tensor){.size = {size[0], size[1], size[2], size[3]}, .dtype = dtype};
    for (int i = 0; i < 4; i++) {
        x->stride[i] = dense ? plain[i] : stride[i];
        x->t.stride[i] = stride[i];
        span += i < 3 ? (size[i] - 1) * x->stride[i] : 0;
    }
    const bool empty = case_tensor_rows(x) == 0;
    check_buffer_open(&x->buffer, empty ? 0 : (size_t)span * attn_dtype_size(dtype), attn_dtype_size(dtype),
                      true);
    x->t.data = x->buffer.data;
}

void case_tensor_close(case_tensor *x)
{
    check_buffer_close(&x->buffer);
}

void *case_tensor_at(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d)
{
    const int64_t *s = x->stride;
    int64_t at = batch * s[0] + head * s[1] + token * s[2] + d * s[3];
    return (char *)x->buffer.data + at * (int64_t)attn_dtype_size(x->dtype);
}

double case_tensor_get(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d)
{
    float value;
    attn_to_f32(&value, case_tensor_at(x, batch, head, token, d), x->dtype, 1, 1);
    return (double)value;
}

void case_tensor_set(case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d, double value)
{
    float rounded = (float)value;
    attn_from_f32(case_tensor_at(x, batch, head, token, d), x->dtype, 1, &rounded, 1);
}

int64_t case_tensor_rows(const case_tensor *x)
{
    return x->size[0] * x->size[1] * x->size[2];
}

case_row case_tensor_row(const case_tensor *x, int64_t i)
{
    return (case_row){i / x->size[2] / x->size[1], i / x->size[2] % x->size[1], i % x->size[2]};
}

void case_tensor_fill(case_tensor *x, uint64_t *seed)
{
    for (int64_t i = 0; i < case_tensor_rows(x); i++) {
        case_row at = case_tensor_row(x, i);
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

void case_tensor_padding(const case_tensor *x)
{
    size_t element_size = attn_dtype_size(x->dtype);
    for (int64_t i = 0; x->stride[3] == 2 && i < case_tensor_rows(x) * x->size[3]; i++) {
        case_row at = case_tensor_row(x, i / x->size[3]);
        const char *behind =
            (char *)case_tensor_at(x, at.batch, at.head, at.token, i % x->size[3]) + element_size;
        assert_true(check_poisoned(behind, element_size));
    }
}

attn_tensor case_tensor_cut(const case_tensor *x, int64_t token)
{
    attn_tensor t = {.data = case_tensor_at(x, 0, 0, token, 0)};
    memcpy(t.stride, x->stride, sizeof t.stride);
    return t;
}

void case_tensor_keep(const case_tensor *x, char **copy)
{
    *copy = *copy != NULL ? *copy : malloc(x->buffer.bytes + 1);
    assert_non_null(*copy);
    memcpy(*copy, x->buffer.data, x->buffer.bytes);
}

/* ---- sequences ---- */

int64_t *case_lengths(uint64_t *seed, int64_t batch, int64_t most)
{
    int64_t *list = calloc((size_t)batch + 1, sizeof *list);
    assert_non_null(list);
    for (int64_t b = 0; b < batch; b++) {
        list[b + 1] = list[b] + (case_random(seed, 4) == 0 ? 0 : case_random(seed, most + 1));
    }
    return list;
}

case_piece case_piece_of(const attn_problem *p, const int64_t *cu_q, const int64_t *cu_kv, int64_t b)
{
    if (cu_q == NULL) {
        return (case_piece){b, 0, p->tokens_q, 0, p->tokens_kv};
    }
    return (case_piece){0, cu_q[b], cu_q[b + 1] - cu_q[b], cu_kv[b], cu_kv[b + 1] - cu_kv[b]};
}

/* ---- cases ---- */

void sequence_case_open(sequence_case *c, uint64_t seed)
{
    const attn_problem *p = &c->problem;
    int64_t batch = c->cu_q == NULL ? p->batch : 1;
    int64_t nq = c->cu_q == NULL ? p->tokens_q : c->cu_q[p->batch];
    int64_t nkv = c->cu_kv == NULL ? p->tokens_kv : c->cu_kv[p->batch];
    case_tensor_open(&c->q, p->dtype, batch, p->heads_q, nq, p->dim_qk, &seed);
    case_tensor_open(&c->k, p->dtype, batch, p->heads_kv, nkv, p->dim_qk, &seed);
    case_tensor_open(&c->v, p->dtype, batch, p->heads_kv, nkv, p->dim_v, &seed);
    case_tensor_open(&c->o, p->dtype_out, batch, p->heads_q, nq, p->dim_v, &seed);
    case_tensor_open(&c->lse, ATTN_F32, batch, p->heads_q, nq, 1, &seed);
    case_tensor_fill(&c->q, &seed);
    case_tensor_fill(&c->k, &seed);
    case_tensor_fill(&c->v, &seed);
}

void sequence_case_close(sequence_case *c)
{
    case_tensor_close(&c->q);
    case_tensor_close(&c->k);
    case_tensor_close(&c->v);
    case_tensor_close(&c->o);
    case_tensor_close(&c->lse);
    free(c->cu_q);
    free(c->cu_kv);
}

attn_io sequence_case_io(const sequence_case *c)
{
    attn_io io = ATTN_INIT(attn_io);
    io.q = c->q.t, io.k = c->k.t, io.v = c->v.t, io.o = c->o.t, io.lse = c->lse.t;
    io.cu_seqlens_q = c->cu_q, io.cu_seqlens_kv = c->cu_kv;
    return io;
}

const char *case_kernel(const attn_problem *p, const attn_options *options)
{
    attn_plan *plan;
    attn_summary summary = ATTN_INIT(attn_summary);
    assert_int_equal(attn_plan_create(&plan, p, options), ATTN_OK);
    assert_int_equal(attn_plan_summary(plan, &summary), ATTN_OK);
    attn_plan_destroy(plan);
    return summary.kernel;
}

static attn_status run(const attn_problem *p, const attn_io *io, const attn_options *options)
{
    attn_options o = *options;
    attn_plan *plan;
    check_buffer workspace;
    o.in_memory = 1;
    attn_status status = attn_plan_create(&plan, p, &o);
    if (status != ATTN_OK) {
        return status;
    }
    check_buffer_open(&workspace, attn_plan_workspace(plan), 1, true);
    status = attn_execute(plan, io, workspace.data);
    check_buffer_close(&workspace);
    attn_plan_destroy(plan);
    return status;
}

static void poison(sequence_case *c)
{
    check_poison(c->o.buffer.data, c->o.buffer.bytes);
    check_poison(c->lse.buffer.data, c->lse.buffer.bytes);
}

attn_status sequence_case_run(sequence_case *c, const attn_options *options)
{
    attn_io io = sequence_case_io(c);
    poison(c);
    return run(&c->problem, &io, options);
}

static check_bound bound_of(const sequence_case *c)
{
    const attn_problem *p = &c->problem;
    return (check_bound){.score = fabs(p->scale) * c->q.norm * c->k.norm,
                         .value = c->v.most,
                         .round = p->dtype == ATTN_BF16 ? 0x1p-8 : 0,
                         .dim_qk = p->dim_qk,
                         .keys = p->tokens_kv};
}

static void compare_row(const sequence_case *c, const char *what, case_row at, const double *o, double lse)
{
    const check_bound bound = bound_of(c);
    double got = case_tensor_get(&c->lse, at.batch, at.head, at.token, 0);
    bool close = lse == -INFINITY ? got == lse : fabs(got - lse) <= check_bound_lse(&bound, lse);
    double worst = 0;
    for (int64_t d = 0; d < c->problem.dim_v; d++) {
        double tolerance = lse == -INFINITY ? 0 : check_bound_o(&bound);
        double x = case_tensor_get(&c->o, at.batch, at.head, at.token, d);
        tolerance += check_half_unit(c->o.dtype, fabs(o[d]) + tolerance);
        close = close && fabs(x - o[d]) <= tolerance;
        worst = fmax(worst, fabs(x - o[d]));
    }
    if (!close) {
        fail_msg("%s: batch %lld, head %lld, token %lld: lse %.9g, not %.9g; o is off by %.2g", what,
                 (long long)at.batch, (long long)at.head, (long long)at.token, got, lse, worst);
    }
}

void sequence_case_compare(const sequence_case *c, const char *what)
{
    const attn_problem *p = &c->problem;
    attn_io io = sequence_case_io(c);
    int64_t *rows = malloc((size_t)p->tokens_q * sizeof *rows);
    double *o = malloc((size_t)(p->tokens_q * p->dim_v) * sizeof *o);
    double *lse = malloc((size_t)p->tokens_q * sizeof *lse);
    assert_true(rows != NULL && o != NULL && lse != NULL);
    for (int64_t i = 0; i < p->tokens_q; i++) {
        rows[i] = i;
    }
    for (int64_t plane = 0; plane < p->batch * p->heads_q; plane++) {
        int64_t b = plane / p->heads_q, h = plane % p->heads_q;
        case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, b);
        assert_int_equal(attn_reference(p, &io, b, h, rows, s.q_count, o, lse), ATTN_OK);
        for (int64_t i = 0; i < s.q_count; i++) {
            compare_row(c, what, (case_row){s.batch, h, s.q_first + i}, o + i * p->dim_v, lse[i]);
        }
    }
    free(rows);
    free(o);
    free(lse);
    case_tensor_padding(&c->o);
    case_tensor_padding(&c->lse);
}

static void same_bits(const sequence_case *c, const char *what, const char *o, const char *lse)
{
    if (memcmp(c->o.buffer.data, o, c->o.buffer.bytes) != 0 ||
        memcmp(c->lse.buffer.data, lse, c->lse.buffer.bytes) != 0) {
        fail_msg("%s: other bits", what);
    }
}

void sequence_case_threads(sequence_case *c, const char *what)
{
    static const int threads[] = {1, 2, 3, 5};
    char *o = NULL, *lse = NULL;
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        attn_options options = {.size = sizeof options, .threads = threads[i]};
        assert_int_equal(sequence_case_run(c, &options), ATTN_OK);
        if (i == 0) {
            sequence_case_compare(c, what);
            case_tensor_keep(&c->o, &o);
            case_tensor_keep(&c->lse, &lse);
        }
        same_bits(c, what, o, lse);
    }
    free(o);
    free(lse);
}

void sequence_case_alone(sequence_case *c, const char *what)
{
    char *o = NULL, *lse = NULL;
    attn_options options = {.size = sizeof options, .threads = 2};
    assert_int_equal(sequence_case_run(c, &options), ATTN_OK);
    case_tensor_keep(&c->o, &o);
    case_tensor_keep(&c->lse, &lse);
    options.kernel = case_kernel(&c->problem, &options);
    for (int64_t b = 0; b < c->problem.batch; b++) {
        case_piece s = case_piece_of(&c->problem, c->cu_q, c->cu_kv, b);
        attn_problem p = c->problem;
        attn_io io = ATTN_INIT(attn_io);
        if (s.q_count == 0 || s.kv_count == 0) {
            continue; /* a problem has at least one of each */
        }
        p.batch = 1, p.tokens_q = s.q_count, p.tokens_kv = s.kv_count;
        io.q = case_tensor_cut(&c->q, s.q_first);
        io.k = case_tensor_cut(&c->k, s.kv_first);
        io.v = case_tensor_cut(&c->v, s.kv_first);
        io.o = case_tensor_cut(&c->o, s.q_first);
        io.lse = case_tensor_cut(&c->lse, s.q_first);
        for (int64_t i = 0; i < p.heads_q * s.q_count; i++) {
            case_tensor_set(&c->lse, 0, i / s.q_count, s.q_first + i % s.q_count, 0, NAN);
        }
        assert_int_equal(run(&p, &io, &options), ATTN_OK);
    }
    same_bits(c, what, o, lse);
    free(o);
    free(lse);
}
