/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda.c - the forward rows of the CUDA table alone: right, and how fast.
 *
 *     kernel_cuda [--kernel NAME] check          small shapes, every row against fp64
 *     kernel_cuda [--kernel NAME] time [DIM]     16384 tokens, heads x dim = 2048, TFLOP/s
 *
 * METHOD.  Inputs are random, outputs are poisoned with NaN before each run.  Errors are max |o - ref| / max
 * |ref| over the rows that see a key.  Times are by events around ROUNDS batches of launches after a warm-up,
 * the median of them. FLOPs = 4 b h n^2 d, half if causal.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn/cuda.h"
#include "kernel/cuda/cuda.h"

typedef struct shape {
    attn_dtype dtype, out;
    int64_t batch, heads_q, heads_kv, nq, nkv, dim_qk, dim_v;
    int64_t left, right; /* -1: unbounded */
    bool bnhd, ragged, merge;
    int sms;
    float scale; /* 0: the usual one */
    bool nan;    /* some keys and values are none */
} shape;

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != ATTN_OK) {                                                                             \
            fprintf(stderr, "%s: %s\n", #call, attn_last_error());                                           \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static const attn__cuda_device *device;
static const char *kernel_name;

static uint64_t seed = 88172645463325252u;

/* About normal: four uniform numbers, of variance 1 / 12 each. */
/* About normal, of mean 0 and variance 1: a sum of four numbers of 16 bits. */
static float normal(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    const int64_t sum =
        (int64_t)((seed & 0xffff) + (seed >> 16 & 0xffff) + (seed >> 32 & 0xffff) + (seed >> 48));
    return (float)(sum - 131070) * (1.7320508f / 65536);
}

/* A host array, what the device sees of it rounded, and the device's copy. */
typedef struct array {
    float *seen;
    void *raw, *there;
    int64_t count;
    attn_dtype dtype;
} array;

static array make(int64_t count, attn_dtype dtype, bool random)
{
    const size_t element = attn_dtype_size(dtype);
    array a = {.count = count, .dtype = dtype};
    a.seen = malloc((size_t)count * sizeof *a.seen);
    a.raw = malloc((size_t)count * element);
    if (random) {
        for (int64_t i = 0; i < count; i++) {
            a.seen[i] = normal();
        }
        attn_from_f32(a.raw, dtype, 1, a.seen, count);
        attn_to_f32(a.seen, a.raw, dtype, 1, count);
    } else {
        memset(a.raw, 0xff, (size_t)count * element);
    }
    OK(attn_cuda_alloc(0, &a.there, (size_t)count * element + 256));
    OK(attn_cuda_copy(0, a.there, a.raw, (size_t)count * element, NULL));
    return a;
}

static void spoil(array *a, int64_t at)
{
    const size_t element = attn_dtype_size(a->dtype);
    a->seen[at] = NAN;
    attn_from_f32((char *)a->raw + (size_t)at * element, a->dtype, 1, &a->seen[at], 1);
    OK(attn_cuda_copy(0, a->there, a->raw, (size_t)a->count * element, NULL));
}

static void fetch(array *a)
{
    OK(attn_cuda_copy(0, a->raw, a->there, (size_t)a->count * attn_dtype_size(a->dtype), NULL));
    OK(attn_cuda_wait(0, NULL));
    attn_to_f32(a->seen, a->raw, a->dtype, 1, a->count);
}

static void drop(array *a)
{
    free(a->seen);
    free(a->raw);
    attn_cuda_free(0, a->there);
}

static attn__cuda_tensor tensor(const array *a, const shape *s, int64_t heads, int64_t tokens, int64_t dim)
{
    attn__cuda_tensor t = {a->there, heads * tokens * dim, tokens * dim, dim};
    if (s->bnhd) {
        t.head = dim, t.token = heads * dim;
    }
    if (s->ragged) {
        t.batch = 0;
    }
    return t;
}

typedef struct problem {
    shape s;
    array q, k, v, o, lse;
    attn__cuda_call call;
    int64_t cu[2][65];
    void *cu_there[2], *workspace;
    const attn__cuda_kernel *kernel;
} problem;

static void set_lengths(problem *p)
{
    shape *s = &p->s;
    for (int x = 0; x < 2; x++) {
        const int64_t most = x == 0 ? s->nq : s->nkv;
        p->cu[x][0] = 0;
        for (int64_t b = 0; b < s->batch; b++) {
            const int64_t length = b == 1 ? 0 : b == 0 ? most : (b * 7919 + x * 31) % (most + 1);
            p->cu[x][b + 1] = p->cu[x][b] + length;
        }
        OK(attn_cuda_alloc(0, &p->cu_there[x], sizeof p->cu[x]));
        OK(attn_cuda_copy(0, p->cu_there[x], p->cu[x], sizeof p->cu[x], NULL));
    }
}

static bool open_problem(problem *p, const shape *from)
{
    *p = (problem){.s = *from};
    const shape *s = &p->s;
    int64_t nq = s->nq, nkv = s->nkv, batch = s->batch;
    if (s->ragged) {
        set_lengths(p);
        nq = p->cu[0][batch], nkv = p->cu[1][batch], batch = 1;
    }
    p->q = make(batch * s->heads_q * nq * s->dim_qk, s->dtype, true);
    p->k = make(batch * s->heads_kv * nkv * s->dim_qk, s->dtype, true);
    p->v = make(batch * s->heads_kv * nkv * s->dim_v, s->dtype, true);
    for (int64_t i = 0; i < 3 && s->nan; i++) {
        spoil(&p->v, p->v.count * (2 * i + 1) / 7);
    }
    p->o = make(batch * s->heads_q * nq * s->dim_v, s->out, s->merge);
    p->lse = make(batch * s->heads_q * nq, ATTN_F32, s->merge);
    p->call = (attn__cuda_call){
        .dtype = s->dtype,
        .dtype_out = s->out,
        .batch = s->batch,
        .heads_q = s->heads_q,
        .heads_kv = s->heads_kv,
        .tokens_q = s->nq,
        .tokens_kv = s->nkv,
        .total_q = nq * batch,
        .total_kv = nkv * batch,
        .dim_qk = s->dim_qk,
        .dim_v = s->dim_v,
        .scale = s->scale != 0 ? s->scale : 1 / sqrtf((float)s->dim_qk),
        .left = s->left < 0 ? attn__unbounded : s->left,
        .right = s->right < 0 ? attn__unbounded : s->right,
        .cu_q = p->cu_there[0],
        .cu_kv = p->cu_there[1],
        .sms = s->sms,
        .merge = s->merge,
        .q = tensor(&p->q, s, s->heads_q, nq, s->dim_qk),
        .k = tensor(&p->k, s, s->heads_kv, nkv, s->dim_qk),
        .v = tensor(&p->v, s, s->heads_kv, nkv, s->dim_v),
        .o = tensor(&p->o, s, s->heads_q, nq, s->dim_v),
        .lse = {p->lse.there, s->ragged ? 0 : s->heads_q * nq, nq, 1},
    };
    if (attn__cuda_choose(&p->kernel, &p->call, false, kernel_name) != ATTN_OK) {
        printf("%s\n", attn_last_error());
        return false;
    }
    OK(attn_cuda_alloc(0, &p->workspace, p->kernel->forward_workspace(&p->call, device) + 256));
    return true;
}

static void close_problem(problem *p)
{
    drop(&p->q), drop(&p->k), drop(&p->v), drop(&p->o), drop(&p->lse);
    attn_cuda_free(0, p->cu_there[0]);
    attn_cuda_free(0, p->cu_there[1]);
    attn_cuda_free(0, p->workspace);
}

/* ---- check ---- */

static const float *row_of(const array *a, const attn__cuda_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return a->seen + b * t->batch + h * t->head + i * t->token;
}

/* o and lse of one row in fp64; returns lse. */
static double reference(const problem *p, int64_t b, int64_t h, int64_t i, int64_t nq, int64_t nkv, double *o)
{
    const attn__cuda_call *c = &p->call;
    const int64_t kv = h / (c->heads_q / c->heads_kv), shift = nkv - nq;
    const int64_t first_q = c->cu_q != NULL ? p->cu[0][b] : 0, first_kv = c->cu_q != NULL ? p->cu[1][b] : 0;
    const float *q = row_of(&p->q, &c->q, b, h, first_q + i);
    double *s = malloc((size_t)(nkv + 1) * sizeof *s), most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < nkv; j++) {
        const bool seen =
            (p->s.left < 0 || j >= i + shift - p->s.left) && (p->s.right < 0 || j <= i + shift + p->s.right);
        const float *k = row_of(&p->k, &c->k, b, kv, first_kv + j);
        s[j] = seen ? 0 : -INFINITY;
        for (int64_t x = 0; x < c->dim_qk && seen; x++) {
            s[j] += (double)q[x] * k[x] * c->scale;
        }
        most = fmax(most, s[j]);
    }
    memset(o, 0, (size_t)c->dim_v * sizeof *o);
    for (int64_t j = 0; j < nkv; j++) {
        if (s[j] == -INFINITY) {
            continue;
        }
        const double w = exp(s[j] - most);
        const float *v = row_of(&p->v, &c->v, b, kv, first_kv + j);
        sum += w;
        for (int64_t x = 0; x < c->dim_v; x++) {
            o[x] += w * v[x];
        }
    }
    for (int64_t x = 0; x < c->dim_v && sum > 0; x++) {
        o[x] /= sum;
    }
    free(s);
    return sum > 0 ? most + log(sum) : -INFINITY;
}

/* What a check has found so far. */
typedef struct finding {
    double worst, worst_lse, most, got, want;
    int64_t wrong, rows, at[4]; /* of the worst: batch, head, row, column */
} finding;

/* Folds the partial (old, old_lse) into the reference of a row, as a merge does; returns the lse. */
static double merged(double *o, double lse, const float *old, double old_lse, int64_t dim)
{
    const double most = fmax(old_lse, lse), both = most + log(exp(old_lse - most) + exp(lse - most));
    for (int64_t x = 0; x < dim; x++) {
        o[x] = o[x] * exp(lse - both) + old[x] * exp(old_lse - both);
    }
    return both;
}

/* One row of head (b, h) against its reference, o and lse. */
static void judge(finding *f, const problem *p, const double *o, double lse, int64_t b, int64_t h,
                  int64_t row, int64_t token)
{
    const float *seen = row_of(&p->o, &p->call.o, b, h, token);
    const float seen_lse = p->lse.seen[b * p->call.lse.batch + h * p->call.lse.head + token];
    const double error = lse == -INFINITY ? (seen_lse == -INFINITY ? 0 : 1e9) : fabs(seen_lse - lse);
    f->worst_lse = error <= f->worst_lse ? f->worst_lse : error;
    f->rows++;
    for (int64_t x = 0; x < p->s.dim_v; x++) {
        const double e = isnan(o[x]) && isnan(seen[x]) ? 0 : fabs(seen[x] - o[x]);
        f->most = fmax(f->most, fabs(o[x]));
        f->wrong += !(e < 0.02);
        if (!(e <= f->worst)) {
            f->worst = e, f->got = seen[x], f->want = o[x];
            f->at[0] = b, f->at[1] = h, f->at[2] = row, f->at[3] = x;
        }
    }
}

/* old: what o and lse held before, if merged. */
static void judge_all(finding *f, const problem *p, const array *old_o, const array *old_lse)
{
    const shape *s = &p->s;
    double o[512];
    for (int64_t b = 0; b < s->batch; b++) {
        const int64_t first = s->ragged ? p->cu[0][b] : 0;
        const int64_t nq = s->ragged ? p->cu[0][b + 1] - first : s->nq;
        const int64_t nkv = s->ragged ? p->cu[1][b + 1] - p->cu[1][b] : s->nkv;
        for (int64_t h = 0; h < s->heads_q; h++) {
            for (int64_t i = 0; i<nq; i += nq * s->heads_q * s->batch> 3000 ? 7 : 1) {
                double lse = reference(p, b, h, i, nq, nkv, o);
                if (s->merge) {
                    const int64_t at = b * p->call.lse.batch + h * p->call.lse.head + first + i;
                    lse = merged(o, lse, row_of(old_o, &p->call.o, b, h, first + i), old_lse->seen[at],
                                 s->dim_v);
                }
                judge(f, p, o, lse, b, h, i, first + i);
            }
        }
    }
}

static void print_shape(const shape *s)
{
    printf("%s>%s b%lld h%lld/%lld n%lld/%lld d%lld/%lld l%lld r%lld%s%s%s%s: ", attn_dtype_name(s->dtype),
           attn_dtype_name(s->out), (long long)s->batch, (long long)s->heads_q, (long long)s->heads_kv,
           (long long)s->nq, (long long)s->nkv, (long long)s->dim_qk, (long long)s->dim_v, (long long)s->left,
           (long long)s->right, s->bnhd ? " bnhd" : "", s->ragged ? " ragged" : "", s->merge ? " merge" : "",
           s->scale < 0 ? " negative" : "");
    fflush(stdout);
}

static array copy_of(const array *a)
{
    array copy = *a;
    copy.seen = malloc((size_t)a->count * sizeof(float));
    memcpy(copy.seen, a->seen, (size_t)a->count * sizeof(float));
    return copy;
}

static bool check(const shape *s)
{
    problem p;
    print_shape(s);
    if (!open_problem(&p, s)) {
        return false;
    }
    array old_o = copy_of(&p.o), old_lse = copy_of(&p.lse);
    OK(p.kernel->forward(&p.call, device, p.workspace, NULL));
    OK(attn_cuda_wait(0, NULL));
    fetch(&p.o);
    fetch(&p.lse);
    finding f = {.most = 1e-9};
    judge_all(&f, &p, &old_o, &old_lse);
    const bool right = f.wrong == 0 && f.worst_lse < 1e-4;
    printf("o %.1e lse %.1e of %lld rows %s\n", f.worst / f.most, f.worst_lse, (long long)f.rows,
           right ? "right" : "WRONG");
    if (!right) {
        printf("    %lld wrong; worst at b %lld h %lld row %lld col %lld: got %g want %g\n",
               (long long)f.wrong, (long long)f.at[0], (long long)f.at[1], (long long)f.at[2],
               (long long)f.at[3], f.got, f.want);
    }
    free(old_o.seen);
    free(old_lse.seen);
    close_problem(&p);
    return right;
}

static int check_all(void)
{
    const attn_dtype h = ATTN_BF16, f = ATTN_F16, w = ATTN_F32;
    const shape shapes[] = {
        {h, h, 1, 1, 1, 128, 128, 128, 128, -1, -1, 0, 0, 0, 0, 0, 0},
        {h, h, 1, 1, 1, 64, 512, 128, 128, -1, -1, 0, 0, 0, 0, 0, 0},
        {h, w, 2, 3, 3, 517, 391, 128, 128, -1, -1, 1, 0, 0, 0, 0, 0},
        {h, h, 2, 4, 2, 517, 391, 128, 128, -1, 0, 1, 0, 0, 0, 0, 0},
        {h, h, 2, 4, 2, 391, 517, 128, 128, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 4, 2, 391, 517, 128, 128, 100, 30, 0, 0, 0, 0, 0, 0},
        {h, h, 1, 2, 2, 192, 128, 64, 64, -1, -1, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 4, 1, 517, 391, 64, 64, -1, -1, 1, 0, 0, 0, 0, 0},
        {f, f, 2, 4, 1, 517, 391, 64, 64, -1, 0, 1, 0, 0, 0, 0, 0},
        {f, w, 2, 4, 1, 300, 991, 64, 64, 77, 3, 1, 0, 0, 0, 0, 0},
        {h, h, 1, 2, 2, 128, 160, 256, 256, -1, -1, 0, 0, 0, 0, 0, 0},
        {h, w, 1, 2, 2, 317, 460, 256, 256, -1, 0, 0, 0, 0, 0, 0, 0},
        {f, f, 1, 2, 2, 460, 317, 256, 256, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 2, 2, 200, 300, 96, 72, -1, 0, 0, 0, 0, 0, 0, 0},
        {f, w, 2, 2, 2, 200, 300, 40, 64, -1, -1, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 2, 2, 200, 300, 192, 128, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, w, 5, 4, 2, 400, 300, 128, 128, -1, 0, 1, 1, 0, 0, 0, 0},
        {f, f, 5, 4, 2, 300, 500, 64, 64, -1, -1, 0, 1, 0, 0, 0, 0},
        {h, h, 5, 4, 2, 300, 500, 256, 256, 100, 0, 0, 1, 0, 0, 0, 0},
        {h, h, 5, 4, 2, 400, 300, 64, 64, -1, 0, 1, 1, 0, 7, 0, 0},     /* tiles taken by who has time */
        {h, h, 1, 2, 1, 150, 16500, 128, 128, -1, 9, 1, 0, 0, 0, 0, 0}, /* many keys: larger steps */
        {f, f, 1, 2, 1, 150, 16499, 128, 128, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 2, 1, 500, 2100, 64, 64, -1, -1, 1, 0, 0, 0, 0, 0},
        {f, f, 2, 2, 1, 500, 2049, 64, 64, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 1, 4, 4, 2500, 100, 64, 64, -1, 0, 0, 0, 0, 1, 0, 0}, /* many tiles in turn without a key */
        {h, w, 1, 4, 4, 1200, 100, 128, 128, -1, 0, 0, 0, 0, 1, 0, 0},
        {h, w, 2, 2, 2, 300, 400, 128, 128, -1, 0, 0, 0, 1, 0, 0, 0},
        {f, w, 2, 2, 2, 300, 200, 64, 64, -1, 0, 0, 0, 1, 0, 0, 0},
        {h, h, 2, 2, 2, 300, 400, 128, 128, -1, -1, 0, 0, 0, 3, -0.1f, 0},
        /* the first maximum is soon outgrown */
        {h, h, 1, 2, 2, 200, 1500, 128, 128, -1, 0, 0, 0, 0, 0, 2.0F, 0},
        {f, f, 1, 2, 2, 100, 16384, 128, 128, -1, -1, 0, 0, 0, 0, 2.0F, 0},
        {f, f, 2, 2, 1, 300, 1500, 64, 64, -1, 0, 0, 0, 0, 0, 2.0F, 0},
        {h, w, 1, 2, 1, 300, 1500, 256, 256, -1, -1, 0, 0, 0, 0, 2.0F, 0},
        {h, h, 1, 1, 1, 1, 1, 128, 128, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 1, 1, 1, 1, 1000, 64, 64, -1, 0, 0, 0, 0, 0, 0, 0},
        {h, h, 2, 2, 1, 500, 500, 128, 128, -1, 0, 0, 0, 0, 0, 0, true},
        {h, w, 2, 2, 1, 500, 700, 64, 64, 100, 0, 1, 0, 0, 0, 0, true},
        {f, f, 4, 2, 1, 300, 400, 256, 256, -1, 20, 0, 1, 0, 0, 0, true},
        {h, h, 1, 30, 30, 1100, 1000, 128, 128, -1, 0, 0, 0, 0, 7, 0, 0},
        {h, h, 1, 30, 30, 1100, 1000, 64, 64, -1, -1, 0, 0, 0, 0, 0, 0},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        bad += !check(&shapes[i]);
    }
    printf("%d of %zu wrong\n", bad, sizeof shapes / sizeof *shapes);
    return bad > 0;
}

/* ---- time ---- */

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(problem *p)
{
    enum { ROUNDS = 7 };
    double samples[ROUNDS];
    void *begin, *end;
    OK(attn_cuda_event_create(0, &begin));
    OK(attn_cuda_event_create(0, &end));
    int launches = 3;
    for (int i = -1; i < ROUNDS; i++) {
        OK(attn_cuda_event_record(0, begin, NULL));
        for (int j = 0; j < launches; j++) {
            OK(p->kernel->forward(&p->call, device, p->workspace, NULL));
        }
        OK(attn_cuda_event_record(0, end, NULL));
        double seconds;
        OK(attn_cuda_event_elapsed(0, begin, end, &seconds));
        if (i < 0) {
            const double one = seconds / launches;
            launches = one > 0.003 ? 5 : (int)(0.015 / one);
        } else {
            samples[i] = seconds / launches;
        }
    }
    qsort(samples, ROUNDS, sizeof *samples, compare);
    attn_cuda_event_destroy(0, begin);
    attn_cuda_event_destroy(0, end);
    return samples[ROUNDS / 2];
}

static void time_dim(int64_t dim)
{
    for (int causal = 0; causal < 2; causal++) {
        printf("bf16 d %lld %s, TFLOP/s at 512 .. 16384:", (long long)dim, causal ? "causal" : "full  ");
        for (int64_t n = 512; n <= 16384; n *= 2) {
            const shape s = {.dtype = ATTN_BF16,
                             .out = ATTN_BF16,
                             .batch = 16384 / n,
                             .heads_q = 2048 / dim,
                             .heads_kv = 2048 / dim,
                             .nq = n,
                             .nkv = n,
                             .dim_qk = dim,
                             .dim_v = dim,
                             .left = -1,
                             .right = causal ? 0 : -1,
                             .bnhd = true};
            problem p;
            if (!open_problem(&p, &s)) {
                exit(1);
            }
            const double flops = 4.0 * 16384 * (double)n * 2048 / (causal ? 2 : 1);
            printf(" %4.0f", flops / median_of(&p) * 1e-12);
            fflush(stdout);
            close_problem(&p);
        }
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    int at = 1;
    OK(attn__cuda_open(&device, 0));
    if (at + 1 < argc && strcmp(argv[at], "--kernel") == 0) {
        kernel_name = argv[at + 1];
        at += 2;
    }
    if (at < argc && strcmp(argv[at], "check") == 0) {
        return check_all();
    }
    if (at < argc && strcmp(argv[at], "time") == 0) {
        for (int64_t dim = 64; dim <= 256; dim *= 2) {
            if (at + 1 >= argc || atoi(argv[at + 1]) == dim) {
                time_dim(dim);
            }
        }
        return 0;
    }
    fprintf(stderr, "usage: kernel_cuda [--kernel NAME] check | time [DIM]\n");
    return 2;
}
