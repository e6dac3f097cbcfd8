/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_merge.c - the laws of the merge: identity to the bit, commutative and associative to rounding,
 * partials over parts of the keys make the whole, NaN stays in its row, and the same bits everywhere.
 */
#include <float.h>
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

enum { ROWS = 40, DIM = 37, STRIDE = 40 };

#define MERGE_HASH 0x0e526129504a9e93u /* of test_bits() */

typedef struct partial {
    float o[ROWS * STRIDE], lse[ROWS];
} partial;

/* lse over `spread` around 0; o as means of normal values; one row in eight is the identity. */
static void fill(partial *p, uint64_t *seed, double spread)
{
    check_poison(p, sizeof *p);
    for (int i = 0; i < ROWS; i++) {
        const bool empty = check_between(seed, 0, 7) == 0;
        p->lse[i] = empty ? -INFINITY : (float)((check_uniform(seed) * 2.0 - 1.0) * spread);
        for (int d = 0; d < DIM; d++) {
            p->o[i * STRIDE + d] = empty ? 0.0f : (float)(check_uniform(seed) * 2.0 - 1.0);
        }
    }
}

static void merge(partial *a, const partial *b)
{
    attn__merge(a->o, STRIDE, a->lse, b->o, STRIDE, b->lse, ROWS, DIM);
    for (int i = 0; i < ROWS; i++) { /* padding is not ours */
        assert_true(check_poisoned(a->o + i * STRIDE + DIM, (STRIDE - DIM) * sizeof(float)));
    }
}

/* Rows of a and b agree to `units` roundings; |o| <= 1. */
static void assert_same(const partial *a, const partial *b, double units)
{
    const double u = 0x1p-24;
    for (int i = 0; i < ROWS; i++) {
        double x = (double)a->lse[i], y = (double)b->lse[i];
        assert_true(x == y || fabs(x - y) <= units * u * fmax(1.0, fabs(y)));
        for (int d = 0; d < DIM; d++) {
            assert_true(fabs((double)a->o[i * STRIDE + d] - (double)b->o[i * STRIDE + d]) <= units * u);
        }
    }
}

static void test_identity(void **state)
{
    uint64_t seed = 1;
    (void)state;
    for (int run = 0; run < 50; run++) {
        partial a, b, one;
        fill(&a, &seed, run % 2 == 0 ? 3.0 : 1e30);
        a.lse[0] = a.lse[6] = 0.25f; /* rows with keys */
        a.o[3] = -0.0f;
        a.lse[5] = NAN;
        a.o[5 * STRIDE] = NAN;
        a.o[6 * STRIDE + 1] = INFINITY;
        check_poison(&one, sizeof one);
        attn__merge_identity(one.o, STRIDE, one.lse, ROWS, DIM);
        b = a;
        merge(&b, &one);
        assert_memory_equal(&b, &a, sizeof a);
        b = one;
        merge(&b, &a);
        assert_memory_equal(&b, &a, sizeof a);
        b = one;
        merge(&b, &one);
        assert_memory_equal(&b, &one, sizeof one);
    }
}

static void test_formula(void **state)
{
    uint64_t seed = 2;
    (void)state;
    for (int run = 0; run < 200; run++) {
        partial a, b, got;
        fill(&a, &seed, run % 3 == 0 ? 200.0 : 2.0);
        fill(&b, &seed, run % 3 == 0 ? 200.0 : 2.0);
        got = a;
        merge(&got, &b);
        for (int i = 0; i < ROWS; i++) {
            double l1 = (double)a.lse[i], l2 = (double)b.lse[i], top = fmax(l1, l2);
            double lse = top == -INFINITY ? top : top + log(exp(l1 - top) + exp(l2 - top));
            assert_true((double)got.lse[i] == lse ||
                        fabs((double)got.lse[i] - lse) <= 0x1p-24 * fabs(lse) + 1e-9);
            for (int d = 0; d < DIM && top > -INFINITY; d++) {
                double o1 = (double)a.o[i * STRIDE + d], o2 = (double)b.o[i * STRIDE + d];
                double o = o1 * exp(l1 - lse) + o2 * exp(l2 - lse);
                assert_true(fabs((double)got.o[i * STRIDE + d] - o) <= 2.0 * 0x1p-24);
            }
        }
    }
}

static void test_laws(void **state)
{
    uint64_t seed = 3;
    (void)state;
    for (int run = 0; run < 200; run++) {
        partial a, b, c, left, right;
        double spread = run % 2 == 0 ? 2.0 : 30.0;
        fill(&a, &seed, spread);
        fill(&b, &seed, spread);
        fill(&c, &seed, spread);
        left = a;
        merge(&left, &b);
        right = b;
        merge(&right, &a);
        assert_same(&left, &right, 1.0);
        merge(&left, &c); /* (a b) c */
        right = b;
        merge(&right, &c);
        merge(&right, &a); /* (b c) a */
        assert_same(&left, &right, 8.0);
    }
}

