/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_tile.cuh - what the fp32 kernels are made of: tiles in shared memory and their products by fused
 * multiply-adds, each thread an outer product of registers.
 *
 * LANES.  A warp is 4 x 8 lanes (ty, tx), or 2 x 16.  A thread's rows of a product are 4 ty + c + 16 i, its columns
 * 4 tx + c + 32 j, c = 0..3 (8 i and 64 j): its registers are 4 x 4 squares, read and written by 16 bytes.  Bit 0 of the
 * lane is ty's and bit 1 is tx's, so that in every quarter of a warp neighbours ask for the same 16 bytes, whatever
 * operand it is: such a load takes half the passes through shared memory.
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

#ifndef FMA_DOWN
#define FMA_DOWN 4 /* ty: 4, or 2 */
#endif
enum { FMA_ACROSS = 32 / FMA_DOWN };

PTX_INLINE int fma_ty(int lane)
{
    return FMA_DOWN == 4 ? (lane & 1) | (lane >> 2 & 2) : lane & 1;
}
PTX_INLINE int fma_tx(int lane)
{
    return FMA_DOWN == 4 ? (lane >> 1 & 3) | (lane >> 2 & 4) : lane >> 1;
}
/* over the lanes of one ty */
PTX_INLINE float fma_max_tx(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = FMA_DOWN == 4 ? x : fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
PTX_INLINE float fma_sum_tx(float x)
{
    x += __shfl_xor_sync(~0u, x, 2);
    x += __shfl_xor_sync(~0u, x, 4);
    x += FMA_DOWN == 4 ? 0.0f : __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
/* a thread's i-th row and j-th column, beyond 4 ty and 4 tx */
#define FMA_ROW(i)    ((i) / 4 * (4 * FMA_DOWN) + (i) % 4)
#define FMA_COLUMN(j) ((j) / 4 * (4 * FMA_ACROSS) + (j) % 4)
/* what the turn of the rows i and of their chunks differs by, in bytes; where the columns j begin, in bytes */
#define FMA_TURN_ROW(i)    (((i) & 4) * (4 * FMA_DOWN))
#define FMA_COLUMN_PLACE(j) ((j) / 4 * (16 * FMA_ACROSS))

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
#ifndef FMA_UNROLL_ROWS
#define FMA_UNROLL_ROWS FMA_UNROLL
#endif
enum { FMA_AT_ONCE = FMA_UNROLL, FMA_ROWS_AT_ONCE = FMA_UNROLL_ROWS }; /* chunks of a product's loop */

PTX_INLINE float4 fma_at(const char *tile, int offset)
{
    return *(const float4 *)(tile + offset);
}
PTX_INLINE float fma_part(float4 x, const int part)
{
    return part == 0 ? x.x : part == 1 ? x.y : part == 2 ? x.z : x.w;
}

/*
 * THE ORDER of the multiply-adds.  The register file has two banks, even and odd registers, and reads one of each in a
 * cycle; an instruction that reads two of the same bank takes two cycles.  So one operand should be that of the
 * instruction before, which is kept, and the other two of different banks.  Loads of 16 bytes put x and z, the first and
 * third of four, in even registers; sums that are stored by 16 bytes lie likewise.  So where the sum's column is that of
 * an operand, one of the two is stored with x and y, z and w exchanged (fma_swap), and where the sum runs along both
 * rows, one of these is.
 */

/*
 * Operands are places in shared memory, of the thread's first element.  Down the rows (4 ty or 4 tx of them): its row, and
 * fma_chunk(that row, 0) in the last 7 bits.  Along a row: a column that is a multiple of 32, and 16 ty or 16 tx in the
 * last 7 bits.  So the chunk c of the sum is at place ^ 16 c; and a row of the group 4 .. 7 of ty's at place ^ 64.
 *
 * acc[m][n] += sum over k of x[m][k] y[n][k], k < 4 * chunks.  One of the tiles is swapped.
 */
PTX_INLINE void fma_rows_rows(float *acc, const int rows, const int columns, const char *tiles, int x,
                              const int x_bytes, int y, const int y_bytes, int chunks)
{
#pragma unroll 1
    for (int left = chunks * 16; left > 0; left -= 128) {
#pragma unroll 1
        for (int turn = 0; turn < min(left, 128); turn += 16) {
            float4 a[8], b[8];
#pragma unroll
            for (int j = 0; j < columns; j++) {
                b[j] = fma_at(tiles, (y ^ turn) + FMA_COLUMN(j) * y_bytes);
            }
#pragma unroll
            for (int i = 0; i < rows; i++) {
                a[i] = fma_at(tiles, (x ^ turn ^ FMA_TURN_ROW(i)) + FMA_ROW(i) * x_bytes);
            }
#pragma unroll
            for (int part = 0; part < 4; part++) {
#pragma unroll
                for (int n = 0; n < rows * columns / 2; n++) { /* a stays, b changes */
                    const int i = n / (columns / 2), j = n % (columns / 2) * 2 + part % 2;
                    float *sum = &acc[i * columns + j];
                    *sum = fmaf(fma_part(a[i], part), fma_part(b[j], part ^ 1), *sum);
                }
#pragma unroll
                for (int n = 0; n < rows * columns / 2; n++) { /* b stays, a changes */
                    const int i = n % rows, j = n / rows * 2 + 1 - part % 2;
                    float *sum = &acc[i * columns + j];
                    *sum = fmaf(fma_part(a[i], part), fma_part(b[j], part ^ 1), *sum);
                }
            }
        }
        x += 128;
        y += 128;
    }
}

/*
 * acc[m][n] += sum over k of x[m][k] y[k][n].  Either acc is stored swapped, or y is and swapped = 1.  Which operand
 * stays from one multiply-add to the next is what has been seen to leave fewer conflicts.
 */
PTX_INLINE void fma_rows_columns(float *acc, const int rows, const int columns, const char *tiles, int x,
                                 const int x_bytes, int y, const int y_bytes, int chunks, const int swapped,
                                 const bool y_stays)
{
#pragma unroll 1
    for (int left = chunks * 16; left > 0; left -= 128) {
#pragma unroll 1
        for (int turn = 0; turn < min(left, 128); turn += 16) {
            float4 a[8], b[4][16];
            const int here = y ^ turn;
#pragma unroll
            for (int i = 0; i < rows; i++) {
                a[i] = fma_at(tiles, (x ^ turn ^ FMA_TURN_ROW(i)) + FMA_ROW(i) * x_bytes);
            }
#pragma unroll
            for (int part = 0; part < 4; part++) {
#pragma unroll
                for (int j = 0; j < columns / 4; j++) {
                    b[part][j] = fma_at(tiles, here + part * y_bytes + FMA_COLUMN_PLACE(4 * j));
                }
#pragma unroll
                for (int n = 0; n < rows * columns; n++) {
                    const int side = n / columns, to_fro = side % 2 == 0 ? n % columns : columns - 1 - n % columns;
                    const int i = y_stays ? n % rows : side, j = y_stays ? n / rows : to_fro;
                    float *sum = &acc[i * columns + (j ^ swapped)];
                    *sum = fmaf(fma_part(a[i], part), fma_part(b[part][j / 4], j % 4), *sum);
                }
            }
            y += 4 * y_bytes;
        }
        x += 128;
    }
}

/*
 * acc[m][n] += sum over k of x[k][m] y[k][n].  acc is stored swapped.
 */
PTX_INLINE void fma_columns_columns(float *acc, const int rows, const int columns, const char *tiles, int x,
                                    const int x_bytes, int y, const int y_bytes, int chunks)
{
#pragma unroll 1
    for (int turn = 0; turn < chunks * 16; turn += 16) {
        const int x_here = x ^ (turn & 112), y_here = y ^ (turn & 112);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            float4 a[2], b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a[i] = fma_at(tiles, (x_here ^ i * 64) + part * x_bytes);
                b[i] = fma_at(tiles, y_here + part * y_bytes + i * 128);
            }
#pragma unroll
            for (int n = 0; n < rows * columns; n++) {
                const int i = n / columns, j = i % 2 == 0 ? n % columns : columns - 1 - n % columns;
                float *sum = &acc[i * columns + j];
                *sum = fmaf(fma_part(a[i / 4], i % 4), fma_part(b[j / 4], j % 4), *sum);
            }
        }
        x += 4 * x_bytes;
        y += 4 * y_bytes;
    }
}

