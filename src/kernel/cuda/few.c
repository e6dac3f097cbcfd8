/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few.c - the row few-sm90: few query rows against many keys, bf16 and fp16; launches few.cuh, then, unless
 * every block has whole tiles, few_merge.cu or few_merge_direct.cu.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernel/cuda/driver.h"
#include "kernel/cuda/few_cut.h"
#include "kernel/cuda/few_params.h"
#include "kernel/cuda/flash_forward.h"
#include "kernel/cuda/rows.h"

enum {
    MULTIPROCESSORS = 132,        /* of an H100 or H200; only whether it declines hangs on it */
    MERGE_BLOCKS = 6,             /* of a merge for a multiprocessor, at most */
    MOST_DIRECT = 2 * FEW_DIRECT, /* parts of a tile for few_merge_direct */
    MOST_SHARED = 227 << 10,      /* of a block, which is then alone on its multiprocessor */
    ALL_SHARED = 228 << 10,       /* bytes of a multiprocessor, */
    BLOCK_SHARED = 1 << 10,       /* of which each block takes as many for the system, */
    MERGE_SHARED = 3 << 10,       /* and one of few_merge for what has no other size */
    ALL_REGISTERS = 64 << 10      /* of a multiprocessor */
};
static const int64_t far_stride = (int64_t)1 << 40; /* bytes: more than the copy engine takes */

/* ---- what it takes ---- */

/* The copy engine and loads of 16 bytes: strides of whole 16 bytes, of which some may be 0 (as `expand` of
 * PyTorch makes them).  Nothing is read or written of what has no tokens. */
static bool aligned(const attn__cuda_tensor *t, int64_t batch, int64_t heads, int64_t tokens, int64_t size)
{
    const int64_t strides[] = {t->batch, t->head, t->token}, counts[] = {batch, heads, tokens};
    for (int i = 0; i < 3; i++) {
        bool fits = strides[i] >= 0 && strides[i] < far_stride / size && strides[i] * size % 16 == 0;
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
        return "batches, heads and tokens of q, k, v and o must be multiples of 16 bytes apart, with no "
               "negative stride; copy them, or take the kernel fma-sm90";
    }
    int64_t units = attn__ceil_div(call->tokens_kv, FEW_UNIT) * attn__few_tiles(call) * call->heads_kv;
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
    if (attn__few_rows(call) > INT32_MAX / 2) {
        return "takes fewer query rows a kv head";
    }
    if (call->merge && call->lse.data == NULL) {
        return "merges only with an lse";
    }
    /* a plan asks before there are tensors, and forward() again */
    return call->q.data == NULL ? NULL : rejects_layout(call);
}

/* What a call takes here, ns, as measured on an H200 (docs/perf/cuda_few.md, "Which kernel"): its keys and
 * the merge; a share that goes on from tile to tile, for each of them; the search of such a share in
 * sequences of unequal length. */
static double time_of(const attn__cuda_call *call)
{
    static const struct {
        double key, merge, next, search;
    } dims[] = {{12.5, 7000, 10000, 2000}, {16.3, 9500, 9300, 1900}, {31, 16000, 17900, 3600}};
    const int64_t dim = attn__max(call->dim_qk, call->dim_v);
    const int i = dim <= 64 ? 0 : dim <= 128 ? 1 : 2;
    const attn__few_seen keys = attn__few_seen_of(call);
    const attn__cuda_device gpu = {.sms = MULTIPROCESSORS};
    const attn__few_cut cut = attn__few_cut_of(call, &gpu);
    const double all = (double)cut.all * keys.mean, share = all / (double)cut.blocks;
    return dims[i].key * all / MULTIPROCESSORS + dims[i].merge +
           (cut.each > 0 ? 0 : dims[i].next * fmax(share / fmax(keys.least, 1), 1)) +
           (cut.fixed ? 0 : dims[i].search * (double)cut.tiles);
}

/*
 * Up to 16 tokens leave most of a full tile empty, where here the heads of a group fill one together and read
 * K and V once: nothing beats that.  Beyond, flash-sm90, whose blocks each go over all keys of a tile, is
 * slower where its tiles fill the GPU badly.
 */
static const char *declines(const attn__cuda_call *call, bool backward)
{
    (void)backward;
    if (call->tokens_q <= 16) {
        return NULL;
    }
    return time_of(call) > attn__flash_forward_time(call, MULTIPROCESSORS)
               ? "is for few query rows against many keys; these fill a kernel of larger tiles"
               : NULL;
}

/* ---- workspace ---- */

