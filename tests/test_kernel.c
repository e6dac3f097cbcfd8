/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel.c - every kernel that this machine can run against an fp64 answer: random problems between
 * guard pages, sizes around every tile edge, NaN and inf, rows without keys.  Scores: test_kernel_scores.c.
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

#include "kernel_case.h"

static int64_t random_cases(int64_t usual)
{
    const char *text = getenv("ATTN_TEST_CASES");
    return text == NULL ? usual : strtoll(text, NULL, 10);
}

static void test_random(void **state)
{
    (void)state;
    for (int64_t i = 0, count = random_cases(250); i < count; i++) {
        uint64_t seed = (uint64_t)i;
        kernel_case c = kernel_case_random(&seed, i % 10 == 0 ? 1000 : 150);
        kernel_case_open_and_try(&c, &seed);
    }
}

/* Keys and rows one below, at and above every micro-kernel, panel and tile size. */
static void test_edges(void **state)
{
    static const int64_t edges[] = {1,  2,  3,   4,   5,   6,   7,   8,   9,   11,  12,  13, 15, 16,
                                    17, 23, 24,  25,  31,  32,  33,  47,  48,  49,  63,  64, 65, 95,
                                    96, 97, 127, 128, 129, 191, 192, 193, 288, 383, 384, 385};
    const size_t count = sizeof edges / sizeof edges[0];
    uint64_t seed = 1;
    (void)state;
    for (size_t i = 0; i < count; i++) {
        kernel_case few = kernel_case_plain(3, edges[i], 10, false);
        kernel_case causal = kernel_case_plain(edges[i], edges[count - 1 - i], 16, true);
        kernel_case many = kernel_case_plain(edges[i], 50, 5, i % 2 == 0);
        few.dtype = (attn_dtype)(i % 3), causal.dtype = (attn_dtype)((i + 1) % 3);
        many.dtype = (attn_dtype)((i + 2) % 3);
        kernel_case_open_and_try(&few, &seed);
        kernel_case_open_and_try(&causal, &seed);
        kernel_case_open_and_try(&many, &seed);
    }
}

static void test_dims(void **state)
{
    uint64_t seed = 2;
    (void)state;
    for (int64_t dim = 1; dim <= 512; dim += dim < 40 ? 1 : 37) {
        kernel_case c = kernel_case_plain(18, 45, dim, dim % 2 == 0);
        c.dim_v = check_between(&seed, 1, 512);
        c.dtype = (attn_dtype)(dim % 3);
        kernel_case_open_and_try(&c, &seed);
    }
    kernel_case c = kernel_case_plain(130, 130, 512, true);
    kernel_case_open_and_try(&c, &seed);
}

/* One NaN or inf in q, k or v, also where only some rows see it: it must reach these and no other. */
static void poison_one(kernel_case *c, uint64_t *seed)
{
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    const double x = poisons[check_between(seed, 0, 2)];
    const int64_t s = check_between(seed, 0, attn__max(0, c->span_count - 1));
    switch (check_between(seed, 0, 4)) {
    case 0:
        kernel_set(c, &c->q, check_between(seed, 0, c->rows - 1), check_between(seed, 0, c->dim_qk - 1), x);
        break;
    case 1:
    case 2:
        if (c->span_count > 0 && c->span_keys[s] > 0) {
            kernel_set(c, &c->k[s], check_between(seed, 0, c->span_keys[s] - 1),
                       check_between(seed, 0, c->dim_qk - 1), x);
        }
        break;
    default:
        if (c->span_count > 0 && c->span_keys[s] > 0) {
            kernel_set(c, &c->v[s], check_between(seed, 0, c->span_keys[s] - 1),
                       check_between(seed, 0, c->dim_v - 1), x);
        }
    }
}

static void test_poisoned(void **state)
{
    (void)state;
    for (int64_t i = 0, count = random_cases(200); i < count; i++) {
        uint64_t seed = (uint64_t)i + 1000000;
        kernel_case c = kernel_case_random(&seed, 120);
        c.dim_qk = check_between(&seed, 1, 20);
        c.dim_v = check_between(&seed, 1, 40);
        kernel_case_open(&c, &seed);
        for (int64_t n = check_between(&seed, 1, 6); n > 0; n--) {
            poison_one(&c, &seed);
        }
        kernel_case_solve(&c);
        kernel_case_try(&c);
        kernel_case_close(&c);
    }
}

/* Rows that begin at 0 in place of `first`, as those of a sequence do: the band moves. */
static void begin_at_zero(kernel_case *c)
{
    c->lo += c->first, c->hi += c->first;
    c->first = 0;
}

