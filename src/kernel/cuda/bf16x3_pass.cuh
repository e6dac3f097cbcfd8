/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_pass.cuh - what the passes of the gradients of fp32 inputs in parts of bf16 are made of: items, products, weights, and
 * the way out.
 *
 * METHOD.  bf16x3_backward.cuh tells it.  A pass keeps rows and lets columns go by, both in images as bf16x3_parts.cu has made
 * them: two of them, one below the other, stay, and one is a tile that passes.
 *
 * What includes bf16x3_backward.cuh or bf16x3_backward_pair.cuh, which include this, has set
 *     NAME, KEYS         the kernel; 1 if keys stay, 0 if queries do
 *     HEAD_DIM           width of the tiles
 *     PRODUCT_S          of wgmma.cuh, as many columns as an image has rows
 */
#ifndef ATTN_BF16X3_PASS_CUH
#define ATTN_BF16X3_PASS_CUH

#include "kernel/cuda/bf16x3.cuh"
#include "kernel/cuda/fma_tile.cuh"

enum {
    CONSUMERS = 256,
    PRODUCERS = 128,
    TILE = ATTN__BF16X3_TILE(HEAD_DIM), /* numbers */
    COLUMNS = TILE / HEAD_DIM,          /* of a tile that passes */
    ROWS = 2 * COLUMNS,                 /* that stay */
    APART = ROWS == 128,                /* the warpgroups have different rows */
    PANELS = HEAD_DIM / 64,
    PART = TILE * 2, /* bytes of a tile's part, and of that of the rows */
    ROWS_PART = 2 * PART,
    NUMBERS = COLUMNS * 4,
    IMAGE = PARTS * PART + NUMBERS,
    SLOT = (IMAGE + 1023) / 1024 * 1024,
    SCORES = COLUMNS / 2, /* of a thread */
    SUM = HEAD_DIM / 2,
    ROW = HEAD_DIM * 4, /* bytes of fp32 */
};

extern __shared__ __align__(1024) char shared[];

PTX_INLINE uint32_t at_shared(int offset)
{
    return ptx_shared(shared) + (uint32_t)offset;
}

/* ---- items ---- */

/* Rows of a head, and the tiles of columns that some of them see.  s: of rows and columns instead of queries and keys.  head: of
 * the gradients; parts of a group have the same rows. */
typedef struct rows_item {
    fma_sequence s;
    int64_t batch, head;
    int row, left; /* the first; rows of the sequence from it on */
    int tile, tiles;
} rows_item;

/* Long items first: under a causal mask the low keys and the high queries have them. */
static __device__ __forceinline__ rows_item item_of(const attn__bf16x3_pass *p, int64_t item)
{
    const int64_t rest = item / p->tiles, tile = item % p->tiles;
    rows_item it;
    it.head = rest % p->heads;
    it.batch = rest / p->heads;
    it.row = (int)(KEYS ? tile : p->tiles - 1 - tile) * ROWS;
    it.s = fma_sequence_of(&p->problem, it.batch);
    if (KEYS) {
        const fma_sequence s = {it.s.first_kv, it.s.first_q, it.s.keys, it.s.queries, -it.s.hi, -it.s.lo};
        it.s = s;
    }
    it.left = it.s.queries - it.row;
    const int from = max(it.row + it.s.lo, 0), to = min(it.row + min(it.left, (int)ROWS) + it.s.hi, it.s.keys);
    it.tile = from / COLUMNS;
    it.tiles = it.left > 0 && from < to ? (to + COLUMNS - 1) / COLUMNS - it.tile : 0;
    return it;
}
/* The head of the rows themselves; in 32 bits, since the copying thread has few registers. */
static __device__ __forceinline__ int64_t rows_head(const attn__bf16x3_pass *p, int64_t head)
{
    return KEYS ? (uint32_t)head / (uint32_t)p->problem.parts : head;
}
/* Heads whose columns belong to a head of gradients: from .. to */
static __device__ __forceinline__ int64_t first_head(const attn__bf16x3_pass *p, int64_t head)
{
    const int64_t group = p->problem.heads_q / p->problem.heads_kv;
    return KEYS ? head * group : head / group;
}
static __device__ __forceinline__ int64_t end_head(const attn__bf16x3_pass *p, int64_t head)
{
    return first_head(p, head) + (KEYS ? p->problem.heads_q / p->problem.heads_kv : 1);
}

