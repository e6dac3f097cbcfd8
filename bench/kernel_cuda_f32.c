/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_f32.c - the fp32 rows of the CUDA kernel table: right?  how fast?
 *
 *     kernel_cuda_f32 check|time [--kernel NAME] [--forward | --backward] [--quick]
 *
 * CHECK.  Every case runs on random inputs into outputs of 0xff bytes, and all its rows are compared with fp64 here:
 * the error is relative to the largest number of a tensor, NaN must be where the reference has it.  Gradients run
 * twice and must have the same bits.
 *
 * TIME.  Batches of launches between two events, after one to warm up; the median batch counts.  FLOPs = 4 * batch * heads
 * * cells * d, 2.5 times that for gradients.  Some rows of each are compared with fp64 too.
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
    bool varlen, odd, merge, accumulate, spoiled; /* odd: nothing aligned; spoiled: NaN and inf here and there */
    int options, sms;
    double size; /* of the inputs; 0: 1 */
} bench_case;

#define MUCH INT64_MAX
static const bench_case checks[] = {
    {.name = "d64", .batch = 1, .heads_q = 2, .heads_kv = 2, .queries = 200, .keys = 300, .dim_qk = 64, .dim_v = 64,
     .left = MUCH, .right = MUCH},
    {.name = "d64 causal", .batch = 2, .heads_q = 2, .heads_kv = 1, .queries = 300, .keys = 333, .dim_qk = 64,
     .dim_v = 64, .left = MUCH, .right = 0},
    {.name = "d128", .batch = 1, .heads_q = 2, .heads_kv = 2, .queries = 300, .keys = 290, .dim_qk = 128, .dim_v = 128,
     .left = MUCH, .right = MUCH},
    {.name = "d128 causal", .batch = 1, .heads_q = 4, .heads_kv = 2, .queries = 515, .keys = 400, .dim_qk = 128,
     .dim_v = 128, .left = MUCH, .right = 0},
    {.name = "d256 causal", .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 150, .keys = 203, .dim_qk = 256,
     .dim_v = 256, .left = MUCH, .right = 0},
    {.name = "d512", .batch = 1, .heads_q = 1, .heads_kv = 1, .queries = 77, .keys = 130, .dim_qk = 512, .dim_v = 400,
     .left = MUCH, .right = MUCH},
    {.name = "d40/72 window", .batch = 2, .heads_q = 2, .heads_kv = 2, .queries = 260, .keys = 400, .dim_qk = 40,
     .dim_v = 72, .left = 37, .right = 5},
    {.name = "d3 odd strides", .odd = true, .batch = 2, .heads_q = 3, .heads_kv = 1, .queries = 131, .keys = 77,
     .dim_qk = 3, .dim_v = 5, .left = MUCH, .right = 0},
    {.name = "d99 odd, sms 5", .odd = true, .sms = 5, .batch = 2, .heads_q = 2, .heads_kv = 2, .queries = 190,
     .keys = 270, .dim_qk = 99, .dim_v = 33, .left = 100, .right = MUCH},
    {.name = "f16", .dtype = ATTN_F16, .dtype_out = ATTN_F16, .batch = 2, .heads_q = 2, .heads_kv = 1, .queries = 130,
     .keys = 200, .dim_qk = 64, .dim_v = 64, .left = MUCH, .right = 0},
    {.name = "bf16 odd, varlen", .dtype = ATTN_BF16, .dtype_out = ATTN_BF16, .odd = true, .varlen = true, .batch = 5,
     .heads_q = 2, .heads_kv = 1, .queries = 200, .keys = 210, .dim_qk = 50, .dim_v = 70, .left = MUCH, .right = 0},
    {.name = "bf16 to fp32", .dtype = ATTN_BF16, .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 64, .keys = 64,
     .dim_qk = 128, .dim_v = 128, .left = MUCH, .right = MUCH, .accumulate = true},
    {.name = "varlen window", .varlen = true, .batch = 6, .heads_q = 4, .heads_kv = 2, .queries = 400, .keys = 300,
     .dim_qk = 64, .dim_v = 64, .left = 50, .right = 20},
    {.name = "shifted block", .shifted = true, .shift = 130, .batch = 1, .heads_q = 2, .heads_kv = 2, .queries = 257,
     .keys = 600, .dim_qk = 64, .dim_v = 64, .left = 90, .right = 0, .merge = true, .accumulate = true},
    {.name = "shifted away", .shifted = true, .shift = -200, .batch = 1, .heads_q = 2, .heads_kv = 2, .queries = 300,
     .keys = 300, .dim_qk = 128, .dim_v = 128, .left = MUCH, .right = 0, .merge = true, .accumulate = true},
    {.name = "band beside the diagonal", .batch = 1, .heads_q = 1, .heads_kv = 1, .queries = 400, .keys = 400,
     .dim_qk = 64, .dim_v = 64, .left = -30, .right = 200},
    {.name = "one key", .batch = 3, .heads_q = 2, .heads_kv = 2, .queries = 70, .keys = 1, .dim_qk = 64, .dim_v = 64,
     .left = MUCH, .right = 0},
    {.name = "one query", .batch = 3, .heads_q = 8, .heads_kv = 2, .queries = 1, .keys = 1000, .dim_qk = 128,
     .dim_v = 128, .left = MUCH, .right = 0},
    {.name = "huge logits", .size = 30.0, .batch = 1, .heads_q = 2, .heads_kv = 2, .queries = 200, .keys = 260,
     .dim_qk = 64, .dim_v = 64, .left = MUCH, .right = 0},
    {.name = "NaN and inf, d64", .spoiled = true, .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 330, .keys = 400,
     .dim_qk = 64, .dim_v = 64, .left = 60, .right = 0, .options = GIVE_DELTA},
    {.name = "NaN and inf, d128", .spoiled = true, .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 330,
     .keys = 400, .dim_qk = 128, .dim_v = 128, .left = 60, .right = 0},
    {.name = "no dq", .options = NO_DQ, .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 130, .keys = 300,
     .dim_qk = 64, .dim_v = 64, .left = MUCH, .right = 0},
    {.name = "only dq", .options = NO_DK | NO_DV, .batch = 1, .heads_q = 2, .heads_kv = 1, .queries = 130,
     .keys = 300, .dim_qk = 128, .dim_v = 128, .left = MUCH, .right = 0},
    {.name = "d64 many blocks", .batch = 2, .heads_q = 16, .heads_kv = 8, .queries = 2100, .keys = 2300, .dim_qk = 64,
     .dim_v = 64, .left = MUCH, .right = 0},
};

