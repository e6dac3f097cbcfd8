/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - the contract of the CUDA kernels: a whole problem in device memory, enqueued on a stream.
 *
 * HOST ONLY.  Nothing links to CUDA: the driver library is loaded when it is first asked for (driver.c), the
 * kernels are cubins inside this library (images.c) and are loaded once a device.  So the same library runs
 * on a machine without a GPU, and says what is missing.  The runtime library is not used at all.
 *
 * A launcher only enqueues: it allocates nothing, waits for nothing and may be captured into a graph.  Its
 * kernels take 64-bit strides and find their sequences' lengths on the device.
 */
#ifndef ATTN_CUDA_H
#define ATTN_CUDA_H

#include "base/base.h"
#include "kernel/cuda/params.h"

/* ---- the device (driver.c) ---- */

/* One GPU, opened.  Owned by the library, never closed; the same pointer for the same ordinal. */
typedef struct attn__cuda_device {
    int ordinal;
    int major, minor;  /* compute capability */
    int sms;           /* multiprocessors */
    size_t l2, memory; /* bytes */
    char name[128];
    void *context; /* its primary context, which the CUDA runtime of others uses too */
} attn__cuda_device;

/* Opens device `ordinal` (CUDA's own order), or fails with ATTN_EUNSUPPORTED: built without CUDA, no driver,
 * no such device, older than Hopper. */
attn_status attn__cuda_open(const attn__cuda_device **device, int ordinal);

/* Memory of the device, and an end to all that `stream` was given.  free(NULL) is fine. */
attn_status attn__cuda_alloc(void **memory, const attn__cuda_device *device, size_t bytes);
void attn__cuda_free(void *memory, const attn__cuda_device *device);
attn_status attn__cuda_wait(const attn__cuda_device *device, void *stream);
/* The same where there is an error to tell already: says nothing. */
void attn__cuda_settle(const attn__cuda_device *device, void *stream);
/* What `stream` is given next begins after `event`. */
attn_status attn__cuda_after(const attn__cuda_device *device, void *stream, void *event);
/* Enqueues the identity of the merge: `count` zeros and behind them `rows` times -inf. */
attn_status attn__cuda_identity(const attn__cuda_device *device, float *o, int64_t count, int64_t rows,
                                void *stream);

/* ---- a problem in device memory ---- */

static const int64_t attn__unbounded = INT64_MAX; /* of left and right below */

/*
 * Key j of a sequence is visible to its query i when
 *
 *     i + shift - left <= j <= i + shift + right
 *
 * where shift is the sequence's keys - its queries, or `shift` below if shifted: then the query block and the
 * key block are parts of longer sequences, and shift = first query position - first key position.  Full:
 * both unbounded.  Causal: right = 0.
 *
 * With cu_q and cu_kv, device arrays of batch + 1 numbers, sequence b is the tokens cu[b] .. cu[b + 1] - 1 of
 * tensors whose batch stride is 0; any sequence may be empty.  tokens_q and tokens_kv are then the longest
 * that may come.
 *
 * In the functions that judge a problem or size its workspace no pointer is read but to see if it is NULL.  A
 * plan asks them about contiguous tensors, all results wanted, delta not given; what it is told must do for
 * any call that wants less.  Before an execute, rejects() judges the tensors that came.
 */
typedef struct attn__cuda_call {
    attn_dtype dtype;     /* of q, k, v, dout */
    attn_dtype dtype_out; /* of o; of dq, dk, dv */
    int64_t batch, heads_q, heads_kv, tokens_q, tokens_kv;
    int64_t dim_qk, dim_v;
    float scale;
    int64_t left, right;
    bool shifted;
    int64_t shift;
    const int64_t *cu_q, *cu_kv;
    int64_t total_q, total_kv; /* tokens of the tensors: batch * tokens_q, or with cu_q at most so many */
    int64_t most_q, most_kv;   /* what these may be in any call of the plan */
    int sms;                   /* most multiprocessors to use; 0: all */
    bool deterministic;        /* backward: the same bits every time */
    attn__cuda_tensor q, k, v;
    /* forward: written.  backward: read; o not if delta is given */
    attn__cuda_tensor o, lse; /* lse: fp32, natural log */
    bool merge; /* forward, dtype_out fp32: o and lse hold a partial over other keys, and take the merged one
                 */
    /* backward only */
    attn__cuda_tensor dout, delta; /* delta: fp32, shaped like lse; NULL: rowsum(dout * o) is computed */
    attn__cuda_tensor dq, dk, dv;  /* each may be NULL */
    bool accumulate;               /* added to what dq, dk, dv hold, rounded once */
} attn__cuda_call;

/* Must it leave multiprocessors to others?  Then none of its kernels may begin beside the one before it,
 * whose blocks still have theirs. */
static inline bool attn__cuda_limited(const attn__cuda_call *call, const attn__cuda_device *device)
{
    return call->sms > 0 && call->sms < device->sms;
}

/* One row of the table.  A slot is NULL where the kernel has none. */
typedef struct attn__cuda_kernel {
    const char *name;    /* "flash-sm90" */
    const char *summary; /* one line */
    bool rounds_weights; /* P and dS go to the 16-bit dtype of the inputs before they are multiplied */
    /* NULL, or why it cannot take it (static text) */
    const char *(*rejects)(const attn__cuda_call *call, bool backward);
    /* NULL, or why it is taken only by name; may itself be NULL */
    const char *(*declines)(const attn__cuda_call *call, bool backward);
    /* bytes of device memory, 256-byte aligned by the caller; contents undefined before and after.  A row
     * that wants 0 without cu_q must do with a workspace of NULL if it is then called with cu_q. */
    size_t (*forward_workspace)(const attn__cuda_call *call, const attn__cuda_device *device);
    attn_status (*forward)(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                           void *stream);
    size_t (*backward_workspace)(const attn__cuda_call *call, const attn__cuda_device *device);
    attn_status (*backward)(const attn__cuda_call *call, const attn__cuda_device *device, void *workspace,
                            void *stream);
} attn__cuda_kernel;

/* The one ordered table, best first (table.c); ends with a NULL entry. */
extern const attn__cuda_kernel *const attn__cuda_kernels[];

/* ---- the choice (../cuda_choose.c): as of the CPU's kernels, kernel.h ---- */

/* Why `kernel` does not take `call`, or NULL if it does. */
const char *attn__cuda_refusal(const attn__cuda_kernel *kernel, const attn__cuda_call *call, bool backward);
/* Why it takes `call`, which it does not refuse, only when asked for by name, or NULL. */
const char *attn__cuda_reluctance(const attn__cuda_kernel *kernel, const attn__cuda_call *call,
                                  bool backward);
/* The first row that takes call without being asked for, or the one called `name`. */
attn_status attn__cuda_choose(const attn__cuda_kernel **kernel, const attn__cuda_call *call, bool backward,
                              const char *name);

#endif
