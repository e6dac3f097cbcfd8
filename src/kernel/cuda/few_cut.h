/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_cut.h - how a call of few-sm90 is cut into tiles, and these into shares of blocks.
 */
#ifndef ATTN_CUDA_FEW_CUT_H
#define ATTN_CUDA_FEW_CUT_H

#include "kernel/cuda/cuda.h"

typedef struct attn__few_cut {
    int64_t height;      /* rows that a tile has room for: the kernel that is taken */
    int64_t tiles, all;  /* of a kv head; of all */
    int64_t rows;        /* of a tile, at most */
    unsigned dim;        /* that the kernel is made for: 64, 128 or 256 */
    bool split;          /* 64 rows by two warpgroups, which share a tile */
    bool fixed;          /* all sequences are of one length */
    bool pairs;          /* blocks add their sums two by two */
    int64_t first_units; /* of the first tile, if fixed */
    int64_t most;        /* blocks that run at once and have work */
    int64_t each;        /* blocks of a tile, if all tiles are cut alike; else 0 */
    int64_t blocks;      /* that are taken */
} attn__few_cut;

/* Query rows of a kv head. */
static inline int64_t attn__few_rows(const attn__cuda_call *call)
{
    return call->tokens_q * (call->heads_q / call->heads_kv);
}

/* Tiles of a kv head. */
int64_t attn__few_tiles(const attn__cuda_call *call);

/* Keys that tiles see, of the longest sequence, about; a call with queries. */
typedef struct attn__few_seen {
    double least, mean;
} attn__few_seen;
attn__few_seen attn__few_seen_of(const attn__cuda_call *call);

/* Where a band begins or ends: -2^40 to 2^40, which is further than any key from any query. */
int64_t attn__few_clamp(int64_t x);

/* Of a call that has tiles. */
attn__few_cut attn__few_cut_of(const attn__cuda_call *call, const attn__cuda_device *device);

/* Does each block have whole tiles, so that there is nothing to merge? */
bool attn__few_whole(const attn__few_cut *c);

/* Parts of each tile, where all are cut alike: one of a block, or of two. */
static inline int64_t attn__few_parts(const attn__few_cut *c)
{
    return c->each / (c->pairs ? 2 : 1);
}

/* Rows of all parts that a call like this one writes, with as many tokens or fewer, at most. */
int64_t attn__few_part_rows(const attn__cuda_call *call, const attn__cuda_device *device);

#endif
