/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few.c - the row few-sm90: few query rows against many keys, bf16 and fp16; launches few.cuh, then
 * few_merge.cu, unless every block has whole tiles.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernel/cuda/driver.h"
#include "kernel/cuda/few_params.h"
#include "kernel/cuda/rows.h"

enum {
    MULTIPROCESSORS = 132,  /* of an H100 or H200; only whether it declines hangs on it */
    MERGE_BLOCKS = 6,       /* of few_merge for a multiprocessor, at most */
    LONG = 2048,            /* keys that are worth splitting for more than 16 tokens */
    MOST_SHARED = 227 << 10 /* of a block, which is then alone on its multiprocessor */
};
static const int64_t far_away = (int64_t)1 << 40; /* further than any key from any query */

static int64_t clamp(int64_t x)
{
    return attn__max(attn__min(x, far_away), -far_away);
}

/* Query rows of a kv head. */
static int64_t head_rows(const attn__cuda_call *call)
{
    return call->tokens_q * (call->heads_q / call->heads_kv);
}

/* Rows that a tile has room for: the kernel that is taken. */
static unsigned height(const attn__cuda_call *call)
{
    return head_rows(call) <= 16 ? 16 : head_rows(call) <= 64 ? 64 : 128;
}

static int64_t tiles(const attn__cuda_call *call)
{
    return attn__ceil_div(head_rows(call), height(call));
}

static int64_t all_tiles(const attn__cuda_call *call)
{
    return call->batch * call->heads_kv * tiles(call);
}

static int64_t tile_rows(const attn__cuda_call *call)
{
    return attn__min(head_rows(call), height(call));
}

static bool limited(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return call->sms > 0 && call->sms < device->sms;
}

/* The dims that the kernel is made for: 64, 128 or 256. */
static unsigned padded_dim(const attn__cuda_call *call)
{
    int64_t dim = attn__max(call->dim_qk, call->dim_v);
    return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

/* ---- the cut ---- */

/* As many as run at once, but no more than the longest sequences that may come have work for.  The workspace
 * is for these: a plan's call may come with fewer tokens, or with sequences of unequal length. */
static int64_t most_blocks(const attn__cuda_call *call, const attn__cuda_device *device)
{
    int64_t units = call->cu_kv != NULL ? call->total_kv / FEW_UNIT + call->batch
                                        : attn__ceil_div(call->tokens_kv, FEW_UNIT) * call->batch;
    int64_t useful = units * tiles(call) * call->heads_kv / FEW_LEAST;
    int64_t most =
        limited(call, device) ? call->sms : FEW_BLOCKS(padded_dim(call), height(call)) * (int64_t)device->sms;
    return attn__max(attn__min(useful, most), 1);
}

/* How a call is cut into tiles, and these into shares of blocks. */
typedef struct cut {
    int64_t height;      /* rows that a tile has room for */
    int64_t tiles, all;  /* of a kv head; of all */
    int64_t rows;        /* of a tile, at most */
    unsigned dim;        /* that the kernel is made for */
    bool fixed;          /* all sequences are of one length */
    int64_t first_units; /* of the first tile, if fixed */
    int64_t most;        /* most_blocks() */
    int64_t each;        /* blocks of a tile, if all tiles are cut alike; else 0 */
    int64_t blocks;      /* that are taken */
} cut;

/* Units of a tile of sequences of one length; as few_tile_of() has it. */
static int64_t tile_units(const cut *c, const attn__cuda_call *call, int64_t index)
{
    const int64_t group = call->heads_q / call->heads_kv, first = index * c->height;
    const int64_t shift = call->shifted ? clamp(call->shift) : call->tokens_kv - call->tokens_q;
    const int64_t bottom = (attn__min(first + c->height, head_rows(call)) - 1) / group;
    const int64_t lo = attn__max(first / group + shift - clamp(call->left), 0);
    const int64_t hi = attn__min(bottom + shift + clamp(call->right) + 1, call->tokens_kv);
    return attn__ceil_div(attn__max(hi - lo, 0), FEW_UNIT);
}

/* Blocks of a tile of `units`, about `most`, but so that their shares are whole stages of the ring, if there
 * is such a number: the rest of a stage costs as much as all of it. */
static int64_t blocks_of_tile(const cut *c, int64_t units, int64_t most)
{
    const int64_t stage = FEW_KEYS(c->dim, c->height) / FEW_UNIT;
    for (int64_t count = most; 16 * count >= 15 * most; count--) {
        if (units % (count * stage) == 0) {
            return count;
        }
    }
    return most;
}

/* Blocks of each tile, if tiles are about of one length, and share all blocks nearly without a rest, or have
 * no work for as many; else 0.  A share that ends just beyond a tile is what all others wait for. */
static int64_t blocks_each(const cut *c, const attn__cuda_call *call)
{
    int64_t least_units = c->first_units, most_units = c->first_units;
    if (!c->fixed || c->all > c->most) {
        return 0;
    }
    for (int64_t i = 1; i < c->tiles; i++) {
        const int64_t units = tile_units(c, call, i);
        least_units = attn__min(least_units, units);
        most_units = attn__max(most_units, units);
    }
    if (least_units < FEW_LEAST || 16 * least_units < 15 * most_units) {
        return 0;
    }
    const int64_t useful = least_units / FEW_LEAST, room = attn__min(c->most / c->all, useful);
    const int64_t each = blocks_of_tile(c, most_units, room);
    return room == useful || 16 * each * c->all >= 15 * c->most ? each : 0;
}

/* All blocks: so that they have whole tiles or tiles whole blocks, if tiles are about of one length, and that
 * is not much less than the most.  A whole tile needs no merge. */
static int64_t all_blocks(const cut *c)
{
    if (c->each > 0) {
        return c->each * c->all;
    }
    if (!c->fixed || c->all <= c->most) {
        return c->most;
    }
    const int64_t fitting = attn__ceil_div(c->all, attn__ceil_div(c->all, c->most));
    return 16 * fitting >= 15 * c->most ? fitting : c->most;
}

/* Of a call that has tiles. */
static cut cut_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    cut c = {.height = height(call),
             .tiles = tiles(call),
             .all = all_tiles(call),
             .rows = tile_rows(call),
             .dim = padded_dim(call),
             .fixed = call->cu_q == NULL && call->cu_kv == NULL,
             .most = most_blocks(call, device)};
    c.first_units = tile_units(&c, call, 0);
    c.each = blocks_each(&c, call);
    c.blocks = all_blocks(&c);
    return c;
}

