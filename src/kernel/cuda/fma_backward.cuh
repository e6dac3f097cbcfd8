/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_backward.cuh - the gradients of attention in fp32 by fused multiply-adds: one block keeps a tile of keys, with
 * its dK and dV in registers, and takes it through its queries.
 *
 * METHOD.  FlashAttention's backward (Dao et al., arXiv 2205.14135, algorithm 4): five products a tile,
 *
 *     P = exp(Q K^T - lse)   dV += P^T dO   dS = P * (dO V^T - delta)   dK += dS^T Q   dQ += dS K
 *
 * P and then dS pass through one buffer.  For dQ the warps cut the keys into PARTS and add up their shares in that
 * buffer, so that every product is 8 x 8 registers a thread where the tile allows it.
 *
 * THE SAME BITS EVERY TIME.  The key tiles add to a query tile in rising order: each waits until the one before has
 * said that it is done (turns).  All go through the queries in the same falling order, so the wait is rare: a tile
 * begins one addition behind its predecessor, not one step.  A block takes the next item from a counter, items of lower
 * key tiles come first, and an item waits only for lower ones: whatever blocks run, the lowest unfinished one goes on.
 * Under a causal mask the long items come first too.
 *
 * The including file sets
 *     NAME             of the kernel
 *     HEAD_DIM         width of the tiles: multiple of 64, at least both dims
 *     BLOCK_K, BLOCK_Q keys that a block keeps, queries of a step; BLOCK_K * HEAD_DIM is 16384
 *     S_ROWS, S_COLUMNS  of a thread in S and dO V^T: all 8 warps make one after the other, or 4 each
 *     PARTS, Q_COLUMNS of the keys for dQ; columns of a thread in it (8 rows)
 *     AT_SUM           where the parts of dQ meet: AT_P, or AT_DOUT if they need more than P's place
 *
 * COST.  At HEAD_DIM 64 a step of 64 x 256 cells is 20480 multiply-adds a thread, 1280 loads of 16 bytes and about 900
 * others.
 */
#include "kernel/cuda/fma_tile.cuh"

enum {
    THREADS = 256,
    ROW = HEAD_DIM * 4, /* bytes */
    CELLS = BLOCK_K * 4,
    S_DOWN = BLOCK_Q / (4 * S_ROWS), /* warps over the queries */
    S_WARPS = S_DOWN * (BLOCK_K / (8 * S_COLUMNS)), /* 8 or 4 */
    TOGETHER = S_WARPS == 4, /* half of the warps make Q K^T, the others dO V^T */
    K_DOWN = BLOCK_K / 32, /* warps over the keys in dK and dV, 32 keys x 64 dims each */
    Q_DOWN = BLOCK_Q / 32, /* warps over the queries in dQ */
    AT_K = 0,
    AT_V = AT_K + BLOCK_K * ROW,
    AT_Q = AT_V + BLOCK_K * ROW,
    AT_DOUT = AT_Q + BLOCK_Q * ROW,
    AT_P = AT_DOUT + BLOCK_Q * ROW,
    AT_ROWS = AT_P + BLOCK_Q * CELLS, /* lse and delta of two steps */
    AT_ITEM = AT_ROWS + 4 * BLOCK_Q * 4,
};

extern __shared__ __align__(1024) char shared[];

/* What all threads know of the block's item and of its steps; in shared memory, not in registers. */
typedef struct keys_item {
    int64_t item;
    int cleaned_k, cleaned_q, cleaned_dout; /* there was what is not finite */
    int dead[2];                            /* of even and odd steps: there is a row without keys */
    fma_sequence s;
    int64_t batch, head, head_kv, group; /* head: of dK and dV; parts of a group have the same head_kv, of K and V */
    int key, tile;         /* the first key, the number of the tile */
    int highest, tiles, steps; /* the highest query tile, how many it takes, and that times the query heads */
} keys_item;

