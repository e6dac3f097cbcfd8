/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_few_check.c - is the CUDA kernel for few queries against many keys right?
 *
 *     kernel_cuda_few_check [FIRST [COUNT]]     random problems, numbered from FIRST
 *
 * Random shapes, masks, layouts, lengths; some keys and values are NaN or infinite, some scores rise or fall
 * from key to key, the tensors are filled with NaN where no sequence is, outputs and workspace are poisoned.
 * Rows are compared with fp64, at most SAMPLE of a problem, under tests/check.h's tolerances; a second run
 * must give the same bits.
 */
#include <string.h>

#include "kernel/cuda/few_cut.h"
#include "kernel_cuda_few.h"

enum { SAMPLE = 192 };

static int64_t between(uint64_t *state, int64_t least, int64_t most)
{
    return least + (int64_t)(next_random(state) % (uint64_t)(most - least + 1));
}

static int64_t one_of(uint64_t *state, const int64_t *list, int64_t count)
{
    return list[between(state, 0, count - 1)];
}
#define ONE_OF(state, ...)                                                                                   \
    one_of(state, (const int64_t[]){__VA_ARGS__},                                                            \
           (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static double widen(attn_dtype dtype, const void *data, int64_t at)
{
    if (dtype == ATTN_F32) {
        return (double)((const float *)data)[at];
    }
    uint16_t half = ((const uint16_t *)data)[at];
    return (double)(dtype == ATTN_F16 ? attn__f16_to_f32(half) : attn__bf16_to_f32(half));
}

/* ---- problems ---- */

/* A tensor on the host and its copy on the device. */
typedef struct twin {
    attn__cuda_tensor strides; /* data: on the device */
    void *host;
    size_t bytes;
} twin;

typedef struct check_case {
    attn__cuda_call call;
    twin q, k, v, o, lse;
    int64_t *cu_q, *cu_kv; /* on the host; NULL: all of one length */
    int64_t number;
} check_case;

/* [batch, heads, tokens, dim], or with the tokens outside of the heads; sometimes with room between. */
static void open_twin(twin *t, int64_t batch, int64_t heads, int64_t tokens, int64_t dim, size_t size,
                      uint64_t *seed)
{
    int64_t row = dim + 8 * ONE_OF(seed, 0, 0, 1, 3);
    bool outside = between(seed, 0, 1) == 1;
    t->strides.token = outside ? row * heads : row;
    t->strides.head = outside ? row : row * attn__max(tokens, 1);
    t->strides.batch = row * heads * attn__max(tokens, 1);
    t->bytes = (size_t)(batch * t->strides.batch) * size;
    t->host = malloc(t->bytes + 16);
    t->strides.data = device_memory(t->bytes);
    memset(t->host, 0xff, t->bytes);
}

static void close_twin(twin *t)
{
    free(t->host);
    attn_cuda_free(0, t->strides.data);
}

static int64_t place(const twin *t, int64_t b, int64_t head, int64_t token)
{
    return b * t->strides.batch + head * t->strides.head + token * t->strides.token;
}

static void put(const check_case *c, twin *t, int64_t at, float x)
{
    attn_from_f32((uint16_t *)t->host + at, c->call.dtype, 1, &x, 1);
}

static int64_t first_of(const int64_t *cu, int64_t b)
{
    return cu != NULL ? cu[b] : 0;
}

static int64_t length_of(const int64_t *cu, int64_t b, int64_t tokens)
{
    return cu != NULL ? cu[b + 1] - cu[b] : tokens;
}

/* Normal numbers for the tokens of sequences; `odd` rows are NaN or infinite in places. */
static void fill_twin(check_case *c, twin *t, int64_t heads, const int64_t *cu, int64_t tokens, int64_t dim,
                      int odd, uint64_t *seed)
{
    for (int64_t b = 0; b < c->call.batch; b++) {
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = first_of(cu, b); i < first_of(cu, b) + length_of(cu, b, tokens); i++) {
                int64_t at = place(t, cu != NULL ? 0 : b, h, i);
                for (int64_t d = 0; d < dim; d++) {
                    put(c, t, at + d, normal(seed));
                }
                if (odd > 0 && between(seed, 0, odd) == 0) {
                    put(c, t, at + between(seed, 0, dim - 1), between(seed, 0, 1) ? NAN : INFINITY);
                }
            }
        }
    }
    must(attn_cuda_copy(0, t->strides.data, t->host, t->bytes, NULL));
    must(attn_cuda_wait(0, NULL));
}

