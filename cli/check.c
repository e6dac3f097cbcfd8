/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - the verb `check`: every kernel of this machine over a grid of cases against the fp64 reference, a
 * line a kernel.
 */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "machine.h"
#include "random.h"

typedef struct check_args {
    cli_common common;
    const char *kernel;
    bool quick, verbose;
    int64_t seed, only;
} check_args;

/* Of one kernel, over all cases. */
typedef struct tally {
    int ran, refused, wrong;
    bool has_backward;
    double forward, backward, forward_error, backward_error;
    double seconds;
    char note[720]; /* the first failure and how to repeat it, or why the kernel was refused */
} tally;

typedef struct checking {
    const check_args *args;
    check_case *grid;
    attn_verdict row[CLI_KERNELS];
    int rows, count, kernels, wrong, ran;
    cli_gpu gpu; /* where that is asked for */
    cli_out out;
    cli_table table;
    cli_progress progress;
} checking;

static const cli_column kernel_columns[] = {
    {"kernel", "kernel", CLI_CELL_TEXT, 0, 14},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"cases", "cases", CLI_CELL_INT, 0, 5},
    {"refused", "refused", CLI_CELL_INT, 0, 0},
    {"wrong", "wrong", CLI_CELL_INT, 0, 5},
    {"forward_error_rel", "forward rel. error", CLI_CELL_REAL, 9, 0},
    {"forward_share", "of tolerance", CLI_CELL_REAL, 3, 0},
    {"backward_error_rel", "backward rel. error", CLI_CELL_REAL, 9, 0},
    {"backward_share", "of tolerance", CLI_CELL_REAL, 3, 0},
    {"seconds", "seconds", CLI_CELL_REAL, 1, 0},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};

static const cli_column case_columns[] = {
    {"kernel", "kernel", CLI_CELL_TEXT, 0, 14},
    {"case", "case", CLI_CELL_INT, 0, 4},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"forward_error_rel", "forward rel. error", CLI_CELL_REAL, 9, 0},
    {"forward_share", "of tolerance", CLI_CELL_REAL, 3, 0},
    {"backward_error_rel", "backward rel. error", CLI_CELL_REAL, 9, 0},
    {"backward_share", "of tolerance", CLI_CELL_REAL, 3, 0},
    {"problem", "problem", CLI_CELL_TEXT, 0, 90},
    {"arrays", "arrays", CLI_CELL_TEXT, 0, 18},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};

/* ---- one case ---- */

static void put_case(checking *k, const char *kernel, int index, const check_result *r)
{
    cli_table *t = &k->table;
    const check_case *c = &k->grid[index];
    bool ran = cli_row_measured(r->status);
    char problem[256], arrays[CHECK_TEXT];
    (void)attn_problem_print(&c->problem, problem, sizeof problem);
    cli_table_text(t, kernel);
    cli_table_int(t, index);
    cli_table_text(t, cli_row_word(r->status));
    cli_table_known(t, ran, r->forward_error);
    cli_table_known(t, ran, r->forward);
    cli_table_known(t, r->has_backward, r->backward_error);
    cli_table_known(t, r->has_backward, r->backward);
    cli_table_text(t, problem);
    cli_table_text(t, check_case_text(c, arrays));
    cli_table_text(t, r->text[0] != '\0' ? r->text : NULL);
}

static void count_case(const checking *k, tally *sum, const char *kernel, int index, const check_result *r)
{
    const check_case *c = &k->grid[index];
    if (r->status == CLI_ROW_REFUSED) {
        sum->refused++;
        if (sum->ran == 0) {
            snprintf(sum->note, sizeof sum->note, "%s", r->text);
        }
        return;
    }
    if (sum->ran++ == 0) {
        sum->note[0] = '\0';
    }
    sum->has_backward = sum->has_backward || r->has_backward;
    sum->forward = fmax(sum->forward, r->forward);
    sum->backward = fmax(sum->backward, r->backward);
    sum->forward_error = fmax(sum->forward_error, r->forward_error);
    sum->backward_error = fmax(sum->backward_error, r->backward_error);
    if (r->status != CLI_ROW_OK && sum->wrong++ == 0) {
        char problem[256], arrays[CHECK_TEXT];
        (void)attn_problem_print(&c->problem, problem, sizeof problem);
        snprintf(sum->note, sizeof sum->note,
                 "%s (%s; %s); again: attn check%s%s --kernel %s --seed %lld --case %d", r->text, problem,
                 check_case_text(c, arrays), k->args->quick ? " --quick" : "",
                 c->place.device == ATTN_CUDA ? " --device cuda" : "", kernel, (long long)k->args->seed,
                 index);
    }
}

