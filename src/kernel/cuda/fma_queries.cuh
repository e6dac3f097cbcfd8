/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_queries.cuh - one block's way with a tile of queries through its keys, whatever makes the products: the copies,
 * which tiles of K and V and when, what is masked, and the result to memory.
 *
 * METHOD.  FlashAttention (Dao et al., arXiv 2205.14135).  Q is scaled to powers of 2 once.  The next K is on its way
 * during P V, the next V during Q K^T; warps meet only where a tile of K or V changes.
 *
 * The including file sets
 *     NAME, HEAD_DIM, WARPS, BLOCKS    the kernel, the width of its tiles (at least both dims), warps of a block,
 *                                      blocks of a multiprocessor
 *     THREADS, BLOCK_Q, BLOCK_K, WARP_ROWS, ROW    threads; rows of a tile of Q, of K and V, of a warp; bytes of a row
 *     AT_Q, AT_K, AT_V, AT_LSE         places in shared memory; at the end O lies where Q was
 *     ONE_BUFFER                       1: K and V lie in the same place in turn
 * and work and scores, the registers of a thread for good and of a tile of keys, with
 *     work_row()       the first row of its warp
 *     prepare_queries(tile, factor)    the thread's own chunks of Q times factor
 *     work_begin(w)
 *     work_scores(w, s, band, partial, dim)   s, which is 0, becomes the weights of the tile of K, masked by band if
 *                                             partial; their maximum and sum
 *     work_values(w, s)  O += P V
 *     work_end(w)      O, swapped, and the lse of each row to shared memory
 */
#include "kernel/cuda/fma_tile.cuh"

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
        float *x = (float *)(tile + row * ROW + (column ^ 1) * 4);
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
        float4 x = fma_swap(fma_at(tile, row * ROW + column * 4));
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
    const int first = work_row();
    const int left = s.queries - query, last = query + min(left, BLOCK_Q) - 1;
    const int64_t head_kv = head / (problem->heads_q / problem->heads_kv);
    const int64_t at_v = batch * p->v.batch + head_kv * p->v.head + s.first_kv * p->v.token;
    int key = max(query + s.lo, 0);
    const int end = min(last + s.hi + 1, s.keys);
    const int dim_qk = problem->dim_qk, dim_v = problem->dim_v;
    bool cleaned = false;

    work w;
    work_begin(&w);
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
        prepare_queries(shared + AT_Q, problem->factor);
        __syncthreads();
    }
    for (; key < end; key += BLOCK_K) {
        const fma_band band = fma_band_of(&s, query, key);
        const bool none = fma_none(&band, first, first + WARP_ROWS - 1, BLOCK_K);
        const bool partial = !fma_all(&band, 0, BLOCK_Q - 1, BLOCK_K); /* the same for all warps */
        scores weights = {};
        if (!none) {
            work_scores(&w, &weights, &band, partial, dim_qk);
        }
        k += BLOCK_K * p->k.token;
        if (ONE_BUFFER) {
            __syncthreads();
            fma_load(shared + AT_V, BLOCK_K, HEAD_DIM, &p->v, v, s.keys - key, dim_v, THREADS);
            ptx_copy_commit();
        }
        PTX_COPY_WAIT(0);
        if (partial) {
            cleaned |= fma_clean(shared + AT_V, BLOCK_K, HEAD_DIM, NULL, THREADS);
        }
        __syncthreads(); /* V is there, K is not needed any more */
        if (!ONE_BUFFER && key + BLOCK_K < end) {
            fma_load(shared + AT_K, BLOCK_K, HEAD_DIM, &p->k, k, s.keys - key - BLOCK_K, dim_qk, THREADS);
        }
        ptx_copy_commit();
        v += BLOCK_K * p->v.token;
        if (!none) {
            work_values(&w, &weights);
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

    work_end(&w);
    if (__syncthreads_or(cleaned)) {
        mend(shared + AT_Q, p, &s, at_v, query, left);
        __syncthreads();
    }
    put(shared + AT_Q, (const float *)(shared + AT_LSE), p, batch * p->o.batch + head * p->o.head + (s.first_q + query) * p->o.token,
        batch * p->lse.batch + head * p->lse.head + (s.first_q + query) * p->lse.token, left);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ attn__fma_forward p)
{
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        forward_tile(&p, item);
        __syncthreads();
    }
}
