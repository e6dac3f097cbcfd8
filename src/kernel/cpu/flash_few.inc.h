/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_few.inc.h - the forward of a few query rows (decoding) at the speed of memory; a part of
 * flash.inc.h, which includes it.
 *
 * METHOD.  The running maximum of flash.inc.h, but nothing is transposed and no lane is empty:
 *
 *     Q        packed once per call, scale * log2(e) folded in; dims along the lanes
 *     for each tile of keys:
 *         for each block of keys, for each group of 4, 2 or 1 rows, or of 3, 5 or 6 (AVX-512):
 *             S[row][key]  = Q K^T    dims along the lanes; VEC_LANES dot products in registers, their lanes
 *                                     added up together by a transposition (vec_sums)
 *         max, P = exp2(S - max), sum             keys along the lanes
 *         for each block of keys, for each group:
 *             O[row][dim] += P[row][key] V[key][dim]  P broadcast, dims along the lanes
 *
 * K and V are read once, where they lie if their dims are dense, and widened in registers; the L1 holds a
 * block for the groups after the first.  How memory is kept busy: flash_few_products.inc.h.
 *
 * MASK, NaN.  A masked score is replaced by -inf.  A value is added only to rows that see its key: to all
 * rows of a group over the keys that all see, and row by row over the others.
 *
 * COST.  (d_qk + d_v) / VEC_LANES FMAs for each (key, query), and about 5 vector operations; one read of K
 * and V from memory.  See docs/perf/cpu.md, "Few queries".
 */
enum {
    FEW_GROUP = VEC_LANES < 4 ? VEC_LANES : 4,  /* rows that share a load, */
    FEW_LARGE = VEC_LANES < 16 ? FEW_GROUP : 6, /* or the last ones, if there are so many */
    FEW_THREE = VEC_LANES >= 16,                /* are there groups of 3? */
    FEW_KNOWN = VEC_LANES >= 16,                /* and products written out for some dims, */
    FEW_KNOWN_ONE = VEC_LANES >= 8,             /* or for those of one row alone? */
    FEW_MOST = PANEL * 3 / 4,                   /* rows of a call */
    FEW_KEYS = 2048,                            /* of a tile, at most */
    FEW_BYTES = 512 * 1024,                     /* of K in a tile: turning from K to V takes time */
    FEW_BLOCK = 32,                             /* keys of a block; their values are a sum of their own */
    FEW_BLOCK_BYTES = 16 * 1024,                /* of a block, for groups and strips find it in the L1, */
    FEW_TOUCH_BYTES = 4 * 1024,                 /* or of one whose rows the first strip touches, */
    FEW_LONG = 512,                             /* but of longer rows, in bytes, it has */
    FEW_LONG_KEYS = 2,                          /* so many */
    FEW_COPY_KEYS = 64,                         /* of a tile that is gathered */
    FEW_SUMS = VEC_LANES < 8 ? VEC_LANES : 8,   /* in registers: enough to hide an FMA's latency */
    FEW_REGISTERS = VEC_ROWS > 6 ? 32 : 16,     /* vectors of the processor */
    FEW_FAR = 24 * 1024,                        /* bytes from what is read to what the L2 is asked for, */
    FEW_BUSY = 8,                               /* from so many FMAs a line on, */
};

typedef struct few_state {
    const attn__block *block;
    int64_t rows, tile_k, copy_k; /* rows: a whole number of groups */
    int64_t q_row, o_row;         /* dims in whole vectors */
    int64_t p_row;                /* tile_k, and what scores a step of keys goes beyond it */
    float *q, *o;                 /* [row][q_row], [row][o_row]; dims that do not exist are 0 */
    float *p;                     /* [row][p_row] S, then P */
    float *max;                   /* [row] */
    float *sum;                   /* [row][VEC_LANES] */
    float *wide;                  /* [o_row] P V of one row and block, more than registers hold */
    float *k, *v;                 /* a tile gathered to dense fp32 */
} few_state;

/* Rows of K or V with dense dims; distances in bytes.  What lies `near` or `far` from what is read is asked
 * for, into the L1 or into the L2; see flash_few_products.inc.h. */
