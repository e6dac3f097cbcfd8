/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run_report.c - what a run tells at its end: text for people, one document as json, one row as csv or md.
 *
 * Seconds of gather, compute and merge are sums over the workers' steps: with several residents at once they
 * add up to more than the wall time.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

static const char *const operand_names[] = {"q", "k", "v"};

static double gflops(const run *r)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    if (r->times.wall <= 0 || attn_plan_summary(r->plan, &summary) != ATTN_OK || summary.cells == 0) {
        return NAN;
    }
    double done = 1 - (double)r->times.cells_resumed / (double)summary.cells;
    return attn_problem_flops(&r->problem) * done / r->times.wall * 1e-9;
}

/* ---- text ---- */

static void print_inputs(FILE *file, const run *r)
{
    char shape[CLI_SHAPE_TEXT];
    if (r->args->random != NULL) {
        fprintf(file, "  %-12sstandard normal, Philox4x32-10, seed %lld\n", "Inputs",
                (long long)r->args->seed);
        for (int x = ATTN_Q; x <= ATTN_V && r->args->save_inputs != NULL; x++) {
            char *name = run_saved_name(r, x);
            fprintf(file, "  %-12s%s %s\n", "", operand_names[x], name);
            free(name);
        }
        return;
    }
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        fprintf(file, "  %-12s%s %s %s %s\n", x == ATTN_Q ? "Inputs" : "", operand_names[x], r->input.path[x],
                cli_dtype_name(r->input.array[x].dtype), cli_array_shape(&r->input.array[x], shape));
    }
}

static void print_plan(FILE *file, const run *r, const attn_summary *s)
{
    fprintf(file, "  %-12s%lld worker%s, %lld at a time, %d thread%s each, kernel %s%s\n", "Plan",
            (long long)s->workers, s->workers == 1 ? "" : "s", (long long)s->resident, s->threads,
            s->threads == 1 ? "" : "s", s->kernel, s->spooled ? ", partials in a spool" : "");
    fprintf(file, "  %-12s%s quorums, ", "", s->quorum == ATTN_QUORUM_CYCLIC ? "cyclic" : "rectangular");
    if (s->quorum == ATTN_QUORUM_CYCLIC && s->quorum_q <= 24) {
        fputs("interest set ", file);
        for (int64_t i = 0; i < s->quorum_q; i++) {
            fprintf(file, "%s%lld", i > 0 ? "," : "", (long long)s->set_q[i]);
        }
        fprintf(file, " (%s)%s\n", s->set_origin, s->classic ? ", classic rules" : "");
    } else {
        fprintf(file, "%lld query and %lld key groups a worker\n", (long long)s->quorum_q,
                (long long)s->quorum_kv);
    }
    (void)r;
}

static void print_memory(FILE *file, const run *r, const attn_summary *s)
{
    char predicted[CLI_NUMBER], measured[CLI_NUMBER], limit[CLI_NUMBER];
    const run_memory *m = &r->memory;
    fprintf(file, "  %-12spredicted peak %s", "Memory", cli_bytes(predicted, (double)m->predicted));
    if (m->measured > 0) {
        fprintf(file, ", measured peak %s", cli_bytes(measured, (double)m->measured));
    }
    if (m->limit > 0) {
        fprintf(file, ", limit %s%s", cli_bytes(limit, (double)m->limit),
                m->measured > m->limit ? " EXCEEDED" : "");
    }
    fputc('\n', file);
    if (s->device_memory > 0) {
        fprintf(file, "  %-12s%s of GPU %lld's memory", "", cli_bytes(predicted, (double)s->device_memory),
                (long long)r->args->common.gpu);
        if (r->args->mem_limit > 0) {
            fprintf(file, ", limit %s", cli_bytes(limit, (double)r->args->mem_limit));
        }
        fputc('\n', file);
    }
}

static void print_times(FILE *file, const run *r)
{
    char wall[CLI_NUMBER], gather[CLI_NUMBER], work[CLI_NUMBER], merge[CLI_NUMBER];
    const run_times *t = &r->times;
    fprintf(file, "  %-12s%s (gather %s, compute %s, merge %s), %.1f GFLOP/s\n", "Time",
            cli_seconds(wall, t->wall), cli_seconds(gather, t->gather), cli_seconds(work, t->compute),
            cli_seconds(merge, t->handover + t->merge), gflops(r));
}

