/* SPDX-License-Identifier: Apache-2.0 */
/*
 * enqueued_limits.c - what the launchers of all CUDA kernels enqueue, without a GPU: a call that is to leave
 * multiprocessors to others does, and whatever a kernel is set to is the same for every call, since threads
 * share it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "emulated/driver.h"
#include "engine/engine.h"
#include "kernel/cuda/rows.h"

/* ---- the driver ---- */

enum { MOST_FUNCTIONS = 256 };

typedef struct kernel_function {
    CUmodule module;
    const char *name;
    int shared; /* that it may use; -1: not told yet */
} kernel_function;

static struct {
    kernel_function functions[MOST_FUNCTIONS];
    int count, kernels;
    int64_t widest;  /* blocks of a kernel */
    bool overlapped; /* may one of them begin before the one before it has ended? */
} enqueued;

/* Each image is a module of its own. */
static CUresult load(CUmodule *module, const void *image)
{
    *module = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}
static CUresult function(CUfunction *found, CUmodule module, const char *name)
{
    int i = 0;
    while (i < enqueued.count &&
           (enqueued.functions[i].module != module || strcmp(enqueued.functions[i].name, name) != 0)) {
        i++;
    }
    if (i == enqueued.count) {
        assert_true(enqueued.count < MOST_FUNCTIONS);
        enqueued.functions[enqueued.count++] = (kernel_function){module, name, -1};
    }
    *found = (CUfunction)(void *)&enqueued.functions[i];
    return CUDA_SUCCESS;
}
static CUresult set(CUfunction of, CUfunction_attribute attribute, int value)
{
    kernel_function *f = (kernel_function *)(void *)of;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        assert_true(f->shared < 0 || f->shared == value);
        f->shared = value;
    }
    return CUDA_SUCCESS;
}
static CUresult clear(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream)
{
    (void)memory, (void)value, (void)bytes, (void)stream;
    return CUDA_SUCCESS;
}
static CUresult launch(const CUlaunchConfig *config, CUfunction of, void **params, void **extra)
{
    const kernel_function *f = (const kernel_function *)(const void *)of;
    (void)params, (void)extra;
    assert_true((int)config->sharedMemBytes <= f->shared);
    for (unsigned i = 0; i < config->numAttrs; i++) {
        enqueued.overlapped |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    }
    enqueued.widest =
        attn__max(enqueued.widest, (int64_t)config->gridDimX * config->gridDimY * config->gridDimZ);
    enqueued.kernels++;
    return CUDA_SUCCESS;
}

static int install(void **state)
{
    (void)state;
    driver_install(launch);
    attn__cuda.module_load = load, attn__cuda.module_function = function, attn__cuda.function_set = set;
    attn__cuda.memset_async = clear;
    return 0;
}

/* ---- problems ---- */

static attn_problem random_problem(uint64_t *seed)
{
    attn_problem p = ATTN_INIT(attn_problem);
    p.dtype = (attn_dtype)check_between(seed, 0, 2);
    p.dtype_out = check_between(seed, 0, 1) == 0 ? ATTN_F32 : p.dtype;
    p.batch = check_between(seed, 1, 4);
    p.heads_kv = check_between(seed, 1, 8);
    p.heads_q = p.heads_kv * check_between(seed, 1, 8);
    p.tokens_q = check_between(seed, 1, (int64_t)1 << check_between(seed, 0, 13));
    p.tokens_kv = check_between(seed, 1, (int64_t)1 << check_between(seed, 4, 15));
    p.dim_qk = 8 * check_between(seed, 1, 32);
    p.dim_v = 8 * check_between(seed, 1, 32);
    p.mask = (attn_mask)check_between(seed, 0, 1);
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    return p;
}

/* What is enqueued for the call; false: the kernel does not take it.  The workspace is not looked at. */
static bool enqueue(const attn__cuda_kernel *kernel, const attn__cuda_call *call, bool backward)
{
    static _Alignas(256) char workspace[256];
    if ((backward ? kernel->backward == NULL : kernel->forward == NULL) ||
        attn__cuda_refusal(kernel, call, backward) != NULL) {
        return false;
    }
    enqueued.kernels = 0, enqueued.widest = 0, enqueued.overlapped = false;
    assert_int_equal((backward ? kernel->backward : kernel->forward)(call, &driver_device, workspace, NULL),
                     ATTN_OK);
    return true;
}

/* ---- tests ---- */

/* One kernel after the other, none of them of more blocks than multiprocessors may be used, though one has
 * room for several; of calls without a limit some do overlap. */
static void limit_holds(void **state)
{
    uint64_t seed = 1;
    int limited = 0, overlapped = 0;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        const attn_problem p = random_problem(&seed);
        const attn_options options = ATTN_INIT(attn_options);
        attn__cuda_call call = attn__device_call(&p, &options);
        call.sms = (int)(check_between(&seed, 0, 3) == 0 ? 0 : check_between(&seed, 1, 131));
        call.deterministic = check_between(&seed, 0, 1) == 1;
        for (int k = 0; attn__cuda_kernels[k] != NULL; k++) {
            for (int backward = 0; backward < 2; backward++) {
                if (!enqueue(attn__cuda_kernels[k], &call, backward == 1)) {
                    continue;
                }
                assert_true(enqueued.kernels > 0);
                overlapped += enqueued.overlapped;
                if (call.sms > 0) {
                    assert_false(enqueued.overlapped);
                    assert_true(enqueued.widest <= call.sms);
                    limited++;
                }
            }
        }
    }
    assert_true(limited > 1000 && overlapped > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(limit_holds, install),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
