/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_256_move.cuh - what the two blocks of flash_backward_256.cuh load, for themselves and for each
 * other, and how dK and dV leave.  Included after the shape of a step and what lies in shared memory are set.
 */

/* ---- the producer ---- */

/* This block's half of a tile of Q or dO goes to both; both barriers count it.  The producer has few registers:
 * what can be made anew is. */
PTX_INLINE void load_half(const attn__backward_params *p, const work *w, const visit *at, const uint8_t *to,
                          const attn__tile_map *map, uint32_t barrier)
{
    PTX_FORGET();
    place of = place_of(p->cu_q != nullptr, w->batch, w->s.first_q, w->s.queries, at->tile * QUERIES);
    int head = w->head * p->group + at->head;
#pragma unroll 1
    for (int i = (int)ptx_rank() * 2, end = i + 2; i < end; i++) {
        ptx_load_tile_5d_all(ptx_shared(to) + i * QUERY_PANEL, map, barrier, 3, 64 * i, of.token, head, of.c3,
                             of.c4);
    }
}

/* A step's rows' statistics: minus_lse or delta */
PTX_INLINE void load_statistics(shared_memory *m, const float *to, const float *from, uint32_t barrier)
{
    PTX_FORGET();
    ptx_load_bulk(ptx_shared(to), from + (int64_t)m->tile[m->n % 4].slot * QUERIES, QUERIES * 4, barrier);
}

/* Q, dO and their rows' statistics of step m->n, which is the one that m->at tells */
PTX_INLINE void load_step(const attn__backward_params *p, shared_memory *m)
{
    uint32_t stage = m->n % 2, parity = (m->n / 2 & 1) ^ 1;
    ptx_barrier_wait(ptx_shared(&m->q_empty[stage]), parity);
    m->tile[m->n % 4] = tile_of(&m->at, p, &m->w);
    ptx_barrier_expect(ptx_shared(&m->q_full[stage]), QUERY_TILE + QUERIES * 4);
    load_half(p, &m->w, &m->at, m->q[stage], &p->q, ptx_shared(&m->q_full[stage]));
    load_statistics(m, m->minus_lse[stage], p->minus_lse, ptx_shared(&m->q_full[stage]));
    ptx_barrier_wait(ptx_shared(&m->o_empty[stage]), parity);
    ptx_barrier_expect(ptx_shared(&m->o_full[stage]), QUERY_TILE + QUERIES * 4);
    load_half(p, &m->w, &m->at, m->dout[stage], &p->dout, ptx_shared(&m->o_full[stage]));
    load_statistics(m, m->delta[stage], p->delta, ptx_shared(&m->o_full[stage]));
}

PTX_INLINE void load_keys(const attn__backward_params *p, shared_memory *m)
{
    const work *w = &m->w;
    uint32_t barrier = ptx_shared(&m->keys_full);
    int rank = (int)ptx_rank();
    place at = place_of(p->cu_kv != nullptr, w->batch, w->s.first_kv, w->s.keys, w->first_key);
    ptx_barrier_expect(barrier, 2 * KEY_TILE + 2 * KEY_PANEL);
    load_panels(ptx_shared(m->k), &p->k, barrier, KEY_PANEL, at, w->key_head);
    load_panels(ptx_shared(m->v), &p->v, barrier, KEY_PANEL, at, w->key_head);
    at.token += rank == 0 ? ROWS : -ROWS;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        ptx_load_tile_5d(ptx_shared(m->other_k) + i * KEY_PANEL, &p->k, barrier, 64 * (2 * rank + i), at.token,
                         w->key_head, at.c3, at.c4);
    }
}

/* The first block fetches the next tile for both.  parity: of the tile before. */
PTX_INLINE int next_tile(const attn__backward_params *p, shared_memory *m, uint32_t parity)
{
    uint32_t full = ptx_shared(&m->next_full), empty = ptx_shared(&m->next_empty);
    int tile;
    if (ptx_rank() == 0) {
        tile = atomicAdd(p->next, 1) + (int)gridDim.x / 2;
        ptx_barrier_wait(empty, parity ^ 1);
        ptx_store_remote(ptx_remote(ptx_shared(&m->next), 1), tile, ptx_remote(full, 1));
    } else {
        ptx_barrier_expect(full, 4);
        ptx_barrier_wait(full, parity);
        tile = *(volatile int *)&m->next;
        ptx_barrier_arrive_remote(ptx_remote(empty, 0));
    }
    return tile;
}

