/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_backward.inc.h - the gradients of one query tile against a list of key spans, all products in
 * bf16 parts; the second half of flash_dot.inc.h, which includes it.
 *
 * METHOD.  As flash_backward.inc.h (Dao et al., arXiv 2205.14135), with the operands laid out for attn__dot:
 *
 *     Q^T, dO^T in pairs of dims, Q, dO in pairs of queries: packed once per call
 *     for each tile of keys: K, V and K^T packed
 *         for each panel of queries:
 *             S^T = K Q^T, dP^T = V dO^T
 *             P = exp2(S - lse), dS = scale P (dP - delta)   vertical; cut into parts, twice for dS
 *             dQ^T += K^T dS^T                               B: dS^T in pairs of keys
 *         dV += P^T dO, dK += dS^T Q                         A: P^T and dS^T along the queries
 *         of the first: dQ^T += dQ turned                    one part: before it
 *     dQ = dQ^T turned
 *
 * Scores stay without a factor until they are fp32, and dS gets its factor before it is cut, so that nothing
 * is rounded for a factor's sake.
 *
 * PARTS.  bf16 is its own part, and P and dS are rounded to one: relative errors of up to 2^-8 each.  fp16 is
 * two parts and fp32 three; P and dS are three then, which keeps 24 bits.  Sums begin at zero for each tile
 * (dQ, one part: go on) and are added to dV and dK as fp32.
 *
 * MASK.  Blocks of 32 keys by 32 queries that nobody sees are left out of every product; what else is masked
 * is P = dS = 0.  A tile with an infinite or NaN element in Q, dO, K or V is summed cell by cell in fp32.
 *
 * COST.  10 FLOPs a cell and dim for one part, 46 for two (P and dS are three), 60 for three.  About 18
 * vector operations for 16 cells of one part.  See docs/perf/cpu_amx_backward.md.
 */
#include "kernel/cpu/flash_dot_backward_pack.inc.h"

/* A panel against a tile.  Offsets in the tile: [from, to) is seen by some row, [whole_from, whole_to) by
 * every row; [begin, end) are the blocks around [from, to). */
typedef struct backward_task {
    int64_t panel;
    flash_band band;
    int64_t from, to, whole_from, whole_to, begin, end;
    uint16_t *pairs; /* of the tile's first key */
} backward_task;

/* ---- P and dS ------------------------------------------------------------------------------------- */

/* Constants and the two vectors of queries of a panel. */
typedef struct backward_lanes {
    vec factor, scale, lse[2], delta[2]; /* delta: scale * delta */
} backward_lanes;

/* One vector: scores become weights, dP becomes scale * dS.  The minimum cuts off what rounding says beyond
 * P = 1; it lets a NaN through. */
VEC_INLINE void weigh_back(const int parts, const backward_lanes *lanes, int half, const float *scores,
                           const float *slopes, vec *weight, vec *slope)
{
    const vec power = vec_fma(vec_load(scores), lanes->factor, vec_sub(vec_set(0.0f), lanes->lse[half]));
    const vec most = vec_min(vec_set(0.0f), power);
    *weight = parts == 1 ? dot_exp2(most) : flash_exp2(most);
    *slope =
        vec_mul(*weight, vec_fma(vec_load(slopes), lanes->scale, vec_sub(vec_set(0.0f), lanes->delta[half])));
}

/*
 * P or dS of two keys, x[key][half], as rows of A, `a` of the first, and if b is not NULL as a row of B too.
 * One part is rounded.  More are cut, and a row of them has queries of both halves in turn: 0, 16, 1, 17,
 * ..., which needs no permutation; the strips have the same order (turn_panel).
 */
