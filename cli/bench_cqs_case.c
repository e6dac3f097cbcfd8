/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cqs_case.c - one case of `bench cqs`, in a child process.
 *
 * The workers of a case run one after another on this machine (one resident), so that each has all of the
 * threads and all of the cache, as it would on a machine of its own.  Inputs come from unnamed files by
 * position and rows go to one, so that the child's peak memory is what a worker and the Tiler hold, not the
 * whole arrays.  Times are out of the events of attn_execute().  The peak is taken before the result is
 * compared with the reference.
 */
#include "bench_cqs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "results.h"
#include "verify.h"

typedef struct sample {
    double longest, all, gather, merge;
} sample;

typedef struct tally {
    double *rank; /* seconds of each worker */
    double gather, merge;
} tally;

typedef struct bench {
    const bench_case *c;
    bench_result *result;
    attn_plan *plan;
    attn_source source;
    cli_result out;
    attn_sink sink;
    void *workspace;
    tally tally;
    sample *samples;
} bench;

static int on_event(void *data, const attn_event *event)
{
    tally *k = data;
    double seconds = event->end - event->begin;
    if (event->step == ATTN_STEP_MERGE) {
        k->merge += seconds;
    } else if (event->rank >= 0) {
        k->rank[event->rank] += seconds;
        k->gather += event->step == ATTN_STEP_GATHER ? seconds : 0;
    }
    return 0;
}

/* ---- planning ---- */

static attn_status make_plan(bench *b)
{
    const bench_case *c = b->c;
    int64_t program = cli_memory_program(c->threads), limit = c->mem_limit;
    if (limit == 0) {
        limit = cli_memory_available(); /* rather a row than the kernel's OOM killer */
    }
    if (limit > 0 && limit <= program) {
        return cli_refuse(ATTN_ELIMIT, "the program alone takes %lld bytes", (long long)program);
    }
    attn_options options = {
        .size = sizeof options,
        .workers = c->workers,
        .resident = 1,
        .memory_limit = limit > 0 ? limit - program : 0,
        .classic = c->classic,
        .threads = c->threads,
        .kernel = c->kernel,
        .event = on_event,
        .event_data = &b->tally,
    };
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_create(&b->plan, &c->problem, &options);
    if (status == ATTN_OK) {
        status = attn_plan_summary(b->plan, &summary);
    }
    if (status == ATTN_OK) {
        snprintf(b->result->kernel, sizeof b->result->kernel, "%s", summary.kernel);
        b->result->threads = summary.threads;
        b->result->predicted = program + summary.workspace;
        b->result->bound =
            summary.cells_worker.max > 0 ? (double)summary.cells / summary.cells_worker.max : NAN;
    }
    return status;
}

static attn_status make_room(bench *b)
{
    const bench_case *c = b->c;
    cli_result_want want = {.dtype = CLI_F32, .layout = CLI_BHND, .rank = 4, .scratch = true};
    attn_status status = cli_result_open(&b->out, &c->problem, &want);
    if (status != ATTN_OK) {
        return status;
    }
    b->source = (attn_source){.size = sizeof b->source, .data = c->input, .read = cli_input_read};
    b->sink = (attn_sink){.size = sizeof b->sink, .data = &b->out, .write = cli_result_write};
    b->workspace = malloc(attn_plan_workspace(b->plan));
    b->tally.rank = calloc((size_t)c->workers, sizeof *b->tally.rank);
    b->samples = calloc((size_t)c->repeat, sizeof *b->samples);
    bool enough = b->workspace != NULL && b->tally.rank != NULL && b->samples != NULL;
    return enough ? ATTN_OK : cli_refuse(ATTN_ENOMEM, "out of memory");
}

/* ---- timing ---- */

