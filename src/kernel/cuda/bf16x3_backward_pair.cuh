/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward_pair.cuh - gradients of attention of fp32 inputs with up to 256 dims on the tensor cores, by clusters of two
 * blocks.
 *
 * METHOD.  That of bf16x3_backward.cuh, from where x and y have their names.  Three parts of 64 rows of 256 dims are 96 KB, and
 * the sums of 64 rows of a gradient are 128 registers of a thread: a block has room for one tensor and one gradient.  So of two
 * blocks one has all of x, the first of the cluster, and the other all of y, of the same rows and columns:
 *
 *     x:  S = X x^T   P = exp(S - lse)    gives P, takes t    dS = P * t    dX += dS x
 *     y:  t = Y y^T - delta               gives t, takes P                  dY += P y
 *
 * where the pass that keeps queries needs no dY, and the second block only gives.
 *
 * WHO DOES WHAT.  In both blocks two warpgroups compute, every other tile of columns each, and their sums meet at the end.  A
 * thread gives and takes the numbers of the thread of the same number in the other block: they have the same rows and columns,
 * and nothing is reordered.  They go straight into the other's shared memory, to a place of the warpgroup for one tile, whose
 * barrier counts their bytes; when a warp has read its own there, it tells the giver's barrier.  One thread a block copies tiles.
 *
 * A warpgroup has its tile from the scores to the last product, and the other has another: the ring is two tiles.  So that the
 * next one comes meanwhile, what is given back and filled again are panels of 64 dims.
 *
 * NOT FINITE.  As in bf16x3_backward.cuh.  P goes over hidden, t does not: dS is hidden again.
 *
 * HEAD_DIM is 256, PRODUCT_S has 32 columns.
 *
 * COST.  A tile of 64 rows x 32 columns is 1536 cycles of the tensor cores for each product, for scores half as much again, since
 * they wait for shared memory: 3840 in each block, and 2304 in the second if queries stay.  8 KB cross over each way.
 */
#include "kernel/cuda/bf16x3_pass.cuh"

enum {
    SLOTS = 2,
    EXCHANGE = 128 * SCORES * 4, /* bytes that a warpgroup takes of a tile */
    AT_ROWS = 0,                 /* at the end their gradient */
    AT_RING = AT_ROWS + PARTS * ROWS_PART,
    AT_EXCHANGE = AT_RING + SLOTS * SLOT, /* of each warpgroup */
    AT_NUMBERS = AT_EXCHANGE + 2 * EXCHANGE,
    AT_ROWS_FULL = AT_NUMBERS + ROWS * 4,
    AT_ROWS_EMPTY = AT_ROWS_FULL + 8,
    AT_FULL = AT_ROWS_EMPTY + 8,              /* of each slot */
    AT_EMPTY = AT_FULL + SLOTS * 8,           /* of each panel of each slot */
    AT_GIVEN = AT_EMPTY + SLOTS * PANELS * 8, /* of each warpgroup: what the other block gives is there */
    AT_TAKEN = AT_GIVEN + 2 * 8,              /* of each warpgroup: the other block has read what this one gave */
};

PTX_INLINE bool has_x(void)
{
    return ptx_rank() == 0;
}

/* ---- the thread that copies ---- */

static __device__ __forceinline__ void copy_rows(const attn__bf16x3_pass *p, const char *images, const rows_item *it)
{
    const int count = min((it->left + COLUMNS - 1) / COLUMNS, 2);
    const char *image = images + image_at(p, false, it, rows_head(p, it->head), it->row / COLUMNS);
    ptx_barrier_expect(at_shared(AT_ROWS_FULL), (uint32_t)(count * IMAGE));
#pragma unroll 1
    for (int n = 0; n < count; n++, image += ATTN__BF16X3_IMAGE(HEAD_DIM)) {
#pragma unroll 1
        for (int i = 0; i < PARTS * PANELS; i++) {
            ptx_load_bulk(at_shared(AT_ROWS + i * (ROWS * 128) + n * (COLUMNS * 128)), image + i * (COLUMNS * 128), COLUMNS * 128,
                          at_shared(AT_ROWS_FULL));
        }
        ptx_load_bulk(at_shared(AT_NUMBERS + n * NUMBERS), image + PARTS * PART, NUMBERS, at_shared(AT_ROWS_FULL));
    }
}

/* Panel by panel, as they become empty; the numbers come with the first. */
static __device__ __forceinline__ void copy_tile(ring_place *at, const char *image)
{
    const uint32_t full = at_shared(AT_FULL + at->slot * 8), to = at_shared(AT_RING + at->slot * SLOT);
#pragma unroll 1
    for (int panel = 0; panel < PANELS; panel++) {
        ptx_barrier_wait(at_shared(AT_EMPTY + (at->slot * PANELS + panel) * 8), (at->round & 1) ^ 1);
        if (panel == 0) {
            ptx_barrier_expect(full, IMAGE);
            ptx_load_bulk(to + PARTS * PART, image + PARTS * PART, NUMBERS, full);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int offset = part * PART + panel * (COLUMNS * 128);
            ptx_load_bulk(to + offset, image + offset, COLUMNS * 128, full);
        }
    }
    place_on(at, SLOTS);
}

