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

/* Two rows' parts of this thread, 16-bit: eight neighbouring columns at a time.  The L2 cache gives them up first,
 * keys and values are of more use there. */
PTX_INLINE void store_rows_16(uint16_t *to_0, uint16_t *to_1, const float *o, float factor_0, float factor_1,
                              int dim, const bool *kept)
{
    const int t = thread_number() & 3;
#pragma unroll
    for (int i = 0; i < OUTPUT / 16; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float factor = r == 0 ? factor_0 : factor_1;
            const int column = 32 * i + 8 * t;
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *from = &o[16 * i + 4 * j + 2 * r];
                x[j] = pack(from[0] * factor, from[1] * factor);
            }
            transpose(x, t);
            if (kept[r] && column < dim) {
                __stcs((uint4 *)((r == 0 ? to_0 : to_1) + column), make_uint4(x[0], x[1], x[2], x[3]));
            }
        }
    }
}

/* ---- masked values that are no numbers ---- */

/*
 * A masked value has the weight 0, but 0 times NaN or inf is NaN, and the tensor cores multiply whole steps.
 * A row whose output is NaN is looked at again: if a value masked for it, within the steps of its tile, is no
 * number, the row is computed anew from memory, over the keys that it sees alone.  This is rare, and written to
 * be short: a warp takes its rows one after another, and all its threads go through loops as often, which the
 * assembler must see, or it holds nothing in uniform registers any more.
 */

/* The keys that a row of a tile sees are [from, to), those of the tile's steps [begin, end). */
typedef struct keys_seen {
    int from, to, begin, end;
} keys_seen;

PTX_INLINE keys_seen keys_of(const tile *t, int query)
{
    const int begin = t->first * KEYS, end = min(t->keys, begin + t->count * KEYS);
    const int from = min(max(begin, query + t->low), end), to = max(from, min(end, query + t->high + 1));
    const keys_seen x = {uniform(from), uniform(to), uniform(begin), uniform(end)};
    return x;
}

PTX_INLINE const uint16_t *row_of(const attn__cuda_tensor *x, int batch, int head, int token)
{
    return (const uint16_t *)x->data + batch * x->batch + head * x->head + token * x->token;
}

/* Is a value masked for the row no number?  By a warp. */
PTX_INLINE bool has_masked_nan(const attn__forward_params *p, const tile *t, int query)
{
    const keys_seen x = keys_of(t, query);
    const uint16_t *v = row_of(&p->v_rows, t->batch, t->head / p->group, t->first_kv);
    bool found = false;
#pragma unroll 1
    for (int i = x.begin - x.from; i < x.end - x.to; i++) {
        const int key = i < 0 ? x.from + i : x.to + i;
#pragma unroll 1
        for (int j = 0; j < p->dim_v; j += 32) {
            const int column = j + thread_number() % 32;
            if (column < p->dim_v) {
                found = found || !(fabsf(unpack(v[key * p->v_rows.token + column])) < INFINITE);
            }
        }
    }
    return __any_sync(0xffffffffU, found);
}

/* A row, by a warp: relative to the maximum score `max`, and multiplied by `factor`. */
PTX_INLINE void store_anew(const attn__forward_params *p, const tile *t, int query, float max, float factor,
                           float old_factor)
{
    const keys_seen x = keys_of(t, query);
    const int lane = thread_number() % 32;
    const float used = max == -INFINITE ? 0.0F : max * p->scale_log2;
    const int64_t to = t->batch * p->o.batch + t->head * p->o.head + (t->first_q + query) * p->o.token;
    const uint16_t *q = row_of(&p->q_rows, t->batch, t->head, t->first_q + query);
    const uint16_t *k = row_of(&p->k_rows, t->batch, t->head / p->group, t->first_kv);
    const uint16_t *v = row_of(&p->v_rows, t->batch, t->head / p->group, t->first_kv);
#pragma unroll 1
    for (int i = 0; i < p->dim_v; i += 32) {
        const bool there = i + lane < p->dim_v;
        const int column = there ? i + lane : 0;
        float o = 0.0F;
#pragma unroll 1
        for (int key = x.from; key < x.to; key++) {
            float score = 0.0F;
#pragma unroll 1
            for (int j = 0; j < p->dim_qk; j += 32) {
                if (j + lane < p->dim_qk) {
                    score = fmaf(unpack(q[j + lane]), unpack(k[key * p->k_rows.token + j + lane]), score);
                }
            }
#pragma unroll
            for (int j = 1; j < 32; j *= 2) {
                score += __shfl_xor_sync(0xffffffffU, score, j);
            }
            const float w = ptx_exp2(fmaf(p->negate ? -score : score, p->scale_log2, -used));
            o = fmaf(w, unpack(v[key * p->v_rows.token + column]), o);
        }
        float *const to_f32 = (float *)p->o.data + to + column;
        if (there && p->out_f32) {
            *to_f32 = o * factor + (old_factor == 0.0F ? 0.0F : *to_f32 * old_factor);
        } else if (there) {
            ((uint16_t *)p->o.data)[to + column] = (uint16_t)pack(o * factor, 0.0F);
        }
    }
}

/* Bit i: row i of the warp's 16 is to be computed anew.  first, second: the lanes that have a NaN in the first, or
 * the second, of their rows. */
