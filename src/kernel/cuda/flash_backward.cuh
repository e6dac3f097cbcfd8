/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward.cuh - dQ, dK and dV of dims up to 64 or 128, one tile of keys a block at a time.  Included
 * by .cu files that set DIM, and F16 for fp16.
 *
 * METHOD.  Dao et al., FlashAttention-2 (2023), algorithm 2, by keys: a block holds 128 keys and their values
 * and walks over the queries that see them, QUERIES a step, for all query heads of its key head:
 *
 *     S^T = K Q^T,  P^T = exp2(c S^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta)
 *     dV += P^T dO,  dK += dS^T Q,  dQ = dS K
 *
 * The two warpgroups of consumers hold 64 keys each.  As the scores are transposed, P^T and dS^T are the
 * first operands of dV and dK as they lie in registers (Shah et al., FlashAttention-3, 2024); only dS goes
 * through shared memory, because dQ needs all 128 keys.  dQ is added up in fp32 in device memory, straight
 * from the registers and in their order, 16 bytes a thread.  A third warpgroup gives its registers away and
 * loads tiles.
 *
 * ORDER.  While the exponentials of a step are computed, dK of the step before and dP run; while dS is, dV
 * does; while dQ leaves, the next S and dK do.
 *
 * COST.  10 * DIM FLOPs for each pair of key and query, 5 products.
 */
#include "kernel/cuda/flash_backward_store.cuh"

enum {
#if DIM == 64
    QUERIES = ATTN__BACKWARD_QUERIES_64,
#else
    QUERIES = ATTN__BACKWARD_QUERIES_128,
#endif
    KEYS = 128,
    ROWS = KEYS, /* the block's */
    PANELS = DIM / 64,
    Q_STAGES = 3,
    O_STAGES = 2,
    CONSUMERS = 256,
    THREADS = 384,
    KEY_PANEL = KEYS * 128,      /* bytes of 64 columns of K or V */
    QUERY_PANEL = QUERIES * 128, /* of Q or dO */
    SCORE_PANEL = KEYS * 128,    /* of dS^T: 64 queries of all keys */
    KEY_TILE = PANELS * KEY_PANEL,
    QUERY_TILE = PANELS * QUERY_PANEL,
    SCORE_TILE = QUERIES / 64 * SCORE_PANEL,
    HALVES = QUERIES / 64, /* of a step, of 64 queries each */
    HALF = 64 * 128,       /* bytes of a half in a panel of Q or dO */
    SCORES = 32,           /* registers of S^T of a half, and of dP^T */
    GRADIENT = DIM / 2,    /* of dK, and of dV */
};

typedef struct shared_memory {
    uint8_t k[KEY_TILE], v[KEY_TILE];
    uint8_t q[Q_STAGES][QUERY_TILE];
    uint8_t dout[O_STAGES][QUERY_TILE];
    uint8_t ds[2][SCORE_TILE];
    uint8_t out[8 * 4096]; /* dK and dV on their way out, a piece for each warp */
    float minus_lse[Q_STAGES][QUERIES];
    float delta[O_STAGES][QUERIES];
    uint64_t keys_full, keys_empty, q_full[Q_STAGES], q_empty[Q_STAGES], o_full[O_STAGES], o_empty[O_STAGES];
    work w;                    /* of the tile of keys; count -1: there is none any more */
    visit at;                  /* the producer's */
    query_tile tile[O_STAGES]; /* of dO of a stage */
} shared_memory;

#if DIM == 64
static_assert(sizeof(shared_memory) <= ATTN__BACKWARD_SHARED_64, "shared memory");
#else
static_assert(sizeof(shared_memory) <= ATTN__BACKWARD_SHARED_128, "shared memory");
#endif

#include "kernel/cuda/flash_backward_step.cuh"

/* ---- the producer ---- */

/* Q, dO and their rows' statistics of the block's step n, which is the one that m->at tells */
PTX_INLINE void load_step(const attn__backward_params *p, shared_memory *m, uint32_t n)
{
    const work *w = &m->w;
    const query_tile tile = tile_of(&m->at, p, w);
    const int head = w->head * p->group + m->at.head;
    place at = place_of(p->cu_q != nullptr, w->batch, w->s.first_q, w->s.queries, tile.number * QUERIES);
    uint32_t stage = n % Q_STAGES;
    uint32_t barrier = ptx_shared(&m->q_full[stage]);
    ptx_barrier_wait(ptx_shared(&m->q_empty[stage]), (n / Q_STAGES & 1) ^ 1);
    ptx_barrier_expect(barrier, QUERY_TILE + QUERIES * 4);
    load_panels(ptx_shared(m->q[stage]), &p->q, barrier, QUERY_PANEL, at, head);
    ptx_load_bulk(ptx_shared(m->minus_lse[stage]), p->minus_lse + (int64_t)tile.slot * QUERIES, QUERIES * 4,
                  barrier);
    stage = n % O_STAGES;
    barrier = ptx_shared(&m->o_full[stage]);
    ptx_barrier_wait(ptx_shared(&m->o_empty[stage]), (n / O_STAGES & 1) ^ 1);
    m->tile[stage] = tile;
    ptx_barrier_expect(barrier, QUERY_TILE + QUERIES * 4);
    load_panels(ptx_shared(m->dout[stage]), &p->dout, barrier, QUERY_PANEL, at, head);
    ptx_load_bulk(ptx_shared(m->delta[stage]), p->delta + (int64_t)tile.slot * QUERIES, QUERIES * 4, barrier);
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
            load_panels(ptx_shared(m->k), &p->k, barrier, KEY_PANEL, at, w->key_head);
            load_panels(ptx_shared(m->v), &p->v, barrier, KEY_PANEL, at, w->key_head);
            visit_first(&m->at, p, w, KEYS);
#pragma unroll 1
            do {
                load_step(p, m, n++);
            } while (visit_next(&m->at, p, w));
        }
        tile = atomicAdd(p->next, 1) + (int)gridDim.x;
    }
    ptx_barrier_wait(ptx_shared(&m->keys_empty), parity ^ 1);
    m->w.count = -1;
    ptx_barrier_arrive(barrier);
}

