/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - ggml's flash attention on arrays from files, one run for each line of input.
 *
 * usage: ggml_driver Q K V O BATCH HEADS KV_HEADS QUERIES TOKENS DIM THREADS causal|full f32|f16
 *
 * Q is raw fp32, [batch, heads, queries, dim], K and V are raw fp32 or fp16, [batch, kv_heads, tokens, dim].
 * Says "ready", then computes once for each line that it reads and prints the seconds; at the end of input it
 * writes O, fp32 [batch, queries, heads, dim].  A causal mask takes as many queries as tokens.  Built against
 * ggml by CMakeLists.txt beside it.
 */
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct shape {
    int64_t batch, heads, kv_heads, queries, tokens, dim;
    int threads;
    int causal;
    enum ggml_type kv_type;
} shape;

typedef struct work {
    struct ggml_context *context;
    struct ggml_tensor *q, *k, *v, *o;
    struct ggml_cgraph *graph;
    struct ggml_cplan plan;
} work;

static void stop(const char *what)
{
    fprintf(stderr, "ggml_driver: %s\n", what);
    exit(1);
}

static void read_tensor(struct ggml_tensor *tensor, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fread(tensor->data, 1, ggml_nbytes(tensor), file) != ggml_nbytes(tensor)) {
        stop(path);
    }
    fclose(file);
}

static void write_tensor(const struct ggml_tensor *tensor, const char *path)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(tensor->data, 1, ggml_nbytes(tensor), file) != ggml_nbytes(tensor) ||
        fclose(file) != 0) {
        stop(path);
    }
}

/* Rows in multiples of 64, which older versions of ggml ask for. */
static int64_t mask_rows(const shape *s)
{
    return (s->tokens + 63) / 64 * 64;
}

/* fp16: 0 where the key is visible, -inf where not. */
static struct ggml_tensor *causal_mask(struct ggml_context *context, const shape *s)
{
    struct ggml_tensor *mask = ggml_new_tensor_4d(context, GGML_TYPE_F16, s->tokens, mask_rows(s), 1, 1);
    uint16_t *data = mask->data;
    for (int64_t i = 0; i < mask_rows(s); i++) {
        for (int64_t j = 0; j < s->tokens; j++) {
            data[i * s->tokens + j] = j <= i ? 0 : 0xfc00;
        }
    }
    return mask;
}

static work make(const shape *s)
{
    int64_t rows = 2 * s->heads * s->queries + 2 * s->kv_heads * s->tokens;
    size_t bytes = (size_t)(s->batch * rows * s->dim) * sizeof(float);
    bytes += s->causal ? (size_t)(s->tokens * mask_rows(s)) * 2 : 0;
    bytes += 16 * ggml_tensor_overhead() + ggml_graph_overhead() + (1 << 20);
    work w = {.context = ggml_init((struct ggml_init_params){.mem_size = bytes})};
    if (w.context == NULL) {
        stop("out of memory");
    }
    w.q = ggml_new_tensor_4d(w.context, GGML_TYPE_F32, s->dim, s->queries, s->heads, s->batch);
    w.k = ggml_new_tensor_4d(w.context, s->kv_type, s->dim, s->tokens, s->kv_heads, s->batch);
    w.v = ggml_new_tensor_4d(w.context, s->kv_type, s->dim, s->tokens, s->kv_heads, s->batch);
    struct ggml_tensor *mask = s->causal ? causal_mask(w.context, s) : NULL;
    w.o = ggml_flash_attn_ext(w.context, w.q, w.k, w.v, mask, 1.0f / sqrtf((float)s->dim), 0.0f, 0.0f);
    w.graph = ggml_new_graph(w.context);
    ggml_build_forward_expand(w.graph, w.o);
    w.plan = ggml_graph_plan(w.graph, s->threads, NULL);
    w.plan.work_data = malloc(w.plan.work_size + 1);
    if (w.plan.work_data == NULL) {
        stop("out of memory");
    }
    return w;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int count, char **arguments)
{
    if (count != 14) {
        stop("usage: Q K V O BATCH HEADS KV_HEADS QUERIES TOKENS DIM THREADS causal|full f32|f16");
    }
    shape s = {.batch = atoll(arguments[5]),
               .heads = atoll(arguments[6]),
               .kv_heads = atoll(arguments[7]),
               .queries = atoll(arguments[8]),
               .tokens = atoll(arguments[9]),
               .dim = atoll(arguments[10]),
               .threads = atoi(arguments[11]),
               .causal = strcmp(arguments[12], "causal") == 0,
               .kv_type = strcmp(arguments[13], "f16") == 0 ? GGML_TYPE_F16 : GGML_TYPE_F32};
    ggml_cpu_init();
    work w = make(&s);
    read_tensor(w.q, arguments[1]);
    read_tensor(w.k, arguments[2]);
    read_tensor(w.v, arguments[3]);
    memset(w.o->data, 0xff, ggml_nbytes(w.o));
    printf("ready\n");
    fflush(stdout);
    for (char line[16]; fgets(line, sizeof line, stdin) != NULL;) {
        double begin = now();
        if (ggml_graph_compute(w.graph, &w.plan) != GGML_STATUS_SUCCESS) {
            stop("ggml_graph_compute failed");
        }
        printf("%.9f\n", now() - begin);
        fflush(stdout);
    }
    write_tensor(w.o, arguments[4]);
    free(w.plan.work_data);
    ggml_free(w.context);
    return 0;
}