VEC_INLINE void store_weights(const int parts, vec x[PAIR][2], uint16_t *a, int64_t a_part, uint16_t *b,
                              int64_t b_part)
{
    if (parts == 1) {
        const __m512i row[PAIR] = {(__m512i)_mm512_cvtne2ps_pbh(x[0][1], x[0][0]),
                                   (__m512i)_mm512_cvtne2ps_pbh(x[1][1], x[1][0])};
        _mm512_storeu_si512(a, row[0]);
        _mm512_storeu_si512(a + BLOCK, row[1]);
        if (b != NULL) {
            dot_store_rows(b, row[0], row[1]);
        }
        return;
    }
    FLASH_UNROLL
    for (int n = 0; n < parts; n++) {
        _mm512_storeu_si512(a + n * a_part, dot_interleave(x[0][0], x[0][1]));
        _mm512_storeu_si512(a + n * a_part + BLOCK, dot_interleave(x[1][0], x[1][1]));
        FLASH_UNROLL
        for (int half = 0; half < 2; half++) {
            if (b != NULL) {
                _mm512_storeu_si512(b + n * b_part + half * PAIR_LANES,
                                    dot_interleave(x[0][half], x[1][half]));
            }
            x[0][half] = vec_sub(x[0][half], dot_upper(x[0][half]));
            x[1][half] = vec_sub(x[1][half], dot_upper(x[1][half]));
        }
    }
}

/* Keys j and j + 1 of a panel; all lanes see them, or `masked`. */
VEC_INLINE void weigh_pair(const int parts, const bool masked, const backward_state *state,
                           const backward_lanes *lanes, const backward_task *task, int64_t position,
                           int64_t j, dot_queue *queue)
{
    const int64_t keys = state->tile_k, a_part = PAIR * state->array;
    float *scores = cells_of(state, 0, j, 0, task->panel);
    vec weight[PAIR][2], slope[PAIR][2];
    FLASH_UNROLL
    for (int i = 0; i < PAIR; i++) {
        take_share(parts, queue);
        FLASH_UNROLL
        for (int half = 0; half < 2; half++) {
            const float *at = scores + i * VEC_LANES + half * state->half;
            weigh_back(parts, lanes, half, at, at + state->array, &weight[i][half], &slope[i][half]);
            if (masked) {
                const vec_mask seen = j + i < task->to
                                          ? visible(&task->band, position + j + i, half * VEC_LANES)
                                          : vec_between(0, 0);
                weight[i][half] = vec_select(seen, weight[i][half], vec_set(0.0f));
                slope[i][half] = vec_select(seen, slope[i][half], vec_set(0.0f));
            }
        }
    }
    store_weights(parts, weight, (uint16_t *)scores, a_part, NULL, 0);
    store_weights(parts, slope, (uint16_t *)(scores + state->half), a_part, task->pairs + j * PANEL,
                  keys * PANEL);
}

/* P and dS of a panel; the queue's steps spread evenly between. */
VEC_INLINE void weigh_panel(const int parts, const backward_state *state, const backward_task *task,
                            int64_t position, dot_queue *queue)
{
    const attn__gradient *g = state->gradient;
    const float *lse = state->lse + task->panel * PANEL, *delta = state->delta + task->panel * PANEL;
    const backward_lanes lanes = {vec_set((float)((double)g->scale * 1.44269504088896340736)),
                                  vec_set(g->scale),
                                  {vec_load(lse), vec_load(lse + VEC_LANES)},
                                  {vec_mul(vec_set(g->scale), vec_load(delta)),
                                   vec_mul(vec_set(g->scale), vec_load(delta + VEC_LANES))}};
    for (int64_t j = task->begin; j < task->end; j += PAIR) {
        if (task->whole_from <= j && j + PAIR <= task->whole_to) {
            weigh_pair(parts, false, state, &lanes, task, position, j, queue);
        } else {
            weigh_pair(parts, true, state, &lanes, task, position, j, queue);
        }
    }
}

