/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_launch.c - the rows "fma-sm90": fp32 throughout, by fused multiply-adds; any dtype, dims, strides; and
 * "bf16x3-sm90": the same for fp32 inputs with six products of bf16 for one, forward, which is faster and no
 * less exact.
 *
 * fp32 is read where it lies.  fp16 and bf16 are first copied to fp32 in the workspace, which costs next to
 * nothing beside the products, and keeps conversions and their registers out of the kernels.  Gradients are
 * the same bits every time, always: fma_backward.cuh tells how.
 */
#include <math.h>
#include <stddef.h>

#include "kernel/cuda/driver.h"
#include "kernel/cuda/fma_params.h"
#include "kernel/cuda/rows.h"

/* A kernel, its tiles and its shared memory, which are those of the .cu file of that name; 256 bytes more
 * than the tiles where products read beyond the last of them. */
typedef struct fma_kernel {
    int64_t dim;
    const char *name;
    int64_t queries, keys; /* of a tile */
    unsigned block, shared;
} fma_kernel;

enum { ROWS_BLOCK = 256 };

static const int64_t most_tokens = (int64_t)1 << 29; /* positions are 32 bits wide, and added up */

static const fma_kernel forwards[] = {
    {64, "fma_forward_64", 128, 64, 128, 81920},
    {128, "fma_forward_128", 128, 128, 256, 229376},
    {256, "fma_forward_256", 128, 32, 256, 212992},
    {512, "fma_forward_512", 64, 32, 256, 212992},
};
static const fma_kernel bf16x3_forwards[] = {
    {64, "bf16x3_forward_64", 128, 64, 384, 197376},
    {128, "bf16x3_forward_128", 128, 64, 384, 197376},
};
static const fma_kernel backwards[] = {
    {64, "fma_backward_64", 64, 256, 256, 230656},
    {128, "fma_backward_128", 64, 128, 256, 230656},
    {256, "fma_backward_256", 32, 64, 256, 205824},
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
    return widest(call) > 128 ? "takes dims up to 128" : rejects(call, backward);
}

/* The two passes of the gradients: a block's rows, and in `keys` the rows of a tile that passes. */
static const fma_kernel bf16x3_backward_keys[] = {
    {64, "bf16x3_backward_keys_64", 128, 64, 384, 228352},
    {128, "bf16x3_backward_keys_128", 64, 32, 384, 228352},
};
static const fma_kernel bf16x3_backward_queries[] = {
    {64, "bf16x3_backward_queries_64", 128, 64, 384, 228352},
    {128, "bf16x3_backward_queries_128", 64, 32, 384, 228352},
};

static const fma_kernel *fitting(const fma_kernel *kernels, const attn__cuda_call *call)
{
    while (kernels->dim < widest(call)) {
        kernels++;
    }
    return kernels;
}

/* ---- the workspace ---- */

typedef struct fma_workspace {
    float *q, *k, *v, *dout; /* fp32 copies of 16-bit inputs */
    float *delta, *dq;
    int32_t *turns; /* of backward, and the counter before them */
    size_t turns_bytes;
    size_t bytes;
} fma_workspace;

static int64_t padded(int64_t dim)
{
    return attn__ceil_div(dim, 4) * 4;
}

/* The next `count` numbers of 4 bytes; base NULL: only counts. */
static void *take(fma_workspace *w, void *base, int64_t count)
{
    void *memory = base == NULL ? NULL : (char *)base + w->bytes;
    w->bytes += (size_t)attn__ceil_div(count, 64) * 256;
    return memory;
}

static fma_workspace lay_out(const attn__cuda_call *call, bool backward, void *base)
{
    fma_workspace w = {0};
    const int64_t queries = call->total_q * call->heads_q, keys = call->total_kv * call->heads_kv;
    if (call->dtype != ATTN_F32) {
        w.q = take(&w, base, queries * padded(call->dim_qk));
        w.k = take(&w, base, keys * padded(call->dim_qk));
        w.v = take(&w, base, keys * padded(call->dim_v));
        w.dout = backward ? take(&w, base, queries * padded(call->dim_v)) : NULL;
    }
    if (backward) {
        const int64_t tiles = attn__ceil_div(call->tokens_q, fitting(backwards, call)->queries);
        const int64_t turns = call->batch * call->heads_q * tiles + 2;
        w.delta = call->delta.data == NULL ? take(&w, base, queries) : NULL;
        if (call->dq.data != NULL && call->dtype_out != ATTN_F32) {
            w.dq = take(&w, base, queries * padded(call->dim_qk));
        }
        w.turns = take(&w, base, turns);
        w.turns_bytes = (size_t)turns * sizeof(int32_t);
    }
    return w;
}

