/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_backward.c - the gradients of every kernel that this machine can run against an fp64 answer, as
 * test_kernel.c does it for the forward.
 *
 * ATTN_TEST_CASES=N sets the number of random problems.
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

#include "gradient_case.h"

#define FOR_EACH_KERNEL(g, row) for (const attn__kernel *const *row = gradient_rows(g); *row != NULL; row++)

static void run_all(gradient_case *g)
{
    FOR_EACH_KERNEL(g, row)
    {
        gradient_case_reset(g);
        gradient_case_run(g, *row);
        gradient_case_compare(g, *row);
    }
}

static void open_solve_run(gradient_case *g, uint64_t *seed)
{
    gradient_case_open(g, seed);
    gradient_case_solve(g);
    run_all(g);
    gradient_case_close(g);
}

static int64_t random_cases(int64_t usual)
{
    const char *text = getenv("ATTN_TEST_CASES");
    return text == NULL ? usual : strtoll(text, NULL, 10);
}

static void test_random(void **state)
{
    (void)state;
    for (int64_t i = 0, count = random_cases(250); i < count; i++) {
        uint64_t seed = (uint64_t)i + 500;
        gradient_case g = gradient_case_random(&seed, i % 10 == 0 ? 1000 : 150);
        open_solve_run(&g, &seed);
    }
}

/* Keys and rows one below, at and above every micro-kernel, panel and tile size. */
static void test_edges(void **state)
{
    static const int64_t edges[] = {1,   2,   3,   4,   5,   6,   7,   8,   9,   11,  12,  13,
                                    15,  16,  17,  23,  24,  25,  31,  32,  33,  47,  48,  49,
                                    63,  64,  65,  71,  72,  73,  95,  96,  97,  127, 128, 129,
                                    143, 144, 145, 191, 192, 193, 255, 256, 257, 288, 289};
    const size_t count = sizeof edges / sizeof edges[0];
    uint64_t seed = 1;
    (void)state;
    for (size_t i = 0; i < count; i++) {
        gradient_case few = gradient_case_plain(3, edges[i], 10, false);
        gradient_case causal = gradient_case_plain(edges[i], edges[count - 1 - i], 16, true);
        gradient_case many = gradient_case_plain(edges[i], 50, 5, i % 2 == 0);
        few.base.dtype = (attn_dtype)(i % 3), causal.base.dtype = (attn_dtype)((i + 1) % 3);
        many.base.dtype = (attn_dtype)((i + 2) % 3);
        open_solve_run(&few, &seed);
        open_solve_run(&causal, &seed);
        open_solve_run(&many, &seed);
    }
}

static void test_dims(void **state)
{
    uint64_t seed = 2;
    (void)state;
    for (int64_t dim = 1; dim <= 512; dim += dim < 70 ? 1 : 37) {
        gradient_case g = gradient_case_plain(18, 45, dim, dim % 2 == 0);
        g.base.dim_v = check_between(&seed, 1, 512);
        g.base.dtype = (attn_dtype)(dim % 3);
        open_solve_run(&g, &seed);
    }
    gradient_case g = gradient_case_plain(130, 130, 512, true);
    open_solve_run(&g, &seed);
}

/* Bands of a few keys, where most of a tile is masked. */
static void test_windows(void **state)
{
    uint64_t seed = 3;
    (void)state;
    for (int64_t width = 0; width < 80; width = width * 3 / 2 + 1) {
        gradient_case g = gradient_case_plain(150, 150, 20, true);
        g.base.lo = -width, g.base.dtype = (attn_dtype)(width % 3);
        open_solve_run(&g, &seed);
        g = gradient_case_plain(150, 150, 20, true);
        g.base.lo = -width / 2, g.base.hi = width - width / 2;
        g.base.dtype = (attn_dtype)((width + 1) % 3);
        open_solve_run(&g, &seed);
    }
}

