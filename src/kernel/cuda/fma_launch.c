/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_launch.c - the rows "fma-sm90": fp32 throughout, by fused multiply-adds; any dtype, dims, strides; and
 * "bf16x3-sm90": the same for fp32 inputs with six products of bf16 for one, which is faster and no less
 * exact; its gradients are enqueued in bf16x3_backward.c.
 *
 * fp32 is read where it lies.  fp16 and bf16 are first copied to fp32 in the workspace, which costs next to
 * nothing beside the products, and keeps conversions and their registers out of the kernels.  Gradients are
 * the same bits every time, always: fma_backward.cuh tells how.
 */
#include <math.h>
#include <stddef.h>

#include "kernel/cuda/fma_launch.h"
#include "kernel/cuda/rows.h"

static const int64_t most_tokens = (int64_t)1 << 29; /* positions are 32 bits wide, and added up */

static const attn__fma_kernel forwards[] = {
    {64, "fma_forward_64", 128, 64, 128, 81920, 0},
    {128, "fma_forward_128", 128, 128, 256, 229376, 0},
    {256, "fma_forward_256", 128, 32, 256, 212992, 0},
    {512, "fma_forward_512", 64, 32, 256, 212992, 0},
};
static const attn__fma_kernel bf16x3_forwards[] = {
    {64, "bf16x3_forward_64", 128, 64, 384, 197376, 0},
    {128, "bf16x3_forward_128", 128, 64, 384, 197376, 0},
    {256, "bf16x3_forward_256", 64, 32, 384, 229760, 0},
};
static const attn__fma_kernel backwards[] = {
    {64, "fma_backward_64", 64, 256, 256, 230656, 0},
    {128, "fma_backward_128", 64, 128, 256, 230656, 0},
    {256, "fma_backward_256", 32, 64, 256, 205824, 0},
};

static int64_t widest(const attn__cuda_call *call)
{
    return attn__max(call->dim_qk, call->dim_v);
}

static const char *rejects(const attn__cuda_call *call, bool backward)
{
    if (widest(call) > 512) {
        return "takes dims up to 512";
    }
    if (backward && widest(call) > 256) {
        return "has gradients for dims up to 256";
    }
    if (attn__max(call->tokens_q, call->tokens_kv) >= most_tokens) {
        return "takes sequences of less than 2^29 tokens";
    }
    return NULL;
}

static const char *bf16x3_rejects(const attn__cuda_call *call, bool backward)
{
    if (call->dtype != ATTN_F32) {
        return "is for fp32 inputs";
    }
    if (widest(call) > 256) {
        return "takes dims up to 256";
    }
    if (backward && widest(call) > 128 && call->sms == 1) {
        return "has gradients of more than 128 dims by two multiprocessors at once, and sms allows one";
    }
    return rejects(call, backward);
}

const attn__fma_kernel *attn__fma_fitting(const attn__fma_kernel *kernels, const attn__cuda_call *call)
{
    while (kernels->dim < widest(call)) {
        kernels++;
    }
    return kernels;
}

/* ---- the workspace ---- */

typedef struct fma_workspace {
    float *q, *k, *v, *dout;     /* fp32 copies of 16-bit inputs */
    float *delta, *dq, *dk, *dv; /* dk, dv: of several parts of each group */
    int64_t parts;
    int32_t *turns; /* of backward, and the counter before them */
    size_t turns_bytes;
    size_t bytes;
} fma_workspace;

/* The next `count` numbers of 4 bytes; base NULL: only counts. */
static void *take(fma_workspace *w, void *base, int64_t count)
{
    void *memory = base == NULL ? NULL : (char *)base + w->bytes;
    w->bytes += (size_t)attn__ceil_div(count, 64) * 256;
    return memory;
}

/* parts: 0 of the forward */
static fma_workspace lay_out(const attn__cuda_call *call, int64_t parts, void *base)
{
    const bool backward = parts > 0;
    fma_workspace w = {.parts = parts};
    const int64_t queries = call->total_q * call->heads_q, keys = call->total_kv * call->heads_kv;
    if (call->dtype != ATTN_F32) {
        w.q = take(&w, base, queries * attn__fma_padded(call->dim_qk));
        w.k = take(&w, base, keys * attn__fma_padded(call->dim_qk));
        w.v = take(&w, base, keys * attn__fma_padded(call->dim_v));
        w.dout = backward ? take(&w, base, queries * attn__fma_padded(call->dim_v)) : NULL;
    }
    if (backward) {
        const int64_t tiles = attn__ceil_div(call->tokens_q, attn__fma_fitting(backwards, call)->queries);
        const int64_t turns = call->batch * call->heads_q * tiles + 2;
        w.delta = call->delta.data == NULL ? take(&w, base, queries) : NULL;
        if (call->dq.data != NULL && call->dtype_out != ATTN_F32) {
            w.dq = take(&w, base, queries * attn__fma_padded(call->dim_qk));
        }
        const int64_t rows = parts * keys;
        w.dk =
            parts > 1 && call->dk.data != NULL ? take(&w, base, rows * attn__fma_padded(call->dim_qk)) : NULL;
        w.dv =
            parts > 1 && call->dv.data != NULL ? take(&w, base, rows * attn__fma_padded(call->dim_v)) : NULL;
        w.turns = take(&w, base, turns);
        w.turns_bytes = (size_t)turns * sizeof(int32_t);
    }
    return w;
}

