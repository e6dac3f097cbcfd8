/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_backward.c - gradients of whole problems against the fp64 reference over random shapes, dtypes,
 * layouts and kernels; the reference against differences of the forward; everything that can fail.
 */
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

static void test_gradients_are_the_reference(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 150; i++) {
        uint64_t seed = 5000 + i;
        char what[1024];
        backward_case c = backward_case_random(&seed, i % 10 == 0 ? 300 : 70);
        attn_options o = {.size = sizeof o, .threads = 1 + (int)case_random(&seed, 3)};
        if (case_random(&seed, 2) == 0) {
            o.kernel = backward_case_kernel(&c.problem, &seed);
        }
        backward_case_open(&c, seed);
        backward_case_describe(what, sizeof what, &c, &o);
        if (backward_case_run(&c, &o) != ATTN_OK) {
            fail_msg("%s: %s", what, attn_last_error());
        }
        backward_case_compare(&c, what);
        backward_case_close(&c);
    }
}

/* ---- the reference ---- */

/* sum of o * dO in fp64 */
static double loss(const backward_case *c)
{
    const attn_problem *p = &c->problem;
    enum { ROWS = 16, DIM = 16 };
    double o[ROWS * DIM], lse[ROWS], sum = 0;
    int64_t rows[ROWS];
    attn_io io = ATTN_INIT(attn_io);
    io.q = c->q.t, io.k = c->k.t, io.v = c->v.t;
    for (int64_t i = 0; i < p->tokens_q; i++) {
        rows[i] = i;
    }
    for (int64_t h = 0; h < p->heads_q; h++) {
        assert_int_equal(attn_reference(p, &io, 0, h, rows, p->tokens_q, o, lse), ATTN_OK);
        for (int64_t i = 0; i < p->tokens_q * p->dim_v; i++) {
            sum += o[i] * case_tensor_get(&c->dout, 0, h, i / p->dim_v, i % p->dim_v);
        }
    }
    return sum;
}

/* (L(x + h) - L(x - h)) / 2h is off by about h^2 times the third derivative; the step is what fp32 makes of
 * it. */
static void check_differences(const backward_case *c, case_tensor *x, const double *slope)
{
    const double h = 0x1p-10;
    for (int64_t i = 0; i < x->size[1] * x->size[2] * x->size[3]; i++) {
        int64_t d = i % x->size[3], token = i / x->size[3] % x->size[2], head = i / x->size[3] / x->size[2];
        const double old = case_tensor_get(x, 0, head, token, d);
        case_tensor_set(x, 0, head, token, d, old + h);
        double step = case_tensor_get(x, 0, head, token, d), above = loss(c);
        case_tensor_set(x, 0, head, token, d, old - h);
        step -= case_tensor_get(x, 0, head, token, d);
        double below = loss(c);
        case_tensor_set(x, 0, head, token, d, old);
        assert_true(fabs((above - below) / step - slope[i]) <= 100.0 * h * h);
    }
}

static void test_reference_is_the_slope_of_the_forward(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "heads=2,kv_heads=1,tokens=7,kv_tokens=9,dim=5,dim_v=6",
        "heads=2,tokens=9,kv_tokens=6,dim=4,causal",
        "heads=1,tokens=8,dim=5,window=2:1,scale=0.9",
    };
    for (uint64_t i = 0; i < 3; i++) {
        backward_case c = {.problem = ATTN_INIT(attn_problem)};
        assert_int_equal(attn_problem_parse(&c.problem, problems[i]), ATTN_OK);
        backward_case_open(&c, i + 70);
        check_differences(&c, &c.q, c.want_dq);
        check_differences(&c, &c.k, c.want_dk);
        check_differences(&c, &c.v, c.want_dv);
        backward_case_close(&c);
    }
}

/* ---- failures ---- */

static backward_case small_case(uint64_t seed)
{
    backward_case c = {.accumulate = 0};
    assert_int_equal(attn_problem_parse(&c.problem, "heads=2,tokens=40,dim=8,causal"), ATTN_OK);
    backward_case_open(&c, seed);
    return c;
}

