/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_backward.c - the CUDA kernels of gradients alone: right, and how fast.
 *
 *     kernel_cuda_backward [--check] [--time] [--dim D] [--dtype NAME] [--causal N] [--tokens N] [--heads-kv
 * H]
 *                          [--deterministic] [--repeat N]
 *
 * CHECK.  Small problems of every kind against gradients in fp64 from the same rounded inputs: the error of a
 * tensor is ||got - want|| / ||want||, and where it is too large the first wrong elements are told.  Outputs
 * are poisoned.  A deterministic one runs ten times and must give the same bits.
 *
 * TIME.  16384 tokens in sequences of 512 to 16384, heads * dim = 2048.  Device time by events around
 * batches of launches, the median of the batches.  FLOPs = 10 * b * h * n * n * d, half if causal.  Inputs
 * are standard normal, lse is what a softmax over n such keys has.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/cuda/driver.h"
#include "kernel/cuda/rows.h"

typedef struct bench_shape {
    attn_dtype dtype, out;
    int64_t batch, heads_q, heads_kv, tokens_q, tokens_kv, dim_qk, dim_v, left, right;
    bool ragged, accumulate, deterministic, given_delta;
} bench_shape;

enum { Q, K, V, O, DOUT, DQ, DK, DV, LSE, DELTA, TENSORS };
static const char *const tensor_names[] = {"q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse", "delta"};

/* One problem: on the host as floats of what the device holds, and on the device. */
typedef struct bench_data {
    bench_shape shape;
    int64_t cu[2][65];
    float *host[TENSORS];
    float *want[TENSORS]; /* dq, dk, dv */
    int64_t count[TENSORS];
    CUdeviceptr device[TENSORS], lengths, workspace;
    attn__cuda_call call;
} bench_data;

static const attn__cuda_device *gpu;

static void must(attn_status status)
{
    if (status != ATTN_OK) {
        printf("failed: %s\n", attn_last_error());
        exit(1);
    }
}

static void cuda(CUresult result, const char *what)
{
    must(attn__cuda_check(result, what));
}

static uint64_t seed = 1;

