/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_few.inc.h - the forward of a few query rows of bf16 (decoding) at the speed of memory; a part of
 * flash_dot.inc.h, which includes it.
 *
 * METHOD.  The running maximum of flash_dot.inc.h, but K and V are multiplied where they lie:
 *
 *     Q^T    packed once a call, dims in pairs
 *     for each tile of keys:
 *         S^T[key][row]  = K Q^T           few_multiply_qk; up to FEW_PACKED rows are packed
 *         max, P = exp2(S - max), sum      vertical; then P is rounded and turned
 *         O[row][dim]    = O * fade + P V  few_multiply_pv
 *
 * A tile whose rows of K or V are not whole vectors side by side is copied first.
 *
 * MEMORY.  The L2 is asked for K and V of the next tile line by line while this one is computed, evenly, so
 * that memory never waits: FEW_SHARE lines of 16 during the products, the others during the softmax.
 *
 * NaN.  A value that is not finite gets into all rows and into its neighbours' dims.  O shows that, and then
 * the call is made again by panels, which have it where it belongs.
 *
 * COST.  See docs/perf/cpu_amx.md, "Few rows, bf16".
 */
enum {
    FEW_PACK = VEC_LANES / 2, /* packed rows that share vectors, at most */
    FEW_ROWS = PANEL,         /* of a call */
    FEW_BYTES = 16 * 1024,    /* of K or V in a tile: both and S stay in the L1; */
    FEW_BYTES_L1 = 8 * 1024,  /* the next tile's, too, where the L1 is asked for them: for up to */
    FEW_ROWS_L1 = 8,          /* so many rows, more need longer tiles */
    FEW_KEYS = ATTN__SQUARE,  /* of a square of P */
};

/* A tile, each of whose keys some row sees, those from whole_from to whole_to all rows; and what is asked for
 * meanwhile. */
typedef struct few_tile {
    const attn__span *span;
    int64_t first, count, padded;
    int64_t whole_from, whole_to;
    flash_band band;
    few_ahead ahead;
    int64_t step_lines, softmax_lines; /* a step of products, two keys' softmax */
} few_tile;

/* Dims of V, and of O, in whole pairs of vectors. */
static int64_t few_width(const dot_state *state)
{
    return round_up(state->width, PAIR_LANES);
}

static int64_t few_tile_keys(const dot_state *state)
{
    const int64_t bytes = attn__max(state->depth, few_width(state)) * (int64_t)sizeof(uint16_t);
    const bool near = state->block->count <= FEW_ROWS_L1 && attn__cpu_asks_l1();
    const int64_t keys = attn__max((near ? FEW_BYTES_L1 : FEW_BYTES) / bytes / FEW_KEYS, 1) * FEW_KEYS;
    return attn__min(keys, state->tile_k / attn__max(1, FEW_P_PARTS / 2) / FEW_KEYS * FEW_KEYS);
}

static few_tile few_begin_tile(const dot_state *state, const attn__span *span, int64_t first, int64_t count)
{
    const attn__block *block = state->block;
    few_tile tile = {.span = span, .first = first, .count = count, .padded = round_up(count, FEW_KEYS)};
    const int64_t row = block->first - first, last = row + block->count - 1;
    tile.band = (flash_band){block->first, block->lo, block->hi};
    tile.whole_from = attn__min(count, attn__max(0, last + block->lo));
    tile.whole_to = attn__max(tile.whole_from, attn__min(count, row + block->hi + 1));
    return tile;
}