#define TIMED(heads, n, d, side)                                                                             \
    {.batch = 1, .heads_q = heads, .heads_kv = heads, .queries = n, .keys = n, .dim_qk = d, .dim_v = d,        \
     .left = MUCH, .right = side}
static const bench_case times[] = {
    TIMED(8, 8192, 64, MUCH),   TIMED(8, 8192, 64, 0),    TIMED(8, 8192, 128, MUCH), TIMED(8, 8192, 128, 0),
    TIMED(32, 2048, 64, MUCH),  TIMED(32, 2048, 64, 0),   TIMED(16, 2048, 128, 0),   TIMED(8, 1024, 64, MUCH),
    TIMED(8, 4096, 256, MUCH),
};

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
    return t->skip + (size_t)(b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + d) *
                         attn_dtype_size(t->dtype);
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
static bench_tensor make(attn_dtype dtype, int64_t batches, int64_t heads, int64_t tokens, int64_t dim, bool odd,
                         double size)
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
        set(&t, i / dim / tokens / heads, i / dim / tokens % heads, i / dim % tokens, i % dim, size * normal());
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
    return (attn__cuda_tensor){(char *)(uintptr_t)t->device + t->skip, t->stride[0], t->stride[1], t->stride[2]};
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
    return (r->c.left == MUCH || j >= i + shift - r->c.left) && (r->c.right == MUCH || j <= i + shift + r->c.right);
}
/* of a sequence: its tensor batch, first row, rows */
static int64_t rows_of(const int64_t *cu, int64_t b, int64_t all, int64_t *batch, int64_t *first)
{
    *batch = cu ? 0 : b;
    *first = cu ? cu[b] : 0;
    return cu ? cu[b + 1] - cu[b] : all;
}

