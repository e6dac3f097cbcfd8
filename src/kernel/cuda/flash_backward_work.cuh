/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_work.cuh - which part of the gradients is whose: sequences, tiles, the band.
 */
#ifndef ATTN_FLASH_BACKWARD_WORK_CUH
#define ATTN_FLASH_BACKWARD_WORK_CUH

#include "kernel/cuda/flash_backward_params.h"
#include "kernel/cuda/ptx.cuh"

/* One sequence: its lengths, where its queries' slots begin, its band [i + low, i + high] of keys of query i.
 */
typedef struct sequence {
    int queries, keys, slot, low, high;
    int first_q, first_kv; /* tokens before it in a ragged batch; else 0 */
} sequence;

/* `s` lies in shared memory, or all its fields are asked for. */
PTX_INLINE void sequence_of(sequence *s, const attn__backward_params *p, int batch, int tile_queries)
{
    int queries = p->tokens_q, keys = p->tokens_kv, slot = batch * p->tiles_q;
    s->first_q = s->first_kv = 0;
    if (p->cu_q != nullptr) {
        int first = (int)p->cu_q[batch];
        queries = (int)p->cu_q[batch + 1] - first;
        slot = first / tile_queries + batch;
        s->first_q = first;
    }
    if (p->cu_kv != nullptr) {
        int first = (int)p->cu_kv[batch];
        keys = (int)p->cu_kv[batch + 1] - first;
        s->first_kv = first;
    }
    int shift = p->shifted ? p->shift : keys - queries;
    s->queries = queries;
    s->keys = keys;
    s->slot = slot;
    s->low = shift - p->left;
    s->high = shift + p->right;
}

/* A tile of keys of one key head, and the tiles of queries that see any of it. */
typedef struct work {
    sequence s;
    int batch, head, first_key; /* head: a part of a group */
    int key_head;               /* whose keys and values these are */
    int first, count;           /* tiles of queries; count 0: none sees it */
    int whole_first, whole_end; /* of these, all queries see all keys; before and behind, some do not */
} work;

/*
 * `tile` counts tiles of keys in the order in which blocks take them.  In order (deterministic) a head's last
 * keys come first: a tile adds to a tile of queries after all that follow it, and so it waits only for what
 * has begun before it, and under a causal band for what also met these queries two steps before it.
 *
 * The thread that does this has few registers: what is done lies in shared memory.
 */
PTX_INLINE void work_of(work *w, const attn__backward_params *p, int tile, int tile_keys, int tile_queries)
{
    int first = min(tile / (p->together * p->tiles_kv) * p->together, p->last);
    int heads = first < p->last ? p->together : p->batch * p->heads_kv - p->last;
    int rest = tile - first * p->tiles_kv;
    int n = rest / heads;
    int head = first + rest - n * heads;
    w->first_key = (p->turns == nullptr ? n : p->tiles_kv - 1 - n) * tile_keys;
    w->batch = head / p->heads_kv;
    w->head = head - w->batch * p->heads_kv;
    w->key_head = w->head / p->parts;
    PTX_FORGET();
    sequence_of(&w->s, p, w->batch, tile_queries);
    PTX_FORGET();
    int last_key = min(w->first_key + tile_keys, w->s.keys) - 1;
    int from = max(0, w->first_key - w->s.high);
    int to = min(w->s.queries - 1, last_key - w->s.low);
    /* the tile's first query must see the last key, its last one the first key */
    int whole_from = max(0, w->first_key + tile_keys - 1 - w->s.high);
    int whole_to = w->first_key - w->s.low + 1;
    w->whole_first = (whole_from + tile_queries - 1) / tile_queries;
    w->whole_end = w->first_key + tile_keys > w->s.keys ? 0 : max(0, whole_to) / tile_queries;
    w->first = from / tile_queries;
    w->count = to >= from && w->first_key < w->s.keys && w->s.low <= w->s.high
                   ? to / tile_queries - w->first + 1
                   : 0;
    PTX_FORGET();
}

/*
 * Which tile of queries of which head a tile of keys meets: `run` tiles of one head in order, the same ones of
 * the next head of the group, and so on; the last queries' runs first.
 *
 * With runs as long as all tiles that is one head after the other.  Where a causal band gives each tile of keys
 * another number of queries, blocks that began together part at each head, and what one has loaded the next no
 * longer finds in the L2 cache; all see the last queries, so short runs from there on keep them together.  Each
 * tile of keys begins a head further on then: blocks that begin a run later find the one before them there.
 */
typedef struct visit {
    int tile, head;       /* head: of the group */
    int first, end, left; /* tiles of the run, heads that have it still before them */
} visit;

PTX_INLINE void visit_run(visit *at, const attn__backward_params *p, const work *w, int end)
{
    at->end = end;
    at->first = max(w->first, end - p->run);
    at->tile = at->first;
    at->left = p->group;
}

PTX_INLINE void visit_first(visit *at, const attn__backward_params *p, const work *w, int tile_keys)
{
    at->head = p->run < w->count ? w->first_key / tile_keys % p->group : 0;
    visit_run(at, p, w, w->first + w->count);
}

/* Is there one more? */
PTX_INLINE bool visit_next(visit *at, const attn__backward_params *p, const work *w)
{
    if (++at->tile < at->end) {
        return true;
    }
    at->head = at->head + 1 < p->group ? at->head + 1 : 0;
    at->tile = at->first;
    if (--at->left == 0) {
        visit_run(at, p, w, at->first);
    }
    return at->end > w->first;
}

/* A step's tile of queries, which the producer tells the consumers: its number in the sequence, and its place
 * among the tiles of all heads and sequences. */
typedef struct query_tile {
    int number, slot;
} query_tile;

PTX_INLINE query_tile tile_of(const visit *at, const attn__backward_params *p, const work *w)
{
    query_tile t = {at->tile, (w->head * p->group + at->head) * p->slots + w->s.slot + at->tile};
    return t;
}

/* Coordinates of a token for the copy engine: see ATTN__TILE_RAGGED. */
typedef struct place {
    int token, c3, c4;
} place;

PTX_INLINE place place_of(bool ragged, int batch, int first, int count, int token)
{
    place at;
    at.token = ragged ? ATTN__TILE_RAGGED - count + token : token;
    at.c3 = ragged ? first + count : batch;
    at.c4 = ragged ? ATTN__TILE_RAGGED : 0;
    return at;
}

/* Where column `query` of a tile lies in its row of statistics: a thread reads those of four of its columns,
 * 8 i + 2 t + {0, 1} and 8 more, in one go. */
PTX_INLINE int statistic_place(int query)
{
    int i = query >> 3, t = query >> 1 & 3;
    return (i >> 1) * 16 + t * 4 + (i & 1) * 2 + (query & 1);
}

#endif