/* What is asked for while this tile is computed: K and V of the next. */
static void few_look_ahead(const dot_state *state, few_tile *tile, few_ahead *values)
{
    const attn__span *span = tile->span;
    const attn__block *block = state->block;
    const int64_t size = sizeof(uint16_t), skip = tile->first + tile->count - span->first;
    *values = few_ahead_of((const uint16_t *)span->v + skip * span->v_token, tile->count, block->dim_v * size,
                           span->v_token * size, NULL);
    tile->ahead = few_ahead_of((const uint16_t *)span->k + skip * span->k_token, tile->count,
                               block->dim_qk * size, span->k_token * size, values);
    const int64_t lines = (state->depth + few_width(state)) * size * FEW_KEYS / LINE; /* of 32 keys */
    const int64_t rows = round_up(block->count, block->count <= FEW_PACKED ? FEW_PV_ROWS : VEC_LANES);
    const int64_t steps = rows * state->depth + round_up(block->count, FEW_PV_ROWS) * few_width(state) *
                                                    FEW_STEP_COST; /* 256 to a step */
    tile->step_lines = attn__ceil_div(lines * FEW_SHARE * 256 / 16, steps);
    tile->softmax_lines = lines * (16 - FEW_SHARE) / 16 / (FEW_KEYS / PAIR);
}

/* ---- S ------------------------------------------------------------------------------------------- */

/* How many of `rows` packed rows share vectors from row `at` on: FEW_PACK, then what is left. */
VEC_INLINE int few_pack_at(const int rows, const int at)
{
    return rows - at < FEW_PACK ? rows - at : FEW_PACK;
}

/* S of the packed rows from `first` on. */
static float *few_packed_scores(const dot_state *state, const few_tile *tile, int first)
{
    return state->s + first * tile->padded;
}

/* Of the keys from .. to, `pack` packed rows from `first` on: -inf where a row does not see one, or there is
 * none. */
static void few_hide_packed(int pack, int first, const dot_state *state, const few_tile *tile, int64_t from,
                            int64_t to)
{
    const int64_t keys = PANEL / pack;
    float *s = few_packed_scores(state, tile, first);
    for (int64_t key = from; key < to; key++) {
        float *at = s + key / keys * PANEL + key % 2 * VEC_LANES + key % keys / 2 * pack;
        for (int row = 0; row < pack; row++) {
            const int64_t apart = tile->first + key - tile->band.row - first - row;
            if (key >= tile->count || apart < tile->band.lo || apart > tile->band.hi) {
                at[row] = -INFINITY;
            }
        }
    }
}

static void few_mask_packed(int pack, int first, const dot_state *state, const few_tile *tile)
{
    few_hide_packed(pack, first, state, tile, 0, tile->whole_from);
    few_hide_packed(pack, first, state, tile, tile->whole_to, tile->padded);
}

VEC_INLINE void few_scores(const int n, const int pack, const dot_state *state, few_tile *tile)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    const int64_t depth = state->depth;
    const uint16_t *k = (const uint16_t *)span->k + (tile->first - span->first) * span->k_token;
    few_qk of = {.k = k,
                 .q = state->q,
                 .k_row = span->k_token,
                 .s = state->s,
                 .rows = block->count,
                 .keys = tile->count,
                 .n = n,
                 .depth = depth,
                 .ahead = &tile->ahead,
                 .lines = tile->step_lines};
    if (span->k_dim != 1 || block->dim_qk != depth || tile->count % VEC_LANES != 0) {
        for (int64_t j = 0; j < tile->count; j++) {
            dot_pack_row(state->k + j * depth, 0, PAIR_LANES, k + j * span->k_token, ATTN_BF16, span->k_dim,
                         block->dim_qk, depth, NULL);
        }
        of.k = state->k, of.k_row = depth;
    }
    few_multiply_qk(&of);
    if (pack > 0) {
        for (int at = 0; at < pack; at += FEW_PACK) {
            few_mask_packed(few_pack_at(pack, at), at, state, tile);
        }
        return;
    }
    mask_scores(n, state->s, PANEL, &tile->band, tile->first, tile->whole_from);
    mask_scores(n, state->s + tile->whole_to * PANEL, PANEL, &tile->band, tile->first + tile->whole_to,
                tile->count - tile->whole_to);
    hide_scores(state->s + tile->count * PANEL, tile->padded - tile->count);
}

/* ---- P ------------------------------------------------------------------------------------------- */

