/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward.cuh - attention forward on Hopper (Dao et al., FlashAttention, arXiv 2205.14135; Shah et al.,
 * FlashAttention-3, arXiv 2407.08608).
 *
 * One block a multiprocessor walks over tiles of ROWS queries of one head.  Three warps bring Q, K and V into
 * shared memory by the copy engine, each as soon as there is room for it; each of GROUPS warpgroups owns 64
 * queries and keeps their softmax state and output in registers:
 *
 *     S(n) = Q K(n)^T   is issued, then   O += P(n+1) V(n+1)   of the step before,
 *
 * and while the tensor cores are at the second, the softmax of S(n) is made.  The warpgroups take turns in
 * issuing, so that one's softmax meets another's products.
 *
 * Keys go from right to left, so that the masked steps of a causal band come first.  Scores never leave the
 * registers: the accumulator of S is, rounded, the left operand of P V.
 *
 * To be set before: HEAD_DIM 64, 128 or 256; KEYS of a step; SHARED, bytes of shared memory; TYPE; pack(low,
 * high); unpack(bits).
 */
#include "kernel/cuda/flash_forward_store.cuh"

/* ---- a consumer ---- */

PTX_INLINE void arrive(uint64_t *barrier)
{
    if (thread_number() % 32 == 0) {
        ptx_barrier_arrive(ptx_shared(barrier));
    }
}

/* The groups issue their products in turn. */
PTX_INLINE void take_turn(int group)
{
    ptx_sync(TURN + group, 256);
}
PTX_INLINE void pass_turn(int group)
{
    ptx_arrive(TURN + (group + 1 == GROUPS ? 0 : group + 1), 256);
}

PTX_INLINE void wait_k(shared_memory *m, uint32_t step)
{
    ptx_barrier_wait(ptx_shared(&m->k_full[stage_of(step)]), parity_of(step));
}

/* For what the first product of a tile needs. */
PTX_INLINE void wait_q_k(shared_memory *m, int count, uint32_t turn, uint32_t step)
{
    if (count > 0) {
        ptx_barrier_wait(ptx_shared(&m->q_full[turn % Q_STAGES]), turn / Q_STAGES & 1);
        wait_k(m, step);
    }
}

PTX_INLINE void issue_s(shared_memory *m, float *s, int group, uint32_t turn, uint32_t step)
{
    const uint32_t rows = group * 64 * 128;
    ptx_wgmma_fence();
    product_s(s, ptx_shared(m->q[turn % Q_STAGES]) + rows, ptx_shared(m->k[stage_of(step)]));
    ptx_wgmma_commit();
}

PTX_INLINE void issue_o(shared_memory *m, float *o, const uint32_t *weights, uint32_t step)
{
    ptx_barrier_wait(ptx_shared(&m->v_full[stage_of(step)]), parity_of(step));
    ptx_wgmma_fence();
    product_o(o, weights, ptx_shared(m->v[stage_of(step)]));
    ptx_wgmma_commit();
}

/* The scores of a step are there: the stage is free, and the scores become weights. */
PTX_INLINE void take_s(const attn__forward_params *p, shared_memory *m, const tile *t, float *s, state *st,
                       float *factor, int key, uint32_t step, int plain_low, uint32_t plain_span)
{
    ptx_hold(s, SCORES);
    arrive(&m->k_empty[stage_of(step)]);
    if ((uint32_t)(key - plain_low) > plain_span) {
        cut(s, p, t, key);
    }
    soften(s, st, factor, p->scale_log2);
}

/*
 * The weights are made before this, and what follows comes after it.  The assembler would wait for O first
 * and make the weights then, with no product to hide them behind; it moves no work across a branch that
 * depends on that work.  A sum is never below zero, so the branch is not taken.
 */
PTX_INLINE void finish_weights(shared_memory *m, const state *st)
{
    if (st->sum[0] + st->sum[1] < 0.0F) {
        ptx_barrier_wait(ptx_shared(&m->q_full[0]), 0);
    }
}

/* Of the first steps of a tile, how many hold no key that the group's rows see; one step is left.  A tile of two
 * groups has hardly any. */
PTX_INLINE int unseen(const tile *t, int group)
{
    if (GROUPS <= 2) {
        return 0;
    }
    const int row = t->row + 64 * group, last = min(t->keys - 1, row + 63 + t->high) / KEYS;
    return row < t->queries ? min(t->first + t->count - 1 - last, t->count - 1) : t->count - 1;
}

