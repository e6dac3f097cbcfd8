/* SPDX-License-Identifier: Apache-2.0 */
/*
 * contest_naive.c - attention as it is written down: S = scale Q K^T, a softmax of its rows in place, O = P
 * V, with the products by OpenBLAS and all batch * heads * n * n floats of S in memory.
 *
 * It does what eager frameworks do: P stays for the backward pass, which makes a second matrix of that size
 * (dP, then dS); 16-bit inputs are widened to fp32 first; under a causal mask all cells are computed and half
 * of them thrown away.  It is helped where that is cheap: a (batch, head) does its three steps while its part
 * of S may still be in a cache, and the softmax is vectorised.
 *
 * One pool of threads: OpenBLAS, loaded when the contestant is set up, is told to use one thread, and OpenMP
 * shares out (batch, head) pairs and, where these are few, parts of their rows or keys.  Two pools that spin
 * for each other's cores made times several times longer.
 */
#include "contest.h"

#include "machine.h"
#include "softmax.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if ATTN_HAVE_OPENBLAS

#include <cblas.h>
#include <dlfcn.h>
#include <limits.h>
#include <math.h>

typedef void (*sgemm_fn)(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb, int m,
                         int n, int k, float alpha, const float *a, int lda, const float *b, int ldb,
                         float beta, float *c, int ldc);

enum { Q, K, V, DOUT, INPUTS };  /* widened if they are 16-bit */
enum { O, DQ, DK, DV, OUTPUTS }; /* rounded if they are 16-bit */

typedef struct naive {
    attn_problem p;
    int threads;
    sgemm_fn sgemm;
    char isa[32];
    const void *given[INPUTS];
    void *wanted[OUTPUTS];
    float *in[INPUTS], *out[OUTPUTS]; /* the caller's own arrays where those are fp32 */
    int64_t in_count[INPUTS], out_count[OUTPUTS];
    float *lse;
    float *weights; /* S, then P: [batch][heads_q][n][n] */
    float *slopes;  /* dP, then dS */
} naive;

/* ---- the steps ---- */

/* Part `index` of the `parts` of n: its first and, returned, its count. */
static int64_t part_of(int64_t n, int64_t parts, int64_t index, int64_t *first)
{
    *first = n * index / parts;
    return n * (index + 1) / parts - *first;
}

/* Parts of each of `planes`, so that every thread has work. */
static int64_t parts_for(const naive *s, int64_t planes)
{
    int64_t wanted = (4 * s->threads + planes - 1) / planes, most = (s->p.tokens_q + 63) / 64;
    return wanted < most ? wanted : most;
}

static void forward_rows(const naive *s, int64_t plane, int64_t first, int64_t count)
{
    const attn_problem *p = &s->p;
    int64_t n = p->tokens_q, group = p->heads_q / p->heads_kv, kv = plane / group;
    int rows = (int)count, keys = (int)n, d = (int)p->dim_qk, dv = (int)p->dim_v;
    float *w = s->weights + (plane * n + first) * n;
    s->sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, d, (float)p->scale,
             s->in[Q] + (plane * n + first) * d, d, s->in[K] + kv * n * d, d, 0, w, keys);
    for (int64_t i = 0; i < count; i++) {
        int64_t seen = p->mask == ATTN_MASK_CAUSAL ? first + i + 1 : n;
        s->lse[plane * n + first + i] = cli_softmax_row(w + i * n, seen, n);
    }
    s->sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dv, keys, 1, w, keys, s->in[V] + kv * n * dv,
             dv, 0, s->out[O] + (plane * n + first) * dv, dv);
}

