/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h - in place of the CUDA driver, for launchers without a GPU: what always succeeds and does nothing.
 * What is launched a test looks at itself; of the rest it may set more afterwards.
 */
#ifndef ATTN_TESTS_EMULATED_DRIVER_H
#define ATTN_TESTS_EMULATED_DRIVER_H

#include <string.h>

#include "engine/engine.h"
#include "kernel/cuda/driver.h"

static CUresult driver_push(CUcontext context)
{
    (void)context;
    return CUDA_SUCCESS;
}
static CUresult driver_pop(CUcontext *context)
{
    *context = NULL;
    return CUDA_SUCCESS;
}
static CUresult driver_load(CUmodule *module, const void *image)
{
    static char any;
    (void)image;
    *module = (void *)&any;
    return CUDA_SUCCESS;
}
static CUresult driver_function(CUfunction *found, CUmodule module, const char *name)
{
    static char any;
    (void)module, (void)name;
    *found = (void *)&any;
    return CUDA_SUCCESS;
}
static CUresult driver_capture_mode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}
/* No more shared memory than a block of an H200 may have. */
static CUresult driver_set(CUfunction of, CUfunction_attribute attribute, int value)
{
    (void)of, (void)attribute;
    return value <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult driver_map(CUtensorMap *made, CUtensorMapDataType type, cuuint32_t rank, void *data,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                           CUtensorMapFloatOOBfill fill)
{
    (void)type, (void)rank, (void)data, (void)sizes, (void)strides, (void)box, (void)steps;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    memset(made, 0, sizeof *made);
    return CUDA_SUCCESS;
}

/* An H200, as far as launchers ask. */
static const attn__cuda_device driver_device = {.major = 9, .sms = 132, .l2 = 50 << 20};

static inline void driver_install(CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **))
{
    attn__cuda.launch = launch;
    attn__cuda.context_push = driver_push, attn__cuda.context_pop = driver_pop;
    attn__cuda.module_load = driver_load, attn__cuda.module_function = driver_function;
    attn__cuda.function_set = driver_set;
    attn__cuda.capture_mode = driver_capture_mode, attn__cuda.tensor_map = driver_map;
}

/* A call with contiguous arrays, of which nothing may be read. */
static inline attn__cuda_call driver_call(const attn_problem *p)
{
    static _Alignas(256) char memory[256];
    const attn_options options = ATTN_INIT(attn_options);
    attn__cuda_call call = attn__device_call(p, &options);
    const int64_t d = p->dim_qk, n = p->tokens_q, m = p->tokens_kv;
    call.q = call.o = (attn__cuda_tensor){memory, p->heads_q * n * d, n * d, d};
    call.k = call.v = (attn__cuda_tensor){memory, p->heads_kv * m * d, m * d, d};
    return call;
}

#endif