/* Does each block have whole tiles, so that there is nothing to merge?  Known of one tile a sequence, all of
 * them of one length; the cut is then that of few_share.cuh. */
static bool whole(const cut *c)
{
    if (c->each > 0 || !c->fixed || c->tiles > 1) {
        return c->each == 1;
    }
    return c->all % attn__min(c->blocks, attn__max(c->first_units * c->all / FEW_LEAST, 1)) == 0;
}

/* Do blocks add their sums two by two? */
static bool pairs(const cut *c)
{
    return c->height > 16 && FEW_GATHER(c->dim, c->height) > 0 && c->each % 2 == 0 && c->each >= 4;
}

/* ---- what it takes ---- */

/* The copy engine and loads of 16 bytes: strides of whole 16 bytes, and none of 0 where there are several.
 * Nothing is read or written of what has no tokens. */
static bool aligned(const attn__cuda_tensor *t, int64_t batch, int64_t heads, int64_t tokens, int64_t size)
{
    const int64_t strides[] = {t->batch, t->head, t->token}, counts[] = {batch, heads, tokens};
    for (int i = 0; i < 3; i++) {
        bool fits = strides[i] > 0 && strides[i] < far_away / size && strides[i] * size % 16 == 0;
        if (tokens > 0 && counts[i] > 1 && !fits) {
            return false;
        }
    }
    return true;
}

