/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash.inc.h - exact attention of one query block in one pass over the keys, written once for every
 * instruction set.
 *
 * METHOD.  Tiles of keys, a running maximum and a running sum per query (Milakov & Gimelshein, arXiv
 * 1805.02867; Dao et al., arXiv 2205.14135), no score matrix.  Everything is computed transposed, queries
 * along the vector lanes, so that no step works across lanes and neither K nor V needs packing:
 *
 *     Q^T   packed once per call, scale * log2(e) folded in; PANEL = 2 vectors of queries side by side
 *     for each tile of keys, for each panel:
 *         S^T[key][query]  = K[key][.] Q^T        K elements broadcast from where they lie
 *         max, P = exp2(S - max), sum             vertical, in place
 *         O^T[dim][query]  = O^T * 2^(old - new max) + V[.][dim] P^T        V elements broadcast
 *
 * The last panel is narrow if that is enough (flash_shape in micro.inc.h).  Memory fetches the next tile
 * meanwhile, during the last one the rows of O and of the next Q (flash_ask).  One panel against one tile,
 * the mask and NaN: flash_panel.inc.h.  Calls of a few queries go another way (flash_few.inc.h).
 *
 * COST.  2 * d_qk + 2 * d_v FLOPs in FMAs for each (key, query), and about 14 vector operations for exp2 and
 * the softmax; 1 load for 1.5 FMAs or better.  See docs/perf/cpu.md.
 *
 * PARAMETERS.  FLASH_NAME, FLASH_SUMMARY, FLASH_NEEDS, FLASH_ROW, FLASH_PROBE: the row that this inclusion
 * defines.  Before it, a vec_<isa>.h gives the vocabulary: vec, vec_mask, VEC_LANES, VEC_ROWS (accumulator
 * rows of a micro-kernel: 6 with 16 registers, 12 with 32), VEC_INLINE and
 *
 *     vec_set vec_load vec_store vec_add vec_sub vec_mul vec_fma    what they say, any alignment
 *     vec_max(a, b)          the greater; b where a is NaN
 *     vec_min(a, b)          the lesser; b where b is NaN
 *     vec_exponent(a)        the low 9 bits of each lane moved to the top (sign and exponent); or VEC_POWERS
 *                            with vec_fraction and vec_times_power of its own (flash_common.inc.h)
 *     vec_less vec_select vec_between    masks
 *     vec_widen              fp16 or bf16 to fp32
 *     vec_load_as vec_load_part     a vector of any dtype, whole or its first lanes
 *     vec_sums vec_transpose        of VEC_LANES vectors: the sum of the lanes of each; rows become columns
 *     vec_greatest           the greatest lane
 *     vec_set_pair vec_set_four vec_mix_low vec_mix_high vec_even vec_odd   lanes side by side, if VEC_PAIRS
 */
#include "kernel/cpu/micro.inc.h"

enum {
    TILE_Q = 128,             /* queries of a call, at most */
    TILE_K = 192,             /* keys of a tile, at most, */
    TILE_LEAST = 96,          /* and at least; between these as many as K and V of */
    TILE_FLOATS = 24 * 1024,  /* have: the next tile's, Q^T and O^T lie in the L2, too; and never more than */
    KEY_FLOATS = 48 * 1024,   /* of K and V */
    PANEL_FLOATS = 12 * 1024, /* of K and V for a single panel, but no less than */
    PANEL_KEYS = 3,           /* keys a row */
    SCORE_FLOATS = 3 * 1024,  /* P^T of a panel: 12 KiB of a 32 KiB L1 */
    QUERY_FLOATS = 64 * 1024, /* Q^T and O^T of a call: 256 KiB of L2 */
    FIRST_KEYS = 12, /* of the first tile of a single panel, and how many more of each next one; tiles
                      * are multiples of it, so that few keys are left to small micro-kernels */
    COPY_PANELS = 4, /* readers that make copying rows of K and V worth it */
};

static const double LOG2_E = 1.44269504088896340736;

