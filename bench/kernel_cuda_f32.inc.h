/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_f32.inc.h - for kernel_cuda_f32.c: tensors on both sides, attention and its gradients in fp64
 * one row at a time, and the comparison.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/cuda/driver.h"
#include "kernel/cuda/rows.h"

enum { NO_DQ = 1, NO_DK = 2, NO_DV = 4, GIVE_DELTA = 8 };

typedef struct bench_case {
    const char *name;
    attn_dtype dtype, dtype_out;
    int64_t batch, heads_q, heads_kv, queries, keys, dim_qk, dim_v, left, right;
    bool shifted;
    int64_t shift;
    bool varlen, odd, merge, accumulate,
        spoiled; /* odd: nothing aligned; spoiled: NaN and inf here and there */
    int options, sms;
    double size; /* of the inputs; 0: 1 */
} bench_case;

#define MUCH INT64_MAX

static void fail(attn_status status)
{
    if (status != ATTN_OK) {
        fprintf(stderr, "kernel_cuda_f32: %s\n", attn_last_error());
        exit(1);
    }
}
static void *need(void *memory)
{
    fail(memory == NULL ? ATTN_ENOMEM : ATTN_OK);
    return memory;
}
#define CUDA(call) fail(attn__cuda_check((call), #call))

static uint64_t state = 1;
static double uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}
static double normal(void)
{
    return sqrt(-2.0 * log(1.0 - uniform())) * cos(6.28318530717958647692 * uniform());
}

/* ---- tensors, on both sides ---- */

typedef struct bench_tensor {
    attn_dtype dtype;
    int64_t heads, tokens, dim, batches;
    size_t bytes, skip; /* skip: of the first element */
    int64_t stride[3];  /* batch, head, token */
    void *host, *copy;  /* copy: what was there before */
    CUdeviceptr device;
} bench_tensor;

static size_t at(const bench_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return t->skip +
           (size_t)(b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + d) * attn_dtype_size(t->dtype);
}
static double get(const bench_tensor *t, const void *from, int64_t b, int64_t h, int64_t i, int64_t d)
{
    float x;
    attn_to_f32(&x, (const char *)from + at(t, b, h, i, d), t->dtype, 1, 1);
    return (double)x;
}
static void set(bench_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d, double x)
{
    const float y = (float)x;
    attn_from_f32((char *)t->host + at(t, b, h, i, d), t->dtype, 1, &y, 1);
}

/* [batch][token][head][dim], with gaps and from an odd address if `odd`. */
static bench_tensor make(attn_dtype dtype, int64_t batches, int64_t heads, int64_t tokens, int64_t dim,
                         bool odd, double size)
{
    bench_tensor t = {.dtype = dtype, .heads = heads, .tokens = tokens, .dim = dim, .batches = batches};
    const int64_t gap = odd ? 1 : 0;
    t.skip = odd ? attn_dtype_size(dtype) : 0;
    t.stride[1] = dim + gap;
    t.stride[2] = heads * t.stride[1] + gap;
    t.stride[0] = batches == 1 ? 0 : tokens * t.stride[2];
    t.bytes = t.skip + (size_t)(batches * tokens * t.stride[2] + 1) * attn_dtype_size(dtype);
    t.host = need(attn__alloc(t.bytes)), t.copy = need(attn__alloc(t.bytes));
    memset(t.host, 0xff, t.bytes);
    for (int64_t i = 0; i < batches * heads * tokens * dim; i++) {
        set(&t, i / dim / tokens / heads, i / dim / tokens % heads, i / dim % tokens, i % dim,
            size * normal());
    }
    memcpy(t.copy, t.host, t.bytes);
    CUDA(attn__cuda.memory_alloc(&t.device, t.bytes));
    return t;
}
static void to_device(const bench_tensor *t)
{
    CUDA(attn__cuda.copy_to_device(t->device, t->copy, t->bytes, NULL));
}
static void to_host(const bench_tensor *t)
{
    CUDA(attn__cuda.copy_to_host(t->host, t->device, t->bytes, NULL));
    CUDA(attn__cuda.stream_wait(NULL));
}
static void poison(bench_tensor *t)
{
    memset(t->copy, 0xff, t->bytes);
}
static void drop(bench_tensor *t)
{
    attn__free(t->host), attn__free(t->copy);
    CUDA(attn__cuda.memory_free(t->device));
}
static attn__cuda_tensor tensor_of(const bench_tensor *t)
{
    return (attn__cuda_tensor){(char *)(uintptr_t)t->device + t->skip, t->stride[0], t->stride[1],
                               t->stride[2]};
}