static backward_task task_of(const backward_state *state, int64_t panel, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const int64_t turn = panel % 2 * state->tile_k * PANEL, row = g->first + panel * PANEL;
    const int64_t last = attn__min(row + PANEL, g->first + g->count) - 1;
    backward_task task = {
        .panel = panel, .band = {row, g->lo, g->hi}, .pairs = state->pairs + turn * state->weight_parts};
    task.from = attn__min(tile->count, attn__max(0, row + g->lo - tile->first));
    task.to = attn__max(task.from, attn__min(tile->count, last + g->hi + 1 - tile->first));
    task.whole_from = attn__min(task.to, attn__max(task.from, last + g->lo - tile->first));
    task.whole_to = attn__max(task.whole_from, attn__min(task.to, row + g->hi + 1 - tile->first));
    task.begin = task.from / BLOCK * BLOCK;
    task.end = task.from == task.to ? task.begin : round_up(task.to, BLOCK);
    return task;
}

/* S^T (array 0, rows: K, turned: Q^T) or dP^T (1, V, dO^T) of a task. */
static void scores_dot(const backward_state *state, const backward_task *task, int64_t array,
                       const uint16_t *rows, const uint16_t *turned, int64_t depth, attn__dot *to)
{
    to->a = rows + task->begin * depth;
    to->a_band = BLOCK * depth;
    to->a_part = state->tile_k * depth;
    to->a_parts = state->parts;
    to->b = turned + task->panel * state->parts * depth * PANEL;
    to->b_band = 0; /* no second column of squares */
    to->b_part = depth * PANEL;
    to->b_parts = state->parts;
    to->c = cells_of(state, array, task->begin, 0, task->panel);
    to->c_band = state->band;
    to->c_row = VEC_LANES;
    to->c_half = state->half;
    to->rows = task->end - task->begin;
    to->cols = PANEL;
    to->depth = depth;
    to->add = false;
}

/* Where dQ^T of a task is summed: of one part where the others are, else apart. */
static float *queries_sums(const backward_state *state, const backward_task *task)
{
    const int64_t size = state->pad_qk * PANEL;
    return state->weight_parts == 1 ? state->dqt + task->panel * size : state->sums + task->panel % 2 * size;
}

/* Keys that a panel sees none of give it no dQ. */
static bool adds_queries(const backward_state *state, const backward_task *task)
{
    return task->begin < task->end && state->gradient->dq != NULL;
}

/* dQ^T of a task. */
static void queries_dot(const backward_state *state, const backward_task *task, attn__dot *to)
{
    const int64_t keys = state->tile_k, qk = state->pad_qk;
    to->a = state->kt + attn__dot_place(0, task->begin, 0);
    to->a_band = BLOCK * keys;
    to->a_part = keys * qk;
    to->a_parts = state->parts;
    to->b = task->pairs + task->begin * PANEL;
    to->b_band = 0; /* no second column of squares */
    to->b_part = keys * PANEL;
    to->b_parts = state->weight_parts;
    to->c = queries_sums(state, task);
    to->c_band = PANEL * PANEL;
    to->c_row = PANEL;
    to->c_half = VEC_LANES;
    to->rows = adds_queries(state, task) ? qk : 0;
    to->cols = PANEL;
    to->depth = task->end - task->begin;
    to->add = state->weight_parts == 1;
}

/* Fills the queue of a turn; a task may be NULL. */
static void fill_queue(const backward_state *state, const backward_task *done, const backward_task *before,
                       const backward_task *now, const backward_task *next, dot_queue *queue)
{
    int products = 0;
    if (before != NULL) {
        queries_dot(state, before, &queue->dots[products++]);
    }
    if (next != NULL) {
        scores_dot(state, next, 0, state->k, state->qt, state->pad_qk, &queue->dots[products++]);
        scores_dot(state, next, 1, state->v, state->dt, state->pad_v, &queue->dots[products++]);
    }
    start_queue(queue, products,
                (done != NULL ? state->pad_qk / JOIN_ROWS : 0) + (now != NULL ? now->end - now->begin : 0));
}

