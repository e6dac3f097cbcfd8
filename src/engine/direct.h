/* SPDX-License-Identifier: Apache-2.0 */
/* direct.h - what direct.c (one execute of one worker) and few.c (its items of few queries) share. */
#ifndef ATTN_ENGINE_DIRECT_H
#define ATTN_ENGINE_DIRECT_H

#include "engine/engine.h"

/* One (sequence, kv head) of few queries. */
typedef struct attn__few_plane {
    int64_t region; /* of the partials, while it is at work; -1 */
    int64_t done;   /* tasks that have ended */
} attn__few_plane;

/* The items of one (sequence, kv head), whose keys a thread goes on with; or all items. */
typedef struct attn__queue {
    atomic_int_least64_t next;
    int64_t begin, end;
} attn__queue;

/* One execute of a direct plan. */
typedef struct attn__forward {
    attn__run *run;
    attn_tensor in[3];   /* where q, k and v lie */
    int64_t *order;      /* sequences by falling number of keys */
    int64_t *first;      /* [batch + 1]: items of those before in that order */
    double cost;         /* of all items: each as many as it has keys */
    attn__queue *queues; /* in the order of the items */
    int64_t queue_count;
    bool in_order;           /* one queue, since some sequence is of few queries */
    attn__few_plane *planes; /* [sequence][kv head]; under the run's lock, as the free regions are */
    int64_t *free;           /* regions that no plane has */
    int64_t free_count;
    float *partials; /* [region][task] */
    char *threads;
    atomic_int_least64_t taken; /* items */
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
/* Lays out planes, free regions and partials from *at on (NULL: only counts); returns the bytes. */
int64_t attn__few_lay_out(attn__forward *f, const attn_plan *plan, char *at);
/* All planes idle, all regions free. */
void attn__few_begin(attn__forward *f);
/* Task `item` of the sequence, over all kv heads. */
attn_status attn__few_compute(attn__forward *f, const attn__sequence *s, int64_t sequence,
                              const attn__few *few, int64_t item);

#endif
