/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_tables.c - the tables of the verb `plan`: workers, costs, kernels; the coverage proof; the search.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* The proof looks at every block: W^2 of them. */
#define MOST_PROVED 32768

/* ---- workers ------------------------------------------------------------------------------------------- */

/* Groups of a quorum in one cell, "0 1 3" */
static void print_groups(const attn_rank *rank, char *text, size_t size)
{
    size_t at = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < rank->group_count && at + 24 < size; i++) {
        at += (size_t)snprintf(text + at, size - at, "%s%lld", i > 0 ? " " : "", (long long)rank->groups[i]);
    }
}

int plan_rank_table(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    static const cli_column columns[] = {
        {.key = "rank", .title = "Worker", .kind = CLI_CELL_INT, .width = 6},
        {.key = "groups", .title = "Quorum", .kind = CLI_CELL_TEXT, .width = 16},
        {.key = "tokens", .title = "Subsequence", .kind = CLI_CELL_INT},
        {.key = "ratio", .title = "Ratio to N", .kind = CLI_CELL_REAL, .precision = 4},
        {.key = "pairs", .title = "Pairs", .kind = CLI_CELL_INT},
        {.key = "cells", .title = "Cells", .kind = CLI_CELL_INT, .width = 12},
        {.key = "bytes_in", .title = "In", .kind = CLI_CELL_BYTES, .width = 12},
        {.key = "bytes_out", .title = "Out", .kind = CLI_CELL_BYTES, .width = 12},
    };
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    cli_table table;
    cli_ints ranks = plan_ranks(args, summary.workers, PLAN_DATA_RANKS);
    cli_table_begin(&table, out, "ranks", columns, 8);
    for (int64_t i = 0; i < ranks.count && status == ATTN_OK; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        status = attn_plan_rank(plan, ranks.item[i], &rank);
        if (status == ATTN_OK) {
            char groups[512];
            print_groups(&rank, groups, sizeof(groups));
            cli_table_int(&table, rank.rank);
            cli_table_text(&table, groups);
            cli_table_int(&table, rank.tokens);
            cli_table_real(&table, (double)rank.tokens / (double)attn_plan_problem(plan)->tokens_q);
            cli_table_int(&table, rank.pair_count);
            cli_table_int(&table, rank.cells);
            cli_table_int(&table, rank.bytes_in);
            cli_table_int(&table, rank.bytes_out);
            attn_rank_free(&rank);
        }
    }
    cli_table_end(&table);
    free(ranks.item);
    return cli_fail(status);
}

/* ---- costs --------------------------------------------------------------------------------------------- */

static const cli_column cost_columns[] = {
    {.key = "scheme", .title = "Scheme", .kind = CLI_CELL_TEXT, .width = 12},
    {.key = "a", .title = "Query groups |A|", .kind = CLI_CELL_INT},
    {.key = "b", .title = "Key groups |B|", .kind = CLI_CELL_INT},
    {.key = "in_mean_bytes", .title = "In, mean", .kind = CLI_CELL_BYTES},
    {.key = "in_max_bytes", .title = "In, most", .kind = CLI_CELL_BYTES},
    {.key = "out_mean_bytes", .title = "Out, mean", .kind = CLI_CELL_BYTES},
    {.key = "out_max_bytes", .title = "Out, most", .kind = CLI_CELL_BYTES},
    {.key = "backward_in_mean_bytes", .title = "Backward in, mean", .kind = CLI_CELL_BYTES},
    {.key = "backward_in_max_bytes", .title = "Backward in, most", .kind = CLI_CELL_BYTES},
    {.key = "backward_out_mean_bytes", .title = "Backward out, mean", .kind = CLI_CELL_BYTES},
    {.key = "backward_out_max_bytes", .title = "Backward out, most", .kind = CLI_CELL_BYTES},
    {.key = "root_in_bytes", .title = "Central root in", .kind = CLI_CELL_BYTES},
    {.key = "root_out_bytes", .title = "Central root out", .kind = CLI_CELL_BYTES},
    {.key = "memory_bytes", .title = "Memory, largest worker", .kind = CLI_CELL_BYTES},
    {.key = "balance", .title = "Most cells / mean", .kind = CLI_CELL_REAL, .precision = 3},
    {.key = "messages", .title = "Messages to a worker", .kind = CLI_CELL_INT},
    {.key = "why_not", .title = "Why not", .kind = CLI_CELL_TEXT},
};
enum { COST_COLUMNS = sizeof(cost_columns) / sizeof(cost_columns[0]), COST_ROWS = 16 };

