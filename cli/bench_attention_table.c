/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attention_table.c - rows of `bench attention`: the full columns, and those of the published tables.
 *
 * Memory is in MB of 10^6 bytes.  Speed is FLOPs by the field's convention over the median time; machines get
 * GFLOP/s, people TFLOP/s.  A preset for people has the columns of its publication, then error, status and
 * note; as csv or JSON it has the full columns behind parameter and value.
 */
#include <math.h>
#include <string.h>

#include "bench_attention.h"
#include "machine.h"

static const cli_column columns[] = {
    {"parameter", "parameter", CLI_CELL_TEXT, 0, 10}, /* these two of a preset only */
    {"value", "value", CLI_CELL_TEXT, 0, 0},
    {"contestant", "contestant", CLI_CELL_TEXT, 0, 14},
    {"isa", "isa", CLI_CELL_TEXT, 0, 9},
    {"pass", "pass", CLI_CELL_TEXT, 0, 0},
    {"batch", "batch", CLI_CELL_INT, 0, 5},
    {"seq", "seq", CLI_CELL_INT, 0, 6},
    {"heads", "heads", CLI_CELL_INT, 0, 5},
    {"kv_heads", "kv heads", CLI_CELL_INT, 0, 0},
    {"dim", "dim", CLI_CELL_INT, 0, 4},
    {"causal", "causal", CLI_CELL_BOOL, 0, 6},
    {"dtype", "dtype", CLI_CELL_TEXT, 0, 5},
    {"threads", "threads", CLI_CELL_INT, 0, 0},
    {"first_ms", "first (ms)", CLI_CELL_REAL, 3, 10},
    {"mean_ms", "mean (ms)", CLI_CELL_REAL, 3, 10},
    {"std_ms", "std (ms)", CLI_CELL_REAL, 3, 0},
    {"median_ms", "median (ms)", CLI_CELL_REAL, 3, 0},
    {"min_ms", "min (ms)", CLI_CELL_REAL, 3, 10},
    {"max_ms", "max (ms)", CLI_CELL_REAL, 3, 10},
    {"gflops", "TFLOP/s", CLI_CELL_REAL, 4, 0},
    {"percent_of_peak", "% of peak", CLI_CELL_REAL, 1, 0},
    {"predicted_peak_mb", "predicted (MB)", CLI_CELL_REAL, 1, 0},
    {"peak_mb", "peak (MB)", CLI_CELL_REAL, 1, 0},
    {"error_max", "max error", CLI_CELL_REAL, 9, 11},
    {"error_rel", "rel. error", CLI_CELL_REAL, 9, 11},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"samples", "samples", CLI_CELL_INT, 0, 0},
    {"before_backward_mb", "before bwd (MB)", CLI_CELL_REAL, 1, 0},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};
enum { OF_PRESET = 2, COLUMNS = sizeof columns / sizeof columns[0] };

/* On a GPU also these, before the note. */
static const cli_column gpu_columns[] = {
    {"sm_clock_mhz", "SM (MHz)", CLI_CELL_INT, 0, 0},
    {"power_w", "power (W)", CLI_CELL_INT, 0, 0},
};
enum { GPU_COLUMNS = sizeof gpu_columns / sizeof gpu_columns[0] };

static const cli_column flash_vs_naive_columns[] = {
    {"parameter", "parameter", CLI_CELL_TEXT, 0, 10},
    {"value", "value", CLI_CELL_TEXT, 0, 0},
    {"contestant", "contestant", CLI_CELL_TEXT, 0, 10},
    {"forward_s", "forward time (s)", CLI_CELL_REAL, 4, 0},
    {"tflops", "TFLOP/s", CLI_CELL_REAL, 4, 0},
    {"peak_mb", "peak memory (MB)", CLI_CELL_REAL, 1, 0},
    {"error_max", "max error", CLI_CELL_REAL, 9, 11},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};

static const cli_column d_model_columns[] = {
    {"d_model", "d_model", CLI_CELL_INT, 0, 0},
    {"seq", "seq", CLI_CELL_INT, 0, 6},
    {"contestant", "contestant", CLI_CELL_TEXT, 0, 10},
    {"forward_mean_ms", "forward mean (ms)", CLI_CELL_REAL, 3, 0},
    {"backward_mean_ms", "backward mean (ms)", CLI_CELL_REAL, 3, 0},
    {"before_backward_mb", "memory before backward (MB)", CLI_CELL_REAL, 1, 0},
    {"error_max", "max error", CLI_CELL_REAL, 9, 11},
    {"status", "status", CLI_CELL_TEXT, 0, 0},
    {"note", "note", CLI_CELL_TEXT, 0, 0},
};

