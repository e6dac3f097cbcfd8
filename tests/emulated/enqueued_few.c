/* SPDX-License-Identifier: Apache-2.0 */
/*
 * enqueued_few.c - the launcher of few-sm90 without a GPU: what it enqueues for random problems has room in
 * the workspace that a plan was told of, and ends with a merge where it must.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "emulated/driver.h"
#include "engine/engine.h"
#include "kernel/cuda/few_params.h"
#include "kernel/cuda/rows.h"

/* ---- the driver ---- */

static struct {
    int kernels;
    few_params params; /* of the last */
    size_t shared;     /* bytes, likewise */
    unsigned threads;  /* of a block of the first */
    int64_t grid;      /* blocks of the last */
} enqueued;

static CUresult launch(const CUlaunchConfig *config, CUfunction of, void **params, void **extra)
{
    (void)of, (void)extra;
    assert_true(config->gridDimX > 0);
    enqueued.threads = enqueued.kernels == 0 ? config->blockDimX : enqueued.threads;
    enqueued.grid = config->gridDimX;
    enqueued.kernels++;
    memcpy(&enqueued.params, params[0], sizeof enqueued.params);
    enqueued.shared = config->sharedMemBytes;
    return CUDA_SUCCESS;
}

static int install(void **state)
{
    (void)state;
    driver_install(launch);
    return 0;
}

/* ---- problems ---- */

static attn_problem random_problem(uint64_t *seed)
{
    attn_problem p = ATTN_INIT(attn_problem);
    p.dtype = p.dtype_out = ATTN_BF16;
    p.batch = check_between(seed, 1, 80);
    p.heads_kv = check_between(seed, 1, 12);
    p.heads_q = p.heads_kv * check_between(seed, 1, 12);
    p.tokens_q = check_between(seed, 1, 16);
    p.tokens_kv = check_between(seed, 1, (int64_t)1 << check_between(seed, 4, 17));
    p.dim_qk = p.dim_v = (int64_t)64 << check_between(seed, 0, 2);
    p.mask = (attn_mask)check_between(seed, 0, 2);
    if (p.mask == ATTN_MASK_WINDOW) {
        p.window_left = check_between(seed, 0, p.tokens_kv);
        p.window_right = check_between(seed, 0, p.tokens_kv);
    }
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    return p;
}

/* few_merge_direct.cu has a lane for each member and 4 columns of a row, and no shared memory. */
static void direct_has_lanes(void)
{
    const few_params *p = &enqueued.params;
    assert_true(p->each > 1 && p->each / (p->pairs ? 2 : 1) <= 2 * FEW_DIRECT);
    assert_true(p->members == 1 || p->members == 2);
    assert_true(p->merge_rows > 0);
    assert_true(p->merge_rows * (p->dim_v / 4) * p->members <= FEW_MERGE_THREADS);
}

/* few_merge.cu has rows of parts in shared memory, and their maxima and sums of weights once more.  Both go
 * on from a block's rows to those row_blocks further. */
static void merge_has_room(void)
{
    const few_params *p = &enqueued.params;
    const size_t row = (size_t)(FEW_PART_ROW(p->dim_v) + FEW_MERGE_SUMS) * sizeof(float);
    assert_true(p->row_blocks > 0 && enqueued.grid % p->row_blocks == 0);
    if (enqueued.shared == 0) {
        assert_int_equal(enqueued.grid / p->row_blocks, p->batch * p->heads_kv * p->tiles);
        direct_has_lanes();
        return;
    }
    assert_true(p->merge_rows > 0 && p->merge_parts > 0);
    assert_true(enqueued.shared >= (size_t)p->merge_parts * (size_t)p->merge_rows * row);
    assert_true(enqueued.shared <= FEW_MERGE_SHARED);
}

/* What is enqueued for the call. */
static void enqueue(const attn__cuda_call *call, void *workspace)
{
    enqueued.kernels = 0;
    assert_int_equal(attn__cuda_few_sm90.forward(call, &driver_device, workspace, NULL), ATTN_OK);
    if (enqueued.kernels == 2) {
        merge_has_room();
    }
}

/* The blocks that have work, of tiles of `units` units in all: few_cut_of() of few_share.cuh.  Where each
 * tile is cut by itself, all have. */
