/* SPDX-License-Identifier: Apache-2.0 */
/* backward.h - what backward.c (the parts of one execute) and ranges.c (its items) share. */
#ifndef ATTN_ENGINE_BACKWARD_H
#define ATTN_ENGINE_BACKWARD_H

#include "engine/engine.h"

/* One execute of the gradients. */
typedef struct attn__backward {
    attn__run run;
    const attn_plan *plan;
    attn_gradients io; /* strides filled in */
    attn__sequences sequences;
    int64_t places;     /* for query tiles */
    int64_t *order;     /* sequences by falling number of ranges */
    int64_t *count;     /* [batch]: ranges of a sequence */
    int64_t *first;     /* [levels + 1]: items of the ranges before one, over all sequences */
    int64_t levels;     /* most ranges of a sequence here */
    float *lse, *delta; /* [sequence][query head][query], dense */
    float *dq;          /* likewise, [..][dim_qk]: the sum where dq itself is no place for fp32; or NULL */
    atomic_uint *turns; /* [place][query head]: of a query tile, the range whose turn it is; NULL: dq_apart */
    char *threads;
    atomic_int_least64_t next;  /* item */
    atomic_int_least64_t cells; /* of the finished items */
} attn__backward;

/* Ranges of a sequence. */
int64_t attn__ranges(const attn_plan *plan, const attn__sequence *s);
/* Bytes of workspace of one thread; the most ranges of a sequence. */
int64_t attn__range_space(const attn_plan *plan);
int64_t attn__ranges_most(const attn_plan *plan);

/* Fills in order, count, first and levels. */
void attn__ranges_number(attn__backward *b);
/* Takes items until there are no more. */
void attn__ranges_work(attn__backward *b);
/* dq of a query tile that has rows, of all ranges, in fp32: in the thread's buffer, dense. */
const float *attn__ranges_queries(attn__backward *b, int64_t sequence, int64_t head, int64_t tile);

/* A kernel can add to rows of such a tensor. */
static inline bool attn__adds_in_place(const attn_plan *plan, const attn_tensor *t)
{
    return plan->problem.dtype_out == ATTN_F32 && t->stride[3] == 1;
}
/* Where the query tiles of sequence `index` begin among those of all: each sequence has a place for each of
 * its tiles, and at most one more, so that no list of them is needed. */
static inline int64_t attn__first_place(const attn__backward *b, int64_t index)
{
    return attn__rows_before(&b->sequences, index) / b->plan->tile_q + index;
}
/* Where the arrays of the workspace keep a query row. */
static inline int64_t attn__row_at(const attn__backward *b, const attn__sequence *s, int64_t head,
                                   int64_t row)
{
    return s->rows_before * b->plan->problem.heads_q + head * s->q_count + row;
}
/* count rows of a plane of t from `token` on become rows, or those added to what was there. */
void attn__put_rows(const attn_plan *plan, const attn_tensor *t, int64_t batch, int64_t head, int64_t token,
                    int64_t count, int64_t dim, const float *rows, bool accumulate);
void attn__put_zeros(const attn_plan *plan, const attn_tensor *t, int64_t batch, int64_t head, int64_t token,
                     int64_t count, int64_t dim);

#endif