/* ---- products ---- */

/* the warpgroup's 64 rows of a tile of keys */
PTX_INLINE uint32_t its_keys(const uint8_t *tile)
{
    return ptx_shared(tile) + its_group() * (64 * 128);
}

#if DIM == 64
#define GRADIENT_WGMMA wgmma_64_rt
#else
#define GRADIENT_WGMMA wgmma_128_rt
#endif

/* d = (64 rows of K or V) times (64 rows of Q or dO), transposed */
PTX_INLINE void scores(float *d, uint32_t keys, uint32_t queries)
{
    uint64_t first_a = ptx_operand(keys, 0);
    uint64_t first_b = ptx_operand(queries, 0);
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i / 4 * KEY_PANEL + i % 4 * 32);
        uint64_t b = ptx_operand_at(first_b, i / 4 * QUERY_PANEL + i % 4 * 32);
        wgmma_64_ss(d, a, b, i > 0);
    }
}

/* d += (P^T or dS^T of this warpgroup) times (64 rows of dO or Q) */
PTX_INLINE void gradient(float *d, const uint32_t *weights, uint32_t queries)
{
    uint64_t first_b = ptx_operand(queries, QUERY_PANEL);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        GRADIENT_WGMMA(d, weights + 4 * i, ptx_operand_at(first_b, i * 2048));
    }
}

/* d = 64 x 64 of dS K: the warpgroup's half of the queries if DIM is 64, of the columns if it is 128 */
PTX_INLINE void query_gradient(float *d, uint32_t ds, uint32_t k)
{
    if (DIM == 64) {
        ds += its_group() * SCORE_PANEL;
    } else {
        k += its_group() * KEY_PANEL;
    }
    uint64_t first_a = ptx_operand(ds, SCORE_PANEL);
    uint64_t first_b = ptx_operand(k, KEY_PANEL);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i * 2048);
        uint64_t b = ptx_operand_at(first_b, i * 2048);
        wgmma_64_tt(d, a, b, i > 0);
    }
}

/* ---- a step of the consumers ---- */

