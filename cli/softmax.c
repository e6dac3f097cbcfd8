/* SPDX-License-Identifier: Apache-2.0 */
/*
 * softmax.c - softmax of rows of scores and its gradient, as fast as plain C gets.
 *
 * One pass for the maximum, one for exp and the sum, one for the quotient.  LANES maxima and sums run side by
 * side, in loops that compilers vectorise without being told.  exp is 2^n times the Taylor polynomial of
 * degree 6 on [-1/2, 1/2] (remainder 1.2e-7); it is written out because a function for it would stay a call
 * in the copies for each level of the instruction set.
 */
#include "softmax.h"

#include <math.h>
#include <string.h>

enum { LANES = 32 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define SANITIZED 0
#endif

/* The softmax is compiled for each level of the instruction set where the compiler can do that; the choice is
 * made while the program is loaded, when sanitizers are not ready yet. */
#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__) && !SANITIZED
#define FOR_EACH_LEVEL __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_LEVEL
#endif

FOR_EACH_LEVEL static float softmax_row(float *s, int64_t seen, int64_t n)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float lane[LANES], most = -INFINITY, sum = 0;
    int64_t whole = seen - seen % LANES;
    for (int i = 0; i < LANES; i++) {
        lane[i] = -INFINITY;
    }
    for (int64_t j = 0; j < whole; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            lane[i] = s[j + i] > lane[i] ? s[j + i] : lane[i];
        }
    }
    for (int i = 0; i < LANES; i++) {
        most = lane[i] > most ? lane[i] : most;
        lane[i] = 0;
    }
    for (int64_t j = whole; j < seen; j++) {
        most = s[j] > most ? s[j] : most;
    }
    for (int64_t j = 0; j < seen; j += LANES) {
        float last[LANES], *y = s + j;
        if (j == whole) { /* fewer than LANES: among numbers that add nothing */
            for (int i = 0; i < LANES; i++) {
                last[i] = -INFINITY;
            }
            memcpy(last, s + j, (size_t)(seen - j) * sizeof *last);
            y = last;
        }
        for (int i = 0; i < LANES; i++) {
            float x = y[i] - most, t = (x < -87.0f ? -87.0f : x) * 1.44269504f;
            float rounded = (t + shift) - shift, f = t - rounded;
            float z = 1.54035304e-4f; /* 2^f on [-1/2, 1/2]: Taylor to degree 6, remainder 1.2e-7 */
            z = z * f + 1.33335581e-3f;
            z = z * f + 9.61812911e-3f;
            z = z * f + 5.55041087e-2f;
            z = z * f + 2.40226507e-1f;
            z = z * f + 6.93147181e-1f;
            z = z * f + 1.0f;
            union {
                int32_t bits;
                float power;
            } two = {.bits = ((int32_t)rounded + 127) * (1 << 23)};
            y[i] = z * two.power;
            lane[i] += y[i];
        }
        if (j == whole) {
            memcpy(s + j, last, (size_t)(seen - j) * sizeof *last);
        }
    }
    for (int i = 0; i < LANES; i++) {
        sum += lane[i];
    }
    for (int64_t j = 0; j < seen; j++) {
        s[j] *= 1 / sum;
    }
    memset(s + seen, 0, (size_t)(n - seen) * sizeof *s);
    return most + logf(sum);
}

FOR_EACH_LEVEL static void softmax_slope(float *dp, const float *weight, int64_t n)
{
    float lane[LANES] = {0}, sum = 0;
    int64_t whole = n - n % LANES;
    for (int64_t j = 0; j < whole; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            lane[i] += dp[j + i] * weight[j + i];
        }
    }
    for (int64_t j = whole; j < n; j++) {
        sum += dp[j] * weight[j];
    }
    for (int i = 0; i < LANES; i++) {
        sum += lane[i];
    }
    for (int64_t j = 0; j < n; j++) {
        dp[j] = weight[j] * (dp[j] - sum);
    }
}

/* Only functions of one file are compiled for each level by clang. */
float cli_softmax_row(float *s, int64_t seen, int64_t n)
{
    return softmax_row(s, seen, n);
}

void cli_softmax_slope(float *dp, const float *weight, int64_t n)
{
    softmax_slope(dp, weight, n);
}
