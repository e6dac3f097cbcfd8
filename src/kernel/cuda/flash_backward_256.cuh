/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_256.cuh - dQ, dK and dV of dims up to 256, by clusters of two blocks, one tile of 128 keys
 * after the other.  Included by .cu files that set F16 for fp16.
 *
 * METHOD.  As flash_backward.cuh, but a block has 64 keys, since registers hold no more of dK and dV:
 *
 *     first warpgroup:   S^T = K Q^T,   P^T = exp2(c S^T - lse),    dV += P^T dO
 *     second warpgroup:  dP^T = V dO^T, dS^T = P^T (dP^T - delta),  dK += dS^T Q
 *
 * So each has the first operand of its gradient in registers and all 256 columns in one product, and scores of 64
 * queries in one: shared memory is read for 2048 cycles where the tensor cores take 2560.  With half of the
 * columns of both gradients each, and scores of 32 queries, it was 2816.  P goes to the second warpgroup through
 * shared memory, as fp16 times 4096, with an eighth of the error of bf16 down to P = 2^-26; dS takes its place
 * there.
 *
 * With 64 keys, a step of 64 queries adds 64 KB to dQ, and the second-level cache takes 17 bytes a cycle from
 * each multiprocessor.  Therefore the two blocks walk over the same queries, give each other their dS, and each
 * adds half of the columns of dQ for the keys of both.  Each also loads half of Q and dO, for both.
 *
 * ORDER.  The first warpgroup hands over P, when both blocks are done with the dS before; dV and the next S
 * run.  The second makes dS, starts dK, and sends dS to the other block; both make dQ, while the first computes
 * the next exponentials, and the next dP runs.  dQ is added while the next products run.
 *
 * COST.  10 * 256 FLOPs for each pair of key and query, 5 products.
 */
#include "kernel/cuda/flash_backward_store.cuh"

#define DIM 256

enum {
    QUERIES = ATTN__BACKWARD_QUERIES_256,
    KEYS = ATTN__BACKWARD_KEYS_256,
    ROWS = KEYS / 2, /* of a block */
    PANELS = 4,
    Q_STAGES = 2,
    O_STAGES = 2,
    CONSUMERS = 256,
    THREADS = 384,
    KEY_PANEL = ROWS * 128, /* bytes of 64 columns of K or V */
    QUERY_PANEL = QUERIES * 128,
    KEY_TILE = PANELS * KEY_PANEL,
    QUERY_TILE = PANELS * QUERY_PANEL,
    SCORE_TILE = ROWS * 128, /* of P^T or dS^T */
    SCORES = 32,             /* registers of S^T or dP^T */
    GRADIENT = DIM / 2,      /* of dK or dV */
};

typedef struct shared_memory {
    uint8_t k[KEY_TILE], v[KEY_TILE];
    uint8_t other_k[2 * KEY_PANEL]; /* the other block's keys, this one's columns of dQ */
    uint8_t q[Q_STAGES][QUERY_TILE];
    uint8_t dout[O_STAGES][QUERY_TILE];
    uint8_t ds[SCORE_TILE]; /* P, then dS */
    uint8_t other_ds[SCORE_TILE];
    float minus_lse[Q_STAGES][QUERIES];
    float delta[O_STAGES][QUERIES];
    uint64_t keys_full, keys_empty, q_full[Q_STAGES], q_empty[Q_STAGES], o_full[O_STAGES], o_empty[O_STAGES];
    uint64_t p_full, ds_full, other_full, ds_empty; /* a round each step */
    uint64_t next_full, next_empty;                 /* a round each tile of keys */
    int next; /* the tile of keys that the first block tells the second */
    work w;   /* of the tile of keys; count -1: there is none any more */
    /* the producer's, who has few registers: its step, how many came before it, and how many tiles of keys */
    visit at;
    uint32_t n, round;
    query_tile tile[4]; /* of step n in place n % 4: the step before the last is still to be added */
} shared_memory;

