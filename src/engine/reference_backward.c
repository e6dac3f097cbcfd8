/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference_backward.c - the fp64 reference of a problem's gradients, in plain C: dq of chosen rows, dk and
 * dv of chosen keys.
 *
 * What a query must know of its whole row, lse and delta, is read or made anew by the running softmax of the
 * forward reference, block of rows by block.  A chosen row then goes over all its keys, and each block of
 * rows, of each query head of the group, over the chosen keys.  Rows, or keys, are shared out among threads;
 * each sums in one order.
 */
#include "engine/engine.h"

enum {
    KEYS = 64,  /* keys read at a time */
    ROWS = 128, /* rows of a block */
    DIM_MOST = 512,
};

/* Rows of one query head, and what is known of them. */
typedef struct block {
    int64_t head, count;
    int64_t *row;     /* [ROWS] */
    double *q, *dout; /* [ROWS][dim] */
    double *o, *lse, *delta;
    attn__reference_row *running;
} block;

typedef struct reference {
    attn_problem problem;
    attn_gradients io;
    attn__sequences sequences;
    attn__sequence s;
    int64_t kv_head, group;
    block block;
    double *k, *v;               /* [KEYS][dim] */
    double *chosen_k, *chosen_v; /* [key_count][dim] */
} reference;

/* ---- reading ---- */

static void read_row(double *dst, const attn_tensor *t, attn_dtype dtype, int64_t batch, int64_t head,
                     int64_t token, int64_t dim)
{
    float row[DIM_MOST];
    attn_to_f32(row, attn__tensor_at(t, dtype, batch, head, token), dtype, t->stride[3], dim);
    for (int64_t d = 0; d < dim; d++) {
        dst[d] = (double)row[d];
    }
}

static void read_key(const reference *r, int64_t key, double *k, double *v)
{
    const attn_problem *p = &r->problem;
    int64_t token = r->s.kv_first + key;
    read_row(k, &r->io.k, p->dtype, r->s.batch, r->kv_head, token, p->dim_qk);
    read_row(v, &r->io.v, p->dtype, r->s.batch, r->kv_head, token, p->dim_v);
}

static double dot(const double *a, const double *b, int64_t dim)
{
    double sum = 0;
    for (int64_t d = 0; d < dim; d++) {
        sum += a[d] * b[d];
    }
    return sum;
}

static double flops_of(const reference *r, int64_t rows, int64_t keys)
{
    return 2.0 * (double)(rows * keys) * (double)(r->problem.dim_qk + r->problem.dim_v);
}

/* ---- lse and delta ---- */

static void read_statistics(const reference *r, int64_t i)
{
    const attn_problem *p = &r->problem;
    const block *b = &r->block;
    int64_t token = r->s.q_first + b->row[i];
    read_row(&b->lse[i], &r->io.lse, ATTN_F32, r->s.batch, b->head, token, 1);
    if (r->io.delta.data != NULL) {
        read_row(&b->delta[i], &r->io.delta, ATTN_F32, r->s.batch, b->head, token, 1);
        return;
    }
    double *o = b->o + i * p->dim_v;
    read_row(o, &r->io.o, p->dtype_out, r->s.batch, b->head, token, p->dim_v);
    b->delta[i] = dot(o, b->dout + i * p->dim_v, p->dim_v);
}

/* The forward pass of the block's rows. */
static void make_statistics(const reference *r)
{
    const attn_problem *p = &r->problem;
    const block *b = &r->block;
    for (int64_t i = 0; i < b->count; i++) {
        b->running[i].acc = b->o + i * p->dim_v;
        attn__reference_begin(&b->running[i], p->dim_v);
    }
    for (int64_t first = 0; first < r->s.kv_count; first += KEYS) {
        int64_t keys = attn__min(KEYS, r->s.kv_count - first);
        for (int64_t j = 0; j < keys; j++) {
            read_key(r, first + j, r->k + j * p->dim_qk, r->v + j * p->dim_v);
        }
        bool together = attn__worth_threads(flops_of(r, b->count, keys));
#pragma omp parallel for schedule(static) if (together)
        for (int64_t i = 0; i < b->count; i++) {
            attn__reference_add(&b->running[i], b->q + i * p->dim_qk, r->k, r->v, first, keys, b->row[i],
                                r->s.band.lo, r->s.band.hi, p->scale, p->dim_qk, p->dim_v);
        }
    }
    for (int64_t i = 0; i < b->count; i++) {
        b->lse[i] = attn__reference_end(&b->running[i], p->dim_v);
        b->delta[i] = dot(b->o + i * p->dim_v, b->dout + i * p->dim_v, p->dim_v);
    }
}

