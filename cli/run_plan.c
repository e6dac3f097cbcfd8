/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_plan.c - the plan of a run: how much memory it may take, and where finished tasks are kept.
 *
 * --mem-limit is for the whole process.  What the program itself holds before the work is measured and
 * rounded up to a step of 16 MiB, so that the same command plans the same W each time (a spool is of one plan
 * only); the buffers that the program will need are added; the library may take the rest.  If no W fits that
 * way, partial results go through a folder of their own beside the output, which is removed at the end.  With
 * a GPU the limit is of its memory, and the process's is only predicted.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"
#include "run.h"

/* What the spool belongs to, beside the problem: the data. */
static void spool_key(const run *r, char *text, size_t room)
{
    if (r->args->random != NULL) {
        snprintf(text, room, "random philox4x32-10 seed %lld", (long long)r->args->seed);
    } else {
        snprintf(text, room, "files %016llx", (unsigned long long)r->scan.hash);
    }
}

/* A folder of this run alone, beside the output; the library makes it. */
static char *name_spool(const run *r)
{
    const char *folder = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp", *out = r->args->out;
    int length = (int)strlen(folder);
    if (out != NULL) {
        const char *slash = strrchr(out, '/');
        folder = slash != NULL ? out : ".";
        length = slash != NULL ? (int)(slash - out) + 1 : 1;
    }
    size_t room = (size_t)length + 80;
    char *name = cli_alloc(1, room);
    snprintf(name, room, "%.*s/.attn-spool-%lx-%llx", length, folder, (unsigned long)getpid(),
             (unsigned long long)time(NULL));
    return name;
}

/* Where --mem-limit is that of the GPU's memory, which the plan alone takes. */
static bool on_gpu(const run *r)
{
    return r->args->common.device == ATTN_CUDA;
}

static attn_status create(run *r, const char *spool)
{
    char key[128];
    const run_args *args = r->args;
    spool_key(r, key, sizeof key);
    attn_options options = {
        .size = sizeof options,
        .workers = args->workers,
        .resident = args->resident,
        .memory_limit = on_gpu(r)             ? args->mem_limit
                        : r->memory.limit > 0 ? r->memory.limit - r->memory.program
                                              : 0,
        .device = (attn_device)args->common.device,
        .gpu = (int)args->common.gpu,
        .quorum = (attn_quorum)args->quorum,
        .rectangle = args->rectangle,
        .interest_set = args->interest_set.item,
        .interest_size = args->interest_set.count,
        .classic = args->classic,
        .threads = (int)args->common.threads,
        .kernel = args->kernel,
        .spool = spool,
        .spool_key = key,
        .event = run_event,
        .event_data = r,
    };
    r->spool = spool;
    return attn_plan_create(&r->plan, &r->problem, &options);
}

static int64_t plan_workers(const attn_plan *plan)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    return attn_plan_summary(plan, &summary) == ATTN_OK ? summary.workers : INT64_MAX;
}

/* Partials on disk leave more memory to the groups: a temporary spool is taken where only it fits, or where
 * fewer workers fit with it.  `status` is that of r->plan, made without one. */
static attn_status try_temporary_spool(run *r, attn_status status)
{
    attn_plan *without = r->plan;
    char *name = name_spool(r);
    attn_status spooled = create(r, name);
    if (status == ATTN_OK && (spooled != ATTN_OK || plan_workers(r->plan) >= plan_workers(without))) {
        attn_plan_destroy(r->plan);
        free(name);
        r->plan = without;
        r->spool = NULL;
        return ATTN_OK;
    }
    attn_plan_destroy(without);
    r->temporary_spool = name;
    return spooled;
}

int run_make_plan(run *r)
{
    run_memory *m = &r->memory;
    m->limit = on_gpu(r) ? 0 : r->args->mem_limit;
    m->program = cli_memory_program(r->args->common.threads);
    if (m->limit > 0 && m->limit <= m->program) {
        char limit[CLI_NUMBER], held[CLI_NUMBER];
        return cli_error(CLI_USAGE, "--mem-limit %s leaves nothing for the work: the program itself takes %s",
                         cli_bytes(limit, (double)m->limit), cli_bytes(held, (double)(m->program)));
    }
    attn_status status = create(r, r->args->spool);
    if (m->limit > 0 && r->args->spool == NULL && (status == ATTN_OK || status == ATTN_ELIMIT)) {
        status = try_temporary_spool(r, status);
    }
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    attn_summary summary = ATTN_INIT(attn_summary);
    status = attn_plan_summary(r->plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    if (on_gpu(r)) { /* the driver has come */
        m->program = cli_memory_program(r->args->common.threads);
    }
    /* The workspace is gone when the result is verified: the plan must not depend on --verify. */
    int64_t check = r->args->verify || r->args->verify_rows > 0 ? cli_verify_bytes(&r->problem) : 0;
    m->predicted =
        m->program + summary.pinned_memory + (summary.workspace > check ? summary.workspace : check);
    return CLI_OK;
}

void run_clean_spool(run *r, bool finished)
{
    bool temporary = r->temporary_spool != NULL;
    if (r->plan != NULL && (temporary || (finished && r->spool != NULL && !r->args->keep_spool))) {
        if (attn_spool_remove(r->plan) != ATTN_OK) {
            cli_warn("%s", attn_last_error());
        }
    }
    free(r->temporary_spool);
    r->temporary_spool = NULL;
}
