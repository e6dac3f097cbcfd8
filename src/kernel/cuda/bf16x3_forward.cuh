/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_forward.cuh - attention of fp32 inputs on the tensor cores: each number is three of bf16, each product six.
 *
 * METHOD.  Parts and their products are those of bf16x3.cuh.  The tensor cores cut off where they should round, which adds up
 * over many keys: so P V of a tile of keys is made in registers of its own and added to O by a rounded multiply-add, the one
 * that lets O fade.
 *
 * WHO DOES WHAT.  Two warpgroups have 64 queries each, FlashAttention's way (Dao et al., arXiv 2205.14135).  A third reads
 * K and V, and puts their parts into a ring of tiles in shared memory, K and V in turn; Q's parts stay there all the time.
 * P is split in registers.  At HEAD_DIM 256, where 128 queries have no room, both warpgroups have the same 64, and each half of
 * the dims: they add up their sums over the dims of Q and K through shared memory, have the same weights then, and make
 * half of the columns of O.
 *
 * NOT FINITE.  Such numbers of V become 0, and the rows that see them get them when all sums are made (fma_output.cuh).  An
 * infinite number of Q or K has NaN for its second part: it makes NaN where it is visible.
 *
 * The including file sets
 *     NAME, HEAD_DIM     the kernel, the width of its tiles: 64, 128 or 256
 *     BLOCK_K, STAGES    keys of a tile, tiles of the ring
 *     PRODUCT_S, PRODUCT_O  of wgmma.cuh, BLOCK_K columns and those of a warpgroup, HEAD_DIM or 128
 *
 * COST.  128 queries x 64 keys at HEAD_DIM 128: 6144 cycles of the tensor cores, about 700 instructions of a thread beside them.
 */
#include "kernel/cuda/bf16x3.cuh"

enum {
    CONSUMERS = 256,
    PRODUCERS = 128,
    HALVES = HEAD_DIM == 256, /* each warpgroup has half of the dims */
    BLOCK_Q = HALVES ? 64 : 128,
    WIDTH = HALVES ? HEAD_DIM / 2 : HEAD_DIM, /* dims of a warpgroup */
    CHUNKS = HEAD_DIM / 8,  /* of a row: what becomes 16 bytes of a part */
    ROW = HEAD_DIM * 4,     /* bytes of fp32 */
    Q_PART = BLOCK_Q * HEAD_DIM * 2,
    PART = BLOCK_K * HEAD_DIM * 2,
    STAGE = PARTS * PART,
    SCORES = BLOCK_K / 2,   /* of a thread */
    OUTPUT = WIDTH / 2,
    EXCHANGE = HALVES ? 128 * SCORES * 4 : 0, /* bytes of a warpgroup's scores */
    AT_Q = 0,               /* at the end O */
    AT_RING = AT_Q + PARTS * Q_PART,
    AT_LSE = AT_RING + STAGES * STAGE,
    AT_BARRIERS = AT_LSE + BLOCK_Q * 4, /* two a stage: it is full; it is empty */
    AT_CLEANED = AT_BARRIERS + STAGES * 16, /* of each stage the last round in which V was not finite */
    AT_EXCHANGE = (AT_CLEANED + STAGES * 4 + 127) / 128 * 128, /* two buffers in turn, each of both warpgroups' scores */
    OUTPUT_THREADS = CONSUMERS,
};

extern __shared__ __align__(1024) char shared[];

#define OUTPUT_SYNC() ptx_sync(1, CONSUMERS)
#include "kernel/cuda/fma_output.cuh"

/* ---- items ---- */

/* A tile of queries of a head, and the keys that some of them see: from `key`, a multiple of BLOCK_K, to before `end`. */
typedef struct queries_item {
    fma_sequence s;
    int64_t batch, head, head_kv;
    int query, left; /* the first; queries of the sequence from it on */
    int key, end;
} queries_item;

static __device__ __forceinline__ queries_item item_of(const attn__fma_forward *p, int64_t item)
{
    const attn__fma_problem *problem = &p->problem;
    const int64_t rest = item / problem->heads_q;
    queries_item it;
    it.head = item % problem->heads_q;
    it.head_kv = it.head / (problem->heads_q / problem->heads_kv);
    it.batch = rest % problem->batch;
    it.query = (int)(p->tiles - 1 - rest / problem->batch) * BLOCK_Q;
    it.s = fma_sequence_of(problem, it.batch);
    it.left = it.s.queries - it.query;
    it.key = max(it.query + it.s.lo, 0);
    it.key -= it.key % BLOCK_K;
    it.end = it.left > 0 ? min(it.query + min(it.left, (int)BLOCK_Q) + it.s.hi, it.s.keys) : 0;
    return it;
}

