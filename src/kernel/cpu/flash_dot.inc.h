/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot.inc.h - exact attention of one query block as flash.inc.h computes it, with both products made by
 * an instruction set's products of bf16 matrices.
 *
 * METHOD.  Panels of 32 queries along the lanes, everything transposed, tiles of keys, a running maximum:
 *
 *     Q^T    packed once a call, dims in pairs
 *     for each tile of keys:
 *         K, V^T packed: K [key][dim], V^T [dim][key]
 *         for each panel:
 *             S^T[key][query] = K Q^T                     dot_product
 *             max, P = exp2(S - max), sum                 vertical; P leaves as bf16, keys in pairs
 *             O^T[dim][query] = O^T * fade + V^T P^T      dot_product
 *
 * PARTS.  bf16 is one part; its weights P are rounded to bf16, their sum is not.  fp16 is two parts, fp32 is
 * three (dot_pack.h): products of these and of P in three parts, with the pairs of parts that matter, are as
 * exact as FMAs in fp32.  There the scale is folded into Q; one part would be rounded by it, so its scores
 * are scaled in the softmax.
 *
 * NaN.  The values of a key that is not finite are packed as zeros and added lane by lane under the mask.  In
 * one part tiles carry infinity and NaN as FMAs do.  In more parts x = inf has the parts (inf, 0, 0), and 0 *
 * inf is NaN: scores of such queries and keys are made again by plain loops.
 *
 * COST.  See docs/perf/cpu_amx.md.
 *
 * PARAMETERS.  FLASH_* as in flash.inc.h, DOT_MOST_PARTS.  Before it, vec_avx512.h and flash_common.inc.h,
 * and a dot_<isa>.h for dot_begin, dot_end, dot_product and probe_dot_peak.
 */
#include "kernel/cpu/dot_pack.h"

enum {
    TILE_Q = 256,             /* queries of a call, at most */
    TILE_K = 128,             /* keys of a tile, at most: S^T and P^T of a panel are 24 KiB of L1 */
    KEY_STEP = 32,            /* the depth of a tile product */
    QUERY_BYTES = 768 * 1024, /* Q^T and O^T of a call, in L2 */
    WEIGHT_PARTS = 3,         /* of P, unless the inputs are one part */
};

typedef struct dot_state {
    const attn__block *block;
    int parts, q_parts, p_parts;
    int64_t panels;
    int64_t depth, width; /* dim_qk and dim_v up to whole tiles */
    float factor;         /* of scores: they become powers of 2; 1 if that is folded into Q */
    uint16_t *q;          /* [panel][part][depth / 2][PANEL][2] */
    float *ot;            /* [panel][width][PANEL] */
    float *max, *sum;     /* [panel][PANEL] */
    bool *odd;            /* [panel]: a query is not finite, in more parts than one */
    float *s;             /* [TILE_K][PANEL] */
    uint16_t *p;          /* [part][TILE_K / 2][PANEL][2] */
    float *fresh;         /* [width][PANEL]: V^T P^T of one tile */
    uint16_t *k;          /* [part][TILE_K][depth] */
    uint16_t *v;          /* [part][width][TILE_K] */
    uint16_t *rows;       /* [part][KEY_STEP][longest dim] rows on their way */
    uint16_t *pairs;      /* [KEY_STEP / 2][longest dim][2] */
    float *wide, *other;  /* rows in fp32 */
} dot_state;

/* A tile of keys; what of it is not finite. */
typedef struct dot_tile {
    const attn__span *span;
    int64_t first, count;
    int64_t padded; /* count up to whole steps */
    bool odd_k, odd_v;
    bool key_odd[TILE_K], value_odd[TILE_K];
} dot_tile;

static int64_t round_up(int64_t x, int64_t step)
{
    return attn__ceil_div(x, step) * step;
}

/* `count` bf16 from the scratch. */
static uint16_t *take_bf16(float *scratch, size_t *used, int64_t count)
{
    return (void *)take(scratch, used, attn__ceil_div(count, 2));
}