/* One NaN or inf in q, k, v or dO: it must reach what it belongs to and nothing else. */
static void poison_one(gradient_case *g, uint64_t *seed)
{
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    kernel_case *c = &g->base;
    const double x = poisons[check_between(seed, 0, 2)];
    const int64_t s = check_between(seed, 0, attn__max(0, c->span_count - 1));
    const bool keys = c->span_count > 0 && c->span_keys[s] > 0;
    const int64_t row = check_between(seed, 0, c->rows - 1);
    const int64_t key = keys ? check_between(seed, 0, c->span_keys[s] - 1) : 0;
    switch (check_between(seed, 0, 5)) {
    case 0:
        kernel_set(c, &c->q, row, check_between(seed, 0, c->dim_qk - 1), x);
        break;
    case 1:
    case 2:
        kernel_set(c, &g->dout, row, check_between(seed, 0, c->dim_v - 1), x);
        break;
    case 3:
    case 4:
        if (keys) {
            kernel_set(c, &c->k[s], key, check_between(seed, 0, c->dim_qk - 1), x);
        }
        break;
    default:
        if (keys) {
            kernel_set(c, &c->v[s], key, check_between(seed, 0, c->dim_v - 1), x);
        }
    }
}

static void test_poisoned(void **state)
{
    (void)state;
    for (int64_t i = 0, count = random_cases(300); i < count; i++) {
        uint64_t seed = (uint64_t)i + 2000000;
        gradient_case g = gradient_case_random(&seed, 120);
        g.base.dim_qk = check_between(&seed, 1, 20);
        g.base.dim_v = check_between(&seed, 1, 40);
        gradient_case_open(&g, &seed);
        for (int64_t n = check_between(&seed, 1, 6); n > 0; n--) {
            poison_one(&g, &seed);
        }
        gradient_case_solve(&g);
        run_all(&g);
        gradient_case_close(&g);
    }
}

/* Causal: NaN in what the first half of the rows does not see, or in the rows that do not see the last keys.
 */
static void test_masked_nan(void **state)
{
    uint64_t seed = 4;
    (void)state;
    for (int64_t n = 4; n < 300; n = n * 3 / 2) {
        for (int kind = 0; kind < 2; kind++) {
            gradient_case g = gradient_case_plain(n, n, 12, true);
            g.base.dtype = (attn_dtype)(n % 3);
            gradient_case_open(&g, &seed);
            for (int64_t j = n / 2; j < n; j++) {
                for (int64_t d = 0; d < 12; d++) {
                    kernel_set(&g.base, kind == 0 ? &g.base.k[0] : &g.base.q, kind == 0 ? j : n - 1 - j, d,
                               NAN);
                    kernel_set(&g.base, kind == 0 ? &g.base.v[0] : &g.dout, kind == 0 ? j : n - 1 - j, d,
                               j % 2 == 0 ? NAN : INFINITY);
                }
            }
            gradient_case_solve(&g);
            run_all(&g);
            /* The case is what it says: a first row, or a last key, is whole. */
            assert_true(isnan(g.dq.want[kind == 0 ? (n - 1) * 12 : 0]));
            assert_true(isfinite(kind == 0 ? g.dq.want[0] : g.dk[0].want[(n - 1) * 12]));
            gradient_case_close(&g);
        }
    }
}

static void test_no_keys(void **state)
{
    uint64_t seed = 6;
    (void)state;
    gradient_case none = gradient_case_plain(20, 0, 8, false);
    open_solve_run(&none, &seed);
    none = gradient_case_plain(20, 0, 8, false);
    none.base.span_count = 0;
    open_solve_run(&none, &seed);
    gradient_case above = gradient_case_plain(40, 10, 8, true); /* bottom-right: 30 rows see nothing */
    above.base.first = -30;
    open_solve_run(&above, &seed);
    gradient_case empty = gradient_case_plain(40, 40, 8, true);
    empty.base.lo = 5;
    empty.base.hi = 4;
    open_solve_run(&empty, &seed);
}

/* Rows whose lse = -inf although the mask lets them see keys: their scores are all -inf.  They give nothing,
 * and what they hold does not matter. */
static void test_blind_rows(void **state)
{
    uint64_t seed = 7;
    (void)state;
    for (int64_t n = 3; n < 120; n += 29) {
        gradient_case g = gradient_case_plain(n, n, 8, n % 2 == 0);
        g.base.dtype = (attn_dtype)(n / 29 % 3);
        gradient_case_open(&g, &seed);
        for (int64_t j = 0; j < n; j++) {
            kernel_set(&g.base, &g.base.k[0], j, 0, 1.0);
        }
        for (int64_t i = 0; i < n; i += 3) {
            kernel_set(&g.base, &g.base.q, i, 0, -INFINITY);
            kernel_set(&g.base, &g.dout, i, 0, NAN);
        }
        gradient_case_solve(&g);
        assert_true(g.lse[0] == -INFINITY && isfinite(g.lse[1]));
        run_all(&g);
        gradient_case_close(&g);
    }
    for (uint64_t i = 0; i < 60; i++) { /* by decree, and NaN anywhere */
        seed = i + 7000;
        gradient_case g = gradient_case_random(&seed, 100);
        g.base.dim_qk = check_between(&seed, 1, 20);
        g.mute = check_between(&seed, 1, 4);
        gradient_case_open(&g, &seed);
        for (int64_t n = check_between(&seed, 1, 4); n > 0; n--) {
            poison_one(&g, &seed);
        }
        gradient_case_solve(&g);
        run_all(&g);
        gradient_case_close(&g);
    }
}

