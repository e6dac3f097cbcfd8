/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_backward_bits.c - gradients of whole problems have the same bits whatever the number of threads, with
 * the least workspace, and whether sequences come together or alone.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backward_case.h"
#include "engine_case.h"

/* Copies of dq, dk and dv, as an execute left them. */
typedef struct bits {
    char *kept[3];
} bits;

static bits keep_bits(const backward_case *c)
{
    bits b = {0};
    case_tensor_keep(&c->dq, &b.kept[0]);
    case_tensor_keep(&c->dk, &b.kept[1]);
    case_tensor_keep(&c->dv, &b.kept[2]);
    return b;
}

static void free_bits(bits *b)
{
    free(b->kept[0]), free(b->kept[1]), free(b->kept[2]);
}

static void expect_bits(const backward_case *c, const bits *b, const char *what)
{
    const case_tensor *results[] = {&c->dq, &c->dk, &c->dv};
    for (int x = 0; x < 3; x++) {
        if (memcmp(results[x]->buffer.data, b->kept[x], results[x]->buffer.bytes) != 0) {
            fail_msg("%s: other bits of d%c", what, "qkv"[x]);
        }
    }
}

static void test_bits_repeat(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "heads=2,kv_heads=1,tokens=500,kv_tokens=1400,dim=8,causal",
        "heads=2,tokens=500,kv_tokens=1400,dim=12,dim_v=5,window=400:100,dtype=bf16,out=bf16",
        "heads=1,tokens=1000,kv_tokens=1400,dim=16",
        "heads=1,tokens=1000,kv_tokens=700,dim=8,causal,dtype=f16",
    };
    static const int threads[] = {1, 2, 3, 5, 16};
    for (int i = 0; i < 8; i++) {
        backward_case c = backward_case_long(problems[i % 4], i / 4 && i % 4 != 3, i % 2);
        bits first = {0};
        backward_case_open(&c, (uint64_t)i);
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            attn_options o = {.size = sizeof o, .threads = threads[t]};
            assert_int_equal(backward_case_run(&c, &o), ATTN_OK);
            if (t == 0) {
                backward_case_compare(&c, problems[i % 4]);
                first = keep_bits(&c);
            }
            expect_bits(&c, &first, problems[i % 4]);
        }
        free_bits(&first);
        backward_case_close(&c);
    }
}

/* The least workspace, where dq in 16 bits is made in a pass of its own, gives the same bits. */
static void test_bits_of_the_least_workspace(void **state)
{
    (void)state;
    int smaller = 0;
    for (uint64_t i = 0; i < 60; i++) {
        uint64_t seed = 9000 + i;
        char what[1024];
        backward_case c =
            i % 6 == 0 ? backward_case_long("heads=4,kv_heads=2,tokens=500,kv_tokens=1400,dim=16,dtype=bf16,"
                                            "out=bf16,causal",
                                            (int)(i / 6 % 2), (int)(i / 12 % 2))
                       : backward_case_random(&seed, 70);
        attn_options o = {.size = sizeof o, .threads = 1 + (int)case_random(&seed, 3)};
        o.kernel = backward_case_kernel(&c.problem, &seed);
        backward_case_open(&c, seed);
        backward_case_describe(what, sizeof what, &c, &o);
        assert_int_equal(backward_case_run(&c, &o), ATTN_OK);
        bits before = keep_bits(&c);
        long long least = 0;
        attn_options none = o;
        none.memory_limit = 1;
        assert_int_equal(backward_case_run(&c, &none), ATTN_ELIMIT);
        assert_int_equal(sscanf(attn_last_error(), "the gradients need %lld bytes", &least), 1);
        attn_plan *plan;
        attn_options whole = o;
        whole.backward = whole.in_memory = 1;
        assert_int_equal(attn_plan_create(&plan, &c.problem, &whole), ATTN_OK);
        smaller += attn_plan_workspace(plan) > (size_t)least;
        attn_plan_destroy(plan);
        o.memory_limit = least;
        if (backward_case_run(&c, &o) != ATTN_OK) {
            fail_msg("%s: %s", what, attn_last_error());
        }
        expect_bits(&c, &before, what);
        free_bits(&before);
        backward_case_close(&c);
    }
    assert_true(smaller >= 15);
}

static void run_alone(backward_case *c, const case_piece *s, const attn_options *options)
{
    attn_gradients io = backward_case_io(c);
    attn_problem p = c->problem;
    if (s->q_count == 0 || s->kv_count == 0) {
        return;
    }
    p.batch = 1, p.tokens_q = s->q_count, p.tokens_kv = s->kv_count;
    io.cu_seqlens_q = io.cu_seqlens_kv = NULL;
    attn_tensor *of_q[] = {&io.q, &io.o, &io.lse, &io.delta, &io.dout, &io.dq};
    const case_tensor *from_q[] = {&c->q, &c->o, &c->lse, &c->delta, &c->dout, &c->dq};
    attn_tensor *of_kv[] = {&io.k, &io.v, &io.dk, &io.dv};
    const case_tensor *from_kv[] = {&c->k, &c->v, &c->dk, &c->dv};
    for (int i = 0; i < 6; i++) {
        *of_q[i] = of_q[i]->data == NULL ? *of_q[i] : case_tensor_cut(from_q[i], s->q_first);
    }
    for (int i = 0; i < 4; i++) {
        *of_kv[i] = of_kv[i]->data == NULL ? *of_kv[i] : case_tensor_cut(from_kv[i], s->kv_first);
    }
    assert_int_equal(attn_backward(&p, &io, options), ATTN_OK);
}

/* Sequences one at a time write the same bits in the same places as all together. */
static void test_sequences_alone(void **state)
{
    (void)state;
    int compared = 0;
    for (uint64_t i = 0; i < 150; i++) {
        uint64_t seed = 9000 + i;
        backward_case c = backward_case_random(&seed, 90);
        char what[1024];
        attn_options o = {.size = sizeof o, .threads = 2};
        c.accumulate = 0;
        backward_case_open(&c, seed);
        assert_int_equal(backward_case_run(&c, &o), ATTN_OK);
        backward_case_describe(what, sizeof what, &c, &o);
        bits together = keep_bits(&c);
        o.backward = 1;
        o.kernel = case_kernel(&c.problem, &o);
        for (int64_t b = 0; c.cu_q != NULL && b < c.problem.batch; b++) {
            case_piece s = case_piece_of(&c.problem, c.cu_q, c.cu_kv, b);
            run_alone(&c, &s, &o);
            compared++;
        }
        expect_bits(&c, &together, what);
        free_bits(&together);
        backward_case_close(&c);
    }
    assert_true(compared > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_repeat),
        cmocka_unit_test(test_bits_of_the_least_workspace),
        cmocka_unit_test(test_sequences_alone),
    };
    return cmocka_run_group_tests_name("backward_bits", tests, NULL, NULL);
}