/* ---- one call ------------------------------------------------------------------------------------ */

typedef struct flash_state {
    const attn__block *block;
    int64_t panels;
    int64_t tile_k;
    float *qt;        /* [panel][dim_qk][PANEL], of a narrow panel as its shape says */
    float *ot;        /* [panel][dim_v][PANEL], likewise */
    float *max, *sum; /* [panel][PANEL] */
    float *p;         /* [tile_k][flash_row] S^T, then P^T */
    float *k, *v;     /* a tile widened or gathered to dense fp32; also a row of q */
} flash_state;

/* Some keys and their values. */
typedef struct flash_tile {
    int64_t first, count;
    flash_rows k, v;
} flash_tile;

/* A single panel goes over its keys once, so few of them are kept waiting in the L2; but the more rows, the
 * more does arithmetic count, which long tiles save. */
static int64_t keys_of_tile(int64_t rows, int64_t dim_qk, int64_t dim_v)
{
    const bool single = rows <= PANEL;
    const int row = single ? flash_row(flash_shape_of(rows, dim_qk, dim_v)) : PANEL;
    const int64_t dims = dim_qk + dim_v, some = attn__max(TILE_FLOATS / dims, TILE_LEAST);
    int64_t keys = attn__min(attn__min(some, TILE_K), KEY_FLOATS / dims);
    if (single) {
        keys = attn__min(keys, attn__max(PANEL_FLOATS / dims, PANEL_KEYS * rows));
    }
    return attn__min(keys, SCORE_FLOATS / row) / FIRST_KEYS * FIRST_KEYS;
}

/* Lays the scratch out; returns its floats. */
static size_t lay_out(flash_state *state, float *scratch, int64_t rows, int64_t dim_qk, int64_t dim_v)
{
    size_t used = 0;
    state->panels = attn__ceil_div(rows, PANEL);
    state->tile_k = keys_of_tile(rows, dim_qk, dim_v);
    int64_t lanes = state->panels * PANEL;
    state->qt = take(scratch, &used, lanes * dim_qk);
    state->ot = take(scratch, &used, lanes * dim_v);
    state->max = take(scratch, &used, lanes);
    state->sum = take(scratch, &used, lanes);
    state->p = take(scratch, &used, state->tile_k * FLASH_WIDE);
    state->k = take(scratch, &used, state->tile_k * dim_qk);
    state->v = take(scratch, &used, state->tile_k * dim_v);
    return used;
}

/* VEC_LANES dense rows into as many lanes of to[dim][PANEL], times factor. */
static void transpose_rows(float *to, const float *rows, int64_t dim, float factor)
{
    const vec times = vec_set(factor);
    for (int64_t d = 0; d < dim; d += VEC_LANES) {
        const int width = (int)attn__min(VEC_LANES, dim - d);
        vec a[VEC_LANES];
        FLASH_UNROLL
        for (int i = 0; i < VEC_LANES; i++) {
            const float *at = rows + i * dim + d;
            a[i] = width == VEC_LANES ? vec_load(at) : vec_load_part(at, ATTN_F32, width);
        }
        vec_transpose(a);
        for (int i = 0; i < width; i++) {
            vec_store(to + (d + i) * PANEL, vec_mul(a[i], times));
        }
    }
}

/*
 * `count` rows as the micro-kernels want them: where they lie if that is fp32 with dense dims, else widened
 * or gathered.  Rows that lie apart (heads interleaved, say) share a few cache sets and fill a page each:
 * copied together they are read faster, if they are read often enough.
 */
static const float *tile_rows(float *copy, attn__rows rows, int64_t dim, int64_t count, bool often,
                              int64_t *token)
{
    const bool readable = rows.dtype == ATTN_F32 && (rows.dim == 1 || dim == 1);
    *token = rows.token;
    if (readable && (rows.token == dim || !often)) {
        return rows.data;
    }
    *token = dim;
    if (rows.token == dim && rows.dim == 1) { /* rows without a gap are one */
        dim *= count;
        count = 1;
    }
    for (int64_t j = 0; j < count; j++) {
        widen(copy + j * dim, rows.data, j * rows.token, rows.dtype, rows.dim, dim);
    }
    return copy;
}

