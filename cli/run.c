/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - the verb `run`: attention over arrays in files, or over random ones, with bounded memory.
 *
 * The order of the steps makes errors early and cheap: command line, inputs' headers, the plan, the outputs'
 * folders and room, one pass over the inputs' contents; then the work; then the outputs get their names, and
 * only then the spool goes.  Ctrl-C is heard between slices of work and between reads; what is finished
 * stays in the spool.
 */
#include "run.h"

#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

/* ---- stopping ---- */

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "a signal handler may store an int");

/* Lock-free, and so fit for a signal handler; read by the threads that compute. */
static atomic_int stopped;

static void on_stop(int number)
{
    (void)number;
    atomic_store(&stopped, 1);
}

bool run_stopped(void)
{
    return atomic_load(&stopped) != 0;
}

/* The first signal stops cleanly, a second one at once.  A file that grows past a limit is an error code
 * like a full disk, not a signal. */
static void catch_signals(void)
{
    struct sigaction stop, ignore;
    memset(&stop, 0, sizeof stop);
    stop.sa_handler = on_stop;
    stop.sa_flags = (int)SA_RESETHAND;
    sigemptyset(&stop.sa_mask);
    ignore = stop;
    ignore.sa_handler = SIG_IGN;
    ignore.sa_flags = 0;
    (void)sigaction(SIGINT, &stop, NULL);
    (void)sigaction(SIGTERM, &stop, NULL);
    (void)sigaction(SIGXFSZ, &ignore, NULL);
}

/* ---- messages ---- */