/* The columns of full rows, in t->columns; returns how many. */
static int choose_columns(attention_table *t, int preset)
{
    const int skip = preset == PRESET_NONE ? OF_PRESET : 0;
    int count = COLUMNS - skip;
    memcpy(t->columns, columns + skip, (size_t)count * sizeof *columns);
    if (t->gpu != NULL) {
        memcpy(t->columns + count - 1, gpu_columns, sizeof gpu_columns);
        count += GPU_COLUMNS;
        t->columns[count - 1] = columns[COLUMNS - 1];
    }
    return count;
}

static void put_machine(cli_json *json, const cli_gpu *gpu)
{
    cli_machine host;
    cli_machine_look(&host);
    cli_json_object(json, "machine");
    cli_machine_json(json, &host);
    cli_json_text(json, "version", attn_version());
    cli_json_text(json, "build", cli_build());
    cli_json_text(json, "compiler", cli_compiler());
    if (gpu != NULL) {
        cli_json_object(json, "gpu");
        cli_gpu_json(json, gpu);
        for (int dtype = 0; dtype < CLI_GPU_DTYPES; dtype++) {
            char key[32];
            snprintf(key, sizeof key, "peak_gflops_%s", attn_dtype_name((attn_dtype)dtype));
            if (gpu->peak[dtype] > 0) {
                cli_json_real(json, key, 1e-9 * gpu->peak[dtype]);
            }
        }
        cli_json_text(json, "peak_of", gpu->peak_of);
        cli_json_end(json);
    }
    cli_json_end(json);
}

int attention_table_begin(attention_table *t, const attention_args *args, int preset, const cli_gpu *gpu)
{
    t->gpu = gpu;
    int code = cli_out_open(&t->out, &args->common);
    if (code != CLI_OK) {
        return code;
    }
    cli_out *out = &t->out;
    t->preset = preset;
    t->published = preset != PRESET_NONE && (out->format == CLI_FORMAT_TABLE || out->format == CLI_FORMAT_MD);
    if (out->format == CLI_FORMAT_JSON) {
        cli_json_object(&out->json, NULL);
        cli_json_int(&out->json, "schema_version", CLI_SCHEMA_VERSION);
        put_machine(&out->json, gpu);
    }
    if (t->published && preset == PRESET_D_MODEL) {
        cli_table_begin(&t->table, out, "rows", d_model_columns,
                        sizeof d_model_columns / sizeof d_model_columns[0]);
    } else if (t->published) {
        cli_table_begin(&t->table, out, "rows", flash_vs_naive_columns,
                        sizeof flash_vs_naive_columns / sizeof flash_vs_naive_columns[0]);
    } else {
        const int count = choose_columns(t, preset);
        cli_table_begin(&t->table, out, "rows", t->columns, count);
    }
    return CLI_OK;
}

/* What the numbers above were measured on. */
static void put_gpu(const attention_table *t)
{
    const cli_gpu *gpu = t->gpu;
    FILE *file = t->out.file;
    fprintf(file, "\n%s, %d SMs", gpu->info.name, gpu->info.sms);
    if (gpu->clock_most > 0) {
        fprintf(file, " up to %d MHz, %d W", gpu->clock_most, gpu->power_most);
    }
    fprintf(file, ", CUDA %d.%d", gpu->info.driver / 1000, gpu->info.driver % 1000 / 10);
    if (gpu->driver[0] != '\0') {
        fprintf(file, ", driver %s", gpu->driver);
    }
    fprintf(file, "; peak:");
    for (int dtype = 0; dtype < CLI_GPU_DTYPES; dtype++) {
        if (gpu->peak[dtype] > 0) {
            fprintf(file, " %s %.1f TFLOP/s,", attn_dtype_name((attn_dtype)dtype), 1e-12 * gpu->peak[dtype]);
        }
    }
    fprintf(file, " %s\n", gpu->peak_of);
}

int attention_table_end(attention_table *t, int code)
{
    cli_table_end(&t->table);
    if (t->out.format == CLI_FORMAT_JSON) {
        cli_json_end(&t->out.json);
    } else if (t->gpu != NULL && (t->out.format == CLI_FORMAT_TABLE || t->out.format == CLI_FORMAT_MD)) {
        put_gpu(t);
    }
    return cli_out_close(&t->out, code);
}