static int64_t parts_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    const attn__fma_kernel *kernel = attn__fma_fitting(backwards, call);
    const attn__backward_tiles tiles = {
        .queries = kernel->queries, .keys = kernel->keys, .tile_steps = 1, .part_steps = 1};
    return attn__fma_parts(call, device, kernel, tiles);
}

static size_t forward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    (void)device;
    return lay_out(call, 0, NULL).bytes;
}

static size_t backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return lay_out(call, parts_of(call, device), NULL).bytes;
}

/* ---- parameters ---- */

attn__fma_array attn__fma_array_of(const attn__cuda_tensor *tensor, attn_dtype dtype)
{
    const bool aligned = (uintptr_t)tensor->data % 16 == 0 && tensor->batch % 4 == 0 &&
                         tensor->head % 4 == 0 && tensor->token % 4 == 0;
    return (attn__fma_array){.data = tensor->data,
                             .batch = tensor->batch,
                             .head = tensor->head,
                             .token = tensor->token,
                             .dtype = (int32_t)dtype,
                             .wide = dtype == ATTN_F32 && aligned};
}

attn__fma_array attn__fma_dense(float *data, int64_t heads, int64_t tokens, const int64_t *ends,
                                int64_t total, int64_t width)
{
    const int64_t rows = ends != NULL ? total : tokens;
    return (attn__fma_array){.data = data,
                             .batch = ends != NULL ? 0 : heads * rows * width,
                             .head = rows * width,
                             .token = width,
                             .dtype = ATTN_F32,
                             .wide = width % 4 == 0};
}

static int64_t bounded(int64_t x)
{
    const int64_t far = (int64_t)1 << 60;
    return attn__max(-far, attn__min(x, far));
}

attn__fma_problem attn__fma_problem_of(const attn__cuda_call *call, int64_t parts)
{
    return (attn__fma_problem){
        .cu_q = call->cu_q,
        .cu_kv = call->cu_kv,
        .tokens_q = call->tokens_q,
        .tokens_kv = call->tokens_kv,
        .left = bounded(call->left),
        .right = bounded(call->right),
        .shift = bounded(call->shift),
        .batch = call->batch,
        .heads_q = call->heads_q,
        .heads_kv = call->heads_kv * parts,
        .parts = (int32_t)parts,
        .shifted = call->shifted,
        .dim_qk = (int32_t)call->dim_qk,
        .dim_v = (int32_t)call->dim_v,
        .scale = call->scale,
        .factor = (float)((double)call->scale * 1.44269504088896340736),
    };
}

/* ---- launches ---- */

attn_status attn__fma_launch(const attn__cuda_device *device, const char *image,
                             const attn__fma_kernel *kernel, int64_t grid, void *params, void *stream)
{
    attn__cuda_launch it = {.grid = {(unsigned)attn__min(grid, INT32_MAX), 1, 1},
                            .block = kernel->block,
                            .shared = kernel->shared,
                            .cluster = kernel->cluster,
                            .stream = stream};
    ATTN__TRY(attn__cuda_function(&it.function, device, image, kernel->name, kernel->shared));
    return attn__cuda_enqueue(&it, (void *[]){params});
}

attn_status attn__fma_launch_rows(const attn__cuda_call *call, const attn__cuda_device *device,
                                  const char *name, int64_t rows, void *params, void *stream)
{
    const int64_t most = call->sms > 0 ? call->sms : (int64_t)device->sms * 8;
    const int64_t blocks = attn__ceil_div(rows, ATTN__FMA_ROWS_BLOCK / 32);
    if (rows == 0) {
        return ATTN_OK;
    }
    const attn__fma_kernel kernel = {.name = name, .block = ATTN__FMA_ROWS_BLOCK};
    return attn__fma_launch(device, "fma_rows", &kernel, attn__min(blocks, most), params, stream);
}

/* ---- parts of a group ---- */

