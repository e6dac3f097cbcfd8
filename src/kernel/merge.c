/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge.c - two partials over disjoint keys become one:
 *
 *     lse = logaddexp(l1, l2),   o = o1 * exp(l1 - lse) + o2 * exp(l2 - lse)
 *
 * With d = exp(-|l1 - l2|) the weights are 1 / (1 + d) for the greater lse and d / (1 + d) for the other, and
 * lse = max + log1p(d): nothing overflows, whatever the sizes.
 *
 * THE SAME BITS EVERYWHERE.  exp and log1p are series in fp64 of our own, since those of C libraries differ
 * with version and CPU; contraction to fused multiply-adds is off here.  In the sum over o it could not
 * matter: the product of two fp32 numbers is exact in fp64.
 *
 * COST.  Weights once a row; then 2 reads and 1 write an element, bound by memory.
 */
#include <math.h>
#include <string.h>

#include "kernel/kernel.h"

#if defined(__clang__) || !defined(__GNUC__)
#pragma STDC FP_CONTRACT OFF /* gcc does not know it, and does not contract under -std=c11 */
#endif

/* e^-x for x >= 0 to 3e-10, relative; 0 beyond 87, where fp32 ends.  x = n ln 2 - f with |f| <= ln(2)/2. */
static double exp_minus(double x)
{
    static const double series[] = {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                                    1.0 / 6,     1.0 / 2,    1.0,       1.0}; /* 1/i!, i = 8 ... 0 */
    if (!(x < 87.0)) {
        return 0.0;
    }
    const int n = (int)(x * 1.44269504088896340736 + 0.5);
    const double f = n * 0.69314718055994530942 - x;
    double sum = 0.0, power;
    for (size_t i = 0; i < sizeof series / sizeof series[0]; i++) {
        sum = sum * f + series[i];
    }
    const uint64_t bits = (uint64_t)(1023 - n) << 52; /* 2^-n */
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* log(1 + x) for 0 <= x <= 1 to 3e-10: 2 artanh(z), z = x / (2 + x) <= 1/3. */
static double log_1_plus(double x)
{
    static const double series[] = {1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9,
                                    1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
    const double z = x / (2.0 + x), square = z * z;
    double sum = 0.0;
    for (size_t i = 0; i < sizeof series / sizeof series[0]; i++) {
        sum = sum * square + series[i];
    }
    return 2.0 * z * sum;
}

/* A partial of lse = -inf weighs nothing: the other stays as it is, bit for bit, but for a NaN of the first
 * (a NaN value under a score of -inf), which stays too. */
static void keep_nan(float *o, const float *weightless, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        o[d] = weightless[d] == weightless[d] ? o[d] : weightless[d];
    }
}

/* The product of two fp32 numbers is exact in fp64, so that each element rounds twice, however it is
 * compiled. */
static void blend(float *restrict o1, float w1, const float *restrict o2, float w2, int64_t dim)
{
    const double a = (double)w1, b = (double)w2;
    for (int64_t d = 0; d < dim; d++) {
        o1[d] = (float)((double)o1[d] * a + (double)o2[d] * b);
    }
}

static void merge_row(float *o1, float *lse1, const float *o2, float lse2, int64_t dim)
{
    if (lse2 == -INFINITY) {
        keep_nan(o1, o2, dim);
        return;
    }
    if (*lse1 == -INFINITY) {
        for (int64_t d = 0; d < dim; d++) {
            o1[d] = o1[d] == o1[d] ? o2[d] : o1[d];
        }
        *lse1 = lse2;
        return;
    }
    const double difference = (double)*lse1 - (double)lse2; /* NaN if one is, or both are +inf */
    if (difference != difference) {
        for (int64_t d = 0; d < dim; d++) {
            o1[d] = NAN;
        }
        *lse1 = NAN;
        return;
    }
    const double small = exp_minus(fabs(difference));
    const bool first = difference >= 0.0;
    const double share = 1.0 / (1.0 + small);
    const float greater = (float)share, lesser = (float)(small * share);
    *lse1 = (float)((double)(first ? *lse1 : lse2) + log_1_plus(small));
    blend(o1, first ? greater : lesser, o2, first ? lesser : greater, dim);
}

void attn__merge(float *o1, int64_t stride1, float *lse1, const float *o2, int64_t stride2, const float *lse2,
                 int64_t rows, int64_t dim)
{
    for (int64_t i = 0; i < rows; i++) {
        merge_row(o1 + i * stride1, &lse1[i], o2 + i * stride2, lse2[i], dim);
    }
}

void attn__merge_identity(float *o, int64_t stride, float *lse, int64_t rows, int64_t dim)
{
    for (int64_t i = 0; i < rows; i++) {
        memset(o + i * stride, 0, sizeof(float) * (size_t)dim);
        lse[i] = -INFINITY;
    }
}
