/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiler.c - folds partials into rows, in ascending order of rank for each query group, so that the bits do
 * not depend on who finished first.
 *
 * In memory, a partial is folded into the accumulators when it is handed over; a worker that comes early
 * waits for its turn.  Ranks start in ascending order and visit their groups in ascending order, so the
 * lowest rank at work never waits: no deadlock.  With a spool, partials become files, and the fold reads them
 * at the end, by pieces of rows small enough for any memory limit.  Both ways fold the same values in the
 * same order: same bits.
 */
#include <string.h>

#include "engine/engine.h"

/* Rows of one (batch, head) that the spool's fold holds at once: long reads, small memory. */
enum { FOLD_ROWS = 2048 };

/* 1 MiB of o: about 100 us on one core, a few times what a parallel region costs. */
enum { FOLD_ALONE = 1 << 18 };

static int64_t planes(const attn_plan *plan)
{
    return plan->problem.batch * plan->problem.heads_q;
}

/* Two buffers of one fold: the rows so far and the partial that comes. */
static int64_t fold_space(const attn_plan *plan)
{
    return 2 * attn__aligned(FOLD_ROWS * plan->problem.dim_v * (int64_t)sizeof(float)) +
           2 * attn__aligned(FOLD_ROWS * (int64_t)sizeof(float));
}

int64_t attn__tiler_space(const attn_plan *plan, int64_t workers, int64_t size_q)
{
    int64_t rows = planes(plan) * plan->problem.tokens_q;
    if (plan->spooled) {
        return attn__aligned(workers * size_q) + plan->threads * fold_space(plan);
    }
    return attn__aligned(workers * (int64_t)sizeof(int64_t)) +
           attn__aligned(rows * plan->problem.dim_v * (int64_t)sizeof(float)) +
           attn__aligned(rows * (int64_t)sizeof(float));
}

void attn__tiler_begin(attn__run *run)
{
    const attn_plan *plan = run->plan;
    int64_t rows = planes(plan) * plan->problem.tokens_q, workers = plan->layout.workers;
    char *at = run->tiler;
    if (plan->spooled) {
        run->have = (unsigned char *)at;
        memset(run->have, 0, (size_t)(workers * plan->set_q_size));
        return;
    }
    run->turn = (int64_t *)at;
    at += attn__aligned(workers * (int64_t)sizeof(int64_t));
    run->acc_o = (float *)at;
    run->acc_lse = (float *)(at + attn__aligned(rows * plan->problem.dim_v * (int64_t)sizeof(float)));
    memset(run->turn, 0, (size_t)workers * sizeof *run->turn);
    attn__merge_identity(run->acc_o, plan->problem.dim_v, run->acc_lse, rows, plan->problem.dim_v);
}

/* ---- turns, in memory ---- */

/* How many of the group's contributors have a lower rank. */
static int64_t place_of(const attn_plan *plan, int64_t rank, int64_t group)
{
    const int64_t *set = attn__plan_set_q(plan);
    int64_t place = 0;
    for (int64_t a = 0; a < plan->set_q_size; a++) {
        place += attn__mod(group - set[a], plan->layout.workers) < rank;
    }
    return place;
}

static attn_status wait_for_turn(attn__run *run, int64_t rank, int64_t group)
{
    int64_t place = place_of(run->plan, rank, group);
    pthread_mutex_lock(&run->lock);
    while (run->turn[group] != place && run->status == ATTN_OK) {
        pthread_cond_wait(&run->turned, &run->lock);
    }
    attn_status status = run->status;
    pthread_mutex_unlock(&run->lock);
    return status == ATTN_OK ? ATTN_OK : attn__fail(ATTN_ECANCELED, "another worker failed");
}

static void end_turn(attn__run *run, int64_t group)
{
    pthread_mutex_lock(&run->lock);
    run->turn[group]++;
    pthread_cond_broadcast(&run->turned);
    pthread_mutex_unlock(&run->lock);
}

/* A fold is bound by memory: one below FOLD_ALONE elements is done before other threads have woken up. */
static void fold_in(attn__run *run, const attn_partial *partial)
{
    const attn_problem *p = &run->plan->problem;
    int64_t count = planes(run->plan);
    bool together = count * partial->count * p->dim_v > FOLD_ALONE;
#pragma omp parallel for schedule(static) num_threads(run->plan->threads) if (together)
    for (int64_t plane = 0; plane < count; plane++) {
        int64_t row = plane * p->tokens_q + partial->first;
        attn__merge(run->acc_o + row * p->dim_v, p->dim_v, run->acc_lse + row,
                    partial->o + plane * partial->count * p->dim_v, p->dim_v,
                    partial->lse + plane * partial->count, partial->count, p->dim_v);
    }
}

