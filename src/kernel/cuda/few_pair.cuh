/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_pair.cuh - a part of few.cuh: what tiles of 64 and 128 rows have in common, the product with K and two blocks that add
 * up what they have found.
 */
/* The compiler shall not move what reads these registers to before this place. */
FEW void pin(float *x, int count)
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

/* scores[64][KEYS] = Q K^T, a group of wgmma, of WIDTH dims from `place` * WIDTH on, added to those before; q: the low half of
 * an operand */
FEW void begin_scores(float *scores, uint32_t q, uint32_t k, int place)
{
    uint64_t keys = ptx_operand(k, 16);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
        uint32_t inside = i % 4 * 32;
        FEW_WGMMA_S(scores, ptx_operand_at(q, (place * (WIDTH / 64) + i / 4) * (Q_ROWS * 128) + inside),
                    ptx_operand_at(keys, i / 4 * (KEYS * 128) + inside), place > 0 || i > 0);
    }
    ptx_wgmma_commit();
}

/* ---- two blocks of a cluster, which have neighbouring shares of one tile ---- */

/* This block keeps, of the columns that a warp has, the first half or, rank 1, the second; its sums of the other half, its maxima and sums of weights go to
 * the other block. */
FEW void send_half(const few_state *s, uint32_t shared, uint32_t rank)
{
    uint32_t to = ptx_remote(shared + GATHER, rank ^ 1) + threadIdx.x * 16;
    uint32_t full = ptx_remote(shared + PAIR_BARRIER, rank ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i += 4) {
        const float *o = s->o + i, *high = o + COLUMNS / 4;
        ptx_store_remote_f32x4(to + i / 4 * (COMPUTING * 16), rank == 0 ? high[0] : o[0], rank == 0 ? high[1] : o[1],
                               rank == 0 ? high[2] : o[2], rank == 0 ? high[3] : o[3], full);
    }
    ptx_store_remote_f32x4(to + COLUMNS / 16 * (COMPUTING * 16), s->most[0], s->most[1], s->sum[0], s->sum[1], full);
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
    few_scales scales = add_weights(s, other + COLUMNS / 16 * COMPUTING);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i += 4) {
        float4 x = other[i / 4 * COMPUTING];
        const float found[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float own = rank == 0 ? s->o[i + k] : s->o[COLUMNS / 4 + i + k];
            s->o[i + k] = own * scales.own[k / 2] + found[k] * scales.other[k / 2];
        }
    }
    write_part(p, c, s, blockIdx.x / 2 * 2, first_column() + (int)rank * (COLUMNS / 2), COLUMNS / 2);
}
