/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma.c - the fp32 rows of the CUDA kernel table without a GPU: launcher and kernels on the machine of
 * machine.h, over random problems in random layouts, each array flush against an unreadable page, against the
 * fp64 reference.
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

#include "backward_case.h"
#include "emulated/driver.h"
#include "emulated/machine.h"
#include "engine/engine.h"
#include "engine_case.h"
#include "kernel/cuda/rows.h"

/* ---- the driver ---- */

static CUresult function(CUfunction *found, CUmodule module, const char *name)
{
    const machine_kernel *kernel = machine_find(name);
    (void)module;
    memcpy(found, &kernel, sizeof *found);
    return kernel == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
static CUresult launch(const CUlaunchConfig *config, CUfunction of, void **params, void **extra)
{
    unsigned cluster = 1;
    (void)extra;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            cluster = config->attrs[i].value.clusterDim.x;
        }
    }
    machine_run((const void *)of, config->gridDimX, config->blockDimX, cluster, params[0]);
    return CUDA_SUCCESS;
}
static CUresult fill(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
    (void)stream;
    memset((void *)(uintptr_t)to, value, bytes);
    return CUDA_SUCCESS;
}

static const attn__cuda_device device = {
    .ordinal = 0, .major = 9, .sms = 8}; /* groups are cut into parts for so many */

static int install(void **state)
{
    (void)state;
    driver_install(launch);
    attn__cuda.module_function = function;
    attn__cuda.memset_async = fill;
    return 0;
}

/* ---- calls ---- */

static attn__cuda_tensor tensor_of(const case_tensor *x)
{
    return (attn__cuda_tensor){x->t.data, x->size[0] == 1 ? 0 : x->stride[0], x->stride[1], x->stride[2]};
}

/* As the engine makes it, but for what an execute adds. */
static attn__cuda_call call_of(const attn_problem *p, const int64_t *cu_q, const int64_t *cu_kv)
{
    const attn_options options = ATTN_INIT(attn_options);
    attn__cuda_call call = attn__device_call(p, &options);
    if (cu_q != NULL) {
        call.cu_q = cu_q, call.cu_kv = cu_kv;
        call.total_q = cu_q[p->batch], call.total_kv = cu_kv[p->batch];
    }
    return call;
}

/* With a poisoned workspace of exactly its size. */
static void run(const attn__cuda_kernel *kernel, const attn__cuda_call *call, bool backward)
{
    check_buffer workspace;
    size_t bytes =
        backward ? kernel->backward_workspace(call, &device) : kernel->forward_workspace(call, &device);
    check_buffer_open(&workspace, bytes, 256, true);
    assert_int_equal(backward ? kernel->backward(call, &device, workspace.data, NULL)
                              : kernel->forward(call, &device, workspace.data, NULL),
                     ATTN_OK);
    check_buffer_close(&workspace);
}

/* Dims one after another are all that the kernels take. */
static bool dense(const case_tensor *x)
{
    return x->stride[3] == 1;
}

/* ---- tests ---- */

/* Some of the dims of each kernel. */
static void pick_dims(attn_problem *p, uint64_t *seed, int64_t most)
{
    p->dim_qk =
        check_between(seed, 1, 2) == 1 ? most - check_between(seed, 0, 5) : check_between(seed, 1, most);
    p->dim_v = check_between(seed, 1, 2) == 1 ? p->dim_qk : check_between(seed, 1, most);
}

static void forward_cases(const attn__cuda_kernel *kernel, int64_t most_dim, int count)
{
    uint64_t seed = (uint64_t)most_dim;
    for (int done = 0; done < count;) {
        sequence_case c = {.problem = case_problem(&seed, 200)};
        char what[1000];
        pick_dims(&c.problem, &seed, most_dim);
        if (check_between(&seed, 1, 3) == 1) {
            c.problem.batch = 4;
            c.cu_q = case_lengths(&seed, 4, c.problem.tokens_q);
            c.cu_kv = case_lengths(&seed, 4, c.problem.tokens_kv);
        }
        sequence_case_open(&c, check_random(&seed));
        attn__cuda_call call = call_of(&c.problem, c.cu_q, c.cu_kv);
        call.sms = (int)check_between(&seed, 0, 2);
        if (dense(&c.q) && dense(&c.k) && dense(&c.v) && dense(&c.o) &&
            kernel->rejects(&call, false) == NULL) {
            call.q = tensor_of(&c.q), call.k = tensor_of(&c.k), call.v = tensor_of(&c.v);
            call.o = tensor_of(&c.o), call.lse = tensor_of(&c.lse);
            run(kernel, &call, false);
            attn_problem_print(&c.problem, what, sizeof what);
            sequence_case_compare(&c, what);
            done++;
        }
        sequence_case_close(&c);
    }
}

