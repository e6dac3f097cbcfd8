/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few.c - sequences of few queries and many keys, as when tokens are generated one by one ("split-K",
 * "flash decoding"): the keys are shared out, since query tiles and heads are too few for the threads, and
 * time goes into reading K and V.
 *
 * The keys that some query sees are cut into chunks, as many keys as K and V of one kv head fill CHUNK_BYTES
 * with.  A task is a run of chunks.  Where all query heads of the group see all of it they go over it in one
 * kernel call, as the rows of one tile; where the mask cuts it, head by head over a chunk while that lies in
 * L2, and the task folds the chunks' partials in order.  The last task of a kv head to end folds the tasks'
 * partials in ascending order.  The cut is by the sequence's shape alone, so the bits do not depend on the
 * number of threads or on what else is in the batch.
 *
 * Items are taken in order, of a sequence the tasks of the same keys one kv head after the other, since with
 * [token, head, dim] their keys lie side by side.  So the planes (sequence, kv head) at work, each of which
 * needs a region for its tasks' partials, are at most one a thread and those of the sequence being handed
 * out.
 *
 * COST.  K and V are read from memory once; a fold is some hundred FLOPs a row and run.
 */
#include <string.h>

#include "engine/direct.h"

enum {
    ROWS = 128,               /* rows of a kernel call: with more, heads and tiles are work enough */
    CHUNK_BYTES = 256 * 1024, /* an eighth of a large L2, a quarter of an older one */
    CHUNK_LEAST = 64,         /* keys: what a kernel call costs beside them stays small */
    TASKS = 128,              /* of a sequence, over its kv heads: many threads end together */
};

int64_t attn__few_rows(const attn_problem *p)
{
    return attn__min(ROWS, p->tokens_q * (p->heads_q / p->heads_kv));
}

static int64_t chunk_keys(const attn_problem *p)
{
    int64_t bytes = (p->dim_qk + p->dim_v) * (int64_t)attn_dtype_size(p->dtype);
    return attn__max(CHUNK_LEAST, CHUNK_BYTES / bytes);
}

static int64_t tasks_most(const attn_problem *p)
{
    return attn__ceil_div(TASKS, p->heads_kv);
}

attn__few attn__few_of(const attn_plan *plan, const attn__sequence *s)
{
    const attn_problem *p = &plan->problem;
    int64_t group = p->heads_q / p->heads_kv;
    attn__few few = {.rows = s->q_count * group, .chunk = chunk_keys(p)};
    few.begin = attn__max(0, s->band.lo);
    few.end = attn__min(s->kv_count, s->q_count + s->band.hi);
    int64_t chunks = attn__ceil_div(attn__max(0, few.end - few.begin), few.chunk);
    bool fits = few.rows > 0 && few.rows <= attn__min(ROWS, plan->call_rows);
    bool pays = chunks > 1 || (chunks == 1 && group > 1); /* otherwise it is a query tile like others */
    if (fits && pays) {
        few.run = attn__ceil_div(chunks, attn__min(chunks, tasks_most(p)));
        few.tasks = attn__ceil_div(chunks, few.run);
    }
    return few;
}

/* ---- memory ---- */

/* Floats of a task's partial: o, then lse. */
static int64_t partial_floats(const attn_problem *p, int64_t rows)
{
    return attn__aligned(rows * (p->dim_v + 1) * (int64_t)sizeof(float)) / (int64_t)sizeof(float);
}

/* Of one (sequence, kv head). */
static int64_t plane_floats(const attn_problem *p)
{
    int64_t chunks = attn__ceil_div(p->tokens_kv, chunk_keys(p));
    return attn__min(chunks, tasks_most(p)) * partial_floats(p, attn__few_rows(p));
}

/* Can a sequence of this plan be one?  Not if all are as long as the longest, and that is too long. */
static bool possible(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    return plan->in_memory || p->tokens_q * (p->heads_q / p->heads_kv) <= ROWS;
}

static int64_t planes_of(const attn_plan *plan)
{
    return possible(plan) ? plan->problem.batch * plan->problem.heads_kv : 0;
}

static int64_t regions_of(const attn_plan *plan)
{
    return attn__min(planes_of(plan), plan->threads + plan->problem.heads_kv);
}

int64_t attn__few_lay_out(attn__forward *f, const attn_plan *plan, char *at)
{
    int64_t planes = planes_of(plan) * (int64_t)sizeof *f->planes;
    int64_t regions = regions_of(plan) * (int64_t)sizeof *f->free;
    int64_t partials = regions_of(plan) * plane_floats(&plan->problem) * (int64_t)sizeof *f->partials;
    if (at != NULL) {
        f->planes = attn__take(&at, planes);
        f->free = attn__take(&at, regions);
        f->partials = attn__take(&at, partials);
    }
    return attn__aligned(planes) + attn__aligned(regions) + attn__aligned(partials);
}

void attn__few_begin(attn__forward *f)
{
    const attn_plan *plan = f->run->plan;
    for (int64_t plane = 0; plane < planes_of(plan); plane++) {
        f->planes[plane] = (attn__few_plane){.region = -1};
    }
    for (f->free_count = 0; f->free_count < regions_of(plan); f->free_count++) {
        f->free[f->free_count] = f->free_count;
    }
}

/* The partials of a plane, with a region from now on. */
static float *begin_task(attn__forward *f, attn__few_plane *plane)
{
    pthread_mutex_lock(&f->run->lock);
    if (plane->region < 0) {
        plane->region = f->free[--f->free_count];
    }
    pthread_mutex_unlock(&f->run->lock);
    return f->partials + plane->region * plane_floats(&f->run->plan->problem);
}

