/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_step.cuh - what the main kernels of all dims share: loading, softmax, the way out.  Included
 * after the shape of a step (KEYS, QUERIES, ...) and what lies in shared memory are set.
 */

/* A place in the ring of query tiles, and the parity that tells this round from the last. */
typedef struct ring {
    uint32_t stage, parity;
} ring;

PTX_INLINE void ring_step(ring *r)
{
    if (++r->stage == Q_STAGES) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

PTX_INLINE uint32_t ring_before(const ring *r)
{
    return r->stage == 0 ? Q_STAGES - 1 : r->stage - 1;
}

/* ---- the producer ---- */

PTX_INLINE void load_panels(uint32_t to, const attn__tile_map *map, uint32_t barrier, int panel, place at,
                            int head)
{
#pragma unroll PANELS <= 2 ? PANELS : 1
    for (int i = 0; i < PANELS; i++) {
        ptx_load_tile_5d(to + i * panel, map, barrier, 64 * i, at.token, head, at.c3, at.c4);
    }
}

/* ---- the consumers ---- */

/* Places are made of the thread's number when they are needed: registers are short. */
PTX_INLINE uint32_t its_group(void)
{
    return __any_sync(0xffffffffu, threadIdx.x >= 128) ? 1 : 0;
}
PTX_INLINE bool is_first_lane(void)
{
    return ptx_thread() % 32 == 0;
}
/* the first of its two rows of the block's keys */
PTX_INLINE int its_row(void)
{
    uint32_t thread = ptx_thread();
    return (int)(thread / 32 % (ROWS / 16) * 16 + thread % 32 / 4);
}

/* Which columns of a row see its key: column - first below count, as unsigned. */
typedef struct span {
    int first;
    uint32_t count;
} span;

PTX_INLINE span visible(const work *w, int row, int first_query, int columns)
{
    span v;
    int key = w->first_key + row;
    int from = max(key - w->s.high, first_query);
    int to = min(min(key - w->s.low, w->s.queries - 1), first_query + columns - 1);
    v.first = from - first_query - 2 * (int)(ptx_thread() & 3);
    v.count = key < w->s.keys && to >= from ? (uint32_t)(to - from + 1) : 0U;
    return v;
}

/* Zeroes the scores, or their gradients, of queries that do not see the key. */
PTX_INLINE void cut(float *s, const work *w, int first_query)
{
    int row = its_row();
    const span spans[2] = {visible(w, row, first_query, SCORES * 2),
                           visible(w, row + 8, first_query, SCORES * 2)};
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const span *v = &spans[i / 2 % 2];
        s[i] = (uint32_t)(i / 4 * 8 + i % 2 - v->first) < v->count ? s[i] : 0.0F;
    }
}

/* s becomes P^T */
PTX_INLINE void weights(float *s, const float *minus_lse, float scale)
{
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float4 l = *(const float4 *)(minus_lse + 16 * i);
        const float of[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            s[8 * i + j] = ptx_exp2(fmaf(s[8 * i + j], scale, of[j / 4 * 2 + j % 2]));
        }
    }
}

/* dp becomes dS^T = P^T (dP^T - delta) */
PTX_INLINE void score_gradients(const float *s, float *dp, const float *delta)
{
#pragma unroll
    for (int i = 0; i < SCORES / 8; i++) {
        float4 l = *(const float4 *)(delta + 16 * i);
        const float of[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            dp[8 * i + j] = s[8 * i + j] * (dp[8 * i + j] - of[j / 4 * 2 + j % 2]);
        }
    }
}

PTX_INLINE void round_scores(uint32_t *packed, const float *s)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
}

/* ---- the sum of dQ ---- */

/* which piece of a tile's sum is the warp's; `of_warp`: pieces of a warp */
PTX_INLINE int64_t its_piece(int piece, int of_warp)
{
    return (int64_t)piece + ptx_thread() / 32 * of_warp;
}

/* Deterministic: waits until all tiles of keys behind this one that see any of the tile of queries have added
 * theirs. */
