/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward.cuh - attention in fp32 by fused multiply-adds: one block takes a tile of queries through its keys.
 *
 * METHOD.  FlashAttention (Dao et al., arXiv 2205.14135): scores of BLOCK_K keys, running maximum (Milakov & Gimelshein,
 * arXiv 1805.02867), weights, and O += P V, all in registers but P, which a warp passes through 4 KiB of its own, 32
 * keys at a time.  A warp holds whole rows, so that warps meet only where a tile of K or V changes.  Q is scaled to
 * powers of 2 once.  The next K is on its way during P V, the next V during Q K^T.
 *
 * The including file sets
 *     NAME          of the kernel
 *     HEAD_DIM      width of the tiles: multiple of 32, at least both dims
 *     WARPS, BLOCKS warps of a block, blocks of a multiprocessor
 *     ROWS          rows of a thread: 8 or 4
 *     BLOCK_K       keys of a tile: 64 or 32
 *     SHARES        warps that share the columns of O of the same rows (each makes all scores): 1 or 2
 *     ONE_BUFFER    1: K and V lie in the same place in turn
 *
 * COST.  A tile of 64 keys at HEAD_DIM 64 is 8192 multiply-adds a thread, 512 loads of 16 bytes and about 350 others.
 */
#include "kernel/cuda/fma_tile.cuh"

enum {
    THREADS = WARPS * 32,
    WARP_ROWS = 4 * ROWS,
    BLOCK_Q = WARPS / SHARES * WARP_ROWS,
    PIECE = 32, /* keys of P at a time */
    COLUMNS = BLOCK_K / 8,
    OUT = HEAD_DIM / SHARES / 8, /* columns of O of a thread */
    ROW = HEAD_DIM * 4,          /* bytes */
    AT_Q = 0,
    AT_K = AT_Q + BLOCK_Q * ROW,
    AT_V = ONE_BUFFER ? AT_K : AT_K + BLOCK_K * ROW,
    AT_P = AT_V + BLOCK_K * ROW,
};

extern __shared__ __align__(1024) char shared[];

/* What a thread knows of its rows. */
typedef struct softmax_rows {
    float max[ROWS], sum[ROWS]; /* in powers of 2; the sum over this thread's columns alone */
} softmax_rows;

/* Scores become weights, and O and the sums fade where the maximum has risen. */
static __device__ __forceinline__ void weigh(float *s, softmax_rows *rows, float *o)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float most = s[i * COLUMNS];
#pragma unroll
        for (int j = 1; j < COLUMNS; j++) {
            most = fmaxf(most, s[i * COLUMNS + j]);
        }
        most = fmaxf(rows->max[i], fma_max_tx(most));
        const float base = most == -INFINITY ? 0.0f : most;
        const float fade = most > rows->max[i] ? ptx_exp2(rows->max[i] - base) : 1.0f;
        rows->max[i] = most;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float weight = ptx_exp2(s[i * COLUMNS + j] - base);
            s[i * COLUMNS + j] = weight;
            sum += weight;
        }
        rows->sum[i] = rows->sum[i] * fade + sum;
#pragma unroll
        for (int j = 0; j < OUT; j++) {
            o[i * OUT + j] *= fade;
        }
    }
}

/* Cells that are not visible */
static __device__ __forceinline__ void hide(float *s, const fma_band *band, int row, int tx)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const bool sees = fma_sees(band, row + FMA_ROW(i), 4 * tx + FMA_COLUMN(j));
            s[i * COLUMNS + j] = sees ? s[i * COLUMNS + j] : -INFINITY;
        }
    }
}

/* O += P V of a tile, by way of the warp's own piece of shared memory. */
static __device__ __forceinline__ void add_values(float *o, const float *p, char *piece, const char *v, int ty, int tx)
{
    const int turn = fma_chunk(4 * ty, 0);
#pragma unroll
    for (int part = 0; part < BLOCK_K / PIECE; part++) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float *x = p + i * COLUMNS + part * 4;
            *(float4 *)(piece + (4 * ty + FMA_ROW(i)) * PIECE * 4 + (16 * tx ^ turn ^ (i & 4) * 16)) =
                make_float4(x[0], x[1], x[2], x[3]);
        }
        __syncwarp();
        fma_rows_columns(o, ROWS, OUT, piece + 4 * ty * PIECE * 4, turn, PIECE * 4, v + part * PIECE * ROW, 16 * tx, ROW,
                         PIECE / 4);
        __syncwarp();
    }
}

/* Multiplies what this thread has copied. */
static __device__ __forceinline__ void scale_own(char *tile, float factor)
{
    const int chunks = HEAD_DIM / 4, thread = ptx_thread();
#pragma unroll 1
    for (int row = thread / chunks; row < BLOCK_Q; row += THREADS / chunks) {
        float4 *x = (float4 *)(tile + row * ROW + fma_chunk(row, thread % chunks));
        *x = make_float4(x->x * factor, x->y * factor, x->z * factor, x->w * factor);
    }
}

