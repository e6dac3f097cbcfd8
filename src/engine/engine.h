/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - where quorum, kernel and comm meet.
 *
 *   problem.c    the problem: defaults, checks, string form
 *   scheduler.c  problem + options -> plan: kernel, W, schedule, memory.  Touches no data.
 *   inspect.c    a plan looked at: groups, pairs, costs, proof, verdicts
 *   sequence.c   the sequences of a batch, of equal or unequal length
 *   io.c         tensors in memory as a source and a sink
 *   execute.c    one execute: starts the workers, then the merge
 *   direct.c     W = 1 without a spool: rows go where they belong; few.c: few queries, many keys
 *   worker.c     one rank of several: gather -> compute -> hand over
 *   tiler.c      partials -> rows, in a fixed order
 *   spool.c      partials on disk: manifest, pieces, resume
 *   backward.c   one execute of the gradients; ranges.c: its items
 *   reference.c  the fp64 reference over a problem; reference_backward.c: of its gradients
 *   peak.c       what the machine's multiply-adds reach at most
 *   device.c     plans and executes in the memory of a GPU; stage.c: of inputs outside of it
 */
#ifndef ATTN_ENGINE_H
#define ATTN_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "comm/comm.h"
#include "kernel/cuda/cuda.h"
#include "kernel/kernel.h"
#include "quorum/quorum.h"

/* ---- the plan (scheduler.c) ---- */

/* Byte sizes and offsets within the workspace; each part 64-byte aligned. */
typedef struct attn__space {
    int64_t kv_rows, q_rows; /* most rows that a worker holds or computes at once */
    int64_t gather;  /* per resident worker: K, V of its quorum and Q of one group; 0 when in memory */
    int64_t partial; /* per resident worker: o and lse of one query group; backward: what its rows share */
    int64_t lists;   /* per resident worker: pairs and held groups; direct and backward: items by sequence */
    int64_t thread;  /* per kernel thread: scratch, spans, a tile of results */
    int64_t worker;  /* one resident worker: the above, for all its threads */
    int64_t device, pinned; /* of a GPU's plan with inputs outside its memory: owned by the plan */
    int64_t pair;           /* there: query groups on their way at once, 1 or 2 */
    int64_t tiler;          /* accumulators (memory) or fold buffers (spool), and turns */
    int64_t total;
} attn__space;

