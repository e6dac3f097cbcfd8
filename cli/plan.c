/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - the verb `plan`: who holds what, who computes what, and what it costs; touches no data.
 *
 * One case is told in full (plan_text.c, plan_json.c); lists of tokens or workers are a sweep
 * (plan_sweep.c).  --cost, --explain, --prove and a picture in the terminal take the place of the details in
 * text, and stand beside them in JSON.
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* ---- the case ---------------------------------------------------------------------------------------- */

static void fill_problem(const plan_args *args, int64_t tokens, attn_problem *problem)
{
    memset(problem, 0, sizeof(*problem));
    problem->size = sizeof(*problem);
    problem->batch = args->batch;
    problem->heads_q = args->heads;
    problem->heads_kv = args->kv_heads;
    problem->tokens_q = tokens;
    problem->tokens_kv = args->kv_tokens;
    problem->dim_qk = args->dim;
    problem->dim_v = args->dim_v;
    problem->dtype = (attn_dtype)args->dtype;
    problem->mask = args->causal ? ATTN_MASK_CAUSAL : ATTN_MASK_FULL;
    if (args->window.count == 2) {
        problem->mask = ATTN_MASK_WINDOW;
        problem->window_left = args->window.item[0];
        problem->window_right = args->causal ? 0 : args->window.item[1];
    }
}

attn_status plan_make(const plan_args *args, int64_t tokens, int64_t workers, attn_plan **plan)
{
    attn_problem problem;
    attn_options options = ATTN_INIT(attn_options);
    fill_problem(args, tokens, &problem);
    options.workers = workers;
    options.resident = args->resident;
    options.memory_limit = args->mem_limit;
    options.quorum = (attn_quorum)args->quorum;
    options.rectangle = args->rectangle;
    options.interest_set = args->interest_set.item;
    options.interest_size = args->interest_set.count;
    options.classic = args->classic;
    options.threads = (int)args->common.threads;
    options.kernel = args->kernel;
    options.device = (attn_device)args->common.device;
    options.gpu = (int)args->common.gpu;
    return attn_plan_create(plan, &problem, &options);
}

cli_ints plan_ranks(const plan_args *args, int64_t all, int64_t most)
{
    cli_ints ranks = {NULL, all <= most ? all : 1};
    if (args->rank.count > 0) {
        ranks.count = args->rank.count;
    }
    ranks.item = cli_alloc(ranks.count, sizeof(*ranks.item));
    for (int64_t i = 0; i < ranks.count; i++) {
        ranks.item[i] = args->rank.count > 0 ? args->rank.item[i] : i;
    }
    return ranks;
}

static void print_mask(const attn_problem *problem, char *text, size_t size)
{
    if (problem->mask == ATTN_MASK_WINDOW) {
        snprintf(text, size, "window %lld,%lld", (long long)problem->window_left,
                 (long long)problem->window_right);
    } else {
        snprintf(text, size, "%s", problem->mask == ATTN_MASK_CAUSAL ? "causal" : "full");
    }
}

void plan_title(const attn_plan *plan, char *text, size_t size)
{
    const attn_problem *problem = attn_plan_problem(plan);
    attn_summary summary = ATTN_INIT(attn_summary);
    char mask[80], shape[80];
    if (attn_plan_summary(plan, &summary) != ATTN_OK) {
        text[0] = '\0';
        return;
    }
    print_mask(problem, mask, sizeof(mask));
    snprintf(shape, sizeof(shape), "%lld%s", (long long)summary.quorum_q,
             summary.classic ? ", classic rules" : "");
    if (summary.quorum == ATTN_QUORUM_RECTANGULAR) {
        snprintf(shape, sizeof(shape), "%lld x %lld", (long long)summary.quorum_q,
                 (long long)summary.quorum_kv);
    }
    char keys[64] = "";
    if (problem->tokens_kv != problem->tokens_q) {
        snprintf(keys, sizeof(keys), " x %lld", (long long)problem->tokens_kv);
    }
    snprintf(text, size, "%lld%s tokens, %lld worker%s, %s quorums of %s groups, %s mask",
             (long long)problem->tokens_q, keys, (long long)summary.workers, summary.workers == 1 ? "" : "s",
             summary.quorum == ATTN_QUORUM_RECTANGULAR ? "rectangular" : "cyclic", shape, mask);
}

/* ---- what to write ----------------------------------------------------------------------------------- */

/* In csv, md and jsonl the output is one table. */
static int write_one_table(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    int sections = (args->cost ? 1 : 0) + (args->explain ? 1 : 0) + (args->prove ? 1 : 0);
    if (sections > 1) {
        return cli_error(CLI_USAGE,
                         "--format md, csv and jsonl hold one table: ask for one of --cost, --explain and "
                         "--prove, or use --format json");
    }
    if (args->cost) {
        return plan_cost_table(out, plan);
    }
    if (args->explain) {
        return plan_kernel_table(out, plan);
    }
    return args->prove ? plan_proof(out, plan) : plan_rank_table(out, plan, args);
}