/* The first dim of token i of each sequence becomes start + slope * i / tokens. */
static void set_first_dim(check_case *c, twin *t, int64_t heads, const int64_t *cu, int64_t tokens,
                          double start, double slope)
{
    for (int64_t b = 0; b < c->call.batch; b++) {
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < length_of(cu, b, tokens); i++) {
                const double x = start + slope * (double)i / (double)tokens;
                put(c, t, place(t, cu != NULL ? 0 : b, h, first_of(cu, b) + i), (float)x);
            }
        }
    }
    must(attn_cuda_copy(0, t->strides.data, t->host, t->bytes, NULL));
    must(attn_cuda_wait(0, NULL));
}

/* Scores rise from key to key, by `slope` in all over the longest sequence. */
static void add_slope(check_case *c, double slope)
{
    const attn__cuda_call *a = &c->call;
    set_first_dim(c, &c->q, a->heads_q, c->cu_q, a->tokens_q, 1 / (double)a->scale, 0);
    set_first_dim(c, &c->k, a->heads_kv, c->cu_kv, a->tokens_kv, 0, slope);
}

static int64_t *lengths(int64_t batch, int64_t tokens, uint64_t *seed, void **device)
{
    size_t bytes = (size_t)(batch + 1) * sizeof(int64_t);
    int64_t *cu = calloc(1, bytes);
    for (int64_t b = 0; b < batch; b++) {
        cu[b + 1] = cu[b] + (between(seed, 0, 4) == 0 ? 0 : between(seed, 0, tokens));
    }
    *device = device_memory(bytes);
    must(attn_cuda_copy(0, *device, cu, bytes, NULL));
    must(attn_cuda_wait(0, NULL));
    return cu;
}

static void choose_band(attn__cuda_call *a, uint64_t *seed)
{
    int64_t far = a->tokens_kv;
    a->left = a->right = attn__unbounded;
    switch (between(seed, 0, 4)) {
    case 0:
        a->right = 0;
        break;
    case 1:
        a->left = between(seed, 0, far);
        a->right = between(seed, 0, 9) - 2;
        break;
    case 2:
        a->shifted = true;
        a->shift = between(seed, -far / 4, far + far / 4);
        a->right = 0;
        break;
    default:
        break;
    }
}

/* One head, four multiprocessors, and as many keys as give each a long share. */
static void choose_long_shares(attn__cuda_call *a, uint64_t *seed)
{
    a->batch = a->heads_kv = 1;
    a->heads_q = ONE_OF(seed, 1, 3, 8);
    a->tokens_q = between(seed, 17, 64) / a->heads_q + 1;
    a->dim_qk = a->dim_v = ONE_OF(seed, 128, 256, 96, 200);
    a->sms = 4;
    a->tokens_kv = ((int64_t)4 << 20) / (a->dim_qk + a->dim_v) + between(seed, 0, 3000);
}

/* The tensors of a chosen case, filled. */
static void open_case(check_case *c, uint64_t *seed)
{
    attn__cuda_call *a = &c->call;
    bool varlen = c->cu_q != NULL;
    int64_t batch = varlen ? 1 : a->batch, nq = varlen ? a->total_q : a->tokens_q,
            nkv = varlen ? a->total_kv : a->tokens_kv;
    int odd = between(seed, 0, 3) == 0 ? 50 : 0;
    open_twin(&c->q, batch, a->heads_q, nq, a->dim_qk, 2, seed);
    open_twin(&c->k, batch, a->heads_kv, nkv, a->dim_qk, 2, seed);
    open_twin(&c->v, batch, a->heads_kv, nkv, a->dim_v, 2, seed);
    open_twin(&c->o, batch, a->heads_q, nq, a->dim_v, attn_dtype_size(a->dtype_out), seed);
    open_twin(&c->lse, batch, a->heads_q, nq, 1, 4, seed);
    if (varlen) {
        c->q.strides.batch = c->k.strides.batch = c->v.strides.batch = c->o.strides.batch =
            c->lse.strides.batch = 0;
    }
    fill_twin(c, &c->q, a->heads_q, c->cu_q, a->tokens_q, a->dim_qk, 0, seed);
    fill_twin(c, &c->k, a->heads_kv, c->cu_kv, a->tokens_kv, a->dim_qk, odd * 40, seed);
    fill_twin(c, &c->v, a->heads_kv, c->cu_kv, a->tokens_kv, a->dim_v, odd, seed);
    if (odd == 0 && between(seed, 0, 2) == 0) {
        add_slope(c, (double)ONE_OF(seed, 40, 200, 800, 3000, -200));
    }
    a->q = c->q.strides, a->k = c->k.strides, a->v = c->v.strides, a->o = c->o.strides,
    a->lse = c->lse.strides;
}

