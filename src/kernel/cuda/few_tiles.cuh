/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_tiles.cuh - a part of few.cuh: a share of one tile or several, each of whose stages all warps work on.
 */
FEW void load_share(const few_params *p, few_share *c, uint32_t shared)
{
    few_turn turn = {0, 0};
    uint64_t policy = cache_policy(p);
    do {
        int end = share_end(c);
        for (int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT; key < end; key += KEYS) {
            int keys = min(end - key, (int)KEYS);
            for (int dim = 0; dim < DIM; dim += WIDTH) {
                load_stage(p, c, &p->k, &p->k_unit, shared, turn, key, keys, dim, policy);
                turn_on(&turn, STAGES);
            }
            for (int dim = 0; dim < DIM; dim += WIDTH) {
                load_stage(p, c, &p->v, &p->v_unit, shared, turn, key, keys, dim, policy);
                turn_on(&turn, STAGES);
            }
        }
    } while (few_share_next(p, c));
}

/* Two warpgroups are short of registers: a warp keeps its share in shared memory. */
FEW few_share *keep_share(few_share *c, unsigned char *shared)
{
    few_share *kept = c;
    if (FEW_HEIGHT == 128) {
        static_assert(sizeof *c <= FEW_KEPT_SHARE, "a share has no room");
        kept = (few_share *)(shared + KEPT + threadIdx.x / 32 * FEW_KEPT_SHARE);
        *kept = *c;
        __syncwarp();
    }
    return kept;
}

/* few_share_next() of what lanes may have in common. */
FEW bool next_share(const few_params *p, few_share *c)
{
    few_share next = *c;
    __syncwarp();
    bool more = few_share_next(p, &next);
    *c = next;
    __syncwarp();
    return more;
}

/* It does not wait for the kernel before: that the first Q is there says that it has ended. */
FEW void compute_share(const few_params *p, few_share *c, unsigned char *shared)
{
    few_turn turn = {0, 0};
    uint32_t parity = 0; /* of Q */
    c = keep_share(c, shared);
    do {
        few_state s;
        begin_tile(p, c, &s);
        ptx_barrier_wait(ptx_shared(shared) + Q_BARRIERS, parity);
        compute_tile(p, c, &s, shared, &turn);
        parity ^= 1;
        finish_tile(&s, shared);
        if (c->at.first == 0 && c->last == c->at.tile.units) {
            write_rows(p, c, &s);
        } else if (p->pairs) {
            write_half(p, c, &s, shared);
        } else {
            write_part(p, c, &s, blockIdx.x * 2 + (c->at.first == 0), first_column(), OWN_COLUMNS);
        }
    } while (next_share(p, c));
}
