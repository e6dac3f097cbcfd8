/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_share.cuh - which keys of which tile a block of few.cuh works on, and how a row ends; for few.cuh and
 * few_merge.cu.
 *
 * The keys that some row of a tile sees are counted in units of FEW_UNIT keys; all tiles' units, one tile after
 * the other, are cut into as many equal shares as there are blocks.  So every block has the same number of bytes
 * to read, whatever the lengths of the sequences, and a share is a run of whole tiles but for its ends.
 */
#ifndef ATTN_CUDA_FEW_SHARE_CUH
#define ATTN_CUDA_FEW_SHARE_CUH

#include "kernel/cuda/few_params.h"
#include "kernel/cuda/ptx.cuh"

#define FEW static __device__ __forceinline__

/* ---- sequences and tiles ---- */

typedef struct few_sequence {
    int64_t q0, k0; /* first token */
    int64_t shift;
    int n_q, n_kv;
    int tiles; /* of one kv head */
} few_sequence;

FEW few_sequence few_sequence_of(const few_params *p, int b)
{
    few_sequence s = {0, 0, 0, p->tokens_q, p->tokens_kv, 0};
    if (p->cu_q != nullptr) {
        s.q0 = p->cu_q[b];
        s.n_q = (int)(p->cu_q[b + 1] - s.q0);
    }
    if (p->cu_kv != nullptr) {
        s.k0 = p->cu_kv[b];
        s.n_kv = (int)(p->cu_kv[b + 1] - s.k0);
    }
    s.shift = p->shifted ? p->shift : (int64_t)s.n_kv - s.n_q;
    s.tiles = (int)(((int64_t)s.n_q * p->group + FEW_ROWS - 1) / FEW_ROWS);
    return s;
}

/* Query `token` sees the keys lo .. hi - 1. */
FEW int few_lo(const few_params *p, const few_sequence *s, int token)
{
    int64_t lo = token + s->shift - p->left;
    return lo < 0 ? 0 : lo > s->n_kv ? s->n_kv : (int)lo;
}

FEW int few_hi(const few_params *p, const few_sequence *s, int token)
{
    int64_t hi = token + s->shift + p->right + 1;
    return hi < 0 ? 0 : hi > s->n_kv ? s->n_kv : (int)hi;
}

typedef struct few_tile {
    int rows;   /* from row index * FEW_ROWS on */
    int lo, hi; /* some row sees keys in here, none outside */
    int all_lo, all_hi; /* every row sees the keys in here, if there are any */
    int units;
} few_tile;

FEW few_tile few_tile_of(const few_params *p, const few_sequence *s, int index)
{
    int64_t first = (int64_t)index * FEW_ROWS, rows = (int64_t)s->n_q * p->group - first;
    few_tile t;
    t.rows = rows < FEW_ROWS ? (int)rows : FEW_ROWS;
    int top = (int)(first / p->group), bottom = (int)((first + t.rows - 1) / p->group);
    t.lo = few_lo(p, s, top);
    t.all_lo = few_lo(p, s, bottom);
    t.all_hi = few_hi(p, s, top);
    t.hi = few_hi(p, s, bottom);
    t.units = t.hi > t.lo ? (t.hi - t.lo + FEW_UNIT - 1) / FEW_UNIT : 0;
    return t;
}

/* units of the tiles of one kv head */
FEW int64_t few_head_units(const few_params *p, const few_sequence *s)
{
    int64_t units = 0;
    for (int t = 0; t < s->tiles; t++) {
        units += few_tile_of(p, s, t).units;
    }
    return units;
}

FEW int64_t few_sequence_units(const few_params *p, int b)
{
    few_sequence s = few_sequence_of(p, b);
    return few_head_units(p, &s) * p->heads_kv;
}

/* ---- a block's share ---- */

