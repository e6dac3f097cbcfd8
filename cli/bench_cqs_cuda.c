/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cqs_cuda.c - one case of `bench cqs` on a GPU, as it was published: a worker computes the attention
 * of its whole subsequence (the tokens of its quorum), all cells of it, and the W workers take turns.
 *
 * It is a case of `bench attention` whose length is the longest subsequence, so that its clock, its memory
 * and its comparison with fp64 are those; nothing is gathered and nothing merged.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_attention.h"
#include "bench_cqs.h"

/* The contestant of a row's name; NULL: the first kernel. */
static bool find_contestant(const char *name, contestant *who)
{
    contestant all[CONTESTANTS];
    const int count = contest_all(all, ATTN_CUDA);
    for (int i = 0; i < count; i++) {
        if (strcmp(all[i].name, name != NULL ? name : "flash") == 0) {
            *who = all[i];
            return true;
        }
    }
    return false;
}

/* The longest subsequence, from a plan that computes nothing. */
static attn_status cut(const bench_case *c, int64_t *tokens)
{
    const attn_options options = {.size = sizeof options, .workers = c->workers, .classic = c->classic};
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_plan *plan = NULL;
    attn_status status = attn_plan_create(&plan, &c->problem, &options);
    if (status == ATTN_OK) {
        status = attn_plan_summary(plan, &summary);
    }
    if (status == ATTN_OK) {
        *tokens = (int64_t)summary.subsequence.max;
    }
    attn_plan_destroy(plan);
    return status;
}

bench_result bench_run_cuda(const bench_case *c)
{
    bench_result r = {.status = CLI_ROW_REFUSED};
    int64_t tokens = 0;
    attention_case a = {
        .c = {.problem = c->problem, .pass = CONTEST_FORWARD, .place = c->place},
        .warmup = c->warmup,
        .repeat = c->repeat,
        .mem_limit = c->mem_limit,
        .rows = c->rows,
        .seed = c->seed,
        .dry_run = c->dry_run,
        .turns = c->workers,
    };
    if (!find_contestant(c->kernel, &a.who)) {
        snprintf(r.text, sizeof r.text, "there is no such kernel for a GPU");
        return r;
    }
    if (cut(c, &tokens) != ATTN_OK) {
        snprintf(r.text, sizeof r.text, "%s", attn_last_error());
        return r;
    }
    const double share = (double)tokens / (double)c->problem.tokens_q;
    a.c.problem.tokens_q = a.c.problem.tokens_kv = tokens;
    a.c.problem.dtype_out = c->problem.dtype;
    const attention_result m = attention_measure(&a);
    r.status = m.status;
    r.bound = 1 / (share * share);
    r.longest = m.time.median;
    r.deviation = m.time.std;
    r.all = m.turns;
    r.unwaited = m.unwaited;
    r.first = m.first;
    r.predicted = m.predicted;
    r.peak = m.peak;
    r.max_error = m.max_error;
    r.relative = m.relative;
    snprintf(r.kernel, sizeof r.kernel, "%s", a.who.name);
    snprintf(r.text, sizeof r.text, "%s", m.text);
    return r;
}
