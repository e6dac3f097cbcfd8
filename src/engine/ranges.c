/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranges.c - the items of the backward pass: (range of keys, sequence, kv head).
 *
 * An item alone owns dk and dv of its keys, and goes over all query tiles of the group's heads that see them,
 * the last tile first, so that under a causal mask all ranges begin with a tile that each of them sees.  dq
 * of a query tile is shared by the ranges that see it, and is summed by turns: range r adds to it when range
 * r - 1 has; or, where these sums have no room (plan->dq_apart), a pass of its own takes its ranges in turn.
 * Many threads get short ranges, but all are cut where the kernel's tiles of keys end, and every
 * sum has one order: the bits do not depend on the number of threads.
 *
 * WAITING.  Items are taken by rising number, ranges outermost, so that threads mostly work on different
 * planes.  An item only waits for the range before its own in the same plane, which has a lower number and
 * was taken before by a thread that is at work on it: the lowest item at work never waits, so there is no
 * deadlock.  A kernel asks for its turn as late as it can (attn__turn), most of them when S, dP, dV and dK of
 * a call's first keys are made, so that in one plane ranges follow each other by less than a query tile.
 *
 * COST.  K, V, dK and dV of a range stay near while its query tiles pass; Q, dO and dQ are read once a range.
 */
#include <sched.h>
#include <string.h>

#include "engine/backward.h"

enum {
    ITEMS = 4,        /* wanted for each of several threads, so that they end together */
    RANGE_KEYS = 128, /* of a range at least, but for its step: each reads and packs the queries again */
};

static int64_t round_up(int64_t x, int64_t step)
{
    return attn__ceil_div(x, step) * step;
}

/* `count` ranges of each sequence, or a few more if then every thread gets as many. */
static int64_t even_count(const attn_plan *plan, int64_t count)
{
    const attn_problem *p = &plan->problem;
    const int64_t planes = p->batch * p->heads_kv;
    const int64_t last = attn__min(2 * count, p->tokens_kv / RANGE_KEYS);
    for (int64_t even = count; even <= last; even++) {
        if (planes * even % plan->threads == 0) {
            return even;
        }
    }
    return count;
}

int64_t attn__range_keys(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    const int64_t step = plan->kernel->backward_step(&plan->shape);
    const int64_t most = round_up(plan->kernel->backward_tile_k(&plan->shape), step);
    const bool alike = p->total_kv == 0; /* the sequences, as far as is known */
    const int64_t keys = alike ? p->batch * p->tokens_kv : p->total_kv;
    if (plan->threads == 1) {
        return most;
    }
    int64_t wanted = attn__ceil_div(keys * p->heads_kv, ITEMS * (int64_t)plan->threads);
    wanted = attn__min(most, round_up(attn__max(RANGE_KEYS, wanted), step));
    if (!alike) {
        return wanted;
    }
    const int64_t count = even_count(plan, attn__ceil_div(p->tokens_kv, wanted));
    return attn__min(wanted, round_up(attn__ceil_div(p->tokens_kv, count), step));
}

int64_t attn__ranges(const attn_plan *plan, const attn__sequence *s)
{
    return attn__ceil_div(s->kv_count, plan->range_keys);
}

/* The first key of a range; of the one after the last, the end.  Ranges differ by one step at most. */
static int64_t first_key(const attn_plan *plan, const attn__sequence *s, int64_t range)
{
    const int64_t step = plan->kernel->backward_step(&plan->shape);
    const int64_t steps = attn__ceil_div(s->kv_count, step), count = attn__ranges(plan, s);
    const int64_t longer = attn__min(range, steps % count); /* of those before it */
    return attn__min(s->kv_count, (steps / count * range + longer) * step);
}

int64_t attn__ranges_most(const attn_plan *plan)
{
    return attn__ceil_div(plan->problem.tokens_kv, plan->range_keys);
}

/* dK and dV of a range, a tile of dQ, where they cannot be summed in their place. */
int64_t attn__range_space(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    int64_t keys = attn__min(p->tokens_kv, plan->range_keys);
    return attn__aligned((int64_t)plan->kernel->backward_scratch(&plan->shape)) +
           attn__aligned(keys * p->dim_qk * (int64_t)sizeof(float)) +
           attn__aligned(keys * p->dim_v * (int64_t)sizeof(float)) +
           attn__aligned(plan->tile_q * p->dim_qk * (int64_t)sizeof(float));
}

/* ---- numbers ---- */

void attn__ranges_number(attn__backward *b)
{
    int64_t live = b->plan->problem.batch; /* sequences that have the range */
    for (int64_t i = 0; i < live; i++) {
        attn__sequence s = attn__sequence_at(&b->sequences, i);
        b->count[i] = attn__ranges(b->plan, &s);
    }
    attn__sort_falling(b->order, b->count, live);
    b->levels = b->count[b->order[0]];
    b->first[0] = 0;
    for (int64_t range = 0; range < b->levels; range++) {
        while (b->count[b->order[live - 1]] <= range) {
            live--;
        }
        b->first[range + 1] = b->first[range] + live * b->plan->problem.heads_kv;
    }
}