static int64_t working(int64_t units)
{
    return enqueued.params.each > 0 ? enqueued.params.blocks
                                    : attn__min(enqueued.params.blocks, attn__max(units / FEW_LEAST, 1));
}

static size_t written(int64_t units)
{
    const few_params *p = &enqueued.params;
    return (size_t)(working(units) * 2 * p->rows) * (size_t)FEW_PART_ROW(p->dim_v) * sizeof(float);
}

/* ---- tests ---- */

/* Fewer tokens than the plan's, and sequences of unequal length, are other numbers of blocks. */
static void workspace_for_every_call(void **state)
{
    static _Alignas(16) char workspace[16];
    uint64_t seed = 1;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        const attn_problem p = random_problem(&seed);
        attn__cuda_call call = driver_call(&p);
        call.sms = (int)(check_between(&seed, 0, 2) == 0 ? check_between(&seed, 1, 132) : 0);
        const size_t planned = attn__cuda_few_sm90.forward_workspace(&call, &driver_device);
        const int64_t units = attn__ceil_div(p.tokens_kv, FEW_UNIT) * p.batch * p.heads_kv;
        for (call.tokens_q = p.tokens_q; call.tokens_q > 0; call.tokens_q--) {
            enqueue(&call, workspace);
            assert_true(written(units * enqueued.params.tiles) <= planned);
        }
        enqueue(&call, workspace);
        assert_int_equal(enqueued.kernels, 0); /* no query */
        call.tokens_q = p.tokens_q;
        call.cu_q = call.cu_kv = (const int64_t *)(const void *)&seed; /* on the device: nobody looks */
        call.total_q = p.batch * p.tokens_q, call.total_kv = p.batch * p.tokens_kv;
        enqueue(&call, workspace);
        assert_true(written(units * enqueued.params.tiles) <= planned);
    }
}

/* Keys that some query of a tile sees. */
static int64_t keys_of_tile(const attn_problem *p, int64_t index)
{
    const few_params *e = &enqueued.params;
    const int64_t shift = p->tokens_kv - p->tokens_q, group = p->heads_q / p->heads_kv;
    const int64_t last = attn__min((index + 1) * e->height, p->tokens_q * group) - 1;
    int64_t seen = 0;
    for (int64_t key = 0; key < p->tokens_kv; key++) {
        seen += key <= last / group + shift + e->right && key >= index * e->height / group + shift - e->left;
    }
    return seen;
}

/* Without a merge every block's share is whole tiles. */
static void merged_where_cut(void **state)
{
    static _Alignas(16) char workspace[16];
    uint64_t seed = 2;
    int whole = 0;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        const attn_problem p = random_problem(&seed);
        const attn__cuda_call call = driver_call(&p);
        enqueue(&call, workspace);
        const few_params *e = &enqueued.params;
        const int64_t units = attn__ceil_div(keys_of_tile(&p, 0), FEW_UNIT),
                      all = units * p.batch * p.heads_kv;
        if (enqueued.kernels == 2 || all == 0) {
            continue;
        }
        if (e->each > 0) {
            assert_int_equal(e->each, 1);
            whole++;
            continue;
        }
        assert_int_equal(e->tiles, 1);
        for (int64_t block = 0; block < working(all); block++) {
            assert_int_equal(block * all / working(all) % units, 0);
        }
        whole++;
    }
    assert_true(whole > 100);
}

/* Where each tile is cut by itself, no block is without work, and pairs share one tile. */
static void tiles_cut_alike(void **state)
{
    static _Alignas(16) char workspace[16];
    uint64_t seed = 3;
    int alone = 0, several = 0, pairs = 0;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        attn_problem p = random_problem(&seed);
        p.batch = check_between(&seed, 1, 3);
        const attn__cuda_call call = driver_call(&p);
        enqueue(&call, workspace);
        const few_params *e = &enqueued.params;
        const int64_t tiles = p.batch * p.heads_kv * e->tiles;
        assert_true(!e->pairs || (e->each >= 4 && e->each % 2 == 0 && e->height > 16));
        if (e->each == 0) {
            continue;
        }
        assert_int_equal(e->blocks, e->each * tiles);
        assert_true(e->blocks <= FEW_BLOCKS(p.dim_qk, e->height, false) * driver_device.sms);
        for (int64_t tile = 0; tile < e->tiles; tile++) {
            assert_true(keys_of_tile(&p, tile) > (e->each * FEW_LEAST - 1) * FEW_UNIT);
        }
        alone += e->tiles == 1, several += e->tiles > 1, pairs += e->pairs;
    }
    assert_true(alone > 100 && several > 100 && pairs > 100);
}

