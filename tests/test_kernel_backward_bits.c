/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_backward_bits.c - every kernel's gradients have the same bits again: for a second run, where
 * some gradients are left out, where the turn at dq never comes, and however keys are cut into calls.
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

/* What a run gave. */
typedef struct results {
    char *dq, *dk, *dv;
} results;

static char *copy_of(const gradient_array *a)
{
    char *copy = malloc(a->buffer.bytes + 1);
    assert_non_null(copy);
    memcpy(copy, a->buffer.data, a->buffer.bytes);
    return copy;
}

static results run(gradient_case *g, const attn__kernel *kernel)
{
    gradient_case_reset(g);
    gradient_case_run(g, kernel);
    return (results){copy_of(&g->dq), copy_of(&g->dk[0]), copy_of(&g->dv[0])};
}

/* A run now gives the same, where it is asked for. */
static void run_again(gradient_case *g, const attn__kernel *kernel, const results *first)
{
    gradient_case_reset(g);
    gradient_case_run(g, kernel);
    assert_true(g->no_dq || memcmp(first->dq, g->dq.buffer.data, g->dq.buffer.bytes) == 0);
    assert_true(g->no_dk || memcmp(first->dk, g->dk[0].buffer.data, g->dk[0].buffer.bytes) == 0);
    assert_true(g->no_dv || memcmp(first->dv, g->dv[0].buffer.data, g->dv[0].buffer.bytes) == 0);
}

static void drop(results *r)
{
    free(r->dq), free(r->dk), free(r->dv);
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
            results whole = run(&g, *row);
            g.no_dq = i % 4 == 1, g.no_dk = i % 4 == 2, g.no_dv = i % 4 == 3;
            run_again(&g, *row, &whole);
            for (int64_t n = 0; n < g.dq.rows && g.no_dq; n++) { /* left alone */
                assert_memory_equal((float *)g.dq.buffer.data + n * g.dq.token, g.dq.before + n * g.dq.dim,
                                    (size_t)g.dq.dim * sizeof(float));
            }
            drop(&whole);
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
            results whole = run(&g, *row);
            for (g.steps = 1; g.steps <= 3; g.steps++) {
                run_again(&g, *row, &whole);
            }
            drop(&whole);
        }
        gradient_case_close(&g);
    }
}

/* Where dq's turn never comes it is left alone (gradient_case_run() looks), and dk and dv are as ever. */
static void test_no_turn(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 24; i++) {
        uint64_t seed = i + 9000;
        gradient_case g = gradient_case_random(&seed, 300);
        g.base.span_count = attn__max(1, g.base.span_count);
        gradient_case_open(&g, &seed);
        if (i % 4 == 0 && g.base.spans[0].count > 0) {
            kernel_set(&g.base, &g.base.k[0], 0, 0, i % 8 == 0 ? NAN : INFINITY);
        }
        gradient_case_solve(&g);
        FOR_EACH_KERNEL(&g, row)
        {
            results whole = run(&g, *row);
            g.never = true;
            gradient_case_reset(&g);
            gradient_case_run(&g, *row);
            assert_memory_equal(whole.dk, g.dk[0].buffer.data, g.dk[0].buffer.bytes);
            assert_memory_equal(whole.dv, g.dv[0].buffer.data, g.dv[0].buffer.bytes);
            g.never = false;
            drop(&whole);
        }
        gradient_case_close(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_cut_keys),
        cmocka_unit_test(test_no_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
