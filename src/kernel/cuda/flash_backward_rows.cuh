/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_rows.cuh - what comes before and after the gradients' main kernel.  Included by .cu files
 * that set F16 for fp16.
 *
 * METHOD.  A block takes one tile of queries of one head after the other.  Before: delta = rowsum(dO * O), or
 * the caller's, and - lse * log2(e), -inf where a row has no keys, both in the order in which the main
 * kernel's threads read them; and zeroes the tile's sum of dQ.  After: the sum, which lies as the
 * accumulators lay in their threads, times scale, goes to the rows of dQ; and if a group was cut into parts,
 * their dK and dV are added up, always in the same order.
 *
 * COST.  Memory alone: before, dO and O read and 4 bytes a dim written; after, these read and dQ written, and
 * 4 bytes of each part read for a dim of dK and dV.
 */
#include "kernel/cuda/flash_backward_store.cuh"

enum { ROW_THREADS = 256 };

#define LOG2_E 1.4426950408889634F

/* A tile of queries of one head. */
typedef struct rows {
    sequence s;
    int batch, head, first;
    int64_t slot;
} rows;

PTX_INLINE rows rows_of(const attn__backward_params *p, int64_t index, int queries)
{
    rows r;
    int tile = (int)(index % p->tiles_q);
    int64_t rest = index / p->tiles_q;
    r.head = (int)(rest % p->heads_q);
    r.batch = (int)(rest / p->heads_q);
    sequence_of(&r.s, p, r.batch, queries);
    r.first = tile * queries;
    r.slot = (int64_t)r.head * p->slots + r.s.slot + tile;
    return r;
}

PTX_INLINE int64_t row_offset(const attn__cuda_tensor *t, const rows *r, int query)
{
    return r->batch * t->batch + r->head * t->head + ((int64_t)r->s.first_q + query) * t->token;
}

PTX_INLINE float dot_pair(uint32_t a, float low, float high)
{
    return unpack_low(a) * low + unpack_high(a) * high;
}

/* The lanes of a row, a power of two, each have some of its columns. */
PTX_INLINE float delta_of(const attn__backward_params *p, const rows *r, int query, int lane, int lanes)
{
    float sum = 0.0F;
    if (query < r->s.queries && lane * 8 < p->dim_v) {
        uint4 a = *(const uint4 *)((const uint16_t *)p->dout_rows.data + row_offset(&p->dout_rows, r, query) +
                                   lane * 8);
        int64_t at = row_offset(&p->o_rows, r, query) + lane * 8;
        if (p->out_f32) { /* o is of the dtype of the gradients */
            float4 low = *(const float4 *)((const float *)p->o_rows.data + at);
            float4 high = *(const float4 *)((const float *)p->o_rows.data + at + 4);
            sum = dot_pair(a.x, low.x, low.y) + dot_pair(a.y, low.z, low.w) + dot_pair(a.z, high.x, high.y) +
                  dot_pair(a.w, high.z, high.w);
        } else {
            uint4 b = *(const uint4 *)((const uint16_t *)p->o_rows.data + at);
            sum = dot_pairs(a.x, b.x) + dot_pairs(a.y, b.y) + dot_pairs(a.z, b.z) + dot_pairs(a.w, b.w);
        }
    }
    for (int bit = lanes / 2; bit > 0; bit /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    }
    return sum;
}