static void test_each_allocation_fails_in_turn(void **state)
{
    (void)state;
    backward_case c = small_case(1);
    attn_gradients io = backward_case_io(&c);
    int64_t failures[2] = {0}, row = 3;
    double dq[8], dk[8], dv[8];
    size_t before = attn__memory_now();
    for (int way = 0; way < 2; way++) {
        for (;; failures[way]++) {
            attn__memory_fail_after(failures[way]);
            attn_status status =
                way == 0 ? attn_backward(&c.problem, &io, NULL)
                         : attn_reference_backward(&c.problem, &io, 0, 0, &row, 1, dq, &row, 1, dk, dv);
            attn__memory_fail_after(-1);
            assert_int_equal(attn__memory_now(), before);
            if (status == ATTN_OK) {
                break;
            }
            assert_int_equal(status, ATTN_ENOMEM);
            assert_true(attn_last_error()[0] != '\0');
        }
        assert_true(failures[way] >= 5);
    }
    backward_case_compare(&c, "after the failures");
    backward_case_close(&c);
}

typedef struct patience {
    int left;
    int64_t cells;
} patience;

static int stop_after(void *data, const attn_event *event)
{
    patience *p = data;
    assert_int_equal(event->step, ATTN_STEP_COMPUTE);
    p->cells += event->cells;
    return p->left-- <= 0;
}

static void test_cancel_at_each_event(void **state)
{
    (void)state;
    backward_case c = backward_case_long("heads=2,tokens=300,kv_tokens=1700,dim=8,causal", 0, 0);
    backward_case_open(&c, 4);
    for (int after = 0;; after++) {
        patience p = {.left = after};
        attn_options o = {.size = sizeof o, .threads = 3, .event = stop_after, .event_data = &p};
        attn_status status = backward_case_run(&c, &o);
        if (status == ATTN_OK) {
            assert_true(after >= 6);
            attn__band band = attn__problem_band(&c.problem);
            assert_int_equal(p.cells, attn__band_cells(band, 0, 300, 0, 1700));
            break;
        }
        assert_int_equal(status, ATTN_ECANCELED);
    }
    backward_case_compare(&c, "after the cancels");
    backward_case_close(&c);
}

static void refuse(const attn_problem *p, const attn_gradients *io, const attn_options *o, attn_status want,
                   const char *words)
{
    assert_int_equal(attn_backward(p, io, o), want);
    if (strstr(attn_last_error(), words) == NULL) {
        fail_msg("'%s' does not say '%s'", attn_last_error(), words);
    }
}