static void make_case(check_case *c, int64_t number)
{
    uint64_t seed = (uint64_t)number * 7919 + 1;
    attn__cuda_call *a = &c->call;
    *c = (check_case){.number = number};
    int64_t group = ONE_OF(&seed, 1, 1, 2, 4, 8, 5, 16);
    a->dtype = between(&seed, 0, 1) ? ATTN_BF16 : ATTN_F16;
    a->dtype_out = between(&seed, 0, 1) ? ATTN_F32 : a->dtype;
    a->heads_kv = between(&seed, 1, 4);
    a->heads_q = a->heads_kv * group;
    a->batch = ONE_OF(&seed, 1, 1, 2, 3, 7, 40);
    a->tokens_q = ONE_OF(&seed, 1, 1, 1, 2, 3, 8, 16, 33, 64);
    a->tokens_kv = between(&seed, 0, 3) ? between(&seed, 1, 700) : between(&seed, 1, 9000 / a->batch + 100);
    a->dim_qk = a->dim_v = ONE_OF(&seed, 64, 128, 256, 64, 128, 256, 8, 40, 72, 192);
    if (between(&seed, 0, 7) == 0) {
        a->dim_v = ONE_OF(&seed, 16, 64, 128, 136);
    }
    a->scale = (float)(ONE_OF(&seed, 1, 1, 1, 4, -1)) / sqrtf((float)a->dim_qk);
    a->sms = (int)ONE_OF(&seed, 0, 0, 0, 16, 1);
    a->merge = a->dtype_out == ATTN_F32 && between(&seed, 0, 3) == 0;
    choose_band(a, &seed);
    bool regular = between(&seed, 0, 4) == 0; /* such as are cut into pairs of blocks */
    if (regular) {
        a->batch = 1;
        a->sms = (int)ONE_OF(&seed, 0, 0, 4, 8, 16);
        a->tokens_kv = ONE_OF(&seed, 2048, 4096, 8192, 16384, 12345);
    }
    if (!regular && between(&seed, 0, 9) == 0) {
        choose_long_shares(a, &seed);
        regular = true;
    }
    a->total_q = a->batch * a->tokens_q;
    a->total_kv = a->batch * a->tokens_kv;
    if (!regular && between(&seed, 0, 2) == 0) {
        void *q, *kv;
        c->cu_q = lengths(a->batch, a->tokens_q, &seed, &q);
        c->cu_kv = lengths(a->batch, a->tokens_kv, &seed, &kv);
        a->cu_q = q;
        a->cu_kv = kv;
        a->total_q = attn__max(c->cu_q[a->batch], 1);
        a->total_kv = attn__max(c->cu_kv[a->batch], 1);
    }
    open_case(c, &seed);
}

static void close_case(check_case *c)
{
    twin *const twins[] = {&c->q, &c->k, &c->v, &c->o, &c->lse};
    for (size_t i = 0; i < sizeof twins / sizeof *twins; i++) {
        close_twin(twins[i]);
    }
    if (c->cu_q != NULL) {
        attn_cuda_free(0, (void *)(uintptr_t)c->call.cu_q);
        attn_cuda_free(0, (void *)(uintptr_t)c->call.cu_kv);
    }
    free(c->cu_q);
    free(c->cu_kv);
}

/* ---- the answer ---- */

typedef struct row_answer {
    double lse, most, value; /* most: the largest |score| and partial sum; value: the largest |v| */
    int64_t keys;
} row_answer;