/* Lays the scratch out; returns its floats. */
static size_t lay_out(dot_state *state, float *scratch, attn_dtype dtype, int64_t rows, int64_t dim_qk,
                      int64_t dim_v)
{
    size_t used = 0;
    state->parts = dot_parts_of(dtype);
    state->q_parts = state->parts == 1 ? 1 : WEIGHT_PARTS;
    state->p_parts = state->q_parts;
    state->panels = attn__ceil_div(rows, PANEL);
    state->depth = round_up(dim_qk, PAIR_LANES);
    state->width = round_up(dim_v, VEC_LANES);
    const int64_t lanes = state->panels * PANEL, longest = round_up(attn__max(dim_qk, dim_v), PAIR_LANES);
    state->q = take_bf16(scratch, &used, lanes * state->q_parts * state->depth);
    state->ot = take(scratch, &used, lanes * state->width);
    state->max = take(scratch, &used, lanes);
    state->sum = take(scratch, &used, lanes);
    state->odd = (void *)take(scratch, &used, state->panels);
    state->s = take(scratch, &used, TILE_K * PANEL);
    state->p = take_bf16(scratch, &used, state->p_parts * TILE_K * PANEL);
    state->fresh = take(scratch, &used, state->width * PANEL);
    state->k = take_bf16(scratch, &used, state->parts * TILE_K * state->depth);
    state->v = take_bf16(scratch, &used, state->parts * TILE_K * state->width);
    state->rows = take_bf16(scratch, &used, WEIGHT_PARTS * KEY_STEP * longest);
    state->pairs = take_bf16(scratch, &used, KEY_STEP * longest);
    state->wide = take(scratch, &used, longest);
    state->other = take(scratch, &used, longest);
    return used;
}

/* ---- packing ------------------------------------------------------------------------------------- */

/* Whether the bf16 row, or first part of a row, is finite; count % 32 = 0. */
static bool finite_row(const uint16_t *row, int64_t count)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 odd = 0;
    for (int64_t d = 0; d < count; d += PAIR_LANES) {
        odd |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(row + d), exponent), exponent);
    }
    return odd == 0;
}

/* Query `row` as fp32, with what is folded into it. */
static void widen_query(const dot_state *state, float *to, int64_t row)
{
    const attn__block *block = state->block;
    const float factor = (float)((double)block->scale * 1.44269504088896340736);
    widen(to, block->q, row * block->q_token, block->dtype, block->q_dim, block->dim_qk);
    for (int64_t d = 0; d < block->dim_qk; d++) {
        to[d] *= factor;
    }
}

/* Query `row` into line `line` of state->rows. */
static void pack_query(const dot_state *state, int64_t row, int64_t line)
{
    const attn__block *block = state->block;
    uint16_t *to = state->rows + line * state->depth;
    if (row >= block->count) {
        for (int part = 0; part < state->q_parts; part++) {
            memset(to + part * KEY_STEP * state->depth, 0, sizeof *to * (size_t)state->depth);
        }
    } else if (state->q_parts == 1) {
        dot_pack_row(to, 0, attn__element(block->q, block->dtype, row * block->q_token), block->dtype,
                     block->q_dim, block->dim_qk, state->depth, state->wide);
        for (int64_t d = 0; d < block->dim_qk && block->scale < 0.0f; d++) {
            to[d] ^= 0x8000;
        }
    } else {
        widen_query(state, state->wide, row);
        dot_split(state->q_parts, to, KEY_STEP * state->depth, state->wide, block->dim_qk, state->depth);
    }
}

/* Q^T of all panels; unused lanes are 0. */
static void pack_queries(const dot_state *state)
{
    const int64_t depth = state->depth;
    for (int64_t panel = 0; panel < state->panels; panel++) {
        uint16_t *to = state->q + panel * PANEL * state->q_parts * depth;
        state->odd[panel] = false;
        for (int64_t line = 0; line < PANEL; line++) {
            pack_query(state, panel * PANEL + line, line);
            if (state->q_parts > 1 && !finite_row(state->rows + line * depth, depth)) {
                state->odd[panel] = true;
            }
        }
        for (int64_t part = 0; part < state->q_parts; part++, to += PANEL * depth) {
            const uint16_t *from = state->rows + part * KEY_STEP * depth;
            for (int64_t d = 0; d < depth; d += PAIR_LANES) {
                dot_transpose(to + d * PANEL, 2 * PANEL, from + d, depth);
                dot_transpose(to + d * PANEL + PAIR_LANES, 2 * PANEL, from + VEC_LANES * depth + d, depth);
            }
        }
    }
}

