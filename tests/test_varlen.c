/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_varlen.c - sequences of unequal length in one call against the fp64 reference, and bit for bit against
 * each sequence alone; the same bits whatever the number of threads; refusals.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "engine_case.h"
#include "sequence_case.h"

static sequence_case random_case(uint64_t *seed, int64_t most_tokens, int64_t most_batch)
{
    sequence_case c = {.problem = case_problem(seed, most_tokens)};
    attn_problem *p = &c.problem;
    p->batch = 1 + case_random(seed, most_batch);
    p->dtype_out = case_random(seed, 3) > 0 ? ATTN_F32 : (attn_dtype)case_random(seed, 3);
    c.cu_q = case_lengths(seed, p->batch, p->tokens_q);
    c.cu_kv = case_lengths(seed, p->batch, p->tokens_kv);
    return c;
}

static void describe(char *text, size_t capacity, const sequence_case *c, uint64_t number)
{
    char problem[512];
    attn_problem_print(&c->problem, problem, sizeof problem);
    snprintf(text, capacity, "case %d, %s", (int)number, problem);
}

static void test_is_the_reference(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t seed = 300 + i;
        char what[1024];
        sequence_case c = random_case(&seed, i % 10 == 0 ? 400 : 60, 6);
        attn_options o = {.size = sizeof o, .threads = 1 + (int)case_random(&seed, 3)};
        sequence_case_open(&c, seed);
        describe(what, sizeof what, &c, i);
        if (sequence_case_run(&c, &o) != ATTN_OK) {
            fail_msg("%s: %s", what, attn_last_error());
        }
        sequence_case_compare(&c, what);
        sequence_case_close(&c);
    }
}

static void test_alone(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 100; i++) {
        uint64_t seed = 700 + i;
        char what[1024];
        sequence_case c = random_case(&seed, i % 10 == 0 ? 400 : 60, 5);
        sequence_case_open(&c, seed);
        describe(what, sizeof what, &c, i);
        sequence_case_alone(&c, what);
        sequence_case_close(&c);
    }
}

static void test_bits_repeat(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 6; i++) {
        uint64_t seed = 40 + i;
        sequence_case c = random_case(&seed, 400, 30); /* long enough for several threads */
        sequence_case_open(&c, seed);
        sequence_case_threads(&c, "random lengths");
        sequence_case_close(&c);
    }
}

static int add_cells(void *data, const attn_event *event)
{
    *(int64_t *)data += event->cells;
    return 0;
}

/* Events tell the cells of a sequence on average. */
static void test_cells(void **state)
{
    (void)state;
    uint64_t seed = 5;
    int64_t told = 0, cells = 0;
    sequence_case c = random_case(&seed, 50, 1);
    attn_options o = {.size = sizeof o, .event = add_cells, .event_data = &told};
    free(c.cu_q), free(c.cu_kv);
    c.problem.batch = 3, c.problem.mask = ATTN_MASK_CAUSAL, c.problem.tokens_q = c.problem.tokens_kv = 40;
    c.cu_q = calloc(4, sizeof *c.cu_q), c.cu_kv = calloc(4, sizeof *c.cu_kv);
    assert_true(c.cu_q != NULL && c.cu_kv != NULL);
    for (int64_t b = 0; b < 3; b++) {
        c.cu_q[b + 1] = c.cu_q[b] + 10 * b;
        c.cu_kv[b + 1] = c.cu_kv[b] + 20 + 10 * b;
        cells += 10 * b * (10 * b + 1) / 2 + 10 * b * 20; /* a triangle, and 20 keys that all see */
    }
    sequence_case_open(&c, seed);
    assert_int_equal(sequence_case_run(&c, &o), ATTN_OK);
    assert_int_equal(told, cells / 3);
    sequence_case_close(&c);
}

static void refuse(const attn_problem *p, const attn_io *io, const attn_options *o, attn_status want,
                   const char *words)
{
    assert_int_equal(attn_forward(p, io, o), want);
    if (strstr(attn_last_error(), words) == NULL) {
        fail_msg("'%s' does not say '%s'", attn_last_error(), words);
    }
}

static attn_status read_nothing(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                                void *dst, int64_t head_stride)
{
    (void)data, (void)operand, (void)batch, (void)first, (void)count, (void)dst, (void)head_stride;
    return attn_fail(ATTN_EIO, "should not be read");
}