/* One row in fp64; o[dim_v] */
static row_answer solve(const check_case *c, int64_t b, int64_t head, int64_t token, double *o)
{
    const attn__cuda_call *a = &c->call;
    int64_t n_q = length_of(c->cu_q, b, a->tokens_q), n_kv = length_of(c->cu_kv, b, a->tokens_kv);
    int64_t shift = a->shifted ? a->shift : n_kv - n_q, batch = c->cu_q != NULL ? 0 : b,
            kv = head / (a->heads_q / a->heads_kv);
    int64_t lo = a->left > INT32_MAX ? 0 : attn__max(token + shift - a->left, 0);
    int64_t hi = a->right > INT32_MAX ? n_kv : attn__min(token + shift + a->right + 1, n_kv);
    int64_t q = place(&c->q, batch, head, first_of(c->cu_q, b) + token), first = first_of(c->cu_kv, b);
    row_answer r = {.lse = -INFINITY, .keys = attn__max(hi - lo, 0)};
    double top = -INFINITY, sum = 0.0, *scores = malloc((size_t)(r.keys + 1) * sizeof *scores);
    memset(o, 0, (size_t)a->dim_v * sizeof *o);
    for (int64_t j = lo; j < hi; j++) {
        double s = 0.0;
        for (int64_t d = 0; d < a->dim_qk; d++) {
            s += widen(a->dtype, c->q.host, q + d) *
                 widen(a->dtype, c->k.host, place(&c->k, batch, kv, first + j) + d);
            r.most = fmax(r.most, isfinite(s) ? fabs(s * (double)a->scale) : 0.0);
        }
        scores[j - lo] = s *= (double)a->scale;
        top = isnan(s) || isnan(top) ? NAN : fmax(top, s);
    }
    for (int64_t j = lo; j < hi && top != -INFINITY; j++) {
        double p = exp(scores[j - lo] - top);
        sum += p;
        for (int64_t d = 0; d < a->dim_v; d++) {
            double v = widen(a->dtype, c->v.host, place(&c->v, batch, kv, first + j) + d);
            o[d] += p * v;
            r.value = fmax(r.value, isfinite(v) ? fabs(v) : 0.0);
        }
    }
    for (int64_t d = 0; d < a->dim_v && top != -INFINITY; d++) {
        o[d] /= sum;
    }
    r.lse = top == -INFINITY ? top : top + log(sum);
    free(scores);
    return r;
}

/* Merges with what was there before: o = 0.5, lse = 1. */
static void merge_before(const check_case *c, row_answer *r, double *o)
{
    double both = r->lse == -INFINITY ? 1.0 : fmax(r->lse, 1.0) + log1p(exp(-fabs(r->lse - 1.0)));
    for (int64_t d = 0; d < c->call.dim_v; d++) {
        o[d] = r->lse == -INFINITY ? 0.5 : o[d] * exp(r->lse - both) + 0.5 * exp(1.0 - both);
    }
    r->lse = both;
}

/* An infinite value times a weight that fp16 rounds to 0 is NaN. */
static bool near(double want, double got, double tolerance)
{
    if (isinf(want)) {
        return !isfinite(got);
    }
    return want == got || (isnan(want) && isnan(got)) || fabs(want - got) <= tolerance;
}

/* Prints the first wrong numbers of a row; how many are wrong. */
static int64_t compare_row(const check_case *c, int64_t b, int64_t head, int64_t token)
{
    const attn__cuda_call *a = &c->call;
    double *o = malloc((size_t)a->dim_v * sizeof *o), u = 0x1p-24;
    row_answer r = solve(c, b, head, token, o);
    double e = u * ((sqrt((double)a->dim_qk) + 2) * r.most + sqrt((double)r.keys) + 4);
    double round = a->dtype == ATTN_BF16 ? 0x1p-8 : 0x1p-10, bad = 0;
    double store = a->dtype_out == ATTN_F32 ? u : a->dtype_out == ATTN_BF16 ? 0x1p-9 : 0x1p-11;
    if (a->merge) {
        merge_before(c, &r, o);
        r.value = fmax(r.value, 0.5);
    }
    int64_t batch = c->cu_q != NULL ? 0 : b, row = first_of(c->cu_q, b) + token;
    double lse = widen(ATTN_F32, c->lse.host, place(&c->lse, batch, head, row));
    if (!near(r.lse, lse, e + 4 * u * fabs(r.lse))) {
        printf("  lse of batch %lld head %lld row %lld: %g, should be %g\n", (long long)b, (long long)head,
               (long long)token, lse, r.lse);
        bad++;
    }
    for (int64_t d = 0; d < a->dim_v; d++) {
        double x = widen(a->dtype_out, c->o.host, place(&c->o, batch, head, row) + d);
        if (!near(o[d], x, (2 * e + round) * r.value + store * fabs(o[d]) + 0x1p-25) && bad++ < 3) {
            printf("  o of batch %lld head %lld row %lld dim %lld: %g, should be %g\n", (long long)b,
                   (long long)head, (long long)token, (long long)d, x, o[d]);
        }
    }
    free(o);
    return (int64_t)bad;
}