struct attn_plan {
    attn_problem problem;
    attn__band band;
    attn__layout layout;
    attn__cover cover; /* cyclic only; kept for the cost table */
    attn__schedule *schedule;
    attn_quorum quorum;
    const attn__kernel *kernel; /* NULL on a GPU */
    attn__shape shape;
    const attn__cuda_device *gpu;  /* NULL on the CPU */
    const attn__cuda_kernel *cuda; /* likewise */
    attn__cuda_call call;          /* what is known of it before the pointers are */
    struct attn__stage *stage;     /* of inputs outside the GPU\'s memory; else NULL */
    int64_t tile_q;                /* query rows of a tile, which a kernel call computes */
    int64_t call_rows;             /* of a call, at most: a tile's, or those of few queries (few.c) */
    int64_t range_keys;            /* of a range, at most (ranges.c); 0 without gradients */
    int64_t resident;
    int threads; /* of each resident worker */
    bool in_memory;
    bool direct;   /* W = 1 without a spool: a kernel's rows are the result */
    bool backward; /* gradients */
    bool dq_apart; /* of which dQ is made in a pass of its own: its fp32 sums have no room */
    bool spooled;
    char *spool;
    char *manifest; /* the spool's identity, as text; NULL with one worker and no spool */
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

/* The name of the chosen kernel. */
static inline const char *attn__plan_kernel(const attn_plan *plan)
{
    return plan->gpu != NULL ? plan->cuda->name : plan->kernel->name;
}

attn__band attn__problem_band(const attn_problem *problem);
/* The same mask for a sequence whose keys exceed its queries by `shift`. */
attn__band attn__mask_band(const attn_problem *problem, int64_t shift);
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

/* Takes `bytes` of the workspace at *at, from a cache line on. */
static inline void *attn__take(char **at, int64_t bytes)
{
    void *here = *at;
    *at += attn__aligned(bytes);
    return here;
}

/* Forward, for so many cells of every (batch, query head). */
static inline double attn__flops(const attn_problem *p, int64_t cells)
{
    return 2 * (double)cells * (double)(p->dim_qk + p->dim_v) * (double)(p->batch * p->heads_q);
}

/* FLOPs, some 40 us of one core: less is not worth waking other threads. */
static inline bool attn__worth_threads(double flops)
{
    return flops > 4e6;
}

/* ---- sequence.c ---- */

/* The sequences of a batch: one an entry, or cut out of the tokens by cumulative lengths. */
typedef struct attn__sequences {
    const attn_problem *problem;
    const int64_t *cu_q, *cu_kv; /* NULL: all of tokens_q and tokens_kv */
} attn__sequences;

/* One of them.  Positions within it, as a kernel and its band know them, begin at 0. */
typedef struct attn__sequence {
    int64_t batch;              /* of the tensors; 0 with cumulative lengths */
    int64_t q_first, q_count;   /* its tokens in the tensors */
    int64_t kv_first, kv_count; /* likewise */
    int64_t rows_before;        /* queries of all sequences before it */
    attn__band band;
} attn__sequence;

/* Queries of all sequences before this one. */
static inline int64_t attn__rows_before(const attn__sequences *s, int64_t index)
{
    return s->cu_q != NULL ? s->cu_q[index] : index * s->problem->tokens_q;
}

/* Are the lists there, or not, as the problem wants?  Reads none of their numbers. */
attn_status attn__sequences_lists(const attn_problem *problem, const int64_t *cu_q, const int64_t *cu_kv);
/* Checks the lists (from 0, never falling, no sequence too long, not too many tokens in all) and wraps them.
 */
attn_status attn__sequences_open(attn__sequences *sequences, const attn_problem *problem, const int64_t *cu_q,
                                 const int64_t *cu_kv);
attn__sequence attn__sequence_at(const attn__sequences *sequences, int64_t index);
/* Tokens of an operand's tensor, along its token axis. */
int64_t attn__sequences_tokens(const attn__sequences *sequences, attn_operand operand);
/* order[0 .. count): indices by falling key, equal keys by rising index. */
void attn__sort_falling(int64_t *order, const int64_t *key, int64_t count);

/* ---- io.c ---- */

/* Element 0 of a token's row. */
static inline void *attn__tensor_at(const attn_tensor *t, attn_dtype dtype, int64_t batch, int64_t head,
                                    int64_t token)
{
    int64_t at = batch * t->stride[0] + head * t->stride[1] + token * t->stride[2];
    return (char *)t->data + at * (int64_t)attn_dtype_size(dtype);
}

/* `dim` elements of 2 or 4 bytes, `stride` elements apart, to a dense row. */
void attn__copy_row(void *dst, const void *src, int64_t element, int64_t stride, int64_t dim);

/* Fills in contiguous strides where all are zero. */
void attn__tensor_strides(attn_tensor *tensor, int64_t heads, int64_t tokens, int64_t dim);

typedef struct attn__memory_io {
    const attn_problem *problem;
    attn__sequences sequences;
    attn_tensor in[3], o, lse;
    bool merge; /* rows are folded into o and lse */
    attn_source source;
    attn_sink sink;
} attn__memory_io;

/* Checks the inputs of io against the problem and wraps its tensors; a source of io's own is taken over. */
attn_status attn__io_inputs(attn__memory_io *memory, const attn_problem *problem, const attn_io *io);
/* Inputs and outputs. *memory must stay where it is while the source or sink is used. */
attn_status attn__io_open(attn__memory_io *memory, const attn_problem *problem, const attn_io *io);

/* Refuses a result that begins where another array does: the overlap that is easily made, and seen at once.
 * Without queries or keys no array has anything that could be overwritten.  And one whose elements share
 * memory; tokens, queries and keys: along the token axes. */
attn_status attn__io_apart(const attn_problem *problem, const attn_io *io, int64_t tokens);
attn_status attn__gradients_apart(const attn_problem *problem, const attn_gradients *io, int64_t queries,
                                  int64_t keys);

/* ---- one execute ---- */

typedef struct attn__run {
    const attn_plan *plan;
    attn__memory_io *io; /* NULL in the backward pass */
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

/* Makes the lock and its condition, or releases them. */
attn_status attn__run_open(attn__run *run, const attn_plan *plan, void *workspace);
void attn__run_close(attn__run *run);
/* Tells the user; ATTN_ECANCELED if he wants no more. */
attn_status attn__run_event(attn__run *run, attn_event event);
/* Remembers the first failure and wakes all who wait. */
void attn__run_failed(attn__run *run, attn_status status);
bool attn__run_stopped(attn__run *run);

/* For the calls that plan and execute at once: what such a call knows of its sequences, their tokens, told to
 * the problem, in *copy; */
const attn_problem *attn__problem_with_totals(attn_problem *copy, const attn_problem *problem,
                                              const attn_options *options, const int64_t *cu_q,
                                              const int64_t *cu_kv, int64_t total_q, int64_t total_kv);
/* and the plan's workspace.  close waits for a GPU's stream; it returns the first failure, `status` or its
 * own. */
attn_status attn__workspace_open(void **workspace, const attn_plan *plan);
attn_status attn__workspace_close(void *workspace, const attn_plan *plan, void *stream, attn_status status);

/* How many slices a long task of `items` is told in. */
int64_t attn__slices(const attn_plan *plan, double flops, int64_t items);

/* Bytes for the records of the resident workers' threads. */
int64_t attn__resident_space(int64_t residents);

/* ---- direct.c ---- */

/* Most query rows of a kernel call of a direct plan. */
int64_t attn__direct_rows(const attn_problem *problem);
/* Most rows, queries times heads of a group, of a sequence of few queries (few.c). */
int64_t attn__few_rows(const attn_problem *problem);
/* The workspace of a direct plan, and what it computes with it. */
attn__space attn__direct_space(const attn_plan *plan);
attn_status attn__direct(attn__run *run);

/* ---- backward.c, ranges.c ---- */

/* Keys of a range of the gradients, at most, for the plan's threads: the plan's range_keys. */
int64_t attn__range_keys(const attn_plan *plan);
attn__space attn__backward_space(const attn_plan *plan);
/* Checks what every use of `from` needs, and fills in strides and sequences. */
attn_status attn__gradients_open(attn_gradients *io, attn__sequences *sequences, const attn_problem *problem,
                                 const attn_gradients *from);

/* ---- device.c ---- */

/* Settles a plan for a GPU; and one execute of it: enqueues. */
attn_status attn__device_plan(attn_plan *plan, const attn_options *options);
attn_status attn__device_forward(const attn_plan *plan, const attn_io *io, void *workspace);
attn_status attn__device_backward(const attn_plan *plan, const attn_gradients *io, void *workspace);
/* What a call says of the problem; its pointers are yet to come. */
attn__cuda_call attn__device_call(const attn_problem *problem, const attn_options *options);
/* A plan's workspace, for the calls that plan and execute at once; free waits until `stream` is done. */
attn_status attn__device_alloc(void **workspace, const attn_plan *plan);
attn_status attn__device_free(void *workspace, const attn_plan *plan, void *stream);

/* ---- stage.c ---- */

typedef struct attn__stage attn__stage;

/* Chooses the kernel and sizes everything up, for so many workers and quorums of size_q and size_kv groups.
 */
attn_status attn__stage_plan(attn_plan *plan, const char *kernel, int64_t workers, int64_t size_q,
                             int64_t size_kv);
/* Makes a plan's stage, whose memory, streams and events its first execute takes; gives all of them back. */
attn_status attn__stage_open(attn_plan *plan);
void attn__stage_close(attn_plan *plan);
/* Around an execute.  finish waits for the GPU; returns the first failure, `status` or its own. */
attn_status attn__stage_begin(const attn_plan *plan);
attn_status attn__stage_finish(const attn_plan *plan, attn_status status);

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
