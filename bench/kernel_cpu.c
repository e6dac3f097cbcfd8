/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu.c - speed of the CPU kernels alone, beside what the same cores can do at most.
 *
 *     kernel_cpu [--tokens N] [--seconds S] [--kernel NAME] [--dtype NAME] [--dim D] [--threads T]
 *                [--heads H] [--backward [--range KEYS] | --few ROWS]
 *
 * METHOD.  The peak is measured in the same run: independent fused multiply-adds on registers and nothing
 * else, or products of bf16 tiles or pairs where the kernel uses these.  Each case runs a whole head, n
 * queries against n keys, for S seconds, in turn with the peak; the best run counts, since what other work
 * does is noise from above.  FLOPs = 4 * n * n * d, half if causal.  --heads H: they lie as [n, H, d].
 * --backward times the gradients instead, 2.5 times the FLOPs: all queries against one range of keys after
 * the other (--range, or what the kernel likes best), which stays in the caches; lse, delta: as of n keys.
 *
 * THREADS.  With --threads T as many threads do all that at once, peak included, each on a head of its own;
 * rates are sums.  "scaling" is that sum over the rate of one thread alone, in turns in the same run.
 *
 * FEW.  --few ROWS: that many queries against N keys (32768 unless told), each thread on its share of the
 * keys, CHUNK bytes of K and V a call; the merge of the partials is left out.  The figure is the bytes of K
 * and V over the time of the slowest thread, beside reading them from begin to end; the best pass, of both.
 */
#include <err.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/rows.h"

typedef struct bench_options {
    int64_t tokens, heads, range, threads, few;
    int64_t dim; /* 0: all */
    double seconds;
    const char *kernel, *dtype; /* NULL: all */
    bool backward;
} bench_options;

typedef struct bench_case {
    attn_dtype dtype;
    int64_t dim;
    bool causal;
} bench_case;

enum { CHUNK = 1024 * 1024 };

static const bench_case few_cases[] = {
    {ATTN_F32, 64, false},  {ATTN_F32, 128, false},  {ATTN_F16, 64, false}, {ATTN_F16, 128, false},
    {ATTN_BF16, 64, false}, {ATTN_BF16, 128, false}, {ATTN_F32, 80, false}, {ATTN_F32, 72, false},
    {ATTN_F32, 256, false}, {ATTN_F32, 512, false},
};

static const bench_case cases[] = {
    {ATTN_F32, 64, false},  {ATTN_F32, 64, true},    {ATTN_F32, 128, false}, {ATTN_F32, 128, true},
    {ATTN_F32, 256, false}, {ATTN_F32, 512, false},  {ATTN_F32, 80, false},  {ATTN_F32, 96, false},
    {ATTN_F32, 72, true},   {ATTN_F16, 64, false},   {ATTN_F16, 128, false}, {ATTN_BF16, 64, false},
    {ATTN_BF16, 64, true},  {ATTN_BF16, 128, false}, {ATTN_BF16, 128, true},
};

/* Uniform in [-1, 1); any cheap generator will do for timing. */
static float next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

/* The library's result, or the end of this program. */
static void *need(void *memory)
{
    if (memory == NULL) {
        errx(1, "%s", attn_last_error());
    }
    return memory;
}

static void *random_array(attn_dtype dtype, int64_t count)
{
    float *values = need(attn__alloc_array(count, sizeof(float)));
    void *array = need(attn__alloc_array(count, attn_dtype_size(dtype)));
    uint64_t state = 1;
    for (int64_t i = 0; i < count; i++) {
        values[i] = next_random(&state);
    }
    attn_from_f32(array, dtype, 1, values, count);
    attn__free(values);
    return array;
}

static double peak_flops(const attn__probe *probe)
{
    float sink;
    double start = attn__now();
    int64_t flops = probe->dot_peak != NULL ? probe->dot_peak(1 << 12, &sink) : probe->peak(1 << 14, &sink);
    double elapsed = attn__now() - start;
    return isnan(sink) ? 0.0 : (double)flops / elapsed;
}

static double exp2_rate(const attn__probe *probe)
{
    enum { COUNT = 2048 };
    static float x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) {
        x[i] = -20.0f * (float)i / COUNT;
    }
    double best = 0.0;
    for (int run = 0; run < 200; run++) {
        double start = attn__now();
        for (int i = 0; i < 20; i++) {
            probe->exp2(y, x, COUNT);
        }
        best = fmax(best, 20.0 * COUNT / (attn__now() - start));
    }
    return best;
}

