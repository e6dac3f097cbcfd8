/* SPDX-License-Identifier: Apache-2.0 */
/*
 * summary.c - the summary that CQS users know, shared by `plan` and `run`.
 *
 * A subsequence is what a worker holds: the tokens of the groups of its quorum.  Longest, shortest and
 * average with their ratios to N, standard deviation, histogram, then cells, bytes and balance.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The histogram asks each worker: O(k^2) each, so up to this many. */
#define MOST_COUNTED 2048

#define BINS 8
#define BAR  40

typedef struct histogram {
    int bins;
    int64_t first[BINS]; /* bin i holds subsequences of first[i] to first[i + 1] - 1 tokens */
    int64_t width;
    int64_t workers[BINS];
} histogram;

static attn_status count_workers(const attn_plan *plan, const attn_summary *summary, histogram *bins)
{
    int64_t least = (int64_t)summary->subsequence.min, most = (int64_t)summary->subsequence.max;
    memset(bins, 0, sizeof(*bins));
    if (summary->workers > MOST_COUNTED) {
        return ATTN_OK; /* none */
    }
    bins->width = (most - least) / BINS + 1;
    bins->bins = (int)((most - least) / bins->width) + 1;
    for (int i = 0; i < bins->bins; i++) {
        bins->first[i] = least + i * bins->width;
    }
    for (int64_t i = 0; i < summary->workers; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        attn_status status = attn_plan_rank(plan, i, &rank);
        if (status != ATTN_OK) {
            return status;
        }
        int64_t bin = (rank.tokens - least) / bins->width;
        bin = bin < 0 ? 0 : bin >= bins->bins ? bins->bins - 1 : bin;
        bins->workers[bin]++;
        attn_rank_free(&rank);
    }
    return ATTN_OK;
}

/* ---- for people ---------------------------------------------------------------------------------------- */

static void print_bar(FILE *file, int64_t count, int64_t most, bool utf8)
{
    int64_t length = most > 0 ? (count * BAR + most - 1) / most : 0;
    for (int64_t i = 0; i < length; i++) {
        fputs(utf8 ? "\u2588" : "#", file);
    }
}

static void print_histogram(FILE *file, const histogram *bins)
{
    int64_t most = 0;
    for (int i = 0; i < bins->bins; i++) {
        most = bins->workers[i] > most ? bins->workers[i] : most;
    }
    fputs("  Workers by subsequence length\n", file);
    for (int i = 0; i < bins->bins; i++) {
        char range[64];
        if (bins->width == 1) {
            snprintf(range, sizeof(range), "%lld", (long long)bins->first[i]);
        } else {
            snprintf(range, sizeof(range), "%lld-%lld", (long long)bins->first[i],
                     (long long)(bins->first[i] + bins->width - 1));
        }
        fprintf(file, "    %20s  %6lld  ", range, (long long)bins->workers[i]);
        print_bar(file, bins->workers[i], most, cli_utf8());
        fputc('\n', file);
    }
}

static void print_length(FILE *file, const char *label, double tokens, double all)
{
    fprintf(file, "  %-30s%.*f tokens, ratio to N %.4f\n", label, tokens == floor(tokens) ? 0 : 2, tokens,
            tokens / all);
}

static void print_bytes(FILE *file, const char *label, const attn_spread *bytes)
{
    char least[CLI_NUMBER], most[CLI_NUMBER], mean[CLI_NUMBER];
    fprintf(file, "  %-30smean %s, from %s to %s\n", label, cli_bytes(mean, bytes->mean),
            cli_bytes(least, bytes->min), cli_bytes(most, bytes->max));
}

static double balance(const attn_summary *summary)
{
    return summary->cells_worker.mean > 0 ? summary->cells_worker.max / summary->cells_worker.mean : 1;
}

static void print_work(FILE *file, const attn_summary *summary)
{
    fprintf(file, "  %-30s%lld for each batch and head\n", "Visible cells", (long long)summary->cells);
    if (summary->ranks_counted == 0) {
        fprintf(file, "  %-30snot counted: too many workers\n", "Cells and bytes a worker");
        return;
    }
    const attn_spread *cells = &summary->cells_worker;
    fprintf(file, "  %-30smean %.1f, from %.0f to %.0f\n", "Cells a worker", cells->mean, cells->min,
            cells->max);
    fprintf(file, "  %-30s%.4f (most cells of a worker / mean)\n", "Balance", balance(summary));
    print_bytes(file, "Bytes in, a worker", &summary->bytes_in);
    print_bytes(file, "Bytes out, a worker", &summary->bytes_out);
}

