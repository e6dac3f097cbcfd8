/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_output.cuh - the end of a tile of queries of the fp32 forward kernels: from shared memory to o and lse.
 *
 * The including file sets BLOCK_Q, the rows of the tile; ROW, the bytes of one, of which neighbours are exchanged;
 * OUTPUT_THREADS, the first of the block, which do this, and OUTPUT_SYNC(), where they meet.
 */
#ifndef ATTN_FMA_OUTPUT_CUH
#define ATTN_FMA_OUTPUT_CUH

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
    for (int i = threadIdx.x; i < min(left, BLOCK_Q) * dim; i += OUTPUT_THREADS) {
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
    for (int i = threadIdx.x; i < min(left, BLOCK_Q) * chunks; i += OUTPUT_THREADS) {
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
            OUTPUT_SYNC(); /* all have read what is there */
        }
        for (int row = threadIdx.x; row < min(left, BLOCK_Q); row += OUTPUT_THREADS) {
            float *lse = (float *)p->lse.data + at_lse + row * p->lse.token;
            *lse = p->merge ? merge_lse(*lse, lses[row]) : lses[row];
        }
    }
}

/* A tile of O and its lse, to memory.  cleaned: what of V is not finite was left out. */
static __device__ __forceinline__ void put_output(const attn__fma_forward *p, const fma_sequence *s, int64_t batch, int64_t head,
                                                  int query, char *tile, const float *lses, bool cleaned)
{
    const attn__fma_problem *problem = &p->problem;
    const int64_t head_kv = head / (problem->heads_q / problem->heads_kv), token = s->first_q + query;
    const int left = s->queries - query;
    if (cleaned) {
        mend(tile, p, s, batch * p->v.batch + head_kv * p->v.head + s->first_kv * p->v.token, query, left);
        OUTPUT_SYNC();
    }
    put(tile, lses, p, batch * p->o.batch + head * p->o.head + token * p->o.token,
        batch * p->lse.batch + head * p->lse.head + token * p->lse.token, left);
}

#endif
