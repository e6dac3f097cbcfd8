/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - everything that can fail fails once: each allocation in turn, the source, the sink, the
 * user's patience. No crash, no leak, the right status with words.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "engine_case.h"

/* One whole use of the library; the first failure ends it. */
static attn_status use_everything(engine_case *c, const attn_options *o)
{
    attn_source source;
    attn_sink sink;
    attn_io io = case_io(c, 1, &source, &sink);
    attn_plan *plan;
    attn_summary s = ATTN_INIT(attn_summary);
    attn_rank r = ATTN_INIT(attn_rank);
    attn_proof proof = ATTN_INIT(attn_proof);
    attn_cost cost = ATTN_INIT(attn_cost);
    int64_t rows[] = {0, 3}, set[8], found;
    double want_o[2 * 64], want_lse[2];
    case_poison(c);
    ATTN__TRY(attn_forward(&c->problem, &io, o));
    ATTN__TRY(attn_reference(&c->problem, &io, 0, 0, rows, 2, want_o, want_lse));
    ATTN__TRY(attn_interest_search(7, 3, 1, 1, set, 8, &found));
    ATTN__TRY(attn_plan_create(&plan, &c->problem, o));
    attn_status status = attn_plan_summary(plan, &s);
    status = status == ATTN_OK ? attn_plan_rank(plan, 0, &r) : status;
    attn_rank_free(&r);
    status = status == ATTN_OK ? attn_plan_prove(plan, &proof) : status;
    status = status == ATTN_OK ? attn_plan_cost(plan, 0, &cost) : status;
    attn_plan_destroy(plan);
    return status;
}

static void test_each_allocation_fails_in_turn(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    attn_options o[] = {
        {.size = sizeof o[0], .workers = 7, .threads = 1},
        {.size = sizeof o[0], .workers = 8, .threads = 1, .resident = 3},
        {.size = sizeof o[0], .workers = 6, .threads = 1, .quorum = ATTN_QUORUM_AUTO},
        {.size = sizeof o[0], .memory_limit = 100000, .threads = 1, .kernel = "flash-portable"},
        {.size = sizeof o[0], .workers = 128, .threads = 1, .quorum = ATTN_QUORUM_RECTANGULAR},
    };
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=40,dim=8,causal"), ATTN_OK);
    case_open(&c, &p, 3);
    for (size_t i = 0; i < sizeof o / sizeof o[0]; i++) {
        size_t before = attn__memory_now();
        int64_t failures = 0;
        for (;; failures++) {
            attn__memory_fail_after(failures);
            attn_status status = use_everything(&c, &o[i]);
            attn__memory_fail_after(-1);
            assert_int_equal(attn__memory_now(), before);
            if (status == ATTN_OK) {
                break;
            }
            if (status != ATTN_ENOMEM) {
                fail_msg("plan %zu, allocation %d: %s", i, (int)failures, attn_last_error());
            }
            assert_true(attn_last_error()[0] != '\0');
        }
        assert_true(failures >= 10);
        case_compare(&c, "after the failures");
    }
    case_close(&c);
}

static void test_each_read_fails_in_turn(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    assert_int_equal(attn_problem_parse(&p, "batch=2,heads=2,tokens=40,dim=8"), ATTN_OK);
    case_open(&c, &p, 3);
    for (int64_t resident = 1; resident <= 7; resident += 3) {
        attn_options o = {.size = sizeof o, .workers = 7, .resident = resident};
        for (c.fail_read_at = 0;; c.fail_read_at++) {
            c.reads = 0;
            attn_status status = case_run(&c, &o, 1);
            if (c.reads <= c.fail_read_at) {
                assert_int_equal(status, ATTN_OK);
                break;
            }
            assert_int_equal(status, ATTN_EIO);
            assert_string_equal(attn_last_error(), "the disk is on fire");
        }
        assert_true(c.fail_read_at > 50);
        case_compare(&c, "after the failures");
    }
    case_close(&c);
}

static attn_status refuse_rows(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               const float *o, int64_t o_stride, const float *lse)
{
    (void)data, (void)batch, (void)head, (void)first, (void)count, (void)o, (void)o_stride, (void)lse;
    return attn_fail(ATTN_EIO, "no room for rows");
}

static void test_the_sink_fails(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=40,dim=8"), ATTN_OK);
    case_open(&c, &p, 3);
    for (int64_t workers = 1; workers <= 7; workers += 3) {
        attn_options o = {.size = sizeof o, .workers = workers};
        attn_sink sink = {sizeof sink, NULL, refuse_rows};
        attn_io io = case_io(&c, 0, NULL, NULL);
        io.sink = &sink;
        assert_int_equal(attn_forward(&p, &io, &o), ATTN_EIO);
        assert_string_equal(attn_last_error(), "no room for rows");
    }
    case_close(&c);
}

static int stop_after(void *data, const attn_event *event)
{
    int *left = data;
    assert_int_equal(event->size, sizeof *event);
    assert_true(event->end >= event->begin);
    return (*left)-- <= 0;
}

static void test_cancel_at_each_event(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=40,dim=8"), ATTN_OK);
    case_open(&c, &p, 3);
    for (int64_t resident = 1; resident <= 5; resident += 2) {
        for (int after = 0;; after++) {
            int left = after;
            attn_options o = {.size = sizeof o,
                              .workers = 7,
                              .resident = resident,
                              .event = stop_after,
                              .event_data = &left};
            attn_status status = case_run(&c, &o, 1);
            if (status == ATTN_OK) {
                assert_true(after > 50);
                break;
            }
            assert_int_equal(status, ATTN_ECANCELED);
        }
        case_compare(&c, "after the cancels");
    }
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation_fails_in_turn),
        cmocka_unit_test(test_each_read_fails_in_turn),
        cmocka_unit_test(test_the_sink_fails),
        cmocka_unit_test(test_cancel_at_each_event),
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
