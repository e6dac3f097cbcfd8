/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_engine.c - plan and execute against the fp64 reference, over random problems, numbers of workers,
 * quorums, layouts, ways in and out; the same bits whatever the threads, the residents and the road.
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

#include "attn/cuda.h"
#include "check.h"
#include "engine/engine.h"
#include "engine_case.h"

static attn_options random_options(uint64_t *seed)
{
    attn_options o = ATTN_INIT(attn_options);
    o.workers = 1 + case_random(seed, case_random(seed, 4) == 0 ? 200 : 20);
    o.resident = 1 + case_random(seed, 4);
    o.threads = 1 + (int)case_random(seed, 4);
    o.quorum = (attn_quorum)case_random(seed, 3);
    o.classic = o.quorum == ATTN_QUORUM_CYCLIC && case_random(seed, 3) == 0;
    return o;
}

static void describe(char *text, size_t capacity, const engine_case *c, const attn_options *o,
                     int from_source)
{
    char problem[512];
    attn_problem_print(&c->problem, problem, sizeof problem);
    snprintf(text, capacity, "%s W=%lld R=%lld threads=%d quorum=%d classic=%d source=%d", problem,
             (long long)o->workers, (long long)o->resident, o->threads, (int)o->quorum, o->classic,
             from_source);
}

static void test_run_is_the_reference(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 250; i++) {
        uint64_t seed = 1000 + i;
        attn_problem p = case_problem(&seed, i % 10 == 0 ? 300 : 70);
        attn_options o = random_options(&seed);
        engine_case c;
        char what[1024];
        int from_source = (int)case_random(&seed, 2);
        o.in_memory = !from_source && case_random(&seed, 2) == 0;
        case_open(&c, &p, seed);
        describe(what, sizeof what, &c, &o, from_source);
        attn_status status = case_run(&c, &o, from_source);
        if (status != ATTN_OK) {
            fail_msg("%s: %s", what, attn_last_error());
        }
        case_compare(&c, what);
        case_close(&c);
    }
}

/* Every road to the same partials gives the same bits: threads, residents, memory or source. */
static void compare_roads(const attn_problem *p, int64_t workers, uint64_t seed)
{
    attn_options o = {.size = sizeof o, .workers = workers, .threads = 1};
    engine_case c;
    case_open(&c, p, seed);
    assert_int_equal(case_run(&c, &o, 0), ATTN_OK);
    case_compare(&c, "one thread");
    size_t bytes = (size_t)(case_rows(&c) * p->dim_v) * sizeof(float);
    size_t lse_bytes = (size_t)case_rows(&c) * sizeof(float);
    float *o_first = malloc(bytes), *lse_first = malloc(lse_bytes);
    assert_true(o_first != NULL && lse_first != NULL);
    memcpy(o_first, c.o, bytes);
    memcpy(lse_first, c.lse, lse_bytes);
    for (int way = 0; way < 6; way++) {
        o.threads = 1 + way;
        o.resident = 1 + (way * 5) % 7;
        o.in_memory = way == 2;
        assert_int_equal(case_run(&c, &o, way % 2), ATTN_OK);
        assert_memory_equal(c.o, o_first, bytes);
        assert_memory_equal(c.lse, lse_first, lse_bytes);
    }
    free(o_first);
    free(lse_first);
    case_close(&c);
}

static void test_bits_repeat(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 30; i++) {
        uint64_t seed = 77 + i;
        attn_problem p = case_problem(&seed, 90);
        compare_roads(&p, 1 + case_random(&seed, 14), seed);
    }
}

/* Tasks and merges long enough that several threads share each. */
static void test_bits_repeat_in_long_tasks(void **state)
{
    (void)state;
    static const char *const problems[] = {"heads=4,kv_heads=2,tokens=500,dim=64,causal",
                                           "heads=3,tokens=480,dim=64",
                                           "tokens=1100,dim=64,causal",
                                           "heads=2,tokens=1300,dim=96,dtype=bf16",
                                           "tokens=1300,dim=64,dtype=bf16,causal",
                                           "tokens=1100,dim=64,dtype=bf16,window=200:100",
                                           "tokens=1100,dim=64,dtype=f16,window=200:100"};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        for (int64_t workers = 1; workers <= 5; workers += 2) {
            attn_problem p;
            assert_int_equal(attn_problem_parse(&p, problems[i]), ATTN_OK);
            compare_roads(&p, workers, i);
        }
    }
}