PTX_INLINE uint32_t rows_anew(const attn__forward_params *p, const tile *t, uint32_t first, uint32_t second)
{
    const int row = t->row + thread_number() / 32 * 16;
    uint32_t rows = 0;
#pragma unroll 1
    for (int i = 0; i < 16; i++) { /* a row is of four threads */
        const bool broken = ((i < 8 ? first : second) >> i % 8 * 4 & 15) != 0 && row + i < t->queries;
        if (uniform(broken)) {
            rows |= (uint32_t)has_masked_nan(p, t, row + i) << i;
        }
    }
    return (uint32_t)uniform((int)rows);
}

/* NaN if one is of the thread's row r. */
PTX_INLINE float sum_of_row(const float *o, int r)
{
    float sum[4];
#pragma unroll
    for (int i = 0; i < OUTPUT / 2; i++) {
        const float x = o[4 * (i / 2) + 2 * r + i % 2];
        sum[i % 4] = i < 4 ? x : sum[i % 4] + x;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* ---- fp32 results, which may be merged with what is there ---- */

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

/* What a row's o is to be multiplied by, before it is added to what is there, and the latter. */
typedef struct factors {
    float now, old;
} factors;

/* A row, by its four threads.  A factor of zero is of what may be no number. */
PTX_INLINE factors store_row_32(const attn__forward_params *p, const tile *t, const float *o, int query, float lse,
                               float factor, bool there, bool kept)
{
    const int64_t token = t->first_q + query;
    float *const lse_at =
        (float *)p->lse.data + t->batch * p->lse.batch + t->head * p->lse.head + token * p->lse.token;
    float *const to = (float *)p->o.data + t->batch * p->o.batch + t->head * p->o.head + token * p->o.token;
    const int lane = thread_number() & 3;
    float old_factor = 0.0F;
    if (p->merge) {
        old_factor = merge_row(there ? *lse_at : -INFINITE, &lse, &factor);
        __syncwarp(); /* the old sum is read */
    }
    if (p->lse.data != nullptr && lane == 0 && there) {
        *lse_at = lse;
    }
#pragma unroll 1
    for (int i = 0; i < OUTPUT / 4; i++) {
        const int column = 8 * i + 2 * lane;
        float2 *const at = (float2 *)(to + column);
        float2 old = make_float2(0.0F, 0.0F);
        const bool writes = column < p->dim_v && kept;
        if (old_factor != 0.0F && writes) {
            old = *at;
        }
        float2 x = make_float2(o[2 * i] * factor, o[2 * i + 1] * factor);
        x = factor == 0.0F ? make_float2(0.0F, 0.0F) : x;
        if (writes) {
            *at = make_float2(fmaf(old.x, old_factor, x.x), fmaf(old.y, old_factor, x.y));
        }
    }
    const factors both = {factor, old_factor};
    return both;
}

/* ---- the end of a tile ---- */

PTX_INLINE void store(const attn__forward_params *p, const tile *t, const float *o, const state *st)
{
    const int row = t->row + thread_row();
    float sum[2] = {st->sum[0], st->sum[1]}, lse[2];
    factors factor[2];
    uint32_t anew = 0;
    bool there[2], kept[2];
    if (uniform(t->cut)) {
        const float a = sum_of_row(o, 0), b = sum_of_row(o, 1);
        if (__any_sync(0xffffffffU, !(a == a) || !(b == b))) {
            anew = rows_anew(p, t, __ballot_sync(0xffffffffU, !(a == a)), __ballot_sync(0xffffffffU, !(b == b)));
        }
    }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(0xffffffffU, sum[r], x);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        there[r] = row + 8 * r < t->queries;
        kept[r] = there[r] && (anew >> (thread_row() % 8 + 8 * r) & 1) == 0;
        factor[r].now = sum[r] == 0.0F ? 0.0F : ptx_reciprocal(sum[r]);
        factor[r].old = 0.0F;
        lse[r] = sum[r] == 0.0F ? -INFINITE : fmaf(st->max[r], p->scale, ptx_log2(sum[r]) * 0.693147181F);
    }
    if (!p->out_f32) {
        const bool writes = p->lse.data != nullptr && (thread_number() & 3) == 0;
        const int64_t token = t->first_q + row;
        uint16_t *const to = (uint16_t *)p->o.data + t->batch * p->o.batch + t->head * p->o.head + token * p->o.token;
        float *const lse_at =
            (float *)p->lse.data + t->batch * p->lse.batch + t->head * p->lse.head + token * p->lse.token;
        store_rows_16(to, to + 8 * p->o.token, o, factor[0].now, factor[1].now, p->dim_v, kept);
        if (writes && there[0]) {
            *lse_at = lse[0];
        }
        if (writes && there[1]) {
            lse_at[8 * p->lse.token] = lse[1];
        }
    } else {
        float copy[2][OUTPUT / 2]; /* in local memory, for a short loop */
#pragma unroll
        for (int i = 0; i < OUTPUT; i++) {
            copy[i / 2 & 1][i / 4 * 2 + i % 2] = o[i];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factor[r] = store_row_32(p, t, copy[r], row + 8 * r, lse[r], factor[r].now, there[r], kept[r]);
        }
    }
#pragma unroll 1
    for (uint32_t left = anew; left != 0; left &= left - 1) {
        const int i = __ffs((int)left) - 1, lane = i % 8 * 4;
        store_anew(p, t, t->row + thread_number() / 32 * 16 + i,
                   __shfl_sync(0xffffffffU, i < 8 ? st->max[0] : st->max[1], lane),
                   __shfl_sync(0xffffffffU, i < 8 ? factor[0].now : factor[1].now, lane),
                   __shfl_sync(0xffffffffU, i < 8 ? factor[0].old : factor[1].old, lane));
    }
}

#endif
