/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cqs.c - the verb `bench cqs`: what cutting a problem for W workers costs and gains.
 *
 * For each case a row: the whole problem on one worker, the slowest of W workers, all of them, gather and
 * merge, and the honest speed-up (one worker / slowest worker) next to W and to the block-exact bound (all
 * cells / cells of the largest worker), which no schedule of whole blocks can beat.  Peak memory is measured
 * for each case by itself.  A case that does not fit is a row with a status, and the sweep goes on.
 */
#include "bench_cqs.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "gpu.h"
#include "random.h"
#include "results.h"

typedef struct bench_args {
    cli_common common;
    cli_ints tokens, workers;
    int64_t heads, kv_heads, dim, dim_v;
    int dtype;
    bool causal, classic;
    const char *kernel;
    int64_t mem_limit, repeat, warmup, rows, seed;
    bool dry_run;
} bench_args;

static const cli_column columns[] = {
    {"kernel", "kernel", CLI_CELL_TEXT, 0, 14},
    {"threads", "threads", CLI_CELL_INT, 0, 0},
    {"tokens", "tokens", CLI_CELL_INT, 0, 8},
    {"workers", "W", CLI_CELL_INT, 0, 5},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"one_worker_s", "one worker (s)", CLI_CELL_REAL, 4, 0},
    {"longest_worker_s", "longest of W (s)", CLI_CELL_REAL, 4, 0},
    {"longest_worker_std_s", "std (s)", CLI_CELL_REAL, 4, 0},
    {"all_workers_s", "all W (s)", CLI_CELL_REAL, 4, 0},
    {"gather_s", "gather (s)", CLI_CELL_REAL, 4, 0},
    {"merge_s", "merge (s)", CLI_CELL_REAL, 4, 0},
    {"speedup", "speed-up", CLI_CELL_REAL, 2, 0},
    {"bound", "bound", CLI_CELL_REAL, 2, 0},
    {"predicted_peak_bytes", "predicted", CLI_CELL_BYTES, 0, 10},
    {"measured_peak_bytes", "peak memory", CLI_CELL_BYTES, 0, 10},
    {"max_error", "max error", CLI_CELL_REAL, 9, 11},
    {"relative_error", "rel. error", CLI_CELL_REAL, 9, 11},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};

enum { COLUMNS = sizeof columns / sizeof columns[0] };

/* On a GPU this one, too, before the note. */
static const cli_column unwaited_column = {"unwaited_s", "not waited (s)", CLI_CELL_REAL, 6, 0};

typedef struct sweep {
    const bench_args *args;
    cli_column columns[COLUMNS + 1];
    cli_input input; /* random inputs in unnamed files */
    cli_writer file[3];
    bool made;
    cli_out out;
    cli_table table;
    int wrong;
} sweep;

/* ---- inputs ---- */

static attn_problem problem_of(const bench_args *args, int64_t tokens)
{
    return (attn_problem){
        .size = sizeof(attn_problem),
        .heads_q = args->heads,
        .heads_kv = args->kv_heads,
        .tokens_q = tokens,
        .dim_qk = args->dim,
        .dim_v = args->dim_v,
        .dtype = (attn_dtype)args->dtype,
        .mask = args->causal ? ATTN_MASK_CAUSAL : ATTN_MASK_FULL,
    };
}

static void drop_inputs(sweep *s)
{
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        cli_writer_close(&s->file[x]);
    }
}

/* Fresh random q, k and v in unnamed files, which children read by position. */
static attn_status make_inputs(sweep *s, const attn_problem *p)
{
    cli_random random = {.problem = *p, .seed = (uint64_t)s->args->seed, .alone = true};
    attn_source source = {.size = sizeof source, .data = &random, .read = cli_random_read};
    attn_status status = ATTN_OK;
    drop_inputs(s);
    s->input = (cli_input)CLI_INPUT_CLOSED;
    for (int x = ATTN_Q; x <= ATTN_V && status == ATTN_OK; x++) {
        status = cli_operand_scratch(&source, p, (attn_operand)x, &s->file[x], &s->input.array[x]);
        s->input.reader[x] = (cli_reader){.fd = s->file[x].fd, .path = s->file[x].path};
        (void)cli_view_of(&s->input.array[x], CLI_BHND, &s->input.view[x]);
    }
    return status;
}

