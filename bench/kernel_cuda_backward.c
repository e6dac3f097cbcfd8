/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_backward.c - the CUDA kernels of gradients alone: right, and how fast.
 *
 *     kernel_cuda_backward [--check [--first N] [--count N]] [--time [--deterministic] [--causal 0|1]
 *                          [--tokens N] [--heads-kv H]] [--dim D] [--dtype NAME]
 *
 * CHECK.  Small problems of every kind against gradients in fp64 from the same rounded inputs: the error of a
 * tensor is ||got - want|| / ||want||, and where it is too large the first wrong elements are told.  Outputs
 * are poisoned.  A deterministic one runs ten times and must give the same bits.
 *
 * TIME.  16384 tokens in sequences of 512 to 16384, heads * dim = 2048.  Device time by events around
 * batches of launches, the median of the batches.  FLOPs = 10 * b * h * n * n * d, half if causal.  Inputs
 * are standard normal, lse is what a softmax over n such keys has.
 */
#include "kernel_cuda_backward.inc.h"

/* ---- check ---- */

/* Of a ragged batch the last sequence is NaN throughout, which the others must not feel. */
static int64_t good_tokens(const bench_data *d, int tensor)
{
    bool keys = tensor == K || tensor == V || tensor == DK || tensor == DV;
    return d->cu[keys][d->shape.batch - d->shape.ragged];
}

static void spoil(bench_data *d)
{
    for (int i = Q; i <= DOUT; i++) {
        for (int64_t j = good_tokens(d, i) * width_of(&d->shape, i); j < d->count[i]; j++) {
            d->host[i][j] = NAN;
        }
    }
}

/* Prints the first wrong elements; true if the tensor is right. */
static bool compare(const bench_data *d, int tensor, const float *got, const float *want)
{
    double error = 0, norm = 0, worst = 0;
    int64_t bad = 0, at = 0, width = width_of(&d->shape, tensor), count = good_tokens(d, tensor) * width;
    for (int64_t i = 0; i < count; i++) {
        double e = fabs((double)got[i] - (double)want[i]);
        bad += !(e < 1e30);
        if (!(e <= worst)) {
            worst = e;
            at = i;
        }
        error += e * e;
        norm += (double)want[i] * (double)want[i];
    }
    double relative = sqrt(error / fmax(norm, 1e-4 * (double)d->count[tensor]));
    bool right = bad == 0 && relative < (d->shape.dtype == ATTN_F16 ? 1.5e-3 : 1e-2);
    printf("  %s %.1e%s", tensor_names[tensor], relative, right ? "" : " WRONG");
    if (!right) {
        printf(" not finite %lld, worst at token %lld column %lld\n", (long long)bad, (long long)(at / width),
               (long long)(at % width));
        int shown = 0;
        for (int64_t i = 0; i < count && shown < 12; i += shown < 4 ? 1 : 61) {
            if (!(fabs((double)got[i] - (double)want[i]) < 0.05 * fabs((double)want[i]) + 1e-3)) {
                printf("    token %lld column %lld: got %g want %g\n", (long long)(i / width),
                       (long long)(i % width), (double)got[i], (double)want[i]);
                shown++;
            }
        }
    }
    return right;
}

static void fill(bench_data *d)
{
    for (int i = 0; i < TENSORS; i++) {
        d->host[i] = memory(d->count[i], 4);
        d->want[i] = memory(d->count[i], 4);
        for (int64_t j = 0; j < d->count[i] && i <= DV; j++) {
            d->host[i][j] = normal();
        }
        round_host(d, i);
    }
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < d->shape.batch; b++) {
        for (int64_t h = 0; h < d->shape.heads_kv; h++) {
            reference_head(d, b, h);
        }
    }
}

static void prepare_outputs(const bench_data *d)
{
    for (int i = DQ; i <= DV; i++) {
        if (d->shape.accumulate) {
            upload(d, i);
        } else {
            cuda(attn__cuda.memset_async(d->device[i], 0xff,
                                         (size_t)d->count[i] * attn_dtype_size(d->shape.out), NULL),
                 "poison");
        }
    }
}

static bool same_bits(const bench_data *d, float *const *got)
{
    bool same = true;
    for (int round = 0; round < 10; round++) {
        prepare_outputs(d);
        launch(d);
        for (int i = DQ; i <= DV; i++) {
            float *again = memory(d->count[i], 4);
            download(d, i, again);
            same = same && memcmp(again, got[i], (size_t)d->count[i] * 4) == 0;
            free(again);
        }
    }
    return same;
}

