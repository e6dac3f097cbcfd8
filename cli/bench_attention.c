/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attention.c - the verb `bench attention`: the cases, and what becomes of each.
 *
 * A sweep is the product of the lists on the command line; contestants vary fastest, so that rivals stand
 * side by side.  A preset is a list of cases around a base.  Whatever becomes of a case, the next one
 * follows.
 */
#include "bench_attention.h"

#include <stdlib.h>
#include <string.h>

#include "random.h"

typedef struct sweep {
    const attention_args *args;
    contestant all[CONTESTANTS];
    int count;
    cli_gpu gpu; /* where that is asked for */
    attention_table table;
    cli_progress progress;
    int wrong;
} sweep;

/* The sizes of a case before they are a problem. */
typedef struct axes {
    int64_t batch, seq, heads, kv_heads, dim, embedding;
    int64_t causal; /* 0 or 1 */
    attn_dtype dtype;
    int64_t threads;
    contest_pass pass;
} axes;

/* ---- cases ---- */

static attention_case case_of(const sweep *s, const axes *x, const contestant *who)
{
    const attention_args *args = s->args;
    attention_case a = {
        .c = {.problem = {.size = sizeof(attn_problem),
                          .batch = x->batch,
                          .heads_q = x->heads,
                          .heads_kv = x->kv_heads > 0 ? x->kv_heads : x->heads,
                          .tokens_q = x->seq,
                          .dim_qk = x->embedding > 0 ? x->embedding / x->heads : x->dim,
                          .dtype = x->dtype,
                          .dtype_out = x->dtype,
                          .mask = x->causal != 0 ? ATTN_MASK_CAUSAL : ATTN_MASK_FULL},
              .pass = x->pass,
              .threads = (int)x->threads,
              .place = {(attn_device)args->common.device, (int)args->common.gpu}},
        .who = *who,
        .warmup = args->warmup,
        .repeat = args->repeat,
        .mem_limit = args->mem_limit,
        .rows = args->rows,
        .seconds = args->seconds,
        .seed = (uint64_t)args->seed,
        .dry_run = args->dry_run,
        .peak_flops = s->gpu.peak[x->dtype],
    };
    if (x->embedding > 0 && x->embedding % x->heads != 0) {
        a.refusal = "the heads do not divide the embedding";
    } else if (attn_problem_check(&a.c.problem) != ATTN_OK) {
        a.refusal = "no such problem: kv heads must divide the heads, and a head has 1 to 512 dimensions";
    }
    return a;
}

static attention_result measure(sweep *s, const attention_case *a)
{
    attention_result result = attention_measure(a);
    s->wrong += result.status == CLI_ROW_WRONG;
    cli_progress_add(&s->progress, 1);
    cli_progress_hide(&s->progress);
    return result;
}

static void measure_row(sweep *s, const attention_case *a)
{
    attention_result result = measure(s, a);
    if (s->table.published) {
        attention_table_published(&s->table, a, &result, NULL);
    } else {
        attention_table_row(&s->table, a, &result);
    }
}

/* ---- sweeps ---- */

/* The list, or where there is none one `fallback`. */
static cli_ints list_or(const cli_ints *list, int64_t *fallback)
{
    return list->count > 0 ? *list : (cli_ints){.item = fallback, .count = 1};
}

enum { AXES = 9 };

/* The lists of a sweep, the one that varies slowest first. */
typedef struct lists {
    cli_ints axis[AXES];
    int64_t zero, dim; /* what an axis without a list is */
    int64_t cases;
} lists;

static void make_lists(lists *l, const attention_args *args)
{
    const cli_ints *from[AXES] = {
        &args->dtype, &args->causal,   &args->batch,
        &args->heads, &args->kv_heads, args->embedding.count > 0 ? &args->embedding : &args->dim,
        &args->seq,   &args->threads,  &args->pass};
    l->zero = 0;
    l->dim = 64;
    l->cases = 1;
    for (int i = 0; i < AXES; i++) {
        l->axis[i] = list_or(from[i], from[i] == &args->dim ? &l->dim : &l->zero);
        l->cases = l->axis[i].count > INT64_MAX / CONTESTANTS / l->cases ? INT64_MAX / CONTESTANTS
                                                                         : l->cases * l->axis[i].count;
    }
}

static axes axes_at(const lists *l, const attention_args *args, int64_t index)
{
    int64_t value[AXES];
    for (int i = AXES - 1; i >= 0; i--) {
        value[i] = l->axis[i].item[index % l->axis[i].count];
        index /= l->axis[i].count;
    }
    bool embedding = args->embedding.count > 0;
    return (axes){
        .dtype = (attn_dtype)value[0],
        .causal = value[1],
        .batch = value[2],
        .heads = value[3],
        .kv_heads = value[4],
        .dim = embedding ? 0 : value[5],
        .embedding = embedding ? value[5] : 0,
        .seq = value[6],
        .threads = value[7],
        .pass = (contest_pass)value[8],
    };
}

