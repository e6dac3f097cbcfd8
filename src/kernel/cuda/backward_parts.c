/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backward_parts.c - into how many parts a group of query heads is cut for the gradients on Hopper.
 *
 * METHOD.  A tile of keys meets the queries of all heads of its group, and one block does that.  Few key
 * heads have few tiles, and each is long: some multiprocessors have none, and under a causal mask the rest
 * end one by one.  So a group is cut into parts, each with tiles of its own, whose dK and dV are added up in
 * the end.  What that costs is told in steps, as is the time: the longest tile, or what each multiprocessor
 * has to do and how long the last one is waited for, whichever is more.  The constants, here and of each
 * kernel, were fitted to measured times (docs/perf/cuda_bwd.md, docs/perf/cuda_f32.md).
 */
#include "kernel/cuda/backward_parts.h"

#include <math.h>

#include "kernel/cuda/params.h"

enum {
    SAMPLES = 64, /* tiles of keys that are looked at */
    EMPTY = 3     /* so many tiles behind the end of a sequence cost one step */
};

/* More parts are more workspace: they must save so much. */
static const double ENOUGH = 0.97;

/* The tiles of keys of one head of one sequence: the longest, and all of them, in steps. */
typedef struct head_steps {
    int64_t tiles;
    double longest, all;
} head_steps;

/* Of queries that see any of the keys from `first` to `last`: as work_of() (flash_backward_work.cuh) has it.
 */
static int64_t steps_of(const attn__cuda_call *call, const attn__backward_tiles *tiles, int64_t queries,
                        int64_t keys, int64_t first, int64_t last)
{
    const int64_t shift = call->shifted ? call->shift : keys - queries;
    const int64_t high = shift + attn__min(call->right, ATTN__TILE_FAR);
    const int64_t low = shift - attn__min(call->left, ATTN__TILE_FAR);
    const int64_t from = attn__max(0, first - high), to = attn__min(queries - 1, last - low);
    return to >= from ? to / tiles->queries - from / tiles->queries + 1 : 0;
}

static head_steps head_of(const attn__cuda_call *call, const attn__backward_tiles *tiles, int64_t queries,
                          int64_t keys)
{
    head_steps head = {attn__ceil_div(keys, tiles->keys), 0, 0};
    const int64_t stride = attn__max(head.tiles / SAMPLES, 1);
    for (int64_t i = 0; i < head.tiles; i += stride) {
        const int64_t first = i * tiles->keys, last = attn__min(first + tiles->keys, keys) - 1;
        const double steps = (double)steps_of(call, tiles, queries, keys, first, last);
        head.longest = fmax(head.longest, steps);
        head.all += steps * (double)attn__min(stride, head.tiles - i);
    }
    return head;
}

/*
 * What a step costs more if a part has `share` query heads.  Tiles of keys of unequal length lose sight of
 * each other at the heads of a large group, and with it what the L2 cache would keep
 * (flash_backward_work.cuh): beyond four heads about 15 %.
 */
static double step_of(const attn__cuda_call *call, const attn__backward_tiles *tiles, int64_t share)
{
    const double bytes =
        (double)(call->batch * call->heads_q * call->tokens_q) * (double)(tiles->dim * ATTN__BACKWARD_BYTES);
    return attn__backward_uneven(call) && share > 4 && bytes > (double)tiles->l2 ? 1.15 : 1;
}

/* Steps until the last cluster is done, if each of `heads` has tiles like these, `share` times, and a tile
 * costs `each` besides. */
static double time_of(const attn__backward_tiles *tiles, const head_steps *longest, const head_steps *typical,
                      int64_t heads, double share, double each)
{
    const double empty = (double)(longest->tiles - typical->tiles) / EMPTY;
    const double all = (double)heads * (typical->all * share + (double)typical->tiles * each + empty);
    const double last = longest->longest * share + each;
    /* alike, they come in waves; else the shorter ones fill what the longer ones leave */
    if (longest->longest * (double)longest->tiles < 1.25 * longest->all) {
        return last * (double)attn__ceil_div(heads * typical->tiles, tiles->clusters);
    }
    return fmax(last, all / (double)tiles->clusters + tiles->tail * last);
}

int64_t attn__cuda_backward_parts(const attn__cuda_call *call, const attn__backward_tiles *tiles)
{
    const int64_t batch = attn__max(call->batch, 1), group = call->heads_q / attn__max(call->heads_kv, 1);
    const int64_t heads = batch * call->heads_kv;
    const head_steps longest = head_of(call, tiles, call->tokens_q, call->tokens_kv);
    head_steps typical = longest;
    if (call->cu_q != NULL) {
        typical = head_of(call, tiles, call->most_q / batch, call->most_kv / batch);
    }
    const int64_t most = attn__min(group, INT32_MAX / 2 / attn__max(heads * longest.tiles, 1));
    int64_t best = 1;
    double least = time_of(tiles, &longest, &typical, heads, (double)group * step_of(call, tiles, group),
                           (double)tiles->tile_steps);
    const double each = (double)(tiles->tile_steps + tiles->part_steps);
    for (int64_t parts = 2; parts <= most; parts++) {
        if (group % parts == 0) {
            const double share = (double)(group / parts) * step_of(call, tiles, group / parts);
            const double time = time_of(tiles, &longest, &typical, heads * parts, share, each);
            if (time < ENOUGH * least) {
                best = parts;
                least = time;
            }
        }
    }
    return best;
}
