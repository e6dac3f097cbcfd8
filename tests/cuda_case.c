/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_case.c - problems in a GPU's memory and their answers in fp64.  See cuda_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

enum { PAD = 16 }; /* elements of a gap: whole 16 bytes in every dtype */

/* ---- tensors ---- */

attn_tensor cuda_tensor_there(const cuda_tensor *x)
{
    attn_tensor t = x->host.t;
    t.data = x->block != NULL ? x->block + CUDA_GUARD : NULL;
    return t;
}

static void send(const cuda_tensor *x)
{
    assert_int_equal(
        attn_cuda_copy(cuda.gpu, x->block + CUDA_GUARD, x->host.buffer.data, x->host.buffer.bytes, NULL),
        ATTN_OK);
}

static void open_tensor(const cuda_case *c, cuda_tensor *x, attn_dtype dtype, attn_operand like, int64_t dim)
{
    const attn_problem *p = &c->problem;
    const bool varlen = c->cu_q != NULL;
    const int64_t *cu = like == ATTN_Q ? c->cu_q : c->cu_kv;
    const int64_t heads = like == ATTN_Q ? p->heads_q : p->heads_kv;
    const int64_t tokens = varlen ? cu[p->batch] : like == ATTN_Q ? p->tokens_q : p->tokens_kv;
    const int64_t size[4] = {varlen ? 1 : p->batch, heads, tokens, dim}, row = dim + PAD;
    int64_t stride[4] = {0};
    if (c->layout == CUDA_BNHD) {
        stride[0] = heads * tokens * dim, stride[1] = dim, stride[2] = heads * dim, stride[3] = 1;
    } else if (c->layout == CUDA_PADDED) {
        stride[0] = heads * (tokens * row + PAD) + PAD, stride[1] = tokens * row + PAD, stride[2] = row;
        stride[3] = 1;
    }
    case_tensor_place(&x->host, dtype, size, stride);
    const size_t bytes = x->host.buffer.bytes + 2 * CUDA_GUARD;
    void *block = NULL;
    assert_int_equal(attn_cuda_alloc(cuda.gpu, &block, bytes), ATTN_OK);
    assert_int_equal(attn_cuda_fill(cuda.gpu, block, 0xff, bytes, NULL), ATTN_OK);
    x->block = block;
}

static void close_tensor(cuda_tensor *x)
{
    case_tensor_close(&x->host);
    attn_cuda_free(cuda.gpu, x->block);
    x->block = NULL;
}

/* Normal random numbers; every row has a seed of its own. */
static void fill(case_tensor *x, uint64_t seed, bool alike)
{
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < case_tensor_rows(x); i++) {
        const case_row at = case_tensor_row(x, i);
        uint64_t own = seed + (alike ? 0 : (uint64_t)i * 7919);
        (void)check_random(&own);
        own ^= check_random(&own);
        for (int64_t d = 0; d < x->size[3]; d++) {
            case_tensor_set(x, at.batch, at.head, at.token, d, check_normal(&own));
        }
    }
}

/* NaN into the first dim of one token of all heads. */
static void put_nan(case_tensor *x, int64_t token)
{
    for (int64_t i = 0; i < x->size[0] * x->size[1]; i++) {
        case_tensor_set(x, i / x->size[1], i % x->size[1], token, 0, (double)NAN);
    }
}

/* The same large random numbers into one token of all heads. */
static void put_huge(case_tensor *x, int64_t token)
{
    for (int64_t i = 0; i < x->size[0] * x->size[1]; i++) {
        uint64_t seed = 24;
        for (int64_t d = 0; d < x->size[3]; d++) {
            case_tensor_set(x, i / x->size[1], i % x->size[1], token, d, 24 * check_normal(&seed));
        }
    }
}

/* Tokens multiplied by what goes evenly from `first` to `last`: a kernel that walks over the keys from the
 * smaller factor to the larger finds larger scores in every step. */
static void slope(case_tensor *x, double first, double last)
{
    for (int64_t i = 0; i < case_tensor_rows(x); i++) {
        const case_row at = case_tensor_row(x, i);
        const double factor = first + (last - first) * (double)(at.token + 1) / (double)x->size[2];
        for (int64_t d = 0; d < x->size[3]; d++) {
            const double value = case_tensor_get(x, at.batch, at.head, at.token, d);
            case_tensor_set(x, at.batch, at.head, at.token, d, factor * value);
        }
    }
}

