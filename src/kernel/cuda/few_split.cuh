/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_split.cuh - a part of few.cuh: a share of one tile of up to 64 rows by two warpgroups.
 *
 * Each makes the weights of every second stage, and leaves them in shared memory; both multiply all of them with
 * V, one with the first half of its columns, the other with the second.  So one computes while the other waits, each has half
 * of the sums, and they need not add any up at the end.  What they must agree on is `most` of each row: when one of them
 * finds a score that raises it, both make their weights anew.
 */

enum {
    PLACES = 2,                  /* of the ring, for a stage's K or V: halves of the dims; of V one for each warpgroup */
    KEY_RING = FEW_KEY_RING(DIM) /* the first places are for K, of both warpgroups in turn, the others for V */
};
static_assert(WIDTH * PLACES == DIM && COLUMNS == WIDTH, "a place is half of the dims");

/* Of the two, this one. */
FEW uint32_t own_group()
{
    return ptx_uniform(threadIdx.x / 128);
}

/* The n-th place of the ring after this one, in the same step. */
FEW few_turn place_after(few_turn t, uint32_t n)
{
    few_turn place = {t.stage + n, t.parity};
    return place;
}

/* On by a step, among `count` places up to `end`: those of K or V. */
FEW void step_on(few_turn *t, uint32_t end, uint32_t count)
{
    t->stage += 2 * PLACES;
    if (t->stage >= end) {
        t->stage -= count;
        t->parity ^= 1;
    }
}
FEW void step_on_keys(few_turn *t)
{
    step_on(t, KEY_RING, KEY_RING);
}
FEW void step_on_values(few_turn *t)
{
    step_on(t, STAGES, STAGES - KEY_RING);
}

/* ---- the warp that loads ---- */

/* Two stages of K or V from key `from` on, as far as there are keys. */
FEW void load_step(const few_params *p, const few_share *c, const few_map *whole, const few_map *unit, uint32_t shared,
                   few_turn t, int from, uint64_t policy)
{
    int end = share_end(c);
#pragma unroll
    for (int i = 0; i < 2 * PLACES; i++) {
        int key = from + i / PLACES * KEYS;
        if (key < end) {
            load_stage(p, c, whole, unit, shared, place_after(t, i), key, min(end - key, (int)KEYS), i % PLACES * WIDTH,
                       policy);
        }
    }
}

/* K is a step ahead of V. */
FEW void load_share(const few_params *p, const few_share *c, uint32_t shared)
{
    few_turn k = {0, 0}, v = {KEY_RING, 0};
    uint64_t policy = cache_policy(p);
    int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT, end = share_end(c);
    load_step(p, c, &p->k, &p->k_unit, shared, k, key, policy);
    for (; key < end; key += 2 * KEYS) {
        step_on_keys(&k);
        load_step(p, c, &p->k, &p->k_unit, shared, k, key + 2 * KEYS, policy);
        load_step(p, c, &p->v, &p->v_unit, shared, v, key, policy);
        step_on_values(&v);
    }
}

/* ---- the warps that compute ---- */

/* Begins this warpgroup's scores, of the stage whose K is at the places from t on.  real: there is one; else of what is
 * there, and nobody looks at them. */
FEW void begin_step(float *scores, uint32_t q, uint32_t shared, few_turn t, bool real)
{
#pragma unroll
    for (int i = 0; i < PLACES; i++) {
        few_turn k = place_after(t, i);
        if (real) {
            ptx_barrier_wait(ring_barrier(shared, k), k.parity);
        }
        begin_scores(scores, q, shared + RING + k.stage * STAGE, i);
    }
}

FEW void release_keys(uint32_t shared, few_turn t)
{
#pragma unroll
    for (int i = 0; i < PLACES; i++) {
        give_back(shared, place_after(t, i));
    }
}

/* What the other warpgroup has of each row, from what this one has; by all. */
FEW void exchange(const float *x, unsigned char *shared, float *other)
{
    float *rows = (float *)(shared + TOPS) + first_row() + threadIdx.x % 32 / 4;
    uint32_t own = threadIdx.x / 128;
    if (threadIdx.x % 4 == 0) {
        rows[own * 64] = x[0];
        rows[own * 64 + 8] = x[1];
    }
    ptx_sync(1, COMPUTING);
    other[0] = rows[(own ^ 1) * 64];
    other[1] = rows[(own ^ 1) * 64 + 8];
}

FEW bool is_masked(const few_share *c, int end, int key)
{
    return unseen(c, end, key) || unseen(c, end, key + KEYS - 1);
}

/* Where the weights of the second stage of a step are, behind those of the first: one operand of 64 rows and 2 KEYS columns,
 * whose panels have 64.  Bytes. */
enum { SECOND = KEYS == 64 ? 64 * 128 : KEYS * 2 };

/* Weights of this warpgroup's stage to shared memory; their sums to `sum`. */
FEW void store_weights(const few_params *p, const few_state *s, const float *scores, uint32_t to, float *sum)
{
    int lane = (int)(threadIdx.x % 32), row = first_row() + lane % 16, own = (int)(threadIdx.x / 128);
    int piece = own * (SECOND % 128 / 16) + lane / 16;
    float used[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        used[r] = s->most[r] == -INFINITY ? 0.0f : s->most[r];
        sum[r] = 0.0f;
    }
    to += own * (SECOND / 128 * 128) + row * 128;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        uint32_t packed[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x = ptx_exp2(fmaf(scores[8 * i + 2 * k], p->scale, -used[k % 2]));
            float y = ptx_exp2(fmaf(scores[8 * i + 2 * k + 1], p->scale, -used[k % 2]));
            sum[k % 2] += x;
            sum[k % 2] += y;
            packed[k] = FEW_PACK(x, y);
        }
        ptx_store_matrices(to + ((2 * i + piece) ^ (row & 7)) * 16, packed[0], packed[1], packed[2],
                           packed[3]);
    }
}

