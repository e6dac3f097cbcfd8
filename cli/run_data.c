/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_data.c - where q, k and v of a run come from, and where o and lse go.
 *
 * The contents of files are read once before the work: the pass finds what is not finite while there is still
 * time to stop (--strict), and hashes what the spool must belong to.
 */
#include <stdlib.h>
#include <string.h>

#include "run.h"

/* ---- inputs ---- */

static attn_status open_random(run *r)
{
    attn_status status = cli_random_ready();
    if (status == ATTN_OK) {
        status = attn_problem_parse(&r->problem, r->args->random);
    }
    r->out_dtype = (cli_dtype)r->problem.dtype;
    return status;
}

static attn_status open_files(run *r)
{
    attn_status status = cli_input_open(&r->input, r->args->operand, (cli_layout)r->args->layout);
    if (status != ATTN_OK) {
        return status;
    }
    r->problem = (attn_problem)ATTN_INIT(attn_problem);
    cli_input_problem(&r->input, &r->problem);
    r->out_dtype = (cli_dtype)r->problem.dtype;
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        if (r->input.array[x].dtype == CLI_F64) {
            run_note(r, "%s is float64: it is converted to float32 while it is read", r->input.path[x]);
        }
    }
    return ATTN_OK;
}

static attn_status apply_mask(run *r)
{
    const run_args *args = r->args;
    if (args->causal) {
        r->problem.mask = ATTN_MASK_CAUSAL;
    }
    if (args->window.count == 2) {
        r->problem.mask = ATTN_MASK_WINDOW;
        r->problem.window_left = args->window.item[0];
        r->problem.window_right = args->causal ? 0 : args->window.item[1];
    }
    if (args->scale != 0) {
        r->problem.scale = args->scale;
    }
    return attn_problem_check(&r->problem);
}

/* The type of o, and whether its file can hold it. */
static attn_status choose_out_dtype(run *r)
{
    bool asked = cli_given(&r->args->common, "out-dtype");
    cli_dtype wanted = asked ? (cli_dtype)r->args->out_dtype : r->out_dtype, lse;
    attn_status status = cli_result_dtype(r->args->out, wanted, &r->out_dtype);
    if (status == ATTN_OK) {
        status = cli_result_dtype(r->args->lse, CLI_F32, &lse);
    }
    if (status == ATTN_OK && r->out_dtype != wanted) {
        if (asked) {
            return cli_refuse(ATTN_EINVAL, "%s: .npy has no bf16; write a .safetensors file", r->args->out);
        }
        run_note(r, ".npy has no bf16: %s is written as f32; a .safetensors file would keep bf16",
                 r->args->out);
    }
    r->problem.dtype_out = (attn_dtype)r->out_dtype;
    return status;
}

int run_open_inputs(run *r)
{
    attn_status status = r->args->random != NULL ? open_random(r) : open_files(r);
    if (status == ATTN_OK) {
        status = apply_mask(r);
    }
    if (status == ATTN_OK) {
        status = choose_out_dtype(r);
    }
    r->random = (cli_random){.problem = r->problem, .seed = (uint64_t)r->args->seed};
    r->inner = (attn_source){.size = sizeof r->inner,
                             .data = r->args->random != NULL ? (void *)&r->random : (void *)&r->input,
                             .read = r->args->random != NULL ? cli_random_read : cli_input_read};
    r->planes = (double)r->problem.batch * (double)r->problem.heads_q;
    return cli_fail(status);
}

static int on_scanned(void *data, int64_t bytes)
{
    run *r = data;
    cli_progress_add(&r->progress, (double)bytes);
    return run_stopped();
}

