/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - the verb `plan` in its parts.
 *
 *   plan_options.c the option table
 *   plan.c         the problem, one plan or a sweep
 *   plan_text.c    one plan for people: group map, quorums, pair, material and task lists
 *   plan_json.c    one plan as data
 *   plan_sweep.c   longest subsequences over lists of tokens and workers
 *   plan_tables.c  ranks, costs, kernels, the coverage proof, the search for interest sets
 */
#ifndef ATTN_CLI_PLAN_H
#define ATTN_CLI_PLAN_H

#include "cli.h"

typedef struct plan_args {
    cli_common common;
    cli_ints tokens, workers;
    int64_t kv_tokens, batch, heads, kv_heads, dim, dim_v;
    int dtype;
    bool causal;
    cli_ints window;
    cli_ints interest_set;
    bool classic;
    int quorum;
    int64_t rectangle, resident, mem_limit;
    const char *kernel;
    cli_ints rank;
    bool prove, cost, explain;
    const char *picture;
    int64_t search, size, seed;
    double seconds;
} plan_args;

int plan_run(const void *values);

/* Details of every worker up to this many in text and in data; beyond, of those in --rank. */
#define PLAN_TEXT_RANKS 16
#define PLAN_DATA_RANKS 1024

/* The token groups are all listed up to this many. */
#define PLAN_DATA_GROUPS 65536

/* Makes the plan of one case; workers 0: the smallest W that fits.  *plan is the caller's. */
attn_status plan_make(const plan_args *args, int64_t tokens, int64_t workers, attn_plan **plan);

/* The workers to be told in detail: those in --rank, else all of `all` if that is at most `most`, else
 * worker 0.  Freed by the caller. */
cli_ints plan_ranks(const plan_args *args, int64_t all, int64_t most);

/* "10 tokens, 7 workers, ..." as one line */
void plan_title(const attn_plan *plan, char *text, size_t size);

/* Each writes its part and returns an exit code, with the message printed if it is not CLI_OK. */
int plan_text(FILE *file, const attn_plan *plan, const plan_args *args);
int plan_json(cli_out *out, const attn_plan *plan, const plan_args *args);
int plan_rank_table(cli_out *out, const attn_plan *plan, const plan_args *args);
int plan_cost_table(cli_out *out, const attn_plan *plan);
int plan_kernel_table(cli_out *out, const attn_plan *plan);
/* CLI_WRONG when a cell is not owned exactly once.  JSON: the member "proof" of the object that is open. */
int plan_proof(cli_out *out, const attn_plan *plan);
int plan_sweep(cli_out *out, const plan_args *args);
int plan_search(cli_out *out, const plan_args *args);

#endif
