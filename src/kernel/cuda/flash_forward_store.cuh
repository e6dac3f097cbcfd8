/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward_store.cuh - the end of a tile of flash_forward.cuh: o and lse to memory, merged with a
 * partial there if asked for, and rows made anew whose masked values were no numbers.
 */
#ifndef ATTN_FLASH_FORWARD_STORE_CUH
#define ATTN_FLASH_FORWARD_STORE_CUH

#include "kernel/cuda/flash_forward_softmax.cuh"

/* ---- the result ---- */

/* Four 32-bit values of each of four neighbouring threads, transposed: thread t has element t of all, in
 * order. */
PTX_INLINE void transpose(uint32_t *x, int t)
{
    const bool odd = t & 1, upper = t & 2;
    uint32_t a = __shfl_xor_sync(0xffffffffU, odd ? x[0] : x[1], 1);
    uint32_t b = __shfl_xor_sync(0xffffffffU, odd ? x[2] : x[3], 1);
    uint32_t y0 = odd ? a : x[0], y1 = odd ? x[1] : a, y2 = odd ? b : x[2], y3 = odd ? x[3] : b;
    a = __shfl_xor_sync(0xffffffffU, upper ? y0 : y2, 2);
    b = __shfl_xor_sync(0xffffffffU, upper ? y1 : y3, 2);
    x[0] = upper ? a : y0;
    x[1] = upper ? b : y1;
    x[2] = upper ? y2 : a;
    x[3] = upper ? y3 : b;
}

/* Two rows' parts of this thread, 16-bit: eight neighbouring columns at a time. */
PTX_INLINE void store_rows_16(uint16_t *const *to, const float *o, const float *factor, int dim,
                              const bool *there)
{
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < OUTPUT / 16; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *from = &o[16 * i + 4 * j + 2 * r];
                x[j] = pack(from[0] * factor[r], from[1] * factor[r]);
            }
            transpose(x, t);
            const int column = 32 * i + 8 * t;
            if (there[r] && column < dim) {
                *(uint4 *)(to[r] + column) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}

PTX_INLINE void store_row_32(float *to, const float *o, int r, float factor, float old_factor, bool merge,
                             int dim)
{
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < OUTPUT / 4; i++) {
        const int column = 8 * i + 2 * t;
        if (column < dim) {
            float2 x = make_float2(o[4 * i + 2 * r] * factor, o[4 * i + 2 * r + 1] * factor);
            if (merge) {
                const float2 old = *(const float2 *)(to + column);
                x.x = old_factor == 0.0F ? x.x
                      : factor == 0.0F   ? old.x * old_factor
                                         : fmaf(old.x, old_factor, x.x);
                x.y = old_factor == 0.0F ? x.y
                      : factor == 0.0F   ? old.y * old_factor
                                         : fmaf(old.y, old_factor, x.y);
            }
            *(float2 *)(to + column) = x;
        }
    }
}

/* Folds the partial that is in memory into a row of a tile: what the row's o is to be multiplied by changes,
 * and what o in memory is to be multiplied by is returned. */
PTX_INLINE float merge_row(float old, float *lse, float *factor)
{
    if (old == -INFINITE) {
        return 0.0F;
    }
    const float most = fmaxf(old, *lse);
    const float both = *lse == -INFINITE ? old : most + logf(expf(old - most) + expf(*lse - most));
    const float old_factor = *lse == -INFINITE ? 1.0F : expf(old - both);
    *factor *= *lse == -INFINITE ? 0.0F : expf(*lse - both);
    *lse = both;
    return old_factor;
}

PTX_INLINE void store(const attn__forward_params *p, const tile *t, const float *o, const state *st)
{
    const int row = t->row + thread_row();
    float sum[2] = {st->sum[0], st->sum[1]};
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(0xffffffffU, sum[r], x);
        }
    }
    const int64_t plane = t->batch * p->o.batch + t->head * p->o.head;
    float *const lses = (float *)p->lse.data + t->batch * p->lse.batch + t->head * p->lse.head;
    float factor[2], old_factor[2] = {0.0F, 0.0F}, lse[2];
    int64_t token[2], at[2];
    bool there[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        there[r] = row + 8 * r < t->queries;
        token[r] = t->first_q + row + 8 * r;
        at[r] = plane + token[r] * p->o.token;
        factor[r] = sum[r] == 0.0F ? 0.0F : ptx_reciprocal(sum[r]);
        lse[r] = sum[r] == 0.0F ? -INFINITE : fmaf(st->max[r], p->scale, ptx_log2(sum[r]) * 0.693147181F);
        if (p->merge && there[r]) {
            old_factor[r] = merge_row(lses[token[r] * p->lse.token], &lse[r], &factor[r]);
        }
    }
    __syncwarp(); /* the old sums are read */
    if (__builtin_expect(!p->out_f32, 1)) {
        uint16_t *const to[2] = {(uint16_t *)p->o.data + at[0], (uint16_t *)p->o.data + at[1]};
        store_rows_16(to, o, factor, p->dim_v, there);
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (there[r]) {
                store_row_32((float *)p->o.data + at[r], o, r, factor[r], old_factor[r], p->merge, p->dim_v);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (p->lse.data != nullptr && there[r] && (threadIdx.x & 3) == 0) {
            lses[token[r] * p->lse.token] = lse[r];
        }
    }
}

/* ---- masked values that are no numbers ---- */

