/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few.cuh - the forward of few query rows against many keys, at the speed of memory; a short .cu file for
 * each head dimension and dtype includes this.
 *
 * METHOD.  The query heads of a kv head and their tokens are the rows of one tile, so that K and V are read
 * once for all of them; the keys are shared by all blocks (few_share.cuh; the idea of Flash-Decoding, Dao et
 * al. 2023, with the even cut of Stream-K, Osama et al., arXiv 2301.03598), and few_merge.cu merges what they
 * found.  A block is a warp that lets the copy engine fill a ring of tiles of K and V in turn, one that
 * fetches the rows of Q of the next tile, and a warpgroup:
 *
 *     S = Q K^T            wgmma, both in shared memory; 64 rows, whatever of them is used
 *     P = exp2(S * scale - max), sum     in registers, fp32
 *     O += P V             wgmma, P in registers, rounded to the dtype of the inputs
 *
 * Two blocks live on a multiprocessor, so that one computes while the other waits; with 256 dims one, which
 * has the time.
 *
 * MASK, NaN.  A masked score is replaced by -inf.  Where a tile of V has keys that not all rows see, elements
 * of theirs that are not finite become 0 before the product, and are added to the rows that see them after
 * it.
 *
 * COST.  The bytes of K and V, once; each block's partials, two tiles at most.  The products take 64 rows'
 * time for any number of rows, and a tile's chain of product, softmax and product nearly as long as its bytes
 * need: the warpgroup waits for memory about a tenth of its time (docs/perf/cuda_few.md).
 */
#include "kernel/cuda/few_share.cuh"
#include "kernel/cuda/wgmma.cuh"

enum {
    DIM = FEW_DIM,
    KEYS = FEW_KEYS(DIM),
    STAGE = KEYS * DIM * 2, /* bytes */
    SLABS = DIM / 64,       /* of 64 dims, 128 bytes, of all rows or keys: one behind the other */
    STAGES = FEW_STAGES(DIM),
    Q_BYTES = FEW_ROWS * DIM * 2,
    RING = 2 * Q_BYTES, /* where the ring begins, behind Q of two tiles */
    BARRIERS = RING + STAGES * STAGE,
    Q_BARRIERS = BARRIERS + STAGES * 16,
    COMPUTING = 128, /* threads */
    WARPS = COMPUTING / 32
};

#include "kernel/cuda/few_load.cuh"

/* ---- the warpgroup that computes ---- */

/* A thread's part of a tile: two rows 8 apart, of which it has 2 neighbours of every 8 columns. */
typedef struct few_state {
    float o[DIM / 2], most[2], sum[2];
    int lo[2], hi[2]; /* keys that the rows see, of this share */
    int end;          /* of this share */
    bool idle;        /* none of the warp's rows is used */
} few_state;

/* The compiler shall not move what reads these registers to before this place. */
FEW void pin(float *x, int count)
{
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

FEW void begin_tile(const few_params *p, const few_share *c, few_state *s)
{
    int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    s->end = share_end(c);
    s->idle = warp * 16 >= c->at.tile.rows;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) {
        s->o[i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = min(warp * 16 + lane / 4 + 8 * r, c->at.tile.rows - 1);
        int token = (c->at.index * FEW_ROWS + row) / p->group;
        s->lo[r] = few_lo(p, &c->at.sequence, token);
        s->hi[r] = min(few_hi(p, &c->at.sequence, token), s->end);
        s->most[r] = -INFINITY;
        s->sum[r] = 0.0f;
    }
}

/* scores[64][KEYS] = Q K^T, a group of wgmma */
FEW void begin_scores(float *scores, uint32_t q, uint32_t k)
{
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint32_t inside = i % 4 * 32;
        FEW_WGMMA_S(scores, ptx_operand(q + i / 4 * (FEW_ROWS * 128) + inside, 16),
                    ptx_operand(k + i / 4 * (KEYS * 128) + inside, 16), i > 0);
    }
    ptx_wgmma_commit();
}