typedef struct few_rows {
    attn_dtype dtype;
    bool gathered;
    const char *at;
    int64_t token, near, far;
    int64_t known; /* dims of K for which products are written out, or 0 */
    bool l1;       /* the L1, not the L2, is asked for what lies far */
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
    state->p_row = state->tile_k + VEC_LANES;
    state->p = take(scratch, &used, rows * state->p_row);
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

static bool few_dense(int64_t distance, int64_t dim)
{
    return distance == 1 || dim == 1;
}

/* `count` rows of K or V as the loops below want them. */
static few_rows few_load_rows(float *copy, const attn__rows *rows, int64_t dim, int64_t count)
{
    if (few_dense(rows->dim, dim)) {
        return (few_rows){
            .dtype = rows->dtype, .at = rows->data, .token = rows->token * few_size(rows->dtype)};
    }
    for (int64_t j = 0; j < count; j++) {
        widen(copy + j * dim, rows->data, j * rows->token, rows->dtype, rows->dim, dim);
    }
    return (few_rows){
        .dtype = ATTN_F32, .gathered = true, .at = (const char *)copy, .token = dim * (int64_t)sizeof(float)};
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

/* ---- groups --------------------------------------------------------------------------------------- */

/* Rows row .. row + m, which share what is loaded.  Row row + i sees a tile's keys from[i] .. to[i]; neither
 * falls with i. */
typedef struct few_group {
    int64_t row;
    int m;
    int asker, askers; /* of what is far it asks for the asker-th share; askers = 0: for nothing */
    int64_t from[FEW_LARGE], to[FEW_LARGE];
} few_group;

/* 3 rows alone keep pace with memory key after key, as 1 and 2 do; a Zen 5 keeps it with
 * a group of 4, too, as other vectors do. */
static bool few_three(int64_t rows)
{
    return FEW_THREE && rows == 3 && !attn__cpu_asks_l1();
}

/* Rows of the group that begins at `row`, of so many: groups of about the same size. */
static int few_next(int64_t rows, int64_t row)
{
    const int64_t left = rows - row, m = attn__ceil_div(left, attn__ceil_div(left, FEW_LARGE));
    return m == 3 && !few_three(rows) ? FEW_GROUP : (int)m;
}

/* All rows in groups; returns how many there are. */
static int few_split(const few_state *state, const few_tile *tile, few_group *groups)
{
    const attn__block *block = state->block;
    int count = 0;
    for (int64_t row = 0; row < block->count; row += groups[count++].m) {
        few_group *group = &groups[count];
        *group = (few_group){.row = row, .m = few_next(block->count, row)};
        for (int i = 0; i < group->m; i++) {
            const int64_t apart = block->first + attn__min(row + i, block->count - 1) - tile->first;
            group->from[i] = attn__min(tile->count, attn__max(0, apart + block->lo));
            group->to[i] = attn__max(group->from[i], attn__min(tile->count, apart + block->hi + 1));
        }
    }
    const int askers = count > 1 && groups[count - 1].m < FEW_GROUP ? count - 1 : count;
    for (int g = 0; g < askers; g++) {
        groups[g].asker = g, groups[g].askers = askers;
    }
    return count;
}

/* Keys of a block of K or V. */
static int64_t few_block(int64_t dim, attn_dtype dtype)
{
    return attn__min(FEW_BLOCK, attn__max(FEW_BLOCK_BYTES / (dim * few_size(dtype)), 8));
}

/* 1 row alone keeps pace with memory key after key in products that are written out for so many dims, a loop
 * over dims does not always; with AVX-512 so do 2 rows, and 4 or 5 of fp32, but where memory wants to be
 * asked early (attn__cpu_ahead) these won nothing. */
static bool few_known(const few_rows *rows, int64_t dim, int count, int m)
{
    const bool many = (m == 4 || m == 5) && rows->dtype == ATTN_F32 && attn__cpu_ahead() == 0;
    const bool written = (FEW_KNOWN_ONE && m == 1) || (FEW_KNOWN && (m == 2 || many));
    return count == 1 && written && (dim == 64 || dim == 128 || (dim == 256 && m < FEW_GROUP));
}

/* Decides what is asked for while `count` groups, the first of m rows, use these rows, of K (`keys`) or V. */
static void few_set_ahead(few_rows *rows, int64_t dim, int count, int m, bool keys)
{
    if (rows->gathered) {
        return;
    }
    const int64_t size = few_size(rows->dtype), ahead = attn__cpu_ahead();
    rows->known = keys && few_known(rows, dim, count, m) ? dim : 0;
    const bool long_values = !keys && m > 2 && dim * size > FEW_LONG;
    const bool many =
        m * (LINE / size / VEC_LANES) >= FEW_BUSY || (m >= FEW_GROUP && (keys || ahead > 0)) || long_values;
    const bool busy = count > 1 || (many && rows->known == 0);
    const int64_t block = count > 1 || !keys ? few_block(dim, rows->dtype) * dim * size : 0;
    rows->l1 = attn__cpu_asks_l1() && block <= FEW_FAR;
    const int64_t far = rows->l1 ? attn__max(ahead, block) : FEW_FAR;
    const int64_t distance = attn__ceil_div(busy ? far : ahead, dim * size) * rows->token;
    rows->near = busy ? 0 : distance;
    rows->far = busy ? distance : 0;
}

#include "kernel/cpu/flash_few_products.inc.h"

/* ---- softmax -------------------------------------------------------------------------------------- */

/* Scores from .. to of one row become weights, in whole vectors; max, sum and O move on.  A row without a
 * score yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN. */
static void few_softmax(const few_state *state, int64_t row, int64_t from, int64_t to)
{
    if (from >= to) {
        return;
    }
    const int64_t begin = from / VEC_LANES * VEC_LANES, end = attn__ceil_div(to, VEC_LANES) * VEC_LANES;
    float *s = state->p + row * state->p_row, *sums = state->sum + row * VEC_LANES;
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

/* The keys that all rows of a group see: *from .. *to, which may be none. */
static void few_shared(const few_group *group, int64_t *from, int64_t *to)
{
    *from = group->from[group->m - 1];
    *to = attn__max(*from, group->to[0]);
}

/* O += P V of the other keys of the tile, row by row. */
static void few_edges(const few_state *state, const few_group *group, const few_rows *values)
{
    int64_t from, to;
    few_shared(group, &from, &to);
    for (int i = 0; i < group->m; i++) {
        const few_group row = {.row = group->row + i, .m = 1};
        few_values(state, &row, values, group->from[i], attn__min(group->to[i], from));
        few_values(state, &row, values, attn__max(group->from[i], to), group->to[i]);
    }
}

/* S of the tile's keys first .. end */
static void few_score_block(const few_state *state, const few_group *groups, int count, const few_rows *keys,
                            int64_t first, int64_t end)
{
    for (int g = 0; g < count; g++) {
        const int64_t from = groups[g].from[0] / VEC_LANES * VEC_LANES, to = groups[g].to[groups[g].m - 1];
        few_scores(state, &groups[g], keys, attn__max(first, from), attn__min(end, to));
    }
}

/* O += P V of those of them that whole groups see */
static void few_value_block(const few_state *state, const few_group *groups, int count,
                            const few_rows *values, int64_t first, int64_t end)
{
    for (int g = 0; g < count; g++) {
        int64_t from, to;
        few_shared(&groups[g], &from, &to);
        few_values(state, &groups[g], values, attn__max(first, from), attn__min(end, to));
    }
}

/* All rows against one tile. */
static void few_step(const few_state *state, few_tile *tile)
{
    few_group groups[(FEW_MOST + FEW_GROUP - 1) / FEW_GROUP] = {{0}};
    const int count = few_split(state, tile, groups);
    const int64_t dims = attn__max(state->block->dim_qk, state->block->dim_v);
    const int64_t block = count > 1 ? few_block(dims, tile->k.dtype) : tile->count;
    few_set_ahead(&tile->k, state->block->dim_qk, count, groups[0].m, true);
    few_set_ahead(&tile->v, state->block->dim_v, count, groups[0].m, false);
    for (int64_t first = 0; first < tile->count; first += block) {
        few_score_block(state, groups, count, &tile->k, first, first + block);
    }
    for (int g = 0; g < count; g++) {
        for (int i = 0; i < groups[g].m; i++) {
            few_softmax(state, groups[g].row + i, groups[g].from[i], groups[g].to[i]);
        }
    }
    for (int64_t first = 0; first < tile->count; first += block) {
        few_value_block(state, groups, count, &tile->v, first, first + block);
    }
    for (int g = 0; g < count; g++) {
        few_edges(state, &groups[g], &tile->v);
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

/* Is this path faster than a panel?  With the rows of one group; if a quarter of the lanes of a panel would
 * be empty, of a narrow one of AVX2 three eighths; and with the rows of two groups if a panel would have to
 * widen K and V first, or if the sums of many dims are worth what they take to end (AVX-512). */
static bool few_suits(const attn__block *block)
{
    const int64_t rows = block->count;
    const flash_shape shape = flash_shape_of(rows, block->dim_qk, block->dim_v);
    const int64_t eighths = shape.dims > 1 && VEC_LANES < 16 ? 5 : 6;
    const bool suits = (shape.dims > 1 && rows <= FEW_LARGE) || 8 * rows <= eighths * flash_queries(shape);
    const bool two = block->dtype != ATTN_F32 || (VEC_LANES >= 16 && block->dim_qk + block->dim_v >= 256);
    return rows <= FEW_MOST && (suits || (two && rows <= 2 * FEW_LARGE));
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
            few_step(&state, &tile);
        }
    }
    few_end(&state);
}
