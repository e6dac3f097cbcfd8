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
 * K and V are read once a group, where they lie if their dims are dense, and widened in registers; while
 * one of the two is read, the caches are asked for what comes next in the other.
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
    FEW_KEYS = 64,                             /* of a tile, at most */
    FEW_BYTES = 16 * 1024,                     /* of K in a tile, and as much of V: an L1 holds both */
    FEW_DOTS = VEC_LANES < 8 ? VEC_LANES : 8,  /* keys at once: chains that hide an FMA's latency */
};

typedef struct few_state {
    const attn__block *block;
    int64_t rows, tile_k; /* rows: a whole number of groups */
    int64_t q_row, o_row; /* dims in whole vectors */
    float *q, *o;         /* [row][q_row], [row][o_row]; dims that do not exist are 0 */
    float *p;             /* [row][FEW_KEYS] S, then P */
    float *max;           /* [row] */
    float *sum;           /* [row][VEC_LANES] */
    float *k, *v;         /* a tile gathered to dense fp32 */
} few_state;

/* Rows of K or V with dense dims; distances in bytes.  What lies `ahead` of a row will be read next. */
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
    state->q_row = attn__ceil_div(dim_qk, VEC_LANES) * VEC_LANES;
    state->o_row = attn__ceil_div(dim_v, VEC_LANES) * VEC_LANES;
    state->q = take(scratch, &used, rows * state->q_row);
    state->o = take(scratch, &used, rows * state->o_row);
    state->p = take(scratch, &used, rows * FEW_KEYS);
    state->max = take(scratch, &used, rows);
    state->sum = take(scratch, &used, rows * VEC_LANES);
    state->k = take(scratch, &used, state->tile_k * dim_qk);
    state->v = take(scratch, &used, state->tile_k * dim_v);
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

/* `count` rows of K or V as the loops below want them. */
static few_rows few_load_rows(float *copy, const attn__rows *rows, int64_t dim, int64_t count)
{
    if (rows->dim == 1 || dim == 1) {
        return (few_rows){.dtype = rows->dtype,
                          .at = rows->data,
                          .token = rows->token * (int64_t)attn_dtype_size(rows->dtype)};
    }
    for (int64_t j = 0; j < count; j++) {
        widen(copy + j * dim, rows->data, j * rows->token, rows->dtype, rows->dim, dim);
    }
    return (few_rows){.dtype = ATTN_F32, .at = (const char *)copy, .token = dim * (int64_t)sizeof(float)};
}

/* Keys first .. first + count of span; `more` says that as many come next.  Where K and V have their tokens
 * equally far apart, each row of one finds what to ask for at one distance. */
static few_tile few_load(const few_state *state, const attn__span *span, int64_t first, int64_t count,
                         bool more)
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
    if (tile.k.token == tile.v.token && span->k_dim == 1 && span->v_dim == 1) {
        const int64_t apart = (int64_t)((uintptr_t)tile.v.at - (uintptr_t)tile.k.at);
        tile.k.ahead = apart;
        tile.v.ahead = more ? count * tile.k.token - apart : 0;
    }
    return tile;
}

/* Asks for what lies `ahead` of p. */
VEC_INLINE void few_fetch(const char *p, int64_t ahead)
{
    FLASH_PREFETCH((const void *)((uintptr_t)p + (uintptr_t)ahead));
}

/* A vector of a row; whole, or its first `width` lanes. */
VEC_INLINE vec few_vec(const void *p, const attn_dtype dtype, const bool whole, int64_t width)
{
    return whole ? vec_load_as(p, dtype) : vec_load_part(p, dtype, (int)width);
}

/* ---- S = Q K^T ------------------------------------------------------------------------------------ */

