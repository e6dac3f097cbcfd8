/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernel_dot.c - products of matrices in bf16 parts (attn__dot) against fp64: every number of parts,
 * remainders of tiles, rows apart, sums that are added to.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "kernel/rows.h"

static const struct {
    const char *name;
    const attn__probe *probe;
    uint32_t needs;
} instances[] = {
    {"amx", &attn__probe_amx, ATTN__CPU_AMX},
    {"avx512bf16", &attn__probe_avx512bf16, ATTN__CPU_AVX512_BF16},
};

/* One operand: what its parts add up to, and the parts, guarded. */
typedef struct operand {
    double *value; /* [rows][depth] of A, [depth][cols] of B */
    check_buffer parts;
} operand;

static const int64_t GAP = 7; /* between the parts */

static uint16_t upper(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Fills element `at` of every part; returns their sum. */
static double put(uint16_t *parts, int64_t at, int64_t part, int count, uint64_t *seed)
{
    float rest = (float)check_normal(seed);
    double sum = 0.0;
    for (int i = 0; i < count; i++) {
        uint16_t bits = upper(rest);
        parts[at + i * part] = bits;
        sum += (double)attn__bf16_to_f32(bits);
        rest -= attn__bf16_to_f32(bits);
    }
    return sum;
}

static operand make_a(attn__dot *dot, uint64_t *seed)
{
    operand a = {.value = attn__alloc_array(dot->rows * dot->depth, sizeof(double))};
    dot->a_band = ATTN__SQUARE * (dot->depth + ATTN__SQUARE * check_between(seed, 0, 2));
    dot->a_part = attn__dot_place(dot->rows - 1, dot->depth - 1, dot->a_band) + 1 + GAP;
    check_buffer_open(&a.parts, sizeof(uint16_t) * (size_t)(dot->a_parts * dot->a_part - GAP), 2, true);
    for (int64_t i = 0; i < dot->rows; i++) {
        for (int64_t k = 0; k < dot->depth; k++) {
            a.value[i * dot->depth + k] =
                put(a.parts.data, attn__dot_place(i, k, dot->a_band), dot->a_part, dot->a_parts, seed);
        }
    }
    dot->a = a.parts.data;
    return a;
}

static operand make_b(attn__dot *dot, uint64_t *seed)
{
    operand b = {.value = attn__alloc_array(dot->depth * dot->cols, sizeof(double))};
    dot->b_band = ATTN__SQUARE * (dot->depth + ATTN__SQUARE * check_between(seed, 0, 2));
    dot->b_part = (dot->cols / ATTN__SQUARE - 1) * dot->b_band + dot->depth * ATTN__SQUARE + GAP;
    check_buffer_open(&b.parts, sizeof(uint16_t) * (size_t)(dot->b_parts * dot->b_part - GAP), 2, true);
    for (int64_t k = 0; k < dot->depth; k++) {
        for (int64_t j = 0; j < dot->cols; j++) {
            b.value[k * dot->cols + j] =
                put(b.parts.data,
                    j / ATTN__SQUARE * dot->b_band + k / 2 * 2 * ATTN__SQUARE + j % ATTN__SQUARE * 2 + k % 2,
                    dot->b_part, dot->b_parts, seed);
        }
    }
    dot->b = b.parts.data;
    return b;
}

/* Rounding of a sum of `depth` terms in any order and the pairs of parts that are left out, 3 * 2^-24. */
static void compare(const char *name, const attn__dot *dot, const double *a, const double *b,
                    const float *was)
{
    for (int64_t i = 0; i < dot->rows; i++) {
        for (int64_t j = 0; j < dot->cols; j++) {
            double want = dot->add ? (double)was[attn__dot_sum_place(dot, i, j)] : 0.0, size = fabs(want);
            for (int64_t k = 0; k < dot->depth; k++) {
                want += a[i * dot->depth + k] * b[k * dot->cols + j];
                size += fabs(a[i * dot->depth + k] * b[k * dot->cols + j]);
            }
            const double x = (double)dot->c[attn__dot_sum_place(dot, i, j)];
            const double bound = 0x1p-24 * (sqrt((double)dot->depth) + 4.0) * size;
            if (!(fabs(x - want) <= bound)) {
                fail_msg("%s: %lld x %lld x %lld, parts %d, %d%s: c[%lld][%lld] = %.9g, not %.9g +- %.2g",
                         name, (long long)dot->rows, (long long)dot->cols, (long long)dot->depth,
                         dot->a_parts, dot->b_parts, dot->add ? ", added" : "", (long long)i, (long long)j, x,
                         want, bound);
            }
        }
    }
}

/* Rows side by side, or halves of 16 columns apart, as the gradients have their scores. */
static void lay_out_c(attn__dot *dot, uint64_t *seed)
{
    const int64_t gap = check_between(seed, 0, 1) * 5;
    if (dot->cols == ATTN__SQUARE && check_between(seed, 0, 1) == 0) {
        dot->c_row = 16 + gap;
        dot->c_half = ATTN__SQUARE * dot->c_row + gap;
        dot->c_band = 2 * dot->c_half + gap;
    } else {
        dot->c_row = dot->cols + gap;
        dot->c_half = 16;
        dot->c_band = ATTN__SQUARE * dot->c_row + gap;
    }
}

static void run_case(const char *name, const attn__probe *probe, uint64_t *seed)
{
    attn__dot dot = {.rows = 16 * check_between(seed, 1, 5),
                     .cols = 32 * check_between(seed, 1, 3),
                     .depth = 32 * check_between(seed, 1, 6),
                     .a_parts = (int)check_between(seed, 1, 3),
                     .b_parts = (int)check_between(seed, 1, 3),
                     .add = check_between(seed, 0, 1) == 0};
    operand a = make_a(&dot, seed), b = make_b(&dot, seed);
    check_buffer c, was;
    lay_out_c(&dot, seed);
    const int64_t count = attn__dot_sum_place(&dot, dot.rows - 1, dot.cols - 1) + 1;
    const size_t bytes = sizeof(float) * (size_t)count;
    check_buffer_open(&c, bytes, sizeof(float), true);
    check_buffer_open(&was, bytes, sizeof(float), true);
    dot.c = c.data;
    for (int64_t i = 0; i < dot.rows * dot.cols && dot.add; i++) {
        dot.c[attn__dot_sum_place(&dot, i / dot.cols, i % dot.cols)] = (float)check_normal(seed);
    }
    memcpy(was.data, c.data, bytes);
    probe->dot(&dot);
    compare(name, &dot, a.value, b.value, was.data);
    for (int64_t i = 0; i < dot.rows * dot.cols; i++) {
        dot.c[attn__dot_sum_place(&dot, i / dot.cols, i % dot.cols)] =
            ((float *)was.data)[attn__dot_sum_place(&dot, i / dot.cols, i % dot.cols)];
    }
    assert_memory_equal(dot.c, was.data, bytes);
    check_buffer_close(&c), check_buffer_close(&was);
    check_buffer_close(&a.parts), check_buffer_close(&b.parts);
    attn__free(a.value), attn__free(b.value);
}

static void test_product(void **state)
{
    int ran = 0;
    (void)state;
    for (size_t i = 0; i < sizeof instances / sizeof instances[0]; i++) {
        if (instances[i].probe->dot == NULL || (attn__cpu() & instances[i].needs) == 0) {
            continue;
        }
        for (uint64_t n = 0; n < 200; n++) {
            uint64_t seed = n;
            run_case(instances[i].name, instances[i].probe, &seed);
        }
        ran++;
    }
    if (ran == 0) {
        skip();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_product)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