int64_t attn__fma_parts(const attn__cuda_call *call, const attn__cuda_device *device,
                        const attn__fma_kernel *kernel, attn__backward_tiles tiles)
{
    const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
    tiles.dim = kernel->dim;
    tiles.clusters = attn__max(sms / attn__max(kernel->cluster, 1), 1);
    tiles.l2 = INT64_MAX;
    return attn__cuda_backward_parts(call, &tiles);
}

attn__fma_array attn__fma_parts_array(const attn__cuda_call *call, int64_t parts, float *memory,
                                      const attn__cuda_tensor *tensor, int64_t dim)
{
    return memory == NULL ? attn__fma_array_of(tensor, call->dtype_out)
                          : attn__fma_dense(memory, parts * call->heads_kv, call->tokens_kv, call->cu_kv,
                                            call->total_kv, attn__fma_padded(dim));
}

attn_status attn__fma_add_parts(const attn__cuda_call *call, const attn__cuda_device *device, int64_t parts,
                                float *memory, const attn__cuda_tensor *tensor, int64_t dim, void *stream)
{
    if (memory == NULL) {
        return ATTN_OK;
    }
    attn__fma_sum params = {.problem = attn__fma_problem_of(call, parts),
                            .parts = attn__fma_parts_array(call, parts, memory, tensor, dim),
                            .to = attn__fma_array_of(tensor, call->dtype_out),
                            .dim = (int32_t)dim,
                            .accumulate = call->accumulate};
    return attn__fma_launch_rows(call, device, "fma_sum", call->batch * call->heads_kv * call->tokens_kv,
                                 &params, stream);
}

/* ---- operands, and the forward ---- */

/* The operand as fp32: itself, or its copy, which is enqueued. */
static attn_status operand(attn__fma_array *array, const attn__cuda_call *call,
                           const attn__cuda_device *device, const attn__cuda_tensor *tensor, bool query,
                           int64_t dim, float *copy, void *stream)
{
    *array = attn__fma_array_of(tensor, call->dtype);
    if (copy == NULL) {
        return ATTN_OK;
    }
    const int64_t heads = query ? call->heads_q : call->heads_kv,
                  tokens = query ? call->tokens_q : call->tokens_kv;
    const int64_t *ends = query ? call->cu_q : call->cu_kv;
    const int64_t total = query ? call->total_q : call->total_kv;
    attn__fma_copy params = {.from = *array,
                             .to = copy,
                             .ends = ends,
                             .count = call->batch,
                             .batch = ends != NULL ? 1 : call->batch,
                             .heads = heads,
                             .tokens = ends != NULL ? total : tokens,
                             .dim = (int32_t)dim,
                             .width = (int32_t)attn__fma_padded(dim)};
    *array = attn__fma_dense(copy, heads, tokens, ends, total, attn__fma_padded(dim));
    return attn__fma_launch_rows(call, device, "fma_copy", params.batch * heads * params.tokens, &params,
                                 stream);
}

static attn_status forward_entered(const attn__fma_kernel *kernel, const attn__cuda_call *call,
                                   const attn__cuda_device *device, void *workspace, void *stream)
{
    const fma_workspace w = lay_out(call, 0, workspace);
    const int64_t tiles = attn__ceil_div(call->tokens_q, kernel->queries);
    attn__fma_forward params = {.problem = attn__fma_problem_of(call, 1),
                                .o = attn__fma_array_of(&call->o, call->dtype_out),
                                .lse = attn__fma_array_of(&call->lse, ATTN_F32),
                                .tiles = tiles,
                                .items = tiles * call->batch * call->heads_q,
                                .merge = call->merge};
    if (params.items == 0) {
        return ATTN_OK;
    }
    ATTN__TRY(operand(&params.q, call, device, &call->q, true, call->dim_qk, w.q, stream));
    ATTN__TRY(operand(&params.k, call, device, &call->k, false, call->dim_qk, w.k, stream));
    ATTN__TRY(operand(&params.v, call, device, &call->v, false, call->dim_v, w.v, stream));
    const int64_t grid = call->sms > 0 ? attn__min(params.items, call->sms) : params.items;
    return attn__fma_launch(device, kernel->name, kernel, grid, &params, stream);
}

