/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward.inc.h - the gradients of one query tile against a list of key spans in one pass over the
 * keys; the second half of flash.inc.h, which includes it.
 *
 * METHOD.  P is made again from the scores and lse (Dao et al., arXiv 2205.14135), a key tile at a time:
 *
 *     Q^T, dO^T  packed once per call (scale * log2(e) folded into Q^T), panels of queries along the lanes;
 *     Q, dO      packed once per call, strips of dims along the lanes
 *     for each tile of keys:
 *         for each panel:
 *             S^T = K Q^T, dP^T = V dO^T               K, V broadcast
 *             P = exp2(S - lse), dS = P (dP - delta)   vertical, in place
 *         dV += P^T dO, dK += scale * dS^T Q           P^T, dS^T broadcast, keys by dims
 *         dQ += scale * dS K                           dS^T broadcast, queries by dims; K packed in strips
 *
 * P^T and dS^T lie [key][query], so a broadcast reads them along either axis as it likes and the gradients
 * come out as they lie in memory.  Each sum over a tile is made apart in registers and added at its end.
 *
 * MASK.  A panel makes scores only for keys that one of its queries sees; the rest of P^T and dS^T is zero.
 * The sums leave out what their whole micro-kernel does not see.  What remains masked meets P = dS = 0; where
 * an infinite or NaN Q, dO or K would turn that into NaN, the tile is summed cell by cell instead.
 *
 * COST.  10 FLOPs a cell and dim in FMAs, and 22 vector operations for PANEL / 2 cells between the products.
 * See docs/perf/cpu.md.
 */
enum {
    BACK_Q = 192,              /* queries of a call, at most: a multiple of VEC_ROWS and of PANEL */
    BACK_K = 96,               /* keys of a tile, at most; tiles end at multiples of it */
    RANGE_FLOATS = 512 * 1024, /* K, V, dK and dV of a range of keys: 2 MiB of L2 and L3 */
    BACK_FLOATS = 96 * 1024,   /* Q, dO and their transposes: 384 KiB of L2 */
    BACK_LEAST = 3 * PANEL,    /* queries of a call that make the ends of dV's and dK's sums cheap */
};

typedef struct backward_state {
    const attn__gradient *gradient;
    int64_t panels;
    bool finite;        /* Q and dO are */
    bool all_see;       /* no row has lse = -inf */
    float *qt, *dt;     /* Q^T, dO^T: [panel][dim][PANEL] */
    float *q, *dout;    /* [strip][lane][PANEL] */
    float *lse, *delta; /* [lane]; lse as a power of 2 */
    float *blind;       /* [lane]: 1 for lanes without a row and rows with lse = -inf, else 0 */
    float *p, *ds;      /* [BACK_K][BACK_Q] */
    float *k, *v;       /* a tile widened or gathered to dense fp32; also VEC_LANES rows of q, dO */
    float *strips;      /* K of a tile: [strip][BACK_K][PANEL] */
} backward_state;

/* Some keys, their values, and where their gradients go. */
typedef struct backward_tile {
    int64_t first, count;
    flash_rows k, v;
    float *dk, *dv; /* NULL: not wanted */
    int64_t dk_token, dv_token;
} backward_tile;

static int64_t strips_of(int64_t dim)
{
    return attn__ceil_div(dim, PANEL);
}

static int64_t backward_tile_q(const attn__shape *shape)
{
    int64_t most = BACK_FLOATS / (2 * (shape->dim_qk + shape->dim_v)) / PANEL * PANEL;
    most = attn__min(attn__max(most, BACK_LEAST), BACK_Q);
    return attn__min(most, attn__ceil_div(shape->rows, PANEL) * PANEL);
}

/* As many keys as K, V, dK and dV stay near for, while all query tiles go over them. */
static int64_t backward_tile_k(const attn__shape *shape)
{
    return attn__max(BACK_K, RANGE_FLOATS / (2 * (shape->dim_qk + shape->dim_v)) / BACK_K * BACK_K);
}

