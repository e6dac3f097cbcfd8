/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h - a group of workers, as the engine sees it.  Experimental until version 1.0.
 *
 * Only two things move between workers, and both have names instead of addresses:
 *
 *   get    token groups of q, k and v, to every worker whose quorum holds them, before it computes;
 *   put    one partial (o, lse) per worker and query group, to the owner of those rows, afterwards.
 *
 * The library brings one group: W workers in one process that share an attn_source and a partial store
 * (src/comm/local.c).  A transport (MPI, NCCL) fills the same six slots; it fills get from the worker at
 * whose home the group is, and hands each partial that arrives to `deliver`.
 *
 * Rules of the slots: begin starts and may return before anything moved; wait returns when the buffer may be
 * used (get) or reused (put).  At most one ticket per call; tickets of one worker may be waited for in any
 * order. Every slot returns a status and sets the error text by attn_fail().  A worker calls its own
 * attn_comm from one thread at a time; different workers' attn_comm at once.
 */
#ifndef ATTN_COMM_H
#define ATTN_COMM_H

#include "attn/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_comm attn_comm;

/* Tokens first..first+count of one operand and batch, all heads; element (head, row, c) goes to
 * dst[head * head_stride + row * dim + c]. */
typedef struct attn_get {
    attn_operand operand;
    int64_t batch, group, first, count;
    void *dst;
    int64_t head_stride;
} attn_get;

/* What worker `rank` computed for the rows first..first+count (one query group):
 * o[batch][heads_q][count][dim_v] and lse[batch][heads_q][count], dense fp32.  Rows that it did not compute
 * hold the identity (0, -inf). */
typedef struct attn_partial {
    int64_t rank, group, first, count;
    const float *o;
    const float *lse;
} attn_partial;

typedef struct attn_comm_ops {
    size_t size; /* sizeof(attn_comm_ops) */
    const char *name;
    attn_status (*get_begin)(attn_comm *comm, const attn_get *get, void **ticket);
    attn_status (*get_wait)(attn_comm *comm, void *ticket);
    attn_status (*put_begin)(attn_comm *comm, const attn_partial *partial, void **ticket);
    attn_status (*put_wait)(attn_comm *comm, void *ticket);
    /* All workers planned the same: fails on every worker if the fingerprints differ. */
    attn_status (*agree)(attn_comm *comm, uint64_t fingerprint);
    void (*free)(attn_comm *comm);
} attn_comm_ops;

struct attn_comm {
    const attn_comm_ops *ops;
    int64_t rank, size;
    void *data; /* the transport's own */
};

#ifdef __cplusplus
}
#endif
#endif