static __device__ __forceinline__ void produce(const attn__bf16x3_pass *p)
{
    const char *rows = has_x() ? p->rows.x : p->rows.y, *columns = has_x() ? p->columns.x : p->columns.y;
    ring_place at = {0, 0};
    uint32_t round = 0;
#pragma unroll 1
    for (int64_t item = blockIdx.x / 2; item < p->items; item += gridDim.x / 2) {
        const rows_item it = item_of(p, item);
        if (it.left <= 0) {
            continue;
        }
        ptx_barrier_wait(at_shared(AT_ROWS_EMPTY), (round & 1) ^ 1);
        copy_rows(p, rows, &it);
        round++;
#pragma unroll 1
        for (int64_t head = first_head(p, it.head); head < end_head(p, it.head); head++) {
            const char *image = columns + image_at(p, true, &it, head, it.tile);
#pragma unroll 1
            for (int tile = 0; tile < it.tiles; tile++, image += ATTN__BF16X3_IMAGE(HEAD_DIM)) {
                copy_tile(&at, image);
            }
        }
    }
}

/* ---- the warpgroups that compute ---- */

typedef struct work {
    float sum[SUM];
    bool has_x;
    ring_place at;
    uint32_t exchanges; /* of this warpgroup, so far */
} work;

static __device__ __forceinline__ int its_group(void)
{
    return ptx_thread_signed() / 128;
}
/* The address in the other block. */
static __device__ __forceinline__ uint32_t at_other(int offset)
{
    return ptx_remote(at_shared(offset), ptx_rank() ^ 1);
}
/* Where a thread's numbers lie, in the block that takes them; the next four 2 KB further. */
static __device__ __forceinline__ int exchange_at(void)
{
    return AT_EXCHANGE + its_group() * EXCHANGE + ptx_thread_signed() % 128 * 16;
}

/* To the other block, when it has read those before. */
static __device__ __forceinline__ void give(const work *w, const float *s)
{
    ptx_barrier_wait(at_shared(AT_TAKEN + its_group() * 8), (w->exchanges & 1) ^ 1);
    const uint32_t to = at_other(exchange_at()), given = at_other(AT_GIVEN + its_group() * 8);
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
        ptx_store_remote_f32x4(to + i * (128 * 16), s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], given);
    }
}

/* From the other block: t, by which P becomes dS, or P. */
static __device__ __forceinline__ void take(const work *w, float *s)
{
    const uint32_t given = at_shared(AT_GIVEN + its_group() * 8);
    if (ptx_thread_signed() % 128 == 0) {
        ptx_barrier_expect(given, EXCHANGE);
    }
    ptx_barrier_wait(given, w->exchanges & 1);
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
        const float4 x = *(const float4 *)(shared + exchange_at() + i * (128 * 16));
        s[4 * i] = w->has_x ? s[4 * i] * x.x : x.x;
        s[4 * i + 1] = w->has_x ? s[4 * i + 1] * x.y : x.y;
        s[4 * i + 2] = w->has_x ? s[4 * i + 2] * x.z : x.z;
        s[4 * i + 3] = w->has_x ? s[4 * i + 3] * x.w : x.w;
    }
    __syncwarp();
    if (ptx_thread_signed() % 32 == 0) {
        ptx_barrier_arrive_remote(at_other(AT_TAKEN + its_group() * 8));
    }
}

/* The warp has read a panel of the slot. */
static __device__ __forceinline__ void release(const ring_place *at, int panel)
{
    __syncwarp();
    if (ptx_thread_signed() % 32 == 0) {
        ptx_barrier_arrive(at_shared(AT_EMPTY + (at->slot * PANELS + panel) * 8));
    }
}

/* dP becomes t */
static __device__ __forceinline__ void subtract(float *s, int slot)
{
    const float2 row = row_numbers(AT_NUMBERS);
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
        const float2 base = column_numbers(slot, i);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            s[4 * i + c] -= (c < 2 ? row.x : row.y) + (c % 2 ? base.y : base.x);
        }
    }
}

/* P or t of a tile, to the other block if it wants it; it lies at `slot`. */
static __device__ __forceinline__ void make_scores(const attn__bf16x3_pass *p, const work *w, float *s, int slot,
                                                   const fma_band *band, bool partial)
{
    ptx_barrier_wait(at_shared(AT_FULL + w->at.slot * 8), w->at.round & 1);
    multiply_rows(s, AT_ROWS, slot);
    PTX_WGMMA_WAIT(0);
    ptx_hold(s, SCORES);
    if (w->has_x) {
        weigh(s, AT_NUMBERS, slot, p->problem.factor);
        if (partial) {
            hide(s, band);
        }
    } else {
        subtract(s, slot);
    }
    if (KEYS || !w->has_x) {
        give(w, s);
    }
}