static void print_outputs(FILE *file, const run *r)
{
    char shape[CLI_SHAPE_TEXT];
    const char *label = "Outputs";
    if (r->args->out != NULL) {
        fprintf(file, "  %-12so %s %s %s\n", label, r->args->out, cli_dtype_name(r->result.o_array.dtype),
                cli_array_shape(&r->result.o_array, shape));
        label = "";
    }
    if (r->args->lse != NULL) {
        fprintf(file, "  %-12slse %s f32 %s\n", label, r->args->lse,
                cli_array_shape(&r->result.lse_array, shape));
    }
}

static void print_verdict(FILE *file, const run *r)
{
    const cli_verdict *v = &r->verdict;
    fprintf(file, "  %-12s%s: %lld rows against fp64\n", "Verified", v->passed ? "correct" : "WRONG",
            (long long)v->rows);
    fprintf(file, "  %-12smax error %.3g (tolerance %.3g), relative error %.3g\n", "", v->max_error,
            v->max_limit, v->relative);
    fprintf(file, "  %-12sroot mean square %.3g (tolerance %.3g)", "", v->rms, v->rms_limit);
    if (v->has_lse) {
        fprintf(file, ", lse error %.3g (tolerance %.3g)", v->lse_error, v->tolerance.lse);
    }
    fputc('\n', file);
    if (v->nonfinite > 0) {
        fprintf(file, "  %-12s%lld rows see a NaN or inf, and so are not finite\n", "",
                (long long)v->nonfinite);
    }
    if (v->wrong > 0) {
        fprintf(file, "  %-12s%lld rows are outside, the first at batch %lld, head %lld, row %lld\n", "",
                (long long)v->wrong, (long long)v->at[0], (long long)v->at[1], (long long)v->at[2]);
    }
}

