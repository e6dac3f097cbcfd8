/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn.h - exact attention, cut by cyclic quorum sets into independent workers.
 *
 * INTRODUCTION
 *
 * For each batch b and query head h (which reads kv head h / (heads_q / heads_kv)) attn computes
 *
 *     S = scale * Q K^T + mask,    O = softmax(S) V,    lse_i = log sum_j exp(S_ij)
 *
 * exactly: no cell is dropped, scores and sums are fp32 at least, the running maximum, or one near it, is
 * subtracted (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., FlashAttention, arXiv 2205.14135).  lse is
 * the natural logarithm, fp32.  A row that sees no key has O = 0 and lse = -inf.  A NaN stays in the rows
 * that see it.
 *
 * The work is cut by a cyclic quorum schedule (CQS-Attention): the N tokens fall into W token groups,
 * worker i holds the groups {i + a mod W : a in I}, where the differences of the interest set I cover
 * Z_W, and every ordered pair (query group, key group) is computed by exactly one worker.  Workers
 * do not talk to each other; a Tiler merges their partials (o, lse) by
 *
 *     lse = logaddexp(l1, l2),   o = o1 * exp(l1 - lse) + o2 * exp(l2 - lse).
 *
 * Four steps, simple first:
 *
 *     attn_forward()          arrays in, arrays out: plans, allocates, computes, frees.
 *     attn_plan_create()      decide once: kernel, schedule, memory.  Touches no data.
 *     attn_plan_*()           look at the decision: who holds what, who computes what, what it costs.
 *     attn_execute()          do it, any number of times.  Decides nothing, and allocates nothing (but the
 *                             first time where inputs are brought to a GPU: attn_plan_create()).
 *
 * Gradients likewise: attn_backward(), or a plan with options.backward and attn_execute_backward().
 *
 * CONVENTIONS
 *
 * - Every struct begins with its own size: set it with ATTN_INIT or to sizeof.  Zero means default.
 * - The environment variable ATTN_ISA (ref, avx2, avx512, avx512bf16, amx, neon) hides the instruction sets
 *   above a level, for tests and comparisons; read once.  With another value no plan is made: ATTN_EINVAL.
 * - Every call that can fail returns an attn_status; attn_last_error() tells what to do about it.
 *   The library never prints, exits or aborts.
 * - Counts and strides are int64_t in elements or tokens; memory is size_t or int64_t in bytes.
 * - Thread safety: a plan is immutable after attn_plan_create() and may be shared by threads; two
 *   executes of one plan may run at once if each has its own workspace (but for a plan for a GPU whose inputs
 *   are outside of its memory: ATTN_EINVAL).  The error text is per thread.
 * - Results repeat bit for bit for the same plan and machine level, whatever the number of threads; gradients
 *   on a GPU do with options.deterministic.
 */
#ifndef ATTN_ATTN_H
#define ATTN_ATTN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0

#if defined(__GNUC__)
#define ATTN_API        __attribute__((visibility("default")))
#define ATTN_MUST_CHECK __attribute__((warn_unused_result))
#else
#define ATTN_API
#define ATTN_MUST_CHECK
#endif

/* ---- status and version ------------------------------------------------------------------------- */

/* X(symbol, value, text).  The values are part of the ABI. */
#define ATTN_STATUS_LIST(X)                                                                                  \
    X(ATTN_OK, 0, "ok")                                                                                      \
    X(ATTN_EINVAL, 1, "bad argument")                                                                        \
    X(ATTN_ENOMEM, 2, "out of memory")                                                                       \
    X(ATTN_ELIMIT, 3, "does not fit in the memory limit")                                                    \
    X(ATTN_EUNSUPPORTED, 4, "not supported here")                                                            \
    X(ATTN_EIO, 5, "input/output error")                                                                     \
    X(ATTN_EMISMATCH, 6, "the spool belongs to another problem")                                             \
    X(ATTN_ELOST, 7, "worker lost")                                                                          \
    X(ATTN_ECANCELED, 8, "canceled")