/* Keys of the tile. */
static void pack_keys(const dot_state *state, dot_tile *tile)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    const int64_t depth = state->depth, part = TILE_K * depth;
    for (int64_t j = 0; j < tile->padded; j++) {
        uint16_t *to = state->k + j * depth;
        tile->key_odd[j] = false;
        if (j < tile->count) {
            const int64_t at = (tile->first + j - span->first) * span->k_token;
            dot_pack_row(to, part, attn__element(span->k, block->dtype, at), block->dtype, span->k_dim,
                         block->dim_qk, depth, state->wide);
            tile->key_odd[j] = state->parts > 1 && !finite_row(to, depth);
            tile->odd_k = tile->odd_k || tile->key_odd[j];
            continue;
        }
        for (int i = 0; i < state->parts; i++) {
            memset(to + i * part, 0, sizeof *to * (size_t)depth);
        }
    }
}

/* Value j into line `line` of state->rows; zeros if it is not there or not finite. */
static void pack_value(const dot_state *state, dot_tile *tile, int64_t j, int64_t line)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    const int64_t row = round_up(state->width, PAIR_LANES), part = KEY_STEP * row;
    uint16_t *to = state->rows + line * row;
    tile->value_odd[j] = false;
    if (j < tile->count) {
        const int64_t at = (tile->first + j - span->first) * span->v_token;
        dot_pack_row(to, part, attn__element(span->v, block->dtype, at), block->dtype, span->v_dim,
                     block->dim_v, row, state->wide);
        tile->value_odd[j] = !finite_row(to, row);
        tile->odd_v = tile->odd_v || tile->value_odd[j];
    }
    for (int i = 0; i < state->parts && (j >= tile->count || tile->value_odd[j]); i++) {
        memset(to + i * part, 0, sizeof *to * (size_t)row);
    }
}

/* V^T of the tile. */
static void pack_values(const dot_state *state, dot_tile *tile)
{
    const int64_t width = state->width, row = round_up(width, PAIR_LANES);
    for (int64_t j = 0; j < tile->padded; j += KEY_STEP) {
        for (int64_t line = 0; line < KEY_STEP; line++) {
            pack_value(state, tile, j + line, line);
        }
        for (int64_t part = 0; part < state->parts; part++) {
            const uint16_t *from = state->rows + part * KEY_STEP * row;
            uint16_t *to = state->v + part * TILE_K * width + j;
            for (int64_t line = 0; line < KEY_STEP; line += PAIR) {
                dot_pair_rows(state->pairs + line * width, from + line * row, from + (line + 1) * row, width);
            }
            for (int64_t d = 0; d < width; d += VEC_LANES) {
                dot_transpose(to + d * TILE_K, TILE_K, state->pairs + PAIR * d, PAIR * width);
            }
        }
    }
}

/* ---- one panel against one tile ------------------------------------------------------------------ */

/* The score of one query and one key as FMAs would make it. */
static float plain_score(const float *q, const float *k, int64_t dim)
{
    float sum = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        sum += q[d] * k[d];
    }
    return sum;
}

/* Makes the scores of queries and keys that are not finite again; keys from .. to of the tile. */
static void score_again(const dot_state *state, int64_t panel, const dot_tile *tile, int64_t from, int64_t to)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    const int64_t rows = attn__min(PANEL, block->count - panel * PANEL);
    for (int64_t lane = 0; lane < rows; lane++) {
        widen_query(state, state->wide, panel * PANEL + lane);
        const bool odd = !all_finite(state->wide, block->dim_qk);
        for (int64_t j = from; j < attn__min(to, tile->count); j++) {
            if (odd || tile->key_odd[j]) {
                widen(state->other, span->k, (tile->first + j - span->first) * span->k_token, block->dtype,
                      span->k_dim, block->dim_qk);
                state->s[(j - from) * PANEL + lane] = plain_score(state->wide, state->other, block->dim_qk);
            }
        }
    }
}

