/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_backward_pack.inc.h - the scratch of flash_dot_backward.inc.h, which includes it, and the
 * operands in it: Q and dO both ways, K both ways, V; and the way back of dQ.
 *
 * METHOD.  As flash_dot_pack.inc.h: rows are cut into parts, which are interleaved in pairs and transposed.
 *
 * COST.  A call packs its queries once and each tile of keys once.  One part: about a tenth of a call.
 */
enum {
    BLOCK = PANEL,                  /* keys of a block: what is masked as a whole is not computed */
    BACK_Q = 256,                   /* queries of a call, at most */
    BACK_K = 128,                   /* keys of a tile, at most; tiles end at multiples of their size */
    BACK_QUERY_BYTES = 1024 * 1024, /* packed queries of a call, and their dQ */
    BACK_KEY_BYTES = 224 * 1024,    /* packed keys of a tile */
    RANGE_BYTES = 2048 * 1024,      /* K, V, dK and dV of a range of keys: L2 and L3 */
};

typedef struct backward_state {
    const attn__gradient *gradient;
    int parts;             /* of the inputs */
    int weight_parts;      /* of P and dS */
    int64_t panels, lanes; /* lanes = panels * PANEL */
    int64_t pad_qk, pad_v; /* dims, up to a multiple of 32 */
    int64_t tile_k;        /* keys of a tile, at most: a multiple of BLOCK */
    bool finite;           /* Q and dO are */
    bool joined;           /* dQ is in dQ^T */
    uint16_t *qt, *dt;     /* Q^T, dO^T: [panel][part][dim / 2][2 * PANEL] */
    uint16_t *q, *dout;    /* [strip of 32 dims][part][lane / 2][2 * PANEL] */
    float *dqt;            /* dQ^T: [panel][dim][PANEL] */
    float *lse, *delta;    /* [lane]; lse as a power of 2 */
    uint16_t *k, *v;       /* [part], tile_k keys by dim in squares */
    uint16_t *kt;          /* K^T: [part], dim by tile_k keys in squares */
    float *cells;          /* S^T and dP^T, then P^T and dS^T, of a tile */
    int64_t array, band;   /* floats of cells from one to the next, see cells_of() */
    int64_t half;          /* likewise */
    uint16_t *pairs;       /* dS^T of two panels in turn: [2][part][tile_k / 2][2 * PANEL] */
    float *sums;    /* two products on their way to fp32 sums: [dim][PANEL], or dK and dV: [BLOCK][dim] */
    uint16_t *rows; /* [part], 32 rows by dim in squares: before they are turned */
    float *wide;    /* rows as fp32: k and v, then q and dO, of one cell */
} backward_state;

/*
 * Cells lie as [array][BLOCK keys][half of a panel][panel][BLOCK][VEC_LANES] floats: arrays 0 and 1 are S^T
 * and dP^T.  As bf16 a square of these is BLOCK keys by PANEL queries of A: part n of P^T takes the place of
 * the first halves of array n, part n of dS^T that of the second.  So they are written to lines that were
 * just read, but for the third parts, and not to others, which would have to come from L2 first.
 */
static float *cells_of(const backward_state *state, int64_t array, int64_t key, int64_t half, int64_t panel)
{
    return state->cells + array * state->array + key / BLOCK * state->band + half * state->half +
           (panel * BLOCK + key % BLOCK) * VEC_LANES;
}

/* Some keys, their values, and where their gradients go. */
typedef struct backward_tile {
    const attn__gradient_span *span;
    int64_t first, count, skip; /* skip: keys of the span before the first */
    float *dk, *dv;             /* NULL: not wanted */
} backward_tile;

/* ---- sizes ---------------------------------------------------------------------------------------- */

static int64_t backward_tile_q(const attn__shape *shape)
{
    const int64_t qk = round_up(shape->dim_qk, KEY_STEP), v = round_up(shape->dim_v, KEY_STEP);
    const int64_t bytes = 4 * (qk + v) * dot_parts_of(shape->dtype) + 4 * qk;
    const int64_t most = attn__max(1, attn__min(BACK_Q, BACK_QUERY_BYTES / bytes) / PANEL) * PANEL;
    return attn__min(most, round_up(shape->rows, PANEL));
}

