/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_share.cuh - which keys of which tile a block of few.cuh works on, and how a row ends; for few.cuh and
 * few_merge.cu.
 *
 * The keys that some row of a tile sees are counted in units of FEW_UNIT keys; all tiles' units, one tile
 * after the other, are cut into as many equal shares as there are blocks.  So every block has the same number
 * of bytes to read, whatever the lengths of the sequences, and a share is a run of whole tiles but for its
 * ends.  Where all tiles are nearly alike, few.c gives each the same number of blocks, if that is not much less than
 * all of them: then each tile is cut by itself.
 */
#ifndef ATTN_CUDA_FEW_SHARE_CUH
#define ATTN_CUDA_FEW_SHARE_CUH

#include "kernel/cuda/few_params.h"
#include "kernel/cuda/ptx.cuh"

#define FEW static __device__ __forceinline__

/* ---- sequences and tiles ---- */

typedef struct few_sequence {
    int q0, k0; /* first token */
    int n_q, n_kv;
    int tiles; /* of one kv head */
} few_sequence;

FEW few_sequence few_sequence_of(const few_params *p, int b)
{
    few_sequence s = {0, 0, p->tokens_q, p->tokens_kv, 0};
    if (p->cu_q != nullptr) {
        s.q0 = (int)p->cu_q[b];
        s.n_q = (int)(p->cu_q[b + 1] - s.q0);
    }
    if (p->cu_kv != nullptr) {
        s.k0 = (int)p->cu_kv[b];
        s.n_kv = (int)(p->cu_kv[b + 1] - s.k0);
    }
    s.tiles = (s.n_q * p->group + p->height - 1) / p->height;
    return s;
}

FEW int64_t few_shift(const few_params *p, const few_sequence *s)
{
    return p->shifted ? p->shift : (int64_t)s->n_kv - s->n_q;
}

/* Query `token` sees the keys lo .. hi - 1. */
FEW int few_lo(const few_params *p, const few_sequence *s, int token)
{
    int64_t lo = token + few_shift(p, s) - p->left;
    return lo < 0 ? 0 : lo > s->n_kv ? s->n_kv : (int)lo;
}

FEW int few_hi(const few_params *p, const few_sequence *s, int token)
{
    int64_t hi = token + few_shift(p, s) + p->right + 1;
    return hi < 0 ? 0 : hi > s->n_kv ? s->n_kv : (int)hi;
}

typedef struct few_tile {
    int rows;           /* from row index * height on */
    int lo, hi;         /* some row sees keys in here, none outside */
    int all_lo, all_hi; /* every row sees the keys in here, if there are any */
    unsigned units;
} few_tile;

FEW few_tile few_tile_of(const few_params *p, const few_sequence *s, int index)
{
    int first = index * p->height;
    few_tile t;
    t.rows = min(s->n_q * p->group - first, p->height);
    int top = first / p->group, bottom = (first + t.rows - 1) / p->group;
    t.lo = few_lo(p, s, top);
    t.all_lo = few_lo(p, s, bottom);
    t.all_hi = few_hi(p, s, top);
    t.hi = few_hi(p, s, bottom);
    t.units = t.hi > t.lo ? (unsigned)(t.hi - t.lo + FEW_UNIT - 1) / FEW_UNIT : 0;
    return t;
}

/* Units of sequence b.  By any thread alone: one after the other, since mostly there are few. */
FEW unsigned few_sequence_units(const few_params *p, int b)
{
    few_sequence s = few_sequence_of(p, b);
    unsigned units = 0;
    for (int t = 0; t < s.tiles; t++) {
        units += few_tile_of(p, &s, t).units;
    }
    return units * p->heads_kv;
}

/* All sequences are of one length: what blocks work on is known before any memory is read. */
FEW bool few_fixed(const few_params *p)
{
    return p->cu_q == nullptr && p->cu_kv == nullptr;
}

/* ---- the cut.  All lanes of a warp work these out together. ---- */

/* The sum over the warp's lanes up to this one. */
FEW unsigned few_running_sum(unsigned x)
{
    int lane = (int)(threadIdx.x % 32);
    for (int step = 1; step < 32; step *= 2) {
        unsigned other = __shfl_up_sync(~0u, x, step);
        x += lane >= step ? other : 0;
    }
    return x;
}