/* Some of the tile is seen: between what a row sees and what the next one sees there is no hole. */
static __device__ __forceinline__ void compute_tile(const attn__bf16x3_pass *p, work *w, const rows_item *it, int tile)
{
    const fma_band band = fma_band_of(&it->s, it->row, tile * COLUMNS);
    const bool partial = !fma_all(&band, 0, ROWS - 1, COLUMNS);
    const int slot = AT_RING + w->at.slot * SLOT;
    float s[SCORES];
    make_scores(p, w, s, slot, &band, partial);
    if (KEYS || w->has_x) {
        take(w, s);
        if (w->has_x && partial) {
            hide(s, &band);
        }
        uint32_t weights[PARTS][SCORES / 2];
        split_scores(weights, s);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            add_panel(w->sum + panel * 32, weights, slot + panel * (COLUMNS * 128), w->sum + (panel + PANELS - 1) % PANELS * 32,
                      p->zero);
            release(&w->at, panel);
        }
    } else {
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            release(&w->at, panel);
        }
    }
    w->exchanges++;
}

static __device__ __forceinline__ void compute(const attn__bf16x3_pass *p, work *w, const rows_item *it)
{
    const int heads = KEYS ? (int)(p->problem.heads_q / p->problem.heads_kv) : 1;
    int tile = it->tile;
#pragma unroll 1
    for (int n = 0; n < heads * it->tiles; n++) {
        if (n % 2 == its_group()) {
            compute_tile(p, w, it, tile);
        }
        place_on(&w->at, SLOTS);
        if (++tile == it->tile + it->tiles) {
            tile = it->tile;
        }
    }
}

static __device__ __forceinline__ void put_gradient(const attn__bf16x3_pass *p, const work *w, const rows_item *it)
{
    ptx_sync(1, CONSUMERS); /* nobody reads the rows any more */
    if (KEYS || w->has_x) {
        for (int turn = 0; turn < 2; turn++) {
            if (turn == its_group()) {
                stage(AT_ROWS, w->sum, w->has_x ? p->problem.scale : 1.0f, turn > 0);
            }
            ptx_sync(1, CONSUMERS);
        }
        if (w->has_x) {
            put(p, it, AT_ROWS, &p->dx, p->problem.dim_qk, false);
        } else {
            put(p, it, AT_ROWS, &p->dy, p->problem.dim_v, *p->stained != 0);
        }
    }
    ptx_fence_async();
    ptx_barrier_arrive(at_shared(AT_ROWS_EMPTY));
}

static __device__ __forceinline__ void consume(const attn__bf16x3_pass *p)
{
    work w;
    uint32_t round = 0;
    w.has_x = has_x();
    w.at.slot = 0;
    w.at.round = w.exchanges = 0;
#pragma unroll 1
    for (int64_t item = blockIdx.x / 2; item < p->items; item += gridDim.x / 2) {
        rows_item it = item_of(p, item);
        if (it.left <= 0) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < SUM; i++) {
            w.sum[i] = 0.0f;
        }
        ptx_barrier_wait(at_shared(AT_ROWS_FULL), round++ & 1);
        compute(p, &w, &it);
        it = item_of(p, item);
        put_gradient(p, &w, &it);
    }
}

static __device__ __forceinline__ void init_barriers(void)
{
    ptx_barrier_init(at_shared(AT_ROWS_FULL), 1);
    ptx_barrier_init(at_shared(AT_ROWS_EMPTY), CONSUMERS);
    for (int i = 0; i < SLOTS; i++) {
        ptx_barrier_init(at_shared(AT_FULL + i * 8), 1);
    }
    for (int i = 0; i < SLOTS * PANELS; i++) {
        ptx_barrier_init(at_shared(AT_EMPTY + i * 8), 4); /* the warps of a warpgroup */
    }
    for (int group = 0; group < 2; group++) {
        ptx_barrier_init(at_shared(AT_GIVEN + group * 8), 1);
        ptx_barrier_init(at_shared(AT_TAKEN + group * 8), 4);
    }
    ptx_barrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    NAME(const __grid_constant__ attn__bf16x3_pass p)
{
    if (threadIdx.x == 0) {
        init_barriers();
    }
    ptx_cluster_sync();
    if (threadIdx.x >= CONSUMERS) {
        PTX_REGISTERS_LESS(40); /* the copying thread needs more than the 24 that 240 would leave */
        if (threadIdx.x == CONSUMERS) {
            produce(&p);
        }
    } else {
        PTX_REGISTERS_MORE(232);
        consume(&p);
    }
    ptx_cluster_sync(); /* the other block may still arrive at this one's barriers */
}