typedef enum attn_status {
#define ATTN_STATUS_ENUM(symbol, value, text) symbol = value,
    ATTN_STATUS_LIST(ATTN_STATUS_ENUM)
#undef ATTN_STATUS_ENUM
} attn_status;

/* Short fixed text of a status; never NULL. */
ATTN_API const char *attn_strerror(attn_status status);

/*
 * What went wrong in this thread's last failed call and what to do about it; "" if nothing did.
 * Valid until this thread's next call into the library.
 */
ATTN_API const char *attn_last_error(void);

/*
 * For callbacks (attn_source, attn_sink): sets this thread's error text and returns `status`, so that
 * a failure inside a callback reaches the caller of attn_execute() with its own words.
 */
ATTN_API attn_status attn_fail(attn_status status, const char *text);

/* "major.minor.patch" of the library that is running. */
ATTN_API const char *attn_version(void);

/* ---- the problem -------------------------------------------------------------------------------- */

typedef enum attn_dtype { ATTN_F32 = 0, ATTN_F16 = 1, ATTN_BF16 = 2 } attn_dtype;

/* Bytes of one element; 0 for an unknown dtype. */
ATTN_API size_t attn_dtype_size(attn_dtype dtype);
/* "f32", "f16", "bf16"; "?" for an unknown dtype. */
ATTN_API const char *attn_dtype_name(attn_dtype dtype);

/*
 * `count` elements of src, `stride` elements apart, to dense fp32; and back, rounded to nearest even.  A NaN
 * stays a NaN, subnormals are kept.  src and dst lie on multiples of their element's size and do not overlap.
 */
ATTN_API void attn_to_f32(float *dst, const void *src, attn_dtype dtype, int64_t stride, int64_t count);
ATTN_API void attn_from_f32(void *dst, attn_dtype dtype, int64_t stride, const float *src, int64_t count);

/*
 * Masks are bands of the score matrix.  With shift = tokens_kv - tokens_q (bottom-right alignment; or, for
 * blocks of a longer sequence, as `placed` says below) key j is visible to query i when
 *     FULL     always
 *     CAUSAL   j <= i + shift
 *     WINDOW   i + shift - window_left <= j <= i + shift + window_right     (-1: no bound on that side)
 */
typedef enum attn_mask { ATTN_MASK_FULL = 0, ATTN_MASK_CAUSAL = 1, ATTN_MASK_WINDOW = 2 } attn_mask;

typedef struct attn_problem {
    size_t size;          /* sizeof(attn_problem) */
    int64_t batch;        /* 0: 1 */
    int64_t heads_q;      /* 0: 1 */
    int64_t heads_kv;     /* divides heads_q; 0: heads_q */
    int64_t tokens_q;     /* at least 1 */
    int64_t tokens_kv;    /* 0: tokens_q */
    int64_t dim_qk;       /* 1 to 512 */
    int64_t dim_v;        /* 1 to 512; 0: dim_qk */
    attn_dtype dtype;     /* of q, k and v */
    attn_dtype dtype_out; /* of o in memory */
    attn_mask mask;
    int64_t window_left, window_right; /* only with ATTN_MASK_WINDOW; -1: no bound */
    double scale; /* 0: 1/sqrt(dim_qk); must be finite.  A score above 2.3e38, which is fp32's largest number
                     / log2(e), makes NaN of the rows that see it, one below -2.3e38 counts as hidden */
    int placed; /* 1: query 0 is token first_q and key 0 token first_kv of one long sequence.  A block without
                   tokens needs no call: merged, or accumulated, it would change nothing */
    int64_t first_q, first_kv; /* only if placed; then shift = first_q - first_kv */
    int64_t total_q, total_kv; /* of sequences of unequal length (attn_io): most tokens in all; 0: not told */
} attn_problem;

/*
 * Reads "batch=1,heads=4,kv_heads=4,tokens=30000,kv_tokens=N,dim=64,dim_v=N,dtype=f32,out=f32,scale=X,
 * causal,window=L:R,at=Q:K,total=Q:K" (any order, each at most once; at sets placed, first_q and first_kv;
 * counts take the suffixes k, M, Ki, Mi) into *problem, which it sets whole; defaults are filled in.  Fails
 * with ATTN_EINVAL and leaves *problem alone.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_problem_parse(attn_problem *problem, const char *text);

/*
 * Writes the string form, which attn_problem_parse() reads back, into text[capacity] (cut, but always
 * terminated if capacity > 0) and returns the length it needs without the terminator.
 */