/*
 * A masked value has the weight 0, but 0 times NaN or inf is NaN, and the tensor cores multiply whole steps.
 * A row whose output is NaN while its sum is a number is looked at again: if a value masked for it, within a
 * step that it took part in, is no number, the row is computed anew from memory, over the keys that it sees
 * alone.
 */

/* Does any of the thread's columns of V hold no number, among the keys [from, to)?  v: the row of key 0. */
PTX_INLINE bool no_numbers(const attn__forward_params *p, const uint16_t *v, int from, int to)
{
    bool found = false;
#pragma unroll 1
    for (int key = from; key < to; key++) {
        const uint16_t *row = v + key * p->v_rows.token;
#pragma unroll 1
        for (int column = 2 * (thread_number() & 3); column < p->dim_v; column += 8) {
            found = found || !(fabsf(unpack(row[column])) < INFINITE) ||
                    !(fabsf(unpack(row[column + 1])) < INFINITE);
        }
    }
    return found;
}

/* The score of a pair, by the four threads of a row. */
PTX_INLINE float score(const attn__forward_params *p, const uint16_t *q, const uint16_t *k)
{
    float sum = 0.0F;
#pragma unroll 1
    for (int i = thread_number() & 3; i < p->dim_qk; i += 4) {
        sum = fmaf(unpack(q[i]), unpack(k[i]), sum);
    }
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    return p->negate ? -sum : sum;
}

PTX_INLINE const uint16_t *row_of(const attn__cuda_tensor *x, int batch, int head, int token)
{
    return (const uint16_t *)x->data + batch * x->batch + head * x->head + token * x->token;
}

/* The rows r of a warp: those with `broken` are made anew. */
PTX_INLINE void repair_row(const attn__forward_params *p, const tile *t, float *o, const state *st, int r,
                           int query, bool broken)
{
    const uint16_t *v = row_of(&p->v_rows, t->batch, t->head / p->group, t->first_kv);
    const int from = max(0, query + t->low), to = min(t->keys, query + t->high + 1);
    const int begin = t->first * KEYS, end = min(t->keys, (t->first + t->count) * KEYS);
    broken = broken && (no_numbers(p, v, begin, min(from, end)) || no_numbers(p, v, max(to, begin), end));
    broken = __shfl_xor_sync(0xffffffffU, broken, 1) || broken;
    broken = __shfl_xor_sync(0xffffffffU, broken, 2) || broken;
    if (!__any_sync(0xffffffffU, broken)) {
        return;
    }
    const uint16_t *q = row_of(&p->q_rows, t->batch, t->head, t->first_q + (broken ? query : 0));
    const float used = st->max[r] * p->scale_log2;
    const int column = 2 * (thread_number() & 3), columns = broken ? p->dim_v - column : 0;
#pragma unroll
    for (int i = 0; i < OUTPUT / 4; i++) {
        o[4 * i + 2 * r] = broken ? 0.0F : o[4 * i + 2 * r];
        o[4 * i + 2 * r + 1] = broken ? 0.0F : o[4 * i + 2 * r + 1];
    }
    const int most = __reduce_max_sync(0xffffffffU, broken ? to - from : 0);
#pragma unroll 1
    for (int i = 0; i < most; i++) { /* all threads, for the sums across four of them */
        const int key = min(from + i, t->keys - 1);
        const uint16_t *k = row_of(&p->k_rows, t->batch, t->head / p->group, t->first_kv + key);
        const float w = ptx_exp2(fmaf(score(p, q, k), p->scale_log2, -used));
        const uint16_t *values = v + key * p->v_rows.token + column;
        const int seen = from + i < to ? columns : 0;
#pragma unroll
        for (int j = 0; j < OUTPUT / 4; j++) {
            if (8 * j < seen) {
                o[4 * j + 2 * r] = fmaf(w, unpack(values[8 * j]), o[4 * j + 2 * r]);
                o[4 * j + 2 * r + 1] = fmaf(w, unpack(values[8 * j + 1]), o[4 * j + 2 * r + 1]);
            }
        }
    }
}

/* NaN if one is. */
PTX_INLINE float sum_of(const float *o)
{
    float sum[8];
#pragma unroll
    for (int i = 0; i < OUTPUT; i++) {
        sum[i % 8] = i < 8 ? o[i] : sum[i % 8] + o[i];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

PTX_INLINE void repair(const attn__forward_params *p, const tile *t, float *o, const state *st)
{
    if (!is_cut(t, t->first * KEYS) && !is_cut(t, (t->first + t->count - 1) * KEYS)) {
        return;
    }
    const float sum = sum_of(o);
    if (__builtin_expect(!__any_sync(0xffffffffU, !(sum == sum)), 1)) {
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool broken = false;
#pragma unroll
        for (int i = 0; i < OUTPUT / 4; i++) {
            broken = broken || !(o[4 * i + 2 * r] == o[4 * i + 2 * r]) ||
                     !(o[4 * i + 2 * r + 1] == o[4 * i + 2 * r + 1]);
        }
        const int query = t->row + thread_row() + 8 * r;
        broken = broken && query < t->queries;
        broken = __shfl_xor_sync(0xffffffffU, broken, 1) || broken;
        broken = __shfl_xor_sync(0xffffffffU, broken, 2) || broken;
        if (__any_sync(0xffffffffU, broken)) {
            repair_row(p, t, o, st, r, query, broken);
        }
    }
}

#endif
