/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_json.c - one plan as a JSON document.
 *
 * Written a worker at a time: the memory is that of one worker's lists, whatever W.  "pairs" holds whole
 * blocks [query group, key group]; the halves of the half-difference blocks of an even W stand in
 * "split_pairs" as [query group, key group, first row, rows].
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* first, count of all groups, or of those that the told workers hold when there are too many */
static void write_group(cli_json *json, const attn_plan *plan, attn_operand side, int64_t group)
{
    int64_t first = 0, count = 0;
    attn_plan_group(plan, side, group, &first, &count);
    cli_json_object(json, NULL);
    cli_json_int(json, "first", first);
    cli_json_int(json, "count", count);
    cli_json_int(json, "group", group);
    cli_json_end(json);
}

static int write_groups(cli_json *json, const char *key, const attn_plan *plan, attn_operand side,
                        int64_t workers, const cli_ints *ranks)
{
    cli_json_array(json, key);
    for (int64_t group = 0; group < workers && workers <= PLAN_DATA_GROUPS; group++) {
        write_group(json, plan, side, group);
    }
    for (int64_t i = 0; i < ranks->count && workers > PLAN_DATA_GROUPS; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        attn_status status = attn_plan_rank(plan, ranks->item[i], &rank);
        if (status != ATTN_OK) {
            return cli_fail(status);
        }
        for (int64_t j = 0; j < rank.group_count; j++) {
            write_group(json, plan, side, rank.groups[j]);
        }
        attn_rank_free(&rank);
    }
    cli_json_end(json);
    return CLI_OK;
}

static void write_pairs(cli_json *json, const attn_rank *rank)
{
    cli_json_array(json, "pairs");
    json->compact = true; /* W of them: on one line */
    for (int64_t i = 0; i < rank->pair_count; i++) {
        if (rank->pairs[i].part == 0) {
            cli_json_ints(json, NULL, (int64_t[]){rank->pairs[i].q, rank->pairs[i].kv}, 2);
        }
    }
    cli_json_end(json);
    json->compact = false;
}

/* [query group, key group, first row, rows] */
static void write_split_pairs(cli_json *json, const attn_plan *plan, const attn_rank *rank)
{
    cli_json_array(json, "split_pairs");
    json->compact = true;
    for (int64_t i = 0; i < rank->pair_count; i++) {
        const attn_pair *pair = &rank->pairs[i];
        if (pair->part != 0) {
            int64_t first = 0, count = 0;
            attn_plan_group(plan, ATTN_Q, pair->q, &first, &count);
            int64_t begin = pair->part == 1 ? 0 : count / 2, end = pair->part == 1 ? count / 2 : count;
            cli_json_ints(json, NULL, (int64_t[]){pair->q, pair->kv, first + begin, end - begin}, 4);
        }
    }
    cli_json_end(json);
    json->compact = false;
}

static int write_rank(cli_json *json, const attn_plan *plan, int64_t index)
{
    attn_rank rank = ATTN_INIT(attn_rank);
    attn_status status = attn_plan_rank(plan, index, &rank);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    cli_json_object(json, NULL);
    cli_json_int(json, "rank", rank.rank);
    cli_json_ints(json, "groups", rank.groups, rank.group_count);
    cli_json_int(json, "tokens", rank.tokens);
    write_pairs(json, &rank);
    cli_json_int(json, "cells", rank.cells);
    cli_json_int(json, "bytes_in", rank.bytes_in);
    cli_json_int(json, "bytes_out", rank.bytes_out);
    write_split_pairs(json, plan, &rank);
    cli_json_ints(json, "needs_q", rank.needs_q, rank.needs_q_count);
    cli_json_ints(json, "needs_kv", rank.needs_kv, rank.needs_kv_count);
    cli_json_end(json);
    attn_rank_free(&rank);
    return CLI_OK;
}

static int write_ranks(cli_json *json, const attn_plan *plan, const cli_ints *ranks)
{
    int code = CLI_OK;
    cli_json_array(json, "ranks");
    for (int64_t i = 0; i < ranks->count && code == CLI_OK; i++) {
        code = write_rank(json, plan, ranks->item[i]);
    }
    cli_json_end(json);
    return code;
}

static void write_problem(cli_json *json, const attn_problem *problem)
{
    static const char *const masks[] = {"full", "causal", "window"};
    cli_json_object(json, "problem");
    cli_json_int(json, "batch", problem->batch);
    cli_json_int(json, "heads", problem->heads_q);
    cli_json_int(json, "kv_heads", problem->heads_kv);
    cli_json_int(json, "tokens", problem->tokens_q);
    cli_json_int(json, "kv_tokens", problem->tokens_kv);
    cli_json_int(json, "dim", problem->dim_qk);
    cli_json_int(json, "dim_v", problem->dim_v);
    cli_json_text(json, "dtype", attn_dtype_name(problem->dtype));
    cli_json_text(json, "mask", masks[problem->mask]);
    if (problem->mask == ATTN_MASK_WINDOW) {
        cli_json_ints(json, "window", (int64_t[]){problem->window_left, problem->window_right}, 2);
    }
    cli_json_real(json, "flops", attn_problem_flops(problem));
    cli_json_end(json);
}

static int write_sections(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    int code = args->cost ? plan_cost_table(out, plan) : CLI_OK;
    if (code == CLI_OK && args->explain) {
        code = plan_kernel_table(out, plan);
    }
    return code == CLI_OK && args->prove ? plan_proof(out, plan) : code;
}

int plan_json(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    cli_json *json = &out->json;
    const attn_problem *problem = attn_plan_problem(plan);
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    cli_ints ranks = plan_ranks(args, summary.workers, PLAN_DATA_RANKS);
    cli_json_object(json, NULL);
    cli_json_int(json, "schema_version", CLI_SCHEMA_VERSION);
    cli_json_int(json, "tokens", problem->tokens_q);
    cli_json_int(json, "workers", summary.workers);
    cli_json_ints(json, "interest_set", summary.set_q, summary.quorum_q);
    cli_json_int(json, "quorum_size", summary.quorum_q);
    cli_json_int(json, "longest_subsequence", (int64_t)summary.subsequence.max);
    cli_json_int(json, "shortest_subsequence", (int64_t)summary.subsequence.min);
    int code = write_groups(json, "groups", plan, ATTN_Q, summary.workers, &ranks);
    if (code == CLI_OK) {
        code = write_ranks(json, plan, &ranks);
    }
    if (code == CLI_OK && problem->tokens_kv != problem->tokens_q) {
        code = write_groups(json, "groups_kv", plan, ATTN_K, summary.workers, &ranks);
    }
    free(ranks.item);
    if (code == CLI_OK) {
        write_problem(json, problem);
        code = cli_summary_json(json, plan);
    }
    if (code == CLI_OK) {
        code = write_sections(out, plan, args);
    }
    if (code <= CLI_WRONG) {
        cli_json_end(json);
    }
    return code;
}
