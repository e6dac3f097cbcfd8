/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quorum_search.c - the search for interest sets, and every allocation of the cover functions failed in
 * turn.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "quorum_case.h"

static void search_finds(void **state)
{
    static const int64_t cases[][2] = {{1, 1},  {2, 2},  {3, 2},  {7, 3},   {20, 6},
                                       {31, 6}, {57, 8}, {64, 9}, {93, 11}, {5, 9}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t first[16];
        int64_t again[16];
        int64_t found = -1;
        assert_int_equal(attn__cover_search(cases[i][0], cases[i][1], 200, 5, first, &found), ATTN_OK);
        assert_int_equal(found, attn__min(cases[i][0], cases[i][1]));
        attn__cover cover = {.workers = cases[i][0], .size = found, .set = first};
        assert_cover(&cover, cases[i][0]);
        /* another time limit, the same seed: the same set */
        assert_int_equal(attn__cover_search(cases[i][0], cases[i][1], 100, 5, again, &found), ATTN_OK);
        assert_memory_equal(first, again, (size_t)found * sizeof first[0]);
    }
}

static void search_refuses(void **state)
{
    (void)state;
    int64_t set[16];
    int64_t found = -1;
    assert_int_equal(attn__cover_search(31, 5, 1, 0, set, &found), ATTN_EINVAL); /* 5 * 4 + 1 < 31 */
    assert_int_equal(found, 0);
    assert_int_equal(attn__cover_search(31, 0, 1, 0, set, &found), ATTN_EINVAL); /* 6 is least */
    assert_int_equal(attn__cover_search(0, 1, 1, 0, set, &found), ATTN_EINVAL);
    assert_int_equal(attn__cover_search(31, -6, 1, 0, set, &found), ATTN_EINVAL);
    assert_int_equal(attn__cover_search(31, 6, -1, 0, set, &found), ATTN_EINVAL);
    assert_int_equal(attn__cover_search(31, 6, (double)NAN, 0, set, &found), ATTN_EINVAL);
    assert_int_equal(attn__cover_search(31, 6, (double)INFINITY, 0, set, &found), ATTN_EINVAL);
}

/* 5 elements have 20 differences, but no set covers Z_20 with them: the time runs out, and is kept. */
static void search_gives_up(void **state)
{
    (void)state;
    int64_t set[5];
    int64_t found = -1;
    double begin = attn__now();
    assert_int_equal(attn__cover_search(20, 5, 0.2, 1, set, &found), ATTN_OK);
    assert_int_equal(found, 0);
    assert_true(attn__now() - begin < 5);
}

/* ---- memory ---- */

/* Every allocation failed in turn, for a chain of calls that uses them all. */
static attn_status chain(int64_t workers)
{
    static const int64_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    int64_t set[64];
    int64_t found;
    attn__cover cover = {0};
    attn_status status = attn__cover_best(&cover, workers);
    if (status == ATTN_OK) {
        status = attn__cover_fit(&cover, 3 * workers / 2);
    }
    if (status == ATTN_OK) {
        status = attn__cover_fit_causal(&cover, 3 * workers / 2, 2, 1);
    }
    attn__cover_free(&cover);
    if (status == ATTN_OK) {
        status = attn__cover_user(&cover, 13, all, 8);
        attn__cover_free(&cover);
    }
    return status == ATTN_OK ? attn__cover_search(20, 6, 100, 3, set, &found) : status;
}

static void memory_fails(void **state)
{
    static const int64_t sizes[] = {31, 200, 273, 300, 1057};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t before = attn__memory_now();
        attn_status status = ATTN_ENOMEM;
        int64_t allowed = 0;
        for (; status != ATTN_OK; allowed++) {
            attn__memory_fail_after(allowed);
            status = chain(sizes[i]);
            attn__memory_fail_after(-1);
            assert_true(status == ATTN_OK || status == ATTN_ENOMEM);
            assert_int_equal(attn__memory_now(), before);
        }
        assert_true(allowed > 4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(search_finds),
        cmocka_unit_test(search_refuses),
        cmocka_unit_test(search_gives_up),
        cmocka_unit_test(memory_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