/* What one thread needs: the arrays of one head (the outputs of the pass that is not run stay unused) and its
 * best times, with all threads at work and, the first thread, alone. */
typedef struct bench_thread {
    int64_t n, token;
    void *scratch, *q, *k, *v, *dout;
    float *o, *lse, *delta, *dq, *dk, *dv;
    double *times, *alone;
    double peak, peak_alone;
} bench_thread;

static double *best_times(int64_t count)
{
    double *times = need(attn__alloc_array(count, sizeof(double)));
    for (int64_t i = 0; i < count; i++) {
        times[i] = INFINITY;
    }
    return times;
}

static void make_arrays(bench_thread *a, const attn__kernel *kernel, const attn__shape *shape, int64_t heads,
                        int64_t tiles)
{
    const int64_t n = shape->keys, token = heads * shape->dim_qk, size = n * token;
    *a = (bench_thread){.n = n, .token = token, .times = best_times(tiles), .alone = best_times(tiles)};
    a->scratch =
        need(attn__alloc(shape->backward ? kernel->backward_scratch(shape) : kernel->scratch(shape)));
    a->q = random_array(shape->dtype, size), a->k = random_array(shape->dtype, size);
    a->v = random_array(shape->dtype, size), a->dout = random_array(shape->dtype, size);
    a->o = random_array(ATTN_F32, n * shape->dim_v), a->lse = random_array(ATTN_F32, n);
    a->delta = random_array(ATTN_F32, n);
    a->dq = random_array(ATTN_F32, size), a->dk = random_array(ATTN_F32, size);
    a->dv = random_array(ATTN_F32, size);
    for (int64_t i = 0; i < n && shape->backward; i++) {
        a->lse[i] += (float)log((double)n);
    }
}

static void free_arrays(bench_thread *a)
{
    attn__free(a->scratch), attn__free(a->q), attn__free(a->k), attn__free(a->v), attn__free(a->dout);
    attn__free(a->o), attn__free(a->lse), attn__free(a->delta);
    attn__free(a->dq), attn__free(a->dk), attn__free(a->dv);
    attn__free(a->times), attn__free(a->alone);
}

static void run_forward(const attn__kernel *kernel, const bench_case *c, const bench_thread *a, int64_t first,
                        int64_t count, int64_t key, int64_t keys)
{
    const attn__span span = {.first = key,
                             .count = keys,
                             .k = attn__element(a->k, c->dtype, key * a->token),
                             .v = attn__element(a->v, c->dtype, key * a->token),
                             .k_token = a->token,
                             .k_dim = 1,
                             .v_token = a->token,
                             .v_dim = 1};
    const int64_t next = first + count;
    const attn__block block = {.dtype = c->dtype,
                               .dim_qk = c->dim,
                               .dim_v = c->dim,
                               .scale = (float)(1.0 / sqrt((double)c->dim)),
                               .lo = -a->n,
                               .hi = c->causal ? 0 : a->n,
                               .first = first,
                               .count = count,
                               .q = attn__element(a->q, c->dtype, first * a->token),
                               .q_token = a->token,
                               .q_dim = 1,
                               .next_q = next < a->n ? attn__element(a->q, c->dtype, next * a->token) : NULL,
                               .spans = &span,
                               .span_count = 1,
                               .o = a->o + first * c->dim,
                               .o_stride = c->dim,
                               .lse = a->lse + first};
    kernel->forward(&block, a->scratch);
}

static void run_backward(const attn__kernel *kernel, const bench_case *c, const bench_thread *a,
                         int64_t first, int64_t count, int64_t key, int64_t keys)
{
    const attn__gradient_span span = {.first = key,
                                      .count = keys,
                                      .k = attn__element(a->k, c->dtype, key * a->token),
                                      .v = attn__element(a->v, c->dtype, key * a->token),
                                      .k_token = a->token,
                                      .k_dim = 1,
                                      .v_token = a->token,
                                      .v_dim = 1,
                                      .dk = a->dk + key * a->token,
                                      .dv = a->dv + key * a->token,
                                      .dk_token = a->token,
                                      .dv_token = a->token};
    const attn__gradient gradient = {.dtype = c->dtype,
                                     .dim_qk = c->dim,
                                     .dim_v = c->dim,
                                     .scale = (float)(1.0 / sqrt((double)c->dim)),
                                     .lo = -a->n,
                                     .hi = c->causal ? 0 : a->n,
                                     .first = first,
                                     .count = count,
                                     .q = attn__element(a->q, c->dtype, first * a->token),
                                     .dout = attn__element(a->dout, c->dtype, first * a->token),
                                     .q_token = a->token,
                                     .q_dim = 1,
                                     .dout_token = a->token,
                                     .dout_dim = 1,
                                     .lse = a->lse + first,
                                     .delta = a->delta + first,
                                     .dq = a->dq + first * a->token,
                                     .dq_token = a->token,
                                     .spans = &span,
                                     .span_count = 1};
    kernel->backward(&gradient, a->scratch);
}