/* A stage of the ring, and how often the turn has come round, counted from 1. */
typedef struct ring_turn {
    int stage, round;
} ring_turn;

static __device__ __forceinline__ void turn_on(ring_turn *t)
{
    if (++t->stage == STAGES) {
        t->stage = 0;
        t->round++;
    }
}
static __device__ __forceinline__ int *cleaned_round(const ring_turn *t)
{
    return (int *)(shared + AT_CLEANED) + t->stage;
}
static __device__ __forceinline__ uint32_t full_barrier(const ring_turn *t)
{
    return ptx_shared(shared) + AT_BARRIERS + t->stage * 16;
}
static __device__ __forceinline__ void wait_full(const ring_turn *t)
{
    ptx_barrier_wait(full_barrier(t), (t->round & 1) ^ 1);
}

/* ---- the warpgroup that fills the ring ---- */

/* Keys from `from` on, of which `there` exist.  clean: what is not finite becomes 0, and is told of. */
static __device__ __forceinline__ void fill_stage(ring_turn *t, const attn__fma_array *array, const float *from, int there,
                                                  int dim, bool clean)
{
    enum { AT_ONCE = 4, DOWN = PRODUCERS / CHUNKS };
    const int thread = ptx_thread_signed() - CONSUMERS, chunk = thread % CHUNKS, first = thread / CHUNKS;
    const uint32_t full = full_barrier(t);
#pragma unroll
    for (int begin = 0; begin < BLOCK_K; begin += AT_ONCE * DOWN) {
        float x[AT_ONCE][8];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int row = begin + i * DOWN + first;
            fetch(x[i], array, from + row * array->token, 8 * chunk, dim, HEAD_DIM, row < there);
        }
        if (begin == 0) {
            ptx_barrier_wait(full + 8, t->round & 1);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (clean) {
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    if (!fma_finite(x[i][c])) {
                        x[i][c] = 0.0f;
                        *cleaned_round(t) = t->round;
                    }
                }
            }
            put_parts(shared + AT_RING + t->stage * STAGE, BLOCK_K, HEAD_DIM, begin + i * DOWN + first, chunk, x[i]);
        }
    }
    ptx_fence_async();
    ptx_barrier_arrive(full);
    turn_on(t);
}

static __device__ __forceinline__ void produce(const attn__fma_forward *p)
{
    ring_turn turn = {0, 1};
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p->items; item += gridDim.x) {
        const queries_item it = item_of(p, item);
        const float *k = (const float *)p->k.data + it.batch * p->k.batch + it.head_kv * p->k.head +
                         (it.s.first_kv + it.key) * p->k.token;
        const float *v = (const float *)p->v.data + it.batch * p->v.batch + it.head_kv * p->v.head +
                         (it.s.first_kv + it.key) * p->v.token;
#pragma unroll 1
        for (int key = it.key; key < it.end; key += BLOCK_K) {
            fill_stage(&turn, &p->k, k, it.s.keys - key, p->problem.dim_qk, false);
            fill_stage(&turn, &p->v, v, it.s.keys - key, p->problem.dim_v, true);
            k += BLOCK_K * p->k.token;
            v += BLOCK_K * p->v.token;
        }
    }
}

/* ---- a warpgroup that computes ---- */

/* A thread has two rows 8 apart, and 2 neighbours of every 8 columns. */
typedef struct work {
    float max[2], sum[2]; /* in powers of 2; the sum over this thread's columns alone */
    float o[OUTPUT];
} work;

/* The first of the warpgroup's rows in the tile of queries; the first of its dims. */
static __device__ __forceinline__ int group_row(void)
{
    return HALVES ? 0 : ptx_thread_signed() / 128 * 64;
}
static __device__ __forceinline__ int group_dim(void)
{
    return HALVES ? ptx_thread_signed() / 128 * WIDTH : 0;
}
/* in the tile of queries */
static __device__ __forceinline__ int thread_row(void)
{
    const int thread = HALVES ? ptx_thread_signed() % 128 : ptx_thread_signed();
    return thread / 32 * 16 + thread % 32 / 4;
}