/* ---- rows ---- */

enum { DIM_MOST = 512 };

void attn__put_rows(const attn_plan *plan, const attn_tensor *t, int64_t batch, int64_t head, int64_t token,
                    int64_t count, int64_t dim, const float *rows, bool accumulate)
{
    attn_dtype dtype = plan->problem.dtype_out;
    float sum[DIM_MOST];
    for (int64_t i = 0; i < count; i++) {
        void *to = attn__tensor_at(t, dtype, batch, head, token + i);
        const float *from = rows + i * dim;
        if (accumulate) {
            attn_to_f32(sum, to, dtype, t->stride[3], dim);
            for (int64_t d = 0; d < dim; d++) {
                sum[d] += from[d];
            }
            from = sum;
        }
        attn_from_f32(to, dtype, t->stride[3], from, dim);
    }
}

void attn__put_zeros(const attn_plan *plan, const attn_tensor *t, int64_t batch, int64_t head, int64_t token,
                     int64_t count, int64_t dim)
{
    static const float zeros[DIM_MOST];
    for (int64_t i = 0; i < count; i++) {
        attn__put_rows(plan, t, batch, head, token + i, 1, dim, zeros, false);
    }
}

/* ---- one item ---- */

/* Query tiles [from, to). */
typedef struct tiles {
    int64_t from, to;
} tiles;

typedef struct item {
    attn__backward *b;
    attn__sequence s;
    int64_t sequence, range, kv_head;
    int64_t first, count; /* keys */
    tiles sees, before;   /* of this range and of the one before it */
    attn__gradient_span span;
    void *scratch;
    float *dk, *dv, *dq; /* buffers */
} item;

/* A range and a band have one interval of rows that see some of its keys. */
static tiles tiles_of(const attn__backward *b, const attn__sequence *s, int64_t range)
{
    int64_t first = first_key(b->plan, s, range), last = first_key(b->plan, s, range + 1) - 1;
    int64_t from = attn__max(0, first - s->band.hi), to = attn__min(s->q_count - 1, last - s->band.lo);
    if (from > to) {
        return (tiles){0, 0};
    }
    return (tiles){from / b->plan->tile_q, to / b->plan->tile_q + 1};
}

/* With this thread's buffers, of no range yet. */
static item open_item(attn__backward *b, int64_t sequence, int64_t kv_head)
{
    const attn_problem *p = &b->plan->problem;
    const int64_t keys = attn__min(p->tokens_kv, b->plan->range_keys), real = (int64_t)sizeof(float);
    item t = {.b = b, .sequence = sequence, .kv_head = kv_head};
    t.s = attn__sequence_at(&b->sequences, sequence);
    char *space = b->threads + attn__thread() * b->plan->space.thread;
    t.scratch = attn__take(&space, (int64_t)b->plan->kernel->backward_scratch(&b->plan->shape));
    t.dk = attn__take(&space, keys * p->dim_qk * real);
    t.dv = attn__take(&space, keys * p->dim_v * real);
    t.dq = attn__take(&space, b->plan->tile_q * p->dim_qk * real);
    return t;
}

static void set_range(item *t, int64_t range)
{
    const attn_problem *p = &t->b->plan->problem;
    t->range = range;
    t->first = first_key(t->b->plan, &t->s, range);
    t->count = first_key(t->b->plan, &t->s, range + 1) - t->first;
    t->sees = tiles_of(t->b, &t->s, range);
    t->before = range > 0 ? tiles_of(t->b, &t->s, range - 1) : (tiles){0, 0};
    const int64_t token = t->s.kv_first + t->first;
    t->span = (attn__gradient_span){
        .first = t->first,
        .count = t->count,
        .k = attn__tensor_at(&t->b->io.k, p->dtype, t->s.batch, t->kv_head, token),
        .v = attn__tensor_at(&t->b->io.v, p->dtype, t->s.batch, t->kv_head, token),
        .k_token = t->b->io.k.stride[2],
        .k_dim = t->b->io.k.stride[3],
        .v_token = t->b->io.v.stride[2],
        .v_dim = t->b->io.v.stride[3],
    };
}

