/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.c - one rank's share: gather the token groups that its task list needs, compute one partial per
 * query group, hand it over.  It talks to its attn_comm only; a worker on another machine would run the same
 * lines.
 *
 * With inputs that a GPU must be given (stage.c) gathering and computing are its part.
 *
 * The key and value groups of the quorum stay in the arena for all of the rank's query groups; query groups
 * come one at a time.  The arena keeps, for each (batch, head), the rows of all held groups one after another
 * in ascending order, so that neighbouring groups are one span for the kernel.
 */
#include <string.h>

#include "engine/worker.h"

/* ---- set up ---- */

static void lay_out(attn__rank_work *w, attn__run *run, int64_t rank, int64_t slot)
{
    const attn_plan *plan = run->plan;
    const attn__space *s = &plan->space;
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    char *at = run->workspace + slot * s->worker;
    *w = (attn__rank_work){.run = run, .slot = slot};
    w->comm = attn__local_comm(&run->local, rank, plan->layout.workers);
    w->pairs = attn__take(&at, 2 * plan->layout.workers * (int64_t)sizeof(attn_pair));
    w->groups = attn__take(&at, (plan->set_q_size + 2 * plan->set_kv_size) * (int64_t)sizeof(int64_t));
    w->held = w->groups + plan->set_q_size;
    w->offset = w->held + plan->set_kv_size;
    if (plan->stage != NULL) {
        return;
    }
    if (!plan->in_memory) {
        w->k = attn__take(&at, s->kv_rows * bytes.k);
        w->v = attn__take(&at, s->kv_rows * bytes.v);
        w->q = attn__take(&at, s->q_rows * bytes.q);
    }
    w->o = attn__take(&at, s->q_rows * bytes.o);
    w->threads = at;
}

static void sort(int64_t *list, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        int64_t x = list[i], j = i;
        for (; j > 0 && list[j - 1] > x; j--) {
            list[j] = list[j - 1];
        }
        list[j] = x;
    }
}

/* Task list and material list. */
static void list_tasks(attn__rank_work *w)
{
    const attn_plan *plan = w->run->plan;
    int64_t workers = plan->layout.workers;
    w->pair_count = attn__schedule_pairs(plan->schedule, w->comm.rank, w->pairs);
    for (int64_t a = 0; a < plan->set_q_size; a++) {
        w->groups[a] = attn__mod(w->comm.rank + attn__plan_set_q(plan)[a], workers);
    }
    sort(w->groups, plan->set_q_size);
    int64_t *quorum = w->offset; /* free until the offsets are known */
    for (int64_t b = 0; b < plan->set_kv_size; b++) {
        quorum[b] = attn__mod(w->comm.rank + attn__plan_set_kv(plan)[b], workers);
    }
    sort(quorum, plan->set_kv_size);
    for (int64_t b = 0; b < plan->set_kv_size; b++) {
        bool needed = false;
        for (int64_t i = 0; i < w->pair_count && !needed; i++) {
            needed = w->pairs[i].kv == quorum[b];
        }
        if (needed) {
            w->held[w->held_count++] = quorum[b];
        }
    }
    for (int64_t i = 0; i < w->held_count; i++) {
        w->offset[i] = w->held_rows;
        w->held_rows += attn__group_count(plan->problem.tokens_kv, workers, w->held[i]);
    }
}

/* ---- gather ---- */

/* One group of one operand, all batches, into rows from `row` of an array of `rows` rows a plane. */
static attn_status get_group(attn__rank_work *w, attn_operand operand, int64_t group, char *dst, int64_t row,
                             int64_t rows)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    int64_t element = (int64_t)attn_dtype_size(p->dtype), dim = attn__dim(p, operand);
    int64_t heads = attn__heads(p, operand), tokens = attn__tokens(p, operand);
    for (int64_t b = 0; b < p->batch; b++) {
        attn_get get = {
            .operand = operand,
            .batch = b,
            .group = group,
            .first = attn__group_first(tokens, plan->layout.workers, group),
            .count = attn__group_count(tokens, plan->layout.workers, group),
            .dst = dst + (b * heads * rows + row) * dim * element,
            .head_stride = rows * dim,
        };
        void *ticket;
        ATTN__TRY(w->comm.ops->get_begin(&w->comm, &get, &ticket));
        ATTN__TRY(w->comm.ops->get_wait(&w->comm, ticket));
    }
    return ATTN_OK;
}