/* o += weights V, a group of wgmma */
FEW void begin_values(float *o, const uint32_t *weights, uint32_t v)
{
    pin(o, DIM / 2);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        FEW_WGMMA_O(o, weights + 4 * i, ptx_operand(v + i * (16 * 128), KEYS * 128));
    }
    ptx_wgmma_commit();
}

/* Scores of the keys from `key` on to weights; o and sums follow the new maximum. */
FEW void softmax(few_state *s, float *scores, uint32_t *weights, int key, bool masked, float scale)
{
    int column = 2 * (int)(threadIdx.x % 4);
    float most[2] = {s->most[0], s->most[1]}, sum[2] = {0.0f, 0.0f}, used[2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int r = i / 2 % 2;
        scores[i] *= scale;
        if (masked) {
            int at = key + i / 4 * 8 + column + i % 2;
            scores[i] = at < s->lo[r] || at >= s->hi[r] ? -INFINITY : scores[i];
        }
        most[r] = fmaxf(most[r], scores[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        used[r] = most[r] == -INFINITY ? 0.0f : most[r];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int r = i / 2 % 2;
        scores[i] = ptx_exp2(scores[i] - used[r]);
        sum[r] += scores[i];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        weights[i] = FEW_PACK(scores[2 * i], scores[2 * i + 1]);
    }
    float fade[2] = {ptx_exp2(s->most[0] - used[0]), ptx_exp2(s->most[1] - used[1])};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        s->sum[r] = s->sum[r] * fade[r] + sum[r];
        s->most[r] = most[r];
    }
    if (__any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f)) { /* rare after the first tiles */
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) {
            s->o[i] *= fade[i / 2 % 2];
        }
    }
}

/* ---- V that is not finite under a mask ---- */

FEW bool not_finite(uint32_t half)
{
    return (half & FEW_EXPONENT) == FEW_EXPONENT;
}

/* Does a row of the tile not see this key? */
FEW bool unseen(const few_share *c, int end, int key)
{
    return key < c->at.tile.all_lo || key >= min(c->at.tile.all_hi, end);
}

/* Zeroes, in the tile of V from `key` on, what is not finite of keys that not all rows see; true if some row
 * sees such a key. */
FEW bool clean_values(const few_share *c, int end, unsigned char *v, int key)
{
    bool found = false;
    for (int i = (int)threadIdx.x; i < STAGE / 16; i += COMPUTING) {
        int at = key + i / 8 % KEYS;
        if (!unseen(c, end, at)) {
            continue;
        }
        uint32_t *words = (uint32_t *)(v + i * 16);
        for (int w = 0; w < 4; w++) {
            uint32_t x = words[w];
            uint32_t clean = (not_finite(x) ? 0 : x & 0xffff) | (not_finite(x >> 16) ? 0 : x & 0xffff0000);
            if (clean != x) {
                words[w] = clean;
                found = found || (at >= c->at.tile.lo && at < end);
            }
        }
    }
    ptx_fence_async();
    return ptx_sync_or(1, COMPUTING, found);
}

/* What clean_values() took out of the tile, to the rows that see it: the sum is then no number, or infinite,
 * whatever the weight. */
FEW void add_values(const few_params *p, const few_share *c, few_state *s, int key)
{
    int column = 2 * (int)(threadIdx.x % 4), end = min(key + (int)KEYS, s->end);
    const uint16_t *values =
        (const uint16_t *)p->values.data + c->at.b * p->values.batch + c->at.head * p->values.head;
    for (int at = max(key, c->at.tile.lo); at < end; at++) {
        if (!unseen(c, s->end, at)) {
            continue;
        }
        const uint16_t *row = values + (c->at.sequence.k0 + at) * p->values.token;
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) {
            int from = i / 2 * 8 + column + i % 2;
            uint16_t x = from < p->dim_v ? row[from] : 0;
            if (not_finite(x)) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    bool sees = at >= s->lo[r] && at < s->hi[r];
                    s->o[i / 2 * 4 + r * 2 + i % 2] += sees ? FEW_WIDEN(x) : 0.0f;
                }
            }
        }
    }
}

