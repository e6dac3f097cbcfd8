/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_tile.cuh - what the fp32 kernels are made of: tiles in shared memory and their products by fused
 * multiply-adds, each thread an outer product of registers.
 *
 * LANES.  A warp is 4 x 8 lanes (ty, tx).  A thread's rows of a product are 4 ty + c + 16 i, its columns
 * 4 tx + c + 32 j, c = 0..3: its registers are 4 x 4 squares, read and written by 16 bytes.  Bit 0 of the lane is
 * ty's and bit 1 is tx's, so that in every quarter of a warp neighbours ask for the same 16 bytes, whatever operand it
 * is: such a load takes half the passes through shared memory.
 *
 * TILES.  Rows of fp32, whole multiples of 128 bytes wide; the 16-byte chunk c of row r lies at c ^ (r / 4 & 7) of its
 * group of 8.  So the chunks that the lanes read at once lie in different banks, whether they go down the rows (the
 * sum runs along a row) or along one (it runs down the rows), and there is no padding.
 *
 * COST.  8 x 8 registers a thread: 16 loads of 16 bytes for 256 multiply-adds.
 *
 * NUMBERS THAT ARE NOT FINITE.  A cell that is not visible gets the weight 0, but 0 * NaN is NaN.  So where a tile has
 * such cells, what is not finite in the operand that weights multiply becomes 0 (fma_clean); whoever sees it gets it
 * when all sums are made, by a second look at the inputs.
 */
#ifndef ATTN_FMA_TILE_CUH
#define ATTN_FMA_TILE_CUH

#include "kernel/cuda/fma_params.h"
#include "kernel/cuda/ptx.cuh"

enum { FMA_F32 = 0, FMA_F16 = 1, FMA_BF16 = 2 }; /* attn_dtype */

/* ---- lanes ---- */

PTX_INLINE int fma_ty(int lane)
{
    return (lane & 1) | (lane >> 2 & 2);
}
PTX_INLINE int fma_tx(int lane)
{
    return (lane >> 1 & 3) | (lane >> 2 & 4);
}
/* over the lanes of one ty */
PTX_INLINE float fma_max_tx(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
PTX_INLINE float fma_sum_tx(float x)
{
    x += __shfl_xor_sync(~0u, x, 2);
    x += __shfl_xor_sync(~0u, x, 4);
    return x + __shfl_xor_sync(~0u, x, 16);
}
/* a thread's i-th row and j-th column, beyond 4 ty and 4 tx */
#define FMA_ROW(i)    ((i) / 4 * 16 + (i) % 4)
#define FMA_COLUMN(j) ((j) / 4 * 32 + (j) % 4)

/* where chunk `chunk` of row `row` lies in the row, in bytes */
#ifndef FMA_TURN
#define FMA_TURN(row) ((row) >> 2 & 7)
#endif
PTX_INLINE int fma_chunk(int row, int chunk)
{
    return (chunk ^ FMA_TURN(row)) << 4;
}

/* ---- products ---- */

#ifndef FMA_UNROLL
#define FMA_UNROLL 1
#endif
enum { FMA_AT_ONCE = FMA_UNROLL }; /* chunks of a product's loop */

PTX_INLINE float4 fma_at(const char *tile, int offset)
{
    return *(const float4 *)(tile + offset);
}
PTX_INLINE float fma_part(float4 x, const int part)
{
    return part == 0 ? x.x : part == 1 ? x.y : part == 2 ? x.z : x.w;
}

/* Addresses of a thread's rows of a product, of which the sum runs along the row: at `chunk`, rows 0..3 and 4..7. */
PTX_INLINE float4 fma_row(const char *x, int turn, const int bytes, int chunk, const int i)
{
    return fma_at(x, chunk / 8 * 128 + (turn ^ chunk % 8 * 16 ^ (i & 4) * 16) + FMA_ROW(i) * bytes);
}
/* The thread's i-th 4 columns at row `k` of a tile, of which the sum runs down the rows; `step` bytes between them. */
PTX_INLINE float4 fma_column(const char *y, int turn, const int bytes, int k, const int i)
{
    return fma_at(y, k * bytes + (turn ^ k / 4 % 8 * 16) + i * 128);
}

/*
 * acc[m][n] += sum over k of x[m][k] y[n][k], k < 4 * chunks, of tiles x_bytes and y_bytes a row.  x and y point to the
 * thread's first row; x_turn and y_turn are fma_chunk(that row, 0).
 *
 * Each register is loaded again as soon as it has been used for the last time, so that a load has more than a hundred
 * multiply-adds to arrive; what is read behind the last chunk lies in shared memory too, and is not used.
 */
PTX_INLINE void fma_rows_rows(float *acc, const int rows, const int columns, const char *x, int x_turn,
                              const int x_bytes, const char *y, int y_turn, const int y_bytes, int chunks)
{
    float4 a[8], b[8];
#pragma unroll
    for (int i = 0; i < rows; i++) {
        a[i] = fma_row(x, x_turn, x_bytes, 0, i);
    }
#pragma unroll
    for (int j = 0; j < columns / 2; j++) {
        b[j] = fma_at(y, y_turn + FMA_COLUMN(j) * y_bytes);
    }
#pragma unroll FMA_AT_ONCE
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int next = chunk + 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int other = (1 - half) * columns / 2, at = chunk + half;
#pragma unroll
            for (int j = other; j < other + columns / 2; j++) {
                b[j] = fma_at(y, at / 8 * 128 + (y_turn ^ at % 8 * 16) + FMA_COLUMN(j) * y_bytes);
            }
#pragma unroll
            for (int i = 0; i < rows; i++) {
#pragma unroll
                for (int part = 0; part < 4; part++) {
#pragma unroll
                    for (int j = half * columns / 2; j < (half + 1) * columns / 2; j++) {
                        float *sum = &acc[i * columns + j];
                        *sum = fmaf(fma_part(a[i], part), fma_part(b[j], part), *sum);
                    }
                }
                if (half == 1) {
                    a[i] = fma_row(x, x_turn, x_bytes, next, i);
                }
            }
        }
    }
}

