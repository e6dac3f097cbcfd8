/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward_tile.cuh - sizes, tiles and their order, and the producers of flash_forward.cuh.
 *
 * A tile is ROWS queries of one head and the steps of KEYS keys that they see.  Under a band tiles differ in
 * length: the long ones of a few heads come first, then the others of these heads, while the L2 cache has their
 * keys and values.
 */
#ifndef ATTN_FLASH_FORWARD_TILE_CUH
#define ATTN_FLASH_FORWARD_TILE_CUH

#include "kernel/cuda/flash_forward_params.h"
#include "kernel/cuda/wgmma.cuh"

#define INFINITE (__int_as_float(0x7f800000))
#define LARGE    32768.0F /* sum of a step's weights, each of which fits in fp16 then */

#if GROUPS == 4
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(32)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(112)
enum { STAGES = 8, Q_STAGES = 2 };
#elif GROUPS == 3
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(32)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(160)
enum { STAGES = 4, Q_STAGES = 2 };
#else
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(40)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(232)
enum { STAGES = HEAD_DIM == 64 ? 4 : 2, Q_STAGES = HEAD_DIM <= 128 && KEYS <= 128 ? 2 : 1 };
#endif

enum {
    ROWS = 64 * GROUPS,
    CONSUMERS = 128 * GROUPS,
    THREADS = CONSUMERS + 128,
    PANELS = HEAD_DIM / 64,
    Q_PANEL = ROWS * 128, /* bytes */
    KEY_PANEL = KEYS * 128,
    Q_TILE = PANELS * Q_PANEL,
    KEY_TILE = PANELS * KEY_PANEL,
    SCORES = KEYS / 2,     /* registers of S */
    OUTPUT = HEAD_DIM / 2, /* of O */
    /* scores made weights before O is waited for; with three warpgroups the others' products fill the time */
    EARLY = GROUPS > 2 ? SCORES : SCORES / 2,
    TURN = 1,              /* the first named barrier of the turns */
    OVERLAP = Q_STAGES > 1, /* a tile's store and the next tile's first product */
    TILES = 2 + Q_STAGES, /* known: that being stored or computed, those whose Q is there, the next */
};

/* ---- what a tile is ---- */

typedef struct tile {
    int batch, head, row;      /* the first query, within its sequence */
    int queries, keys;         /* of the sequence */
    int low, high;             /* key j is visible to query i when low <= j - i <= high */
    int first_q, first_kv;     /* tokens before the sequence in a ragged batch */
    int first, count;          /* steps of KEYS keys; count 0: none is visible, or no tile is left */
    int plain_low, plain_high; /* all is visible of steps that begin with these keys, and those between */
    int cut;                   /* is there a step of which not all is visible? */
} tile;

typedef struct shared_memory {
    uint8_t q[Q_STAGES][Q_TILE];
    uint8_t k[STAGES][KEY_TILE], v[STAGES][KEY_TILE];
    tile tile[TILES]; /* of the last turns */
    uint64_t tile_full[TILES], q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES],
        v_full[STAGES], v_empty[STAGES];
} shared_memory;

static_assert(sizeof(shared_memory) <= SHARED, "shared memory");

/*
 * The number of the block's tile of a round, or p->tiles or more; by a warp.  Where tiles are of one length,
 * blocks take them there and back, so that what is left over adds up; else each takes the next that is left
 * when it has time for it.
 */
PTX_INLINE int tile_number(const attn__forward_params *p, int round)
{
    const int first = round * (int)gridDim.x, block = (int)blockIdx.x;
    if (p->taken == nullptr) {
        return first + (round & 1 ? (int)gridDim.x - 1 - block : block);
    }
    if (round == 0) {
        return block;
    }
    int taken = 0;
    if (threadIdx.x % 32 == 0) {
        taken = atomicAdd(p->taken, 1);
    }
    return (int)gridDim.x + __shfl_sync(0xffffffffU, taken, 0);
}

PTX_INLINE void tile_of(tile *t, const attn__forward_params *p, int number)
{
    int plane, n;
    if (p->together == 0) {
        plane = number / p->tiles_q;
        n = number - plane * p->tiles_q;
    } else {
        const int first = min(number / (p->together * p->tiles_q) * p->together, p->last);
        const int heads = first < p->last ? p->together : p->batch * p->heads_q - p->last;
        const int rest = number - first * p->tiles_q;
        n = rest / heads;
        plane = first + rest - n * heads;
        n = p->tiles_q - 1 - n;
    }
    const int batch = plane / p->heads_q, row = n * ROWS;
    int queries = p->tokens_q, keys = p->tokens_kv, first_q = 0, first_kv = 0;
    if (p->cu_q != nullptr) {
        first_q = (int)p->cu_q[batch];
        queries = (int)p->cu_q[batch + 1] - first_q;
        first_kv = (int)p->cu_kv[batch];
        keys = (int)p->cu_kv[batch + 1] - first_kv;
    }
    const int shift = p->shifted ? p->shift : keys - queries, low = shift - p->left, high = shift + p->right;
    const int from = max(0, row + low), to = min(keys - 1, min(row + ROWS, queries) - 1 + high);
    const int first = from / KEYS;
    t->batch = batch;
    t->head = plane - batch * p->heads_q;
    t->row = row;
    t->queries = queries;
    t->keys = keys;
    t->low = low;
    t->high = high;
    t->first_q = first_q;
    t->first_kv = first_kv;
    t->first = first;
    t->count = to >= from && row < queries && low <= high ? to / KEYS - first + 1 : 0;
    t->plain_low = row + ROWS - 1 + low;
    t->plain_high = min(keys, row + high + 1) - KEYS;
    t->cut = first * KEYS < t->plain_low || to / KEYS * KEYS > t->plain_high;
}