/* Largest element and row, of what is finite. */
static void measure(case_tensor *x)
{
    double most = 0, norm = 0;
#pragma omp parallel for reduction(max : most, norm)
    for (int64_t i = 0; i < case_tensor_rows(x); i++) {
        const case_row at = case_tensor_row(x, i);
        double square = 0;
        for (int64_t d = 0; d < x->size[3]; d++) {
            const double value = case_tensor_get(x, at.batch, at.head, at.token, d);
            most = isfinite(value) ? fmax(most, fabs(value)) : most;
            square += isfinite(value) ? value * value : 0;
        }
        norm = fmax(norm, sqrt(square));
    }
    x->most = most;
    x->norm = norm;
}

static void make_inputs(cuda_case *c)
{
    const attn_problem *p = &c->problem;
    cuda_tensor *in[] = {&c->q, &c->k, &c->v, &c->dout};
    open_tensor(c, &c->q, p->dtype, ATTN_Q, p->dim_qk);
    open_tensor(c, &c->k, p->dtype, ATTN_K, p->dim_qk);
    open_tensor(c, &c->v, p->dtype, ATTN_V, p->dim_v);
    open_tensor(c, &c->dout, p->dtype, ATTN_Q, p->dim_v);
    for (int i = 0; i < 4; i++) {
        fill(&in[i]->host, c->seed * 31 + (uint64_t)i, c->kind == CUDA_EQUAL && i < 2);
    }
    if (c->kind == CUDA_HUGE) { /* a score of about 24^2 sqrt(d), thousands */
        put_huge(&c->q.host, p->tokens_q / 2);
        put_huge(&c->k.host, p->tokens_kv / 3);
    } else if (c->kind == CUDA_NAN) {
        put_nan(&c->q.host,
                2 * p->tokens_q / 3); /* with keys that it sees and others, also of a ragged batch */
        put_nan(&c->k.host, p->tokens_kv - 9);
        put_nan(&c->v.host, p->tokens_kv - 5);
    } else if (c->kind == CUDA_RISING) {
        slope(&c->k.host, 41, 1);
    } else if (c->kind == CUDA_GROWING) {
        slope(&c->k.host, 1, 6); /* no farther: the gradients of small weights stay in fp32's range */
    }
    for (int i = 0; i < 4; i++) {
        measure(&in[i]->host);
        send(in[i]);
    }
}

static void make_outputs(cuda_case *c)
{
    const attn_problem *p = &c->problem;
    cuda_tensor *grads[] = {&c->dq, &c->dk, &c->dv};
    open_tensor(c, &c->o, p->dtype_out, ATTN_Q, p->dim_v);
    open_tensor(c, &c->lse, ATTN_F32, ATTN_Q, 1);
    if (!c->backward) {
        return;
    }
    open_tensor(c, &c->given_o, p->dtype_out, ATTN_Q, p->dim_v);
    open_tensor(c, &c->given_lse, ATTN_F32, ATTN_Q, 1);
    open_tensor(c, &c->delta, ATTN_F32, ATTN_Q, 1);
    for (int i = 0; i < 3; i++) {
        const int64_t dim = i == 2 ? p->dim_v : p->dim_qk;
        open_tensor(c, grads[i], p->dtype_out, (attn_operand)i, dim);
        case_tensor_place(&c->before[i], p->dtype_out, grads[i]->host.size, grads[i]->host.t.stride);
        fill(&c->before[i], c->seed * 57 + (uint64_t)i, false);
        measure(&c->before[i]);
        c->slope.before = c->accumulate ? fmax(c->slope.before, c->before[i].most) : 0;
    }
}

/* ---- what the reference reads ---- */

static attn_io host_io(const cuda_case *c)
{
    attn_io io = ATTN_INIT(attn_io);
    io.q = c->q.host.t, io.k = c->k.host.t, io.v = c->v.host.t;
    io.cu_seqlens_q = c->cu_q, io.cu_seqlens_kv = c->cu_kv;
    return io;
}

