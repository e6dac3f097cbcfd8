/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backward_parts.h - into how many parts a group of query heads is cut for the gradients on Hopper.
 */
#ifndef ATTN_BACKWARD_PARTS_H
#define ATTN_BACKWARD_PARTS_H

#include "kernel/cuda/cuda.h"

/* What the kernel for the call's dims has, on a device. */
typedef struct attn__backward_tiles {
    int64_t queries, keys; /* of a step, of a tile */
    int64_t dim;           /* padded */
    int64_t clusters;      /* that take tiles at once */
    int64_t l2;            /* bytes of the cache that large groups lose; INT64_MAX: they lose nothing */
    int64_t tile_steps;    /* what a tile's begin and end cost, in steps, */
    int64_t part_steps;    /* and dK and dV, if they are one of several parts */
    double tail;           /* how much of the longest tile is waited for at the end: 0 if it comes first, more
                            * where heads come one after the other and the last one's tiles are as long */
} attn__backward_tiles;

/* Of Q, dO and the sum of dQ together, for each dim of a query. */
enum { ATTN__BACKWARD_BYTES = 8 };

/* Do tiles of keys meet unequal numbers of queries, as under a causal band, and add to dQ in any order? */
static inline bool attn__backward_uneven(const attn__cuda_call *call)
{
    return call->left >= call->tokens_kv && call->right < call->tokens_kv && !call->deterministic;
}

/*
 * A divisor of the group.  Reads nothing of the call that may change between the calls of one plan: the
 * workspace depends on it.
 */
int64_t attn__cuda_backward_parts(const attn__cuda_call *call, const attn__backward_tiles *tiles);

#endif
