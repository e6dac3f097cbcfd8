/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_rows.cuh - a part of few.cuh: the rows of a tile in registers, as wgmma and mma both lay them out.
 */

/* A thread's part of a tile: two rows 8 apart, of which it has 2 neighbours of every 8 columns.  most: what a row's
 * scores are taken relative to, its maximum or up to SLACK powers of 2 less. */
typedef struct few_state {
    float o[COLUMNS / 2], most[2], sum[2];
    int lo[2], hi[2]; /* keys that the rows see, of this share */
    int end;          /* of this share */
} few_state;

/* Of this warp's rows. */
FEW int first_row()
{
    return NARROW ? 0 : (int)(SPLIT ? threadIdx.x % 128 / 32 : threadIdx.x / 32) * 16;
}

/* The first of the columns that this warp has at the end. */
FEW int first_column()
{
    return NARROW ? (int)(threadIdx.x / 32) * OWN_COLUMNS : SPLIT ? (int)(threadIdx.x / 128) * COLUMNS : 0;
}

FEW void begin_tile(const few_params *p, const few_share *c, few_state *s)
{
    int lane = (int)(threadIdx.x % 32);
    s->end = share_end(c);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) {
        s->o[i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = min(first_row() + lane / 4 + 8 * r, c->at.tile.rows - 1);
        int token = (c->at.index * p->height + row) / p->group;
        s->lo[r] = few_lo(p, &c->at.sequence, token);
        s->hi[r] = min(few_hi(p, &c->at.sequence, token), s->end);
        s->most[r] = -INFINITY;
        s->sum[r] = 0.0f;
    }
}

/* -inf for the keys from `key` on that a row does not see. */
FEW void mask(const few_state *s, float *scores, int key)
{
    int column = 2 * (int)(threadIdx.x % 4);
    PTX_FORGET(); /* else every tile is masked, by instructions that mostly do nothing */
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int r = i / 2 % 2, at = key + i / 4 * 8 + column + i % 2;
        scores[i] = at < s->lo[r] || at >= s->hi[r] ? -INFINITY : scores[i];
    }
}

/* By how many powers of 2 a score may be above a row's `most` before that moves.  A weight of 2^8 is rounded like one
 * of 1, and far from the largest number of fp16. */
enum { SLACK = 8 };

/* Raises `most` of row r to `most` if that is more than SLACK above it; o and sum fade. */
FEW void raise(few_state *s, int r, float most)
{
    float fade = 1.0f;
    if (most > s->most[r] + SLACK) {
        fade = ptx_exp2(s->most[r] - most);
        s->most[r] = most;
    }
    s->sum[r] *= fade;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
        s->o[i / 2 * 4 + 2 * r + i % 2] *= fade;
    }
}

/* The greatest of a row, from the greatest that each of its four threads has. */
FEW float greatest(float top)
{
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
}

/* Masks the scores of the keys from `key` on; top: the greatest that this thread has of each row, in powers of 2. */
FEW void find_top(const few_params *p, const few_state *s, float *scores, int key, bool masked, float *top)
{
    if (p->negate) {
        PTX_FORGET(); /* a branch, and not instructions that mostly do nothing */
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            scores[i] = -scores[i];
        }
    }
    if (masked) {
        mask(s, scores, key);
    }
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
    }
    top[0] *= p->scale;
    top[1] *= p->scale;
}

/* Has this thread a score that raises a row's `most`? */
FEW bool raises(const few_state *s, const float *top)
{
    return top[0] > s->most[0] + SLACK || top[1] > s->most[1] + SLACK;
}

/* Scores of the keys from `key` on to weights, which are added to the rows' sums.  Were every new maximum followed at
 * once, the sums of 16 rows would fade at most of the first hundred stages, and a warp's products wait for that. */
FEW void softmax(const few_params *p, few_state *s, float *scores, uint32_t *weights, int key, bool masked)
{
    float top[2], used[2];
    find_top(p, s, scores, key, masked, top);
    if (__any_sync(~0u, raises(s, top))) {
        raise(s, 0, greatest(top[0]));
        raise(s, 1, greatest(top[1]));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        used[r] = s->most[r] == -INFINITY ? 0.0f : s->most[r];
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int r = i / 2 % 2;
        scores[i] = ptx_exp2(fmaf(scores[i], p->scale, -used[r]));
        s->sum[r] += scores[i];
    }
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        weights[i] = FEW_PACK(scores[2 * i], scores[2 * i + 1]);
    }
}

