/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gradient.c - what gradients stand on: the fp64 reference against central differences of the fp64
 * forward, and delta = rowsum(o * dO) in every dtype and layout.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernel_case.h"

/* delta of any dtype and layout: a sum of dim_v products in 8 parts, each part and their sum in fp32. */
static void test_delta(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t seed = i + 4000;
        kernel_case c = kernel_case_random(&seed, 10), other = c;
        kernel_array o, dout;
        float *delta = malloc((size_t)c.rows * sizeof *delta);
        assert_non_null(delta);
        other.dtype = (attn_dtype)check_between(&seed, 0, 2);
        kernel_array_open(&c, &o, c.q_layout, c.rows, c.dim_v, &seed);
        kernel_array_open(&other, &dout, c.k_layout, c.rows, c.dim_v, &seed);
        const attn__rows a = {o.base, c.dtype, o.token, o.dim};
        const attn__rows b = {dout.base, other.dtype, dout.token, dout.dim};
        attn__delta(delta, &a, &b, c.rows, c.dim_v);
        for (int64_t row = 0; row < c.rows; row++) {
            double want = 0.0, size = 0.0;
            for (int64_t d = 0; d < c.dim_v; d++) {
                double x = kernel_get(&c, &o, row, d) * kernel_get(&other, &dout, row, d);
                want += x;
                size += fabs(x);
            }
            double terms =
                (double)attn__ceil_div(c.dim_v, 8) + 4.0; /* roundings that a product goes through */
            assert_true(fabs((double)delta[row] - want) <= 0x1p-24 * terms * size);
        }
        check_buffer_close(&o.buffer);
        check_buffer_close(&dout.buffer);
        free(delta);
    }
}

/* ---- the reference itself ---- */

enum { REF_ROWS = 7, REF_KEYS = 9, REF_QK = 5, REF_V = 6 };

typedef struct ref_problem {
    double q[REF_ROWS * REF_QK], k[REF_KEYS * REF_QK], v[REF_KEYS * REF_V], dout[REF_ROWS * REF_V];
    double scale;
    int64_t lo, hi;
} ref_problem;

/* sum of o * dO by the forward of the reference; o and lse of each row besides */
static double loss(const ref_problem *p, double *o, double *lse)
{
    double sum = 0.0;
    for (int64_t i = 0; i < REF_ROWS; i++) {
        attn__reference_row row = {.acc = o + i * REF_V};
        attn__reference_begin(&row, REF_V);
        attn__reference_add(&row, p->q + i * REF_QK, p->k, p->v, 0, REF_KEYS, i, p->lo, p->hi, p->scale,
                            REF_QK, REF_V);
        lse[i] = attn__reference_end(&row, REF_V);
        for (int64_t d = 0; d < REF_V; d++) {
            sum += o[i * REF_V + d] * p->dout[i * REF_V + d];
        }
    }
    return sum;
}

/* (L(x + h) - L(x - h)) / 2h is off by about h^2 times the third derivative, and 2^-53 L / h. */
static void check_differences(ref_problem *p, double *x, const double *slope, int64_t count)
{
    double o[REF_ROWS * REF_V], lse[REF_ROWS];
    const double h = 1e-5;
    for (int64_t i = 0; i < count; i++) {
        const double old = x[i];
        x[i] = old + h;
        double above = loss(p, o, lse);
        x[i] = old - h;
        double below = loss(p, o, lse);
        x[i] = old;
        assert_true(fabs((above - below) / (2.0 * h) - slope[i]) <= 100.0 * h * h);
    }
}

static void test_differences(void **state)
{
    (void)state;
    for (uint64_t n = 0; n < 20; n++) {
        uint64_t seed = n + 30;
        ref_problem p = {.scale = 0.7, .lo = -(int64_t)(n % 5) - 1, .hi = (int64_t)(n % 4) - 1};
        double dq[REF_ROWS * REF_QK] = {0.0}, dk[REF_KEYS * REF_QK] = {0.0}, dv[REF_KEYS * REF_V] = {0.0};
        double o[REF_ROWS * REF_V], lse[REF_ROWS];
        double *const arrays[] = {p.q, p.k, p.v, p.dout};
        const int64_t sizes[] = {REF_ROWS * REF_QK, REF_KEYS * REF_QK, REF_KEYS * REF_V, REF_ROWS * REF_V};
        for (size_t a = 0; a < 4; a++) {
            for (int64_t i = 0; i < sizes[a]; i++) {
                arrays[a][i] = check_normal(&seed);
            }
        }
        loss(&p, o, lse);
        for (int64_t i = 0; i < REF_ROWS; i++) {
            attn__reference_query query = {
                p.q + i * REF_QK, p.dout + i * REF_V, lse[i], 0.0, i, p.lo, p.hi, p.scale, REF_QK, REF_V,
                dq + i * REF_QK};
            for (int64_t d = 0; d < REF_V; d++) {
                query.delta += o[i * REF_V + d] * p.dout[i * REF_V + d];
            }
            /* in two pieces */
            attn__reference_backward(&query, p.k, p.v, 0, 4, dk, dv);
            attn__reference_backward(&query, p.k + 4 * REF_QK, p.v + 4 * REF_V, 4, REF_KEYS - 4,
                                     dk + 4 * REF_QK, dv + 4 * REF_V);
        }
        check_differences(&p, p.q, dq, sizes[0]);
        check_differences(&p, p.k, dk, sizes[1]);
        check_differences(&p, p.v, dv, sizes[2]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delta),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
