/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward.cuh - attention forward on Hopper (Dao et al., FlashAttention, arXiv 2205.14135; Shah et al.,
 * FlashAttention-3, arXiv 2407.08608).
 *
 * One block a multiprocessor walks over tiles of ROWS queries of one head.  A producer warp brings Q, K and V into
 * shared memory by the copy engine; each of GROUPS warpgroups owns 64 queries and keeps their softmax state and
 * output in registers:
 *
 *     S(n) = Q K(n)^T   is issued, then   O += P(n+1) V(n+1)   of the step before: while the tensor cores are at
 *     the second, the softmax of S(n) is made.  The warpgroups take turns in issuing, so that one's softmax
 *     meets another's products.
 *
 * Keys go from right to left, so that the masked steps of a causal band come first.  Scores never leave the
 * registers: the accumulator of S is, rounded, the left operand of P V.
 *
 * To be set before: HEAD_DIM 64, 128 or 256, TYPE, pack(low, high), unpack(bits),
 * KEYS, SHARED.
 */
#include "kernel/cuda/flash_forward_params.h"
#include "kernel/cuda/wgmma.cuh"

#define INFINITE (__int_as_float(0x7f800000))

#if HEAD_DIM == 64
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(32)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(160)
enum { GROUPS = 3, STAGES = 4, Q_STAGES = 2 };
#else
#define PRODUCER_REGISTERS PTX_REGISTERS_LESS(40)
#define CONSUMER_REGISTERS PTX_REGISTERS_MORE(232)
enum { GROUPS = 2, STAGES = 2, Q_STAGES = HEAD_DIM == 128 && KEYS <= 128 ? 2 : 1 };
#endif

enum {
    ROWS = 64 * GROUPS,
    CONSUMERS = 128 * GROUPS,
    THREADS = CONSUMERS + 128,
    PANELS = HEAD_DIM / 64,
    Q_PANEL = ROWS * 128, /* bytes */
    KEY_PANEL = KEYS * 128,
    Q_TILE = PANELS * Q_PANEL,
    KEY_TILE = PANELS * KEY_PANEL,
    SCORES = KEYS / 2,   /* registers of S */
    OUTPUT = HEAD_DIM / 2, /* of O */
    TURN = 1,            /* the first named barrier of the turns */
    OVERLAP = HEAD_DIM < 256,
    TILES = 4,           /* one is being stored, one computed, and the producer may be Q_STAGES ahead */
};

/* ---- what a tile is ---- */

typedef struct tile {
    int batch, head, row;        /* the first query, within its sequence */
    int queries, keys;           /* of the sequence */
    int low, high;               /* key j is visible to query i when low <= j - i <= high */
    int first_q, first_kv;       /* tokens before the sequence in a ragged batch */
    int first, count;            /* steps of KEYS keys; count 0: no key is visible, -1: no tile is left */
    int plain_low, plain_high;   /* all is visible of steps that begin with these keys, and those between */
} tile;

typedef struct shared_memory {
    uint8_t q[Q_STAGES][Q_TILE];
    uint8_t k[STAGES][KEY_TILE], v[STAGES][KEY_TILE];
    tile tile[TILES], next; /* of the last turns; the producer's own */
    uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
} shared_memory;

static_assert(sizeof(shared_memory) <= SHARED, "shared memory");

/*
 * The number of the block's tile of a round, or p->tiles or more.  Where tiles are of one length, blocks take them there
 * and back, so that what is left over adds up; else each takes the next that is left when it has time for it.
 */
PTX_INLINE int tile_number(const attn__forward_params *p, int round)
{
    const int first = round * (int)gridDim.x, block = (int)blockIdx.x;
    if (p->taken == nullptr) {
        return first + (round & 1 ? (int)gridDim.x - 1 - block : block);
    }
    return round == 0 ? block : (int)gridDim.x + atomicAdd(p->taken, 1);
}