/* One tile's part of dQ is added after the other. */
static int64_t backward_step(const attn__shape *shape)
{
    (void)shape;
    return BACK_K;
}

static size_t backward_lay_out(backward_state *state, float *scratch, int64_t rows, int64_t dim_qk,
                               int64_t dim_v)
{
    size_t used = 0;
    state->panels = attn__ceil_div(rows, PANEL);
    const int64_t lanes = state->panels * PANEL;
    state->qt = take(scratch, &used, lanes * dim_qk);
    state->dt = take(scratch, &used, lanes * dim_v);
    state->q = take(scratch, &used, lanes * strips_of(dim_qk) * PANEL);
    state->dout = take(scratch, &used, lanes * strips_of(dim_v) * PANEL);
    state->lse = take(scratch, &used, lanes);
    state->delta = take(scratch, &used, lanes);
    state->blind = take(scratch, &used, lanes);
    state->p = take(scratch, &used, BACK_K * BACK_Q);
    state->ds = take(scratch, &used, BACK_K * BACK_Q);
    state->k = take(scratch, &used, BACK_K * dim_qk);
    state->v = take(scratch, &used, BACK_K * dim_v);
    state->strips = take(scratch, &used, BACK_K * strips_of(dim_qk) * PANEL);
    return used;
}

/* ---- packing ------------------------------------------------------------------------------------- */

/* One dense row into the strips of `rows` rows that begin at `to`; dims that do not exist are 0.  By vectors:
 * a short copy of a length that gcc does not know may become REP MOVS, which takes 30 cycles to begin. */
static void pack_strips(float *to, int64_t rows, const float *row, int64_t dim)
{
    int64_t d = 0;
    for (; d + PANEL <= dim; d += PANEL, to += rows * PANEL) {
        vec_store(to, vec_load(row + d));
        vec_store(to + VEC_LANES, vec_load(row + d + VEC_LANES));
    }
    if (d < dim) {
        for (int64_t i = 0; i < PANEL; i++) {
            to[i] = d + i < dim ? row[d + i] : 0.0f;
        }
    }
}

/* lse and delta of one lane; returns whether there is a row that weighs anything. */
static bool pack_lane(backward_state *state, int64_t lane)
{
    const attn__gradient *g = state->gradient;
    const bool real = lane < g->count && g->lse[lane] != -INFINITY;
    state->all_see = state->all_see && (real || lane >= g->count);
    state->blind[lane] = real ? 0.0f : 1.0f;
    state->lse[lane] = real ? (float)((double)g->lse[lane] * LOG2_E) : 0.0f;
    state->delta[lane] = real ? g->delta[lane] : 0.0f;
    return real;
}

/* VEC_LANES dense rows with row i set to 0: in `copy`, since they may be the caller's. */
static const float *without_row(float *copy, const float *rows, int64_t i, int64_t dim)
{
    if (rows != copy) {
        memcpy(copy, rows, sizeof(float) * (size_t)(VEC_LANES * dim));
    }
    memset(copy + i * dim, 0, sizeof(float) * (size_t)dim);
    return copy;
}