/* Rows of dP, dS and dQ. */
static void backward_rows(const naive *s, int64_t plane, int64_t first, int64_t count)
{
    const attn_problem *p = &s->p;
    int64_t n = p->tokens_q, group = p->heads_q / p->heads_kv, kv = plane / group;
    int rows = (int)count, keys = (int)n, d = (int)p->dim_qk, dv = (int)p->dim_v;
    const float *w = s->weights + (plane * n + first) * n;
    float *slopes = s->slopes + (plane * n + first) * n;
    s->sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dv, 1,
             s->in[DOUT] + (plane * n + first) * dv, dv, s->in[V] + kv * n * dv, dv, 0, slopes, keys);
    for (int64_t i = 0; i < count; i++) {
        cli_softmax_slope(slopes + i * n, w + i * n, n);
    }
    s->sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, d, keys, (float)p->scale, slopes, keys,
             s->in[K] + kv * n * d, d, 0, s->out[DQ] + (plane * n + first) * d, d);
}

/* dK and dV of some keys, over the query heads that share them. */
static void backward_keys(const naive *s, int64_t kv, int64_t first, int64_t count)
{
    const attn_problem *p = &s->p;
    int64_t n = p->tokens_q, group = p->heads_q / p->heads_kv;
    int keys = (int)count, rows = (int)n, d = (int)p->dim_qk, dv = (int)p->dim_v;
    float *dk = s->out[DK] + (kv * n + first) * d, *dvalue = s->out[DV] + (kv * n + first) * dv;
    for (int64_t plane = kv * group; plane < (kv + 1) * group; plane++) {
        float keep = plane > kv * group ? 1 : 0;
        s->sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, dv, rows, 1,
                 s->weights + plane * n * n + first, rows, s->in[DOUT] + plane * n * dv, dv, keep, dvalue,
                 dv);
        s->sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, d, rows, (float)p->scale,
                 s->slopes + plane * n * n + first, rows, s->in[Q] + plane * n * d, d, keep, dk, d);
    }
}

/* step(plane, part of the n rows or keys) for all, shared out among the threads */
static void share_out(const naive *s, int64_t planes,
                      void (*step)(const naive *s, int64_t plane, int64_t first, int64_t count))
{
    int64_t parts = parts_for(s, planes);
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
    for (int64_t i = 0; i < planes * parts; i++) {
        int64_t first = 0, count = part_of(s->p.tokens_q, parts, i % parts, &first);
        step(s, i / parts, first, count);
    }
}

static void convert(const naive *s, void *to, const void *from, int64_t count, bool widen)
{
    const int64_t piece = 1 << 14;
    const int64_t size = (int64_t)attn_dtype_size(widen ? s->p.dtype : s->p.dtype_out);
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < count; i += piece) {
        int64_t take = count - i < piece ? count - i : piece;
        if (widen) {
            attn_to_f32((float *)to + i, (const char *)from + i * size, s->p.dtype, 1, take);
        } else {
            attn_from_f32((char *)to + i * size, s->p.dtype_out, 1, (const float *)from + i, take);
        }
    }
}

static void widen(const naive *s, int first, int last)
{
    for (int i = first; i <= last; i++) {
        if (s->in[i] != s->given[i]) {
            convert(s, s->in[i], s->given[i], s->in_count[i], true);
        }
    }
}

static void narrow(const naive *s, int first, int last)
{
    for (int i = first; i <= last; i++) {
        if (s->out[i] != s->wanted[i]) {
            convert(s, s->wanted[i], s->out[i], s->out_count[i], false);
        }
    }
}

static attn_status run(void *state, contest_pass pass)
{
    const naive *s = state;
    int64_t planes = s->p.batch * s->p.heads_q, kv_planes = s->p.batch * s->p.heads_kv;
    if (pass != CONTEST_BACKWARD) {
        widen(s, Q, V);
        share_out(s, planes, forward_rows);
        narrow(s, O, O);
    }
    if (pass != CONTEST_FORWARD) {
        widen(s, DOUT, DOUT);
        share_out(s, planes, backward_rows);
        share_out(s, kv_planes, backward_keys);
        narrow(s, DQ, DV);
    }
    return ATTN_OK;
}

