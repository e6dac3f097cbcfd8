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
 * FEW.  Up to 32 rows of bf16 that are a whole sequence go by flash_dot_few.inc.h.
 *
 * PARAMETERS.  FLASH_* as in flash.inc.h, DOT_MOST_PARTS, DOT_DECLINES (why it is not taken, or NULL). Before
 * it, vec_avx512.h, flash_common.inc.h, dot_pack.h and dot_few.h, and a dot_<isa>.h for dot_begin, dot_end,
 * dot_product, probe_dot_peak and what dot_few.h says.
 */
#include "kernel/cpu/flash_dot_pack.inc.h"

#include "kernel/cpu/flash_dot_queue.inc.h"

/* ---- one panel against one tile ------------------------------------------------------------------ */

/*
 * A panel and the keys of a tile that it sees, as offsets in the tile: [from, to) is seen by some row,
 * [whole_from, whole_to) by every row, [begin, end) is computed.
 */
typedef struct dot_task {
    int64_t panel;
    flash_band band;
    int64_t from, to, whole_from, whole_to, begin, end;
    float *s;          /* [end - begin][PANEL] */
    uint16_t *p;       /* [part][(end - begin) / 2][PANEL][2] */
    float *ot;         /* [width][PANEL] */
    float *sums;       /* what V^T P^T is added to: ot, or of more parts than one apart */
    float fade[PANEL]; /* what older sums shrink by */
    bool moved;        /* a fade is not 1 */
    bool first;        /* there are no older sums */
} dot_task;

enum {
    RAISE_KEYS = 16,  /* of a task, a share more where its maximum is looked for */
    SAMPLE_KEYS = 32, /* of a panel's first task that its maxima are guessed by: a task has as many */
    SLACK = 8,        /* by how many powers of 2 a score may be above the maximum before that moves */
    LARGE = 65536,    /* no 256 weights of 2^SLACK, which is a task's most, sum up to more */
};

/* The first panel from *panel on that sees keys of the tile; false if none does. `turn` counts these. */
static bool next_task(const dot_state *state, const dot_tile *tile, int64_t *panel, int64_t turn,
                      dot_task *task)
{
    const attn__block *block = state->block;
    for (; *panel < state->panels; ++*panel) {
        const flash_band band = {block->first + *panel * PANEL, block->lo, block->hi};
        const int64_t last = attn__min(band.row + PANEL, block->first + block->count) - 1;
        const int64_t from = attn__max(0, band.row + band.lo - tile->first);
        const int64_t to = attn__min(tile->count, last + band.hi + 1 - tile->first);
        if (from >= to) {
            continue;
        }
        task->panel = (*panel)++;
        task->band = band;
        task->from = from;
        task->to = to;
        task->whole_from = attn__min(to, attn__max(from, last + band.lo - tile->first));
        task->whole_to = attn__max(task->whole_from, attn__min(to, band.row + band.hi + 1 - tile->first));
        task->begin = from / KEY_STEP * KEY_STEP;
        task->end = round_up(to, KEY_STEP);
        task->s = state->s + turn % 2 * state->tile_k * PANEL;
        task->p = state->p + turn % 2 * state->p_parts * state->tile_k * PANEL;
        task->ot = state->ot + task->panel * state->width * PANEL;
        task->first = !state->begun[task->panel];
        task->sums =
            state->parts == 1 || task->first ? task->ot : state->fresh + turn % 2 * state->width * PANEL;
        state->begun[task->panel] = true;
        return true;
    }
    return false;
}

static void scores_of(const dot_state *state, const dot_task *task, attn__dot *to)
{
    const int64_t depth = state->depth;
    to->a = state->k + task->begin * depth;
    to->a_band = KEY_STEP * depth;
    to->a_part = state->tile_k * depth;
    to->a_parts = state->parts;
    to->b = state->q + task->panel * PANEL * state->q_parts * depth;
    to->b_band = 0; /* no second column of squares */
    to->b_part = PANEL * depth;
    to->b_parts = state->q_parts;
    to->c = task->s;
    to->c_band = PANEL * PANEL;
    to->c_row = PANEL;
    to->c_half = VEC_LANES;
    to->rows = task->end - task->begin;
    to->cols = PANEL;
    to->depth = depth;
    to->add = false;
}

/* One part is added to O^T; more are summed apart, so that small pairs of parts meet small sums. */
static void values_of(const dot_state *state, const dot_task *task, attn__dot *to)
{
    to->a = state->v + attn__dot_place(0, task->begin, 0);
    to->a_band = KEY_STEP * state->tile_k;
    to->a_part = state->v_part;
    to->a_parts = state->parts;
    to->b = task->p;
    to->b_band = 0; /* no second column of squares */
    to->b_part = state->tile_k * PANEL;
    to->b_parts = state->p_parts;
    to->c = task->sums;
    to->c_band = PANEL * PANEL;
    to->c_row = PANEL;
    to->c_half = VEC_LANES;
    to->rows = state->width;
    to->cols = PANEL;
    to->depth = task->end - task->begin;
    to->add = state->parts == 1 && !task->first;
}

