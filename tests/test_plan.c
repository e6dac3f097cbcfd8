/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan.c - what a plan says of itself: summary against a count rank by rank, ranks, proof, costs,
 * verdicts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "engine_case.h"

static void near(double a, double b)
{
    if (fabs(a - b) > 1e-9 * (1 + fabs(a) + fabs(b))) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

static void compare_spread(const attn_spread *spread, double *values, int64_t count)
{
    double min = INFINITY, max = -INFINITY, sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        min = fmin(min, values[i]);
        max = fmax(max, values[i]);
        sum += values[i];
    }
    for (int64_t i = 0; i < count; i++) {
        squares += (values[i] - sum / (double)count) * (values[i] - sum / (double)count);
    }
    near(spread->min, min);
    near(spread->max, max);
    near(spread->mean, sum / (double)count);
    if (fabs(spread->std - sqrt(squares / (double)count)) > 1e-6 * (1 + max)) {
        fail_msg("standard deviation %g is not %g", spread->std, sqrt(squares / (double)count));
    }
}

static void test_summary_is_the_sum_of_ranks(void **state)
{
    (void)state;
    double tokens[200], cells[200], in[200], out[200];
    for (uint64_t i = 0; i < 150; i++) {
        uint64_t seed = i;
        attn_problem p = case_problem(&seed, 400);
        attn_options o = {.size = sizeof o, .workers = 1 + case_random(&seed, 120)};
        o.quorum = (attn_quorum)case_random(&seed, 3);
        attn_plan *plan;
        attn_summary s = ATTN_INIT(attn_summary);
        attn_proof proof = ATTN_INIT(attn_proof);
        assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
        assert_int_equal(attn_plan_summary(plan, &s), ATTN_OK);
        assert_int_equal(attn_plan_prove(plan, &proof), ATTN_OK);
        double total = 0;
        for (int64_t rank = 0; rank < o.workers; rank++) {
            attn_rank r = ATTN_INIT(attn_rank);
            assert_int_equal(attn_plan_rank(plan, rank, &r), ATTN_OK);
            int64_t held = 0, first, count;
            for (int64_t g = 0; g < r.group_count; g++) {
                attn_plan_group(plan, p.tokens_kv > p.tokens_q ? ATTN_K : ATTN_Q, r.groups[g], &first,
                                &count);
                held += count;
            }
            assert_int_equal(held, r.tokens);
            tokens[rank] = (double)r.tokens;
            cells[rank] = (double)r.cells;
            in[rank] = (double)r.bytes_in;
            out[rank] = (double)r.bytes_out;
            total += cells[rank];
            attn_rank_free(&r);
            attn_rank_free(&r);
        }
        compare_spread(&s.subsequence, tokens, o.workers);
        compare_spread(&s.cells_worker, cells, o.workers);
        compare_spread(&s.bytes_in, in, o.workers);
        compare_spread(&s.bytes_out, out, o.workers);
        near(total, (double)s.cells);
        assert_int_equal(proof.cells, s.cells);
        assert_int_equal(proof.once, s.cells);
        assert_int_equal(proof.missing + proof.repeated, 0);
        attn_plan_destroy(plan);
    }
}