/* Weights of this warpgroup's stage from its scores, and the sums of weights.  real: there is such a stage, and this
 * warp has rows.  When it returns, all have done so. */
FEW void make_weights(const few_params *p, few_state *s, float *scores, unsigned char *shared, uint32_t to, int key,
                      bool masked, bool real)
{
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    if (real) {
        find_top(p, s, scores, key, masked, top);
    }
    bool more = raises(s, top);
#pragma unroll 1
    while (true) {
        if (real) {
            store_weights(p, s, scores, to, sum);
        }
        ptx_fence_async();
        if (!ptx_sync_or(1, COMPUTING, more)) {
            break;
        }
        float other[2];
        top[0] = greatest(top[0]);
        top[1] = greatest(top[1]);
        exchange(top, shared, other);
        raise(s, 0, fmaxf(top[0], other[0]));
        raise(s, 1, fmaxf(top[1], other[1]));
        more = false;
    }
    s->sum[0] += sum[0];
    s->sum[1] += sum[1];
}

/* o += weights V of a stage: this warpgroup's columns, a group of wgmma.  True: values were taken out. */
FEW bool begin_stage(const few_share *c, few_state *s, unsigned char *shared, uint32_t weights, few_turn t, int key)
{
    unsigned char *v = shared + RING + t.stage * STAGE;
    uint64_t values = ptx_operand(ptx_shared(v), KEYS * 128), rows = ptx_operand(weights, 16);
    bool lost = false;
    ptx_barrier_wait(ring_barrier(ptx_shared(shared), t), t.parity);
    if (is_masked(c, s->end, key)) {
        lost = clean_values(c, s->end, v, key);
    }
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        FEW_WGMMA_O(s->o, ptx_operand_at(rows, i * 32), ptx_operand_at(values, i * (16 * 128)), 1);
    }
    ptx_wgmma_commit();
    return lost;
}

/* The last step, of one stage or two. */
FEW void end_step(const few_params *p, const few_share *c, few_state *s, unsigned char *shared, uint32_t weights, few_turn v,
                  int key)
{
#pragma unroll 1
    for (; key < s->end; key += KEYS) {
        pin(s->o, COLUMNS / 2);
        bool lost = begin_stage(c, s, shared, weights, v, key);
        PTX_WGMMA_WAIT(0);
        pin(s->o, COLUMNS / 2);
        if (lost) {
            add_values(p, c, s, key);
        }
        v = place_after(v, PLACES);
        weights += SECOND;
    }
}

/* The share, which is of one tile.  Scores of the next step are made beside the product with V. */
FEW void compute_steps(const few_params *p, const few_share *c, few_state *s, unsigned char *shared)
{
    float scores[KEYS / 2];
    uint32_t address = ptx_shared(shared), own = own_group(), weights = address + WEIGHTS;
    uint32_t q = (uint32_t)ptx_operand(address, 16);
    few_turn k = {own * PLACES, 0}, v = {KEY_RING + own, 0};
    int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT, mine = key + (int)own * KEYS;
    begin_step(scores, q, address, k, mine < s->end);
    PTX_WGMMA_WAIT(0);
    release_keys(address, k);
#pragma unroll 1
    while (true) {
        pin(scores, KEYS / 2);
        asm volatile("" : "+r"(q), "+r"(address)); /* else what is made of them fills registers */
        make_weights(p, s, scores, shared, weights, mine, is_masked(c, s->end, mine),
                     mine < s->end && first_row() < c->at.tile.rows);
        if (key + 2 * KEYS >= s->end) {
            break;
        }
        mine += 2 * KEYS;
        step_on_keys(&k);
        pin(s->o, COLUMNS / 2);
        begin_step(scores, q, address, k, mine < s->end);
        bool lost = begin_stage(c, s, shared, weights, v, key);
        PTX_WGMMA_WAIT(1);
        release_keys(address, k);
        bool second = begin_stage(c, s, shared, weights + SECOND, place_after(v, PLACES), key + KEYS);
        PTX_WGMMA_WAIT(1);
        give_back(address, v);
        PTX_WGMMA_WAIT(0);
        pin(s->o, COLUMNS / 2);
        give_back(address, place_after(v, PLACES));
        if (lost) {
            add_values(p, c, s, key);
        }
        if (second) {
            add_values(p, c, s, key + KEYS);
        }
        key += 2 * KEYS;
        step_on_values(&v);
        weights = 2 * (address + WEIGHTS) + WEIGHTS_SIZE - weights;
    }
    end_step(p, c, s, shared, weights, v, key);
}

/* The share, and the half of it that this block keeps. */
FEW void compute_share(const few_params *p, const few_share *c, unsigned char *shared)
{
    few_state s;
    float other[2];
    begin_tile(p, c, &s);
    ptx_barrier_wait(ptx_shared(shared) + Q_BARRIERS, 0);
    compute_steps(p, c, &s, shared);
    add_sums(&s);
    exchange(s.sum, shared, other);
    s.sum[0] += other[0];
    s.sum[1] += other[1];
    write_half(p, c, &s, shared);
}
