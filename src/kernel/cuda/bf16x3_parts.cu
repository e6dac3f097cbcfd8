/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_parts.cu - q, k, v and dout of fp32 to tiles of three parts of bf16 (bf16x3.cuh) that lie in memory as they will in
 * shared memory, for the gradients.
 *
 * A tile has a number for each of its rows: what is taken from the exponent of its weights (q: lse, in powers of 2; k: 0) or from
 * their gradients (dout: delta; v: 0).  NOT FINITE: such elements become 0, and NaN the number of the row; so what sees
 * the row becomes NaN, and nothing else.  For dV, where that is too much, `stained` tells of dout.  A row without keys has
 * lse = inf and so weights 0, and no delta.
 *
 * COST.  Memory alone: 4 bytes read and 6 written for each number.
 */
#include "kernel/cuda/bf16x3.cuh"
#include "kernel/cuda/fma_tile.cuh"

enum { THREADS = 256 };

extern __shared__ __align__(1024) char shared[];

extern "C" __global__ void __launch_bounds__(THREADS) bf16x3_parts(const __grid_constant__ attn__bf16x3_parts p)
{
    const int numbers = ATTN__BF16X3_TILE(p.width), rows = numbers / p.width, chunks = p.width / 8;
    int *spoiled = (int *)shared; /* of each row */
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int64_t rest = item / p.tiles, head = rest % p.heads, batch = rest / p.heads, tile = item % p.tiles;
        const int64_t before = p.ends ? p.ends[batch] : 0, tokens = p.ends ? p.ends[batch + 1] - before : p.tokens;
        const int64_t slot = p.ends ? before / rows + batch : batch * p.tiles, left = tokens - tile * rows;
        char *to = p.to + (head * p.slots + slot + tile) * ATTN__BF16X3_IMAGE(p.width);
        if (left <= 0) {
            continue;
        }
        const int64_t first = before + tile * rows;
        if (threadIdx.x < rows) {
            spoiled[threadIdx.x] = 0;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < numbers / 8; i += THREADS) {
            const int row = i / chunks, chunk = i % chunks;
            float x[8];
            fetch(x, &p.from,
                  (const float *)p.from.data + batch * p.from.batch + head * p.from.head + (first + row) * p.from.token, 8 * chunk,
                  p.dim, p.width, row < left);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                if (!fma_finite(x[c])) {
                    x[c] = 0.0f;
                    spoiled[row] = 1;
                }
            }
            put_parts(to, rows, p.width, row, chunk, x);
        }
        __syncthreads();
        if (threadIdx.x < rows) {
            const int64_t token = first + threadIdx.x;
            const bool there = threadIdx.x < left;
            float number = 0.0f;
            bool alive = there;
            if (there && p.lse.data) {
                number = ((const float *)p.lse.data)[batch * p.lse.batch + head * p.lse.head + token * p.lse.token];
                alive = number != -INFINITY;
                number = alive ? number * 1.44269504088896341f : INFINITY;
            }
            if (there && p.delta.data) {
                number =
                    alive ? ((const float *)p.delta.data)[batch * p.delta.batch + head * p.delta.head + token * p.delta.token] : 0.0f;
            }
            if (alive && spoiled[threadIdx.x]) {
                number = NAN;
                if (p.delta.data) {
                    *p.stained = 1;
                }
            }
            ((float *)(to + numbers * 6))[threadIdx.x] = number;
        }
        __syncthreads();
    }
}