/* Q, dO, lse and delta; lanes without a row, and rows with lse = -inf, are 0 and never weigh anything. */
static void pack_rows(backward_state *state)
{
    const attn__gradient *g = state->gradient;
    const attn__rows q = {g->q, g->dtype, g->q_token, g->q_dim};
    const attn__rows dout = {g->dout, g->dtype, g->dout_token, g->dout_dim};
    const int64_t lanes = state->panels * PANEL;
    state->finite = true;
    state->all_see = true;
    for (int64_t lane = 0; lane < lanes; lane += VEC_LANES) {
        const float *q_rows = lane_rows(state->k, &q, g->dim_qk, lane, g->count);
        const float *dout_rows = lane_rows(state->v, &dout, g->dim_v, lane, g->count);
        for (int64_t i = 0; i < VEC_LANES; i++) {
            if (!pack_lane(state, lane + i)) {
                q_rows = without_row(state->k, q_rows, i, g->dim_qk);
                dout_rows = without_row(state->v, dout_rows, i, g->dim_v);
            }
        }
        state->finite = state->finite && all_finite(q_rows, VEC_LANES * g->dim_qk) &&
                        all_finite(dout_rows, VEC_LANES * g->dim_v);
        for (int64_t i = 0; i < VEC_LANES; i++) {
            pack_strips(state->q + (lane + i) * PANEL, lanes, q_rows + i * g->dim_qk, g->dim_qk);
            pack_strips(state->dout + (lane + i) * PANEL, lanes, dout_rows + i * g->dim_v, g->dim_v);
        }
        const int64_t panel = lane / PANEL * PANEL, at = lane % PANEL;
        transpose_rows(state->qt + panel * g->dim_qk + at, q_rows, g->dim_qk,
                       (float)((double)g->scale * LOG2_E));
        transpose_rows(state->dt + panel * g->dim_v + at, dout_rows, g->dim_v, 1.0f);
    }
}

/* ---- P and dS ------------------------------------------------------------------------------------- */

/* One vector: scores become weights, dP becomes dS.  The minimum cuts off what rounding says beyond P = 1; it
 * lets a NaN through. */
VEC_INLINE void weigh(float *p, float *ds, vec lse, vec delta, vec *weight, vec *slope)
{
    *weight = flash_exp2(vec_min(vec_set(0.0f), vec_sub(vec_load(p), lse)));
    *slope = vec_mul(*weight, vec_sub(vec_load(ds), delta));
}

/* Keys that every lane sees. */
static void weigh_whole(float *p, float *ds, int64_t count, const float *lse, const float *delta)
{
    const vec lse0 = vec_load(lse), lse1 = vec_load(lse + VEC_LANES);
    const vec delta0 = vec_load(delta), delta1 = vec_load(delta + VEC_LANES);
    for (int64_t j = 0; j < count; j++, p += BACK_Q, ds += BACK_Q) {
        vec p0, p1, ds0, ds1;
        weigh(p, ds, lse0, delta0, &p0, &ds0);
        weigh(p + VEC_LANES, ds + VEC_LANES, lse1, delta1, &p1, &ds1);
        vec_store(p, p0);
        vec_store(p + VEC_LANES, p1);
        vec_store(ds, ds0);
        vec_store(ds + VEC_LANES, ds1);
    }
}

/* Keys from `position` on that some lane may not see, or that meet a row with lse = -inf. */
static void weigh_masked(float *p, float *ds, int64_t count, const float *lse, const float *delta,
                         const float *blind, const flash_band *band, int64_t position)
{
    const vec zero = vec_set(0.0f);
    for (int64_t j = 0; j < count; j++, p += BACK_Q, ds += BACK_Q) {
        for (int64_t lane = 0; lane < PANEL; lane += VEC_LANES) {
            const vec_mask seen = visible(band, position + j, lane);
            const vec_mask none = vec_less(zero, vec_load(blind + lane));
            vec weight, slope;
            weigh(p + lane, ds + lane, vec_load(lse + lane), vec_load(delta + lane), &weight, &slope);
            vec_store(p + lane, vec_select(seen, weight, zero)); /* without a row it meets dO = 0 */
            vec_store(ds + lane, vec_select(seen, vec_select(none, zero, slope), zero));
        }
    }
}

static void clear_rows(float *rows, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        memset(rows + j * BACK_Q, 0, sizeof(float) * PANEL);
    }
}

