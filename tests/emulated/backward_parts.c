/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backward_parts.c - into how many parts a group is cut for the gradients on Hopper: what was measured to be
 * within 5 % of the best, a divisor always, the same for every call of a plan, and room in its workspace.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "check.h"
#include "emulated/driver.h"
#include "engine/engine.h"
#include "kernel/cuda/backward_parts.h"
#include "kernel/cuda/flash_backward_params.h"
#include "kernel/cuda/rows.h"

static const attn__backward_tiles tiles = {.queries = ATTN__BACKWARD_QUERIES_128,
                                           .keys = ATTN__BACKWARD_KEYS_128,
                                           .dim = 128,
                                           .clusters = 132,
                                           .l2 = 50 << 20,
                                           .tile_steps = 8,
                                           .part_steps = 8};

static attn__cuda_call call_of(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t tokens, bool causal)
{
    attn_problem p = ATTN_INIT(attn_problem);
    const attn_options options = ATTN_INIT(attn_options);
    p.dtype = p.dtype_out = ATTN_BF16;
    p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv;
    p.tokens_q = p.tokens_kv = tokens;
    p.dim_qk = p.dim_v = 128;
    p.mask = causal ? ATTN_MASK_CAUSAL : ATTN_MASK_FULL;
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    return attn__device_call(&p, &options);
}

/* docs/perf/cuda_bwd.md has the times. */
static void as_measured(void **state)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, tokens;
        bool causal;
        int64_t parts;
    } cases[] = {
        {1, 32, 8, 4096, true, 1},  {1, 32, 4, 4096, true, 2},  {1, 32, 2, 4096, true, 4},
        {1, 32, 1, 4096, true, 8},  {1, 16, 1, 4096, true, 8},  {1, 8, 1, 4096, true, 8},
        {1, 4, 1, 4096, true, 4},   {1, 32, 8, 32768, true, 1}, {1, 32, 4, 32768, true, 2},
        {1, 32, 2, 32768, true, 4}, {1, 32, 1, 32768, true, 8}, {1, 16, 1, 32768, true, 4},
        {1, 4, 1, 32768, true, 1},  {1, 32, 1, 4096, false, 4}, {1, 32, 1, 16384, false, 1},
        {4, 8, 1, 4096, false, 1},  {4, 16, 16, 4096, true, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const attn__cuda_call call =
            call_of(cases[i].batch, cases[i].heads_q, cases[i].heads_kv, cases[i].tokens, cases[i].causal);
        assert_int_equal(attn__cuda_backward_parts(&call, &tiles), cases[i].parts);
    }
}

/* Small problems with groups are cut, so that what compares gradients with fp64 meets parts. */
static void small(void **state)
{
    (void)state;
    attn__cuda_call call = call_of(2, 8, 2, 400, true);
    assert_int_equal(attn__cuda_backward_parts(&call, &tiles), 4);
    call.cu_q = call.cu_kv = &call.batch; /* nobody looks */
    assert_int_equal(attn__cuda_backward_parts(&call, &tiles), 4);
    call.deterministic = true;
    assert_int_equal(attn__cuda_backward_parts(&call, &tiles), 4);
}

static void divides(void **state)
{
    uint64_t seed = 1;
    int cut = 0;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        const int64_t group = check_between(&seed, 1, 40), heads_kv = check_between(&seed, 1, 8);
        attn__cuda_call call =
            call_of(check_between(&seed, 1, 40), group * heads_kv, heads_kv,
                    check_between(&seed, 1, (int64_t)1 << check_between(&seed, 1, 17)), i % 2 == 0);
        call.deterministic = check_between(&seed, 0, 1) == 1;
        const int64_t parts = attn__cuda_backward_parts(&call, &tiles);
        assert_true(parts >= 1 && parts <= group && group % parts == 0);
        cut += parts > 1;
    }
    assert_true(cut > 100);
}

/* A batch of any lengths has as many parts, whatever its totals, and not more workspace. */
static void same_for_every_call(void **state)
{
    static const attn__cuda_kernel *const kernels[] = {&attn__cuda_flash_sm90, &attn__cuda_bf16x3_sm90,
                                                       &attn__cuda_fma_sm90};
    uint64_t seed = 2;
    const int64_t any = 0;
    (void)state;
    for (int i = 0; i < 1000; i++) {
        const int64_t group = check_between(&seed, 1, 40);
        attn__cuda_call call =
            call_of(check_between(&seed, 1, 40), group, 1, check_between(&seed, 1, 9999), i % 2 == 0);
        call.cu_q = call.cu_kv = &any;
        const attn__cuda_call planned = call;
        call.total_q = check_between(&seed, 0, call.total_q);
        call.total_kv = check_between(&seed, 0, call.total_kv);
        assert_int_equal(attn__cuda_backward_parts(&call, &tiles),
                         attn__cuda_backward_parts(&planned, &tiles));
        for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++) {
            assert_true(kernels[k]->backward_workspace(&call, &driver_device) <=
                        kernels[k]->backward_workspace(&planned, &driver_device));
        }
    }
}

static void empty(void **state)
{
    attn__cuda_call call = call_of(1, 8, 1, 128, true);
    (void)state;
    call.tokens_q = call.tokens_kv = 0;
    assert_int_equal(attn__cuda_backward_parts(&call, &tiles), 1);
    call.batch = 0;
    assert_int_equal(attn__cuda_backward_parts(&call, &tiles), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_measured),         cmocka_unit_test(small), cmocka_unit_test(divides),
        cmocka_unit_test(same_for_every_call), cmocka_unit_test(empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
