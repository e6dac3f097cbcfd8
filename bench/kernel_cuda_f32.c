/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda_f32.c - the fp32 rows of the CUDA kernel table: right?  how fast?
 *
 *     kernel_cuda_f32 check|time [--kernel NAME] [--forward | --backward] [--quick]
 *
 * CHECK.  Every case runs on random inputs into outputs of 0xff bytes, and all its rows are compared with
 * fp64 here: the error is relative to the largest number of a tensor, NaN must be where the reference has it.
 * Gradients run twice and must have the same bits.
 *
 * TIME.  Batches of launches between two events, after one to warm up; the median batch counts.  FLOPs are 4
 * for each cell and dim, 2.5 times that for gradients.  Some rows of each are compared with fp64 too.
 */
#include "kernel_cuda_f32.inc.h"

#define CASE(text, b, hq, hkv, nq, nkv, d, dv, l, r, ...)                                                    \
    {                                                                                                        \
        .name = text, .batch = b, .heads_q = hq, .heads_kv = hkv, .queries = nq, .keys = nkv, .dim_qk = d,   \
        .dim_v = dv, .left = l, .right = r, __VA_ARGS__                                                      \
    }
static const bench_case checks[] = {
    CASE("d64", 1, 2, 2, 200, 300, 64, 64, MUCH, MUCH, .size = 1.0),
    CASE("d64 causal", 2, 2, 1, 300, 333, 64, 64, MUCH, 0, .size = 1.0),
    CASE("d128", 1, 2, 2, 300, 290, 128, 128, MUCH, MUCH, .size = 1.0),
    CASE("d128 causal", 1, 4, 2, 515, 400, 128, 128, MUCH, 0, .size = 1.0),
    CASE("d256 causal", 1, 2, 1, 150, 203, 256, 256, MUCH, 0, .size = 1.0),
    CASE("d256", 1, 2, 2, 300, 290, 256, 256, MUCH, MUCH, .size = 1.0),
    CASE("d200/136 window", 2, 2, 2, 260, 400, 200, 136, 37, 5, .size = 1.0),
    CASE("d136/250 odd, sms 5", 2, 2, 2, 190, 270, 136, 250, 100, MUCH, .odd = true, .sms = 5),
    CASE("d256 varlen", 6, 4, 2, 400, 300, 256, 256, MUCH, 0, .varlen = true, .accumulate = true),
    CASE("d512", 1, 1, 1, 77, 130, 512, 400, MUCH, MUCH, .size = 1.0),
    CASE("d40/72 window", 2, 2, 2, 260, 400, 40, 72, 37, 5, .size = 1.0),
    CASE("d3 odd strides", 2, 3, 1, 131, 77, 3, 5, MUCH, 0, .odd = true),
    CASE("d99 odd, sms 5", 2, 2, 2, 190, 270, 99, 33, 100, MUCH, .odd = true, .sms = 5),
    CASE("f16", 2, 2, 1, 130, 200, 64, 64, MUCH, 0, .dtype = ATTN_F16, .dtype_out = ATTN_F16),
    CASE("bf16 odd, varlen", 5, 2, 1, 200, 210, 50, 70, MUCH, 0, .dtype = ATTN_BF16, .dtype_out = ATTN_BF16,
         .odd = true, .varlen = true),
    CASE("bf16 to fp32", 1, 2, 1, 64, 64, 128, 128, MUCH, MUCH, .dtype = ATTN_BF16, .accumulate = true),
    CASE("varlen window", 6, 4, 2, 400, 300, 64, 64, 50, 20, .varlen = true),
    CASE("shifted block", 1, 2, 2, 257, 600, 64, 64, 90, 0, .shifted = true, .shift = 130, .merge = true,
         .accumulate = true),
    CASE("shifted away", 1, 2, 2, 300, 300, 128, 128, MUCH, 0, .shifted = true, .shift = -200, .merge = true,
         .accumulate = true),
    CASE("band beside the diagonal", 1, 1, 1, 400, 400, 64, 64, -30, 200, .size = 1.0),
    CASE("one key", 3, 2, 2, 70, 1, 64, 64, MUCH, 0, .size = 1.0),
    CASE("one query", 3, 8, 2, 1, 1000, 128, 128, MUCH, 0, .size = 1.0),
    CASE("huge logits", 1, 2, 2, 200, 260, 64, 64, MUCH, 0, .size = 30.0),
    CASE("NaN and inf, d64", 1, 2, 1, 330, 400, 64, 64, 60, 0, .spoiled = true, .options = GIVE_DELTA),
    CASE("NaN and inf, d128", 1, 2, 1, 330, 400, 128, 128, 60, 0, .spoiled = true),
    CASE("NaN and inf, d256", 1, 2, 1, 330, 400, 256, 256, 60, 0, .spoiled = true),
    CASE("no dq", 1, 2, 1, 130, 300, 64, 64, MUCH, 0, .options = NO_DQ),
    CASE("only dq", 1, 2, 1, 130, 300, 128, 128, MUCH, 0, .options = NO_DK | NO_DV),
    CASE("only dv, d256", 1, 2, 1, 130, 300, 256, 256, MUCH, 0, .options = NO_DQ | NO_DK),
    CASE("d64 many blocks", 2, 16, 8, 2100, 2300, 64, 64, MUCH, 0, .size = 1.0),
    CASE("d256 many blocks", 2, 8, 4, 2100, 2300, 256, 256, MUCH, 0, .size = 1.0),
};