/* Scores far apart and far from 0. */
static void test_huge(void **state)
{
    (void)state;
    for (int64_t n = 10; n < 400; n += 39) {
        uint64_t seed = (uint64_t)n;
        gradient_case g = gradient_case_plain(40, n, 16, n % 2 == 0);
        g.base.scale = n % 3 == 0 ? 20.0 : -3.0;
        open_solve_run(&g, &seed);
        gradient_case low = gradient_case_plain(40, n, 16, n % 2 == 0);
        gradient_case_open(&low, &seed);
        for (int64_t j = 0; j < n; j++) {
            kernel_set(&low.base, &low.base.k[0], j, 0, -40.0);
        }
        for (int64_t i = 0; i < 40; i++) {
            kernel_set(&low.base, &low.base.q, i, 0, 100.0);
        }
        gradient_case_solve(&low);
        assert_true(low.base.want_lse[39] < -900.0);
        run_all(&low);
        gradient_case_close(&low);
    }
}

/* Scores so large that lse as fp32 is off by more than a key's weight: weights may be wrong, but never more
 * than 1, and gradients are numbers. */
static void test_beyond(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 200; n += 33) {
        uint64_t seed = 8;
        gradient_case g = gradient_case_plain(20, n, 8, false);
        g.base.scale = 1e30;
        gradient_case_open(&g, &seed);
        gradient_case_solve(&g);
        FOR_EACH_KERNEL(&g, row)
        {
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            for (int64_t j = 0; j < n * 8; j++) {
                float x = ((float *)g.dv[0].buffer.data)[j / 8 * g.dv[0].token + j % 8];
                assert_true(fabs((double)x) <= g.slope.before + 20.0 * g.slope.dout);
            }
        }
        gradient_case_close(&g);
    }
}

/* An lse far below the scores cannot be; the weights stay at 1 then. */
static void test_cut_off(void **state)
{
    uint64_t seed = 10;
    gradient_case g = gradient_case_plain(20, 70, 8, true);
    (void)state;
    gradient_case_open(&g, &seed);
    gradient_case_solve(&g);
    FOR_EACH_KERNEL(&g, row)
    {
        for (int64_t i = 0; i < 20; i++) {
            g.lse[i] = -300.0f;
        }
        gradient_case_reset(&g);
        gradient_case_run(&g, *row);
        for (int64_t j = 0; j < 70; j++) {
            for (int64_t d = 0; d < 8; d++) {
                double want = (double)g.dv[0].before[j * 8 + d];
                for (int64_t i = 0; i < 20; i++) {
                    want += kernel_sees(&g.base, i, j) ? kernel_get(&g.base, &g.dout, i, d) : 0.0;
                }
                double x = (double)((float *)g.dv[0].buffer.data)[j * g.dv[0].token + d];
                assert_true(fabs(x - want) <= 0x1p-24 * 21.0 * (g.slope.before + 20.0 * g.slope.dout));
            }
        }
    }
    gradient_case_close(&g);
}

/* Query heads that share a kv head add to the same dK and dV. */
static void test_heads(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 20; i++) {
        uint64_t first = i + 900;
        const gradient_case plan = gradient_case_random(&first, 120);
        FOR_EACH_KERNEL(&plan, row)
        {
            uint64_t seed = first;
            gradient_case g = plan;
            gradient_case_open(&g, &seed);
            for (int head = 0; head < 4; head++) {
                if (head > 0) {
                    gradient_case_next_head(&g, &seed);
                }
                gradient_case_solve(&g);
                gradient_case_run(&g, *row);
                gradient_case_compare(&g, *row);
            }
            gradient_case_close(&g);
        }
    }
}

/* ---- accuracy ---- */