/* Outputs of 16 bits and odd strides: the rounded fp32 result. */
static void test_output_types_and_strides(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    assert_int_equal(attn_problem_parse(&p, "batch=2,heads=3,tokens=37,dim=12,dim_v=7,causal"), ATTN_OK);
    case_open(&c, &p, 5);
    attn_options o = ATTN_INIT(attn_options);
    for (int64_t workers = 1; workers <= 5; workers += 2) {
        o.workers = workers;
        assert_int_equal(case_run(&c, &o, 0), ATTN_OK);
        uint16_t *half = calloc((size_t)(case_rows(&c) * p.dim_v * 2), sizeof *half);
        assert_non_null(half);
        attn_io io = case_io(&c, 0, NULL, NULL);
        attn_problem q = p;
        q.dtype_out = ATTN_BF16;
        /* [b, n, h, d] with every second element left alone */
        io.o = (attn_tensor){half, {37 * 3 * 14, 14, 3 * 14, 2}};
        io.lse.data = NULL;
        assert_int_equal(attn_forward(&q, &io, &o), ATTN_OK);
        for (int64_t row = 0; row < case_rows(&c); row++) {
            int64_t b = row / (3 * 37), h = row / 37 % 3, n = row % 37;
            for (int64_t d = 0; d < 7; d++) {
                int64_t at = b * 37 * 3 * 14 + h * 14 + n * 3 * 14 + d * 2;
                assert_int_equal(half[(size_t)at], attn__f32_to_bf16(c.o[row * 7 + d]));
                assert_int_equal(half[(size_t)at + 1], 0);
            }
        }
        free(half);
    }
    case_close(&c);
}

static void test_nan_stays_in_its_rows(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=50,dim=8,causal"), ATTN_OK);
    case_open(&c, &p, 9);
    attn_options o = ATTN_INIT(attn_options);
    const attn_tensor *v = &c.tensor[ATTN_V];
    ((float *)v->data)[v->stride[1] * 1 + v->stride[2] * 30] = NAN; /* head 1, key 30 */
    for (o.workers = 1; o.workers <= 9; o.workers++) {
        assert_int_equal(case_run(&c, &o, 0), ATTN_OK);
        for (int64_t row = 0; row < 100; row++) {
            bool sees = row >= 50 && row % 50 >= 30;
            assert_int_equal(isnan(c.o[row * 8]) != 0, sees);
            assert_true(isnan(c.o[row * 8 + 1]) == 0);
            assert_true(isnan(c.lse[row]) == 0);
        }
    }
    case_close(&c);
}

/* ---- blocks of a longer sequence ---- */

/* Queries first_q.. against keys first_kv.., folded into what o and lse hold of them. */
static attn_status run_block(const engine_case *c, const attn_options *o, int64_t first_q, int64_t q_count,
                             int64_t first_kv, int64_t kv_count, bool merge)
{
    const attn_problem *whole = &c->problem;
    const int64_t n = whole->tokens_q, dim = whole->dim_v, ahead = whole->tokens_kv - n;
    const int64_t size = (int64_t)attn_dtype_size(whole->dtype);
    attn_problem p = *whole;
    attn_io io = ATTN_INIT(attn_io);
    p.placed = 1;
    p.first_q = first_q + (ahead > 0 ? ahead : 0);
    p.first_kv = first_kv + (ahead < 0 ? -ahead : 0);
    p.tokens_q = q_count;
    p.tokens_kv = kv_count;
    io.q = c->tensor[ATTN_Q], io.k = c->tensor[ATTN_K], io.v = c->tensor[ATTN_V];
    io.q.data = (char *)io.q.data + first_q * io.q.stride[2] * size;
    io.k.data = (char *)io.k.data + first_kv * io.k.stride[2] * size;
    io.v.data = (char *)io.v.data + first_kv * io.v.stride[2] * size;
    io.o = (attn_tensor){c->o + first_q * dim, {whole->heads_q * n * dim, n * dim, dim, 1}};
    io.lse = (attn_tensor){c->lse + first_q, {whole->heads_q * n, n, 1, 1}};
    io.merge = merge;
    return attn_forward(&p, &io, o);
}

