/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_exp2.c - the largest error of the kernels' exp2 and its special values (docs/exp.md).
 *
 * A sample of one float in SAMPLE_STEP by default; every float of the range with ATTN_TEST_FULL=1.
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

#include "check.h"
#include "kernel/rows.h"

enum { BATCH = 4096, SAMPLE_STEP = 997 };

typedef struct exp2_instance {
    const char *name;
    const attn__probe *probe;
    uint32_t needs;
    double limit; /* relative error, in units of 2^-24 */
    bool weight;  /* the one for weights that are rounded to bf16 */
} exp2_instance;

/* With FMA the error is that of the last two roundings (1 + f p, and none for the power of two); without,
 * each step of the polynomial rounds twice.  That for weights has a term less. */
static const exp2_instance instances[] = {
    {"amx", &attn__probe_amx, ATTN__CPU_AMX, 1.2, false},
    {"amx weights", &attn__probe_amx, ATTN__CPU_AMX, 3.0, true},
    {"avx512bf16", &attn__probe_avx512bf16, ATTN__CPU_AVX512_BF16, 1.2, false},
    {"avx512bf16 weights", &attn__probe_avx512bf16, ATTN__CPU_AVX512_BF16, 3.0, true},
    {"avx512", &attn__probe_avx512, ATTN__CPU_AVX512, 1.2, false},
    {"avx2", &attn__probe_avx2, ATTN__CPU_AVX2, 1.2, false},
    {"neon", &attn__probe_neon, ATTN__CPU_NEON, 1.2, false},
    {"portable", &attn__probe_portable, 0, 1.6, false},
};

typedef void exp2_function(float *y, const float *x, int64_t count);

/* NULL where this machine, or the build, has none. */
static exp2_function *function_of(const exp2_instance *instance)
{
    const bool has = (attn__cpu() & instance->needs) == instance->needs;
    return !has ? NULL : instance->weight ? instance->probe->weight : instance->probe->exp2;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Largest relative error over every step-th float of [-126, -0], and where. */
static double worst_error(exp2_function *function, uint32_t step, float *where)
{
    static float x[BATCH], y[BATCH];
    const uint64_t first = bits_of(-0.0f), last = bits_of(-126.0f);
    double worst = 0.0;
    for (uint64_t bits = first; bits <= last; bits += (uint64_t)step * BATCH) {
        for (uint32_t i = 0; i < BATCH; i++) {
            uint64_t at = bits + (uint64_t)step * i;
            x[i] = float_of((uint32_t)(at < last ? at : last));
        }
        function(y, x, BATCH);
        for (int i = 0; i < BATCH; i++) {
            double want = exp2((double)x[i]);
            double error = fabs((double)y[i] - want) / want;
            if (!(error <= worst)) {
                worst = error;
                *where = x[i];
            }
        }
    }
    return worst;
}

static void test_error(void **state)
{
    const uint32_t step = getenv("ATTN_TEST_FULL") != NULL ? 1 : SAMPLE_STEP;
    (void)state;
    for (size_t i = 0; i < sizeof instances / sizeof instances[0]; i++) {
        exp2_function *function = function_of(&instances[i]);
        if (function != NULL) {
            float where = 0.0f;
            double units = worst_error(function, step, &where) / 0x1p-24;
            print_message("exp2 %-18s largest error %.3f * 2^-24 at %.9g (every %u. float)\n",
                          instances[i].name, units, (double)where, (unsigned)step);
            assert_true(units <= instances[i].limit);
        }
    }
}

static void test_special(void **state)
{
    const float below = nextafterf(-126.0f, -INFINITY);
    const float x[] = {0.0f,
                       -0.0f,
                       -1.0f,
                       -126.0f,
                       below,
                       -127.0f,
                       -150.0f,
                       -1e30f,
                       -INFINITY,
                       NAN,
                       -NAN,
                       1.0f,
                       10.0f,
                       127.0f,
                       float_of(0x7fc00001),
                       float_of(0xffffffff),
                       -1e-30f,
                       -0x1p-149f,
                       -1e5f};
    const float want[] = {1.0f, 1.0f, 0.5f,    0x1p-126f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, NAN,
                          NAN,  2.0f, 1024.0f, 0x1p127f,  NAN,  NAN,  1.0f, 1.0f, 0.0f};
    enum { COUNT = sizeof x / sizeof x[0] };
    (void)state;
    for (size_t i = 0; i < sizeof instances / sizeof instances[0]; i++) {
        exp2_function *function = function_of(&instances[i]);
        for (int count = 0; count <= COUNT && function != NULL; count++) {
            float y[COUNT];
            check_poison(y, sizeof y);
            function(y, x, count);
            for (int j = 0; j < COUNT; j++) {
                const float off = instances[i].weight ? 3 * 0x1p-24f * want[j] : 0.0f;
                assert_true(j >= count || isnan(want[j]) ? isnan(y[j]) : fabsf(y[j] - want[j]) <= off);
            }
        }
    }
}

/* What softmax needs where it is not rounded any more: a weight never exceeds 1, and equal scores give equal
 * weights. */
static void test_monotone_at_zero(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof instances / sizeof instances[0]; i++) {
        exp2_function *function = instances[i].weight ? NULL : function_of(&instances[i]);
        float x = -0.0f;
        for (int step = 0; step < 200000 && function != NULL; step++) {
            float y;
            function(&y, &x, 1);
            assert_true(y <= 1.0f);
            x = float_of(bits_of(x) + 5323u);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_special),
        cmocka_unit_test(test_monotone_at_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
