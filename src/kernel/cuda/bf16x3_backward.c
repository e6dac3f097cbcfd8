/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward.c - the gradients of the row "bf16x3-sm90": four tensors to parts in the workspace, then a
 * pass for dK and dV, and one for dQ.  Where key heads are few, groups of heads are cut into parts, too
 * (backward_parts.h).  The same bits every time, always: nothing is added up in memory but dK and dV of
 * these, in order.
 */
#include "kernel/cuda/fma_launch.h"

/* The two passes of the gradients: a block's rows, or those of a cluster, and in `keys` the rows of a tile
 * that passes. */
static const attn__fma_kernel keys_kernels[] = {
    {64, "bf16x3_backward_keys_64", 128, 64, 384, 228352, 0},
    {128, "bf16x3_backward_keys_128", 64, 32, 384, 228352, 0},
    {256, "bf16x3_backward_keys_256", 64, 32, 384, 215424, 2},
};
static const attn__fma_kernel queries_kernels[] = {
    {64, "bf16x3_backward_queries_64", 128, 64, 384, 228352, 0},
    {128, "bf16x3_backward_queries_128", 64, 32, 384, 228352, 0},
    {256, "bf16x3_backward_queries_256", 64, 32, 384, 215424, 2},
};

/* The next `count` numbers of 4 bytes; base NULL: only counts. */
static void *take(size_t *bytes, void *base, int64_t count)
{
    void *memory = base == NULL ? NULL : (char *)base + *bytes;
    *bytes += (size_t)attn__ceil_div(count, 64) * 256;
    return memory;
}

typedef struct workspace_parts {
    attn__bf16x3_side queries, keys;
    int64_t parts;  /* into which each group of heads is cut */
    float *dk, *dv; /* of these, if there are several */
    float *delta;
    int32_t *stained;
    size_t bytes;
} workspace_parts;

/* Images of two tensors of `heads`; base NULL: only counts. */
static attn__bf16x3_side take_side(size_t *bytes, void *base, const attn__cuda_call *call, bool query)
{
    const attn__fma_kernel *kernel = attn__fma_fitting(keys_kernels, call);
    const int64_t rows = kernel->keys;
    const int64_t heads = query ? call->heads_q : call->heads_kv;
    const int64_t tiles = attn__ceil_div(query ? call->tokens_q : call->tokens_kv, rows);
    const bool ragged = (query ? call->cu_q : call->cu_kv) != NULL;
    /* in ragged arrays a sequence's first slot is its first token / rows + its number */
    const int64_t slots =
        ragged ? (query ? call->total_q : call->total_kv) / rows + call->batch : call->batch * tiles;
    const int64_t count = heads * slots * (ATTN__BF16X3_IMAGE(kernel->dim) / 4);
    attn__bf16x3_side side = {.heads = heads, .tiles = tiles, .slots = slots};
    side.x = take(bytes, base, count);
    side.y = take(bytes, base, count);
    return side;
}

/* Fitted to measured times (docs/perf/cuda_f32.md). */
static int64_t parts_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    const attn__fma_kernel *kernel = attn__fma_fitting(keys_kernels, call);
    const attn__backward_tiles tiles = {
        .queries = kernel->keys, .keys = kernel->queries, .tile_steps = 3, .part_steps = 3, .tail = 0.5};
    return attn__fma_parts(call, device, kernel, tiles);
}

static workspace_parts lay_out(const attn__cuda_call *call, const attn__cuda_device *device, void *base)
{
    const int64_t parts = parts_of(call, device), rows = parts * call->heads_kv * call->total_kv;
    size_t bytes = 0;
    workspace_parts w = {.queries = take_side(&bytes, base, call, true),
                         .keys = take_side(&bytes, base, call, false),
                         .parts = parts};
    if (parts > 1 && call->dk.data != NULL) {
        w.dk = take(&bytes, base, rows * attn__fma_padded(call->dim_qk));
    }
    if (parts > 1 && call->dv.data != NULL) {
        w.dv = take(&bytes, base, rows * attn__fma_padded(call->dim_v));
    }
    w.delta = call->delta.data == NULL ? take(&bytes, base, call->total_q * call->heads_q) : NULL;
    w.stained = take(&bytes, base, 1);
    w.bytes = bytes;
    return w;
}

size_t attn__bf16x3_backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return lay_out(call, device, NULL).bytes;
}

/* A tensor to its images in `to`, which is a side's x or y. */
static attn_status launch_parts(const attn__cuda_call *call, const attn__cuda_device *device,
                                attn__bf16x3_parts *p, const attn__bf16x3_side *side, const char *to,
                                const attn__cuda_tensor *tensor, int64_t dim, void *stream)
{
    const bool query = p->lse.data != NULL;
    p->from = attn__fma_array_of(tensor, ATTN_F32);
    p->to = (char *)(uintptr_t)to;
    p->ends = query ? call->cu_q : call->cu_kv;
    p->heads = side->heads;
    p->tokens = query ? call->tokens_q : call->tokens_kv;
    p->tiles = side->tiles;
    p->slots = side->slots;
    p->items = side->tiles * side->heads * call->batch;
    p->dim = (int32_t)dim;
    p->width = (int32_t)attn__fma_fitting(keys_kernels, call)->dim;
    if (p->items == 0) {
        return ATTN_OK;
    }
    static const attn__fma_kernel kernel = {.name = "bf16x3_parts", .block = 256, .shared = 256};
    const int64_t most = call->sms > 0 ? call->sms : INT32_MAX;
    return attn__fma_launch(device, kernel.name, &kernel, attn__min(p->items, most), p, stream);
}