/* ---- runs ---- */

/* Poisons or sets up the outputs, runs, fetches them. */
static void run_case(check_case *c, void *workspace, size_t size)
{
    const attn__cuda_device *device;
    must(attn__cuda_open(&device, 0));
    memset(c->o.host, 0xff, c->o.bytes);
    memset(c->lse.host, 0xff, c->lse.bytes);
    for (size_t i = 0; c->call.merge && i < c->o.bytes / 4; i++) {
        ((float *)c->o.host)[i] = 0.5f;
    }
    for (size_t i = 0; c->call.merge && i < c->lse.bytes / 4; i++) {
        ((float *)c->lse.host)[i] = 1.0f;
    }
    must(attn_cuda_copy(0, c->o.strides.data, c->o.host, c->o.bytes, NULL));
    must(attn_cuda_copy(0, c->lse.strides.data, c->lse.host, c->lse.bytes, NULL));
    must(attn_cuda_fill(0, workspace, 0xff, size, NULL));
    must(kernel->forward(&c->call, device, workspace, NULL));
    must(attn_cuda_copy(0, c->o.host, c->o.strides.data, c->o.bytes, NULL));
    must(attn_cuda_copy(0, c->lse.host, c->lse.strides.data, c->lse.bytes, NULL));
    must(attn_cuda_wait(0, NULL));
}

static int64_t compare_case(const check_case *c)
{
    const attn__cuda_call *a = &c->call;
    int64_t rows = a->batch * a->heads_q * a->tokens_q, step = rows / SAMPLE | 1, bad = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : bad)
    for (int64_t i = 0; i < rows; i += step) {
        int64_t token = i % a->tokens_q, head = i / a->tokens_q % a->heads_q,
                b = i / a->tokens_q / a->heads_q;
        if (token < length_of(c->cu_q, b, a->tokens_q)) {
            bad += compare_row(c, b, head, token);
        }
    }
    return bad;
}

/* Problems whose tiles of 64 rows two warpgroups share. */
static int64_t by_two_warpgroups;

static bool check(int64_t number)
{
    check_case c;
    const attn__cuda_device *device;
    must(attn__cuda_open(&device, 0));
    make_case(&c, number);
    const attn__cuda_call *a = &c.call;
    const char *reason = kernel->rejects(a, false);
    if (reason != NULL) {
        printf("case %lld refused: %s\n", (long long)number, reason);
        close_case(&c);
        return false;
    }
    by_two_warpgroups += attn__few_cut_of(a, device).split;
    size_t size = kernel->forward_workspace(a, device);
    void *workspace = device_memory(size), *again = malloc(c.o.bytes);
    run_case(&c, workspace, size);
    int64_t bad = compare_case(&c);
    memcpy(again, c.o.host, c.o.bytes);
    run_case(&c, workspace, size);
    bool same = memcmp(again, c.o.host, c.o.bytes) == 0;
    if (bad > 0 || !same) {
        printf("case %lld: %lld wrong%s: %s to %s batch %lld heads %lld/%lld tokens %lld/%lld dims %lld/%lld "
               "band %lld "
               "%lld shift %d %lld%s sms %d%s\n",
               (long long)number, (long long)bad, same ? "" : ", bits differ", attn_dtype_name(a->dtype),
               attn_dtype_name(a->dtype_out), (long long)a->batch, (long long)a->heads_q,
               (long long)a->heads_kv, (long long)a->tokens_q, (long long)a->tokens_kv, (long long)a->dim_qk,
               (long long)a->dim_v, (long long)a->left, (long long)a->right, a->shifted, (long long)a->shift,
               a->cu_q ? " varlen" : "", a->sms, a->merge ? " merge" : "");
    }
    free(again);
    attn_cuda_free(0, workspace);
    close_case(&c);
    return bad == 0 && same;
}

int main(int argc, char **argv)
{
    int64_t first = argc > 1 ? atoll(argv[1]) : 0, count = argc > 2 ? atoll(argv[2]) : 100, wrong = 0;
    for (int64_t i = first; i < first + count; i++) {
        wrong += !check(i);
        fflush(stdout);
    }
    printf("%lld problems (%lld with 64 rows by two warpgroups), %lld wrong\n", (long long)count,
           (long long)by_two_warpgroups, (long long)wrong);
    return wrong > 0;
}
