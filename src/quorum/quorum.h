/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quorum.h - who holds what and who computes what, in integers only.
 *
 *   groups    N tokens fall into W token groups (attn__groups)
 *   cover     a set whose differences cover Z_W (attn__cover): table, Singer, Wichmann, or the user's
 *   schedule  for each difference one (a, b): which ordered pairs worker i computes (attn__schedule)
 *   band      how many cells of a block are visible (attn__band)
 *
 * Terms as in docs/ and attn.h: token group, interest set, quorum, material list, task list.
 */
#ifndef ATTN_QUORUM_H
#define ATTN_QUORUM_H

#include "base/base.h"

/* ---- token groups (groups.c) ---- */

/* With N = qW + r the first W - r groups have q tokens, the last r have q + 1. */
static inline int64_t attn__group_first(int64_t tokens, int64_t workers, int64_t group)
{
    int64_t rest = tokens % workers;
    return group * (tokens / workers) + attn__max(0, group - (workers - rest));
}

static inline int64_t attn__group_count(int64_t tokens, int64_t workers, int64_t group)
{
    return tokens / workers + (group >= workers - tokens % workers ? 1 : 0);
}

/* ---- difference covers (cover.c, table.c, singer.c, wichmann.c, fit.c, search.c) ---- */

typedef struct attn__cover {
    int64_t workers;
    int64_t size;
    int64_t *set;       /* ascending, first 0, in [0, workers); owned */
    const char *origin; /* static: "table", "singer", "wichmann", "user" */
} attn__cover;

/* The smallest cover known for `workers`: built-in table, Singer set where workers = q^2+q+1, Wichmann ruler.
 */
attn_status attn__cover_best(attn__cover *cover, int64_t workers);
/* The user's set: any order, reduced mod workers, translated so that its least element is 0; refused with the
 * uncovered differences if it is no cover. */
attn_status attn__cover_user(attn__cover *cover, int64_t workers, const int64_t *set, int64_t size);
void attn__cover_free(attn__cover *cover);

/* Each construction alone; ATTN_EUNSUPPORTED, without words since others are tried, where it has no set for
 * `workers`: beyond the table, and where no prime power q up to 4096 makes q^2 + q + 1 of it. */
attn_status attn__cover_table(attn__cover *cover, int64_t workers);
attn_status attn__cover_singer(attn__cover *cover, int64_t workers);
attn_status attn__cover_wichmann(attn__cover *cover, int64_t workers);

/* Differences of Z_workers that set does not cover: writes up to capacity of them, returns how many there
 * are; -1 when there is no memory to count them. */
int64_t attn__cover_missing(int64_t workers, const int64_t *set, int64_t size, int64_t *missing,
                            int64_t capacity);

/* Replaces the set by the multiple (by a unit of Z_W), or the other known set of the same size, whose longest
 * subsequence for `tokens` is least; bounded work for any W.  A user's set stays as it is. */
attn_status attn__cover_fit(attn__cover *cover, int64_t tokens);

/*
 * Replaces the set by the multiple and translate that moves the fewest bytes under a causal mask, of those
 * whose longest subsequence for `tokens` is not longer than now.  Weights: what a row of queries (q and o)
 * and a row of keys (k and v) costs.  Bounded work for any W.  A user's set stays as it is.
 */
attn_status attn__cover_fit_causal(attn__cover *cover, int64_t tokens, int64_t weight_q, int64_t weight_kv);

/* Most tokens that any quorum {i + a} of the set holds. */
int64_t attn__cover_longest(const attn__cover *cover, int64_t tokens);

/* ---- the schedule (schedule.c) ---- */

/* Visible means lo <= key - query <= hi, on global positions. */
typedef struct attn__band {
    int64_t lo, hi;
} attn__band;
#define ATTN__BAND_OPEN (INT64_MAX / 4) /* "no bound": lo = -OPEN, hi = OPEN */

/* Visible cells of the block [q, q + nq) x [k, k + nk); O(1). */
int64_t attn__band_cells(attn__band band, int64_t q, int64_t nq, int64_t k, int64_t nk);

typedef struct attn__schedule attn__schedule;