static attn_status take_sample(bench *b, sample *s)
{
    tally *k = &b->tally;
    attn_io io = {.size = sizeof io, .source = &b->source, .sink = &b->sink};
    memset(k->rank, 0, (size_t)b->c->workers * sizeof *k->rank);
    k->gather = k->merge = 0;
    attn_status status = attn_execute(b->plan, &io, b->workspace);
    *s = (sample){.gather = k->gather, .merge = k->merge};
    for (int64_t i = 0; i < b->c->workers; i++) {
        s->all += k->rank[i];
        s->longest = fmax(s->longest, k->rank[i]);
    }
    return status;
}

/* Statistics of the member at `offset` of each sample. */
static cli_spread spread(const bench *b, size_t offset, double *room)
{
    int64_t n = b->c->repeat;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&room[i], (const char *)&b->samples[i] + offset, sizeof room[i]);
    }
    return cli_spread_of(room, n);
}

static void reduce(bench *b, double *room)
{
    bench_result *r = b->result;
    cli_spread longest = spread(b, offsetof(sample, longest), room);
    r->longest = longest.median;
    r->deviation = longest.std;
    r->all = spread(b, offsetof(sample, all), room).median;
    r->gather = spread(b, offsetof(sample, gather), room).median;
    r->merge = spread(b, offsetof(sample, merge), room).median;
}

static attn_status measure(bench *b)
{
    sample ignored;
    attn_status status = ATTN_OK;
    b->result->first = NAN;
    for (int64_t i = 0; i < b->c->warmup && status == ATTN_OK; i++) {
        status = take_sample(b, &ignored);
        b->result->first = i == 0 ? ignored.all : b->result->first;
    }
    for (int64_t i = 0; i < b->c->repeat && status == ATTN_OK; i++) {
        status = take_sample(b, &b->samples[i]);
    }
    if (status == ATTN_OK) {
        double *room = malloc((size_t)b->c->repeat * sizeof *room);
        if (room == NULL) {
            return cli_refuse(ATTN_ENOMEM, "out of memory");
        }
        reduce(b, room);
        free(room);
    }
    b->result->peak = cli_memory_peak();
    return status;
}

static attn_status read_result(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *o, float *lse)
{
    return cli_result_read(data, batch, head, first, count, o, lse);
}

static attn_status compare(bench *b)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    cli_verdict verdict;
    attn_status status = attn_plan_summary(b->plan, &summary);
    cli_verify verify = {
        .problem = attn_plan_problem(b->plan),
        .kernel = summary.kernel,
        .source = &b->source,
        .out = CLI_F32,
        .rows = b->c->rows,
        .seed = b->c->seed,
        .has_lse = true,
        .read = read_result,
        .data = &b->out,
    };
    status = status == ATTN_OK ? cli_verify_run(&verify, &verdict) : status;
    if (status == ATTN_OK) {
        b->result->max_error = verdict.max_error;
        b->result->relative = verdict.relative;
        b->result->status = verdict.passed ? CLI_ROW_OK : CLI_ROW_WRONG;
    }
    return status;
}

/* ---- the child ---- */

static void run_case(const bench_case *c, bench_result *result)
{
    bench b = {.c = c, .result = result, .out = CLI_RESULT_CLOSED};
    result->status = CLI_ROW_PLANNED;
    attn_status status = make_plan(&b);
    if (status == ATTN_OK && !c->dry_run) {
        status = make_room(&b);
        if (status == ATTN_OK) {
            status = measure(&b);
        }
        free(b.workspace); /* the reference needs room too */
        b.workspace = NULL;
        if (status == ATTN_OK) {
            status = compare(&b);
        }
    }
    if (status != ATTN_OK) {
        result->status = cli_row_status_of(status);
        snprintf(result->text, sizeof result->text, "%s", attn_last_error());
    }
    free(b.tally.rank);
    free(b.samples);
    cli_result_close(&b.out);
    attn_plan_destroy(b.plan);
}

static void child(const void *data, void *result)
{
    run_case(data, result);
}

bench_result bench_run(const bench_case *c)
{
    bench_result result = {0};
    result.status = cli_child_run(child, c, &result, sizeof result, result.text, sizeof result.text);
    return result;
}
