/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel.h - the kernel contract: one query block against a list of key/value spans gives one partial, or
 * adds up gradients.
 *
 * A kernel computes, for the query rows of one (batch, head), softmax over the visible keys of all its spans:
 * o normalised, lse natural; a row that sees no key has o = 0, lse = -inf; a NaN stays in the rows that see
 * it (a masked key or value may be NaN or inf and must not leak).  Inputs are dtype with any strides; sums,
 * scores and results are fp32.  It is one thread's work: the caller runs blocks side by side.  The bits
 * depend only on the block; those of a row, where lo bounds no key of it, not on where its block begins, as
 * long as blocks of the same rows are cut at multiples of 128, or of 64 where keys are kept.
 */
#ifndef ATTN_KERNEL_H
#define ATTN_KERNEL_H

#include "base/base.h"

/* Keys and values at the global positions first..first+count.  Strides in elements: next token, next dim. */
typedef struct attn__span {
    int64_t first, count;
    const void *k, *v;
    int64_t k_token, k_dim, v_token, v_dim;
} attn__span;

typedef struct attn__block {
    attn_dtype dtype;
    int64_t dim_qk, dim_v;
    float scale;
    int64_t lo, hi;       /* key j is visible to query i when lo <= j - i <= hi */
    int64_t first, count; /* query rows, global positions; count <= the row's tile_q */
    const void *q;
    int64_t q_token, q_dim;
    const void *next_q; /* queries, strides alike, that the caller's next call is likely to have, or NULL: may
                         * be asked for, is not read */
    const attn__span *spans; /* ascending, disjoint; none is legal */
    int64_t span_count;
    bool keep_keys; /* other calls have the same spans: what this one makes of them is worth keeping */
    bool same_keys; /* the spans, and what lies there, are those of the last call with this scratch: what that
                     * kept may be used again */
    float *o;       /* [count] rows, o_stride elements apart, dense dims */
    int64_t o_stride;
    void *half_o; /* not NULL, only for a row that rounds_results: o rounded to half_dtype, here instead */
    attn_dtype half_dtype;
    float *lse; /* [count] */
} attn__block;

/*
 * The backward unit: the gradients that the query rows of one (batch, query head) and the keys of all spans
 * owe to each other,
 *
 *     P = exp(S - lse)    dS = P * (dO V^T - delta)    dQ += scale dS K    dK += scale dS^T Q    dV += P^T dO
 *
 * lse and delta (attn__delta) are those of the whole row, whatever part of its keys the spans are, so P <= 1;
 * rounding that says otherwise is cut off.  A row with lse = -inf, and a key that no row sees, changes
 * nothing; what is masked may be NaN or inf and does not leak.
 *
 * Results are ADDED to what dq, dk and dv hold, in fp32: the caller zeroes them, adds up the query heads that
 * share a kv head and the blocks of a sequence by calling on, and sees to it that no two threads add to the
 * same rows at once.  Each may be NULL, which saves its product.  The bits depend only on the block and on
 * what was there: for bits that do not depend on the number of threads, the cutting into blocks and the order
 * of the calls that add to a row must not.
 */
typedef struct attn__gradient_span {
    int64_t first, count;
    const void *k, *v;
    int64_t k_token, k_dim, v_token, v_dim;
    float *dk, *dv; /* [count] rows, dense dims */
    int64_t dk_token, dv_token;
} attn__gradient_span;

/*
 * Threads that have other keys add to the same dq, each in its turn.  A row of the table asks attn__dq_open()
 * before it reads or writes dq, as late as it can, so that what needs no dq is done while others have theirs.
 */
typedef struct attn__turn attn__turn;
struct attn__turn {
    bool (*come)(attn__turn *turn); /* waits for it, if it has not come; false: never, something has failed */
};

typedef struct attn__gradient {
    attn_dtype dtype;
    int64_t dim_qk, dim_v;
    float scale;
    int64_t lo, hi;
    int64_t first, count; /* query rows; count <= the row's backward_tile_q */
    const void *q, *dout; /* dout: the gradient of o, dtype */
    int64_t q_token, q_dim, dout_token, dout_dim;
    const float *lse, *delta; /* [count] */
    float *dq;                /* [count] rows, dense dims */
    int64_t dq_token;
    attn__turn *turn;                 /* at dq; NULL: it has come */
    const attn__gradient_span *spans; /* ascending, disjoint; none is legal */
    int64_t span_count;
} attn__gradient;

/* Is dq wanted, and its turn come?  To be asked before dq is touched, as often as one likes. */
static inline bool attn__dq_open(const attn__gradient *g)
{
    return g->dq != NULL && (g->turn == NULL || g->turn->come(g->turn));
}

/* What decides whether a kernel takes a problem, and its scratch. */
typedef struct attn__shape {
    attn_dtype dtype;
    int64_t dim_qk, dim_v;
    int64_t rows;   /* most query rows of a task */
    int64_t keys;   /* most keys of a task */
    bool keep_keys; /* blocks may have it: only if the row keeps_keys of this shape */
    bool backward;  /* gradients too */
} attn__shape;