static __device__ void take_item(keys_item *it, const attn__fma_backward *p)
{
    it->cleaned_k = it->cleaned_q = it->cleaned_dout = it->dead[0] = it->dead[1] = 0;
    it->item = (int64_t)atomicAdd(p->next, 1ull);
    const int64_t rest = it->item / p->problem.heads_kv;
    it->head = it->item % p->problem.heads_kv;
    it->head_kv = it->head / p->problem.parts;
    it->batch = rest % p->problem.batch;
    it->tile = (int)(rest / p->problem.batch);
    it->key = it->tile * BLOCK_K;
    it->s = fma_sequence_of(&p->problem, it->item < p->items ? it->batch : 0);
    it->group = p->problem.heads_q / p->problem.heads_kv;
    const int last = min(it->key + BLOCK_K, it->s.keys) - 1;
    const int from = max(it->key - it->s.hi, 0), to = min(last - it->s.lo, it->s.queries - 1);
    it->highest = to / BLOCK_Q;
    it->tiles = from <= to ? it->highest - from / BLOCK_Q + 1 : 0;
    it->steps = it->key < it->s.keys ? it->tiles * (int)it->group : 0;
}
PTX_INLINE int64_t step_head(const keys_item *it, int step)
{
    return it->head * it->group + step / it->tiles;
}
PTX_INLINE int step_tile(const keys_item *it, int step)
{
    return it->highest - step % it->tiles;
}

static __device__ __forceinline__ void load_queries(char *tile, const attn__fma_array *array, const keys_item *it,
                                                    int step, int dim)
{
    const int query = step_tile(it, step) * BLOCK_Q;
    fma_load(tile, BLOCK_Q, HEAD_DIM, array,
             (const float *)array->data + it->batch * array->batch + step_head(it, step) * array->head +
                 (it->s.first_q + query) * array->token,
             it->s.queries - query, dim, THREADS);
}

/* lse, in powers of 2, and delta of a step's rows; a row that is not there, or without keys, has lse = inf, so that P is
 * 0. */
static __device__ __forceinline__ void load_rows(const attn__fma_backward *p, keys_item *it, int step)
{
    float *rows = (float *)(shared + AT_ROWS) + step % 2 * 2 * BLOCK_Q;
    const int query = step_tile(it, step) * BLOCK_Q + threadIdx.x;
    if (threadIdx.x < BLOCK_Q) {
        float lse = INFINITY, delta = 0.0f;
        if (query < it->s.queries) {
            const int64_t head = step_head(it, step), token = it->s.first_q + query;
            lse = ((const float *)p->lse.data)[it->batch * p->lse.batch + head * p->lse.head + token * p->lse.token];
            delta = ((const float *)
                         p->delta.data)[it->batch * p->delta.batch + head * p->delta.head + token * p->delta.token];
            if (lse == -INFINITY) {
                it->dead[step % 2] = 1;
                lse = INFINITY;
            }
            lse *= 1.44269504088896341f;
        }
        rows[threadIdx.x] = lse;
        rows[BLOCK_Q + threadIdx.x] = delta;
    }
}

/* Waits until the key tiles before this one have added to the step's query tile. */
static __device__ __forceinline__ int *turn_of(const attn__fma_backward *p, const keys_item *it, int step)
{
    const int64_t head = it->batch * p->problem.heads_q + step_head(it, step);
    return p->turns + head * p->tiles_q + step_tile(it, step);
}
static __device__ __forceinline__ void wait_turn(const attn__fma_backward *p, const keys_item *it, int step)
{
    const int lowest = max(step_tile(it, step) * BLOCK_Q + it->s.lo, 0) / BLOCK_K;
    const int *turn = turn_of(p, it, step);
    while (ptx_load_acquire(turn) < it->tile - lowest) {
        __nanosleep(40);
    }
}

/* What of K is not finite, to the dQ of a row that sees it: NaN. */
static __device__ float mend_query(const attn__fma_backward *p, const keys_item *it, int query, int column, float x)
{
    const int last = min(min(it->key + BLOCK_K, it->s.keys) - 1, query + it->s.hi);
    for (int key = max(it->key, query + it->s.lo); key <= last && column < p->problem.dim_qk; key++) {
        const float y = ((const float *)p->k.data)[it->batch * p->k.batch + it->head_kv * p->k.head +
                                                   (it->s.first_kv + key) * p->k.token + column];
        x = fma_finite(y) ? x : NAN;
    }
    return x;
}

