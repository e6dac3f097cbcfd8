/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward.cuh - gradients of attention of fp32 inputs on the tensor cores: each number is three of bf16, each product
 * six (bf16x3.cuh).
 *
 * METHOD.  Two passes over the pairs of queries and keys, so that blocks add up nothing in memory and the bits are the same every
 * time.  In one a block keeps a tile of queries and their dO and goes through the keys that they see,
 *
 *     S = Q K^T   P = exp(S - lse)   dS = P * (dO V^T - delta)   dQ += dS K
 *
 * and in the other a tile of keys and values, and goes through queries: S^T, dP^T, dS^T of the same form, dK += dS^T Q and
 * dV += P^T dO.  So what stays are the rows of both, here called x (Q or K) and y (dO or V), and what passes are columns:
 * seven products instead of the five of Dao et al. (arXiv 2205.14135), and one kernel; for more than 128 dims that is
 * bf16x3_backward_pair.cuh.  All four tensors lie in parts, as bf16x3_parts.cu has left them, with a number a row that is taken
 * from the exponent (x) or from dP (y).
 *
 * P and dS go from the sums of one product to the first operand of the next in registers, where they are split.  The tensor
 * cores cut off where they should round, so what a tile of columns gives is made in registers of its own, and added.
 *
 * WHO DOES WHAT.  Two warpgroups compute, each with both products' sums of 64 rows: different rows if HEAD_DIM is 64; if it is
 * 128 the same, and every other tile of columns, and their sums meet at the end.  One thread copies tiles.
 *
 * NOT FINITE.  bf16x3_parts.cu has told; dV gets it from a second look at dO.
 *
 * The including file sets
 *     NAME, KEYS         the kernel; 1 if keys stay, 0 if queries do
 *     HEAD_DIM           width of the tiles: 64 or 128
 *     PRODUCT_S          of wgmma.cuh, 4096 / HEAD_DIM columns
 *
 * COST.  At HEAD_DIM 128 a tile of 64 rows x 32 columns is 768 cycles of the tensor cores for each product, half as much again for
 * S and dP, which wait for shared memory.
 */
#include "kernel/cuda/bf16x3_pass.cuh"

enum {
    X_SLOTS = 3,
    Y_SLOTS = 2,
    AT_X = 0, /* at the end dX and dY */
    AT_Y = AT_X + PARTS * ROWS_PART,
    AT_PASSING_X = AT_Y + PARTS * ROWS_PART,
    AT_PASSING_Y = AT_PASSING_X + X_SLOTS * SLOT,
    AT_X_NUMBERS = AT_PASSING_Y + Y_SLOTS * SLOT,
    AT_Y_NUMBERS = AT_X_NUMBERS + ROWS * 4,
    AT_ROWS_FULL = AT_Y_NUMBERS + ROWS * 4,
    AT_ROWS_EMPTY = AT_ROWS_FULL + 8,
    AT_X_FULL = AT_ROWS_EMPTY + 8,
    AT_Y_FULL = AT_X_FULL + X_SLOTS * 16, /* of each slot: it is full; it is empty */
};

/* ---- the thread that copies ---- */

static __device__ __forceinline__ void copy_rows(const attn__bf16x3_pass *p, const rows_item *it)
{
    const int images = min((it->left + COLUMNS - 1) / COLUMNS, 2);
    const int64_t from = image_at(p, false, it, rows_head(p, it->head), it->row / COLUMNS);
    ptx_barrier_expect(at_shared(AT_ROWS_FULL), (uint32_t)(images * 2 * IMAGE));
#pragma unroll 1
    for (int image = 0; image < images; image++) {
        const int64_t at = from + image * ATTN__BF16X3_IMAGE(HEAD_DIM);
        const char *x = p->rows.x + at, *y = p->rows.y + at;
#pragma unroll 1
        for (int i = 0; i < PARTS * PANELS; i++) {
            const int to = i * (ROWS * 128) + image * (COLUMNS * 128), panel = i * (COLUMNS * 128);
            ptx_load_bulk(at_shared(AT_X + to), x + panel, COLUMNS * 128, at_shared(AT_ROWS_FULL));
            ptx_load_bulk(at_shared(AT_Y + to), y + panel, COLUMNS * 128, at_shared(AT_ROWS_FULL));
        }
        ptx_load_bulk(at_shared(AT_X_NUMBERS + image * NUMBERS), x + PARTS * PART, NUMBERS, at_shared(AT_ROWS_FULL));
        ptx_load_bulk(at_shared(AT_Y_NUMBERS + image * NUMBERS), y + PARTS * PART, NUMBERS, at_shared(AT_ROWS_FULL));
    }
}