attn_status attn__worker_gathered(attn__rank_work *w, int64_t group, double begin, int64_t bytes)
{
    return attn__run_event(
        w->run,
        (attn_event){
            .step = ATTN_STEP_GATHER, .rank = w->comm.rank, .group = group, .begin = begin, .bytes = bytes});
}

static attn_status gather_keys(attn__rank_work *w)
{
    attn__bytes bytes = attn__problem_bytes(&w->run->plan->problem);
    double begin = attn__now();
    if (w->k == NULL) {
        return ATTN_OK;
    }
    for (int64_t i = 0; i < w->held_count; i++) {
        ATTN__TRY(get_group(w, ATTN_K, w->held[i], w->k, w->offset[i], w->held_rows));
        ATTN__TRY(get_group(w, ATTN_V, w->held[i], w->v, w->offset[i], w->held_rows));
    }
    return attn__worker_gathered(w, -1, begin, w->held_rows * (bytes.k + bytes.v));
}

static attn_status gather_queries(attn__rank_work *w, int64_t group, int64_t count)
{
    double begin = attn__now();
    if (w->q == NULL) {
        return ATTN_OK;
    }
    ATTN__TRY(get_group(w, ATTN_Q, group, w->q, 0, count));
    return attn__worker_gathered(w, group, begin, count * attn__problem_bytes(&w->run->plan->problem).q);
}

/* ---- compute ---- */

/* Where row `row` of a plane is, and how to step to the next row and dim. */
typedef struct view {
    const char *data;
    int64_t token, dim;
} view;

static view look(const attn__rank_work *w, attn_operand operand, const char *arena, int64_t rows, int64_t row,
                 int64_t position, int64_t batch, int64_t head)
{
    const attn_problem *p = &w->run->plan->problem;
    int64_t element = (int64_t)attn_dtype_size(p->dtype);
    if (arena == NULL) {
        const attn_tensor *t = &w->run->io->in[operand];
        int64_t at = batch * t->stride[0] + head * t->stride[1] + position * t->stride[2];
        return (view){(const char *)t->data + at * element, t->stride[2], t->stride[3]};
    }
    int64_t dim = attn__dim(p, operand), plane = batch * attn__heads(p, operand) + head;
    return (view){arena + (plane * rows + row) * dim * element, dim, 1};
}

/* The spans of a piece for one (batch, kv head): neighbouring groups become one. */
static int64_t list_spans(const attn__rank_work *w, const attn__piece *t, int64_t batch, int64_t head,
                          attn__span *spans)
{
    const attn_plan *plan = w->run->plan;
    int64_t count = 0, tokens = plan->problem.tokens_kv, at = 0;
    for (int64_t i = 0; i < t->pair_count; i++) {
        int64_t group = t->pairs[i].kv;
        if (t->pairs[i].part != 0 && t->pairs[i].part != t->part) {
            continue;
        }
        while (w->held[at] != group) {
            at++;
        }
        int64_t first = attn__group_first(tokens, plan->layout.workers, group);
        int64_t rows = attn__group_count(tokens, plan->layout.workers, group);
        if (count > 0 && spans[count - 1].first + spans[count - 1].count == first) {
            spans[count - 1].count += rows;
            continue;
        }
        view k = look(w, ATTN_K, w->k, w->held_rows, w->offset[at], first, batch, head);
        view v = look(w, ATTN_V, w->v, w->held_rows, w->offset[at], first, batch, head);
        spans[count++] = (attn__span){first, rows, k.data, v.data, k.token, k.dim, v.token, v.dim};
    }
    return count;
}

/* An item is one tile of the piece for one (batch, head), a plane.  Last tiles first: under a causal mask
 * they are the long ones, and short ones fill up the end. */
typedef struct place {
    int64_t b, h, plane;
    int64_t row;   /* of the piece */
    int64_t local; /* of the group */
    view q;
} place;

static int64_t tiles_of(const attn__rank_work *w, const attn__piece *t)
{
    return attn__ceil_div(t->count, w->run->plan->tile_q);
}