/* acc[i * n + j] += q[i] . k[j] over one vector of dims, m rows by `some` of n keys */
VEC_INLINE void few_dot(const int m, const int n, const int some, const attn_dtype dtype, const bool whole,
                        vec *acc, const float *q, int64_t q_row, const char *const *k, int64_t byte,
                        int64_t ahead, int64_t width)
{
    if (byte % LINE == 0) {
        FLASH_UNROLL
        for (int j = 0; j < some; j++) {
            few_fetch(k[j] + byte, ahead);
        }
    }
    FLASH_UNROLL
    for (int j = 0; j < some; j++) {
        const vec x = few_vec(k[j] + byte, dtype, whole, width);
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            acc[i * n + j] = vec_fma(x, vec_load(q + i * q_row), acc[i * n + j]);
        }
    }
}

/* The scores of m rows and the keys from .. to, in steps of n = VEC_LANES / m: up to n - 1 scores behind them
 * are those of the last key. */
VEC_INLINE void few_scores_of(const int m, const attn_dtype dtype, const few_state *state, int64_t row,
                              const few_rows *keys, int64_t from, int64_t to)
{
    enum { L = VEC_LANES };
    const int n = L / m, some = n < FEW_DOTS ? n : FEW_DOTS;
    const int64_t dim = state->block->dim_qk, q_row = state->q_row, size = few_size(dtype);
    const float *q = state->q + row * q_row;
    const int64_t ahead = keys->ahead;
    float *s = state->p + row * FEW_KEYS;
    for (int64_t key = from; key < to; key += n) {
        vec acc[L];
        FLASH_UNROLL
        for (int i = 0; i < L; i++) {
            acc[i] = vec_set(0.0f);
        }
        FLASH_UNROLL
        for (int part = 0; part < n; part += some) {
            const char *k[FEW_DOTS];
            FLASH_UNROLL
            for (int j = 0; j < some; j++) {
                k[j] = keys->at + attn__min(key + part + j, to - 1) * keys->token;
            }
            int64_t d = 0;
            for (; d + L <= dim; d += L) {
                few_dot(m, n, some, dtype, true, acc + part, q + d, q_row, k, d * size, ahead, L);
            }
            if (d < dim) {
                few_dot(m, n, some, dtype, false, acc + part, q + d, q_row, k, d * size, ahead, dim - d);
            }
        }
        float sums[L];
        vec_store(sums, vec_sums(acc));
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            memcpy(s + i * FEW_KEYS + key, sums + i * n, sizeof(float) * (size_t)n);
        }
    }
}

VEC_INLINE void few_scores_as(const attn_dtype dtype, const few_state *state, int64_t row, int m,
                              const few_rows *keys, int64_t from, int64_t to)
{
    if (m == 4) {
        few_scores_of(FEW_GROUP >= 4 ? 4 : 1, dtype, state, row, keys, from, to);
    } else if (m == 2) {
        few_scores_of(FEW_GROUP >= 2 ? 2 : 1, dtype, state, row, keys, from, to);
    } else {
        few_scores_of(1, dtype, state, row, keys, from, to);
    }
}

static void few_scores(const few_state *state, int64_t row, int m, const few_rows *keys, int64_t from,
                       int64_t to)
{
    if (keys->dtype == ATTN_F32) {
        few_scores_as(ATTN_F32, state, row, m, keys, from, to);
    } else if (keys->dtype == ATTN_F16) {
        few_scores_as(ATTN_F16, state, row, m, keys, from, to);
    } else {
        few_scores_as(ATTN_BF16, state, row, m, keys, from, to);
    }
}

/* ---- softmax -------------------------------------------------------------------------------------- */

/* Scores from .. to of one row become weights, in whole vectors; max, sum and O move on.  A row without a
 * score yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN. */