/* ---- rows ---- */

static void put_bytes(cli_table *table, int64_t bytes)
{
    if (bytes > 0) {
        cli_table_int(table, bytes);
    } else {
        cli_table_missing(table);
    }
}

static void put_row(sweep *s, const bench_case *c, const bench_result *r, double one)
{
    cli_table *t = &s->table;
    bool ran = cli_row_measured(r->status), planned = ran || r->status == CLI_ROW_PLANNED;
    cli_table_text(t, r->kernel[0] != '\0' ? r->kernel : c->kernel != NULL ? c->kernel : "flash");
    if (planned && r->threads > 0) {
        cli_table_int(t, r->threads);
    } else {
        cli_table_missing(t);
    }
    cli_table_int(t, c->problem.tokens_q);
    cli_table_int(t, c->workers);
    cli_table_text(t, cli_row_word(r->status));
    cli_table_known(t, one > 0, one);
    cli_table_known(t, ran, r->longest);
    cli_table_known(t, ran, r->deviation);
    cli_table_known(t, ran, r->all);
    const bool cuda = c->place.device == ATTN_CUDA;
    cli_table_known(t, ran && !cuda, r->gather);
    cli_table_known(t, ran && !cuda, r->merge);
    cli_table_known(t, ran && one > 0 && r->longest > 0, one / r->longest);
    cli_table_known(t, planned, r->bound);
    put_bytes(t, r->predicted);
    put_bytes(t, r->peak);
    cli_table_known(t, ran, r->max_error);
    cli_table_known(t, ran, r->relative);
    if (cuda) {
        cli_table_known(t, ran, r->unwaited);
    }
    cli_table_text(t, r->text[0] != '\0' ? r->text : NULL);
    s->wrong += r->status == CLI_ROW_WRONG;
}

static bench_result run_case(const bench_case *c)
{
    return c->place.device == ATTN_CUDA ? bench_run_cuda(c) : bench_run(c);
}

/* All W of one number of tokens and one kernel; the whole problem on one worker comes first. */
static void run_group(sweep *s, bench_case c)
{
    double one = 0;
    bench_result alone = {.status = CLI_ROW_PLANNED};
    bool known = false;
    if (!s->args->dry_run) {
        c.workers = 1;
        alone = run_case(&c);
        known = true;
        one = cli_row_measured(alone.status) ? alone.longest : 0;
    }
    for (int64_t i = 0; i < s->args->workers.count; i++) {
        c.workers = s->args->workers.item[i];
        bench_result result = c.workers == 1 && known ? alone : run_case(&c);
        put_row(s, &c, &result, one);
    }
}

/* ---- the sweep ---- */

static int run_tokens(sweep *s, int64_t tokens)
{
    const bench_args *args = s->args;
    char name[64];
    attn_problem problem = problem_of(args, tokens);
    attn_status status = attn_problem_check(&problem);
    if (status == ATTN_OK && !args->dry_run && args->common.device == ATTN_CPU) {
        status = make_inputs(s, &problem);
    }
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    for (int i = 0; cli_word_at(args->kernel, i, name, sizeof name); i++) {
        run_group(s, (bench_case){
                         .problem = problem,
                         .input = &s->input,
                         .kernel = strcmp(name, "flash") == 0 ? NULL : name,
                         .classic = args->classic,
                         .threads = (int)args->common.threads,
                         .place = {(attn_device)args->common.device, (int)args->common.gpu},
                         .mem_limit = args->mem_limit,
                         .warmup = args->warmup,
                         .repeat = args->repeat,
                         .rows = args->rows,
                         .seed = (uint64_t)args->seed,
                         .dry_run = args->dry_run,
                     });
    }
    return CLI_OK;
}

static int find_gpu(const bench_args *args)
{
    cli_gpu gpu;
    if (args->common.device != ATTN_CUDA) {
        return CLI_OK;
    }
    cli_gpu_look((int)args->common.gpu, 0, &gpu);
    return gpu.status == CLI_ROW_OK ? CLI_OK : cli_error(CLI_MISSING, "%s", gpu.text);
}