#include "kernel/cpu/flash_dot_odd.inc.h"

static void hide_scores(float *s, int64_t count)
{
    for (int64_t i = 0; i < count * PANEL; i++) {
        s[i] = -INFINITY;
    }
}

/* What must be done to scores before the softmax. */
static void end_scores(const dot_state *state, const dot_tile *tile, const dot_task *task)
{
    const int64_t first = tile->first;
    float *s = task->s - task->begin * PANEL;
    if (tile->odd_k || state->odd[task->panel]) {
        score_again(state, tile, task);
    }
    hide_scores(task->s, task->from - task->begin);
    mask_scores(2, s + task->from * PANEL, PANEL, &task->band, first + task->from,
                task->whole_from - task->from);
    mask_scores(2, s + task->whole_to * PANEL, PANEL, &task->band, first + task->whole_to,
                task->to - task->whole_to);
    hide_scores(s + task->to * PANEL, task->end - task->to);
}

/* The greatest scores of the task's first keys. */
VEC_INLINE void raise_task(const int parts, const dot_task *task, int64_t count, vec *max, dot_queue *queue)
{
    for (int64_t j = 0; j < count; j += RAISE_KEYS) {
        take_share(parts, queue);
        raise_max(2, task->s + j * PANEL, PANEL, RAISE_KEYS, max);
    }
}

/* exp2 of a score, times factor if it is in one part. */
VEC_INLINE vec weigh(const int parts, const float *s, vec factor, vec less)
{
    const vec score = vec_load(s);
    return parts == 1 ? dot_exp2(vec_fma(score, factor, vec_sub(vec_set(0.0f), less)))
                      : flash_exp2(vec_sub(score, less));
}

/* P of the task's keys from s to p, and their sums. */
VEC_INLINE void weigh_keys(const int parts, const dot_state *state, const dot_task *task, const vec *less,
                           vec *sum, dot_queue *queue)
{
    const vec factor = vec_set(state->factor), less0 = less[0], less1 = less[1];
    const int64_t p_part = state->tile_k * PANEL, count = task->end - task->begin;
    const float *s = task->s;
    uint16_t *p = task->p;
    vec sum0 = vec_set(0.0f), sum1 = vec_set(0.0f);
    for (int64_t j = 0; j < count; j += PAIR, s += PAIR * PANEL, p += PAIR * PANEL) {
        take_share(parts, queue);
        const vec even0 = weigh(parts, s, factor, less0);
        const vec odd0 = weigh(parts, s + PANEL, factor, less0);
        const vec even1 = weigh(parts, s + VEC_LANES, factor, less1);
        const vec odd1 = weigh(parts, s + PANEL + VEC_LANES, factor, less1);
        dot_store_pairs(parts, p, p_part, even0, odd0);
        dot_store_pairs(parts, p + PAIR_LANES, p_part, even1, odd1);
        sum0 = vec_add(sum0, vec_add(even0, odd0));
        sum1 = vec_add(sum1, vec_add(even1, odd1));
    }
    sum[0] = sum0;
    sum[1] = sum1;
}

/* Moves the maxima where those of the task's first `count` keys are 2^SLACK above; did one?  Beside it the
 * queue goes on.  A lane without a score yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN.
 */
VEC_INLINE bool move_max(const int parts, const dot_state *state, dot_task *task, int64_t count, float *max,
                         vec *less, dot_queue *queue)
{
    const vec none = vec_set(-INFINITY), zero = vec_set(0.0f), factor = vec_set(state->factor);
    vec top[2] = {none, none};
    vec_mask moved = 0;
    raise_task(parts, task, count, top, queue);
    FLASH_UNROLL
    for (int i = 0; i < 2; i++) {
        const vec old = vec_load(max + i * VEC_LANES);
        const vec high = parts == 1 ? vec_mul(top[i], factor) : top[i];
        const vec_mask above = vec_less(vec_add(old, vec_set(SLACK)), high);
        top[i] = vec_select(above, high, old);
        less[i] = vec_select(vec_less(none, top[i]), top[i], zero);
        moved |= above;
        vec_store(max + i * VEC_LANES, top[i]);
        vec_store(task->fade + i * VEC_LANES, flash_exp2(vec_sub(old, less[i])));
    }
    return moved != 0;
}

/* Has some lane of a panel no maximum yet? */
VEC_INLINE bool lacks_max(const float *max)
{
    const vec none = vec_set(-INFINITY);
    return (vec_mask)(vec_less(none, vec_load(max)) & vec_less(none, vec_load(max + VEC_LANES))) !=
           (vec_mask)~0;
}