static int tell_nonfinite(const run *r)
{
    static const char *const names[] = {"q", "k", "v"};
    const cli_scan *s = &r->scan;
    char text[256];
    snprintf(text, sizeof text,
             "%lld input%s not finite, the first in %s at batch %lld, head %lld, token %lld, "
             "dimension %lld",
             (long long)s->nonfinite, s->nonfinite == 1 ? " is" : "s are", names[s->operand],
             (long long)s->batch, (long long)s->head, (long long)s->token, (long long)s->dim);
    if (r->args->strict) {
        return cli_error(CLI_USAGE, "%s (%s); --strict refuses them", text, r->input.path[s->operand]);
    }
    cli_warn("%s (%s); a NaN stays in the rows that see it", text, r->input.path[s->operand]);
    return CLI_OK;
}

int run_scan_inputs(run *r)
{
    double bytes = 0;
    if (r->args->random != NULL) {
        return CLI_OK; /* normals are finite, and their seed tells them apart */
    }
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        bytes += (double)r->input.array[x].count * (double)cli_dtype_size(r->input.array[x].dtype);
    }
    cli_progress_begin(&r->progress, &r->args->common, "reading", bytes);
    attn_status status = cli_input_scan(&r->input, &r->scan, on_scanned, r);
    cli_progress_end(&r->progress);
    if (status == ATTN_ECANCELED) {
        return cli_error(CLI_CANCELED, "stopped before computing");
    }
    r->scanned = status == ATTN_OK;
    return r->scanned && r->scan.nonfinite > 0 ? tell_nonfinite(r) : cli_fail(status);
}

char *run_saved_name(const run *r, int operand)
{
    const char *prefix = r->args->save_inputs, *end = r->problem.dtype == ATTN_BF16 ? "safetensors" : "npy";
    const size_t room = strlen(prefix) + 20;
    char *name = cli_alloc(1, room);
    snprintf(name, room, "%s-%c.%s", prefix, "qkv"[operand], end);
    return name;
}

int run_save_inputs(run *r)
{
    attn_status status = ATTN_OK;
    for (int x = ATTN_Q; x <= ATTN_V && r->args->save_inputs != NULL && status == ATTN_OK; x++) {
        char *path = run_saved_name(r, x);
        status = cli_operand_save(&r->source, &r->problem, (attn_operand)x, path);
        free(path);
    }
    if (status == ATTN_ECANCELED) {
        return cli_error(CLI_CANCELED, "stopped before computing");
    }
    return cli_fail(status);
}

/* ---- outputs ---- */

/* Links and different spellings of one path included. */
static bool same_file(const char *a, const char *b)
{
    bool same = a != NULL && b != NULL && strcmp(a, b) == 0;
    char *one = a != NULL && b != NULL ? cli_real_path(a) : NULL;
    char *other = one != NULL ? cli_real_path(b) : NULL;
    same = same || (other != NULL && strcmp(one, other) == 0);
    free(one);
    free(other);
    return same;
}

static attn_status check_paths(const run *r)
{
    const char *out = r->args->out, *lse = r->args->lse;
    if (same_file(out, lse)) {
        return cli_refuse(ATTN_EINVAL, "--out and --lse name the same file %s", out);
    }
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        const char *in = r->input.path[x];
        if (same_file(in, out) || same_file(in, lse)) {
            return cli_refuse(ATTN_EINVAL, "the output would replace the input %s; write to another file",
                              in);
        }
    }
    return ATTN_OK;
}

int run_open_results(run *r)
{
    const run_args *args = r->args;
    cli_result_want want = {
        .o_path = args->out,
        .lse_path = args->lse,
        .dtype = r->out_dtype,
        .layout = (cli_layout)args->layout,
        .rank = args->random != NULL ? 4 : r->input.array[ATTN_Q].rank,
        .scratch = args->verify || args->verify_rows > 0,
    };
    attn_status status = check_paths(r);
    return cli_fail(status == ATTN_OK ? cli_result_open(&r->result, &r->problem, &want) : status);
}

void run_close(run *r)
{
    cli_result_close(&r->result);
    cli_input_close(&r->input);
}