/* The thread that does this has few registers: what is done lies in shared memory. */
PTX_INLINE void tile_of(tile *t, const attn__forward_params *p, int number)
{
    int plane, n;
    if (p->together == 0) {
        plane = number / p->tiles_q;
        n = number - plane * p->tiles_q;
    } else {
        int of_group = p->together * p->tiles_q, group = number / of_group, rest = number - group * of_group;
        int heads = min(p->together, p->batch * p->heads_q - group * p->together);
        n = rest / heads;
        plane = group * p->together + rest - n * heads;
        n = p->tiles_q - 1 - n;
    }
    t->batch = plane / p->heads_q;
    t->head = plane - t->batch * p->heads_q;
    t->row = n * ROWS;
    PTX_FORGET();
    int queries = p->tokens_q, keys = p->tokens_kv, first_q = 0, first_kv = 0;
    if (p->cu_q != nullptr) {
        first_q = (int)p->cu_q[t->batch];
        queries = (int)p->cu_q[t->batch + 1] - first_q;
        first_kv = (int)p->cu_kv[t->batch];
        keys = (int)p->cu_kv[t->batch + 1] - first_kv;
    }
    t->first_q = first_q;
    t->first_kv = first_kv;
    t->queries = queries;
    t->keys = keys;
    int shift = p->shifted ? p->shift : keys - queries;
    t->low = shift - p->left;
    t->high = shift + p->right;
    PTX_FORGET();
    int from = max(0, t->row + t->low);
    int to = min(t->keys - 1, min(t->row + ROWS, t->queries) - 1 + t->high);
    t->first = from / KEYS;
    t->count = to >= from && t->row < t->queries && t->low <= t->high ? to / KEYS - t->first + 1 : 0;
    t->plain_low = t->row + ROWS - 1 + t->low;
    t->plain_high = min(t->keys, t->row + t->high + 1) - KEYS;
    PTX_FORGET();
}

PTX_INLINE bool is_cut(const tile *t, int key)
{
    return key < t->plain_low || key > t->plain_high;
}

/* ---- the producer ---- */

/* Step number `step` of all tiles so far: its place in the ring, and the parity that tells this round from the last. */
PTX_INLINE uint32_t stage_of(uint32_t step)
{
    return step % STAGES;
}
PTX_INLINE uint32_t parity_of(uint32_t step)
{
    return step / STAGES & 1;
}

PTX_INLINE void load(uint32_t to, int panel, const attn__forward_map *map, uint32_t barrier, bool ragged, int head,
                     int batch, int before, int length, int token)
{
    int c1 = ragged ? ATTN__FORWARD_RAGGED - length + token : token;
    int c3 = ragged ? before + length : batch, c4 = ragged ? ATTN__FORWARD_RAGGED : 0;
#pragma unroll 1
    for (int i = 0; i < PANELS; i++) {
        ptx_load_tile_5d(to + i * panel, map, barrier, 64 * i, c1, head, c3, c4);
    }
}

PTX_INLINE void load_keys(const attn__forward_params *p, const attn__forward_map *map, uint8_t (*to)[KEY_TILE],
                          uint64_t *fulls, uint64_t *empties, uint32_t step, const tile *t, int key)
{
    const uint32_t full = ptx_shared(&fulls[stage_of(step)]);
    ptx_barrier_wait(ptx_shared(&empties[stage_of(step)]), parity_of(step) ^ 1);
    ptx_barrier_expect(full, KEY_TILE);
    load(ptx_shared(to[stage_of(step)]), KEY_PANEL, map, full, p->cu_q != nullptr, t->head / p->group, t->batch,
         t->first_kv, t->keys, key);
}

