/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_sweep.c - longest subsequences over lists of tokens and workers.
 *
 * For people (table, md) a matrix: a row for each W, a column for each N, "tokens (ratio to N)".  For
 * programs (csv, json, jsonl) a row for each case.  A case that is refused is a row with its status, and the
 * sweep goes on.
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

typedef struct sweep_case {
    int64_t tokens, workers;
    attn_status status;
    char reason[160];
    attn_summary summary;
    char set_origin[32]; /* the plan's own goes with the plan */
} sweep_case;

static void run_case(sweep_case *one, const plan_args *args, int64_t tokens, int64_t workers)
{
    attn_plan *plan = NULL;
    memset(one, 0, sizeof(*one));
    one->tokens = tokens;
    one->workers = workers;
    one->summary.size = sizeof(one->summary);
    one->status = plan_make(args, tokens, workers, &plan);
    if (one->status == ATTN_OK) {
        one->status = attn_plan_summary(plan, &one->summary);
    }
    if (one->status == ATTN_OK) {
        one->workers = one->summary.workers;
        snprintf(one->set_origin, sizeof(one->set_origin), "%s", one->summary.set_origin);
    } else {
        snprintf(one->reason, sizeof(one->reason), "%s", attn_last_error());
    }
    attn_plan_destroy(plan);
}

/* ---- a row for each case ------------------------------------------------------------------------------- */

static const cli_column case_columns[] = {
    {.key = "workers", .title = "W", .kind = CLI_CELL_INT, .width = 6},
    {.key = "tokens", .title = "N", .kind = CLI_CELL_INT, .width = 10},
    {.key = "quorum_size", .title = "k", .kind = CLI_CELL_INT, .width = 4},
    {.key = "set_origin", .title = "Origin", .kind = CLI_CELL_TEXT, .width = 8},
    {.key = "longest_subsequence", .title = "Longest", .kind = CLI_CELL_INT, .width = 10},
    {.key = "longest_ratio", .title = "Ratio to N", .kind = CLI_CELL_REAL, .precision = 4},
    {.key = "shortest_subsequence", .title = "Shortest", .kind = CLI_CELL_INT, .width = 10},
    {.key = "average_subsequence", .title = "Average", .kind = CLI_CELL_REAL, .precision = 1, .width = 10},
    {.key = "std_subsequence", .title = "Std", .kind = CLI_CELL_REAL, .precision = 2},
    {.key = "cells", .title = "Cells", .kind = CLI_CELL_INT, .width = 14},
    {.key = "workspace_bytes", .title = "Workspace", .kind = CLI_CELL_BYTES, .width = 12},
    {.key = "status", .title = "Status", .kind = CLI_CELL_TEXT, .width = 6},
};
enum { CASE_COLUMNS = sizeof(case_columns) / sizeof(case_columns[0]) };

static void case_row(cli_table *table, const sweep_case *one)
{
    const attn_summary *summary = &one->summary;
    if (one->workers > 0) {
        cli_table_int(table, one->workers);
    } else {
        cli_table_missing(table);
    }
    cli_table_int(table, one->tokens);
    if (one->status != ATTN_OK) {
        for (int i = 2; i < CASE_COLUMNS - 1; i++) {
            cli_table_missing(table);
        }
        cli_table_text(table, one->reason[0] != '\0' ? one->reason : attn_strerror(one->status));
        return;
    }
    cli_table_int(table, summary->quorum_q);
    cli_table_text(table, one->set_origin);
    cli_table_int(table, (int64_t)summary->subsequence.max);
    cli_table_real(table, summary->subsequence.max / (double)one->tokens);
    cli_table_int(table, (int64_t)summary->subsequence.min);
    cli_table_real(table, summary->subsequence.mean);
    cli_table_real(table, summary->subsequence.std);
    cli_table_int(table, summary->cells);
    cli_table_int(table, summary->workspace);
    cli_table_text(table, "ok");
}

