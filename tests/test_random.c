/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_random.c - the counter-based normals: known answers, any element alone, and the statistics that a
 * standard normal must have (bounds of about five standard errors; the numbers are always the same).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "cli/bytes.h"
#include "cli/random.h"

enum { COUNT = 1 << 20 };
static float sample[COUNT];

/* Philox4x32-10 of counter 0 and key 0 is 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (Random123's kat_vectors); the
 * normals are Box-Muller of those words. */
static void known_answer(void **state)
{
    static const uint32_t words[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    float got[4];
    (void)state;
    cli_random_normal(0, ATTN_Q, 0, 4, got);
    for (int i = 0; i < 4; i += 2) {
        double radius = sqrt(-2 * log((words[i] + 0.5) / 4294967296.0));
        double angle = 8 * atan(1.0) * ((words[i + 1] + 0.5) / 4294967296.0);
        assert_true(fabs(got[i] - radius * cos(angle)) < 1e-6);
        assert_true(fabs(got[i + 1] - radius * sin(angle)) < 1e-6);
    }
}

static void any_element_alone(void **state)
{
    float all[1000], part[1000];
    int64_t far = (int64_t)5 << 40;
    (void)state;
    cli_random_normal(42, ATTN_V, far, 1000, all);
    for (int64_t first = 0; first < 40; first++) {
        for (int64_t count = 0; count < 30; count++) {
            cli_random_normal(42, ATTN_V, far + first, count, part);
            assert_memory_equal(part, all + first, (size_t)count * sizeof *part);
        }
    }
}

/* Neither seeds nor operands share numbers, also not the pairs that a sum of the two would confuse. */
static void streams_differ(void **state)
{
    static const struct {
        uint64_t seed;
        attn_operand operand;
    } streams[] = {{0, ATTN_Q}, {0, ATTN_K}, {0, ATTN_V},
                   {1, ATTN_Q}, {1, ATTN_K}, {(uint64_t)1 << 32, ATTN_Q}};
    enum { STREAMS = sizeof streams / sizeof streams[0], N = 4096 };
    static float x[STREAMS][N];
    (void)state;
    for (int i = 0; i < STREAMS; i++) {
        cli_random_normal(streams[i].seed, streams[i].operand, 0, N, x[i]);
        for (int j = 0; j < i; j++) {
            double sum = 0;
            for (int t = 0; t < N; t++) {
                sum += (double)x[i][t] * x[j][t];
            }
            assert_true(fabs(sum) < 5 * sqrt(N));
        }
    }
}

static void is_standard_normal(void **state)
{
    double power[5] = {0}, tail = 0, neighbours = 0;
    (void)state;
    cli_random_normal(123, ATTN_K, 0, COUNT, sample);
    for (int i = 0; i < COUNT; i++) {
        double x = sample[i], y = 1;
        for (int p = 0; p < 5; p++, y *= x) {
            power[p] += y / COUNT;
        }
        tail += fabs(x) > 1.959963984540054 ? 1.0 / COUNT : 0;
        neighbours += i > 0 ? x * (double)sample[i - 1] / COUNT : 0;
        assert_true(fabs(x) < 6.77);
    }
    double error = 5 / sqrt(COUNT); /* of a mean of values with variance 1 */
    assert_true(fabs(power[1]) < error);
    assert_true(fabs(power[2] - 1) < error * sqrt(2));
    assert_true(fabs(power[3]) < error * sqrt(15));
    assert_true(fabs(power[4] - 3) < error * sqrt(96));
    assert_true(fabs(tail - 0.05) < error * sqrt(0.05 * 0.95));
    assert_true(fabs(neighbours) < error);
}

/* The source gives [b, h, n, d] element by element, in every dtype, whatever the cut. */
static void source_agrees(void **state)
{
    cli_random random = {.problem = ATTN_INIT(attn_problem), .seed = 9};
    (void)state;
    assert_int_equal(attn_problem_parse(&random.problem,
                                        "batch=2,heads=4,kv_heads=2,tokens=37,kv_tokens=23,dim=5,dim_v=3"),
                     ATTN_OK);
    for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
        random.problem.dtype = (attn_dtype)dtype;
        for (int x = ATTN_Q; x <= ATTN_V; x++) {
            int64_t heads = x == ATTN_Q ? 4 : 2, tokens = x == ATTN_Q ? 37 : 23, dim = x == ATTN_V ? 3 : 5;
            unsigned char got[4 * 40 * 5 * 4], want[5 * 4];
            int64_t size = (int64_t)attn_dtype_size((attn_dtype)dtype), first = 7, count = 11, stride = 60;
            assert_int_equal(cli_random_read(&random, (attn_operand)x, 1, first, count, got, stride),
                             ATTN_OK);
            for (int64_t head = 0; head < heads; head++) {
                for (int64_t row = 0; row < count; row++) {
                    float exact[5];
                    cli_random_normal(9, (attn_operand)x, ((heads + head) * tokens + first + row) * dim, dim,
                                      exact);
                    cli_from_f32(want, (cli_dtype)dtype, exact, dim);
                    assert_memory_equal(got + (head * stride + row * dim) * size, want, (size_t)(dim * size));
                }
            }
        }
    }
}

static void without_random123(void **state)
{
    (void)state;
    assert_int_equal(cli_random_ready(), ATTN_EUNSUPPORTED);
    assert_non_null(strstr(attn_last_error(), "librandom123-dev"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answer),   cmocka_unit_test(any_element_alone),
        cmocka_unit_test(streams_differ), cmocka_unit_test(is_standard_normal),
        cmocka_unit_test(source_agrees),
    };
    const struct CMUnitTest absent[] = {cmocka_unit_test(without_random123)};
    return cli_random_ready() == ATTN_OK ? cmocka_run_group_tests(tests, NULL, NULL)
                                         : cmocka_run_group_tests(absent, NULL, NULL);
}