static_assert(sizeof(shared_memory) <= ATTN__BACKWARD_SHARED_256, "shared memory");

#include "kernel/cuda/flash_backward_step.cuh"

#include "kernel/cuda/flash_backward_256_move.cuh"

/* ---- products ---- */

/* d = (64 rows of K or V) times (64 rows of Q or dO), transposed; added to what is there if `add` */
PTX_INLINE void scores(float *d, const uint8_t *keys, const uint8_t *queries, bool add)
{
    uint64_t first_a = ptx_operand(ptx_shared(keys), 0);
    uint64_t first_b = ptx_operand(ptx_shared(queries), 0);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint64_t a = ptx_operand_at(first_a, i / 4 * KEY_PANEL + i % 4 * 32);
        uint64_t b = ptx_operand_at(first_b, i / 4 * QUERY_PANEL + i % 4 * 32);
        wgmma_64_ss(d, a, b, add || i > 0);
    }
    ptx_wgmma_commit();
}

/* d += (P^T or dS^T) times (dO or Q) */
PTX_INLINE void gradient(float *d, const uint32_t *weights, const uint8_t *queries)
{
    uint64_t first_b = ptx_operand(ptx_shared(queries), QUERY_PANEL);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        wgmma_256_rt(d, weights + 4 * i, ptx_operand_at(first_b, i * 2048));
    }
    ptx_wgmma_commit();
}

/* d = 64 queries by the warpgroup's 64 columns of dS K, all 128 keys */
PTX_INLINE void query_gradient(float *d, shared_memory *m)
{
    uint64_t a = ptx_operand(ptx_shared(m->ds), SCORE_TILE);
    uint64_t other_a = ptx_operand(ptx_shared(m->other_ds), SCORE_TILE);
    uint64_t b = ptx_operand(ptx_shared(m->k) + (2 * ptx_rank() + its_group()) * KEY_PANEL, KEY_PANEL);
    uint64_t other_b = ptx_operand(ptx_shared(m->other_k) + its_group() * KEY_PANEL, KEY_PANEL);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        wgmma_64_tt(d, ptx_operand_at(a, i * 2048), ptx_operand_at(b, i * 2048), i > 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        wgmma_64_tt(d, ptx_operand_at(other_a, i * 2048), ptx_operand_at(other_b, i * 2048), 1);
    }
    ptx_wgmma_commit();
}

/* ---- P and dS in shared memory ---- */

#define WEIGHT_SCALE 4096.0F

/* where a warp's 16 rows of P lie, as its registers do */
PTX_INLINE uint32_t its_weights(const shared_memory *m)
{
    uint32_t thread = ptx_thread();
    return ptx_shared(m->ds) + thread / 32 % 4 * (16 * 128) + thread % 32 * 16;
}

PTX_INLINE void hand_over(shared_memory *m, const float *s)
{
    uint32_t at = its_weights(m);
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *pair = s + 8 * i + 2 * j;
            x[j] = __uint_as_float(ptx_pack_f16(pair[0] * WEIGHT_SCALE, pair[1] * WEIGHT_SCALE));
        }
        ptx_store_f32x4(at + i * 512, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    if (is_first_lane()) {
        ptx_barrier_arrive(ptx_shared(&m->p_full));
    }
}

PTX_INLINE void take_over(const shared_memory *m, float *s)
{
    uint32_t at = its_weights(m);
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float x[4];
        ptx_read_f32x4(x, at + i * 512);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t pair = __float_as_uint(x[j]);
            s[8 * i + 2 * j] = ptx_unpack_f16((uint16_t)pair) * (1 / WEIGHT_SCALE);
            s[8 * i + 2 * j + 1] = ptx_unpack_f16((uint16_t)(pair >> 16)) * (1 / WEIGHT_SCALE);
        }
    }
    __syncwarp();
}