/* The warpgroup's rows and dims of Q, times factor. */
static __device__ __forceinline__ void load_queries(const attn__fma_forward *p, const queries_item *it)
{
    enum { FELLOWS = WIDTH / 8 }; /* threads that fetch the same row */
    const int thread = ptx_thread_signed() % 128, chunk = group_dim() / 8 + thread % FELLOWS;
    const float *q = (const float *)p->q.data + it->batch * p->q.batch + it->head * p->q.head +
                     (it->s.first_q + it->query) * p->q.token;
#pragma unroll 2
    for (int row = group_row() + thread / FELLOWS; row < group_row() + 64; row += 128 / FELLOWS) {
        float x[8];
        fetch(x, &p->q, q + row * p->q.token, 8 * chunk, p->problem.dim_qk, HEAD_DIM, row < it->left);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            x[c] *= p->problem.factor;
        }
        put_parts(shared + AT_Q, BLOCK_Q, HEAD_DIM, row, chunk, x);
    }
    ptx_fence_async();
    ptx_sync(2 + ptx_thread_signed() / 128, 128);
}

/* s = Q K^T, over the warpgroup's dims */
static __device__ __forceinline__ void multiply_keys(float *s, uint32_t k)
{
    const uint32_t q = ptx_shared(shared) + AT_Q + group_row() * 128 + group_dim() * (BLOCK_Q * 2);
    const uint64_t left = ptx_operand(anew(q), 16);
    const uint64_t right = ptx_operand(anew(k + group_dim() * (BLOCK_K * 2)), 16);
    ptx_wgmma_fence();
#pragma unroll
    for (int n = 0; n < 6; n++) {
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i++) {
            PRODUCT_S(s, ptx_operand_at(left, LEFT(n) * Q_PART + i / 4 * (BLOCK_Q * 128) + i % 4 * 32),
                      ptx_operand_at(right, RIGHT(n) * PART + i / 4 * (BLOCK_K * 128) + i % 4 * 32), n + i > 0);
        }
    }
    ptx_wgmma_commit();
    PTX_WGMMA_WAIT(0);
    ptx_hold(s, SCORES);
}

/* Adds the other warpgroup's scores; `parity` changes from tile to tile, so that one meeting a tile is enough. */
static __device__ __forceinline__ void add_other_half(float *s, int parity)
{
    const int thread = ptx_thread_signed(), group = thread / 128;
    float4 *mine = (float4 *)(shared + AT_EXCHANGE + (2 * parity + group) * EXCHANGE) + thread % 128;
    const float4 *other = (const float4 *)(shared + AT_EXCHANGE + (2 * parity + 1 - group) * EXCHANGE) + thread % 128;
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
        mine[i / 4 * 128] = make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
    }
    OUTPUT_SYNC();
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
        const float4 x = other[i / 4 * 128];
        s[i] += x.x;
        s[i + 1] += x.y;
        s[i + 2] += x.z;
        s[i + 3] += x.w;
    }
}

/* sum = P V, of the warpgroup's dims */
static __device__ __forceinline__ void multiply_values(float *sum, uint32_t weights[PARTS][SCORES / 2], uint32_t v)
{
    const uint64_t right = ptx_operand(anew(v + group_dim() * (BLOCK_K * 2)), BLOCK_K * 128);
#pragma unroll
    for (int i = 0; i < OUTPUT; i++) {
        sum[i] = 0.0f;
    }
    ptx_hold(sum, OUTPUT);
    ptx_wgmma_fence();
#pragma unroll
    for (int n = 0; n < 6; n++) {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
            PRODUCT_O(sum, weights[LEFT(n)] + 4 * i, ptx_operand_at(right, RIGHT(n) * PART + i * (16 * 128)));
        }
    }
    ptx_wgmma_commit();
    PTX_WGMMA_WAIT(0);
    ptx_hold(sum, OUTPUT);
}

static __device__ __forceinline__ void hide(float *s, const fma_band *band)
{
    const int row = thread_row(), column = ptx_thread_signed() % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fma_sees(band, row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2) ? s[i] : -INFINITY;
    }
}

/* Scores become weights; by what O and the sums fade. */
static __device__ __forceinline__ void weigh(work *w, float *s, float *fade)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = w->max[r], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SCORES; i += 4) {
            most = fmaxf(most, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float base = most == -INFINITY ? 0.0f : most;
        fade[r] = most > w->max[r] ? ptx_exp2(w->max[r] - base) : 1.0f;
        w->max[r] = most;
#pragma unroll
        for (int i = 2 * r; i < SCORES; i += 4) {
            s[i] = ptx_exp2(s[i] - base);
            s[i + 1] = ptx_exp2(s[i + 1] - base);
            sum += s[i] + s[i + 1];
        }
        w->sum[r] = w->sum[r] * fade[r] + sum;
    }
}