static void fill_scores(float *s, int64_t count, float x)
{
    for (int64_t i = 0; i < count * PANEL; i++) {
        s[i] = x;
    }
}

/* exp2 of scores, `factor` times what they are. */
VEC_INLINE vec weigh(const bool scaled, const float *s, vec factor, vec less)
{
    return flash_exp2(vec_sub(scaled ? vec_mul(vec_load(s), factor) : vec_load(s), less));
}

/* P of an even number of keys from s to p; returns the sums. */
VEC_INLINE void weigh_keys(const int parts, const dot_state *state, int64_t count, const vec *less, vec *sum)
{
    const vec factor = vec_set(state->factor);
    const int64_t p_part = TILE_K * PANEL;
    for (int64_t j = 0; j < count; j += PAIR) {
        const float *s = state->s + j * PANEL;
        uint16_t *p = state->p + j * PANEL;
        FLASH_UNROLL
        for (int i = 0; i < 2; i++) {
            const vec even = weigh(parts == 1, s + i * VEC_LANES, factor, less[i]);
            const vec odd = weigh(parts == 1, s + PANEL + i * VEC_LANES, factor, less[i]);
            dot_store_pairs(parts, p + i * PAIR_LANES, p_part, even, odd);
            sum[i] = vec_add(sum[i], vec_add(even, odd));
        }
    }
}

/*
 * p becomes exp2(s - max), max and sum move on, fade gets what older sums shrink by.  A lane without a score
 * yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN.  Returns whether any fade is not 1.
 */
static bool softmax(const dot_state *state, int64_t panel, int64_t count, float *fade)
{
    float *max = state->max + panel * PANEL, *sum = state->sum + panel * PANEL;
    const vec none = vec_set(-INFINITY), zero = vec_set(0.0f), factor = vec_set(state->factor);
    vec top[2] = {none, none}, less[2], fresh[2] = {zero, zero};
    vec_mask moved = 0;
    raise_max(state->s, count, &top[0], &top[1]);
    FLASH_UNROLL
    for (int i = 0; i < 2; i++) {
        const vec old = vec_load(max + i * VEC_LANES);
        top[i] = vec_max(state->parts == 1 ? vec_mul(top[i], factor) : top[i], old);
        less[i] = vec_select(vec_less(none, top[i]), top[i], zero);
        moved |= vec_less(old, top[i]);
        vec_store(max + i * VEC_LANES, top[i]);
        vec_store(fade + i * VEC_LANES, flash_exp2(vec_sub(old, less[i])));
    }
    if (state->p_parts == 1) {
        weigh_keys(1, state, count, less, fresh);
    } else {
        weigh_keys(WEIGHT_PARTS, state, count, less, fresh);
    }
    FLASH_UNROLL
    for (int i = 0; i < 2; i++) {
        float *at = sum + i * VEC_LANES;
        vec_store(at, vec_fma(vec_load(at), vec_load(fade + i * VEC_LANES), fresh[i]));
    }
    return moved != 0;
}

/* Values that are not finite, under the mask. */
static void add_odd_values(const dot_state *state, float *ot, const flash_band *band, const dot_tile *tile,
                           int64_t from, int64_t to)
{
    const attn__block *block = state->block;
    const attn__span *span = tile->span;
    for (int64_t j = from; j < attn__min(to, tile->count); j++) {
        if (!tile->value_odd[j]) {
            continue;
        }
        float p[PANEL];
        const int64_t line = j - from;
        for (int64_t lane = 0; lane < PANEL; lane++) {
            p[lane] = 0.0f;
            for (int part = state->p_parts - 1; part >= 0; part--) {
                const uint16_t *at = state->p + part * TILE_K * PANEL + (line - line % PAIR) * PANEL;
                p[lane] += attn__bf16_to_f32(at[PAIR * lane + line % PAIR]);
            }
        }
        widen(state->wide, span->v, (tile->first + j - span->first) * span->v_token, block->dtype,
              span->v_dim, block->dim_v);
        value_masked(ot, band, tile->first + j, state->wide, block->dim_v, p);
    }
}