/* Was it the last of `tasks`? */
static bool end_task(attn__forward *f, attn__few_plane *plane, int64_t tasks)
{
    pthread_mutex_lock(&f->run->lock);
    bool last = ++plane->done == tasks;
    pthread_mutex_unlock(&f->run->lock);
    return last;
}

static void end_plane(attn__forward *f, const attn__few_plane *plane)
{
    pthread_mutex_lock(&f->run->lock);
    f->free[f->free_count++] = plane->region;
    pthread_mutex_unlock(&f->run->lock);
}

/* ---- a task ---- */

typedef struct task {
    const attn__forward *f;
    const attn__sequence *s;
    const attn__few *few;
    int64_t kv_head, group;
    attn__forward_thread space;
} task;

/* The queries of the group's heads, one after another. */
static void copy_queries(const task *t)
{
    const attn_problem *p = &t->f->run->plan->problem;
    const attn_tensor *q = &t->f->in[ATTN_Q];
    int64_t element = (int64_t)attn_dtype_size(p->dtype), row = p->dim_qk * element;
    for (int64_t i = 0; i < t->few->rows; i++) {
        int64_t head = t->kv_head * t->group + i / t->s->q_count, token = t->s->q_first + i % t->s->q_count;
        attn__copy_row(t->space.q + i * row, attn__tensor_at(q, p->dtype, t->s->batch, head, token), element,
                       q->stride[3], p->dim_qk);
    }
}

/* Do all rows see all of the keys [from, to)? */
static bool all_seen(const task *t, int64_t from, int64_t to)
{
    const attn__band band = t->s->band;
    return from >= t->s->q_count - 1 + band.lo && to - 1 <= band.hi;
}

/* The partial of keys [from, to) for all rows. */
static void compute_chunk(const task *t, int64_t from, int64_t to, float *o, float *lse)
{
    const attn_plan *plan = t->f->run->plan;
    const attn_problem *p = &plan->problem;
    attn__span span;
    attn__block block = attn__forward_block(t->f, t->s, t->kv_head, from, to - from, &span);
    bool whole = all_seen(t, from, to);
    int64_t rows = whole ? t->few->rows : t->s->q_count; /* of a call */
    if (whole) {
        block.lo = -ATTN__BAND_OPEN;
        block.hi = ATTN__BAND_OPEN;
    }
    block.count = rows;
    block.q_token = p->dim_qk;
    block.q_dim = 1;
    block.o_stride = p->dim_v;
    for (int64_t row = 0; row < t->few->rows; row += rows) {
        block.q = t->space.q + row * p->dim_qk * (int64_t)attn_dtype_size(p->dtype);
        block.o = o + row * p->dim_v;
        block.lse = lse + row;
        plan->kernel->forward(&block, t->space.scratch);
    }
}

/* A run of chunks, folded in order into the task's partial; in one call if the mask does not cut it, since
 * the processor's reading ahead begins anew with each. */
static void compute_run(const task *t, int64_t number, float *o)
{
    const attn__few *few = t->few;
    int64_t dim = t->f->run->plan->problem.dim_v, size = few->run * few->chunk;
    int64_t first = few->begin + number * size, end = attn__min(few->end, first + size);
    float *lse = o + few->rows * dim;
    int64_t step = all_seen(t, first, end) ? size : few->chunk;
    for (int64_t from = first; from < end; from += step) {
        int64_t to = attn__min(end, from + step);
        if (from == first) {
            compute_chunk(t, from, to, o, lse);
        } else {
            compute_chunk(t, from, to, t->space.o, t->space.lse);
            attn__merge(o, dim, lse, t->space.o, dim, t->space.lse, few->rows, dim);
        }
    }
}

/* All tasks have ended: their partials become rows of the result. */
static attn_status finish(const task *t, float *o, int64_t step)
{
    const attn_sink *sink = &t->f->run->io->sink;
    int64_t dim = t->f->run->plan->problem.dim_v, rows = t->few->rows, queries = t->s->q_count;
    float *lse = o + rows * dim;
    for (int64_t number = 1; number < t->few->tasks; number++) {
        const float *next = o + number * step;
        attn__merge(o, dim, lse, next, dim, next + rows * dim, rows, dim);
    }
    for (int64_t h = 0; h < t->group; h++) {
        int64_t row = h * queries;
        ATTN__TRY(sink->write(sink->data, t->s->batch, t->kv_head * t->group + h, t->s->q_first, queries,
                              o + row * dim, dim, lse + row));
    }
    return ATTN_OK;
}

attn_status attn__few_compute(attn__forward *f, const attn__sequence *s, int64_t sequence,
                              const attn__few *few, int64_t item)
{
    const attn_problem *p = &f->run->plan->problem;
    int64_t kv_head = item % p->heads_kv, number = item / p->heads_kv, step = partial_floats(p, few->rows);
    attn__few_plane *plane = &f->planes[sequence * p->heads_kv + kv_head];
    float *partials = begin_task(f, plane);
    task t = {f, s, few, kv_head, p->heads_q / p->heads_kv, attn__forward_space(f)};
    copy_queries(&t);
    compute_run(&t, number, partials + number * step);
    if (!end_task(f, plane, few->tasks)) {
        return ATTN_OK;
    }
    attn_status status = finish(&t, partials, step);
    end_plane(f, plane);
    return status;
}