/* What of dO or Q (`array`) is not finite, to the element of dV or dK that it is visible to: itself, or NaN. */
static __device__ float mend_key(const attn__fma_backward *p, const keys_item *it, const attn__fma_array *array,
                                 int key, int column, bool as_nan)
{
    float x = 0.0f;
    for (int64_t head = it->head * it->group; head < (it->head + 1) * it->group; head++) {
        for (int query = max(key - it->s.hi, 0); query <= min(key - it->s.lo, it->s.queries - 1); query++) {
            const int64_t token = it->s.first_q + query;
            const float y = ((const float *)
                                 array->data)[it->batch * array->batch + head * array->head + token * array->token + column];
            const float lse =
                ((const float *)p->lse.data)[it->batch * p->lse.batch + head * p->lse.head + token * p->lse.token];
            x += fma_finite(y) || lse == -INFINITY ? 0.0f : as_nan ? NAN : y;
        }
    }
    return x;
}

/* A thread's place in a product: its first row, and its warp's first column. */
typedef struct place {
    int row, column, tx, part;
} place;

static __device__ __forceinline__ place place_of_scores(void)
{
    const int thread = ptx_thread_signed(), warp = thread / 32 % S_WARPS;
    const place at = {warp % S_DOWN * 4 * S_ROWS + 4 * fma_ty(thread % 32), warp / S_DOWN * 8 * S_COLUMNS,
                      fma_tx(thread % 32), 0};
    return at;
}
static __device__ __forceinline__ place place_of_queries(void)
{
    const int thread = ptx_thread_signed(), part = thread / (THREADS / PARTS), warp = thread % (THREADS / PARTS) / 32;
    const place at = {warp % Q_DOWN * 32 + 4 * fma_ty(thread % 32), warp / Q_DOWN * 8 * Q_COLUMNS, fma_tx(thread % 32),
                      part};
    return at;
}

/* Q K^T or dO V^T */
static __device__ __forceinline__ void make_scores(float *sum, int rows, int keys, int dim)
{
    const place at = place_of_scores();
#pragma unroll
    for (int i = 0; i < S_ROWS * S_COLUMNS; i++) {
        sum[i] = 0.0f;
    }
    fma_rows_rows(sum, S_ROWS, S_COLUMNS, shared, rows + at.row * ROW + fma_chunk(at.row, 0), ROW,
                  keys + (at.column + 4 * at.tx) * ROW + fma_chunk(4 * at.tx, 0), ROW, (dim + 7) / 8 * 2);
}

/* Where four cells of P or dS lie. */
static __device__ __forceinline__ float4 *cells_of(int row, int column, int tx)
{
    return (float4 *)(shared + AT_P + row * CELLS + column * 4 + (fma_chunk(row, 0) ^ 16 * tx));
}