/* O^T = O^T * fade + fresh, or without fresh. */
static void fade_panel(float *ot, const float *fade, const float *fresh, int64_t width)
{
    const vec fade0 = vec_load(fade), fade1 = vec_load(fade + VEC_LANES), zero = vec_set(0.0f);
    for (int64_t d = 0; d < width; d++) {
        float *at = ot + d * PANEL;
        const vec fresh0 = fresh != NULL ? vec_load(fresh + d * PANEL) : zero;
        const vec fresh1 = fresh != NULL ? vec_load(fresh + d * PANEL + VEC_LANES) : zero;
        vec_store(at, vec_fma(vec_load(at), fade0, fresh0));
        vec_store(at + VEC_LANES, vec_fma(vec_load(at + VEC_LANES), fade1, fresh1));
    }
}

/* O^T takes in keys from .. to, whose weights are in p. */
static void add_values(const dot_state *state, float *ot, const float *fade, bool moved, int64_t from,
                       int64_t to)
{
    const bool one = state->parts == 1;
    const attn__dot dot = {.a = state->v + from,
                           .a_row = TILE_K,
                           .a_part = TILE_K * state->width,
                           .a_parts = state->parts,
                           .b = state->p,
                           .b_row = PAIR * PANEL,
                           .b_part = TILE_K * PANEL,
                           .b_parts = state->p_parts,
                           .c = one ? ot : state->fresh,
                           .c_row = PANEL,
                           .rows = state->width,
                           .cols = PANEL,
                           .depth = to - from,
                           .add = one};
    if (one && moved) {
        fade_panel(ot, fade, NULL, state->width);
    }
    dot_product(&dot);
    if (!one) {
        fade_panel(ot, fade, state->fresh, state->width);
    }
}

static void score_keys(const dot_state *state, int64_t panel, int64_t from, int64_t to)
{
    const int64_t depth = state->depth;
    const attn__dot dot = {.a = state->k + from * depth,
                           .a_row = depth,
                           .a_part = TILE_K * depth,
                           .a_parts = state->parts,
                           .b = state->q + panel * PANEL * state->q_parts * depth,
                           .b_row = PAIR * PANEL,
                           .b_part = PANEL * depth,
                           .b_parts = state->q_parts,
                           .c = state->s,
                           .c_row = PANEL,
                           .rows = to - from,
                           .cols = PANEL,
                           .depth = depth};
    dot_product(&dot);
}

static void panel_step(const dot_state *state, int64_t panel, const dot_tile *tile)
{
    const attn__block *block = state->block;
    const flash_band band = {block->first + panel * PANEL, block->lo, block->hi};
    const int64_t last = attn__min(band.row + PANEL, block->first + block->count) - 1;

    /* Offsets in the tile: [from, to) is seen by some row, [whole_from, whole_to) by every row. */
    int64_t from = attn__max(0, band.row + band.lo - tile->first);
    int64_t to = attn__min(tile->count, last + band.hi + 1 - tile->first);
    if (from >= to) {
        return;
    }
    int64_t whole_from = attn__min(to, attn__max(from, last + band.lo - tile->first));
    int64_t whole_to = attn__max(whole_from, attn__min(to, band.row + band.hi + 1 - tile->first));
    int64_t begin = from / KEY_STEP * KEY_STEP, end = round_up(to, KEY_STEP);

    float fade[PANEL], *s = state->s, *ot = state->ot + panel * state->width * PANEL;
    score_keys(state, panel, begin, end);
    if (tile->odd_k || state->odd[panel]) {
        score_again(state, panel, tile, begin, end);
    }
    fill_scores(s, from - begin, -INFINITY);
    mask_scores(s + (from - begin) * PANEL, &band, tile->first + from, whole_from - from);
    mask_scores(s + (whole_to - begin) * PANEL, &band, tile->first + whole_to, to - whole_to);
    fill_scores(s + (to - begin) * PANEL, end - to, -INFINITY);
    const bool moved = softmax(state, panel, end - begin, fade);
    add_values(state, ot, fade, moved, begin, end);
    if (tile->odd_v) {
        add_odd_values(state, ot, &band, tile, begin, end);
    }
}