/* The warp has read the stage. */
static __device__ __forceinline__ void release(ring_turn *t)
{
    __syncwarp();
    if (ptx_thread_signed() % 32 == 0) {
        ptx_barrier_arrive(full_barrier(t) + 8);
    }
    turn_on(t);
}

/* A tile of keys; whether what of its V is not finite was left out. */
static __device__ __forceinline__ bool compute_tile(work *w, ring_turn *t, const queries_item *it, int key)
{
    const fma_band band = fma_band_of(&it->s, it->query, key);
    const int first = group_row();
    /* HALVES: the item's rows are these 64, and its keys what some of them see */
    const bool none = !HALVES && fma_none(&band, first, first + 63, BLOCK_K);
    float s[SCORES], sum[OUTPUT], fade[2];
    uint32_t weights[PARTS][SCORES / 2];
    wait_full(t);
    if (none) {
        release(t);
        wait_full(t);
        const bool cleaned = *cleaned_round(t) == t->round;
        release(t);
        return cleaned;
    }
    multiply_keys(s, ptx_shared(shared) + AT_RING + t->stage * STAGE);
    release(t);
    if (HALVES) {
        add_other_half(s, key / BLOCK_K % 2);
    }
    if (!fma_all(&band, first, first + 63, BLOCK_K)) {
        hide(s, &band);
    }
    weigh(w, s, fade);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        split(&weights[0][i], &weights[1][i], &weights[2][i], s[2 * i], s[2 * i + 1]);
    }
    wait_full(t);
    const bool cleaned = *cleaned_round(t) == t->round;
    multiply_values(sum, weights, ptx_shared(shared) + AT_RING + t->stage * STAGE);
    release(t);
#pragma unroll
    for (int i = 0; i < OUTPUT; i++) {
        w->o[i] = fmaf(w->o[i], fade[i / 2 % 2], sum[i]);
    }
    return cleaned;
}

/* O, its neighbours exchanged, and the rows' lse, to shared memory. */
static __device__ __forceinline__ void stage_output(const work *w)
{
    const int row = thread_row(), column = ptx_thread_signed() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = w->sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float scale = sum == 0.0f ? 1.0f : 1.0f / sum;
#pragma unroll
        for (int i = 2 * r; i < OUTPUT; i += 4) {
            *(float2 *)(shared + AT_Q + (row + 8 * r) * ROW + (group_dim() + i / 4 * 8 + column) * 4) =
                make_float2(w->o[i + 1] * scale, w->o[i] * scale);
        }
        if (column == 0 && group_dim() == 0) {
            ((float *)(shared + AT_LSE))[row + 8 * r] =
                sum == 0.0f ? -INFINITY : (w->max[r] + log2f(sum)) * 0.693147180559945309f;
        }
    }
}

static __device__ __forceinline__ void consume(const attn__fma_forward *p)
{
    ring_turn turn = {0, 1};
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p->items; item += gridDim.x) {
        queries_item it = item_of(p, item);
        bool cleaned = false;
        if (it.left <= 0) {
            continue;
        }
        work w;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            w.max[i] = -INFINITY;
            w.sum[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < OUTPUT; i++) {
            w.o[i] = 0.0f;
        }
        load_queries(p, &it);
#pragma unroll 1
        for (int key = it.key; key < it.end; key += BLOCK_K) {
            cleaned |= compute_tile(&w, &turn, &it, key);
        }
        OUTPUT_SYNC(); /* nobody reads Q any more */
        stage_output(&w);
        OUTPUT_SYNC();
        asm volatile("" : "+l"(item)); /* found anew, rather than kept in registers meanwhile */
        it = item_of(p, item);
        put_output(p, &it.s, it.batch, it.head, it.query, shared + AT_Q, (const float *)(shared + AT_LSE),
                   cleaned);
        OUTPUT_SYNC();
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) NAME(const __grid_constant__ attn__fma_forward p)
{
    if (threadIdx.x == 0) {
        for (ring_turn t = {0, 1}; t.round == 1; turn_on(&t)) {
            ptx_barrier_init(full_barrier(&t), PRODUCERS);
            ptx_barrier_init(full_barrier(&t) + 8, CONSUMERS / 32);
            *cleaned_round(&t) = 0;
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        PTX_REGISTERS_LESS(72);
        produce(&p);
    } else {
        PTX_REGISTERS_MORE(216);
        consume(&p);
    }
}
