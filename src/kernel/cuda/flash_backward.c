/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward.c - gradients on Hopper: three kernels on one stream.
 *
 * METHOD.  flash_backward_before makes delta and the scaled lse and zeroes the sum of dQ; flash_backward (by
 * tiles of keys) adds to that sum and writes dK and dV; flash_backward_after rounds dQ, and adds up dK and dV
 * of a group's parts.  The main kernel takes one block a multiprocessor, and its blocks, or beyond 128 dims
 * its pairs of blocks, fetch tiles from a counter.
 *
 * COST.  Workspace: 4 bytes for each element of dQ with dims padded to 64, 128 or 256 and tokens to a tile,
 * and 8 for each row; 4 for each element of dK and dV of each part, if there are several.  Nothing grows like
 * queries times keys.
 */
#include "kernel/cuda/flash_backward.h"

#include <string.h>

#include "kernel/cuda/backward_parts.h"
#include "kernel/cuda/flash_backward_params.h"
#include "kernel/cuda/map.h"

enum {
    ALIGN = 256,
    ROW_THREADS = 256,
    MAIN_THREADS = 384,
    ROW_BLOCKS = 8,
    TOGETHER_BYTES = 12 << 20,
    LAST_BYTES = 24 << 20,
    RUN_QUERIES = 512,
    GROUP_QUERIES = 2048,
    RUN_BYTES = 16 << 20,
    TILE_STEPS = 8, /* of attn__backward_tiles */
    PART_STEPS = 8
};

/* ---- shapes ---- */

/* The three kernels of padded dims. */
typedef struct variant {
    int dim, queries, keys;
    int blocks; /* of a cluster, which share a tile of keys */
    unsigned shared;
    const char *image[2]; /* fp16, bf16 */
} variant;

static const variant variants[] = {
    {64,
     ATTN__BACKWARD_QUERIES_64,
     ATTN__BACKWARD_KEYS_64,
     1,
     ATTN__BACKWARD_SHARED_64,
     {"flash_backward_f16_64", "flash_backward_bf16_64"}},
    {128,
     ATTN__BACKWARD_QUERIES_128,
     ATTN__BACKWARD_KEYS_128,
     1,
     ATTN__BACKWARD_SHARED_128,
     {"flash_backward_f16_128", "flash_backward_bf16_128"}},
    {256,
     ATTN__BACKWARD_QUERIES_256,
     ATTN__BACKWARD_KEYS_256,
     2,
     ATTN__BACKWARD_SHARED_256,
     {"flash_backward_f16_256", "flash_backward_bf16_256"}},
};

static const variant *variant_of(const attn__cuda_call *call)
{
    int64_t dim = attn__max(call->dim_qk, call->dim_v);
    return &variants[dim <= 64 ? 0 : dim <= 128 ? 1 : 2];
}

/* Blocks, or pairs of blocks, that work at once. */
static int64_t clusters_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
    return attn__max(sms / variant_of(call)->blocks, 1);
}

/* Into how many a group is cut, each of them a key head to the main kernel. */
static int64_t parts_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    const variant *v = variant_of(call);
    const attn__backward_tiles tiles = {.queries = v->queries,
                                        .keys = v->keys,
                                        .dim = v->dim,
                                        .clusters = clusters_of(call, device),
                                        .l2 = (int64_t)device->l2,
                                        .tile_steps = TILE_STEPS,
                                        .part_steps = PART_STEPS};
    return attn__cuda_backward_parts(call, &tiles);
}

/* Tiles of queries of one head, all sequences.  A ragged batch rounds each sequence up, by less than one
 * tile. */
static int64_t slots_of(const attn__cuda_call *call, const variant *v)
{
    return call->cu_q != NULL ? call->total_q / v->queries + call->batch
                              : attn__ceil_div(call->tokens_q, v->queries) * call->batch;
}