/* ---- begin, loop, end ---------------------------------------------------------------------------- */

static void clear(const dot_state *state)
{
    const int64_t lanes = state->panels * PANEL;
    memset(state->ot, 0, sizeof(float) * (size_t)(lanes * state->width));
    memset(state->sum, 0, sizeof(float) * (size_t)lanes);
    for (int64_t i = 0; i < lanes; i++) {
        state->max[i] = -INFINITY;
    }
}

/* O = O^T / sum, lse = ln(2) * (max + log2(sum)); a row that saw no key has max = -inf and
 * sum = 0, which gives O = 0 and lse = -inf. */
static void write_rows(const dot_state *state)
{
    const attn__block *block = state->block;
    for (int64_t row = 0; row < block->count; row++) {
        const float *from = state->ot + row / PANEL * state->width * PANEL + row % PANEL;
        float *to = block->o + row * block->o_stride;
        float sum = state->sum[row];
        float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int64_t d = 0; d < block->dim_v; d++) {
            to[d] = from[d * PANEL] * inverse;
        }
        block->lse[row] = (float)(((double)state->max[row] + log2((double)sum)) * 0.69314718055994530942);
    }
}

static void forward(const attn__block *block, void *scratch)
{
    dot_state state = {.block = block};
    lay_out(&state, scratch, block->dtype, block->count, block->dim_qk, block->dim_v);
    state.factor = (float)(fabs((double)block->scale) * 1.44269504088896340736);
    pack_queries(&state);
    clear(&state);
    dot_begin();
    for (int64_t s = 0; s < block->span_count; s++) {
        const attn__span *span = &block->spans[s];
        int64_t first = attn__max(span->first, block->first + block->lo);
        int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
        for (; first < end; first += TILE_K) {
            dot_tile tile = {.span = span, .first = first, .count = attn__min(TILE_K, end - first)};
            tile.padded = round_up(tile.count, KEY_STEP);
            pack_keys(&state, &tile);
            pack_values(&state, &tile);
            for (int64_t panel = 0; panel < state.panels; panel++) {
                panel_step(&state, panel, &tile);
            }
        }
    }
    dot_end();
    write_rows(&state);
}

#include "kernel/cpu/flash_dot_backward.inc.h"

/* ---- the row ------------------------------------------------------------------------------------- */

static int64_t tile_q(const attn__shape *shape)
{
    const int64_t parts = shape->dtype == ATTN_BF16 ? 1 : WEIGHT_PARTS;
    const int64_t bytes = round_up(shape->dim_qk, PAIR_LANES) * parts * (int64_t)sizeof(uint16_t) +
                          round_up(shape->dim_v, VEC_LANES) * (int64_t)sizeof(float);
    const int64_t most = attn__min(TILE_Q, QUERY_BYTES / bytes / PANEL * PANEL);
    return attn__min(most, round_up(shape->rows, PANEL));
}

static const char *rejects(const attn__shape *shape)
{
    if (dot_parts_of(shape->dtype) > DOT_MOST_PARTS) {
        return "takes bf16 only";
    }
    return NULL;
}

static size_t scratch_bytes(const attn__shape *shape)
{
    dot_state state;
    return sizeof(float) * lay_out(&state, NULL, shape->dtype, tile_q(shape), shape->dim_qk, shape->dim_v);
}

const attn__kernel FLASH_ROW = {
    .name = FLASH_NAME,
    .summary = FLASH_SUMMARY,
    .needs = FLASH_NEEDS,
    .rounds_weights = true,
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = backward_tile_q,
    .backward_tile_k = backward_tile_k,
    .backward_scratch = backward_scratch,
    .backward = backward,
};

static void probe_dot(const attn__dot *dot)
{
    dot_begin();
    dot_product(dot);
    dot_end();
}

const attn__probe FLASH_PROBE = {
    .lanes = VEC_LANES, .exp2 = probe_exp2, .peak = probe_peak, .dot = probe_dot, .dot_peak = probe_dot_peak};