static const char *rejects_layout(const attn__cuda_call *call)
{
    int64_t batch_q = call->cu_q != NULL ? 1 : call->batch, batch_kv = call->cu_kv != NULL ? 1 : call->batch;
    int64_t tokens_q = call->cu_q != NULL ? call->total_q : call->tokens_q;
    int64_t tokens_kv = call->cu_kv != NULL ? call->total_kv : call->tokens_kv;
    int64_t out = (int64_t)attn_dtype_size(call->dtype_out);
    if (!aligned(&call->q, batch_q, call->heads_q, tokens_q, 2) ||
        !aligned(&call->k, batch_kv, call->heads_kv, tokens_kv, 2) ||
        !aligned(&call->v, batch_kv, call->heads_kv, tokens_kv, 2) ||
        !aligned(&call->o, batch_q, call->heads_q, tokens_q, out)) {
        return "takes strides of batch, head and token that are multiples of 16 bytes and above 0";
    }
    int64_t units = attn__ceil_div(call->tokens_kv, FEW_UNIT) * tiles(call) * call->heads_kv;
    if (tokens_q >= INT32_MAX || tokens_kv >= INT32_MAX || call->batch > INT32_MAX / attn__max(units, 1)) {
        return "takes fewer than 2^31 tokens, and 2^35 over all heads and tiles of 128 rows";
    }
    return NULL;
}

static const char *rejects(const attn__cuda_call *call, bool backward)
{
    if (backward) {
        return "computes no gradients";
    }
    if (call->dtype == ATTN_F32) {
        return "takes fp16 and bf16";
    }
    if (call->dim_qk > 256 || call->dim_v > 256 || call->dim_qk % 8 != 0 || call->dim_v % 8 != 0) {
        return "takes head dimensions that are multiples of 8, up to 256";
    }
    if (head_rows(call) > INT32_MAX / 2) {
        return "takes fewer query rows a kv head";
    }
    if (call->merge && call->lse.data == NULL) {
        return "merges only with an lse";
    }
    /* a plan asks before there are tensors, and forward() again */
    return call->q.data == NULL ? NULL : rejects_layout(call);
}

/*
 * Up to 16 tokens leave most of a full tile empty, where here the heads of a group fill one together and read
 * K and V once: nothing beats that.  Beyond, a tile costs up to 7/4 of one of 128 rows in a kernel of full
 * tiles, which has one for each 128 tokens of a head, but whose blocks each go over all keys: it is slower
 * where they fill the GPU badly.
 */
static const char *declines(const attn__cuda_call *call, bool backward)
{
    int64_t full = call->batch * call->heads_q * attn__ceil_div(call->tokens_q, 128);
    int64_t rounds = attn__ceil_div(full, MULTIPROCESSORS);
    (void)backward;
    if (call->tokens_q <= 16) {
        return NULL;
    }
    return call->tokens_kv < LONG || 7 * all_tiles(call) > 4 * MULTIPROCESSORS * rounds
               ? "is for few query rows against many keys; these fill a kernel of larger tiles"
               : NULL;
}

/* ---- workspace ---- */

/* Rows of all parts. */
static int64_t part_rows(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return most_blocks(call, device) * 2 * tile_rows(call);
}

/* For fewer tokens, too: up to 64 rows have twice the blocks. */
static size_t workspace_size(const attn__cuda_call *call, const attn__cuda_device *device)
{
    attn__cuda_call fewer = *call;
    fewer.tokens_q = 64 * call->heads_kv / call->heads_q;
    int64_t rows = part_rows(call, device);
    if (height(call) == 128 && fewer.tokens_q > 0) {
        rows = attn__max(rows, part_rows(&fewer, device));
    }
    return (size_t)(rows * FEW_PART_ROW(call->dim_v)) * sizeof(float);
}

/* ---- launch ---- */

/* Boxes of `keys` rows of 64 dims; a stride of a dimension of 1 is never used, but must be a legal one. */
static attn_status make_map(few_map *map, const attn__cuda_call *call, const attn__cuda_tensor *t,
                            int64_t dim, unsigned keys)
{
    bool varlen = call->cu_kv != NULL;
    int64_t tokens = varlen ? call->total_kv : call->tokens_kv, batch = varlen ? 1 : call->batch;
    const int64_t counts[] = {tokens, call->heads_kv, batch}, strides[] = {t->token, t->head, t->batch};
    cuuint64_t sizes[4] = {(cuuint64_t)dim}, bytes[3];
    const cuuint32_t box[4] = {64, keys, 1, 1}, steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 3; i++) {
        sizes[i + 1] = (cuuint64_t)attn__max(counts[i], 1);
        bytes[i] = tokens > 0 && counts[i] > 1 ? (cuuint64_t)strides[i] * 2 : 512;
    }
    CUtensorMapDataType type =
        call->dtype == ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    void *start = tokens > 0 ? t->data : call->q.data; /* a map must begin somewhere */
    CUtensorMap made;
    ATTN__TRY(attn__cuda_check(
        attn__cuda.tensor_map(&made, type, 4, start, sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "the layout of K or V"));
    memcpy(map, &made, sizeof *map);
    return ATTN_OK;
}