static size_t workspace_size(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return (size_t)(attn__few_part_rows(call, device) * FEW_PART_ROW(call->dim_v)) * sizeof(float);
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

/* How the rows of tiles that several blocks have worked on are merged. */
typedef struct merge {
    bool direct;        /* by few_merge_direct, else by few_merge */
    int64_t early;      /* blocks that begin while few is at work */
    int64_t members;    /* few_merge_direct: lanes that share the parts of the same columns, 1 or 2 */
    int64_t tiles;      /* that it looks at, or blocks whose last tile it looks at */
    int64_t rows;       /* of a block: of few_merge so many that there is one a multiprocessor, if its threads
                           suffice */
    int64_t row_blocks; /* for a tile; not more in all, since most have nothing to do where there are many
                           tiles */
    int64_t parts; /* few_merge: of a tile, if it is like the others, as far as there is room; it goes round
                      again where there are more */
} merge;

/* Bytes that few_merge has of a row of a part: all of it, and its maximum and sum of weights once more. */
static int64_t merge_row_size(const attn__cuda_call *call)
{
    return (FEW_PART_ROW(call->dim_v) + FEW_MERGE_SUMS) * (int64_t)sizeof(float);
}

/* Rows of which the threads of a block have 4 columns each. */
static int64_t rows_of_threads(const attn__cuda_call *call, int64_t threads)
{
    return threads * 4 / attn__max(call->dim_v, 1);
}

/* Blocks of a merge that begin while few is at work: that have room on a multiprocessor beside its blocks,
 * each with so many registers and bytes of shared memory. */
static int64_t early_blocks(const attn__few_cut *c, const attn__cuda_device *device, int64_t registers,
                            int64_t shared)
{
    const int64_t blocks = FEW_BLOCKS(c->dim, c->height, c->split);
    const int64_t few_registers =
        FEW_THREADS(c->height, c->split) * FEW_REGISTERS(c->dim, c->height, c->split);
    const int64_t few_shared = FEW_SHARED(c->dim, c->height, c->split) + BLOCK_SHARED;
    return attn__min((ALL_REGISTERS - blocks * few_registers) / registers,
                     (ALL_SHARED - blocks * few_shared) / (shared + BLOCK_SHARED)) *
           device->sms;
}

/* Two where one does not read all parts at once, if a block has whole rows then and all begin early. */
static int64_t members_of(const attn__few_cut *c, const attn__cuda_call *call, int64_t early)
{
    const int64_t rows = rows_of_threads(call, FEW_MERGE_THREADS / 2);
    const bool two =
        attn__few_parts(c) > FEW_DIRECT && rows > 0 && c->all * attn__ceil_div(c->rows, rows) <= early;
    return two ? 2 : 1;
}

static merge merge_of(const attn__few_cut *c, const attn__cuda_call *call, const attn__cuda_device *device)
{
    const int64_t long_ones =
        call->cu_kv != NULL ? 1 : call->batch; /* one of them may have nearly all keys */
    const int64_t sms = call->sms > 0 ? attn__min(call->sms, device->sms) : device->sms;
    merge m = {.direct = c->each > 0 && attn__few_parts(c) <= MOST_DIRECT, .members = 1};
    m.tiles = attn__min(c->all, c->blocks);
    if (m.direct) {
        m.early = early_blocks(c, device, FEW_MERGE_THREADS * FEW_DIRECT_REGISTERS, 0);
        m.members = members_of(c, call, m.early);
        m.rows = attn__min(rows_of_threads(call, FEW_MERGE_THREADS / m.members), c->rows);
    } else {
        m.rows = attn__min(rows_of_threads(call, FEW_MERGE_THREADS), attn__ceil_div(m.tiles * c->rows, sms));
        m.rows = attn__max(m.rows, 1);
        m.parts = attn__min(c->blocks / (long_ones * call->heads_kv * c->tiles) + 2,
                            FEW_MERGE_SHARED / (m.rows * merge_row_size(call)));
        m.early = early_blocks(c, device, FEW_MERGE_THREADS * FEW_MERGE_REGISTERS,
                               m.parts * m.rows * merge_row_size(call) + MERGE_SHARED);
    }
    m.row_blocks = attn__min(attn__ceil_div(c->rows, m.rows),
                             call->sms > 0 ? attn__max(sms / attn__max(m.tiles, 1), 1)
                                           : attn__ceil_div(MERGE_BLOCKS * sms, m.tiles));
    return m;
}

static void fill(few_params *p, const attn__few_cut *c, const merge *m, const attn__cuda_call *call,
                 void *workspace)
{
    p->q = tensor(&call->q);
    p->values = tensor(&call->v);
    p->o = tensor(&call->o);
    p->lse = tensor(&call->lse);
    p->cu_q = call->cu_q;
    p->cu_kv = call->cu_kv;
    p->left = attn__few_clamp(call->left);
    p->right = attn__few_clamp(call->right);
    p->shift = attn__few_clamp(call->shift);
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
    p->members = (int32_t)m->members;
    p->early = (int32_t)m->early;
    p->dtype_out = (int32_t)call->dtype_out;
    p->shifted = call->shifted;
    p->merge = call->merge;
    p->negate = call->scale < 0;
    p->pairs = c->pairs;
    p->blocks = (int32_t)c->blocks;
    p->each = (int32_t)c->each;
    p->by_tile = c->all <= c->blocks;
}

static attn_status make_maps(few_params *p, const attn__few_cut *c, const attn__cuda_call *call)
{
    const unsigned keys = FEW_KEYS(c->dim, c->height, c->split);
    ATTN__TRY(make_map(&p->k, call, &call->k, call->dim_qk, keys));
    ATTN__TRY(make_map(&p->v, call, &call->v, call->dim_v, keys));
    ATTN__TRY(make_map(&p->k_unit, call, &call->k, call->dim_qk, FEW_UNIT));
    return make_map(&p->v_unit, call, &call->v, call->dim_v, FEW_UNIT);
}

static attn_status launch_few(few_params *p, const attn__few_cut *c, const attn__cuda_call *call,
                              const attn__cuda_device *device, void *stream)
{
    static const char *const images[4][2][3] = {{{"few16_f16_64", "few16_f16_128", "few16_f16_256"},
                                                 {"few16_bf16_64", "few16_bf16_128", "few16_bf16_256"}},
                                                {{"few64_f16_64", "few64_f16_128", "few64_f16_256"},
                                                 {"few64_bf16_64", "few64_bf16_128", "few64_bf16_256"}},
                                                {{"few128_f16_64", "few128_f16_128", "few128_f16_256"},
                                                 {"few128_bf16_64", "few128_bf16_128", "few128_bf16_256"}},
                                                {{NULL, "few64_f16_128_long", "few64_f16_256_long"},
                                                 {NULL, "few64_bf16_128_long", "few64_bf16_256_long"}}};
    attn__cuda_launch launch = {
        .grid = {(unsigned)c->blocks, 1, 1},
        .block = FEW_THREADS(c->height, c->split),
        .shared = attn__cuda_limited(call, device) ? MOST_SHARED
                                                   : (unsigned)FEW_SHARED(c->dim, c->height, c->split),
        .overlap = !attn__cuda_limited(call, device),
        .cluster = p->pairs ? 2 : 0,
        .stream = stream,
    };
    ATTN__TRY(make_maps(p, c, call));
    ATTN__TRY(attn__cuda_function(
        &launch.function, device,
        images[c->split ? 3 : c->height / 64][call->dtype == ATTN_BF16][c->dim / 128], "few", MOST_SHARED));
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
        .overlap = !attn__cuda_limited(call, device),
        .stream = stream,
    };
    const char *name = m->direct ? "few_merge_direct" : "few_merge";
    ATTN__TRY(attn__cuda_function(&launch.function, device, name, name, m->direct ? 0 : FEW_MERGE_SHARED));
    ATTN__CUDA_TRY(
        attn__cuda.function_set(launch.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
    return attn__cuda_enqueue(&launch, (void *[]){p});
}

static attn_status launch(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                          void *stream)
{
    few_params p;
    if (call->batch * call->heads_kv * attn__few_tiles(call) == 0) {
        return ATTN_OK; /* no row is asked for */
    }
    const attn__few_cut c = attn__few_cut_of(call, device);
    const merge m = merge_of(&c, call, device);
    fill(&p, &c, &m, call, workspace);
    ATTN__TRY(launch_few(&p, &c, call, device, stream));
    return attn__few_whole(&c) ? ATTN_OK : launch_merge(&p, &m, call, device, stream);
}

static attn_status forward(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                           void *stream)
{
    const void *const starts[] = {call->q.data, call->k.data, call->v.data, call->o.data, workspace};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        if ((uintptr_t)starts[i] % 16 != 0) {
            return attn__fail(
                ATTN_EUNSUPPORTED,
                "few-sm90 reads 16 bytes at a time: q, k, v and o must begin at a multiple of 16 "
                "bytes; copy them, or take the kernel fma-sm90");
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