/* ---- the producers ---- */

/* Step number `step` of all tiles so far: its place in the ring, and the parity that tells this round from
 * the last. */
PTX_INLINE uint32_t stage_of(uint32_t step)
{
    return step % STAGES;
}
PTX_INLINE uint32_t parity_of(uint32_t step)
{
    return step / STAGES & 1;
}

PTX_INLINE void load(uint32_t to, int panel, const attn__tile_map *map, uint32_t barrier, bool once, bool ragged,
                     int head, int batch, int before, int length, int token)
{
    int c1 = ragged ? ATTN__TILE_RAGGED - length + token : token;
    int c3 = ragged ? before + length : batch, c4 = ragged ? ATTN__TILE_RAGGED : 0;
#pragma unroll
    for (int i = 0; i < PANELS; i++) {
        if (once) {
            ptx_load_tile_5d_once(to + i * panel, map, barrier, 64 * i, c1, head, c3, c4);
        } else {
            ptx_load_tile_5d(to + i * panel, map, barrier, 64 * i, c1, head, c3, c4);
        }
    }
}

/* The tile of a turn, once it is known. */
PTX_INLINE const tile *tile_of_turn(shared_memory *m, uint32_t turn)
{
    ptx_barrier_wait(ptx_shared(&m->tile_full[turn % TILES]), turn / TILES & 1);
    return &m->tile[turn % TILES];
}

/* K, or V, of all steps of all tiles. */
PTX_INLINE void produce_keys(const attn__forward_params *p, shared_memory *m, const attn__tile_map *map,
                             uint8_t (*to)[KEY_TILE], uint64_t *fulls, uint64_t *empties)
{
    uint32_t step = 0;
    ptx_prefetch_map(map);
    ptx_grid_wait();
#pragma unroll 1
    for (uint32_t turn = 0;; turn++) {
        const tile *t = tile_of_turn(m, turn);
        const int head = t->head / p->group, first = t->first;
        if (t->count == 0) {
            break;
        }
#pragma unroll 1
        for (int i = first + t->count - 1; i >= first; i--, step++) {
            const uint32_t full = ptx_shared(&fulls[stage_of(step)]);
            ptx_barrier_wait(ptx_shared(&empties[stage_of(step)]), parity_of(step) ^ 1);
            ptx_barrier_expect(full, KEY_TILE);
            load(ptx_shared(to[stage_of(step)]), KEY_PANEL, map, full, false, p->cu_q != nullptr, head, t->batch,
                 t->first_kv, t->keys, i * KEYS);
        }
    }
}

/* Makes the tile of a turn known, and brings its Q once there is room for it. */
PTX_INLINE void produce_turn(const attn__forward_params *p, shared_memory *m, uint32_t turn)
{
    const uint32_t place = turn % Q_STAGES, full = ptx_shared(&m->q_full[place]);
    const tile *t = &m->tile[turn % TILES];
    ptx_barrier_arrive(ptx_shared(&m->tile_full[turn % TILES]));
    if (t->count == 0) {
        return;
    }
    ptx_barrier_wait(ptx_shared(&m->q_empty[place]), (turn / Q_STAGES & 1) ^ 1);
    ptx_barrier_expect(full, Q_TILE);
    load(ptx_shared(m->q[place]), Q_PANEL, &p->q, full, true, p->cu_q != nullptr, t->head, t->batch, t->first_q,
         t->queries, t->row);
}

/* A tile that sees no key, by a warp: zeros, and lse = -inf. */
PTX_INLINE void store_nothing(const attn__forward_params *p, const tile *t)
{
    const int end = min(t->row + ROWS, t->queries);
    for (int query = t->row + (int)threadIdx.x % 32 / 4; query < end && !p->merge; query += 8) {
        const int64_t token = t->first_q + query;
        const int64_t at = t->batch * p->o.batch + t->head * p->o.head + token * p->o.token;
        for (int column = (int)threadIdx.x & 3; column < p->dim_v; column += 4) {
            if (p->out_f32) {
                ((float *)p->o.data)[at + column] = 0.0F;
            } else {
                ((uint16_t *)p->o.data)[at + column] = 0;
            }
        }
        if (p->lse.data != nullptr && ((int)threadIdx.x & 3) == 0) {
            ((float *)p->lse.data)[t->batch * p->lse.batch + t->head * p->lse.head + token * p->lse.token] =
                -INFINITE;
        }
    }
}

/* A whole warp: the tiles in turn, and their Q.  Those that see no key it stores itself. */
PTX_INLINE void produce_tiles(const attn__forward_params *p, shared_memory *m)
{
    uint32_t turn = 0;
    ptx_prefetch_map(&p->q);
    if (p->cu_q != nullptr) { /* lengths may come from the kernel before this one, as arrays may */
        ptx_grid_wait();
    }
#pragma unroll 1
    for (int round = 0;; round++) {
        const int number = tile_number(p, round);
        const bool last = number >= p->tiles && (p->taken != nullptr || round * (int)gridDim.x >= p->tiles);
        tile *t = &m->tile[turn % TILES];
        if (number >= p->tiles && !last) {
            continue;
        }
        if (threadIdx.x % 32 == 0) {
            if (last) {
                t->count = 0;
            } else {
                tile_of(t, p, number);
            }
        }
        __syncwarp();
        ptx_grid_wait();
        if (last || t->count != 0) {
            if (threadIdx.x % 32 == 0) {
                produce_turn(p, m, turn);
            }
            turn++;
        } else if (t->row < t->queries) {
            store_nothing(p, t);
        }
        if (last) {
            break;
        }
        __syncwarp();
    }
}

#endif