/* dS, where the same warp has read P */
PTX_INLINE void store_scores(shared_memory *m, const uint32_t *ds)
{
    uint32_t thread = ptx_thread();
    uint32_t row = ptx_shared(m->ds) + (thread / 32 % 4 * 16 + thread % 16) * 128 +
                   (thread % 32 / 16 * 16 ^ thread % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_store_matrices(row ^ (uint32_t)(i * 32), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
    ptx_fence_async();
    ptx_sync(1, CONSUMERS / 2);
    if (thread == CONSUMERS / 2) {
        uint32_t other = ptx_rank() ^ 1, full = ptx_shared(&m->other_full);
        ptx_barrier_arrive(ptx_shared(&m->ds_full));
        ptx_barrier_expect(full, SCORE_TILE);
        ptx_copy_remote(ptx_remote(ptx_shared(m->other_ds), other), ptx_shared(m->ds), SCORE_TILE,
                        ptx_remote(full, other));
    }
}

/* ---- a step ---- */

/* The same number, so that what is made of it is made anew: registers are short. */
PTX_INLINE uint32_t again(uint32_t n)
{
    asm volatile("" : "+r"(n));
    return n;
}

/* In both blocks: a lane for each. */
PTX_INLINE void arrive_both(const uint64_t *barrier)
{
    uint32_t lane = ptx_thread() % 32;
    __syncwarp();
    if (lane < 2) {
        ptx_barrier_arrive_remote(ptx_remote(ptx_shared(barrier), lane));
    }
}

/* dQ of a step, of which both blocks' dS is awaited */
PTX_INLINE void begin_query_gradient(shared_memory *m, uint32_t n, float *dq)
{
    n = again(n);
    if (its_group() == 0) { /* the other has stored it */
        ptx_barrier_wait(ptx_shared(&m->ds_full), n & 1);
    }
    ptx_barrier_wait(ptx_shared(&m->other_full), n & 1);
    query_gradient(dq, m);
}

PTX_INLINE void end_query_gradient(shared_memory *m, float *dq)
{
    PTX_WGMMA_WAIT(0);
    ptx_hold(dq, 32);
    arrive_both(&m->ds_empty);
}

PTX_INLINE void make_query_gradient(shared_memory *m, uint32_t n, float *dq)
{
    begin_query_gradient(m, n, dq);
    end_query_gradient(m, dq);
}

/* the warp's 64 columns of 16 rows of a step's dQ */
PTX_INLINE int64_t piece_of(int slot)
{
    return its_piece(slot * 16 + (int)((ptx_rank() - its_group()) * 8 + its_group()), 2);
}

PTX_INLINE void add_step(const attn__backward_params *p, const shared_memory *m, uint32_t n, const float *dq)
{
    const query_tile *tile = &m->tile[n % 4];
    int64_t piece = piece_of(tile->slot);
    wait_turn(p, &m->w, piece, tile->number);
    add_query_gradient(p, piece, dq);
    pass_turn(p, piece);
}

/* Some of the step's queries may not see some of the keys. */
PTX_INLINE bool is_cut(const shared_memory *m, uint32_t n)
{
    int tile = m->tile[n % 4].number;
    return tile < m->w.whole_first || tile >= m->w.whole_end;
}

/* S becomes P */
PTX_INLINE void softmax(const attn__backward_params *p, const shared_memory *m, uint32_t n, float *s)
{
    n = again(n);
    weights(s, m->minus_lse[n % 2] + ptx_thread() % 4 * 4, p->scale_log2);
    if (is_cut(m, n)) {
        cut(s, &m->w, m->tile[n % 4].number * QUERIES);
    }
}

/* P to the other warpgroup, when all of both blocks have made the dQ before; dV */
PTX_INLINE void begin_values(shared_memory *m, uint32_t n, const float *s, uint32_t *weight, float *dv)
{
    n = again(n);
    ptx_barrier_wait(ptx_shared(&m->ds_empty), (n & 1) ^ 1);
    hand_over(m, s);
    round_scores(weight, s);
    n = again(n);
    ptx_barrier_wait(ptx_shared(&m->o_full[n % 2]), n / 2 & 1);
    gradient(dv, weight, m->dout[n % 2]);
}

PTX_INLINE void begin_scores(shared_memory *m, uint32_t n, float *s)
{
    n = again(n);
    ptx_barrier_wait(ptx_shared(&m->q_full[n % 2]), n / 2 & 1);
    n = again(n);
    scores(s, m->k, m->q[n % 2], false);
}

/* What the first warpgroup does for all queries of a tile of keys; n: of all steps of the block.  dv: zeroed by
 * the caller. */
PTX_INLINE void walk_values(const attn__backward_params *p, shared_memory *m, uint32_t *n, float *dv)
{
    float s[SCORES], dq[32];
    uint32_t weight[SCORES / 2];
    int step = 0;
    begin_scores(m, *n, s);
    PTX_WGMMA_WAIT(0);
    ptx_hold(s, SCORES);
    softmax(p, m, *n, s);
    arrive_both(&m->q_empty[*n % 2]);
    begin_values(m, *n, s, weight, dv);
    while (++step < p->group * m->w.count) {
        begin_scores(m, *n + 1, s);
        if (step > 1) {
            add_step(p, m, *n - 1, dq);
        }
        PTX_WGMMA_WAIT(1); /* dV */
        arrive_both(&m->o_empty[*n % 2]);
        PTX_WGMMA_WAIT(0); /* S */
        ptx_hold(s, SCORES);
        begin_query_gradient(m, *n, dq);
        softmax(p, m, *n + 1, s);
        arrive_both(&m->q_empty[(*n + 1) % 2]);
        end_query_gradient(m, dq);
        *n += 1;
        begin_values(m, *n, s, weight, dv);
    }
    if (step > 1) {
        add_step(p, m, *n - 1, dq);
    }
    PTX_WGMMA_WAIT(0);
    arrive_both(&m->o_empty[*n % 2]);
    make_query_gradient(m, *n, dq);
    add_step(p, m, *n, dq);
    ptx_hold(dv, GRADIENT);
    *n += 1;
}

/* dP^T begins as this, so that delta is read where nobody waits for it. */
PTX_INLINE void minus_delta(float *dp, const float *delta)
{
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float4 l = *(const float4 *)(delta + 16 * i);
        const float of[4] = {-l.x, -l.y, -l.z, -l.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            dp[8 * i + j] = of[j / 4 * 2 + j % 2];
        }
    }
}

PTX_INLINE void begin_value_scores(shared_memory *m, uint32_t n, float *dp)
{
    ptx_barrier_wait(ptx_shared(&m->o_full[n % 2]), n / 2 & 1);
    minus_delta(dp, m->delta[n % 2] + ptx_thread() % 4 * 4);
    scores(dp, m->v, m->dout[n % 2], true);
}

/* dS to both blocks; dK */
PTX_INLINE void begin_keys(shared_memory *m, uint32_t n, float *dp, uint32_t *ds, float *dk)
{
    float s[SCORES];
    PTX_WGMMA_WAIT(0); /* dP */
    ptx_hold(dp, SCORES);
    arrive_both(&m->o_empty[n % 2]);
    ptx_barrier_wait(ptx_shared(&m->p_full), n & 1);
    take_over(m, s);
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        dp[i] *= s[i]; /* dP - delta becomes dS */
    }
    if (is_cut(m, n)) {
        cut(dp, &m->w, m->tile[n % 4].number * QUERIES);
    }
    round_scores(ds, dp);
    store_scores(m, ds);
    ptx_barrier_wait(ptx_shared(&m->q_full[n % 2]), n / 2 & 1);
    gradient(dk, ds, m->q[n % 2]);
}