static int write_text(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    char title[300];
    bool drawn = args->picture != NULL && strcmp(args->picture, "-") == 0;
    int code = CLI_OK, worst = CLI_OK;
    if (!args->cost && !args->explain && !args->prove) {
        return drawn ? CLI_OK : plan_text(out->file, plan, args);
    }
    plan_title(plan, title, sizeof(title));
    fprintf(out->file, "%s\n", title);
    if (args->cost) {
        fputc('\n', out->file);
        code = plan_cost_table(out, plan);
    }
    if (args->explain && code <= CLI_WRONG) {
        fputc('\n', out->file);
        code = plan_kernel_table(out, plan);
    }
    if (args->prove && code <= CLI_WRONG) {
        fputc('\n', out->file);
        worst = plan_proof(out, plan);
    }
    return code > worst ? code : worst;
}

static int write_plan(cli_out *out, const attn_plan *plan, const plan_args *args)
{
    if (out->format == CLI_FORMAT_JSON) {
        return plan_json(out, plan, args);
    }
    return out->format == CLI_FORMAT_TABLE ? write_text(out, plan, args) : write_one_table(out, plan, args);
}

static int check_ranks(const plan_args *args, int64_t workers)
{
    for (int64_t i = 0; i < args->rank.count; i++) {
        if (args->rank.item[i] >= workers) {
            return cli_error(CLI_USAGE, "--rank %lld: the workers are 0 to %lld",
                             (long long)args->rank.item[i], (long long)workers - 1);
        }
    }
    return CLI_OK;
}

static int one_plan(cli_out *out, const plan_args *args)
{
    attn_plan *plan = NULL;
    int64_t workers = args->workers.count > 0 ? args->workers.item[0] : 0;
    int64_t tokens = args->tokens.count > 0 ? args->tokens.item[0] : workers;
    attn_status status = plan_make(args, tokens, workers, &plan);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    attn_summary summary = ATTN_INIT(attn_summary);
    status = attn_plan_summary(plan, &summary);
    int code = status == ATTN_OK ? check_ranks(args, summary.workers) : cli_fail(status);
    if (code == CLI_OK && args->picture != NULL) {
        code = cli_picture(plan, args->picture, out->file, &args->common);
    }
    if (code == CLI_OK) {
        code = write_plan(out, plan, args);
    }
    attn_plan_destroy(plan);
    return code;
}

/* ---- checks that concern several options -------------------------------------------------------------- */

static int check_sweep(const plan_args *args)
{
    const struct {
        bool given;
        const char *name;
    } single[] = {{args->prove, "prove"},
                  {args->cost, "cost"},
                  {args->explain, "explain"},
                  {args->picture != NULL, "picture"},
                  {args->rank.count > 0, "rank"}};
    for (size_t i = 0; i < sizeof(single) / sizeof(single[0]); i++) {
        if (single[i].given) {
            return cli_error(CLI_USAGE, "--%s needs one case: give --tokens and --workers one value each",
                             single[i].name);
        }
    }
    return CLI_OK;
}

static bool is_sweep(const plan_args *args)
{
    return args->tokens.count > 1 || args->workers.count > 1;
}

static int check(const plan_args *args)
{
    if (args->window.count != 0 && args->window.count != 2) {
        return cli_error(CLI_USAGE, "--window takes two numbers, left and right: --window 1024,0");
    }
    if (args->causal && args->window.count == 2 && args->window.item[1] > 0) {
        return cli_error(CLI_USAGE, "--causal lets no query see a later key: use --window %lld,0",
                         (long long)args->window.item[0]);
    }
    if (args->search > 0) {
        return CLI_OK;
    }
    if (args->size > 0 || cli_given(&args->common, "seconds") || cli_given(&args->common, "seed")) {
        return cli_error(CLI_USAGE, "--size, --seconds and --seed belong to --search W");
    }
    if (args->workers.count == 0 && args->mem_limit == 0) {
        return cli_error(CLI_USAGE,
                         "give --workers W, or --mem-limit BYTES, which picks the smallest W that fits");
    }
    if (args->workers.count == 0 && args->tokens.count == 0) {
        return cli_error(CLI_USAGE,
                         "give --tokens N: with --mem-limit alone nothing tells how many there are");
    }
    if (args->rectangle > 0 && args->quorum != ATTN_QUORUM_RECTANGULAR) {
        return cli_error(CLI_USAGE, "--rectangle A belongs to --quorum rectangular");
    }
    if (args->interest_set.count > 0 && args->quorum != ATTN_QUORUM_CYCLIC) {
        return cli_error(CLI_USAGE, "--interest-set belongs to --quorum cyclic");
    }
    return is_sweep(args) ? check_sweep(args) : CLI_OK;
}

int plan_run(const void *values)
{
    const plan_args *args = values;
    int code = check(args);
    cli_out out;
    if (code == CLI_OK) {
        code = cli_out_open(&out, &args->common);
    }
    if (code != CLI_OK) {
        return code;
    }
    if (args->search > 0) {
        code = plan_search(&out, args);
    } else {
        code = is_sweep(args) ? plan_sweep(&out, args) : one_plan(&out, args);
    }
    return cli_out_close(&out, code);
}
