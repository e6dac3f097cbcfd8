/* SPDX-License-Identifier: Apache-2.0 */
/* bench_cqs.h - the verb `bench cqs`: bench_cqs.c has the sweep and its table, bench_cqs_case.c one case in a
 * process of its own, bench_cqs_cuda.c one on a GPU. */
#ifndef ATTN_CLI_BENCH_CQS_H
#define ATTN_CLI_BENCH_CQS_H

#include "arrays.h"
#include "measure.h"
#include "place.h"

typedef struct bench_case {
    attn_problem problem;
    cli_input *input;
    int64_t workers;
    const char *kernel; /* NULL: the first that takes the problem */
    bool classic;
    int threads;
    cli_place place;
    int64_t mem_limit; /* of the whole process; 0: what the machine has */
    int64_t warmup, repeat, rows;
    uint64_t seed;
    bool dry_run;
} bench_case;

/* Medians over the samples; seconds. */
typedef struct bench_result {
    cli_row_status status;
    char text[512]; /* why there are no numbers */
    char kernel[64];
    int threads;
    double bound;     /* all cells / cells of the largest worker */
    double longest;   /* the slowest worker: gather, compute and hand over */
    double deviation; /* standard deviation of that */
    double all;       /* all workers, one after another */
    double gather, merge;
    double unwaited;         /* `longest` by a clock that does not wait for the GPU */
    double first;            /* the first call, as `all` */
    int64_t predicted, peak; /* bytes */
    double max_error, relative;
} bench_result;

/* Runs one case in a child process, so that its peak memory is its own and its failure is its own too. */
bench_result bench_run(const bench_case *c);
/* The same on a GPU, as it was published: a worker's call is the attention of its whole subsequence. */
bench_result bench_run_cuda(const bench_case *c);

#endif
