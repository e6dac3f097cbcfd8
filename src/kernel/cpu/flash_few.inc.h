/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_few.inc.h - the forward of a few query rows (decoding) at the speed of memory; a part of
 * flash.inc.h, which includes it.
 *
 * METHOD.  The running maximum of flash.inc.h, but nothing is transposed and no lane is empty:
 *
 *     Q        packed once per call, scale * log2(e) folded in; dims along the lanes
 *     for each tile of keys, for each group of 4, 2 or 1 rows:
 *         S[row][key]  = Q K^T        dims along the lanes; VEC_LANES dot products in registers, their lanes
 *                                     added up together by a transposition (vec_sums)
 *         max, P = exp2(S - max), sum                 keys along the lanes
 *         O[row][dim] += P[row][key] V[key][dim]      P broadcast, dims along the lanes
 *
 * K and V are read once a group, where they lie if their dims are dense, in order, and widened in registers.
 * Where a processor foresees too little of that (attn__cpu_ahead), the caches are asked for the rows to come.
 *
 * MASK, NaN.  A masked score is replaced by -inf.  A value is added only to rows that see its key: to all
 * rows of a group over the keys that all see, and row by row over the others.
 *
 * COST.  (d_qk + d_v) / VEC_LANES FMAs for each (key, query), and about 5 vector operations; one read of K
 * and V from memory.  See docs/perf/cpu.md, "Few queries".
 */
enum {
    FEW_GROUP = VEC_LANES < 4 ? VEC_LANES : 4, /* rows that share a load */
    FEW_ROWS = VEC_LANES + VEC_LANES / 4,      /* of a call, at most: from there on panels are faster */
    FEW_KEYS = 1024,                           /* of a tile, at most */
    FEW_BYTES = 128 * 1024,                    /* of K in a tile, and as much of V: an L2 holds both */
    FEW_SUM_KEYS = 16,                         /* whose values are added up before they join the older ones */
    FEW_COPY_KEYS = 64,                        /* of a tile that is gathered */
    FEW_SUMS = VEC_LANES < 8 ? VEC_LANES : 8,  /* in registers: enough to hide an FMA's latency */
};

typedef struct few_state {
    const attn__block *block;
    int64_t rows, tile_k, copy_k; /* rows: a whole number of groups */
    int64_t q_row, o_row;         /* dims in whole vectors */
    float *q, *o;                 /* [row][q_row], [row][o_row]; dims that do not exist are 0 */
    float *p;                     /* [row][tile_k] S, then P */
    float *max;                   /* [row] */
    float *sum;                   /* [row][VEC_LANES] */
    float *wide;                  /* [o_row] P V of one row and tile, more than registers hold */
    float *k, *v;                 /* a tile gathered to dense fp32 */
} few_state;

/* Rows of K or V with dense dims; distances in bytes.  What lies `ahead` of a row is asked for;
 * 0: the row itself, for the strips that come back to it. */
typedef struct few_rows {
    attn_dtype dtype;
    const char *at;
    int64_t token, ahead;
} few_rows;

typedef struct few_tile {
    int64_t first, count;
    few_rows k, v;
} few_tile;

VEC_INLINE int64_t few_size(const attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 4 : 2;
}

static size_t few_lay_out(few_state *state, float *scratch, attn_dtype dtype, int64_t rows, int64_t dim_qk,
                          int64_t dim_v)
{
    size_t used = 0;
    rows = state->rows = attn__ceil_div(rows, FEW_GROUP) * FEW_GROUP;
    const int64_t keys = FEW_BYTES / (few_size(dtype) * dim_qk) / VEC_LANES * VEC_LANES;
    state->tile_k = attn__min(FEW_KEYS, attn__max(keys, VEC_LANES));
    state->copy_k = attn__min(FEW_COPY_KEYS, state->tile_k);
    state->q_row = attn__ceil_div(dim_qk, VEC_LANES) * VEC_LANES;
    state->o_row = attn__ceil_div(dim_v, VEC_LANES) * VEC_LANES;
    state->q = take(scratch, &used, rows * state->q_row);
    state->o = take(scratch, &used, rows * state->o_row);
    state->p = take(scratch, &used, rows * state->tile_k);
    state->max = take(scratch, &used, rows);
    state->sum = take(scratch, &used, rows * VEC_LANES);
    state->wide = take(scratch, &used, state->o_row);
    state->k = take(scratch, &used, state->copy_k * dim_qk);
    state->v = take(scratch, &used, state->copy_k * dim_v);
    return used;
}

