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
 * issuing, so that one's softmax meets another's products.  The length of a step is that of a warpgroup's
 * chain: S, exponentials, rounding; so nothing is in it that can be elsewhere.  There is no maximum of each
 * step (flash_forward_softmax.cuh), and the rounding lies under the second half of the exponentials.
 *
 * Keys go from right to left, so that the masked steps of a causal band come first.  Scores never leave the
 * registers: the accumulator of S is, rounded, the left operand of P V.
 *
 * To be set before: HEAD_DIM 64, 128 or 256; GROUPS; KEYS of a step; SHARED, bytes of shared memory; TYPE;
 * pack(low, high); unpack(bits).
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

/* Which steps show all of their keys to all rows: those that begin with the key `low`, and with up to `span`
 * more. */
typedef struct plain {
    int low;
    uint32_t span;
} plain;

PTX_INLINE plain plain_of(const attn__forward_params *p, const tile *t)
{
    if (p->negate || t->plain_high < t->plain_low) {
        return {-1, 0U}; /* one that there is not */
    }
    return {t->plain_low, (uint32_t)(t->plain_high - t->plain_low)};
}

/* The scores of a step are there, and become logarithms of weights.  fresh: some rows have seen no key so
 * far. */
PTX_INLINE void take_s(const attn__forward_params *p, const tile *t, float *s, state *st, bool fresh, int key,
                       plain all)
{
    if ((uint32_t)(key - all.low) > all.span) {
        cut(s, p, t, key);
    }
    if (fresh) {
        float most[2];
        row_max(most, s);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            st->max[r] = st->max[r] == -INFINITE ? most[r] : st->max[r];
        }
    }
    relate(s, st, p->scale_log2);
}

/* A step's weights are too large: its scores are made again, and all is relative to the maximum so far. */
PTX_INLINE void take_s_again(const attn__forward_params *p, shared_memory *m, const tile *t, float *s,
                             float *o, state *st, int key, plain all, uint32_t turn, uint32_t step)
{
    float most[2], factor[2];
    product_s_again(s, ptx_shared(m->q[turn % Q_STAGES]), ptx_shared(m->k[stage_of(step)]));
    if ((uint32_t)(key - all.low) > all.span) {
        cut(s, p, t, key);
    }
    row_max(most, s);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float now = fmaxf(st->max[r], most[r]);
        factor[r] =
            now == st->max[r] ? 1.0F : ptx_exp2(fmaf(st->max[r], p->scale_log2, -(now * p->scale_log2)));
        st->max[r] = now;
        st->sum[r] *= factor[r];
    }
    multiply(o, factor);
    relate(s, st, p->scale_log2);
}

/*
 * The early weights are made before this and the others after it.  Left alone, the assembler either waits for
 * O before it makes any weight, with no product left to hide them behind, or makes all of them before, and
 * the rounding finds no exponentials to hide behind.  It moves no work across a branch that depends on that
 * work, or that the work depends on.  A sum is never below zero, so the branch is not taken.
 */
PTX_INLINE void finish_early(shared_memory *m, const float *sum, float *s)
{
    if (sum[0] + sum[1] < 0.0F) {
        ptx_barrier_wait(ptx_shared(&m->q_full[0]), 0);
#pragma unroll
        for (int i = EARLY; i < SCORES; i++) {
            s[i] = 0.0F;
        }
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
    float s[SCORES], o[OUTPUT];
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
        const plain all = plain_of(p, t);
#pragma unroll
        for (int i = 0; i < OUTPUT; i++) {
            o[i] = 0.0F;
        }
        PTX_WGMMA_WAIT(0);
#pragma unroll 1
        for (int i = unseen(t, group); i > 0; i--, step++, count--, key -= KEYS) {
            skip_step(m, s, group, turn, step);
        }
        ptx_hold(s, SCORES);
        arrive(&m->k_empty[stage_of(step)]);
        take_s(p, t, s, &st, true, key, all);
        weigh(s, st.sum, 0, SCORES);
        round_weights(weights, s);
#pragma unroll 1
        for (int i = 1; i < count; i++, step++) {
            key -= KEYS;
            wait_k(m, step + 1);
            take_turn(group);
            issue_s(m, s, group, turn, step + 1);
            issue_o(m, o, weights, step);
            pass_turn(group);
            const bool fresh = is_new(&st);
            float sum[2] = {0.0F, 0.0F};
            PTX_WGMMA_WAIT(1);
            ptx_hold(s, SCORES);
            take_s(p, t, s, &st, fresh, key, all);
            weigh(s, sum, 0, EARLY);
            finish_early(m, sum, s);
            PTX_WGMMA_WAIT(0);
            ptx_hold(o, OUTPUT);
            arrive(&m->v_empty[stage_of(step)]);
            weigh(s, sum, EARLY, SCORES);
            round_weights(weights, s);
            if (__any_sync(0xffffffffU, fmaxf(sum[0], sum[1]) > LARGE)) {
                take_s_again(p, m, t, s, o, &st, key, all, turn, step + 1);
                sum[0] = sum[1] = 0.0F;
                weigh(s, sum, 0, SCORES);
                round_weights(weights, s);
            }
            arrive(&m->k_empty[stage_of(step + 1)]);
            st.sum[0] += sum[0];
            st.sum[1] += sum[1];
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

/* One thread, before a launch whose blocks count the tiles that they take.  A kernel and no memset, so that both
 * launches overlap with what comes before. */
extern "C" __global__ void flash_forward_begin(int32_t *taken)
{
    ptx_grid_go();
    ptx_grid_wait(); /* for a kernel that may count in the same place */
    *taken = 0;
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
