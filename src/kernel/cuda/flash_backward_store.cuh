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

PTX_INLINE float dot_pairs(uint32_t a, uint32_t b)
{
    return unpack_low(a) * unpack_low(b) + unpack_high(a) * unpack_high(b);
}

PTX_INLINE float dot_rows(const uint16_t *a, const uint16_t *b, int dim)
{
    float sum = 0.0F;
#pragma unroll 1
    for (int i = 0; i < dim; i += 8) {
        uint4 x = *(const uint4 *)(a + i), y = *(const uint4 *)(b + i);
        sum += dot_pairs(x.x, y.x) + dot_pairs(x.y, y.y) + dot_pairs(x.z, y.z) + dot_pairs(x.w, y.w);
    }
    return sum;
}

/* x += weight * 8 columns */
PTX_INLINE void add_columns(float *x, float weight, const uint16_t *columns)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t pair = ((const uint32_t *)(const void *)columns)[i];
        x[2 * i] = fmaf(weight, unpack_low(pair), x[2 * i]);
        x[2 * i + 1] = fmaf(weight, unpack_high(pair), x[2 * i + 1]);
    }
}

/* Are all 8 numbers? */
PTX_INLINE bool are_numbers(const float *x)
{
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum += x[i] * 0.0F;
    }
    return sum == 0.0F;
}

/* A row of a tensor of inputs. */
PTX_INLINE const uint16_t *input_row(const attn__cuda_tensor *t, int batch, int head, int token)
{
    return (const uint16_t *)t->data + batch * t->batch + head * t->head + token * t->token;
}

/* 8 columns of a row of the tile of keys and of the row 8 below, `scale` times.  They lie in shared memory as
 * a quad's registers did: thread t's are the 16 bytes at t ^ swap. */
PTX_INLINE void read_rows(float *x, uint32_t quad, uint32_t swap, float scale)
{
#pragma unroll
    for (uint32_t t = 0; t < 4; t++) {
        float v[4];
        ptx_read_f32x4(v, quad + (t ^ swap) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i / 2 * 8 + 2 * t + i % 2] = v[i] * scale;
        }
    }
}

/* dK or dV on its way out. */
typedef struct outlet {
    const attn__cuda_tensor *to;
    int dim;
    float scale;
    bool is_value;
} outlet;

PTX_INLINE void store_key(const attn__backward_params *p, const outlet *out, const work *w, int row,
                          int column, const float *x)
{
    int key = w->first_key + row;
    int64_t offset =
        w->batch * out->to->batch + w->head * out->to->head + ((int64_t)w->s.first_kv + key) * out->to->token;
    if (key < w->s.keys && column < out->dim) {
        store_row(p, (char *)out->to->data + offset * (p->out_f32 ? 4 : 2), column, x);
    }
}

/* ---- masked queries that are no numbers ---- */

/*
 * A masked pair has P = dS = 0, but 0 times NaN or inf is NaN, and the tensor cores multiply whole steps:
 * where the band cuts a step, a query that is no number stains dK and dV of keys that do not see it.
 *
 * x = 8 columns of dK (without scale) or dV of a key, made anew from the queries that see it alone.  False:
 * lse or delta of such a query is NaN, and so is the row.
 */
PTX_INLINE bool make_key_anew(const attn__backward_params *p, const work *w, int tile_queries, int row,
                              int column, bool is_value, float *x)
{
    int key = w->first_key + row;
    int from = max(0, key - w->s.high), to = min(w->s.queries, key - w->s.low + 1);
    const uint16_t *k = input_row(&p->k_rows, w->batch, w->key_head, w->s.first_kv + key);
    const uint16_t *v = input_row(&p->v_rows, w->batch, w->key_head, w->s.first_kv + key);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = 0.0F;
    }
#pragma unroll 1
    for (int head = w->head * p->group; head < (w->head + 1) * p->group; head++) {
#pragma unroll 1
        for (int query = from; query < to; query++) {
            int64_t slot = (int64_t)head * p->slots + w->s.slot + query / tile_queries;
            int64_t place = slot * tile_queries + statistic_place(query % tile_queries);
            float minus_lse = p->minus_lse[place], delta = p->delta[place];
            if (!(minus_lse == minus_lse) || (!is_value && !(delta == delta))) {
                return false;
            }
            if (minus_lse == -INFINITY) {
                continue;
            }
            const uint16_t *q = input_row(&p->q_rows, w->batch, head, w->s.first_q + query);
            const uint16_t *dout = input_row(&p->dout_rows, w->batch, head, w->s.first_q + query);
            float weight = ptx_exp2(fmaf(dot_rows(q, k, p->dim_qk), p->scale_log2, minus_lse));
            if (is_value) {
                add_columns(x, weight, dout + column);
            } else {
                add_columns(x, weight * (dot_rows(dout, v, p->dim_v) - delta), q + column);
            }
        }
    }
    return true;
}

#endif