PTX_INLINE void store_scores(uint32_t tile, const uint32_t *ds)
{
    uint32_t thread = ptx_thread();
    uint32_t row = tile + (thread / 32 * 16 + thread % 16) * 128 + (thread % 32 / 16 * 16 ^ thread % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_store_matrices(row ^ (uint32_t)(i * 32), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
}

/* S of all halves, which are committed together */
PTX_INLINE void all_scores(float s[HALVES][SCORES], const shared_memory *m, uint32_t q_tile)
{
    ptx_wgmma_fence();
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        scores(s[h], its_keys(m->k), q_tile + h * HALF);
    }
    ptx_wgmma_commit();
}

/*
 * From S to dS in one half of a step; dV.  On entry dK of the step before may be under way.  Where registers
 * are short, dS takes those of P, and so waits for dV.
 */
PTX_INLINE void half_step(const attn__backward_params *p, const shared_memory *m, int half, const ring *q,
                          bool release, uint32_t o_stage, int first_query, bool is_cut, float *s,
                          uint32_t *ds, float *dv)
{
    float dp[SCORES];
    uint32_t weight[SCORES / 2];
    uint32_t o_tile = ptx_shared(m->dout[o_stage]) + half * HALF;
    ptx_wgmma_fence();
    scores(dp, its_keys(m->v), o_tile);
    ptx_wgmma_commit();
    weights(s, m->minus_lse[q->stage] + half * 64 + ptx_thread() % 4 * 4, p->scale_log2);
    if (is_cut) {
        cut(s, &m->w, first_query + half * 64);
    }
    PTX_WGMMA_WAIT(1); /* dK of the step before, or dV of the half before */
    if (release && is_first_lane()) {
        ptx_barrier_arrive(ptx_shared(&m->q_empty[ring_before(q)]));
    }
    round_scores(weight, s);
    ptx_wgmma_fence();
    gradient(dv, weight, o_tile);
    ptx_wgmma_commit();
    PTX_WGMMA_WAIT(1); /* dP */
    ptx_hold(dp, SCORES);
    score_gradients(s, dp, m->delta[o_stage] + half * 64 + ptx_thread() % 4 * 4);
    if (is_cut) {
        cut(dp, &m->w, first_query + half * 64);
    }
    if (DIM == 128) {
        PTX_WGMMA_WAIT(0);
    }
    round_scores(ds, dp);
    store_scores(ptx_shared(m->ds[o_stage]) + half * SCORE_PANEL, ds);
}

/* All queries of one tile of keys; o: of all steps of the block.  dk, dv: zeroed by the caller. */
PTX_INLINE void walk(const attn__backward_params *p, shared_memory *m, ring *q, uint32_t *o, float *dk,
                     float *dv)
{
    const work *w = &m->w;
    float s[HALVES][SCORES], dq[32];
    uint32_t ds[HALVES][SCORES / 2];
    int steps = p->group * w->count, pending = -1;
    bool is_first = true;
    ptx_barrier_wait(ptx_shared(&m->q_full[q->stage]), q->parity);
    all_scores(s, m, ptx_shared(m->q[q->stage]));
    PTX_WGMMA_WAIT(0);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        ptx_hold(s[h], SCORES);
    }
    for (;;) {
        uint32_t stage = *o % O_STAGES;
        ptx_barrier_wait(ptx_shared(&m->o_full[stage]), *o / O_STAGES & 1);
        const query_tile tile = m->tile[stage];
        bool is_cut = tile.number < w->whole_first || tile.number >= w->whole_end;
        half_step(p, m, 0, q, !is_first, stage, tile.number * QUERIES, is_cut, s[0], ds[0], dv);
#pragma unroll
        for (int h = 1; h < HALVES; h++) {
            half_step(p, m, h, q, false, stage, tile.number * QUERIES, is_cut, s[h], ds[h], dv);
        }
        is_first = false;
        ptx_fence_async();
        pass_turn(p, pending < 0 ? -1 : its_piece(pending, 1));
        ptx_sync(1, CONSUMERS);

        uint32_t q_tile = ptx_shared(m->q[q->stage]);
        ring_step(q);
        ptx_wgmma_fence();
        query_gradient(dq, ptx_shared(m->ds[stage]), ptx_shared(m->k));
        ptx_wgmma_commit();
        if (DIM == 64) {
            PTX_WGMMA_WAIT(1); /* dV */
        }
        if (is_first_lane()) {
            ptx_barrier_arrive(ptx_shared(&m->o_empty[stage]));
        }
        *o += 1;
        /* the next S; after the last step, one of whatever lies there, since a branch would cost more */
        if (--steps > 0) {
            ptx_barrier_wait(ptx_shared(&m->q_full[q->stage]), q->parity);
        }
        all_scores(s, m, ptx_shared(m->q[q->stage]));
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            gradient(dk, ds[h], q_tile + h * HALF);
        }
        ptx_wgmma_commit();
        PTX_WGMMA_WAIT(2); /* dQ */
        ptx_hold(dq, 32);
        pending = tile.slot * 8;
        wait_turn(p, w, its_piece(pending, 1), tile.number);
        add_query_gradient(p, its_piece(pending, 1), dq);
        PTX_WGMMA_WAIT(1); /* S */
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            ptx_hold(s[h], SCORES);
        }
        if (steps == 0) {
            break;
        }
    }
    PTX_WGMMA_WAIT(0);
    ptx_hold(dk, GRADIENT);
    ptx_hold(dv, GRADIENT);
    pass_turn(p, pending < 0 ? -1 : its_piece(pending, 1));
    if (is_first_lane()) {
        ptx_barrier_arrive(ptx_shared(&m->q_empty[ring_before(q)]));
    }
}

PTX_INLINE void consume(const attn__backward_params *p, shared_memory *m)
{
    ring q = {0, 0};
    uint32_t o = 0, parity = 0;
    for (;; parity ^= 1) {
        ptx_barrier_wait(ptx_shared(&m->keys_full), parity);
        if (m->w.count < 0) {
            break;
        }
        float dk[GRADIENT], dv[GRADIENT];
#pragma unroll
        for (int i = 0; i < GRADIENT; i++) {
            dk[i] = dv[i] = 0.0F;
        }
        ptx_hold(dk, GRADIENT);
        ptx_hold(dv, GRADIENT);
        if (m->w.count > 0) {
            walk(p, m, &q, &o, dk, dv);
        }
        work w = m->w;
        __syncwarp();
        if (is_first_lane()) {
            ptx_barrier_arrive(ptx_shared(&m->keys_empty));
        }
        store_gradients(p, &w, ptx_shared(m->out) + ptx_thread() / 32 * 4096, dk, dv);
    }
}

#include "kernel/cuda/flash_backward_entry.cuh"