ATTN_API size_t attn_problem_print(const attn_problem *problem, char *text, size_t capacity);

/* Fills in the defaults above and checks every field. */
ATTN_API ATTN_MUST_CHECK attn_status attn_problem_check(attn_problem *problem);

/* Forward FLOPs by the field's convention: 2*batch*heads_q*visible cells*(dim_qk + dim_v). */
ATTN_API double attn_problem_flops(const attn_problem *problem);

/* ---- tensors, sources and sinks ------------------------------------------------------------------ */

/*
 * An array in memory.  stride[] is in elements, for batch, head, token and dim; all four zero means
 * contiguous [batch, heads, tokens, dim].  Any strides do, also negative ones; the caller owns data.
 */
typedef struct attn_tensor {
    void *data;
    int64_t stride[4];
} attn_tensor;

typedef enum attn_operand { ATTN_Q = 0, ATTN_K = 1, ATTN_V = 2 } attn_operand;

/*
 * Where q, k and v come from when they are not in memory (files, a generator).
 * read() writes `count` tokens from `first` of one batch, for all heads of the operand, in the problem's
 * dtype: element (head, row, c) to dst[head * head_stride + row * dim + c] (head_stride in elements).
 * It is called by several threads at once, and must give the same data each time.
 */
typedef struct attn_source {
    size_t size; /* sizeof(attn_source) */
    void *data;
    attn_status (*read)(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                        void *dst, int64_t head_stride);
} attn_source;

/*
 * Where o and lse go when they are not wanted in memory.  write() takes `count` finished rows from
 * `first` of one (batch, query head): o[row * o_stride + c] and lse[row], fp32.  Each row is written
 * exactly once per execute; several threads may write different rows at once.
 */
typedef struct attn_sink {
    size_t size; /* sizeof(attn_sink) */
    void *data;
    attn_status (*write)(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                         const float *o, int64_t o_stride, const float *lse);
} attn_sink;

/*
 * Batches of sequences of unequal length ("varlen") lie one after another in tensors without padding:
 * sequence b is the tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1; the list, the caller's, has batch + 1
 * numbers, begins at 0 and never falls.  problem.tokens_q and tokens_kv are then the longest that may come,
 * each sequence has its own shift (its keys - its queries), and may be empty.  Batch strides are ignored; all
 * strides zero means contiguous [heads, cu_seqlens[batch], dim].  Both lists, or neither; only tensors in
 * memory (options.in_memory), W = 1, no spool and not placed.  A sequence's bits are those that the same
 * kernel gives it alone; on a GPU, where the lengths of others decide how it is cut, they may differ by
 * rounding.  A plan that is told problem.total_q and total_kv is for such batches only; its
 * workspace on a GPU, or for gradients, then grows with these, and not with batch times the longest sequence.
 *
 * With options.device = ATTN_CUDA and options.in_memory every pointer but source and sink is device memory,
 * cu_seqlens too; since nothing waits for the device to read them, total_q and total_kv tell what their last
 * numbers are.  Tensors have dense dims there.
 */
typedef struct attn_io {
    size_t size;         /* sizeof(attn_io) */
    attn_tensor q, k, v; /* read when source is NULL */
    attn_tensor o;       /* written when sink is NULL, in problem.dtype_out */
    attn_tensor lse;     /* fp32, likewise; data NULL: not wanted; stride[3] is ignored */
    /* o and lse must not overlap any other array: ATTN_EINVAL if one begins where another does. */
    const attn_source *source;
    const attn_sink *sink;
    const int64_t *cu_seqlens_q, *cu_seqlens_kv; /* NULL: batch sequences of tokens_q and tokens_kv */
    int64_t total_q, total_kv; /* on a device, with cu_seqlens: tokens along the token axis of q and of k */
    int merge;    /* 1: o (fp32, in memory) and lse hold a partial over other keys, and take the merged one */
    void *stream; /* a CUstream or cudaStream_t of the plan's GPU; NULL: its default stream */
} attn_io;