/*
 * acc[m][n] += sum over k of x[m][k] y[k][n].  x as above; y points to the row k = 0, a multiple of 32 of its tile, and
 * a column that is a multiple of 32; y_turn is 16 tx.
 */
PTX_INLINE void fma_rows_columns(float *acc, const int rows, const int columns, const char *x, int x_turn,
                                 const int x_bytes, const char *y, int y_turn, const int y_bytes, int chunks)
{
    float4 a[8], b[2][16];
#pragma unroll
    for (int i = 0; i < rows; i++) {
        a[i] = fma_row(x, x_turn, x_bytes, 0, i);
    }
#pragma unroll
    for (int j = 0; j < columns / 4; j++) {
        b[0][j] = fma_column(y, y_turn, y_bytes, 0, j);
    }
#pragma unroll FMA_AT_ONCE
    for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
#pragma unroll
            for (int j = 0; j < columns / 4; j++) {
                b[(part + 1) % 2][j] = fma_column(y, y_turn, y_bytes, 4 * chunk + part + 1, j);
            }
#pragma unroll
            for (int i = 0; i < rows; i++) {
#pragma unroll
                for (int j = 0; j < columns; j++) {
                    float *sum = &acc[i * columns + j];
                    *sum = fmaf(fma_part(a[i], part), fma_part(b[part % 2][j / 4], j % 4), *sum);
                }
                if (part == 3) {
                    a[i] = fma_row(x, x_turn, x_bytes, chunk + 1, i);
                }
            }
        }
    }
}

/*
 * acc[m][n] += sum over k of x[k][m] y[k][n].  x and y point to the row k = 0 of their tiles and a column that is a
 * multiple of 32; x_turn is 16 ty, y_turn 16 tx.
 */
PTX_INLINE void fma_columns_columns(float *acc, const int rows, const int columns, const char *x, int x_turn,
                                    const int x_bytes, const char *y, int y_turn, const int y_bytes, int chunks)
{
    float4 a[2][2], b[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        a[0][i] = fma_at(x, x_turn ^ i * 64);
        b[0][i] = fma_column(y, y_turn, y_bytes, 0, i);
    }
#pragma unroll FMA_AT_ONCE
    for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int next = 4 * chunk + part + 1;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a[(part + 1) % 2][i] = fma_at(x, next * x_bytes + (x_turn ^ i * 64 ^ next / 4 % 8 * 16));
                b[(part + 1) % 2][i] = fma_column(y, y_turn, y_bytes, next, i);
            }
#pragma unroll
            for (int i = 0; i < rows; i++) {
#pragma unroll
                for (int j = 0; j < columns; j++) {
                    float *sum = &acc[i * columns + j];
                    *sum = fmaf(fma_part(a[part % 2][i / 4], i % 4), fma_part(b[part % 2][j / 4], j % 4), *sum);
                }
            }
        }
    }
}

/* ---- elements of any dtype ---- */

PTX_INLINE float fma_get(const attn__fma_array *array, int64_t element)
{
    if (array->dtype == FMA_F32) {
        return ((const float *)array->data)[element];
    }
    const uint16_t half = ((const uint16_t *)array->data)[element];
    return array->dtype == FMA_F16 ? ptx_from_f16(half) : __uint_as_float((uint32_t)half << 16);
}
PTX_INLINE void fma_set(const attn__fma_array *array, int64_t element, float x)
{
    if (array->dtype == FMA_F32) {
        ((float *)array->data)[element] = x;
    } else {
        ((uint16_t *)array->data)[element] = array->dtype == FMA_F16 ? ptx_to_f16(x) : ptx_to_bf16(x);
    }
}

/* ---- tiles from memory ---- */

/*
 * `rows` rows of width `width` from `from` on, a token of `array` apart, of which the first `there` exist and have `dim`
 * elements; what does not exist becomes 0.  It is on its way when this returns, until the thread's next commit and
 * wait.  A thread copies its own chunks: `column` of every (threads / chunks of a row)-th row.
 */