/* Q of the tile `next`, once there is room for it; then that tile is there for all to see. */
PTX_INLINE void load_queries(const attn__forward_params *p, shared_memory *m, uint32_t turn)
{
    const uint32_t place = turn % Q_STAGES, full = ptx_shared(&m->q_full[place]);
    ptx_barrier_wait(ptx_shared(&m->q_empty[place]), (turn / Q_STAGES & 1) ^ 1);
    const tile *t = &m->next;
    m->tile[turn % TILES] = *t;
    if (t->count <= 0) {
        ptx_barrier_arrive(full);
        return;
    }
    ptx_barrier_expect(full, Q_TILE);
    load(ptx_shared(m->q[place]), Q_PANEL, &p->q, full, p->cu_q != nullptr, t->head, t->batch, t->first_q, t->queries,
         t->row);
}

PTX_INLINE void produce(const attn__forward_params *p, shared_memory *m)
{
    uint32_t step = 0, turn = 0;
    ptx_prefetch_map(&p->q);
    ptx_prefetch_map(&p->k);
    ptx_prefetch_map(&p->v);
    const tile *t = &m->next;
#pragma unroll 1
    for (int round = 0;; round++) {
        const int number = tile_number(p, round);
        if (number >= p->tiles) {
            if (p->taken != nullptr || round * (int)gridDim.x >= p->tiles) {
                break;
            }
            continue;
        }
        tile_of(&m->next, p, number);
        if (t->row >= t->queries) {
            continue;
        }
        int key = (t->first + t->count - 1) * KEYS;
#pragma unroll 1
        for (int i = 0; i <= t->count; i++, key -= KEYS) {
            if (i < t->count) {
                load_keys(p, &p->k, m->k, m->k_full, m->k_empty, step + i, t, key);
            }
            if (i == 0) {
                load_queries(p, m, turn++);
            } else {
                load_keys(p, &p->v, m->v, m->v_full, m->v_empty, step + i - 1, t, key + KEYS);
            }
        }
        step += t->count;
    }
    m->next.count = -1;
    load_queries(p, m, turn);
}

/* ---- products ---- */

#define CAT_(a, b, c) a##b##c
#define CAT(a, b, c)  CAT_(a, b, c)

/* The low word of the descriptor of an operand; that of another place of it lies as many 16 bytes further. */
PTX_INLINE uint32_t low_word(uint32_t shared, uint32_t panel)
{
    return (shared >> 4) + (panel >> 4 << 16);
}
PTX_INLINE uint64_t operand(uint32_t low, uint32_t bytes)
{
    return (uint64_t)PTX_PANEL_ROWS_HIGH << 32 | (low + bytes / 16);
}

PTX_INLINE void product_s(float *s, uint32_t q, uint32_t k)
{
    /* what comes from another thread is the same in all, as the assembler sees it: it goes to uniform registers, where the
     * descriptors of all products fit side by side */
    const uint32_t a = low_word(q, 0), b = __shfl_sync(0xffffffffU, low_word(k, 0), 0);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        CAT(wgmma_, KEYS, _ss)(s, operand(a, i / 4 * Q_PANEL + i % 4 * 32), operand(b, i / 4 * KEY_PANEL + i % 4 * 32), i > 0);
    }
}

PTX_INLINE void product_o(float *o, const uint32_t *weights, uint32_t v)
{
    const uint32_t b = __shfl_sync(0xffffffffU, low_word(v, KEY_PANEL), 0);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        CAT(wgmma_, HEAD_DIM, _rs)(o, weights + 4 * i, operand(b, i * 2048));
    }
}

/* The thread's number, read anew each time, so that no register is held for it. */
PTX_INLINE int thread_number(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* The first of the thread's two rows of the tile. */
PTX_INLINE int thread_row(void)
{
    const int thread = thread_number();
    return thread / 32 * 16 + thread % 32 / 4;
}

/* ---- softmax ---- */

/* Of two rows of the thread: the running maximum of the raw scores, and the sum of its own columns' weights. */
typedef struct state {
    float max[2], sum[2];
} state;

PTX_INLINE void cut(float *s, const attn__forward_params *p, const tile *t, int key)
{
    const int row = t->row + thread_row();
    const int column = key + 2 * (thread_number() & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = row + 8 * r;
        const int from = max(0, query + t->low), to = min(t->keys - 1, query + t->high);
        const uint32_t count = to >= from ? (uint32_t)(to - from + 1) : 0U;
        const int first = from - column;
#pragma unroll
        for (int i = 0; i < SCORES / 4; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float *x = &s[4 * i + 2 * r + j];
                *x = (uint32_t)(8 * i + j - first) < count ? (p->negate ? -*x : *x) : -INFINITE;
            }
        }
    }
}