/* ---- setting up ---- */

static void count_elements(const contest_case *c, int64_t in[INPUTS], int64_t out[OUTPUTS])
{
    const attn_problem *p = &c->problem;
    bool back = c->pass != CONTEST_FORWARD;
    int64_t rows = p->batch * p->heads_q * p->tokens_q, keys = p->batch * p->heads_kv * p->tokens_kv;
    in[Q] = rows * p->dim_qk;
    in[K] = keys * p->dim_qk;
    in[V] = keys * p->dim_v;
    in[DOUT] = back ? rows * p->dim_v : 0;
    out[O] = rows * p->dim_v;
    out[DQ] = back ? in[Q] : 0;
    out[DK] = back ? in[K] : 0;
    out[DV] = back ? in[V] : 0;
}

static attn_status predict(const contestant *self, const contest_case *c, int64_t *bytes)
{
    const attn_problem *p = &c->problem;
    int64_t in[INPUTS], out[OUTPUTS];
    const double buffers = 8e6; /* that OpenBLAS packs a thread's panels into */
    (void)self;
    count_elements(c, in, out);
    double matrices = c->pass == CONTEST_FORWARD ? 1 : 2, wide = 0;
    for (int i = 0; i < INPUTS; i++) {
        wide += p->dtype != ATTN_F32 ? (double)in[i] : 0;
        wide += p->dtype_out != ATTN_F32 ? (double)out[i] : 0;
    }
    double cells = (double)p->batch * (double)p->heads_q * (double)p->tokens_q * (double)p->tokens_kv;
    double total = 4 * (matrices * cells + wide) + buffers * c->threads;
    if (total > 0x1p62) {
        return attn_fail(ATTN_ELIMIT, "the score matrix is larger than any memory");
    }
    *bytes = (int64_t)total;
    return ATTN_OK;
}

/* The caller's own array if it is fp32, else one of fp32 beside it; NULL: there is no memory. */
static float *array_for(void *own, attn_dtype dtype, int64_t count)
{
    return dtype == ATTN_F32 || count == 0 ? own : malloc((size_t)count * sizeof(float));
}

static void find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
}

/* Whether OpenBLAS took a CPU that it does not know for one without AVX2. */
static bool mistaken(const char *core)
{
    static const char *const old[] = {"Katmai", "Coppermine", "Northwood", "Prescott", "Banias",  "Core2",
                                      "Penryn", "Dunnington", "Nehalem",   "Atom",     "Generic", "Unknown"};
    for (size_t i = 0; i < sizeof old / sizeof old[0]; i++) {
        if (strcmp(core, old[i]) == 0) {
            return true;
        }
    }
    return false;
}

static void *open_library(void)
{
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    return library != NULL ? library : dlopen("libopenblas.so", RTLD_NOW | RTLD_LOCAL);
}

/* OpenBLAS falls back to SSE3 on CPUs that are newer than itself: it is told better, so that the rival is as
 * fast as it can be.  Whoever sets OPENBLAS_CORETYPE knows what he wants. */
static attn_status load(naive *s)
{
    cli_machine host;
    char *(*core)(void) = NULL;
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
    void *library = open_library();
    if (library != NULL) {
        find(library, "openblas_get_corename", &core);
    }
    if (core != NULL && mistaken(core()) && getenv("OPENBLAS_CORETYPE") == NULL) {
        cli_machine_look(&host);
        bool wide = strstr(host.features, "avx512dq") != NULL, avx2 = strstr(host.features, "avx2") != NULL;
        if (wide || avx2) {
            (void)setenv("OPENBLAS_CORETYPE", wide ? "SkylakeX" : "Haswell", 1);
            (void)dlclose(library);
            library = open_library();
        }
    }
    if (library == NULL) {
        return attn_fail(ATTN_EUNSUPPORTED, "OpenBLAS cannot be loaded: install libopenblas0");
    }
    void (*set_threads)(int) = NULL;
    find(library, "openblas_set_num_threads", &set_threads); /* for builds that listen to OpenMP's number */
    if (set_threads != NULL) {
        set_threads(1);
    }
    find(library, "cblas_sgemm", &s->sgemm);
    find(library, "openblas_get_corename", &core);
    snprintf(s->isa, sizeof s->isa, "%s", core != NULL ? core() : "?");
    return s->sgemm != NULL ? ATTN_OK : attn_fail(ATTN_EUNSUPPORTED, "OpenBLAS has no cblas_sgemm");
}