static void test_reference_case(void **state)
{
    (void)state;
    int64_t set[] = {0, 1, 3}, first, count;
    attn_problem p;
    attn_plan *plan;
    attn_options o = {.size = sizeof o, .workers = 7, .interest_set = set, .interest_size = 3};
    assert_int_equal(attn_problem_parse(&p, "tokens=10,dim=1"), ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    static const int64_t firsts[] = {0, 1, 2, 3, 4, 6, 8}, counts[] = {1, 1, 1, 1, 2, 2, 2};
    for (int64_t g = 0; g < 7; g++) {
        attn_plan_group(plan, ATTN_K, g, &first, &count);
        assert_int_equal(first, firsts[g]);
        assert_int_equal(count, counts[g]);
    }
    attn_rank r = ATTN_INIT(attn_rank);
    assert_int_equal(attn_plan_rank(plan, 0, &r), ATTN_OK);
    static const int64_t pairs[][2] = {{0, 0}, {0, 1}, {0, 3}, {1, 0}, {1, 3}, {3, 0}, {3, 1}};
    assert_int_equal(r.pair_count, 7);
    for (int64_t i = 0; i < 7; i++) {
        assert_int_equal(r.pairs[i].q, pairs[i][0]);
        assert_int_equal(r.pairs[i].kv, pairs[i][1]);
        assert_int_equal(r.pairs[i].part, 0);
    }
    assert_int_equal(r.group_count, 3);
    assert_int_equal(r.groups[2], 3);
    attn_rank_free(&r);
    assert_int_equal(attn_plan_rank(plan, 7, &r), ATTN_EINVAL);
    assert_int_equal(attn_plan_rank(plan, -1, &r), ATTN_EINVAL);
    attn_plan_destroy(plan);
}

static void test_a_million_workers(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    attn_options o = {.size = sizeof o, .workers = 1000003};
    attn_summary s = ATTN_INIT(attn_summary);
    attn_rank r = ATTN_INIT(attn_rank);
    assert_int_equal(attn_problem_parse(&p, "tokens=1000000000,dim=64"), ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    assert_int_equal(attn_plan_summary(plan, &s), ATTN_OK);
    assert_int_equal(s.ranks_counted, 0);
    assert_true((double)s.quorum_q <= 1.26 * sqrt(1000003) + 2);
    assert_true(s.subsequence.min <= s.subsequence.mean && s.subsequence.mean <= s.subsequence.max);
    assert_int_equal(attn_plan_rank(plan, 1000002, &r), ATTN_OK);
    assert_int_equal(r.pair_count, 1000003);
    attn_rank_free(&r);
    attn_plan_destroy(plan);
}

static void test_cost_table(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    attn_options o = {.size = sizeof o, .workers = 13};
    static const char *const names[] = {"cyclic", "rectangular", "ring", "ulysses"};
    assert_int_equal(attn_problem_parse(&p, "tokens=1300,dim=8,heads=26"), ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    for (int64_t i = 0; i < 4; i++) {
        attn_cost cost = ATTN_INIT(attn_cost);
        assert_int_equal(attn_plan_cost(plan, i, &cost), ATTN_OK);
        assert_string_equal(cost.scheme, names[i]);
        assert_true(cost.possible);
    }
    attn_cost cost = ATTN_INIT(attn_cost);
    assert_int_equal(attn_plan_cost(plan, 4, &cost), ATTN_EINVAL);
    attn_plan_destroy(plan);
}

static void test_verdicts(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    int64_t rows = 0, chosen = 0;
    assert_int_equal(attn_problem_parse(&p, "tokens=13,dim=8"), ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, NULL), ATTN_OK);
    attn_verdict v = ATTN_INIT(attn_verdict);
    for (; attn_kernel_verdict(plan, rows, &v) == ATTN_OK; rows++) {
        assert_non_null(v.name);
        assert_non_null(v.summary);
        chosen += v.chosen;
        assert_true(!v.chosen || v.reason == NULL);
    }
    assert_true(rows >= 3);
    assert_int_equal(chosen, 1);
    assert_int_equal(attn_kernel_verdict(NULL, 0, &v), ATTN_OK);
    assert_int_equal(attn_kernel_verdict(NULL, -1, &v), ATTN_EINVAL);
    attn_plan_destroy(plan);
}

static void test_interest_search(void **state)
{
    (void)state;
    int64_t set[8], found;
    assert_int_equal(attn_interest_search(13, 4, 5, 1, set, 8, &found), ATTN_OK);
    assert_int_equal(found, 4);
    assert_int_equal(attn__cover_missing(13, set, 4, NULL, 0), 0);
    assert_int_equal(attn_interest_search(13, 3, 0.05, 1, set, 8, &found), ATTN_EINVAL); /* 3 * 2 + 1 < 13 */
    assert_int_equal(attn_interest_search(40, 6, 0.05, 1, set, 8, &found), ATTN_EINVAL);
    assert_int_equal(attn_interest_search(29, 6, 0.05, 1, set, 8, &found), ATTN_OK);
    assert_int_equal(found, 0); /* none is known */
    assert_int_equal(attn_interest_search(13, 9, 1, 1, set, 8, &found), ATTN_EINVAL);
    assert_int_equal(attn_interest_search(0, 4, 1, 1, set, 8, &found), ATTN_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_summary_is_the_sum_of_ranks),
        cmocka_unit_test(test_reference_case),
        cmocka_unit_test(test_a_million_workers),
        cmocka_unit_test(test_cost_table),
        cmocka_unit_test(test_verdicts),
        cmocka_unit_test(test_interest_search),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