static attn_status write_nothing(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                                 const float *o, int64_t o_stride, const float *lse)
{
    (void)data, (void)batch, (void)head, (void)first, (void)count, (void)o, (void)o_stride, (void)lse;
    return attn_fail(ATTN_EIO, "should not be written");
}

static void test_bad_arguments(void **state)
{
    (void)state;
    static const int64_t fine[] = {0, 30, 70}, begins[] = {5, 30, 70}, falls[] = {0, 41, 40},
                         too_long[] = {0, 30, 71};
    sequence_case c = {.problem = ATTN_INIT(attn_problem)};
    const attn_source source = {sizeof source, NULL, read_nothing};
    const attn_sink sink = {sizeof sink, NULL, write_nothing};
    assert_int_equal(attn_problem_parse(&c.problem, "batch=2,heads=2,tokens=40,dim=8"), ATTN_OK);
    sequence_case_open(&c, 3);
    const attn_problem *p = &c.problem;
    attn_io good = sequence_case_io(&c), io;
    good.cu_seqlens_q = good.cu_seqlens_kv = fine;
    assert_int_equal(attn_forward(p, &good, NULL), ATTN_OK);
    attn_problem strange = *p;
    strange.batch = INT64_C(1) << 50; /* lists that nobody can have given are not read */
    refuse(&strange, &good, NULL, ATTN_EINVAL, "batch");
    strange = *p, strange.total_kv = 5;
    refuse(&strange, &good, NULL, ATTN_EINVAL, "total");
    strange = *p, strange.placed = 1;
    refuse(&strange, &good, NULL, ATTN_EINVAL, "cu_seqlens");
    refuse(p, (io = good, io.cu_seqlens_q = NULL, &io), NULL, ATTN_EINVAL, "neither");
    refuse(p, (io = good, io.cu_seqlens_kv = NULL, &io), NULL, ATTN_EINVAL, "neither");
    refuse(p, (io = good, io.cu_seqlens_q = begins, &io), NULL, ATTN_EINVAL, "begin at 0");
    refuse(p, (io = good, io.cu_seqlens_kv = falls, &io), NULL, ATTN_EINVAL, "sequence 0 has 41 tokens");
    refuse(p, (io = good, io.cu_seqlens_q = too_long, &io), NULL, ATTN_EINVAL, "at most 40");
    static const int64_t back[] = {0, 30, 20};
    refuse(p, (io = good, io.cu_seqlens_q = back, &io), NULL, ATTN_EINVAL, "less than the 30");
    attn_problem told = *p;
    told.total_q = told.total_kv = 69;
    refuse(&told, &good, NULL, ATTN_EINVAL, "ends at 70");
    refuse(&told, (io = good, io.cu_seqlens_q = io.cu_seqlens_kv = NULL, &io), NULL, ATTN_EINVAL, "total");
    told.total_q = told.total_kv = 70;
    assert_int_equal(attn_forward(&told, &good, NULL), ATTN_OK);
    attn_plan *none = NULL;
    assert_int_equal(attn_plan_create(&none, &told, NULL), ATTN_EINVAL); /* not in memory */
    assert_non_null(strstr(attn_last_error(), "in_memory"));
    refuse(p, (io = good, io.source = &source, &io), NULL, ATTN_EINVAL, "source");
    refuse(p, (io = good, io.sink = &sink, &io), NULL, ATTN_EINVAL, "sink");
    attn_options o = {.size = sizeof o, .workers = 3};
    refuse(p, &good, &o, ATTN_EUNSUPPORTED, "W = 1");
    attn_plan *plan;
    char workspace[1];
    assert_int_equal(attn_plan_create(&plan, p, NULL), ATTN_OK); /* for a source, perhaps */
    assert_int_equal(attn_execute(plan, &good, workspace), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "options.in_memory"));
    attn_plan_destroy(plan);

    double x[8], lse;
    int64_t row = 35;
    assert_int_equal(attn_reference(p, &good, 1, 0, &row, 1, x, &lse), ATTN_OK);
    assert_int_equal(attn_reference(p, &good, 0, 0, &row, 1, x, &lse), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "0 to 29"));
    sequence_case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_is_the_reference), cmocka_unit_test(test_alone),
        cmocka_unit_test(test_bits_repeat),      cmocka_unit_test(test_cells),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests_name("varlen", tests, NULL, NULL);
}