/* Whatever the cuts: blocks of queries against blocks of keys, merged, are the whole. */
static void test_blocks_merge_to_the_whole(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 150; i++) {
        uint64_t seed = 4000 + i;
        attn_problem p = case_problem(&seed, 90);
        attn_options o = {.size = sizeof o, .threads = 1 + (int)case_random(&seed, 3)};
        engine_case c;
        char what[1024];
        case_open(&c, &p, seed);
        describe(what, sizeof what, &c, &o, 0);
        case_poison(&c);
        for (int64_t q = 0, rows; q < p.tokens_q; q += rows) {
            rows = 1 + case_random(&seed, p.tokens_q - q);
            for (int64_t k = 0, keys; k < p.tokens_kv; k += keys) {
                keys = 1 + case_random(&seed, p.tokens_kv - k);
                if (run_block(&c, &o, q, rows, k, keys, k > 0) != ATTN_OK) {
                    fail_msg("%s: %s", what, attn_last_error());
                }
            }
        }
        case_compare(&c, what);
        case_close(&c);
    }
}

static void refuse_io(const engine_case *c, const attn_io *io, const attn_options *o, attn_status want,
                      const char *words)
{
    assert_int_equal(attn_forward(&c->problem, io, o), want);
    if (strstr(attn_last_error(), words) == NULL) {
        fail_msg("\"%s\" says nothing of %s", attn_last_error(), words);
    }
}

static void test_merge_refusals(void **state)
{
    (void)state;
    engine_case c;
    attn_problem p;
    attn_source source;
    attn_sink sink;
    const attn_options one = ATTN_INIT(attn_options), three = {.size = sizeof three, .workers = 3};
    const int64_t cu[] = {0, 5};
    assert_int_equal(attn_problem_parse(&p, "tokens=5,dim=8"), ATTN_OK);
    case_open(&c, &p, 1);
    attn_io good = case_io(&c, 0, &source, &sink), io;
    good.merge = 1;
    refuse_io(&c, (io = good, io.lse.data = NULL, &io), &one, ATTN_EINVAL, "lse");
    io = good;
    io.o.stride[0] = io.o.stride[1] = 80, io.o.stride[2] = 16, io.o.stride[3] = 2;
    refuse_io(&c, &io, &one, ATTN_EINVAL, "dense");
    refuse_io(&c, &good, &three, ATTN_EUNSUPPORTED, "W = 1");
    io = case_io(&c, 1, &source, &sink);
    io.merge = 1;
    refuse_io(&c, &io, &one, ATTN_EINVAL, "merge"); /* into a sink */
    c.problem.dtype_out = ATTN_BF16;
    refuse_io(&c, &good, &one, ATTN_EINVAL, "fp32");
    c.problem.placed = 1;
    io = good;
    io.merge = 0;
    io.cu_seqlens_q = io.cu_seqlens_kv = cu;
    refuse_io(&c, &io, &one, ATTN_EINVAL, "placed");
    case_close(&c);
}

/* Where there is a GPU, test_cuda has its turn. */
static void test_no_gpu(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    const attn_options o = {.size = sizeof o, .device = ATTN_CUDA, .in_memory = 1};
    if (attn_cuda_look(0, &info) == ATTN_OK) {
        skip();
    }
    assert_int_equal(attn_problem_parse(&p, "tokens=5,dim=8"), ATTN_OK);
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_EUNSUPPORTED);
    assert_null(plan);
    assert_non_null(strstr(attn_last_error(), "CUDA"));
    assert_int_equal(attn_cuda_alloc(0, (void **)&plan, 16), ATTN_EUNSUPPORTED);
    assert_non_null(strstr(attn_last_error(), "device cpu"));
    attn_cuda_free(0, NULL);
}

static void test_memory_limit_picks_the_smallest_w(void **state)
{
    (void)state;
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, "heads=2,tokens=5000,dim=64"), ATTN_OK);
    attn_options o = {.size = sizeof o, .spool = "unused"};
    for (int64_t limit = 16000000; limit >= 1000000; limit = limit * 4 / 5) {
        attn_plan *plan, *smaller;
        attn_summary s = ATTN_INIT(attn_summary);
        o.memory_limit = limit;
        o.workers = 0;
        o.threads = 1;
        if (attn_plan_create(&plan, &p, &o) != ATTN_OK) {
            assert_null(plan);
            assert_true(limit < 3000000);
            assert_non_null(strstr(attn_last_error(), "least"));
            continue;
        }
        assert_int_equal(attn_plan_summary(plan, &s), ATTN_OK);
        assert_true(s.workspace <= limit);
        attn_plan_destroy(plan);
        for (o.workers = 1; o.workers < s.workers; o.workers++) {
            assert_int_equal(attn_plan_create(&smaller, &p, &o), ATTN_ELIMIT);
        }
    }
}