static double uniform(void)
{
    seed += 0x9e3779b97f4a7c15U;
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static float normal(void)
{
    return (float)(sqrt(-2.0 * log(uniform() + 1e-300)) * cos(6.283185307179586 * uniform()));
}

static void *memory(int64_t count, size_t size)
{
    void *data = calloc((size_t)(count > 0 ? count : 1), size);
    if (data == NULL) {
        exit(2);
    }
    return data;
}

/* ---- a problem ---- */

static attn_dtype dtype_of(const bench_shape *s, int tensor)
{
    return tensor >= LSE ? ATTN_F32 : tensor >= DQ ? s->out : s->dtype;
}

static int64_t width_of(const bench_shape *s, int tensor)
{
    int64_t heads = tensor == K || tensor == V || tensor == DK || tensor == DV ? s->heads_kv : s->heads_q;
    int64_t dim = tensor == V || tensor == O || tensor == DOUT || tensor == DV ? s->dim_v : s->dim_qk;
    return tensor >= LSE ? heads : heads * dim;
}

static int64_t tokens_of(const bench_data *d, int tensor)
{
    bool keys = tensor == K || tensor == V || tensor == DK || tensor == DV;
    return d->cu[keys][d->shape.batch];
}

static void make_lengths(bench_data *d)
{
    const bench_shape *s = &d->shape;
    for (int64_t b = 0; b < s->batch; b++) {
        int64_t q = s->tokens_q, k = s->tokens_kv;
        if (s->ragged && b > 0) {
            q = b == 1 ? 0 : (int64_t)(uniform() * (double)q);
            k = b == 2 ? 0 : (int64_t)(uniform() * (double)k);
        }
        d->cu[0][b + 1] = d->cu[0][b] + q;
        d->cu[1][b + 1] = d->cu[1][b] + k;
    }
}

/* Rounds to the dtype of the tensor and back. */
static void round_host(const bench_data *d, int tensor)
{
    attn_dtype type = dtype_of(&d->shape, tensor);
    if (type != ATTN_F32) {
        void *rounded = memory(d->count[tensor], 2);
        attn_from_f32(rounded, type, 1, d->host[tensor], d->count[tensor]);
        attn_to_f32(d->host[tensor], rounded, type, 1, d->count[tensor]);
        free(rounded);
    }
}

static void upload(const bench_data *d, int tensor)
{
    attn_dtype type = dtype_of(&d->shape, tensor);
    size_t size = attn_dtype_size(type) * (size_t)d->count[tensor];
    void *data = memory(d->count[tensor], 4);
    attn_from_f32(data, type, 1, d->host[tensor], d->count[tensor]);
    cuda(attn__cuda.copy_to_device(d->device[tensor], data, size, NULL), "upload");
    cuda(attn__cuda.stream_wait(NULL), "upload");
    free(data);
}

static void download(const bench_data *d, int tensor, float *host)
{
    attn_dtype type = dtype_of(&d->shape, tensor);
    size_t size = attn_dtype_size(type) * (size_t)d->count[tensor];
    void *data = memory(d->count[tensor], 4);
    cuda(attn__cuda.copy_to_host(data, d->device[tensor], size, NULL), "download");
    cuda(attn__cuda.stream_wait(NULL), "download");
    attn_to_f32(host, data, type, 1, d->count[tensor]);
    free(data);
}

static attn__cuda_tensor tensor_at(const bench_data *d, int tensor)
{
    const bench_shape *s = &d->shape;
    bool keys = tensor == K || tensor == V || tensor == DK || tensor == DV;
    int64_t width = width_of(s, tensor), heads = keys ? s->heads_kv : s->heads_q;
    return (attn__cuda_tensor){
        .data = (void *)(uintptr_t)d->device[tensor], /* NOLINT: a device address */
        .batch = s->ragged ? 0 : (keys ? s->tokens_kv : s->tokens_q) * width,
        .head = width / heads,
        .token = width,
    };
}

static void make_call(bench_data *d)
{
    const bench_shape *s = &d->shape;
    attn__cuda_call *c = &d->call;
    *c = (attn__cuda_call){
        .dtype = s->dtype,
        .dtype_out = s->out,
        .batch = s->batch,
        .heads_q = s->heads_q,
        .heads_kv = s->heads_kv,
        .tokens_q = s->tokens_q,
        .tokens_kv = s->tokens_kv,
        .dim_qk = s->dim_qk,
        .dim_v = s->dim_v,
        .scale = 1.0F / sqrtf((float)s->dim_qk),
        .left = s->left,
        .right = s->right,
        .total_q = d->cu[0][s->batch],
        .total_kv = d->cu[1][s->batch],
        .deterministic = s->deterministic,
        .accumulate = s->accumulate,
    };
    if (s->ragged) {
        c->cu_q = (const int64_t *)(uintptr_t)d->lengths;                      /* NOLINT: a device address */
        c->cu_kv = (const int64_t *)(uintptr_t)(d->lengths + sizeof d->cu[0]); /* NOLINT */
    }
    c->q = tensor_at(d, Q);
    c->k = tensor_at(d, K);
    c->v = tensor_at(d, V);
    c->o = tensor_at(d, O);
    c->dout = tensor_at(d, DOUT);
    c->dq = tensor_at(d, DQ);
    c->dk = tensor_at(d, DK);
    c->dv = tensor_at(d, DV);
    c->lse = tensor_at(d, LSE);
    c->delta = tensor_at(d, DELTA);
    if (!s->given_delta) {
        c->delta.data = NULL;
    }
}

static void open_data(bench_data *d, const bench_shape *shape)
{
    memset(d, 0, sizeof *d);
    d->shape = *shape;
    make_lengths(d);
    for (int i = 0; i < TENSORS; i++) {
        d->count[i] = tokens_of(d, i) * width_of(shape, i);
        cuda(attn__cuda.memory_alloc(&d->device[i],
                                     (size_t)d->count[i] * attn_dtype_size(dtype_of(shape, i)) + 16),
             "memory");
    }
    cuda(attn__cuda.memory_alloc(&d->lengths, sizeof d->cu), "memory");
    cuda(attn__cuda.copy_to_device(d->lengths, d->cu, sizeof d->cu, NULL), "lengths");
    make_call(d);
    const char *why = attn__cuda_flash_sm90.rejects(&d->call, true);
    if (why != NULL) {
        printf("rejected: %s\n", why);
        exit(1);
    }
    size_t bytes = attn__cuda_flash_sm90.backward_workspace(&d->call, gpu);
    cuda(attn__cuda.memory_alloc(&d->workspace, bytes), "workspace");
    cuda(attn__cuda.memset_async(d->workspace, 0xff, bytes, NULL), "workspace");
}

static void close_data(bench_data *d)
{
    for (int i = 0; i < TENSORS; i++) {
        (void)attn__cuda.memory_free(d->device[i]);
        free(d->host[i]);
        free(d->want[i]);
    }
    (void)attn__cuda.memory_free(d->lengths);
    (void)attn__cuda.memory_free(d->workspace);
}

static void launch(const bench_data *d)
{
    must(attn__cuda_flash_sm90.backward(&d->call, gpu, (void *)(uintptr_t)d->workspace, /* NOLINT */
                                        NULL));
}

/* ---- the gradients in fp64 ---- */

static double dot(const float *a, const float *b, int64_t dim)
{
    double sum = 0;
    for (int64_t i = 0; i < dim; i++) {
        sum += (double)a[i] * (double)b[i];
    }
    return sum;
}

/* One row of one query head: o and lse, which are rounded as the caller would have them. */
static void forward_row(bench_data *d, double *p, int64_t row, int64_t head, int64_t first, int64_t from,
                        int64_t to)
{
    const bench_shape *s = &d->shape;
    int64_t kv = head / (s->heads_q / s->heads_kv);
    const float *q = d->host[Q] + (row * s->heads_q + head) * s->dim_qk;
    float *o = d->host[O] + (row * s->heads_q + head) * s->dim_v;
    double most = -INFINITY, sum = 0;
    for (int64_t j = from; j <= to; j++) {
        p[j] = (double)d->call.scale *
               dot(q, d->host[K] + ((first + j) * s->heads_kv + kv) * s->dim_qk, s->dim_qk);
        most = fmax(most, p[j]);
    }
    for (int64_t j = from; j <= to; j++) {
        p[j] = exp(p[j] - most);
        sum += p[j];
    }
    d->host[LSE][row * s->heads_q + head] = sum > 0 ? (float)(most + log(sum)) : -INFINITY;
    double acc[256] = {0};
    for (int64_t j = from; j <= to; j++) {
        p[j] /= sum;
        for (int64_t e = 0; e < s->dim_v; e++) {
            acc[e] += p[j] * (double)d->host[V][((first + j) * s->heads_kv + kv) * s->dim_v + e];
        }
    }
    uint16_t rounded[256];
    for (int64_t e = 0; e < s->dim_v; e++) {
        o[e] = (float)acc[e];
    }
    attn_from_f32(rounded, s->dtype, 1, o, s->dim_v);
    attn_to_f32(o, rounded, s->dtype, 1, s->dim_v);
}

static void backward_row(bench_data *d, const double *p, int64_t row, int64_t head, int64_t first,
                         int64_t from, int64_t to, double *dk, double *dv)
{
    const bench_shape *s = &d->shape;
    int64_t kv = head / (s->heads_q / s->heads_kv);
    const float *q = d->host[Q] + (row * s->heads_q + head) * s->dim_qk;
    const float *dout = d->host[DOUT] + (row * s->heads_q + head) * s->dim_v;
    double delta = dot(dout, d->host[O] + (row * s->heads_q + head) * s->dim_v, s->dim_v);
    double acc[256] = {0};
    d->host[DELTA][row * s->heads_q + head] = (float)delta;
    for (int64_t j = from; j <= to; j++) {
        int64_t at = (first + j) * s->heads_kv + kv;
        double ds = p[j] * (dot(dout, d->host[V] + at * s->dim_v, s->dim_v) - delta) * (double)d->call.scale;
        for (int64_t e = 0; e < s->dim_qk; e++) {
            acc[e] += ds * (double)d->host[K][at * s->dim_qk + e];
            dk[j * s->dim_qk + e] += ds * (double)q[e];
        }
        for (int64_t e = 0; e < s->dim_v; e++) {
            dv[j * s->dim_v + e] += p[j] * (double)dout[e];
        }
    }
    for (int64_t e = 0; e < s->dim_qk; e++) {
        d->want[DQ][(row * s->heads_q + head) * s->dim_qk + e] = (float)acc[e];
    }
}

static void reference_head(bench_data *d, int64_t b, int64_t kv)
{
    const bench_shape *s = &d->shape;
    int64_t nq = d->cu[0][b + 1] - d->cu[0][b], nk = d->cu[1][b + 1] - d->cu[1][b],
            group = s->heads_q / s->heads_kv;
    int64_t first = d->cu[1][b];
    double *p = memory(nk, sizeof *p);
    double *dk = memory(nk * s->dim_qk, sizeof *dk), *dv = memory(nk * s->dim_v, sizeof *dv);
    for (int64_t i = 0; i < nq; i++) {
        int64_t at = i + nk - nq;
        int64_t from = s->left > at ? 0 : at - s->left, to = s->right >= nk - at ? nk - 1 : at + s->right;
        for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
            forward_row(d, p, d->cu[0][b] + i, head, first, from, to);
            backward_row(d, p, d->cu[0][b] + i, head, first, from, to, dk, dv);
        }
    }
    for (int64_t j = 0; j < nk; j++) {
        for (int64_t e = 0; e < s->dim_qk; e++) {
            d->want[DK][((first + j) * s->heads_kv + kv) * s->dim_qk + e] = (float)dk[j * s->dim_qk + e];
        }
        for (int64_t e = 0; e < s->dim_v; e++) {
            d->want[DV][((first + j) * s->heads_kv + kv) * s->dim_v + e] = (float)dv[j * s->dim_v + e];
        }
    }
    free(p);
    free(dk);
    free(dv);
}