#define TIMED(heads, n, d, side) CASE("", 1, heads, heads, n, n, d, d, MUCH, side, .size = 1.0)
static const bench_case times[] = {
    TIMED(8, 8192, 64, MUCH),  TIMED(8, 8192, 64, 0),  TIMED(8, 8192, 128, MUCH), TIMED(8, 8192, 128, 0),
    TIMED(32, 2048, 64, MUCH), TIMED(32, 2048, 64, 0), TIMED(16, 2048, 128, 0),   TIMED(8, 1024, 64, MUCH),
    TIMED(8, 4096, 256, MUCH), TIMED(8, 4096, 256, 0),
};

/* Every how many-th row is looked at: some 10^7 products in all. */
static int64_t every(const bench_case *c)
{
    const double cells = (double)(c->batch * c->heads_q) * (double)c->queries * (double)c->keys;
    const int64_t step = 1 + (int64_t)(cells * (double)(c->dim_qk + c->dim_v) / 4e6);
    return step % 2 == 0 ? step + 1 : step;
}

static const attn__cuda_device *device;
static const attn__cuda_kernel *kernel;

static bool by_parts(void)
{
    return kernel == &attn__cuda_bf16x3_sm90;
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
    bench_error e = {.what = "dq", .parts = by_parts()};
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
    bench_error ek = {.what = "dk", .parts = by_parts()}, ev = {.what = "dv"};
    double *dk = need(attn__alloc_array(r->c.dim_qk, sizeof(double)));
    double *dv = need(attn__alloc_array(r->c.dim_v, sizeof(double)));
    double *deltas = need(attn__alloc_array(r->c.heads_q * r->c.queries + 1, sizeof(double)));
    int64_t count = 0;
    for (int64_t n = 0; n < r->c.batch * r->c.heads_kv; n++) {
        int64_t b = n / r->c.heads_kv, h = n % r->c.heads_kv, bq, fq, bk, fk;
        const int64_t nq = rows_of(r->cu_q, b, r->c.queries, &bq, &fq),
                      nkv = rows_of(r->cu_kv, b, r->c.keys, &bk, &fk);
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
    const int64_t nq = c->varlen ? r->cu_q[c->batch] : c->queries,
                  nkv = c->varlen ? r->cu_kv[c->batch] : c->keys;
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
    r->call = (attn__cuda_call){.dtype = c->dtype,
                                .dtype_out = c->dtype_out,
                                .batch = c->batch,
                                .heads_q = c->heads_q,
                                .heads_kv = c->heads_kv,
                                .tokens_q = c->queries,
                                .tokens_kv = c->keys,
                                .dim_qk = c->dim_qk,
                                .dim_v = c->dim_v,
                                .scale = (float)(1.0 / sqrt((double)c->dim_qk)),
                                .left = c->left,
                                .right = c->right,
                                .shifted = c->shifted,
                                .shift = c->shift,
                                .cu_q = (void *)(uintptr_t)r->cu[0],
                                .cu_kv = (void *)(uintptr_t)r->cu[1],
                                .total_q = batch * nq,
                                .total_kv = batch * nkv,
                                .sms = c->sms,
                                .deterministic = true,
                                .merge = c->merge,
                                .accumulate = c->accumulate,
                                .q = tensor_of(&r->q),
                                .k = tensor_of(&r->k),
                                .v = tensor_of(&r->v),
                                .o = tensor_of(&r->o),
                                .lse = tensor_of(&r->lse),
                                .dout = tensor_of(&r->dout)};
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

static void run(bench_run *r, bool backward)
{
    const size_t bytes =
        backward ? kernel->backward_workspace(&r->call, device) : kernel->forward_workspace(&r->call, device);
    if (bytes > r->workspace_bytes) {
        if (r->workspace_bytes > 0) {
            CUDA(attn__cuda.memory_free(r->workspace));
        }
        CUDA(attn__cuda.memory_alloc(&r->workspace, bytes));
        CUDA(attn__cuda.copy_to_device(r->workspace, r->q.copy, bytes < r->q.bytes ? bytes : r->q.bytes,
                                       NULL));
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
    const double allowed =
        half[c->dtype_out] * fmax(1.0, c->size); /* scores grow with the size, and their errors */
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
        check_forward(&r, allowed);
    }
    if (backward && kernel->rejects(&r.call, true) == NULL && kernel->backward != NULL) {
        prepare_backward(&r);
        run(&r, true);
        const uint64_t bits = gradient_bits(&r);
        check_queries(&r, 2.0 * allowed), check_keys(&r, 2.0 * allowed);
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
    const double flops =
        4.0 * (double)(c->heads_q * c->queries * c->keys * c->dim_qk) * (c->right == 0 ? 0.5 : 1.0);
    printf("%2lld heads, n %5lld, d %3lld, %s:", (long long)c->heads_q, (long long)c->queries,
           (long long)c->dim_qk, c->right == 0 ? "causal" : "full  ");
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
        fprintf(stderr,
                "usage: kernel_cuda_f32 check|time [--kernel NAME] [--forward | --backward] [--quick]\n");
        return 2;
    }
    const bool check = strcmp(argv[1], "check") == 0;
    const size_t count = check   ? sizeof checks / sizeof checks[0]
                         : quick ? 4
                                 : sizeof times / sizeof times[0];
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