/* ---- fp64 ---- */

static double dot(const bench_tensor *x, int64_t bx, int64_t hx, int64_t ix, const bench_tensor *y, int64_t by,
                  int64_t hy, int64_t iy)
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
        s[j] = visible(r, b, i, j) ? (double)r->call.scale * dot(&r->q, bq, h, fq + i, &r->k, bk, hk, fk + j) : 0.0;
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
static bool cell(const bench_run *r, int64_t b, int64_t h, int64_t i, int64_t j, double delta, double *p, double *ds)
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
static void reference_dkv(const bench_run *r, int64_t b, int64_t hk, int64_t j, const double *deltas, double *dk,
                          double *dv)
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
    double error, largest;      /* of a tensor */
    int64_t wrong_kind, total;  /* NaN or inf where there should be none, or none */
    int64_t b, h, i, d;         /* the worst */
    double got, want;
} bench_error;

static void compare(bench_error *e, int64_t b, int64_t h, int64_t i, int64_t d, double got, double want)
{
    e->total++;
    const bool kind = isnan(got) == isnan(want) && (isfinite(want) || isnan(want) || got == want) &&
                      (!isfinite(want) || isfinite(got));
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
        printf(" [%lld of another kind of %lld; batch %lld head %lld row %lld dim %lld: %.9g, should be %.9g]\n",
               (long long)e->wrong_kind, (long long)e->total, (long long)e->b, (long long)e->h, (long long)e->i,
               (long long)e->d, e->got, e->want);
    }
}

/* Every how many-th row is looked at: some 10^7 products in all. */
static int64_t every(const bench_case *c)
{
    const double cells = (double)(c->batch * c->heads_q) * (double)c->queries * (double)c->keys;
    const int64_t step = 1 + (int64_t)(cells * (double)(c->dim_qk + c->dim_v) / 4e6);
    return step % 2 == 0 ? step + 1 : step;
}

static void check_forward(const bench_run *r, double allowed)
{
    bench_error o = {.what = "o"}, lse = {.what = "lse"};
    double *want = need(attn__alloc_array(r->c.dim_v, sizeof(double)));
    int64_t count = 0;
    for (int64_t n = 0; n < r->c.batch * r->c.heads_q; n++) {
        int64_t b = n / r->c.heads_q, h = n % r->c.heads_q, bq, fq;
        const int64_t nq = rows_of(r->cu_q, b, r->c.queries, &bq, &fq);
        for (int64_t i = 0; i < nq; i++) {
            if (count++ % every(&r->c) != 0) {
                continue;
            }
            double l = reference_row(r, b, h, i, want), a = 0.0, mine = 1.0;
            if (r->c.merge) { /* what was there, lse and o, over other keys */
                const double old = get(&r->lse, r->lse.copy, bq, h, fq + i, 0), top = fmax(old, l);
                const double both = top + log(exp(old - top) + exp(l - top));
                a = exp(old - both), mine = exp(l - both), l = both;
            }
            compare(&lse, b, h, i, 0, get(&r->lse, r->lse.host, bq, h, fq + i, 0), l);
            for (int64_t d = 0; d < r->c.dim_v; d++) {
                const double there = r->c.merge ? a * get(&r->o, r->o.copy, bq, h, fq + i, d) : 0.0;
                compare(&o, b, h, i, d, get(&r->o, r->o.host, bq, h, fq + i, d), there + mine * want[d]);
            }
        }
    }
    attn__free(want);
    report(&o, allowed), report(&lse, 4e-6);
}

