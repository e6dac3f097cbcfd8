/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_arrays.c - arrays in files as sources and sinks, and the verification that decides whether a result is
 * right: it must find every kind of error that it is there for.
 */
#define _XOPEN_SOURCE 700

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "cli/arrays.h"
#include "cli/npy.h"
#include "cli/results.h"
#include "cli/verify.h"
#include "files.h"

/* ---- the source ---- */

typedef struct shape {
    int64_t batch, heads, tokens, dim;
} shape;

/* An element that tells its own place. */
static double element(int x, int64_t b, int64_t h, int64_t n, int64_t c)
{
    return (double)(x * 1000 + b * 300 + h * 60 + n) + (double)c / 32;
}

/* A .npy of these elements, in bhnd or bnhd order. */
static const char *write_array(int x, shape s, cli_dtype dtype, cli_layout layout, int rank)
{
    static const char *const names[] = {"q.npy", "k.npy", "v.npy"};
    const char *path = files_path(files_own, names[x]);
    char header[CLI_NPY_HEADER];
    int64_t full[4] = {s.batch, s.heads, s.tokens, s.dim};
    if (layout == CLI_BNHD) {
        full[1] = s.tokens;
        full[2] = s.heads;
    }
    if (rank == 2) {
        full[2] = s.tokens;
    }
    cli_array array = {.dtype = dtype, .rank = rank};
    memcpy(array.shape, full + 4 - rank, (size_t)rank * sizeof full[0]);
    assert_true(cli_array_measure(&array));
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    size_t length = cli_npy_header(&array, header);
    assert_int_equal(fwrite(header, 1, length, file), length);
    for (int64_t b = 0; b < s.batch; b++) {
        for (int64_t i = 0; i < s.heads * s.tokens; i++) {
            int64_t h = layout == CLI_BHND ? i / s.tokens : i % s.heads;
            int64_t n = layout == CLI_BHND ? i % s.tokens : i / s.heads;
            for (int64_t c = 0; c < s.dim; c++) {
                char raw[8];
                float value = (float)element(x, b, h, n, c);
                cli_from_f32(raw, dtype, &value, 1);
                assert_int_equal(fwrite(raw, cli_dtype_size(dtype), 1, file), 1);
            }
        }
    }
    assert_int_equal(fclose(file), 0);
    return path;
}

static void check_read(cli_input *input, int x, shape s, cli_dtype dtype, uint64_t *random)
{
    int64_t first = (int64_t)(files_random(random) % (uint64_t)s.tokens);
    int64_t count = 1 + (int64_t)(files_random(random) % (uint64_t)(s.tokens - first));
    int64_t batch = (int64_t)(files_random(random) % (uint64_t)s.batch);
    int64_t stride = count * s.dim + (int64_t)(files_random(random) % 9);
    int64_t size = dtype == CLI_F64 ? 4 : (int64_t)cli_dtype_size(dtype);
    char *dst = malloc((size_t)(s.heads * stride * size)); /* exactly: the sanitizer watches its ends */
    assert_non_null(dst);
    memset(dst, 0x7e, (size_t)(s.heads * stride * size));
    assert_int_equal(cli_input_read(input, (attn_operand)x, batch, first, count, dst, stride), ATTN_OK);
    for (int64_t h = 0; h < s.heads; h++) {
        for (int64_t i = 0; i < stride; i++) {
            char want[8], *got = dst + (h * stride + i) * size;
            float value = (float)element(x, batch, h, first + i / s.dim, i % s.dim);
            memset(want, 0x7e, sizeof want);
            if (i < count * s.dim) {
                cli_from_f32(want, dtype == CLI_F64 ? CLI_F32 : dtype, &value, 1);
            }
            assert_memory_equal(got, want, (size_t)size);
        }
    }
    free(dst);
}

