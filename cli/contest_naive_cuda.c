/* SPDX-License-Identifier: Apache-2.0 */
/*
 * contest_naive_cuda.c - attention as it is written down, on a GPU: S = scale Q K^T, a softmax of its rows in
 * place, O = P V, with the products by cuBLASLt and all batch * heads * n * n scores in memory, in the dtype
 * of the inputs.
 *
 * As in eager frameworks scores and weights are rounded to that dtype, P stays for the backward pass, which
 * makes a second matrix of that size (dP, then dS), and under a causal mask all cells are computed and half
 * of them thrown away.  It is better off than these in one thing: the softmax needs no second matrix.
 *
 * A product is over all (batch, kv head)s at once; the query heads that share a kv head take turns, and add
 * to dK and dV.
 */
#include "contest.h"

#include "place.h"
#include "product_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#if ATTN_HAVE_CUBLASLT

enum { SCORES, VALUES, SLOPES, DQ, DK, DV, DK_MORE, DV_MORE, PRODUCTS };

typedef struct naive {
    attn_problem p;
    cli_place place;
    contest_tensors t;
    product *product[PRODUCTS];
    void *weights; /* S, then P: [batch][heads_q][n][softmax_pitch(n)] */
    void *slopes;  /* dP, then dS */
} naive;

/* ---- the steps ---- */

/* Where query head `member` of the first group lies in an array of `count` elements a head. */
static void *head(const naive *s, void *array, int64_t member, int64_t count)
{
    return (char *)array + member * count * (int64_t)attn_dtype_size(s->p.dtype);
}

static attn_status forward(const naive *s)
{
    const attn_problem *p = &s->p;
    const int64_t n = p->tokens_q, group = p->heads_q / p->heads_kv, cells = n * softmax_pitch(n);
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < group && status == ATTN_OK; i++) {
        status = product_run(s->product[SCORES], head(s, s->t.q, i, n * p->dim_qk), s->t.k,
                             head(s, s->weights, i, cells));
    }
    if (status == ATTN_OK) {
        status = softmax_rows(s->place.gpu, p->dtype, s->weights, s->t.lse, p->batch * p->heads_q * n, n,
                              p->mask == ATTN_MASK_CAUSAL);
    }
    for (int64_t i = 0; i < group && status == ATTN_OK; i++) {
        status = product_run(s->product[VALUES], head(s, s->weights, i, cells), s->t.v,
                             head(s, s->t.o, i, n * p->dim_v));
    }
    return status;
}

static attn_status backward(const naive *s)
{
    const attn_problem *p = &s->p;
    const int64_t n = p->tokens_q, group = p->heads_q / p->heads_kv, cells = n * softmax_pitch(n);
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < group && status == ATTN_OK; i++) {
        status = product_run(s->product[SLOPES], head(s, s->t.dout, i, n * p->dim_v), s->t.v,
                             head(s, s->slopes, i, cells));
    }
    if (status == ATTN_OK) {
        status = softmax_slopes(s->place.gpu, p->dtype, s->slopes, s->weights, p->batch * p->heads_q * n, n);
    }
    for (int64_t i = 0; i < group && status == ATTN_OK; i++) {
        const void *q = head(s, s->t.q, i, n * p->dim_qk), *dout = head(s, s->t.dout, i, n * p->dim_v);
        const void *weights = head(s, s->weights, i, cells), *slopes = head(s, s->slopes, i, cells);
        status = product_run(s->product[DQ], slopes, s->t.k, head(s, s->t.dq, i, n * p->dim_qk));
        status =
            status == ATTN_OK ? product_run(s->product[i == 0 ? DK : DK_MORE], slopes, q, s->t.dk) : status;
        status = status == ATTN_OK ? product_run(s->product[i == 0 ? DV : DV_MORE], weights, dout, s->t.dv)
                                   : status;
    }
    return status;
}

static attn_status run(void *state, contest_pass pass)
{
    const naive *s = state;
    attn_status status = ATTN_OK;
    if (pass != CONTEST_BACKWARD) {
        status = forward(s);
    }
    if (status == ATTN_OK && pass != CONTEST_FORWARD) {
        status = backward(s);
    }
    return status;
}

/* ---- setting up ---- */

static attn_status predict(const contestant *self, const contest_case *c, int64_t *bytes)
{
    const attn_problem *p = &c->problem;
    const double matrices = c->pass == CONTEST_FORWARD ? 1 : 2;
    (void)self;
    double rows = (double)p->batch * (double)p->heads_q * (double)p->tokens_q;
    double cells = rows * (double)softmax_pitch(p->tokens_kv);
    double total = (double)attn_dtype_size(p->dtype) * matrices * cells + (double)product_workspace();
    if (total > 0x1p62) {
        return attn_fail(ATTN_ELIMIT, "the score matrix is larger than any memory");
    }
    *bytes = (int64_t)total;
    return ATTN_OK;
}

static void free_naive(void *state)
{
    naive *s = state;
    if (s == NULL) {
        return;
    }
    for (int i = 0; i < PRODUCTS; i++) {
        product_close(s->product[i]);
    }
    cli_place_free(s->place, s->weights);
    cli_place_free(s->place, s->slopes);
    free(s);
}