/* The number of a column between the scheme and the reason; NAN where there is none. */
static double cost_value(const attn_cost *cost, int column)
{
    const double values[] = {(double)cost->a,        (double)cost->b,       cost->in_mean,
                             cost->in_max,           cost->out_mean,        cost->out_max,
                             cost->backward_in_mean, cost->backward_in_max, cost->backward_out_mean,
                             cost->backward_out_max, cost->root_in,         cost->root_out,
                             cost->memory,           cost->balance,         (double)cost->messages};
    double value = values[column - 1];
    return (column <= 2 && value <= 0) || (column > 2 && !cost->possible) ? NAN : value;
}

static void cost_row(cli_table *table, const attn_cost *cost)
{
    cli_table_text(table, cost->scheme);
    for (int i = 1; i < COST_COLUMNS - 1; i++) {
        double value = cost_value(cost, i);
        if (cost_columns[i].kind == CLI_CELL_INT && !isnan(value)) {
            cli_table_int(table, (int64_t)value);
        } else {
            cli_table_real(table, value);
        }
    }
    cli_table_text(table, cost->possible ? NULL : cost->why);
}

/* For the terminal: a row a quantity, a column a scheme, which fits a line. */
static void cost_matrix(cli_out *out, const attn_cost *costs, int count)
{
    fputs("Bytes of one worker, for data that lies one token group a worker.\n\n", out->file);
    fprintf(out->file, "%-24s", "");
    for (int i = 0; i < count; i++) {
        fprintf(out->file, "  %12s", costs[i].scheme);
    }
    fputc('\n', out->file);
    for (int row = 1; row < COST_COLUMNS - 1; row++) {
        const cli_column *column = &cost_columns[row];
        fprintf(out->file, "%-24s", column->title);
        for (int i = 0; i < count; i++) {
            char text[CLI_NUMBER];
            double value = cost_value(&costs[i], row);
            snprintf(text, sizeof(text), "%.*f", column->precision, value);
            if (column->kind == CLI_CELL_BYTES) {
                cli_bytes(text, value);
            }
            fprintf(out->file, "  %12s", isnan(value) ? "-" : text);
        }
        fputc('\n', out->file);
    }
    for (int i = 0; i < count; i++) {
        if (!costs[i].possible) {
            fprintf(out->file, "%s: not possible, %s\n", costs[i].scheme, costs[i].why);
        }
    }
}

int plan_cost_table(cli_out *out, const attn_plan *plan)
{
    attn_cost costs[COST_ROWS];
    int count = 0;
    for (; count < COST_ROWS; count++) {
        costs[count] = (attn_cost)ATTN_INIT(attn_cost);
        attn_status status = attn_plan_cost(plan, count, &costs[count]);
        if (status == ATTN_EINVAL && count > 0) {
            break; /* past the end */
        }
        if (status != ATTN_OK) {
            return cli_fail(status);
        }
    }
    if (out->format == CLI_FORMAT_TABLE) {
        cost_matrix(out, costs, count);
        return CLI_OK;
    }
    cli_table table;
    cli_table_begin(&table, out, "cost", cost_columns, COST_COLUMNS);
    for (int i = 0; i < count; i++) {
        cost_row(&table, &costs[i]);
    }
    cli_table_end(&table);
    return CLI_OK;
}

/* ---- kernels ------------------------------------------------------------------------------------------- */

int plan_kernel_table(cli_out *out, const attn_plan *plan)
{
    static const cli_column columns[] = {
        {.key = "name", .title = "Kernel", .kind = CLI_CELL_TEXT, .width = 14},
        {.key = "verdict", .title = "Verdict", .kind = CLI_CELL_TEXT, .width = 8},
        {.key = "reason", .title = "Reason", .kind = CLI_CELL_TEXT, .width = 40},
        {.key = "summary", .title = "What it is", .kind = CLI_CELL_TEXT, .width = 10},
    };
    cli_table table;
    cli_table_begin(&table, out, "kernels", columns, 4);
    for (int64_t i = 0;; i++) {
        attn_verdict verdict = ATTN_INIT(attn_verdict);
        if (attn_kernel_verdict(plan, i, &verdict) != ATTN_OK) {
            break; /* past the end */
        }
        cli_table_text(&table, verdict.name);
        cli_table_text(&table, verdict.chosen ? "chosen" : verdict.reason != NULL ? "not taken" : "would do");
        cli_table_text(&table, verdict.reason);
        cli_table_text(&table, verdict.summary);
    }
    cli_table_end(&table);
    return CLI_OK;
}