/* ---- what becomes of a tile ---- */

/* A whole tile: its rows are final. */
FEW void write_rows(const few_params *p, const few_share *c, few_state *s)
{
    int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32), column = 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + lane / 4 + 8 * r;
        if (row < c->at.tile.rows) {
            few_row at = few_row_of(p, &c->at.sequence, c->at.b, c->at.head, c->at.index, row);
            few_end end = few_end_of(p, s->most[r], s->sum[r], at.lse);
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                if (8 * i < p->dim_v) {
                    few_store(p, at.o + 8 * i + column, end, s->o[4 * i + 2 * r], s->o[4 * i + 2 * r + 1]);
                }
            }
            __syncwarp(__activemask());
            if (lane % 4 == 0 && at.lse != nullptr) {
                *at.lse = end.lse;
            }
        }
    }
}

/* A part of a tile, for few_merge.cu. */
FEW void write_partial(const few_params *p, const few_share *c, few_state *s)
{
    int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32), column = 2 * (lane % 4);
    int64_t slot = (int64_t)blockIdx.x * 2 + (c->at.first == 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + lane / 4 + 8 * r;
        if (row < c->at.tile.rows) {
            float *to = p->partial + (slot * p->rows + row) * p->dim_v + column;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                if (8 * i < p->dim_v) {
                    *(float2 *)(to + 8 * i) = make_float2(s->o[4 * i + 2 * r], s->o[4 * i + 2 * r + 1]);
                }
            }
            if (lane % 4 == 0) {
                *(float2 *)(p->stats + (slot * p->rows + row) * 2) = make_float2(s->most[r], s->sum[r]);
            }
        }
    }
}

FEW void end_tile(const few_params *p, const few_share *c, few_state *s)
{
    bool whole = c->at.first == 0 && c->last == c->at.tile.units;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        s->sum[r] += __shfl_xor_sync(~0u, s->sum[r], 1);
        s->sum[r] += __shfl_xor_sync(~0u, s->sum[r], 2);
    }
    if (whole) {
        write_rows(p, c, s);
    } else {
        write_partial(p, c, s);
    }
}

/* This block's part of the tiles whose rows see no key; by one warp. */
FEW void write_empty(const few_params *p)
{
    int lane = (int)(threadIdx.x % 32);
    for (int64_t i = blockIdx.x; i < (int64_t)p->batch * p->tiles && !p->merge; i += gridDim.x) {
        int b = (int)(i / p->tiles), index = (int)(i % p->tiles);
        few_sequence s = few_sequence_of(p, b);
        if (index >= s.tiles) {
            continue;
        }
        few_tile t = few_tile_of(p, &s, index);
        for (int head = 0; t.units == 0 && head < p->heads_kv; head++) {
            for (int row = 0; row < t.rows; row++) {
                few_row at = few_row_of(p, &s, b, head, index, row);
                few_end end = {0.0f, 0.0f, -INFINITY};
                for (int column = 2 * lane; column < p->dim_v; column += 64) {
                    few_store(p, at.o + column, end, 0.0f, 0.0f);
                }
                if (lane == 0 && at.lse != nullptr) {
                    *at.lse = end.lse;
                }
            }
        }
    }
}

/* The stage is read: by one lane of each warp. */
FEW void release(uint32_t shared, few_turn *t)
{
    if (threadIdx.x % 32 == 0) {
        ptx_barrier_arrive(ring_barrier(shared, *t) + 8);
    }
    turn_on(t, STAGES);
}

/*
 * The keys of the share in this tile.  The ring has K and V in turn: while the product with a stage of V is
 * under way, the one with the next stage of K is begun; after the last, with what is there, and nobody looks
 * at it.
 */
