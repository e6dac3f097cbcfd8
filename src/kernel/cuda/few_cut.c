/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_cut.c - the cut of few-sm90: which kernel, how many blocks, and whether tiles are cut alike.
 */
#include "kernel/cuda/few_cut.h"

#include <math.h>

#include "kernel/cuda/few_params.h"

static const int64_t far_away = (int64_t)1 << 40;

/* Bytes of K and V for which a block of two warpgroups is worth it, whose begin and end nothing hides. */
static const int64_t long_share = 3 << 19;

/* Rows that a tile has room for: the kernel that is taken. */
static unsigned height(const attn__cuda_call *call)
{
    return attn__few_rows(call) <= 16 ? 16 : attn__few_rows(call) <= 64 ? 64 : 128;
}

static int64_t tile_rows(const attn__cuda_call *call)
{
    return attn__min(attn__few_rows(call), height(call));
}

static unsigned padded_dim(const attn__cuda_call *call)
{
    int64_t dim = attn__max(call->dim_qk, call->dim_v);
    return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

int64_t attn__few_tiles(const attn__cuda_call *call)
{
    return attn__ceil_div(attn__few_rows(call), height(call));
}

int64_t attn__few_clamp(int64_t x)
{
    return attn__max(attn__min(x, far_away), -far_away);
}

/* As many as run at once, but no more than the longest sequences that may come have work for.  The workspace
 * is for these: a plan's call may come with fewer tokens, or with sequences of unequal length. */
static int64_t most_blocks(const attn__cuda_call *call, const attn__cuda_device *device, bool split)
{
    int64_t units = call->cu_kv != NULL ? call->total_kv / FEW_UNIT + call->batch
                                        : attn__ceil_div(call->tokens_kv, FEW_UNIT) * call->batch;
    int64_t useful = units * attn__few_tiles(call) * call->heads_kv / FEW_LEAST;
    int64_t most = attn__cuda_limited(call, device)
                       ? call->sms
                       : FEW_BLOCKS(padded_dim(call), height(call), split) * (int64_t)device->sms;
    return attn__max(attn__min(useful, most), 1);
}

/* Units of a tile of sequences of one length; as few_tile_of() has it. */
static int64_t tile_units(const attn__few_cut *c, const attn__cuda_call *call, int64_t index)
{
    const int64_t group = call->heads_q / call->heads_kv, first = index * c->height;
    const int64_t shift = call->shifted ? attn__few_clamp(call->shift) : call->tokens_kv - call->tokens_q;
    const int64_t bottom = (attn__min(first + c->height, attn__few_rows(call)) - 1) / group;
    const int64_t lo = attn__max(first / group + shift - attn__few_clamp(call->left), 0);
    const int64_t hi = attn__min(bottom + shift + attn__few_clamp(call->right) + 1, call->tokens_kv);
    return attn__ceil_div(attn__max(hi - lo, 0), FEW_UNIT);
}

attn__few_seen attn__few_seen_of(const attn__cuda_call *call)
{
    enum { SAMPLES = 64 }; /* evenly, the first and the last tile among them */
    const attn__few_cut c = {.height = height(call)};
    const int64_t tiles = attn__few_tiles(call), count = attn__min(tiles, SAMPLES);
    attn__few_seen seen = {.least = INFINITY};
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = count > 1 ? i * (tiles - 1) / (count - 1) : 0;
        const double keys = (double)tile_units(&c, call, index) * FEW_UNIT;
        seen.least = fmin(seen.least, keys);
        seen.mean += keys / (double)count;
    }
    return seen;
}

/* Blocks of a tile of `units`, about `most`, but so that their shares are whole stages of the ring, if there
 * is such a number: the rest of a stage costs as much as all of it. */
static int64_t blocks_of_tile(const attn__few_cut *c, int64_t units, int64_t most)
{
    const int64_t stage = FEW_KEYS(c->dim, c->height, c->split) / FEW_UNIT;
    for (int64_t count = most; 16 * count >= 15 * most; count--) {
        if (units % (count * stage) == 0) {
            return count;
        }
    }
    return most;
}

