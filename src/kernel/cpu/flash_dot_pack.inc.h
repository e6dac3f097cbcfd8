/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_pack.inc.h - the scratch of flash_dot.inc.h, which includes it, the operands in it, Q^T, K and
 * V^T in parts of bf16, and O out of it.
 *
 * METHOD.  Rows are cut into parts (dot_pack.h) 32 at a time, then transposed 16 x 16 pairs at a time: Q^T
 * with its dims in pairs; V with keys in pairs, and those transposed.
 *
 * KEPT.  Where the tiles of all keys fit, calls with the same keys share them.  A call by itself is faster
 * with one tile after the other in one place, since less of the L2 is used.
 *
 * COST.  A call packs its queries once and each tile of keys once: about 5 operations a vector and part.
 */
enum {
    TILE_Q = 512,                         /* queries of a call, at most */
    TILE_K = 256,                         /* keys of a tile of one part, at most; half of that of more */
    KEY_STEP = 32,                        /* the depth of a tile product */
    KEY_BYTES = 512 * 1024,               /* K and V^T of a tile, in L2 */
    QUERY_BYTES = 640 * 1024,             /* Q^T and O^T of a call, in L2 */
    KEPT_BYTES = 1024 * 1024,             /* K and V^T of all tiles, if they are kept */
    WEIGHT_PARTS = 3,                     /* of P, unless the inputs are one part */
    SQUARE = ATTN__SQUARE * ATTN__SQUARE, /* elements from 32 of a row to the next */
};

/* A tile of keys; what of it is not finite. */
typedef struct dot_tile {
    const attn__span *span;
    int64_t first, count;
    int64_t padded; /* count up to whole steps */
    bool odd_k, odd_v;
    bool key_odd[TILE_K], value_odd[TILE_K];
} dot_tile;

typedef struct dot_state {
    const attn__block *block;
    int parts, q_parts, p_parts;
    int64_t panels, tile_k;
    int64_t depth, width; /* dim_qk and dim_v up to whole tiles */
    float factor;         /* of scores: they become powers of 2; 1 if that is folded into Q */
    uint16_t *q;          /* [panel][part][depth / 2][PANEL][2] */
    float *ot;            /* [panel][width][PANEL], or O of few rows */
    float *max, *sum;     /* [panel][PANEL] */
    bool *odd;            /* [panel]: a query is not finite, in more parts than one */
    bool *begun;          /* [panel]: O^T holds something */
    float *s;             /* [2][tile_k][PANEL] */
    uint16_t *p;          /* [2][part][tile_k / 2][PANEL][2] */
    float *fresh;         /* [2][width][PANEL]: V^T P^T of one tile */
    bool keeps;           /* there are tiles for all keys, else there is one */
    int64_t *kept;        /* how many are packed */
    dot_tile *tiles;      /* [tiles] */
    uint16_t *keys;       /* [tiles]: k and v of each */
    uint16_t *k;          /* [part], tile_k keys by depth in squares */
    uint16_t *v;          /* [part], width by tile_k keys in squares */
    int64_t v_part;       /* elements of a part of v */
    uint16_t *rows;       /* [part][32][longest dim]: queries, or [part][16][longest dim][2]: values */
    float *wide, *other;  /* rows in fp32 */
} dot_state;

static int64_t round_up(int64_t x, int64_t step)
{
    return attn__ceil_div(x, step) * step;
}

/* `count` bf16 from the scratch. */
static uint16_t *take_bf16(float *scratch, size_t *used, int64_t count)
{
    return (void *)take(scratch, used, attn__ceil_div(count, 2));
}

/* bf16 of a tile's K and V^T. */
static int64_t tile_elements(const dot_state *state)
{
    return state->parts * (state->tile_k * state->depth + state->v_part);
}

static void use_tile(dot_state *state, int64_t i)
{
    state->k = state->keys + i * tile_elements(state);
    state->v = state->k + state->parts * state->tile_k * state->depth;
}

/* The tiles of so many keys, or one for them all, first in the scratch, so that they stay where they are
 * whatever the rows. */
static void lay_out_keys(dot_state *state, float *scratch, size_t *used, int64_t keys)
{
    const int64_t tiles = attn__max(1, attn__ceil_div(keys, state->tile_k));
    state->kept = (void *)take(scratch, used, sizeof *state->kept / sizeof(float));
    state->tiles = (void *)take(scratch, used, tiles * attn__ceil_div(sizeof(dot_tile), sizeof(float)));
    state->keys = take_bf16(scratch, used, tiles * tile_elements(state));
    use_tile(state, 0);
}