static attn_gradients host_gradients(const cuda_case *c)
{
    attn_gradients io = ATTN_INIT(attn_gradients);
    io.q = c->q.host.t, io.k = c->k.host.t, io.v = c->v.host.t, io.dout = c->dout.host.t;
    io.o = c->given_o.host.t, io.lse = c->given_lse.host.t;
    io.cu_seqlens_q = c->cu_q, io.cu_seqlens_kv = c->cu_kv;
    if (c->give_delta) {
        io.delta = c->delta.host.t;
    }
    return io;
}

/* o and lse by the CPU's kernels, delta from o as it was rounded. */
static void give_forward(cuda_case *c)
{
    const attn_problem *p = &c->problem;
    const attn_options options = {.size = sizeof options, .in_memory = 1};
    attn_io io = host_io(c);
    case_tensor *o = &c->given_o.host, *lse = &c->given_lse.host;
    io.o = o->t, io.lse = lse->t;
    assert_int_equal(attn_forward(p, &io, &options), ATTN_OK);
    for (int64_t i = 0; i < case_tensor_rows(lse); i++) {
        const case_row at = case_tensor_row(lse, i);
        double delta = 0;
        for (int64_t d = 0; d < p->dim_v; d++) {
            delta += case_tensor_get(o, at.batch, at.head, at.token, d) *
                     case_tensor_get(&c->dout.host, at.batch, at.head, at.token, d);
        }
        case_tensor_set(&c->delta.host, at.batch, at.head, at.token, 0, delta);
    }
    measure(lse);
    send(&c->given_o);
    send(&c->given_lse);
    send(&c->delta);
}

/* ---- the answers ---- */

/* The first, the last, and one of each of equal stretches between them; all where there are few. */
static void choose(cuda_case *c, int side, int64_t tokens, uint64_t seed)
{
    const int64_t count = c->rows == 0 || c->rows > tokens ? tokens : c->rows;
    c->chosen[side] = calloc((size_t)count + 1, sizeof **c->chosen);
    assert_non_null(c->chosen[side]);
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = i * tokens / count, to = (i + 1) * tokens / count - 1;
        c->chosen[side][i] = i == 0 ? 0 : i + 1 == count ? tokens - 1 : check_between(&seed, from, to);
    }
    c->count[side] = count;
}

/* How many of the chosen are tokens of a sequence of that length. */
static int64_t within(const cuda_case *c, int side, int64_t length)
{
    int64_t count = 0;
    while (count < c->count[side] && c->chosen[side][count] < length) {
        count++;
    }
    return count;
}

static double *doubles(int64_t count)
{
    double *x = calloc((size_t)count + 1, sizeof *x);
    assert_non_null(x);
    return x;
}

/* Answers of one (batch, query head); `ones`: dO is 1 throughout. */
static bool solve_plane(const cuda_case *c, int64_t plane, const attn_gradients *ones)
{
    const attn_problem *p = &c->problem;
    const int64_t b = plane / p->heads_q, h = plane % p->heads_q, group = p->heads_q / p->heads_kv;
    const case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, b);
    const int64_t rows = within(c, 0, s.q_count), kv = b * p->heads_kv + h / group;
    const int64_t keys = h % group == 0 ? within(c, 1, s.kv_count) : 0;
    const attn_io io = host_io(c);
    bool ok = attn_reference(p, &io, b, h, c->chosen[0], rows, c->want_o + plane * c->count[0] * p->dim_v,
                             c->want_lse + plane * c->count[0]) == ATTN_OK;
    if (c->backward && ok) {
        const attn_gradients all = host_gradients(c);
        double *dk = c->want[1] + kv * c->count[1] * p->dim_qk,
               *dv = c->want[2] + kv * c->count[1] * p->dim_v;
        double *column = c->column + kv * c->count[1];
        double *spare = calloc((size_t)(keys * (p->dim_qk + p->dim_v)) + 1, sizeof *spare);
        ok = spare != NULL;
        ok = ok && attn_reference_backward(p, &all, b, h, c->chosen[0], rows,
                                           c->want[0] + plane * c->count[0] * p->dim_qk, c->chosen[1], keys,
                                           dk, dv) == ATTN_OK;
        ok = ok && attn_reference_backward(p, ones, b, h, c->chosen[0], 0, NULL, c->chosen[1], keys, spare,
                                           spare + keys * p->dim_qk) == ATTN_OK;
        for (int64_t j = 0; j < keys && ok; j++) {
            column[j] = spare[keys * p->dim_qk + j * p->dim_v];
        }
        free(spare);
    }
    return ok;
}

