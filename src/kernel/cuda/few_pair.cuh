/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_pair.cuh - a part of few.cuh: the end of a tile of 64 or 128 rows, and two blocks that make one part of it.
 */

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
