/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_features.c - what the GPU's kernels do beyond one problem in one call: sequences of unequal
 * length, partials merged and gradients added up over blocks of keys, each option of the gradients, and a
 * limit on multiprocessors.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

static attn_problem parse(const char *text)
{
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, text), ATTN_OK);
    return p;
}

/* Forward, and gradients if the case has them. */
static void try_case(cuda_case c, const attn_options *options)
{
    const attn_options plain = ATTN_INIT(attn_options);
    cuda_case_open(&c);
    cuda_case_try(&c, options != NULL ? options : &plain);
    cuda_case_close(&c);
}

static void try_both(cuda_case c, const attn_options *options)
{
    c.backward = true;
    try_case(c, options);
}

/* ---- sequences of unequal length ---- */

static int64_t *cumulate(const int64_t *length, int64_t count)
{
    int64_t *list = calloc((size_t)count + 1, sizeof *list);
    assert_non_null(list);
    for (int64_t b = 0; b < count; b++) {
        list[b + 1] = list[b] + length[b];
    }
    return list;
}

static void test_unequal_lengths(void **state)
{
    (void)state;
    enum { BATCH = 7 };
    static const int64_t q[BATCH] = {0, 70, 1, 0, 128, 33, 200}, kv[BATCH] = {5, 0, 130, 0, 128, 200, 77};
    static const char *const problems[] = {"heads=4,kv_heads=2,dim=128,dtype=bf16,out=bf16,causal",
                                           "heads=3,dim=64,dtype=f16,out=f16",
                                           "heads=4,kv_heads=1,dim=256,dtype=bf16,out=f32,window=40:3",
                                           "heads=4,kv_heads=2,dim=64,dtype=f32,out=f32,causal",
                                           "heads=2,dim=96,dtype=bf16,out=bf16,causal",
                                           "heads=4,kv_heads=2,dim=256,dtype=f32,out=f32,window=40:3"};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        for (int kind = CUDA_PLAIN; kind <= CUDA_NAN; kind += CUDA_NAN) {
            char text[200];
            (void)snprintf(text, sizeof text, "batch=%d,tokens=200,kv_tokens=200,%s%s", (int)BATCH,
                           problems[i], kind == CUDA_PLAIN ? ",total=432:540" : "");
            try_both((cuda_case){.problem = parse(text),
                                 .cu_q = cumulate(q, BATCH),
                                 .cu_kv = cumulate(kv, BATCH),
                                 .layout = (int)i % CUDA_LAYOUTS,
                                 .kind = (cuda_kind)kind,
                                 .seed = i},
                     NULL);
        }
    }
    cuda_conclude();
}

/* Few queries of sequences that differ much: a batch in the midst of generating text. */
static void test_unequal_caches(void **state)
{
    (void)state;
    static const int64_t q[] = {1, 1, 0, 1, 3}, kv[] = {900, 1, 50, 0, 2100};
    static const int64_t all_q[] = {3, 3, 3, 3, 3}, all_kv[] = {2100, 2100, 2100, 2100, 2100};
    attn_problem p =
        parse("batch=5,heads=8,kv_heads=2,tokens=3,kv_tokens=2100,dim=128,dtype=bf16,out=bf16,causal");
    try_both((cuda_case){.problem = p, .cu_q = cumulate(q, 5), .cu_kv = cumulate(kv, 5), .seed = 3}, NULL);
    /* as much as the plan, which knows of no lengths, has room for */
    try_both((cuda_case){.problem = p, .cu_q = cumulate(all_q, 5), .cu_kv = cumulate(all_kv, 5), .seed = 5},
             NULL);
    p.dim_qk = p.dim_v = 64;
    p.dtype = p.dtype_out = ATTN_F16;
    p.total_q = 6;
    p.total_kv = 3051;
    try_both((cuda_case){.problem = p, .cu_q = cumulate(q, 5), .cu_kv = cumulate(kv, 5), .seed = 4}, NULL);
    cuda_conclude();
}

/* A plan that was told no totals has room for sequences that are all as long as may be: one by one they take
 * more workspace than as many equal ones, and where those take none they must do without. */
