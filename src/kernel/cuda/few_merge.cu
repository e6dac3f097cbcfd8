/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: the parts of a tile, which several blocks have worked on, become its rows.
 *
 * A row is the work of `team` warps: each goes over every team-th part with a running maximum, then the first adds up
 * what they found, in order.  So the bits depend on the parts alone.
 *
 * COST.  Reads the partials, which lie in the second-level cache, and writes the rows; about 3 us, all of it
 * latency.
 */
#include "kernel/cuda/few_share.cuh"

enum { WARPS = FEW_MERGE_THREADS / 32, COLUMNS = 256 / 64 };

/* Sums over some of the parts: of the columns 64 * i + 2 * lane and the next in o[i]; below, the row's maximum, in
 * powers of 2, and its sum. */
typedef struct merge_sums {
    float2 o[COLUMNS], below;
} merge_sums;

/* Adds another's; its columns are at from[i * stride] where they are less than dim_v. */
FEW void add_sums(merge_sums *s, float2 below, const float2 *from, int stride, int dim_v)
{
    int lane = (int)(threadIdx.x % 32);
    float most = fmaxf(s->below.x, below.x), used = most == -INFINITY ? 0.0f : most;
    float mine = exp2_fast(s->below.x - used), other = exp2_fast(below.x - used);
    s->below = make_float2(most, s->below.y * mine + below.y * other);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (64 * i + 2 * lane < dim_v) {
            float2 x = from[i * stride];
            s->o[i].x = s->o[i].x * mine + x.x * other;
            s->o[i].y = s->o[i].y * mine + x.y * other;
        }
    }
}

/* Every team-th part of a row.  Its first part ends a block's share, the others begin one. */
FEW void add_parts(const few_params *p, merge_sums *s, few_split split, int row, int member)
{
    const float2 *stats = (const float2 *)p->stats, *partial = (const float2 *)p->partial;
    int lane = (int)(threadIdx.x % 32);
#pragma unroll 4
    for (int part = member; part < split.parts; part += p->team) {
        int64_t at = ((int64_t)(split.first + part) * 2 + (part == 0)) * p->rows + row;
        add_sums(s, stats[at], partial + at * (p->dim_v / 2) + lane, 32, p->dim_v);
    }
}

FEW void write_row(const few_params *p, const merge_sums *s, few_split split, int row)
{
    int lane = (int)(threadIdx.x % 32);
    few_sequence sequence = few_sequence_of(p, split.batch);
    few_row at = few_row_of(p, &sequence, split.batch, split.head, split.index, row);
    few_end end = few_end_of(p, s->below.x, s->below.y, at.lse);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (64 * i + 2 * lane < p->dim_v) {
            few_store(p, at.o + 64 * i + 2 * lane, end, s->o[i].x, s->o[i].y);
        }
    }
    __syncwarp();
    if (lane == 0 && at.lse != nullptr) {
        *at.lse = end.lse;
    }
}

/* Row `row` of a tile may be past its last where sequences are of different lengths. */
FEW bool is_row(const few_params *p, few_split split, int row)
{
    few_sequence s = few_sequence_of(p, split.batch);
    return split.index * FEW_ROWS + row < s.n_q * p->group;
}

extern "C" __global__ void __launch_bounds__(FEW_MERGE_THREADS) few_merge(const __grid_constant__ few_params params)
{
    __shared__ float2 o[WARPS][COLUMNS][32], below[WARPS];
    const few_params *p = &params;
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), member = warp % p->team;
    int64_t number = ((int64_t)blockIdx.x * WARPS + warp) / p->team; /* rows of all entries */
    int entry = (int)(number / p->rows), row = (int)(number % p->rows);
    merge_sums s = {{}, {-INFINITY, 0.0f}};
    few_split split = {};
    grid_release();
    grid_wait();
    if (entry < p->entries) {
        split = p->splits[entry];
    }
    bool mine = split.parts > 0 && is_row(p, split, row);
    if (mine) {
        add_parts(p, &s, split, row, member);
    }
    if (p->team > 1) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            o[warp][i][lane] = s.o[i];
        }
        below[warp] = s.below;
        __syncthreads();
        for (int other = warp + 1; member == 0 && other < warp + p->team; other++) {
            add_sums(&s, below[other], &o[other][0][lane], 32, p->dim_v);
        }
    }
    if (mine && member == 0) {
        write_row(p, &s, split, row);
    }
}