static void solve(cuda_case *c)
{
    const attn_problem *p = &c->problem;
    const int64_t planes = p->batch * p->heads_q, kv = p->batch * p->heads_kv;
    attn_gradients ones = host_gradients(c);
    case_tensor flat = {0};
    c->want_o = doubles(planes * c->count[0] * p->dim_v);
    c->want_lse = doubles(planes * c->count[0]);
    if (c->backward) {
        const int64_t none[4] = {0};
        c->want[0] = doubles(planes * c->count[0] * p->dim_qk);
        c->want[1] = doubles(kv * c->count[1] * p->dim_qk);
        c->want[2] = doubles(kv * c->count[1] * p->dim_v);
        c->column = doubles(kv * c->count[1]);
        case_tensor_place(&flat, p->dtype, c->dout.host.size, none);
        for (int64_t i = 0; i < case_tensor_rows(&flat); i++) {
            const case_row at = case_tensor_row(&flat, i);
            for (int64_t d = 0; d < p->dim_v; d++) {
                case_tensor_set(&flat, at.batch, at.head, at.token, d, 1);
            }
        }
        ones.dout = flat.t;
    }
    int64_t failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : failed)
    for (int64_t plane = 0; plane < planes; plane++) {
        failed += !solve_plane(c, plane, &ones);
    }
    assert_int_equal(failed, 0);
    case_tensor_close(&flat);
}

static void set_bounds(cuda_case *c)
{
    const attn_problem *p = &c->problem;
    const double before = c->slope.before, scale = fabs(p->scale);
    c->bound = (check_bound){.score = scale * c->q.host.norm * c->k.host.norm,
                             .value = c->v.host.most,
                             .dim_qk = p->dim_qk,
                             .keys = p->tokens_kv};
    c->slope = (check_slope){.bound = c->bound,
                             .lse = c->given_lse.host.most,
                             .slope = c->v.host.norm * c->dout.host.norm,
                             .scale = scale,
                             .q = c->q.host.most,
                             .k = c->k.host.most,
                             .dout = c->dout.host.most,
                             .before = before,
                             .dim_v = p->dim_v,
                             .rows = p->tokens_q * (p->heads_q / p->heads_kv)};
}

void cuda_case_open(cuda_case *c)
{
    const int64_t *lists[] = {c->cu_q, c->cu_kv};
    assert_int_equal(attn_problem_check(&c->problem), ATTN_OK);
    make_inputs(c);
    make_outputs(c);
    if (c->backward) {
        give_forward(c);
    }
    for (int side = 0; side < 2 && c->cu_q != NULL; side++) {
        const size_t bytes = (size_t)(c->problem.batch + 1) * sizeof **lists;
        void *there = NULL;
        assert_int_equal(attn_cuda_alloc(cuda.gpu, &there, bytes), ATTN_OK);
        assert_int_equal(attn_cuda_copy(cuda.gpu, there, lists[side], bytes, NULL), ATTN_OK);
        c->cu_there[side] = there;
    }
    choose(c, 0, c->problem.tokens_q, c->seed);
    choose(c, 1, c->problem.tokens_kv, ~c->seed);
    solve(c);
    set_bounds(c);
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
}

void cuda_case_close(cuda_case *c)
{
    cuda_tensor *all[] = {&c->q,       &c->k,         &c->v,     &c->o,  &c->lse, &c->dout,
                          &c->given_o, &c->given_lse, &c->delta, &c->dq, &c->dk,  &c->dv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        close_tensor(all[i]);
    }
    for (int i = 0; i < 3; i++) {
        case_tensor_close(&c->before[i]);
        free(c->want[i]);
    }
    for (int side = 0; side < 2; side++) {
        attn_cuda_free(cuda.gpu, c->cu_there[side]);
        free(c->chosen[side]);
    }
    free(c->cu_q);
    free(c->cu_kv);
    free(c->want_o);
    free(c->want_lse);
    free(c->column);
}