/* All that is to be known of block->row[0 .. count) of block->head. */
static void open_block(const reference *r)
{
    const attn_problem *p = &r->problem;
    const block *b = &r->block;
    for (int64_t i = 0; i < b->count; i++) {
        int64_t token = r->s.q_first + b->row[i];
        read_row(b->q + i * p->dim_qk, &r->io.q, p->dtype, r->s.batch, b->head, token, p->dim_qk);
        read_row(b->dout + i * p->dim_v, &r->io.dout, p->dtype, r->s.batch, b->head, token, p->dim_v);
        if (r->io.lse.data != NULL) {
            read_statistics(r, i);
        }
    }
    if (r->io.lse.data == NULL) {
        make_statistics(r);
    }
}

/* ---- sums ---- */

/* Adds what row i of the block and one key owe to each other. */
static void add_cell(const reference *r, int64_t i, int64_t key, const double *k, const double *v, double *dq,
                     double *dk, double *dv)
{
    const attn_problem *p = &r->problem;
    const block *b = &r->block;
    const attn__reference_query query = {.q = b->q + i * p->dim_qk,
                                         .dout = b->dout + i * p->dim_v,
                                         .lse = b->lse[i],
                                         .delta = b->delta[i],
                                         .pos = b->row[i],
                                         .lo = r->s.band.lo,
                                         .hi = r->s.band.hi,
                                         .scale = p->scale,
                                         .dim_qk = p->dim_qk,
                                         .dim_v = p->dim_v,
                                         .dq = dq};
    attn__reference_backward(&query, k, v, key, 1, dk, dv);
}

/* dq[count] of the block's rows. */
static void sum_rows(const reference *r, double *dq)
{
    const attn_problem *p = &r->problem;
    for (int64_t first = 0; first < r->s.kv_count; first += KEYS) {
        int64_t keys = attn__min(KEYS, r->s.kv_count - first);
        for (int64_t j = 0; j < keys; j++) {
            read_key(r, first + j, r->k + j * p->dim_qk, r->v + j * p->dim_v);
        }
        bool together = attn__worth_threads(flops_of(r, r->block.count, keys));
#pragma omp parallel for schedule(static) if (together)
        for (int64_t i = 0; i < r->block.count; i++) {
            double dk[DIM_MOST] = {0}, dv[DIM_MOST] = {0}; /* not wanted here */
            for (int64_t j = 0; j < keys; j++) {
                add_cell(r, i, first + j, r->k + j * p->dim_qk, r->v + j * p->dim_v, dq + i * p->dim_qk, dk,
                         dv);
            }
        }
    }
}

/* Adds what the block's rows owe to the chosen keys. */
static void sum_keys(const reference *r, const int64_t *keys, int64_t count, double *dk, double *dv)
{
    const attn_problem *p = &r->problem;
    bool together = attn__worth_threads(flops_of(r, r->block.count, count));
#pragma omp parallel for schedule(static) if (together)
    for (int64_t j = 0; j < count; j++) {
        double dq[DIM_MOST] = {0}; /* not wanted here */
        for (int64_t i = 0; i < r->block.count; i++) {
            add_cell(r, i, keys[j], r->chosen_k + j * p->dim_qk, r->chosen_v + j * p->dim_v, dq,
                     dk + j * p->dim_qk, dv + j * p->dim_v);
        }
    }
}

static void zero(double *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        x[i] = 0;
    }
}

static void compute_rows(reference *r, int64_t head, const int64_t *rows, int64_t count, double *dq)
{
    const attn_problem *p = &r->problem;
    block *b = &r->block;
    b->head = head;
    zero(dq, count * p->dim_qk);
    for (int64_t first = 0; first < count; first += ROWS) {
        b->count = attn__min(ROWS, count - first);
        for (int64_t i = 0; i < b->count; i++) {
            b->row[i] = rows[first + i];
        }
        open_block(r);
        sum_rows(r, dq + first * p->dim_qk);
    }
}

static void compute_keys(reference *r, const int64_t *keys, int64_t count, double *dk, double *dv)
{
    const attn_problem *p = &r->problem;
    block *b = &r->block;
    zero(dk, count * p->dim_qk);
    zero(dv, count * p->dim_v);
    for (int64_t j = 0; j < count; j++) {
        read_key(r, keys[j], r->chosen_k + j * p->dim_qk, r->chosen_v + j * p->dim_v);
    }
    for (int64_t h = 0; h < r->group && count > 0; h++) {
        b->head = r->kv_head * r->group + h;
        for (int64_t first = 0; first < r->s.q_count; first += ROWS) {
            b->count = attn__min(ROWS, r->s.q_count - first);
            for (int64_t i = 0; i < b->count; i++) {
                b->row[i] = first + i;
            }
            open_block(r);
            sum_keys(r, keys, count, dk, dv);
        }
    }
}