/* A row of four columns of what is there and of the new partial become one, as kernel/merge.c does it. */
static __device__ __forceinline__ float4 merge(float4 there, float there_lse, float4 x, float lse)
{
    const float difference = there_lse - lse, small = expf(-fabsf(difference)), share = 1.0f / (1.0f + small);
    float a = difference >= 0.0f ? share : small * share, b = difference >= 0.0f ? small * share : share;
    if (lse == -INFINITY || there_lse == -INFINITY) { /* weighs nothing, but its NaN stays */
        a = lse == -INFINITY ? 1.0f : 0.0f;
        b = lse == -INFINITY ? 0.0f : 1.0f;
    }
    return make_float4(there.x * a + x.x * b, there.y * a + x.y * b, there.z * a + x.z * b, there.w * a + x.w * b);
}
static __device__ __forceinline__ float merge_lse(float there, float lse)
{
    if (lse == -INFINITY || there == -INFINITY) {
        return lse == -INFINITY ? there : lse;
    }
    const float difference = there - lse;
    return (difference >= 0.0f ? there : lse) + log1pf(expf(-fabsf(difference)));
}

/* What of V is not finite, to the rows that see it. */
static __device__ void mend(char *tile, const attn__fma_forward *p, const fma_sequence *s, int64_t at_v, int query,
                            int left)
{
    const int dim = p->problem.dim_v;
    for (int i = threadIdx.x; i < min(left, BLOCK_Q) * dim; i += THREADS) {
        const int row = i / dim, column = i % dim;
        float *x = (float *)(tile + row * ROW + column * 4);
        for (int key = max(query + row + s->lo, 0); key <= min(query + row + s->hi, s->keys - 1); key++) {
            const float y = ((const float *)p->v.data)[at_v + key * p->v.token + column];
            *x += fma_finite(y) ? 0.0f : y;
        }
    }
}

/* The tile of O and the rows' lse, from shared memory. */
static __device__ __forceinline__ void put(const char *tile, const float *lses, const attn__fma_forward *p,
                                           int64_t at_o, int64_t at_lse, int left)
{
    const int dim = p->problem.dim_v, chunks = (dim + 3) / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < min(left, BLOCK_Q) * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * 4;
        const int64_t at = at_o + row * p->o.token;
        float4 x = fma_at(tile, row * ROW + column * 4);
        if (p->merge) {
            float there[4];
            for (int c = 0; c < 4; c++) {
                there[c] = column + c < dim ? fma_get(&p->o, at + column + c) : 0.0f;
            }
            x = merge(make_float4(there[0], there[1], there[2], there[3]),
                      ((const float *)p->lse.data)[at_lse + row * p->lse.token], x, lses[row]);
        }
        fma_put(&p->o, at, column, dim, x, false);
    }
    if (p->lse.data) {
        if (p->merge) {
            __syncthreads(); /* all have read what is there */
        }
        for (int row = threadIdx.x; row < min(left, BLOCK_Q); row += THREADS) {
            float *lse = (float *)p->lse.data + at_lse + row * p->lse.token;
            *lse = p->merge ? merge_lse(*lse, lses[row]) : lses[row];
        }
    }
}