/* ---- check ---- */

/* Prints the first wrong elements; true if the tensor is right. */
static bool compare(const bench_data *d, int tensor, const float *got, const float *want)
{
    double error = 0, norm = 0, worst = 0;
    int64_t bad = 0, at = 0, width = width_of(&d->shape, tensor);
    for (int64_t i = 0; i < d->count[tensor]; i++) {
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
        for (int64_t i = 0; i < d->count[tensor] && shown < 12; i += shown < 4 ? 1 : 61) {
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
    const int inputs[] = {Q, K, V, O, DOUT, LSE, DELTA};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        upload(d, inputs[i]);
    }
    if (shape->given_delta) {
        cuda(attn__cuda.memset_async(d->device[O], 0xff, (size_t)d->count[O] * 2, NULL), "poison");
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

/* Normal numbers of the inputs' dtype, the same again and again. */
static void fill_fast(const bench_data *d)
{
    const int64_t part = 1 << 20;
    float *numbers = memory(part, 4);
    uint16_t *rounded = memory(part, 2);
    for (int i = Q; i <= DOUT; i++) {
        for (int64_t j = 0; j < part; j++) {
            numbers[j] = normal() * (i == O ? 0.05F : 1.0F);
        }
        attn_from_f32(rounded, d->shape.dtype, 1, numbers, part);
        for (int64_t at = 0; at < d->count[i]; at += part) {
            size_t bytes = (size_t)(d->count[i] - at < part ? d->count[i] - at : part) * 2;
            cuda(attn__cuda.copy_to_device(d->device[i] + (size_t)at * 2, rounded, bytes, NULL), "upload");
        }
        cuda(attn__cuda.stream_wait(NULL), "upload");
    }
    float *lse = memory(d->count[LSE], 4);
    for (int64_t i = 0; i < d->count[LSE]; i++) {
        lse[i] = logf((float)d->shape.tokens_kv) + 0.5F;
    }
    cuda(attn__cuda.copy_to_device(d->device[LSE], lse, (size_t)d->count[LSE] * 4, NULL), "upload");
    cuda(attn__cuda.stream_wait(NULL), "upload");
    free(numbers);
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
