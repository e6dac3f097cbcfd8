/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: the parts of a tile, which several blocks have worked on, become its
 * rows.
 *
 * A row is the work of `team` warps: each goes over every team-th part with a running maximum, then the first
 * adds up what they found, in order.  So the bits depend on the parts alone.
 *
 * COST.  Reads the partials, which lie in the second-level cache, and writes the rows: about 2 us, all of it
 * latency. While few is still at work everything is done once in vain, so that instructions and addresses are
 * at hand.
 */
#include "kernel/cuda/few_share.cuh"

enum {
    WARPS = FEW_MERGE_THREADS / 32,
    FLIGHT = 5 /* parts that are on their way at once */
};

/* Sums over some of the parts: of 4 columns; below, the row's maximum, in powers of 2, and its sum. */
typedef struct merge_sums {
    float4 o;
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
FEW void add_sums(merge_sums *s, float2 below, float4 o)
{
    float most = fmaxf(s->below.x, below.x), used = most == -INFINITY ? 0.0f : most;
    float mine = ptx_exp2(s->below.x - used), other = ptx_exp2(below.x - used);
    s->below = make_float2(most, s->below.y * mine + below.y * other);
    s->o = make_float4(s->o.x * mine + o.x * other, s->o.y * mine + o.y * other, s->o.z * mine + o.z * other,
                       s->o.w * mine + o.w * other);
}

/* Every team-th part of 4 columns of a row.  The first part ends a block's share, the others begin one. */
FEW void add_parts(const few_params *p, merge_sums *s, const merge_tile *t, int row, int column,
                   unsigned member)
{
    unsigned team = (unsigned)p->team;
    for (unsigned begin = member; begin < t->parts; begin += FLIGHT * team) {
        float2 below[FLIGHT];
        float4 o[FLIGHT];
#pragma unroll
        for (unsigned i = 0; i < FLIGHT; i++) {
            unsigned part = begin + i * team;
            int64_t at = ((int64_t)(t->first + part) * 2 + (part == 0)) * p->rows + row;
            below[i] = make_float2(-INFINITY, 0.0f);
            o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (part < t->parts) {
                below[i] = __ldcg((const float2 *)p->stats + at);
                if (column < p->dim_v) {
                    o[i] = __ldcg((const float4 *)(p->partial + at * p->dim_v + column));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            add_sums(s, below[i], o[i]);
        }
    }
}

/* What the other warps of the team have found, to its first. */
FEW void add_team(const few_params *p, merge_sums *s, int warp, int member)
{
    __shared__ merge_sums found[WARPS][32];
    int lane = (int)(threadIdx.x % 32);
    found[warp][lane] = *s;
    __syncthreads();
    for (int i = 1; member == 0 && i < p->team; i++) {
        add_sums(s, found[warp + i][lane].below, found[warp + i][lane].o);
    }
    __syncthreads();
}

/* A row, by the warps of a team, 128 columns after the other.  Not really: only what leads to it. */
FEW void merge_row(const few_params *p, const merge_tile *t, int row, bool really)
{
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), member = warp % p->team;
    bool mine = t->index * FEW_ROWS + row < t->sequence.n_q * p->group && row < p->rows;
    few_row at = few_row_of(p, &t->sequence, t->b, t->head, t->index, mine ? row : 0);
    few_end end;
    for (int column = 4 * lane; column < p->dim_v + 4 * lane; column += 128) {
        merge_sums s = {{0.0f, 0.0f, 0.0f, 0.0f}, {-INFINITY, 0.0f}};
        if (mine) {
            add_parts(p, &s, t, row, column, (unsigned)member);
        }
        if (p->team > 1) {
            add_team(p, &s, warp, member);
        }
        end = few_end_of(p, s.below.x, s.below.y, at.lse);
        if (mine && really && member == 0 && column < p->dim_v) {
            few_store(p, at.o + column, end, s.o.x, s.o.y);
            few_store(p, at.o + column + 2, end, s.o.z, s.o.w);
        }
    }
    __syncwarp();
    if (mine && really && member == 0 && lane == 0 && at.lse != nullptr) {
        *at.lse = end.lse;
    }
}

extern "C" __global__ void __launch_bounds__(FEW_MERGE_THREADS, 6)
    few_merge(const __grid_constant__ few_params params)
{
    const few_params *p = &params;
    int teams = WARPS / p->team, number = (int)blockIdx.x / p->row_blocks; /* of tile or block */
    int first = ((int)blockIdx.x - number * p->row_blocks) * teams;        /* row */
    ptx_grid_go();
    merge_tile tile = find_tile(p, number);
    if (tile.parts < 2) {
        ptx_grid_wait(); /* or what comes after this kernel would not wait for the one before it */
        return;
    }
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) {
            ptx_grid_wait();
        }
        int end = pass == 1 ? p->rows : first + 1;
        for (int row = first; row < end; row += p->row_blocks * teams) {
            merge_row(p, &tile, row + (int)(threadIdx.x / 32) / p->team, pass == 1);
        }
    }
}