static size_t forward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    (void)device;
    return lay_out(call, false, NULL).bytes;
}

static size_t backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    (void)device;
    return lay_out(call, true, NULL).bytes;
}

/* ---- parameters ---- */

static attn__fma_array array_of(const attn__cuda_tensor *tensor, attn_dtype dtype)
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

/* fp32 rows of `width` in the workspace, in the order batch, head, token; one batch where sequences lie one
 * after another. */
static attn__fma_array dense(float *data, int64_t heads, int64_t tokens, const int64_t *ends, int64_t total,
                             int64_t width)
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

static attn__fma_problem problem_of(const attn__cuda_call *call)
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
        .heads_kv = call->heads_kv,
        .shifted = call->shifted,
        .dim_qk = (int32_t)call->dim_qk,
        .dim_v = (int32_t)call->dim_v,
        .scale = call->scale,
        .factor = (float)((double)call->scale * 1.44269504088896340736),
    };
}

/* ---- launches ---- */

static attn_status launch(const attn__cuda_device *device, const char *image, const char *name, int64_t grid,
                          unsigned block, unsigned shared, void *params, void *stream)
{
    attn__cuda_launch it = {.grid = {(unsigned)attn__min(grid, INT32_MAX), 1, 1},
                            .block = block,
                            .shared = shared,
                            .stream = stream};
    ATTN__TRY(attn__cuda_function(&it.function, device, image, name, shared));
    return attn__cuda_enqueue(&it, (void *[]){params});
}

static attn_status launch_rows(const attn__cuda_call *call, const attn__cuda_device *device, const char *name,
                               int64_t rows, void *params, void *stream)
{
    const int64_t most = call->sms > 0 ? call->sms : (int64_t)device->sms * 8;
    const int64_t blocks = attn__ceil_div(rows, ROWS_BLOCK / 32);
    if (rows == 0) {
        return ATTN_OK;
    }
    return launch(device, "fma_rows", name, attn__min(blocks, most), ROWS_BLOCK, 0, params, stream);
}

/* The operand as fp32: itself, or its copy, which is enqueued. */
static attn_status operand(attn__fma_array *array, const attn__cuda_call *call,
                           const attn__cuda_device *device, const attn__cuda_tensor *tensor, bool query,
                           int64_t dim, float *copy, void *stream)
{
    *array = array_of(tensor, call->dtype);
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
                             .width = (int32_t)padded(dim)};
    *array = dense(copy, heads, tokens, ends, total, padded(dim));
    return launch_rows(call, device, "fma_copy", params.batch * heads * params.tokens, &params, stream);
}