/* What the second does; dk: zeroed by the caller. */
PTX_INLINE void walk_keys(const attn__backward_params *p, shared_memory *m, uint32_t *n, float *dk)
{
    float dp[SCORES], dq[32];
    uint32_t ds[SCORES / 2];
    begin_value_scores(m, *n, dp);
    for (int step = 1; step < p->group * m->w.count; step++) {
        begin_keys(m, *n, dp, ds, dk);
        begin_query_gradient(m, *n, dq);
        PTX_WGMMA_WAIT(1); /* dK */
        arrive_both(&m->q_empty[*n % 2]);
        begin_value_scores(m, *n + 1, dp);
        PTX_WGMMA_WAIT(1); /* dQ */
        ptx_hold(dq, 32);
        arrive_both(&m->ds_empty);
        add_step(p, m, *n, dq);
        *n += 1;
    }
    begin_keys(m, *n, dp, ds, dk);
    make_query_gradient(m, *n, dq);
    arrive_both(&m->q_empty[*n % 2]);
    add_step(p, m, *n, dq);
    ptx_hold(dk, GRADIENT);
    *n += 1;
}

/* ---- the kernel ---- */

PTX_INLINE void consume_half(const attn__backward_params *p, shared_memory *m, bool is_value)
{
    uint32_t n = 0; /* of all steps; the highest bit: of the tiles of keys */
    for (;; n ^= 1U << 31) {
        ptx_barrier_wait(ptx_shared(&m->keys_full), n >> 31);
        if (m->w.count < 0) {
            return;
        }
        float d[GRADIENT];
#pragma unroll
        for (int i = 0; i < GRADIENT; i++) {
            d[i] = 0.0F;
        }
        ptx_hold(d, GRADIENT);
        if (m->w.count > 0) {
            if (is_value) {
                walk_values(p, m, &n, d);
            } else {
                walk_keys(p, m, &n, d);
            }
        }
        work w = m->w;
        __syncwarp();
        if (is_first_lane()) {
            ptx_barrier_arrive(ptx_shared(&m->keys_empty));
        }
        store_gradient(p, &w, is_value, d);
    }
}

