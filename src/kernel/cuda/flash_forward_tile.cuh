/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward_tile.cuh - sizes, tiles and their order, and the producer of flash_forward.cuh.
 *
 * A tile is ROWS queries of one head and the steps of KEYS keys that they see.  Under a band tiles differ in
 * length: the long ones come first, and heads take turns as far as their keys and values fit in the L2 cache.
 */
#ifndef ATTN_FLASH_FORWARD_TILE_CUH
#define ATTN_FLASH_FORWARD_TILE_CUH

#include "kernel/cuda/flash_forward_params.h"
#include "kernel/cuda/wgmma.cuh"

#define INFINITE (__int_as_float(0x7f800000))
#define LARGE    32768.0F /* sum of a step's weights, each of which fits in fp16 then */

#if HEAD_DIM == 64
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(32)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(160)
enum { GROUPS = 3, STAGES = 4, Q_STAGES = 2 };
#else
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(40)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(232)
enum { GROUPS = 2, STAGES = 2, Q_STAGES = HEAD_DIM == 128 && KEYS <= 128 ? 2 : 1 };
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
    EARLY = HEAD_DIM == 64 ? SCORES : SCORES / 2,
    TURN = 1, /* the first named barrier of the turns */
    OVERLAP = HEAD_DIM < 256,
    TILES = 4, /* one is being stored, one computed, and the producer may be Q_STAGES ahead */
};

/* ---- what a tile is ---- */

typedef struct tile {
    int batch, head, row;      /* the first query, within its sequence */
    int queries, keys;         /* of the sequence */
    int low, high;             /* key j is visible to query i when low <= j - i <= high */
    int first_q, first_kv;     /* tokens before the sequence in a ragged batch */
    int first, count;          /* steps of KEYS keys; count 0: no key is visible, -1: no tile is left */
    int plain_low, plain_high; /* all is visible of steps that begin with these keys, and those between */
} tile;

typedef struct shared_memory {
    uint8_t q[Q_STAGES][Q_TILE];
    uint8_t k[STAGES][KEY_TILE], v[STAGES][KEY_TILE];
    tile tile[TILES], next; /* of the last turns; the producer's own */
    uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES],
        v_empty[STAGES];
} shared_memory;

static_assert(sizeof(shared_memory) <= SHARED, "shared memory");

/*
 * The number of the block's tile of a round, or p->tiles or more.  Where tiles are of one length, blocks take
 * them there and back, so that what is left over adds up; else each takes the next that is left when it has
 * time for it.
 */
PTX_INLINE int tile_number(const attn__forward_params *p, int round)
{
    const int first = round * (int)gridDim.x, block = (int)blockIdx.x;
    if (p->taken == nullptr) {
        return first + (round & 1 ? (int)gridDim.x - 1 - block : block);
    }
    return round == 0 ? block : (int)gridDim.x + atomicAdd(p->taken, 1);
}

/* The thread that does this has few registers: what is done lies in shared memory. */
PTX_INLINE void tile_of(tile *t, const attn__forward_params *p, int number)
{
    int plane, n;
    if (p->together == 0) {
        plane = number / p->tiles_q;
        n = number - plane * p->tiles_q;
    } else {
        int of_group = p->together * p->tiles_q, group = number / of_group, rest = number - group * of_group;
        int heads = min(p->together, p->batch * p->heads_q - group * p->together);
        n = rest / heads;
        plane = group * p->together + rest - n * heads;
        n = p->tiles_q - 1 - n;
    }
    t->batch = plane / p->heads_q;
    t->head = plane - t->batch * p->heads_q;
    t->row = n * ROWS;
    PTX_FORGET();
    int queries = p->tokens_q, keys = p->tokens_kv, first_q = 0, first_kv = 0;
    if (p->cu_q != nullptr) {
        first_q = (int)p->cu_q[t->batch];
        queries = (int)p->cu_q[t->batch + 1] - first_q;
        first_kv = (int)p->cu_kv[t->batch];
        keys = (int)p->cu_kv[t->batch + 1] - first_kv;
    }
    t->first_q = first_q;
    t->first_kv = first_kv;
    t->queries = queries;
    t->keys = keys;
    int shift = p->shifted ? p->shift : keys - queries;
    t->low = shift - p->left;
    t->high = shift + p->right;
    PTX_FORGET();
    int from = max(0, t->row + t->low);
    int to = min(t->keys - 1, min(t->row + ROWS, t->queries) - 1 + t->high);
    t->first = from / KEYS;
    t->count = to >= from && t->row < t->queries && t->low <= t->high ? to / KEYS - t->first + 1 : 0;
    t->plain_low = t->row + ROWS - 1 + t->low;
    t->plain_high = min(t->keys, t->row + t->high + 1) - KEYS;
    PTX_FORGET();
}

