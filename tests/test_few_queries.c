/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_few_queries.c - few queries against many keys, whose keys are shared out in chunks: against the fp64
 * reference over groups, masks, dtypes and layouts, with the same bits for any number of threads and for
 * sequences alone.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/direct.h"
#include "engine_case.h"
#include "sequence_case.h"

/* Large dims, so that a chunk is a few hundred keys; 1 to 16 queries. */
static attn_problem random_problem(uint64_t *seed)
{
    static const int64_t heads[][2] = {{1, 1}, {8, 1}, {8, 2}, {6, 6}, {6, 3}};
    attn_problem p = ATTN_INIT(attn_problem);
    int64_t pick = case_random(seed, 5);
    p.heads_q = heads[pick][0], p.heads_kv = heads[pick][1];
    p.tokens_q = 1 + case_random(seed, 16);
    p.tokens_kv = 1 + case_random(seed, 1000);
    p.dim_qk = 64 + case_random(seed, 100), p.dim_v = 64 + case_random(seed, 100);
    p.dtype = (attn_dtype)case_random(seed, 3);
    p.dtype_out = case_random(seed, 3) > 0 ? ATTN_F32 : (attn_dtype)case_random(seed, 3);
    p.mask = (attn_mask)case_random(seed, 3);
    if (p.mask == ATTN_MASK_WINDOW) { /* often around less than a chunk, far from both ends */
        p.window_left = case_random(seed, 900) - 1;
        p.window_right = case_random(seed, 2) > 0 ? 0 : case_random(seed, 900) - 1;
    }
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    return p;
}

static attn__few cut_of(const attn_problem *p)
{
    attn_plan *plan;
    attn_options o = {.size = sizeof o, .in_memory = 1};
    attn__sequences all;
    assert_int_equal(attn_plan_create(&plan, p, &o), ATTN_OK);
    assert_int_equal(attn__sequences_open(&all, p, NULL, NULL), ATTN_OK);
    attn__sequence s = attn__sequence_at(&all, 0);
    attn__few few = attn__few_of(plan, &s);
    attn_plan_destroy(plan);
    return few;
}

static void test_is_the_reference(void **state)
{
    (void)state;
    int many = 0, single = 0, none = 0;
    for (uint64_t i = 0; i < 40; i++) {
        uint64_t seed = 60 + i;
        char what[512];
        sequence_case c = {.problem = random_problem(&seed)};
        c.problem.batch = 1 + case_random(&seed, 4); /* more planes than regions */
        attn__few few = cut_of(&c.problem);
        many += few.tasks > 1, single += few.tasks == 1, none += few.tasks == 0;
        sequence_case_open(&c, seed);
        attn_problem_print(&c.problem, what, sizeof what);
        sequence_case_threads(&c, what);
        sequence_case_close(&c);
    }
    assert_true(many > 15 && single > 5 && none > 0);
}

/* Prompts and single tokens in one batch. */
static void test_alone(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 25; i++) {
        uint64_t seed = 800 + i;
        sequence_case c = {.problem = random_problem(&seed)};
        attn_problem *p = &c.problem;
        p->batch = 1 + case_random(&seed, 6);
        p->tokens_q = case_random(&seed, 2) > 0 ? 300 : p->tokens_q;
        c.cu_q = case_lengths(&seed, p->batch, attn__min(p->tokens_q, 20));
        c.cu_kv = case_lengths(&seed, p->batch, p->tokens_kv);
        c.cu_q[p->batch] = c.cu_q[p->batch - 1] + p->tokens_q;
        sequence_case_open(&c, seed);
        sequence_case_alone(&c, "few and many queries");
        sequence_case_compare(&c, "few and many queries");
        sequence_case_close(&c);
    }
}

/* Tasks of several chunks, which takes many heads. */
static void test_long(void **state)
{
    (void)state;
    const char *text = "heads=86,kv_heads=43,tokens=3,kv_tokens=500,dim=256,causal";
    sequence_case c = {.problem = ATTN_INIT(attn_problem)};
    assert_int_equal(attn_problem_parse(&c.problem, text), ATTN_OK);
    attn__few few = cut_of(&c.problem);
    assert_true(few.tasks > 1 && few.run > 1);
    sequence_case_open(&c, 9);
    sequence_case_threads(&c, text);
    sequence_case_close(&c);
}

