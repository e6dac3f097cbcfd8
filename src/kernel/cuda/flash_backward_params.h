/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_params.h - what the launcher of the Hopper gradients hands to its kernels, in words that
 * both C11 and nvcc read.
 */
#ifndef ATTN_FLASH_BACKWARD_PARAMS_H
#define ATTN_FLASH_BACKWARD_PARAMS_H

#include "kernel/cuda/params.h"

enum {
    /* dims padded to 64, 128, 256: queries and keys of a step of the main kernel */
    ATTN__BACKWARD_QUERIES_64 = 128,
    ATTN__BACKWARD_QUERIES_128 = 64,
    ATTN__BACKWARD_QUERIES_256 = 64,
    ATTN__BACKWARD_KEYS_64 = 128,
    ATTN__BACKWARD_KEYS_128 = 128,
    ATTN__BACKWARD_KEYS_256 = 128, /* of two blocks, half each */
    /* bytes of shared memory, as the kernels lay it out (they check it) */
    ATTN__BACKWARD_SHARED_64 = 221184,
    ATTN__BACKWARD_SHARED_128 = 221184,
    ATTN__BACKWARD_SHARED_256 = 231424,
    ATTN__BACKWARD_PIECE = 1024, /* floats of dQ that a warp adds in one go: 16 rows, 64 columns */
};

typedef struct attn__backward_params {
    attn__tile_map q, k, v, dout;
    attn__cuda_tensor dk, dv, dq, o_rows, dout_rows, lse, given_delta;
    attn__cuda_tensor dk_parts, dv_parts; /* of several parts: fp32, a head for each, to be added up */
    const int64_t *cu_q, *cu_kv;
    /* by query head and tile of queries, tiles of all sequences in a row: */
    float *minus_lse; /* - lse * log2(e), -inf where P is 0; in the order that the threads read it */
    float *delta;     /* the same order */
    float *dq_sum;    /* dQ / scale, as the accumulators lie in their threads */
    int32_t
        *turns;    /* deterministic: of each piece of dQ, the tiles of keys that have added theirs; or NULL */
    int32_t *next; /* the next tile of keys that no block has taken */
    float scale, scale_log2;
    /* A group of query heads is cut into parts (backward_parts.c), and each is a key head to the main
     * kernel: heads_kv counts parts, and group the query heads of one. */
    int32_t batch, heads_q, heads_kv, group, parts;
    int32_t tokens_q, tokens_kv;         /* of a sequence, at most */
    int32_t dim_qk, dim_v, dim;          /* dim: padded */
    int32_t left, right, shift, shifted; /* see cuda.h; sides at most FAR */
    int32_t tiles_q, tiles_kv;           /* of a sequence, at most */
    int32_t slots;                       /* tiles of queries of a head, all sequences */
    int32_t together;                    /* heads whose tiles of keys take turns */
    int32_t last;                        /* from this head on all take turns with each other */
    int32_t run;   /* tiles of queries that a tile of keys meets before the group's next head */
    int32_t tiles; /* of keys, of all heads and sequences */
    int32_t accumulate, out_f32;
    attn__cuda_tensor q_rows, k_rows, v_rows; /* for the few rows that are made anew */
} attn__backward_params;

#endif