static void test_bad_arguments(void **state)
{
    (void)state;
    backward_case c = small_case(2);
    const attn_gradients good = backward_case_io(&c);
    const attn_options plain = ATTN_INIT(attn_options);
    attn_gradients io;
    attn_options o;
    refuse(&c.problem, NULL, NULL, ATTN_EINVAL, "size");
    refuse(&c.problem, (io = good, io.size = 8, &io), NULL, ATTN_EINVAL, "size");
    refuse(&c.problem, (io = good, io.dout.data = NULL, &io), NULL, ATTN_EINVAL, "dout");
    refuse(&c.problem, (io = good, io.lse.data = NULL, &io), NULL, ATTN_EINVAL, "lse");
    refuse(&c.problem, (io = good, io.o.data = NULL, &io), NULL, ATTN_EINVAL, "delta");
    refuse(&c.problem, (io = good, io.dk.data = io.dv.data, &io), NULL, ATTN_EINVAL, "dk begins where dv");
    refuse(&c.problem, (io = good, io.dq.data = io.dout.data, &io), NULL, ATTN_EINVAL,
           "dq begins where dout");
    refuse(NULL, &good, NULL, ATTN_EINVAL, "problem");
    refuse(&c.problem, &good, (o = plain, o.workers = 2, &o), ATTN_EUNSUPPORTED, "workers");
    refuse(&c.problem, &good, (o = plain, o.spool = "folder", &o), ATTN_EUNSUPPORTED, "spool");
    refuse(&c.problem, &good, (o = plain, o.memory_limit = 100, &o), ATTN_ELIMIT, "limit");
    refuse(&c.problem, &good, (o = plain, o.kernel = "naive", &o), ATTN_EUNSUPPORTED, "gradients");

    static const int64_t bad_begin[] = {1, 40}, falls[] = {0, -1}, too_long[] = {0, 41}, fine[] = {0, 40};
    io = good, io.cu_seqlens_q = io.cu_seqlens_kv = fine;
    assert_int_equal(attn_backward(&c.problem, &io, NULL), ATTN_OK);
    refuse(&c.problem, (io.cu_seqlens_kv = NULL, &io), NULL, ATTN_EINVAL, "neither");
    refuse(&c.problem, (io.cu_seqlens_kv = bad_begin, &io), NULL, ATTN_EINVAL, "begin");
    refuse(&c.problem, (io.cu_seqlens_kv = falls, &io), NULL, ATTN_EINVAL, "less");
    refuse(&c.problem, (io.cu_seqlens_kv = too_long, &io), NULL, ATTN_EINVAL, "at most 40");

    attn_plan *plan;
    attn_io forward = ATTN_INIT(attn_io);
    forward.q = c.q.t, forward.k = c.k.t, forward.v = c.v.t, forward.o = c.o.t;
    char workspace[1];
    assert_int_equal(attn_plan_create(&plan, &c.problem, (o = plain, o.backward = 1, &o)), ATTN_OK);
    assert_int_equal(attn_execute(plan, &forward, workspace), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "attn_execute_backward"));
    assert_int_equal(attn_execute_backward(plan, &good, NULL), ATTN_EINVAL);
    assert_int_equal(attn_execute_backward(NULL, &good, workspace), ATTN_EINVAL);
    attn_plan_destroy(plan);
    assert_int_equal(attn_plan_create(&plan, &c.problem, &plain), ATTN_OK);
    assert_int_equal(attn_execute_backward(plan, &good, workspace), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "options.backward"));
    attn_plan_destroy(plan);
    backward_case_close(&c);
}

/* Memory is for the tokens that there are, not for batch times the longest sequence. */
static void test_memory_of_unequal_lengths(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    const attn_options o = {.size = sizeof o, .backward = 1};
    const size_t rows = 8094 * 16;
    assert_int_equal(
        attn_problem_parse(&p, "batch=2000,heads=16,tokens=4096,dim=128,dtype=bf16,out=bf16,total=8094:8094"),
        ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    assert_true(attn_plan_workspace(plan) > rows * 128 * sizeof(float)); /* dq */
    assert_true(attn_plan_workspace(plan) < 2 * rows * 128 * sizeof(float));
    attn_plan_destroy(plan);
}

/* What the one call needs no telling of: 200 sequences of 1422 tokens in all, whose dq would be 210 MB if
 * each were as long as the longest. */
static void test_lists_tell_the_tokens(void **state)
{
    (void)state;
    enum { BATCH = 200, LONGEST = 1024, TOKENS = LONGEST + 2 * (BATCH - 1), HEADS = 4, DIM = 64 };
    const size_t count = (size_t)HEADS * TOKENS * DIM;
    const attn_options o = {.size = sizeof o, .memory_limit = 64 << 20};
    attn_gradients io = ATTN_INIT(attn_gradients);
    attn_tensor *const t[] = {&io.q, &io.k, &io.v, &io.o, &io.dout, &io.dq, &io.dk, &io.dv};
    int64_t starts[BATCH + 1] = {0};
    attn_problem p;
    for (int i = 0; i < BATCH; i++) {
        starts[i + 1] = starts[i] + (i == 7 ? LONGEST : 2);
    }
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        t[i]->data = calloc(count, sizeof(uint16_t));
    }
    io.lse.data = calloc(count, sizeof(float));
    io.cu_seqlens_q = io.cu_seqlens_kv = starts;
    assert_int_equal(
        attn_problem_parse(&p, "batch=200,heads=4,tokens=1024,dim=64,dtype=bf16,out=bf16,causal"), ATTN_OK);
    assert_int_equal(attn_backward(&p, &io, &o), ATTN_OK);
    p.batch = INT64_C(1) << 50; /* nor are lists read that nobody can have given */
    assert_int_equal(attn_backward(&p, &io, &o), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "batch"));
    p.batch = BATCH, p.dim_qk = 0;
    assert_int_equal(attn_backward(&p, &io, &o), ATTN_EINVAL);
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        free(t[i]->data);
    }
    free(io.lse.data);
}