/* P^T and dS^T of all panels and one tile, and what they add to dQ^T, in a pipeline of panels: the tiles are
 * one panel ahead with scores and one behind with dQ^T; what of that is summed apart is added a turn later.
 */
static void add_panels(const backward_state *state, const backward_tile *tile)
{
    const int64_t turns = state->panels + (state->weight_parts == 1 ? 1 : 2);
    backward_task tasks[4];
    dot_queue queue;
    tasks[0] = task_of(state, 0, tile);
    fill_queue(state, NULL, NULL, NULL, &tasks[0], &queue);
    dot_finish(&queue.at);
    for (int64_t turn = 0; turn < turns; turn++) {
        const backward_task *done = turn > 1 ? &tasks[(turn - 2) % 4] : NULL;
        const backward_task *before = turn > 0 && turn <= state->panels ? &tasks[(turn - 1) % 4] : NULL;
        const backward_task *now = turn < state->panels ? &tasks[turn % 4] : NULL;
        backward_task *next = turn + 1 < state->panels ? &tasks[(turn + 1) % 4] : NULL;
        if (next != NULL) {
            *next = task_of(state, turn + 1, tile);
        }
        if (done != NULL && (state->weight_parts == 1 || !adds_queries(state, done))) {
            done = NULL;
        }
        fill_queue(state, done, before, now, next, &queue);
        if (done != NULL) {
            float *dqt = state->dqt + done->panel * state->pad_qk * PANEL;
            join_sums(dqt, vec_set(1.0f), vec_set(1.0f), queries_sums(state, done), state->pad_qk, &queue);
        }
        if (now != NULL && state->weight_parts == 1) {
            weigh_panel(1, state, now, tile->first, &queue);
        } else if (now != NULL) {
            weigh_panel(WEIGHT_PARTS, state, now, tile->first, &queue);
        }
        dot_finish(&queue.at);
    }
}

#include "kernel/cpu/flash_dot_backward_keys.inc.h"

/* ---- tiles with NaN or inf ------------------------------------------------------------------------ */

/* Row `index` of an input as dense fp32, zeros up to a whole vector. */
static const float *wide_row(float *to, const void *data, attn_dtype dtype, int64_t index, int64_t token,
                             int64_t stride, int64_t dim)
{
    widen(to, data, index * token, dtype, stride, dim);
    memset(to + dim, 0, sizeof *to * (size_t)(round_up(dim, VEC_LANES) - dim));
    return to;
}

static float dot_wide(const float *x, const float *y, int64_t dim)
{
    vec acc = vec_set(0.0f);
    float lanes[VEC_LANES], sum = 0.0f;
    for (int64_t d = 0; d < dim; d += VEC_LANES) {
        acc = vec_fma(vec_load(x + d), vec_load(y + d), acc);
    }
    vec_store(lanes, acc);
    for (int i = 0; i < VEC_LANES; i++) {
        sum += lanes[i];
    }
    return sum;
}

static void add_scaled(float *out, float factor, const float *x, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        out[d] += factor * x[d];
    }
}

