/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_products.cuh - a part of few.cuh: the products of a warpgroup, for few_wide.cuh.
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