/* O of the rows first .. last - 1 shrinks by fade[]. */
static void few_fade(const dot_state *state, int64_t first, int64_t last, const float *fade)
{
    const int64_t width = few_width(state);
    for (int64_t row = first; row < last; row++) {
        float *o = state->ot + row * width;
        for (int64_t d = 0; d < width; d += VEC_LANES) {
            vec_store(o + d, vec_mul(vec_load(o + d), vec_set(fade[row - first])));
        }
    }
}

/* max moves on if a score of `top` is 2^SLACK above it, and O and sum shrink: of `rows` rows from `first` on,
 * whose lanes begin at 2 * first.  less: what to subtract. */
VEC_INLINE void few_raise(const int n, const int first, const int rows, const dot_state *state,
                          const vec *top, vec *less)
{
    const vec none = vec_set(-INFINITY), zero = vec_set(0.0f), factor = vec_set(state->factor);
    float fade[PANEL];
    vec_mask moved = 0;
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        const int lane = 2 * first + c * VEC_LANES;
        float *max = state->max + lane, *sum = state->sum + lane;
        const vec old = vec_load(max), high = vec_mul(top[c], factor);
        const vec_mask above = vec_less(vec_add(old, vec_set(SLACK)), high);
        const vec now = vec_select(above, high, old);
        less[c] = vec_select(vec_less(none, now), now, zero);
        const vec shrink = flash_exp2(vec_sub(old, less[c]));
        moved |= above;
        vec_store(max, now);
        vec_store(fade + c * VEC_LANES, shrink);
        vec_store(sum, vec_mul(vec_load(sum), vec_select(above, shrink, vec_set(1.0f))));
    }
    if (moved != 0) {
        few_fade(state, first, attn__min(first + rows, state->block->count), fade);
    }
}

/* Scores of the tile become P, in pairs of keys and then turned for few_multiply_pv, and its sums. */
VEC_INLINE void few_weights(const int n, const dot_state *state, few_tile *tile)
{
    const vec factor = vec_set(state->factor);
    const int64_t p_row = few_tile_keys(state);
    vec less[2], sum[2], top[2] = {vec_set(-INFINITY), vec_set(-INFINITY)};
    raise_max(n, state->s, PANEL, tile->padded, top);
    few_raise(n, 0, n * VEC_LANES, state, top, less);
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        sum[c] = vec_set(0.0f);
    }
    for (int64_t j = 0; j < tile->padded; j += FEW_KEYS) {
        float *s = state->s + j * PANEL;
        for (int64_t i = 0; i < FEW_KEYS; i += PAIR) {
            FLASH_UNROLL
            for (int c = 0; c < n; c++) {
                float *at = s + i * PANEL + c * VEC_LANES;
                const vec even = weigh(1, at, factor, less[c]), odd = weigh(1, at + PANEL, factor, less[c]);
                dot_store_pairs(1, (void *)at, 0, even, odd);
                sum[c] = vec_add(sum[c], vec_add(even, odd));
            }
            few_ask(&tile->ahead, tile->softmax_lines);
        }
        FLASH_UNROLL
        for (int c = 0; c < n; c++) {
            few_turn_weights(state->p + c * VEC_LANES * p_row + j, p_row, (void *)(s + c * VEC_LANES),
                             PAIR * PAIR * PANEL);
        }
    }
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        float *at = state->sum + c * VEC_LANES;
        vec_store(at, vec_add(vec_load(at), sum[c]));
    }
}

/* The greatest score of each of `pack` packed rows, in all lanes of the row. */
VEC_INLINE vec few_top_packed(const int pack, const float *s, const few_tile *tile)
{
    vec top[2] = {vec_set(-INFINITY), vec_set(-INFINITY)};
    raise_max(2, s, PANEL, tile->padded * pack / PANEL, top);
    vec most = vec_max(top[0], top[1]);
    most = vec_max(most, _mm512_shuffle_f32x4(most, most, 0x4e));
    return pack == 8 ? most : vec_max(most, _mm512_shuffle_f32x4(most, most, 0xb1));
}