static bool check(const bench_shape *shape)
{
    bench_data *d = memory(1, sizeof *d);
    open_data(d, shape);
    fill(d);
    spoil(d);
    const int inputs[] = {Q, K, V, O, DOUT, LSE, DELTA};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        upload(d, inputs[i]);
    }
    if (shape->given_delta) {
        cuda(attn__cuda.memset_async(d->device[O], 0xff, (size_t)d->count[O] * attn_dtype_size(shape->out),
                                     NULL),
             "poison");
    }
    prepare_outputs(d);
    launch(d);
    printf("%s>%s b%lld h%lld/%lld n%lld/%lld d%lld/%lld l%lld r%lld%s%s%s%s:", attn_dtype_name(shape->dtype),
           attn_dtype_name(shape->out), (long long)shape->batch, (long long)shape->heads_q,
           (long long)shape->heads_kv, (long long)shape->tokens_q, (long long)shape->tokens_kv,
           (long long)shape->dim_qk, (long long)shape->dim_v,
           shape->left > 99999 ? -1LL : (long long)shape->left,
           shape->right > 99999 ? -1LL : (long long)shape->right, shape->ragged ? " ragged" : "",
           shape->accumulate ? " accumulate" : "", shape->deterministic ? " deterministic" : "",
           shape->given_delta ? " delta" : "");
    bool right = true;
    float *got[TENSORS] = {NULL};
    for (int i = DQ; i <= DV; i++) {
        got[i] = memory(d->count[i], 4);
        download(d, i, got[i]);
        for (int64_t j = 0; j < d->count[i] && shape->accumulate; j++) {
            d->want[i][j] += d->host[i][j];
        }
        right = compare(d, i, got[i], d->want[i]) && right;
    }
    if (shape->deterministic && !same_bits(d, got)) {
        printf("  BITS CHANGE");
        right = false;
    }
    printf("%s\n", right ? "  right" : "");
    fflush(stdout);
    for (int i = DQ; i <= DV; i++) {
        free(got[i]);
    }
    close_data(d);
    free(d);
    return right;
}

#define FAR INT64_MAX
#define B   ATTN_BF16
#define H   ATTN_F16
#define F   ATTN_F32
/* dtype, out, batch, heads, key heads, queries, keys, dims, left, right, then: ragged, accumulate,
 * deterministic, given delta */
static const bench_shape shapes[] = {
    {B, B, 1, 1, 1, 128, 128, 128, 128, FAR, FAR, 0, 0, 0, 0},
    {B, B, 2, 3, 3, 512, 384, 128, 128, FAR, FAR, 0, 0, 0, 0},
    {B, B, 2, 2, 2, 333, 517, 128, 128, FAR, FAR, 0, 0, 0, 0},
    {B, B, 2, 2, 2, 700, 700, 128, 128, FAR, 0, 0, 0, 0, 0},
    {B, B, 1, 2, 2, 517, 333, 128, 128, FAR, 0, 0, 0, 0, 0},
    {B, B, 1, 2, 2, 800, 900, 128, 128, 100, 30, 0, 0, 0, 0},
    {B, B, 2, 8, 2, 300, 400, 128, 128, FAR, 0, 0, 0, 0, 1},
    {B, F, 4, 4, 2, 400, 300, 104, 72, FAR, 0, 1, 1, 0, 0},
    {B, B, 4, 4, 2, 400, 300, 96, 128, 77, 5, 1, 1, 0, 0},
    {B, B, 2, 2, 2, 1100, 1000, 128, 128, FAR, FAR, 0, 0, 1, 0},
    {B, F, 2, 4, 2, 1000, 1100, 128, 128, 200, 0, 0, 0, 1, 0},
    {B, B, 3, 2, 1, 1, 1, 128, 128, FAR, 0, 0, 0, 0, 0},
    {B, B, 2, 40, 40, 700, 640, 128, 128, FAR, 0, 0, 0, 1, 0},
    {B, B, 2, 120, 40, 150, 150, 128, 128, FAR, 0, 0, 0, 0, 0},
    {B, B, 64, 8, 4, 80, 140, 128, 128, FAR, FAR, 1, 0, 0, 0},
    {H, H, 2, 2, 1, 333, 517, 128, 128, FAR, 0, 1, 0, 0, 0},
};

/* Every shape at dims of this padding; those with a fp16 kernel's dtype if it is asked for. */
static int check_all(int64_t dim, const char *dtype, int64_t least, int64_t most)
{
    int wrong = 0, count = 0;
    for (int64_t i = least; i < most && i < (int64_t)(sizeof shapes / sizeof *shapes); i++) {
        bench_shape s = shapes[i];
        s.dim_qk = s.dim_qk * dim / 128 / 8 * 8;
        s.dim_v = s.dim_v * dim / 128 / 8 * 8;
        if (dtype != NULL && strcmp(dtype, attn_dtype_name(s.dtype)) != 0) {
            continue;
        }
        count++;
        wrong += !check(&s);
    }
    printf("dim %lld: %d of %d right\n", (long long)dim, count - wrong, count);
    return wrong;
}

/* ---- time ---- */

