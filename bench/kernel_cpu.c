/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu.c - speed of the CPU kernels alone, one thread, beside what the same core can do at most.
 *
 *     kernel_cpu [--tokens N] [--seconds S] [--kernel NAME] [--heads H]
 *
 * METHOD.  The peak is measured in the same run: independent fused multiply-adds on registers and nothing
 * else. Each case runs a whole head, n queries against n keys, again and again for S seconds; the best run
 * counts, since on a machine that does other work everything else is noise from above.  Peak and case
 * alternate, so that both see the same clock.  FLOPs = 4 * n * n * d, half if causal.  --heads H lays the
 * heads out as [n, h, d], so that tokens lie H * d elements apart.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/rows.h"

typedef struct bench_options {
    int64_t tokens, heads;
    double seconds;
    const char *kernel;
} bench_options;

typedef struct bench_case {
    attn_dtype dtype;
    int64_t dim;
    bool causal;
} bench_case;

static const bench_case cases[] = {
    {ATTN_F32, 64, false},  {ATTN_F32, 64, true},   {ATTN_F32, 128, false}, {ATTN_F32, 128, true},
    {ATTN_F32, 256, false}, {ATTN_F32, 512, false}, {ATTN_F32, 80, false},  {ATTN_F32, 96, false},
    {ATTN_F32, 72, true},   {ATTN_F16, 128, false}, {ATTN_BF16, 128, true},
};

/* Uniform in [-1, 1); any cheap generator will do for timing. */
static float next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

static void *random_array(attn_dtype dtype, int64_t count)
{
    float *values = attn__alloc_array(count, sizeof(float));
    void *array = attn__alloc_array(count, attn_dtype_size(dtype));
    if (values == NULL || array == NULL) {
        fprintf(stderr, "kernel_cpu: %s\n", attn_last_error());
        exit(1);
    }
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
    int64_t flops = probe->peak(1 << 14, &sink);
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

/* All query tiles of one head, each into its best time so far. */
static void run_tiles(const attn__kernel *kernel, int64_t tile, int64_t rows, attn__block block,
                      void *scratch, double *best)
{
    float *o = block.o, *lse = block.lse;
    const void *q = block.q;
    for (int64_t first = 0; first < rows; first += tile) {
        block.first = first;
        block.count = attn__min(tile, rows - first);
        block.q = attn__element(q, block.dtype, first * block.q_token);
        block.o = o + first * block.o_stride;
        block.lse = lse + first;
        double start = attn__now();
        kernel->forward(&block, scratch);
        best[first / tile] = fmin(best[first / tile], attn__now() - start);
    }
}

static void bench(const attn__kernel *kernel, const attn__probe *probe, const bench_case *c,
                  const bench_options *options)
{
    const int64_t n = options->tokens, token = options->heads * c->dim;
    const attn__shape shape = {.dtype = c->dtype, .dim_qk = c->dim, .dim_v = c->dim, .rows = n, .keys = n};
    void *scratch = attn__alloc(kernel->scratch(&shape));
    void *q = random_array(c->dtype, n * token), *k = random_array(c->dtype, n * token);
    void *v = random_array(c->dtype, n * token);
    float *o = random_array(ATTN_F32, n * c->dim), *lse = random_array(ATTN_F32, n);
    if (scratch == NULL) {
        fprintf(stderr, "kernel_cpu: %s\n", attn_last_error());
        exit(1);
    }
    const attn__span span = {
        .count = n, .k = k, .v = v, .k_token = token, .k_dim = 1, .v_token = token, .v_dim = 1};
    const attn__block block = {.dtype = c->dtype,
                               .dim_qk = c->dim,
                               .dim_v = c->dim,
                               .scale = (float)(1.0 / sqrt((double)c->dim)),
                               .lo = -n,
                               .hi = c->causal ? 0 : n,
                               .q = q,
                               .q_token = token,
                               .q_dim = 1,
                               .spans = &span,
                               .span_count = 1,
                               .o = o,
                               .o_stride = c->dim,
                               .lse = lse};
    const int64_t tile = kernel->tile_q(&shape), tiles = attn__ceil_div(n, tile);
    double *times = attn__alloc_array(tiles, sizeof(double));
    double best = 0.0, peak = 0.0, start = attn__now();
    for (int64_t i = 0; i < tiles; i++) {
        times[i] = INFINITY;
    }
    do {
        peak = fmax(peak, probe == NULL ? 0.0 : peak_flops(probe));
        run_tiles(kernel, tile, n, block, scratch, times);
    } while (attn__now() - start < options->seconds);
    for (int64_t i = 0; i < tiles; i++) {
        best += times[i];
    }
    double rate = (c->causal ? 2.0 : 4.0) * (double)n * (double)n * (double)c->dim / best;
    printf("%-15s %-5s %4d  %-7s %9.2f %9.1f", kernel->name, attn_dtype_name(c->dtype), (int)c->dim,
           c->causal ? "causal" : "full", best * 1e3, rate * 1e-9);
    if (probe != NULL) {
        printf(" %9.1f %6.1f", peak * 1e-9, 100.0 * rate / peak);
    }
    printf("\n");
    fflush(stdout);
    attn__free(scratch), attn__free(q), attn__free(k), attn__free(v), attn__free(o), attn__free(lse),
        attn__free(times);
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
    const attn__probe *probe = kernel == &attn__flash_avx512     ? &attn__probe_avx512
                               : kernel == &attn__flash_avx2     ? &attn__probe_avx2
                               : kernel == &attn__flash_portable ? &attn__probe_portable
                                                                 : NULL;
    return probe != NULL && probe->peak != NULL ? probe : NULL;
}

static bench_options read_options(int count, char **words)
{
    bench_options o = {.tokens = 2048, .heads = 1, .seconds = 1.0};
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(words[i], "--tokens") == 0) {
            o.tokens = attn__max(1, strtoll(words[i + 1], NULL, 10));
        } else if (strcmp(words[i], "--heads") == 0) {
            o.heads = attn__max(1, strtoll(words[i + 1], NULL, 10));
        } else if (strcmp(words[i], "--seconds") == 0) {
            o.seconds = strtod(words[i + 1], NULL);
        } else if (strcmp(words[i], "--kernel") == 0) {
            o.kernel = words[i + 1];
        } else {
            fprintf(stderr, "kernel_cpu: unknown option %s\n", words[i]);
            exit(2);
        }
    }
    return o;
}

int main(int count, char **words)
{
    const bench_options options = read_options(count, words);
    const attn__shape any = {.dim_qk = 64, .dim_v = 64, .rows = options.tokens, .keys = options.tokens};
    printf("%-15s %-5s %4s  %-7s %9s %9s %9s %6s   (n = %lld)\n", "kernel", "dtype", "d", "mask", "ms",
           "GFLOP/s", "peak", "%", (long long)options.tokens);
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        if (options.kernel != NULL && strcmp(options.kernel, (*row)->name) != 0) {
            continue;
        }
        const char *reason = attn__kernel_refusal(*row, &any);
        if (reason != NULL) {
            printf("%-15s %s\n", (*row)->name, reason);
            continue;
        }
        const attn__probe *probe = probe_of(*row);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            bench(*row, probe, &cases[i], &options);
        }
        if (probe != NULL) {
            printf("%-15s exp2: %.2f G elements/s\n", (*row)->name, exp2_rate(probe) * 1e-9);
        }
    }
    bench_merge(options.seconds);
    return 0;
}