/* tokens 0 stands for "as many as workers" */
static int64_t tokens_of(const plan_args *args, int64_t index, int64_t workers)
{
    return args->tokens.count > 0 ? args->tokens.item[index] : workers;
}

static void sweep_rows(cli_out *out, const plan_args *args, int64_t tokens, int64_t workers)
{
    cli_table table;
    cli_table_begin(&table, out, "sweep", case_columns, CASE_COLUMNS);
    for (int64_t i = 0; i < workers; i++) {
        for (int64_t j = 0; j < tokens; j++) {
            sweep_case one;
            int64_t w = args->workers.count > 0 ? args->workers.item[i] : 0;
            run_case(&one, args, tokens_of(args, j, w), w);
            case_row(&table, &one);
        }
    }
    cli_table_end(&table);
}

/* ---- the matrix -----------------------------------------------------------------------------------------
 */

/* The columns W, k and one for each N; titles in one block that the caller frees. */
static char *matrix_columns(const plan_args *args, cli_column *columns)
{
    char *titles = cli_alloc(args->tokens.count, CLI_NUMBER);
    columns[0] = (cli_column){.key = "workers", .title = "W", .kind = CLI_CELL_INT, .width = 6};
    columns[1] = (cli_column){.key = "quorum_size", .title = "k", .kind = CLI_CELL_INT, .width = 3};
    for (int64_t j = 0; j < args->tokens.count; j++) {
        char *title = titles + j * CLI_NUMBER;
        snprintf(title, CLI_NUMBER, "N=%lld", (long long)args->tokens.item[j]);
        columns[2 + j] = (cli_column){.key = title, .title = title, .kind = CLI_CELL_TEXT, .width = 14};
    }
    return titles;
}

static void matrix_row(cli_table *table, const plan_args *args, int64_t workers)
{
    sweep_case one;
    cli_table_int(table, workers);
    for (int64_t j = 0; j < args->tokens.count; j++) {
        char cell[64];
        run_case(&one, args, args->tokens.item[j], workers);
        if (j == 0 && one.status == ATTN_OK) {
            cli_table_int(table, one.summary.quorum_q);
        } else if (j == 0) {
            cli_table_missing(table);
        }
        if (one.status == ATTN_OK) {
            snprintf(cell, sizeof(cell), "%lld (%.4f)", (long long)one.summary.subsequence.max,
                     one.summary.subsequence.max / (double)one.tokens);
        } else {
            cli_warn("W=%lld, N=%lld: %s", (long long)workers, (long long)one.tokens, one.reason);
        }
        cli_table_text(table, one.status == ATTN_OK ? cell : NULL);
    }
}

static void sweep_matrix(cli_out *out, const plan_args *args)
{
    cli_column columns[CLI_COLUMNS];
    cli_table table;
    char *titles = matrix_columns(args, columns);
    if (out->format == CLI_FORMAT_TABLE) {
        fputs("Longest subsequence: the most tokens that a worker holds (ratio to N)\n\n", out->file);
    }
    cli_table_begin(&table, out, "sweep", columns, (int)args->tokens.count + 2);
    for (int64_t i = 0; i < args->workers.count; i++) {
        matrix_row(&table, args, args->workers.item[i]);
    }
    cli_table_end(&table);
    free(titles);
}

int plan_sweep(cli_out *out, const plan_args *args)
{
    bool people = out->format == CLI_FORMAT_TABLE || out->format == CLI_FORMAT_MD;
    int64_t tokens = args->tokens.count > 0 ? args->tokens.count : 1;
    int64_t workers = args->workers.count > 0 ? args->workers.count : 1;
    if (people && args->workers.count > 0 && args->tokens.count > 0 && tokens + 2 <= CLI_COLUMNS) {
        sweep_matrix(out, args);
    } else {
        sweep_rows(out, args, tokens, workers);
    }
    return CLI_OK;
}
