/* SPDX-License-Identifier: Apache-2.0 */
/*
 * execute.c - one execute: the workers, at most `resident` of them at a time, then the merge; or, where W = 1
 * needs neither, direct.c.
 *
 * Ranks are handed out in ascending order.  One resident worker runs in the caller's thread; more run as
 * threads, each with its part of the OpenMP threads.  Everything lives in the caller's workspace and on the
 * stack.
 */
#include <string.h>

#include "engine/engine.h"

attn_status attn__run_event(attn__run *run, attn_event event)
{
    const attn_plan *plan = run->plan;
    if (plan->event == NULL) {
        return ATTN_OK;
    }
    event.size = sizeof event;
    event.end = attn__now();
    pthread_mutex_lock(&run->lock);
    int stop = plan->event(plan->event_data, &event);
    pthread_mutex_unlock(&run->lock);
    return stop == 0 ? ATTN_OK : attn__fail(ATTN_ECANCELED, "canceled");
}

void attn__run_failed(attn__run *run, attn_status status)
{
    if (status == ATTN_OK) {
        return;
    }
    pthread_mutex_lock(&run->lock);
    if (run->status == ATTN_OK) {
        run->status = status;
        strncpy(run->text, attn_last_error(), sizeof run->text - 1);
    }
    pthread_cond_broadcast(&run->turned);
    pthread_mutex_unlock(&run->lock);
}

bool attn__run_stopped(attn__run *run)
{
    pthread_mutex_lock(&run->lock);
    bool stopped = run->status != ATTN_OK;
    pthread_mutex_unlock(&run->lock);
    return stopped;
}

/* A slice lets a progress bar move and a cancel be heard, and ends in a barrier: it must be long, and have
 * many items for each thread. */
int64_t attn__slices(const attn_plan *plan, double flops, int64_t items)
{
    enum { ITEMS = 16 }; /* of a thread; the barrier then idles less than 1/16 of the time */
    const double slice_flops = 5e9;
    if (plan->event == NULL) {
        return 1;
    }
    return attn__max(1, attn__min(items / (ITEMS * plan->threads), (int64_t)(flops / slice_flops)));
}

/* ---- workers ---- */

static void run_ranks(attn__run *run, int64_t slot)
{
    for (;;) {
        int64_t rank = atomic_fetch_add(&run->next_rank, 1);
        if (rank >= run->plan->layout.workers || attn__run_stopped(run)) {
            return;
        }
        attn__run_failed(run, attn__worker(run, rank, slot));
    }
}

typedef struct resident {
    attn__run *run;
    int64_t slot;
    pthread_t thread;
} resident;

static void *run_resident(void *data)
{
    resident *r = data;
    run_ranks(r->run, r->slot);
    return NULL;
}

/* Slot 0 is the caller's thread.  The residents' own records are at the start of the workspace. */
static void run_workers(attn__run *run, resident *residents)
{
    int64_t started = 1;
    for (; started < run->plan->resident; started++) {
        resident *r = &residents[started];
        *r = (resident){.run = run, .slot = started};
        if (pthread_create(&r->thread, NULL, run_resident, r) != 0) {
            attn__run_failed(run,
                             attn__fail(ATTN_ENOMEM, "no thread for resident worker %lld of %lld; use fewer",
                                        (long long)started + 1, (long long)run->plan->resident));
            break;
        }
    }
    run_ranks(run, 0);
    for (int64_t i = 1; i < started; i++) {
        pthread_join(residents[i].thread, NULL);
    }
}

int64_t attn__resident_space(int64_t residents)
{
    return attn__ceil_div(residents * (int64_t)sizeof(resident), 64) * 64;
}

/* ---- execute ---- */

static void place(attn__run *run, void *workspace)
{
    const attn__space *s = &run->plan->space;
    uintptr_t start = ((uintptr_t)workspace + 63) / 64 * 64;
    run->residents = (char *)workspace + (start - (uintptr_t)workspace);
    run->workspace = run->residents + attn__resident_space(run->plan->resident);
    run->tiler = run->workspace + run->plan->resident * s->worker;
}

static attn_status execute(attn__run *run)
{
    const attn_plan *plan = run->plan;
    if (plan->direct) {
        return attn__direct(run);
    }
    if (plan->spooled) {
        ATTN__TRY(attn__spool_open(run));
    }
    attn__tiler_begin(run);
    attn_comm comm = attn__local_comm(&run->local, 0, plan->layout.workers);
    ATTN__TRY(comm.ops->agree(&comm, plan->fingerprint));
    run_workers(run, (resident *)(void *)run->residents);
    if (run->status != ATTN_OK) {
        return attn__fail(run->status, "%s", run->text);
    }
    return attn__tiler_finish(run);
}

attn_status attn__run_open(attn__run *run, const attn_plan *plan, void *workspace)
{
    *run = (attn__run){.plan = plan, .spool_folder = -1, .spool_lock = -1};
    if (pthread_mutex_init(&run->lock, NULL) != 0) {
        return attn__fail(ATTN_ENOMEM, "no mutex");
    }
    if (pthread_cond_init(&run->turned, NULL) != 0) {
        pthread_mutex_destroy(&run->lock);
        return attn__fail(ATTN_ENOMEM, "no condition variable");
    }
    place(run, workspace);
    return ATTN_OK;
}

