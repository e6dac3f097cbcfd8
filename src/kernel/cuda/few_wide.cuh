/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_wide.cuh - a part of few.cuh: tiles of 64 or 128 rows, by products of warpgroups; each warp has 16 rows
 * and sees all keys.
 */
/* The compiler shall not move what reads these registers to before this place. */
FEW void pin(float *x, int count)
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

/* scores[64][KEYS] = Q K^T, a group of wgmma; q: the low half of an operand */
FEW void begin_scores(float *scores, uint32_t q, uint32_t k)
{
    uint64_t keys = ptx_operand(k, 16);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint32_t inside = i % 4 * 32;
        FEW_WGMMA_S(scores, ptx_operand_at(q, i / 4 * (Q_ROWS * 128) + inside),
                    ptx_operand_at(keys, i / 4 * (KEYS * 128) + inside), i > 0);
    }
    ptx_wgmma_commit();
}

/* o += weights V, a group of wgmma */
FEW void begin_values(float *o, const uint32_t *weights, uint32_t v)
{
    uint64_t values = ptx_operand(v, KEYS * 128);
    pin(o, DIM / 2);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        FEW_WGMMA_O(o, weights + 4 * i, ptx_operand_at(values, i * (16 * 128)));
    }
    ptx_wgmma_commit();
}

/*
 * The keys of the share in this tile.  The ring has K and V in turn: while the product with a stage of V is
 * under way, the one with the next stage of K is begun; after the last, with what is there, and nobody looks
 * at it.
 */
FEW void compute_tile(const few_params *p, const few_share *c, few_state *s, unsigned char *shared, few_turn *t)
{
    float scores[KEYS / 2];
    uint32_t weights[KEYS / 4] = {0}, address = ptx_shared(shared);
    uint32_t q = (uint32_t)ptx_operand(address + threadIdx.x / 128 * (64 * 128), 16);
    bool more = true;
    ptx_barrier_wait(ring_barrier(address, *t), t->parity);
    begin_scores(scores, q, address + RING + t->stage * STAGE);
    PTX_WGMMA_WAIT(0);
    for (int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT; more; key += KEYS) {
        bool masked = unseen(c, s->end, key) || unseen(c, s->end, key + KEYS - 1), lost = false;
        pin(scores, KEYS / 2);
        asm volatile("" : "+r"(q), "+r"(address)); /* else what is made of them fills registers */
        release(address, t);
        more = key + KEYS < s->end;
        if (!more) {
            release_q(address);
        }
        if (first_row() < c->at.tile.rows) {
            softmax(p, s, scores, weights, key, masked);
        }
        ptx_barrier_wait(ring_barrier(address, *t), t->parity);
        if (masked) {
            lost = clean_values(c, s->end, shared + RING + t->stage * STAGE, key);
        }
        few_turn k = *t;
        turn_on(&k, STAGES);
        begin_values(s->o, weights, address + RING + t->stage * STAGE);
        if (more) {
            ptx_barrier_wait(ring_barrier(address, k), k.parity);
        }
        begin_scores(scores, q, address + RING + k.stage * STAGE);
        PTX_WGMMA_WAIT(1);
        pin(s->o, DIM / 2);
        release(address, t);
        if (lost) {
            add_values(p, c, s, key);
        }
        PTX_WGMMA_WAIT(0);
    }
}

/* The rows are complete in every warp. */
FEW void finish_tile(few_state *s, unsigned char *shared)
{
    (void)shared;
    add_sums(s);
}

/* ---- two blocks of a cluster, which have neighbouring shares of one tile ---- */

/* This block keeps the columns from `rank` * DIM / 2 on; its sums of the other half, its maxima and sums of weights go to
 * the other block. */
FEW void send_half(const few_state *s, uint32_t shared, uint32_t rank)
{
    uint32_t to = ptx_remote(shared + GATHER, rank ^ 1) + threadIdx.x * 16;
    uint32_t full = ptx_remote(shared + PAIR_BARRIER, rank ^ 1);
#pragma unroll
    for (int i = 0; i < DIM / 4; i += 4) {
        const float *o = s->o + i, *high = o + DIM / 4;
        ptx_store_remote_f32x4(to + i / 4 * (COMPUTING * 16), rank == 0 ? high[0] : o[0], rank == 0 ? high[1] : o[1],
                               rank == 0 ? high[2] : o[2], rank == 0 ? high[3] : o[3], full);
    }
    ptx_store_remote_f32x4(to + DIM / 16 * (COMPUTING * 16), s->most[0], s->most[1], s->sum[0], s->sum[1], full);
}

/* What the sums of this block and of the other one are multiplied by when they are added. */
typedef struct few_scales {
    float own[2], other[2];
} few_scales;

/* The maxima and sums of weights of both to s, from this block's. */
FEW few_scales add_weights(few_state *s, const float4 *other)
{
    const float most[2] = {other->x, other->y}, sum[2] = {other->z, other->w};
    few_scales scales;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float both = fmaxf(s->most[r], most[r]), used = both == -INFINITY ? 0.0f : both;
        scales.own[r] = ptx_exp2(s->most[r] - used);
        scales.other[r] = ptx_exp2(most[r] - used);
        s->sum[r] = s->sum[r] * scales.own[r] + sum[r] * scales.other[r];
        s->most[r] = both;
    }
    return scales;
}

/* Half of the columns of what both blocks have found.  A block whose shared memory is written to waits for it here, so that
 * none ends too early. */
FEW void write_half(const few_params *p, const few_share *c, few_state *s, unsigned char *shared)
{
    const float4 *other = (const float4 *)(shared + GATHER) + threadIdx.x;
    uint32_t rank = ptx_rank();
    send_half(s, ptx_shared(shared), rank);
    ptx_barrier_wait(ptx_shared(shared) + PAIR_BARRIER, 0);
    few_scales scales = add_weights(s, other + DIM / 16 * COMPUTING);
#pragma unroll
    for (int i = 0; i < DIM / 4; i += 4) {
        float4 x = other[i / 4 * COMPUTING];
        const float found[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float own = rank == 0 ? s->o[i + k] : s->o[DIM / 4 + i + k];
            s->o[i + k] = own * scales.own[k / 2] + found[k] * scales.other[k / 2];
        }
    }
    write_part(p, c, s, blockIdx.x / 2 * 2, (int)rank * (DIM / 2), DIM / 2);
}