/* Every count of rows that paths of their own take, and some beyond, with every dtype and kind of mask, whole
 * vectors of dense dims in a quarter of the cases, and NaN and inf in half of them. */
static void test_few(void **state)
{
    static const struct {
        int64_t lo, hi;
    } bands[] = {{-500, 500}, {-500, 0}, {-30, 0}, {-3, 2}};
    (void)state;
    for (int64_t rows = 1; rows <= 34; rows++) {
        for (uint64_t i = 0; i < 24; i++) {
            uint64_t seed = (uint64_t)rows * 100 + i;
            kernel_case c = kernel_case_random(&seed, 0);
            c.dtype = (attn_dtype)(i % 3);
            c.lo = bands[i / 3 % 4].lo, c.hi = bands[i / 3 % 4].hi;
            c.dim_qk = check_between(&seed, 1, 150), c.dim_v = check_between(&seed, 1, 150);
            c.rows = rows, c.first = check_between(&seed, 0, 100);
            c.span_count = 2;
            c.span_first[0] = check_between(&seed, 0, 20), c.span_keys[0] = check_between(&seed, 0, 90);
            c.span_first[1] = 130, c.span_keys[1] = check_between(&seed, 1, 40);
            if (i % 4 == 1) {
                c.dim_qk = 32 * check_between(&seed, 1, 4), c.dim_v = 32 * check_between(&seed, 1, 4);
                c.k_layout = c.v_layout = LAYOUT_DENSE;
            }
            if (i % 5 > 1) {
                begin_at_zero(&c);
            }
            kernel_case_open(&c, &seed);
            for (int64_t n = i < 12 ? 0 : check_between(&seed, 1, 4); n > 0; n--) {
                poison_one(&c, &seed);
            }
            kernel_case_solve(&c);
            kernel_case_try(&c);
            kernel_case_close(&c);
        }
    }
}

/* As many rows as lie along the dims where K and V are long, tiles of whole and of cut blocks among them. */
static void test_few_long(void **state)
{
    static const int64_t los[] = {-2000, -2000, -400};
    (void)state;
    for (int64_t rows = 3; rows <= 36; rows += rows < 12 ? 1 : 3) {
        for (uint64_t i = 0; i < 3; i++) {
            uint64_t seed = (uint64_t)rows * 10 + i;
            kernel_case c = kernel_case_random(&seed, 0);
            c.dtype = (attn_dtype)((uint64_t)rows % 3);
            c.lo = los[i], c.hi = i == 0 ? 2000 : 0;
            c.dim_qk = check_between(&seed, 400, 512), c.dim_v = check_between(&seed, 400, 512);
            c.rows = rows, c.first = 1200 - rows;
            c.span_count = 2;
            c.span_first[0] = 0, c.span_keys[0] = check_between(&seed, 700, 800);
            c.span_first[1] = 900, c.span_keys[1] = check_between(&seed, 250, 300);
            begin_at_zero(&c);
            kernel_case_open(&c, &seed);
            if (i == 1) {
                poison_one(&c, &seed);
            }
            kernel_case_solve(&c);
            kernel_case_try(&c);
            kernel_case_close(&c);
        }
    }
}

/* Scores that rise or fall from key to key, by another rate in each row, so that each maximum moves at other
 * keys than its neighbours'. */
static void test_moving_maxima(void **state)
{
    (void)state;
    for (int64_t rows = 1; rows <= 40; rows++) {
        for (uint64_t i = 0; i < 3; i++) {
            uint64_t seed = (uint64_t)rows * 3 + i;
            kernel_case c = kernel_case_plain(rows, 600, 64, false);
            c.dtype = (attn_dtype)i;
            begin_at_zero(&c);
            kernel_case_open(&c, &seed);
            for (int64_t row = 0; row < rows; row++) {
                kernel_set(&c, &c.q, row, 0, (double)(row * 7 % 11 - 5));
            }
            for (int64_t j = 0; j < 600; j++) {
                kernel_set(&c, &c.k[0], j, 0, 0.25 * (double)j);
            }
            kernel_case_solve(&c);
            kernel_case_try(&c);
            kernel_case_close(&c);
        }
    }
}

/* Causal, NaN in every key and value that the first half of the rows does not see. */
static void test_masked_nan(void **state)
{
    uint64_t seed = 3;
    (void)state;
    for (int64_t n = 2; n < 300; n = n * 3 / 2) {
        kernel_case c = kernel_case_plain(n, n, 12, true);
        kernel_case_open(&c, &seed);
        for (int64_t j = n / 2; j < n; j++) {
            for (int64_t d = 0; d < 12; d++) {
                kernel_set(&c, &c.k[0], j, d, NAN);
                kernel_set(&c, &c.v[0], j, d, j % 2 == 0 ? NAN : INFINITY);
            }
        }
        kernel_case_solve(&c);
        kernel_case_try(&c);
        const double *want = c.want_lse;
        assert_true(isfinite(want[n / 2 - 1]) && isnan(want[n / 2])); /* the case is what it says */
        kernel_case_close(&c);
    }
}