/*
 * s becomes the weights; factor[2]: of what was summed so far.  The maximum that they are relative to is left as it is until
 * it would grow by more than 8, so that O is scaled a few times a row and not in every step (as FlashAttention-4 does): weights
 * are then at most 2^8, and their relative error is the same.
 */
PTX_INLINE void soften(float *s, state *st, float *factor, float scale)
{
    enum { PARTS = 4 }; /* of a sum or a maximum: one alone would wait for itself at every step */
    float most[2][PARTS], sum[2][PARTS], used[2];
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float x = fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
            most[r][i % PARTS] = i < PARTS ? x : fmaxf(most[r][i % PARTS], x);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r][0] = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
    }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r][0] = fmaxf(most[r][0], __shfl_xor_sync(0xffffffffU, most[r][0], x));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float now = fmaxf(st->max[r], most[r][0]);
        const bool kept = (now - st->max[r]) * scale <= 8.0F;
        const float next = kept ? st->max[r] : now;
        used[r] = next == -INFINITE ? 0.0F : next * scale;
        factor[r] = kept ? 1.0F : ptx_exp2(fmaf(st->max[r], scale, -used[r]));
        st->max[r] = next;
    }
#pragma unroll
    for (int i = 0; i < SCORES / 4; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float *x = &s[4 * i + 2 * r + j];
                *x = ptx_exp2(fmaf(*x, scale, -used[r]));
            }
            const float both = s[4 * i + 2 * r] + s[4 * i + 2 * r + 1];
            sum[r][i % 2] = i == 0 ? fmaf(st->sum[r], factor[r], both) : i == 1 ? both : sum[r][i % 2] + both;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        st->sum[r] = sum[r][0] + sum[r][1];
    }
}

PTX_INLINE void round_weights(uint32_t *weights, const float *s)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        weights[i] = pack(s[2 * i], s[2 * i + 1]);
    }
}

PTX_INLINE void multiply(float *o, const float *factor)
{
#pragma unroll
    for (int i = 0; i < OUTPUT; i++) {
        o[i] *= factor[i / 2 & 1];
    }
}

/* ---- the result ---- */

/* Four 32-bit values of each of four neighbouring threads, transposed: thread t has element t of all, in order. */
PTX_INLINE void transpose(uint32_t *x, int t)
{
    const bool odd = t & 1, upper = t & 2;
    uint32_t a = __shfl_xor_sync(0xffffffffU, odd ? x[0] : x[1], 1);
    uint32_t b = __shfl_xor_sync(0xffffffffU, odd ? x[2] : x[3], 1);
    uint32_t y0 = odd ? a : x[0], y1 = odd ? x[1] : a, y2 = odd ? b : x[2], y3 = odd ? x[3] : b;
    a = __shfl_xor_sync(0xffffffffU, upper ? y0 : y2, 2);
    b = __shfl_xor_sync(0xffffffffU, upper ? y1 : y3, 2);
    x[0] = upper ? a : y0;
    x[1] = upper ? b : y1;
    x[2] = upper ? y2 : a;
    x[3] = upper ? y3 : b;
}