/* Normal numbers of the inputs' dtype, the same again and again, but elsewhere in each tensor. */
static void fill_fast(const bench_data *d)
{
    enum { PART = 1 << 20 };
    static float numbers[PART];
    uint16_t *rounded = memory(PART, 2);
    for (int64_t j = 0; j < PART && numbers[PART - 1] == 0; j++) {
        numbers[j] = normal();
    }
    attn_from_f32(rounded, d->shape.dtype, 1, numbers, PART);
    for (int i = Q; i <= DOUT; i++) {
        for (int64_t at = 0, part = PART - 999 * i; at < d->count[i]; at += part, part = PART) {
            size_t bytes = (size_t)attn__min(d->count[i] - at, part) * 2;
            cuda(attn__cuda.copy_to_device(d->device[i] + (size_t)at * 2, rounded + PART - part, bytes, NULL),
                 "upload");
        }
        cuda(attn__cuda.stream_wait(NULL), "upload");
    }
    float *lse = memory(d->count[LSE], 4);
    for (int64_t i = 0; i < d->count[LSE]; i++) {
        lse[i] = logf((float)d->shape.tokens_kv) + 0.5F;
    }
    cuda(attn__cuda.copy_to_device(d->device[LSE], lse, (size_t)d->count[LSE] * 4, NULL), "upload");
    cuda(attn__cuda.stream_wait(NULL), "upload");
    free(rounded);
    free(lse);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_time(const bench_data *d, int launches)
{
    enum { BATCHES = 5 };
    double times[BATCHES];
    CUevent events[2];
    cuda(attn__cuda.event_create(&events[0], CU_EVENT_DEFAULT), "event");
    cuda(attn__cuda.event_create(&events[1], CU_EVENT_DEFAULT), "event");
    launch(d);
    launch(d);
    for (int i = 0; i < BATCHES; i++) {
        float ms = 0;
        cuda(attn__cuda.event_record(events[0], NULL), "event");
        for (int j = 0; j < launches; j++) {
            launch(d);
        }
        cuda(attn__cuda.event_record(events[1], NULL), "event");
        cuda(attn__cuda.event_wait(events[1]), "event");
        cuda(attn__cuda.event_time(&ms, events[0], events[1]), "event");
        times[i] = (double)ms / 1e3 / launches;
    }
    qsort(times, BATCHES, sizeof *times, by_value);
    (void)attn__cuda.event_destroy(events[0]);
    (void)attn__cuda.event_destroy(events[1]);
    return times[BATCHES / 2];
}

static void time_shape(const bench_shape *s, bool causal)
{
    bench_data *d = memory(1, sizeof *d);
    open_data(d, s);
    fill_fast(d);
    double flops = 10.0 * (double)(s->batch * s->heads_q * s->tokens_q) * (double)(s->tokens_kv * s->dim_qk);
    double time = median_time(d, 10);
    printf(" %4.0f", flops / (causal ? 2 : 1) / time / 1e12);
    fflush(stdout);
    close_data(d);
    free(d);
}

typedef struct bench_options {
    bool check, time, deterministic;
    int64_t dim, tokens, heads_kv, causal; /* 0, or -1: all */
    int64_t first, count;                  /* of the shapes to check */
    const char *dtype;
} bench_options;

static void time_all(const bench_options *o)
{
    for (int64_t causal = 0; causal < 2; causal++) {
        if (o->causal >= 0 && o->causal != causal) {
            continue;
        }
        printf("%s d %lld %s%s, TFLOP/s at 512 .. 16384:", o->dtype != NULL ? o->dtype : "bf16",
               (long long)o->dim, causal ? "causal" : "full", o->deterministic ? " deterministic" : "");
        for (int64_t n = 512; n <= 16384; n *= 2) {
            if (o->tokens != 0 && o->tokens != n) {
                continue;
            }
            int64_t heads = 2048 / o->dim;
            bench_shape s = {ATTN_BF16,
                             ATTN_BF16,
                             16384 / n,
                             heads,
                             o->heads_kv != 0 ? o->heads_kv : heads,
                             n,
                             n,
                             o->dim,
                             o->dim,
                             FAR,
                             causal ? 0 : FAR,
                             false,
                             false,
                             o->deterministic,
                             false};
            s.dtype = s.out = o->dtype != NULL && strcmp(o->dtype, "f16") == 0 ? ATTN_F16 : ATTN_BF16;
            time_shape(&s, causal);
        }
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    bench_options o = {.dim = 128, .causal = -1, .count = 1000};
    setvbuf(stdout, NULL, _IONBF, 0);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--check") == 0) {
            o.check = true;
        } else if (strcmp(argv[i], "--time") == 0) {
            o.time = true;
        } else if (strcmp(argv[i], "--deterministic") == 0) {
            o.deterministic = true;
        } else {
            int64_t number = atoll(value);
            o.dim = strcmp(argv[i], "--dim") == 0 ? number : o.dim;
            o.causal = strcmp(argv[i], "--causal") == 0 ? number : o.causal;
            o.tokens = strcmp(argv[i], "--tokens") == 0 ? number : o.tokens;
            o.heads_kv = strcmp(argv[i], "--heads-kv") == 0 ? number : o.heads_kv;
            o.first = strcmp(argv[i], "--first") == 0 ? number : o.first;
            o.count = strcmp(argv[i], "--count") == 0 ? number : o.count;
            o.dtype = strcmp(argv[i], "--dtype") == 0 ? value : o.dtype;
            i++;
        }
    }
    must(attn__cuda_open(&gpu, 0));
    must(attn__cuda_enter(gpu));
    int wrong = o.check ? check_all(o.dim, o.dtype, o.first, o.first + o.count) : 0;
    if (o.time) {
        time_all(&o);
    }
    return wrong > 0;
}