static __device__ __forceinline__ void forward_tile(const attn__fma_forward *p, int64_t item)
{
    const attn__fma_problem *problem = &p->problem;
    const int64_t head = item % problem->heads_q, rest = item / problem->heads_q, batch = rest % problem->batch;
    const int query = (int)(p->tiles - 1 - rest / problem->batch) * BLOCK_Q;
    const fma_sequence s = fma_sequence_of(problem, batch);
    if (query >= s.queries) {
        return;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ty = fma_ty(lane), tx = fma_tx(lane);
    const int first = warp / SHARES * WARP_ROWS, row = first + 4 * ty; /* of this warp, of this thread */
    const int left = s.queries - query, last = query + min(left, BLOCK_Q) - 1;
    const int64_t head_kv = head / (problem->heads_q / problem->heads_kv);
    const int64_t at_v = batch * p->v.batch + head_kv * p->v.head + s.first_kv * p->v.token;
    int key = max(query + s.lo, 0);
    const int end = min(last + s.hi + 1, s.keys);
    const int dim_qk = problem->dim_qk, dim_v = problem->dim_v;
    bool cleaned = false;

    softmax_rows rows;
    float o[ROWS * OUT];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        rows.max[i] = -INFINITY;
        rows.sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROWS * OUT; i++) {
        o[i] = 0.0f;
    }
    key -= key % BLOCK_K;
    const float *k = (const float *)p->k.data + batch * p->k.batch + head_kv * p->k.head +
                     (s.first_kv + key) * p->k.token;
    const float *v = (const float *)p->v.data + at_v + key * p->v.token;
    if (key < end) {
        const float *q = (const float *)p->q.data + batch * p->q.batch + head * p->q.head +
                         (s.first_q + query) * p->q.token;
        fma_load(shared + AT_Q, BLOCK_Q, HEAD_DIM, &p->q, q, left, dim_qk, THREADS);
        fma_load(shared + AT_K, BLOCK_K, HEAD_DIM, &p->k, k, s.keys - key, dim_qk, THREADS);
        ptx_copy_commit();
        if (!ONE_BUFFER) {
            fma_load(shared + AT_V, BLOCK_K, HEAD_DIM, &p->v, v, s.keys - key, dim_v, THREADS);
            ptx_copy_commit();
            PTX_COPY_WAIT(1);
        } else {
            PTX_COPY_WAIT(0);
        }
        scale_own(shared + AT_Q, problem->factor);
        __syncthreads();
    }
    for (; key < end; key += BLOCK_K) {
        const fma_band band = fma_band_of(&s, query, key);
        const bool none = fma_none(&band, first, first + WARP_ROWS - 1, BLOCK_K);
        const bool partial = !fma_all(&band, 0, BLOCK_Q - 1, BLOCK_K); /* the same for all warps */
        float weights[ROWS * COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            weights[i] = 0.0f;
        }
        if (!none) {
            fma_rows_rows(weights, ROWS, COLUMNS, shared + AT_Q + row * ROW, fma_chunk(row, 0), ROW,
                          shared + AT_K + 4 * tx * ROW, fma_chunk(4 * tx, 0), ROW, (dim_qk + 7) / 8 * 2);
            if (partial) {
                hide(weights, &band, row, tx);
            }
            weigh(weights, &rows, o);
        }
        k += BLOCK_K * p->k.token;
        if (ONE_BUFFER) {
            __syncthreads();
            fma_load(shared + AT_V, BLOCK_K, HEAD_DIM, &p->v, v, s.keys - key, dim_v, THREADS);
            ptx_copy_commit();
        }
        PTX_COPY_WAIT(0);
        if (partial) {
            cleaned |= fma_clean(shared + AT_V, BLOCK_K, HEAD_DIM, THREADS);
        }
        __syncthreads(); /* V is there, K is not needed any more */
        if (!ONE_BUFFER && key + BLOCK_K < end) {
            fma_load(shared + AT_K, BLOCK_K, HEAD_DIM, &p->k, k, s.keys - key - BLOCK_K, dim_qk, THREADS);
        }
        ptx_copy_commit();
        v += BLOCK_K * p->v.token;
        if (!none) {
            add_values(o, weights, shared + AT_P + warp * WARP_ROWS * PIECE * 4,
                       shared + AT_V + warp % SHARES * (ROW / SHARES), ty, tx);
        }
        if (ONE_BUFFER && key + BLOCK_K < end) {
            __syncthreads();
            fma_load(shared + AT_K, BLOCK_K, HEAD_DIM, &p->k, k, s.keys - key - BLOCK_K, dim_qk, THREADS);
            ptx_copy_commit();
        }
        PTX_COPY_WAIT(0);
        __syncthreads(); /* K is there, V is not needed any more */
        if (!ONE_BUFFER && key + BLOCK_K < end) {
            fma_load(shared + AT_V, BLOCK_K, HEAD_DIM, &p->v, v, s.keys - key - BLOCK_K, dim_v, THREADS);
        }
        ptx_copy_commit();
    }

    /* O to where Q was, the lse to where P was */
    float *lses = (float *)(shared + AT_P);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float sum = fma_sum_tx(rows.sum[i]), scale = sum == 0.0f ? 1.0f : 1.0f / sum;
#pragma unroll
        for (int j = 0; j < OUT; j += 4) {
            const float *x = o + i * OUT + j;
            *(float4 *)(shared + AT_Q + (row + FMA_ROW(i)) * ROW + warp % SHARES * (ROW / SHARES) + 16 * tx +
                        j / 4 * 128) = make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
        }
        if (tx == 0 && warp % SHARES == 0) {
            lses[row + FMA_ROW(i)] =
                sum == 0.0f ? -INFINITY : (rows.max[i] + log2f(sum)) * 0.693147180559945309f;
        }
    }
    if (__syncthreads_or(cleaned)) {
        mend(shared + AT_Q, p, &s, at_v, query, left);
        __syncthreads();
    }
    put(shared + AT_Q, lses, p, batch * p->o.batch + head * p->o.head + (s.first_q + query) * p->o.token,
        batch * p->lse.batch + head * p->lse.head + (s.first_q + query) * p->lse.token, left);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ attn__fma_forward p)
{
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        forward_tile(&p, item);
        __syncthreads();
    }
}