/* Rows first .. first + VEC_LANES of the `count` rows of an array, dense in fp32; rows that do not exist are
 * 0. */
static const float *lane_rows(float *copy, const attn__rows *rows, int64_t dim, int64_t first, int64_t count)
{
    if (first + VEC_LANES <= count) {
        const attn__rows whole = {attn__element(rows->data, rows->dtype, first * rows->token), rows->dtype,
                                  rows->token, rows->dim};
        int64_t token; /* dim */
        return tile_rows(copy, whole, dim, VEC_LANES, true, &token);
    }
    memset(copy, 0, sizeof(float) * (size_t)(VEC_LANES * dim));
    for (int64_t i = first; i < count; i++) {
        widen(copy + (i - first) * dim, rows->data, i * rows->token, rows->dtype, rows->dim, dim);
    }
    return copy;
}

/* Only the last panel may be narrow. */
static flash_shape panel_shape(const attn__block *block, int64_t panel)
{
    return flash_shape_of(block->count - panel * PANEL, block->dim_qk, block->dim_v);
}

/* Query `lane` of a narrow panel x, [dim / dims][query][dims], takes a row, times factor, or gives it. */
static void weave_row(const flash_shape shape, float *x, int64_t lane, const float *row, int64_t dim,
                      float factor)
{
    x += lane * shape.dims;
    for (int64_t d = 0; d < dim; d += shape.dims, x += flash_row(shape)) {
        for (int i = 0; i < shape.dims; i++) {
            x[i] = row[d + i] * factor;
        }
    }
}

static void unweave_row(const flash_shape shape, const float *x, int64_t lane, float *row, int64_t dim,
                        float factor)
{
    x += lane * shape.dims;
    for (int64_t d = 0; d < dim; d += shape.dims, x += flash_row(shape)) {
        for (int i = 0; i < shape.dims; i++) {
            row[d + i] = x[i] * factor;
        }
    }
}

/* Q^T of all panels, times scale * log2(e) so that exp2 takes the scores as they are; unused lanes are 0. */
static void pack_queries(const flash_state *state)
{
    const attn__block *block = state->block;
    const attn__rows q = {block->q, block->dtype, block->q_token, block->q_dim};
    const int64_t dim = block->dim_qk;
    const float factor = (float)((double)block->scale * LOG2_E);
    for (int64_t lane = 0; lane < state->panels * PANEL; lane += VEC_LANES) {
        const flash_shape shape = panel_shape(block, lane / PANEL);
        float *qt = state->qt + lane / PANEL * dim * PANEL;
        const float *rows = lane_rows(state->k, &q, dim, lane, block->count);
        if (shape.dims == 1) {
            transpose_rows(qt + lane % PANEL, rows, dim, factor);
            continue;
        }
        const int64_t begin = lane % PANEL, end = attn__min(begin + VEC_LANES, flash_queries(shape));
        for (int64_t i = begin; i < end; i++) {
            weave_row(shape, qt, i, rows + (i - begin) * dim, dim, factor);
        }
    }
}

/* Rows first .. first + count, to be asked for while micro-kernels take so many elements.  Rows without a gap
 * are one. */
static flash_ask ask_for(const attn__rows *rows, int64_t dim, int64_t first, int64_t count, int64_t elements)
{
    const int64_t size = (int64_t)attn_dtype_size(rows->dtype), pieces = rows->token == dim ? 1 : count;
    const int64_t lines = attn__ceil_div(count * dim / pieces * size, LINE);
    return (flash_ask){.at = (uintptr_t)attn__element(rows->data, rows->dtype, first * rows->token),
                       .left = lines,
                       .lines = lines,
                       .skip = rows->token * size - lines * LINE,
                       .period = attn__max(elements / (pieces * lines), 1)};
}