static void check_queries(const bench_run *r, double allowed)
{
    bench_error e = {.what = "dq"};
    double *want = need(attn__alloc_array(r->c.dim_qk, sizeof(double)));
    int64_t count = 0;
    for (int64_t n = 0; n < r->c.batch * r->c.heads_q && !(r->c.options & NO_DQ); n++) {
        int64_t b = n / r->c.heads_q, h = n % r->c.heads_q, bq, fq;
        const int64_t nq = rows_of(r->cu_q, b, r->c.queries, &bq, &fq);
        for (int64_t i = 0; i < nq; i++) {
            if (count++ % every(&r->c) != 0) {
                continue;
            }
            reference_dq(r, b, h, i, want);
            for (int64_t d = 0; d < r->c.dim_qk; d++) {
                const double there = r->c.accumulate ? get(&r->dq, r->dq.copy, bq, h, fq + i, d) : 0.0;
                compare(&e, b, h, i, d, get(&r->dq, r->dq.host, bq, h, fq + i, d), there + want[d]);
            }
        }
    }
    attn__free(want);
    report(&e, allowed);
}

static void check_keys(const bench_run *r, double allowed)
{
    bench_error ek = {.what = "dk"}, ev = {.what = "dv"};
    double *dk = need(attn__alloc_array(r->c.dim_qk, sizeof(double)));
    double *dv = need(attn__alloc_array(r->c.dim_v, sizeof(double)));
    double *deltas = need(attn__alloc_array(r->c.heads_q * r->c.queries + 1, sizeof(double)));
    int64_t count = 0;
    for (int64_t n = 0; n < r->c.batch * r->c.heads_kv; n++) {
        int64_t b = n / r->c.heads_kv, h = n % r->c.heads_kv, bq, fq, bk, fk;
        const int64_t nq = rows_of(r->cu_q, b, r->c.queries, &bq, &fq), nkv = rows_of(r->cu_kv, b, r->c.keys, &bk, &fk);
        for (int64_t i = 0; i < r->c.heads_q * nq; i++) {
            deltas[i] = row_delta(r, bq, i / nq, fq + i % nq);
        }
        for (int64_t j = 0; j < nkv; j++) {
            if (count++ % every(&r->c) != 0) {
                continue;
            }
            reference_dkv(r, b, h, j, deltas, dk, dv);
            for (int64_t d = 0; d < r->c.dim_qk && !(r->c.options & NO_DK); d++) {
                const double there = r->c.accumulate ? get(&r->dk, r->dk.copy, bk, h, fk + j, d) : 0.0;
                compare(&ek, b, h, j, d, get(&r->dk, r->dk.host, bk, h, fk + j, d), there + dk[d]);
            }
            for (int64_t d = 0; d < r->c.dim_v && !(r->c.options & NO_DV); d++) {
                const double there = r->c.accumulate ? get(&r->dv, r->dv.copy, bk, h, fk + j, d) : 0.0;
                compare(&ev, b, h, j, d, get(&r->dv, r->dv.host, bk, h, fk + j, d), there + dv[d]);
            }
        }
    }
    attn__free(dk), attn__free(dv), attn__free(deltas);
    report(&ek, allowed), report(&ev, allowed);
}

/* ---- one case ---- */

/* NaN and inf in Q, K, V and dO of a few tokens, which some rows see and others do not. */
static void spoil(bench_run *r)
{
    set(&r->k, 0, 0, 100, 3, NAN), set(&r->v, 0, 0, 170, 2, NAN), set(&r->v, 0, 0, 250, 5, INFINITY);
    set(&r->v, 0, 0, 251, 5, -INFINITY), set(&r->q, 0, 0, 290, 1, NAN), set(&r->dout, 0, 0, 20, 7, NAN);
    memcpy(r->k.copy, r->k.host, r->k.bytes), memcpy(r->v.copy, r->v.host, r->v.bytes);
    memcpy(r->q.copy, r->q.host, r->q.bytes), memcpy(r->dout.copy, r->dout.host, r->dout.bytes);
}

