/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: partials of one tile merged into its rows, and rows that see no key.
 *
 * A row is the work of `team` warps: each adds up every team-th part, weighted by 2^(its maximum - the largest); then
 * the warps' sums are added in order.  So the bits depend on the parts alone.  Rows that one block has done
 * alone are written already.
 *
 * COST.  Reads the partials, which lie in the second-level cache, and writes the rows; about 2 us, most of it
 * latency.
 */
#include "kernel/cuda/few_share.cuh"

enum { WARPS = FEW_MERGE_THREADS / 32, COLUMNS = 256 / 64 };

typedef struct merge_row {
    few_sequence sequence;
    int64_t tile; /* over all */
    int b, head, token; /* query head and token */
    int row;      /* in the tile */
    bool any;     /* some row of the tile sees a key */
} merge_row;

/* Row `number` of all tiles as if each had p->rows; false if there is no such row. */
FEW bool find_row(const few_params *p, int64_t number, merge_row *r)
{
    r->row = (int)(number % p->rows);
    r->tile = number / p->rows;
    int index = (int)(r->tile % p->tiles);
    int64_t head = r->tile / p->tiles;
    r->b = (int)(head / p->heads_kv);
    if (r->b >= p->batch) {
        return false;
    }
    r->sequence = few_sequence_of(p, r->b);
    if (index >= r->sequence.tiles) {
        return false;
    }
    few_tile tile = few_tile_of(p, &r->sequence, index);
    int64_t in_head = (int64_t)index * FEW_ROWS + r->row;
    r->head = (int)(head % p->heads_kv) * p->group + (int)(in_head % p->group);
    r->token = (int)(in_head / p->group);
    r->any = tile.units > 0;
    return r->row < tile.rows;
}

/* The slot of a tile's part: its first part ends a block's share, the others begin one. */
FEW int64_t slot_of(int first, int part)
{
    return (int64_t)(first + part) * 2 + (part == 0);
}

/* The largest maximum of all parts, and the sum of their sums under it. */
FEW float2 merge_stats(const few_params *p, int first, int parts, int row)
{
    const float2 *stats = (const float2 *)p->stats;
    int lane = (int)(threadIdx.x % 32);
    float most = -INFINITY, sum = 0.0f;
    for (int part = lane; part < parts; part += 32) {
        float2 s = stats[slot_of(first, part) * p->rows + row];
        float top = fmaxf(most, s.x), used = top == -INFINITY ? 0.0f : top;
        sum = sum * exp2_fast(most - used) + s.y * exp2_fast(s.x - used);
        most = top;
    }
    for (int step = 1; step < 32; step *= 2) {
        float other = __shfl_xor_sync(~0u, most, step), other_sum = __shfl_xor_sync(~0u, sum, step);
        float top = fmaxf(most, other), used = top == -INFINITY ? 0.0f : top;
        sum = sum * exp2_fast(most - used) + other_sum * exp2_fast(other - used);
        most = top;
    }
    return make_float2(most, sum);
}

/* sums[2 * i], sums[2 * i + 1]: columns 64 * i + 2 * lane and the next, of this warp's parts. */
FEW void merge_sums(const few_params *p, int first, int parts, int row, float most, float *sums)
{
    const float2 *stats = (const float2 *)p->stats;
    int lane = (int)(threadIdx.x % 32), member = (int)(threadIdx.x / 32) % p->team;
    float used = most == -INFINITY ? 0.0f : most;
#pragma unroll 4
    for (int part = member; part < parts; part += p->team) {
        int64_t at = slot_of(first, part) * p->rows + row;
        const float2 *from = (const float2 *)(p->partial + at * p->dim_v);
        float weight = exp2_fast(stats[at].x - used);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            if (64 * i + 2 * lane < p->dim_v) {
                float2 x = from[32 * i + lane];
                sums[2 * i] = fmaf(x.x, weight, sums[2 * i]);
                sums[2 * i + 1] = fmaf(x.y, weight, sums[2 * i + 1]);
            }
        }
    }
}

FEW void write_row(const few_params *p, const merge_row *r, float most, float sum, const float *sums)
{
    int lane = (int)(threadIdx.x % 32);
    float *lse = p->lse.data == nullptr
                     ? nullptr
                     : (float *)p->lse.data + few_offset(&p->lse, &r->sequence, r->b, r->head, r->token);
    few_end end = few_end_of(p, most, sum, lse);
    int64_t o = few_offset(&p->o, &r->sequence, r->b, r->head, r->token);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (64 * i + 2 * lane < p->dim_v) {
            few_store(p, o + 64 * i + 2 * lane, end, sums[2 * i], sums[2 * i + 1]);
        }
    }
    __syncwarp();
    if (lane == 0 && lse != nullptr) {
        *lse = end.lse;
    }
}

extern "C" __global__ void __launch_bounds__(FEW_MERGE_THREADS) few_merge(const __grid_constant__ few_params params)
{
    __shared__ float2 exchange[WARPS][COLUMNS][32];
    const few_params *p = &params;
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), member = warp % p->team;
    float sums[2 * COLUMNS] = {0};
    merge_row r;
    grid_wait();
    grid_release();
    bool mine = find_row(p, ((int64_t)blockIdx.x * WARPS + warp) / p->team, &r);
    int first = 0, parts = 0;
    float2 stats = make_float2(-INFINITY, 0.0f);
    if (mine && r.any) {
        first = p->parts[2 * r.tile];
        parts = p->parts[2 * r.tile + 1];
        mine = parts > 1;
    }
    if (mine && r.any) {
        stats = merge_stats(p, first, parts, r.row);
        merge_sums(p, first, parts, r.row, stats.x, sums);
    }
    if (p->team > 1) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            exchange[warp][i][lane] = make_float2(sums[2 * i], sums[2 * i + 1]);
        }
        __syncthreads();
        for (int other = 1; member == 0 && other < p->team; other++) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                float2 x = exchange[warp + other][i][lane];
                sums[2 * i] += x.x;
                sums[2 * i + 1] += x.y;
            }
        }
    }
    if (mine && member == 0) {
        write_row(p, &r, stats.x, stats.y, sums);
    }
}
