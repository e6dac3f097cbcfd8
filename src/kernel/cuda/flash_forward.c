/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward.c - attention forward on Hopper: one kernel, and a number in the workspace where tiles are
 * uneven.
 */
#include "kernel/cuda/flash_forward.h"

#include <float.h>
#include <math.h>

#include "kernel/cuda/flash_forward_params.h"
#include "kernel/cuda/map.h"

/* How large the keys and values are of heads whose tiles take turns; of the last such heads. */
enum { TOGETHER_BYTES = 8 << 20, LAST_BYTES = 32 << 20 };

/* ---- tiles ---- */

/* A kernel: of dims up to 64, 128 or 256.  A higher tile takes less time for its rows, but fewer of them may
 * be there than multiprocessors. */
typedef struct variant {
    int groups, keys;     /* warpgroups of 64 rows of a tile, beside that of the producers; keys of a step */
    unsigned shared;      /* bytes */
    float key, start;     /* ns that a tile takes for each key, and for how many keys all else, on an H200 */
    const char *image[2]; /* fp16, bf16 */
} variant;

enum { GROUP_ROWS = 64, GROUP_THREADS = 128, LEAST_GROUPS = 2 };

/* The first of equals is taken. */
static const variant variants_64[] = {{4,
                                       ATTN__FORWARD_KEYS_64_256,
                                       ATTN__FORWARD_SHARED_64_256,
                                       13.4F,
                                       200,
                                       {"flash_forward_f16_64_256", "flash_forward_bf16_64_256"}},
                                      {3,
                                       ATTN__FORWARD_KEYS_64_192,
                                       ATTN__FORWARD_SHARED_64_192,
                                       10.2F,
                                       250,
                                       {"flash_forward_f16_64_192", "flash_forward_bf16_64_192"}},
                                      {2,
                                       ATTN__FORWARD_KEYS_64_128,
                                       ATTN__FORWARD_SHARED_64_128,
                                       8.06F,
                                       200,
                                       {"flash_forward_f16_64_128", "flash_forward_bf16_64_128"}}};
static const variant variant_128 = {2,
                                    ATTN__FORWARD_KEYS_128,
                                    ATTN__FORWARD_SHARED_128,
                                    9.3F,
                                    200,
                                    {"flash_forward_f16_128", "flash_forward_bf16_128"}};
static const variant variant_128_long = {2, /* taken for as fast as the other by what asks for a time */
                                         ATTN__FORWARD_KEYS_128_LONG,
                                         ATTN__FORWARD_SHARED_128_LONG,
                                         9.3F,
                                         200,
                                         {"flash_forward_f16_128_long", "flash_forward_bf16_128_long"}};
static const variant variant_256 = {2,
                                    ATTN__FORWARD_KEYS_256,
                                    ATTN__FORWARD_SHARED_256,
                                    17.9F,
                                    200,
                                    {"flash_forward_f16_256", "flash_forward_bf16_256"}};

/* Keys from which on steps of more keys are faster under a mask, at dims of 128. */
enum { MANY_KEYS_128 = 16384 };

/* Is every key visible to every query? */
static bool is_full(const attn__cuda_call *call)
{
    return call->left == attn__unbounded && call->right == attn__unbounded;
}

static int32_t side_of(int64_t tokens)
{
    return (int32_t)attn__min(tokens, ATTN__TILE_FAR);
}

static int rows_of(const variant *v)
{
    return GROUP_ROWS * v->groups;
}

static int64_t tiles_q(const attn__cuda_call *call, const variant *v)
{
    return attn__ceil_div(call->tokens_q, rows_of(v));
}

/* Of the steps of a tile, of a sequence as long as any. */
static int64_t tile_keys(const variant *v, const attn__cuda_call *call, int64_t index)
{
    const int64_t shift = call->shifted ? call->shift : call->tokens_kv - call->tokens_q;
    const int64_t row = index * rows_of(v), end = attn__min(row + rows_of(v), call->tokens_q);
    const int64_t from = attn__max(row + shift - side_of(call->left), 0);
    const int64_t to = attn__min(end + shift + side_of(call->right), call->tokens_kv);
    return to > from ? (attn__ceil_div(to, v->keys) - from / v->keys) * v->keys : 0;
}

/* ns, by the rounds of tiles of one length; where lengths differ, by the longest tile, or by all that there
 * is to do and a part of a tile, for which some multiprocessors have none left.  Of unequal sequences only
 * the longest is known, and the sum. */