/* One row's part of this thread, 16-bit: eight neighbouring columns at a time. */
PTX_INLINE void store_row_16(uint16_t *to, const float *o, int r, float factor, int dim, bool there)
{
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < OUTPUT / 16; i++) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *from = &o[16 * i + 4 * j + 2 * r];
            x[j] = pack(from[0] * factor, from[1] * factor);
        }
        transpose(x, t);
        const int column = 32 * i + 8 * t;
        if (there && column < dim) {
            *(uint4 *)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

PTX_INLINE void store_row_32(float *to, const float *o, int r, float factor, float old_factor, bool merge, int dim)
{
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < OUTPUT / 4; i++) {
        const int column = 8 * i + 2 * t;
        if (column < dim) {
            float2 x = make_float2(o[4 * i + 2 * r] * factor, o[4 * i + 2 * r + 1] * factor);
            if (merge) {
                const float2 old = *(const float2 *)(to + column);
                x.x = old_factor == 0.0F ? x.x : factor == 0.0F ? old.x * old_factor : fmaf(old.x, old_factor, x.x);
                x.y = old_factor == 0.0F ? x.y : factor == 0.0F ? old.y * old_factor : fmaf(old.y, old_factor, x.y);
            }
            *(float2 *)(to + column) = x;
        }
    }
}

PTX_INLINE void store(const attn__forward_params *p, const tile *t, const float *o, const state *st)
{
    const int row = t->row + thread_row();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = st->sum[r];
        sum += __shfl_xor_sync(0xffffffffU, sum, 1);
        sum += __shfl_xor_sync(0xffffffffU, sum, 2);
        const int query = row + 8 * r;
        const bool there = query < t->queries;
        float factor = sum == 0.0F ? 0.0F : 1.0F / sum, old_factor = 0.0F;
        float lse = sum == 0.0F ? -INFINITE : fmaf(st->max[r], p->scale, logf(sum));
        const int64_t token = t->first_q + query;
        float *lse_at = (float *)p->lse.data + t->batch * p->lse.batch + t->head * p->lse.head + token * p->lse.token;
        if (p->merge && there) {
            const float old = *lse_at, most = fmaxf(old, lse);
            if (old != -INFINITE) {
                const float both = lse == -INFINITE ? old : most + logf(expf(old - most) + expf(lse - most));
                old_factor = lse == -INFINITE ? 1.0F : expf(old - both);
                factor *= lse == -INFINITE ? 0.0F : expf(lse - both);
                lse = both;
            }
            __syncwarp(__activemask());
        }
        const int64_t at = t->batch * p->o.batch + t->head * p->o.head + token * p->o.token;
        if (!p->out_f32) {
            store_row_16((uint16_t *)p->o.data + at, o, r, factor, p->dim_v, there);
        } else if (there) {
            store_row_32((float *)p->o.data + at, o, r, factor, old_factor, p->merge, p->dim_v);
        }
        if (p->lse.data != nullptr && there && (threadIdx.x & 3) == 0) {
            *lse_at = lse;
        }
    }
}

/* Rows that see no key: zeros, and lse = -inf. */
PTX_INLINE void store_nothing(const attn__forward_params *p, const tile *t)
{
    const int end = min(t->row + ROWS, t->queries);
    for (int query = t->row + thread_number() / 4; query < end && !p->merge; query += CONSUMERS / 4) {
        const int64_t token = t->first_q + query;
        const int64_t at = t->batch * p->o.batch + t->head * p->o.head + token * p->o.token;
        for (int column = thread_number() & 3; column < p->dim_v; column += 4) {
            if (p->out_f32) {
                ((float *)p->o.data)[at + column] = 0.0F;
            } else {
                ((uint16_t *)p->o.data)[at + column] = 0;
            }
        }
        if (p->lse.data != nullptr && (thread_number() & 3) == 0) {
            ((float *)p->lse.data)[t->batch * p->lse.batch + t->head * p->lse.head + token * p->lse.token] = -INFINITE;
        }
    }
}

/* ---- masked values that are no numbers ---- */

/*
 * A masked value has the weight 0, but 0 times NaN or inf is NaN, and the tensor cores multiply whole steps.  A row whose output
 * is NaN while its sum is a number is looked at again: if a value masked for it, within a step that it took part in,
 * is no number, the row is computed anew from memory, over the keys that it sees alone.
 */