static const char *shape_rejects(const attn__cuda_call *call)
{
    if (call->dim_qk % 8 != 0 || call->dim_v % 8 != 0 || call->dim_qk < 8 || call->dim_v < 8 ||
        call->dim_qk > 256 || call->dim_v > 256) {
        return "dims must be multiples of 8 up to 256";
    }
    if (call->tokens_q > ATTN__TILE_TOKENS || call->tokens_kv > ATTN__TILE_TOKENS ||
        call->total_q > ATTN__TILE_TOKENS || call->total_kv > ATTN__TILE_TOKENS) {
        return "at most 2^28 tokens";
    }
    if (call->shifted && (call->shift > ATTN__TILE_TOKENS || call->shift < -ATTN__TILE_TOKENS)) {
        return "a shift of at most 2^28 tokens";
    }
    const variant *v = variant_of(call);
    if (v->blocks > 1 && call->sms == 1) {
        return "has gradients of more than 128 dims by two multiprocessors at once, and sms allows one";
    }
    int64_t tiles = 0, pieces = 0;
    if (!attn__mul(attn__ceil_div(call->tokens_kv, v->keys) * call->batch, call->heads_kv, &tiles) ||
        !attn__mul(slots_of(call, v), call->heads_q, &pieces) || tiles > INT32_MAX / 2 ||
        pieces > INT32_MAX / 2 || call->batch > INT32_MAX / 2) {
        return "too many tiles: split the batch or the heads";
    }
    return NULL;
}

const char *attn__flash_backward_rejects(const attn__cuda_call *call)
{
    if (call->dtype != ATTN_BF16 && call->dtype != ATTN_F16) {
        return "q, k, v and dout must be bf16 or fp16";
    }
    if (call->dtype_out != ATTN_F32 && call->dtype_out != call->dtype) {
        return "gradients are fp32, or of the dtype of q, k and v";
    }
    size_t size = attn_dtype_size(call->dtype_out);
    if (!attn__cuda_map_fits(&call->q) || !attn__cuda_map_fits(&call->k) || !attn__cuda_map_fits(&call->v) ||
        !attn__cuda_map_fits(&call->dout) ||
        (call->delta.data == NULL && !attn__cuda_aligned(&call->o, size))) {
        return "q, k, v, o and dout must begin at a multiple of 16 bytes, and so must each of their batches, "
               "heads and tokens, with no negative stride; copy them, or take the kernel fma-sm90";
    }
    if (!attn__cuda_aligned(&call->dq, size) || !attn__cuda_aligned(&call->dk, size) ||
        !attn__cuda_aligned(&call->dv, size)) {
        return "dq, dk and dv must begin at a multiple of 16 bytes, and so must each of their batches, heads "
               "and tokens; copy them, or take the kernel fma-sm90";
    }
    return shape_rejects(call);
}

/* ---- the workspace ---- */

/* Where its parts begin. */
typedef struct layout {
    size_t minus_lse, delta, turns, next, dk, dv, bytes; /* the sum of dQ is first */
} layout;

static size_t part(size_t *end, int64_t count)
{
    size_t begin = *end;
    *end += ((size_t)count * 4 + ALIGN - 1) / ALIGN * ALIGN;
    return begin;
}

/* Tokens of all sequences: of a ragged batch as many as may come. */
static int64_t kv_rows(const attn__cuda_call *call)
{
    return call->cu_kv != NULL ? call->most_kv : call->batch * call->tokens_kv;
}

static layout layout_of(const attn__cuda_call *call, int64_t parts)
{
    const variant *v = variant_of(call);
    int64_t tiles = slots_of(call, v) * call->heads_q;
    layout at;
    size_t end = 0;
    (void)part(&end, tiles * v->queries * v->dim);
    at.minus_lse = part(&end, tiles * v->queries);
    at.delta = part(&end, tiles * v->queries);
    at.turns = part(&end, call->deterministic ? tiles * v->queries * v->dim / ATTN__BACKWARD_PIECE : 0);
    at.next = part(&end, 1);
    const int64_t rows = parts > 1 ? parts * call->heads_kv * kv_rows(call) : 0;
    at.dk = part(&end, rows * call->dim_qk);
    at.dv = part(&end, rows * call->dim_v);
    at.bytes = end;
    return at;
}