void attn__run_close(attn__run *run)
{
    pthread_cond_destroy(&run->turned);
    pthread_mutex_destroy(&run->lock);
}

static attn_status check_execute(const attn_plan *plan, const attn_io *io)
{
    if (plan->in_memory && io->source != NULL) {
        return attn__fail(ATTN_EINVAL,
                          "the plan was made for tensors in memory (options.in_memory), not for a source");
    }
    if (!plan->direct && io->merge) {
        return attn__fail(ATTN_EUNSUPPORTED, "merge needs a plan with W = 1 and no spool");
    }
    if (!plan->direct && io->cu_seqlens_q != NULL) {
        return attn__fail(ATTN_EUNSUPPORTED,
                          "sequences of unequal length (cu_seqlens) need a plan with W = 1 and no spool");
    }
    if (!plan->in_memory && io->cu_seqlens_q != NULL) {
        return attn__fail(ATTN_EINVAL, "cu_seqlens need a plan made with options.in_memory");
    }
    return ATTN_OK;
}

attn_status attn_execute(const attn_plan *plan, const attn_io *io, void *workspace)
{
    attn__run run;
    attn__memory_io memory;
    if (plan != NULL && plan->gpu != NULL && plan->in_memory && !plan->backward) {
        return attn__device_forward(plan, io, workspace);
    }
    if (plan == NULL || workspace == NULL) {
        return attn__fail(ATTN_EINVAL,
                          "attn_execute needs a plan and attn_plan_workspace() bytes of workspace");
    }
    if (plan->backward) {
        return attn__fail(ATTN_EINVAL, "the plan was made with options.backward, for attn_execute_backward");
    }
    ATTN__TRY(attn__io_open(&memory, &plan->problem, io));
    ATTN__TRY(check_execute(plan, io));
    ATTN__TRY(attn__run_open(&run, plan, workspace));
    run.io = &memory;
    run.local = (attn__local){.source = &memory.source, .deliver = attn__tiler_deliver, .data = &run};
    attn_status status = plan->stage != NULL ? attn__stage_begin(plan) : ATTN_OK;
    if (status == ATTN_OK) {
        status = execute(&run);
        status = plan->stage != NULL ? attn__stage_finish(plan, status) : status;
    }
    attn__spool_close(&run);
    attn__run_close(&run);
    return status;
}

attn_status attn__workspace_open(void **workspace, const attn_plan *plan)
{
    if (plan->gpu != NULL && plan->in_memory) {
        return attn__device_alloc(workspace, plan);
    }
    *workspace = attn__alloc_workspace(attn_plan_workspace(plan));
    return *workspace != NULL ? ATTN_OK : ATTN_ENOMEM;
}

attn_status attn__workspace_close(void *workspace, const attn_plan *plan, void *stream, attn_status status)
{
    if (plan->gpu != NULL && plan->in_memory) {
        attn_status waited = attn__device_free(workspace, plan, stream);
        return status != ATTN_OK ? status : waited;
    }
    attn__free_workspace(workspace);
    return status;
}

const attn_problem *attn__problem_with_totals(attn_problem *copy, const attn_problem *problem,
                                              const attn_options *options, const int64_t *cu_q,
                                              const int64_t *cu_kv, int64_t total_q, int64_t total_kv)
{
    if (problem == NULL || problem->size != sizeof *problem || cu_q == NULL || cu_kv == NULL ||
        problem->total_q != 0 || problem->total_kv != 0 || problem->placed || !options->in_memory) {
        return problem;
    }
    *copy = *problem;
    /* one that is refused does not tell how long the lists are: they are left alone, and the plan refuses it
     */
    if (attn_problem_check(copy) != ATTN_OK) {
        return problem;
    }
    if (options->device == ATTN_CPU) { /* they can be read, and are looked at when the plan is executed */
        total_q = cu_q[copy->batch];
        total_kv = cu_kv[copy->batch];
    }
    copy->total_q = attn__max(total_q, 1);
    copy->total_kv = attn__max(total_kv, 1);
    return attn_problem_check(copy) == ATTN_OK ? copy : problem;
}

attn_status attn_forward(const attn_problem *problem, const attn_io *io, const attn_options *options)
{
    attn_options o = options != NULL ? *options : ATTN_INIT(attn_options);
    attn_problem copy;
    attn_plan *plan;
    if (io != NULL && io->size == sizeof *io) {
        o.in_memory = io->source == NULL ? 1 : o.in_memory;
        problem = attn__problem_with_totals(&copy, problem, &o, io->cu_seqlens_q, io->cu_seqlens_kv,
                                            io->total_q, io->total_kv);
    }
    ATTN__TRY(attn_plan_create(&plan, problem, &o));
    void *workspace;
    attn_status status = attn__workspace_open(&workspace, plan);
    if (status == ATTN_OK) {
        status = attn_execute(plan, io, workspace);
        status = attn__workspace_close(workspace, plan, io != NULL ? io->stream : NULL, status);
    }
    attn_plan_destroy(plan);
    return status;
}