/* Units of the first `tiles` tiles of a kv head. */
FEW unsigned few_head_units(const few_params *p, const few_sequence *s, int tiles)
{
    unsigned units = 0;
    for (int t = (int)(threadIdx.x % 32); t < tiles; t += 32) {
        units += few_tile_of(p, s, t).units;
    }
    return __reduce_add_sync(~0u, units);
}

/* Units of the sequences first .. last - 1. */
FEW unsigned few_units_of(const few_params *p, int first, int last)
{
    if (few_fixed(p)) {
        few_sequence s = few_sequence_of(p, 0);
        return (unsigned)(last - first) * few_head_units(p, &s, s.tiles) * p->heads_kv;
    }
    unsigned sum = 0;
    for (int b = first + (int)(threadIdx.x % 32); b < last; b += 32) {
        sum += few_sequence_units(p, b);
    }
    return __reduce_add_sync(~0u, sum);
}

/* Each lane has the units of one of 32 tiles or sequences in a row, of which the first is number *index.  True if *unit is
 * in one of them: *index becomes its number, *unit is counted from its begin.  Else both go on behind the 32. */
FEW bool few_search(unsigned units, unsigned *unit, int *index)
{
    unsigned upto = few_running_sum(units), past = __ballot_sync(~0u, upto > *unit);
    *unit -= past == 0 ? __shfl_sync(~0u, upto, 31) : __shfl_sync(~0u, upto - units, __ffs((int)past) - 1);
    *index += past == 0 ? 32 : __ffs((int)past) - 1;
    return past != 0;
}

/* Units of all tiles, and the blocks that share them: block i begins at unit i * total / blocks. */
typedef struct few_cut {
    unsigned total, blocks;
} few_cut;

FEW few_cut few_cut_of(const few_params *p)
{
    unsigned total = few_units_of(p, 0, p->batch);
    few_cut c = {total, min((unsigned)p->blocks, max(1u, total / FEW_LEAST))};
    return c;
}

FEW unsigned few_first_of(const few_cut *c, unsigned block)
{
    return (unsigned)((uint64_t)block * c->total / c->blocks);
}

/* The block of a unit. */
FEW unsigned few_block_of(const few_cut *c, unsigned unit)
{
    return (unsigned)((((uint64_t)unit + 1) * c->blocks + c->total - 1) / c->total) - 1;
}

/* A place among the units: unit `first` of a tile. */
typedef struct few_place {
    few_sequence sequence;
    few_tile tile;
    int b, head, index; /* the tile */
    unsigned first;
} few_place;

/* Where unit `unit` is: one that exists. */
FEW few_place few_find(const few_params *p, unsigned unit)
{
    const int lane = (int)(threadIdx.x % 32);
    few_place at;
    at.b = 0;
    at.index = 0;
    if (few_fixed(p)) {
        unsigned units = few_units_of(p, 0, 1);
        at.b = (int)(unit / units);
        unit -= (unsigned)at.b * units;
    } else {
        while (!few_search(at.b + lane < p->batch ? few_sequence_units(p, at.b + lane) : 0, &unit, &at.b)) {
        }
    }
    at.sequence = few_sequence_of(p, at.b);
    unsigned head = few_head_units(p, &at.sequence, at.sequence.tiles);
    at.head = (int)(unit / head);
    unit -= (unsigned)at.head * head;
    for (bool found = false; !found;) {
        int index = at.index + lane;
        unsigned units = index < at.sequence.tiles ? few_tile_of(p, &at.sequence, index).units : 0;
        found = few_search(units, &unit, &at.index);
    }
    at.tile = few_tile_of(p, &at.sequence, at.index);
    at.first = unit;
    return at;
}

/* Tile `number`, in the order in which tiles are counted, of sequences of one length. */
FEW few_place few_tile_number(const few_params *p, int number)
{
    few_place at;
    int plane = number / p->tiles;
    at.index = number - plane * p->tiles;
    at.b = plane / p->heads_kv;
    at.head = plane - at.b * p->heads_kv;
    at.sequence = few_sequence_of(p, at.b);
    at.tile = few_tile_of(p, &at.sequence, at.index);
    at.first = 0;
    return at;
}

/* ---- a block's share ---- */

typedef struct few_share {
    few_place at;
    unsigned last, left; /* units of the tile, the last not included; of the share from at.first on */
} few_share;

