/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_256.cuh - dQ, dK and dV of dims up to 256, one tile of keys a block at a time.  Included by
 * .cu files that set F16 for fp16.
 *
 * METHOD.  As flash_backward.cuh, but registers hold dK and dV of 64 keys only when two warpgroups share
 * them: each has 128 of the 256 columns.  So each needs P^T and dS^T of all 64 queries of a step, computes
 * those of 32, and both go through shared memory.  dQ leaves straight from registers, in two halves.
 *
 * ORDER.  While S and dP of the next step run, dV and dK of this one are done, which frees their tiles; while
 * the exponentials are computed, the first half of dQ runs; the second while the next dV does.
 */
#include "kernel/cuda/flash_backward_store.cuh"

#define DIM 256

enum {
    QUERIES = ATTN__BACKWARD_QUERIES_256,
    KEYS = ATTN__BACKWARD_KEYS_256,
    PANELS = 4,
    Q_STAGES = 2,
    O_STAGES = 2,
    CONSUMERS = 256,
    THREADS = 384,
    KEY_PANEL = KEYS * 128, /* bytes of 64 columns of K or V */
    QUERY_PANEL = QUERIES * 128,
    KEY_TILE = PANELS * KEY_PANEL,
    QUERY_TILE = PANELS * QUERY_PANEL,
    SCORE_TILE = KEYS * 128, /* of P^T or dS^T */
    COLUMNS = 128,           /* of dK, dV and dQ of a warpgroup */
    SCORES = 16,             /* registers of S^T of 32 queries, and of dP^T */
    GRADIENT = COLUMNS / 2,  /* of dK, and of dV */
};

typedef struct shared_memory {
    uint8_t k[KEY_TILE], v[KEY_TILE];
    uint8_t q[Q_STAGES][QUERY_TILE];
    uint8_t dout[O_STAGES][QUERY_TILE];
    uint8_t p[2][SCORE_TILE], ds[2][SCORE_TILE]; /* dK and dV on their way out, too */
    float minus_lse[Q_STAGES][QUERIES];
    float delta[O_STAGES][QUERIES];
    uint64_t keys_full, keys_empty, q_full[Q_STAGES], q_empty[Q_STAGES], o_full[O_STAGES], o_empty[O_STAGES];
    work w; /* of the tile of keys; count -1: there is none any more */
} shared_memory;

static_assert(sizeof(shared_memory) <= ATTN__BACKWARD_SHARED_256, "shared memory");

#include "kernel/cuda/flash_backward_step.cuh"

/* ---- products ---- */

/* d = (64 rows of K or V) times (32 rows of Q or dO), transposed */
PTX_INLINE void scores(float *d, const uint8_t *keys, uint32_t queries)
{
    uint32_t rows = ptx_shared(keys), columns = queries + its_group() * (32 * 128);
    uint64_t first_a = ptx_operand(rows, 0);
    uint64_t first_b = ptx_operand(columns, 0);
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i / 4 * KEY_PANEL + i % 4 * 32);
        uint64_t b = ptx_operand_at(first_b, i / 4 * QUERY_PANEL + i % 4 * 32);
        wgmma_32_ss(d, a, b, i > 0);
    }
}

/* d += (P^T or dS^T) times (the warpgroup's columns of dO or Q) */
PTX_INLINE void gradient(float *d, const uint8_t *weights, uint32_t queries)
{
    uint32_t rows = ptx_shared(weights), columns = queries + its_group() * (2 * QUERY_PANEL);
    uint64_t first_a = ptx_operand(rows, 0);
    uint64_t first_b = ptx_operand(columns, QUERY_PANEL);
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i * 32);
        uint64_t b = ptx_operand_at(first_b, i * 2048);
        wgmma_128_st(d, a, b, 1);
    }
}

