/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_pack.inc.h - the scratch of flash_dot.inc.h, which includes it, and the operands in it: Q^T, K
 * and V^T in parts of bf16.
 *
 * METHOD.  Rows are cut into parts (dot_pack.h) 32 at a time, then transposed 16 x 16 pairs at a time: Q^T
 * with its dims in pairs; V with keys in pairs, and those transposed.
 *
 * COST.  A call packs its queries once and each tile of keys once: about 5 operations a vector and part.
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
    float *s;             /* [2][TILE_K][PANEL] */
    uint16_t *p;          /* [2][part][TILE_K / 2][PANEL][2] */
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
    state->s = take(scratch, &used, 2 * TILE_K * PANEL);
    state->p = take_bf16(scratch, &used, 2 * state->p_parts * TILE_K * PANEL);
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