/* P^T and dS^T of one panel and one tile. */
static void weigh_panel(const backward_state *state, int64_t panel, backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const flash_band band = {g->first + panel * PANEL, g->lo, g->hi};
    const int64_t last = attn__min(band.row + PANEL, g->first + g->count) - 1;
    float *p = state->p + panel * PANEL, *ds = state->ds + panel * PANEL;
    const float *lse = state->lse + panel * PANEL, *delta = state->delta + panel * PANEL;
    const float *blind = state->blind + panel * PANEL;

    /* Offsets in the tile: [from, to) is seen by some row, [whole_from, whole_to) by every row. */
    int64_t from = attn__min(tile->count, attn__max(0, band.row + band.lo - tile->first));
    int64_t to = attn__max(from, attn__min(tile->count, last + band.hi + 1 - tile->first));
    int64_t whole_from = attn__min(to, attn__max(from, last + band.lo - tile->first));
    int64_t whole_to = attn__max(whole_from, attn__min(to, band.row + band.hi + 1 - tile->first));
    if (!state->all_see) {
        whole_to = whole_from;
    }
    clear_rows(p, from), clear_rows(ds, from);
    clear_rows(p + to * BACK_Q, tile->count - to), clear_rows(ds + to * BACK_Q, tile->count - to);
    int64_t at = from * BACK_Q;
    score_panel(flash_whole, p + at, BACK_Q, &tile->k, from, to, state->qt + panel * g->dim_qk * PANEL,
                g->dim_qk);
    score_panel(flash_whole, ds + at, BACK_Q, &tile->v, from, to, state->dt + panel * g->dim_v * PANEL,
                g->dim_v);
    weigh_masked(p + at, ds + at, whole_from - from, lse, delta, blind, &band, tile->first + from);
    at = whole_from * BACK_Q;
    weigh_whole(p + at, ds + at, whole_to - whole_from, lse, delta);
    at = whole_to * BACK_Q;
    weigh_masked(p + at, ds + at, to - whole_to, lse, delta, blind, &band, tile->first + whole_to);
}

/* ---- dV, dK, dQ ----------------------------------------------------------------------------------- */

/* dV and dK: w lies along the queries. */
static void add_by_key(const flash_product *product)
{
    gradient_strips(BACK_Q, 1, product);
}

static void add_by_query(const flash_product *product)
{
    gradient_strips(1, BACK_Q, product);
}

static void add_products(const backward_state *state, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const int64_t apart = tile->first - g->first;
    flash_product by_key = {.x_rows = state->panels * PANEL,
                            .rows = tile->count,
                            .count = g->count,
                            .low = apart - g->hi,
                            .high = apart - g->lo};
    if (tile->dv != NULL) {
        by_key.out = tile->dv, by_key.out_token = tile->dv_token, by_key.dim = g->dim_v;
        by_key.w = state->p, by_key.x = state->dout, by_key.factor = 1.0f;
        add_by_key(&by_key);
    }
    if (tile->dk != NULL) {
        by_key.out = tile->dk, by_key.out_token = tile->dk_token, by_key.dim = g->dim_qk;
        by_key.w = state->ds, by_key.x = state->q, by_key.factor = g->scale;
        add_by_key(&by_key);
    }
    if (attn__dq_open(g)) {
        for (int64_t j = 0; j < tile->count; j++) {
            pack_strips(state->strips + j * PANEL, BACK_K, tile->k.at + j * tile->k.token, g->dim_qk);
        }
        const flash_product by_query = {.out = g->dq,
                                        .out_token = g->dq_token,
                                        .w = state->ds,
                                        .x = state->strips,
                                        .x_rows = BACK_K,
                                        .rows = g->count,
                                        .count = tile->count,
                                        .dim = g->dim_qk,
                                        .low = g->lo - apart,
                                        .high = g->hi - apart,
                                        .factor = g->scale};
        add_by_query(&by_query);
    }
}

static void add_scaled(float *out, float factor, const float *x, int64_t stride, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        out[d] += factor * x[d / PANEL * stride + d % PANEL];
    }
}