/* Lays the scratch out for so many rows, and keys that are kept, or 0; returns its floats. */
static size_t lay_out(dot_state *state, float *scratch, attn_dtype dtype, int64_t rows, int64_t keys,
                      int64_t dim_qk, int64_t dim_v)
{
    size_t used = 0;
    state->parts = dot_parts_of(dtype);
    state->q_parts = state->parts == 1 ? 1 : WEIGHT_PARTS;
    state->p_parts = state->q_parts;
    state->panels = attn__ceil_div(rows, PANEL);
    state->depth = round_up(dim_qk, PAIR_LANES);
    state->width = round_up(dim_v, VEC_LANES);
    const int64_t key_bytes = (int64_t)sizeof(uint16_t) * state->parts * (state->depth + state->width);
    state->tile_k =
        attn__min(state->parts == 1 ? TILE_K : TILE_K / 2, KEY_BYTES / key_bytes / KEY_STEP * KEY_STEP);
    state->v_part = state->tile_k * round_up(state->width, ATTN__SQUARE);
    lay_out_keys(state, scratch, &used, keys);
    const int64_t lanes = state->panels * PANEL, longest = round_up(attn__max(dim_qk, dim_v), PAIR_LANES);
    state->q = take_bf16(scratch, &used, lanes * state->q_parts * state->depth);
    state->ot = take(scratch, &used, lanes * round_up(state->width, PAIR_LANES));
    state->max = take(scratch, &used, lanes);
    state->sum = take(scratch, &used, lanes);
    state->odd = (void *)take(scratch, &used, state->panels);
    state->begun = (void *)take(scratch, &used, state->panels);
    state->s = take(scratch, &used, 2 * state->tile_k * PANEL);
    state->p = take_bf16(scratch, &used, 2 * state->p_parts * state->tile_k * PANEL);
    state->fresh = take(scratch, &used, 2 * state->width * PANEL);
    state->rows = take_bf16(scratch, &used, WEIGHT_PARTS * KEY_STEP * longest);
    state->wide = take(scratch, &used, longest);
    state->other = take(scratch, &used, longest);
    return used;
}

/* ---- packing ------------------------------------------------------------------------------------- */

static const float *key_row(const dot_state *state, const dot_tile *tile, int64_t j, float *copy)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    return dot_dense_row(copy, span->k, (tile->first + j - span->first) * span->k_token, block->dtype,
                         span->k_dim, block->dim_qk);
}

static const float *value_row(const dot_state *state, const dot_tile *tile, int64_t j, float *copy)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    return dot_dense_row(copy, span->v, (tile->first + j - span->first) * span->v_token, block->dtype,
                         span->v_dim, block->dim_v);
}

/* Query `row`, with what is folded into it: its sign, or all of the scale. */
static void query_row(const dot_state *state, float *to, int64_t row)
{
    const attn__block *block = state->block;
    const float factor = state->parts > 1      ? (float)((double)block->scale * 1.44269504088896340736)
                         : block->scale < 0.0f ? -1.0f
                                               : 1.0f;
    widen(to, block->q, row * block->q_token, block->dtype, block->q_dim, block->dim_qk);
    for (int64_t d = 0; d < block->dim_qk; d++) {
        to[d] *= factor;
    }
}

/* VEC_LANES queries from `row` on, *stride apart, in parts VEC_LANES * depth apart: where they lie if nothing
 * is to be changed in them, else copied; those that are not there are 0. */
static const uint16_t *query_lines(const dot_state *state, int64_t row, int64_t *stride)
{
    const attn__block *block = state->block;
    const int64_t depth = state->depth;
    const bool dense = block->q_dim == 1 && block->dim_qk == depth && row + VEC_LANES <= block->count;
    if (state->parts == 1 && dense && !(block->scale < 0.0f)) {
        *stride = block->q_token;
        return (const uint16_t *)block->q + row * block->q_token;
    }
    *stride = depth;
    for (int64_t line = 0; line < VEC_LANES; line++) {
        const int64_t dim = row + line < block->count ? block->dim_qk : 0;
        if (dim > 0) {
            query_row(state, state->wide, row + line);
            state->odd[row / PANEL] |= state->parts > 1 && !all_finite(state->wide, dim);
        }
        dot_split(state->q_parts, state->rows + line * depth, VEC_LANES * depth, PAIR_LANES, state->wide, dim,
                  depth);
    }
    return state->rows;
}