/* More items than blocks, each of one tile of keys, and in each a value that is infinite: it comes out where
 * it is seen, and is not lost on the way from who finds it to who adds it. */
static void short_sequences(void **state)
{
    static const attn__cuda_kernel *const kernels[] = {&attn__cuda_fma_sm90, &attn__cuda_bf16x3_sm90};
    (void)state;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        sequence_case c = {.problem = ATTN_INIT(attn_problem)};
        attn_problem *p = &c.problem;
        p->batch = 7, p->heads_q = p->heads_kv = 1, p->tokens_q = 40, p->tokens_kv = 30;
        p->dim_qk = p->dim_v = 64, p->mask = ATTN_MASK_CAUSAL;
        assert_int_equal(attn_problem_check(p), ATTN_OK);
        sequence_case_open(&c, 1);
        for (int64_t b = 0; b < p->batch; b++) {
            case_tensor_set(&c.v, b, 0, 15, 2, (double)INFINITY);
        }
        attn__cuda_call call = call_of(p, NULL, NULL);
        call.sms = 1;
        call.q = tensor_of(&c.q), call.k = tensor_of(&c.k), call.v = tensor_of(&c.v);
        call.o = tensor_of(&c.o), call.lse = tensor_of(&c.lse);
        run(kernels[i], &call, false);
        for (int64_t j = 0; j < p->batch * 40 * 64; j++) {
            const int64_t b = j / (40 * 64), token = j / 64 % 40, d = j % 64;
            const double x = case_tensor_get(&c.o, b, 0, token, d);
            if (token >= 10 + 15 && d == 2 ? x != (double)INFINITY : !isfinite(x)) {
                fail_msg("%s: batch %lld, token %lld, dim %lld: %g", kernels[i]->name, (long long)b,
                         (long long)token, (long long)d, x);
            }
        }
        sequence_case_close(&c);
    }
}

static void bf16x3_is_right(void **state)
{
    (void)state;
    forward_cases(&attn__cuda_bf16x3_sm90, 64, 3);
    forward_cases(&attn__cuda_bf16x3_sm90, 128, 3);
    forward_cases(&attn__cuda_bf16x3_sm90, 256, 2);
}

static void forward_is_right(void **state)
{
    (void)state;
    forward_cases(&attn__cuda_fma_sm90, 64, 6);
    forward_cases(&attn__cuda_fma_sm90, 128, 4);
    forward_cases(&attn__cuda_fma_sm90, 256, 2);
    forward_cases(&attn__cuda_fma_sm90, 512, 2);
}

/* to holds what from holds */
static void copy_rows(case_tensor *to, const case_tensor *from)
{
    for (int64_t i = 0; i < case_tensor_rows(to); i++) {
        const case_row at = case_tensor_row(to, i);
        for (int64_t d = 0; d < to->size[3]; d++) {
            case_tensor_set(to, at.batch, at.head, at.token, d,
                            case_tensor_get(from, at.batch, at.head, at.token, d));
        }
    }
}

static void run_backward(const attn__cuda_kernel *kernel, backward_case *c, int sms)
{
    const attn__cuda_tensor none = {NULL, 0, 0, 0};
    attn__cuda_call call = call_of(&c->problem, c->cu_q, c->cu_kv);
    char what[1000];
    copy_rows(&c->dq, &c->dq0), copy_rows(&c->dk, &c->dk0), copy_rows(&c->dv, &c->dv0);
    call.q = tensor_of(&c->q), call.k = tensor_of(&c->k), call.v = tensor_of(&c->v);
    call.dout = tensor_of(&c->dout), call.lse = tensor_of(&c->lse);
    call.o = c->give_delta ? none : tensor_of(&c->o);
    call.delta = c->give_delta ? tensor_of(&c->delta) : none;
    call.dq = c->no_dq ? none : tensor_of(&c->dq);
    call.dk = c->no_dk ? none : tensor_of(&c->dk);
    call.dv = c->no_dv ? none : tensor_of(&c->dv);
    call.accumulate = c->accumulate;
    call.sms = sms;
    run(kernel, &call, true);
    attn_problem_print(&c->problem, what, sizeof what);
    backward_case_compare(c, what);
}