static void free_naive(void *state)
{
    naive *s = state;
    if (s == NULL) {
        return;
    }
    for (int i = 0; i < INPUTS; i++) {
        if (s->in[i] != s->given[i]) {
            free(s->in[i]);
        }
        if (s->out[i] != s->wanted[i]) {
            free(s->out[i]);
        }
    }
    free(s->weights);
    free(s->slopes);
    free(s);
}

static attn_status make_room(naive *s, const contest_case *c, const contest_tensors *t)
{
    const attn_problem *p = &s->p;
    void *in[INPUTS] = {t->q, t->k, t->v, t->dout}, *out[OUTPUTS] = {t->o, t->dq, t->dk, t->dv};
    size_t cells = (size_t)(p->batch * p->heads_q * p->tokens_q * p->tokens_kv);
    bool enough = true;
    count_elements(c, s->in_count, s->out_count);
    for (int i = 0; i < INPUTS; i++) {
        s->given[i] = in[i];
        s->wanted[i] = out[i];
        s->in[i] = array_for(in[i], p->dtype, s->in_count[i]);
        s->out[i] = array_for(out[i], p->dtype_out, s->out_count[i]);
        enough = enough && (s->in_count[i] == 0 || s->in[i] != NULL);
        enough = enough && (s->out_count[i] == 0 || s->out[i] != NULL);
    }
    s->weights = malloc(cells * sizeof *s->weights);
    s->slopes = c->pass != CONTEST_FORWARD ? malloc(cells * sizeof *s->slopes) : NULL;
    enough = enough && s->weights != NULL && (c->pass == CONTEST_FORWARD || s->slopes != NULL);
    return enough ? ATTN_OK : attn_fail(ATTN_ENOMEM, "no memory for the score matrix");
}

static attn_status setup(const contestant *self, const contest_case *c, const contest_tensors *t,
                         void **state)
{
    naive *s = calloc(1, sizeof *s);
    (void)self;
    *state = s;
    if (s == NULL) {
        return attn_fail(ATTN_ENOMEM, "out of memory");
    }
    s->p = c->problem;
    s->threads = c->threads;
    s->lse = t->lse;
    attn_status status = load(s);
    return status == ATTN_OK ? make_room(s, c, t) : status;
}

static const char *can_do(const contestant *self, const contest_case *c, char *text, size_t size)
{
    const attn_problem *p = &c->problem;
    (void)self;
    if (p->tokens_q != p->tokens_kv || p->mask == ATTN_MASK_WINDOW || p->tokens_q > INT_MAX) {
        snprintf(text, size, "naive takes as many keys as queries, and no window");
        return text;
    }
    return NULL;
}

static const char *isa(const void *state)
{
    return ((const naive *)state)->isa;
}

static const char *peak(const void *state)
{
    (void)state;
    return NULL;
}

#else

static const char *can_do(const contestant *self, const contest_case *c, char *text, size_t size)
{
    (void)self, (void)c;
    snprintf(text, size, "built without OpenBLAS: install libopenblas-dev and build again");
    return text;
}

#endif

const contestant contest_naive = {
    .name = "naive",
    .can_do = can_do,
#if ATTN_HAVE_OPENBLAS
    .predict = predict,
    .setup = setup,
    .run = run,
    .isa = isa,
    .peak = peak,
    .free_state = free_naive,
#endif
};