/* Adds up the sums of the four threads that share a row. */
FEW void add_sums(few_state *s)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        s->sum[r] += __shfl_xor_sync(~0u, s->sum[r], 1);
        s->sum[r] += __shfl_xor_sync(~0u, s->sum[r], 2);
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

/* Zeroes, among the OWN_KEYS keys of V from `key` on, what is not finite of keys that not all rows see; true
 * if some row sees such a key.  By all that have these keys and columns in common. */
FEW bool clean_values(const few_share *c, int end, unsigned char *v, int key)
{
    bool found = false;
    for (int i = (int)threadIdx.x % FELLOWS; i < OWN_KEYS * WIDTH / 8; i += FELLOWS) {
        int row = i / 8 % OWN_KEYS, at = key + row;
        if (!unseen(c, end, at)) {
            continue;
        }
        uint32_t *words = (uint32_t *)(v + i / (OWN_KEYS * 8) * (KEYS * 128) + row * 128 + i % 8 * 16);
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
    return NARROW ? __any_sync(~0u, found) : ptx_sync_or(SPLIT ? 2 + (int)threadIdx.x / FELLOWS : 1, FELLOWS, found);
}

/* What clean_values() took out of the tile, to the rows that see it: the sum is then no number, or infinite,
 * whatever the weight. */
FEW void add_values(const few_params *p, const few_share *c, few_state *s, int key)
{
    int column = (SPLIT ? first_column() : 0) + 2 * (int)(threadIdx.x % 4), end = min(key + (int)OWN_KEYS, s->end);
    const uint16_t *values =
        (const uint16_t *)p->values.data + c->at.b * p->values.batch + c->at.head * p->values.head;
    for (int at = max(key, c->at.tile.lo); at < end; at++) {
        if (!unseen(c, s->end, at)) {
            continue;
        }
        const uint16_t *row = values + (c->at.sequence.k0 + at) * p->values.token;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
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

FEW few_row row_at(const few_params *p, const few_share *c, int row)
{
    return few_row_of(p, &c->at.sequence, c->at.b, c->at.head, c->at.index, row);
}

/* A whole tile: its rows are final. */
FEW void write_rows(const few_params *p, const few_share *c, few_state *s)
{
    int lane = (int)(threadIdx.x % 32), first = first_column();
    few_end end[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = min(first_row() + lane / 4 + 8 * r, c->at.tile.rows - 1);
        end[r] = few_end_of(p, s->most[r], s->sum[r], row_at(p, c, row).lse);
    }
    ptx_sync(1, COMPUTING); /* all have read the lse that was there */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row() + lane / 4 + 8 * r;
        if (row < c->at.tile.rows) {
            few_row at = row_at(p, c, row);
#pragma unroll
            for (int i = 0; i < OWN_COLUMNS / 8; i++) {
                if (first + 8 * i < p->dim_v) {
                    few_store(p, at.o + first + 8 * i + 2 * (lane % 4), end[r], s->o[4 * i + 2 * r],
                              s->o[4 * i + 2 * r + 1]);
                }
            }
            if (lane % 4 == 0 && first == 0 && at.lse != nullptr) {
                *at.lse = end[r].lse;
            }
        }
    }
}

/* These columns of a part of a tile, for few_merge.cu: a block, or a pair of them, has two places for parts. */
FEW void write_part(const few_params *p, const few_share *c, few_state *s, unsigned place, int first, int columns)
{
    int lane = (int)(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row() + lane / 4 + 8 * r;
        if (row < c->at.tile.rows) {
            float *to = p->parts + ((int64_t)place * p->rows + row) * FEW_PART_ROW(p->dim_v);
#pragma unroll
            for (int i = 0; i < columns / 8; i++) {
                if (first + 8 * i < p->dim_v) {
                    *(float2 *)(to + first + 8 * i + 2 * (lane % 4)) = make_float2(s->o[4 * i + 2 * r], s->o[4 * i + 2 * r + 1]);
                }
            }
            if (lane % 4 == 0 && first == 0) {
                *(float2 *)(to + p->dim_v) = make_float2(s->most[r], s->sum[r]);
            }
        }
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
FEW void give_back(uint32_t shared, few_turn t)
{
    if (threadIdx.x % 32 == 0) {
        ptx_barrier_arrive(ring_barrier(shared, t) + 8);
    }
}

FEW void release(uint32_t shared, few_turn *t)
{
    give_back(shared, *t);
    turn_on(t, STAGES);
}

/* Q is read for the last time in this tile: while the tile ends, the next one's comes. */
FEW void release_q(uint32_t shared)
{
    if (threadIdx.x % 32 == 0) {
        ptx_barrier_arrive(shared + Q_BARRIERS + 8);
    }
}