static int print_text(FILE *file, const run *r)
{
    char problem[512];
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(r->plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    attn_problem_print(&r->problem, problem, sizeof problem);
    fprintf(file, "%s\n  %-12s%s\n", r->args->dry_run ? "Plan of a run" : "Run", "Problem", problem);
    print_inputs(file, r);
    print_plan(file, r, &summary);
    print_memory(file, r, &summary);
    if (!r->args->dry_run) {
        print_times(file, r);
        print_outputs(file, r);
    }
    if (r->verified) {
        print_verdict(file, r);
    }
    return cli_summary_print(file, r->plan);
}

/* ---- json ---- */

static void json_shape(cli_json *json, const cli_array *array)
{
    cli_json_text(json, "dtype", cli_dtype_name(array->dtype));
    cli_json_ints(json, "shape", array->shape, array->rank);
}

static void json_inputs(cli_json *json, const run *r)
{
    cli_json_object(json, "inputs");
    cli_json_text(json, "random", r->args->random);
    if (r->args->random != NULL) {
        cli_json_int(json, "seed", r->args->seed);
    }
    for (int x = ATTN_Q; x <= ATTN_V && r->args->random == NULL; x++) {
        cli_json_object(json, operand_names[x]);
        cli_json_text(json, "file", r->input.path[x]);
        json_shape(json, &r->input.array[x]);
        cli_json_end(json);
    }
    if (r->scanned) {
        cli_json_int(json, "nonfinite", r->scan.nonfinite);
    }
    cli_json_end(json);
}

static void json_output(cli_json *json, const char *key, const char *path, const cli_array *array)
{
    if (path != NULL) {
        cli_json_object(json, key);
        cli_json_text(json, "file", path);
        json_shape(json, array);
        cli_json_end(json);
    }
}

static void json_memory(cli_json *json, const run *r)
{
    const run_memory *m = &r->memory;
    cli_json_object(json, "memory");
    if (m->limit > 0) {
        cli_json_int(json, "limit_bytes", m->limit);
    } else {
        cli_json_null(json, "limit_bytes");
    }
    cli_json_int(json, "program_bytes", m->program);
    cli_json_int(json, "workspace_bytes", (int64_t)attn_plan_workspace(r->plan));
    cli_json_int(json, "predicted_peak_bytes", m->predicted);
    if (m->measured > 0) {
        cli_json_int(json, "measured_peak_bytes", m->measured);
        cli_json_bool(json, "kept", m->limit == 0 || m->measured <= m->limit);
    }
    attn_summary summary = ATTN_INIT(attn_summary);
    if (r->args->common.device == ATTN_CUDA && attn_plan_summary(r->plan, &summary) == ATTN_OK) {
        cli_json_int(json, "device_bytes", summary.device_memory);
        cli_json_int(json, "pinned_bytes", summary.pinned_memory);
    }
    cli_json_end(json);
}

static void json_times(cli_json *json, const run *r)
{
    cli_json_object(json, "time");
    cli_json_real(json, "wall_s", r->times.wall);
    cli_json_real(json, "gather_s", r->times.gather);
    cli_json_real(json, "compute_s", r->times.compute);
    cli_json_real(json, "handover_s", r->times.handover);
    cli_json_real(json, "merge_s", r->times.merge);
    cli_json_real(json, "gflops", gflops(r));
    cli_json_int(json, "tasks_resumed", r->times.resumed);
    cli_json_end(json);
}

static void json_verdict(cli_json *json, const cli_verdict *v)
{
    cli_json_object(json, "verify");
    cli_json_bool(json, "passed", v->passed);
    cli_json_int(json, "rows", v->rows);
    cli_json_int(json, "rows_wrong", v->wrong);
    cli_json_int(json, "rows_not_finite", v->nonfinite);
    cli_json_real(json, "max_error", v->max_error);
    cli_json_real(json, "max_error_tolerance", v->max_limit);
    cli_json_real(json, "relative_error", v->relative);
    cli_json_real(json, "rms_error", v->rms);
    cli_json_real(json, "rms_error_tolerance", v->rms_limit);
    if (v->has_lse) {
        cli_json_real(json, "lse_error", v->lse_error);
        cli_json_real(json, "lse_error_tolerance", v->tolerance.lse);
    }
    cli_json_end(json);
}

static int print_json(cli_json *json, const run *r)
{
    char problem[512];
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(r->plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    attn_problem_print(&r->problem, problem, sizeof problem);
    cli_json_object(json, NULL);
    cli_json_int(json, "schema_version", CLI_SCHEMA_VERSION);
    cli_json_text(json, "problem", problem);
    cli_json_int(json, "workers", summary.workers);
    cli_json_bool(json, "dry_run", r->args->dry_run);
    json_inputs(json, r);
    json_memory(json, r);
    if (!r->args->dry_run) {
        json_output(json, "out", r->args->out, &r->result.o_array);
        json_output(json, "lse", r->args->lse, &r->result.lse_array);
        json_times(json, r);
    }
    if (r->verified) {
        json_verdict(json, &r->verdict);
    }
    int code = cli_summary_json(json, r->plan);
    cli_json_end(json);
    return code;
}

/* ---- one row ---- */

static int print_row(cli_out *out, const run *r)
{
    static const cli_column columns[] = {
        {"problem", "problem", CLI_CELL_TEXT, 0, 0},
        {"workers", "W", CLI_CELL_INT, 0, 0},
        {"kernel", "kernel", CLI_CELL_TEXT, 0, 0},
        {"wall_s", "time (s)", CLI_CELL_REAL, 3, 0},
        {"gflops", "GFLOP/s", CLI_CELL_REAL, 1, 0},
        {"predicted_peak_bytes", "predicted peak", CLI_CELL_BYTES, 0, 0},
        {"measured_peak_bytes", "measured peak", CLI_CELL_BYTES, 0, 0},
        {"max_error", "max error", CLI_CELL_REAL, 9, 0},
        {"relative_error", "rel. error", CLI_CELL_REAL, 9, 0},
        {"status", "status", CLI_CELL_TEXT, 0, 0},
    };
    char problem[512];
    cli_table table;
    attn_summary summary = ATTN_INIT(attn_summary);
    attn_status status = attn_plan_summary(r->plan, &summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    attn_problem_print(&r->problem, problem, sizeof problem);
    cli_table_begin(&table, out, "runs", columns, sizeof columns / sizeof columns[0]);
    cli_table_text(&table, problem);
    cli_table_int(&table, summary.workers);
    cli_table_text(&table, summary.kernel);
    cli_table_real(&table, r->args->dry_run ? NAN : r->times.wall);
    cli_table_real(&table, gflops(r));
    cli_table_int(&table, r->memory.predicted);
    if (r->args->dry_run) {
        cli_table_missing(&table);
    } else {
        cli_table_int(&table, r->memory.measured);
    }
    cli_table_real(&table, r->verified ? r->verdict.max_error : NAN);
    cli_table_real(&table, r->verified ? r->verdict.relative : NAN);
    cli_table_text(&table, r->args->dry_run    ? "planned"
                           : !r->verified      ? "done"
                           : r->verdict.passed ? "ok"
                                               : "wrong");
    cli_table_end(&table);
    return CLI_OK;
}

int run_report(cli_out *out, run *r)
{
    switch (out->format) {
    case CLI_FORMAT_JSON:
    case CLI_FORMAT_JSONL:
        return print_json(&out->json, r);
    case CLI_FORMAT_MD:
    case CLI_FORMAT_CSV:
        return print_row(out, r);
    case CLI_FORMAT_TABLE:
        break;
    }
    return print_text(out->file, r);
}