/* The same cell by cell, leaving out what is masked: for tiles with NaN or inf. */
static void add_cells(const backward_state *state, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const int64_t strip = state->panels * PANEL * PANEL;
    const bool open = attn__dq_open(g);
    for (int64_t j = 0; j < tile->count; j++) {
        const int64_t apart = tile->first + j - g->first;
        for (int64_t i = attn__max(0, apart - g->hi); i < attn__min(g->count, apart - g->lo + 1); i++) {
            const float p = state->p[j * BACK_Q + i], ds = g->scale * state->ds[j * BACK_Q + i];
            if (g->lse[i] == -INFINITY) {
                continue;
            }
            if (tile->dv != NULL) {
                add_scaled(tile->dv + j * tile->dv_token, p, state->dout + i * PANEL, strip, g->dim_v);
            }
            if (tile->dk != NULL) {
                add_scaled(tile->dk + j * tile->dk_token, ds, state->q + i * PANEL, strip, g->dim_qk);
            }
            if (open) {
                add_scaled(g->dq + i * g->dq_token, ds, tile->k.at + j * tile->k.token, PANEL, g->dim_qk);
            }
        }
    }
}

/* Whether 0 * NaN could bring something masked into a sum. */
static bool leaks(const backward_state *state, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const int64_t apart = tile->first - g->first;
    if (state->all_see && g->lo <= apart - g->count + 1 && apart + tile->count - 1 <= g->hi) {
        return false; /* nothing is masked */
    }
    bool finite = state->finite;
    for (int64_t j = 0; j < tile->count && finite; j++) {
        finite = all_finite(tile->k.at + j * tile->k.token, g->dim_qk);
    }
    return !finite;
}

/* ---- one call -------------------------------------------------------------------------------------- */

/* Keys first .. first + count of span, behind which come `next` others. */
static void add_tile(const backward_state *state, const attn__gradient_span *span, int64_t first,
                     int64_t count, int64_t next)
{
    const attn__gradient *g = state->gradient;
    const int64_t skip = first - span->first;
    const attn__rows k = {attn__element(span->k, g->dtype, skip * span->k_token), g->dtype, span->k_token,
                          span->k_dim};
    const attn__rows v = {attn__element(span->v, g->dtype, skip * span->v_token), g->dtype, span->v_token,
                          span->v_dim};
    backward_tile tile = {.first = first,
                          .count = count,
                          .k = load_rows(state->k, &k, g->dim_qk, count, next, state->panels),
                          .v = load_rows(state->v, &v, g->dim_v, count, next, state->panels),
                          .dk = span->dk == NULL ? NULL : span->dk + skip * span->dk_token,
                          .dv = span->dv == NULL ? NULL : span->dv + skip * span->dv_token,
                          .dk_token = span->dk_token,
                          .dv_token = span->dv_token};
    for (int64_t panel = 0; panel < state->panels; panel++) {
        weigh_panel(state, panel, &tile);
    }
    if (leaks(state, &tile)) {
        add_cells(state, &tile);
    } else {
        add_products(state, &tile);
    }
}

static void backward(const attn__gradient *gradient, void *scratch)
{
    backward_state state = {.gradient = gradient};
    backward_lay_out(&state, scratch, gradient->count, gradient->dim_qk, gradient->dim_v);
    pack_rows(&state);
    for (int64_t s = 0; s < gradient->span_count; s++) {
        const attn__gradient_span *span = &gradient->spans[s];
        int64_t first = attn__max(span->first, gradient->first + gradient->lo);
        int64_t end = attn__min(span->first + span->count, gradient->first + gradient->count + gradient->hi);
        for (int64_t count; first < end; first += count) {
            count = attn__min(BACK_K - first % BACK_K, end - first);
            add_tile(&state, span, first, count, attn__min(BACK_K, end - first - count));
        }
    }
}

static size_t backward_scratch(const attn__shape *shape)
{
    backward_state state;
    return sizeof(float) *
           backward_lay_out(&state, NULL, backward_tile_q(shape), shape->dim_qk, shape->dim_v);
}