static void open_run(bench_run *r, const bench_case *c)
{
    *r = (bench_run){.c = *c};
    if (c->varlen) {
        r->cu_q = lengths(&r->cu[0], c->batch, c->queries), r->cu_kv = lengths(&r->cu[1], c->batch, c->keys);
    }
    const int64_t batch = c->varlen ? 1 : c->batch;
    const int64_t nq = c->varlen ? r->cu_q[c->batch] : c->queries, nkv = c->varlen ? r->cu_kv[c->batch] : c->keys;
    const double size = c->size > 0.0 ? c->size : 1.0;
    r->q = make(c->dtype, batch, c->heads_q, nq, c->dim_qk, c->odd, size);
    r->k = make(c->dtype, batch, c->heads_kv, nkv, c->dim_qk, c->odd, 1.0);
    r->v = make(c->dtype, batch, c->heads_kv, nkv, c->dim_v, c->odd, 1.0);
    r->dout = make(c->dtype, batch, c->heads_q, nq, c->dim_v, c->odd, 1.0);
    r->o = make(c->dtype_out, batch, c->heads_q, nq, c->dim_v, c->odd, 1.0);
    r->lse = make(ATTN_F32, batch, c->heads_q, nq, 1, c->odd, 1.0);
    r->delta = make(ATTN_F32, batch, c->heads_q, nq, 1, c->odd, 1.0);
    r->dq = make(c->dtype_out, batch, c->heads_q, nq, c->dim_qk, c->odd, 1.0);
    r->dk = make(c->dtype_out, batch, c->heads_kv, nkv, c->dim_qk, c->odd, 1.0);
    r->dv = make(c->dtype_out, batch, c->heads_kv, nkv, c->dim_v, c->odd, 1.0);
    if (c->spoiled) {
        spoil(r);
    }
    if (!c->merge) {
        poison(&r->o), poison(&r->lse);
    }
    if (!c->accumulate) {
        poison(&r->dq), poison(&r->dk), poison(&r->dv);
    }
    r->call = (attn__cuda_call){
        .dtype = c->dtype, .dtype_out = c->dtype_out, .batch = c->batch, .heads_q = c->heads_q,
        .heads_kv = c->heads_kv, .tokens_q = c->queries, .tokens_kv = c->keys, .dim_qk = c->dim_qk, .dim_v = c->dim_v,
        .scale = (float)(1.0 / sqrt((double)c->dim_qk)), .left = c->left, .right = c->right, .shifted = c->shifted,
        .shift = c->shift, .cu_q = (void *)(uintptr_t)r->cu[0], .cu_kv = (void *)(uintptr_t)r->cu[1],
        .total_q = batch * nq, .total_kv = batch * nkv, .sms = c->sms, .deterministic = true, .merge = c->merge,
        .accumulate = c->accumulate, .q = tensor_of(&r->q), .k = tensor_of(&r->k), .v = tensor_of(&r->v),
        .o = tensor_of(&r->o), .lse = tensor_of(&r->lse), .dout = tensor_of(&r->dout)};
    to_device(&r->q), to_device(&r->k), to_device(&r->v), to_device(&r->dout), to_device(&r->delta);
    to_device(&r->o), to_device(&r->lse);
}

static void close_run(bench_run *r)
{
    drop(&r->q), drop(&r->k), drop(&r->v), drop(&r->dout), drop(&r->o), drop(&r->lse), drop(&r->delta);
    drop(&r->dq), drop(&r->dk), drop(&r->dv);
    attn__free(r->cu_q), attn__free(r->cu_kv);
    for (int i = 0; i < 2 && r->cu_q != NULL; i++) {
        CUDA(attn__cuda.memory_free(r->cu[i]));
    }
    if (r->workspace_bytes > 0) {
        CUDA(attn__cuda.memory_free(r->workspace));
    }
}