PTX_INLINE void produce_half(const attn__backward_params *p, shared_memory *m)
{
    uint32_t barrier = ptx_shared(&m->keys_full);
    ptx_prefetch_map(&p->q);
    ptx_prefetch_map(&p->k);
    ptx_prefetch_map(&p->v);
    ptx_prefetch_map(&p->dout);
    m->n = m->round = 0;
    int tile = (int)blockIdx.x / 2;
#pragma unroll 1
    for (; tile < p->tiles; m->round++) {
        ptx_barrier_wait(ptx_shared(&m->keys_empty), (m->round & 1) ^ 1);
        work_of(&m->w, p, tile, KEYS, QUERIES);
        m->w.first_key += (int)ptx_rank() * ROWS;
        if (m->w.count == 0) {
            ptx_barrier_arrive(barrier);
        } else {
            load_keys(p, m);
            visit_first(&m->at, p, &m->w, KEYS);
#pragma unroll 1
            do {
                load_step(p, m);
                m->n++;
            } while (visit_next(&m->at, p, &m->w));
        }
        tile = next_tile(p, m, m->round & 1);
    }
    ptx_barrier_wait(ptx_shared(&m->keys_empty), (m->round & 1) ^ 1);
    m->w.count = -1;
    ptx_barrier_arrive(barrier);
}

/* ---- the way out ---- */

/* The quad's threads have 2 columns of each of 4 blocks of 8; each gets all 8 of one. */
PTX_INLINE void gather_row(float *x, const float *of_blocks)
{
    uint32_t t = ptx_thread() % 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) { /* from thread t ^ i */
        uint32_t block = t ^ i;        /* which it wants */
        float a = of_blocks[0], b = of_blocks[1];
#pragma unroll
        for (uint32_t k = 1; k < 4; k++) {
            a = block == k ? of_blocks[2 * k] : a;
            b = block == k ? of_blocks[2 * k + 1] : b;
        }
        a = __shfl_xor_sync(0xffffffffu, a, (int)i);
        b = __shfl_xor_sync(0xffffffffu, b, (int)i);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            x[2 * k] = block == k ? a : x[2 * k];
            x[2 * k + 1] = block == k ? b : x[2 * k + 1];
        }
    }
}

/* 8 columns of a row; those that masked queries may have stained are made anew. */
PTX_INLINE void store_columns(const attn__backward_params *p, const outlet *out, const work *w, int row,
                              int column, float *x)
{
    bool is_cut = w->first < w->whole_first || w->first + w->count > w->whole_end;
    if (is_cut && !are_numbers(x) && w->first_key + row < w->s.keys && column < out->dim) {
        bool anew = make_key_anew(p, w, QUERIES, row, column, out->is_value, x);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = anew ? x[i] * out->scale : NAN;
        }
    }
    store_key(p, out, w, row, column, x);
}

/* dK or dV to memory, 32 columns after another. */
PTX_INLINE void store_gradient(const attn__backward_params *p, const work *w, bool is_value, const float *d)
{
    outlet out = {is_value ? &p->dv : &p->dk, 0, is_value ? 1.0F : p->scale, is_value};
    out.dim = out.to->data == nullptr ? 0 : is_value ? p->dim_v : p->dim_qk;
#pragma unroll 1
    for (int part = 0; part < DIM / 32; part++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float of_blocks[8], x[8] = {0.0F};
#pragma unroll
            for (int k = 0; k < DIM / 32; k++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    of_blocks[i] =
                        part == k ? d[16 * k + i / 2 * 4 + 2 * half + i % 2] * out.scale : of_blocks[i];
                }
            }
            gather_row(x, of_blocks);
            store_columns(p, &out, w, its_row() + 8 * half, part * 32 + (int)(ptx_thread() % 4) * 8, x);
        }
    }
}