static void test_full_sequences(void **state)
{
    (void)state;
    enum { BATCH = 48 };
    static const char *const problems[] = {"batch=48,heads=8,tokens=128,dim=64,dtype=bf16,out=bf16",
                                           "batch=48,heads=2,tokens=64,dim=128,dtype=f16,out=f32,causal",
                                           "batch=48,heads=2,tokens=64,dim=256,dtype=bf16,out=bf16",
                                           "batch=48,heads=32,kv_heads=1,tokens=64,dim=64,dtype=bf16,causal",
                                           "batch=48,heads=2,tokens=64,dim=64,dtype=f32",
                                           "batch=48,heads=4,kv_heads=2,tokens=128,dim=128,dtype=f32,causal"};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        const attn_problem p = parse(problems[i]);
        int64_t lengths[BATCH];
        for (int b = 0; b < BATCH; b++) {
            lengths[b] = p.tokens_q;
        }
        try_both((cuda_case){.problem = p,
                             .cu_q = cumulate(lengths, BATCH),
                             .cu_kv = cumulate(lengths, BATCH),
                             .rows = 8,
                             .seed = 130 + i},
                 NULL);
    }
    cuda_conclude();
}

/* ---- more keys and values than a GPU's cache holds ---- */

/* Causal, so some heads take turns: a few, and at the end more.  No count divides another. */
static void test_many_heads(void **state)
{
    (void)state;
    enum { BATCH = 13 };
    static const char *const problems[] = {
        "batch=5,heads=21,tokens=300,kv_tokens=2000,dim=64,dtype=bf16,out=bf16,causal",
        "batch=9,heads=20,kv_heads=5,tokens=260,kv_tokens=3000,dim=128,dtype=f16,out=f16,causal",
        "batch=40,heads=4,tokens=700,dim=256,dtype=bf16,out=f32,window=300:0",
        "batch=3,heads=30,tokens=700,kv_tokens=2500,dim=64,dtype=f16,out=f16,causal"};
    static const int64_t q[BATCH] = {500, 1, 0, 257, 128, 499, 3, 256, 490, 77, 385, 500, 12};
    static const int64_t kv[BATCH] = {2500, 700, 50, 2499, 100, 2300, 2500, 0, 2048, 2490, 1, 2500, 2500};
    /* gradients hold queries and sums there */
    static const char *const gradients[] = {
        "batch=3,heads=30,tokens=700,kv_tokens=640,dim=128,dtype=bf16,out=bf16,causal",
        "batch=5,heads=14,tokens=420,kv_tokens=400,dim=256,dtype=f16,out=f32,window=150:0",
        "batch=6,heads=32,kv_heads=16,tokens=600,kv_tokens=500,dim=64,dtype=bf16,out=bf16,causal"};
    static const char *const in_order[] = {
        "batch=4,heads=20,tokens=700,kv_tokens=640,dim=128,dtype=bf16,out=bf16",
        "batch=3,heads=40,kv_heads=10,tokens=900,kv_tokens=500,dim=64,dtype=f16,out=f16",
        "batch=5,heads=9,tokens=420,kv_tokens=1000,dim=256,dtype=bf16,out=f32"};
    for (size_t i = 0; i < (cuda.small ? 1 : sizeof problems / sizeof problems[0]); i++) {
        try_case((cuda_case){.problem = parse(problems[i]), .rows = 24, .seed = 70 + i}, NULL);
    }
    for (size_t i = 0; i < (cuda.small ? 0 : sizeof gradients / sizeof gradients[0]); i++) {
        try_both((cuda_case){.problem = parse(gradients[i]), .rows = 24, .seed = 90 + i}, NULL);
    }
    /* heads take turns without a mask only where sums are added in order */
    const attn_options fixed = {.size = sizeof fixed, .deterministic = 1};
    for (size_t i = 0; i < (cuda.small ? 0 : sizeof in_order / sizeof in_order[0]); i++) {
        try_both((cuda_case){.problem = parse(in_order[i]), .rows = 24, .seed = 110 + i}, &fixed);
    }
    if (!cuda.small) {
        try_case((cuda_case){.problem = parse("batch=13,heads=7,tokens=500,kv_tokens=2500,dim=128,dtype=bf16,"
                                              "out=bf16,causal"),
                             .cu_q = cumulate(q, BATCH),
                             .cu_kv = cumulate(kv, BATCH),
                             .rows = 24,
                             .seed = 80},
                 NULL);
    }
    cuda_conclude();
}

/* ---- blocks of keys ---- */

