/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_parts.c - into how many parts a group of query heads is cut for the gradients on Hopper.
 *
 * METHOD.  A tile of keys meets the queries of all heads of its group, and one block does that.  Few key
 * heads have few tiles, and each is long: some multiprocessors have none, and under a causal mask the rest
 * end one by one.  So a group is cut into parts, each with tiles of its own, whose dK and dV are added up in
 * the end.  What that costs is told in steps, as is the time: the longest tile, or what each multiprocessor
 * has to do, whichever is more.  The constants were fitted to measured times (docs/perf/cuda_bwd.md).
 */
#include "kernel/cuda/flash_backward_parts.h"

#include <math.h>

#include "kernel/cuda/params.h"

enum {
    SAMPLES = 64,   /* tiles of keys that are looked at */
    TILE_STEPS = 8, /* what a tile's begin and end cost, in steps */
    PART_STEPS = 8, /* and dK and dV, if they are one of several parts */
    EMPTY = 3       /* so many tiles behind the end of a sequence cost one step */
};

/* The tiles of keys of one head of one sequence: the longest, and all of them, in steps. */
typedef struct head_steps {
    int64_t tiles;
    double longest, all;
} head_steps;

/* As work_of() (flash_backward_work.cuh) has it. */
static int64_t steps_of(const attn__cuda_call *call, int64_t queries, int64_t keys, int64_t tile_queries,
                        int64_t first_key, int64_t last_key)
{
    const int64_t shift = call->shifted ? call->shift : keys - queries;
    const int64_t high = shift + attn__min(call->right, ATTN__TILE_FAR);
    const int64_t low = shift - attn__min(call->left, ATTN__TILE_FAR);
    const int64_t from = attn__max(0, first_key - high), to = attn__min(queries - 1, last_key - low);
    return to >= from ? to / tile_queries - from / tile_queries + 1 : 0;
}

static head_steps head_of(const attn__cuda_call *call, int64_t queries, int64_t keys, int64_t tile_queries,
                          int64_t tile_keys)
{
    head_steps head = {attn__ceil_div(keys, tile_keys), 0, 0};
    const int64_t stride = attn__max(head.tiles / SAMPLES, 1);
    for (int64_t i = 0; i < head.tiles; i += stride) {
        const int64_t first = i * tile_keys, last = attn__min(first + tile_keys, keys) - 1;
        const double steps = (double)steps_of(call, queries, keys, tile_queries, first, last);
        head.longest = fmax(head.longest, steps);
        head.all += steps * (double)attn__min(stride, head.tiles - i);
    }
    return head;
}

/*
 * What a step costs more if a part has `share` query heads.  Under a causal band the tiles of keys of a large
 * group part from each other, and lose what the L2 cache would else keep (flash_backward_work.cuh): beyond
 * four heads about 15 %.
 */
static double step_of(const attn__cuda_call *call, const attn__backward_tiles *tiles, int64_t share)
{
    const bool parted = call->left >= call->tokens_kv && call->right < call->tokens_kv;
    const double bytes =
        (double)(call->batch * call->heads_q) * (double)call->tokens_q * (double)tiles->dim * 8;
    return parted && !call->deterministic && share > 4 && bytes > (double)tiles->l2 ? 1.15 : 1;
}

/* Steps until the last cluster is done, if each of `heads` has tiles like these, `share` times, and a tile
 * costs `each` besides. */
static double time_of(const head_steps *longest, const head_steps *typical, int64_t heads, double share,
                      double each, int64_t clusters)
{
    const double empty = (double)(longest->tiles - typical->tiles) / EMPTY;
    const double all = (double)heads * (typical->all * share + (double)typical->tiles * each + empty);
    const double last = longest->longest * share + each;
    /* alike, they come in waves; else the shorter ones fill what the longer ones leave */
    if (longest->longest * (double)longest->tiles < 1.25 * longest->all) {
        return last * (double)attn__ceil_div(heads * typical->tiles, clusters);
    }
    return fmax(last, all / (double)clusters);
}

int64_t attn__flash_backward_parts(const attn__cuda_call *call, const attn__backward_tiles *tiles)
{
    const int64_t batch = attn__max(call->batch, 1), group = call->heads_q / attn__max(call->heads_kv, 1);
    const int64_t heads = batch * call->heads_kv;
    const head_steps longest = head_of(call, call->tokens_q, call->tokens_kv, tiles->queries, tiles->keys);
    head_steps typical = longest;
    if (call->cu_q != NULL) {
        typical = head_of(call, call->most_q / batch, call->most_kv / batch, tiles->queries, tiles->keys);
    }
    int64_t best = 1;
    double least = INFINITY;
    const int64_t most = INT32_MAX / 2 / attn__max(heads * longest.tiles, 1);
    for (int64_t parts = 1; parts <= attn__max(attn__min(group, most), 1); parts++) {
        const int64_t share = group / parts;
        const double each = TILE_STEPS + (parts > 1 ? PART_STEPS : 0);
        const double time = time_of(&longest, &typical, heads * parts,
                                    (double)share * step_of(call, tiles, share), each, tiles->clusters);
        if (share * parts == group && time < 0.97 * least) {
            best = parts;
            least = time;
        }
    }
    return best;
}