/*
 * What the backward pass reads and writes: given dO, the gradient of o,
 *
 *     D = rowsum(dO * O)    P = exp(S - lse)    dV = P^T dO    dS = P * (dO V^T - D)
 *     dQ = scale * dS K     dK = scale * dS^T Q
 *
 * (Dao et al., FlashAttention, arXiv 2205.14135, appendix B).  dk and dv sum over the query heads that share
 * a kv head.  A row that sees no key, and a key that no row sees, has gradient 0.  lse, and delta if given,
 * are those of the whole row, also where k and v are only some of its keys: over disjoint keys and over
 * disjoint queries gradients add up, which is what `accumulate` is for.
 */
typedef struct attn_gradients {
    size_t size;         /* sizeof(attn_gradients) */
    attn_tensor q, k, v; /* as in the forward pass */
    attn_tensor o;       /* problem.dtype_out; not read when delta is given */
    attn_tensor lse;     /* fp32, from the forward pass; stride[3] is ignored */
    attn_tensor delta;   /* D, fp32, shaped like lse; data NULL: computed from o and dout */
    attn_tensor dout;    /* dO, problem.dtype */
    /* Written in problem.dtype_out; data NULL: not wanted, and not computed.  On a CPU 2 to 5 % faster where
     * rows begin cache lines. */
    attn_tensor dq, dk, dv;
    int accumulate;                              /* 1: added to what dq, dk and dv hold, rounded once */
    const int64_t *cu_seqlens_q, *cu_seqlens_kv; /* as in attn_io, like all that follow */
    int64_t total_q, total_kv;
    void *stream;
} attn_gradients;

/* ---- plan ---------------------------------------------------------------------------------------- */

typedef struct attn_plan attn_plan; /* opaque, immutable */

typedef enum attn_quorum {
    ATTN_QUORUM_CYCLIC = 0,      /* one interest set: A = B = I */
    ATTN_QUORUM_RECTANGULAR = 1, /* query groups from A = {0..a-1}, key groups from B = {0,-a,-2a,..} */
    ATTN_QUORUM_AUTO = 2         /* whichever moves the fewest bytes within the memory limit */
} attn_quorum;

/* Where it is computed. */
typedef enum attn_device {
    ATTN_CPU = 0,
    ATTN_CUDA = 1 /* an NVIDIA GPU of the Hopper generation: H100, H200, GH200 */
} attn_device;

/* "cpu", "cuda"; "?" for an unknown device. */
ATTN_API const char *attn_device_name(attn_device device);

/* One step of an execute, told when it ends. */
typedef enum attn_step {
    ATTN_STEP_GATHER = 0,
    ATTN_STEP_COMPUTE,
    ATTN_STEP_HANDOVER,
    ATTN_STEP_MERGE,
    ATTN_STEP_RESUME
} attn_step;

typedef struct attn_event {
    size_t size;
    attn_step step;
    int64_t rank;      /* the worker; -1 for the Tiler */
    int64_t group;     /* the query group, or -1 */
    double begin, end; /* seconds of the monotonic clock */
    int64_t cells;     /* per (batch, head), on average: computed or, on RESUME, taken over from the spool */
    int64_t bytes;     /* moved, read or written */
    const char *text;  /* a warning for the user, or NULL; valid during the call */
} attn_event;

/* Return 0 to go on; else the execute stops with ATTN_ECANCELED.  Never called by two threads at once. */
typedef int (*attn_event_fn)(void *data, const attn_event *event);

struct attn_comm; /* include/attn/comm.h */