static few_tensor tensor(const attn__cuda_tensor *t)
{
    return (few_tensor){t->data, t->batch, t->head, t->token};
}

/* What few_merge shares among its blocks. */
typedef struct merge {
    int64_t tiles;      /* that it looks at, or blocks whose last tile it looks at */
    int64_t rows;       /* of a block: so many that there is one a multiprocessor, if its threads suffice */
    int64_t row_blocks; /* for a tile; not more in all, since most have nothing to do where there are many
                           tiles */
    int64_t parts; /* of a tile, if it is like the others, as far as there is room; few_merge goes round again
                      where there are more */
} merge;

/* Bytes that few_merge has of a row of a part: all of it, and its maximum and sum of weights once more. */
static int64_t merge_row_size(const attn__cuda_call *call)
{
    return (FEW_PART_ROW(call->dim_v) + FEW_MERGE_SUMS) * (int64_t)sizeof(float);
}

static merge merge_of(const cut *c, const attn__cuda_call *call, const attn__cuda_device *device)
{
    const int64_t long_ones =
        call->cu_kv != NULL ? 1 : call->batch; /* one of them may have nearly all keys */
    const int64_t row = merge_row_size(call);
    const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
    merge m = {.tiles = attn__min(c->all, c->blocks)};
    m.rows =
        attn__min(attn__ceil_div(m.tiles * c->rows, sms), FEW_MERGE_THREADS * 4 / attn__max(call->dim_v, 1));
    m.rows = attn__max(m.rows, 1);
    m.row_blocks = attn__min(attn__ceil_div(c->rows, m.rows),
                             call->sms > 0 ? attn__max(sms / attn__max(m.tiles, 1), 1)
                                           : attn__ceil_div(MERGE_BLOCKS * sms, m.tiles));
    m.parts =
        attn__min(c->blocks / (long_ones * call->heads_kv * c->tiles) + 2, FEW_MERGE_SHARED / (m.rows * row));
    return m;
}

static void fill(few_params *p, const cut *c, const merge *m, const attn__cuda_call *call,
                 const attn__cuda_device *device, void *workspace)
{
    p->q = tensor(&call->q);
    p->values = tensor(&call->v);
    p->o = tensor(&call->o);
    p->lse = tensor(&call->lse);
    p->cu_q = call->cu_q;
    p->cu_kv = call->cu_kv;
    p->left = clamp(call->left);
    p->right = clamp(call->right);
    p->shift = clamp(call->shift);
    p->parts = workspace;
    p->scale = fmaxf((float)(fabs((double)call->scale) * 1.4426950408889634), FLT_MIN); /* log2 e */
    p->batch = (int32_t)call->batch;
    p->heads_kv = (int32_t)call->heads_kv;
    p->group = (int32_t)(call->heads_q / call->heads_kv);
    p->tokens_q = (int32_t)call->tokens_q;
    p->tokens_kv = (int32_t)call->tokens_kv;
    p->dim_qk = (int32_t)call->dim_qk;
    p->dim_v = (int32_t)call->dim_v;
    p->height = (int32_t)c->height;
    p->tiles = (int32_t)c->tiles;
    p->rows = (int32_t)c->rows;
    p->merge_rows = (int32_t)m->rows;
    p->row_blocks = (int32_t)m->row_blocks;
    p->merge_parts = (int32_t)m->parts;
    p->early = FEW_MERGE_FITS(c->dim, c->height) ? device->sms : 0;
    p->dtype_out = (int32_t)call->dtype_out;
    p->shifted = call->shifted;
    p->merge = call->merge;
    p->negate = call->scale < 0;
    p->pairs = pairs(c);
    p->blocks = (int32_t)c->blocks;
    p->each = (int32_t)c->each;
    p->by_tile = c->all <= c->blocks;
}

