/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward.cuh - gradients of attention of fp32 inputs on the tensor cores: each number is three of bf16, each product
 * six (bf16x3.cuh).
 *
 * METHOD.  Two passes over the pairs of queries and keys, so that nothing is added up in memory and the bits are the same every
 * time.  In one a block keeps a tile of queries and their dO and goes through the keys that they see,
 *
 *     S = Q K^T   P = exp(S - lse)   dS = P * (dO V^T - delta)   dQ += dS K
 *
 * and in the other a tile of keys and values, and goes through queries: S^T, dP^T, dS^T of the same form, dK += dS^T Q and
 * dV += P^T dO.  So what stays are the rows of both, here called x (Q or K) and y (dO or V), and what passes are columns:
 * seven products instead of the five of Dao et al. (arXiv 2205.14135), and one kernel.  All four tensors lie in parts, as
 * bf16x3_parts.cu has left them, with a number a row that is taken from the exponent (x) or from dP (y).
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
#include "kernel/cuda/bf16x3.cuh"
#include "kernel/cuda/fma_tile.cuh"

enum {
    CONSUMERS = 256,
    PRODUCERS = 128,
    COLUMNS = ATTN__BF16X3_TILE / HEAD_DIM, /* of a tile that passes */
    ROWS = 2 * COLUMNS,                     /* that stay */
    APART = ROWS == 128,                    /* the warpgroups have different rows */
    PANELS = HEAD_DIM / 64,
    PART = ATTN__BF16X3_TILE * 2, /* bytes of a tile's part, and of that of the rows */
    ROWS_PART = 2 * PART,
    NUMBERS = COLUMNS * 4,
    IMAGE = PARTS * PART + NUMBERS,
    SLOT = (IMAGE + 1023) / 1024 * 1024,
    X_SLOTS = 3,
    Y_SLOTS = 2,
    SCORES = COLUMNS / 2, /* of a thread */
    SUM = HEAD_DIM / 2,
    ROW = HEAD_DIM * 4, /* bytes of fp32 */
    AT_X = 0,           /* at the end dX and dY */
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

extern __shared__ __align__(1024) char shared[];

PTX_INLINE uint32_t at_shared(int offset)
{
    return ptx_shared(shared) + (uint32_t)offset;
}

/* ---- items ---- */

/* Rows of a head, and the tiles of columns that some of them see.  s: of rows and columns instead of queries and keys. */
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
    it.head = rest % p->rows.heads;
    it.batch = rest / p->rows.heads;
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
/* Heads whose columns belong to a head of rows: from .. to */
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
    return (head * side->slots + slot + tile) * ATTN__BF16X3_IMAGE;
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

/* ---- the thread that copies ---- */

static __device__ __forceinline__ void copy_rows(const attn__bf16x3_pass *p, const rows_item *it)
{
    const int images = min((it->left + COLUMNS - 1) / COLUMNS, 2);
    const int64_t from = image_at(p, false, it, it->head, it->row / COLUMNS);
    ptx_barrier_expect(at_shared(AT_ROWS_FULL), (uint32_t)(images * 2 * IMAGE));
#pragma unroll 1
    for (int image = 0; image < images; image++) {
        const char *x = p->rows.x + from + image * ATTN__BF16X3_IMAGE, *y = p->rows.y + from + image * ATTN__BF16X3_IMAGE;
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
            for (int tile = 0; tile < it.tiles; tile++, from += ATTN__BF16X3_IMAGE) {
                copy_tile(&at_x, X_SLOTS, AT_PASSING_X, AT_X_FULL, p->columns.x + from);
                copy_tile(&at_y, Y_SLOTS, AT_PASSING_Y, AT_Y_FULL, p->columns.y + from);
            }
        }
    }
}

/* ---- the warpgroups that compute ---- */

/* A thread has two rows 8 apart, and 2 neighbours of every 8 columns. */
typedef struct work {
    float dx[SUM], dy[KEYS ? SUM : 1];
    ring_place at_x, at_y;
} work;

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

/* s = the warpgroup's rows by the columns; on its way when this returns. */
static __device__ __forceinline__ void multiply_rows(float *s, int rows, int columns)
{
    const uint64_t left = ptx_operand(anew(at_shared(rows + group_row() * 128)), 16);
    const uint64_t right = ptx_operand(anew(at_shared(columns)), 16);
    ptx_wgmma_fence();
#pragma unroll
    for (int n = 0; n < 6; n++) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            PRODUCT_S(s, ptx_operand_at(left, LEFT(n) * ROWS_PART + i / 4 * (ROWS * 128) + i % 4 * 32),
                      ptx_operand_at(right, RIGHT(n) * PART + i / 4 * (COLUMNS * 128) + i % 4 * 32), n + i > 0);
        }
    }
    ptx_wgmma_commit();
}

/* total += s by the columns.  Each sum begins with zeros that are made of the sums added before, `after` and then total: so
 * all of them take the same registers, since the compiler would else begin one before it has added the last. */
static __device__ __forceinline__ void add_product(float *total, const float *s, int columns, const float *after, uint32_t zero)
{
    uint32_t weights[PARTS][SCORES / 2];
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        split(&weights[0][i], &weights[1][i], &weights[2][i], s[2 * i], s[2 * i + 1]);
    }
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const uint64_t right = ptx_operand(anew(at_shared(columns + panel * (COLUMNS * 128))), COLUMNS * 128);
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
            total[panel * 32 + i] += sum[i];
        }
        after = total + panel * 32;
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

/* Scores become weights. */
static __device__ __forceinline__ void weigh(float *s, int slot, float factor)
{
    const float2 row = row_numbers(AT_X_NUMBERS);
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

static __device__ __forceinline__ void hide(float *s, const fma_band *band)
{
    const int row = thread_row(), column = ptx_thread_signed() % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fma_sees(band, row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2) ? s[i] : 0.0f;
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
        weigh(s, x, p->problem.factor);
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