/* As many rows as few queries can be, more than a tile of several threads has where a kernel keeps keys. */
static void test_most(void **state)
{
    (void)state;
    const char *texts[] = {"heads=4,tokens=128,kv_tokens=1500,dim=64,dtype=bf16,out=f32,causal",
                           "heads=2,kv_heads=1,tokens=64,kv_tokens=300,dim=128,causal"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        sequence_case c = {.problem = ATTN_INIT(attn_problem)};
        assert_int_equal(attn_problem_parse(&c.problem, texts[i]), ATTN_OK);
        attn__few few = cut_of(&c.problem);
        assert_true(few.tasks > 1 && few.rows == 128);
        sequence_case_open(&c, 10 + i);
        sequence_case_threads(&c, texts[i]);
        sequence_case_close(&c);
    }
}

/* What is cut, and into what: by the shape alone. */
static void test_cut(void **state)
{
    (void)state;
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, "heads=32,kv_heads=8,tokens=1,kv_tokens=32Ki,dim=128,dtype=bf16"),
                     ATTN_OK);
    attn__few few = cut_of(&p);
    assert_int_equal(few.chunk * 2 * 128 * 2, 256 * 1024);
    assert_int_equal(few.tasks, 16);
    assert_int_equal(few.run, 4);
    p.mask = ATTN_MASK_WINDOW, p.window_left = 1000, p.window_right = 0;
    few = cut_of(&p);
    assert_int_equal(few.end - few.begin, 1001); /* unseen keys are not cut */
    assert_int_equal(few.tasks, 2);
    p.tokens_q = 200;
    assert_int_equal(cut_of(&p).tasks, 0);
    p.tokens_q = 1, p.tokens_kv = 10, p.heads_kv = 32;
    assert_int_equal(cut_of(&p).tasks, 0); /* tiny, and nothing to share */
}

/* Partials take room for the threads, not for the batch. */
static void test_workspace(void **state)
{
    (void)state;
    size_t bytes[2];
    attn_options o = {.size = sizeof o, .in_memory = 1, .threads = 2};
    for (int i = 0; i < 2; i++) {
        attn_problem p;
        attn_plan *plan;
        assert_int_equal(attn_problem_parse(&p, "heads=8,kv_heads=2,tokens=4,kv_tokens=9000,dim=64"),
                         ATTN_OK);
        p.batch = i == 0 ? 2 : 200;
        assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
        bytes[i] = attn_plan_workspace(plan);
        attn_plan_destroy(plan);
    }
    assert_true(bytes[1] - bytes[0] < 200 * 100);
}

static attn_status refuse_rows(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               const float *o, int64_t o_stride, const float *lse)
{
    (void)data, (void)batch, (void)head, (void)first, (void)count, (void)o, (void)o_stride, (void)lse;
    return attn_fail(ATTN_EIO, "no room for rows");
}

/* From a source into a sink, which may refuse. */
static void test_source_and_sink(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    attn_options o = {.size = sizeof o, .threads = 2};
    const attn_sink sink = {sizeof sink, NULL, refuse_rows};
    assert_int_equal(
        attn_problem_parse(&p, "batch=2,heads=4,kv_heads=2,tokens=3,kv_tokens=2000,dim=64,causal"), ATTN_OK);
    assert_true(cut_of(&p).tasks > 1);
    case_open(&c, &p, 5);
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    case_compare(&c, "source and sink");
    attn_io io = case_io(&c, 0, NULL, NULL);
    io.sink = &sink;
    assert_int_equal(attn_forward(&p, &io, &o), ATTN_EIO);
    assert_string_equal(attn_last_error(), "no room for rows");
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_is_the_reference),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_most),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_source_and_sink),
    };
    return cmocka_run_group_tests_name("few queries", tests, NULL, NULL);
}
