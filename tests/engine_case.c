/* SPDX-License-Identifier: Apache-2.0 */
/* engine_case.c - see engine_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "engine/engine.h"
#include "engine_case.h"

int64_t case_random(uint64_t *seed, int64_t n)
{
    return (int64_t)(check_random(seed) % (uint64_t)n);
}

attn_problem case_problem(uint64_t *seed, int64_t most_tokens)
{
    static const int64_t heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {3, 3}, {6, 2}};
    attn_problem p = ATTN_INIT(attn_problem);
    int64_t pick = case_random(seed, 5);
    p.batch = 1 + case_random(seed, 2);
    p.heads_q = heads[pick][0];
    p.heads_kv = heads[pick][1];
    p.tokens_q = 1 + case_random(seed, most_tokens);
    p.tokens_kv = case_random(seed, 3) > 0 ? p.tokens_q : 1 + case_random(seed, most_tokens);
    p.dim_qk = 1 + case_random(seed, 40);
    p.dim_v = case_random(seed, 2) > 0 ? p.dim_qk : 1 + case_random(seed, 40);
    p.dtype = (attn_dtype)case_random(seed, 3);
    p.mask = (attn_mask)case_random(seed, 3);
    if (p.mask == ATTN_MASK_WINDOW) {
        p.window_left = case_random(seed, 40) - 1;
        p.window_right = case_random(seed, 40) - 1;
    }
    if (case_random(seed, 4) == 0) {
        p.scale = 0.5 - (double)case_random(seed, 2);
    }
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    return p;
}

/* ---- arrays ---- */

static int64_t elements(const attn_problem *p, attn_operand x)
{
    return p->batch * attn__heads(p, x) * attn__tokens(p, x) * attn__dim(p, x);
}

static void *fill(const attn_problem *p, attn_operand x, uint64_t *seed)
{
    int64_t count = elements(p, x);
    char *data = malloc((size_t)count * attn_dtype_size(p->dtype));
    assert_non_null(data);
    for (int64_t i = 0; i < count; i++) {
        float value = (float)check_normal(seed);
        attn_from_f32(data + (size_t)i * attn_dtype_size(p->dtype), p->dtype, 1, &value, 1);
    }
    return data;
}

static attn_tensor view_of(const engine_case *c, attn_operand x, void *data)
{
    const attn_problem *p = &c->problem;
    int64_t h = attn__heads(p, x), n = attn__tokens(p, x), d = attn__dim(p, x);
    attn_tensor t = {data, {h * n * d, n * d, d, 1}};
    if (c->interleaved) {
        t.stride[1] = d;
        t.stride[2] = h * d;
    }
    return t;
}

int64_t case_rows(const engine_case *c)
{
    return c->problem.batch * c->problem.heads_q * c->problem.tokens_q;
}

static void reference(engine_case *c)
{
    const attn_problem *p = &c->problem;
    attn_source source;
    attn_sink sink;
    attn_io io = case_io(c, 0, &source, &sink);
    int64_t *rows = malloc((size_t)p->tokens_q * sizeof *rows);
    assert_non_null(rows);
    for (int64_t i = 0; i < p->tokens_q; i++) {
        rows[i] = i;
    }
    for (int64_t plane = 0; plane < p->batch * p->heads_q; plane++) {
        int64_t at = plane * p->tokens_q;
        assert_int_equal(attn_reference(p, &io, plane / p->heads_q, plane % p->heads_q, rows, p->tokens_q,
                                        c->want_o + at * p->dim_v, c->want_lse + at),
                         ATTN_OK);
    }
    free(rows);
}

void case_open(engine_case *c, const attn_problem *problem, uint64_t seed)
{
    *c = (engine_case){.problem = *problem, .fail_read_at = -1};
    c->interleaved = case_random(&seed, 2) == 1;
    c->q = fill(problem, ATTN_Q, &seed);
    c->k = fill(problem, ATTN_K, &seed);
    c->v = fill(problem, ATTN_V, &seed);
    c->tensor[ATTN_Q] = view_of(c, ATTN_Q, c->q);
    c->tensor[ATTN_K] = view_of(c, ATTN_K, c->k);
    c->tensor[ATTN_V] = view_of(c, ATTN_V, c->v);
    size_t rows = (size_t)case_rows(c), dim = (size_t)problem->dim_v;
    c->o = malloc(rows * dim * sizeof *c->o);
    c->lse = malloc(rows * sizeof *c->lse);
    c->want_o = malloc(rows * dim * sizeof *c->want_o);
    c->want_lse = malloc(rows * sizeof *c->want_lse);
    assert_true(c->o != NULL && c->lse != NULL && c->want_o != NULL && c->want_lse != NULL);
    reference(c);
}