size_t attn__flash_backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return layout_of(call, parts_of(call, device)).bytes;
}

/* ---- parameters ---- */

static int32_t side_of(int64_t tokens)
{
    return (int32_t)attn__max(attn__min(tokens, ATTN__TILE_FAR), -ATTN__TILE_FAR);
}

/* Bytes of Q, dO and sums of dQ of one key head. */
static int64_t head_bytes(const attn__backward_params *p)
{
    return (int64_t)attn__max(p->tokens_q, 1) * p->group * p->dim * ATTN__BACKWARD_BYTES;
}

/* How many key heads have about so many bytes of these, and so many tiles of keys at least. */
static int32_t heads_of(const attn__backward_params *p, int64_t bytes, int64_t tiles)
{
    const int64_t enough = attn__ceil_div(tiles, attn__max(p->tiles_kv, 1));
    return (int32_t)attn__min(attn__max(attn__max(bytes / head_bytes(p), enough), 1), p->batch * p->heads_kv);
}

/*
 * Tiles of queries of a run (flash_backward_work.cuh).  Short where a causal band parts the blocks of a group
 * and the L2 cache does not keep what the heads that take turns first read and add to: the more heads a group
 * has, the fewer queries, so that a run of all its heads is about as long; and so few that the cache keeps
 * what all groups that blocks work on meet in one run.
 */
static int32_t run_of(const attn__backward_params *p, const attn__cuda_call *call, const variant *v,
                      const attn__cuda_device *device)
{
    const int64_t heads = p->last > 0 ? p->together : p->batch * p->heads_kv;
    if (heads == 0 || p->group == 1 || !attn__backward_uneven(call) ||
        heads * head_bytes(p) <= (int64_t)device->l2) {
        return INT32_MAX;
    }
    const int64_t at_work = attn__min(heads, clusters_of(call, device)) * p->group;
    const int64_t most = RUN_BYTES / (at_work * p->dim * ATTN__BACKWARD_BYTES);
    const int64_t queries = attn__min(attn__min(RUN_QUERIES, GROUP_QUERIES / p->group), most);
    return (int32_t)attn__max(queries / v->queries, 1);
}

/*
 * Tiles of keys of some heads take turns, the first ones first: under a causal band these have the most
 * queries. They are few heads, whose queries and sums the L2 cache keeps, and so that long tiles run beside
 * short ones. The last are more, with a tile and a half for each cluster: the longest work must have begun
 * before blocks run out of tiles.  Without a band all tiles are alike: one head after the other.
 *
 * In order (deterministic) tiles of one head wait for each other, so some heads take turns always; the
 * longest tiles come last there (flash_backward_work.cuh).
 */
static void fill_turns(attn__backward_params *p, const attn__cuda_call *call, const attn__cuda_device *device)
{
    const int64_t clusters = clusters_of(call, device);
    const int32_t heads = p->batch * p->heads_kv;
    p->together = 1;
    p->last = heads;
    if (heads > 0 && call->deterministic) {
        p->together = heads_of(p, LAST_BYTES, 0);
        p->last = heads / p->together * p->together;
    } else if (heads > 0 && call->right < call->tokens_kv) {
        p->together = heads_of(p, TOGETHER_BYTES, clusters / 2);
        p->last = (heads - heads_of(p, LAST_BYTES, clusters * 3 / 2)) / p->together * p->together;
    }
}