PTX_INLINE void store_statistics(const attn__backward_params *p, const rows *r, int row, int queries,
                                 float delta)
{
    int query = r->first + row;
    float minus_lse = -INFINITY;
    if (query < r->s.queries) {
        float lse = ((const float *)p->lse.data)[row_offset(&p->lse, r, query)];
        minus_lse = lse == -INFINITY ? -INFINITY : -lse * LOG2_E;
        if (p->given_delta.data != nullptr) {
            delta = ((const float *)p->given_delta.data)[row_offset(&p->given_delta, r, query)];
        }
        delta = lse == -INFINITY ? 0.0F : delta;
    }
    int64_t place = r->slot * queries + statistic_place(row);
    p->minus_lse[place] = minus_lse;
    p->delta[place] = query < r->s.queries ? delta : 0.0F;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    flash_backward_before(const __grid_constant__ attn__backward_params p)
{
    int queries = p.dim == 64 ? ATTN__BACKWARD_QUERIES_64 : ATTN__BACKWARD_QUERIES_128;
    int lanes = p.dim / 8;
    int lane = (int)threadIdx.x % lanes;
    int64_t tiles = (int64_t)p.tiles_q * p.heads_q * p.batch;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *p.next = 0;
    }
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        rows r = rows_of(&p, index, queries);
        if (r.first >= r.s.queries) {
            continue;
        }
        float4 *sum = (float4 *)(p.dq_sum + r.slot * queries * p.dim);
        for (int i = (int)threadIdx.x; i < queries * p.dim / 4; i += ROW_THREADS) {
            sum[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        }
        int pieces = queries * p.dim / ATTN__BACKWARD_PIECE;
        if (p.turns != nullptr && (int)threadIdx.x < pieces) {
            p.turns[r.slot * pieces + threadIdx.x] = 0;
        }
        /* all loads of 4 rows before the first is waited for */
#pragma unroll 4
        for (int i = 0; i < queries * lanes / ROW_THREADS; i++) {
            int row = (i * ROW_THREADS + (int)threadIdx.x) / lanes;
            float delta = p.given_delta.data == nullptr ? delta_of(&p, &r, r.first + row, lane, lanes) : 0.0F;
            if (lane == 0) {
                store_statistics(&p, &r, row, queries, delta);
            }
        }
    }
}

/* x = 8 columns of dQ of a query, from memory */
PTX_INLINE void make_anew(const attn__backward_params *p, const rows *r, int query, int column,
                          float minus_lse, float delta, float *x)
{
    int head = r->head / (p->group * p->parts);
    const uint16_t *q = input_row(&p->q_rows, r->batch, r->head, r->s.first_q + query);
    const uint16_t *dout = input_row(&p->dout_rows, r->batch, r->head, r->s.first_q + query);
    int to = minus_lse == -INFINITY ? 0 : min(r->s.keys, query + r->s.high + 1);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = 0.0F;
    }
#pragma unroll 1
    for (int key = max(0, query + r->s.low); key < to; key++) {
        const uint16_t *k = input_row(&p->k_rows, r->batch, head, r->s.first_kv + key);
        const uint16_t *v = input_row(&p->v_rows, r->batch, head, r->s.first_kv + key);
        float weight = ptx_exp2(fmaf(dot_rows(q, k, p->dim_qk), p->scale_log2, minus_lse));
        add_columns(x, p->scale * weight * (dot_rows(dout, v, p->dim_v) - delta), k + column);
    }
}

/* Not all of 8 columns are numbers, and lse and delta of the row do not tell why. */
PTX_INLINE bool is_stained(const float *x, const float *minus_lse, const float *delta)
{
    return !are_numbers(x) && *minus_lse == *minus_lse && *delta == *delta;
}

/* 8 columns of a row of a tile, as a number */
PTX_INLINE int chunk_of(int row, int column)
{
    return row * 32 + column / 8;
}

PTX_INLINE void store_query_gradient(const attn__backward_params *p, const rows *r, int row, int column,
                                     const float *x)
{
    char *to = (char *)p->dq.data + row_offset(&p->dq, r, r->first + row) * (p->out_f32 ? 4 : 2);
    store_row(p, to, column, x);
}

/*
 * A thread's columns of one tile: 8 rows by 8 columns, twice: a quad's 16 bytes each of the first 8 rows and
 * of the 8 below.  Stained chunks are left to `list`.
 */
