/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dot_avx512bf16.h - products of bf16 parts (attn__dot in rows.h) on vectors: the words of dot_amx.h for CPUs
 * with AVX512-BF16 and no tiles (AMD since 2022).
 *
 * METHOD.  8 rows by 2 vectors of C in registers; a pair of A is broadcast from memory, B is two vectors.
 * Pairs of small parts are summed first, as in dot_amx.h.
 *
 * ROUNDING.  VDPBF16PS adds two products to C by fp32 additions to nearest; subnormals count as 0.
 *
 * COST.  64 FLOPs an instruction; 10 loads to 16 of these.
 *
 * Include it after vec_avx512.h, inside a region compiled for "avx512bf16".
 */
#ifndef ATTN_DOT_AVX512BF16_H
#define ATTN_DOT_AVX512BF16_H

enum { DOT_PARTS = 3, DOT_ROWS = 8 };

static void dot_begin(void) {}

static void dot_end(void) {}

/* Two bf16 at p for every lane. */
VEC_INLINE __m512bh dot_pair(const uint16_t *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* acc += A_i B_j, 8 rows by 2 vectors */
VEC_INLINE void dot_parts(const attn__dot *dot, const uint16_t *a, const uint16_t *b, vec acc[DOT_ROWS][2])
{
    for (int64_t k = 0; k < dot->depth; k += 2) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b);
        const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + 2 * VEC_LANES);
        FLASH_UNROLL
        for (int i = 0; i < DOT_ROWS; i++) {
            const __m512bh x = dot_pair(a + attn__dot_place(i, k, 0));
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
        b += 2 * ATTN__SQUARE;
    }
}

static void dot_rows(const attn__dot *dot, const uint16_t *a, const uint16_t *b, float *c)
{
    vec acc[DOT_ROWS][2];
    FLASH_UNROLL
    for (int i = 0; i < DOT_ROWS; i++) {
        acc[i][0] = dot->add ? vec_load(c + i * dot->c_row) : vec_set(0.0f);
        acc[i][1] = dot->add ? vec_load(c + i * dot->c_row + VEC_LANES) : vec_set(0.0f);
    }
    for (int sum = DOT_PARTS - 1; sum >= 0; sum--) {
        for (int i = sum < dot->b_parts ? 0 : sum - dot->b_parts + 1; i <= sum && i < dot->a_parts; i++) {
            dot_parts(dot, a + i * dot->a_part, b + (sum - i) * dot->b_part, acc);
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < DOT_ROWS; i++) {
        vec_store(c + i * dot->c_row, acc[i][0]);
        vec_store(c + i * dot->c_row + VEC_LANES, acc[i][1]);
    }
}

/* How far a list of products has come: a step is 8 rows by 2 vectors. */
typedef struct dot_cursor {
    const attn__dot *dot, *end;
    int64_t row, col;
} dot_cursor;

static dot_cursor dot_start(const attn__dot *dots, int count)
{
    return (dot_cursor){.dot = dots, .end = dots + count};
}

/* The steps of a product. */
static int64_t dot_steps(const attn__dot *dot)
{
    return dot->rows / DOT_ROWS * (dot->cols / (2 * VEC_LANES));
}

/* One step; false if there was none left.  `one` as in dot_amx.h. */
static bool dot_step(bool one, dot_cursor *at)
{
    (void)one;
    while (at->dot < at->end && at->row >= at->dot->rows) {
        at->dot++;
        at->row = 0;
    }
    if (at->dot == at->end) {
        return false;
    }
    const attn__dot *dot = at->dot;
    dot_rows(dot, dot->a + attn__dot_place(at->row, 0, dot->a_band),
             dot->b + at->col / ATTN__SQUARE * dot->b_band, dot->c + at->row * dot->c_row + at->col);
    at->col += 2 * VEC_LANES;
    if (at->col >= dot->cols) {
        at->col = 0;
        at->row += DOT_ROWS;
    }
    return true;
}

/* What is left of the products. */
static void dot_finish(dot_cursor *at)
{
    while (dot_step(false, at)) {
    }
}

static void dot_product(const attn__dot *dot)
{
    dot_cursor at = dot_start(dot, 1);
    dot_finish(&at);
}

static int64_t probe_dot_peak(int64_t rounds, float *sink)
{
    enum { CHAINS = 16 };
    const __m512bh quarter = (__m512bh)_mm512_set1_epi32(0x3e803e80); /* pairs of 1/4 */
    vec acc[CHAINS];
    FLASH_UNROLL
    for (int i = 0; i < CHAINS; i++) {
        acc[i] = vec_set((float)i);
    }
    for (int64_t r = 0; r < rounds; r++) {
        FLASH_UNROLL
        for (int i = 0; i < CHAINS; i++) {
            acc[i] = _mm512_dpbf16_ps(acc[i], quarter, quarter);
        }
    }
    vec total = vec_set(0.0f);
    FLASH_UNROLL
    for (int i = 0; i < CHAINS; i++) {
        total = vec_add(total, acc[i]);
    }
    float lanes[VEC_LANES];
    vec_store(lanes, total);
    *sink = lanes[0];
    return rounds * CHAINS * VEC_LANES * 4;
}

#endif