/* ---- the proof ------------------------------------------------------------------------------------------
 */

int plan_proof(cli_out *out, const attn_plan *plan)
{
    static const cli_column columns[] = {
        {.key = "cells", .title = "Visible cells", .kind = CLI_CELL_INT, .width = 14},
        {.key = "once", .title = "Owned once", .kind = CLI_CELL_INT, .width = 14},
        {.key = "missing", .title = "Missing", .kind = CLI_CELL_INT, .width = 10},
        {.key = "repeated", .title = "Repeated", .kind = CLI_CELL_INT, .width = 10},
        {.key = "exact", .title = "Exact", .kind = CLI_CELL_BOOL, .width = 5},
    };
    attn_proof proof = ATTN_INIT(attn_proof);
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(plan, &summary);
    if (status == ATTN_OK && summary.workers > MOST_PROVED) {
        return cli_error(CLI_USAGE, "--prove looks at all W^2 blocks: it takes up to %d workers",
                         MOST_PROVED);
    }
    if (status == ATTN_OK) {
        status = attn_plan_prove(plan, &proof);
    }
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    bool exact = proof.once == proof.cells && proof.missing == 0 && proof.repeated == 0;
    cli_table table;
    cli_table_begin(&table, out, "proof", columns, 5);
    cli_table_int(&table, proof.cells);
    cli_table_int(&table, proof.once);
    cli_table_int(&table, proof.missing);
    cli_table_int(&table, proof.repeated);
    cli_table_int(&table, exact);
    cli_table_end(&table);
    return exact ? CLI_OK : cli_error(CLI_WRONG, "the schedule does not own every visible cell exactly once");
}

/* ---- the search ------------------------------------------------------------------------------------------
 */

static void print_set(const int64_t *set, int64_t size, char *text, size_t room)
{
    size_t at = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < size && at + 24 < room; i++) {
        at += (size_t)snprintf(text + at, room - at, "%s%lld", i > 0 ? "," : "", (long long)set[i]);
    }
}

static void write_found(cli_out *out, const plan_args *args, const int64_t *set, int64_t found)
{
    static const cli_column columns[] = {
        {.key = "workers", .title = "W", .kind = CLI_CELL_INT, .width = 8},
        {.key = "size", .title = "Size", .kind = CLI_CELL_INT, .width = 4},
        {.key = "interest_set", .title = "Interest set", .kind = CLI_CELL_TEXT, .width = 12},
    };
    if (out->format == CLI_FORMAT_JSON) {
        cli_json_object(&out->json, NULL);
        cli_json_int(&out->json, "schema_version", CLI_SCHEMA_VERSION);
        cli_json_int(&out->json, "workers", args->search);
        cli_json_int(&out->json, "quorum_size", found);
        cli_json_ints(&out->json, "interest_set", set, found);
        cli_json_end(&out->json);
        return;
    }
    cli_table table;
    size_t room = 24 * (size_t)found + 32;
    char *text = cli_alloc((int64_t)room, 1);
    print_set(set, found, text, room);
    cli_table_begin(&table, out, "search", columns, 3);
    cli_table_int(&table, args->search);
    cli_table_int(&table, found);
    cli_table_text(&table, text);
    cli_table_end(&table);
    free(text);
}

int plan_search(cli_out *out, const plan_args *args)
{
    int64_t found = 0, capacity = args->search;
    int64_t *set = cli_alloc(capacity, sizeof(*set));
    attn_status status = attn_interest_search(args->search, args->size, args->seconds, (uint64_t)args->seed,
                                              set, capacity, &found);
    int code = cli_fail(status);
    if (code == CLI_OK && found == 0) {
        code = cli_error(CLI_WRONG,
                         "no such interest set found in %g s; try more --seconds, another --seed or a "
                         "larger --size",
                         args->seconds);
    } else if (code == CLI_OK) {
        write_found(out, args, set, found);
    }
    free(set);
    return code;
}