static place place_of(const attn__rank_work *w, const attn__piece *t, int64_t item)
{
    const attn_plan *plan = w->run->plan;
    const int64_t heads = plan->problem.heads_q, tiles = tiles_of(w, t), plane = item / tiles;
    place at = {.b = plane / heads, .h = plane % heads, .plane = plane};
    at.row = (tiles - 1 - item % tiles) * plan->tile_q;
    at.local = t->first - t->group_first + at.row;
    at.q = look(w, ATTN_Q, w->q, t->group_count, at.local, t->first + at.row, at.b, at.h);
    return at;
}

/* One kernel call; `next` is the item that this thread is likely to take after it, or -1. */
static void compute_item(const attn__rank_work *w, const attn__piece *t, int64_t item, int64_t next)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    const place own = place_of(w, t, item);
    char *at = w->threads + attn__thread() * plan->space.thread;
    char *scratch = attn__take(&at, (int64_t)plan->kernel->scratch(&plan->shape));
    attn__span *spans = attn__take(&at, plan->set_kv_size * (int64_t)sizeof(attn__span));
    attn__block block = {
        .dtype = p->dtype,
        .dim_qk = p->dim_qk,
        .dim_v = p->dim_v,
        .scale = (float)p->scale,
        .lo = plan->band.lo,
        .hi = plan->band.hi,
        .first = t->first + own.row,
        .count = attn__min(plan->tile_q, t->count - own.row),
        .q = own.q.data,
        .q_token = own.q.token,
        .q_dim = own.q.dim,
        .next_q = next < 0 ? NULL : place_of(w, t, next).q.data,
        .spans = spans,
        .span_count = list_spans(w, t, own.b, own.h / (p->heads_q / p->heads_kv), spans),
        .o = w->o + (own.plane * t->group_count + own.local) * p->dim_v,
        .o_stride = p->dim_v,
        .lse = w->lse + own.plane * t->group_count + own.local,
    };
    plan->kernel->forward(&block, scratch);
}

static int64_t piece_cells(const attn__rank_work *w, const attn__piece *t)
{
    const attn_plan *plan = w->run->plan;
    int64_t cells = 0, tokens = plan->problem.tokens_kv;
    for (int64_t i = 0; i < t->pair_count; i++) {
        if (t->pairs[i].part == 0 || t->pairs[i].part == t->part) {
            int64_t group = t->pairs[i].kv;
            cells += attn__band_cells(plan->band, t->first, t->count,
                                      attn__group_first(tokens, plan->layout.workers, group),
                                      attn__group_count(tokens, plan->layout.workers, group));
        }
    }
    return cells;
}

static attn_status compute_piece(attn__rank_work *w, const attn__piece *t)
{
    const attn_plan *plan = w->run->plan;
    int64_t items = plan->problem.batch * plan->problem.heads_q * tiles_of(w, t), cells = piece_cells(w, t);
    double flops = attn__flops(&plan->problem, cells);
    int64_t slices = attn__slices(plan, flops, items);
    bool together = attn__worth_threads(flops);
    for (int64_t slice = 0; slice < slices; slice++) {
        int64_t from = items * slice / slices, to = items * (slice + 1) / slices;
        double begin = attn__now();
#pragma omp parallel for schedule(dynamic) num_threads(plan->threads) if (together)
        for (int64_t item = from; item < to; item++) {
            const int64_t next = item + attn__team();
            compute_item(w, t, item, next < items ? next : -1);
        }
        if (attn__run_stopped(w->run)) {
            return attn__fail(ATTN_ECANCELED, "another worker failed");
        }
        ATTN__TRY(attn__run_event(w->run, (attn_event){
                                              .step = ATTN_STEP_COMPUTE,
                                              .rank = w->comm.rank,
                                              .group = t->group,
                                              .begin = begin,
                                              .cells = cells * (slice + 1) / slices - cells * slice / slices,
                                          }));
    }
    return ATTN_OK;
}

/* ---- one query group ---- */

attn_status attn__worker_hand_over(attn__rank_work *w, const attn__piece *t, float *o, float *lse)
{
    attn_partial partial = {w->comm.rank, t->group, t->group_first, t->group_count, o, lse};
    void *ticket;
    ATTN__TRY(w->comm.ops->put_begin(&w->comm, &partial, &ticket));
    return w->comm.ops->put_wait(&w->comm, ticket);
}