static attn_status make_maps(few_params *p, const cut *c, const attn__cuda_call *call)
{
    const unsigned keys = FEW_KEYS(c->dim, c->height);
    ATTN__TRY(make_map(&p->k, call, &call->k, call->dim_qk, keys));
    ATTN__TRY(make_map(&p->v, call, &call->v, call->dim_v, keys));
    ATTN__TRY(make_map(&p->k_unit, call, &call->k, call->dim_qk, FEW_UNIT));
    return make_map(&p->v_unit, call, &call->v, call->dim_v, FEW_UNIT);
}

static attn_status launch_few(few_params *p, const cut *c, const attn__cuda_call *call,
                              const attn__cuda_device *device, void *stream)
{
    static const char *const images[3][2][3] = {{{"few16_f16_64", "few16_f16_128", "few16_f16_256"},
                                                 {"few16_bf16_64", "few16_bf16_128", "few16_bf16_256"}},
                                                {{"few64_f16_64", "few64_f16_128", "few64_f16_256"},
                                                 {"few64_bf16_64", "few64_bf16_128", "few64_bf16_256"}},
                                                {{"few128_f16_64", "few128_f16_128", "few128_f16_256"},
                                                 {"few128_bf16_64", "few128_bf16_128", "few128_bf16_256"}}};
    attn__cuda_launch launch = {
        .grid = {(unsigned)c->blocks, 1, 1},
        .block = FEW_THREADS(c->height),
        .shared = limited(call, device) ? MOST_SHARED : (unsigned)FEW_SHARED(c->dim, c->height),
        .overlap = true,
        .cluster = p->pairs ? 2 : 0,
        .stream = stream,
    };
    ATTN__TRY(make_maps(p, c, call));
    ATTN__TRY(attn__cuda_function(&launch.function, device,
                                  images[c->height / 64][call->dtype == ATTN_BF16][c->dim / 128], "few",
                                  launch.shared));
    ATTN__CUDA_TRY(
        attn__cuda.function_set(launch.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
    return attn__cuda_enqueue(&launch, (void *[]){p});
}

static attn_status launch_merge(few_params *p, const merge *m, const attn__cuda_call *call,
                                const attn__cuda_device *device, void *stream)
{
    attn__cuda_launch launch = {
        .grid = {(unsigned)(m->tiles * m->row_blocks), 1, 1},
        .block = FEW_MERGE_THREADS,
        .shared = (unsigned)(m->parts * m->rows * merge_row_size(call)),
        .overlap = true,
        .stream = stream,
    };
    ATTN__TRY(attn__cuda_function(&launch.function, device, "few_merge", "few_merge", FEW_MERGE_SHARED));
    ATTN__CUDA_TRY(
        attn__cuda.function_set(launch.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
    return attn__cuda_enqueue(&launch, (void *[]){p});
}

static attn_status launch(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                          void *stream)
{
    few_params p;
    if (all_tiles(call) == 0) {
        return ATTN_OK; /* no row is asked for */
    }
    const cut c = cut_of(call, device);
    const merge m = merge_of(&c, call, device);
    fill(&p, &c, &m, call, device, workspace);
    ATTN__TRY(launch_few(&p, &c, call, device, stream));
    return whole(&c) ? ATTN_OK : launch_merge(&p, &m, call, device, stream);
}

static attn_status forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                           void *stream)
{
    const void *const starts[] = {call->q.data, call->k.data, call->v.data, call->o.data, workspace};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        if ((uintptr_t)starts[i] % 16 != 0) {
            return attn__fail(ATTN_EUNSUPPORTED,
                              "few-sm90 takes tensors whose first element lies at a multiple of 16 bytes");
        }
    }
    const char *reason = rejects_layout(call);
    if (reason != NULL) {
        return attn__fail(ATTN_EUNSUPPORTED, "few-sm90 %s", reason);
    }
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = launch(call, device, workspace, stream);
    attn__cuda_leave();
    return status;
}

const attn__cuda_kernel attn__cuda_few_sm90 = {
    .name = "few-sm90",
    .summary = "few query rows against many keys, split over the keys; bf16 and fp16 on wgmma",
    .rounds_weights = true,
    .rejects = rejects,
    .declines = declines,
    .forward_workspace = workspace_size,
    .forward = forward,
};
