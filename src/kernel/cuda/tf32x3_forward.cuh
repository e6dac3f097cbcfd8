/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tf32x3_forward.cuh - attention of fp32 inputs on the tensor cores: each product is three of tf32.
 *
 * METHOD.  x = high + low, both tf32 (11 bits each), and x y = low_x high_y + high_x low_y + high_x high_y (Ootomo &
 * Yokota, arXiv 2203.03341).  high is rounded, low cut off: together they miss x by 2^-21 at most.  The tensor cores cut off where they should
 * round, which adds up over many keys: so P V of a tile of keys is made in registers of its own and added to O by a
 * rounded multiply-add, the one that lets O fade.  fma_queries.cuh has the rest.
 *
 * OPERANDS.  A warp has 16 queries; lane 4 g + t reads 16 bytes at once, and since sums may be made in any order, what
 * it reads is the operand as it comes: four dims of row g of Q or K for two steps of 8 dims; dims 4 g .. 4 g + 3 of the
 * keys 2 t and 2 t + 1 of V for four squares of 8 dims.  So P is used as the scores lie.  The rows' chunks are turned
 * such that both ways read without bank conflicts.
 *
 * An infinite input has no low part: it makes NaN where it is visible.
 *
 * The including file sets NAME, HEAD_DIM (multiple of 64), WARPS, BLOCKS, BLOCK_K as for fma_queries.cuh.
 *
 * COST.  16 queries x 64 keys at HEAD_DIM 64: 384 products of 16 x 8 x 8, and about 1200 other instructions.
 */
#define FMA_TURN(row) (((row) & 1) << 2 ^ ((row) >> 1 & 3) << 1)
#define ONE_BUFFER    0
#include "kernel/cuda/fma_tile.cuh"

enum {
    THREADS = WARPS * 32,
    WARP_ROWS = 16,
    BLOCK_Q = WARPS * WARP_ROWS,
    SQUARES = BLOCK_K / 8,   /* of a warp's scores */
    GROUPS = HEAD_DIM / 32,  /* of 4 squares of O */
    ROW = HEAD_DIM * 4,      /* bytes */
    AT_Q = 0,
    AT_K = AT_Q + BLOCK_Q * ROW,
    AT_V = AT_K + BLOCK_K * ROW,
    AT_LSE = AT_V + BLOCK_K * ROW,
};

extern __shared__ __align__(1024) char shared[];

/* rows g and g + 8 of the warp */
typedef struct work {
    float max[2], sum[2]; /* in powers of 2; the sum over this thread's columns alone */
    float o[GROUPS][4][4];
} work;
typedef struct scores {
    float s[SQUARES][4];
    float fade[2];
} scores;

/* ---- three products for one ---- */

/* count numbers as two tf32 each, the low one as the tensor cores cut it off; a NaN is in the low one */
static __device__ __forceinline__ void split(uint32_t *high, uint32_t *low, const float *x, const int count)
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        high[i] = (__float_as_uint(x[i]) + 0x1000u) & 0xffffe000u;
        low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
}
static __device__ __forceinline__ void multiply(float *d, const uint32_t *a_high, const uint32_t *a_low,
                                                const uint32_t *b_high, const uint32_t *b_low)
{
    ptx_mma_tf32(d, a_low, b_high);
    ptx_mma_tf32(d, a_high, b_low);
    ptx_mma_tf32(d, a_high, b_high);
}

/* ---- a tile of keys ---- */

static __device__ __forceinline__ int work_row(void)
{
    return ptx_thread_signed() / 32 * WARP_ROWS;
}

static __device__ __forceinline__ void prepare_queries(char *tile, float factor)
{
    const int chunks = HEAD_DIM / 4, thread = ptx_thread_signed();
#pragma unroll 1
    for (int row = thread / chunks; row < BLOCK_Q; row += THREADS / chunks) {
        float4 *x = (float4 *)(tile + row * ROW + fma_chunk(row, thread % chunks));
        *x = make_float4(x->x * factor, x->y * factor, x->z * factor, x->w * factor);
    }
}