static void source_reads(void **state)
{
    static const cli_dtype dtypes[] = {CLI_F32, CLI_F16, CLI_F64};
    uint64_t random = 1;
    (void)state;
    for (int round = 0; round < 60; round++) {
        cli_input input;
        const char *spec[3];
        cli_dtype dtype = dtypes[files_random(&random) % 3];
        cli_layout layout = (cli_layout)(files_random(&random) % 2);
        int rank = 2 + (int)(files_random(&random) % 3);
        int64_t kv = rank > 2 ? 1 + (int64_t)(files_random(&random) % 3) : 1;
        shape s[3] = {
            {rank == 4 ? 2 : 1, rank > 2 ? 2 * kv : 1, 1 + (int64_t)(files_random(&random) % 50), 7},
            {0, kv, 1 + (int64_t)(files_random(&random) % 50), 7},
            {0, kv, 0, round % 4 == 0 ? 300 : 5}};
        s[1].batch = s[2].batch = s[0].batch;
        s[2].tokens = s[1].tokens;
        for (int x = 0; x < 3; x++) {
            spec[x] = write_array(x, s[x], dtype, layout, rank);
        }
        if (cli_input_open(&input, spec, layout) != ATTN_OK) {
            fail_msg("%s", attn_last_error());
        }
        for (int x = 0; x < 3; x++) {
            for (int i = 0; i < 5; i++) {
                check_read(&input, x, s[x], dtype, &random);
            }
        }
        cli_scan scan;
        assert_int_equal(cli_input_scan(&input, &scan, NULL, NULL), ATTN_OK);
        assert_int_equal(scan.nonfinite, 0);
        cli_input_close(&input);
        for (int x = 0; x < 3; x++) {
            assert_int_equal(unlink(spec[x]), 0);
        }
    }
}

/* A file that gets shorter while it is read is an error, not old memory. */
static void file_shrinks(void **state)
{
    float dst[64];
    cli_input input;
    shape s = {1, 1, 8, 8};
    const char *spec[3];
    (void)state;
    for (int x = 0; x < 3; x++) {
        spec[x] = write_array(x, s, CLI_F32, CLI_BHND, 4);
    }
    assert_int_equal(cli_input_open(&input, spec, CLI_BHND), ATTN_OK);
    assert_int_equal(truncate(spec[1], 200), 0);
    assert_int_equal(cli_input_read(&input, ATTN_K, 0, 0, 8, dst, 64), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "in the middle"));
    cli_input_close(&input);
    for (int x = 0; x < 3; x++) {
        unlink(spec[x]);
    }
}

/* ---- the sink ---- */

static void sink_writes(void **state)
{
    uint64_t random = 2;
    (void)state;
    for (int round = 0; round < 80; round++) {
        static const cli_dtype dtypes[] = {CLI_F32, CLI_F16, CLI_BF16};
        int rank = 2 + round % 3;
        attn_problem p = {.size = sizeof p,
                          .batch = rank == 4 ? 3 : 1,
                          .heads_q = rank > 2 ? 2 : 1,
                          .tokens_q = 1 + (int64_t)(files_random(&random) % 40),
                          .dim_qk = 4,
                          .dim_v = 1 + (int64_t)(files_random(&random) % 20),
                          .tokens_kv = 9};
        cli_result_want want = {.dtype = dtypes[files_random(&random) % 3],
                                .layout = (cli_layout)(files_random(&random) % 2),
                                .rank = rank,
                                .scratch = true};
        cli_result result;
        float rows[40 * 23], lse[40], got[40 * 20], got_lse[40];
        assert_int_equal(attn_problem_check(&p), ATTN_OK);
        assert_int_equal(cli_result_open(&result, &p, &want), ATTN_OK);
        for (int64_t plane = 0; plane < p.batch * p.heads_q; plane++) {
            for (int64_t i = 0; i < 40 * 23; i++) {
                rows[i] = (float)(plane * 7 + i % 64); /* exact in every dtype */
            }
            for (int i = 0; i < 40; i++) {
                lse[i] = (float)plane + (float)i / 64;
            }
            int64_t cut = (int64_t)(files_random(&random) % (uint64_t)(p.tokens_q + 1)), stride = p.dim_v + 3;
            int64_t b = plane / p.heads_q, h = plane % p.heads_q;
            assert_int_equal(cli_result_write(&result, b, h, cut, p.tokens_q - cut, rows + cut * stride,
                                              stride, lse + cut),
                             ATTN_OK);
            assert_int_equal(cli_result_write(&result, b, h, 0, cut, rows, stride, lse), ATTN_OK);
        }
        for (int64_t plane = 0; plane < p.batch * p.heads_q; plane++) {
            assert_int_equal(
                cli_result_read(&result, plane / p.heads_q, plane % p.heads_q, 0, p.tokens_q, got, got_lse),
                ATTN_OK);
            for (int64_t i = 0; i < p.tokens_q * p.dim_v; i++) {
                int64_t at = i / p.dim_v * (p.dim_v + 3) + i % p.dim_v;
                assert_true(got[i] == (float)(plane * 7 + at % 64));
            }
            for (int64_t i = 0; i < p.tokens_q; i++) {
                assert_true(got_lse[i] == (float)plane + (float)i / 64);
            }
        }
        cli_result_close(&result);
    }
}