/* The scores of a step are there, and not looked at: on to those of the next. */
PTX_INLINE void skip_step(shared_memory *m, float *s, int group, uint32_t turn, uint32_t step)
{
    arrive(&m->k_empty[stage_of(step)]);
    ptx_barrier_wait(ptx_shared(&m->v_full[stage_of(step)]), parity_of(step));
    arrive(&m->v_empty[stage_of(step)]);
    wait_k(m, step + 1);
    take_turn(group);
    issue_s(m, s, group, turn, step + 1);
    pass_turn(group);
    PTX_WGMMA_WAIT(0);
    ptx_hold(s, SCORES);
}

PTX_INLINE void consume(const attn__forward_params *p, shared_memory *m)
{
    uint32_t step = 0, turn = 0;
    float s[SCORES], o[OUTPUT], factor[2];
    uint32_t weights[SCORES / 2];
    const int group = uniform(thread_number() / 128);
    if (group == GROUPS - 1) {
        pass_turn(group);
    }
    const tile *t = tile_of_turn(m, turn);
    int count = uniform(t->count);
    wait_q_k(m, count, turn, step);
    take_turn(group);
    issue_s(m, s, group, turn, step);
    pass_turn(group);
#pragma unroll 1
    while (count > 0) {
        state st = {{-INFINITE, -INFINITE}, {0.0F, 0.0F}};
        int key = (t->first + t->count - 1) * KEYS;
        /* keys from which a step is plain: these and as many more, or one that there is not */
        const bool none = p->negate || t->plain_high < t->plain_low;
        const int plain_low = none ? -1 : t->plain_low;
        const uint32_t plain_span = none ? 0U : (uint32_t)(t->plain_high - plain_low);
#pragma unroll
        for (int i = 0; i < OUTPUT; i++) {
            o[i] = 0.0F;
        }
        PTX_WGMMA_WAIT(0);
#pragma unroll 1
        for (int i = unseen(t, group); i > 0; i--, step++, count--, key -= KEYS) {
            skip_step(m, s, group, turn, step);
        }
        take_s(p, m, t, s, &st, factor, key, step, plain_low, plain_span);
        round_weights(weights, s);
#pragma unroll 1
        for (int i = 1; i < count; i++, step++) {
            key -= KEYS;
            wait_k(m, step + 1);
            take_turn(group);
            issue_s(m, s, group, turn, step + 1);
            issue_o(m, o, weights, step);
            pass_turn(group);
            PTX_WGMMA_WAIT(1);
            take_s(p, m, t, s, &st, factor, key, step + 1, plain_low, plain_span);
            finish_weights(m, &st);
            PTX_WGMMA_WAIT(0);
            ptx_hold(o, OUTPUT);
            arrive(&m->v_empty[stage_of(step)]);
            if (__any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F)) {
                multiply(o, factor);
            }
            round_weights(weights, s);
        }
        arrive(&m->q_empty[turn % Q_STAGES]);
        turn++;
        take_turn(group);
        issue_o(m, o, weights, step);
        const tile *next = tile_of_turn(m, turn);
        count = uniform(next->count);
        /* The next tile's first product runs while this one is stored, where its Q is there by then.  After the
         * last tile it is a product of nothing: no branch may part the products. */
        if (OVERLAP) {
            wait_q_k(m, count, turn, step + 1);
            issue_s(m, s, group, turn, step + 1);
            pass_turn(group);
            PTX_WGMMA_WAIT(1);
        } else {
            pass_turn(group);
            PTX_WGMMA_WAIT(0);
        }
        ptx_hold(o, OUTPUT);
        arrive(&m->v_empty[stage_of(step)]);
        step++;
        store(p, t, o, &st);
        if (!OVERLAP) {
            wait_q_k(m, count, turn, step);
            take_turn(group);
            issue_s(m, s, group, turn, step);
            pass_turn(group);
        }
        t = next;
    }
    PTX_WGMMA_WAIT(0);
    if (group == 0) {
        take_turn(group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_forward(const __grid_constant__ attn__forward_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *m = (shared_memory *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES; i++) {
            ptx_barrier_init(ptx_shared(&m->tile_full[i]), 1);
        }
        for (int i = 0; i < Q_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->q_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->q_empty[i]), 4 * GROUPS);
        }
        for (int i = 0; i < STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->k_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->v_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->k_empty[i]), 4 * GROUPS);
            ptx_barrier_init(ptx_shared(&m->v_empty[i]), 4 * GROUPS);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        PRODUCER_REGISTERS;
        ptx_grid_go();
        if (threadIdx.x < CONSUMERS + 32) {
            produce_tiles(&p, m);
        } else if (threadIdx.x == CONSUMERS + 32) {
            produce_keys(&p, m, &p.k, m->k, m->k_full, m->k_empty);
        } else if (threadIdx.x == CONSUMERS + 64) {
            produce_keys(&p, m, &p.v, m->v, m->v_full, m->v_empty);
        }
    } else {
        CONSUMER_REGISTERS;
        consume(&p, m);
    }
}
