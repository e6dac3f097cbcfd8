/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_backward.inc.h - a problem for kernel_cuda_backward.c: its tensors on the host and on the
 * device, and its gradients in fp64, row by row as they are defined.
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
    return tensor >= LSE ? ATTN_F32 : tensor >= DQ || tensor == O ? s->out : s->dtype;
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
        .most_q = d->cu[0][s->batch],
        .most_kv = d->cu[1][s->batch],
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
    for (int64_t e = 0; e < s->dim_v; e++) {
        o[e] = (float)acc[e];
    }
    if (s->out != ATTN_F32) {
        uint16_t rounded[256];
        attn_from_f32(rounded, s->out, 1, o, s->dim_v);
        attn_to_f32(o, rounded, s->out, 1, s->dim_v);
    }
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