/* Q^T of all panels, of each the first `lanes`; those without a query are 0. */
static void pack_queries(const dot_state *state, int64_t lanes)
{
    const int64_t depth = state->depth;
    for (int64_t panel = 0; panel < state->panels; panel++) {
        state->odd[panel] = false;
        for (int64_t lane = 0; lane < lanes; lane += VEC_LANES) {
            uint16_t *to = state->q + panel * PANEL * state->q_parts * depth + PAIR * lane;
            int64_t stride;
            const uint16_t *from = query_lines(state, panel * PANEL + lane, &stride);
            for (int part = 0; part < state->q_parts;
                 part++, to += PANEL * depth, from += VEC_LANES * depth) {
                for (int64_t d = 0; d < depth; d += PAIR_LANES) {
                    dot_transpose(to + d * PANEL, PAIR * PANEL, from + d, stride);
                }
            }
        }
    }
}

/* Whether `count` bf16 are finite, each 32 `step` after the 32 before; count % 32 = 0. */
static bool finite_row(const uint16_t *row, int64_t step, int64_t count)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 odd = 0;
    for (int64_t d = 0; d < count; d += PAIR_LANES, row += step) {
        odd |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(row), exponent), exponent);
    }
    return odd == 0;
}

/* Keys of the tile. */
static void pack_keys(const dot_state *state, dot_tile *tile)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    const int64_t depth = state->depth, part = state->tile_k * depth;
    for (int64_t j = 0; j < tile->padded; j++) {
        const bool real = j < tile->count;
        const int64_t at = (tile->first + j - span->first) * span->k_token;
        uint16_t *to = state->k + attn__dot_place(j, 0, KEY_STEP * depth);
        dot_pack_row(to, part, SQUARE, real ? attn__element(span->k, block->dtype, at) : state->wide,
                     block->dtype, span->k_dim, real ? block->dim_qk : 0, depth, state->wide);
        tile->key_odd[j] = state->parts > 1 && !finite_row(to, SQUARE, depth);
        tile->odd_k = tile->odd_k || tile->key_odd[j];
    }
}

/* Two rows of values as a row of pairs. */
static void pair_values(const dot_state *state, uint16_t *to, const float *x, const float *y)
{
    const int64_t width = state->width, dim = state->block->dim_v, part = KEY_STEP * width;
    if (state->parts == 1) {
        dot_split_pairs(1, to, part, x, y, dim, width);
    } else if (state->parts == 2) {
        dot_split_pairs(2, to, part, x, y, dim, width);
    } else {
        dot_split_pairs(3, to, part, x, y, dim, width);
    }
}

/* Values j and j + 1 as a row of pairs; zeros for those that are not there or not finite. */
static void pack_value_pair(const dot_state *state, dot_tile *tile, int64_t j, uint16_t *to)
{
    const attn__span *span = tile->span;
    const int64_t dim = state->block->dim_v;
    if (state->parts == 1 && span->v_dim == 1 && dim == state->width && j + 1 < tile->count) {
        const uint16_t *from = (const uint16_t *)span->v + (tile->first + j - span->first) * span->v_token;
        tile->value_odd[j] = tile->value_odd[j + 1] = false;
        if (dot_pair_rows(to, from, from + span->v_token, dim)) {
            return;
        }
    }
    const float *row[PAIR];
    float *copy[PAIR] = {state->wide, state->other};
    for (int i = 0; i < PAIR; i++) {
        const bool real = j + i < tile->count;
        row[i] = real ? value_row(state, tile, j + i, copy[i]) : NULL;
        tile->value_odd[j + i] = real && !all_finite(row[i], dim);
        tile->odd_v = tile->odd_v || tile->value_odd[j + i];
        if (!real || tile->value_odd[j + i]) {
            memset(copy[i], 0, sizeof(float) * (size_t)dim);
            row[i] = copy[i];
        }
    }
    pair_values(state, to, row[0], row[1]);
}