/* What each of the products is. */
static product_want want_of(const attn_problem *p, int which)
{
    const int64_t n = p->tokens_q, d = p->dim_qk, dv = p->dim_v, group = p->heads_q / p->heads_kv;
    const int64_t pitch = softmax_pitch(n);
    const float scale = (float)p->scale, more = which == DK_MORE || which == DV_MORE ? 1 : 0;
    product_want w = {.dtype = p->dtype, .alpha = 1, .beta = more, .batch = p->batch * p->heads_kv};
    switch (which) {
    case SCORES:
        w.m = n, w.n = n, w.k = d, w.transpose_b = true, w.alpha = scale, w.row_c = pitch;
        w.stride_a = group * n * d, w.stride_b = n * d, w.stride_c = group * n * pitch;
        break;
    case VALUES:
        w.m = n, w.n = dv, w.k = n, w.row_a = pitch;
        w.stride_a = group * n * pitch, w.stride_b = n * dv, w.stride_c = group * n * dv;
        break;
    case SLOPES:
        w.m = n, w.n = n, w.k = dv, w.transpose_b = true, w.row_c = pitch;
        w.stride_a = group * n * dv, w.stride_b = n * dv, w.stride_c = group * n * pitch;
        break;
    case DQ:
        w.m = n, w.n = d, w.k = n, w.alpha = scale, w.row_a = pitch;
        w.stride_a = group * n * pitch, w.stride_b = n * d, w.stride_c = group * n * d;
        break;
    case DK:
    case DK_MORE:
        w.m = n, w.n = d, w.k = n, w.transpose_a = true, w.alpha = scale, w.row_a = pitch;
        w.stride_a = group * n * pitch, w.stride_b = group * n * d, w.stride_c = n * d;
        break;
    default:
        w.m = n, w.n = dv, w.k = n, w.transpose_a = true, w.row_a = pitch;
        w.stride_a = group * n * pitch, w.stride_b = group * n * dv, w.stride_c = n * dv;
        break;
    }
    return w;
}

static attn_status setup(const contestant *self, const contest_case *c, const contest_tensors *t,
                         void **state)
{
    const attn_problem *p = &c->problem;
    const int last = c->pass == CONTEST_FORWARD ? VALUES : PRODUCTS - 1;
    naive *s = calloc(1, sizeof *s);
    (void)self;
    *state = s;
    if (s == NULL) {
        return attn_fail(ATTN_ENOMEM, "out of memory");
    }
    s->p = *p;
    s->t = *t;
    s->place = c->place;
    attn_status status = ATTN_OK;
    for (int i = 0; i <= last && status == ATTN_OK; i++) {
        const product_want want = want_of(p, i);
        status = product_open(&s->product[i], s->place.gpu, &want);
    }
    const size_t bytes = (size_t)(p->batch * p->heads_q * p->tokens_q * softmax_pitch(p->tokens_kv)) *
                         attn_dtype_size(p->dtype);
    if (status == ATTN_OK) {
        s->weights = cli_place_alloc(s->place, bytes);
        status = s->weights != NULL ? ATTN_OK : attn_fail(ATTN_ENOMEM, "no memory for the score matrix");
    }
    if (status == ATTN_OK && c->pass != CONTEST_FORWARD) {
        s->slopes = cli_place_alloc(s->place, bytes);
        status = s->slopes != NULL ? ATTN_OK : attn_fail(ATTN_ENOMEM, "no memory for the second matrix");
    }
    return status;
}

static const char *can_do(const contestant *self, const contest_case *c, char *text, size_t size)
{
    const attn_problem *p = &c->problem;
    const int64_t most = INT64_C(1) << 31;
    const char *missing = product_missing(c->place.gpu);
    (void)self;
    if (missing != NULL) {
        snprintf(text, size, "%s", missing);
        return text;
    }
    if (p->tokens_q != p->tokens_kv || p->mask == ATTN_MASK_WINDOW || p->dtype_out != p->dtype ||
        p->batch * p->heads_q * p->tokens_q >= most) {
        snprintf(text, size,
                 "naive takes as many keys as queries, no window, results of the inputs' dtype, and fewer "
                 "than 2^31 "
                 "rows");
        return text;
    }
    return NULL;
}

static const char *isa(const void *state)
{
    (void)state;
    return product_library();
}

static const char *peak(const void *state)
{
    (void)state;
    return NULL;
}

#else

static const char *can_do(const contestant *self, const contest_case *c, char *text, size_t size)
{
    (void)self;
    snprintf(text, size, "%s", product_missing(c->place.gpu));
    return text;
}

#endif

const contestant contest_naive_cuda = {
    .name = "naive",
    .rounds_scores = true,
    .can_do = can_do,
#if ATTN_HAVE_CUBLASLT
    .predict = predict,
    .setup = setup,
    .run = run,
    .isa = isa,
    .peak = peak,
    .free_state = free_naive,
#endif
};