/* Two pieces where a half-difference pair reaches only half of the rows, one piece otherwise. */
static attn_status compute_group(attn__rank_work *w, attn__piece t)
{
    bool halved = false;
    for (int64_t i = 0; i < t.pair_count; i++) {
        halved = halved || t.pairs[i].part != 0;
    }
    if (!w->gathered) {
        ATTN__TRY(gather_keys(w));
        w->gathered = true;
    }
    ATTN__TRY(gather_queries(w, t.group, t.group_count));
    const attn_problem *p = &w->run->plan->problem; /* lse behind o, both dense for this group's rows */
    w->lse = w->o + p->batch * p->heads_q * t.group_count * p->dim_v;
    if (!halved) {
        ATTN__TRY(compute_piece(w, &t));
        return attn__worker_hand_over(w, &t, w->o, w->lse);
    }
    int64_t cut = t.group_count / 2;
    attn__piece lower = t, upper = t;
    lower.part = 1;
    lower.count = cut;
    upper.part = 2;
    upper.first += cut;
    upper.count -= cut;
    ATTN__TRY(compute_piece(w, &lower));
    ATTN__TRY(compute_piece(w, &upper));
    return attn__worker_hand_over(w, &t, w->o, w->lse);
}

int64_t attn__pairs_cells(const attn_plan *plan, const attn__piece *t)
{
    int64_t cells = 0;
    for (int64_t i = 0; i < t->pair_count; i++) {
        attn__block_rows rows = attn__schedule_rows(plan->schedule, t->pairs[i]);
        cells += attn__band_cells(plan->band, rows.q_first, rows.q_count, rows.kv_first, rows.kv_count);
    }
    return cells;
}

/* Taken over from the spool? */
static attn_status find_done(attn__rank_work *w, const attn__piece *t, int64_t a, bool *done)
{
    attn__run *run = w->run;
    *done = false;
    if (!run->plan->spooled) {
        return ATTN_OK;
    }
    int64_t rank = w->comm.rank;
    double begin = attn__now();
    ATTN__TRY(attn__spool_find(run, rank, t->group, done));
    run->have[rank * run->plan->set_q_size + a] = 1;
    if (!*done) {
        return ATTN_OK;
    }
    return attn__run_event(
        run, (attn_event){.step = ATTN_STEP_RESUME,
                          .rank = rank,
                          .group = t->group,
                          .begin = begin,
                          .cells = attn__pairs_cells(run->plan, t),
                          .bytes = t->group_count * attn__problem_bytes(&run->plan->problem).o});
}

/* Which offset of A makes `group` out of this rank. */
static int64_t offset_of(const attn__rank_work *w, int64_t group)
{
    const attn_plan *plan = w->run->plan;
    int64_t a = 0, want = attn__mod(group - w->comm.rank, plan->layout.workers);
    while (attn__plan_set_q(plan)[a] != want) {
        a++;
    }
    return a;
}

attn_status attn__worker(attn__run *run, int64_t rank, int64_t slot)
{
    const attn_plan *plan = run->plan;
    attn__rank_work w;
    lay_out(&w, run, rank, slot);
    list_tasks(&w);
    int64_t at = 0;
    for (int64_t i = 0; i < plan->set_q_size; i++) {
        int64_t group = w.groups[i], from = at;
        while (at < w.pair_count && w.pairs[at].q == group) {
            at++;
        }
        attn__piece t = {.group = group, .pairs = w.pairs + from, .pair_count = at - from};
        t.group_first = t.first = attn__group_first(plan->problem.tokens_q, plan->layout.workers, group);
        t.group_count = t.count = attn__group_count(plan->problem.tokens_q, plan->layout.workers, group);
        if (t.pair_count == 0) {
            ATTN__TRY(attn__tiler_pass(run, rank, group));
            continue;
        }
        bool done;
        ATTN__TRY(find_done(&w, &t, offset_of(&w, group), &done));
        if (done) {
            continue;
        }
        ATTN__TRY(plan->stage != NULL ? attn__stage_group(&w, &t) : compute_group(&w, t));
    }
    return plan->stage != NULL ? attn__stage_end(&w) : ATTN_OK;
}
