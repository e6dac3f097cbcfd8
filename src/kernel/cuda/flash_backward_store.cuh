/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_store.cuh - rows of gradients to memory.
 */
#ifndef ATTN_FLASH_BACKWARD_STORE_CUH
#define ATTN_FLASH_BACKWARD_STORE_CUH

#include "kernel/cuda/flash_backward_type.cuh"
#include "kernel/cuda/flash_backward_work.cuh"

/* Two columns next to each other, in fp32 or rounded, over what is there or added to it. */
PTX_INLINE void store_pair(void *row, int column, float a, float b, bool f32, bool accumulate)
{
    if (f32) {
        float2 *to = (float2 *)((float *)row + column);
        float2 old = accumulate ? *to : make_float2(0.0F, 0.0F);
        *to = make_float2(a + old.x, b + old.y);
    } else {
        uint32_t *to = (uint32_t *)((uint16_t *)row + column);
        uint32_t old = accumulate ? *to : 0;
        *to = pack(a + unpack_low(old), b + unpack_high(old));
    }
}

/* 8 columns of one row, to be stored over what is there or added to it */
PTX_INLINE void store_row(const attn__backward_params *p, void *row, int column, const float *x)
{
    if (p->out_f32 || p->accumulate) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            store_pair(row, column + i, x[i], x[i + 1], p->out_f32, p->accumulate);
        }
        return;
    }
    *(uint4 *)((uint16_t *)row + column) =
        make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

/*
 * 8 columns from `column` on, of a row of the tile of keys and of the row 8 below.  They lie in shared memory
 * as a quad's registers did: thread t's are the 16 bytes at t ^ swap.
 */
PTX_INLINE void store_rows(const attn__backward_params *p, const attn__cuda_tensor *tensor, const work *w,
                           int row, int column, int dim, uint32_t quad, uint32_t swap, float scale)
{
    float x[16];
#pragma unroll
    for (uint32_t t = 0; t < 4; t++) {
        float v[4];
        ptx_read_f32x4(v, quad + (t ^ swap) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i / 2 * 8 + 2 * t + i % 2] = v[i] * scale;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key = w->first_key + row + 8 * half;
        int64_t offset = w->batch * tensor->batch + w->head * tensor->head +
                         ((int64_t)w->s.first_kv + key) * tensor->token;
        if (key < w->s.keys && column < dim) {
            store_row(p, (char *)tensor->data + offset * (p->out_f32 ? 4 : 2), column, x + 8 * half);
        }
    }
}

#endif
