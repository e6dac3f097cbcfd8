/* SPDX-License-Identifier: Apache-2.0 */
/*
 * enqueued_flash.c - the launcher of flash-sm90's forward without a GPU: tiles as high as the GPU is filled
 * best with, as was measured, and enough of them for all queries.
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
#include "kernel/cuda/flash_forward_params.h"
#include "kernel/cuda/rows.h"

/* The last kernel. */
static struct {
    attn__forward_params params;
    unsigned threads, grid;
} enqueued;

static CUresult launch(const CUlaunchConfig *config, CUfunction of, void **params, void **extra)
{
    (void)of, (void)extra;
    if (config->blockDimX > 1) { /* not flash_forward_begin */
        memcpy(&enqueued.params, params[0], sizeof enqueued.params);
        enqueued.threads = config->blockDimX, enqueued.grid = config->gridDimX;
    }
    return CUDA_SUCCESS;
}

static int install(void **state)
{
    (void)state;
    driver_install(launch);
    return 0;
}

/* Enqueues it; queries of a tile. */
static int64_t rows_of(const attn_problem *p, int sms)
{
    static int32_t taken[1]; /* the workspace */
    attn__cuda_call call = driver_call(p);
    call.sms = sms;
    enqueued.threads = 0;
    assert_null(attn__cuda_flash_sm90.rejects(&call, false));
    assert_int_equal(attn__cuda_flash_sm90.forward(&call, &driver_device, taken, NULL), ATTN_OK);
    return (enqueued.threads / 128 - 1) * 64; /* a warpgroup each, beside that of the producers */
}

/* By the times on an H200 (docs/perf/cuda_fwd.md, "Tiles that fill the GPU"). */
static void as_high_as_is_fastest(void **state)
{
    static const struct {
        const char *problem;
        int sms, rows;
    } cases[] = {
        {"tokens=512,dim=64", 0, 128},
        {"heads=16,tokens=1024,dim=64", 0, 128},
        {"heads=8,tokens=2048,dim=40,causal", 0, 128},
        {"heads=12,tokens=1500,dim=64", 0, 192},
        {"heads=24,tokens=1500,dim=64", 0, 192},
        {"heads=12,tokens=2048,dim=64", 0, 192},
        {"heads=12,tokens=4096,dim=64,causal", 0, 192},
        {"heads=4,tokens=8192,dim=64", 0, 256},
        {"heads=16,tokens=2048,dim=64", 0, 256},
        {"heads=32,tokens=1000,dim=64", 0, 256},
        {"heads=128,tokens=512,dim=64", 0, 256},
        {"heads=16,tokens=4096,dim=64,causal", 0, 256},
        {"heads=8,tokens=16384,dim=64,causal", 0, 256},
        /* those of test_cuda_features */
        {"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64", 1, 256},
        {"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64,causal", 1, 256},
        {"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64,window=90:40", 1, 256},
        {"batch=3,heads=6,tokens=380,kv_tokens=400,dim=64", 1, 192},
        {"batch=3,heads=6,tokens=380,kv_tokens=400,dim=64,causal", 1, 192},
        {"batch=3,heads=6,tokens=380,kv_tokens=400,dim=64,window=90:40", 1, 192},
        {"batch=3,heads=6,tokens=500,kv_tokens=512,dim=64", 0, 128},
        {"heads=4,tokens=300,dim=128", 0, 128},
        {"heads=128,tokens=4000,dim=256,causal", 0, 128},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attn_problem p;
        assert_int_equal(attn_problem_parse(&p, cases[i].problem), ATTN_OK);
        p.dtype = p.dtype_out = ATTN_BF16;
        const int64_t rows = rows_of(&p, cases[i].sms);
        if (rows != cases[i].rows) {
            fail_msg("%s: tiles of %lld rows", cases[i].problem, (long long)rows);
        }
    }
}

static void tiles_hold_all(void **state)
{
    uint64_t seed = 3;
    int seen[5] = {0};
    (void)state;
    for (int i = 0; i < 3000; i++) {
        attn_problem p = ATTN_INIT(attn_problem);
        p.dtype = p.dtype_out = check_between(&seed, 0, 1) == 0 ? ATTN_BF16 : ATTN_F16;
        p.batch = check_between(&seed, 1, 4);
        p.heads_q = p.heads_kv = check_between(&seed, 1, 40);
        p.tokens_q = check_between(&seed, 1, (int64_t)1 << check_between(&seed, 0, 13));
        p.tokens_kv = check_between(&seed, 1, (int64_t)1 << check_between(&seed, 4, 15));
        p.dim_qk = p.dim_v = 8 * check_between(&seed, 1, check_between(&seed, 0, 1) == 0 ? 8 : 32);
        p.mask = (attn_mask)check_between(&seed, 0, 2);
        if (p.mask == ATTN_MASK_WINDOW) {
            p.window_left = check_between(&seed, 0, p.tokens_kv);
            p.window_right = check_between(&seed, 0, p.tokens_kv);
        }
        assert_int_equal(attn_problem_check(&p), ATTN_OK);
        const int sms = (int)(check_between(&seed, 0, 2) == 0 ? check_between(&seed, 1, 131) : 132);
        const int64_t rows = rows_of(&p, sms), high = enqueued.params.tiles_q;
        assert_true((high - 1) * rows < p.tokens_q && p.tokens_q <= high * rows);
        assert_int_equal(enqueued.params.tiles, high * p.batch * p.heads_q);
        assert_int_equal(enqueued.grid, attn__min(enqueued.params.tiles, sms));
        seen[rows / 64] += p.dim_qk <= 64;
    }
    assert_true(seen[2] > 50 && seen[3] > 50 && seen[4] > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_high_as_is_fastest),
        cmocka_unit_test(tiles_hold_all),
    };
    return cmocka_run_group_tests(tests, install, NULL);
}