void run_note(run *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    cli_progress_hide(&r->progress);
    fputs("attn: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

/* ---- execute ---- */

int run_event(void *data, const attn_event *event)
{
    run *r = data;
    double seconds = event->end - event->begin;
    double *sums[] = {[ATTN_STEP_GATHER] = &r->times.gather,
                      [ATTN_STEP_COMPUTE] = &r->times.compute,
                      [ATTN_STEP_HANDOVER] = &r->times.handover,
                      [ATTN_STEP_MERGE] = &r->times.merge};
    if (event->text != NULL) {
        cli_progress_hide(&r->progress);
        cli_warn("%s", event->text);
    } else if (event->step == ATTN_STEP_RESUME) {
        r->times.resumed++;
        r->times.cells_resumed += event->cells;
        cli_progress_skip(&r->progress, (double)event->cells);
    } else {
        *sums[event->step] += seconds;
        cli_progress_add(&r->progress, (double)event->cells);
    }
    return run_stopped();
}

static int told_stop(const run *r)
{
    const char *kept = r->temporary_spool == NULL ? r->spool : NULL;
    return kept != NULL
               ? cli_error(CLI_CANCELED,
                           "stopped; finished tasks are in %s: the same command goes on from there", kept)
               : cli_error(CLI_CANCELED, "stopped; with --spool DIR the finished tasks would have been kept");
}

static int execute(run *r)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_io io = {.size = sizeof io, .source = &r->source, .sink = &r->sink};
    attn_status status = attn_plan_summary(r->plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    void *workspace = malloc(attn_plan_workspace(r->plan));
    if (workspace == NULL) {
        return cli_error(CLI_MISSING, "no memory for %lld bytes of workspace; --mem-limit makes it fit",
                         (long long)attn_plan_workspace(r->plan));
    }
    cli_progress_begin(&r->progress, &r->args->common, "computing", (double)summary.cells);
    double begin = cli_now();
    status = attn_execute(r->plan, &io, workspace);
    r->times.wall = cli_now() - begin;
    cli_progress_end(&r->progress);
    free(workspace);
    if (status == ATTN_ECANCELED && run_stopped()) {
        return told_stop(r);
    }
    if (r->times.resumed > 0) {
        run_note(r, "%lld finished tasks were taken over from the spool %s", (long long)r->times.resumed,
                 r->spool);
    }
    return cli_fail(status);
}

/* ---- verify ---- */

static attn_status read_result(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *o, float *lse)
{
    return cli_result_read(data, batch, head, first, count, o, lse);
}

static int on_verified(void *data, int64_t rows)
{
    run *r = data;
    cli_progress_add(&r->progress, (double)rows);
    return run_stopped();
}

static int verify(run *r)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    int code = cli_fail(attn_plan_summary(r->plan, &summary));
    if (code != CLI_OK) {
        return code;
    }
    cli_verify v = {
        .problem = attn_plan_problem(r->plan),
        .kernel = summary.kernel,
        .source = &r->source,
        .out = r->out_dtype,
        .rows = r->args->verify ? 0 : r->args->verify_rows,
        .seed = (uint64_t)r->args->seed,
        .has_lse = r->result.has_lse,
        .read = read_result,
        .data = &r->result,
        .step = on_verified,
        .step_data = r,
    };
    int64_t rows = v.rows == 0 || v.rows > r->problem.tokens_q ? r->problem.tokens_q : v.rows;
    cli_progress_begin(&r->progress, &r->args->common, "verifying", (double)rows * r->planes);
    attn_status status = cli_verify_run(&v, &r->verdict);
    cli_progress_end(&r->progress);
    if (status == ATTN_ECANCELED && run_stopped()) {
        return cli_error(CLI_CANCELED, "stopped while verifying; the output is complete");
    }
    r->verified = status == ATTN_OK;
    return cli_fail(status);
}

/* ---- the steps ---- */

static bool wants_verify(const run_args *args)
{
    return args->verify || args->verify_rows > 0;
}

static int compute(run *r)
{
    int code = execute(r);
    if (code == CLI_OK) {
        code = cli_fail(cli_result_commit(&r->result));
    }
    run_clean_spool(r, code == CLI_OK);
    if (code == CLI_OK && wants_verify(r->args)) {
        code = verify(r);
    }
    r->memory.measured = cli_memory_peak();
    return code;
}

static int report(run *r)
{
    cli_out out;
    int code = cli_out_open(&out, &r->args->common);
    if (code != CLI_OK) {
        return code;
    }
    code = run_report(&out, r);
    if (code == CLI_OK && r->args->picture != NULL) {
        code = cli_picture(r->plan, r->args->picture, out.file, &r->args->common);
    }
    code = cli_out_close(&out, code);
    if (r->memory.limit > 0 && r->memory.measured > r->memory.limit) {
        char measured[CLI_NUMBER], limit[CLI_NUMBER];
        cli_warn("THE MEMORY LIMIT WAS EXCEEDED: the process held %s, the limit is %s",
                 cli_bytes(measured, (double)r->memory.measured), cli_bytes(limit, (double)r->memory.limit));
    }
    if (code == CLI_OK && r->verified && !r->verdict.passed) {
        return cli_error(CLI_WRONG, "the result is outside the tolerance");
    }
    return code;
}

static int check_args(const run_args *args)
{
    int files = (args->operand[0] != NULL) + (args->operand[1] != NULL) + (args->operand[2] != NULL);
    if (files == 0 && args->random == NULL) {
        return cli_error(CLI_USAGE, "what is to be computed? give --q, --k and --v, or --random ...");
    }
    if (files > 0 && args->random != NULL) {
        return cli_error(CLI_USAGE, "--random takes the place of --q, --k and --v: give one or the other");
    }
    if (files > 0 && files < 3) {
        return cli_error(CLI_USAGE, "--q, --k and --v belong together: --%s is missing",
                         args->operand[0] == NULL   ? "q"
                         : args->operand[1] == NULL ? "k"
                                                    : "v");
    }
    if (args->save_inputs != NULL && args->random == NULL) {
        return cli_error(CLI_USAGE, "--save-inputs keeps random inputs: it needs --random");
    }
    if (args->window.item != NULL && args->window.count != 2) {
        return cli_error(CLI_USAGE, "--window takes two numbers, L,R: keys to the left and to the right");
    }
    if (cli_given(&args->common, "scale") && args->scale == 0) {
        return cli_error(CLI_USAGE, "--scale 0 would make every weight equal; leave it out for 1/sqrt(d)");
    }
    if (args->keep_spool && args->spool == NULL) {
        return cli_error(CLI_USAGE, "--keep-spool needs --spool DIR");
    }
    return CLI_OK;
}

static int run_steps(run *r)
{
    int code = run_open_inputs(r);
    if (code == CLI_OK && r->args->dry_run) {
        code = run_make_plan(r);
        return code == CLI_OK ? report(r) : code;
    }
    if (code == CLI_OK) {
        code = run_open_results(r);
    }
    if (code == CLI_OK) {
        code = run_scan_inputs(r);
    }
    if (code == CLI_OK) {
        code = run_save_inputs(r);
    }
    if (code == CLI_OK) {
        code = run_make_plan(r);
    }
    if (code == CLI_OK) {
        code = compute(r);
    }
    return code == CLI_OK ? report(r) : code;
}

static attn_status read_unless_stopped(void *data, attn_operand operand, int64_t batch, int64_t first,
                                       int64_t count, void *dst, int64_t head_stride)
{
    run *r = data;
    if (run_stopped()) {
        return cli_refuse(ATTN_ECANCELED, "stopped");
    }
    return r->inner.read(r->inner.data, operand, batch, first, count, dst, head_stride);
}

static int run_verb(const void *values)
{
    const run_args *args = values;
    int code = check_args(args);
    if (code != CLI_OK) {
        return code;
    }
    run *r = cli_alloc(1, sizeof *r);
    r->args = args;
    r->input = (cli_input)CLI_INPUT_CLOSED;
    r->result = (cli_result)CLI_RESULT_CLOSED;
    r->source = (attn_source){.size = sizeof r->source, .data = r, .read = read_unless_stopped};
    r->sink = (attn_sink){.size = sizeof r->sink, .data = &r->result, .write = cli_result_write};
    catch_signals();
    code = run_steps(r);
    run_clean_spool(r, false);
    run_close(r);
    attn_plan_destroy(r->plan);
    free(r);
    return code;
}

const cli_verb cli_verb_run = {
    .name = "run",
    .summary = "compute attention over arrays in files, or over random ones, with bounded memory",
    .description =
        "O = softmax(scale * Q K^T + mask) V, exactly, cut by a cyclic quorum schedule into W independent "
        "workers whose partial results are merged. One machine does the work of all W, --resident of them at "
        "a "
        "time, so that memory can be as small as --mem-limit says: it picks the smallest W that fits.\n\n"
        "Arrays are .npy files (versions 1 to 3, C order, '<f4', '<f2', '<f8') or tensors of .safetensors "
        "files "
        "(F32, F16, BF16, F64; FILE:NAME says which). Shapes are [n,d], [h,n,d] or [b,h,n,d]; with --layout "
        "bnhd [n,d], [n,h,d] or [b,n,h,d]. The heads of k and v may be fewer than those of q if they divide "
        "them. Elements of 64 bits are computed as fp32. O has the shape of q with v's last dimension; lse "
        "(natural logarithm, fp32) has the shape [n], [h,n] or [b,h,n]. An output file appears under its "
        "name "
        "only when it is complete.\n\n"
        "With --spool DIR each finished task is kept: after a crash, a kill or Ctrl-C the same command goes "
        "on "
        "where it was and gives the same bytes.\n\n"
        "--verify compares every row with a reference in double precision, --verify-rows K so many rows of "
        "each head; the tolerance is a formula of dtype, d, n and the data's sizes, and exit code 1 says "
        "that "
        "it was not kept.",
    .examples = run_examples,
    .options = run_options,
    .size = sizeof(run_args),
    .run = run_verb,
};
