/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_text.c - one plan for people, in the order in which a CQS schedule is made: group map, interest set,
 * then for each worker its quorum, the pairs before and after distillation, the material and task lists.
 */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#define LABEL 28 /* columns of "  before distillation" and its like */

/* Long lists are cut after this many items in text. */
#define MOST_ITEMS 160 /* the 144 pairs of 111 workers stay whole */
/* and lists of lines after this many. */
#define MOST_LINES 40

/* More groups than this are told by their rule. */
#define MOST_GROUPS 64

/* ---- a list that wraps -------------------------------------------------------------------------------- */

typedef struct wrapped {
    FILE *file;
    int at, width;
    int hang; /* more columns before lines that go on */
    int64_t items;
} wrapped;

static wrapped list_begin(FILE *file, int width, const char *label)
{
    int at = fprintf(file, "  %-*s", LABEL - 2, label);
    return (wrapped){.file = file, .at = at, .width = width};
}

static void list_item(wrapped *list, const char *format, ...) CLI_PRINTF(2, 3);
static void list_item(wrapped *list, const char *format, ...)
{
    char text[160];
    va_list args;
    list->items++;
    if (list->items > MOST_ITEMS) {
        return;
    }
    va_start(args, format);
    int size = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (list->at > LABEL && list->at + 1 + size > list->width) {
        list->at = LABEL + list->hang;
        fprintf(list->file, "\n%*s%s", list->at, "", text);
        list->at += size;
        return;
    }
    list->at += fprintf(list->file, "%s%s", list->at > LABEL ? " " : "", text);
}

static void list_end(const wrapped *list)
{
    if (list->items == 0) {
        fputs("nothing", list->file);
    } else if (list->items > MOST_ITEMS) {
        fprintf(list->file, " ... and %lld more", (long long)(list->items - MOST_ITEMS));
    }
    fputc('\n', list->file);
}

/* "4-5", "7" or "-" for no tokens */
static const char *print_span(char text[64], int64_t first, int64_t count)
{
    if (count == 0) {
        snprintf(text, 64, "-");
    } else if (count == 1) {
        snprintf(text, 64, "%lld", (long long)first);
    } else {
        snprintf(text, 64, "%lld-%lld", (long long)first, (long long)(first + count - 1));
    }
    return text;
}

static const char *print_group(char text[64], const attn_plan *plan, attn_operand side, int64_t group)
{
    int64_t first = 0, count = 0;
    attn_plan_group(plan, side, group, &first, &count);
    return print_span(text, first, count);
}

/* ---- the whole ----------------------------------------------------------------------------------------- */

static void write_groups(FILE *file, const attn_plan *plan, const attn_summary *summary, attn_operand side,
                         const char *label, int width)
{
    const attn_problem *problem = attn_plan_problem(plan);
    int64_t workers = summary->workers, tokens = side == ATTN_Q ? problem->tokens_q : problem->tokens_kv;
    wrapped groups = list_begin(file, width, label);
    for (int64_t group = 0; group < workers && workers <= MOST_GROUPS; group++) {
        char text[64];
        list_item(&groups, "%lld:[%s]", (long long)group, print_group(text, plan, side, group));
    }
    if (workers > MOST_GROUPS) {
        int64_t rest = tokens % workers;
        list_item(&groups, "groups 0 to %lld: %lld tokens each", (long long)(workers - rest - 1),
                  (long long)(tokens / workers));
        if (rest > 0) {
            list_item(&groups, "and %lld to %lld: %lld each", (long long)(workers - rest),
                      (long long)(workers - 1), (long long)(tokens / workers + 1));
        }
    }
    list_end(&groups);
}

static void write_set(FILE *file, const char *label, const int64_t *set, int64_t size, const char *origin,
                      int width)
{
    wrapped items = list_begin(file, width, label);
    for (int64_t i = 0; i < size; i++) {
        list_item(&items, "%s%lld%s", i == 0 ? "{" : "", (long long)set[i], i + 1 < size ? "," : "}");
    }
    if (items.items <= MOST_ITEMS) {
        list_item(&items, " (%s)", origin);
    }
    list_end(&items);
}

static void write_head(FILE *file, const attn_plan *plan, const attn_summary *summary, int width)
{
    char title[300];
    const attn_problem *problem = attn_plan_problem(plan);
    plan_title(plan, title, sizeof(title));
    fprintf(file, "%s\n\nScheduler\n", title);
    bool same = problem->tokens_q == problem->tokens_kv;
    write_groups(file, plan, summary, ATTN_Q, same ? "group map (TG:[tokens])" : "query groups (TG:[..])",
                 width);
    if (!same) {
        write_groups(file, plan, summary, ATTN_K, "key groups (TG:[tokens])", width);
    }
    if (summary->quorum == ATTN_QUORUM_RECTANGULAR) {
        write_set(file, "query offsets A", summary->set_q, summary->quorum_q, summary->set_origin, width);
        write_set(file, "key offsets B", summary->set_kv, summary->quorum_kv, summary->set_origin, width);
    } else {
        write_set(file, "interest set I", summary->set_q, summary->quorum_q, summary->set_origin, width);
    }
    fprintf(file, "  %-*s%s\n", LABEL - 2, "kernel", summary->kernel);
}

/* ---- one worker ---------------------------------------------------------------------------------------- */

