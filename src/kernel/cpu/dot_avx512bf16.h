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
 * Include it after vec_avx512.h and dot_few.h, inside a region compiled for "avx512bf16".
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
        acc[i][1] = dot->add ? vec_load(c + i * dot->c_row + dot->c_half) : vec_set(0.0f);
    }
    for (int sum = DOT_PARTS - 1; sum >= 0; sum--) {
        for (int i = sum < dot->b_parts ? 0 : sum - dot->b_parts + 1; i <= sum && i < dot->a_parts; i++) {
            dot_parts(dot, a + i * dot->a_part, b + (sum - i) * dot->b_part, acc);
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < DOT_ROWS; i++) {
        vec_store(c + i * dot->c_row, acc[i][0]);
        vec_store(c + i * dot->c_row + dot->c_half, acc[i][1]);
    }
}

/* How far a list of products has come: a step is 8 rows by 2 vectors. */
typedef struct dot_cursor {
    const attn__dot *dot, *end;
    int64_t row, col;
} dot_cursor;

static void dot_start(dot_cursor *at, const attn__dot *dots, int count)
{
    at->dot = dots, at->end = dots + count;
    at->row = at->col = 0;
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
             dot->b + at->col / ATTN__SQUARE * dot->b_band,
             dot->c + attn__dot_sum_place(dot, at->row, at->col));
    at->col += 2 * VEC_LANES;
    if (at->col >= dot->cols) {
        at->col = 0;
        at->row += DOT_ROWS;
    }
    return true;
}

/* The next step, as in dot_amx.h. */
static int64_t dot_stride(dot_cursor *at)
{
    (void)dot_step(false, at);
    return 1;
}

/* What is left of the products. */
static void dot_finish(dot_cursor *at)
{
    while (dot_step(false, at)) {
    }
}

static void dot_product(const attn__dot *dot)
{
    dot_cursor at;
    dot_start(&at, dot, 1);
    dot_finish(&at);
}

/* ---- few rows (dot_few.h) ------------------------------------------------------------------------- */

enum {
    FEW_SUMS = 16,  /* in registers: enough to hide the latency of two units */
    FEW_DEPTH = 32, /* of a step */
    FEW_PACKED = 12,
    FEW_SHARE = 14,
    FEW_STEP_ROWS = 8,
    FEW_PV_ROWS = 4,
    FEW_STEP_COST = 1,
    FEW_P_PARTS = 1,
};

VEC_INLINE int64_t few_least(void)
{
    return attn__cpu_asks_l1() ? 5 : 3; /* a Zen 5 has two FMAs a cycle for vectors, too */
}

enum { FEW_NEXT = PAIR * PANEL }; /* elements of Q^T from a pair of dims to the next */

/* Row by row a pair of dims from `a` and one from `b`: of 8 rows each. */
VEC_INLINE __m512i few_mix(const uint16_t *a, const uint16_t *b)
{
    const vec first = _mm512_castsi512_ps(_mm512_loadu_si512(a));
    return _mm512_castps_si512(vec_mix_low(first, _mm512_castsi512_ps(_mm512_loadu_si512(b))));
}

/* Up to 4 rows, for few_qk_4: of each 8 dims side by side, a vector in all, `step` after the one before. */
static void few_pack_4(uint16_t *q, int64_t step, const uint16_t *from, int64_t depth)
{
    const __m512i fours = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    for (int64_t d = 0; d < depth; d += 4 * PAIR, from += 4 * FEW_NEXT, q += step) {
        const __m512i low = few_mix(from, from + FEW_NEXT);
        const __m512i high = few_mix(from + 2 * FEW_NEXT, from + 3 * FEW_NEXT);
        _mm512_storeu_si512(q, _mm512_permutex2var_epi64(low, fours, high));
    }
}

/* Up to 16 rows, for few_qk_8 and few_qk_16: of each 4 dims side by side, 8 rows in a vector. */
static void few_pack_16(uint16_t *q, int64_t depth, int64_t rows)
{
    const uint16_t *from = q;
    for (int64_t d = 0; d < depth; d += 2 * PAIR, from += 2 * FEW_NEXT) {
        const __m512i first = few_mix(from, from + FEW_NEXT);
        const __m512i second =
            few_mix(from + PAIR * 8, from + PAIR * 8 + FEW_NEXT); /* first may be stored there */
        _mm512_storeu_si512(q, first);
        q += PAIR_LANES;
        if (rows > 8) {
            _mm512_storeu_si512(q, second);
            q += PAIR_LANES;
        }
    }
}

/* 9 to 12 rows: 8 for few_qk_8, then 4 for few_qk_4.  Those wait in lanes that have no row, behind what is
 * written meanwhile. */