static attn_status forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                           void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = forward_entered(attn__fma_fitting(forwards, call), call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

static attn_status bf16x3_forward(const attn__cuda_call *call, const attn__cuda_device *device,
                                  void *workspace, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status =
        forward_entered(attn__fma_fitting(bf16x3_forwards, call), call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

/* ---- gradients ---- */

/* What the main kernel reads and writes, and the rows' work before it, which is enqueued. */
static attn_status prepare(attn__fma_backward *params, attn__fma_rows *rows, const attn__cuda_call *call,
                           const attn__cuda_device *device, const fma_workspace *w, void *stream)
{
    ATTN__TRY(operand(&params->q, call, device, &call->q, true, call->dim_qk, w->q, stream));
    ATTN__TRY(operand(&params->k, call, device, &call->k, false, call->dim_qk, w->k, stream));
    ATTN__TRY(operand(&params->v, call, device, &call->v, false, call->dim_v, w->v, stream));
    ATTN__TRY(operand(&params->dout, call, device, &call->dout, true, call->dim_v, w->dout, stream));
    params->lse = attn__fma_array_of(&call->lse, ATTN_F32);
    params->delta = attn__fma_array_of(&call->delta, ATTN_F32);
    params->dq = attn__fma_array_of(&call->dq, ATTN_F32);
    if (w->dq != NULL) {
        params->dq = attn__fma_dense(w->dq, call->heads_q, call->tokens_q, call->cu_q, call->total_q,
                                     attn__fma_padded(call->dim_qk));
    }
    *rows = (attn__fma_rows){.problem = params->problem,
                             .o = attn__fma_array_of(&call->o, call->dtype_out),
                             .dout = params->dout,
                             .sum = params->dq,
                             .dq = attn__fma_array_of(&call->dq, call->dtype_out),
                             .accumulate = call->accumulate};
    if (w->delta != NULL) {
        params->delta =
            attn__fma_dense(w->delta, call->heads_q, call->tokens_q, call->cu_q, call->total_q, 1);
        rows->delta = params->delta;
    }
    attn__fma_rows before = *rows;
    if (w->dq == NULL && call->accumulate) {
        before.sum.data = NULL; /* it goes on from there */
    }
    if (before.delta.data == NULL && before.sum.data == NULL) {
        return ATTN_OK;
    }
    return attn__fma_launch_rows(call, device, "fma_before", call->batch * call->heads_q * call->tokens_q,
                                 &before, stream);
}

static attn_status backward_entered(const attn__cuda_call *call, const attn__cuda_device *device,
                                    void *workspace, void *stream)
{
    const attn__fma_kernel *kernel = attn__fma_fitting(backwards, call);
    const int64_t parts = parts_of(call, device), tiles = attn__ceil_div(call->tokens_kv, kernel->keys);
    const fma_workspace w = lay_out(call, parts, workspace);
    attn__fma_rows rows;
    attn__fma_backward params = {.problem = attn__fma_problem_of(call, parts),
                                 .dk = attn__fma_parts_array(call, parts, w.dk, &call->dk, call->dim_qk),
                                 .dv = attn__fma_parts_array(call, parts, w.dv, &call->dv, call->dim_v),
                                 .tiles_q = attn__ceil_div(call->tokens_q, kernel->queries),
                                 .tiles = tiles,
                                 .items = tiles * call->batch * call->heads_kv * parts,
                                 .accumulate = call->accumulate && parts == 1,
                                 .turns = w.turns + 2,
                                 .next = (void *)w.turns};
    ATTN__TRY(prepare(&params, &rows, call, device, &w, stream));
    if (params.items > 0) {
        const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
        ATTN__CUDA_TRY(attn__cuda.memset_async((CUdeviceptr)w.turns, 0, w.turns_bytes, (CUstream)stream));
        ATTN__TRY(
            attn__fma_launch(device, kernel->name, kernel, attn__min(params.items, sms), &params, stream));
        ATTN__TRY(attn__fma_add_parts(call, device, parts, w.dk, &call->dk, call->dim_qk, stream));
        ATTN__TRY(attn__fma_add_parts(call, device, parts, w.dv, &call->dv, call->dim_v, stream));
    }
    if (w.dq == NULL) {
        return ATTN_OK;
    }
    return attn__fma_launch_rows(call, device, "fma_after", call->batch * call->heads_q * call->tokens_q,
                                 &rows, stream);
}

static attn_status backward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                            void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = backward_entered(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

const attn__cuda_kernel attn__cuda_fma_sm90 = {
    .name = "fma-sm90",
    .summary = "fp32 throughout by fused multiply-adds; any dtype, dims and strides",
    .rejects = rejects,
    .forward_workspace = forward_workspace,
    .forward = forward,
    .backward_workspace = backward_workspace,
    .backward = backward,
};

const attn__cuda_kernel attn__cuda_bf16x3_sm90 = {
    .name = "bf16x3-sm90",
    .summary = "fp32 inputs on the tensor cores: six products of bf16 for one",
    .rejects = bf16x3_rejects,
    .forward_workspace = forward_workspace,
    .forward = bf16x3_forward,
    .backward_workspace = attn__bf16x3_backward_workspace,
    .backward = attn__bf16x3_backward,
};