/* False if this block has none. */
FEW bool few_share_first(const few_params *p, few_share *c)
{
    if (p->each > 0) {
        int number = (int)blockIdx.x / p->each;
        unsigned part = blockIdx.x - (unsigned)(number * p->each);
        c->at = few_tile_number(p, number);
        c->at.first = (unsigned)((uint64_t)part * c->at.tile.units / p->each);
        c->last = (unsigned)(((uint64_t)part + 1) * c->at.tile.units / p->each);
        c->left = c->last - c->at.first;
        return c->left > 0;
    }
    few_cut cut = few_cut_of(p);
    if (blockIdx.x >= cut.blocks || cut.total == 0) {
        return false;
    }
    unsigned first = few_first_of(&cut, blockIdx.x);
    c->at = few_find(p, first);
    c->left = few_first_of(&cut, blockIdx.x + 1) - first;
    c->last = min(c->at.tile.units, c->at.first + c->left);
    return true;
}

/* Goes on to the next tile that has units; false when nothing is left of the share.  By any thread alone. */
FEW bool few_share_next(const few_params *p, few_share *c)
{
    few_place *at = &c->at;
    c->left -= c->last - at->first;
    if (c->left == 0) {
        return false;
    }
    do {
        if (++at->index >= at->sequence.tiles) {
            at->index = 0;
            if (++at->head >= p->heads_kv) {
                at->head = 0;
                do {
                    at->sequence = few_sequence_of(p, ++at->b);
                } while (at->sequence.tiles == 0);
            }
        }
        at->tile = few_tile_of(p, &at->sequence, at->index);
    } while (at->tile.units == 0);
    at->first = 0;
    c->last = min(at->tile.units, c->left);
    return true;
}

/* ---- the end of a row ---- */

/* What a row's sums are multiplied by, and what was there before; its logarithm. */
typedef struct few_end {
    float weight, old, lse;
} few_end;

/* Of a row with this maximum (in powers of 2) and sum.  lse: where the row's is, or NULL. */
FEW few_end few_end_of(const few_params *p, float most, float sum, const float *lse)
{
    few_end e;
    e.lse = sum == 0.0f ? -INFINITY : (most + log2f(sum)) * 0.693147181f;
    e.weight = sum == 0.0f ? 0.0f : 1.0f / sum;
    e.old = 0.0f;
    if (p->merge) {
        float before = *lse, top = fmaxf(before, e.lse);
        if (e.lse == -INFINITY) {
            e.old = 1.0f;
            e.lse = before;
        } else if (before != -INFINITY) {
            float both = top + logf(expf(before - top) + expf(e.lse - top));
            e.old = expf(before - both);
            e.weight *= expf(e.lse - both);
            e.lse = both;
        }
    }
    return e;
}

FEW int64_t few_offset(const few_tensor *t, const few_sequence *s, int b, int64_t head, int64_t token)
{
    return b * t->batch + head * t->head + (s->q0 + token) * t->token;
}

/* Row `row` of a tile: its query head and token, where its o begins, and its lse, which may be NULL. */
typedef struct few_row {
    int head, token;
    int64_t o;
    float *lse;
} few_row;

FEW few_row few_row_of(const few_params *p, const few_sequence *s, int b, int kv_head, int index, int row)
{
    int in_head = index * p->height + row;
    few_row r;
    r.token = in_head / p->group;
    r.head = kv_head * p->group + in_head - r.token * p->group;
    r.o = few_offset(&p->o, s, b, r.head, r.token);
    r.lse =
        p->lse.data == nullptr ? nullptr : (float *)p->lse.data + few_offset(&p->lse, s, b, r.head, r.token);
    return r;
}

/* Two neighbours of a row of o, at `offset` from its begin. */
FEW void few_store(const few_params *p, int64_t offset, few_end e, float x, float y)
{
    x *= e.weight;
    y *= e.weight;
    if (p->dtype_out == 0) {
        float2 *to = (float2 *)((float *)p->o.data + offset);
        if (e.old != 0.0f) {
            float2 before = *to;
            x = e.weight == 0.0f ? before.x : fmaf(before.x, e.old, x);
            y = e.weight == 0.0f ? before.y : fmaf(before.y, e.old, y);
        }
        *to = make_float2(x, y);
    } else {
        *(uint32_t *)((uint16_t *)p->o.data + offset) = p->dtype_out == 1 ? ptx_pack_f16(x, y) : ptx_pack_bf16(x, y);
    }
}

#endif