/* ---- one kernel ---- */

static void put_kernel(checking *k, const char *kernel, const tally *sum)
{
    cli_table *t = &k->table;
    const char *status = sum->wrong > 0 ? "WRONG" : sum->ran > 0 ? "ok" : "refused";
    cli_table_text(t, kernel);
    cli_table_text(t, status);
    cli_table_int(t, sum->ran);
    cli_table_int(t, sum->refused);
    cli_table_int(t, sum->wrong);
    cli_table_known(t, sum->ran > 0, sum->forward_error);
    cli_table_known(t, sum->ran > 0, sum->forward);
    cli_table_known(t, sum->has_backward, sum->backward_error);
    cli_table_known(t, sum->has_backward, sum->backward);
    cli_table_real(t, sum->seconds);
    cli_table_text(t, sum->note[0] != '\0' ? sum->note : NULL);
}

static void check_kernel(checking *k, const attn_verdict *row)
{
    tally sum = {0};
    double begin = cli_now();
    const int first = k->args->only < 0 ? 0 : (int)k->args->only,
              end = k->args->only < 0 ? k->count : first + 1;
    for (int i = first; i < end;) {
        check_result result[CHECK_TOGETHER];
        const int done = check_run(&k->grid[i], end - i, row->name, result);
        for (int n = 0; n < done; n++) {
            count_case(k, &sum, row->name, i + n, &result[n]);
            cli_progress_add(&k->progress, 1);
            if (k->args->verbose) {
                cli_progress_hide(&k->progress);
                put_case(k, row->name, i + n, &result[n]);
            }
        }
        i += done;
    }
    sum.seconds = cli_now() - begin;
    cli_progress_hide(&k->progress);
    if (!k->args->verbose) {
        put_kernel(k, row->name, &sum);
    }
    k->wrong += sum.wrong;
    k->ran += sum.ran;
}

static bool asked_for(const check_args *args, const char *name)
{
    char word[64];
    bool found = args->kernel == NULL;
    for (int i = 0; !found && cli_word_at(args->kernel, i, word, sizeof word); i++) {
        found = strcmp(word, name) == 0;
    }
    return found;
}

/* Keeps the rows that are asked for. */
static void list_kernels(checking *k)
{
    const attn_device device = (attn_device)k->args->common.device;
    k->rows = cli_kernel_rows(device, k->row);
    for (int i = 0; i < k->rows; i++) {
        if (asked_for(k->args, k->row[i].name)) {
            k->row[k->kernels++] = k->row[i];
        }
    }
}

/* ---- the verb ---- */

static void begin_output(checking *k)
{
    cli_machine host;
    const bool verbose = k->args->verbose;
    const cli_column *columns = verbose ? case_columns : kernel_columns;
    int count = verbose ? sizeof case_columns / sizeof case_columns[0]
                        : sizeof kernel_columns / sizeof kernel_columns[0];
    if (k->out.format == CLI_FORMAT_JSON) {
        cli_machine_look(&host);
        cli_json_object(&k->out.json, NULL);
        cli_json_int(&k->out.json, "schema_version", CLI_SCHEMA_VERSION);
        cli_json_object(&k->out.json, "machine");
        cli_machine_json(&k->out.json, &host);
        if (k->args->common.device == ATTN_CUDA) {
            cli_json_object(&k->out.json, "gpu");
            cli_gpu_json(&k->out.json, &k->gpu);
            cli_json_end(&k->out.json);
        }
        cli_json_end(&k->out.json);
    }
    cli_table_begin(&k->table, &k->out, verbose ? "cases" : "kernels", columns, count);
}

static int end_output(checking *k)
{
    cli_table_end(&k->table);
    cli_format format = k->out.format;
    if (format == CLI_FORMAT_JSON) {
        cli_json_int(&k->out.json, "ran", k->ran);
        cli_json_int(&k->out.json, "wrong", k->wrong);
        cli_json_end(&k->out.json);
    } else if (format == CLI_FORMAT_TABLE || format == CLI_FORMAT_MD) {
        fprintf(k->out.file, "\n%d cases with %d kernels: %s\n", k->ran, k->kernels,
                k->wrong > 0 ? "WRONG"
                : k->ran > 0 ? "all right"
                             : "NOTHING WAS COMPUTED");
    }
    return cli_out_close(&k->out, k->wrong > 0 ? CLI_WRONG : k->ran > 0 ? CLI_OK : CLI_MISSING);
}