/* Where a number of blocks near the most lets all shares end with a stage of the ring, it is taken; else the
 * most that lets tiles end with shares. */
static void shares_of_whole_stages(void **state)
{
    static _Alignas(16) char workspace[16];
    static const struct {
        int64_t heads_kv, tokens_kv, dim;
        int32_t blocks; /* of 132 multiprocessors */
    } cases[] = {
        {8, 32768, 128, 256}, {8, 65536, 64, 256},  {8, 16384, 256, 128}, {4, 65536, 128, 256},
        {8, 33792, 128, 264}, {8, 33333, 128, 264}, {7, 32768, 128, 259},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attn_problem p = ATTN_INIT(attn_problem);
        p.dtype = p.dtype_out = ATTN_BF16;
        p.batch = 1, p.heads_q = p.heads_kv = cases[i].heads_kv;
        p.tokens_q = 1, p.tokens_kv = cases[i].tokens_kv;
        p.dim_qk = p.dim_v = cases[i].dim;
        assert_int_equal(attn_problem_check(&p), ATTN_OK);
        const attn__cuda_call call = driver_call(&p);
        enqueue(&call, workspace);
        assert_int_equal(enqueued.params.blocks, cases[i].blocks);
        assert_int_equal(enqueued.kernels, 2);
    }
}

/* Which kernel a call takes: two warpgroups where a block's share is long, and what merges its parts.  The
 * problems of few multiprocessors are those of test_cuda_features.c and test_cuda_repeats.c, which mean to
 * meet two warpgroups on a GPU. */