static void backward_cases(const attn__cuda_kernel *kernel, int64_t most_dim, int count)
{
    uint64_t seed = (uint64_t)most_dim;
    for (int done = 0; done < count;) {
        backward_case c = backward_case_random(&seed, most_dim <= 64 ? 400 : 200);
        pick_dims(&c.problem, &seed, most_dim);
        c.problem.heads_q = c.problem.heads_kv * (c.problem.heads_q > c.problem.heads_kv ? 2 : 1);
        backward_case_open(&c, check_random(&seed));
        attn__cuda_call call = call_of(&c.problem, c.cu_q, c.cu_kv);
        call.sms = (int)check_between(&seed, 0, 2);
        if (dense(&c.q) && dense(&c.k) && dense(&c.v) && dense(&c.o) && dense(&c.dout) && dense(&c.dq) &&
            dense(&c.dk) && dense(&c.dv) && kernel->rejects(&call, true) == NULL) {
            run_backward(kernel, &c, call.sms);
            done++;
        }
        backward_case_close(&c);
    }
}

/* What clusters of two blocks may meet: several items of each, odd numbers of tiles, halves of a tile, items
 * and sequences without a partner, different dims. */
static void backward_of_pairs(void **state)
{
    static const struct {
        const char *problem;
        bool varlen, accumulate, give_delta;
        int sms;
    } cases[] = {
        {"heads=2,kv_heads=1,tokens=150,kv_tokens=110,dim=256", false, false, false, 2},
        {"batch=2,tokens=90,dim=200,dim_v=136,window=40:3", false, true, false, 5},
        {"heads=3,tokens=33,kv_tokens=97,dim=136,dim_v=250,causal", false, false, true, 0},
        {"tokens=140,kv_tokens=20,dim=129,causal", false, false, false, 2},
        {"tokens=20,kv_tokens=140,dim=40,dim_v=256,window=10:0", false, true, true, 3},
        {"batch=4,heads=4,kv_heads=2,tokens=70,dim=144,out=bf16,causal", true, false, false, 2},
        {"batch=3,tokens=130,kv_tokens=60,dim=256", true, true, false, 4},
    };
    uint64_t seed = 256;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0];) {
        backward_case c = {.accumulate = cases[i].accumulate, .give_delta = cases[i].give_delta};
        attn_problem *p = &c.problem;
        assert_int_equal(attn_problem_parse(p, cases[i].problem), ATTN_OK);
        if (cases[i].varlen) {
            c.cu_q = case_lengths(&seed, p->batch, p->tokens_q);
            c.cu_kv = case_lengths(&seed, p->batch, p->tokens_kv);
        }
        backward_case_open(&c, check_random(&seed));
        if (dense(&c.q) && dense(&c.k) && dense(&c.v) && dense(&c.o) && dense(&c.dout) && dense(&c.dq) &&
            dense(&c.dk) && dense(&c.dv)) {
            run_backward(&attn__cuda_bf16x3_sm90, &c, cases[i].sms);
            i++;
        }
        backward_case_close(&c);
    }
}

/* Alone, a multiprocessor leaves wide gradients to the next row. */
static void one_multiprocessor(void **state)
{
    const attn_options options = ATTN_INIT(attn_options);
    attn_problem p;
    (void)state;
    for (int64_t dim = 128; dim <= 256; dim += 128) {
        assert_int_equal(attn_problem_parse(&p, "tokens=100,dim=128"), ATTN_OK);
        p.dim_qk = dim;
        attn__cuda_call call = attn__device_call(&p, &options);
        assert_null(attn__cuda_bf16x3_sm90.rejects(&call, true));
        call.sms = 1;
        assert_null(attn__cuda_bf16x3_sm90.rejects(&call, false));
        assert_int_equal(attn__cuda_bf16x3_sm90.rejects(&call, true) == NULL, dim == 128);
        assert_null(attn__cuda_fma_sm90.rejects(&call, true));
    }
}

static void backward_is_right(void **state)
{
    (void)state;
    backward_cases(&attn__cuda_fma_sm90, 64, 4);
    backward_cases(&attn__cuda_fma_sm90, 128, 3);
    backward_cases(&attn__cuda_fma_sm90, 256, 2);
}

/* The call of a case's gradients, of all three. */
static attn__cuda_call gradients_of(const backward_case *c)
{
    attn__cuda_call call = call_of(&c->problem, NULL, NULL);
    call.q = tensor_of(&c->q), call.k = tensor_of(&c->k), call.v = tensor_of(&c->v);
    call.o = tensor_of(&c->o), call.lse = tensor_of(&c->lse), call.dout = tensor_of(&c->dout);
    call.dq = tensor_of(&c->dq), call.dk = tensor_of(&c->dk), call.dv = tensor_of(&c->dv);
    return call;
}