/* All four tensors to their parts, after delta, if it is not given. */
static attn_status prepare(const attn__cuda_call *call, const attn__cuda_device *device,
                           const workspace_parts *w, void *stream)
{
    attn__fma_array delta = attn__fma_array_of(&call->delta, ATTN_F32);
    if (w->delta != NULL) {
        delta = attn__fma_dense(w->delta, call->heads_q, call->tokens_q, call->cu_q, call->total_q, 1);
        attn__fma_rows rows = {.problem = attn__fma_problem_of(call, 1),
                               .o = attn__fma_array_of(&call->o, call->dtype_out),
                               .dout = attn__fma_array_of(&call->dout, ATTN_F32),
                               .delta = delta};
        ATTN__TRY(attn__fma_launch_rows(call, device, "fma_before",
                                        call->batch * call->heads_q * call->tokens_q, &rows, stream));
    }
    ATTN__CUDA_TRY(attn__cuda.memset_async((CUdeviceptr)w->stained, 0, sizeof *w->stained, (CUstream)stream));
    attn__bf16x3_parts keys = {.stained = w->stained};
    attn__bf16x3_parts queries = {.stained = w->stained, .lse = attn__fma_array_of(&call->lse, ATTN_F32)};
    ATTN__TRY(launch_parts(call, device, &keys, &w->keys, w->keys.x, &call->k, call->dim_qk, stream));
    ATTN__TRY(launch_parts(call, device, &keys, &w->keys, w->keys.y, &call->v, call->dim_v, stream));
    ATTN__TRY(
        launch_parts(call, device, &queries, &w->queries, w->queries.x, &call->q, call->dim_qk, stream));
    queries.delta = delta;
    return launch_parts(call, device, &queries, &w->queries, w->queries.y, &call->dout, call->dim_v, stream);
}

/* The gradients of one side: dQ, or dK and dV. */
static attn_status launch_pass(const attn__cuda_call *call, const attn__cuda_device *device,
                               const attn__fma_kernel *kernel, attn__bf16x3_pass *p, int64_t tokens,
                               void *stream)
{
    p->tiles = attn__ceil_div(tokens, kernel->queries);
    p->items = p->tiles * p->heads * call->batch;
    if (p->items == 0 || (p->dx.data == NULL && p->dy.data == NULL)) {
        return ATTN_OK;
    }
    const int64_t blocks = attn__max(kernel->cluster, 1); /* of an item */
    const int64_t most = (call->sms > 0 ? call->sms : INT32_MAX) / blocks;
    return attn__fma_launch(device, kernel->name, kernel, blocks * attn__min(p->items, most), p, stream);
}

static attn_status backward_entered(const attn__cuda_call *call, const attn__cuda_device *device,
                                    void *workspace, void *stream)
{
    const workspace_parts w = lay_out(call, device, workspace);
    attn__bf16x3_pass params = {.problem = attn__fma_problem_of(call, w.parts),
                                .rows = w.keys,
                                .columns = w.queries,
                                .heads = call->heads_kv * w.parts,
                                .dx = attn__fma_parts_array(call, w.parts, w.dk, &call->dk, call->dim_qk),
                                .dy = attn__fma_parts_array(call, w.parts, w.dv, &call->dv, call->dim_v),
                                .dout = attn__fma_array_of(&call->dout, ATTN_F32),
                                .lse = attn__fma_array_of(&call->lse, ATTN_F32),
                                .stained = w.stained,
                                .accumulate = call->accumulate && w.parts == 1};
    ATTN__TRY(prepare(call, device, &w, stream));
    ATTN__TRY(
        launch_pass(call, device, attn__fma_fitting(keys_kernels, call), &params, call->tokens_kv, stream));
    ATTN__TRY(attn__fma_add_parts(call, device, w.parts, w.dk, &call->dk, call->dim_qk, stream));
    ATTN__TRY(attn__fma_add_parts(call, device, w.parts, w.dv, &call->dv, call->dim_v, stream));
    params.problem = attn__fma_problem_of(call, 1);
    params.accumulate = call->accumulate;
    params.rows = w.queries;
    params.columns = w.keys;
    params.heads = call->heads_q;
    params.dx = attn__fma_array_of(&call->dq, call->dtype_out);
    params.dy.data = NULL;
    return launch_pass(call, device, attn__fma_fitting(queries_kernels, call), &params, call->tokens_q,
                       stream);
}

attn_status attn__bf16x3_backward(const attn__cuda_call *call, const attn__cuda_device *device,
                                  void *workspace, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = backward_entered(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}