static double time_of(const variant *v, const attn__cuda_call *call, int sms)
{
    enum { SAMPLES = 9 }; /* evenly, the first and the last tile among them */
    const int64_t high = tiles_q(call, v), count = attn__min(high, is_full(call) ? 1 : SAMPLES);
    const bool ragged = call->cu_q != NULL;
    int64_t tiles = high * call->batch;
    tiles = ragged ? attn__min(tiles, call->total_q / rows_of(v) + call->batch) : tiles;
    double least = INFINITY, most = 0, mean = 0;
    for (int64_t i = 0; i < count; i++) {
        const double keys = (double)tile_keys(v, call, count > 1 ? i * (high - 1) / (count - 1) : 0);
        least = fmin(least, keys);
        most = fmax(most, keys);
        mean += keys / (double)count;
    }
    const double rounds = (double)(tiles * call->heads_q) / sms;
    const bool alike = (least == most && !ragged) || rounds <= 1;
    return v->key * (alike ? ceil(rounds) * (most + v->start)
                           : fmax(most + v->start, rounds * (mean + v->start) + mean / 4));
}

static const variant *variant_of(const attn__cuda_call *call, int sms)
{
    const int64_t dim = attn__max(call->dim_qk, call->dim_v);
    if (dim > 128) {
        return &variant_256;
    }
    if (dim > 64) {
        return is_full(call) || call->tokens_kv < MANY_KEYS_128 ? &variant_128 : &variant_128_long;
    }
    const variant *best = variants_64;
    double least = time_of(best, call, sms);
    for (size_t i = 1; i < sizeof variants_64 / sizeof *variants_64; i++) {
        const double time = time_of(&variants_64[i], call, sms);
        best = time < least ? &variants_64[i] : best;
        least = fmin(least, time);
    }
    return best;
}

double attn__flash_forward_time(const attn__cuda_call *call, int sms)
{
    return time_of(variant_of(call, sms), call, sms);
}

/* ---- what it takes ---- */

static const char *shape_rejects(const attn__cuda_call *call)
{
    const int64_t most = ATTN__TILE_TOKENS;
    int64_t tiles = 0;
    if (call->dim_qk % 8 != 0 || call->dim_v % 8 != 0 || call->dim_qk > 256 || call->dim_v > 256) {
        return "takes dims that are multiples of 8 up to 256";
    }
    if (call->tokens_q > most || call->tokens_kv > most || call->total_q > most || call->total_kv > most) {
        return "takes at most 2^28 tokens";
    }
    if (call->shifted && (call->shift > most || call->shift < -most)) {
        return "takes a shift of at most 2^28 tokens";
    }
    const int64_t high = attn__ceil_div(call->tokens_q, LEAST_GROUPS * GROUP_ROWS);
    if (!attn__mul(high * call->batch, call->heads_q, &tiles) || tiles > INT32_MAX / 2) {
        return "has too many tiles: split the batch or the heads";
    }
    return NULL;
}

const char *attn__flash_forward_rejects(const attn__cuda_call *call)
{
    if (call->dtype != ATTN_BF16 && call->dtype != ATTN_F16) {
        return "takes bf16 and fp16";
    }
    if (call->dtype_out != ATTN_F32 && call->dtype_out != call->dtype) {
        return "gives o in fp32 or in the dtype of q, k and v";
    }
    return shape_rejects(call);
}

size_t attn__flash_forward_workspace(const attn__cuda_call *call, const attn__cuda_device *device)
{
    (void)device;
    return is_full(call) && call->cu_q == NULL ? 0 : sizeof(int32_t);
}

/* ---- parameters ---- */

/* How many heads have keys and values of about so many bytes: one at least. */
static int32_t heads_of(const attn__cuda_call *call, int64_t bytes)
{
    const int64_t planes = call->batch * call->heads_q, group = call->heads_q / call->heads_kv;
    const int64_t head = attn__max(call->tokens_kv, 1) * (call->dim_qk + call->dim_v) * 2;
    return (int32_t)attn__max(1, attn__min(bytes * group / head, planes));
}

/*
 * Tiles of some heads take turns, the last queries first: under a causal band these see the most keys.  They
 * are few heads, so that long tiles, which wait for memory, and short ones, which find their keys in the L2
 * cache, run side by side.  The last are more: what is left when blocks run out of tiles shall be short.
 */
static void fill_turns(attn__forward_params *p, const attn__cuda_call *call)
{
    const int32_t planes = (int32_t)(call->batch * call->heads_q);
    if (call->right >= call->tokens_kv) {
        return; /* tiles of one length */
    }
    p->together = heads_of(call, TOGETHER_BYTES);
    p->last = (planes - heads_of(call, LAST_BYTES)) / p->together * p->together;
}