/* V^T of the tile. */
static void pack_values(const dot_state *state, dot_tile *tile)
{
    const int64_t width = state->width;
    for (int64_t j = 0; j < tile->padded; j += KEY_STEP) {
        for (int64_t line = 0; line < KEY_STEP; line += PAIR) {
            pack_value_pair(state, tile, j + line, state->rows + line * width);
        }
        for (int64_t part = 0; part < state->parts; part++) {
            const uint16_t *from = state->rows + part * KEY_STEP * width;
            uint16_t *to = state->v + part * state->v_part;
            for (int64_t d = 0; d < width; d += VEC_LANES) {
                dot_transpose(to + attn__dot_place(d, j, KEY_STEP * state->tile_k), ATTN__SQUARE,
                              from + PAIR * d, PAIR * width);
            }
        }
    }
}

/* The span's tile of keys from `first` on, up to `end` or, where tiles are kept, up to the span's end: other
 * rows may see more of it. */
static dot_tile *load_tile(dot_state *state, const attn__span *span, int64_t first, int64_t end)
{
    const int64_t i = state->keeps ? (first - span->first) / state->tile_k : 0;
    dot_tile *tile = &state->tiles[i];
    use_tile(state, i);
    if (state->keeps && i < *state->kept) {
        tile->span = span;
        return tile;
    }
    const int64_t last = state->keeps ? span->first + span->count : end;
    *tile = (dot_tile){.span = span, .first = first, .count = attn__min(state->tile_k, last - first)};
    tile->padded = round_up(tile->count, KEY_STEP);
    pack_keys(state, tile);
    pack_values(state, tile);
    *state->kept = state->keeps ? i + 1 : 0;
    return tile;
}

/* ---- the sums ------------------------------------------------------------------------------------ */

/* But for O^T, which begins with its panel's first tile. */
static void clear(const dot_state *state)
{
    const int64_t lanes = state->panels * PANEL;
    memset(state->begun, false, sizeof(bool) * (size_t)state->panels);
    memset(state->sum, 0, sizeof(float) * (size_t)lanes);
    for (int64_t i = 0; i < lanes; i++) {
        state->max[i] = -INFINITY;
    }
}

/* 16 dims of 16 rows of O from O^T, element `at` on; lanes that are not there are left out. */
static void write_square(const attn__block *block, int64_t at, const float *ot, const float *inverse,
                         int64_t rows, int64_t dims)
{
    float square[VEC_LANES * VEC_LANES];
    const __mmask16 real = (__mmask16)((1u << dims) - 1u);
    dot_transpose((void *)square, PAIR_LANES, (const void *)ot, PAIR * PANEL);
    for (int64_t i = 0; i < rows; i++, at += block->o_stride) {
        const vec x = vec_mul(vec_load(square + i * VEC_LANES), vec_set(inverse[i]));
        if (block->half_o != NULL) {
            _mm256_mask_storeu_epi16((uint16_t *)block->half_o + at, real, dot_round(x, block->half_dtype));
        } else {
            _mm512_mask_storeu_ps(block->o + at, real, x);
        }
    }
}

/* Writes lse = ln(2) * (max + log2(sum)) and returns 1 / sum; a row that saw no key has max = -inf and sum =
 * 0, which gives 0 and lse = -inf. */
static float finish_row(const dot_state *state, int64_t row)
{
    const float sum = state->sum[row];
    const double log = (double)state->max[row] + log2((double)sum);
    state->block->lse[row] = (float)(log * 0.69314718055994530942);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

/* O = O^T / sum */
static void write_rows(const dot_state *state)
{
    const attn__block *block = state->block;
    for (int64_t row = 0; row < block->count; row += VEC_LANES) {
        const int64_t rows = attn__min(VEC_LANES, block->count - row), panel = row / PANEL;
        float *ot = state->ot + panel * state->width * PANEL + row % PANEL;
        if (!state->begun[panel]) { /* it saw no key */
            memset(ot - row % PANEL, 0, sizeof *ot * (size_t)(state->width * PANEL));
        }
        float inverse[VEC_LANES];
        for (int64_t i = row; i < row + rows; i++) {
            inverse[i - row] = finish_row(state, i);
        }
        for (int64_t d = 0; d < block->dim_v; d += VEC_LANES) {
            write_square(block, row * block->o_stride + d, ot + d * PANEL, inverse, rows,
                         attn__min(VEC_LANES, block->dim_v - d));
        }
    }
}