/* The tensor there, from a token on. */
static attn_tensor cut(const cuda_tensor *x, int64_t token)
{
    attn_tensor t = cuda_tensor_there(x);
    memcpy(t.stride, x->host.stride, sizeof t.stride);
    t.data = (char *)t.data + token * t.stride[2] * (int64_t)attn_dtype_size(x->host.dtype);
    return t;
}

/* One block of keys, with a workspace of its own. */
static attn_status run_block(const cuda_case *c, bool backward, const char *kernel, int64_t first,
                             int64_t count, bool merge)
{
    attn_problem p = c->problem;
    attn_options o = {
        .size = sizeof o, .device = ATTN_CUDA, .gpu = cuda.gpu, .in_memory = 1, .kernel = kernel};
    attn_io io = cuda_case_io(c);
    attn_gradients g = cuda_case_gradients(c);
    p.placed = 1;
    p.first_q = p.tokens_kv - p.tokens_q;
    p.first_kv = first;
    p.tokens_kv = count;
    io.k = g.k = cut(&c->k, first);
    io.v = g.v = cut(&c->v, first);
    io.merge = merge;
    if (backward) {
        g.dk = cut(&c->dk, first);
        g.dv = cut(&c->dv, first);
        return attn_backward(&p, &g, &o);
    }
    return attn_forward(&p, &io, &o);
}

static void try_blocks(const char *problem)
{
    static const int64_t lengths[] = {64, 1, 100, 135}; /* 300 keys */
    cuda_case c = {
        .problem = parse(problem), .backward = true, .accumulate = true, .give_delta = true, .seed = 21};
    cuda_case_open(&c);
    for (int i = 0; i < cuda.row_count; i++) {
        for (int backward = 0; backward < 2; backward++) {
            attn_status status = ATTN_OK;
            int64_t first = 0;
            cuda_case_reset(&c, backward);
            for (int k = 0; k < 4 && status == ATTN_OK; k++) {
                status = run_block(&c, backward, cuda.rows[i].name, first, lengths[k], k > 0);
                first += lengths[k];
            }
            if (status == ATTN_EUNSUPPORTED) {
                cuda.refused++;
                continue;
            }
            cuda_expect(status == ATTN_OK, "%s: %s", problem, attn_last_error());
            *(backward ? &cuda.backward : &cuda.forward) += 1;
            cuda_case_fetch(&c, backward);
            cuda_case_compare(&c, backward, &cuda.rows[i]);
        }
    }
    cuda_case_close(&c);
}

static void test_blocks_of_keys(void **state)
{
    (void)state;
    try_blocks("batch=2,heads=4,kv_heads=2,tokens=250,kv_tokens=300,dim=128,dtype=bf16,causal");
    try_blocks("heads=3,tokens=300,dim=64,dtype=f16");
    try_blocks("heads=4,kv_heads=1,tokens=200,kv_tokens=300,dim=256,dtype=bf16,window=90:10");
    try_blocks("heads=4,kv_heads=1,tokens=2,kv_tokens=300,dim=128,dtype=bf16,causal");
    try_blocks("heads=2,tokens=300,dim=64,dtype=f32,causal");
    try_blocks("heads=2,tokens=300,dim=200,dtype=f32,causal");
    cuda_conclude();
}

/* ---- options ---- */

static void test_gradient_options(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "batch=2,heads=4,kv_heads=2,tokens=260,dim=128,dtype=bf16,out=bf16,causal",
        "heads=4,kv_heads=1,tokens=150,kv_tokens=260,dim=64,dtype=f16,out=f32",
        "heads=4,kv_heads=1,tokens=260,dim=256,dtype=bf16,out=bf16",
        "heads=4,kv_heads=2,tokens=200,dim=64,dtype=f32,causal",
        "heads=4,kv_heads=2,tokens=200,dim=256,dtype=f32,causal"};
    const attn_options fixed = {.size = sizeof fixed, .deterministic = 1};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        const attn_problem p = parse(problems[i]);
        try_both((cuda_case){.problem = p, .no_dq = true, .seed = 1}, NULL);
        try_both((cuda_case){.problem = p, .no_dk = true, .give_delta = true, .seed = 2}, NULL);
        try_both((cuda_case){.problem = p, .no_dv = true, .seed = 3}, NULL);
        try_both((cuda_case){.problem = p, .no_dk = true, .no_dv = true, .seed = 4}, NULL);
        try_both((cuda_case){.problem = p, .accumulate = true, .seed = 5}, NULL);
        try_both((cuda_case){.problem = p, .give_delta = true, .accumulate = true, .seed = 6}, &fixed);
        try_both((cuda_case){.problem = p, .layout = CUDA_PADDED, .seed = 7}, &fixed);
    }
    cuda_conclude();
}