/* Several tiles of keys, of which the first rows see few. */
static void test_kept(void **state)
{
    uint64_t seed = 12;
    (void)state;
    for (int i = 0; i < 9; i++) {
        kernel_case c = kernel_case_plain(150, 600 + i, 64 - i % 2, i % 3 > 0);
        c.dtype = (attn_dtype)(i / 3);
        c.first = i % 3 > 0 ? 350 : c.first;
        c.lo = i % 3 == 2 ? -360 : c.lo;
        kernel_case_open_and_try(&c, &seed);
    }
}

static void test_no_keys(void **state)
{
    uint64_t seed = 6;
    (void)state;
    kernel_case none = kernel_case_plain(20, 0, 8, false);
    kernel_case_open_and_try(&none, &seed);
    none = kernel_case_plain(20, 0, 8, false);
    none.span_count = 0;
    kernel_case_open_and_try(&none, &seed);
    kernel_case above = kernel_case_plain(40, 10, 8, true); /* bottom-right: 30 rows see nothing */
    above.first = -30;
    kernel_case_open_and_try(&above, &seed);
    kernel_case empty = kernel_case_plain(40, 40, 8, true);
    empty.lo = 5;
    empty.hi = 4;
    kernel_case_open_and_try(&empty, &seed);
}

/* The same bits for a second run.  The scratch is all NaN before each, so nothing of it can be read unset. */
static void test_repeats(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 20; i++) {
        uint64_t seed = i + 77;
        kernel_case c = kernel_case_random(&seed, 300);
        kernel_case_open(&c, &seed);
        KERNEL_CASE_ROWS(&c, row)
        {
            kernel_case_run(&c, *row);
            float *o = malloc(c.o.bytes), *lse = malloc(c.lse.bytes);
            assert_true(o != NULL && lse != NULL);
            memcpy(o, c.o.data, c.o.bytes);
            memcpy(lse, c.lse.data, c.lse.bytes);
            kernel_case_run(&c, *row);
            assert_memory_equal(o, c.o.data, c.o.bytes);
            assert_memory_equal(lse, c.lse.data, c.lse.bytes);
            free(o);
            free(lse);
        }
        kernel_case_close(&c);
    }
}

/* ||o - want|| / ||want|| */
static double relative_error(const kernel_case *c)
{
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < c->rows; i++) {
        for (int64_t d = 0; d < c->dim_v; d++) {
            double want = c->want_o[i * c->dim_v + d];
            double x = (double)((const float *)c->o.data)[i * c->o_stride + d];
            error += (x - want) * (x - want);
            norm += want * want;
        }
    }
    return sqrt(error / norm);
}

/* What good implementations reach: keys added one after the other, u * sqrt(n); in blocks, less.  Weights
 * rounded to bf16 are off by up to 2^-8, evenly: r / sqrt(3). */
static double gate(const attn__kernel *kernel, attn_dtype dtype)
{
    const double sums = kernel == &attn__kernel_naive ? 0x1p-24 * sqrt(1000.0) : 6e-7;
    return sums + (kernel->rounds_weights && dtype == ATTN_BF16 ? 0x1p-8 / sqrt(3.0) : 0.0);
}

/* The error that users see in benches, against a gate that good implementations pass; for many rows and few.
 */
static void test_accuracy(void **state)
{
    static const int64_t dims[] = {64, 128}, rows[] = {200, 9};
    (void)state;
    for (size_t i = 0; i < 24; i++) {
        uint64_t seed = 8 + i;
        kernel_case c = kernel_case_plain(rows[i / 4 % 2], 1000, dims[i / 2 % 2], i % 2 != 0);
        c.dtype = (attn_dtype)(i / 8);
        kernel_case_open(&c, &seed);
        kernel_case_solve(&c);
        KERNEL_CASE_ROWS(&c, row)
        {
            kernel_case_run(&c, *row);
            double error = relative_error(&c);
            print_message("%-16s %-4s %3lld rows, d %3lld %-6s %.2g\n", (*row)->name,
                          attn_dtype_name(c.dtype), (long long)c.rows, (long long)c.dim_v,
                          i % 2 != 0 ? "causal" : "full", error);
            assert_true(error <= gate(*row, c.dtype));
        }
        kernel_case_close(&c);
    }
}