static void begin_table(sweep *s)
{
    int count = COLUMNS;
    const size_t unit = strlen("_s");
    memcpy(s->columns, columns, sizeof columns);
    if (s->args->common.device == ATTN_CUDA) {
        for (int i = 0; i < count; i++) { /* times are microseconds there */
            const char *key = s->columns[i].key;
            if (strcmp(key + strlen(key) - unit, "_s") == 0) {
                s->columns[i].precision = 6;
            }
        }
        s->columns[count - 1] = unwaited_column;
        s->columns[count++] = columns[COLUMNS - 1];
    }
    cli_table_begin(&s->table, &s->out, "cases", s->columns, count);
}

/* What was not told: a small case on the CPU, the published one on a GPU. */
static bench_args with_defaults(const bench_args *told)
{
    static int64_t small[] = {4096}, published[] = {10000, 20000, 30000, 40000, 49000};
    const bool gpu = told->common.device == ATTN_CUDA;
    bench_args args = *told;
    if (args.tokens.count == 0) {
        args.tokens = gpu ? (cli_ints){published, sizeof published / sizeof published[0]}
                          : (cli_ints){small, sizeof small / sizeof small[0]};
    }
    if (!cli_given(&told->common, "heads")) {
        args.heads = gpu ? 8 : 4;
    }
    if (!cli_given(&told->common, "dtype")) {
        args.dtype = gpu ? ATTN_F16 : ATTN_F32;
    }
    return args;
}

static int bench_verb(const void *values)
{
    const bench_args filled = with_defaults(values), *args = &filled;
    sweep *s = cli_alloc(1, sizeof *s);
    s->args = args;
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        s->file[x] = (cli_writer)CLI_WRITER_CLOSED;
    }
    (void)signal(SIGXFSZ, SIG_IGN);
    int code = args->dry_run ? CLI_OK : cli_fail(cli_random_ready());
    code = code == CLI_OK ? find_gpu(args) : code;
    if (code == CLI_OK) {
        code = cli_out_open(&s->out, &args->common);
    }
    if (code == CLI_OK) {
        begin_table(s);
        for (int64_t i = 0; i < args->tokens.count && code == CLI_OK; i++) {
            code = run_tokens(s, args->tokens.item[i]);
        }
        cli_table_end(&s->table);
        code = cli_out_close(&s->out, code == CLI_OK && s->wrong > 0 ? CLI_WRONG : code);
    }
    drop_inputs(s);
    free(s);
    return code;
}