static int64_t backward_keys(int64_t pad_qk, int64_t pad_v, int parts)
{
    const int64_t most = attn__min(BACK_K, BACK_KEY_BYTES / (2 * (2 * pad_qk + pad_v) * parts));
    return attn__max(1, most / BLOCK) * BLOCK;
}

/* As many keys as K, V, dK and dV stay near for, while all query tiles go over them. */
static int64_t backward_tile_k(const attn__shape *shape)
{
    const int64_t bytes =
        (int64_t)(sizeof(float) + attn_dtype_size(shape->dtype)) * (shape->dim_qk + shape->dim_v);
    return attn__max(BACK_K, RANGE_BYTES / bytes / BACK_K * BACK_K);
}

/* One tile's part of dQ is added after the other. */
static int64_t backward_step(const attn__shape *shape)
{
    return backward_keys(round_up(shape->dim_qk, KEY_STEP), round_up(shape->dim_v, KEY_STEP),
                         dot_parts_of(shape->dtype));
}

static size_t backward_lay_out(backward_state *state, float *scratch, attn_dtype dtype, int64_t rows,
                               int64_t dim_qk, int64_t dim_v)
{
    size_t used = 0;
    const int parts = dot_parts_of(dtype), weight_parts = parts == 1 ? 1 : WEIGHT_PARTS;
    const int64_t qk = round_up(dim_qk, KEY_STEP), v = round_up(dim_v, KEY_STEP);
    const int64_t keys = backward_keys(qk, v, parts);
    state->parts = parts, state->weight_parts = weight_parts;
    state->pad_qk = qk, state->pad_v = v, state->tile_k = keys;
    state->panels = attn__ceil_div(rows, PANEL);
    const int64_t lanes = state->lanes = state->panels * PANEL;
    state->qt = take_bf16(scratch, &used, parts * lanes * qk);
    state->dt = take_bf16(scratch, &used, parts * lanes * v);
    state->q = take_bf16(scratch, &used, parts * lanes * qk);
    state->dout = take_bf16(scratch, &used, parts * lanes * v);
    state->dqt = take(scratch, &used, lanes * qk);
    state->lse = take(scratch, &used, lanes);
    state->delta = take(scratch, &used, lanes);
    state->k = take_bf16(scratch, &used, parts * keys * qk);
    state->v = take_bf16(scratch, &used, parts * keys * v);
    state->kt = take_bf16(scratch, &used, parts * keys * qk);
    state->half = lanes * VEC_LANES;
    state->band = lanes * BLOCK;
    state->array = lanes * keys;
    state->cells = take(scratch, &used, attn__max(2, weight_parts) * state->array);
    state->pairs = take_bf16(scratch, &used, 2 * weight_parts * keys * PANEL);
    state->sums = take(scratch, &used, 2 * BLOCK * (qk + v));
    state->rows = take_bf16(scratch, &used, parts * PANEL * attn__max(qk, v));
    state->wide = take(scratch, &used, 2 * (qk + v));
    return used;
}

/* ---- packing -------------------------------------------------------------------------------------- */

/* Zeros for row i of A, `pad` long. */
static void clear_row(uint16_t *a, int64_t a_part, int parts, int64_t i, int64_t pad)
{
    for (int part = 0; part < parts; part++) {
        uint16_t *to = a + part * a_part + attn__dot_place(i, 0, BLOCK * pad);
        for (int64_t d = 0; d < pad; d += PAIR_LANES, to += SQUARE) {
            memset(to, 0, sizeof *to * PAIR_LANES);
        }
    }
}

/* `real` rows of an input as rows of A, `pad` long; those up to `rows` are 0. */
static void pack_rows(uint16_t *a, int64_t a_part, const attn__rows *from, int64_t dim, int64_t pad,
                      int64_t real, int64_t rows, float *wide)
{
    for (int64_t i = 0; i < real; i++) {
        dot_pack_row(a + attn__dot_place(i, 0, BLOCK * pad), a_part, SQUARE,
                     attn__element(from->data, from->dtype, i * from->token), from->dtype, from->dim, dim,
                     pad, wide);
    }
    for (int64_t i = real; i < rows; i++) {
        clear_row(a, a_part, dot_parts_of(from->dtype), i, pad);
    }
}