PTX_INLINE void wait_turn(const attn__backward_params *p, const work *w, int64_t piece, int tile)
{
    if (p->turns != nullptr && is_first_lane()) {
        int last_query = min(tile * QUERIES + QUERIES, w->s.queries) - 1;
        int turn = min(last_query + w->s.high, w->s.keys - 1) / KEYS - w->first_key / KEYS;
        while (ptx_load_acquire(p->turns + piece) != turn) {
        }
    }
    __syncwarp();
}

/* Deterministic: what the warp has added is there, and the next tile of keys may.  Not at once after adding:
 * that would be a wait for memory.  piece -1: nothing was added. */
PTX_INLINE void pass_turn(const attn__backward_params *p, int64_t piece)
{
    if (p->turns != nullptr && piece >= 0) {
        __threadfence();
        __syncwarp();
        if (is_first_lane()) {
            ptx_add_release(p->turns + piece, 1);
        }
    }
    __syncwarp();
}

/* Adds 64 columns of 16 rows, straight from the registers, as they lie. */
PTX_INLINE void add_query_gradient(const attn__backward_params *p, int64_t piece, const float *dq)
{
    float *to = p->dq_sum + piece * ATTN__BACKWARD_PIECE + ptx_thread() % 32 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        ptx_add_f32x4(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
}

/* ---- the way out ---- */

/* 64 columns that lie in the warp's piece, from column `first` on.  What the band's masked queries may have
 * stained is left for last. */
PTX_INLINE void store_part(const attn__backward_params *p, const work *w, const outlet *out, uint32_t piece,
                           int first)
{
    uint32_t lane = ptx_thread() % 32, quad = piece + lane % 8 * 64;
    int row = its_row() / 16 * 16 + (int)(lane % 8);
    bool is_cut = w->first < w->whole_first || w->first + w->count > w->whole_end;
    uint32_t stained = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        uint32_t block = lane / 8 + 4 * n;
        float x[16];
        read_rows(x, quad + block * 512, lane / 2 % 4, out->scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (is_cut && !are_numbers(x + 8 * half)) {
                stained |= 1U << (2 * n + half);
            } else {
                store_key(p, out, w, row + 8 * half, first + (int)block * 8, x + 8 * half);
            }
        }
    }
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        int half = i % 2, column = first + (int)(lane / 8 + i / 2 * 4) * 8;
        if ((stained >> i & 1) == 0 || w->first_key + row + 8 * half >= w->s.keys || column >= out->dim) {
            continue;
        }
        float x[8];
        bool anew = make_key_anew(p, w, QUERIES, row + 8 * half, column, out->is_value, x);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = anew ? x[j] * out->scale : NAN;
        }
        store_key(p, out, w, row + 8 * half, column, x);
    }
}

/*
 * dK and dV to memory, 64 columns after another, each warp its 16 rows by way of its piece of shared memory:
 * there each thread finds 8 columns of a row together.  A quad's 16 bytes lie in an order that keeps both the
 * writes and the reads free of bank conflicts.
 */
PTX_INLINE void store_gradients(const attn__backward_params *p, const work *w, uint32_t piece,
                                const float *dk, const float *dv)
{
    enum { PARTS = DIM / 64 };
    uint32_t lane = ptx_thread() % 32;
    uint32_t place = piece + (lane ^ lane / 8 % 4) * 16;
#pragma unroll 1
    for (int part = 0; part < 2 * PARTS; part++) {
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 2 * PARTS; k++) {
            const float *d = (k < PARTS ? dk : dv) + k % PARTS * 32;
            if (part == k) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    ptx_store_f32x4(place + i * 512, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
                }
            }
        }
        __syncwarp();
        outlet out = {part < PARTS ? &p->dk : &p->dv, 0, part < PARTS ? p->scale : 1.0F, part >= PARTS};
        out.dim = out.to->data == nullptr ? 0 : out.is_value ? p->dim_v : p->dim_qk;
        store_part(p, w, &out, piece, part % PARTS * 64);
    }
    __syncwarp();
}