PTX_INLINE void round_tile(const attn__backward_params *p, const rows *r, int queries, int *count,
                           uint16_t *list)
{
    int blocks = p->dim == 256 ? 16 : 8; /* of 8 columns, of a warp */
    const float *sum = p->dq_sum + r->slot * queries * p->dim;
#pragma unroll 2
    for (int i = (int)threadIdx.x; i < 8 * 8 * blocks; i += ROW_THREADS) {
        int block = i % blocks, quad = i / blocks % 8, warp = i / blocks / 8;
        const float4 *from = (const float4 *)sum + (warp * blocks + block) * 32 + quad * 4;
        float x[16];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            float4 v = from[t];
            x[2 * t] = v.x * p->scale;
            x[2 * t + 1] = v.y * p->scale;
            x[8 + 2 * t] = v.z * p->scale;
            x[9 + 2 * t] = v.w * p->scale;
        }
        int column = block * 8 + (p->dim == 64 ? 0 : warp / 4 * 8 * blocks);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = warp % 4 * 16 + quad + (p->dim == 64 ? warp / 4 * 64 : 0) + 8 * half;
            if (r->first + row < r->s.queries && column < p->dim_qk) {
                int64_t place = r->slot * queries + statistic_place(row);
                if (is_stained(x + 8 * half, p->minus_lse + place, p->delta + place)) {
                    list[atomicAdd(count, 1)] = (uint16_t)chunk_of(row, column);
                } else {
                    store_query_gradient(p, r, row, column, x + 8 * half);
                }
            }
        }
    }
}

PTX_INLINE void round_tiles(const attn__backward_params *p)
{
    __shared__ uint16_t list[128 * 256 / 8];
    __shared__ int count;
    int queries = p->dim == 64 ? ATTN__BACKWARD_QUERIES_64 : ATTN__BACKWARD_QUERIES_128;
    if (threadIdx.x == 0) {
        count = 0;
    }
    __syncthreads();
    int64_t tiles = (int64_t)p->tiles_q * p->heads_q * p->batch;
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        rows r = rows_of(p, index, queries);
        if (r.first >= r.s.queries) {
            continue;
        }
        round_tile(p, &r, queries, &count, list);
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < count; i += ROW_THREADS) {
            int row = list[i] / 32, column = list[i] % 32 * 8;
            int64_t place = r.slot * queries + statistic_place(row);
            float x[8];
            make_anew(p, &r, r.first + row, column, p->minus_lse[place], p->delta[place], x);
            store_query_gradient(p, &r, row, column, x);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            count = 0;
        }
        __syncthreads();
    }
}

/* ---- parts of a group ---- */

/* `to` = the sum of its parts, 8 columns of a row a thread. */
PTX_INLINE void add_parts(const attn__backward_params *p, const attn__cuda_tensor *to,
                          const attn__cuda_tensor *from, int dim)
{
    int first = p->cu_kv != nullptr ? (int)p->cu_kv[0] : 0;
    int tokens = p->cu_kv != nullptr ? (int)p->cu_kv[p->batch] - first : p->tokens_kv;
    int batch = p->cu_kv != nullptr ? 1 : p->batch, heads = p->heads_kv / p->parts, chunks = dim / 8;
    int64_t all = (int64_t)batch * heads * tokens * chunks;
    int64_t index = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    for (; index < all; index += (int64_t)gridDim.x * ROW_THREADS) {
        int64_t row = index / chunks, head = row / tokens;
        int column = (int)(index - row * chunks) * 8;
        int64_t token = first + (row - head * tokens), b = head / heads;
        head -= b * heads;
        const float *part = (const float *)from->data + b * from->batch + head * p->parts * from->head +
                            token * from->token + column;
        float x[8] = {0.0F};
#pragma unroll 4
        for (int i = 0; i < p->parts; i++, part += from->head) {
            float4 low = *(const float4 *)part, high = *(const float4 *)(part + 4);
            x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
            x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
        }
        int64_t offset = b * to->batch + head * to->head + token * to->token;
        store_row(p, (char *)to->data + offset * (p->out_f32 ? 4 : 2), column, x);
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 3)
    flash_backward_after(const __grid_constant__ attn__backward_params p)
{
    ptx_grid_wait();
    if (p.dq.data != nullptr) {
        round_tiles(&p);
    }
    if (p.parts > 1 && p.dk.data != nullptr) {
        add_parts(&p, &p.dk, &p.dk_parts, p.dim_qk);
    }
    if (p.parts > 1 && p.dv.data != nullptr) {
        add_parts(&p, &p.dv, &p.dv_parts, p.dim_v);
    }
}