/* One panel of Q or dO, which lies in state->rows, both ways. */
static void turn_panel(const backward_state *state, int64_t panel, uint16_t *transposed, uint16_t *strips,
                       int64_t pad)
{
    const bool one = state->weight_parts == 1;
    for (int part = 0; part < state->parts; part++) {
        const uint16_t *from = state->rows + part * PANEL * pad;
        uint16_t *to = transposed + (panel * state->parts + part) * pad * PANEL;
        for (int64_t d = 0; d < pad; d += PAIR_LANES, from += SQUARE) {
            dot_transpose(to + d * PANEL, PAIR * PANEL, from, PAIR_LANES);
            dot_transpose(to + d * PANEL + PAIR_LANES, PAIR * PANEL, from + SQUARE / 2, PAIR_LANES);
            uint16_t *strip =
                strips + ((d / PAIR_LANES * state->parts + part) * state->lanes + panel * PANEL) * PANEL;
            for (int64_t i = 0; i < VEC_LANES; i++) { /* as store_weights has the queries */
                const uint16_t *first = from + i * (one ? PAIR : 1) * PANEL;
                dot_store_rows(strip + i * PAIR * PANEL, _mm512_loadu_si512(first),
                               _mm512_loadu_si512(first + (one ? 1 : VEC_LANES) * PANEL));
            }
        }
    }
}

/* Rows of Q or dO of one panel.  Rows with lse = -inf and lanes without a row are 0. */
static bool pack_panel(const backward_state *state, int64_t panel, const attn__rows *input, int64_t dim,
                       int64_t pad, uint16_t *transposed, uint16_t *strips)
{
    const attn__gradient *g = state->gradient;
    const int64_t first = panel * PANEL, real = attn__min(PANEL, g->count - first);
    const attn__rows from = {attn__element(input->data, input->dtype, first * input->token), input->dtype,
                             input->token, input->dim};
    pack_rows(state->rows, PANEL * pad, &from, dim, pad, real, PANEL, state->wide);
    for (int64_t i = 0; i < real; i++) {
        if (g->lse[first + i] == -INFINITY) {
            clear_row(state->rows, PANEL * pad, state->parts, i, pad);
        }
    }
    turn_panel(state, panel, transposed, strips, pad);
    return finite_row(state->rows, PAIR_LANES, PANEL * pad);
}

/* dQ^T becomes -0: what is added to that stays as it is, to its sign. */
static void clear_queries(const backward_state *state)
{
    for (int64_t i = 0; i < state->lanes * state->pad_qk; i += VEC_LANES) {
        vec_store(state->dqt + i, vec_set(-0.0f));
    }
}

/* Adds dQ to dQ^T, once, when its turn comes, turned 16 x 16 at a time; what has no row or no dim is 0. */
static void join_queries(backward_state *state)
{
    const attn__gradient *g = state->gradient;
    float square[VEC_LANES * VEC_LANES], turned[VEC_LANES * VEC_LANES];
    if (state->joined || !attn__dq_open(g)) {
        return;
    }
    state->joined = true;
    for (int64_t row = 0; row < state->lanes; row += VEC_LANES) {
        float *to = state->dqt + row / PANEL * state->pad_qk * PANEL + row % PANEL;
        for (int64_t d = 0; d < state->pad_qk; d += VEC_LANES) {
            const vec_mask real = vec_between(0, (int32_t)attn__max(0, attn__min(VEC_LANES, g->dim_qk - d)));
            for (int64_t i = 0; i < VEC_LANES; i++) {
                const vec_mask there = row + i < g->count ? real : vec_between(0, 0);
                vec_store(square + i * VEC_LANES,
                          _mm512_maskz_loadu_ps(there, g->dq + (row + i) * g->dq_token + d));
            }
            dot_transpose((void *)turned, PAIR_LANES, (const void *)square, PAIR_LANES);
            for (int64_t i = 0; i < VEC_LANES; i++) {
                float *at = to + (d + i) * PANEL;
                vec_store(at, vec_add(vec_load(at), vec_load(turned + i * VEC_LANES)));
            }
        }
    }
}

