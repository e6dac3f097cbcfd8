/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_step.cuh - what the main kernels of all dims share: loading, softmax, the way out.  Included
 * after the shape of a step (KEYS, QUERIES, ...) and what lies in shared memory are set.
 */

/* A place in the ring of query tiles, and the parity that tells this round from the last. */
typedef struct ring {
    uint32_t stage, parity;
} ring;

PTX_INLINE void ring_step(ring *r)
{
    if (++r->stage == Q_STAGES) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

PTX_INLINE uint32_t ring_before(const ring *r)
{
    return r->stage == 0 ? Q_STAGES - 1 : r->stage - 1;
}

/* ---- the producer ---- */

PTX_INLINE void load_panels(uint32_t to, const attn__tile_map *map, uint32_t barrier, int panel, place at,
                            int head)
{
#pragma unroll PANELS <= 2 ? PANELS : 1
    for (int i = 0; i < PANELS; i++) {
        ptx_load_tile_5d(to + i * panel, map, barrier, 64 * i, at.token, head, at.c3, at.c4);
    }
}

/* The tiles of queries of one query head that see this tile of keys. */
PTX_INLINE void load_head(const attn__backward_params *p, shared_memory *m, int head, uint32_t *n)
{
    const work *w = &m->w;
    place at = place_of(p->cu_q != nullptr, w->batch, w->s.first_q, w->s.queries, w->first * QUERIES);
    int slot = head * p->slots + w->s.slot + w->first;
#pragma unroll 1
    for (int end = slot + w->count; slot < end; slot++, at.token += QUERIES) {
        uint32_t stage = *n % Q_STAGES;
        uint32_t barrier = ptx_shared(&m->q_full[stage]);
        ptx_barrier_wait(ptx_shared(&m->q_empty[stage]), (*n / Q_STAGES & 1) ^ 1);
        ptx_barrier_expect(barrier, QUERY_TILE + QUERIES * 4);
        load_panels(ptx_shared(m->q[stage]), &p->q, barrier, QUERY_PANEL, at, head);
        ptx_load_bulk(ptx_shared(m->minus_lse[stage]), p->minus_lse + (int64_t)slot * QUERIES, QUERIES * 4,
                      barrier);
        stage = *n % O_STAGES;
        barrier = ptx_shared(&m->o_full[stage]);
        ptx_barrier_wait(ptx_shared(&m->o_empty[stage]), (*n / O_STAGES & 1) ^ 1);
        ptx_barrier_expect(barrier, QUERY_TILE + QUERIES * 4);
        load_panels(ptx_shared(m->dout[stage]), &p->dout, barrier, QUERY_PANEL, at, head);
        ptx_load_bulk(ptx_shared(m->delta[stage]), p->delta + (int64_t)slot * QUERIES, QUERIES * 4, barrier);
        *n += 1;
    }
}

PTX_INLINE void produce(const attn__backward_params *p, shared_memory *m)
{
    uint32_t n = 0, parity = 0, barrier = ptx_shared(&m->keys_full);
    ptx_prefetch_map(&p->q);
    ptx_prefetch_map(&p->k);
    ptx_prefetch_map(&p->v);
    ptx_prefetch_map(&p->dout);
    int tile = (int)blockIdx.x;
#pragma unroll 1
    for (; tile < p->tiles; parity ^= 1) {
        ptx_barrier_wait(ptx_shared(&m->keys_empty), parity ^ 1);
        work_of(&m->w, p, tile, KEYS, QUERIES);
        const work *w = &m->w;
        if (w->count == 0) {
            ptx_barrier_arrive(barrier);
        } else {
            place at = place_of(p->cu_kv != nullptr, w->batch, w->s.first_kv, w->s.keys, w->first_key);
            ptx_barrier_expect(barrier, 2 * KEY_TILE);
            load_panels(ptx_shared(m->k), &p->k, barrier, KEY_PANEL, at, w->head);
            load_panels(ptx_shared(m->v), &p->v, barrier, KEY_PANEL, at, w->head);
            int head = w->head * p->group;
#pragma unroll 1
            for (int end = head + p->group; head < end; head++) {
                load_head(p, m, head, &n);
            }
        }
        tile = atomicAdd(p->next, 1) + (int)gridDim.x;
    }
    ptx_barrier_wait(ptx_shared(&m->keys_empty), parity ^ 1);
    m->w.count = -1;
    ptx_barrier_arrive(barrier);
}

/* ---- the consumers ---- */

/* Places are made of the thread's number when they are needed: registers are short. */
PTX_INLINE uint32_t its_group(void)
{
    return __any_sync(0xffffffffu, threadIdx.x >= 128) ? 1 : 0;
}
PTX_INLINE bool is_first_lane(void)
{
    return ptx_thread() % 32 == 0;
}
/* the first of its two rows of the block's keys */
PTX_INLINE int its_row(void)
{
    uint32_t thread = ptx_thread();
    return (int)(thread / 32 % (ROWS / 16) * 16 + thread % 32 / 4);
}

/* Which columns of a row see its key: column - first below count, as unsigned. */
typedef struct span {
    int first;
    uint32_t count;
} span;

PTX_INLINE span visible(const work *w, int row, int first_query, int columns)
{
    span v;
    int key = w->first_key + row;
    int from = max(key - w->s.high, first_query);
    int to = min(min(key - w->s.low, w->s.queries - 1), first_query + columns - 1);
    v.first = from - first_query - 2 * (int)(ptx_thread() & 3);
    v.count = key < w->s.keys && to >= from ? (uint32_t)(to - from + 1) : 0U;
    return v;
}

/* Zeroes the scores, or their gradients, of queries that do not see the key. */
PTX_INLINE void cut(float *s, const work *w, int first_query)
{
    int row = its_row();
    const span spans[2] = {visible(w, row, first_query, SCORES * 2),
                           visible(w, row + 8, first_query, SCORES * 2)};
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const span *v = &spans[i / 2 % 2];
        s[i] = (uint32_t)(i / 4 * 8 + i % 2 - v->first) < v->count ? s[i] : 0.0F;
    }
}