typedef struct few_share {
    few_sequence sequence;
    few_tile tile;
    int b, head, index;   /* the tile */
    int first, last;      /* units of it: last is not among them */
    int64_t at, left;     /* units before `first` of all tiles; of this share from `first` on */
    int64_t total, count; /* units of all tiles; blocks that share them */
} few_share;

/* The sum over the warp's lanes up to this one. */
FEW int64_t few_running_sum(int64_t x)
{
    int lane = (int)(threadIdx.x % 32);
    for (int step = 1; step < 32; step *= 2) {
        int64_t other = __shfl_up_sync(~0u, x, step);
        x += lane >= step ? other : 0;
    }
    return x;
}

FEW void few_share_clip(few_share *c)
{
    int64_t more = c->tile.units - c->first;
    c->last = c->first + (int)(more < c->left ? more : c->left);
}

/* Goes on to the next tile that has units: one that exists while units are left. */
FEW void few_share_find(const few_params *p, few_share *c)
{
    while (c->first >= c->tile.units) {
        c->first = 0;
        if (++c->index >= c->sequence.tiles) {
            c->index = 0;
            if (++c->head >= p->heads_kv) {
                c->head = 0;
                do {
                    c->sequence = few_sequence_of(p, ++c->b);
                } while (c->sequence.tiles == 0);
            }
        }
        c->tile = few_tile_of(p, &c->sequence, c->index);
    }
    few_share_clip(c);
}

/* After the units first .. last - 1; false when nothing is left. */
FEW bool few_share_next(const few_params *p, few_share *c)
{
    int done = c->last - c->first;
    c->left -= done;
    c->at += done;
    c->first = c->last;
    if (c->left <= 0) {
        return false;
    }
    few_share_find(p, c);
    return true;
}

/*
 * This block's share; false if it has none.  All lanes of a warp work it out together: each sums the units of a run
 * of sequences, then the run that the share begins in is looked through.
 */
FEW bool few_share_first(const few_params *p, few_share *c)
{
    int lane = (int)(threadIdx.x % 32), run = (p->batch + 31) / 32, end = min(p->batch, (lane + 1) * run);
    int64_t sum = 0;
    for (int b = lane * run; b < end; b++) {
        sum += few_sequence_units(p, b);
    }
    int64_t upto = few_running_sum(sum);
    c->total = __shfl_sync(~0u, upto, 31);
    c->count = min((int64_t)gridDim.x, max((int64_t)1, c->total / FEW_LEAST));
    if (blockIdx.x >= c->count || c->total == 0) {
        return false;
    }
    c->at = blockIdx.x * c->total / c->count;
    c->left = (blockIdx.x + 1) * c->total / c->count - c->at;
    int owner = __ffs((int)__ballot_sync(~0u, upto > c->at)) - 1;
    int64_t before = __shfl_sync(~0u, upto - sum, owner);
    c->b = owner * run;
    for (;; c->b += 32) {
        int64_t units = c->b + lane < min(p->batch, (owner + 1) * run) ? few_sequence_units(p, c->b + lane) : 0;
        upto = few_running_sum(units);
        unsigned past = __ballot_sync(~0u, before + upto > c->at);
        if (past != 0) {
            int found = __ffs((int)past) - 1;
            c->b += found;
            before += __shfl_sync(~0u, upto - units, found);
            break;
        }
        before += __shfl_sync(~0u, upto, 31);
    }
    c->sequence = few_sequence_of(p, c->b);
    int64_t head = few_head_units(p, &c->sequence), rest = c->at - before;
    c->head = (int)(rest / head);
    rest %= head;
    c->index = 0;
    c->tile = few_tile_of(p, &c->sequence, 0);
    while (rest >= c->tile.units) {
        rest -= c->tile.units;
        c->tile = few_tile_of(p, &c->sequence, ++c->index);
    }
    c->first = (int)rest;
    few_share_clip(c);
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
        *(uint32_t *)((uint16_t *)p->o.data + offset) = p->dtype_out == 1 ? pack_f16(x, y) : pack_bf16(x, y);
    }
}

#endif