/* few_weights of `pack` packed rows from `first` on, one of `all`: a row's lanes share its maximum, and each
 * has a sum. */
VEC_INLINE void few_weights_packed(const int pack, const int first, const int all, const dot_state *state,
                                   few_tile *tile)
{
    float *scores = few_packed_scores(state, tile, first), *sums = state->sum + 2 * first;
    uint16_t *p = state->p + first * few_tile_keys(state);
    const vec factor = vec_set(state->factor), top = few_top_packed(pack, scores, tile);
    vec less, sum = vec_set(0.0f);
    few_raise(1, first, pack, state, &top, &less);
    for (int64_t j = 0; j < tile->padded; j += FEW_KEYS) {
        float *s = scores + j * pack;
        FLASH_UNROLL
        for (int i = 0; i < pack; i++) {
            const float *at = s + i * PANEL;
            const vec even = weigh(1, at, factor, less), odd = weigh(1, at + VEC_LANES, factor, less);
            dot_store_pairs(1, (void *)(s + i * VEC_LANES), 0, even, odd); /* [pair of keys][pack] */
            sum = vec_add(sum, vec_add(even, odd));
            few_ask(&tile->ahead, tile->softmax_lines * VEC_LANES / all);
        }
        dot_transpose_cols(pack, p + j, few_tile_keys(state), (const void *)s, PAIR * pack);
    }
    vec_store(sums, vec_add(vec_load(sums), sum));
}

/* ---- O ------------------------------------------------------------------------------------------- */

/* A copy of the values, with zeros up to whole vectors and squares. */
static void few_copy_values(const dot_state *state, const few_tile *tile)
{
    const attn__span *span = tile->span;
    const int64_t width = few_width(state);
    const uint16_t *v = (const uint16_t *)span->v + (tile->first - span->first) * span->v_token;
    for (int64_t j = 0; j < tile->padded; j++) {
        dot_pack_row(state->v + j * width, 0, PAIR_LANES, v + j * span->v_token, ATTN_BF16, span->v_dim,
                     j < tile->count ? state->block->dim_v : 0, width, NULL);
    }
}

static void few_values(const dot_state *state, few_tile *tile)
{
    const attn__span *span = tile->span;
    const int64_t width = few_width(state);
    few_pv of = {.p = state->p,
                 .v = (const uint16_t *)span->v + (tile->first - span->first) * span->v_token,
                 .p_row = few_tile_keys(state),
                 .v_row = span->v_token,
                 .o = state->ot,
                 .o_row = width,
                 .rows = state->block->count,
                 .keys = tile->padded,
                 .dims = width,
                 .ahead = &tile->ahead,
                 .lines = tile->step_lines};
    if (span->v_dim != 1 || state->block->dim_v != width || tile->count != tile->padded) {
        few_copy_values(state, tile);
        of.v = state->v, of.v_row = width;
    }
    few_multiply_pv(&of);
    few_ask(&tile->ahead, INT64_MAX);
}

/* ---- one call ------------------------------------------------------------------------------------ */

/* Returns whether all is finite. */
static bool few_write_row(float *o, const float *from, vec factor, int64_t dim)
{
    enum { NAN_OR_INF = 0x99 };
    const __m512i first = _mm512_loadu_si512(few_order);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(VEC_LANES / 2));
    __mmask16 odd = 0;
    for (int64_t d = 0; d < dim; d += PAIR_LANES) {
        const int64_t left = dim - d;
        const uint32_t real = left < PAIR_LANES ? (UINT32_C(1) << left) - 1 : UINT32_MAX;
        const vec low = vec_mul(vec_load(from + d), factor);
        const vec high = vec_mul(vec_load(from + d + VEC_LANES), factor);
        odd |= _mm512_fpclass_ps_mask(low, NAN_OR_INF) | _mm512_fpclass_ps_mask(high, NAN_OR_INF);
        _mm512_mask_storeu_ps(o + d, (__mmask16)real, _mm512_permutex2var_ps(low, first, high));
        _mm512_mask_storeu_ps(o + d + VEC_LANES, (__mmask16)(real >> VEC_LANES),
                              _mm512_permutex2var_ps(low, second, high));
    }
    return odd == 0;
}