/* Rows that fill the last group up are zero, and see what the last row sees. */
static void few_begin(const few_state *state)
{
    const attn__block *block = state->block;
    const float factor = (float)((double)block->scale * LOG2_E);
    memset(state->q, 0, sizeof(float) * (size_t)(state->rows * state->q_row));
    memset(state->o, 0, sizeof(float) * (size_t)(state->rows * state->o_row));
    memset(state->sum, 0, sizeof(float) * (size_t)(state->rows * VEC_LANES));
    for (int64_t row = 0; row < state->rows; row++) {
        float *q = state->q + row * state->q_row;
        state->max[row] = -INFINITY;
        if (row < block->count) {
            widen(q, block->q, row * block->q_token, block->dtype, block->q_dim, block->dim_qk);
            for (int64_t d = 0; d < block->dim_qk; d++) {
                q[d] *= factor;
            }
        }
    }
}

/* ---- tiles ---------------------------------------------------------------------------------------- */

/* Whole rows of attn__cpu_ahead() bytes. */
static int64_t few_ahead(const attn__rows *rows, int64_t dim)
{
    const int64_t size = few_size(rows->dtype), bytes = attn__cpu_ahead();
    return bytes == 0 ? 0 : attn__max(bytes / (dim * size), 1) * rows->token * size;
}

static bool few_dense(int64_t distance, int64_t dim)
{
    return distance == 1 || dim == 1;
}

/* `count` rows of K or V as the loops below want them. */
static few_rows few_load_rows(float *copy, const attn__rows *rows, int64_t dim, int64_t count)
{
    if (few_dense(rows->dim, dim)) {
        return (few_rows){.dtype = rows->dtype,
                          .at = rows->data,
                          .token = rows->token * few_size(rows->dtype),
                          .ahead = few_ahead(rows, dim)};
    }
    for (int64_t j = 0; j < count; j++) {
        widen(copy + j * dim, rows->data, j * rows->token, rows->dtype, rows->dim, dim);
    }
    return (few_rows){.dtype = ATTN_F32, .at = (const char *)copy, .token = dim * (int64_t)sizeof(float)};
}

/* How many keys of span make a tile. */
static int64_t few_tile_keys(const few_state *state, const attn__span *span)
{
    const bool dense =
        few_dense(span->k_dim, state->block->dim_qk) && few_dense(span->v_dim, state->block->dim_v);
    return dense ? state->tile_k : state->copy_k;
}

/* Keys first .. first + count of span. */
static few_tile few_load(const few_state *state, const attn__span *span, int64_t first, int64_t count)
{
    const attn__block *block = state->block;
    const int64_t skip = first - span->first;
    const attn__rows k = {attn__element(span->k, block->dtype, skip * span->k_token), block->dtype,
                          span->k_token, span->k_dim};
    const attn__rows v = {attn__element(span->v, block->dtype, skip * span->v_token), block->dtype,
                          span->v_token, span->v_dim};
    few_tile tile = {.first = first, .count = count};
    tile.k = few_load_rows(state->k, &k, block->dim_qk, count);
    tile.v = few_load_rows(state->v, &v, block->dim_v, count);
    return tile;
}

#include "kernel/cpu/flash_few_products.inc.h"

/* ---- softmax -------------------------------------------------------------------------------------- */

/* Scores from .. to of one row become weights, in whole vectors; max, sum and O move on.  A row without a
 * score yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN. */
