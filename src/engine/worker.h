/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.h - one rank's share as worker.c and stage.c know it.
 */
#ifndef ATTN_WORKER_H
#define ATTN_WORKER_H

#include "engine/engine.h"

/* Where things are in this worker's part of the workspace. */
typedef struct attn__rank_work {
    attn__run *run;
    attn_comm comm;
    int64_t slot; /* which of the resident workers */
    attn_pair *pairs;
    int64_t pair_count;
    int64_t *groups; /* query groups of the quorum, ascending */
    int64_t *held;   /* key groups that some pair needs, ascending */
    int64_t *offset; /* of each held group: first row in the arena */
    int64_t held_count, held_rows;
    char *k, *v, *q; /* the arena, NULL in memory and on a GPU */
    float *o, *lse;  /* the partial */
    char *threads;
    bool gathered; /* the keys are there */
} attn__rank_work;

/* One kernel call's surroundings: rows [first, first+count) against the pairs that reach them. */
typedef struct attn__piece {
    int64_t group, group_first, group_count;
    const attn_pair *pairs;
    int64_t pair_count;
    int64_t first, count;
    int part; /* pairs of the other half do not reach these rows */
} attn__piece;

/* Visible cells of the piece's pairs; tells of a gather; hands the partial (o, lse) of the piece's group
 * over. */
int64_t attn__pairs_cells(const attn_plan *plan, const attn__piece *t);
attn_status attn__worker_gathered(attn__rank_work *w, int64_t group, double begin, int64_t bytes);
attn_status attn__worker_hand_over(attn__rank_work *w, const attn__piece *t, float *o, float *lse);

/* ---- stage.c: the same share on a GPU, for inputs that are not in its memory ---- */

/* One query group: reads what it needs, enqueues, and hands the group before it over. */
attn_status attn__stage_group(attn__rank_work *w, const attn__piece *t);
/* The rank's last group is handed over, and the GPU is idle. */
attn_status attn__stage_end(attn__rank_work *w);

#endif