/* All query tiles of one head against each range of keys, each pair into its best time so far. */
static void run_tiles(const attn__kernel *kernel, const bench_case *c, const bench_thread *a, bool backward,
                      int64_t tile, int64_t range, double *best)
{
    for (int64_t key = 0; key < a->n; key += range) {
        for (int64_t first = 0; first < a->n; first += tile, best++) {
            const int64_t count = attn__min(tile, a->n - first);
            double start = attn__now();
            if (backward) {
                run_backward(kernel, c, a, first, count, key, attn__min(range, a->n - key));
            } else {
                run_forward(kernel, c, a, first, count, key, attn__min(range, a->n - key));
            }
            *best = fmin(*best, attn__now() - start);
        }
    }
}

static double sum_of(const double *times, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += times[i];
    }
    return sum;
}

static void bench(const attn__kernel *kernel, const attn__probe *probe, const bench_case *c,
                  const bench_options *options)
{
    const int64_t n = options->tokens, threads = options->threads;
    const bool back = options->backward;
    const attn__shape shape = {
        .dtype = c->dtype, .dim_qk = c->dim, .dim_v = c->dim, .rows = n, .keys = n, .backward = back};
    const int64_t tile = back ? kernel->backward_tile_q(&shape) : kernel->tile_q(&shape);
    const int64_t range = !back ? n : options->range > 0 ? options->range : kernel->backward_tile_k(&shape);
    const int64_t tiles = attn__ceil_div(n, tile) * attn__ceil_div(n, range);
    bench_thread *all = need(attn__alloc_array(threads, sizeof *all));
    for (int64_t t = 0; t < threads; t++) {
        make_arrays(&all[t], kernel, &shape, options->heads, tiles);
    }
    const double start = attn__now();
    do {
#pragma omp parallel num_threads((int)threads)
        {
            bench_thread *a = &all[attn__thread()];
            a->peak = fmax(a->peak, probe == NULL ? 0.0 : peak_flops(probe));
#pragma omp barrier
            run_tiles(kernel, c, a, back, tile, range, a->times);
        }
        if (threads > 1) {
            run_tiles(kernel, c, all, back, tile, range, all->alone);
        }
    } while (attn__now() - start < options->seconds);
    const double flops =
        (c->causal ? 2.0 : 4.0) * (back ? 2.5 : 1.0) * (double)n * (double)n * (double)c->dim;
    double rate = 0.0, peak = 0.0, slowest = 0.0;
    for (int64_t t = 0; t < threads; t++) {
        const double time = sum_of(all[t].times, tiles);
        slowest = fmax(slowest, time), rate += flops / time, peak += all[t].peak;
    }
    printf("%-16s %-5s %4d  %-7s %9.2f %9.1f", kernel->name, attn_dtype_name(c->dtype), (int)c->dim,
           c->causal ? "causal" : "full", slowest * 1e3, rate * 1e-9);
    if (probe != NULL) {
        printf(" %9.1f %6.1f", peak * 1e-9, 100.0 * rate / peak);
    }
    if (threads > 1) {
        printf(" %8.2f", rate * sum_of(all->alone, tiles) / flops);
    }
    printf("\n");
    fflush(stdout);
    for (int64_t t = 0; t < threads; t++) {
        free_arrays(&all[t]);
    }
    attn__free(all);
}

/* ---- few queries --------------------------------------------------------------------------------- */