static __device__ __forceinline__ void work_begin(work *w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w->max[i] = -INFINITY;
        w->sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < GROUPS * 16; i++) {
        w->o[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
}

/* s += Q K^T: 16 dims at once */
static __device__ __forceinline__ void multiply_keys(scores *s, int dim)
{
    const int lane = ptx_thread_signed() % 32, g = lane / 4, t = lane % 4, turn = FMA_TURN(g);
    const char *q = shared + AT_Q + (work_row() + g) * ROW, *k = shared + AT_K + g * ROW;
#pragma unroll 1
    for (int chunk = t; chunk < (dim + 15) / 16 * 4; chunk += 4) {
        const int at = (chunk ^ turn) << 4;
        const float4 a0 = fma_at(q, at), a1 = fma_at(q, at + 8 * ROW);
        const float a[8] = {a0.x, a1.x, a0.y, a1.y, a0.z, a1.z, a0.w, a1.w};
        uint32_t a_high[8], a_low[8];
        split(a_high, a_low, a, 8);
#pragma unroll
        for (int i = 0; i < SQUARES; i++) {
            const float4 x = fma_at(k, at + i * 8 * ROW);
            const float b[4] = {x.x, x.y, x.z, x.w};
            uint32_t b_high[4], b_low[4];
            split(b_high, b_low, b, 4);
            multiply(s->s[i], a_high, a_low, b_high, b_low);
            multiply(s->s[i], a_high + 4, a_low + 4, b_high + 2, b_low + 2);
        }
    }
}

static __device__ __forceinline__ void hide(scores *s, const fma_band *band)
{
    const int lane = ptx_thread_signed() % 32, row = work_row() + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < SQUARES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            s->s[i][c] = fma_sees(band, row + c / 2 * 8, i * 8 + column + c % 2) ? s->s[i][c] : -INFINITY;
        }
    }
}

/* over the 4 lanes of a row */
static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

static __device__ __forceinline__ void work_scores(work *w, scores *s, const fma_band *band, bool partial, int dim)
{
    multiply_keys(s, dim);
    if (partial) {
        hide(s, band);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SQUARES; i++) {
            most = fmaxf(most, fmaxf(s->s[i][2 * r], s->s[i][2 * r + 1]));
        }
        most = fmaxf(w->max[r], row_max(most));
        const float base = most == -INFINITY ? 0.0f : most;
        s->fade[r] = most > w->max[r] ? ptx_exp2(w->max[r] - base) : 1.0f;
        w->max[r] = most;
#pragma unroll
        for (int i = 0; i < SQUARES; i++) {
            s->s[i][2 * r] = ptx_exp2(s->s[i][2 * r] - base);
            s->s[i][2 * r + 1] = ptx_exp2(s->s[i][2 * r + 1] - base);
            sum += s->s[i][2 * r] + s->s[i][2 * r + 1];
        }
        w->sum[r] = w->sum[r] * s->fade[r] + sum;
    }
}

static __device__ __forceinline__ void work_values(work *w, const scores *s)
{
    const int lane = ptx_thread_signed() % 32, g = lane / 4, t = lane % 4;
    const char *v0 = shared + AT_V + 2 * t * ROW, *v1 = v0 + ROW;
    float sum[GROUPS][4][4] = {};
#pragma unroll
    for (int i = 0; i < SQUARES; i++) {
        const float a[4] = {s->s[i][0], s->s[i][2], s->s[i][1], s->s[i][3]};
        uint32_t a_high[4], a_low[4], b_high[8], b_low[8];
        split(a_high, a_low, a, 4);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int at = i * 8 * ROW + group * 128;
            const float4 x0 = fma_at(v0, at + fma_chunk(2 * t, g)), x1 = fma_at(v1, at + fma_chunk(2 * t + 1, g));
            const float b[8] = {x0.x, x1.x, x0.y, x1.y, x0.z, x1.z, x0.w, x1.w};
            split(b_high, b_low, b, 8);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply(sum[group][j], a_high, a_low, b_high + 2 * j, b_low + 2 * j);
            }
        }
        __syncwarp(); /* loads do not pass, so that not all of them are in registers at once */
    }
#pragma unroll
    for (int i = 0; i < GROUPS * 16; i++) {
        float *o = &w->o[i / 16][i / 4 % 4][i % 4];
        *o = fmaf(*o, s->fade[i % 4 / 2], sum[i / 16][i / 4 % 4][i % 4]);
    }
}

static __device__ __forceinline__ void work_end(work *w)
{
    const int lane = ptx_thread_signed() % 32, g = lane / 4, t = lane % 4;
    float *lse = (float *)(shared + AT_LSE);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(w->sum[r]), scale = sum == 0.0f ? 1.0f : 1.0f / sum;
        const int row = work_row() + g + 8 * r;
#pragma unroll
        for (int i = 0; i < GROUPS * 2; i++) { /* of 4 dims: those of the columns 2 t and 2 t + 1 of four squares */
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[j] = w->o[i / 2][j][2 * r + i % 2] * scale;
            }
            *(float4 *)(shared + AT_Q + row * ROW + i / 2 * 128 + (2 * t + i % 2) * 16) =
                make_float4(x[1], x[0], x[3], x[2]);
        }
        if (t == 0) {
            lse[row] = sum == 0.0f ? -INFINITY : (w->max[r] + log2f(sum)) * 0.693147180559945309f;
        }
    }
}

#include "kernel/cuda/fma_queries.cuh"
