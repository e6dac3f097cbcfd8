/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference.c - the fp64 reference over a problem: chosen query rows of one (batch, head), in plain C.
 *
 * Keys and values are read in pieces and folded into every row's running softmax in double precision, so that
 * it needs no more memory than the rows, whatever the number of keys.  Rows are shared out among threads.
 */
#include "engine/engine.h"

enum { KEYS = 256 }; /* keys read at a time */

typedef struct reference {
    attn_problem problem;
    attn__memory_io io;
    attn__sequence s;
    int64_t batch, head, kv_head;
    void *raw;     /* KEYS tokens of all heads of an operand, as the source gives them */
    float *row;    /* one row, fp32 */
    double *q;     /* [count][dim_qk] */
    double *k, *v; /* [KEYS][dim] */
    attn__reference_row *rows;
} reference;

/* Rows [first, first + count) of one head as doubles. */
static attn_status read_rows(reference *r, attn_operand operand, int64_t head, int64_t first, int64_t count,
                             double *dst)
{
    const attn_problem *p = &r->problem;
    int64_t dim = attn__dim(p, operand), element = (int64_t)attn_dtype_size(p->dtype);
    first += operand == ATTN_Q ? r->s.q_first : r->s.kv_first;
    ATTN__TRY(r->io.source.read(r->io.source.data, operand, r->s.batch, first, count, r->raw, count * dim));
    for (int64_t i = 0; i < count; i++) {
        attn_to_f32(r->row, (char *)r->raw + (head * count + i) * dim * element, p->dtype, 1, dim);
        for (int64_t c = 0; c < dim; c++) {
            dst[i * dim + c] = (double)r->row[c];
        }
    }
    return ATTN_OK;
}

static attn_status fold(reference *r, const int64_t *rows, int64_t count)
{
    const attn_problem *p = &r->problem;
    for (int64_t first = 0; first < r->s.kv_count; first += KEYS) {
        int64_t keys = attn__min(KEYS, r->s.kv_count - first);
        ATTN__TRY(read_rows(r, ATTN_K, r->kv_head, first, keys, r->k));
        ATTN__TRY(read_rows(r, ATTN_V, r->kv_head, first, keys, r->v));
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            attn__reference_add(&r->rows[i], r->q + i * p->dim_qk, r->k, r->v, first, keys, rows[i],
                                r->s.band.lo, r->s.band.hi, p->scale, p->dim_qk, p->dim_v);
        }
    }
    return ATTN_OK;
}

static attn_status compute(reference *r, const int64_t *rows, int64_t count, double *o, double *lse)
{
    const attn_problem *p = &r->problem;
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= r->s.q_count) {
            return attn__fail(ATTN_EINVAL, "row %lld: rows go from 0 to %lld", (long long)rows[i],
                              (long long)r->s.q_count - 1);
        }
        ATTN__TRY(read_rows(r, ATTN_Q, r->head, rows[i], 1, r->q + i * p->dim_qk));
        r->rows[i].acc = o + i * p->dim_v;
        attn__reference_begin(&r->rows[i], p->dim_v);
    }
    ATTN__TRY(fold(r, rows, count));
    for (int64_t i = 0; i < count; i++) {
        lse[i] = attn__reference_end(&r->rows[i], p->dim_v);
    }
    return ATTN_OK;
}

static attn_status check(reference *r, const attn_problem *problem, const attn_io *io)
{
    const attn_problem *p = &r->problem;
    if (problem == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_reference needs a problem");
    }
    r->problem = *problem;
    ATTN__TRY(attn_problem_check(&r->problem));
    ATTN__TRY(attn__io_inputs(&r->io, &r->problem, io));
    if (r->batch < 0 || r->batch >= p->batch || r->head < 0 || r->head >= p->heads_q) {
        return attn__fail(ATTN_EINVAL, "batch %lld, head %lld: the problem has %lld and %lld",
                          (long long)r->batch, (long long)r->head, (long long)p->batch,
                          (long long)p->heads_q);
    }
    r->s = attn__sequence_at(&r->io.sequences, r->batch);
    r->kv_head = r->head / (p->heads_q / p->heads_kv);
    return ATTN_OK;
}

attn_status attn_reference(const attn_problem *problem, const attn_io *io, int64_t batch, int64_t head,
                           const int64_t *rows, int64_t count, double *o, double *lse)
{
    reference r = {.batch = batch, .head = head};
    ATTN__TRY(check(&r, problem, io));
    if (count < 0 || rows == NULL || o == NULL || lse == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_reference needs rows, and room for o and lse");
    }
    const attn_problem *p = &r.problem;
    int64_t dim = attn__max(p->dim_qk, p->dim_v);
    r.raw = attn__alloc_array(p->heads_q * KEYS * dim, sizeof(float));
    r.row = attn__alloc_array(dim, sizeof *r.row);
    r.q = attn__alloc_array(count, (size_t)p->dim_qk * sizeof *r.q);
    r.k = attn__alloc_array(KEYS * p->dim_qk, sizeof *r.k);
    r.v = attn__alloc_array(KEYS * p->dim_v, sizeof *r.v);
    r.rows = attn__alloc_array(count, sizeof *r.rows);
    attn_status status = ATTN_ENOMEM;
    if (r.raw != NULL && r.row != NULL && r.q != NULL && r.k != NULL && r.v != NULL && r.rows != NULL) {
        status = compute(&r, rows, count, o, lse);
    }
    attn__free(r.raw);
    attn__free(r.row);
    attn__free(r.q);
    attn__free(r.k);
    attn__free(r.v);
    attn__free(r.rows);
    return status;
}