static void long_shares_are_split(void **state)
{
    static _Alignas(16) char workspace[16];
    static const struct {
        const char *problem;
        int sms; /* 0: all */
        bool split, direct;
        int32_t blocks, members;
    } cases[] = {
        {"heads=16,tokens=64,kv_tokens=32768,dim=128", 0, true, true, 128, 1},
        {"heads=8,tokens=64,kv_tokens=32768,dim=256", 0, true, true, 128, 1},
        {"heads=32,tokens=64,kv_tokens=32768,dim=64", 0, false, true, 256, 1},
        {"heads=8,tokens=64,kv_tokens=16384,dim=256", 0, false, true, 128, 1},
        {"heads=64,kv_heads=8,tokens=8,kv_tokens=32768,dim=128", 0, false, true, 256, 1},
        {"heads=64,kv_heads=8,tokens=8,kv_tokens=65536,dim=64", 0, false, true, 256, 2},
        {"heads=64,kv_heads=8,tokens=4,kv_tokens=131072,dim=128", 0, true, true, 128, 1},
        {"heads=64,kv_heads=8,tokens=2,kv_tokens=131072,dim=128", 0, false, false, 256, 1},
        {"heads=64,kv_heads=8,tokens=16,kv_tokens=131072,dim=128", 0, false, true, 128, 1},
        {"heads=16,kv_heads=2,tokens=8,kv_tokens=131072,dim=256", 0, true, false, 128, 1},
        {"heads=64,kv_heads=8,tokens=8,kv_tokens=32768,dim=128", 64, true, true, 64, 1},
        {"heads=1,tokens=64,kv_tokens=12800,dim=128", 4, true, true, 4, 1},
        {"heads=2,tokens=50,kv_tokens=13013,dim=128,causal", 8, true, true, 8, 1},
        {"heads=16,kv_heads=2,tokens=5,kv_tokens=6501,dim=256,causal", 8, true, true, 8, 1},
        {"heads=1,tokens=33,kv_tokens=7001,dim=256", 4, true, true, 4, 1},
        {"heads=4,kv_heads=1,tokens=9,kv_tokens=15001,dim=120,window=14000:2", 4, true, true, 4, 1},
        {"heads=8,kv_heads=1,tokens=6,kv_tokens=9001,dim=200,window=8000:0", 4, true, true, 4, 1},
        {"heads=1,tokens=64,kv_tokens=12900,dim=128,causal", 4, true, true, 4, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attn_problem p;
        assert_int_equal(attn_problem_parse(&p, cases[i].problem), ATTN_OK);
        p.dtype = p.dtype_out = ATTN_BF16;
        attn__cuda_call call = driver_call(&p);
        call.sms = cases[i].sms;
        enqueue(&call, workspace);
        const few_params *e = &enqueued.params;
        assert_int_equal(enqueued.kernels, 2);
        assert_int_equal(enqueued.threads == FEW_THREADS(64, true), cases[i].split);
        assert_int_equal(enqueued.shared == 0, cases[i].direct);
        assert_int_equal(e->blocks, cases[i].blocks);
        assert_int_equal(e->members, cases[i].members);
        assert_true(!cases[i].split || e->pairs);
    }
}

/* Where it is taken, and where a kernel of full tiles is: problems that the other took a sixth longer for at
 * least, on an H200 (docs/perf/cuda_few.md, "Which kernel"). */
static void taken_where_faster(void **state)
{
    static const struct {
        const char *problem;
        bool unequal, taken;
    } cases[] = {
        {"heads=64,kv_heads=8,tokens=16,kv_tokens=32000,dim=128", false, true},
        {"heads=8,tokens=100,kv_tokens=32000,dim=128", false, true},
        {"heads=8,tokens=500,kv_tokens=32000,dim=256,causal", false, true},
        {"heads=2,tokens=4000,kv_tokens=32000,dim=128,causal", false, true},
        {"heads=32,kv_heads=8,tokens=64,kv_tokens=2048,dim=128", false, true},
        {"batch=8,heads=8,kv_heads=1,tokens=40,kv_tokens=4000,dim=128", false, true},
        {"tokens=2000,dim=64", false, true},
        {"tokens=4000,dim=128", false, true},
        {"heads=2,tokens=2000,dim=64", false, true},
        {"batch=4,heads=4,tokens=100,kv_tokens=8000,dim=128", true, true},
        {"tokens=8000,dim=128,causal", false, false},
        {"heads=2,tokens=4000,dim=64,causal", false, false},
        {"heads=4,tokens=4000,dim=128,causal", false, false},
        {"heads=2,tokens=8000,dim=128", false, false},
        {"heads=8,tokens=2000,kv_tokens=32000,dim=128", false, false},
        {"heads=64,kv_heads=8,tokens=500,kv_tokens=32000,dim=256", false, false},
        {"heads=32,kv_heads=8,tokens=200,kv_tokens=1000,dim=128", false, false},
        {"heads=8,kv_heads=2,tokens=300,kv_tokens=700,dim=128,causal", false, false},
        {"heads=2,tokens=8000,dim=64,causal", true, false},
        {"batch=4,heads=32,kv_heads=8,tokens=100,kv_tokens=8000,dim=128", true, false},
        {"heads=4,tokens=4000,dim=64", false, false},
        {"heads=32,tokens=512,dim=64", false, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static const int64_t list[9]; /* on the GPU: never read here */
        attn_problem p;
        assert_int_equal(attn_problem_parse(&p, cases[i].problem), ATTN_OK);
        p.dtype = p.dtype_out = ATTN_BF16;
        attn__cuda_call call = driver_call(&p);
        if (cases[i].unequal) {
            call.cu_q = call.cu_kv = list;
            call.total_q = call.batch * call.tokens_q;
            call.total_kv = call.batch * call.tokens_kv;
        }
        const char *why = attn__cuda_few_sm90.declines(&call, false);
        if ((why == NULL) != cases[i].taken) {
            fail_msg("%s: %s", cases[i].problem, why == NULL ? "taken" : "declined");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workspace_for_every_call), cmocka_unit_test(merged_where_cut),
        cmocka_unit_test(tiles_cut_alike),          cmocka_unit_test(shares_of_whole_stages),
        cmocka_unit_test(long_shares_are_split),    cmocka_unit_test(taken_where_faster),
    };
    return cmocka_run_group_tests(tests, install, NULL);
}
