/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_narrow.cuh - a part of few.cuh: up to 16 rows, by products of single warps; each warp has all rows and
 * every fourth 16 keys, with a maximum of its own, so that no warp waits for another until the tile's end.
 */

/* Where this lane's row of 8x8 matrices begins that lie in pairs one below and one beside the other: for
 * ptx_load_matrices of a slab of swizzled rows from `rows` on.  beside: the second matrix is beside the first, not
 * below. */
FEW uint32_t matrix_row(uint32_t rows, uint32_t pair, bool beside)
{
    uint32_t lane = threadIdx.x % 32, number = lane / 8;
    uint32_t below = beside ? number / 2 : number % 2, right = beside ? number % 2 : number / 2;
    uint32_t row = below * 8 + lane % 8;
    return rows + row * 128 + ((pair * 2 + right) ^ (lane % 8)) * 16;
}

/* scores[16][16] += Q K^T, of 64 dims.  Two sums at once: each product waits for the one before it. */
FEW void multiply_scores(float *scores, float *other, uint32_t q, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t a[4], b[4];
        float *to = i % 2 == 0 ? scores : other;
        ptx_load_matrices(a, matrix_row(q, i, false));
        ptx_load_matrices(b, matrix_row(k, i, true));
        ptx_mma_16(to, a, b);
        ptx_mma_16(to + 4, a, b + 2);
    }
}

/* o += weights V, of 64 dims */
FEW void multiply_values(float *o, const uint32_t *weights, uint32_t v)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t b[4];
        ptx_load_matrices_transposed(b, matrix_row(v, i, false));
        ptx_mma_16(o + 8 * i, weights, b);
        ptx_mma_16(o + 8 * i + 4, weights, b + 2);
    }
}

/* The stages of 64 keys, none of which are this warp's. */
FEW void skip_stages(uint32_t shared, few_turn *t)
{
    for (int i = 0; i < 2 * (DIM / 64); i++) {
        ptx_barrier_wait(ring_barrier(shared, *t), t->parity);
        release(shared, t);
    }
}

/* The keys of the share in this tile.  The ring has 64 dims after the other, of K and of V in turn. */
FEW void compute_tile(const few_params *p, const few_share *c, few_state *s, unsigned char *shared, few_turn *t)
{
    uint32_t own = threadIdx.x / 32 * OWN_KEYS, address = ptx_shared(shared);
    for (int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT; key < s->end; key += KEYS) {
        int first = key + (int)own;
        if (first >= s->end) {
            release_q(address);
            skip_stages(address, t);
            break;
        }
        bool masked = unseen(c, s->end, first) || unseen(c, s->end, first + OWN_KEYS - 1), lost = false;
        float scores[SCORES] = {0.0f}, other[SCORES] = {0.0f};
        uint32_t weights[SCORES / 2];
        asm volatile("" : "+r"(address)); /* else what is made of them fills registers */
#pragma unroll
        for (int slab = 0; slab < DIM / 64; slab++) {
            ptx_barrier_wait(ring_barrier(address, *t), t->parity);
            multiply_scores(scores, other, address + slab * (Q_ROWS * 128), address + RING + t->stage * STAGE + own * 128);
            __syncwarp();
            release(address, t);
        }
        if (key + KEYS >= s->end) {
            release_q(address);
        }
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            scores[i] += other[i];
        }
        softmax(p, s, scores, weights, first, masked);
#pragma unroll
        for (int slab = 0; slab < DIM / 64; slab++) {
            ptx_barrier_wait(ring_barrier(address, *t), t->parity);
            if (masked) {
                lost |= clean_values(c, s->end, shared + RING + t->stage * STAGE + own * 128, first);
            }
            multiply_values(s->o + 32 * slab, weights, address + RING + t->stage * STAGE + own * 128);
            __syncwarp();
            release(address, t);
        }
        if (lost) {
            add_values(p, c, s, first);
        }
    }
}

/* What all warps have found: a fourth of the columns to each, in the first registers of o. */
FEW void finish_tile(few_state *s, unsigned char *shared)
{
    enum { OWN = OWN_COLUMNS / 4 }; /* pairs of o that a thread keeps */
    int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    float2 *o = (float2 *)(shared + GATHER);
    float4 *below = (float4 *)(shared + GATHER + WARPS * 32 * DIM * 2);
    add_sums(s);
    ptx_sync(1, COMPUTING); /* all have read what was found in the tile before */
#pragma unroll
    for (int i = 0; i < DIM / 4; i++) {
        o[(warp * (DIM / 4) + i) * 32 + lane] = make_float2(s->o[2 * i], s->o[2 * i + 1]);
    }
    below[warp * 32 + lane] = make_float4(s->most[0], s->sum[0], s->most[1], s->sum[1]);
    ptx_sync(1, COMPUTING);
    float weight[WARPS][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = s->most[r];
        for (int w = 0; w < WARPS; w++) {
            top = fmaxf(top, r == 0 ? below[w * 32 + lane].x : below[w * 32 + lane].z);
        }
        s->most[r] = top;
        s->sum[r] = 0.0f;
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float4 x = below[w * 32 + lane];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float used = s->most[r] == -INFINITY ? 0.0f : s->most[r];
            weight[w][r] = ptx_exp2((r == 0 ? x.x : x.z) - used);
            s->sum[r] += (r == 0 ? x.y : x.w) * weight[w][r];
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float2 y = o[(w * (DIM / 4) + warp * OWN + i) * 32 + lane];
            sum.x += y.x * weight[w][i % 2];
            sum.y += y.y * weight[w][i % 2];
        }
        s->o[2 * i] = sum.x;
        s->o[2 * i + 1] = sum.y;
    }
}

/* These blocks are never in pairs: their parts are small. */
FEW void write_half(const few_params *p, const few_share *c, few_state *s, unsigned char *shared)
{
    (void)p, (void)c, (void)s, (void)shared;
}
