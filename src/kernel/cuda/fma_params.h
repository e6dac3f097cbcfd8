/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_params.h - the parameters of the fp32 kernels, as host and device see them.
 */
#ifndef ATTN_FMA_PARAMS_H
#define ATTN_FMA_PARAMS_H

#include <stdint.h>

/* Strides in elements.  wide: rows of fp32 that begin on multiples of 16 bytes. */
typedef struct attn__fma_array {
    void *data;
    int64_t batch, head, token;
    int32_t dtype; /* of attn.h */
    int32_t wide;
} attn__fma_array;

typedef struct attn__fma_problem {
    const int64_t *cu_q, *cu_kv;
    int64_t tokens_q, tokens_kv;
    int64_t left, right, shift; /* finite: at most 2^60 */
    int64_t batch, heads_q, heads_kv;
    int32_t parts; /* of dK and dV: each group is cut into so many, and heads_kv counts them all; else 1 */
    int32_t shifted;
    int32_t dim_qk, dim_v;
    float scale, factor; /* factor: scale / ln 2, for powers of 2 */
} attn__fma_problem;

typedef struct attn__fma_forward {
    attn__fma_problem problem;
    attn__fma_array q, k, v, o, lse;
    int64_t tiles, items; /* query tiles of a head; of all heads */
    int32_t merge;
} attn__fma_forward;

typedef struct attn__fma_backward {
    attn__fma_problem problem;
    attn__fma_array q, k, v, dout, lse, delta;
    attn__fma_array dk, dv;   /* of all heads_kv */
    attn__fma_array dq;       /* fp32: the caller's, or a sum in the workspace */
    int64_t tiles_q, tiles;   /* query tiles of a query head, key tiles of a kv head */
    int64_t items;            /* key tiles of all heads_kv */
    int32_t accumulate;       /* dk and dv */
    int32_t *turns;           /* [batch][heads_q][tiles_q]: key tiles that have added to the query tile */
    unsigned long long *next; /* the first item that nobody has taken */
} attn__fma_backward;

/* Rows of the queries of all heads: what goes before and after the gradients. */
typedef struct attn__fma_rows {
    attn__fma_problem problem;
    attn__fma_array o, dout, delta; /* before: delta = rowsum(o * dout), unless delta.data is NULL */
    attn__fma_array sum, dq;        /* sum: fp32, as dq of above; before: becomes 0, unless data is NULL */
    int32_t accumulate;             /* after: dq += sum, else dq = sum */
} attn__fma_rows;

/* dK or dV, the sum of the fp32 parts of its heads, always in the same order. */
typedef struct attn__fma_sum {
    attn__fma_problem problem;
    attn__fma_array parts, to;
    int32_t dim, accumulate;
} attn__fma_sum;

/* Numbers of a tile in three parts of bf16: 64 rows of 64, 32 of 128 and of 256.  Bytes of its image: the
 * parts, and a number for each row. */
#define ATTN__BF16X3_TILE(width)  ((width) > 128 ? 8192 : 4096)
#define ATTN__BF16X3_IMAGE(width) (ATTN__BF16X3_TILE(width) * 6 + 256)

/* A tensor to such tiles. */
typedef struct attn__bf16x3_parts {
    attn__fma_array from, lse, delta; /* lse: of q and dout; delta: of dout; else data is NULL */
    char *to;                         /* [heads][slots] */
    const int64_t *ends;              /* where the sequences end, or NULL: all have `tokens` */
    int64_t heads, tokens;
    int64_t tiles, slots; /* of a sequence; of all sequences of a head */
    int64_t items;        /* tiles of all */
    int32_t *stained;     /* becomes 1 if dout has what is not finite */
    int32_t dim, width;
} attn__bf16x3_parts;

/* Two tensors in such tiles: q and dout, or k and v. */
typedef struct attn__bf16x3_side {
    const char *x, *y;
    int64_t heads, tiles, slots;
} attn__bf16x3_side;

/* Gradients of `rows`, each from all `columns` that it sees or is seen by: of q, or of k and v. */
typedef struct attn__bf16x3_pass {
    attn__fma_problem problem;
    attn__bf16x3_side rows, columns;
    attn__fma_array dx, dy, dout, lse; /* dx: of q or k; dy: of v, data may be NULL */
    const int32_t *stained;
    int64_t heads;        /* of the rows' gradients */
    int64_t tiles, items; /* of a sequence's rows, as the kernel takes them; of all */
    int32_t accumulate;
    uint32_t zero; /* 0, which the compiler does not know */
} attn__bf16x3_pass;

/* Any tensor to fp32 rows of `width` elements, a multiple of 4, dense in the order batch, head, token. */
typedef struct attn__fma_copy {
    attn__fma_array from;
    float *to;
    const int64_t *ends; /* [count + 1], the last of which is the number of tokens, or NULL: `tokens` */
    int64_t count;
    int64_t batch, heads, tokens;
    int32_t dim, width;
} attn__fma_copy;

#endif