typedef struct bench_run {
    bench_case c;
    int64_t *cu_q, *cu_kv; /* NULL: equal lengths */
    bench_tensor q, k, v, o, lse, dout, delta, dq, dk, dv;
    attn__cuda_call call;
    CUdeviceptr cu[2], workspace;
    size_t workspace_bytes;
} bench_run;

static int64_t *lengths(CUdeviceptr *device, int64_t batch, int64_t most)
{
    int64_t *cu = need(attn__alloc_array(batch + 1, sizeof(int64_t)));
    cu[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        cu[b + 1] = cu[b] + (b == 1 ? 0 : b == 2 ? most : (int64_t)(uniform() * (double)most));
    }
    CUDA(attn__cuda.memory_alloc(device, (size_t)(batch + 1) * sizeof(int64_t)));
    CUDA(attn__cuda.copy_to_device(*device, cu, (size_t)(batch + 1) * sizeof(int64_t), NULL));
    CUDA(attn__cuda.stream_wait(NULL));
    return cu;
}

static bool visible(const bench_run *r, int64_t b, int64_t i, int64_t j)
{
    const int64_t nq = r->cu_q ? r->cu_q[b + 1] - r->cu_q[b] : r->c.queries;
    const int64_t nkv = r->cu_kv ? r->cu_kv[b + 1] - r->cu_kv[b] : r->c.keys;
    const int64_t shift = r->c.shifted ? r->c.shift : nkv - nq;
    return (r->c.left == MUCH || j >= i + shift - r->c.left) &&
           (r->c.right == MUCH || j <= i + shift + r->c.right);
}
/* of a sequence: its tensor batch, first row, rows */
static int64_t rows_of(const int64_t *cu, int64_t b, int64_t all, int64_t *batch, int64_t *first)
{
    *batch = cu ? 0 : b;
    *first = cu ? cu[b] : 0;
    return cu ? cu[b + 1] - cu[b] : all;
}

/* ---- fp64 ---- */

static double dot(const bench_tensor *x, int64_t bx, int64_t hx, int64_t ix, const bench_tensor *y,
                  int64_t by, int64_t hy, int64_t iy)
{
    double sum = 0.0;
    for (int64_t d = 0; d < x->dim; d++) {
        sum += get(x, x->copy, bx, hx, ix, d) * get(y, y->copy, by, hy, iy, d);
    }
    return sum;
}

static double reference_row(const bench_run *r, int64_t b, int64_t h, int64_t i, double *o)
{
    int64_t bq, fq, bk, fk, hk = h / (r->c.heads_q / r->c.heads_kv);
    rows_of(r->cu_q, b, r->c.queries, &bq, &fq);
    const int64_t nkv = rows_of(r->cu_kv, b, r->c.keys, &bk, &fk);
    double max = -INFINITY, sum = 0.0;
    double *s = need(attn__alloc_array(nkv + 1, sizeof(double)));
    memset(o, 0, (size_t)r->c.dim_v * sizeof(double));
    for (int64_t j = 0; j < nkv; j++) {
        s[j] = visible(r, b, i, j) ? (double)r->call.scale * dot(&r->q, bq, h, fq + i, &r->k, bk, hk, fk + j)
                                   : 0.0;
        max = visible(r, b, i, j) && s[j] > max ? s[j] : max;
    }
    for (int64_t j = 0; j < nkv; j++) {
        if (visible(r, b, i, j)) {
            const double p = s[j] == -INFINITY ? 0.0 : exp(s[j] - max);
            sum += p;
            for (int64_t d = 0; d < r->c.dim_v; d++) {
                o[d] += p * get(&r->v, r->v.copy, bk, hk, fk + j, d);
            }
        }
    }
    for (int64_t d = 0; d < r->c.dim_v; d++) {
        o[d] = sum == 0.0 ? o[d] : o[d] / sum;
    }
    attn__free(s);
    return sum == 0.0 ? -INFINITY : max + log(sum);
}