static void print_memory(FILE *file, const attn_summary *summary)
{
    char total[CLI_NUMBER], gather[CLI_NUMBER], partial[CLI_NUMBER], kernel[CLI_NUMBER];
    fprintf(file, "  %-30s%s (%lld resident worker%s: groups %s, partials %s, kernels %s)\n", "Workspace",
            cli_bytes(total, (double)summary->workspace), (long long)summary->resident,
            summary->resident == 1 ? "" : "s", cli_bytes(gather, (double)summary->workspace_gather),
            cli_bytes(partial, (double)summary->workspace_partial),
            cli_bytes(kernel, (double)summary->workspace_kernel));
}

int cli_summary_print(FILE *file, const attn_plan *plan)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    histogram bins;
    attn_status status = attn_plan_summary(plan, &summary);
    if (status == ATTN_OK) {
        status = count_workers(plan, &summary, &bins);
    }
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    double all = (double)attn_plan_problem(plan)->tokens_q;
    fputs("Summary\n", file);
    print_length(file, "Longest subsequence length", summary.subsequence.max, all);
    print_length(file, "Shortest subsequence length", summary.subsequence.min, all);
    print_length(file, "Average subsequence length", summary.subsequence.mean, all);
    fprintf(file, "  %-30s%.2f tokens\n", "Standard deviation", summary.subsequence.std);
    if (summary.quorum == ATTN_QUORUM_CYCLIC) {
        fprintf(file, "  %-30s%.4f (%lld of %lld groups)\n", "Estimated ratio k/W",
                (double)summary.quorum_q / (double)summary.workers, (long long)summary.quorum_q,
                (long long)summary.workers);
    }
    if (bins.bins > 0) {
        print_histogram(file, &bins);
    }
    print_work(file, &summary);
    print_memory(file, &summary);
    return CLI_OK;
}

/* ---- for programs ---------------------------------------------------------------------------------------
 */

static void json_spread(cli_json *json, const char *key, const attn_spread *spread, bool known)
{
    if (!known) {
        cli_json_null(json, key);
        return;
    }
    cli_json_object(json, key);
    cli_json_real(json, "min", spread->min);
    cli_json_real(json, "max", spread->max);
    cli_json_real(json, "mean", spread->mean);
    cli_json_real(json, "std", spread->std);
    cli_json_end(json);
}

static void json_histogram(cli_json *json, const histogram *bins)
{
    cli_json_array(json, "histogram");
    for (int i = 0; i < bins->bins; i++) {
        cli_json_object(json, NULL);
        cli_json_int(json, "first", bins->first[i]);
        cli_json_int(json, "last", bins->first[i] + bins->width - 1);
        cli_json_int(json, "workers", bins->workers[i]);
        cli_json_end(json);
    }
    cli_json_end(json);
}

static void json_schedule(cli_json *json, const attn_summary *summary)
{
    bool rectangular = summary->quorum == ATTN_QUORUM_RECTANGULAR;
    cli_json_text(json, "quorum", rectangular ? "rectangular" : "cyclic");
    cli_json_bool(json, "classic", summary->classic != 0);
    cli_json_text(json, "set_origin", summary->set_origin);
    cli_json_ints(json, "set_q", summary->set_q, summary->quorum_q);
    cli_json_ints(json, "set_kv", summary->set_kv, summary->quorum_kv);
    cli_json_int(json, "resident", summary->resident);
    cli_json_int(json, "threads", summary->threads);
    cli_json_text(json, "kernel", summary->kernel);
    cli_json_bool(json, "spooled", summary->spooled != 0);
}

int cli_summary_json(cli_json *json, const attn_plan *plan)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    histogram bins;
    attn_status status = attn_plan_summary(plan, &summary);
    if (status == ATTN_OK) {
        status = count_workers(plan, &summary, &bins);
    }
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    double all = (double)attn_plan_problem(plan)->tokens_q;
    bool counted = summary.ranks_counted > 0;
    cli_json_object(json, "summary");
    json_schedule(json, &summary);
    json_spread(json, "subsequence", &summary.subsequence, true);
    cli_json_real(json, "longest_ratio", summary.subsequence.max / all);
    cli_json_real(json, "shortest_ratio", summary.subsequence.min / all);
    cli_json_real(json, "average_ratio", summary.subsequence.mean / all);
    json_histogram(json, &bins);
    cli_json_int(json, "cells", summary.cells);
    json_spread(json, "cells_worker", &summary.cells_worker, counted);
    json_spread(json, "bytes_in", &summary.bytes_in, counted);
    json_spread(json, "bytes_out", &summary.bytes_out, counted);
    cli_json_real(json, "balance", counted ? balance(&summary) : NAN);
    cli_json_int(json, "workspace_bytes", summary.workspace);
    cli_json_int(json, "workspace_gather_bytes", summary.workspace_gather);
    cli_json_int(json, "workspace_partial_bytes", summary.workspace_partial);
    cli_json_int(json, "workspace_kernel_bytes", summary.workspace_kernel);
    cli_json_end(json);
    return CLI_OK;
}
