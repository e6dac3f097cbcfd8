/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: the parts of a tile, which several blocks have worked on, become its rows.
 *
 * A row is the work of `team` warps: each goes over every team-th part with a running maximum, then the first adds up
 * what they found, in order.  So the bits depend on the parts alone.
 *
 * COST.  Reads the partials, which lie in the second-level cache, and writes the rows: about 2 us, all of it latency.
 * While few is still at work everything is done once in vain, so that instructions and addresses are at hand.
 */
#include "kernel/cuda/few_share.cuh"

enum { WARPS = FEW_MERGE_THREADS / 32, COLUMNS = 256 / 128 };

/* Sums over some of the parts: of the columns 128 * i + 4 * lane and the 3 next in o[i]; below, the row's maximum, in
 * powers of 2, and its sum. */
typedef struct merge_sums {
    float4 o[COLUMNS];
    float2 below;
} merge_sums;

/* A tile that has parts, if parts > 1: the first is of block `first`. */
typedef struct merge_tile {
    few_sequence sequence;
    int b, head, index;
    unsigned first, parts;
} merge_tile;

/* The tile of this number, or the one that block `number` begins and does not end. */
FEW merge_tile find_tile(const few_params *p, int number)
{
    few_cut cut = few_cut_of(p);
    merge_tile t = {};
    unsigned from, units;
    if (p->by_tile) {
        int head = number / p->tiles;
        t.index = number - head * p->tiles;
        t.b = head / p->heads_kv;
        t.head = head - t.b * p->heads_kv;
        if (t.b >= p->batch) {
            return t;
        }
        t.sequence = few_sequence_of(p, t.b);
        if (t.index >= t.sequence.tiles) {
            return t;
        }
        units = few_tile_of(p, &t.sequence, t.index).units;
        from = few_units_of(p, 0, t.b) + (unsigned)t.head * few_head_units(p, &t.sequence, t.sequence.tiles) +
               few_head_units(p, &t.sequence, t.index);
    } else {
        if ((unsigned)number >= cut.blocks || cut.total == 0) {
            return t;
        }
        unsigned last = few_first_of(&cut, (unsigned)number + 1) - 1;
        few_place at = few_find(p, last);
        t.sequence = at.sequence;
        t.b = at.b;
        t.head = at.head;
        t.index = at.index;
        units = at.tile.units;
        from = last - at.first;
        units = from < few_first_of(&cut, (unsigned)number) ? 0 : units;
    }
    if (units > 0) {
        t.first = few_block_of(&cut, from);
        t.parts = few_block_of(&cut, from + units - 1) - t.first + 1;
    }
    return t;
}

/* Adds another's. */
FEW void add_sums(merge_sums *s, float2 below, const float4 *o)
{
    float most = fmaxf(s->below.x, below.x), used = most == -INFINITY ? 0.0f : most;
    float mine = exp2_fast(s->below.x - used), other = exp2_fast(below.x - used);
    s->below = make_float2(most, s->below.y * mine + below.y * other);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        s->o[i] = make_float4(s->o[i].x * mine + o[i].x * other, s->o[i].y * mine + o[i].y * other,
                              s->o[i].z * mine + o[i].z * other, s->o[i].w * mine + o[i].w * other);
    }
}

/* Every team-th part of a row.  Its first part ends a block's share, the others begin one. */
FEW void add_parts(const few_params *p, merge_sums *s, const merge_tile *t, int row, unsigned member)
{
    const float2 *stats = (const float2 *)p->stats;
    const float4 *partial = (const float4 *)p->partial;
    int lane = (int)(threadIdx.x % 32);
#pragma unroll 4
    for (unsigned part = member; part < t->parts; part += (unsigned)p->team) {
        int64_t at = ((int64_t)(t->first + part) * 2 + (part == 0)) * p->rows + row;
        float4 o[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            bool there = 128 * i + 4 * lane < p->dim_v;
            o[i] = there ? __ldcg(partial + at * (p->dim_v / 4) + 32 * i + lane) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        add_sums(s, __ldcg(stats + at), o);
    }
}

/* What the other warps of the team have found. */
FEW void add_team(const few_params *p, merge_sums *s, int warp, int member)
{
    __shared__ float4 o[WARPS][COLUMNS][32];
    __shared__ float2 below[WARPS];
    int lane = (int)(threadIdx.x % 32);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        o[warp][i][lane] = s->o[i];
    }
    below[warp] = s->below;
    __syncthreads();
    for (int other = warp + 1; member == 0 && other < warp + p->team; other++) {
        float4 x[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            x[i] = o[other][i][lane];
        }
        add_sums(s, below[other], x);
    }
}

FEW void write_row(const few_params *p, const merge_sums *s, const merge_tile *t, int row, bool really)
{
    int lane = (int)(threadIdx.x % 32);
    few_row at = few_row_of(p, &t->sequence, t->b, t->head, t->index, row);
    few_end end = few_end_of(p, s->below.x, s->below.y, at.lse);
    __syncwarp();
    if (!really) {
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        int column = 128 * i + 4 * lane;
        if (column < p->dim_v) {
            few_store(p, at.o + column, end, s->o[i].x, s->o[i].y);
            few_store(p, at.o + column + 2, end, s->o[i].z, s->o[i].w);
        }
    }
    if (lane == 0 && at.lse != nullptr) {
        *at.lse = end.lse;
    }
}

extern "C" __global__ void __launch_bounds__(FEW_MERGE_THREADS) few_merge(const __grid_constant__ few_params params)
{
    const few_params *p = &params;
    int warp = (int)(threadIdx.x / 32), member = warp % p->team;
    int64_t number = ((int64_t)blockIdx.x * WARPS + warp) / p->team; /* rows of all tiles or blocks */
    int row = (int)(number % p->rows);
    grid_release();
    merge_tile tile = find_tile(p, (int)(number / p->rows));
    bool mine = tile.parts > 1 && tile.index * FEW_ROWS + row < tile.sequence.n_q * p->group;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        merge_sums s = {{}, {-INFINITY, 0.0f}};
        if (pass == 1) {
            grid_wait();
        }
        if (mine) {
            add_parts(p, &s, &tile, row, (unsigned)member);
        }
        if (p->team > 1) {
            add_team(p, &s, warp, member);
        }
        if (mine && member == 0) {
            write_row(p, &s, &tile, row, pass == 1);
        }
    }
}