static void test_bad_arguments_of_the_reference(void **state)
{
    (void)state;
    backward_case c = small_case(3);
    const attn_gradients io = backward_case_io(&c);
    int64_t row = 40;
    double dq[8], dk[8], dv[8];
    const attn_problem *p = &c.problem;
    assert_int_equal(attn_reference_backward(p, &io, 0, 0, &row, 1, dq, NULL, 0, NULL, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "40"));
    assert_int_equal(attn_reference_backward(p, &io, 0, 0, NULL, 0, NULL, &row, 1, dk, dv), ATTN_EINVAL);
    row = 39;
    assert_int_equal(attn_reference_backward(p, &io, 0, 0, &row, 1, NULL, NULL, 0, NULL, NULL), ATTN_EINVAL);
    assert_int_equal(attn_reference_backward(p, &io, 0, 0, NULL, 0, NULL, &row, 1, dk, NULL), ATTN_EINVAL);
    assert_int_equal(attn_reference_backward(p, &io, 1, 0, &row, 1, dq, NULL, 0, NULL, NULL), ATTN_EINVAL);
    assert_int_equal(attn_reference_backward(p, &io, 0, 2, &row, 1, dq, NULL, 0, NULL, NULL), ATTN_EINVAL);
    assert_int_equal(attn_reference_backward(NULL, &io, 0, 0, &row, 1, dq, NULL, 0, NULL, NULL), ATTN_EINVAL);
    assert_int_equal(attn_reference_backward(p, &io, 0, 0, &row, 1, dq, &row, 1, dk, dv), ATTN_OK);
    backward_case_close(&c);
}

/* What a plan for gradients says of itself. */
static void test_summary(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    attn_summary s = ATTN_INIT(attn_summary);
    attn_options o = {.size = sizeof o, .backward = 1, .threads = 3};
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=3000,dim=64,causal,dtype=bf16,out=bf16"),
                     ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    assert_int_equal(attn_plan_summary(plan, &s), ATTN_OK);
    assert_int_equal(s.workers, 1);
    assert_int_equal(s.threads, 3);
    assert_int_equal(s.workspace, (int64_t)attn_plan_workspace(plan));
    assert_int_equal(s.workspace_gather, 0);
    assert_true(s.workspace_partial >= 2 * 3000 * (64 + 2) * 4); /* dq in fp32, lse, delta */
    assert_true(s.workspace_kernel > 0 && s.workspace_kernel + s.workspace_partial < s.workspace);
    attn_verdict v = ATTN_INIT(attn_verdict);
    int refusals = 0;
    for (int64_t i = 0; attn_kernel_verdict(plan, i, &v) == ATTN_OK; i++) {
        refusals += v.reason != NULL && strstr(v.reason, "gradients") != NULL;
        assert_true(!v.chosen || strcmp(v.name, s.kernel) == 0);
    }
    assert_true(refusals >= 1);
    attn_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_are_the_reference),
        cmocka_unit_test(test_reference_is_the_slope_of_the_forward),
        cmocka_unit_test(test_each_allocation_fails_in_turn),
        cmocka_unit_test(test_cancel_at_each_event),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_memory_of_unequal_lengths),
        cmocka_unit_test(test_lists_tell_the_tokens),
        cmocka_unit_test(test_bad_arguments_of_the_reference),
        cmocka_unit_test(test_summary),
    };
    return cmocka_run_group_tests_name("backward", tests, NULL, NULL);
}