/* Magnitudes at the end of fp32: the greater lse wins, equal ones share. */
static void test_huge(void **state)
{
    static const float sizes[] = {1e4f, 1e30f, FLT_MAX};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        float o1[2] = {1.0f, -2.0f}, o2[2] = {5.0f, 7.0f}, lse1 = sizes[i], lse2 = -sizes[i];
        attn__merge(o1, 2, &lse1, o2, 2, &lse2, 1, 2);
        assert_true(lse1 == sizes[i] && o1[0] == 1.0f && o1[1] == -2.0f);
        attn__merge(o2, 2, &lse2, o1, 2, &lse1, 1, 2);
        assert_true(lse2 == sizes[i] && o2[0] == 1.0f && o2[1] == -2.0f);
        o2[0] = 3.0f;
        o2[1] = 0.0f;
        attn__merge(o1, 2, &lse1, o2, 2, &lse2, 1, 2);
        assert_true(o1[0] == 2.0f && o1[1] == -1.0f);
        assert_true(fabs((double)lse1 - (double)sizes[i]) <= 0.7 + 0x1p-23 * (double)sizes[i]);
    }
}

static void test_nan(void **state)
{
    uint64_t seed = 4;
    partial a, b, clean, got;
    (void)state;
    fill(&a, &seed, 2.0);
    fill(&b, &seed, 2.0);
    for (int i = 0; i < ROWS; i++) {
        a.lse[i] = a.lse[i] == -INFINITY ? 0.5f : a.lse[i];
        b.lse[i] = b.lse[i] == -INFINITY ? 0.5f : b.lse[i];
    }
    clean = a;
    merge(&clean, &b);
    got = a;
    b.lse[7] = NAN;
    b.o[9 * STRIDE + 4] = NAN;
    a.lse[11] = NAN;
    got = a;
    merge(&got, &b);
    for (int i = 0; i < ROWS; i++) {
        const bool whole = i == 7 || i == 11;
        assert_true(whole ? isnan(got.lse[i]) : got.lse[i] == clean.lse[i]);
        for (int d = 0; d < DIM; d++) {
            const bool bad = whole || (i == 9 && d == 4);
            float x = got.o[i * STRIDE + d];
            assert_true(bad ? isnan(x) : x == clean.o[i * STRIDE + d]);
        }
    }
    /* A NaN value under a score of -inf: weight 0, and still NaN, from either side. */
    float o1[1] = {NAN}, o2[1] = {1.0f}, none = -INFINITY, some = 1.0f;
    attn__merge(o1, 1, &none, o2, 1, &some, 1, 1);
    assert_true(isnan(o1[0]) && none == 1.0f);
    o1[0] = NAN;
    none = -INFINITY;
    attn__merge(o2, 1, &some, o1, 1, &none, 1, 1);
    assert_true(isnan(o2[0]) && some == 1.0f);
}

/* Each span alone, merged one by one, against the answer over all of them. */
static void test_split_keys(void **state)
{
    (void)state;
    for (uint64_t run = 0; run < 40; run++) {
        uint64_t seed = run + 500;
        kernel_case c = kernel_case_random(&seed, 300);
        kernel_case_open(&c, &seed);
        kernel_case_solve(&c);
        for (const attn__kernel *const *row = kernel_rows(&c); *row != NULL; row++) {
            float *o = malloc(c.o.bytes), *lse = malloc(c.lse.bytes);
            assert_true(o != NULL && lse != NULL);
            attn__merge_identity(o, c.o_stride, lse, c.rows, c.dim_v);
            for (int64_t s = 0; s < c.span_count; s++) {
                kernel_case part = c;
                part.span_count = 1;
                part.spans[0] = c.spans[s];
                part.span_keys[0] = c.span_keys[s];
                kernel_case_run(&part, *row);
                attn__merge(o, c.o_stride, lse, c.o.data, c.o_stride, c.lse.data, c.rows, c.dim_v);
            }
            const check_bound bound = kernel_case_bound(&c, *row);
            check_rows((*row)->name, &bound, c.rows, c.dim_v, o, c.o_stride, lse, c.want_o, c.want_lse);
            free(o);
            free(lse);
        }
        kernel_case_close(&c);
    }
}

/* Every compiler, option and CPU gives these bits: no libm, no contraction. */
static void test_bits(void **state)
{
    uint64_t seed = 5, hash = 0;
    (void)state;
    for (int run = 0; run < 20; run++) {
        partial a, b;
        fill(&a, &seed, run % 2 == 0 ? 1.0 : 40.0);
        fill(&b, &seed, run % 2 == 0 ? 1.0 : 40.0);
        merge(&a, &b);
        for (int i = 0; i < ROWS; i++) {
            hash = attn__hash(hash, a.o + i * STRIDE, DIM * sizeof(float));
        }
        hash = attn__hash(hash, a.lse, sizeof a.lse);
    }
    if (hash != MERGE_HASH) {
        fail_msg("the hash of the merged bits is %#llx", (unsigned long long)hash);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identity), cmocka_unit_test(test_formula), cmocka_unit_test(test_laws),
        cmocka_unit_test(test_huge),     cmocka_unit_test(test_nan),     cmocka_unit_test(test_split_keys),
        cmocka_unit_test(test_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