/* ---- the table ---- */

static void test_table(void **state)
{
    const attn__shape shape = {.dtype = ATTN_BF16, .dim_qk = 64, .dim_v = 64, .rows = 100, .keys = 100};
    const attn__kernel *kernel = NULL;
    const uint32_t features = attn__cpu();
    const struct {
        uint32_t features;
        const char *name;
    } levels[] = {{0, "flash-portable"},
                  {ATTN__CPU_AVX2, "flash-avx2"},
                  {ATTN__CPU_AVX2 | ATTN__CPU_AVX512, "flash-avx512"},
                  {ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16,
                   attn__cpu_pairs() ? "flash-avx512bf16" : "flash-avx512"},
                  {ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16 | ATTN__CPU_AMX, "flash-amx"},
                  {ATTN__CPU_NEON, "flash-neon"}};
    (void)state;
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        if ((features & levels[i].features) == levels[i].features) {
            attn__cpu_override(levels[i].features);
            assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_OK);
            assert_string_equal(kernel->name, levels[i].name);
        }
    }
    attn__cpu_override(features);
    attn__shape few = {.dim_qk = 64, .dim_v = 64, .rows = 3, .keys = 100};
    assert_int_equal(attn__kernel_choose(&kernel, &few, NULL), ATTN_OK);
    assert_ptr_not_equal(kernel, &attn__flash_amx); /* declines; by name it is taken */
    assert_true((features & ATTN__CPU_AMX) == 0 ||
                attn__kernel_choose(&kernel, &few, "flash-amx") == ATTN_OK);
    attn__cpu_override(0);
    assert_int_equal(attn__kernel_choose(&kernel, &shape, "flash-avx2"), ATTN_EUNSUPPORTED);
    assert_non_null(strstr(attn_last_error(), "flash-avx2"));
    assert_non_null(strstr(attn_last_error(), "AVX2"));
    assert_non_null(strstr(attn_last_error(), "ATTN_ISA"));
    attn__cpu_override(features);

    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        assert_true((*row)->summary != NULL && (*row)->tile_q != NULL && (*row)->rejects != NULL &&
                    (*row)->scratch != NULL && (*row)->forward != NULL);
        if (attn__kernel_refusal(*row, &shape) == NULL) {
            assert_int_equal(attn__kernel_choose(&kernel, &shape, (*row)->name), ATTN_OK);
            assert_ptr_equal(kernel, *row);
        }
    }
    assert_int_equal(attn__kernel_choose(&kernel, &shape, "flash"), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "reference"));
}

static void test_refusals(void **state)
{
    attn__shape shape = {.dim_qk = 513, .dim_v = 64, .rows = 100, .keys = 100};
    const attn__kernel *kernel = NULL;
    (void)state;
    assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_EUNSUPPORTED);
    assert_non_null(strstr(attn_last_error(), "reference: takes head dimensions from 1 to 512"));
    shape = (attn__shape){.dim_qk = 64, .dim_v = 0, .rows = 1};
    assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_EUNSUPPORTED);
    shape = (attn__shape){.dim_qk = 64, .dim_v = 64, .dtype = (attn_dtype)9, .rows = 1};
    assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_EUNSUPPORTED);
    shape = (attn__shape){.dim_qk = 64, .dim_v = 64, .rows = INT64_MAX / 8, .keys = INT64_MAX / 8};
    assert_int_equal(attn__kernel_choose(&kernel, &shape, NULL), ATTN_OK);
    assert_true(kernel->scratch(&shape) < 8u << 20); /* the tiled rows do not care how many keys there are */
    assert_int_equal(attn__kernel_choose(&kernel, &shape, "naive"), ATTN_EUNSUPPORTED);
    assert_non_null(strstr(attn_last_error(), "score matrix"));
    shape = (attn__shape){.dim_qk = 64, .dim_v = 64, .rows = 1 << 20, .keys = 1 << 20};
    assert_int_equal(attn__kernel_choose(&kernel, &shape, "naive"), ATTN_OK);
    assert_true(kernel->scratch(&shape) >= (size_t)4 << 40); /* the caller's limit decides */
    assert_int_equal(kernel->tile_q(&shape), shape.rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_dims),          cmocka_unit_test(test_poisoned),
        cmocka_unit_test(test_few),           cmocka_unit_test(test_few_long),
        cmocka_unit_test(test_moving_maxima), cmocka_unit_test(test_masked_nan),
        cmocka_unit_test(test_kept),          cmocka_unit_test(test_no_keys),
        cmocka_unit_test(test_repeats),       cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_table),         cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