/* P = exp(S - lse), to its place */
static __device__ __forceinline__ void put_weights(const float *sum, const float *lse, const fma_band *band, bool partial,
                                                   float factor)
{
    const place at = place_of_scores();
#pragma unroll
    for (int i = 0; i < S_ROWS; i++) {
        const int row = at.row + FMA_ROW(i);
        const float base = lse[row];
#pragma unroll
        for (int j = 0; j < S_COLUMNS; j += 4) {
            const int column = at.column + FMA_COLUMN(j);
            float x[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                x[c] = ptx_exp2(ptx_min_nan(fmaf(sum[i * S_COLUMNS + j + c], factor, -base), 0.0f));
                if (partial) {
                    x[c] = base != INFINITY && fma_sees(band, row, column + 4 * at.tx + c) ? x[c] : 0.0f;
                }
            }
            *cells_of(row, column, at.tx) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* dS = P * (dO V^T - delta), to where P was */
static __device__ __forceinline__ void put_slopes(const float *sum, const float *lse, const float *delta,
                                                  const fma_band *band, bool partial)
{
    const place at = place_of_scores();
#pragma unroll
    for (int i = 0; i < S_ROWS; i++) {
        const int row = at.row + FMA_ROW(i);
        const float d = delta[row];
#pragma unroll
        for (int j = 0; j < S_COLUMNS; j += 4) {
            const int column = at.column + FMA_COLUMN(j), key = column + 4 * at.tx;
            float4 *cell = cells_of(row, column, at.tx);
            const float *x = sum + i * S_COLUMNS + j;
            float4 y = *cell;
            y = make_float4(y.x * (x[0] - d), y.y * (x[1] - d), y.z * (x[2] - d), y.w * (x[3] - d));
            if (partial) {
                const bool live = lse[row] != INFINITY;
                y.x = live && fma_sees(band, row, key) ? y.x : 0.0f;
                y.y = live && fma_sees(band, row, key + 1) ? y.y : 0.0f;
                y.z = live && fma_sees(band, row, key + 2) ? y.z : 0.0f;
                y.w = live && fma_sees(band, row, key + 3) ? y.w : 0.0f;
            }
            *cell = y;
        }
    }
}

/* dV += P^T dO, or dK += dS^T Q */
static __device__ __forceinline__ void add_keys(float *sum, int rows)
{
    const int thread = ptx_thread_signed(), warp = thread / 32;
    fma_columns_columns(sum, 8, 8, shared, AT_P + warp % K_DOWN * 128 + 16 * fma_ty(thread % 32), CELLS,
                        rows + warp / K_DOWN * 256 + 16 * fma_tx(thread % 32), ROW, BLOCK_Q / 4);
}

/* dS K, of this thread's part of the keys */
static __device__ __forceinline__ void make_queries(float *sum)
{
    const place at = place_of_queries();
#pragma unroll
    for (int i = 0; i < 8 * Q_COLUMNS; i++) {
        sum[i] = 0.0f;
    }
    fma_rows_columns(sum, 8, Q_COLUMNS, shared, AT_P + at.part * (CELLS / PARTS) + at.row * CELLS + fma_chunk(at.row, 0),
                     CELLS, AT_K + at.part * (BLOCK_K / PARTS) * ROW + at.column * 4 + 16 * at.tx, ROW,
                     BLOCK_K / PARTS / 4, 1, false);
}

/* A thread's 8 rows of sums, times scale, to a tile from `to` on; swapped: as accumulators that are stored swapped. */
static __device__ __forceinline__ void stage_sums(char *to, const float *sum, const int columns, const int swapped, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < columns; j += 4) {
            const float *x = sum + i * columns + j;
            *(float4 *)(to + FMA_ROW(i) * ROW + FMA_COLUMN_PLACE(j)) =
                make_float4(x[swapped] * scale, x[1 - swapped] * scale, x[2 + swapped] * scale, x[3 - swapped] * scale);
        }
    }
}

/* A warp's 32 keys x 64 dims of dK or dV to a tile. */
static __device__ __forceinline__ void stage_keys(char *tile, const float *sum, float scale)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    stage_sums(tile + (warp % K_DOWN * 32 + 4 * fma_ty(lane)) * ROW + warp / K_DOWN * 256 + 16 * fma_tx(lane), sum, 8, 1, scale);
}

/* The tile to memory.  mended: dO or Q, or NULL. */
static __device__ __forceinline__ void put_keys(const attn__fma_backward *p, const keys_item *it, const char *tile,
                                                const attn__fma_array *array, int dim, const attn__fma_array *mended)
{
    const int chunks = (dim + 3) / 4, rows = min(BLOCK_K, it->s.keys - it->key);
    const int64_t at = it->batch * array->batch + it->head * array->head + (it->s.first_kv + it->key) * array->token;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * 4;
        float4 x = fma_swap(fma_at(tile, row * ROW + column * 4));
        if (mended) {
            float *y = &x.x;
            for (int c = 0; c < 4 && column + c < dim; c++) {
                y[c] += mend_key(p, it, mended, it->key + row, column + c, mended == &p->q);
            }
        }
        fma_put(array, at + row * array->token, column, dim, x, p->accumulate);
    }
}

