/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_few.c - the CUDA kernel for few queries against many keys: as fast as memory?
 *
 *     kernel_cuda_few [GB [SHAPE ...]]     a list of shapes, with K and V in GB gigabytes; or these: numbers
 *                                          of the list, or BATCH,KV_HEADS,GROUP,TOKENS,KEYS,DIM
 *
 * METHOD.  Device time by events around LAUNCHES launches in a row, the median of BATCHES such batches, over
 * as many different K and V as have room, so that none is found in a cache.  The rate is the bytes of K and V
 * over the time, beside that of two copies in the same run, which count bytes read and written: one of all
 * gigabytes, and one that moves as many bytes as the case, over different memory each time as well.  More
 * than 64 rows are also given to the kernel of full tiles, which is what runs where few-sm90 declines.
 */
#include <string.h>

#include "kernel_cuda_few.h"

enum { LAUNCHES = 20, BATCHES = 7 };

typedef struct timed_case {
    int64_t batch, heads_kv, group, tokens_q, tokens_kv, dim;
} timed_case;

static const timed_case timed[] = {
    {1, 8, 1, 1, 32768, 128},  {1, 8, 4, 1, 32768, 128},   {1, 8, 8, 1, 32768, 128},
    {1, 8, 8, 8, 32768, 128},  {1, 8, 8, 1, 131072, 128},  {1, 8, 8, 1, 262144, 128},
    {8, 8, 4, 1, 32768, 128},  {64, 8, 1, 1, 4096, 128},   {64, 8, 8, 1, 4096, 128},
    {64, 8, 8, 8, 4096, 128},  {32, 8, 4, 1, 1024, 128},   {1, 1, 32, 1, 131072, 128},
    {3, 7, 4, 1, 33333, 128},  {1, 8, 8, 1, 65536, 64},    {1, 8, 8, 8, 65536, 64},
    {64, 8, 4, 1, 8192, 64},   {1, 8, 8, 1, 16384, 256},   {1, 8, 8, 8, 16384, 256},
    {64, 8, 4, 1, 2048, 256},  {1, 8, 4, 1, 8192, 128},    {1, 8, 4, 1, 2048, 128},
    {1, 8, 8, 16, 32768, 128}, {1, 8, 8, 8, 131072, 128},  {1, 32, 1, 64, 32768, 128},
    {1, 8, 8, 8, 262144, 128}, {1, 8, 8, 8, 262144, 64},   {1, 8, 8, 8, 65536, 256},
    {1, 32, 1, 1, 32768, 64},  {1, 16, 1, 1, 32768, 128},  {1, 8, 1, 1, 32768, 256},
    {1, 32, 1, 16, 32768, 64}, {1, 16, 1, 16, 32768, 128}, {1, 8, 1, 16, 32768, 256},
    {1, 32, 1, 64, 32768, 64}, {1, 16, 1, 64, 32768, 128}, {1, 8, 1, 64, 32768, 256},
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds that the host took for the last launches. */
static double host_seconds;

/* Median seconds of one of `launches` things that `enqueue` puts on the default stream. */
static double median(void (*enqueue)(void *state, int64_t number), void *state)
{
    void *begin, *end;
    double times[BATCHES];
    must(attn_cuda_event_create(0, &begin));
    must(attn_cuda_event_create(0, &end));
    for (int batch = -1; batch < BATCHES; batch++) {
        must(attn_cuda_event_record(0, begin, NULL));
        host_seconds = attn__now();
        for (int64_t i = 0; i < LAUNCHES; i++) {
            enqueue(state, i);
        }
        host_seconds = attn__now() - host_seconds;
        must(attn_cuda_event_record(0, end, NULL));
        must(attn_cuda_event_elapsed(0, begin, end, &times[attn__max(batch, 0)]));
    }
    attn_cuda_event_destroy(0, begin);
    attn_cuda_event_destroy(0, end);
    qsort(times, BATCHES, sizeof *times, by_value);
    return times[BATCHES / 2] / LAUNCHES;
}

typedef struct timed_state {
    attn__cuda_call call;
    const attn__cuda_kernel *kernel;
    char *pool; /* K, then V, of one set after the other */
    int64_t bytes, sets;
    void *workspace;
} timed_state;

static void enqueue_kernel(void *data, int64_t number)
{
    timed_state *t = data;
    const attn__cuda_device *device;
    must(attn__cuda_open(&device, 0));
    t->call.k.data = t->pool + number % t->sets * t->bytes;
    t->call.v.data = (char *)t->call.k.data + t->bytes / 2;
    must(t->kernel->forward(&t->call, device, t->workspace, NULL));
}

static void enqueue_copy(void *data, int64_t number)
{
    timed_state *t = data;
    char *set = t->pool + number % t->sets * t->bytes;
    must(attn_cuda_copy(0, set, set + t->bytes / 2, (size_t)t->bytes / 2, NULL));
}

static double time_kernel(timed_state *t, const attn__cuda_kernel *chosen)
{
    const attn__cuda_device *device;
    must(attn__cuda_open(&device, 0));
    t->kernel = chosen;
    t->workspace = device_memory(chosen->forward_workspace(&t->call, device));
    double seconds = median(enqueue_kernel, t);
    attn_cuda_free(0, t->workspace);
    return seconds;
}

static void time_full(timed_state *t, double seconds, double flops)
{
    double full = time_kernel(t, &attn__cuda_flash_sm90);
    printf("    %.0f TFLOP/s; full tiles %.1f us, %.0f TFLOP/s; %s\n", flops / seconds * 1e-12, full * 1e6,
           flops / full * 1e-12, kernel->declines(&t->call, false) != NULL ? "declined" : "taken");
}

static void time_case(const timed_case *c, timed_state *t, int64_t room, double copy)
{
    attn__cuda_call *a = &t->call;
    int64_t heads = c->heads_kv * c->group;
    t->bytes = c->batch * c->heads_kv * c->tokens_kv * c->dim * 4;
    t->sets = room / t->bytes;
    if (t->sets == 0) {
        return;
    }
    *a = (attn__cuda_call){.dtype = ATTN_BF16,
                           .dtype_out = ATTN_BF16,
                           .batch = c->batch,
                           .heads_q = heads,
                           .heads_kv = c->heads_kv,
                           .tokens_q = c->tokens_q,
                           .tokens_kv = c->tokens_kv,
                           .dim_qk = c->dim,
                           .dim_v = c->dim,
                           .scale = 0.1f,
                           .left = attn__unbounded,
                           .right = 0};
    a->k = (attn__cuda_tensor){NULL, c->heads_kv * c->tokens_kv * c->dim, c->tokens_kv * c->dim, c->dim};
    a->v = a->k;
    a->q = a->o = (attn__cuda_tensor){NULL, heads * c->tokens_q * c->dim, c->tokens_q * c->dim, c->dim};
    a->lse = (attn__cuda_tensor){NULL, heads * c->tokens_q, c->tokens_q, 1};
    size_t rows = (size_t)(c->batch * heads * c->tokens_q);
    a->q.data = t->pool; /* any numbers do */
    a->o.data = device_memory(rows * (size_t)c->dim * 2);
    a->lse.data = device_memory(rows * 4);
    double seconds = time_kernel(t, kernel), rate = (double)t->bytes / seconds, host = host_seconds;
    double same = median(enqueue_copy, t);
    printf("batch %3lld heads %3lld/%lld tokens %2lld/%6lld dim %3lld  %6.0f MB %8.1f us %5.2f TB/s %5.1f %% "
           "of copy, %5.1f %% of one of as many bytes (%.1f us), host %.1f us\n",
           (long long)c->batch, (long long)heads, (long long)c->heads_kv, (long long)c->tokens_q,
           (long long)c->tokens_kv, (long long)c->dim, (double)t->bytes * 1e-6, seconds * 1e6, rate * 1e-12,
           100.0 * rate / copy, 100.0 * same / seconds, same * 1e6, host * 1e6 / LAUNCHES);
    if (c->group * c->tokens_q > 64) {
        time_full(t, seconds, (double)t->bytes * (double)(c->group * c->tokens_q));
    }
    fflush(stdout);
    attn_cuda_free(0, a->o.data);
    attn_cuda_free(0, a->lse.data);
}

/* Shape `number` of the list, or that of the text; false if there is none. */
static bool shape_of(timed_case *c, const char *text)
{
    long long v[6];
    int count = sscanf(text, "%lld,%lld,%lld,%lld,%lld,%lld", v, v + 1, v + 2, v + 3, v + 4, v + 5);
    if (count == 6) {
        *c = (timed_case){v[0], v[1], v[2], v[3], v[4], v[5]};
        return true;
    }
    if (count != 1 || v[0] < 0 || v[0] >= (long long)(sizeof timed / sizeof *timed)) {
        fprintf(stderr, "no shape: %s\n", text);
        return false;
    }
    *c = timed[v[0]];
    return true;
}

int main(int argc, char **argv)
{
    enum { BLOCK = 1 << 25 };
    double gigabytes = argc > 1 ? atof(argv[1]) : 4.5;
    int64_t room = (int64_t)(gigabytes * 1e9) / BLOCK * BLOCK;
    uint16_t *block = malloc(BLOCK);
    uint64_t seed = 1;
    timed_state t = {.pool = device_memory((size_t)room)};
    for (int64_t i = 0; i < BLOCK / 2; i++) {
        block[i] = attn__f32_to_bf16(normal(&seed));
    }
    for (int64_t at = 0; at < room; at += BLOCK) {
        must(attn_cuda_copy(0, t.pool + at, block, BLOCK, NULL));
    }
    t.bytes = room;
    t.sets = 1;
    double copy = (double)t.bytes / median(enqueue_copy, &t);
    printf("copy: %.2f TB/s\n", copy * 1e-12);
    timed_case given;
    for (int i = 2; i < argc && shape_of(&given, argv[i]); i++) {
        time_case(&given, &t, room, copy);
    }
    for (size_t i = 0; argc <= 2 && i < sizeof timed / sizeof *timed; i++) {
        time_case(&timed[i], &t, room, copy);
    }
    attn_cuda_free(0, t.pool);
    free(block);
    return 0;
}