static void few_pack_12(uint16_t *q, int64_t depth)
{
    uint16_t *fours = q + 3 * depth / 8 * FEW_NEXT + PAIR_LANES;
    few_pack_4(fours, FEW_NEXT, q + PAIR * 8, depth);
    few_pack_16(q, depth, 8);
    q += 8 * depth;
    for (int64_t d = 0; d < depth; d += 4 * PAIR, q += PAIR_LANES, fours += FEW_NEXT) {
        _mm512_storeu_si512(q, _mm512_loadu_si512(fours));
    }
}

static void few_pack_queries(uint16_t *q, int64_t depth, int64_t rows)
{
    if (rows <= 4) {
        few_pack_4(q, PAIR_LANES, q, depth);
    } else if (rows > 8 && rows <= FEW_PACKED) {
        few_pack_12(q, depth);
    } else if (rows <= VEC_LANES) {
        few_pack_16(q, depth, rows);
    }
}

/* As unpacking two rows leaves them. */
static const int32_t few_order[VEC_LANES] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};

VEC_INLINE void few_turn_weights(uint16_t *p, int64_t p_row, const uint16_t *pairs, int64_t pairs_row)
{
    dot_transpose(p, p_row, pairs, pairs_row);
}

/* Where each fourth of `rows` rows begins: they share address registers. */
VEC_INLINE void few_fourths(const int rows, const uint16_t **fourth, const uint16_t *a, int64_t a_row)
{
    FLASH_UNROLL
    for (int i = 0; i < rows / 4; i++) {
        fourth[i] = a + 4 * i * a_row;
        __asm__("" : "+r"(fourth[i])); /* not one register a row */
    }
}

/* `pairs` pairs of bf16 at p, over and over. */
VEC_INLINE __m512bh few_repeat(const int pairs, const uint16_t *p)
{
    if (pairs == 4) {
        return (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)p));
    }
    if (pairs == 2) {
        int64_t quad;
        memcpy(&quad, p, sizeof quad);
        return (__m512bh)_mm512_set1_epi64(quad);
    }
    return dot_pair(p);
}

/* acc[i]: 16 / n keys by 16 n lanes, of which each row has `pairs` */
VEC_INLINE void few_qk_sums(const int n, const int pairs, const few_qk *of, int64_t key, vec acc[FEW_SUMS])
{
    const int64_t dims = pairs * PAIR, q_row = pairs > 1 ? n * PAIR_LANES : FEW_NEXT;
    const uint16_t *q = of->q;
    FLASH_UNROLL
    for (int i = 0; i < FEW_SUMS; i++) {
        acc[i] = vec_set(0.0f);
    }
    for (int64_t d = 0; d < of->depth; d += FEW_DEPTH) {
        const uint16_t *fourth[FEW_SUMS / 4];
        few_fourths(FEW_SUMS / n, fourth, of->k + key * of->k_row + d, of->k_row);
        for (int64_t k = 0; k < FEW_DEPTH; k += dims, q += q_row) {
            __m512bh rows[2];
            FLASH_UNROLL
            for (int j = 0; j < n; j++) {
                rows[j] = (__m512bh)_mm512_loadu_si512(q + j * PAIR_LANES);
            }
            FLASH_UNROLL
            for (int i = 0; i < FEW_SUMS; i++) {
                const uint16_t *at = fourth[i / n / 4] + i / n % 4 * of->k_row + k;
                acc[i] = _mm512_dpbf16_ps(acc[i], few_repeat(pairs, at), rows[i % n]);
            }
        }
        few_ask(of->ahead, (of->lines + pairs - 1) / pairs);
    }
}

/* 8 keys by 32 rows. */
VEC_INLINE void few_qk_rows(const few_qk *of, int64_t key)
{
    float *s = of->s + key * PANEL;
    vec acc[FEW_SUMS];
    few_qk_sums(2, 1, of, key, acc);
    FLASH_UNROLL
    for (int i = 0; i < FEW_SUMS; i++) {
        vec_store(s + i / 2 * PANEL + i % 2 * VEC_LANES, acc[i]);
    }
}

/* Lanes 2 r and 2 r + 1 added up: first's 8, then second's. */
VEC_INLINE vec few_add_lanes(vec first, vec second)
{
    return vec_add(vec_even(first, second), vec_odd(first, second));
}

/* 8 keys by 16 rows. */
VEC_INLINE void few_qk_16(const few_qk *of, int64_t key)
{
    vec acc[FEW_SUMS];
    few_qk_sums(2, 2, of, key, acc);
    FLASH_UNROLL
    for (int i = 0; i < FEW_SUMS; i += 2) {
        vec_store(of->s + (key + i / 2) * PANEL, few_add_lanes(acc[i], acc[i + 1]));
    }
}