static __device__ __forceinline__ void copy_tile(ring_place *at, const int slots, int ring, int barriers, const char *image)
{
    const uint32_t full = at_shared(barriers + at->slot * 16);
    ptx_barrier_wait(full + 8, (at->round & 1) ^ 1);
    ptx_barrier_expect(full, IMAGE);
    ptx_load_bulk(at_shared(ring + at->slot * SLOT), image, IMAGE, full);
    place_on(at, slots);
}

static __device__ __forceinline__ void produce(const attn__bf16x3_pass *p)
{
    ring_place at_x = {0, 0}, at_y = {0, 0};
    uint32_t round = 0;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p->items; item += gridDim.x) {
        const rows_item it = item_of(p, item);
        if (it.left <= 0) {
            continue;
        }
        ptx_barrier_wait(at_shared(AT_ROWS_EMPTY), (round & 1) ^ 1);
        copy_rows(p, &it);
        round++;
#pragma unroll 1
        for (int64_t head = first_head(p, it.head); head < end_head(p, it.head); head++) {
            int64_t from = image_at(p, true, &it, head, it.tile);
#pragma unroll 1
            for (int tile = 0; tile < it.tiles; tile++, from += ATTN__BF16X3_IMAGE(HEAD_DIM)) {
                copy_tile(&at_x, X_SLOTS, AT_PASSING_X, AT_X_FULL, p->columns.x + from);
                copy_tile(&at_y, Y_SLOTS, AT_PASSING_Y, AT_Y_FULL, p->columns.y + from);
            }
        }
    }
}

/* ---- the warpgroups that compute ---- */

typedef struct work {
    float dx[SUM], dy[KEYS ? SUM : 1];
    ring_place at_x, at_y;
} work;

static __device__ __forceinline__ void wait_full(int barriers, const ring_place *at)
{
    ptx_barrier_wait(at_shared(barriers + at->slot * 16), at->round & 1);
}
/* The warp has read the slot. */
static __device__ __forceinline__ void release(int barriers, const ring_place *at)
{
    __syncwarp();
    if (ptx_thread_signed() % 32 == 0) {
        ptx_barrier_arrive(at_shared(barriers + at->slot * 16 + 8));
    }
}

/* total += s by the columns, after sums that lie in `after` */
static __device__ __forceinline__ void add_product(float *total, const float *s, int columns, const float *after, uint32_t zero)
{
    uint32_t weights[PARTS][SCORES / 2];
    split_scores(weights, s);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        add_panel(total + panel * 32, weights, columns + panel * (COLUMNS * 128), after, zero);
        after = total + panel * 32;
    }
}

/* dp becomes dS */
static __device__ __forceinline__ void slope(const float *s, float *dp, int slot)
{
    const float2 row = row_numbers(AT_Y_NUMBERS);
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
        const float2 base = column_numbers(slot, i);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            dp[4 * i + c] = s[4 * i + c] * (dp[4 * i + c] - ((c < 2 ? row.x : row.y) + (c % 2 ? base.y : base.x)));
        }
    }
}

