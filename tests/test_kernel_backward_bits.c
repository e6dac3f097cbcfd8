/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_backward_bits.c - every kernel's gradients have the same bits again: for a second run, where
 * some gradients are left out, and however keys are cut into calls.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gradient_case.h"

#define FOR_EACH_KERNEL(g, row) for (const attn__kernel *const *row = gradient_rows(g); *row != NULL; row++)

static float *copy_of(const gradient_array *a)
{
    float *copy = malloc(a->buffer.bytes + 1);
    assert_non_null(copy);
    memcpy(copy, a->buffer.data, a->buffer.bytes);
    return copy;
}

/* The same bits for a second run, and for one that leaves some gradients out. */
static void test_repeats(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 24; i++) {
        uint64_t seed = i + 77;
        gradient_case g = gradient_case_random(&seed, 300);
        g.base.span_count = 1;
        g.base.span_keys[0] = check_between(&seed, 0, 200);
        gradient_case_open(&g, &seed);
        gradient_case_solve(&g);
        FOR_EACH_KERNEL(&g, row)
        {
            g.no_dq = g.no_dk = g.no_dv = false;
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            float *dq = copy_of(&g.dq), *dk = copy_of(&g.dk[0]), *dv = copy_of(&g.dv[0]);
            g.no_dq = i % 4 == 1, g.no_dk = i % 4 == 2, g.no_dv = i % 4 == 3;
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            for (int64_t n = 0; n < g.dq.rows && g.no_dq; n++) { /* left alone */
                assert_memory_equal((float *)g.dq.buffer.data + n * g.dq.token, g.dq.before + n * g.dq.dim,
                                    (size_t)g.dq.dim * sizeof(float));
            }
            assert_true(g.no_dq || memcmp(dq, g.dq.buffer.data, g.dq.buffer.bytes) == 0);
            assert_true(g.no_dk || memcmp(dk, g.dk[0].buffer.data, g.dk[0].buffer.bytes) == 0);
            assert_true(g.no_dv || memcmp(dv, g.dv[0].buffer.data, g.dv[0].buffer.bytes) == 0);
            free(dq);
            free(dk);
            free(dv);
        }
        gradient_case_close(&g);
    }
}

/* Keys in several calls that end where the kernel's tiles do give the bits of one call. */
static void test_cut_keys(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 48; i++) {
        uint64_t seed = i + 4000;
        gradient_case g = gradient_case_random(&seed, 100);
        g.base.span_count = 1;
        g.base.span_keys[0] = check_between(&seed, 100, 600);
        gradient_case_open(&g, &seed);
        if (i % 4 == 0) {
            kernel_set(&g.base, &g.base.k[0], check_between(&seed, 0, 99), 0, i % 8 == 0 ? NAN : INFINITY);
        }
        gradient_case_solve(&g);
        FOR_EACH_KERNEL(&g, row)
        {
            g.steps = 0;
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            float *dq = copy_of(&g.dq), *dk = copy_of(&g.dk[0]), *dv = copy_of(&g.dv[0]);
            for (g.steps = 1; g.steps <= 3; g.steps++) {
                gradient_case_reset(&g);
                gradient_case_run(&g, *row);
                assert_memory_equal(dq, g.dq.buffer.data, g.dq.buffer.bytes);
                assert_memory_equal(dk, g.dk[0].buffer.data, g.dk[0].buffer.bytes);
                assert_memory_equal(dv, g.dv[0].buffer.data, g.dv[0].buffer.bytes);
            }
            free(dq), free(dk), free(dv);
        }
        gradient_case_close(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_cut_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