/* "batch 32/4; needs 3.2 GiB, ...": what is to be said about the row */
static void put_note(cli_table *table, const attention_case *c, const char *text)
{
    char note[640];
    snprintf(note, sizeof note, "%s%s%s", c->note, c->note[0] != '\0' && text[0] != '\0' ? "; " : "", text);
    cli_table_text(table, note[0] != '\0' ? note : NULL);
}

static void put_axes(cli_table *table, const attention_case *c, const attention_result *r)
{
    static const char *const passes[] = {"forward", "backward", "both"};
    const attn_problem *p = &c->c.problem;
    cli_table_text(table, c->who.name);
    cli_table_text(table, r->isa[0] != '\0' ? r->isa : NULL);
    cli_table_text(table, passes[c->c.pass]);
    cli_table_int(table, p->batch);
    cli_table_int(table, p->tokens_q);
    cli_table_int(table, p->heads_q);
    cli_table_int(table, p->heads_kv);
    cli_table_int(table, p->dim_qk);
    cli_table_int(table, p->mask == ATTN_MASK_CAUSAL);
    cli_table_text(table, attn_dtype_name(p->dtype));
    int threads = r->threads > 0 ? r->threads : c->c.threads;
    cli_table_known(table, threads > 0, threads);
}

void attention_table_row(attention_table *t, const attention_case *c, const attention_result *r)
{
    cli_table *table = &t->table;
    bool ran = cli_row_measured(r->status);
    bool people = t->out.format == CLI_FORMAT_TABLE || t->out.format == CLI_FORMAT_MD;
    double speed = ran ? r->flops / r->time.median : 0;
    if (t->preset != PRESET_NONE) {
        cli_table_text(table, c->parameter);
        cli_table_text(table, c->value);
    }
    put_axes(table, c, r);
    cli_table_known(table, ran, 1e3 * r->first);
    cli_table_known(table, ran, 1e3 * r->time.mean);
    cli_table_known(table, ran, 1e3 * r->time.std);
    cli_table_known(table, ran, 1e3 * r->time.median);
    cli_table_known(table, ran, 1e3 * r->time.min);
    cli_table_known(table, ran, 1e3 * r->time.max);
    cli_table_known(table, ran, speed * (people ? 1e-12 : 1e-9));
    cli_table_known(table, ran && r->peak_flops > 0, 100 * speed / r->peak_flops);
    cli_table_known(table, r->predicted > 0, 1e-6 * (double)r->predicted);
    cli_table_known(table, ran && r->peak > 0, 1e-6 * (double)r->peak);
    cli_table_known(table, ran, r->max_error);
    cli_table_known(table, ran, r->relative);
    cli_table_text(table, cli_row_word(r->status));
    cli_table_known(table, ran, (double)r->samples);
    cli_table_known(table, ran && r->before > 0, 1e-6 * (double)r->before);
    if (t->gpu != NULL) {
        cli_table_known(table, r->state.clock > 0, r->state.clock);
        cli_table_known(table, r->state.power > 0, r->state.power);
    }
    put_note(table, c, r->text);
}

void attention_table_published(attention_table *t, const attention_case *c, const attention_result *forward,
                               const attention_result *backward)
{
    cli_table *table = &t->table;
    bool ran = cli_row_measured(forward->status);
    const attention_result *worse = forward;
    double error = forward->max_error;
    if (t->preset == PRESET_D_MODEL) {
        bool back = cli_row_measured(backward->status);
        cli_table_int(table, c->c.problem.dim_qk);
        cli_table_int(table, c->c.problem.tokens_q);
        cli_table_text(table, c->who.name);
        cli_table_known(table, ran, 1e3 * forward->time.mean);
        cli_table_known(table, back, 1e3 * backward->time.mean);
        cli_table_known(table, back && backward->before > 0, 1e-6 * (double)backward->before);
        worse = forward->status == CLI_ROW_OK || forward->status == CLI_ROW_PLANNED ? backward : forward;
        error = fmax(error, backward->max_error);
        ran = ran && back;
    } else {
        cli_table_text(table, c->parameter);
        cli_table_text(table, c->value);
        cli_table_text(table, c->who.name);
        cli_table_known(table, ran, forward->time.median);
        cli_table_known(table, ran, 1e-12 * forward->flops / forward->time.median);
        cli_table_known(table, ran && forward->peak > 0, 1e-6 * (double)forward->peak);
    }
    cli_table_known(table, ran, error);
    cli_table_text(table, cli_row_word(worse->status));
    put_note(table, c, worse->text);
}