/* What must be there before the first case. */
static int prepare(checking *k)
{
    const check_args *args = k->args;
    const cli_place place = {(attn_device)args->common.device, (int)args->common.gpu};
    int code = cli_fail(cli_random_ready());
    if (code == CLI_OK && place.device == ATTN_CUDA) {
        cli_gpu_look(place.gpu, 0, &k->gpu);
        code = k->gpu.status == CLI_ROW_OK ? CLI_OK : cli_error(CLI_MISSING, "%s", k->gpu.text);
    }
    if (code != CLI_OK) {
        return code;
    }
    list_kernels(k);
    if (k->kernels == 0 && args->kernel != NULL) {
        return cli_error(CLI_USAGE, "--kernel %s: there is no such kernel; 'attn info' lists them",
                         args->kernel);
    }
    k->grid = check_grid(args->quick, (uint64_t)args->seed, place, &k->count);
    if (cli_given(&args->common, "case") && args->only >= k->count) {
        return cli_error(CLI_USAGE, "--case %lld: the cases are 0 to %d", (long long)args->only,
                         k->count - 1);
    }
    return CLI_OK;
}

static int check_verb(const void *values)
{
    checking *k = cli_alloc(1, sizeof *k);
    k->args = values;
    int code = prepare(k);
    code = code == CLI_OK ? cli_out_open(&k->out, &k->args->common) : code;
    if (code == CLI_OK) {
        begin_output(k);
        cli_progress_begin(&k->progress, &k->args->common, "cases", (double)k->kernels * k->count);
        for (int i = 0; i < k->kernels; i++) {
            check_kernel(k, &k->row[i]);
        }
        cli_progress_end(&k->progress);
        code = end_output(k);
    }
    free(k->grid);
    free(k);
    return code;
}

static const cli_option check_options[] = {
    CLI_HEADING("What is checked"),
    {.name = "quick", .kind = CLI_FLAG, CLI_TO(check_args, quick), .help = "a part of the cases, in seconds"},
    {.name = "kernel",
     .kind = CLI_TEXT,
     CLI_TO(check_args, kernel),
     .argument = "NAME[,NAME..]",
     .fallback = "(all)",
     .help = "only these rows of the kernel table; attn info lists them"},
    CLI_OPTION_DEVICE,
    CLI_OPTION_GPU,
    {.name = "case",
     .kind = CLI_INT,
     CLI_TO(check_args, only),
     .argument = "N",
     .fallback = "-1",
     .least = -1,
     .most = 1 << 20,
     .help = "only the case of this number, as a failure names it; -1: all"},
    {.name = "seed",
     .kind = CLI_INT,
     CLI_TO(check_args, seed),
     .argument = "N",
     .fallback = "0",
     .help = "seed of the random inputs"},
    CLI_HEADING("Output"),
    {.name = "verbose", .kind = CLI_FLAG, CLI_TO(check_args, verbose), .help = "a line a case"},
    CLI_OPTION_FORMAT,
    CLI_OPTION_OUTPUT,
    CLI_OPTION_PROGRESS,
    CLI_OPTION_HELP,
    CLI_OPTIONS_END,
};

static const cli_example check_examples[] = {
    {"attn check", "every kernel on this machine, about a minute"},
    {"attn check --quick", "the same in seconds"},
    {"attn check --device cuda", "every kernel for the GPU"},
    {"attn check --kernel flash-avx2 --case 17 --verbose", "one case again"},
    {NULL, NULL},
};

const cli_verb cli_verb_check = {
    .name = "check",
    .summary = "check every kernel on this machine against the fp64 reference",
    .description =
        "Runs each kernel of the table, forward and backward, over a grid of cases through the library's "
        "public "
        "interface and compares with a reference in double precision on the same inputs. The grid has "
        "lengths "
        "around tile sizes, primes, one query, few queries against many keys, more queries than keys, full, "
        "causal and window masks, grouped heads, dimensions from 1 to 512, fp32, fp16 and bf16, five "
        "layouts, "
        "rows without keys, one huge logit, equal weights, NaN that must stay in its rows, and work that is "
        "cut "
        "for several workers. Each case runs in a process of its own, twice, with one and three threads: the "
        "bits must be the same, and nothing between rows may be written. On a GPU cases share a process, and "
        "gradients run once in the mode that repeats its bits and once in the other.\n\n"
        "of tolerance: the largest error as a share of what rounding may cost, a formula of dtype, dimension "
        "and "
        "length; above 1 is WRONG, and the exit code is 1. A kernel that this machine or ATTN_ISA cannot run "
        "is refused, with the reason. A failure tells the problem and the command that repeats it.",
    .examples = check_examples,
    .options = check_options,
    .size = sizeof(check_args),
    .run = check_verb,
};