static void few_softmax(const few_state *state, int64_t row, int64_t from, int64_t to)
{
    const int64_t begin = from / VEC_LANES * VEC_LANES, end = attn__ceil_div(to, VEC_LANES) * VEC_LANES;
    float *s = state->p + row * FEW_KEYS, *sums = state->sum + row * VEC_LANES;
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

/* ---- O += P V ------------------------------------------------------------------------------------- */

/* o[m rows][r vectors] += sum over keys from .. to of p v; the keys are summed apart from the older ones */
VEC_INLINE void few_strip(const int m, const int r, const attn_dtype dtype, const bool whole, float *o,
                          int64_t o_row, const float *p, const few_rows *values, int64_t byte, int64_t from,
                          int64_t to, int64_t width)
{
    const int64_t size = few_size(dtype);
    const char *v = values->at + from * values->token + byte;
    const int64_t ahead = values->ahead;
    vec acc[FEW_GROUP * FEW_DOTS];
    FLASH_UNROLL
    for (int i = 0; i < m * r; i++) {
        acc[i] = vec_set(0.0f);
    }
    for (int64_t j = from; j < to; j++, v += values->token) {
        FLASH_UNROLL
        for (int c = 0; c < r; c++) {
            const vec x = few_vec(v + c * VEC_LANES * size, dtype, whole, width);
            if (c * VEC_LANES * size % LINE == 0) {
                few_fetch(v + c * VEC_LANES * size, ahead);
            }
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                acc[i * r + c] = vec_fma(x, vec_set(p[i * FEW_KEYS + j]), acc[i * r + c]);
            }
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        FLASH_UNROLL
        for (int c = 0; c < r; c++) {
            float *at = o + i * o_row + c * VEC_LANES;
            vec_store(at, vec_add(vec_load(at), acc[i * r + c]));
        }
    }
}

/* In strips of at most VEC_LANES accumulators. */
VEC_INLINE void few_values_of(const int m, const attn_dtype dtype, const few_state *state, int64_t row,
                              const few_rows *values, int64_t from, int64_t to)
{
    enum { L = VEC_LANES };
    const int most = L / m < FEW_DOTS ? L / m : FEW_DOTS;
    const int64_t dim = state->block->dim_v, o_row = state->o_row, size = few_size(dtype);
    const float *p = state->p + row * FEW_KEYS;
    float *o = state->o + row * o_row;
    for (int64_t d = 0; d < dim;) {
        const int64_t left = (dim - d) / L;
        if (left >= most) {
            few_strip(m, most, dtype, true, o + d, o_row, p, values, d * size, from, to, L);
            d += most * L;
        } else if (most > 4 && left >= 4) {
            few_strip(m, most > 4 ? 4 : 1, dtype, true, o + d, o_row, p, values, d * size, from, to, L);
            d += 4 * L;
        } else if (most > 2 && left >= 2) {
            few_strip(m, most > 2 ? 2 : 1, dtype, true, o + d, o_row, p, values, d * size, from, to, L);
            d += 2 * L;
        } else if (left >= 1) {
            few_strip(m, 1, dtype, true, o + d, o_row, p, values, d * size, from, to, L);
            d += L;
        } else {
            few_strip(m, 1, dtype, false, o + d, o_row, p, values, d * size, from, to, dim - d);
            d = dim;
        }
    }
}

VEC_INLINE void few_values_as(const attn_dtype dtype, const few_state *state, int64_t row, int m,
                              const few_rows *values, int64_t from, int64_t to)
{
    if (m == 4) {
        few_values_of(FEW_GROUP >= 4 ? 4 : 1, dtype, state, row, values, from, to);
    } else if (m == 2) {
        few_values_of(FEW_GROUP >= 2 ? 2 : 1, dtype, state, row, values, from, to);
    } else {
        few_values_of(1, dtype, state, row, values, from, to);
    }
}

static void few_values(const few_state *state, int64_t row, int m, const few_rows *values, int64_t from,
                       int64_t to)
{
    if (from >= to) {
        return;
    }
    if (values->dtype == ATTN_F32) {
        few_values_as(ATTN_F32, state, row, m, values, from, to);
    } else if (values->dtype == ATTN_F16) {
        few_values_as(ATTN_F16, state, row, m, values, from, to);
    } else {
        few_values_as(ATTN_BF16, state, row, m, values, from, to);
    }
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
        for (; first < end; first += state.tile_k) {
            const int64_t count = attn__min(state.tile_k, end - first);
            few_tile tile = few_load(&state, span, first, count, end - first >= 2 * count);
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