static attn_status forward_entered(const fma_kernel *kernel, const attn__cuda_call *call,
                                   const attn__cuda_device *device, void *workspace, void *stream)
{
    const fma_workspace w = lay_out(call, false, workspace);
    const int64_t tiles = attn__ceil_div(call->tokens_q, kernel->queries);
    attn__fma_forward params = {.problem = problem_of(call),
                                .o = array_of(&call->o, call->dtype_out),
                                .lse = array_of(&call->lse, ATTN_F32),
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
    return launch(device, kernel->name, kernel->name, grid, kernel->block, kernel->shared, &params, stream);
}

static attn_status forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                           void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = forward_entered(fitting(forwards, call), call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

static attn_status bf16x3_forward(const attn__cuda_call *call, const attn__cuda_device *device,
                                  void *workspace, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = forward_entered(fitting(bf16x3_forwards, call), call, device, workspace, stream);
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
    params->lse = array_of(&call->lse, ATTN_F32);
    params->delta = array_of(&call->delta, ATTN_F32);
    params->dq = array_of(&call->dq, ATTN_F32);
    if (w->dq != NULL) {
        params->dq =
            dense(w->dq, call->heads_q, call->tokens_q, call->cu_q, call->total_q, padded(call->dim_qk));
    }
    *rows = (attn__fma_rows){.problem = params->problem,
                             .o = array_of(&call->o, call->dtype_out),
                             .dout = params->dout,
                             .sum = params->dq,
                             .dq = array_of(&call->dq, call->dtype_out),
                             .accumulate = call->accumulate};
    if (w->delta != NULL) {
        params->delta = dense(w->delta, call->heads_q, call->tokens_q, call->cu_q, call->total_q, 1);
        rows->delta = params->delta;
    }
    attn__fma_rows before = *rows;
    if (w->dq == NULL && call->accumulate) {
        before.sum.data = NULL; /* it goes on from there */
    }
    if (before.delta.data == NULL && before.sum.data == NULL) {
        return ATTN_OK;
    }
    return launch_rows(call, device, "fma_before", call->batch * call->heads_q * call->tokens_q, &before,
                       stream);
}

static attn_status backward_entered(const attn__cuda_call *call, const attn__cuda_device *device,
                                    void *workspace, void *stream)
{
    const fma_kernel *kernel = fitting(backwards, call);
    const fma_workspace w = lay_out(call, true, workspace);
    const int64_t tiles = attn__ceil_div(call->tokens_kv, kernel->keys);
    attn__fma_rows rows;
    attn__fma_backward params = {.problem = problem_of(call),
                                 .dk = array_of(&call->dk, call->dtype_out),
                                 .dv = array_of(&call->dv, call->dtype_out),
                                 .tiles_q = attn__ceil_div(call->tokens_q, kernel->queries),
                                 .tiles = tiles,
                                 .items = tiles * call->batch * call->heads_kv,
                                 .accumulate = call->accumulate,
                                 .turns = w.turns + 2,
                                 .next = (void *)w.turns};
    ATTN__TRY(prepare(&params, &rows, call, device, &w, stream));
    if (params.items > 0) {
        const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
        ATTN__CUDA_TRY(attn__cuda.memset_async((CUdeviceptr)w.turns, 0, w.turns_bytes, (CUstream)stream));
        ATTN__TRY(launch(device, kernel->name, kernel->name, attn__min(params.items, sms), kernel->block,
                         kernel->shared, &params, stream));
    }
    if (w.dq == NULL) {
        return ATTN_OK;
    }
    return launch_rows(call, device, "fma_after", call->batch * call->heads_q * call->tokens_q, &rows,
                       stream);
}

static attn_status backward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                            void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = backward_entered(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

/* ---- gradients by products of bf16 ---- */

typedef struct bf16x3_workspace {
    attn__bf16x3_side queries, keys;
    float *delta;
    int32_t *stained;
    size_t bytes;
} bf16x3_workspace;

/* Images of two tensors of `heads`; base NULL: only counts. */
static attn__bf16x3_side take_side(fma_workspace *w, void *base, const attn__cuda_call *call, bool query)
{
    const int64_t rows = fitting(bf16x3_backward_keys, call)->keys;
    const int64_t heads = query ? call->heads_q : call->heads_kv;
    const int64_t tiles = attn__ceil_div(query ? call->tokens_q : call->tokens_kv, rows);
    const bool ragged = (query ? call->cu_q : call->cu_kv) != NULL;
    /* in ragged arrays a sequence's first slot is its first token / rows + its number */
    const int64_t slots =
        ragged ? (query ? call->total_q : call->total_kv) / rows + call->batch : call->batch * tiles;
    const int64_t count = heads * slots * (ATTN__BF16X3_IMAGE / 4);
    attn__bf16x3_side side = {.heads = heads, .tiles = tiles, .slots = slots};
    side.x = take(w, base, count);
    side.y = take(w, base, count);
    return side;
}

static bf16x3_workspace bf16x3_lay_out(const attn__cuda_call *call, void *base)
{
    fma_workspace counted = {0};
    bf16x3_workspace w = {.queries = take_side(&counted, base, call, true),
                          .keys = take_side(&counted, base, call, false)};
    w.delta =
        call->delta.data == NULL ? take(&counted, base, call->total_q * call->heads_q) : NULL;
    w.stained = take(&counted, base, 1);
    w.bytes = counted.bytes;
    return w;
}

static size_t bf16x3_backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    (void)device;
    return bf16x3_lay_out(call, NULL).bytes;
}

/* A tensor to its images in `to`, which is a side's x or y. */
static attn_status launch_parts(const attn__cuda_call *call, const attn__cuda_device *device,
                                attn__bf16x3_parts *p, const attn__bf16x3_side *side, const char *to,
                                const attn__cuda_tensor *tensor, int64_t dim, void *stream)
{
    const bool query = p->lse.data != NULL;
    p->from = array_of(tensor, ATTN_F32);
    p->to = (char *)(uintptr_t)to;
    p->ends = query ? call->cu_q : call->cu_kv;
    p->heads = side->heads;
    p->tokens = query ? call->tokens_q : call->tokens_kv;
    p->tiles = side->tiles;
    p->slots = side->slots;
    p->items = side->tiles * side->heads * call->batch;
    p->dim = (int32_t)dim;
    p->width = (int32_t)fitting(bf16x3_backward_keys, call)->dim;
    if (p->items == 0) {
        return ATTN_OK;
    }
    const int64_t most = call->sms > 0 ? call->sms : INT32_MAX;
    return launch(device, "bf16x3_parts", "bf16x3_parts", attn__min(p->items, most), ROWS_BLOCK, 256, p,
                  stream);
}

/* All four tensors to their parts, after delta, if it is not given. */
static attn_status bf16x3_prepare(const attn__cuda_call *call, const attn__cuda_device *device,
                                  const bf16x3_workspace *w, void *stream)
{
    attn__fma_array delta = array_of(&call->delta, ATTN_F32);
    if (w->delta != NULL) {
        delta = dense(w->delta, call->heads_q, call->tokens_q, call->cu_q, call->total_q, 1);
        attn__fma_rows rows = {.problem = problem_of(call),
                               .o = array_of(&call->o, call->dtype_out),
                               .dout = array_of(&call->dout, ATTN_F32),
                               .delta = delta};
        ATTN__TRY(launch_rows(call, device, "fma_before", call->batch * call->heads_q * call->tokens_q, &rows,
                              stream));
    }
    ATTN__CUDA_TRY(
        attn__cuda.memset_async((CUdeviceptr)w->stained, 0, sizeof *w->stained, (CUstream)stream));
    attn__bf16x3_parts keys = {.stained = w->stained};
    attn__bf16x3_parts queries = {.stained = w->stained, .lse = array_of(&call->lse, ATTN_F32)};
    ATTN__TRY(launch_parts(call, device, &keys, &w->keys, w->keys.x, &call->k, call->dim_qk, stream));
    ATTN__TRY(launch_parts(call, device, &keys, &w->keys, w->keys.y, &call->v, call->dim_v, stream));
    ATTN__TRY(
        launch_parts(call, device, &queries, &w->queries, w->queries.x, &call->q, call->dim_qk, stream));
    queries.delta = delta;
    return launch_parts(call, device, &queries, &w->queries, w->queries.y, &call->dout, call->dim_v, stream);
}

/* The gradients of one side: dQ, or dK and dV. */
static attn_status bf16x3_pass(const attn__cuda_call *call, const attn__cuda_device *device,
                               const fma_kernel *kernel, attn__bf16x3_backward *p, int64_t tokens,
                               void *stream)
{
    p->tiles = attn__ceil_div(tokens, kernel->queries);
    p->items = p->tiles * p->rows.heads * call->batch;
    if (p->items == 0 || (p->dx.data == NULL && p->dy.data == NULL)) {
        return ATTN_OK;
    }
    const int64_t grid = call->sms > 0 ? attn__min(p->items, call->sms) : p->items;
    return launch(device, kernel->name, kernel->name, grid, kernel->block, kernel->shared, p, stream);
}

static attn_status bf16x3_backward_entered(const attn__cuda_call *call, const attn__cuda_device *device,
                                           void *workspace, void *stream)
{
    const bf16x3_workspace w = bf16x3_lay_out(call, workspace);
    attn__bf16x3_backward params = {.problem = problem_of(call),
                                    .rows = w.keys,
                                    .columns = w.queries,
                                    .dx = array_of(&call->dk, call->dtype_out),
                                    .dy = array_of(&call->dv, call->dtype_out),
                                    .dout = array_of(&call->dout, ATTN_F32),
                                    .lse = array_of(&call->lse, ATTN_F32),
                                    .stained = w.stained,
                                    .accumulate = call->accumulate};
    ATTN__TRY(bf16x3_prepare(call, device, &w, stream));
    ATTN__TRY(bf16x3_pass(call, device, fitting(bf16x3_backward_keys, call), &params, call->tokens_kv, stream));
    params.rows = w.queries;
    params.columns = w.keys;
    params.dx = array_of(&call->dq, call->dtype_out);
    params.dy.data = NULL;
    return bf16x3_pass(call, device, fitting(bf16x3_backward_queries, call), &params, call->tokens_q, stream);
}

static attn_status bf16x3_backward(const attn__cuda_call *call, const attn__cuda_device *device,
                                   void *workspace, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = bf16x3_backward_entered(call, device, workspace, stream);
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
    .backward_workspace = bf16x3_backward_workspace,
    .backward = bf16x3_backward,
};