/* 16 keys by 8 rows, packed. */
VEC_INLINE void few_qk_8(const few_qk *of, int64_t key)
{
    float *s = of->s + key / 4 * PANEL;
    vec acc[FEW_SUMS];
    few_qk_sums(1, 2, of, key, acc);
    FLASH_UNROLL
    for (int i = 0; i < FEW_SUMS; i += 4, s += PANEL) {
        vec_store(s, few_add_lanes(acc[i], acc[i + 2]));
        vec_store(s + VEC_LANES, few_add_lanes(acc[i + 1], acc[i + 3]));
    }
}

/* 16 keys by 4 rows, packed. */
VEC_INLINE void few_qk_4(const few_qk *of, int64_t key)
{
    float *s = of->s + key / 8 * PANEL;
    vec acc[FEW_SUMS];
    few_qk_sums(1, 4, of, key, acc);
    FLASH_UNROLL
    for (int i = 0; i < 4; i++, s += VEC_LANES) {
        const vec *x = acc + i / 2 * 8 + i % 2; /* x[0], x[2], .. are of even keys, or all of odd ones */
        vec_store(s, few_add_lanes(few_add_lanes(x[0], x[2]), few_add_lanes(x[4], x[6])));
    }
}

static void few_multiply_qk(const few_qk *of)
{
    const int64_t step = of->rows <= FEW_PACKED ? FEW_SUMS : FEW_SUMS / 2;
    few_qk fours = *of; /* after 8 */
    fours.q += 8 * of->depth;
    fours.s += 8 * FEW_DEPTH * attn__ceil_div(of->keys, FEW_DEPTH);
    for (int64_t key = 0; key < of->keys; key += step) {
        if (of->rows <= 4) {
            few_qk_4(of, key);
        } else if (of->rows <= 8) {
            few_qk_8(of, key);
        } else if (of->rows <= FEW_PACKED) {
            few_qk_8(of, key);
            few_qk_4(&fours, key);
        } else if (of->n == 1) {
            few_qk_16(of, key);
        } else {
            few_qk_rows(of, key);
        }
    }
}

/* 4 or 8 rows by 32 dims of O. */
VEC_INLINE void few_pv_block(const int rows, const few_pv *of, int64_t row, int64_t dim)
{
    float *o = of->o + row * of->o_row + dim;
    const uint16_t *v = of->v + dim;
    vec acc[2 * FEW_STEP_ROWS];
    FLASH_UNROLL
    for (int i = 0; i < 2 * rows; i++) {
        acc[i] = vec_load(o + i / 2 * of->o_row + i % 2 * VEC_LANES);
    }
    for (int64_t key = 0; key < of->keys; key += FEW_DEPTH) {
        const uint16_t *fourth[FEW_STEP_ROWS / 4];
        few_fourths(rows, fourth, of->p + row * of->p_row + key, of->p_row);
        for (int64_t k = 0; k < FEW_DEPTH; k += PAIR, v += PAIR * of->v_row) {
            const __m512i even = _mm512_loadu_si512(v), odd = _mm512_loadu_si512(v + of->v_row);
            const __m512bh pairs[2] = {(__m512bh)_mm512_unpacklo_epi16(even, odd),
                                       (__m512bh)_mm512_unpackhi_epi16(even, odd)};
            FLASH_UNROLL
            for (int i = 0; i < 2 * rows; i++) {
                const __m512bh x = dot_pair(fourth[i / 8] + i / 2 % 4 * of->p_row + k);
                acc[i] = _mm512_dpbf16_ps(acc[i], x, pairs[i % 2]);
            }
        }
        few_ask(of->ahead, (of->lines * rows + FEW_STEP_ROWS - 1) / FEW_STEP_ROWS);
    }
    FLASH_UNROLL
    for (int i = 0; i < 2 * rows; i++) {
        vec_store(o + i / 2 * of->o_row + i % 2 * VEC_LANES, acc[i]);
    }
}

static void few_multiply_pv(const few_pv *of)
{
    for (int64_t dim = 0; dim < of->dims; dim += PAIR_LANES) {
        for (int64_t row = 0; row < of->rows; row += FEW_STEP_ROWS) {
            if (of->rows - row <= FEW_PV_ROWS) {
                few_pv_block(FEW_PV_ROWS, of, row, dim);
            } else {
                few_pv_block(FEW_STEP_ROWS, of, row, dim);
            }
        }
    }
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
