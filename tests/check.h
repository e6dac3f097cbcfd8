/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - what tests of numbers share: random numbers, buffers between guard pages, tolerances.
 *
 * TOLERANCES.  u = 2^-24 is the relative error of one fp32 rounding.  Rounding errors of a sum of m terms
 * grow like sqrt(m) (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019), times the largest partial sum.
 *
 *   score   s = scale * q.k over d terms: u * sqrt(d) * A, where A bounds every |scale * q.k| and every
 *           |scale| * |q| * |k| / sqrt(d), the size of a partial sum of random signs; twice more for folding
 * the scale into q and for subtracting the maximum. weight  p = exp(s - max): the absolute error of s is the
 * relative error of p, and 2u of exp itself. sums    sum p and sum p * v over n keys: u * sqrt(n) each, and u
 * for the quotient.
 *
 *   lse     e = u * ((sqrt(d) + 2) * A + sqrt(n) + 4), and u * |lse| when it is rounded
 *   o       2 * e * max|v|: numerator and denominator; and r * max|v| where a kernel rounds the weights p by
 *           r = 2^-8 (to bf16) or 2^-11 (to fp16), relative, before they meet v: sum p r |v| / sum p
 *   rms     of all rows together, (2 * e + r) * (rms(o) + max|v| / sqrt(n)): errors of a row's weights
 * cancel, and where o is small because its terms cancel, max|v| / sqrt(n) is what is left of their size.  The
 * sharp test: one key too many or too few in n changes a row by about rms(o) / sqrt(n)
 *
 * Weights that go to fp16 are rounded by h = 2^-25 at least, which is half of its smallest step: sqrt(n) * h
 * * max|v| more in o and in rms.
 *
 * Gradients of m query rows, from lse and delta as fp32, L = max|lse|, B a bound for |v.dO| as A is for
 * scores, W = the largest sum of p over the rows that see one key:
 *
 *   p       relative error e = u * ((sqrt(d) + 2) * A + 3 * L + 4): lse rounded, in powers of 2, subtracted
 *   dS      p * (dP - delta), where |dP - delta| <= 2B: p * g, g = B * (2 * e + u * (sqrt(d_v) + 6)); and
 *           2B * r where a kernel rounds dS by r as above; p is not rounded before dS is made
 *   dQ      |scale| * max|k| * (g + 2B * u * (sqrt(n) + 3)), since the weights of a row add up to 1
 *   dK      |scale| * max|q| * W * (g + 2B * u * (sqrt(m) + 3))
 *   dV      max|dO| * W * (e + r + u * (sqrt(m) + 3))
 *
 * with h times the square root of the number of terms, times the largest of the other factor, for each of
 * them in fp16, and u * (sqrt(n or m) + 1) times what was there before, for adding to it again and again.
 *
 * The inputs count as exact in their own dtype; results stored as fp16 or bf16 add half a unit of theirs.
 */
#ifndef ATTN_TESTS_CHECK_H
#define ATTN_TESTS_CHECK_H

#include <stdbool.h>

#include "attn/attn.h"

/* ---- random numbers: splitmix64, the same on every machine ---- */

uint64_t check_random(uint64_t *seed);
double check_uniform(uint64_t *seed);                               /* [0, 1) */
double check_normal(uint64_t *seed);                                /* mean 0, deviation 1, |x| < 8.6 */
int64_t check_between(uint64_t *seed, int64_t least, int64_t most); /* both ends included */

/* ---- buffers between guard pages ---- */

/* `data` lies flush against an unreadable page: behind its end, or in front of its begin. */
typedef struct check_buffer {
    void *data;
    size_t bytes;
    void *map;
    size_t map_bytes;
} check_buffer;

/* Filled with 0xff, which is NaN in every dtype.  At the end, `align` (a power of two) may leave a gap. */
void check_buffer_open(check_buffer *buffer, size_t bytes, size_t align, bool at_end);
void check_buffer_close(check_buffer *buffer);
void check_poison(void *data, size_t bytes);
bool check_poisoned(const void *data, size_t bytes);

/* ---- tolerances ---- */

typedef struct check_bound {
    double score; /* A above */
    double value; /* max|v| */
    double round; /* r above, or 0 */
    double step;  /* h above, or 0 */
    int64_t dim_qk, keys;
} check_bound;

double check_bound_o(const check_bound *bound);
double check_bound_lse(const check_bound *bound, double lse);
double check_bound_rms(const check_bound *bound, double rms);
/* A bound for standard normal q, k, v of such a problem, whichever kernel computes it; fails one time in
 * about 10^6. */
check_bound check_bound_normal(const attn_problem *problem);

/* For gradients. */
typedef struct check_slope {
    check_bound bound;   /* A, d, n */
    double lse, slope;   /* L, B */
    double column;       /* W */
    double scale;        /* |scale| */
    double q, k, dout;   /* largest finite */
    double before;       /* largest |content| before */
    int64_t dim_v, rows; /* d_v, m */
} check_slope;

double check_bound_dq(const check_slope *slope);
double check_bound_dk(const check_slope *slope);
double check_bound_dv(const check_slope *slope);

/* The error of storing x in dtype, beyond fp32: half a unit in the last place of fp16 or bf16, 0 for fp32. */
double check_half_unit(attn_dtype dtype, double x);

/* One row of a gradient against fp64, NaN and inf as below; `what` and `row` name it. */
void check_gradient(const char *what, int64_t row, int64_t dim, const float *x, const double *want,
                    double tolerance);

/* Rows of o (stride elements apart) and lse against fp64.  NaN and inf must be where the reference has them;
 * a row with lse = -inf must be exactly so, and its zeros exactly 0.  Fails the test, with the worst element.
 */
void check_rows(const char *what, const check_bound *bound, int64_t rows, int64_t dim_v, const float *o,
                int64_t o_stride, const float *lse, const double *want_o, const double *want_lse);
/* The same for dense results of standard normal inputs. */
void check_partial(const char *what, const attn_problem *problem, int64_t rows, const float *o,
                   const float *lse, const double *want_o, const double *want_lse);

#endif