typedef struct attn_options {
    size_t size;          /* sizeof(attn_options) */
    int64_t workers;      /* W; 0: 1, or with memory_limit the smallest W that fits */
    int64_t resident;     /* workers that compute at once, at most W; 0: 1 */
    int64_t memory_limit; /* bytes that the workspace may take, of the GPU's memory with device CUDA; 0: no
                             limit (nine tenths of what the GPU has free) */
    attn_quorum quorum;
    int64_t rectangle;           /* a = |A| of a rectangular quorum; 0: the a that moves the fewest bytes */
    const int64_t *interest_set; /* one's own set (copied); NULL: the best known */
    int64_t interest_size;
    int classic;   /* 1: the published rules (even W out of balance, set as in the table) */
    int threads;   /* 0: as many as OpenMP gives */
    int in_memory; /* 1: q, k, v will be tensors: they are read in place, without room to gather them */
    int backward;  /* 1: a plan for attn_execute_backward(): W = 1, tensors in memory, no spool */
    attn_device device;
    int gpu;            /* CUDA: which one, in CUDA's own order */
    int sms;            /* CUDA: most multiprocessors to use, so that some are left to others; 0: all */
    int deterministic;  /* CUDA: gradients with the same bits every time, at a price; elsewhere always so */
    const char *kernel; /* a row of the kernel table by name; NULL: the first that takes the problem */
    const char *spool;  /* folder for finished partials (copied); NULL: none */
    const char *spool_key; /* identity of the data, kept in the spool (copied); NULL: "" */
    attn_event_fn event;
    void *event_data;
} attn_options;

/*
 * Decides everything about `problem` under `options` (NULL: all defaults) and touches no data.  Costs
 * O(k^2 + W) time and memory.  With device CUDA and without in_memory the plan's first execute takes, and the
 * plan keeps until it is destroyed, memory of the GPU (attn_summary.device_memory) and pinned memory of the
 * host (pinned_memory): it may fail with ATTN_ENOMEM.  Without a memory_limit each plan is made for what the
 * GPU has free then, so give one to each of several.  On success *plan is owned by the caller, who frees it
 * with attn_plan_destroy().  Fails with ATTN_EINVAL (a field, or an interest set that covers not all
 * differences: the text lists them), ATTN_EUNSUPPORTED (no kernel takes it), ATTN_ELIMIT, ATTN_ENOMEM; then
 * *plan = NULL.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_plan_create(attn_plan **plan, const attn_problem *problem,
                                                      const attn_options *options);
ATTN_API void attn_plan_destroy(attn_plan *plan); /* NULL is fine */

/* The problem with its defaults filled in; owned by the plan. */
ATTN_API const attn_problem *attn_plan_problem(const attn_plan *plan);

/* Bytes of workspace that attn_execute() or attn_execute_backward() needs; any alignment does.  With device
 * CUDA and options.in_memory it is memory of the GPU, else of the host: what a plan for a GPU takes of the
 * GPU's memory when inputs are elsewhere is its own (attn_plan_create). */
ATTN_API size_t attn_plan_workspace(const attn_plan *plan);

#include "attn/plan.h" /* a plan looked at */

/* ---- the kernel table ----------------------------------------------------------------------------- */

typedef struct attn_verdict {
    size_t size;         /* sizeof(attn_verdict), set by the caller */
    const char *name;    /* of the row */
    const char *summary; /* one line: what it is */
    int chosen;
    int rounds_weights; /* 1: it rounds P and dS of bf16 inputs to bf16; 2: those of fp16 to fp16, too */
    const char *reason; /* why it is not taken for this problem here; NULL: it would be */
    attn_device device; /* whose table it stands in */
} attn_verdict;

/* Row `index` of the kernel table, best first, judged for the plan's problem (plan NULL: for this machine
 * alone). ATTN_EINVAL past the end.  Strings are static or owned by the plan. */
ATTN_API ATTN_MUST_CHECK attn_status attn_kernel_verdict(const attn_plan *plan, int64_t index,
                                                         attn_verdict *verdict);

/* FLOP/s that `threads` threads reach together with the multiply-adds that a kernel is made of, on registers
 * alone: what no kernel of that kind can exceed.  kernel NULL: the best fp32 row of the table.  Takes about
 * `seconds`; each thread's best moment counts.  0: there is no such kernel, here, or it has no such measure.
 */
ATTN_API double attn_peak_flops(const char *kernel, int threads, double seconds);

/* ---- execute --------------------------------------------------------------------------------------- */

