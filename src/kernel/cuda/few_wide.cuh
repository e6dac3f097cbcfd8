/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_wide.cuh - a part of few.cuh: tiles of 64 or 128 rows, by products of warpgroups; each warp has 16 rows
 * and sees all keys.
 */
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
    begin_scores(scores, q, address + RING + t->stage * STAGE, 0);
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
        begin_scores(scores, q, address + RING + k.stage * STAGE, 0);
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