/* One thread's pass over its keys, in chunks or, the yardstick, from begin to end; in seconds. */
static double few_pass(const attn__kernel *kernel, const attn__probe *probe, const bench_case *c,
                       const bench_thread *a, int64_t rows, bool read)
{
    const int64_t size = (int64_t)attn_dtype_size(c->dtype);
    const int64_t chunk = attn__max(1, CHUNK / (2 * c->dim * size));
    const double start = attn__now();
    if (read) {
        a->o[0] = probe->read(a->k, (size_t)(a->n * a->token * size));
        a->o[1] = probe->read(a->v, (size_t)(a->n * a->token * size));
    } else {
        for (int64_t key = 0; key < a->n; key += chunk) {
            run_forward(kernel, c, a, 0, rows, key, attn__min(chunk, a->n - key));
        }
    }
    return attn__now() - start;
}

static void bench_few(const attn__kernel *kernel, const attn__probe *probe, const bench_case *c,
                      const bench_options *options)
{
    const int64_t threads = options->threads, keys = options->tokens / threads;
    const attn__shape shape = {
        .dtype = c->dtype, .dim_qk = c->dim, .dim_v = c->dim, .rows = options->few, .keys = keys};
    const double bytes = 2.0 * (double)(keys * threads * c->dim) * (double)attn_dtype_size(c->dtype);
    bench_thread *all = need(attn__alloc_array(threads, sizeof *all));
    double best[2] = {INFINITY, INFINITY};
    for (int64_t t = 0; t < threads; t++) {
        make_arrays(&all[t], kernel, &shape, 1, 2);
    }
    const double start = attn__now();
    for (int read = 0; attn__now() - start < options->seconds; read = 1 - read) {
        double slowest = 0.0;
#pragma omp parallel num_threads((int)threads)
        {
            bench_thread *a = &all[attn__thread()];
#pragma omp barrier
            a->times[0] = few_pass(kernel, probe, c, a, options->few, read != 0);
        }
        for (int64_t t = 0; t < threads; t++) {
            slowest = fmax(slowest, all[t].times[0]);
        }
        best[read] = fmin(best[read], slowest);
    }
    printf("%-15s %-5s %4d  %4lld %9.3f %9.1f %9.1f %6.1f\n", kernel->name, attn_dtype_name(c->dtype),
           (int)c->dim, (long long)options->few, best[0] * 1e3, bytes / best[0] * 1e-9,
           bytes / best[1] * 1e-9, 100.0 * best[1] / best[0]);
    fflush(stdout);
    for (int64_t t = 0; t < threads; t++) {
        free_arrays(&all[t]);
    }
    attn__free(all);
}

/* Folds 16 Ki rows of 64 into others: 2 reads and 1 write of 4 MiB. */
static void bench_merge(double seconds)
{
    enum { ROWS = 1 << 14, DIM = 64 };
    float *o1 = random_array(ATTN_F32, ROWS * DIM), *o2 = random_array(ATTN_F32, ROWS * DIM);
    float *lse1 = random_array(ATTN_F32, ROWS), *lse2 = random_array(ATTN_F32, ROWS);
    double best = INFINITY, start = attn__now();
    do {
        double begin = attn__now();
        attn__merge(o1, DIM, lse1, o2, DIM, lse2, ROWS, DIM);
        best = fmin(best, attn__now() - begin);
    } while (attn__now() - start < seconds);
    printf("merge           %.2f ns a row of %d, %.1f GB/s\n", best / ROWS * 1e9, (int)DIM,
           3.0 * ROWS * DIM * sizeof(float) / best * 1e-9);
    attn__free(o1), attn__free(o2), attn__free(lse1), attn__free(lse2);
}

static const attn__probe *probe_of(const attn__kernel *kernel)
{
    const attn__probe *probe = kernel == &attn__flash_amx          ? &attn__probe_amx
                               : kernel == &attn__flash_avx512bf16 ? &attn__probe_avx512bf16
                               : kernel == &attn__flash_avx512     ? &attn__probe_avx512
                               : kernel == &attn__flash_avx2       ? &attn__probe_avx2
                               : kernel == &attn__flash_neon       ? &attn__probe_neon
                               : kernel == &attn__flash_portable   ? &attn__probe_portable
                                                                   : NULL;
    return probe != NULL && probe->peak != NULL ? probe : NULL;
}

static double positive(const char *word, bool whole)
{
    char *end;
    const double n = strtod(word, &end);
    if (!(n > 0.0 && n < 1e15) || *end != '\0' || (whole && n != floor(n))) {
        errx(2, "%s is not one %snumber above 0", word, whole ? "whole " : "");
    }
    return n;
}

