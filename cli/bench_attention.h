/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attention.h - the verb `bench attention` in its parts.
 *
 *   bench_attention_options.c   the option table and the texts
 *   bench_attention.c           the cases: sweeps over lists of axes, and the presets
 *   bench_attention_case.c      one case, in a process of its own
 *   bench_attention_table.c     rows: columns, JSON, the presets' published columns
 *   contest.h                   who is measured
 */
#ifndef ATTN_CLI_BENCH_ATTENTION_H
#define ATTN_CLI_BENCH_ATTENTION_H

#include "cli.h"
#include "contest.h"
#include "gpu.h"
#include "measure.h"

enum { PRESET_FLASH_VS_NAIVE, PRESET_D_MODEL, PRESET_NONE }; /* the first two: words of --preset */

typedef struct attention_args {
    cli_common common;
    int preset;
    int64_t scale_down;
    const char *contestant;
    cli_ints pass, batch, seq, heads, kv_heads, dim, embedding, causal, dtype, threads;
    int64_t warmup, repeat, mem_limit, seed, rows;
    double seconds;
    bool dry_run;
} attention_args;

typedef struct attention_case {
    contest_case c;
    contestant who;
    const char *refusal; /* why there is no such case, or NULL */
    int64_t warmup, repeat, mem_limit, rows;
    double seconds;
    uint64_t seed;
    bool dry_run;
    int64_t turns;     /* that many calls under one clock, after the samples; 0: none */
    double peak_flops; /* on a GPU: what its multiply-adds reach; else 0: the case measures it */
    /* of a preset: what its table calls this row */
    const char *parameter;
    char value[24], note[80];
} attention_case;

typedef struct attention_result {
    cli_row_status status; /* first, for cli_child_run() */
    char text[480];        /* why there are no numbers, or why they are wrong */
    char isa[32];
    int threads;         /* 0: on a GPU */
    cli_gpu_state state; /* of the GPU, at the end of the samples */
    int64_t samples;
    double first;                    /* seconds, of the first call */
    cli_spread time;                 /* seconds, of the samples */
    double unwaited;                 /* of a call, by a clock that does not wait for the GPU */
    double turns;                    /* of all those calls */
    double flops, peak_flops;        /* of one call; FLOP/s */
    int64_t predicted, peak, before; /* bytes; before: taken between forward and backward */
    double max_error, relative;
} attention_result;

attention_result attention_measure(const attention_case *c);

/* ---- bench_attention_table.c ---- */

enum { ATTENTION_COLUMNS = 40 };

typedef struct attention_table {
    const cli_gpu *gpu; /* NULL: the CPU */
    cli_column columns[ATTENTION_COLUMNS];
    cli_out out;
    cli_table table;
    int preset;
    bool published; /* a preset for people: the published columns */
} attention_table;

/* gpu: where it is measured, or NULL. */
int attention_table_begin(attention_table *t, const attention_args *args, int preset, const cli_gpu *gpu);
/* The full row. */
void attention_table_row(attention_table *t, const attention_case *c, const attention_result *r);
/* The row of a preset for people; backward: NULL where the preset has none. */
void attention_table_published(attention_table *t, const attention_case *c, const attention_result *forward,
                               const attention_result *backward);
int attention_table_end(attention_table *t, int code);

extern const cli_option attention_options[];
extern const cli_example attention_examples[];
extern const char attention_description[];

#endif