/* d = 64 queries by 64 columns of dS K: half 0 or 1 of the warpgroup's columns */
PTX_INLINE void query_gradient(float *d, const uint8_t *ds, const uint8_t *k, int half)
{
    uint32_t rows = ptx_shared(ds), columns = ptx_shared(k) + (2 * its_group() + half) * KEY_PANEL;
    uint64_t first_a = ptx_operand(rows, SCORE_TILE);
    uint64_t first_b = ptx_operand(columns, KEY_PANEL);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i * 2048);
        uint64_t b = ptx_operand_at(first_b, i * 2048);
        wgmma_64_tt(d, a, b, i > 0);
    }
}

/* ---- a step ---- */

PTX_INLINE void store_scores(const uint8_t *tile, const uint32_t *ds)
{
    uint32_t thread = ptx_thread();
    uint32_t row = ptx_shared(tile) + (thread / 32 % 4 * 16 + thread % 16) * 128;
    uint32_t chunk = (thread % 32 / 16 * 16 ^ thread % 8 * 16) ^ thread / 128 * 64;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        ptx_store_matrices(row + (chunk ^ (uint32_t)(i * 32)), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2],
                           ds[4 * i + 3]);
    }
}

/* a half of the warp's columns of dQ of a step */
PTX_INLINE void add_half(const attn__backward_params *p, const work *w, int slot, int tile, int half,
                         const float *dq)
{
    int64_t piece = its_piece((slot + tile) * 16 + half, 2);
    wait_turn(p, w, piece, tile);
    add_query_gradient(p, piece, dq);
    pass_turn(p, piece);
}

/* Which step it is: its tile of queries and query head. */
typedef struct position {
    int tile, slot; /* slot: of the head's and sequence's first tile */
} position;

PTX_INLINE void position_step(position *at, const attn__backward_params *p, const work *w)
{
    if (++at->tile == w->first + w->count) {
        at->tile = w->first;
        at->slot += p->slots;
    }
}

/* S and dP of a step, to be waited for one after the other */
PTX_INLINE void begin_step(shared_memory *m, uint32_t n, float *s, float *dp)
{
    uint32_t stage = n % 2, parity = n / 2 & 1;
    ptx_barrier_wait(ptx_shared(&m->q_full[stage]), parity);
    ptx_wgmma_fence();
    scores(s, m->k, ptx_shared(m->q[stage]));
    ptx_wgmma_commit();
    ptx_barrier_wait(ptx_shared(&m->o_full[stage]), parity);
    ptx_wgmma_fence();
    scores(dp, m->v, ptx_shared(m->dout[stage]));
    ptx_wgmma_commit();
}

/* P and dS to shared memory.  S and dP are under way, and behind them one more product. */
PTX_INLINE void softmax_step(const attn__backward_params *p, shared_memory *m, uint32_t n, const position *at,
                             float *s, float *dp)
{
    uint32_t stage = n % 2, columns = (ptx_thread() / 128) * 32 + ptx_thread() % 4 * 4, packed[SCORES / 2];
    bool is_cut = at->tile < m->w.whole_first || at->tile >= m->w.whole_end;
    int first_query = at->tile * QUERIES + (int)(ptx_thread() / 128) * 32;
    PTX_WGMMA_WAIT(2); /* S */
    ptx_hold(s, SCORES);
    weights(s, m->minus_lse[stage] + columns, p->scale_log2);
    if (is_cut) {
        cut(s, &m->w, first_query);
    }
    round_scores(packed, s);
    store_scores(m->p[stage], packed);
    PTX_WGMMA_WAIT(1); /* dP */
    ptx_hold(dp, SCORES);
    score_gradients(s, dp, m->delta[stage] + columns);
    if (is_cut) {
        cut(dp, &m->w, first_query);
    }
    round_scores(packed, dp);
    store_scores(m->ds[stage], packed);
    ptx_fence_async();
}