/* `count` rows of K or V for so many panels; `next` others follow. */
static flash_rows load_rows(float *copy, const attn__rows *rows, int64_t dim, int64_t count, int64_t next,
                            int64_t panels)
{
    flash_rows loaded = {.ask = {.period = FLASH_NEVER}};
    loaded.at = tile_rows(copy, *rows, dim, count, panels >= COPY_PANELS, &loaded.token);
    if (next > 0 && rows->dim == 1) {
        loaded.ask = ask_for(rows, dim, count, next, count * dim * panels);
        loaded.ask.near = panels == 1 && attn__cpu_asks_l1();
    }
    return loaded;
}

/* No tile follows: memory brings the lines that O is written to, and the next call's rows of Q. */
static void ask_for_queries(const flash_state *state, flash_tile *tile)
{
    const attn__block *block = state->block;
    const attn__rows o = {block->o, ATTN_F32, block->o_stride, 1};
    const attn__rows q = {block->next_q, block->dtype, block->q_token, block->q_dim};
    const int64_t uses = tile->count * state->panels;
    tile->k.ask = ask_for(&o, block->dim_v, 0, block->count, uses * block->dim_qk);
    if (q.data != NULL && q.dim == 1) {
        tile->v.ask = ask_for(&q, block->dim_qk, 0, block->count, uses * block->dim_v);
    }
}

/* Keys first .. first + count of span, behind which come `next` others. */
static flash_tile load_tile(const flash_state *state, const attn__span *span, int64_t first, int64_t count,
                            int64_t next)
{
    const attn__block *block = state->block;
    const int64_t skip = first - span->first;
    const attn__rows k = {attn__element(span->k, block->dtype, skip * span->k_token), block->dtype,
                          span->k_token, span->k_dim};
    const attn__rows v = {attn__element(span->v, block->dtype, skip * span->v_token), block->dtype,
                          span->v_token, span->v_dim};
    flash_tile tile = {.first = first,
                       .count = count,
                       .k = load_rows(state->k, &k, block->dim_qk, count, next, state->panels),
                       .v = load_rows(state->v, &v, block->dim_v, count, next, state->panels)};
    if (next == 0 && state->panels > 1) {
        ask_for_queries(state, &tile);
    }
    return tile;
}

#include "kernel/cpu/flash_panel.inc.h"

/* ---- begin, loop, end ---------------------------------------------------------------------------- */

static void clear(const flash_state *state)
{
    int64_t lanes = state->panels * PANEL;
    memset(state->ot, 0, sizeof(float) * (size_t)(lanes * state->block->dim_v));
    memset(state->sum, 0, sizeof(float) * (size_t)lanes);
    for (int64_t i = 0; i < lanes; i++) {
        state->max[i] = -INFINITY;
    }
}

/* lse = ln(2) * (max + log2(sum)); returns what O is to be multiplied by.  A row that saw no key has
 * max = -inf and sum = 0, which gives lse = -inf and O = 0. */
