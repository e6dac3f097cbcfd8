/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_forward.cuh - attention in fp32 by fused multiply-adds: one block takes a tile of queries through its keys.
 *
 * METHOD.  fma_queries.cuh; scores of BLOCK_K keys, running maximum (Milakov & Gimelshein, arXiv 1805.02867), weights,
 * and O += P V, all in registers but P, which a warp passes through 4 KiB of its own, 32 or 64 keys at a time.  A warp holds
 * whole rows.
 *
 * The including file sets
 *     NAME          of the kernel
 *     HEAD_DIM      width of the tiles: multiple of 32, at least both dims
 *     WARPS, BLOCKS warps of a block, blocks of a multiprocessor
 *     ROWS          rows of a thread: 8 or 4
 *     BLOCK_K       keys of a tile: 32, 64, 128
 *     FMA_DOWN      rows of lanes: 4 (the default) or 2
 *     SHARES        warps that share the columns of O of the same rows (each makes all scores): 1 or 2
 *     ONE_BUFFER    1: K and V lie in the same place in turn
 *
 * COST.  A tile of 64 keys at HEAD_DIM 64 is 8192 multiply-adds a thread, 512 loads of 16 bytes and about 350 others.
 */
#include "kernel/cuda/fma_tile.cuh"

enum {
    THREADS = WARPS * 32,
    WARP_ROWS = FMA_DOWN * ROWS,
    BLOCK_Q = WARPS / SHARES * WARP_ROWS,
    PIECE = 4 * FMA_ACROSS, /* keys of P at a time */
    COLUMNS = BLOCK_K / FMA_ACROSS,
    OUT = HEAD_DIM / SHARES / FMA_ACROSS, /* columns of O of a thread */
    ROW = HEAD_DIM * 4,          /* bytes */
    AT_Q = 0,
    AT_K = AT_Q + BLOCK_Q * ROW,
    AT_V = ONE_BUFFER ? AT_K : AT_K + BLOCK_K * ROW,
    AT_P = AT_V + BLOCK_K * ROW,
    AT_LSE = AT_P,
};

extern __shared__ __align__(1024) char shared[];

typedef struct work {
    float max[ROWS], sum[ROWS];   /* in powers of 2; the sum over this thread's columns alone */
    float o[ROWS * OUT];
} work;
typedef struct scores {
    float s[ROWS * COLUMNS];
} scores;

/* A thread's place: its warp's first row, its own, its first column. */
static __device__ __forceinline__ int work_row(void)
{
    return ptx_thread_signed() / 32 / SHARES * WARP_ROWS;
}

static __device__ __forceinline__ void prepare_queries(char *tile, float factor)
{
    fma_swap_own(tile, BLOCK_Q, HEAD_DIM, factor, THREADS);
}

static __device__ __forceinline__ void work_begin(work *w)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        w->max[i] = -INFINITY;
        w->sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROWS * OUT; i++) {
        w->o[i] = 0.0f;
    }
}

/* Scores become weights, and O and the sums fade where the maximum has risen. */
static __device__ __forceinline__ void weigh(work *w, float *s)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float most = s[i * COLUMNS];
#pragma unroll
        for (int j = 1; j < COLUMNS; j++) {
            most = fmaxf(most, s[i * COLUMNS + j]);
        }
        most = fmaxf(w->max[i], fma_max_tx(most));
        const float base = most == -INFINITY ? 0.0f : most;
        const float fade = most > w->max[i] ? ptx_exp2(w->max[i] - base) : 1.0f;
        w->max[i] = most;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float weight = ptx_exp2(s[i * COLUMNS + j] - base);
            s[i * COLUMNS + j] = weight;
            sum += weight;
        }
        w->sum[i] = w->sum[i] * fade + sum;
#pragma unroll
        for (int j = 0; j < OUT; j++) {
            w->o[i * OUT + j] *= fade;
        }
    }
}

/* Cells that are not visible */
static __device__ __forceinline__ void hide(float *s, const fma_band *band, int row, int tx)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const bool sees = fma_sees(band, row + FMA_ROW(i), 4 * tx + FMA_COLUMN(j));
            s[i * COLUMNS + j] = sees ? s[i * COLUMNS + j] : -INFINITY;
        }
    }
}

static __device__ __forceinline__ void work_scores(work *w, scores *weights, const fma_band *band, bool partial, int dim)
{
    const int lane = ptx_thread_signed() % 32, tx = fma_tx(lane), row = work_row() + 4 * fma_ty(lane);
    fma_rows_rows(weights->s, ROWS, COLUMNS, shared, AT_Q + row * ROW + fma_chunk(row, 0), ROW,
                  AT_K + 4 * tx * ROW + fma_chunk(4 * tx, 0), ROW, (dim + 7) / 8 * 2);
    if (partial) {
        hide(weights->s, band, row, tx);
    }
    weigh(w, weights->s);
}

/* By way of the warp's own piece of shared memory. */
static __device__ __forceinline__ void work_values(work *w, const scores *weights)
{
    const int thread = ptx_thread_signed(), warp = thread / 32, ty = fma_ty(thread % 32), tx = fma_tx(thread % 32);
    const int turn = fma_chunk(4 * ty, 0);
    const int piece = AT_P + warp * WARP_ROWS * PIECE * 4, v = AT_V + warp % SHARES * (ROW / SHARES);
#pragma unroll
    for (int part = 0; part < BLOCK_K / PIECE; part++) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float *x = weights->s + i * COLUMNS + part * 4;
            *(float4 *)(shared + piece + (4 * ty + FMA_ROW(i)) * PIECE * 4 + (16 * tx ^ turn ^ FMA_TURN_ROW(i))) =
                make_float4(x[0], x[1], x[2], x[3]);
        }
        __syncwarp();
        fma_rows_columns(w->o, ROWS, OUT, shared, piece + 4 * ty * PIECE * 4 + turn, PIECE * 4,
                         v + part * PIECE * ROW + 16 * tx, ROW, PIECE / 4, 0, true);
        __syncwarp();
    }
}

static __device__ __forceinline__ void work_end(work *w)
{
    const int thread = ptx_thread_signed(), share = thread / 32 % SHARES, tx = fma_tx(thread % 32);
    const int row = work_row() + 4 * fma_ty(thread % 32);
    float *lse = (float *)(shared + AT_LSE);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float sum = fma_sum_tx(w->sum[i]), scale = sum == 0.0f ? 1.0f : 1.0f / sum;
#pragma unroll
        for (int j = 0; j < OUT; j += 4) {
            const float *x = w->o + i * OUT + j;
            *(float4 *)(shared + AT_Q + (row + FMA_ROW(i)) * ROW + share * (ROW / SHARES) + 16 * tx +
                        FMA_COLUMN_PLACE(j)) =
                make_float4(x[1] * scale, x[0] * scale, x[3] * scale, x[2] * scale);
        }
        if (tx == 0 && share == 0) {
            lse[row + FMA_ROW(i)] = sum == 0.0f ? -INFINITY : (w->max[i] + log2f(sum)) * 0.693147180559945309f;
        }
    }
}

#include "kernel/cuda/fma_queries.cuh"
