/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - where quorum, kernel and comm meet.
 *
 *   problem.c    the problem: defaults, checks, string form
 *   scheduler.c  problem + options -> plan: kernel, W, schedule, memory.  Touches no data.
 *   inspect.c    a plan looked at: groups, pairs, costs, proof, verdicts
 *   io.c         tensors in memory as a source and a sink
 *   execute.c    one execute: starts the workers, then the merge
 *   worker.c     one rank: gather -> compute -> hand over
 *   tiler.c      partials -> rows, in a fixed order
 *   spool.c      partials on disk: manifest, pieces, resume
 *   reference.c  the fp64 reference over a problem
 *   peak.c       what the machine's multiply-adds reach at most
 */
#ifndef ATTN_ENGINE_H
#define ATTN_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "comm/comm.h"
#include "kernel/kernel.h"
#include "quorum/quorum.h"

/* ---- the plan (scheduler.c) ---- */

/* Byte sizes and offsets within the workspace; each part 64-byte aligned. */
typedef struct attn__space {
    int64_t kv_rows, q_rows; /* most rows that a worker holds or computes at once */
    int64_t gather;  /* per resident worker: K, V of its quorum and Q of one group; 0 when in memory */
    int64_t partial; /* per resident worker: o and lse of one query group; 0 when direct */
    int64_t lists;   /* per resident worker: pairs and held groups */
    int64_t thread;  /* per kernel thread: scratch, spans, a tile of o and lse */
    int64_t worker;  /* one resident worker: the above, for all its threads */
    int64_t tiler;   /* accumulators (memory) or fold buffers (spool), and turns */
    int64_t total;
} attn__space;

struct attn_plan {
    attn_problem problem;
    attn__band band;
    attn__layout layout;
    attn__cover cover; /* cyclic only; kept for the cost table */
    attn__schedule *schedule;
    attn_quorum quorum;
    const attn__kernel *kernel;
    attn__shape shape;
    int64_t tile_q;
    int64_t resident;
    int threads; /* of each resident worker */
    bool in_memory;
    bool direct; /* W = 1 without a spool: a kernel's rows are the result */
    bool spooled;
    char *spool;
    char *manifest; /* the spool's identity, as text */
    uint64_t fingerprint;
    attn__space space;
    attn_event_fn event;
    void *event_data;
    int64_t *sets; /* A then B, for attn_summary */
    int64_t set_q_size, set_kv_size;
};

/* Every part of the workspace begins on a cache line. */
static inline int64_t attn__aligned(int64_t bytes)
{
    return attn__ceil_div(bytes, 64) * 64;
}

static inline const int64_t *attn__plan_set_q(const attn_plan *plan)
{
    return plan->sets;
}
static inline const int64_t *attn__plan_set_kv(const attn_plan *plan)
{
    return plan->sets + plan->set_q_size;
}

attn__band attn__problem_band(const attn_problem *problem);
/* What one token row of each operand weighs, over all batches and heads. */
attn__bytes attn__problem_bytes(const attn_problem *problem);

/* Heads of an operand, its last dimension, its tokens. */
static inline int64_t attn__heads(const attn_problem *p, attn_operand x)
{
    return x == ATTN_Q ? p->heads_q : p->heads_kv;
}
static inline int64_t attn__dim(const attn_problem *p, attn_operand x)
{
    return x == ATTN_V ? p->dim_v : p->dim_qk;
}
static inline int64_t attn__tokens(const attn_problem *p, attn_operand x)
{
    return x == ATTN_Q ? p->tokens_q : p->tokens_kv;
}

/* ---- io.c ---- */

/* Fills in contiguous strides where all are zero. */
void attn__tensor_strides(attn_tensor *tensor, int64_t heads, int64_t tokens, int64_t dim);

typedef struct attn__memory_io {
    const attn_problem *problem;
    attn_tensor in[3], o, lse;
    attn_source source;
    attn_sink sink;
} attn__memory_io;

/* Checks the inputs of io against the problem and wraps its tensors; a source of io's own is taken over. */
attn_status attn__io_inputs(attn__memory_io *memory, const attn_problem *problem, const attn_io *io);
/* Inputs and outputs. *memory must stay where it is while the source or sink is used. */
attn_status attn__io_open(attn__memory_io *memory, const attn_problem *problem, const attn_io *io);

/* ---- one execute ---- */

typedef struct attn__run {
    const attn_plan *plan;
    attn__memory_io io;
    attn__local local;
    char *residents; /* parts of the workspace: threads' records, workers' parts, the Tiler's */
    char *workspace;
    atomic_int_least64_t next_rank;
    pthread_mutex_t lock; /* events, status, turns */
    pthread_cond_t turned;
    attn_status status; /* first failure of any worker */
    char text[1024];    /* its words */
    int64_t *turn;      /* per query group: how many contributors have folded */
    char *tiler;
    float *acc_o, *acc_lse; /* [batch][heads_q][tokens_q] rows, memory mode */
    unsigned char *have;    /* spool mode: [rank][a]: a piece exists */
    int spool_folder;       /* descriptors, spool mode */
    int spool_lock;
} attn__run;

/* Tells the user; ATTN_ECANCELED if he wants no more. */
attn_status attn__run_event(attn__run *run, attn_event event);
/* Remembers the first failure and wakes all who wait. */
void attn__run_failed(attn__run *run, attn_status status);
bool attn__run_stopped(attn__run *run);

/* Bytes for the records of the resident workers' threads. */
int64_t attn__resident_space(int64_t residents);

/* ---- worker.c ---- */

/* All of rank's tasks, in workspace slot `slot` of the resident workers. */
attn_status attn__worker(attn__run *run, int64_t rank, int64_t slot);

/* ---- tiler.c ---- */

void attn__tiler_begin(attn__run *run);
/* The local group's deliver: folds in turn, or writes a piece. */
attn_status attn__tiler_deliver(void *run, const attn_partial *partial);
/* Worker `rank` has nothing for `group`: its turn passes. */
attn_status attn__tiler_pass(attn__run *run, int64_t rank, int64_t group);
/* All workers are done: rows to the sink. */
attn_status attn__tiler_finish(attn__run *run);
/* Bytes that it needs. */
int64_t attn__tiler_space(const attn_plan *plan, int64_t workers, int64_t size_q);

/* ---- spool.c ---- */

/* Creates or checks the folder and its manifest, takes the lock. */
attn_status attn__spool_open(attn__run *run);
void attn__spool_close(attn__run *run);
/* *found = a whole piece of this rank and group is there; a damaged one is told as an event and not found. */
attn_status attn__spool_find(attn__run *run, int64_t rank, int64_t group, bool *found);
attn_status attn__spool_write(attn__run *run, const attn_partial *partial);
/* Rows [row, row + count) of one (batch, head) out of a piece. */
attn_status attn__spool_read(attn__run *run, int64_t rank, int64_t group, int64_t plane, int64_t row,
                             int64_t count, float *o, float *lse);
/* The manifest's text for a plan; the caller frees it. */
char *attn__spool_manifest(const attn_plan *plan, const char *key);

#endif