/* ---- checks and memory ---- */

static attn_status check_list(const char *name, const int64_t *list, int64_t count, int64_t end)
{
    for (int64_t i = 0; i < count; i++) {
        if (list[i] < 0 || list[i] >= end) {
            return attn__fail(ATTN_EINVAL, "%s %lld: they go from 0 to %lld", name, (long long)list[i],
                              (long long)end - 1);
        }
    }
    return ATTN_OK;
}

static attn_status open_problem(reference *r, const attn_problem *problem, const attn_gradients *io,
                                int64_t batch, int64_t head)
{
    const attn_problem *p = &r->problem;
    if (problem == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_reference_backward needs a problem");
    }
    r->problem = *problem;
    ATTN__TRY(attn_problem_check(&r->problem));
    ATTN__TRY(attn__gradients_open(&r->io, &r->sequences, p, io));
    if (io->lse.data != NULL && io->o.data == NULL && io->delta.data == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_gradients: lse comes with o or delta, or leave it out too");
    }
    if (batch < 0 || batch >= p->batch || head < 0 || head >= p->heads_q) {
        return attn__fail(ATTN_EINVAL, "batch %lld, head %lld: the problem has %lld and %lld",
                          (long long)batch, (long long)head, (long long)p->batch, (long long)p->heads_q);
    }
    r->s = attn__sequence_at(&r->sequences, batch);
    r->group = p->heads_q / p->heads_kv;
    r->kv_head = head / r->group;
    return ATTN_OK;
}

static attn_status open_memory(reference *r, int64_t key_count)
{
    const attn_problem *p = &r->problem;
    block *b = &r->block;
    b->row = attn__alloc_array(ROWS, sizeof *b->row);
    b->q = attn__alloc_array(ROWS * p->dim_qk, sizeof *b->q);
    b->dout = attn__alloc_array(ROWS * p->dim_v, sizeof *b->dout);
    b->o = attn__alloc_array(ROWS * p->dim_v, sizeof *b->o);
    b->lse = attn__alloc_array(ROWS, sizeof *b->lse);
    b->delta = attn__alloc_array(ROWS, sizeof *b->delta);
    b->running = attn__alloc_array(ROWS, sizeof *b->running);
    r->k = attn__alloc_array(KEYS * p->dim_qk, sizeof *r->k);
    r->v = attn__alloc_array(KEYS * p->dim_v, sizeof *r->v);
    r->chosen_k = attn__alloc_array(key_count, (size_t)p->dim_qk * sizeof *r->chosen_k);
    r->chosen_v = attn__alloc_array(key_count, (size_t)p->dim_v * sizeof *r->chosen_v);
    bool block_there = b->row != NULL && b->q != NULL && b->dout != NULL && b->o != NULL && b->lse != NULL &&
                       b->delta != NULL && b->running != NULL;
    bool keys_there = r->k != NULL && r->v != NULL && r->chosen_k != NULL && r->chosen_v != NULL;
    return block_there && keys_there ? ATTN_OK : ATTN_ENOMEM;
}

static void close_memory(reference *r)
{
    block *b = &r->block;
    attn__free(b->row);
    attn__free(b->q);
    attn__free(b->dout);
    attn__free(b->o);
    attn__free(b->lse);
    attn__free(b->delta);
    attn__free(b->running);
    attn__free(r->k);
    attn__free(r->v);
    attn__free(r->chosen_k);
    attn__free(r->chosen_v);
}

attn_status attn_reference_backward(const attn_problem *problem, const attn_gradients *io, int64_t batch,
                                    int64_t head, const int64_t *rows, int64_t row_count, double *dq,
                                    const int64_t *keys, int64_t key_count, double *dk, double *dv)
{
    reference r = {.kv_head = 0};
    ATTN__TRY(open_problem(&r, problem, io, batch, head));
    bool no_rows = row_count != 0 && (rows == NULL || dq == NULL);
    bool no_keys = key_count != 0 && (keys == NULL || dk == NULL || dv == NULL);
    if (row_count < 0 || key_count < 0 || no_rows || no_keys) {
        return attn__fail(ATTN_EINVAL,
                          "attn_reference_backward needs rows and room for dq, or none; keys and room for dk "
                          "and dv, or none");
    }
    ATTN__TRY(check_list("rows", rows, row_count, r.s.q_count));
    ATTN__TRY(check_list("keys", keys, key_count, r.s.kv_count));
    attn_status status = open_memory(&r, key_count);
    if (status == ATTN_OK) {
        compute_rows(&r, head, rows, row_count, dq);
        compute_keys(&r, keys, key_count, dk, dv);
    }
    close_memory(&r);
    return status;
}