typedef struct attn__layout {
    int64_t workers;
    int64_t tokens_q, tokens_kv;
    attn__band band;
    bool classic;
} attn__layout;

/*
 * Worker i holds the query groups i + A and the key groups i + B.  For each difference d of Z_W one (a, b) in
 * A x B with b - a = d is fixed: worker i computes (query group i + a, key group i + b).  A = B = I is CQS;
 * there d and -d use the same two offsets reversed.  Even W, d = W/2: classic gives both directions to the
 * workers i < W/2; otherwise worker i takes its own direction when no mask cuts the pair, and half of the
 * query rows of each direction when one does, so that the load is equal. The sets are copied.  O(k^2 + W)
 * time and memory.
 */
attn_status attn__schedule_cyclic(attn__schedule **schedule, const attn__layout *layout,
                                  const attn__cover *cover);
/* a = |A|; 1 is ring, and W gives every worker all keys... of one group. */
attn_status attn__schedule_rectangular(attn__schedule **schedule, const attn__layout *layout, int64_t a);
void attn__schedule_free(attn__schedule *schedule);

const attn__layout *attn__schedule_layout(const attn__schedule *schedule);
/* Offsets A and B, ascending mod W, owned by the schedule. */
void attn__schedule_sets(const attn__schedule *schedule, const int64_t **set_q, int64_t *size_q,
                         const int64_t **set_kv, int64_t *size_kv);

/* The most pairs that attn__schedule_pairs writes: 2 * W at most. */
int64_t attn__schedule_capacity(const attn__schedule *schedule);
/* The task list of one worker, by query group, then key group, then part; blocks with no visible cell left
 * out.  pairs[capacity] is the caller's; returns how many.  Allocates nothing. */
int64_t attn__schedule_pairs(const attn__schedule *schedule, int64_t rank, attn_pair *pairs);
/* The k^2 ordered pairs before distillation are the product of the two quorums; nothing to store. */

/* Rows of a pair: query rows (the half that `part` names) and key rows, as global positions. */
typedef struct attn__block_rows {
    int64_t q_first, q_count, kv_first, kv_count;
} attn__block_rows;
attn__block_rows attn__schedule_rows(const attn__schedule *schedule, attn_pair pair);

/* Counts each cell's owners over all workers (attn_proof in attn.h). */
attn_status attn__schedule_prove(const attn__schedule *schedule, attn_proof *proof);

/* ---- costs (cost.c) ---- */

typedef struct attn__bytes { /* of one token row, over all batches and heads */
    int64_t q, k, v;         /* in the problem's dtype */
    int64_t o;               /* one partial row: fp32 o and lse */
    int64_t out;             /* one row of O and dO in the problem's dtype; dQ, dK, dV are as q, k, v */
    int64_t stat;            /* lse or D of one row, fp32 */
} attn__bytes;

typedef struct attn__traffic {
    int64_t cells;
    int64_t bytes_in, bytes_out; /* forward, own group at home */
    int64_t backward_in, backward_out;
    int64_t messages; /* forward: workers that it gets material from, and partials that it sends */
} attn__traffic;

/* What one worker's task list makes it move.  pairs as from attn__schedule_pairs.  Allocates nothing. */
attn_status attn__schedule_traffic(const attn__schedule *schedule, int64_t rank, const attn_pair *pairs,
                                   int64_t count, const attn__bytes *bytes, attn__traffic *traffic);

/* The four rows of the cost table (cyclic with this cover, best rectangular, ring, Ulysses); formulas in
 * docs/costs.md. Exact sums over all workers up to ATTN__COUNTED workers, the formulas above. */
#define ATTN__COUNTED 2048
attn_status attn__cost_table(const attn__layout *layout, const attn__cover *cover, int64_t heads_q,
                             int64_t heads_kv, const attn__bytes *bytes, attn_cost rows[4]);

/* a of the rectangular quorum that moves the fewest bytes. */
int64_t attn__rectangle_best(const attn__layout *layout, const attn__bytes *bytes);

/* Simulated annealing for a cover of `size` elements; see attn_interest_search() in attn.h. */
attn_status attn__cover_search(int64_t workers, int64_t size, double seconds, uint64_t seed, int64_t *set,
                               int64_t *found);

#endif