/* Does any of the thread's columns of V hold no number, among the keys [from, to)?  v: the row of key 0. */
PTX_INLINE bool no_numbers(const attn__forward_params *p, const uint16_t *v, int from, int to)
{
    bool found = false;
#pragma unroll 1
    for (int key = from; key < to; key++) {
        const uint16_t *row = v + key * p->v_rows.token;
#pragma unroll 1
        for (int column = 2 * (thread_number() & 3); column < p->dim_v; column += 8) {
            found = found || !(fabsf(unpack(row[column])) < INFINITE) || !(fabsf(unpack(row[column + 1])) < INFINITE);
        }
    }
    return found;
}

/* The score of a pair, by the four threads of a row. */
PTX_INLINE float score(const attn__forward_params *p, const uint16_t *q, const uint16_t *k)
{
    float sum = 0.0F;
#pragma unroll 1
    for (int i = thread_number() & 3; i < p->dim_qk; i += 4) {
        sum = fmaf(unpack(q[i]), unpack(k[i]), sum);
    }
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    return p->negate ? -sum : sum;
}

PTX_INLINE const uint16_t *row_of(const attn__forward_tensor *x, int batch, int head, int token)
{
    return (const uint16_t *)x->data + batch * x->batch + head * x->head + token * x->token;
}

/* The rows r of a warp: those with `broken` are made anew. */
PTX_INLINE void repair_row(const attn__forward_params *p, const tile *t, float *o, const state *st, int r, int query,
                           bool broken)
{
    const uint16_t *v = row_of(&p->v_rows, t->batch, t->head / p->group, t->first_kv);
    const int from = max(0, query + t->low), to = min(t->keys, query + t->high + 1);
    const int begin = t->first * KEYS, end = min(t->keys, (t->first + t->count) * KEYS);
    broken = broken && (no_numbers(p, v, begin, min(from, end)) || no_numbers(p, v, max(to, begin), end));
    broken = __shfl_xor_sync(0xffffffffU, broken, 1) || broken;
    broken = __shfl_xor_sync(0xffffffffU, broken, 2) || broken;
    if (!__any_sync(0xffffffffU, broken)) {
        return;
    }
    const uint16_t *q = row_of(&p->q_rows, t->batch, t->head, t->first_q + (broken ? query : 0));
    const float used = st->max[r] * p->scale_log2;
    const int column = 2 * (thread_number() & 3), columns = broken ? p->dim_v - column : 0;
#pragma unroll
    for (int i = 0; i < OUTPUT / 4; i++) {
        o[4 * i + 2 * r] = broken ? 0.0F : o[4 * i + 2 * r];
        o[4 * i + 2 * r + 1] = broken ? 0.0F : o[4 * i + 2 * r + 1];
    }
    const int most = __reduce_max_sync(0xffffffffU, broken ? to - from : 0);
#pragma unroll 1
    for (int i = 0; i < most; i++) { /* all threads, for the sums across four of them */
        const int key = min(from + i, t->keys - 1);
        const uint16_t *k = row_of(&p->k_rows, t->batch, t->head / p->group, t->first_kv + key);
        const float w = ptx_exp2(fmaf(score(p, q, k), p->scale_log2, -used));
        const uint16_t *values = v + key * p->v_rows.token + column;
        const int seen = from + i < to ? columns : 0;
#pragma unroll
        for (int j = 0; j < OUTPUT / 4; j++) {
            if (8 * j < seen) {
                o[4 * j + 2 * r] = fmaf(w, unpack(values[8 * j]), o[4 * j + 2 * r]);
                o[4 * j + 2 * r + 1] = fmaf(w, unpack(values[8 * j + 1]), o[4 * j + 2 * r + 1]);
            }
        }
    }
}