/*
 * Computes the plan's problem.  workspace: attn_plan_workspace() bytes, the caller's, contents undefined
 * before and after; on Linux, huge pages under it (madvise) make tile kernels up to 4 % faster, and
 * attn_forward() and attn_backward() ask for them.  Runs `resident` workers at a time, then merges; with a
 * spool, finished tasks found there are not computed again.  On failure the output is undefined, and the
 * spool keeps what is finished.
 *
 * On a GPU, with options.in_memory, it enqueues kernels on io->stream and returns: it waits for nothing and
 * may be captured into a graph.  The first execute of a kernel loads it, which takes some milliseconds.
 * workspace, which may be NULL where none is needed, belongs to these kernels until they are done.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_execute(const attn_plan *plan, const attn_io *io, void *workspace);

/* Removes the plan's finished pieces and manifest from the spool folder, then the folder if it is empty. */
ATTN_API ATTN_MUST_CHECK attn_status attn_spool_remove(const attn_plan *plan);

/* Plan, allocate, execute and free in one call.  io->q, k, v must be tensors (on a GPU: in its memory, and
 * the call waits for it) or io->source set.  Of workspaces of 1 MiB or more one, of up to 256 MiB, is kept
 * for the next call. */
ATTN_API ATTN_MUST_CHECK attn_status attn_forward(const attn_problem *problem, const attn_io *io,
                                                  const attn_options *options);

/*
 * The gradients of the plan's problem; the plan was made with options.backward.  workspace as above; on a CPU
 * beside what each thread wants it has 8 bytes for each query row and, where dq is stored in 16 bits, its
 * sums in fp32, since ranges of keys add to it in turn.  Where options.memory_limit has no room for these, dq
 * is made in a pass of its own, with 7 products instead of 5, in the same bits.  The more threads, the
 * shorter the ranges of keys that they share, but sums over keys are made in a fixed order: the bits do not
 * depend on their number.  q, k, v, o, dout and the results must not overlap: ATTN_EINVAL if a result begins
 * where another of them does.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_execute_backward(const attn_plan *plan, const attn_gradients *io,
                                                           void *workspace);

/* Plan, allocate, execute and free in one call, as attn_forward(); sets options.backward and in_memory
 * itself. */
ATTN_API ATTN_MUST_CHECK attn_status attn_backward(const attn_problem *problem, const attn_gradients *io,
                                                   const attn_options *options);

/*
 * The fp64 reference: rows[0..count) of one (batch, query head), from the same inputs, in plain C.  Writes
 * o[count][dim_v] and lse[count].  Reads keys and values in pieces: O(count * dim) memory.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_reference(const attn_problem *problem, const attn_io *io,
                                                    int64_t batch, int64_t head, const int64_t *rows,
                                                    int64_t count, double *o, double *lse);

/*
 * The fp64 reference of the gradients: dq[row_count][dim_qk] of chosen rows of one (batch, query head), and
 * dk[key_count][dim_qk], dv[key_count][dim_v] of chosen keys of its kv head, summed over the query heads that
 * share it.  lse and delta are read from io as attn_execute_backward() reads them, in O((row_count +
 * key_count * group) * tokens * dim) time; where io->lse.data is NULL both are made anew in fp64 from q, k, v
 * and dout, in O(group * tokens_q * tokens_kv * dim).  io's dq, dk, dv and accumulate are not looked at.
 */
ATTN_API ATTN_MUST_CHECK attn_status attn_reference_backward(
    const attn_problem *problem, const attn_gradients *io, int64_t batch, int64_t head, const int64_t *rows,
    int64_t row_count, double *dq, const int64_t *keys, int64_t key_count, double *dk, double *dv);

/* A struct with its size set and everything else zero: `attn_problem problem = ATTN_INIT(attn_problem);` */
#ifdef __cplusplus
#define ATTN_INIT(type)                                                                                      \
    ([] {                                                                                                    \
        type attn_init_ = type();                                                                            \
        attn_init_.size = sizeof(type);                                                                      \
        return attn_init_;                                                                                   \
    }())
#else
#define ATTN_INIT(type) ((type){.size = sizeof(type)})
#endif

#ifdef __cplusplus
}
#endif
#endif