static void run_lists(sweep *s)
{
    lists l;
    make_lists(&l, s->args);
    cli_progress_begin(&s->progress, &s->args->common, "cases", (double)l.cases * s->count);
    for (int64_t i = 0; i < l.cases; i++) {
        axes x = axes_at(&l, s->args, i);
        for (int k = 0; k < s->count; k++) {
            attention_case a = case_of(s, &x, &s->all[k]);
            measure_row(s, &a);
        }
    }
}

/* ---- presets ---- */

/* Fewer batches on a smaller machine, which the row's note tells. */
static void scale_down(const sweep *s, axes *x, char *note, size_t size)
{
    int64_t by = s->args->scale_down;
    if (by > 1) {
        bool less = x->batch < by;
        snprintf(note, size, "batch %lld/%lld%s", (long long)x->batch, (long long)by,
                 less ? ", that is 1" : "");
        x->batch = less ? 1 : x->batch / by;
    }
}

static void preset_cases(sweep *s, axes x, const char *parameter, const char *value)
{
    char note[sizeof((attention_case *)0)->note] = "";
    scale_down(s, &x, note, sizeof note);
    for (int k = 0; k < s->count; k++) {
        attention_case a = case_of(s, &x, &s->all[k]);
        a.parameter = parameter;
        snprintf(a.value, sizeof a.value, "%s", value);
        snprintf(a.note, sizeof a.note, "%s", note);
        if (s->table.preset != PRESET_D_MODEL) {
            measure_row(s, &a);
            continue;
        }
        attention_case back = a;
        back.c.pass = CONTEST_BACKWARD;
        attention_result forward = measure(s, &a), backward = measure(s, &back);
        if (s->table.published) {
            attention_table_published(&s->table, &a, &forward, &backward);
        } else {
            attention_table_row(&s->table, &a, &forward);
            attention_table_row(&s->table, &back, &backward);
        }
    }
}

/* One axis after another around batch 32, seq 1024, 32 heads, embedding 2048; the embedding with 16 heads. */
static void flash_vs_naive(sweep *s, const axes *base)
{
    static const struct {
        const char *parameter;
        size_t offset;
        int64_t value[3];
    } lines[] = {
        {"batch", offsetof(axes, batch), {16, 32, 64}},
        {"seq", offsetof(axes, seq), {512, 1024, 2048}},
        {"heads", offsetof(axes, heads), {8, 16, 32}},
        {"embedding", offsetof(axes, embedding), {1024, 2048, 4096}},
        {"causal", offsetof(axes, causal), {0, 1, -1}},
    };
    enum { LINES = sizeof lines / sizeof lines[0] };
    cli_progress_begin(&s->progress, &s->args->common, "cases", (3.0 * LINES - 1) * s->count);
    for (int i = 0; i < LINES; i++) {
        for (int k = 0; k < 3 && lines[i].value[k] >= 0; k++) {
            char value[24];
            axes x = *base;
            x.batch = 32;
            x.seq = 1024;
            x.heads = lines[i].offset == offsetof(axes, embedding) ? 16 : 32;
            x.embedding = 2048;
            memcpy((char *)&x + lines[i].offset, &lines[i].value[k], sizeof lines[i].value[k]);
            snprintf(value, sizeof value, "%lld", (long long)lines[i].value[k]);
            if (lines[i].offset == offsetof(axes, causal)) {
                snprintf(value, sizeof value, "%s", x.causal != 0 ? "true" : "false");
            }
            preset_cases(s, x, lines[i].parameter, value);
        }
    }
}

/* Batch 8, one head. */
static void d_model(sweep *s, const axes *base)
{
    cli_progress_begin(&s->progress, &s->args->common, "cases", 2.0 * 4 * 5 * s->count);
    for (int64_t dim = 16; dim <= 128; dim *= 2) {
        static const int64_t seq[] = {256, 1024, 4096, 8192, 16384};
        for (size_t i = 0; i < sizeof seq / sizeof seq[0]; i++) {
            char value[24];
            axes x = *base;
            x.batch = 8;
            x.seq = seq[i];
            x.heads = 1;
            x.dim = dim;
            snprintf(value, sizeof value, "%lld/%lld", (long long)dim, (long long)seq[i]);
            preset_cases(s, x, "d_model/seq", value);
        }
    }
}

