/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_scores.c - every kernel that this machine can run against an fp64 answer, with scores that
 * provoke: all equal, huge, low, rising and falling from key to key.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernel_case.h"

static void test_all_equal(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 500; n = n * 2 + 1) {
        uint64_t seed = 4;
        kernel_case c = kernel_case_plain(20, n, 24, false);
        kernel_case_open(&c, &seed);
        for (int64_t j = 0; j < n; j++) {
            for (int64_t d = 0; d < 24; d++) {
                kernel_set(&c, &c.k[0], j, d, kernel_get(&c, &c.k[0], 0, d));
            }
        }
        kernel_case_solve(&c);
        kernel_case_try(&c);
        kernel_case_close(&c);
    }
}

/* Scores far apart: the row of the greatest key comes out, and lse is its score. */
static void huge(double size, double scale, int64_t winner)
{
    uint64_t seed = 5;
    kernel_case c = kernel_case_plain(3, 200, 8, false);
    c.scale = scale;
    kernel_case_open(&c, &seed);
    for (int64_t j = 0; j < 200; j++) {
        for (int64_t d = 0; d < 8; d++) {
            kernel_set(&c, &c.k[0], j, d,
                       d > 0 ? 0.0 : size * (j == winner ? 1.0 : -1.0 - (double)j / 200.0));
        }
    }
    for (int64_t i = 0; i < 3; i++) {
        kernel_set(&c, &c.q, i, 0, scale < 0.0 ? -size : size);
    }
    KERNEL_CASE_ROWS(&c, row)
    {
        kernel_case_run(&c, *row);
        for (int64_t i = 0; i < 3; i++) {
            const float *o = (const float *)c.o.data + i * c.o_stride;
            double lse = (double)((const float *)c.lse.data)[i], want = fabs(scale) * size * size;
            assert_true(fabs(lse - want) <= 8.0 * 0x1p-24 * want);
            for (int64_t d = 0; d < 8; d++) {
                assert_true((double)o[d] == kernel_get(&c, &c.v[0], winner, d));
            }
        }
    }
    kernel_case_close(&c);
}

static void test_huge(void **state)
{
    (void)state;
    for (int64_t winner = 0; winner < 200; winner += 33) {
        huge(100.0, 1.0, winner); /* 1e4 */
        huge(1e15, 1.0, winner);  /* 1e30 */
        huge(1e15, -1.0, winner);
        huge(1e18, 0.5, winner); /* 5e35: the differences overflow to no more than inf */
    }
    for (int64_t n = 10; n < 400; n += 77) { /* moderate, against the answer */
        uint64_t seed = (uint64_t)n;
        kernel_case c = kernel_case_plain(40, n, 16, n % 2 == 0);
        c.scale = n % 3 == 0 ? 20.0 : -3.0;
        kernel_case_open_and_try(&c, &seed);
    }
}

/* All scores far below 0: a maximum that began at 0 would make every weight 0. */
static void test_all_low(void **state)
{
    uint64_t seed = 9;
    (void)state;
    for (int64_t n = 1; n < 300; n += 37) {
        kernel_case c = kernel_case_plain(20, n, 16, n % 2 == 0);
        kernel_case_open(&c, &seed);
        for (int64_t j = 0; j < n; j++) {
            kernel_set(&c, &c.k[0], j, 0, -40.0);
        }
        for (int64_t i = 0; i < 20; i++) {
            kernel_set(&c, &c.q, i, 0, 100.0);
        }
        kernel_case_solve(&c);
        assert_true(c.want_lse[19] < -900.0);
        kernel_case_try(&c);
        kernel_case_close(&c);
    }
}

/* Scores that rise or fall evenly, in all by `slopes`: sums of earlier keys must shrink with the maximum,
 * where they still count and where they are gone. */
static void test_slopes(void **state)
{
    static const double slopes[] = {2.0, 15.0, 40.0, 800.0, -15.0};
    (void)state;
    for (int i = 0; i < 30; i++) {
        uint64_t seed = (uint64_t)i;
        kernel_case c = kernel_case_plain(70, 900, 24, i % 2 == 0);
        c.dtype = (attn_dtype)(i % 3);
        c.scale = i < 15 ? 0.1 : -0.1;
        kernel_case_open(&c, &seed);
        for (int64_t j = 0; j < 900; j++) {
            kernel_set(&c, &c.k[0], j, 0, slopes[i % 5] * (double)j / 900.0);
        }
        for (int64_t row = 0; row < 70; row++) {
            kernel_set(&c, &c.q, row, 0, 1.0 / c.scale);
        }
        kernel_case_solve(&c);
        kernel_case_try(&c);
        kernel_case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_equal),
        cmocka_unit_test(test_huge),
        cmocka_unit_test(test_all_low),
        cmocka_unit_test(test_slopes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