static const attn__cuda_device *device;
static const attn__cuda_kernel *kernel;

static void run(bench_run *r, bool backward)
{
    const size_t bytes = backward ? kernel->backward_workspace(&r->call, device)
                                  : kernel->forward_workspace(&r->call, device);
    if (bytes > r->workspace_bytes) {
        if (r->workspace_bytes > 0) {
            CUDA(attn__cuda.memory_free(r->workspace));
        }
        CUDA(attn__cuda.memory_alloc(&r->workspace, bytes));
        CUDA(attn__cuda.copy_to_device(r->workspace, r->q.copy, bytes < r->q.bytes ? bytes : r->q.bytes, NULL));
        r->workspace_bytes = bytes;
    }
    void *workspace = (void *)(uintptr_t)r->workspace;
    fail(backward ? kernel->backward(&r->call, device, workspace, NULL)
                  : kernel->forward(&r->call, device, workspace, NULL));
}

/* From the forward that has run: its o and lse are inputs now, as they are. */
static void prepare_backward(bench_run *r)
{
    memcpy(r->o.copy, r->o.host, r->o.bytes), memcpy(r->lse.copy, r->lse.host, r->lse.bytes);
    r->call.merge = false;
    r->call.delta = r->c.options & GIVE_DELTA ? tensor_of(&r->delta) : (attn__cuda_tensor){NULL, 0, 0, 0};
    r->call.dq = r->c.options & NO_DQ ? r->call.dq : tensor_of(&r->dq);
    r->call.dk = r->c.options & NO_DK ? r->call.dk : tensor_of(&r->dk);
    r->call.dv = r->c.options & NO_DV ? r->call.dv : tensor_of(&r->dv);
    to_device(&r->dq), to_device(&r->dk), to_device(&r->dv);
}

static uint64_t gradient_bits(bench_run *r)
{
    to_host(&r->dq), to_host(&r->dk), to_host(&r->dv);
    uint64_t hash = attn__hash(0, r->dq.host, r->dq.bytes);
    hash = attn__hash(hash, r->dk.host, r->dk.bytes);
    return attn__hash(hash, r->dv.host, r->dv.bytes);
}

static void check_case(const bench_case *c, bool forward, bool backward)
{
    static const double half[] = {4e-6, 6e-4, 5e-3};
    bench_run r;
    open_run(&r, c);
    printf("%-26s", c->name);
    if (kernel->rejects(&r.call, false) != NULL) {
        printf(" %s\n", kernel->rejects(&r.call, false));
        close_run(&r);
        return;
    }
    run(&r, false);
    to_host(&r.o), to_host(&r.lse);
    if (forward) {
        check_forward(&r, half[c->dtype_out]);
    }
    if (backward && kernel->rejects(&r.call, true) == NULL && kernel->backward != NULL) {
        prepare_backward(&r);
        run(&r, true);
        const uint64_t bits = gradient_bits(&r);
        check_queries(&r, 2.0 * half[c->dtype_out]), check_keys(&r, 2.0 * half[c->dtype_out]);
        for (int again = 0; again < 3; again++) {
            to_device(&r.dq), to_device(&r.dk), to_device(&r.dv);
            run(&r, true);
            if (gradient_bits(&r) != bits) {
                printf(" OTHER BITS"), wrong_cases++;
            }
        }
    }
    printf("\n");
    fflush(stdout);
    close_run(&r);
}

/* ---- time ---- */

static int by_size(const void *a, const void *b)
{
    return *(const float *)a < *(const float *)b ? -1 : *(const float *)a > *(const float *)b;
}

