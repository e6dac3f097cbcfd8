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
enum { OUTPUT_THREADS = THREADS };
#define OUTPUT_SYNC() __syncthreads()
#include "kernel/cuda/fma_output.cuh"

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
    put_output(p, &s, batch, head, query, shared + AT_Q, (const float *)(shared + AT_LSE), __syncthreads_or(cleaned));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ attn__fma_forward p)
{
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        forward_tile(&p, item);
        __syncthreads();
    }
}