static bool few_write(const dot_state *state)
{
    const attn__block *block = state->block;
    bool finite = true;
    for (int64_t row = 0; row < block->count; row++) {
        float *o = block->half_o != NULL ? state->wide : block->o + row * block->o_stride;
        finite &= few_write_row(o, state->ot + row * few_width(state), vec_set(finish_row(state, row)),
                                block->dim_v);
        if (block->half_o != NULL) {
            attn_from_f32((uint16_t *)block->half_o + row * block->o_stride, block->half_dtype, 1, o,
                          block->dim_v);
        }
    }
    return finite;
}

VEC_INLINE void few_span(const int n, const int pack, const dot_state *state, const attn__span *span)
{
    const attn__block *block = state->block;
    const int64_t keys = few_tile_keys(state);
    int64_t first = attn__max(span->first, block->first + block->lo);
    const int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
    for (; first < end; first += keys) {
        few_tile tile = few_begin_tile(state, span, first, attn__min(keys, end - first));
        few_ahead values;
        few_look_ahead(state, &tile, &values);
        few_scores(n, pack, state, &tile);
        if (pack > 0) {
            /* clang unrolls only what ends at a number */
            FLASH_UNROLL
            for (int at = 0; at < VEC_LANES; at += FEW_PACK) {
                if (at < pack) {
                    few_weights_packed(few_pack_at(pack, at), at, pack, state, &tile);
                }
            }
        } else {
            few_weights(n, state, &tile);
        }
        few_values(state, &tile);
    }
}

/* Are these all rows of a short sequence?  The last ones of a long one keep the bits that they have where its
 * blocks are cut elsewhere (kernel.h), so those are a panel's. */
static bool few_suits(const attn__block *block)
{
    return block->dtype == ATTN_BF16 && block->first == 0 && block->count <= FEW_ROWS;
}

/* max and sum of each of `pack` packed rows from `first` on, from their lanes to where rows have them. */
static void few_join_lanes(int pack, int first, const dot_state *state)
{
    float *max = state->max + 2 * first, *sum = state->sum + 2 * first;
    for (int lane = pack; lane < VEC_LANES; lane++) {
        sum[lane % pack] += sum[lane];
    }
    memmove(state->max + first, max, sizeof *max * (size_t)pack);
    memmove(state->sum + first, sum, sizeof *sum * (size_t)pack);
}

VEC_INLINE void few_spans(const int n, const int pack, const dot_state *state)
{
    for (int64_t i = 0; i < state->block->span_count; i++) {
        few_span(n, pack, state, &state->block->spans[i]);
    }
    for (int at = 0; at < pack; at += FEW_PACK) {
        few_join_lanes(few_pack_at(pack, at), at, state);
    }
}

/* Returns whether O is right: whether all of it is finite. */
static bool few_forward(const dot_state *state)
{
    const int64_t rows = state->block->count;
    clear(state);
    memset(state->ot, 0, sizeof(float) * (size_t)(PANEL * round_up(state->width, PAIR_LANES)));
    pack_queries(state, rows <= VEC_LANES ? VEC_LANES : PANEL);
    few_pack_queries(state->q, state->depth, rows);
    dot_begin();
    if (rows <= 4 && rows <= FEW_PACKED) {
        few_spans(1, 4, state);
    } else if (rows <= 8 && rows <= FEW_PACKED) {
        few_spans(1, 8, state);
    } else if (rows <= FEW_PACKED) {
        few_spans(1, 12, state);
    } else if (rows <= VEC_LANES) {
        few_spans(1, 0, state);
    } else {
        few_spans(2, 0, state);
    }
    dot_end();
    return few_write(state);
}