static double row_delta(const bench_run *r, int64_t bq, int64_t h, int64_t i)
{
    return r->c.options & GIVE_DELTA ? get(&r->delta, r->delta.copy, bq, h, i, 0)
                                     : dot(&r->o, bq, h, i, &r->dout, bq, h, i);
}
/* P and dS of a cell; 0 where it is not visible */
static bool cell(const bench_run *r, int64_t b, int64_t h, int64_t i, int64_t j, double delta, double *p,
                 double *ds)
{
    int64_t bq, fq, bk, fk, hk = h / (r->c.heads_q / r->c.heads_kv);
    rows_of(r->cu_q, b, r->c.queries, &bq, &fq), rows_of(r->cu_kv, b, r->c.keys, &bk, &fk);
    const double lse = get(&r->lse, r->lse.copy, bq, h, fq + i, 0);
    if (!visible(r, b, i, j) || lse == -INFINITY) {
        return false;
    }
    const double power = (double)r->call.scale * dot(&r->q, bq, h, fq + i, &r->k, bk, hk, fk + j) - lse;
    *p = exp(power > 0.0 ? 0.0 : power);
    *ds = (double)r->call.scale * *p * (dot(&r->dout, bq, h, fq + i, &r->v, bk, hk, fk + j) - delta);
    return true;
}
static void reference_dq(const bench_run *r, int64_t b, int64_t h, int64_t i, double *dq)
{
    int64_t bq, fq, bk, fk, hk = h / (r->c.heads_q / r->c.heads_kv);
    rows_of(r->cu_q, b, r->c.queries, &bq, &fq);
    const int64_t nkv = rows_of(r->cu_kv, b, r->c.keys, &bk, &fk);
    const double delta = row_delta(r, bq, h, fq + i);
    memset(dq, 0, (size_t)r->c.dim_qk * sizeof(double));
    for (int64_t j = 0; j < nkv; j++) {
        double p, ds;
        for (int64_t d = 0; d < r->c.dim_qk && (d > 0 || cell(r, b, h, i, j, delta, &p, &ds)); d++) {
            dq[d] += ds * get(&r->k, r->k.copy, bk, hk, fk + j, d);
        }
    }
}
static void reference_dkv(const bench_run *r, int64_t b, int64_t hk, int64_t j, const double *deltas,
                          double *dk, double *dv)
{
    int64_t bq, fq;
    const int64_t nq = rows_of(r->cu_q, b, r->c.queries, &bq, &fq), group = r->c.heads_q / r->c.heads_kv;
    memset(dk, 0, (size_t)r->c.dim_qk * sizeof(double));
    memset(dv, 0, (size_t)r->c.dim_v * sizeof(double));
    for (int64_t n = 0; n < group * nq; n++) {
        const int64_t h = hk * group + n / nq, i = n % nq;
        double p, ds;
        if (cell(r, b, h, i, j, deltas[h * nq + i], &p, &ds)) {
            for (int64_t d = 0; d < r->c.dim_qk; d++) {
                dk[d] += ds * get(&r->q, r->q.copy, bq, h, fq + i, d);
            }
            for (int64_t d = 0; d < r->c.dim_v; d++) {
                dv[d] += p * get(&r->dout, r->dout.copy, bq, h, fq + i, d);
            }
        }
    }
}

/* ---- comparing ---- */

typedef struct bench_error {
    const char *what;
    bool parts;                /* made of parts of numbers: NaN may stand for an infinite one */
    double error, largest;     /* of a tensor */
    int64_t wrong_kind, total; /* NaN or inf where there should be none, or none */
    int64_t b, h, i, d;        /* the worst */
    double got, want;
} bench_error;

static void compare(bench_error *e, int64_t b, int64_t h, int64_t i, int64_t d, double got, double want)
{
    e->total++;
    const bool same = isnan(got) == isnan(want) && (isfinite(want) || isnan(want) || got == want) &&
                      (!isfinite(want) || isfinite(got));
    const bool kind = same || (e->parts && isnan(got) && isinf(want));
    const double error = isfinite(want) && kind ? fabs(got - want) : 0.0;
    e->largest = isfinite(want) ? fmax(e->largest, fabs(want)) : e->largest;
    if ((!kind && e->wrong_kind == 0) || (e->wrong_kind == 0 && error > e->error)) {
        e->b = b, e->h = h, e->i = i, e->d = d, e->got = got, e->want = want;
    }
    e->wrong_kind += !kind;
    e->error = fmax(e->error, error);
}

static int wrong_cases;
static void report(const bench_error *e, double allowed)
{
    const double relative = e->error / (e->largest > 0.0 ? e->largest : 1.0);
    const bool good = e->wrong_kind == 0 && relative <= allowed;
    printf(" %s %.1e%s", e->what, relative, good ? "" : " WRONG");
    if (!good) {
        wrong_cases++;
        printf(
            " [%lld of another kind of %lld; batch %lld head %lld row %lld dim %lld: %.9g, should be %.9g]\n",
            (long long)e->wrong_kind, (long long)e->total, (long long)e->b, (long long)e->h, (long long)e->i,
            (long long)e->d, e->got, e->want);
    }
}