PTX_INLINE void release(shared_memory *m, uint32_t n)
{
    if (is_first_lane()) {
        ptx_barrier_arrive(ptx_shared(&m->q_empty[n % 2]));
        ptx_barrier_arrive(ptx_shared(&m->o_empty[n % 2]));
    }
}

PTX_INLINE void gradients(shared_memory *m, uint32_t n, float *dk, float *dv)
{
    ptx_wgmma_fence();
    gradient(dv, m->p[n % 2], ptx_shared(m->dout[n % 2]));
    gradient(dk, m->ds[n % 2], ptx_shared(m->q[n % 2]));
    ptx_wgmma_commit();
}

PTX_INLINE void half_query_gradient(shared_memory *m, uint32_t n, int half, float *dq)
{
    ptx_wgmma_fence();
    query_gradient(dq, m->ds[n % 2], m->k, half);
    ptx_wgmma_commit();
}

/*
 * All queries of one tile of keys; n: of all steps of the block.  dk, dv: zeroed by the caller.  What dQ of a
 * step before the first would be is computed and not used, since a branch around products costs more.
 */
PTX_INLINE void walk(const attn__backward_params *p, shared_memory *m, uint32_t *n, float *dk, float *dv)
{
    float s[SCORES], dp[SCORES], dq[32];
    position at = {m->w.first, m->w.head * p->group * p->slots + m->w.s.slot}, before = {-1, 0};
    begin_step(m, *n, s, dp);
    ptx_wgmma_commit(); /* in the place of dQ */
    for (int steps = p->group * m->w.count;; *n += 1) {
        softmax_step(p, m, *n, &at, s, dp);
        PTX_WGMMA_WAIT(0);
        ptx_hold(dq, 32);
        if (before.tile >= 0) {
            add_half(p, &m->w, before.slot, before.tile, 0, dq);
        }
        half_query_gradient(m, *n + 1, 1, dq);
        ptx_sync(1, CONSUMERS);
        gradients(m, *n, dk, dv);
        PTX_WGMMA_WAIT(1); /* dQ */
        ptx_hold(dq, 32);
        if (before.tile >= 0) {
            add_half(p, &m->w, before.slot, before.tile, 1, dq);
        }
        before = at;
        if (--steps == 0) {
            break;
        }
        position_step(&at, p, &m->w);
        begin_step(m, *n + 1, s, dp);
        half_query_gradient(m, *n, 0, dq);
        PTX_WGMMA_WAIT(3); /* dV, dK */
        release(m, *n);
    }
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        half_query_gradient(m, *n, half, dq);
        PTX_WGMMA_WAIT(0);
        ptx_hold(dq, 32);
        add_half(p, &m->w, before.slot, before.tile, half, dq);
    }
    ptx_hold(dk, GRADIENT);
    ptx_hold(dv, GRADIENT);
    release(m, *n);
    *n += 1;
}

PTX_INLINE void consume(const attn__backward_params *p, shared_memory *m)
{
    uint32_t n = 0, parity = 0;
    for (;; parity ^= 1) {
        ptx_barrier_wait(ptx_shared(&m->keys_full), parity);
        if (m->w.count < 0) {
            return;
        }
        float dk[GRADIENT], dv[GRADIENT];
#pragma unroll
        for (int i = 0; i < GRADIENT; i++) {
            dk[i] = dv[i] = 0.0F;
        }
        ptx_hold(dk, GRADIENT);
        ptx_hold(dv, GRADIENT);
        if (m->w.count > 0) {
            walk(p, m, &n, dk, dv);
        }
        work w = m->w;
        ptx_sync(1, CONSUMERS); /* nobody reads P and dS any more */
        if (is_first_lane()) {
            ptx_barrier_arrive(ptx_shared(&m->keys_empty));
        }
        store_gradients(p, &w, ptx_shared(m->p[0]) + ptx_thread() / 32 * 4096, dk, dv);
        ptx_sync(1, CONSUMERS);
    }
}

#include "kernel/cuda/flash_backward_entry.cuh"
