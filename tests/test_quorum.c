/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quorum.c - interest sets: every row of the table, Singer, Wichmann, the user's, the fit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "quorum_case.h"

/* k(k - 1) + 1 >= W */
static int64_t counting_bound(int64_t workers)
{
    int64_t k = 1;
    while (k * (k - 1) + 1 < workers) {
        k++;
    }
    return k;
}

/* ---- the table ---- */

/* {last W, most elements}: from the W after the previous row on.  Up to 111 the sizes are the least that
 * exist (Luk & Wong 1997). */
static const int64_t size_limits[][2] = {
    {1, 1},    {3, 2},    {7, 3},    {13, 4},   {19, 5},   {20, 6},   {21, 5},   {28, 6},   {30, 7},
    {31, 6},   {37, 7},   {38, 8},   {39, 7},   {51, 8},   {56, 9},   {57, 8},   {65, 9},   {72, 10},
    {73, 9},   {79, 10},  {90, 11},  {91, 10},  {93, 11},  {94, 12},  {95, 11},  {113, 12}, {116, 13},
    {117, 12}, {131, 13}, {132, 14}, {133, 12}, {150, 14}, {152, 15}, {153, 14}, {159, 15}, {160, 14},
    {169, 15}, {170, 16}, {171, 15}, {175, 16}, {176, 15}, {182, 16}, {183, 14}, {185, 16}, {186, 17},
    {187, 16}, {191, 17}, {193, 16}, {206, 17}, {207, 18}, {208, 17}, {226, 18}, {227, 19}, {228, 18},
    {229, 19}, {232, 18}, {233, 19}, {234, 18}, {246, 19}, {247, 18}, {252, 19}, {256, 20},
};

static void table_rows(void **state)
{
    (void)state;
    size_t limit = 0;
    for (int64_t workers = 1; workers <= 256; workers++) {
        limit += workers > size_limits[limit][0];
        attn__cover cover;
        assert_int_equal(attn__cover_table(&cover, workers), ATTN_OK);
        assert_cover(&cover, workers);
        assert_true(cover.size <= size_limits[limit][1]);
        assert_true(cover.size >= counting_bound(workers));
        assert_string_equal(cover.origin, "table");
        attn__cover_free(&cover);
    }
}

static void table_ends(void **state)
{
    (void)state;
    attn__cover cover;
    assert_int_equal(attn__cover_table(&cover, 257), ATTN_EUNSUPPORTED);
    assert_null(cover.set);
    assert_int_equal(attn__cover_table(&cover, 0), ATTN_EUNSUPPORTED);
    assert_int_equal(attn__cover_table(&cover, INT64_MIN), ATTN_EUNSUPPORTED);
}

static void published_seven(void **state)
{
    (void)state;
    attn__cover cover;
    assert_int_equal(attn__cover_best(&cover, 7), ATTN_OK);
    assert_int_equal(cover.size, 3);
    assert_int_equal(cover.set[1], 1);
    assert_int_equal(cover.set[2], 3);
    attn__cover_free(&cover);
}

/* ---- closed forms ---- */

static bool prime_power(int64_t q)
{
    int64_t p = 2;
    while (q % p != 0) {
        p++;
    }
    while (q % p == 0) {
        q /= p;
    }
    return q == 1;
}

/* All prime powers up to 128, and no other number: perfect difference sets of q + 1 elements. */
static void singer_orders(void **state)
{
    (void)state;
    for (int64_t q = 2; q <= 128; q++) {
        int64_t workers = q * q + q + 1;
        attn__cover cover;
        attn_status status = attn__cover_singer(&cover, workers);
        if (!prime_power(q)) {
            assert_int_equal(status, ATTN_EUNSUPPORTED);
            continue;
        }
        assert_int_equal(status, ATTN_OK);
        assert_int_equal(cover.size, q + 1);
        assert_cover(&cover, workers);
        attn__cover_free(&cover);
    }
}

static void singer_large(void **state)
{
    static const int64_t orders[] = {243, 256, 343, 512, 625, 729, 997, 1024};
    (void)state;
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        int64_t workers = orders[i] * orders[i] + orders[i] + 1;
        attn__cover cover;
        assert_int_equal(attn__cover_singer(&cover, workers), ATTN_OK);
        assert_int_equal(cover.size, orders[i] + 1);
        assert_cover(&cover, workers);
        attn__cover_free(&cover);
    }
}

static void singer_refuses(void **state)
{
    static const int64_t others[] = {-7, 0, 1, 2, 3, 6, 8, 43, 111, 1058, INT64_C(1) << 40, INT64_MAX};
    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        attn__cover cover;
        assert_int_equal(attn__cover_singer(&cover, others[i]), ATTN_EUNSUPPORTED);
        assert_null(cover.set);
    }
}

static void check_wichmann(int64_t workers)
{
    attn__cover cover;
    assert_int_equal(attn__cover_wichmann(&cover, workers), ATTN_OK);
    assert_cover(&cover, workers);
    assert_true((double)cover.size <= 1.26 * sqrt((double)workers) + 2);
    attn__cover_free(&cover);
}