PTX_INLINE bool is_cut(const tile *t, int key)
{
    return key < t->plain_low || key > t->plain_high;
}

/* ---- the producer ---- */

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

PTX_INLINE void load(uint32_t to, int panel, const attn__tile_map *map, uint32_t barrier, bool ragged,
                     int head, int batch, int before, int length, int token)
{
    int c1 = ragged ? ATTN__TILE_RAGGED - length + token : token;
    int c3 = ragged ? before + length : batch, c4 = ragged ? ATTN__TILE_RAGGED : 0;
#pragma unroll 1
    for (int i = 0; i < PANELS; i++) {
        ptx_load_tile_5d(to + i * panel, map, barrier, 64 * i, c1, head, c3, c4);
    }
}

PTX_INLINE void load_keys(const attn__forward_params *p, const attn__tile_map *map,
                          uint8_t (*to)[KEY_TILE], uint64_t *fulls, uint64_t *empties, uint32_t step,
                          const tile *t, int key)
{
    const uint32_t full = ptx_shared(&fulls[stage_of(step)]);
    ptx_barrier_wait(ptx_shared(&empties[stage_of(step)]), parity_of(step) ^ 1);
    ptx_barrier_expect(full, KEY_TILE);
    load(ptx_shared(to[stage_of(step)]), KEY_PANEL, map, full, p->cu_q != nullptr, t->head / p->group,
         t->batch, t->first_kv, t->keys, key);
}

/* Q of the tile `next`, once there is room for it; then that tile is there for all to see. */
PTX_INLINE void load_queries(const attn__forward_params *p, shared_memory *m, uint32_t turn)
{
    const uint32_t place = turn % Q_STAGES, full = ptx_shared(&m->q_full[place]);
    ptx_barrier_wait(ptx_shared(&m->q_empty[place]), (turn / Q_STAGES & 1) ^ 1);
    const tile *t = &m->next;
    m->tile[turn % TILES] = *t;
    if (t->count <= 0) {
        ptx_barrier_arrive(full);
        return;
    }
    ptx_barrier_expect(full, Q_TILE);
    load(ptx_shared(m->q[place]), Q_PANEL, &p->q, full, p->cu_q != nullptr, t->head, t->batch, t->first_q,
         t->queries, t->row);
}

PTX_INLINE void produce(const attn__forward_params *p, shared_memory *m)
{
    uint32_t step = 0, turn = 0;
    ptx_prefetch_map(&p->q);
    ptx_prefetch_map(&p->k);
    ptx_prefetch_map(&p->v);
    const tile *t = &m->next;
#pragma unroll 1
    for (int round = 0;; round++) {
        const int number = tile_number(p, round);
        if (number >= p->tiles) {
            if (p->taken != nullptr || round * (int)gridDim.x >= p->tiles) {
                break;
            }
            continue;
        }
        tile_of(&m->next, p, number);
        if (t->row >= t->queries) {
            continue;
        }
        int key = (t->first + t->count - 1) * KEYS;
#pragma unroll 1
        for (int i = 0; i <= t->count; i++, key -= KEYS) {
            if (i < t->count) {
                load_keys(p, &p->k, m->k, m->k_full, m->k_empty, step + i, t, key);
            }
            if (i == 0) {
                load_queries(p, m, turn++);
            } else {
                load_keys(p, &p->v, m->v, m->v_full, m->v_empty, step + i - 1, t, key + KEYS);
            }
        }
        step += t->count;
    }
    m->next.count = -1;
    load_queries(p, m, turn);
}

#endif