static void few_softmax(const few_state *state, int64_t row, int64_t from, int64_t to)
{
    const int64_t begin = from / VEC_LANES * VEC_LANES, end = attn__ceil_div(to, VEC_LANES) * VEC_LANES;
    float *s = state->p + row * state->tile_k, *sums = state->sum + row * VEC_LANES;
    float *o = state->o + row * state->o_row;
    for (int64_t j = begin; j < from; j++) {
        s[j] = -INFINITY;
    }
    for (int64_t j = to; j < end; j++) {
        s[j] = -INFINITY;
    }
    const float old = state->max[row];
    vec most = vec_set(old);
    for (int64_t j = begin; j < end; j += VEC_LANES) {
        most = vec_max(vec_load(s + j), most);
    }
    const float max = vec_greatest(most);
    const vec less = vec_set(max > -INFINITY ? max : 0.0f);
    vec sum = vec_load(sums);
    if (max > old) {
        const vec fade = flash_exp2(vec_sub(vec_set(old), less));
        for (int64_t d = 0; d < state->o_row; d += VEC_LANES) {
            vec_store(o + d, vec_mul(vec_load(o + d), fade));
        }
        sum = vec_mul(sum, fade);
        state->max[row] = max;
    }
    vec more = vec_set(0.0f); /* of this tile alone, for a small rounding error */
    for (int64_t j = begin; j < end; j += VEC_LANES) {
        const vec p = flash_exp2(vec_sub(vec_load(s + j), less));
        vec_store(s + j, p);
        more = vec_add(more, p);
    }
    vec_store(sums, vec_add(sum, more));
}

/* ---- one call ------------------------------------------------------------------------------------- */

/* m rows from `row` on against one tile. */
static void few_step(const few_state *state, int64_t row, int m, const few_tile *tile)
{
    const attn__block *block = state->block;
    int64_t from[FEW_GROUP], to[FEW_GROUP]; /* offsets in the tile that a row sees; neither falls */
    for (int i = 0; i < m; i++) {
        const int64_t apart = block->first + attn__min(row + i, block->count - 1) - tile->first;
        from[i] = attn__min(tile->count, attn__max(0, apart + block->lo));
        to[i] = attn__max(from[i], attn__min(tile->count, apart + block->hi + 1));
    }
    if (from[0] >= to[m - 1]) {
        return;
    }
    few_scores(state, row, m, &tile->k, from[0] / VEC_LANES * VEC_LANES, to[m - 1]);
    for (int i = 0; i < m; i++) {
        if (from[i] < to[i]) {
            few_softmax(state, row + i, from[i], to[i]);
        }
    }
    const bool shared = from[m - 1] < to[0];
    const int64_t whole_from = shared ? from[m - 1] : from[0], whole_to = shared ? to[0] : from[0];
    few_values(state, row, m, &tile->v, whole_from, whole_to);
    for (int i = 0; i < m; i++) {
        few_values(state, row + i, 1, &tile->v, from[i], attn__min(to[i], whole_from));
        few_values(state, row + i, 1, &tile->v, attn__max(from[i], whole_to), to[i]);
    }
}

static void few_end(const few_state *state)
{
    const attn__block *block = state->block;
    for (int64_t row = 0; row < block->count; row++) {
        const float *o = state->o + row * state->o_row;
        float sum = 0.0f;
        for (int i = 0; i < VEC_LANES; i++) {
            sum += state->sum[row * VEC_LANES + i];
        }
        const vec factor = vec_set(finish_row(block, row, state->max[row], sum));
        for (int64_t d = 0; d < block->dim_v; d += VEC_LANES) {
            store_part(block->o + row * block->o_stride + d, vec_mul(vec_load(o + d), factor),
                       block->dim_v - d);
        }
    }
}

static void few_forward(const attn__block *block, float *scratch)
{
    few_state state = {.block = block};
    few_lay_out(&state, scratch, block->dtype, block->count, block->dim_qk, block->dim_v);
    few_begin(&state);
    for (int64_t s = 0; s < block->span_count; s++) {
        const attn__span *span = &block->spans[s];
        int64_t first = attn__max(span->first, block->first + block->lo);
        int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
        const int64_t keys = few_tile_keys(&state, span);
        for (; first < end; first += keys) {
            const int64_t count = attn__min(keys, end - first);
            few_tile tile = few_load(&state, span, first, count);
            for (int64_t row = 0; row < block->count;) {
                const int64_t left = block->count - row;
                const int m = left > 2 ? FEW_GROUP : (int)attn__min(left, FEW_GROUP);
                few_step(&state, row, m, &tile);
                tile.k.ahead = tile.v.ahead = 0;
                row += m;
            }
        }
    }
    few_end(&state);
}