FEW void compute_tile(const few_params *p, const few_share *c, few_state *s, unsigned char *shared,
                      uint32_t q, few_turn *t)
{
    float scores[KEYS / 2];
    uint32_t weights[KEYS / 4] = {0}, address = ptx_shared(shared);
    bool more = true;
    ptx_barrier_wait(ring_barrier(address, *t), t->parity);
    begin_scores(scores, q, address + RING + t->stage * STAGE);
    PTX_WGMMA_WAIT(0);
    for (int key = c->at.tile.lo + (int)c->at.first * FEW_UNIT; more; key += KEYS) {
        bool masked = unseen(c, s->end, key) || unseen(c, s->end, key + KEYS - 1), lost = false;
        pin(scores, KEYS / 2);
        release(address, t);
        if (!s->idle) {
            softmax(s, scores, weights, key, masked, p->scale);
        }
        ptx_barrier_wait(ring_barrier(address, *t), t->parity);
        if (masked) {
            lost = clean_values(c, s->end, shared + RING + t->stage * STAGE, key);
        }
        few_turn k = *t;
        turn_on(&k, STAGES);
        more = key + KEYS < s->end;
        begin_values(s->o, weights, address + RING + t->stage * STAGE);
        if (more) {
            ptx_barrier_wait(ring_barrier(address, k), k.parity);
        }
        begin_scores(scores, q, address + RING + k.stage * STAGE);
        PTX_WGMMA_WAIT(1);
        pin(s->o, DIM / 2);
        release(address, t);
        if (lost) {
            add_values(p, c, s, key);
        }
        PTX_WGMMA_WAIT(0);
    }
}

FEW void compute_share(const few_params *p, few_share *c, unsigned char *shared)
{
    few_turn turn = {0, 0}, q = {0, 0};
    uint32_t address = ptx_shared(shared);
    do {
        few_state s;
        begin_tile(p, c, &s);
        ptx_barrier_wait(q_barrier(address, q), q.parity);
        compute_tile(p, c, &s, shared, address + q.stage * Q_BYTES, &turn);
        if (threadIdx.x % 32 == 0) {
            ptx_barrier_arrive(q_barrier(address, q) + 8);
        }
        turn_on(&q, 2);
        end_tile(p, c, &s);
    } while (few_share_next(p, c));
}

FEW void make_barriers(uint32_t shared)
{
    for (uint32_t i = 0; i < STAGES; i++) {
        few_turn t = {i, 0};
        ptx_barrier_init(ring_barrier(shared, t), 1);
        ptx_barrier_init(ring_barrier(shared, t) + 8, WARPS);
    }
    for (uint32_t i = 0; i < 2; i++) {
        few_turn t = {i, 0};
        ptx_barrier_init(q_barrier(shared, t), 32);
        ptx_barrier_init(q_barrier(shared, t) + 8, WARPS);
    }
    ptx_barrier_init_fence();
}

extern "C" __global__ void __maxnreg__(FEW_REGISTERS(DIM)) few(const __grid_constant__ few_params params)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    const few_params *p = &params;
    int warp = (int)(threadIdx.x / 32) - WARPS;
    if (threadIdx.x == 0) {
        make_barriers(ptx_shared(shared));
        ptx_prefetch_map(&p->k);
        ptx_prefetch_map(&p->v);
    }
    __syncthreads();
    few_share share;
    bool fixed = few_fixed(p);
    if (!fixed) {
        ptx_grid_wait();
    }
    bool mine = few_share_first(p, &share);
    if (fixed) {
        ptx_grid_wait();
    }
    ptx_grid_go();
    if (warp < 0) {
        if (mine) {
            compute_share(p, &share, shared);
        }
    } else if (warp == 0) {
        if (mine && threadIdx.x % 32 == 0) {
            load_share(p, &share, ptx_shared(shared));
        }
    } else {
        if (mine) {
            load_share_q(p, &share, ptx_shared(shared));
        }
        write_empty(p);
    }
}
