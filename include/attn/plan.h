/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - a plan looked at: what it costs, who holds what, who computes what, and the proof that each cell
 * is computed once.  attn.h includes it; it is no header to include alone.
 *
 * What is told here is what an execute will do: both ask the same schedule.  Nothing changes the plan, and
 * all functions may be called by several threads.
 */
#ifndef ATTN_PLAN_H
#define ATTN_PLAN_H

#ifndef ATTN_ATTN_H
#error "include attn/attn.h"
#endif

/* Smallest, largest, mean and standard deviation over the workers. */
typedef struct attn_spread {
    double min, max, mean, std;
} attn_spread;

typedef struct attn_summary {
    size_t size; /* sizeof(attn_summary), set by the caller */
    int64_t workers, resident;
    int threads;        /* of each resident worker */
    attn_quorum quorum; /* CYCLIC or RECTANGULAR, never AUTO */
    int classic;
    int64_t quorum_q, quorum_kv; /* |A| and |B|: query and key groups a worker holds; = |I| */
    const int64_t *set_q;        /* A (the interest set), quorum_q offsets, owned by the plan */
    const int64_t *set_kv;       /* B, quorum_kv offsets */
    const char *set_origin; /* "table", "singer", "wichmann", "user", "rectangular", ...; owned by the plan */
    attn_spread subsequence; /* tokens of a worker's groups, counted on the longer side */
    int64_t cells;           /* visible cells, per (batch, head), of all workers */
    int64_t ranks_counted; /* workers that the next three cover: W, or 0 where W is too large to count each */
    attn_spread cells_worker;
    attn_spread bytes_in;      /* forward, one group a worker at home: q, k, v that some cell needs */
    attn_spread bytes_out;     /* forward: fp32 partials and lse for rows at home elsewhere */
    const char *kernel;        /* the chosen row of the kernel table */
    int spooled;               /* partials go through a folder */
    int64_t workspace;         /* bytes, = attn_plan_workspace() */
    int64_t workspace_gather;  /* parts of it: groups held by the resident workers */
    int64_t workspace_partial; /* partials on their way and the Tiler's rows; dq, lse and D of gradients */
    int64_t workspace_kernel;  /* scratch of the kernel threads */
    int64_t device_memory;     /* of the GPU, owned by the plan, where inputs are outside of its memory */
    int64_t pinned_memory;     /* of the host, likewise: the way to the GPU and back; not in the workspace */
} attn_summary;

ATTN_API ATTN_MUST_CHECK attn_status attn_plan_summary(const attn_plan *plan, attn_summary *summary);

/* Token group g: its first token and its count (0 when N < W), on the query or the key side. */
ATTN_API void attn_plan_group(const attn_plan *plan, attn_operand side, int64_t group, int64_t *first,
                              int64_t *count);

/*
 * One block of the task list: query group x key group.  part 0: all query rows; 1 or 2: the lower or upper
 * half of them (half-difference pairs of an even W, which two workers share): rows [0, n/2) or [n/2, n) of
 * the group.
 */
typedef struct attn_pair {
    int64_t q, kv;
    int part;
} attn_pair;

/* One worker's share.  Arrays are owned by the struct: free with attn_rank_free(). */
typedef struct attn_rank {
    size_t size; /* sizeof(attn_rank), set by the caller */
    int64_t rank;
    int64_t *groups; /* the quorum: groups held, ascending; group_count of them */
    int64_t group_count;
    int64_t tokens;   /* in those groups, on the longer side (queries or keys) */
    attn_pair *pairs; /* the task list, by query group then key group; empty and masked blocks left out */
    int64_t pair_count;
    int64_t *needs_q; /* the material list: groups whose queries it reads */
    int64_t needs_q_count;
    int64_t *needs_kv; /* groups whose keys and values it reads */
    int64_t needs_kv_count;
    int64_t cells; /* visible cells per (batch, head) */
    int64_t bytes_in, bytes_out;
} attn_rank;

/* O(k^2) time and memory, whatever W. */
ATTN_API ATTN_MUST_CHECK attn_status attn_plan_rank(const attn_plan *plan, int64_t rank, attn_rank *out);
ATTN_API void attn_rank_free(attn_rank *out);

/* Counts how often each visible (query, key) cell is owned, over all workers: O(W^2) blocks, none assumed. */
typedef struct attn_proof {
    size_t size;      /* sizeof(attn_proof), set by the caller */
    int64_t cells;    /* visible cells of the problem, per (batch, head), by its mask alone */
    int64_t once;     /* of those, owned exactly once */
    int64_t missing;  /* owned by nobody */
    int64_t repeated; /* owned twice or more */
} attn_proof;
ATTN_API ATTN_MUST_CHECK attn_status attn_plan_prove(const attn_plan *plan, attn_proof *proof);

/* What a way of distributing costs a worker, in bytes; formulas in docs/costs.md. */
typedef struct attn_cost {
    size_t size;        /* sizeof(attn_cost), set by the caller */
    const char *scheme; /* "cyclic", "rectangular", "ring", "ulysses" */
    int64_t a, b;       /* |A|, |B|; 0 where they mean nothing */
    int possible;       /* 0: `why` tells why not */
    const char *why;
    double in_mean, in_max, out_mean, out_max; /* sharded: one group a worker at home, forward */
    double backward_in_mean, backward_in_max, backward_out_mean, backward_out_max;
    double root_in, root_out; /* a central root hands out all inputs, takes back all partials: root's bytes */
    double memory;            /* largest worker: inputs, buffers and partials */
    double balance;           /* most cells of a worker / mean */
    int64_t messages;         /* that a worker receives, forward */
} attn_cost;

/* Row `index` (0, 1, ...) of the cost table; ATTN_EINVAL past its end. */
ATTN_API ATTN_MUST_CHECK attn_status attn_plan_cost(const attn_plan *plan, int64_t index, attn_cost *cost);

/*
 * Searches for an interest set of Z_workers with `size` elements (0: as many as the best known has) for up to
 * `seconds`; set[capacity] takes it, *found its size, 0 when the time ran out.  What a seed finds, it finds
 * on every machine. ATTN_EINVAL where size * (size - 1) + 1 < workers: no such set can exist.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_interest_search(int64_t workers, int64_t size, double seconds,
                                                          uint64_t seed, int64_t *set, int64_t capacity,
                                                          int64_t *found);

#endif
