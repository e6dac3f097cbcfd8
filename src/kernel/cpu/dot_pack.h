/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dot_pack.h - operands of dot_product (attn__dot in rows.h): rows cut into bf16 parts, rows interleaved in
 * pairs, transposes.
 *
 * METHOD.  A part is the upper half of an fp32, what is left goes to the next: x = x0 + x1 + x2 exactly for
 * 24 bits, all of one sign; fp16 has 11 bits, two parts; bf16 is its own part.  Below 2^-102 the last part is
 * subnormal, which products count as 0.  Infinity and NaN become (x, 0, 0).
 *
 * WEIGHTS.  Those that are rounded to bf16 come from an exp2 of their own (docs/exp.md).
 *
 * Include it after base/round_avx512.h, vec_avx512.h and flash_common.inc.h, inside a region compiled for
 * "avx512bf16".
 */
#ifndef ATTN_DOT_PACK_H
#define ATTN_DOT_PACK_H

enum { PAIR = 2, PAIR_LANES = PAIR * VEC_LANES };

static int dot_parts_of(attn_dtype dtype)
{
    return dtype == ATTN_BF16 ? 1 : dtype == ATTN_F16 ? 2 : 3;
}

/*
 * 2^x for a weight that will be one part: exactly 1 at 0, 0 below -126, NaN for NaN, off by 2.91 * 2^-24 at
 * most.  x = n + f with 0 <= f <= 1, as VSCALEFPS takes x; 2^f = 1 + f * p(f) by a term less than flash_exp2
 * has: 9 operations in place of 11.
 */
VEC_INLINE vec dot_exp2(vec x)
{
    const vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vec p = vec_set(0x1.e96900p-10f);
    p = vec_fma(p, f, vec_set(0x1.277c1ep-7f));
    p = vec_fma(p, f, vec_set(0x1.c91c10p-5f));
    p = vec_fma(p, f, vec_set(0x1.ebdb6ap-3f));
    p = vec_fma(p, f, vec_set(0x1.62e4bap-1f));
    p = vec_fma(p, f, vec_set(1.0f));
    return vec_times_power(p, x, x);
}

/* The first part of x, as fp32. */
VEC_INLINE vec dot_upper(vec x)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-0x10000)));
}

/* The upper halves of x and y, interleaved.  One shuffle in place of a shift and a blend: shifts compete with
 * FMAs for the one vector unit that is left for them while tiles are busy. */
VEC_INLINE __m512i dot_interleave(vec x, vec y)
{
    const __mmask64 even = 0x3333333333333333;
    const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    return _mm512_mask_shuffle_epi8(_mm512_castps_si512(y), even, _mm512_castps_si512(x), down);
}

/* Parts of 16 columns of two rows of B: x at depth k, y at k + 1.  One part is rounded to nearest even, more
 * are cut. x and y are finite, or there is one part. */
VEC_INLINE void dot_store_pairs(const int parts, uint16_t *b, int64_t b_part, vec x, vec y)
{
    if (parts == 1) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        _mm512_storeu_si512(b, _mm512_permutexvar_epi16(order, both));
        return;
    }
    for (int i = 0; i < parts; i++) {
        _mm512_storeu_si512(b + i * b_part, dot_interleave(x, y));
        x = vec_sub(x, dot_upper(x));
        y = vec_sub(y, dot_upper(y));
    }
}

/* Lanes d .. d + 16 of x[count]; 0 beyond its end. */
VEC_INLINE vec dot_load_part(const float *x, int64_t count, int64_t d)
{
    const int64_t left = attn__min(attn__max(count - d, 0), VEC_LANES);
    return _mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1u), x + d);
}

/* 16 fp32 as dtype, as attn_from_f32() rounds them. */
VEC_INLINE __m256i dot_round(vec x, attn_dtype dtype)
{
    return dtype == ATTN_F16 ? _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : attn__round_16(x);
}

/* The first parts of 32 fp32, side by side. */
VEC_INLINE __m512i dot_upper_row(vec x, vec y)
{
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                         29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(x), odd, _mm512_castps_si512(y));
}

/* The lanes of x that are infinite or NaN. */
VEC_INLINE vec_mask dot_odd(vec x)
{
    return _mm512_fpclass_ps_mask(x, 0x01 | 0x08 | 0x10 | 0x80);
}

/* The parts of 32 fp32 as rows at a, a + a_part, ... */
VEC_INLINE void dot_split_32(const int parts, uint16_t *a, int64_t a_part, vec x, vec y)
{
    const vec_mask odd_x = dot_odd(x), odd_y = dot_odd(y);
    const bool odd = (odd_x | odd_y) != 0;
    for (int i = 0; i < parts; i++) {
        _mm512_storeu_si512(a + i * a_part, dot_upper_row(x, y));
        x = vec_sub(x, dot_upper(x));
        y = vec_sub(y, dot_upper(y));
        if (odd) {
            x = vec_select(odd_x, vec_set(0.0f), x);
            y = vec_select(odd_y, vec_set(0.0f), y);
        }
    }
}

/* The parts of `count` dense fp32 as rows at a, a + a_part, ..., each 32 elements `step` after the 32 before;
 * zeros up to `padded`, a multiple of 32. */