/* ---- verification ---- */

enum { N = 96, D = 8, HEADS = 2 };

static float q[HEADS][N][D], k[HEADS][N][D], v[HEADS][N][D], o[HEADS][N][D], lse[HEADS][N];

static attn_status memory_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                               void *dst, int64_t head_stride)
{
    float(*from)[N][D] = operand == ATTN_Q ? q : operand == ATTN_K ? k : v;
    (void)data;
    (void)batch;
    for (int64_t h = 0; h < HEADS; h++) {
        memcpy((float *)dst + h * head_stride, from[h][first], (size_t)(count * D) * sizeof(float));
    }
    return ATTN_OK;
}

static attn_status result_read(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *to, float *to_lse)
{
    (void)data;
    (void)batch;
    memcpy(to, o[head][first], (size_t)(count * D) * sizeof(float));
    memcpy(to_lse, lse[head] + first, (size_t)count * sizeof(float));
    return ATTN_OK;
}

/* The right answer for problem p, rounded to fp32. */
static void solve(const attn_problem *p, const attn_source *source)
{
    attn_io io = {.size = sizeof io, .source = source};
    for (int h = 0; h < HEADS; h++) {
        for (int64_t row = 0; row < N; row++) {
            double exact[D], exact_lse;
            assert_int_equal(attn_reference(p, &io, 0, h, &row, 1, exact, &exact_lse), ATTN_OK);
            for (int c = 0; c < D; c++) {
                o[h][row][c] = (float)exact[c];
            }
            lse[h][row] = (float)exact_lse;
        }
    }
}

static void fill(uint64_t seed)
{
    float *all[] = {&q[0][0][0], &k[0][0][0], &v[0][0][0]};
    for (int x = 0; x < 3; x++) {
        for (int i = 0; i < HEADS * N * D; i++) {
            all[x][i] = (float)((double)(files_random(&seed) >> 11) * 0x1p-52 - 1);
        }
    }
}

typedef struct setting {
    attn_problem problem;
    attn_source source;
    cli_verify verify;
    cli_verdict verdict;
} setting;

static void prepare(setting *s, attn_mask mask)
{
    *s = (setting){
        .problem = {.size = sizeof s->problem, .heads_q = HEADS, .tokens_q = N, .dim_qk = D, .mask = mask},
        .source = {.size = sizeof s->source, .read = memory_read}};
    s->verify =
        (cli_verify){.problem = &s->problem, .source = &s->source, .has_lse = true, .read = result_read};
    assert_int_equal(attn_problem_check(&s->problem), ATTN_OK);
    solve(&s->problem, &s->source);
}

static bool passes(setting *s)
{
    assert_int_equal(cli_verify_run(&s->verify, &s->verdict), ATTN_OK);
    return s->verdict.passed;
}

static void right_passes(void **state)
{
    setting s;
    (void)state;
    for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_CAUSAL; mask++) {
        fill(4);
        prepare(&s, (attn_mask)mask);
        assert_true(passes(&s));
        assert_int_equal(s.verdict.rows, HEADS * N);
        assert_true(s.verdict.relative < 1e-7);
        s.verify.rows = 10;
        assert_true(passes(&s));
        assert_int_equal(s.verdict.rows, HEADS * 10);
    }
}