static void wichmann_small(void **state)
{
    (void)state;
    for (int64_t workers = 1; workers <= 3000; workers++) {
        check_wichmann(workers);
    }
}

static void wichmann_large(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        check_wichmann(pick(3001, 1000000));
    }
    check_wichmann(1000003);
}

/* The size alone, which is cheap, for every W up to 20000. */
static void wichmann_bound(void **state)
{
    (void)state;
    for (int64_t workers = 1; workers <= 20000; workers++) {
        attn__cover cover;
        assert_int_equal(attn__cover_wichmann(&cover, workers), ATTN_OK);
        assert_true((double)cover.size <= 1.26 * sqrt((double)workers) + 2);
        /* the ruler reaches half way around and stays within one turn */
        assert_true(cover.set[cover.size - 1] >= workers / 2);
        assert_true(cover.set[cover.size - 1] < workers);
        attn__cover_free(&cover);
    }
}

static void best_of_all(void **state)
{
    static const struct {
        int64_t workers;
        const char *origin;
    } cases[] = {{31, "table"},    {256, "table"},    {273, "singer"},
                 {1057, "singer"}, {274, "wichmann"}, {1000003, "wichmann"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attn__cover cover;
        assert_int_equal(attn__cover_best(&cover, cases[i].workers), ATTN_OK);
        assert_string_equal(cover.origin, cases[i].origin);
        assert_cover(&cover, cases[i].workers);
        attn__cover_free(&cover);
    }
    attn__cover cover;
    assert_int_equal(attn__cover_best(&cover, 0), ATTN_EINVAL);
    assert_int_equal(attn__cover_best(&cover, -1), ATTN_EINVAL);
    assert_int_equal(attn__cover_best(&cover, INT64_MAX), ATTN_EINVAL);
}

/* Bounded work: far below a second even when the machine is busy. */
static void best_is_quick(void **state)
{
    static const int64_t many[] = {1000003, 995007, 16777213, (INT64_C(1) << 30) - 1};
    (void)state;
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i++) {
        attn__cover cover;
        double begin = attn__now();
        assert_int_equal(attn__cover_best(&cover, many[i]), ATTN_OK);
        assert_int_equal(attn__cover_fit(&cover, 12345678901), ATTN_OK);
        assert_int_equal(attn__cover_fit_causal(&cover, 12345678901, 2, 2), ATTN_OK);
        assert_true(attn__now() - begin < 2.0);
        attn__cover_free(&cover);
    }
}

/* ---- the user's set ---- */

static void user_accepted(void **state)
{
    static const int64_t set[] = {13, -6, 9, 8}; /* mod 7: 6, 1, 2, 1; less the least: 0, 1, 5 */
    (void)state;
    attn__cover cover;
    assert_int_equal(attn__cover_user(&cover, 7, set, 4), ATTN_OK);
    assert_int_equal(cover.size, 3);
    assert_int_equal(cover.set[1], 1);
    assert_int_equal(cover.set[2], 5);
    assert_string_equal(cover.origin, "user");
    assert_cover(&cover, 7);
    attn__cover_free(&cover);
}

static void user_refused(void **state)
{
    static const int64_t set[] = {0, 1, 3};
    (void)state;
    attn__cover cover;
    assert_int_equal(attn__cover_user(&cover, 8, set, 3), ATTN_EINVAL); /* misses 4 */
    assert_null(cover.set);
    assert_non_null(strstr(attn_last_error(), "(4)"));
    assert_int_equal(attn__cover_user(&cover, 1000, set, 3), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "993 differences"));
    assert_non_null(strstr(attn_last_error(), "(4, 5, 6, "));
    assert_non_null(strstr(attn_last_error(), ", ...)"));
    assert_int_equal(attn__cover_user(&cover, 7, set, 0), ATTN_EINVAL);
    assert_int_equal(attn__cover_user(&cover, 7, NULL, 3), ATTN_EINVAL);
    assert_int_equal(attn__cover_user(&cover, 0, set, 3), ATTN_EINVAL);
    assert_int_equal(attn__cover_user(&cover, -4, set, 3), ATTN_EINVAL);
}

/* Random sets: what is missing is what a plain count finds missing. */
static void missing_random(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        int64_t workers = pick(1, 150);
        int64_t size = pick(1, 16);
        int64_t set[16];
        int64_t got[150];
        unsigned char seen[150] = {0};
        for (int64_t i = 0; i < size; i++) {
            set[i] = pick(0, workers - 1);
        }
        for (int64_t i = 0; i < size * size; i++) {
            seen[attn__mod(set[i / size] - set[i % size], workers)] = 1;
        }
        int64_t count = attn__cover_missing(workers, set, size, got, 150);
        int64_t at = 0;
        for (int64_t d = 0; d < workers; d++) {
            if (!seen[d]) {
                assert_true(at < count);
                assert_int_equal(got[at++], d);
            }
        }
        assert_int_equal(at, count);
        assert_int_equal(attn__cover_missing(workers, set, size, NULL, 0), count);
    }
}