PTX_INLINE void repair(const attn__forward_params *p, const tile *t, float *o, const state *st)
{
    if (!is_cut(t, t->first * KEYS) && !is_cut(t, (t->first + t->count - 1) * KEYS)) {
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool broken = false;
#pragma unroll
        for (int i = 0; i < OUTPUT / 4; i++) {
            broken = broken || !(o[4 * i + 2 * r] == o[4 * i + 2 * r]) || !(o[4 * i + 2 * r + 1] == o[4 * i + 2 * r + 1]);
        }
        const int query = t->row + thread_row() + 8 * r;
        broken = broken && query < t->queries;
        broken = __shfl_xor_sync(0xffffffffU, broken, 1) || broken;
        broken = __shfl_xor_sync(0xffffffffU, broken, 2) || broken;
        if (__any_sync(0xffffffffU, broken)) {
            repair_row(p, t, o, st, r, query, broken);
        }
    }
}

/* ---- a consumer ---- */

PTX_INLINE void arrive(uint64_t *barrier)
{
    if (thread_number() % 32 == 0) {
        ptx_barrier_arrive(ptx_shared(barrier));
    }
}

/* The groups issue their products in turn. */
PTX_INLINE void take_turn(int group)
{
    ptx_sync(TURN + group, 256);
}
PTX_INLINE void pass_turn(int group)
{
    ptx_arrive(TURN + (group + 1 == GROUPS ? 0 : group + 1), 256);
}

/* The same in all threads of a warp, and known to be. */
PTX_INLINE int uniform(int x)
{
    return __shfl_sync(0xffffffffU, x, 0);
}

PTX_INLINE void wait_k(shared_memory *m, uint32_t step)
{
    ptx_barrier_wait(ptx_shared(&m->k_full[stage_of(step)]), parity_of(step));
}

PTX_INLINE void issue_s(shared_memory *m, float *s, int group, uint32_t turn, uint32_t step)
{
    const uint32_t rows = group * 64 * 128;
    ptx_wgmma_fence();
    product_s(s, ptx_shared(m->q[turn % Q_STAGES]) + rows, ptx_shared(m->k[stage_of(step)]));
    ptx_wgmma_commit();
}

PTX_INLINE void issue_o(shared_memory *m, float *o, const uint32_t *weights, uint32_t step)
{
    ptx_barrier_wait(ptx_shared(&m->v_full[stage_of(step)]), parity_of(step));
    ptx_wgmma_fence();
    product_o(o, weights, ptx_shared(m->v[stage_of(step)]));
    ptx_wgmma_commit();
}

/* The tile of a turn; those that see no key are stored on the way. */
PTX_INLINE const tile *next_tile(const attn__forward_params *p, shared_memory *m, uint32_t *turn)
{
    for (;; *turn += 1) {
        const tile *t = &m->tile[*turn % TILES];
        ptx_barrier_wait(ptx_shared(&m->q_full[*turn % Q_STAGES]), *turn / Q_STAGES & 1);
        if (t->count != 0) {
            return t;
        }
        store_nothing(p, t);
        arrive(&m->q_empty[*turn % Q_STAGES]);
    }
}

/* The scores of a step are there: the stage is free, and the scores become weights. */
PTX_INLINE void take_s(const attn__forward_params *p, shared_memory *m, const tile *t, float *s, state *st,
                       float *factor, int key, uint32_t step, int plain_low, uint32_t plain_span)
{
    ptx_hold(s, SCORES);
    arrive(&m->k_empty[stage_of(step)]);
    if ((uint32_t)(key - plain_low) > plain_span) {
        cut(s, p, t, key);
    }
    soften(s, st, factor, p->scale_log2);
}

/*
 * The weights are made before this, and what follows comes after it.  The assembler would wait for O first and make the
 * weights then, with no product to hide them behind; it moves no work across a branch that depends on that work.  A sum is
 * never below zero, so the branch is not taken.
 */
