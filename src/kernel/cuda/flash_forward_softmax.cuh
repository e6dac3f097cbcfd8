/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward_softmax.cuh - the products and the online softmax of flash_forward.cuh, for one warpgroup and
 * 64 rows.
 *
 * The layout of an accumulator is that of wgmma.cuh: a thread has parts of two rows, 8 apart.
 */
#ifndef ATTN_FLASH_FORWARD_SOFTMAX_CUH
#define ATTN_FLASH_FORWARD_SOFTMAX_CUH

#include "kernel/cuda/flash_forward_tile.cuh"

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
    /* what comes from another thread is the same in all, as the assembler sees it: it goes to uniform
     * registers, where the descriptors of all products fit side by side */
    const uint32_t a = low_word(q, 0), b = __shfl_sync(0xffffffffU, low_word(k, 0), 0);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        CAT(wgmma_, KEYS, _ss)
        (s, operand(a, i / 4 * Q_PANEL + i % 4 * 32), operand(b, i / 4 * KEY_PANEL + i % 4 * 32), i > 0);
    }
}

PTX_INLINE void product_o(float *o, const uint32_t *weights, uint32_t v)
{
    const uint32_t b = __shfl_sync(0xffffffffU, low_word(v, KEY_PANEL), 0);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        CAT(wgmma_, HEAD_DIM, _rt)(o, weights + 4 * i, operand(b, i * 2048));
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

/* The same in all threads of a warp, and known to be. */
PTX_INLINE int uniform(int x)
{
    return __shfl_sync(0xffffffffU, x, 0);
}

/* S of this warp's rows by its own instructions, which wait for no other warp: for scores that are needed
 * again. */
PTX_INLINE void product_s_again(float *s, uint32_t q, uint32_t k)
{
    const uint32_t thread = thread_number(), row = thread % 32 / 4, word = thread % 4 * 4;
    q += (thread / 32 * 16 + row) * 128;
    k += row * 128;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = 0.0F;
    }
#pragma unroll 1
    for (uint32_t n = 0; n < HEAD_DIM / 16; n++) {
        const uint32_t low = (n % 4 * 2 ^ row) * 16 + word, high = low ^ 16;
        const uint32_t from = q + n / 4 * Q_PANEL, at = k + n / 4 * KEY_PANEL;
        const uint32_t a[4] = {ptx_read_u32(from + low), ptx_read_u32(from + 1024 + low),
                               ptx_read_u32(from + high), ptx_read_u32(from + 1024 + high)};
#pragma unroll
        for (int i = 0; i < SCORES / 4; i++) {
            const uint32_t b[2] = {ptx_read_u32(at + i * 1024 + low), ptx_read_u32(at + i * 1024 + high)};
            mma_16(s + 4 * i, a, b);
        }
    }
}

/* ---- softmax ---- */

/*
 * Of two rows of the thread: the raw score that their weights are relative to, -inf if they have seen no key,
 * and the sum of its own columns' weights.
 *
 * Softmax is the same whatever weights are relative to, so long as they are numbers.  To look for the maximum
 * of every step would take a third of the time of the softmax, all of it before the first weight; so rows
 * keep the maximum of the first step that they have seen a key in, and a step whose weights have become too
 * large is made again.
 */
typedef struct state {
    float max[2], sum[2];
} state;

/* Scores of keys that a row does not see become -inf. */
PTX_INLINE void cut(float *s, const attn__forward_params *p, const tile *t, int key)
{
    const int row = t->row + thread_row();
    const int column = key + 2 * (thread_number() & 3);
    if (p->negate) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            s[i] = -s[i];
        }
    }
    int from[2], to[2]; /* columns of the thread's own */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        from[r] = row + 8 * r + t->low - column;
        to[r] = min(t->keys - 1, row + 8 * r + t->high) - column;
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = to[i / 2 & 1] < i / 4 * 8 + i % 2 ? -INFINITE : s[i];
    }
    if (__any_sync(0xffffffffU, from[1] > 0)) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            s[i] = from[i / 2 & 1] > i / 4 * 8 + i % 2 ? -INFINITE : s[i];
        }
    }
}

PTX_INLINE void row_max(float *max, const float *s)
{
    enum { PARTS = 4 }; /* of a maximum: one alone would wait for itself at every step */
    float most[2][PARTS];
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
        max[r] = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
    }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffffU, max[r], x));
        }
    }
}

/* Is there a row in the warp that has seen no key? */
PTX_INLINE bool is_new(const state *st)
{
    return __any_sync(0xffffffffU, st->max[0] == -INFINITE || st->max[1] == -INFINITE);
}

/* s becomes the logarithms of the weights, to base 2. */
PTX_INLINE void relate(float *s, const state *st, float scale)
{
    float used[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        used[r] = st->max[r] == -INFINITE ? 0.0F : st->max[r] * scale;
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fmaf(s[i], scale, -used[i / 2 & 1]);
    }
}

/* s[from .. to) become the weights, and go into the sums: 2 independent parts of each. */
PTX_INLINE void weigh(float *s, float *sum, int from, int to)
{
    float more[2] = {0.0F, 0.0F};
#pragma unroll
    for (int i = from; i < to; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *x = &s[i + 2 * r], *part = i / 4 % 2 ? more : sum;
            x[0] = ptx_exp2(x[0]);
            x[1] = ptx_exp2(x[1]);
            part[r] += x[0] + x[1];
        }
    }
    sum[0] += more[0];
    sum[1] += more[1];
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

#endif