/* This thread's share of dQ to where the parts meet. */
static __device__ __forceinline__ void stage_queries(const float *dq)
{
    const place at = place_of_queries();
    stage_sums(shared + AT_SUM + at.part * (BLOCK_Q * ROW) + at.row * ROW + at.column * 4 + 16 * at.tx, dq, Q_COLUMNS, 0, 1.0f);
}

/* The sum of the parts, to memory. */
static __device__ __forceinline__ void add_queries(const attn__fma_backward *p, const keys_item *it, int step, bool mended)
{
    const int query = step_tile(it, step) * BLOCK_Q, dim = p->problem.dim_qk, rows = it->s.queries - query;
    float *to = (float *)p->dq.data + it->batch * p->dq.batch + step_head(it, step) * p->dq.head +
                (it->s.first_q + query) * p->dq.token;
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_Q * (HEAD_DIM / 4); i += THREADS) {
        const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        if (row >= rows || column >= dim) {
            continue;
        }
        float4 x = fma_at(shared + AT_SUM, row * ROW + column * 4);
#pragma unroll
        for (int part = 1; part < PARTS; part++) {
            const float4 y = fma_at(shared + AT_SUM, part * (BLOCK_Q * ROW) + row * ROW + column * 4);
            x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        const float scale = p->problem.scale;
        x = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
        if (mended) {
            x.x = mend_query(p, it, query + row, column, x.x);
            x.y = mend_query(p, it, query + row, column + 1, x.y);
            x.z = mend_query(p, it, query + row, column + 2, x.z);
            x.w = mend_query(p, it, query + row, column + 3, x.w);
        }
        float *at = to + row * p->dq.token + column;
        if (p->dq.wide && column + 4 <= dim) {
            ptx_add_f32x4(at, x.x, x.y, x.z, x.w);
            continue;
        }
        atomicAdd(at, x.x);
        for (int c = 1; c < 4 && column + c < dim; c++) {
            atomicAdd(at + c, c == 1 ? x.y : c == 2 ? x.z : x.w);
        }
    }
}

static __device__ __forceinline__ void clean(char *tile, const int rows, float *marks, int *cleaned)
{
    if (fma_clean(tile, rows, HEAD_DIM, marks, THREADS)) {
        *cleaned = 1;
    }
}