/* What is tried on the way and given up is not the caller's concern. */
static void test_success_says_nothing(void **state)
{
    (void)state;
    (void)attn_fail(ATTN_EIO, "");
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t random = seed;
        attn_problem p = case_problem(&random, 300);
        attn_options o = random_options(&random);
        engine_case c;
        o.workers = seed == 1 ? 1 : seed == 2 ? 290 : o.workers;
        case_open(&c, &p, seed);
        assert_int_equal(case_run(&c, &o, (int)(seed % 2)), ATTN_OK);
        assert_string_equal(attn_last_error(), "");
        case_close(&c);
    }
}

static void test_bad_options(void **state)
{
    (void)state;
    attn_problem p;
    attn_plan *plan;
    int64_t no_cover[] = {0, 1, 2}, cover[] = {0, 1, 3};
    assert_int_equal(attn_problem_parse(&p, "tokens=50,dim=8"), ATTN_OK);
    attn_options good = {.size = sizeof good, .workers = 7}, o;
    assert_int_equal(attn_plan_create(&plan, &p, (o = good, o.size = 3, &o)), ATTN_EINVAL);
    assert_int_equal(attn_plan_create(&plan, &p, (o = good, o.workers = -1, &o)), ATTN_EINVAL);
    assert_int_equal(attn_plan_create(&plan, &p, (o = good, o.memory_limit = -1, &o)), ATTN_EINVAL);
    assert_int_equal(attn_plan_create(&plan, &p, (o = good, o.quorum = (attn_quorum)9, &o)), ATTN_EINVAL);
    o = good;
    o.interest_set = no_cover;
    o.interest_size = 3;
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "3"));
    assert_null(plan);
    o.interest_set = cover;
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_OK);
    attn_plan_destroy(plan);
    assert_int_equal(attn_plan_create(&plan, &p, (o = good, o.kernel = "quantum", &o)), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "quantum"));
    o = good;
    o.memory_limit = 10;
    assert_int_equal(attn_plan_create(&plan, &p, &o), ATTN_ELIMIT);
    assert_int_equal(attn_plan_create(NULL, &p, &good), ATTN_EINVAL);
    assert_int_equal(attn_plan_create(&plan, NULL, &good), ATTN_EINVAL);
}

static void test_bad_io(void **state)
{
    (void)state;
    attn_problem p;
    engine_case c;
    attn_plan *plan;
    char workspace[1];
    assert_int_equal(attn_problem_parse(&p, "tokens=5,dim=8"), ATTN_OK);
    case_open(&c, &p, 1);
    assert_int_equal(attn_plan_create(&plan, &p, NULL), ATTN_OK);
    attn_io io = case_io(&c, 0, NULL, NULL);
    assert_int_equal(attn_execute(NULL, &io, workspace), ATTN_EINVAL);
    assert_int_equal(attn_execute(plan, &io, NULL), ATTN_EINVAL);
    assert_int_equal(attn_execute(plan, NULL, workspace), ATTN_EINVAL);
    io.size = 1;
    assert_int_equal(attn_execute(plan, &io, workspace), ATTN_EINVAL);
    io = case_io(&c, 0, NULL, NULL);
    io.k.data = NULL;
    assert_int_equal(attn_execute(plan, &io, workspace), ATTN_EINVAL);
    io = case_io(&c, 0, NULL, NULL);
    io.o.data = NULL;
    assert_int_equal(attn_execute(plan, &io, workspace), ATTN_EINVAL);
    io = case_io(&c, 0, NULL, NULL);
    io.o.data = (void *)(uintptr_t)io.v.data;
    assert_int_equal(attn_execute(plan, &io, workspace), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error(), "o begins where v does"));
    attn_plan_destroy(plan);
    attn_plan_destroy(NULL);
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_is_the_reference),
        cmocka_unit_test(test_bits_repeat),
        cmocka_unit_test(test_bits_repeat_in_long_tasks),
        cmocka_unit_test(test_output_types_and_strides),
        cmocka_unit_test(test_nan_stays_in_its_rows),
        cmocka_unit_test(test_blocks_merge_to_the_whole),
        cmocka_unit_test(test_merge_refusals),
        cmocka_unit_test(test_no_gpu),
        cmocka_unit_test(test_memory_limit_picks_the_smallest_w),
        cmocka_unit_test(test_success_says_nothing),
        cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_bad_io),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