static void fill_tensors(attn__backward_params *p, const attn__cuda_call *call)
{
    p->dq = call->dq;
    p->dk = call->dk;
    p->dv = call->dv;
    p->q_rows = call->q;
    p->k_rows = call->k;
    p->v_rows = call->v;
    p->o_rows = call->o;
    p->dout_rows = call->dout;
    p->lse = call->lse;
    p->given_delta = call->delta;
    p->cu_q = call->cu_q;
    p->cu_kv = call->cu_kv;
}

/* dK or dV of all parts: [batch][part of a head][token][dim], sequences of a ragged batch in one. */
static attn__cuda_tensor parts_at(const attn__cuda_call *call, char *data, int64_t dim, int64_t parts)
{
    const int64_t heads = call->heads_kv * parts,
                  tokens = call->cu_kv != NULL ? call->most_kv : call->tokens_kv;
    return (attn__cuda_tensor){data, call->cu_kv != NULL ? 0 : heads * tokens * dim, tokens * dim, dim};
}

static void fill_workspace(attn__backward_params *p, const attn__cuda_call *call, char *workspace)
{
    layout at = layout_of(call, p->parts);
    p->dq_sum = (float *)(void *)workspace;
    p->minus_lse = (float *)(void *)(workspace + at.minus_lse);
    p->delta = (float *)(void *)(workspace + at.delta);
    p->turns = call->deterministic ? (int32_t *)(void *)(workspace + at.turns) : NULL;
    p->next = (int32_t *)(void *)(workspace + at.next);
    p->dk_parts = parts_at(call, workspace + at.dk, call->dim_qk, p->parts);
    p->dv_parts = parts_at(call, workspace + at.dv, call->dim_v, p->parts);
}

static attn_status fill_maps(attn__backward_params *p, const attn__cuda_call *call, void *anything)
{
    const variant *v = variant_of(call);
    const struct {
        attn__tile_map *map;
        const attn__cuda_tensor *tensor;
        int64_t dim, heads, tokens;
        int rows;
    } maps[] = {
        {&p->q, &call->q, call->dim_qk, call->heads_q, call->tokens_q, v->queries},
        {&p->dout, &call->dout, call->dim_v, call->heads_q, call->tokens_q, v->queries},
        {&p->k, &call->k, call->dim_qk, call->heads_kv, call->tokens_kv, v->keys / v->blocks},
        {&p->v, &call->v, call->dim_v, call->heads_kv, call->tokens_kv, v->keys / v->blocks},
    };
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) {
        ATTN__TRY(attn__cuda_map(maps[i].map, call->dtype, maps[i].tensor, maps[i].dim, maps[i].heads,
                                 maps[i].tokens, call->batch, call->cu_q != NULL, maps[i].rows, anything));
    }
    return ATTN_OK;
}

static attn_status fill(attn__backward_params *p, const attn__cuda_call *call,
                        const attn__cuda_device *device, void *workspace)
{
    const variant *v = variant_of(call);
    memset(p, 0, sizeof *p);
    p->parts = (int32_t)parts_of(call, device);
    fill_tensors(p, call);
    fill_workspace(p, call, workspace);
    p->scale = call->scale;
    p->scale_log2 = call->scale * 1.4426950408889634F;
    p->batch = (int32_t)call->batch;
    p->heads_q = (int32_t)call->heads_q;
    p->heads_kv = (int32_t)call->heads_kv * p->parts;
    p->group = (int32_t)(call->heads_q / attn__max(p->heads_kv, 1));
    p->tokens_q = (int32_t)call->tokens_q;
    p->tokens_kv = (int32_t)call->tokens_kv;
    p->dim_qk = (int32_t)call->dim_qk;
    p->dim_v = (int32_t)call->dim_v;
    p->dim = v->dim;
    p->left = side_of(call->left);
    p->right = side_of(call->right);
    p->shift = (int32_t)call->shift;
    p->shifted = call->shifted;
    p->tiles_q = (int32_t)attn__ceil_div(call->tokens_q, v->queries);
    p->tiles_kv = (int32_t)attn__ceil_div(call->tokens_kv, v->keys);
    p->slots = (int32_t)slots_of(call, v);
    fill_turns(p, call, device);
    p->run = run_of(p, call, v, device);
    p->tiles = p->tiles_kv * p->batch * p->heads_kv;
    p->accumulate = call->accumulate;
    p->out_f32 = call->dtype_out == ATTN_F32;
    return fill_maps(p, call, workspace);
}

