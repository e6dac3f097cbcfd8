/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.h - the verb `run` in its parts.
 *
 *   run_options.c  the option table
 *   run.c          the steps: inputs, plan, execute, verify, report
 *   run_data.c     where q, k, v come from and where o, lse go
 *   run_plan.c     the memory limit, the spool, the plan
 *   run_report.c   the report, for people and as data
 */
#ifndef ATTN_CLI_RUN_H
#define ATTN_CLI_RUN_H

#include "arrays.h"
#include "cli.h"
#include "random.h"
#include "results.h"
#include "verify.h"

typedef struct run_args {
    cli_common common;
    const char *operand[3], *out, *lse;
    const char *random, *save_inputs;
    int64_t seed;
    int layout, out_dtype;
    bool causal, strict;
    cli_ints window;
    double scale;
    int64_t workers, resident, mem_limit;
    cli_ints interest_set;
    bool classic;
    int quorum;
    int64_t rectangle;
    const char *kernel, *spool;
    bool keep_spool;
    bool verify;
    int64_t verify_rows;
    const char *picture;
    bool dry_run;
} run_args;

/* Seconds and counts out of the events of an execute. */
typedef struct run_times {
    double wall, gather, compute, handover, merge;
    int64_t resumed;       /* tasks taken over from the spool */
    int64_t cells_resumed; /* per batch and head */
} run_times;

typedef struct run_memory {
    int64_t limit;   /* --mem-limit, 0: none */
    int64_t program; /* what the program itself takes */
    int64_t predicted, measured;
} run_memory;

typedef struct run {
    const run_args *args;
    attn_problem problem;
    cli_input input;
    cli_random random;
    attn_source inner, source; /* the data; the same, stopped by Ctrl-C */
    cli_scan scan;
    bool scanned;
    cli_dtype out_dtype;
    cli_result result;
    attn_sink sink;
    char *temporary_spool; /* made for this run alone, or NULL */
    const char *spool;
    attn_plan *plan;
    cli_progress progress;
    double planes; /* batches x heads: cells of an event are per plane */
    run_times times;
    run_memory memory;
    bool verified;
    cli_verdict verdict;
} run;

/* Set by SIGINT and SIGTERM. */
bool run_stopped(void);

/* "attn: ..." on stderr: what is worth knowing and no warning. */
void run_note(run *r, const char *format, ...) CLI_PRINTF(2, 3);

/* attn_options.event; data is a run. */
int run_event(void *data, const attn_event *event);

/* ---- run_data.c: each returns an exit code with the message printed ---- */

int run_open_inputs(run *r);
int run_open_results(run *r);
int run_scan_inputs(run *r);
int run_save_inputs(run *r);
/* The file that ATTN_Q, ATTN_K or ATTN_V goes to; freed by the caller. */
char *run_saved_name(const run *r, int operand);
void run_close(run *r);

/* ---- run_plan.c ---- */

int run_make_plan(run *r);
/* Removes a temporary spool, and a finished one unless it is to be kept. */
void run_clean_spool(run *r, bool finished);

/* ---- run_report.c ---- */

int run_report(cli_out *out, run *r);

extern const cli_option run_options[];
extern const cli_example run_examples[];

#endif