PTX_INLINE void fma_load(char *tile, const int rows, const int width, const attn__fma_array *array, const float *from,
                         int there, int dim, const int threads)
{
    const int chunks = width / 4, thread = ptx_thread_signed(), column = thread % chunks, left = dim - 4 * column;
    int row = thread / chunks;
    const uint32_t to = ptx_shared(tile);
    const float *at = from + row * array->token + 4 * column;
#pragma unroll 4
    for (int step = 0; step < rows * chunks / threads; step++) {
        const uint32_t place = to + row * width * 4 + fma_chunk(row, column);
        const int count = row < there ? min(max(left, 0), 4) : 0; /* of elements */
        if (array->wide) {
            ptx_copy_16(place, count > 0 ? at : from, count * 4);
        } else {
            for (int c = 0; c < 4; c++) {
                ptx_copy_4(place + 4 * c, c < count ? at + c : from, c < count ? 4 : 0);
            }
        }
        row += threads / chunks;
        at += threads / chunks * array->token;
    }
}

PTX_INLINE bool fma_finite(float x)
{
    return fabsf(x) < INFINITY;
}

/* Replaces what is not finite by 0 in the thread's own chunks of a tile; whether there was any. */
PTX_INLINE bool fma_clean(char *tile, const int rows, const int width, const int threads)
{
    const int chunks = width / 4, thread = ptx_thread_signed();
    bool found = false;
#pragma unroll 1
    for (int row = thread / chunks; row < rows; row += threads / chunks) {
        float4 *x = (float4 *)(tile + row * width * 4 + fma_chunk(row, thread % chunks));
        if (!(fma_finite(x->x) && fma_finite(x->y) && fma_finite(x->z) && fma_finite(x->w))) {
            found = true;
            *x = make_float4(fma_finite(x->x) ? x->x : 0.0f, fma_finite(x->y) ? x->y : 0.0f,
                             fma_finite(x->z) ? x->z : 0.0f, fma_finite(x->w) ? x->w : 0.0f);
        }
    }
    return found;
}

/* Four elements from `column` on of a row that ends at `dim`, of any dtype: += or = */
PTX_INLINE void fma_put(const attn__fma_array *array, int64_t at, int column, int dim, float4 x, bool add)
{
    if (array->wide && column + 4 <= dim) {
        float4 *to = (float4 *)((float *)array->data + at + column);
        if (add) {
            const float4 y = *to;
            x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        *to = x;
        return;
    }
#pragma unroll 1
    for (int c = 0; c < 4 && column + c < dim; c++) {
        const float y = c == 0 ? x.x : c == 1 ? x.y : c == 2 ? x.z : x.w;
        fma_set(array, at + column + c, add ? y + fma_get(array, at + column + c) : y);
    }
}

/* ---- sequences and their band ---- */

/* Key j is visible to query i when lo <= j - i <= hi.  Positions within a sequence are less than 2^29. */
typedef struct fma_sequence {
    int64_t first_q, first_kv; /* tokens before it in the tensors, beyond the batch stride */
    int queries, keys;
    int lo, hi;
} fma_sequence;

/* within 2^30, which is as good as without a bound */
PTX_INLINE int fma_near(int64_t x)
{
    const int64_t far = 1 << 30;
    return (int)(x < -far ? -far : x > far ? far : x);
}
PTX_INLINE fma_sequence fma_sequence_of(const attn__fma_problem *p, int64_t batch)
{
    fma_sequence s = {0, 0, (int)p->tokens_q, (int)p->tokens_kv, 0, 0};
    if (p->cu_q) {
        s.first_q = p->cu_q[batch];
        s.queries = (int)(p->cu_q[batch + 1] - s.first_q);
    }
    if (p->cu_kv) {
        s.first_kv = p->cu_kv[batch];
        s.keys = (int)(p->cu_kv[batch + 1] - s.first_kv);
    }
    const int64_t shift = p->shifted ? p->shift : s.keys - s.queries;
    const bool empty = p->left + p->right < 0;
    s.lo = empty ? 1 << 30 : fma_near(shift - p->left);
    s.hi = empty ? -(1 << 30) : fma_near(shift + p->right);
    return s;
}

/* The band in a tile of `rows` x `columns` cells: column c of row r is visible when low <= c - r <= high and
 * c < there. */
typedef struct fma_band {
    int low, high, there;
} fma_band;

PTX_INLINE fma_band fma_band_of(const fma_sequence *s, int query, int key)
{
    fma_band band = {s->lo + (query - key), s->hi + (query - key), s->keys - key};
    return band;
}
/* Of the rows first .. last and the columns 0 .. columns - 1: all visible?  none? */
PTX_INLINE bool fma_all(const fma_band *band, int first, int last, int columns)
{
    return band->low + last <= 0 && band->high + first >= columns - 1 && band->there >= columns;
}
PTX_INLINE bool fma_none(const fma_band *band, int first, int last, int columns)
{
    return band->high + last < 0 || band->low + first >= min(band->there, columns);
}
PTX_INLINE bool fma_sees(const fma_band *band, int row, int column)
{
    return column - row >= band->low && column - row <= band->high && column < band->there;
}

#endif