static __device__ __forceinline__ void compute_tile(const attn__bf16x3_pass *p, work *w, const rows_item *it, int tile)
{
    const fma_band band = fma_band_of(&it->s, it->row, tile * COLUMNS);
    const int first = group_row(), x = AT_PASSING_X + w->at_x.slot * SLOT, y = AT_PASSING_Y + w->at_y.slot * SLOT;
    wait_full(AT_X_FULL, &w->at_x);
    if (!fma_none(&band, first, first + 63, COLUMNS)) {
        const bool partial = !fma_all(&band, first, first + 63, COLUMNS);
        float s[SCORES], dp[SCORES];
        multiply_rows(s, AT_X, x);
        wait_full(AT_Y_FULL, &w->at_y);
        multiply_rows(dp, AT_Y, y);
        PTX_WGMMA_WAIT(1);
        ptx_hold(s, SCORES);
        weigh(s, AT_X_NUMBERS, x, p->problem.factor);
        if (partial) {
            hide(s, &band);
        }
        PTX_WGMMA_WAIT(0);
        ptx_hold(dp, SCORES);
        slope(s, dp, y);
        if (partial) {
            hide(dp, &band);
        }
        if (KEYS) {
            add_product(w->dy, s, y, w->dx + SUM - 32, p->zero);
        }
        release(AT_Y_FULL, &w->at_y);
        add_product(w->dx, dp, x, KEYS ? w->dy + SUM - 32 : w->dx, p->zero);
    } else {
        wait_full(AT_Y_FULL, &w->at_y);
        release(AT_Y_FULL, &w->at_y);
    }
    release(AT_X_FULL, &w->at_x);
}

static __device__ __forceinline__ void compute(const attn__bf16x3_pass *p, work *w, const rows_item *it)
{
    const int heads = KEYS ? (int)(p->problem.heads_q / p->problem.heads_kv) : 1, group = ptx_thread_signed() / 128;
    int tile = it->tile;
#pragma unroll 1
    for (int n = 0; n < heads * it->tiles; n++) {
        if (APART || n % 2 == group) {
            compute_tile(p, w, it, tile);
        }
        place_on(&w->at_x, X_SLOTS);
        place_on(&w->at_y, Y_SLOTS);
        if (++tile == it->tile + it->tiles) {
            tile = it->tile;
        }
    }
}

/* ---- the way out ---- */

static __device__ __forceinline__ void put_gradients(const attn__bf16x3_pass *p, const work *w, const rows_item *it)
{
    const int group = ptx_thread_signed() / 128;
    ptx_sync(1, CONSUMERS); /* nobody reads the rows any more */
    for (int turn = 0; turn < (APART ? 1 : 2); turn++) {
        if (APART || turn == group) {
            stage(AT_X, w->dx, p->problem.scale, turn > 0);
            if (KEYS) {
                stage(AT_Y, w->dy, 1.0f, turn > 0);
            }
        }
        ptx_sync(1, CONSUMERS);
    }
    put(p, it, AT_X, &p->dx, p->problem.dim_qk, false);
    if (KEYS) {
        put(p, it, AT_Y, &p->dy, p->problem.dim_v, *p->stained != 0);
    }
    ptx_fence_async();
    ptx_barrier_arrive(at_shared(AT_ROWS_EMPTY));
}

static __device__ __forceinline__ void consume(const attn__bf16x3_pass *p)
{
    work w;
    uint32_t round = 0;
    w.at_x.slot = w.at_y.slot = 0;
    w.at_x.round = w.at_y.round = 0;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p->items; item += gridDim.x) {
        rows_item it = item_of(p, item);
        if (it.left <= 0) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < SUM; i++) {
            w.dx[i] = 0.0f;
            if (KEYS) {
                w.dy[i] = 0.0f;
            }
        }
        ptx_barrier_wait(at_shared(AT_ROWS_FULL), round++ & 1);
        compute(p, &w, &it);
        it = item_of(p, item);
        put_gradients(p, &w, &it);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    NAME(const __grid_constant__ attn__bf16x3_pass p)
{
    if (threadIdx.x == 0) {
        ptx_barrier_init(at_shared(AT_ROWS_FULL), 1);
        ptx_barrier_init(at_shared(AT_ROWS_EMPTY), CONSUMERS);
        for (int slot = 0; slot < X_SLOTS + Y_SLOTS; slot++) {
            ptx_barrier_init(at_shared(AT_X_FULL + slot * 16), 1);
            ptx_barrier_init(at_shared(AT_X_FULL + slot * 16 + 8), (APART ? CONSUMERS : CONSUMERS / 2) / 32);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        PTX_REGISTERS_LESS(24);
        if (threadIdx.x == CONSUMERS) {
            produce(&p);
        }
    } else {
        PTX_REGISTERS_MORE(240);
        consume(&p);
    }
}