static void test_fewer_multiprocessors(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "batch=2,heads=4,tokens=300,dim=128,dtype=bf16,out=bf16,causal",
        "heads=8,kv_heads=2,tokens=1,kv_tokens=5000,dim=64,dtype=f16,out=f16",
        "heads=2,tokens=300,dim=64,dtype=f32",
        /* a block has many tiles in turn that see no key */
        "heads=2,tokens=1500,kv_tokens=100,dim=128,dtype=bf16,out=bf16,causal",
        "heads=2,tokens=300,dim=256,dtype=f32,causal", "heads=2,tokens=300,dim=200,dtype=f16,out=f16"};
    for (int sms = 1; sms <= 40; sms += 39) {
        const attn_options o = {.size = sizeof o, .sms = sms};
        for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
            try_both((cuda_case){.problem = parse(problems[i]), .rows = 16, .seed = 9}, &o);
        }
    }
    cuda_conclude();
}

/* Of 64 dims tiles are as high as fills the multiprocessors best: of 256 rows, 192, 128 (enqueued_flash). */
static void test_tiles_of_every_height(void **state)
{
    (void)state;
    static const struct {
        const char *problem;
        int sms;
    } cases[] = {{"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64", 1},
                 {"batch=3,heads=6,tokens=380,kv_tokens=400,dim=64", 1},
                 {"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64", 0}};
    for (int i = 0; i < 3; i++) {
        const attn_options o = {.size = sizeof o, .sms = cases[i].sms};
        for (int kind = 0; kind < (cuda.small ? 1 : CUDA_KINDS); kind++) {
            attn_problem p = parse(cases[i].problem);
            p.dtype = p.dtype_out = kind % 2 == 0 ? ATTN_BF16 : ATTN_F16;
            p.heads_kv = kind % 3 == 0 ? 2 : 6;
            p.mask = (attn_mask)((kind + i) % 3);
            p.window_left = p.mask == ATTN_MASK_WINDOW ? 90 : 0;
            p.window_right = p.mask == ATTN_MASK_WINDOW ? 40 : 0;
            try_case((cuda_case){.problem = p,
                                 .kind = (cuda_kind)kind,
                                 .layout = kind % CUDA_LAYOUTS,
                                 .rows = 24,
                                 .seed = 12},
                     &o);
        }
    }
    cuda_conclude();
}

/* Few multiprocessors have long shares of a cache, which few-sm90 gives to other kernels; whole steps, a
 * rest, masks at either end. */
static void test_long_shares(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "heads=1,tokens=64,kv_tokens=12800,dim=128,dtype=bf16,out=bf16",
        "heads=2,tokens=50,kv_tokens=13013,dim=128,dtype=f16,out=f16,causal",
        "heads=16,kv_heads=2,tokens=5,kv_tokens=6501,dim=256,dtype=f16,out=f32,causal",
        "heads=1,tokens=33,kv_tokens=7001,dim=256,dtype=bf16,out=bf16",
        "heads=4,kv_heads=1,tokens=9,kv_tokens=15001,dim=120,dtype=bf16,out=bf16,window=14000:2",
        "heads=8,kv_heads=1,tokens=6,kv_tokens=9001,dim=200,dtype=f16,out=f16,window=8000:0"};
    for (int kind = CUDA_PLAIN; kind < CUDA_KINDS && !cuda.small; kind++) {
        for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
            const attn_options o = {.size = sizeof o, .sms = i == 1 || i == 2 ? 8 : 4};
            const cuda_case c = {
                .problem = parse(problems[i]), .kind = (cuda_kind)kind, .rows = 12, .seed = 11};
            try_case(c, &o);
        }
    }
    cuda_conclude();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unequal_lengths),       cmocka_unit_test(test_unequal_caches),
        cmocka_unit_test(test_full_sequences),        cmocka_unit_test(test_many_heads),
        cmocka_unit_test(test_blocks_of_keys),        cmocka_unit_test(test_gradient_options),
        cmocka_unit_test(test_fewer_multiprocessors), cmocka_unit_test(test_tiles_of_every_height),
        cmocka_unit_test(test_long_shares),
    };
    return cuda_main(argc, argv, "cuda_features", tests, sizeof tests / sizeof tests[0]);
}