void case_close(engine_case *c)
{
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->o);
    free(c->lse);
    free(c->want_o);
    free(c->want_lse);
}

void case_poison(engine_case *c)
{
    memset(c->o, 0xff, (size_t)(case_rows(c) * c->problem.dim_v) * sizeof *c->o); /* NaN */
    memset(c->lse, 0xff, (size_t)case_rows(c) * sizeof *c->lse);
}

/* ---- source and sink ---- */

static attn_status read_case(void *data, attn_operand x, int64_t batch, int64_t first, int64_t count,
                             void *dst, int64_t head_stride)
{
    engine_case *c = data;
    const attn_problem *p = &c->problem;
    const attn_tensor *t = &c->tensor[x];
    int64_t element = (int64_t)attn_dtype_size(p->dtype), dim = attn__dim(p, x);
    int reads = __atomic_fetch_add(&c->reads, 1, __ATOMIC_RELAXED);
    if (reads == c->fail_read_at) {
        return attn_fail(ATTN_EIO, "the disk is on fire");
    }
    assert_true(first >= 0 && count > 0 && first + count <= attn__tokens(p, x) && batch < p->batch);
    for (int64_t h = 0; h < attn__heads(p, x); h++) {
        for (int64_t i = 0; i < count; i++) {
            int64_t from = batch * t->stride[0] + h * t->stride[1] + (first + i) * t->stride[2];
            memcpy((char *)dst + (h * head_stride + i * dim) * element, (char *)t->data + from * element,
                   (size_t)(dim * element));
        }
    }
    return ATTN_OK;
}

/* Each row must come exactly once: it is still poisoned. */
static attn_status write_case(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                              const float *o, int64_t o_stride, const float *lse)
{
    engine_case *c = data;
    int64_t dim = c->problem.dim_v;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = (batch * c->problem.heads_q + head) * c->problem.tokens_q + first + i;
        uint32_t bits;
        memcpy(&bits, &c->lse[row], sizeof bits);
        if (bits != 0xffffffffu) {
            return attn_fail(ATTN_EINVAL, "a row was written twice");
        }
        memcpy(c->o + row * dim, o + i * o_stride, (size_t)dim * sizeof *o);
        c->lse[row] = lse[i];
    }
    return ATTN_OK;
}

attn_io case_io(engine_case *c, int from_source, attn_source *source, attn_sink *sink)
{
    attn_io io = ATTN_INIT(attn_io);
    if (from_source) {
        *source = (attn_source){sizeof *source, c, read_case};
        *sink = (attn_sink){sizeof *sink, c, write_case};
        io.source = source;
        io.sink = sink;
        return io;
    }
    io.q = c->tensor[ATTN_Q];
    io.k = c->tensor[ATTN_K];
    io.v = c->tensor[ATTN_V];
    io.o.data = c->o;
    io.lse.data = c->lse;
    return io;
}

attn_status case_run(engine_case *c, const attn_options *options, int from_source)
{
    attn_plan *plan;
    attn_source source;
    attn_sink sink;
    attn_io io = case_io(c, from_source, &source, &sink);
    case_poison(c);
    attn_status status = attn_plan_create(&plan, &c->problem, options);
    if (status != ATTN_OK) {
        return status;
    }
    size_t bytes = attn_plan_workspace(plan);
    char *workspace = malloc(bytes);
    assert_non_null(workspace);
    memset(workspace, 0xff, bytes);
    status = attn_execute(plan, &io, workspace);
    free(workspace);
    attn_plan_destroy(plan);
    return status;
}

void case_compare(const engine_case *c, const char *what)
{
    check_partial(what, &c->problem, case_rows(c), c->o, c->lse, c->want_o, c->want_lse);
}