/* The k^2 ordered pairs of the quorum, or A x B: offsets moved by the rank. */
static void write_before(FILE *file, const attn_summary *summary, int64_t rank, int width)
{
    wrapped pairs = list_begin(file, width, "pairs before distillation");
    for (int64_t i = 0; i < summary->quorum_q && pairs.items <= MOST_ITEMS; i++) {
        for (int64_t j = 0; j < summary->quorum_kv && pairs.items <= MOST_ITEMS; j++) {
            list_item(&pairs, "(%lld,%lld)", (long long)((rank + summary->set_q[i]) % summary->workers),
                      (long long)((rank + summary->set_kv[j]) % summary->workers));
        }
    }
    pairs.items = summary->quorum_q * summary->quorum_kv;
    list_end(&pairs);
}

static const char *half_of(int part)
{
    return part == 0 ? "" : part == 1 ? " lower half" : " upper half";
}

static void write_after(FILE *file, const attn_rank *rank, int width)
{
    wrapped pairs = list_begin(file, width, "pairs after distillation");
    for (int64_t i = 0; i < rank->pair_count; i++) {
        const attn_pair *pair = &rank->pairs[i];
        list_item(&pairs, pair->part == 0 ? "(%lld,%lld)" : "(%lld,%lld%s)", (long long)pair->q,
                  (long long)pair->kv, half_of(pair->part));
    }
    list_end(&pairs);
}

static void write_material(FILE *file, const attn_rank *rank, int width)
{
    wrapped groups = list_begin(file, width, "material list");
    for (int64_t i = 0; i < rank->needs_q_count; i++) {
        list_item(&groups, "Q%lld", (long long)rank->needs_q[i]);
    }
    for (int64_t i = 0; i < rank->needs_kv_count; i++) {
        list_item(&groups, "KV%lld", (long long)rank->needs_kv[i]);
    }
    list_end(&groups);
}

/* One line for each query group: "Q 4-5 x KV 4-5 6-7"; pairs come by query group and part runs together. */
static void write_tasks(FILE *file, const attn_plan *plan, const attn_rank *rank, int width)
{
    int64_t lines = 0, i = 0;
    while (i < rank->pair_count && lines < MOST_LINES) {
        const attn_pair *first = &rank->pairs[i];
        char text[64];
        wrapped keys = list_begin(file, width, lines++ == 0 ? "task list" : "");
        keys.hang = 4;
        list_item(&keys, "Q [%s]%s x KV", print_group(text, plan, ATTN_Q, first->q), half_of(first->part));
        for (; i < rank->pair_count && rank->pairs[i].q == first->q && rank->pairs[i].part == first->part;
             i++) {
            list_item(&keys, "[%s]", print_group(text, plan, ATTN_K, rank->pairs[i].kv));
        }
        list_end(&keys);
    }
    if (i < rank->pair_count) {
        fprintf(file, "%*s... and %lld more blocks\n", LABEL, "", (long long)(rank->pair_count - i));
    }
    if (rank->pair_count == 0) {
        wrapped none = list_begin(file, width, "task list");
        list_end(&none);
    }
}

static void write_rank(FILE *file, const attn_plan *plan, const attn_summary *summary, const attn_rank *rank,
                       int width)
{
    char in[CLI_NUMBER], out[CLI_NUMBER];
    fprintf(file, "\nWorker %lld\n", (long long)rank->rank);
    wrapped quorum = list_begin(file, width, "quorum");
    for (int64_t i = 0; i < rank->group_count; i++) {
        list_item(&quorum, "%lld", (long long)rank->groups[i]);
    }
    list_end(&quorum);
    write_before(file, summary, rank->rank, width);
    write_after(file, rank, width);
    write_material(file, rank, width);
    write_tasks(file, plan, rank, width);
    fprintf(file, "  %-*s%lld token%s, %lld cells, %s in, %s out\n", LABEL - 2, "subsequence",
            (long long)rank->tokens, rank->tokens == 1 ? "" : "s", (long long)rank->cells,
            cli_bytes(in, (double)rank->bytes_in), cli_bytes(out, (double)rank->bytes_out));
}

static int write_ranks(FILE *file, const attn_plan *plan, const attn_summary *summary, const cli_ints *ranks,
                       int width)
{
    for (int64_t i = 0; i < ranks->count; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        attn_status status = attn_plan_rank(plan, ranks->item[i], &rank);
        if (status != ATTN_OK) {
            return cli_fail(status);
        }
        write_rank(file, plan, summary, &rank, width);
        attn_rank_free(&rank);
    }
    return CLI_OK;
}

int plan_text(FILE *file, const attn_plan *plan, const plan_args *args)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    int width = cli_terminal_width(file);
    write_head(file, plan, &summary, width);
    cli_ints ranks = plan_ranks(args, summary.workers, PLAN_TEXT_RANKS);
    int code = write_ranks(file, plan, &summary, &ranks, width);
    if (code == CLI_OK && ranks.count < summary.workers && args->rank.count == 0) {
        fprintf(file, "\n(%lld more workers: --rank R tells of one, --format json of all)\n",
                (long long)(summary.workers - ranks.count));
    }
    free(ranks.item);
    if (code == CLI_OK) {
        fputc('\n', file);
        code = cli_summary_print(file, plan);
    }
    return code;
}