/* What does not go with a preset. */
static int check_preset(const attention_args *args)
{
    static const char *const own[] = {"batch", "seq",       "heads",  "kv-heads",
                                      "dim",   "embedding", "causal", "pass"};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        if (cli_given(&args->common, own[i])) {
            return cli_error(CLI_USAGE, "--preset sets the cases itself: leave out --%s", own[i]);
        }
    }
    if (args->dtype.count > 1 || args->threads.count > 1) {
        return cli_error(CLI_USAGE, "--preset takes one --dtype and one --threads");
    }
    return CLI_OK;
}

static void run_preset(sweep *s)
{
    const attention_args *args = s->args;
    lists l;
    make_lists(&l, args);
    axes base = axes_at(&l, args, 0);
    base.dim = base.kv_heads = 0;
    if (s->table.preset == PRESET_D_MODEL) {
        d_model(s, &base);
    } else {
        flash_vs_naive(s, &base);
    }
}

/* ---- the verb --------------------------------------------------------------------------------------- */

/* Keeps of all contestants those that are asked for, in that order. */
static int choose_contestants(sweep *s)
{
    contestant all[CONTESTANTS];
    char word[64];
    int count = contest_all(all, (attn_device)s->args->common.device);
    if (strcmp(s->args->contestant, "all") == 0) {
        memcpy(s->all, all, sizeof all);
        s->count = count;
        return CLI_OK;
    }
    for (int i = 0; cli_word_at(s->args->contestant, i, word, sizeof word); i++) {
        const char *names[CONTESTANTS + 1] = {NULL};
        int found = 0;
        for (; found < count && strcmp(all[found].name, word) != 0; found++) {
            names[found] = all[found].name;
        }
        if (found == count || s->count == CONTESTANTS) {
            const char *near = cli_nearest(word, names);
            return cli_error(
                CLI_USAGE, "--contestant %s: there is no such contestant%s%s%s; 'all' takes every one", word,
                near != NULL ? ", did you mean " : "", near != NULL ? near : "", near != NULL ? "?" : "");
        }
        s->all[s->count++] = all[found];
    }
    return CLI_OK;
}

static int check_args(const attention_args *args)
{
    if (args->dim.count > 0 && args->embedding.count > 0) {
        return cli_error(CLI_USAGE, "--dim or --embedding (heads times dim), not both");
    }
    if (cli_given(&args->common, "scale-down") && !cli_given(&args->common, "preset")) {
        return cli_error(CLI_USAGE, "--scale-down belongs to --preset");
    }
    if (args->common.device == ATTN_CUDA && args->threads.count > 0) {
        return cli_error(CLI_USAGE, "--threads belongs to --device cpu");
    }
    const int code =
        cli_given(&args->common, "preset") && args->preset != PRESET_NONE ? check_preset(args) : CLI_OK;
    return code != CLI_OK || args->dry_run ? code : cli_fail(cli_random_ready());
}

/* The GPU and, for the dtypes that are asked for, its peak. */
static int find_gpu(sweep *s)
{
    const attention_args *args = s->args;
    unsigned dtypes = 0;
    if (args->common.device != ATTN_CUDA) {
        return CLI_OK;
    }
    for (int64_t i = 0; i < args->dtype.count && !args->dry_run; i++) {
        dtypes |= 1u << args->dtype.item[i];
    }
    cli_gpu_look((int)args->common.gpu, dtypes, &s->gpu);
    return s->gpu.status == CLI_ROW_OK ? CLI_OK : cli_error(CLI_MISSING, "%s", s->gpu.text);
}

static int attention_verb(const void *values)
{
    const attention_args *args = values;
    int code = check_args(args), preset = cli_given(&args->common, "preset") ? args->preset : PRESET_NONE;
    if (code != CLI_OK) {
        return code;
    }
    sweep *s = cli_alloc(1, sizeof *s);
    s->args = args;
    code = choose_contestants(s);
    code = code == CLI_OK ? find_gpu(s) : code;
    if (code == CLI_OK) {
        code =
            attention_table_begin(&s->table, args, preset, args->common.device == ATTN_CUDA ? &s->gpu : NULL);
    }
    if (code == CLI_OK) {
        if (preset == PRESET_NONE) {
            run_lists(s);
        } else {
            run_preset(s);
        }
        cli_progress_end(&s->progress);
        code = attention_table_end(&s->table, code == CLI_OK && s->wrong > 0 ? CLI_WRONG : code);
    }
    free(s);
    return code;
}

const cli_verb cli_verb_bench_attention = {
    .name = "bench attention",
    .summary = "measure attention: kernels beside the naive way, forward and backward",
    .description = attention_description,
    .examples = attention_examples,
    .options = attention_options,
    .size = sizeof(attention_args),
    .run = attention_verb,
};