/* Where the image of a tile lies, from x or y on; columns: of the rows that pass. */
static __device__ __forceinline__ int64_t image_at(const attn__bf16x3_pass *p, bool columns, const rows_item *it,
                                                   int64_t head, int tile)
{
    const attn__bf16x3_side *side = columns ? &p->columns : &p->rows;
    const bool ragged = (columns != (KEYS != 0) ? p->problem.cu_kv : p->problem.cu_q) != nullptr;
    const int64_t first = columns ? it->s.first_kv : it->s.first_q;
    const int64_t slot = ragged ? first / COLUMNS + it->batch : it->batch * side->tiles;
    return (head * side->slots + slot + tile) * ATTN__BF16X3_IMAGE(HEAD_DIM);
}

/* A place in a ring of `slots`, after so many before. */
typedef struct ring_place {
    int slot;
    uint32_t round;
} ring_place;

static __device__ __forceinline__ void place_on(ring_place *at, const int slots)
{
    if (++at->slot == slots) {
        at->slot = 0;
        at->round++;
    }
}

/* ---- the warpgroups that compute: a thread has two rows 8 apart, and 2 neighbours of every 8 columns ---- */

static __device__ __forceinline__ int group_row(void)
{
    return APART ? ptx_thread_signed() / 128 * 64 : 0;
}
/* of those that stay */
static __device__ __forceinline__ int thread_row(void)
{
    const int thread = ptx_thread_signed();
    return (APART ? thread / 32 : thread / 32 % 4) * 16 + thread % 32 / 4;
}

/* The same operand; its descriptors are made anew from here. */
static __device__ __forceinline__ uint64_t operand_anew(uint64_t operand)
{
    return ptx_operand_at((uint64_t)ptx_uniform((uint32_t)operand), 0);
}

/* s = the warpgroup's rows by the columns; on its way when this returns.  At HEAD_DIM 256 the descriptors of all six products are
 * too many: the compiler keeps them, since three of six come again. */
static __device__ __forceinline__ void multiply_rows(float *s, int rows, int columns)
{
    uint64_t left = ptx_operand(anew(at_shared(rows + group_row() * 128)), 16);
    uint64_t right = ptx_operand(anew(at_shared(columns)), 16);
    ptx_wgmma_fence();
#pragma unroll
    for (int n = 0; n < 6; n++) {
        if (HEAD_DIM > 128 && n % 3 == 0) {
            left = operand_anew(left), right = operand_anew(right);
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            PRODUCT_S(s, ptx_operand_at(left, LEFT(n) * ROWS_PART + i / 4 * (ROWS * 128) + i % 4 * 32),
                      ptx_operand_at(right, RIGHT(n) * PART + i / 4 * (COLUMNS * 128) + i % 4 * 32), n + i > 0);
        }
    }
    ptx_wgmma_commit();
}

/* Weights or their gradients to parts, as the first operand of a product. */
static __device__ __forceinline__ void split_scores(uint32_t (*weights)[SCORES / 2], const float *s)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        split(&weights[0][i], &weights[1][i], &weights[2][i], s[2 * i], s[2 * i + 1]);
    }
}

/* total += weights by 64 of the columns' dims.  Each sum begins with zeros that are made of the sums added before, `after`: so
 * all of them take the same registers, since the compiler would else begin one before it has added the last. */
static __device__ __forceinline__ void add_panel(float *total, const uint32_t (*weights)[SCORES / 2], int panel,
                                                 const float *after, uint32_t zero)
{
    const uint64_t right = ptx_operand(anew(at_shared(panel)), COLUMNS * 128);
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[i] = __uint_as_float(__float_as_uint(after[i]) & zero);
    }
    ptx_hold(sum, 32);
    ptx_wgmma_fence();