/* ---- the fit ---- */

/* The most tokens of a quorum, worker by worker. */
static int64_t longest_by_force(const attn__cover *cover, int64_t tokens)
{
    int64_t longest = 0;
    for (int64_t rank = 0; rank < cover->workers; rank++) {
        int64_t held = 0;
        for (int64_t i = 0; i < cover->size; i++) {
            held += attn__group_count(tokens, cover->workers, (rank + cover->set[i]) % cover->workers);
        }
        longest = attn__max(longest, held);
    }
    return longest;
}

static void fit_random(void **state)
{
    (void)state;
    for (int round = 0; round < 1500; round++) {
        int64_t workers = pick(1, 300);
        int64_t tokens = pick(1, 5 * workers);
        attn__cover cover;
        assert_int_equal(attn__cover_best(&cover, workers), ATTN_OK);
        int64_t before = attn__cover_longest(&cover, tokens);
        assert_int_equal(before, longest_by_force(&cover, tokens));
        assert_int_equal(attn__cover_fit(&cover, tokens), ATTN_OK);
        assert_cover(&cover, workers);
        int64_t after = attn__cover_longest(&cover, tokens);
        assert_int_equal(after, longest_by_force(&cover, tokens));
        assert_true(after <= before);
        assert_int_equal(attn__cover_fit_causal(&cover, tokens, pick(0, 9), pick(0, 9)), ATTN_OK);
        assert_cover(&cover, workers);
        assert_int_equal(attn__cover_longest(&cover, tokens), after);
        attn__cover_free(&cover);
    }
}

/* The fit finds the least over all units, found here by trying them all. */
static void fit_is_least(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        int64_t workers = pick(4, 120);
        int64_t tokens = pick(1, 3 * workers);
        attn__cover table, multiple, fitted;
        assert_int_equal(attn__cover_table(&table, workers), ATTN_OK);
        assert_int_equal(attn__cover_table(&fitted, workers), ATTN_OK);
        assert_int_equal(attn__cover_table(&multiple, workers), ATTN_OK);
        int64_t least = INT64_MAX;
        for (int64_t unit = 1; unit < workers; unit++) {
            for (int64_t i = 0; i < table.size; i++) {
                multiple.set[i] = table.set[i] * unit % workers;
            }
            if (attn__cover_missing(workers, multiple.set, multiple.size, NULL, 0) == 0) {
                least = attn__min(least, longest_by_force(&multiple, tokens));
            }
        }
        assert_int_equal(attn__cover_fit(&fitted, tokens), ATTN_OK);
        assert_true(attn__cover_longest(&fitted, tokens) <= least);
        attn__cover_free(&table);
        attn__cover_free(&multiple);
        attn__cover_free(&fitted);
    }
}

/* The published longest subsequences, or less. */
static void fit_published(void **state)
{
    static const int64_t tokens[9] = {10000, 20000, 30000, 40000, 45000, 46000, 47000, 48000, 49000};
    static const int64_t limits[4][10] = {
        {4, 7500, 15000, 22500, 30000, 33750, 34500, 35250, 36000, 36750},
        {7, 4287, 8572, 12858, 17144, 19287, 19715, 20144, 20572, 21000},
        {8, 5000, 10000, 15000, 20000, 22500, 23000, 23500, 24000, 24500},
        {31, 1937, 3873, 5808, 7743, 8711, 8904, 9099, 9292, 9486},
    };
    (void)state;
    for (int row = 0; row < 4; row++) {
        for (int i = 0; i < 9; i++) {
            attn__cover cover;
            assert_int_equal(attn__cover_best(&cover, limits[row][0]), ATTN_OK);
            assert_int_equal(attn__cover_fit(&cover, tokens[i]), ATTN_OK);
            assert_true(attn__cover_longest(&cover, tokens[i]) <= limits[row][i + 1]);
            attn__cover_free(&cover);
        }
    }
}

static void fit_leaves_users_set(void **state)
{
    static const int64_t set[] = {0, 1, 2, 3, 4};
    (void)state;
    attn__cover cover;
    assert_int_equal(attn__cover_user(&cover, 9, set, 5), ATTN_OK);
    assert_int_equal(attn__cover_fit(&cover, 13), ATTN_OK);
    assert_memory_equal(cover.set, set, sizeof set);
    attn__cover_free(&cover);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table_rows),      cmocka_unit_test(table_ends),
        cmocka_unit_test(published_seven), cmocka_unit_test(singer_orders),
        cmocka_unit_test(singer_large),    cmocka_unit_test(singer_refuses),
        cmocka_unit_test(wichmann_small),  cmocka_unit_test(wichmann_large),
        cmocka_unit_test(wichmann_bound),  cmocka_unit_test(best_of_all),
        cmocka_unit_test(best_is_quick),   cmocka_unit_test(user_accepted),
        cmocka_unit_test(user_refused),    cmocka_unit_test(missing_random),
        cmocka_unit_test(fit_random),      cmocka_unit_test(fit_is_least),
        cmocka_unit_test(fit_published),   cmocka_unit_test(fit_leaves_users_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