/*
 * p becomes exp2(s - max), max and sum move on; beside it the queue goes on.  The task's maximum is looked
 * for only where a lane has none yet, or where the weights sum up to more than those of 2^SLACK could:
 * weights above 1 are as exact, and sums seldom fade.  A panel's first task looks at some of its keys.
 */
VEC_INLINE void softmax(const int parts, const dot_state *state, dot_task *task, dot_queue *queue)
{
    float *max = state->max + task->panel * PANEL, *sum = state->sum + task->panel * PANEL;
    const int64_t count = task->end - task->begin;
    const vec most = vec_set(LARGE);
    vec less[2], fresh[2];
    FLASH_UNROLL
    for (int i = 0; i < 2; i++) {
        less[i] = vec_load(max + i * VEC_LANES);
        vec_store(task->fade + i * VEC_LANES, vec_set(1.0f));
    }
    task->moved = false;
    for (int64_t looked = !lacks_max(max) ? 0 : task->first ? SAMPLE_KEYS : count;; looked = count) {
        if (looked > 0) {
            task->moved = move_max(parts, state, task, looked, max, less, queue);
        }
        if (looked > 0 && looked < count && lacks_max(max)) {
            continue;
        }
        weigh_keys(parts, state, task, less, fresh, queue);
        if (looked == count || (vec_less(most, fresh[0]) | vec_less(most, fresh[1])) == 0) {
            break;
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < 2; i++) {
        float *at = sum + i * VEC_LANES;
        vec_store(at, vec_fma(vec_load(at), vec_load(task->fade + i * VEC_LANES), fresh[i]));
    }
}

/* What must be done to O^T before V^T P^T is added to it. */
static void begin_values(const dot_state *state, const dot_task *task)
{
    if (task->sums != task->ot || task->first || !task->moved) {
        return;
    }
    const vec fade0 = vec_load(task->fade), fade1 = vec_load(task->fade + VEC_LANES);
    for (float *at = task->ot; at < task->ot + state->width * PANEL; at += PANEL) {
        vec_store(at, vec_mul(vec_load(at), fade0));
        vec_store(at + VEC_LANES, vec_mul(vec_load(at + VEC_LANES), fade1));
    }
}

/* Products for the tiles: values of one panel, scores of another, either of which may be NULL, beside the
 * sums of `done` and the softmax of `now`. */
static void begin_turn(const dot_state *state, const dot_task *done, const dot_task *before,
                       const dot_task *now, const dot_task *next, dot_queue *queue)
{
    int products = 0;
    if (before != NULL) {
        values_of(state, before, &queue->dots[products++]);
    }
    if (next != NULL) {
        scores_of(state, next, &queue->dots[products++]);
    }
    start_queue(queue, products,
                (done != NULL ? state->width / JOIN_ROWS : 0) +
                    (now != NULL ? (now->end - now->begin) / PAIR : 0));
}

/* The vectors' part of a turn: O^T = O^T * fade + sums of `done`, the softmax of `now`. */
static void weigh_and_join(const dot_state *state, const dot_tile *tile, const dot_task *done, dot_task *now,
                           dot_queue *queue)
{
    if (done != NULL) {
        join_sums(done->ot, vec_load(done->fade), vec_load(done->fade + VEC_LANES), done->sums, state->width,
                  queue);
    }
    if (now == NULL) {
        return;
    }
    end_scores(state, tile, now);
    if (state->p_parts == 1) {
        softmax(1, state, now, queue);
    } else {
        softmax(WEIGHT_PARTS, state, now, queue);
    }
}

/*
 * All panels against one tile, in a pipeline: while the vectors make the weights of one panel, the tiles make
 * V^T P^T of the panel before and the scores of the next.  Where V^T P^T is summed apart, it is added to O^T
 * a turn later.
 */
static void tile_step(const dot_state *state, const dot_tile *tile)
{
    dot_task tasks[4];
    dot_task *done = NULL, *before = NULL, *now = &tasks[0];
    attn__dot first;
    int64_t panel = 0;
    if (!next_task(state, tile, &panel, 0, now)) {
        return;
    }
    scores_of(state, now, &first);
    dot_product(&first);
    for (int64_t turn = 1; now != NULL || before != NULL || done != NULL; turn++) {
        dot_task *next = &tasks[turn % 4];
        dot_queue queue;
        if (now == NULL || !next_task(state, tile, &panel, turn, next)) {
            next = NULL;
        }
        if (before != NULL) {
            begin_values(state, before);
        }
        begin_turn(state, done, before, now, next, &queue);
        weigh_and_join(state, tile, done, now, &queue);
        dot_finish(&queue.at);
        if (before != NULL && tile->odd_v) {
            add_odd_values(state, tile, before);
        }
        done = before == NULL || before->sums == before->ot ? NULL : before;
        before = now;
        now = next;
    }
}

/* ---- one call ------------------------------------------------------------------------------------ */

#include "kernel/cpu/flash_dot_few.inc.h"

static void forward(const attn__block *block, void *scratch)
{
    dot_state state = {.block = block};
    state.keeps =
        block->keep_keys && block->span_count == 1 && block->first + block->lo <= block->spans[0].first;
    lay_out(&state, scratch, block->dtype, block->count, state.keeps ? block->spans[0].count : 0,
            block->dim_qk, block->dim_v);
    state.factor = (float)(fabs((double)block->scale) * 1.44269504088896340736);
    const bool few = few_suits(block); /* has its own use for the tiles */
    *state.kept = block->same_keys && state.keeps && !few ? *state.kept : 0;
    if (few && few_forward(&state)) {
        return;
    }
    clear(&state);
    pack_queries(&state, PANEL);
    dot_begin();
    for (int64_t s = 0; s < block->span_count; s++) {
        const attn__span *span = &block->spans[s];
        int64_t first = attn__max(span->first, block->first + block->lo);
        int64_t end = attn__min(span->first + span->count, block->first + block->count + block->hi);
        for (; first < end; first += state.tile_k) {
            tile_step(&state, load_tile(&state, span, first, end));
        }
    }
    dot_end();
    write_rows(&state);
}

#include "kernel/cpu/flash_dot_backward.inc.h"

/* ---- the row ------------------------------------------------------------------------------------- */

/* As many queries as fit share the packing of a key. */
static int64_t tile_q(const attn__shape *shape)
{
    const int64_t parts = shape->dtype == ATTN_BF16 ? 1 : WEIGHT_PARTS;
    const int64_t bytes = round_up(shape->dim_qk, PAIR_LANES) * parts * (int64_t)sizeof(uint16_t) +
                          round_up(shape->dim_v, VEC_LANES) * (int64_t)sizeof(float);
    const int64_t most = attn__min(TILE_Q, QUERY_BYTES / bytes / PANEL * PANEL);
    return attn__min(most, round_up(shape->rows, PANEL));
}

static bool keeps_keys(const attn__shape *shape)
{
    dot_state state;
    lay_out(&state, NULL, shape->dtype, PANEL, shape->keys, shape->dim_qk, shape->dim_v);
    const int64_t tiles = attn__ceil_div(shape->keys, state.tile_k);
    return tiles * tile_elements(&state) * (int64_t)sizeof(uint16_t) <= KEPT_BYTES;
}

static const char *rejects(const attn__shape *shape)
{
    if (dot_parts_of(shape->dtype) > DOT_MOST_PARTS) {
        return "takes bf16 only";
    }
    return NULL;
}

/* Measured, see docs/perf/cpu_amx.md. */
static const char *declines(const attn__shape *shape)
{
    const bool bf16 = shape->dtype == ATTN_BF16;
    const int64_t dims = shape->dim_qk + shape->dim_v;
    const char *reason = DOT_DECLINES;
    if (reason != NULL) {
        return reason;
    }
    return dims < (bf16 ? 32 : 96) || shape->rows < (bf16 ? few_least() : 128)
               ? "is slower at such small dimensions or so few rows; asked for by name it is taken"
               : NULL;
}

static size_t scratch_bytes(const attn__shape *shape)
{
    dot_state state;
    return sizeof(float) * lay_out(&state, NULL, shape->dtype, tile_q(shape),
                                   shape->keep_keys ? shape->keys : 0, shape->dim_qk, shape->dim_v);
}

const attn__kernel FLASH_ROW = {
    .name = FLASH_NAME,
    .summary = FLASH_SUMMARY,
    .needs = FLASH_NEEDS,
    .rounds_weights = true,
    .rounds_results = true,
    .tile_q = tile_q,
    .keeps_keys = keeps_keys,
    .rejects = rejects,
    .declines = declines,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = backward_tile_q,
    .backward_tile_k = backward_tile_k,
    .backward_step = backward_step,
    .backward_scratch = backward_scratch,
    .backward = backward,
    .peak = probe_dot_peak,
};

static void probe_weight(float *y, const float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += VEC_LANES) {
        const __mmask16 real = (__mmask16)((1u << attn__min(VEC_LANES, count - i)) - 1u);
        _mm512_mask_storeu_ps(y + i, real, dot_exp2(dot_load_part(x, count, i)));
    }
}

static void probe_dot(const attn__dot *dot)
{
    dot_begin();
    dot_product(dot);
    dot_end();
}

const attn__probe FLASH_PROBE = {.lanes = VEC_LANES,
                                 .exp2 = probe_exp2,
                                 .weight = probe_weight,
                                 .peak = probe_peak,
                                 .read = probe_read,
                                 .dot = probe_dot,
                                 .dot_peak = probe_dot_peak};