static double seconds_of(bench_run *r, bool backward)
{
    enum { BATCHES = 5 };
    CUevent begin, end;
    float ms[BATCHES], one;
    CUDA(attn__cuda.event_create(&begin, 0)), CUDA(attn__cuda.event_create(&end, 0));
    run(r, backward);
    CUDA(attn__cuda.event_record(begin, NULL));
    run(r, backward);
    CUDA(attn__cuda.event_record(end, NULL)), CUDA(attn__cuda.event_wait(end));
    CUDA(attn__cuda.event_time(&one, begin, end));
    const int launches = one > 30.0f ? 2 : one < 1.0f ? 30 : (int)(30.0f / one) + 2;
    for (int i = 0; i < BATCHES; i++) {
        CUDA(attn__cuda.event_record(begin, NULL));
        for (int n = 0; n < launches; n++) {
            run(r, backward);
        }
        CUDA(attn__cuda.event_record(end, NULL)), CUDA(attn__cuda.event_wait(end));
        CUDA(attn__cuda.event_time(&ms[i], begin, end));
    }
    CUDA(attn__cuda.event_destroy(begin)), CUDA(attn__cuda.event_destroy(end));
    qsort(ms, BATCHES, sizeof ms[0], by_size);
    return (double)ms[BATCHES / 2] / launches * 1e-3;
}

static void time_case(const bench_case *c, bool forward, bool backward)
{
    bench_run r;
    open_run(&r, c);
    if (kernel->rejects(&r.call, false) != NULL) {
        close_run(&r);
        return;
    }
    const double flops = 4.0 * (double)(c->heads_q * c->queries * c->keys * c->dim_qk) * (c->right == 0 ? 0.5 : 1.0);
    printf("%2lld heads, n %5lld, d %3lld, %s:", (long long)c->heads_q, (long long)c->queries, (long long)c->dim_qk,
           c->right == 0 ? "causal" : "full  ");
    fflush(stdout);
    double seconds = forward ? seconds_of(&r, false) : 1.0;
    run(&r, false);
    to_host(&r.o), to_host(&r.lse);
    if (forward) {
        printf(" forward %8.3f ms %6.1f TFLOP/s", seconds * 1e3, flops / seconds * 1e-12);
        check_forward(&r, 4e-6);
    }
    if (backward && kernel->rejects(&r.call, true) == NULL && kernel->backward != NULL) {
        prepare_backward(&r);
        seconds = seconds_of(&r, true);
        to_host(&r.dq);
        printf(" | backward %8.3f ms %6.1f TFLOP/s", seconds * 1e3, 2.5 * flops / seconds * 1e-12);
        check_queries(&r, 8e-6);
    }
    printf("\n");
    fflush(stdout);
    close_run(&r);
}

int main(int argc, char **argv)
{
    bool forward = true, backward = true, quick = false;
    const char *name = "fma-sm90";
    for (int i = 2; i < argc; i++) {
        backward = backward && strcmp(argv[i], "--forward") != 0;
        forward = forward && strcmp(argv[i], "--backward") != 0;
        quick = quick || strcmp(argv[i], "--quick") == 0;
        name = strcmp(argv[i], "--kernel") == 0 && i + 1 < argc ? argv[i + 1] : name;
    }
    fail(attn__cuda_open(&device, 0));
    fail(attn__cuda_enter(device));
    for (int i = 0; attn__cuda_kernels[i] != NULL; i++) {
        kernel = strcmp(attn__cuda_kernels[i]->name, name) == 0 ? attn__cuda_kernels[i] : kernel;
    }
    if (argc < 2 || kernel == NULL) {
        fprintf(stderr, "usage: kernel_cuda_f32 check|time [--kernel NAME] [--forward | --backward] [--quick]\n");
        return 2;
    }
    const bool check = strcmp(argv[1], "check") == 0;
    const size_t count = check ? sizeof checks / sizeof checks[0] : quick ? 4 : sizeof times / sizeof times[0];
    printf("%s on %s\n", kernel->name, device->name);
    for (size_t i = 0; i < count; i++) {
        if (!check) {
            time_case(&times[i], forward, backward);
        } else {
            check_case(&checks[i], forward, backward);
        }
    }
    printf("%d wrong\n", wrong_cases);
    return wrong_cases > 0;
}