static const cli_option bench_options[] = {
    CLI_HEADING("Cases"),
    {.name = "tokens",
     .kind = CLI_INTS,
     CLI_TO(bench_args, tokens),
     .argument = "N[,N..]",
     .fallback = "(4096; on a GPU 10k-40k+10k,49k)",
     .least = 1,
     .most = INT64_C(1) << 40,
     .help = "tokens; a list is a sweep"},
    {.name = "workers",
     .kind = CLI_INTS,
     CLI_TO(bench_args, workers),
     .argument = "W[,W..]",
     .fallback = "1,4,7,8,31",
     .least = 1,
     .most = 1 << 20,
     .help = "workers; a list is a sweep"},
    {.name = "kernel",
     .kind = CLI_TEXT,
     CLI_TO(bench_args, kernel),
     .argument = "NAME[,NAME..]",
     .fallback = "naive,flash",
     .help =
         "rows of the kernel table: naive keeps the score matrix, as published; flash is the first of the "
         "table that takes the problem"},
    {.name = "heads",
     .kind = CLI_INT,
     CLI_TO(bench_args, heads),
     .argument = "N",
     .fallback = "(4; on a GPU 8)",
     .least = 1,
     .most = 1 << 20,
     .help = "query heads"},
    {.name = "kv-heads",
     .kind = CLI_INT,
     CLI_TO(bench_args, kv_heads),
     .argument = "N",
     .fallback = "(--heads)",
     .least = 1,
     .most = 1 << 20,
     .help = "key and value heads; must divide --heads"},
    {.name = "dim",
     .kind = CLI_INT,
     CLI_TO(bench_args, dim),
     .argument = "D",
     .fallback = "64",
     .least = 1,
     .most = 512,
     .help = "dimension of queries and keys"},
    {.name = "dim-v",
     .kind = CLI_INT,
     CLI_TO(bench_args, dim_v),
     .argument = "D",
     .fallback = "(--dim)",
     .least = 1,
     .most = 512,
     .help = "dimension of values"},
    {.name = "dtype",
     .kind = CLI_CHOICE,
     CLI_TO(bench_args, dtype),
     .argument = "f32|f16|bf16",
     .fallback = "(f32; on a GPU f16)",
     .help = "type of queries, keys and values"},
    {.name = "causal",
     .kind = CLI_FLAG,
     CLI_TO(bench_args, causal),
     .help = "key j is visible to query i when j <= i"},
    {.name = "classic",
     .kind = CLI_FLAG,
     CLI_TO(bench_args, classic),
     .help = "the published rules, which leave an even W out of balance"},
    CLI_OPTION_THREADS,
    CLI_OPTION_DEVICE,
    CLI_OPTION_GPU,
    CLI_HEADING("Measuring"),
    CLI_OPTION_MEM_LIMIT(bench_args),
    {.name = "repeat",
     .kind = CLI_INT,
     CLI_TO(bench_args, repeat),
     .argument = "N",
     .fallback = "3",
     .least = 1,
     .most = 10000,
     .help = "samples of each case, of which the median is told"},
    {.name = "warmup",
     .kind = CLI_INT,
     CLI_TO(bench_args, warmup),
     .argument = "N",
     .fallback = "1",
     .most = 10000,
     .help = "calls before the samples"},
    {.name = "verify-rows",
     .kind = CLI_INT,
     CLI_TO(bench_args, rows),
     .argument = "K",
     .fallback = "8",
     .least = 1,
     .most = 1 << 20,
     .help = "random rows of each head that are compared with the fp64 reference"},
    CLI_OPTION_SEED(bench_args),
    CLI_OPTION_DRY_RUN(bench_args),
    CLI_HEADING("Output"),
    CLI_OPTION_FORMAT,
    CLI_OPTION_OUTPUT,
    CLI_OPTION_HELP,
    CLI_OPTIONS_END,
};

static const cli_example bench_examples[] = {
    {"attn bench cqs --tokens 8192 --workers 1,7,31", "what cutting gains, with and without a score matrix"},
    {"attn bench cqs --tokens 8k-64k*2 --workers 31 --mem-limit 1GiB", "which cases a small memory can hold"},
    {"attn bench cqs --device cuda", "the published case, on a GPU"},
    {"attn bench cqs --tokens 16384 --workers 4,8 --causal --kernel flash --format csv", "as data"},
    {NULL, NULL},
};

const cli_verb cli_verb_bench_cqs = {
    .name = "bench cqs",
    .summary = "measure what cutting a problem for W workers costs and gains",
    .description =
        "Runs each case in a process of its own and prints a row as soon as it is measured. The "
        "workers "
        "of a case run one after another, each with all of the threads, as on W equal machines.\n\n"
        "one worker: the slowest (and only) worker of W = 1. longest of W: the slowest of the W workers, its "
        "gathering included. speed-up: one worker / longest of W. bound: all cells / cells of the largest "
        "worker, which is W when the load is equal. all W: the workers one after another, which is what one "
        "machine takes that does the work of W in W turns. merge: the Tiler's rows, after the workers. Times "
        "are "
        "medians.\n\n"
        "Inputs are random and lie in unnamed files in TMPDIR, so that the peak memory is that of one worker "
        "and the Tiler. Errors are against a reference in double precision on some random rows.\n\n"
        "On a GPU it is the published case: a worker's call is the attention of its whole subsequence, the "
        "tokens of its "
        "quorum, which are in the GPU's memory; nothing is gathered or merged. Times are between events of "
        "the GPU; "
        "not waited: what a clock shows that is read as soon as the call has been enqueued, which is no time "
        "of "
        "anything. Exact attention by W workers is attn run --device cuda.",
    .examples = bench_examples,
    .options = bench_options,
    .size = sizeof(bench_args),
    .run = bench_verb,
};