/* NaN in one token of each input, which some rows see and others do not: it goes where multiply-adds take it,
 * from the forward on. */
static void spoiled_gradients(void **state)
{
    (void)state;
    for (int64_t dim = 64; dim <= 256; dim *= 2) {
        backward_case c = {.problem = ATTN_INIT(attn_problem)}, other;
        attn_problem *p = &c.problem;
        p->batch = 1, p->heads_q = 2, p->heads_kv = 1, p->tokens_q = p->tokens_kv = 200;
        p->dim_qk = p->dim_v = dim, p->mask = ATTN_MASK_WINDOW, p->window_left = 30, p->window_right = 0;
        assert_int_equal(attn_problem_check(p), ATTN_OK);
        other = c;
        backward_case_open(&c, 1), backward_case_open(&other, 1);
        case_tensor_set(&c.k, 0, 0, 40, 3, (double)NAN), case_tensor_set(&c.v, 0, 0, 80, 5, (double)NAN);
        case_tensor_set(&c.q, 0, 1, 130, 7, (double)NAN), case_tensor_set(&c.dout, 0, 0, 190, 9, (double)NAN);
        attn__cuda_call call = gradients_of(&c);
        run(&attn__cuda_fma_sm90, &call, false);
        run(&attn__cuda_fma_sm90, &call, true);
        call.dq = tensor_of(&other.dq), call.dk = tensor_of(&other.dk), call.dv = tensor_of(&other.dv);
        run(&attn__cuda_bf16x3_sm90, &call, true);
        const case_tensor *got[] = {&other.dq, &other.dk, &other.dv}, *want[] = {&c.dq, &c.dk, &c.dv};
        for (int n = 0; n < 3; n++) {
            int64_t nans = 0;
            for (int64_t i = 0; i < case_tensor_rows(got[n]); i++) {
                const case_row at = case_tensor_row(got[n], i);
                for (int64_t d = 0; d < dim; d++) {
                    const double x = case_tensor_get(got[n], at.batch, at.head, at.token, d),
                                 y = case_tensor_get(want[n], at.batch, at.head, at.token, d);
                    nans += isnan(y);
                    if (isnan(x) != isnan(y) || !(isnan(y) || fabs(x - y) <= 1e-5 * (1.0 + fabs(y)))) {
                        fail_msg("dim %lld, d%c[%lld][%lld][%lld]: %g, should be %g", (long long)dim,
                                 "qkv"[n], (long long)at.head, (long long)at.token, (long long)d, x, y);
                    }
                }
            }
            assert_true(nans > 0 && nans < case_tensor_rows(got[n]) * dim);
        }
        backward_case_close(&c), backward_case_close(&other);
    }
}

static void bf16x3_backward_is_right(void **state)
{
    (void)state;
    backward_cases(&attn__cuda_bf16x3_sm90, 64, 4);
    backward_cases(&attn__cuda_bf16x3_sm90, 128, 4);
    backward_cases(&attn__cuda_bf16x3_sm90, 256, 3);
}

/* A plan that knows the tokens of all sequences takes workspace for these, not for so many of the longest. */
static void ragged_workspace(void **state)
{
    (void)state;
    attn_problem p;
    const attn_options options = ATTN_INIT(attn_options);
    assert_int_equal(attn_problem_parse(&p, "batch=8,heads=2,tokens=1000,dim=64"), ATTN_OK);
    const attn__cuda_call padded = attn__device_call(&p, &options);
    p.total_q = p.total_kv = 1500;
    const attn__cuda_call told = attn__device_call(&p, &options);
    const attn__cuda_kernel *const kernels[] = {&attn__cuda_flash_sm90, &attn__cuda_bf16x3_sm90,
                                                &attn__cuda_fma_sm90};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        const size_t most = kernels[i]->backward_workspace(&padded, &device);
        const size_t bytes = kernels[i]->backward_workspace(&told, &device);
        assert_in_range(bytes, 1, most / 3); /* 1500 of 8000 tokens, and an end of a tile for each sequence */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backward_of_pairs), cmocka_unit_test(one_multiprocessor),
        cmocka_unit_test(spoiled_gradients), cmocka_unit_test(bf16x3_backward_is_right),
        cmocka_unit_test(forward_is_right),  cmocka_unit_test(bf16x3_is_right),
        cmocka_unit_test(short_sequences),   cmocka_unit_test(backward_is_right),
        cmocka_unit_test(ragged_workspace),
    };
    return cmocka_run_group_tests(tests, install, NULL);
}