/* Blocks of each tile, if tiles are about of one length, and share all blocks nearly without a rest, or have
 * no work for as many; else 0.  A share that ends just beyond a tile is what all others wait for. */
static int64_t blocks_each(const attn__few_cut *c, const attn__cuda_call *call)
{
    int64_t least_units = c->first_units, most_units = c->first_units;
    if (!c->fixed || c->all > c->most) {
        return 0;
    }
    for (int64_t i = 1; i < c->tiles; i++) {
        const int64_t units = tile_units(c, call, i);
        least_units = attn__min(least_units, units);
        most_units = attn__max(most_units, units);
    }
    if (least_units < FEW_LEAST || 16 * least_units < 15 * most_units) {
        return 0;
    }
    const int64_t useful = least_units / FEW_LEAST, room = attn__min(c->most / c->all, useful);
    const int64_t each = blocks_of_tile(c, most_units, room);
    return room == useful || 16 * each * c->all >= 15 * c->most ? each : 0;
}

/* All blocks: so that they have whole tiles or tiles whole blocks, if tiles are about of one length, and that
 * is not much less than the most.  A whole tile needs no merge. */
static int64_t all_blocks(const attn__few_cut *c)
{
    if (c->each > 0) {
        return c->each * c->all;
    }
    if (!c->fixed || c->all <= c->most) {
        return c->most;
    }
    const int64_t fitting = attn__ceil_div(c->all, attn__ceil_div(c->all, c->most));
    return 16 * fitting >= 15 * c->most ? fitting : c->most;
}

static attn__few_cut cut_by(const attn__cuda_call *call, const attn__cuda_device *device, bool split)
{
    attn__few_cut c = {.height = height(call),
                       .tiles = attn__few_tiles(call),
                       .rows = tile_rows(call),
                       .dim = padded_dim(call),
                       .split = split,
                       .fixed = call->cu_q == NULL && call->cu_kv == NULL,
                       .most = most_blocks(call, device, split)};
    c.all = call->batch * call->heads_kv * c.tiles;
    c.first_units = tile_units(&c, call, 0);
    c.each = blocks_each(&c, call);
    c.blocks = all_blocks(&c);
    c.pairs = c.height > 16 && FEW_GATHER(c.dim, c.height, split) > 0 && c.each % 2 == 0 && c.each >= 4;
    return c;
}

/* Two warpgroups take shares of one tile each, in pairs. */
attn__few_cut attn__few_cut_of(const attn__cuda_call *call, const attn__cuda_device *device)
{
    if (height(call) == 64 && padded_dim(call) > 64) {
        const attn__few_cut c = cut_by(call, device, true);
        const int64_t bytes = c.first_units * FEW_UNIT * (call->dim_qk + call->dim_v) * 2;
        if (c.pairs && bytes >= long_share * c.each) {
            return c;
        }
    }
    return cut_by(call, device, false);
}

/* Known of one tile a sequence, all of them of one length; the cut is then that of few_share.cuh. */
bool attn__few_whole(const attn__few_cut *c)
{
    if (c->each > 0 || !c->fixed || c->tiles > 1) {
        return c->each == 1;
    }
    return c->all % attn__min(c->blocks, attn__max(c->first_units * c->all / FEW_LEAST, 1)) == 0;
}

/* With fewer tokens, 64 rows or less have twice the blocks; what is split has no more than what is not. */
int64_t attn__few_part_rows(const attn__cuda_call *call, const attn__cuda_device *device)
{
    attn__cuda_call fewer = *call;
    fewer.tokens_q = 64 * call->heads_kv / call->heads_q;
    int64_t rows = most_blocks(call, device, false) * 2 * tile_rows(call);
    if (height(call) == 128 && fewer.tokens_q > 0) {
        rows = attn__max(rows, most_blocks(&fewer, device, false) * 2 * tile_rows(&fewer));
    }
    return rows;
}