/* One row of the kernel table.  No function of a row may be called, not even rejects, on a CPU without what
 * the row needs: its whole file is compiled for that. */
typedef struct attn__kernel {
    const char *name;                            /* "flash-avx2" */
    const char *summary;                         /* one line for attn info and --explain */
    uint32_t needs;                              /* ATTN__CPU_ bits, all of them */
    bool rounds_weights;                         /* of bf16 inputs, P to bf16 before P V */
    bool rounds_results;                         /* takes a block's half_o */
    int64_t (*tile_q)(const attn__shape *shape); /* query rows of one call */
    /* Can a call keep what it makes of keys for the calls that follow?  NULL: never. */
    bool (*keeps_keys)(const attn__shape *shape);
    const char *(*rejects)(const attn__shape *shape); /* NULL, or the reason (static text) */
    /* NULL, or why it is taken only when asked for by name; may itself be NULL */
    const char *(*declines)(const attn__shape *shape);
    size_t (*scratch)(const attn__shape *shape); /* bytes per thread, 64-byte aligned */
    void (*forward)(const attn__block *block, void *scratch);
    /* The same for gradients; all NULL in a row that has none. */
    int64_t (*backward_tile_q)(const attn__shape *shape);
    /* Keys of one call at which all query tiles in turn are fastest; any count is legal. */
    int64_t (*backward_tile_k)(const attn__shape *shape);
    /* Keys are added up to dq in tiles that end at multiples of this, each tile's part after the other: calls
     * for keys that are cut there, in rising order, give the bits of one call for all. */
    int64_t (*backward_step)(const attn__shape *shape);
    size_t (*backward_scratch)(const attn__shape *shape);
    void (*backward)(const attn__gradient *gradient, void *scratch);
    /* `rounds` of the multiply-adds that it is made of, on registers alone; returns the FLOPs.  NULL: unknown
     */
    int64_t (*peak)(int64_t rounds, float *sink);
} attn__kernel;

/* The one ordered table, best first (table.c); ends with a NULL entry. */
extern const attn__kernel *const attn__kernels[];

/* Why `kernel` does not take `shape` on this machine, or NULL if it does. */
const char *attn__kernel_refusal(const attn__kernel *kernel, const attn__shape *shape);
/* Why it takes `shape`, which it does not refuse, only when asked for by name, or NULL. */
const char *attn__kernel_reluctance(const attn__kernel *kernel, const attn__shape *shape);
/* The first row that takes shape without being asked for, or the one called `name`; fails with every row's
 * reason. */
attn_status attn__kernel_choose(const attn__kernel **kernel, const attn__shape *shape, const char *name);

/* The merge (merge.c): folds partial (o2, lse2) into (o1, lse1), rows of `dim`, strides in elements between
 * rows. (0, -inf) is the identity; NaN stays in its row.  Plain C, the same bits on every machine level. */
void attn__merge(float *o1, int64_t stride1, float *lse1, const float *o2, int64_t stride2, const float *lse2,
                 int64_t rows, int64_t dim);
/* rows of the identity */
void attn__merge_identity(float *o, int64_t stride, float *lse, int64_t rows, int64_t dim);

/* delta[i] = sum over d of o[i][d] * dout[i][d] (delta.c), for attn__gradient.  Any dtypes and strides, in
 * elements; plain C, the same bits on every machine level. */
typedef struct attn__rows {
    const void *data;
    attn_dtype dtype;
    int64_t token, dim;
} attn__rows;
void attn__delta(float *delta, const attn__rows *o, const attn__rows *dout, int64_t rows, int64_t dim_v);

/* fp64 reference state over pieces of the keys (reference.c): for attn_reference() and the "reference"
 * kernel. */
typedef struct attn__reference_row {
    double max, sum;
    double *acc; /* dim_v */
} attn__reference_row;
void attn__reference_begin(attn__reference_row *row, int64_t dim_v);
/* q[dim_qk], k[count][dim_qk], v[count][dim_v] dense fp64; adds keys first..first+count visible to query
 * `pos`. */
void attn__reference_add(attn__reference_row *row, const double *q, const double *k, const double *v,
                         int64_t first, int64_t count, int64_t pos, int64_t lo, int64_t hi, double scale,
                         int64_t dim_qk, int64_t dim_v);
/* acc becomes o; returns lse */
double attn__reference_end(attn__reference_row *row, int64_t dim_v);

/* The reference's gradients of one query, with the law and the layouts of above in dense fp64. */
typedef struct attn__reference_query {
    const double *q, *dout;
    double lse, delta;
    int64_t pos, lo, hi;
    double scale;
    int64_t dim_qk, dim_v;
    double *dq;
} attn__reference_query;
/* Adds what query and keys first..first+count owe to each other to query->dq, dk[count][dim_qk] and
 * dv[count][dim_v]. */
void attn__reference_backward(const attn__reference_query *query, const double *k, const double *v,
                              int64_t first, int64_t count, double *dk, double *dv);

#endif