/* s becomes P^T */
PTX_INLINE void weights(float *s, const float *minus_lse, float scale)
{
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float4 l = *(const float4 *)(minus_lse + 16 * i);
        const float of[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            s[8 * i + j] = ptx_exp2(fmaf(s[8 * i + j], scale, of[j / 4 * 2 + j % 2]));
        }
    }
}

/* dp becomes dS^T = P^T (dP^T - delta) */
PTX_INLINE void score_gradients(const float *s, float *dp, const float *delta)
{
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float4 l = *(const float4 *)(delta + 16 * i);
        const float of[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            dp[8 * i + j] = s[8 * i + j] * (dp[8 * i + j] - of[j / 4 * 2 + j % 2]);
        }
    }
}

PTX_INLINE void round_scores(uint32_t *packed, const float *s)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
}

/* How many tiles of keys before this one see any of a tile of queries. */
PTX_INLINE int turn_of(const work *w, int tile)
{
    return (w->first_key - max(0, tile * QUERIES + w->s.low) / KEYS * KEYS) / KEYS;
}

/*
 * Adds 64 columns of 16 rows to the sum of dQ, straight from the registers, as they lie; `turn`: after that
 * many tiles of keys before this one.
 */
PTX_INLINE void add_query_gradient(const attn__backward_params *p, int64_t piece, const float *dq, int turn)
{
    uint32_t lane = ptx_thread() % 32;
    float *to = p->dq_sum + piece * ATTN__BACKWARD_PIECE + lane * 4;
    if (p->turns != nullptr && lane == 0) {
        while (ptx_load_acquire(p->turns + piece) != turn) {
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        ptx_add_f32x4(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    if (p->turns != nullptr) {
        __threadfence();
        __syncwarp();
        if (lane == 0) {
            ptx_store_release(p->turns + piece, turn + 1);
        }
    }
    __syncwarp();
}

/*
 * dK and dV to memory, 64 columns after another, each warp its 16 rows by way of its piece of shared memory:
 * there each thread finds 8 columns of a row together.  A quad's 16 bytes lie in an order that keeps both the
 * writes and the reads free of bank conflicts.
 */
PTX_INLINE void store_gradients(const attn__backward_params *p, const work *w, uint32_t piece,
                                const float *dk, const float *dv)
{
    enum { PARTS = COLUMNS / 64 };
    uint32_t lane = ptx_thread() % 32;
    uint32_t place = piece + (lane ^ lane / 8 % 4) * 16;
    int row = its_row() / 16 * 16 + (int)(lane % 8);
    int first = COLUMNS < DIM ? (int)its_group() * COLUMNS : 0;
#pragma unroll 1
    for (int part = 0; part < 2 * PARTS; part++) {
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 2 * PARTS; k++) {
            const float *d = (k < PARTS ? dk : dv) + k % PARTS * 32;
            if (part == k) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    ptx_store_f32x4(place + i * 512, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
                }
            }
        }
        __syncwarp();
        const attn__cuda_tensor *to = part < PARTS ? &p->dk : &p->dv;
        int dim = to->data == nullptr ? 0 : part < PARTS ? p->dim_qk : p->dim_v;
        float scale = part < PARTS ? p->scale : 1.0F;
#pragma unroll
        for (uint32_t i = lane / 8; i < 8; i += 4) {
            store_rows(p, to, w, row, first + part % PARTS * 64 + (int)i * 8, dim,
                       piece + i * 512 + lane % 8 * 64, lane / 2 % 4, scale);
        }
    }
    __syncwarp();
}