/* One wrong element, a wrong lse, a row without one key, rows of another mask, another scale: all are found.
 */
static void wrong_fails(void **state)
{
    setting s, other;
    (void)state;
    fill(5);
    prepare(&s, ATTN_MASK_CAUSAL);
    float keep = o[1][77][3];
    o[1][77][3] += 1e-4f;
    assert_false(passes(&s));
    assert_int_equal(s.verdict.wrong, 1);
    assert_int_equal(s.verdict.at[1], 1);
    assert_int_equal(s.verdict.at[2], 77);
    o[1][77][3] = NAN;
    assert_false(passes(&s));
    o[1][77][3] = keep;
    assert_true(passes(&s));
    lse[0][5] += 1e-3f;
    assert_false(passes(&s));
    lse[0][5] = -INFINITY;
    assert_false(passes(&s));
    other = s;
    other.problem.mask = ATTN_MASK_FULL;
    solve(&other.problem, &other.source);
    assert_false(passes(&s));
    prepare(&s, ATTN_MASK_FULL);
    other.problem.mask = ATTN_MASK_WINDOW; /* the last row sees one key less */
    other.problem.window_left = N - 2;
    other.problem.window_right = -1;
    solve(&other.problem, &other.source);
    assert_false(passes(&s));
    prepare(&s, ATTN_MASK_FULL);
    s.problem.scale *= 1.0001;
    assert_false(passes(&s));
}

/* Errors too small for any single element show in the mean square. */
static void mean_square_is_sharp(void **state)
{
    setting s;
    uint64_t random = 8;
    (void)state;
    fill(6);
    prepare(&s, ATTN_MASK_FULL);
    assert_true(passes(&s));
    float size = (float)(0.9 * s.verdict.tolerance.o);
    for (int i = 0; i < HEADS * N * D; i++) {
        (&o[0][0][0])[i] += files_random(&random) % 2 == 0 ? size : -size;
    }
    assert_false(passes(&s));
    assert_int_equal(s.verdict.wrong, 0);
    assert_true(s.verdict.rms > s.verdict.rms_limit);
}

/* What rows see must be where the reference has it: NaN rows are NaN, the others are not. */
static void nonfinite_rows(void **state)
{
    setting s;
    (void)state;
    fill(7);
    v[0][50][2] = NAN;
    k[1][60][1] = INFINITY;
    q[1][3][0] = NAN;
    prepare(&s, ATTN_MASK_CAUSAL);
    assert_true(passes(&s));
    assert_true(s.verdict.nonfinite >= N - 50);
    o[0][70][2] = 0; /* a NaN that was lost */
    assert_false(passes(&s));
    prepare(&s, ATTN_MASK_CAUSAL);
    o[0][10][2] = NAN; /* a NaN that leaked */
    assert_false(passes(&s));
}

/* Rows without keys: o = 0 and lse = -inf, exactly. */
static void rows_without_keys(void **state)
{
    setting s;
    (void)state;
    fill(9);
    prepare(&s, ATTN_MASK_FULL);
    s.problem.tokens_kv = N / 2; /* bottom-right alignment: the first half of the queries sees nothing */
    s.problem.mask = ATTN_MASK_CAUSAL;
    solve(&s.problem, &s.source);
    assert_true(lse[0][0] == -INFINITY && o[0][0][0] == 0);
    assert_true(passes(&s));
    lse[0][0] = -1e30f;
    assert_false(passes(&s));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(source_reads),   cmocka_unit_test(file_shrinks),
        cmocka_unit_test(sink_writes),    cmocka_unit_test(right_passes),
        cmocka_unit_test(wrong_fails),    cmocka_unit_test(mean_square_is_sharp),
        cmocka_unit_test(nonfinite_rows), cmocka_unit_test(rows_without_keys),
    };
    return cmocka_run_group_tests(tests, files_set_up, files_tear_down);
}