static item item_at(attn__backward *b, int64_t number)
{
    const attn_problem *p = &b->plan->problem;
    int64_t low = 0, high = b->levels; /* first[low] <= number < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(b->first[middle] <= number ? &low : &high) = middle;
    }
    int64_t at = number - b->first[low];
    item t = open_item(b, b->order[at / p->heads_kv], at % p->heads_kv);
    set_range(&t, low);
    return t;
}

/* Where dk or dv of the range is summed: zeros, or what is to be added to. */
static float *open_keys(const item *t, const attn_tensor *out, int64_t dim, float *buffer, int64_t *token)
{
    const attn__backward *b = t->b;
    *token = dim;
    if (out->data == NULL) {
        return NULL;
    }
    if (!attn__adds_in_place(b->plan, out)) {
        memset(buffer, 0, (size_t)(t->count * dim) * sizeof *buffer);
        return buffer;
    }
    if (!b->io.accumulate) {
        attn__put_zeros(b->plan, out, t->s.batch, t->kv_head, t->s.kv_first + t->first, t->count, dim);
    }
    *token = out->stride[2];
    return attn__tensor_at(out, ATTN_F32, t->s.batch, t->kv_head, t->s.kv_first + t->first);
}

static void close_keys(const item *t, const attn_tensor *out, int64_t dim, const float *buffer)
{
    const attn__backward *b = t->b;
    if (out->data != NULL && !attn__adds_in_place(b->plan, out)) {
        attn__put_rows(b->plan, out, t->s.batch, t->kv_head, t->s.kv_first + t->first, t->count, dim, buffer,
                       b->io.accumulate);
    }
}

/* Some rows of dq, which are this item's from when it is asked for them until it is through. */
typedef struct query_turn {
    attn__turn turn;
    const item *item;
    int64_t head, tile, row, count;
    atomic_uint *next; /* the range whose turn it is */
    bool here;
} query_turn;

/* dq is summed in a buffer? */
static bool buffers_queries(const attn__backward *b)
{
    return b->dq == NULL && !attn__adds_in_place(b->plan, &b->io.dq);
}

/* Where dq of the rows is summed. */
static float *queries_of(const query_turn *turn, int64_t *token)
{
    const item *t = turn->item;
    const attn__backward *b = t->b;
    *token = b->plan->problem.dim_qk;
    if (b->dq != NULL) {
        return b->dq + attn__row_at(b, &t->s, turn->head, turn->row) * *token;
    }
    if (buffers_queries(b)) {
        return t->dq;
    }
    *token = b->io.dq.stride[2];
    return attn__tensor_at(&b->io.dq, ATTN_F32, t->s.batch, turn->head, t->s.q_first + turn->row);
}

static void load_queries(const query_turn *turn)
{
    const item *t = turn->item;
    const attn_tensor *out = &t->b->io.dq;
    const int64_t dim = t->b->plan->problem.dim_qk;
    for (int64_t i = 0; i < turn->count; i++) {
        const int64_t token = t->s.q_first + turn->row + i;
        attn_to_f32(t->dq + i * dim, attn__tensor_at(out, ATTN_F32, t->s.batch, turn->head, token), ATTN_F32,
                    out->stride[3], dim);
    }
}

/* Until the range before has added to this tile, if it does at all; false when something has failed. */
static bool wait_for_turn(const query_turn *turn)
{
    enum { SPINS = 256 };
    const item *t = turn->item;
    if (turn->tile < t->before.from || turn->tile >= t->before.to) {
        return true;
    }
    for (;;) {
        for (int i = 0; i < SPINS; i++) {
            if (atomic_load_explicit(turn->next, memory_order_acquire) == (unsigned)t->range) {
                return true;
            }
            attn__relax();
        }
        if (attn__run_stopped(&t->b->run)) {
            return false;
        }
        sched_yield();
    }
}

static bool turn_comes(attn__turn *base)
{
    query_turn *turn = (query_turn *)base;
    if (!turn->here && wait_for_turn(turn)) {
        turn->here = true;
        if (buffers_queries(turn->item->b)) {
            load_queries(turn);
        }
    }
    return turn->here;
}

/* The rows are the next range's. */
static void end_turn(const query_turn *turn)
{
    const item *t = turn->item;
    const attn__backward *b = t->b;
    if (buffers_queries(b)) {
        attn__put_rows(b->plan, &b->io.dq, t->s.batch, turn->head, t->s.q_first + turn->row, turn->count,
                       b->plan->problem.dim_qk, t->dq, false);
    }
    atomic_store_explicit(turn->next, (unsigned)t->range + 1, memory_order_release);
}

/* One kernel call: some queries of one head, without dq. */
static attn__gradient gradient_of(const item *t, int64_t head, int64_t row, int64_t count)
{
    const attn__backward *b = t->b;
    const attn_problem *p = &b->plan->problem;
    const int64_t at = attn__row_at(b, &t->s, head, row), token = t->s.q_first + row;
    return (attn__gradient){.dtype = p->dtype,
                            .dim_qk = p->dim_qk,
                            .dim_v = p->dim_v,
                            .scale = (float)p->scale,
                            .lo = t->s.band.lo,
                            .hi = t->s.band.hi,
                            .first = row,
                            .count = count,
                            .q = attn__tensor_at(&b->io.q, p->dtype, t->s.batch, head, token),
                            .q_token = b->io.q.stride[2],
                            .q_dim = b->io.q.stride[3],
                            .dout = attn__tensor_at(&b->io.dout, p->dtype, t->s.batch, head, token),
                            .dout_token = b->io.dout.stride[2],
                            .dout_dim = b->io.dout.stride[3],
                            .lse = b->lse + at,
                            .delta = b->delta + at,
                            .spans = &t->span,
                            .span_count = 1};
}

static int64_t rows_of(const item *t, int64_t tile)
{
    const int64_t tile_q = t->b->plan->tile_q;
    return attn__min(tile_q, t->s.q_count - tile * tile_q);
}

/* A query tile of one head. */
static bool add_tile(const item *t, int64_t head, int64_t tile)
{
    attn__backward *b = t->b;
    const attn_plan *plan = b->plan;
    const int64_t row = tile * plan->tile_q, count = rows_of(t, tile);
    attn__gradient gradient = gradient_of(t, head, row, count);
    if (b->io.dq.data == NULL || plan->dq_apart) {
        plan->kernel->backward(&gradient, t->scratch);
        return true;
    }
    const int64_t place = attn__first_place(b, t->sequence) + tile;
    query_turn turn = {
        .turn = {turn_comes}, .item = t, .head = head, .tile = tile, .row = row, .count = count};
    turn.next = &b->turns[place * plan->problem.heads_q + head];
    gradient.dq = queries_of(&turn, &gradient.dq_token);
    gradient.turn = &turn.turn;
    plan->kernel->backward(&gradient, t->scratch);
    if (!turn_comes(&turn.turn)) { /* also where the kernel has nothing to add */
        return false;
    }
    end_turn(&turn);
    return true;
}

static bool add_range(item *t)
{
    const attn__backward *b = t->b;
    const attn_problem *p = &b->plan->problem;
    const int64_t group = p->heads_q / p->heads_kv;
    t->span.dk = open_keys(t, &b->io.dk, p->dim_qk, t->dk, &t->span.dk_token);
    t->span.dv = open_keys(t, &b->io.dv, p->dim_v, t->dv, &t->span.dv_token);
    for (int64_t head = t->kv_head * group; head < (t->kv_head + 1) * group; head++) {
        for (int64_t tile = t->sees.to - 1; tile >= t->sees.from; tile--) {
            if (!add_tile(t, head, tile)) {
                return false;
            }
        }
    }
    close_keys(t, &b->io.dk, p->dim_qk, t->dk);
    close_keys(t, &b->io.dv, p->dim_v, t->dv);
    return true;
}

/* ---- dq apart ---- */

const float *attn__ranges_queries(attn__backward *b, int64_t sequence, int64_t head, int64_t tile)
{
    const attn_plan *plan = b->plan;
    const attn_problem *p = &plan->problem;
    item t = open_item(b, sequence, head / (p->heads_q / p->heads_kv));
    const int64_t count = rows_of(&t, tile), ranges = attn__ranges(plan, &t.s);
    memset(t.dq, 0, (size_t)(count * p->dim_qk) * sizeof *t.dq);
    for (int64_t range = 0; range < ranges; range++) {
        set_range(&t, range);
        if (tile >= t.sees.from && tile < t.sees.to) {
            attn__gradient gradient = gradient_of(&t, head, tile * plan->tile_q, count);
            gradient.dq = t.dq;
            gradient.dq_token = p->dim_qk;
            plan->kernel->backward(&gradient, t.scratch);
        }
    }
    return t.dq;
}

/* ---- all items ---- */

/* Cells are told so that over all items they add up to those of one (batch, head). */
static attn_status tell(const item *t, double begin)
{
    attn__backward *b = t->b;
    int64_t planes = b->plan->problem.batch * b->plan->problem.heads_kv;
    int64_t cells = attn__band_cells(t->s.band, 0, t->s.q_count, t->first, t->count);
    int64_t before = atomic_fetch_add(&b->cells, cells);
    return attn__run_event(&b->run, (attn_event){.step = ATTN_STEP_COMPUTE,
                                                 .begin = begin,
                                                 .cells = (before + cells) / planes - before / planes});
}

void attn__ranges_work(attn__backward *b)
{
    int64_t items = b->first[b->levels];
    for (;;) {
        int64_t number = atomic_fetch_add(&b->next, 1);
        if (number >= items || attn__run_stopped(&b->run)) {
            return;
        }
        item t = item_at(b, number);
        double begin = attn__now();
        if (!add_range(&t)) {
            return;
        }
        attn__run_failed(&b->run, tell(&t, begin));
    }
}