attn_status attn__tiler_pass(attn__run *run, int64_t rank, int64_t group)
{
    if (run->plan->spooled) {
        return ATTN_OK;
    }
    ATTN__TRY(wait_for_turn(run, rank, group));
    end_turn(run, group);
    return ATTN_OK;
}

attn_status attn__tiler_deliver(void *data, const attn_partial *partial)
{
    attn__run *run = data;
    double begin = attn__now();
    attn_step step = ATTN_STEP_MERGE;
    if (run->plan->spooled) {
        step = ATTN_STEP_HANDOVER;
        ATTN__TRY(attn__spool_write(run, partial));
    } else {
        ATTN__TRY(wait_for_turn(run, partial->rank, partial->group));
        begin = attn__now();
        fold_in(run, partial);
        end_turn(run, partial->group);
    }
    return attn__run_event(run, (attn_event){
                                    .step = step,
                                    .rank = partial->rank,
                                    .group = partial->group,
                                    .begin = begin,
                                    .bytes = partial->count * attn__problem_bytes(&run->plan->problem).o,
                                });
}

/* ---- the end ---- */

static attn_status write_plane(attn__run *run, int64_t plane)
{
    const attn_problem *p = &run->plan->problem;
    const attn_sink *sink = &run->io->sink;
    int64_t row = plane * p->tokens_q;
    return sink->write(sink->data, plane / p->heads_q, plane % p->heads_q, 0, p->tokens_q,
                       run->acc_o + row * p->dim_v, p->dim_v, run->acc_lse + row);
}

/* Rows [row, row + count) of one group and plane: every contributor's piece, ascending rank. */
static attn_status fold_rows(attn__run *run, int64_t group, int64_t plane, int64_t row, int64_t count,
                             char *space)
{
    const attn_plan *plan = run->plan;
    int64_t dim = plan->problem.dim_v, workers = plan->layout.workers, size = plan->set_q_size;
    float *o = (float *)space, *next_o = o + FOLD_ROWS * dim;
    float *lse = next_o + FOLD_ROWS * dim, *next_lse = lse + FOLD_ROWS;
    attn__merge_identity(o, dim, lse, count, dim);
    for (int64_t turn = 0, rank = -1; turn < size; turn++) {
        int64_t next = workers, which = 0;
        for (int64_t a = 0; a < size; a++) { /* the lowest rank above the last one */
            int64_t candidate = attn__mod(group - attn__plan_set_q(plan)[a], workers);
            if (candidate > rank && candidate < next) {
                next = candidate;
                which = a;
            }
        }
        rank = next;
        if (run->have[rank * size + which]) {
            ATTN__TRY(attn__spool_read(run, rank, group, plane, row, count, next_o, next_lse));
            attn__merge(o, dim, lse, next_o, dim, next_lse, count, dim);
        }
    }
    int64_t first = attn__group_first(plan->problem.tokens_q, workers, group) + row;
    const attn_sink *sink = &run->io->sink;
    return sink->write(sink->data, plane / plan->problem.heads_q, plane % plan->problem.heads_q, first, count,
                       o, dim, lse);
}

/* One parallel unit of the last step: a plane of the accumulators, or a plane of one group's pieces. */
static attn_status finish_unit(attn__run *run, int64_t unit, char *space)
{
    const attn_plan *plan = run->plan;
    if (!plan->spooled) {
        return write_plane(run, unit);
    }
    int64_t group = unit / planes(plan), plane = unit % planes(plan);
    int64_t rows = attn__group_count(plan->problem.tokens_q, plan->layout.workers, group);
    for (int64_t row = 0; row < rows; row += FOLD_ROWS) {
        ATTN__TRY(fold_rows(run, group, plane, row, attn__min(FOLD_ROWS, rows - row), space));
    }
    return ATTN_OK;
}

attn_status attn__tiler_finish(attn__run *run)
{
    const attn_plan *plan = run->plan;
    double begin = attn__now();
    int64_t units = planes(plan) * (plan->spooled ? plan->layout.workers : 1);
    char *buffers = run->tiler + attn__aligned(plan->layout.workers * plan->set_q_size);
    bool together = planes(plan) * plan->problem.tokens_q * plan->problem.dim_v > FOLD_ALONE;
#pragma omp parallel for schedule(dynamic) num_threads(plan->threads) if (together)
    for (int64_t unit = 0; unit < units; unit++) {
        char *space = plan->spooled ? buffers + attn__thread() * fold_space(plan) : NULL;
        if (!attn__run_stopped(run)) {
            attn__run_failed(run, finish_unit(run, unit, space));
        }
    }
    if (attn__run_stopped(run)) {
        return attn__fail(run->status, "%s", run->text);
    }
    return attn__run_event(run, (attn_event){
                                    .step = ATTN_STEP_MERGE,
                                    .rank = -1,
                                    .group = -1,
                                    .begin = begin,
                                    .bytes = plan->problem.tokens_q * attn__problem_bytes(&plan->problem).o,
                                });
}