/* ---- launches ---- */

/* Blocks of the kernels before and after: a tile of queries each, and enough to add up parts. */
static unsigned row_blocks(const attn__backward_params *p, const attn__cuda_call *call, bool after)
{
    const int64_t tiles = (int64_t)p->tiles_q * p->heads_q * p->batch;
    const int64_t keys = after && p->parts > 1 ? kv_rows(call) * call->heads_kv : 0;
    const int64_t blocks = attn__max(tiles, keys * p->dim / 8 / ROW_THREADS);
    const int64_t most = call->sms > 0 ? call->sms : (int64_t)1 << 30;
    return (unsigned)attn__max(attn__min(blocks, most), 1);
}

static attn_status launch_rows(attn__backward_params *p, const attn__cuda_call *call,
                               const attn__cuda_device *device, bool after, void *stream)
{
    CUfunction function;
    const char *image = call->dtype == ATTN_F16 ? "flash_backward_f16_rows" : "flash_backward_bf16_rows";
    const char *name = after ? "flash_backward_after" : "flash_backward_before";
    ATTN__TRY(attn__cuda_function(&function, device, image, name, 0));
    attn__cuda_launch launch = {
        .function = function,
        .grid = {row_blocks(p, call, after), 1, 1},
        .block = ROW_THREADS,
        .overlap = after && !attn__cuda_limited(call, device),
        .stream = stream,
    };
    void *arguments[] = {p};
    return attn__cuda_enqueue(&launch, arguments);
}

/* Of several parts dK and dV go to the workspace, in fp32, and are added up afterwards. */
static attn__backward_params with_parts(const attn__backward_params *p)
{
    attn__backward_params q = *p;
    if (p->parts > 1) {
        q.dk = p->dk.data != NULL ? p->dk_parts : p->dk;
        q.dv = p->dv.data != NULL ? p->dv_parts : p->dv;
        q.out_f32 = 1;
        q.accumulate = 0;
    }
    return q;
}

static attn_status launch_main(const attn__backward_params *p, const attn__cuda_call *call,
                               const attn__cuda_device *device, void *stream)
{
    CUfunction function;
    const variant *v = variant_of(call);
    attn__backward_params main = with_parts(p);
    ATTN__TRY(attn__cuda_function(&function, device, v->image[call->dtype == ATTN_BF16], "flash_backward",
                                  v->shared));
    attn__cuda_launch launch = {
        .function = function,
        .grid = {(unsigned)(v->blocks * attn__min(p->tiles, clusters_of(call, device))), 1, 1},
        .block = MAIN_THREADS,
        .shared = v->shared,
        .cluster = v->blocks > 1 ? (unsigned)v->blocks : 0,
        .overlap = !attn__cuda_limited(call, device),
        .stream = stream,
    };
    void *arguments[] = {&main};
    return attn__cuda_enqueue(&launch, arguments);
}

static attn_status launch_all(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                              void *stream)
{
    attn__backward_params p;
    ATTN__TRY(fill(&p, call, device, workspace));
    ATTN__TRY(launch_rows(&p, call, device, false, stream));
    if (p.tiles > 0) {
        ATTN__TRY(launch_main(&p, call, device, stream));
    }
    const bool keys = p.parts > 1 && (call->dk.data != NULL || call->dv.data != NULL);
    return call->dq.data != NULL || keys ? launch_rows(&p, call, device, true, stream) : ATTN_OK;
}

attn_status attn__flash_backward(const attn__cuda_call *call, const attn__cuda_device *device,
                                 void *workspace, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = launch_all(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}