static attn_status fill_maps(attn__forward_params *p, const attn__cuda_call *call, const variant *v)
{
    const bool ragged = call->cu_q != NULL;
    ATTN__TRY(attn__cuda_map(&p->q, call->dtype, &call->q, call->dim_qk, call->heads_q, call->tokens_q,
                             call->batch, ragged, rows_of(v), call->o.data));
    ATTN__TRY(attn__cuda_map(&p->k, call->dtype, &call->k, call->dim_qk, call->heads_kv, call->tokens_kv,
                             call->batch, ragged, v->keys, call->o.data));
    return attn__cuda_map(&p->v, call->dtype, &call->v, call->dim_v, call->heads_kv, call->tokens_kv,
                          call->batch, ragged, v->keys, call->o.data);
}

static attn_status fill(attn__forward_params *p, const attn__cuda_call *call, const variant *v)
{
    *p = (attn__forward_params){
        .o = call->o,
        .lse = call->lse,
        .q_rows = call->q,
        .k_rows = call->k,
        .v_rows = call->v,
        .cu_q = call->cu_q,
        .cu_kv = call->cu_kv,
        .scale = fabsf(call->scale),
        /* never zero, by which a masked score, -inf, would become NaN */
        .scale_log2 = fmaxf(fabsf(call->scale) * 1.4426950408889634F, FLT_MIN),
        .batch = (int32_t)call->batch,
        .heads_q = (int32_t)call->heads_q,
        .group = (int32_t)(call->heads_q / call->heads_kv),
        .tokens_q = (int32_t)call->tokens_q,
        .tokens_kv = (int32_t)call->tokens_kv,
        .dim_qk = (int32_t)call->dim_qk,
        .dim_v = (int32_t)call->dim_v,
        .left = side_of(call->left),
        .right = side_of(call->right),
        .shift = (int32_t)call->shift,
        .shifted = call->shifted,
        .tiles_q = (int32_t)tiles_q(call, v),
        .tiles = (int32_t)(tiles_q(call, v) * call->batch * call->heads_q),
        .negate = call->scale < 0,
        .out_f32 = call->dtype_out == ATTN_F32,
        .merge = call->merge,
    };
    fill_turns(p, call);
    return fill_maps(p, call, v);
}

static attn_status check_arrays(const attn__cuda_call *call)
{
    const bool inputs =
        attn__cuda_map_fits(&call->q) && attn__cuda_map_fits(&call->k) && attn__cuda_map_fits(&call->v);
    if (!inputs || !attn__cuda_aligned(&call->o, attn_dtype_size(call->dtype_out))) {
        return attn__fail(
            ATTN_EUNSUPPORTED,
            "flash-sm90 reads 16 bytes at a time: q, k, v and o must begin at a multiple of 16 bytes, and so "
            "must each of their batches, heads and tokens, with no negative stride; copy them, or take the "
            "kernel fma-sm90");
    }
    return ATTN_OK;
}

/* ---- the launch ---- */

/* Are tiles of different lengths dealt out unevenly by going there and back?  Not where all heads take turns:
 * then their lengths fall from the first tile to the last. */
static bool is_uneven(const attn__forward_params *p, const attn__cuda_call *call)
{
    return call->cu_q != NULL || p->last > 0;
}

/* Makes the count of tiles that blocks take 0, in stream order. */
static attn_status launch_begin(const attn__cuda_device *device, const char *image, int32_t *taken,
                                bool overlap, void *stream)
{
    attn__cuda_launch one = {.grid = {1, 1, 1}, .block = 1, .overlap = overlap, .stream = stream};
    void *arguments[] = {&taken};
    ATTN__TRY(attn__cuda_function(&one.function, device, image, "flash_forward_begin", 0));
    return attn__cuda_enqueue(&one, arguments);
}

static attn_status launch(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                          void *stream)
{
    const bool limited = attn__cuda_limited(call, device);
    const int sms = limited ? call->sms : device->sms;
    const variant *v = variant_of(call, sms);
    const char *image = v->image[call->dtype == ATTN_BF16];
    attn__forward_params p;
    CUfunction function;
    ATTN__TRY(fill(&p, call, v));
    if (p.tiles == 0) {
        return ATTN_OK;
    }
    ATTN__TRY(attn__cuda_function(&function, device, image, "flash_forward", v->shared));
    /* without a workspace, which unequal sequences may come without, tiles stay dealt out beforehand */
    if (workspace != NULL && p.tiles > 2 * sms && is_uneven(&p, call)) {
        p.taken = workspace;
        ATTN__TRY(launch_begin(device, image, p.taken, !limited, stream));
    }
    const attn__cuda_launch one = {
        .function = function,
        .grid = {(unsigned)attn__min(p.tiles, sms), 1, 1},
        .block = GROUP_THREADS * (unsigned)(v->groups + 1),
        .shared = v->shared,
        .overlap = !limited,
        .stream = stream,
    };
    void *arguments[] = {&p};
    return attn__cuda_enqueue(&one, arguments);
}

attn_status attn__flash_forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                                void *stream)
{
    ATTN__TRY(check_arrays(call));
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = launch(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}