static bench_options read_options(int count, char **words)
{
    bench_options o = {.heads = 1, .seconds = 1.0, .threads = 1};
    const struct {
        const char *name;
        int64_t *value;
    } numbers[] = {{"--tokens", &o.tokens}, {"--heads", &o.heads},     {"--range", &o.range},
                   {"--dim", &o.dim},       {"--threads", &o.threads}, {"--few", &o.few}};
    for (int i = 1; i < count; i++) {
        size_t n = 0, end = sizeof numbers / sizeof numbers[0];
        for (; n < end && strcmp(words[i], numbers[n].name) != 0; n++) {
        }
        if (strcmp(words[i], "--backward") == 0) {
            o.backward = true;
        } else if (i + 1 < count && n < end) {
            *numbers[n].value = (int64_t)positive(words[++i], true);
        } else if (i + 1 < count && strcmp(words[i], "--seconds") == 0) {
            o.seconds = positive(words[++i], false);
        } else if (i + 1 < count && strcmp(words[i], "--kernel") == 0) {
            o.kernel = words[++i];
        } else if (i + 1 < count && strcmp(words[i], "--dtype") == 0) {
            o.dtype = words[++i];
        } else {
            errx(2, "unknown or incomplete option %s", words[i]);
        }
    }
    if (o.threads > attn__threads_max()) {
        errx(2, "--threads %lld: this build and machine have %d", (long long)o.threads, attn__threads_max());
    }
    o.tokens = o.tokens > 0 ? o.tokens : o.few > 0 ? 32768 : 2048;
    return o;
}

static bool wanted(const bench_options *o, const bench_case *c)
{
    return (o->dtype == NULL || strcmp(o->dtype, attn_dtype_name(c->dtype)) == 0) &&
           (o->dim == 0 || o->dim == c->dim);
}

/* Returns how many cases were wanted. */
static int bench_kernel(const attn__kernel *kernel, const bench_options *options)
{
    int found = 0;
    const attn__probe *probe = probe_of(kernel);
    const bool few = options->few > 0;
    const size_t count = few ? sizeof few_cases / sizeof few_cases[0] : sizeof cases / sizeof cases[0];
    for (size_t i = 0; i < count; i++) {
        const bench_case *c = few ? &few_cases[i] : &cases[i];
        if (!wanted(options, c)) {
            continue;
        }
        found++;
        const attn__shape shape = {.dtype = c->dtype,
                                   .dim_qk = c->dim,
                                   .dim_v = c->dim,
                                   .rows = few ? options->few : options->tokens,
                                   .keys = options->tokens,
                                   .backward = options->backward};
        const char *reason = attn__kernel_refusal(kernel, &shape);
        if (reason != NULL) {
            printf("%-16s %-5s %4d  %s\n", kernel->name, attn_dtype_name(c->dtype), (int)c->dim, reason);
        } else if (!few) {
            bench(kernel, probe, c, options);
        } else if (probe != NULL) {
            bench_few(kernel, probe, c, options);
        }
    }
    if (probe != NULL && found > 0 && !few && options->dim == 0) {
        printf("%-16s exp2: %.2f G elements/s\n", kernel->name, exp2_rate(probe) * 1e-9);
    }
    return found;
}

int main(int count, char **words)
{
    const bench_options options = read_options(count, words);
    if (options.few > 0) {
        printf("%-16s %-5s %4s  %4s %9s %9s %9s %6s", "kernel", "dtype", "d", "rows", "ms", "GB/s", "read",
               "%");
    } else {
        printf("%-16s %-5s %4s  %-7s %9s %9s %9s %6s%s", "kernel", "dtype", "d", "mask", "ms", "GFLOP/s",
               "peak", "%", options.threads > 1 ? "  scaling" : "");
    }
    printf("   (n = %lld, threads = %lld%s)\n", (long long)options.tokens, (long long)options.threads,
           options.backward ? ", backward" : "");
    int found = 0;
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (options.kernel == NULL || strcmp(options.kernel, (*row)->name) == 0) {
            found += bench_kernel(*row, &options);
        }
    }
    if (found == 0) {
        errx(2, "no case has this --kernel (see attn info), --dtype and --dim");
    }
    if (options.few == 0 && options.dim == 0) {
        bench_merge(options.seconds);
    }
    return 0;
}
