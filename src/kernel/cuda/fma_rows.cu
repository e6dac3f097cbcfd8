/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_rows.cu - what goes before and after the fp32 kernels, bound by memory: copies of any tensor to aligned fp32,
 * delta = rowsum(o * dout) (section 3.1 of Dao et al., arXiv 2205.14135), dQ from its fp32 sum, and dK and dV from those of the
 * parts of a group.
 *
 * A warp takes a row at a time; the order of a row's sum does not depend on anything else.
 */
#include "kernel/cuda/fma_tile.cuh"

enum { THREADS = 256 };

PTX_INLINE int64_t first_warp(void)
{
    return ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
}
PTX_INLINE int64_t all_warps(void)
{
    return (int64_t)gridDim.x * (THREADS / 32);
}

extern "C" __global__ void __launch_bounds__(THREADS) fma_copy(const __grid_constant__ attn__fma_copy p)
{
    const int64_t rows = p.batch * p.heads * p.tokens, there = p.ends ? p.ends[p.count] : p.tokens;
    for (int64_t row = first_warp(); row < rows; row += all_warps()) {
        const int64_t token = row % p.tokens, head = row / p.tokens % p.heads, batch = row / p.tokens / p.heads;
        const int64_t at = batch * p.from.batch + head * p.from.head + token * p.from.token;
        for (int d = threadIdx.x % 32; d < p.width && token < there; d += 32) {
            p.to[row * p.width + d] = d < p.dim ? fma_get(&p.from, at + d) : 0.0f;
        }
    }
}

/* Row `row` of all queries of all heads: batch, head and the token in the tensors; false where there is none. */
static __device__ bool find_row(const attn__fma_problem *p, int64_t row, int64_t *batch, int64_t *head, int64_t *token)
{
    const int64_t query = row % p->tokens_q;
    *head = row / p->tokens_q % p->heads_q;
    *batch = row / p->tokens_q / p->heads_q;
    const fma_sequence s = fma_sequence_of(p, *batch);
    *token = s.first_q + query;
    return query < s.queries;
}
PTX_INLINE int64_t row_at(const attn__fma_array *array, int64_t batch, int64_t head, int64_t token)
{
    return batch * array->batch + head * array->head + token * array->token;
}

extern "C" __global__ void __launch_bounds__(THREADS) fma_before(const __grid_constant__ attn__fma_rows p)
{
    const int64_t rows = p.problem.batch * p.problem.heads_q * p.problem.tokens_q;
    const int lane = threadIdx.x % 32;
    for (int64_t row = first_warp(); row < rows; row += all_warps()) {
        int64_t batch, head, token;
        if (!find_row(&p.problem, row, &batch, &head, &token)) {
            continue;
        }
        if (p.delta.data) {
            const int64_t o = row_at(&p.o, batch, head, token), dout = row_at(&p.dout, batch, head, token);
            float sum = 0.0f;
            for (int d = lane; d < p.problem.dim_v; d += 32) {
                sum = fmaf(fma_get(&p.o, o + d), fma_get(&p.dout, dout + d), sum);
            }
            for (int other = 16; other > 0; other /= 2) {
                sum += __shfl_xor_sync(~0u, sum, other);
            }
            if (lane == 0) {
                ((float *)p.delta.data)[row_at(&p.delta, batch, head, token)] = sum;
            }
        }
        for (int d = lane; p.sum.data && d < p.problem.dim_qk; d += 32) {
            ((float *)p.sum.data)[row_at(&p.sum, batch, head, token) + d] = 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fma_after(const __grid_constant__ attn__fma_rows p)
{
    const int64_t rows = p.problem.batch * p.problem.heads_q * p.problem.tokens_q;
    for (int64_t row = first_warp(); row < rows; row += all_warps()) {
        int64_t batch, head, token;
        if (!find_row(&p.problem, row, &batch, &head, &token)) {
            continue;
        }
        const int64_t at = row_at(&p.dq, batch, head, token), sum = row_at(&p.sum, batch, head, token);
        for (int d = threadIdx.x % 32; d < p.problem.dim_qk; d += 32) {
            const float x = ((const float *)p.sum.data)[sum + d];
            fma_set(&p.dq, at + d, p.accumulate ? x + fma_get(&p.dq, at + d) : x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fma_sum(const __grid_constant__ attn__fma_sum p)
{
    const int64_t tokens = p.problem.tokens_kv, heads = p.problem.heads_kv / p.problem.parts;
    const int64_t rows = p.problem.batch * heads * tokens;
    for (int64_t row = first_warp(); row < rows; row += all_warps()) {
        const int64_t key = row % tokens, head = row / tokens % heads, batch = row / tokens / heads;
        const fma_sequence s = fma_sequence_of(&p.problem, batch);
        const int64_t at = row_at(&p.to, batch, head, s.first_kv + key);
        const float *part =
            (const float *)p.parts.data + row_at(&p.parts, batch, head * p.problem.parts, s.first_kv + key);
        for (int d = threadIdx.x % 32; d < p.dim && key < s.keys; d += 32) {
            float x = part[d];
#pragma unroll 4
            for (int i = 1; i < p.problem.parts; i++) {
                x += part[i * p.parts.head + d];
            }
            fma_set(&p.to, at + d, p.accumulate ? x + fma_get(&p.to, at + d) : x);
        }
    }
}