/* ---- elements of any dtype ---- */

PTX_INLINE float fma_get(const attn__fma_array *array, int64_t element)
{
    if (array->dtype == FMA_F32) {
        return ((const float *)array->data)[element];
    }
    const uint16_t half = ((const uint16_t *)array->data)[element];
    return array->dtype == FMA_F16 ? ptx_unpack_f16(half) : __uint_as_float((uint32_t)half << 16);
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

/* x, y, z, w as y, x, w, z */
PTX_INLINE float4 fma_swap(float4 x)
{
    return make_float4(x.y, x.x, x.w, x.z);
}
/* The thread's own chunks of a tile, times factor, swapped. */
PTX_INLINE void fma_swap_own(char *tile, const int rows, const int width, float factor, const int threads)
{
    const int chunks = width / 4, thread = ptx_thread_signed();
#pragma unroll 1
    for (int row = thread / chunks; row < rows; row += threads / chunks) {
        float4 *x = (float4 *)(tile + row * width * 4 + fma_chunk(row, thread % chunks));
        *x = fma_swap(make_float4(x->x * factor, x->y * factor, x->z * factor, x->w * factor));
    }
}

PTX_INLINE bool fma_finite(float x)
{
    return fabsf(x) < INFINITY;
}

/* Replaces what is not finite by 0 in the thread's own chunks of a tile; whether there was any.  marks: of the rows that
 * had it, become NaN; may be NULL. */
PTX_INLINE bool fma_clean(char *tile, const int rows, const int width, float *marks, const int threads)
{
    const int chunks = width / 4, thread = ptx_thread_signed();
    bool found = false;
#pragma unroll 1
    for (int row = thread / chunks; row < rows; row += threads / chunks) {
        float4 *x = (float4 *)(tile + row * width * 4 + fma_chunk(row, thread % chunks));
        if (!(fma_finite(x->x) && fma_finite(x->y) && fma_finite(x->z) && fma_finite(x->w))) {
            found = true;
            if (marks) {
                marks[row] = NAN;
            }
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
