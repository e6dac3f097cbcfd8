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

/* ---- softmax ---- */

/* Of two rows of the thread: the running maximum of the raw scores, and the sum of its own columns' weights.
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

/*
 * s becomes the weights; factor[2]: of what was summed so far.  The maximum that they are relative to is left
 * as it is until it would grow by more than 8, so that O is scaled a few times a row and not in every step
 * (as FlashAttention-4 does): weights are then at most 2^8, and their relative error is the same.
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

#endif