static void dot_split(const int parts, uint16_t *a, int64_t a_part, int64_t step, const float *x,
                      int64_t count, int64_t padded)
{
    int64_t d = 0;
    for (; d + PAIR_LANES <= count; d += PAIR_LANES, a += step) {
        dot_split_32(parts, a, a_part, vec_load(x + d), vec_load(x + d + VEC_LANES));
    }
    for (; d < padded; d += PAIR_LANES, a += step) {
        dot_split_32(parts, a, a_part, dot_load_part(x, count, d), dot_load_part(x, count, d + VEC_LANES));
    }
}

/* `dim` elements `stride` apart from element `at` of src on, as dense fp32: where they lie, or in `copy`. */
static const float *dot_dense_row(float *copy, const void *src, int64_t at, attn_dtype dtype, int64_t stride,
                                  int64_t dim)
{
    if (dtype == ATTN_F32 && (stride == 1 || dim == 1)) {
        return attn__element(src, dtype, at);
    }
    widen(copy, src, at, dtype, stride, dim);
    return copy;
}

/*
 * One row: the parts of `count` elements of dtype, `stride` apart, as dot_split lays them out.  wide has room
 * for count fp32.
 */
static void dot_pack_row(uint16_t *a, int64_t a_part, int64_t step, const void *src, attn_dtype dtype,
                         int64_t stride, int64_t count, int64_t padded, float *wide)
{
    const uint16_t *from = src;
    if (dtype != ATTN_BF16) {
        const float *row = dot_dense_row(wide, src, 0, dtype, stride, count);
        dot_split(dot_parts_of(dtype), a, a_part, step, row, count, padded);
        return;
    }
    for (int64_t d = 0; d < padded && stride == 1; d += PAIR_LANES, a += step) {
        const int64_t left = attn__min(attn__max(count - d, 0), PAIR_LANES);
        const __mmask32 real = (__mmask32)(((uint64_t)1 << left) - 1);
        _mm512_storeu_si512(a, _mm512_maskz_loadu_epi16(real, from + d));
    }
    for (int64_t d = 0; d < padded && stride != 1; d++) {
        a[d / PAIR_LANES * step + d % PAIR_LANES] = d < count ? from[d * stride] : 0;
    }
}

/* Two rows of B, depths k and k + 1: the parts of x[count] and y[count]; zeros up to `padded` columns, a
 * multiple of 16. */
VEC_INLINE void dot_split_pairs(const int parts, uint16_t *b, int64_t b_part, const float *x, const float *y,
                                int64_t count, int64_t padded)
{
    for (int64_t d = 0; d < padded; d += VEC_LANES) {
        dot_store_pairs(parts, b + PAIR * d, b_part, dot_load_part(x, count, d), dot_load_part(y, count, d));
    }
}

/* Two rows of A, 32 bf16 each, as a row of B. */
VEC_INLINE void dot_store_rows(uint16_t *b, __m512i x, __m512i y)
{
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                         38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi16(VEC_LANES));
    _mm512_storeu_si512(b, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(b + PAIR_LANES, _mm512_permutex2var_epi16(x, high, y));
}

/* Two rows of B: rows x and y of bf16, `cols` long, a multiple of 16.  Returns whether all is finite. */
static bool dot_pair_rows(uint16_t *b, const uint16_t *x, const uint16_t *y, int64_t cols)
{
    const __m512i exponents = _mm512_set1_epi16(0x7f80);
    __mmask32 odd = 0;
    for (int64_t d = 0; d < cols; d += VEC_LANES) {
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(x + d)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(y + d)));
        const __m512i both = _mm512_or_si512(even, _mm512_slli_epi32(high, 16));
        odd |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponents), exponents);
        _mm512_storeu_si512(b + PAIR * d, both);
    }
    return odd == 0;
}

/*
 * 16 x `cols` pairs of bf16 transposed: to[j][i] = from[i][j].  A[16 rows][32 of depth] becomes B[16 pairs of
 * depth][16 cols]; B[16 pairs][cols] becomes A[cols][32].
 */
VEC_INLINE void dot_transpose_cols(const int cols, uint16_t *to, int64_t to_row, const uint16_t *from,
                                   int64_t from_row)
{
    FLASH_UNROLL
    for (int64_t j = 0; j < cols; j += 4) {
        __m512i x[4];
        FLASH_UNROLL
        for (int i = 0; i < 4; i++) { /* rows i, i + 4, i + 8, i + 12 side by side */
            const uint16_t *at = from + i * from_row + PAIR * j;
            x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)at));
            at += 4 * from_row;
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const void *)at), 1);
            at += 4 * from_row;
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const void *)at), 2);
            at += 4 * from_row;
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const void *)at), 3);
        }
        const __m512i low0 = _mm512_unpacklo_epi32(x[0], x[1]), low1 = _mm512_unpacklo_epi32(x[2], x[3]);
        const __m512i high0 = _mm512_unpackhi_epi32(x[0], x[1]), high1 = _mm512_unpackhi_epi32(x[2], x[3]);
        _mm512_storeu_si512(to + j * to_row, _mm512_unpacklo_epi64(low0, low1));
        _mm512_storeu_si512(to + (j + 1) * to_row, _mm512_unpackhi_epi64(low0, low1));
        _mm512_storeu_si512(to + (j + 2) * to_row, _mm512_unpacklo_epi64(high0, high1));
        _mm512_storeu_si512(to + (j + 3) * to_row, _mm512_unpackhi_epi64(high0, high1));
    }
}

static void dot_transpose(uint16_t *to, int64_t to_row, const uint16_t *from, int64_t from_row)
{
    dot_transpose_cols(VEC_LANES, to, to_row, from, from_row);
}

#endif