static float finish_row(const attn__block *block, int64_t row, float max, float sum)
{
    block->lse[row] = (float)(((double)max + log2((double)sum)) * 0.69314718055994530942);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

/* The first `count` lanes, or all. */
VEC_INLINE void store_part(float *to, vec a, int64_t count)
{
    if (count >= VEC_LANES) {
        vec_store(to, a);
    } else {
        float lanes[VEC_LANES];
        vec_store(lanes, a);
        memcpy(to, lanes, sizeof(float) * (size_t)count);
    }
}

/* o of VEC_LANES rows, of which `count` are real, from as many lanes of ot[dim][PANEL] */
static void write_lanes(float *o, int64_t o_stride, const float *ot, int64_t dim, const float *factor,
                        int64_t count)
{
    for (int64_t d = 0; d < dim; d += VEC_LANES) {
        const int64_t width = attn__min(VEC_LANES, dim - d);
        vec a[VEC_LANES];
        for (int i = 0; i < VEC_LANES; i++) {
            a[i] = i < width ? vec_load(ot + (d + i) * PANEL) : vec_set(0.0f);
        }
        vec_transpose(a);
        for (int i = 0; i < count; i++) {
            store_part(o + i * o_stride + d, vec_mul(a[i], vec_set(factor[i])), width);
        }
    }
}

static void write_rows(const flash_state *state)
{
    const attn__block *block = state->block;
    for (int64_t row = 0; row < block->count; row += VEC_LANES) {
        const int64_t count = attn__min(VEC_LANES, block->count - row);
        const flash_shape shape = panel_shape(block, row / PANEL);
        const float *ot = state->ot + row / PANEL * block->dim_v * PANEL;
        float *o = block->o + row * block->o_stride, factor[VEC_LANES];
        for (int64_t i = 0; i < count; i++) {
            factor[i] = finish_row(block, row + i, state->max[row + i], state->sum[row + i]);
        }
        if (shape.dims == 1) {
            write_lanes(o, block->o_stride, ot + row % PANEL, block->dim_v, factor, count);
            continue;
        }
        for (int64_t i = 0; i < count; i++) {
            unweave_row(shape, ot, row % PANEL + i, o + i * block->o_stride, block->dim_v, factor[i]);
        }
    }
}

#include "kernel/cpu/flash_few.inc.h"

/* Nothing of a span's first tile has been asked for, and one panel computes little faster than memory
 * delivers: its tiles begin short and grow, so that it waits for little and is never far behind. */
static int64_t first_keys(const flash_state *state)
{
    return state->panels > 1 ? state->tile_k : attn__min(FIRST_KEYS, state->tile_k);
}

static void forward(const attn__block *block, void *scratch)
{
    if (few_suits(block)) {
        few_forward(block, scratch);
        return;
    }
    flash_state state = {.block = block};
    lay_out(&state, scratch, block->count, block->dim_qk, block->dim_v);
    pack_queries(&state);
    clear(&state);
    for (int64_t s = 0; s < block->span_count; s++) {
        const attn__span *span = &block->spans[s];
        int64_t first = attn__max(span->first, block->first + block->lo);
        int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
        int64_t keys = first_keys(&state);
        for (int64_t count; first < end; first += count) {
            count = attn__min(keys, end - first);
            keys = attn__min(keys + FIRST_KEYS, state.tile_k);
            flash_tile tile = load_tile(&state, span, first, count, attn__min(keys, end - first - count));
            for (int64_t panel = 0; panel < state.panels; panel++) {
                panel_step(&state, panel, &tile);
            }
        }
    }
    write_rows(&state);
}

#include "kernel/cpu/flash_backward.inc.h"

/* ---- the row ------------------------------------------------------------------------------------- */

static int64_t tile_q(const attn__shape *shape)
{
    int64_t most = attn__min(TILE_Q, QUERY_FLOATS / (shape->dim_qk + shape->dim_v)) / PANEL * PANEL;
    return attn__min(most, attn__ceil_div(shape->rows, PANEL) * PANEL);
}

static const char *rejects(const attn__shape *shape)
{
    (void)shape;
    return NULL;
}

static size_t scratch_bytes(const attn__shape *shape)
{
    flash_state state;
    few_state few;
    const int64_t rows = tile_q(shape);
    const size_t panels = lay_out(&state, NULL, rows, shape->dim_qk, shape->dim_v);
    const size_t single =
        few_lay_out(&few, NULL, shape->dtype, attn__min(rows, FEW_MOST), shape->dim_qk, shape->dim_v);
    return sizeof(float) * (panels > single ? panels : single);
}

const attn__kernel FLASH_ROW = {
    .name = FLASH_NAME,
    .summary = FLASH_SUMMARY,
    .needs = FLASH_NEEDS,
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = backward_tile_q,
    .backward_tile_k = backward_tile_k,
    .backward_step = backward_step,
    .backward_scratch = backward_scratch,
    .backward = backward,
    .peak = probe_peak,
};

const attn__probe FLASH_PROBE = {
    .lanes = VEC_LANES, .exp2 = probe_exp2, .peak = probe_peak, .read = probe_read};
