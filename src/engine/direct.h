/* SPDX-License-Identifier: Apache-2.0 */
/* direct.h - what direct.c (one execute of one worker) and few.c (its items of few queries) share. */
#ifndef ATTN_ENGINE_DIRECT_H
#define ATTN_ENGINE_DIRECT_H

#include "engine/engine.h"

/* One execute of a direct plan. */
typedef struct attn__forward {
    attn__run *run;
    attn_tensor in[3]; /* where q, k and v lie */
    int64_t *order;    /* sequences by falling number of keys */
    int64_t *first;    /* [batch + 1]: items of those before in that order */
    atomic_uint *done; /* [sequence][kv head]: tasks of few queries that have ended */
    float *partials;   /* [sequence][kv head][task]: theirs */
    char *threads;
} attn__forward;

/* What a thread takes out of its part of the workspace. */
typedef struct attn__forward_thread {
    void *scratch;
    float *o, *lse; /* a tile of results */
    char *q;        /* a tile of queries, dense */
} attn__forward_thread;

attn__forward_thread attn__forward_space(const attn__forward *f);

/* A kernel call without its rows: dims, mask, one span of the sequence's keys from `key` on.  `span` must
 * stay where it is. */
attn__block attn__forward_block(const attn__forward *f, const attn__sequence *s, int64_t kv_head, int64_t key,
                                int64_t count, attn__span *span);

/* ---- few.c ---- */

/* How a sequence of few queries is cut; tasks = 0: it is not one. */
typedef struct attn__few {
    int64_t rows;       /* queries x heads of a group */
    int64_t begin, end; /* keys that some query sees */
    int64_t chunk;      /* keys */
    int64_t run;        /* chunks of a task */
    int64_t tasks;      /* of one kv head */
} attn__few;

attn__few attn__few_of(const attn_plan *plan, const attn__sequence *s);
/* Most rows of such a sequence under the plan. */
int64_t attn__few_rows(const attn_problem *problem);
/* Bytes of `done` and of `partials`. */
int64_t attn__few_done_space(const attn_plan *plan);
int64_t attn__few_partial_space(const attn_plan *plan);
/* Task `item` of the sequence, over all kv heads. */
attn_status attn__few_compute(const attn__forward *f, const attn__sequence *s, int64_t sequence,
                              const attn__few *few, int64_t item);

#endif