/* One query row and one key: all of the method in fp32. */
static void add_cell(const backward_state *state, const backward_tile *tile, int64_t i, int64_t j,
                     const float *k, const float *v)
{
    const attn__gradient *g = state->gradient;
    const attn__gradient_span *span = tile->span;
    const int64_t width = state->pad_qk + state->pad_v;
    const float *q = wide_row(state->wide + width, g->q, g->dtype, i, g->q_token, g->q_dim, g->dim_qk);
    const float *dout = wide_row(state->wide + width + state->pad_qk, g->dout, g->dtype, i, g->dout_token,
                                 g->dout_dim, g->dim_v);
    const float score = dot_wide(q, k, g->dim_qk), slope = dot_wide(dout, v, g->dim_v);
    const backward_lanes lanes = {vec_set((float)((double)g->scale * 1.44269504088896340736)),
                                  vec_set(g->scale),
                                  {vec_set(state->lse[i])},
                                  {vec_set(g->scale * state->delta[i])}};
    float scores[VEC_LANES], slopes[VEC_LANES];
    vec weight, ds;
    vec_store(scores, vec_set(score));
    vec_store(slopes, vec_set(slope));
    weigh_back(state->weight_parts, &lanes, 0, scores, slopes, &weight, &ds);
    vec_store(scores, weight);
    vec_store(slopes, ds);
    if (tile->dv != NULL) {
        add_scaled(tile->dv + j * span->dv_token, scores[0], dout, g->dim_v);
    }
    if (tile->dk != NULL) {
        add_scaled(tile->dk + j * span->dk_token, slopes[0], q, g->dim_qk);
    }
    if (g->dq != NULL) {
        float *to = state->dqt + i / PANEL * state->pad_qk * PANEL + i % PANEL;
        for (int64_t d = 0; d < g->dim_qk; d++) {
            to[d * PANEL] += slopes[0] * k[d];
        }
    }
}

static void add_cells(const backward_state *state, const backward_tile *tile)
{
    const attn__gradient *g = state->gradient;
    const attn__gradient_span *span = tile->span;
    for (int64_t j = 0; j < tile->count; j++) {
        const int64_t apart = tile->first + j - g->first, row = tile->skip + j;
        const float *k = wide_row(state->wide, span->k, g->dtype, row, span->k_token, span->k_dim, g->dim_qk);
        const float *v = wide_row(state->wide + state->pad_qk, span->v, g->dtype, row, span->v_token,
                                  span->v_dim, g->dim_v);
        for (int64_t i = attn__max(0, apart - g->hi); i < attn__min(g->count, apart - g->lo + 1); i++) {
            if (g->lse[i] != -INFINITY) {
                add_cell(state, tile, i, j, k, v);
            }
        }
    }
}

/* ---- one call -------------------------------------------------------------------------------------- */

/* What was in dQ is added to the part of the call's first tile, so that other threads have the time of that
 * tile; the sum is the same.  Not so where parts are no sums of their own: of one part, of single cells. */
static void add_tile(backward_state *state, const attn__gradient_span *span, int64_t first, int64_t count)
{
    const int64_t skip = first - span->first;
    const backward_tile tile = {.span = span,
                                .first = first,
                                .count = count,
                                .skip = skip,
                                .dk = span->dk == NULL ? NULL : span->dk + skip * span->dk_token,
                                .dv = span->dv == NULL ? NULL : span->dv + skip * span->dv_token};
    const bool finite = pack_tile(state, &tile) && state->finite;
    if (!finite || state->weight_parts == 1) {
        join_queries(state);
    }
    if (finite) {
        add_panels(state, &tile);
        add_products(state, &tile);
    } else {
        add_cells(state, &tile);
    }
    join_queries(state);
}

static void backward(const attn__gradient *gradient, void *scratch)
{
    const attn__gradient *g = gradient;
    backward_state state = {.gradient = g};
    backward_lay_out(&state, scratch, g->dtype, g->count, g->dim_qk, g->dim_v);
    dot_begin();
    pack_inputs(&state);
    for (int64_t s = 0; s < g->span_count; s++) {
        const attn__gradient_span *span = &g->spans[s];
        int64_t first = attn__max(span->first, g->first + g->lo);
        int64_t end = attn__min(span->first + span->count, g->first + g->count + g->hi);
        for (int64_t count; first < end; first += count) {
            count = attn__min(state.tile_k - first % state.tile_k, end - first);
            add_tile(&state, span, first, count);
        }
    }
    dot_end();
    write_queries(&state);
}

static size_t backward_scratch(const attn__shape *shape)
{
    backward_state state;
    return sizeof(float) *
           backward_lay_out(&state, NULL, shape->dtype, backward_tile_q(shape), shape->dim_qk, shape->dim_v);
}
