/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_load.cuh - a part of few.cuh: the ring, and the warps that fill it and fetch Q.
 */
/* A buffer of several that are used in turn, and how often the turn has come round. */
typedef struct few_turn {
    uint32_t stage, parity;
} few_turn;

FEW void turn_on(few_turn *t, uint32_t stages)
{
    if (++t->stage == stages) {
        t->stage = 0;
        t->parity ^= 1;
    }
}

/* Two barriers a buffer, and two of Q: it is full; 8 bytes on, it is empty. */
FEW uint32_t ring_barrier(uint32_t shared, few_turn t)
{
    return shared + BARRIERS + t.stage * 16;
}

/* The key after the last of the share's part of this tile. */
FEW int share_end(const few_share *c)
{
    return min(c->at.tile.lo + (int)c->last * FEW_UNIT, c->at.tile.hi);
}

/* ---- the warp that loads ---- */

/* Keys from..from + keys - 1 of the tile's sequence, WIDTH of their dims from `dim` on, to a stage of the ring; boxes of
 * whole stages or of units, of 64 dims, which lie one behind the other. */
FEW void load_stage(const few_params *p, const few_share *c, const few_map *whole, const few_map *unit,
                    uint32_t shared, few_turn t, int from, int keys, int dim, uint64_t policy)
{
    uint32_t full = ring_barrier(shared, t), to = shared + RING + t.stage * STAGE;
    int z = c->at.head, w = p->cu_kv != nullptr ? 0 : c->at.b;
    int y = (int)(c->at.sequence.k0 + from);
    ptx_barrier_wait(full + 8, t.parity ^ 1);
    if (keys > KEYS - FEW_UNIT) {
        ptx_barrier_expect(full, STAGE);
#pragma unroll
        for (int slab = 0; slab < WIDTH / 64; slab++) {
            ptx_load_tile_4d(to + slab * KEYS * 128, whole, full, dim + slab * 64, y, z, w, policy);
        }
    } else {
        int units = (keys + FEW_UNIT - 1) / FEW_UNIT;
        ptx_barrier_expect(full, (uint32_t)units * FEW_UNIT * WIDTH * 2);
        for (int u = 0; u < units; u++) {
#pragma unroll
            for (int slab = 0; slab < WIDTH / 64; slab++) {
                ptx_load_tile_4d(to + slab * KEYS * 128 + u * FEW_UNIT * 128, unit, full, dim + slab * 64,
                            y + u * FEW_UNIT, z, w, policy);
            }
        }
    }
}

/* Asks for a few of the share's first keys, to the second-level cache, while the kernel before is at work: memory looks
 * up their pages then, which the first keys otherwise wait for.  The kernel before may still write them; what it writes
 * is seen there, too. */
FEW void find_pages(const few_params *p, const few_share *c)
{
    int from = c->at.tile.lo + (int)c->at.first * FEW_UNIT;
    ptx_prefetch_tile_4d(&p->k_unit, 0, from, c->at.head, c->at.b);
    ptx_prefetch_tile_4d(&p->v_unit, 0, from, c->at.head, c->at.b);
}

/* Other tiles read the same keys, or none does. */
FEW uint64_t cache_policy(const few_params *p)
{
    return p->tiles > 1 ? ptx_evict_normal() : ptx_evict_first();
}

/* ---- the warps that load Q ---- */

FEW const uint16_t *q_row(const few_params *p, const few_share *c, int row)
{
    int in_head = c->at.index * p->height + row, token = in_head / p->group;
    int64_t head = (int64_t)c->at.head * p->group + in_head - token * p->group;
    return (const uint16_t *)p->q.data + few_offset(&p->q, &c->at.sequence, c->at.b, head, token);
}

/* The first row of Q that this warp fetches. */
FEW int q_first()
{
    return ((int)(threadIdx.x / 32) - WARPS - 1) * Q_WARP_ROWS;
}

/* Where this lane's rows of the tile begin, and 32 further; the last of those that are not there. */
typedef struct few_q_rows {
    const uint16_t *first, *second;
} few_q_rows;

FEW few_q_rows q_rows_of(const few_params *p, const few_share *c)
{
    int row = q_first() + (int)(threadIdx.x % 32), last = c->at.tile.rows - 1;
    few_q_rows rows = {q_row(p, c, min(row, last)), q_row(p, c, min(row + 32, last))};
    return rows;
}

/* The warp's rows of Q of the tile, swizzled; zeros where a warp that computes has rows that are not used. */
FEW void load_q(const few_params *p, const few_share *c, const few_q_rows *q, uint32_t to)
{
    enum { PIECES = DIM / 8, STEP = 32 / PIECES }; /* of 16 bytes, of a row; rows that the warp fetches at once */
    int lane = (int)(threadIdx.x % 32), piece = lane % PIECES, first = q_first();
    int used = min((c->at.tile.rows + 15) / 16 * 16 - first, (int)Q_WARP_ROWS);
    int rows = piece * 8 < p->dim_qk ? c->at.tile.rows : 0;
    to += piece / 8 * (Q_ROWS * 128);
#pragma unroll 4
    for (int i = 0; i < used; i += STEP) {
        int row = i + lane / PIECES, at = first + row;
        uint64_t from = __shfl_sync(~0u, (uint64_t)(i < 32 ? q->first : q->second), row % 32);
        ptx_copy_16(to + at * 128 + ((piece ^ row) & 7) * 16, (const uint16_t *)from + piece * 8, at < rows ? 16 : 0);
    }
    ptx_copy_wait_all();
    ptx_fence_async();
}

/* The addresses of the first tile are known before there is anything at them. */
FEW void load_share_q(const few_params *p, few_share *c, uint32_t shared)
{
    uint32_t parity = 1;
    do {
        few_q_rows rows = q_rows_of(p, c);
        ptx_grid_wait();
        ptx_barrier_wait(shared + Q_BARRIERS + 8, parity);
        load_q(p, c, &rows, shared);
        ptx_barrier_arrive(shared + Q_BARRIERS);
        parity ^= 1;
    } while (few_share_next(p, c));
}