PTX_INLINE void init_barriers(shared_memory *m)
{
    ptx_barrier_init(ptx_shared(&m->keys_full), 1);
    ptx_barrier_init(ptx_shared(&m->keys_empty), 8);
    for (int i = 0; i < 2; i++) {
        ptx_barrier_init(ptx_shared(&m->q_full[i]), 1);
        ptx_barrier_init(ptx_shared(&m->o_full[i]), 1);
        ptx_barrier_init(ptx_shared(&m->q_empty[i]), 16); /* the warps of both blocks */
        ptx_barrier_init(ptx_shared(&m->o_empty[i]), 16);
    }
    ptx_barrier_init(ptx_shared(&m->p_full), 4);
    ptx_barrier_init(ptx_shared(&m->ds_full), 1);
    ptx_barrier_init(ptx_shared(&m->other_full), 1);
    ptx_barrier_init(ptx_shared(&m->ds_empty), 16);
    ptx_barrier_init(ptx_shared(&m->next_full), 1);
    ptx_barrier_init(ptx_shared(&m->next_empty), 1);
    ptx_barrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_backward(const __grid_constant__ attn__backward_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *m = (shared_memory *)memory;
    if (threadIdx.x == 0) {
        init_barriers(m);
    }
    ptx_cluster_sync();
    ptx_grid_wait();
    if (threadIdx.x >= CONSUMERS) {
        PTX_REGISTERS_LESS(24);
        if (threadIdx.x == CONSUMERS) {
            produce_half(&p, m);
        }
    } else {
        PTX_REGISTERS_MORE(240);
        if (threadIdx.x < CONSUMERS / 2) {
            consume_half(&p, m, true);
        } else {
            consume_half(&p, m, false);
        }
    }
    ptx_cluster_sync(); /* the other block may still arrive at this one's barriers */
}