/* Q, dO, lse and delta.  Lanes without a row, and rows with lse = -inf, get lse = inf: they weigh nothing. */
static void pack_inputs(backward_state *state)
{
    const attn__gradient *g = state->gradient;
    const attn__rows q = {g->q, g->dtype, g->q_token, g->q_dim};
    const attn__rows dout = {g->dout, g->dtype, g->dout_token, g->dout_dim};
    state->finite = true;
    for (int64_t panel = 0; panel < state->panels; panel++) {
        const bool first = pack_panel(state, panel, &q, g->dim_qk, state->pad_qk, state->qt, state->q);
        const bool second = pack_panel(state, panel, &dout, g->dim_v, state->pad_v, state->dt, state->dout);
        state->finite = state->finite && first && second;
    }
    for (int64_t lane = 0; lane < state->lanes; lane++) {
        const bool real = lane < g->count && g->lse[lane] != -INFINITY;
        state->lse[lane] = real ? (float)((double)g->lse[lane] * 1.44269504088896340736) : INFINITY;
        state->delta[lane] = real ? g->delta[lane] : 0.0f;
    }
    if (g->dq != NULL) {
        clear_queries(state);
    }
}

/* K^T of a tile of `rows` keys, from K. */
static void turn_keys(const backward_state *state, int64_t rows)
{
    const int64_t pad = state->pad_qk, keys = state->tile_k;
    for (int part = 0; part < state->parts; part++) {
        const uint16_t *from = state->k + part * keys * pad;
        uint16_t *to = state->kt + part * keys * pad;
        for (int64_t j = 0; j < rows; j += BLOCK) {
            for (int64_t d = 0; d < pad; d += PAIR_LANES, from += SQUARE) {
                uint16_t *square = to + attn__dot_place(d, j, BLOCK * keys);
                for (int64_t i = 0; i < BLOCK; i += PAIR) {
                    dot_store_rows(state->rows + i * PANEL, _mm512_loadu_si512(from + i * BLOCK),
                                   _mm512_loadu_si512(from + (i + 1) * BLOCK));
                }
                dot_transpose(square, BLOCK, state->rows, PAIR * PANEL);
                dot_transpose(square + SQUARE / 2, BLOCK, state->rows + PAIR_LANES, PAIR * PANEL);
            }
        }
    }
}

/* K, V and K^T of a tile; whether they are finite. */
static bool pack_tile(const backward_state *state, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const attn__gradient_span *span = tile->span;
    const int64_t rows = round_up(tile->count, BLOCK), keys = state->tile_k;
    const attn__rows k = {attn__element(span->k, g->dtype, tile->skip * span->k_token), g->dtype,
                          span->k_token, span->k_dim};
    const attn__rows v = {attn__element(span->v, g->dtype, tile->skip * span->v_token), g->dtype,
                          span->v_token, span->v_dim};
    pack_rows(state->k, keys * state->pad_qk, &k, g->dim_qk, state->pad_qk, tile->count, rows, state->wide);
    pack_rows(state->v, keys * state->pad_v, &v, g->dim_v, state->pad_v, tile->count, rows, state->wide);
    turn_keys(state, rows);
    return finite_row(state->k, PAIR_LANES, rows * state->pad_qk) &&
           finite_row(state->v, PAIR_LANES, rows * state->pad_v);
}

/* dQ from dQ^T, likewise. */
static void write_queries(const backward_state *state)
{
    const attn__gradient *g = state->gradient;
    float square[VEC_LANES * VEC_LANES];
    for (int64_t row = 0; row < g->count && state->joined; row += VEC_LANES) {
        const int64_t rows = attn__min(VEC_LANES, g->count - row);
        const float *from = state->dqt + row / PANEL * state->pad_qk * PANEL + row % PANEL;
        for (int64_t d = 0; d < g->dim_qk; d += VEC_LANES) {
            const vec_mask real = vec_between(0, (int32_t)attn__min(VEC_LANES, g->dim_qk - d));
            float *to = g->dq + row * g->dq_token + d;
            dot_transpose((void *)square, PAIR_LANES, (const void *)(from + d * PANEL), PAIR * PANEL);
            for (int64_t i = 0; i < rows; i++, to += g->dq_token) {
                _mm512_mask_storeu_ps(to, real, vec_load(square + i * VEC_LANES));
            }
        }
    }
}