PTX_INLINE void finish_weights(shared_memory *m, const state *st)
{
    if (st->sum[0] + st->sum[1] < 0.0F) {
        ptx_barrier_wait(ptx_shared(&m->q_full[0]), 0);
    }
}

PTX_INLINE void consume(const attn__forward_params *p, shared_memory *m)
{
    uint32_t step = 0, turn = 0;
    float s[SCORES], o[OUTPUT], factor[2];
    uint32_t weights[SCORES / 2];
    const int group = uniform(thread_number() / 128);
    if (group == GROUPS - 1) {
        pass_turn(group);
    }
    const tile *t = next_tile(p, m, &turn);
    int count = uniform(t->count);
    if (count > 0) {
        wait_k(m, step);
    }
    take_turn(group);
    issue_s(m, s, group, turn, step);
    pass_turn(group);
#pragma unroll 1
    while (count > 0) {
        state st = {{-INFINITE, -INFINITE}, {0.0F, 0.0F}};
        int key = (t->first + t->count - 1) * KEYS;
        /* keys from which a step is plain: these and as many more, or one that there is not */
        const bool none = p->negate || t->plain_high < t->plain_low;
        const int plain_low = none ? -1 : t->plain_low;
        const uint32_t plain_span = none ? 0U : (uint32_t)(t->plain_high - plain_low);
#pragma unroll
        for (int i = 0; i < OUTPUT; i++) {
            o[i] = 0.0F;
        }
        PTX_WGMMA_WAIT(0);
        take_s(p, m, t, s, &st, factor, key, step, plain_low, plain_span);
        round_weights(weights, s);
#pragma unroll 1
        for (int i = 1; i < count; i++, step++) {
            key -= KEYS;
            wait_k(m, step + 1);
            take_turn(group);
            issue_s(m, s, group, turn, step + 1);
            issue_o(m, o, weights, step);
            pass_turn(group);
            PTX_WGMMA_WAIT(1);
            take_s(p, m, t, s, &st, factor, key, step + 1, plain_low, plain_span);
            finish_weights(m, &st);
            PTX_WGMMA_WAIT(0);
            ptx_hold(o, OUTPUT);
            arrive(&m->v_empty[stage_of(step)]);
            if (__any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F)) {
                multiply(o, factor);
            }
            round_weights(weights, s);
        }
        arrive(&m->q_empty[turn % Q_STAGES]);
        turn++;
        take_turn(group);
        issue_o(m, o, weights, step);
        const tile *next = next_tile(p, m, &turn);
        count = uniform(next->count);
        if (count > 0) {
            wait_k(m, step + 1);
        }
        /* The next tile's first product runs while this one is stored, where there are registers for both.  After
         * the last tile it is a product of nothing: no branch may part the products. */
        if (OVERLAP) {
            issue_s(m, s, group, turn, step + 1);
            pass_turn(group);
            PTX_WGMMA_WAIT(1);
        } else {
            pass_turn(group);
            PTX_WGMMA_WAIT(0);
        }
        ptx_hold(o, OUTPUT);
        arrive(&m->v_empty[stage_of(step)]);
        step++;
        repair(p, t, o, &st);
        store(p, t, o, &st);
        if (!OVERLAP) {
            take_turn(group);
            issue_s(m, s, group, turn, step);
            pass_turn(group);
        }
        t = next;
    }
    PTX_WGMMA_WAIT(0);
    if (group == 0) {
        take_turn(group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward(const __grid_constant__ attn__forward_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *m = (shared_memory *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->q_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->q_empty[i]), 4 * GROUPS);
        }
        for (int i = 0; i < STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->k_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->v_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->k_empty[i]), 4 * GROUPS);
            ptx_barrier_init(ptx_shared(&m->v_empty[i]), 4 * GROUPS);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        PRODUCER_REGISTERS;
        if (threadIdx.x == CONSUMERS) {
            produce(&p, m);
        }
    } else {
        CONSUMER_REGISTERS;
        consume(&p, m);
    }
}