#pragma unroll
    for (int n = 0; n < 6; n++) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; i++) {
            wgmma_64_rt(sum, weights[LEFT(n)] + 4 * i, ptx_operand_at(right, RIGHT(n) * PART + i * (16 * 128)));
        }
    }
    ptx_wgmma_commit();
    PTX_WGMMA_WAIT(0);
    ptx_hold(sum, 32);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        total[i] += sum[i];
    }
}

/* The numbers of this thread's two rows, and of its columns 8 i + {0, 1}. */
static __device__ __forceinline__ float2 row_numbers(int at)
{
    const float *numbers = (const float *)(shared + at) + thread_row();
    return make_float2(numbers[0], numbers[8]);
}
static __device__ __forceinline__ float2 column_numbers(int slot, int i)
{
    return *(const float2 *)(shared + slot + PARTS * PART + i * 32 + ptx_thread_signed() % 4 * 8);
}

/* Scores become weights.  numbers: those of the rows. */
static __device__ __forceinline__ void weigh(float *s, int numbers, int slot, float factor)
{
    const float2 row = row_numbers(numbers);
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
        const float2 base = column_numbers(slot, i);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float *x = &s[4 * i + c];
            *x = ptx_exp2(ptx_min_nan(fmaf(*x, factor, -((c < 2 ? row.x : row.y) + (c % 2 ? base.y : base.x))), 0.0f));
        }
    }
}

static __device__ __forceinline__ void hide(float *s, const fma_band *band)
{
    const int row = thread_row(), column = ptx_thread_signed() % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fma_sees(band, row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2) ? s[i] : 0.0f;
    }
}

/* ---- the way out ---- */

/* Sums to shared memory; added: to what lies there. */
static __device__ __forceinline__ void stage(int to, const float *sum, float scale, bool added)
{
    const int column = ptx_thread_signed() % 4 * 2;
#pragma unroll
    for (int i = 0; i < SUM; i += 2) {
        float2 *at = (float2 *)(shared + to + (thread_row() + i / 2 % 2 * 8) * ROW + (i / 4 * 8 + column) * 4);
        const float2 there = added ? *at : make_float2(0.0f, 0.0f);
        *at = make_float2(there.x + sum[i] * scale, there.y + sum[i + 1] * scale);
    }
}

/* What of dO is not finite, to the element of dV that sees it: itself. */
static __device__ __forceinline__ float mend(const attn__bf16x3_pass *p, const rows_item *it, int key, int column)
{
    float x = 0.0f;
    for (int64_t head = first_head(p, it->head); head < end_head(p, it->head); head++) {
        for (int query = max(key + it->s.lo, 0); query <= min(key + it->s.hi, it->s.keys - 1); query++) {
            const int64_t token = it->s.first_kv + query;
            const float y = ((const float *)
                                 p->dout.data)[it->batch * p->dout.batch + head * p->dout.head + token * p->dout.token + column];
            if (!fma_finite(y)) {
                const float lse =
                    ((const float *)p->lse.data)[it->batch * p->lse.batch + head * p->lse.head + token * p->lse.token];
                x += lse == -INFINITY ? 0.0f : y;
            }
        }
    }
    return x;
}

/* The rows' gradient from shared memory to memory. */
static __device__ __forceinline__ void put(const attn__bf16x3_pass *p, const rows_item *it, int from,
                                           const attn__fma_array *array, int dim, bool mended)
{
    const int chunks = (dim + 3) / 4;
    const int64_t at = it->batch * array->batch + it->head * array->head + (it->s.first_q + it->row) * array->token;
#pragma unroll 1
    for (int i = ptx_thread_signed(); array->data && i < min(it->left, (int)ROWS) * chunks; i += CONSUMERS) {
        const int row = i / chunks, column = i % chunks * 4;
        float4 x = fma_at(shared, from + row * ROW + column * 4);
        if (mended) {
            float *y = &x.x;
            for (int c = 0; c < 4 && column + c < dim; c++) {
                y[c] += mend(p, it, it->row + row, column + c);
            }
        }
        fma_put(array, at + row * array->token, column, dim, x, p->accumulate);
    }
}

#endif