static double relative_error(const gradient_array *a)
{
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < a->rows * a->dim; i++) {
        double x = (double)((const float *)a->buffer.data)[i / a->dim * a->token + i % a->dim];
        error += (x - a->want[i]) * (x - a->want[i]);
        norm += a->want[i] * a->want[i];
    }
    return sqrt(error / norm);
}

static void clear(gradient_array *a)
{
    for (int64_t i = 0; i < a->rows * a->dim; i++) {
        a->before[i] = 0.0f;
        a->want[i] = 0.0;
    }
}

/* What good implementations reach; P and dS rounded to bf16 are off by up to 2^-8, evenly: r / sqrt(3). */
static double gate(const attn__kernel *kernel, attn_dtype dtype)
{
    return 7e-7 + (kernel->rounds_weights && dtype == ATTN_BF16 ? 0x1p-8 / sqrt(3.0) : 0.0);
}

/* The way users go: forward, delta and backward of one kernel, gradients from 0. */
static void test_accuracy(void **state)
{
    static const int64_t dims[] = {64, 128};
    (void)state;
    for (size_t i = 0; i < 12; i++) {
        uint64_t seed = 8 + i;
        gradient_case g = gradient_case_plain(600, 1000, dims[i / 2 % 2], i % 2 != 0);
        kernel_case *c = &g.base;
        c->dtype = (attn_dtype)(i / 4);
        gradient_case_open(&g, &seed);
        clear(&g.dq), clear(&g.dk[0]), clear(&g.dv[0]);
        gradient_case_solve(&g);
        FOR_EACH_KERNEL(&g, row)
        {
            kernel_case_run(c, *row);
            const attn__rows o = {c->o.data, ATTN_F32, c->o_stride, 1};
            const attn__rows dout = {g.dout.base, c->dtype, g.dout.token, g.dout.dim};
            attn__delta(g.delta, &o, &dout, c->rows, c->dim_v);
            memcpy(g.lse, c->lse.data, c->lse.bytes);
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            const double dq = relative_error(&g.dq), dk = relative_error(&g.dk[0]);
            const double dv = relative_error(&g.dv[0]);
            const double most = gate(*row, c->dtype);
            print_message("%-16s %-4s d %3lld %-6s dq %.2g dk %.2g dv %.2g\n", (*row)->name,
                          attn_dtype_name(c->dtype), (long long)c->dim_v, i % 2 != 0 ? "causal" : "full", dq,
                          dk, dv);
            assert_true(dq <= most && dk <= most && dv <= most);
        }
        gradient_case_close(&g);
    }
}

/* ---- the table ---- */

static void test_table(void **state)
{
    const attn__shape shape = {.dim_qk = 64, .dim_v = 64, .rows = 100, .keys = 100, .backward = true};
    const attn__kernel *kernel = NULL;
    (void)state;
    assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_OK);
    assert_non_null(kernel->backward);
    assert_int_equal(attn__kernel_choose(&kernel, &shape, "reference"), ATTN_OK);
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        const bool has = (*row)->backward != NULL;
        assert_true(((*row)->backward_tile_q != NULL) == has && ((*row)->backward_tile_k != NULL) == has &&
                    ((*row)->backward_step != NULL) == has && ((*row)->backward_scratch != NULL) == has);
        if (attn__kernel_refusal(*row, &shape) == NULL) { /* else its code may not run on this CPU */
            assert_true((*row)->backward_tile_k(&shape) >= 1 && (*row)->backward_step(&shape) >= 1);
        }
        if (!has) {
            assert_int_equal(attn__kernel_choose(&kernel, &shape, (*row)->name), ATTN_EUNSUPPORTED);
            assert_non_null(strstr(attn_last_error(), "gradients"));
        }
    }
    const attn__shape large = {
        .dim_qk = 512, .dim_v = 512, .rows = INT64_MAX / 8, .keys = INT64_MAX / 8, .backward = true};
    assert_int_equal(attn__kernel_choose(&kernel, &large, NULL), ATTN_OK);
    assert_true(kernel->backward_scratch(&large) < 4u << 20); /* whatever the number of keys */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),   cmocka_unit_test(test_edges),      cmocka_unit_test(test_dims),
        cmocka_unit_test(test_windows),  cmocka_unit_test(test_poisoned),   cmocka_unit_test(test_masked_nan),
        cmocka_unit_test(test_no_keys),  cmocka_unit_test(test_blind_rows), cmocka_unit_test(test_huge),
        cmocka_unit_test(test_beyond),   cmocka_unit_test(test_heads),      cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_accuracy), cmocka_unit_test(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