static __device__ __forceinline__ void backward_item(const attn__fma_backward *p, keys_item *it)
{
    const int dim_qk = p->problem.dim_qk, dim_v = p->problem.dim_v;
    const int64_t at_k = it->batch * p->k.batch + it->head_kv * p->k.head + (it->s.first_kv + it->key) * p->k.token;
    const int64_t at_v = it->batch * p->v.batch + it->head_kv * p->v.head + (it->s.first_kv + it->key) * p->v.token;
    float dk[64], dv[64];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        dk[i] = dv[i] = 0.0f;
    }
    if (it->steps > 0) {
        fma_load(shared + AT_K, BLOCK_K, HEAD_DIM, &p->k, (const float *)p->k.data + at_k, it->s.keys - it->key, dim_qk,
                 THREADS);
        fma_load(shared + AT_V, BLOCK_K, HEAD_DIM, &p->v, (const float *)p->v.data + at_v, it->s.keys - it->key, dim_v,
                 THREADS);
        load_queries(shared + AT_Q, &p->q, it, 0, dim_qk);
        load_queries(shared + AT_DOUT, &p->dout, it, 0, dim_v);
        ptx_copy_commit();
        load_rows(p, it, 0);
        PTX_COPY_WAIT(0);
        clean(shared + AT_K, BLOCK_K, NULL, &it->cleaned_k);
        fma_swap_own(shared + AT_K, BLOCK_K, HEAD_DIM, 1.0f, THREADS);
        fma_swap_own(shared + AT_V, BLOCK_K, HEAD_DIM, 1.0f, THREADS);
    }
    for (int step = 0; step < it->steps; step++) {
        const fma_band band = fma_band_of(&it->s, step_tile(it, step) * BLOCK_Q, it->key);
        float *lse = (float *)(shared + AT_ROWS) + step % 2 * 2 * BLOCK_Q, *delta = lse + BLOCK_Q;
        PTX_COPY_WAIT(0);
        __syncthreads(); /* Q, dO and their rows are there */
        const bool partial = it->dead[step % 2] || !fma_all(&band, 0, BLOCK_Q - 1, BLOCK_K);
        if (partial) {
            clean(shared + AT_Q, BLOCK_Q, NULL, &it->cleaned_q);
            clean(shared + AT_DOUT, BLOCK_Q, delta, &it->cleaned_dout);
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            it->dead[(step + 1) % 2] = 0;
            if (step > 0 && p->dq.data) { /* all threads' additions of the step before lie behind a barrier */
                __threadfence();
                atomicAdd(turn_of(p, it, step - 1), 1);
            }
        }
        float sum[64];
        const bool second = ptx_thread_signed() / 32 >= S_WARPS; /* makes dO V^T while others make Q K^T */
        make_scores(sum, second ? AT_DOUT : AT_Q, second ? AT_V : AT_K, second ? dim_v : dim_qk);
        if (!second) {
            put_weights(sum, lse, &band, partial, p->problem.factor);
        }
        __syncthreads(); /* P is there */
        if (p->dv.data) {
            add_keys(dv, AT_DOUT);
        }
        if (!TOGETHER) {
            make_scores(sum, AT_DOUT, AT_V, dim_v);
        }
        __syncthreads(); /* P and dO are not needed any more */
        const bool next = step + 1 < it->steps;
        if (next) {
            if (AT_SUM == AT_P) {
                load_queries(shared + AT_DOUT, &p->dout, it, step + 1, dim_v);
            }
            load_rows(p, it, step + 1);
        }
        ptx_copy_commit();
        if (!TOGETHER || second) {
            put_slopes(sum, lse, delta, &band, partial);
        }
        __syncthreads(); /* dS is there */
        if (p->dk.data) {
            add_keys(dk, AT_Q);
        }
        if (p->dq.data) {
            make_queries(sum);
        }
        __syncthreads(); /* dS and Q are not needed any more */
        if (next) {
            load_queries(shared + AT_Q, &p->q, it, step + 1, dim_qk);
        }
        ptx_copy_commit();
        if (p->dq.data) {
            stage_queries(sum);
            if (threadIdx.x == 0) {
                wait_turn(p, it, step);
            }
            __syncthreads();
            add_queries(p, it, step, it->cleaned_k);
            if (AT_SUM == AT_DOUT) {
                __syncthreads();
            }
        }
        if (next && AT_SUM == AT_DOUT) {
            load_queries(shared + AT_DOUT, &p->dout, it, step + 1, dim_v);
            ptx_copy_commit();
        }
    }
    __syncthreads();
    if (it->steps > 0 && p->dq.data && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(turn_of(p, it, it->steps - 1), 1);
    }
    stage_keys(shared + AT_K, dk, p->problem.scale);
    stage_keys(shared + AT_V, dv, 1.0f);
    __syncthreads();
    if (p->dk.data) {
        put_keys(p, it, shared + AT_K, &p->dk, dim_qk, it->cleaned_q ? &p->q : NULL);
    }
    if (p->dv.data) {
        put_keys(p, it, shared + AT_V, &p->dv, dim_v, it->cleaned_dout ? &p->dout : NULL);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ attn__fma_backward p)
{
    keys_item *it = (keys_item *)(shared + AT_ITEM);
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) {
            take_item(it, &p);
        }
        __syncthreads();
        if (it->item >= p.items) {
            return;
        }
        if (it->key < it->s.keys) {
            backward_item(&p, it);
        }
    }
}
