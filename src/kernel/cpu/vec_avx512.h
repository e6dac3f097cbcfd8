/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_avx512.h - the vector vocabulary (see flash.inc.h) in AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
 *
 * Include it after <immintrin.h> and inside a region compiled for "avx512f,avx512bw,avx512dq,avx512vl".
 */
#ifndef ATTN_VEC_AVX512_H
#define ATTN_VEC_AVX512_H

#include <string.h>

enum { VEC_LANES = 16, VEC_ROWS = 12 };

typedef __m512 vec;
typedef __mmask16 vec_mask;

#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec vec_set(float x)
{
    return _mm512_set1_ps(x);
}
/* Two or four numbers, over and over. */
#define VEC_PAIRS
VEC_INLINE vec vec_set_pair(const float *p)
{
    double pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_castpd_ps(_mm512_set1_pd(pair));
}
VEC_INLINE vec vec_set_four(const float *p)
{
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}
/* a0, b0, a1, b1, ..: the first half, and the second */
VEC_INLINE vec vec_mix_low(vec a, vec b)
{
    const __m512i from = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutex2var_ps(a, from, b);
}
VEC_INLINE vec vec_mix_high(vec a, vec b)
{
    const __m512i from = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    return _mm512_permutex2var_ps(a, from, b);
}
/* The even lanes of a, then of b; the odd ones. */
VEC_INLINE vec vec_even(vec a, vec b)
{
    const __m512i from = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(a, from, b);
}
VEC_INLINE vec vec_odd(vec a, vec b)
{
    const __m512i from = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_ps(a, from, b);
}
VEC_INLINE vec vec_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
VEC_INLINE void vec_store(float *p, vec a)
{
    _mm512_storeu_ps(p, a);
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}
VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}
VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
VEC_INLINE vec vec_max(vec a, vec b)
{
    return _mm512_max_ps(a, b); /* b where a is NaN */
}
VEC_INLINE vec vec_min(vec a, vec b)
{
    return _mm512_min_ps(a, b); /* b where b is NaN */
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
/* The two steps of exp2 around its polynomial (flash_common.inc.h): x less the nearest integer n, and p * 2^n
 * or, below -126, 0.  3 operations and a comparison, where integers and selections take 7. */
#define VEC_POWERS
VEC_INLINE vec vec_fraction(vec x, vec *n)
{
    const vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *n = vec_sub(x, f);
    return f;
}
VEC_INLINE vec vec_times_power(vec p, vec n, vec x)
{
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vec_set(-126.0f), _CMP_NLT_UQ), p, n);
}
VEC_INLINE vec vec_select(vec_mask mask, vec yes, vec no)
{
    return _mm512_mask_blend_ps(mask, no, yes);
}
/* lanes first <= lane < last */
VEC_INLINE vec_mask vec_between(int32_t first, int32_t last)
{
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 from = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(first), _MM_CMPINT_NLT);
    return _mm512_mask_cmp_epi32_mask(from, lane, _mm512_set1_epi32(last), _MM_CMPINT_LT);
}

/* The lanes of dtype at p, widened. */
VEC_INLINE vec vec_load_as(const void *p, attn_dtype dtype)
{
    if (dtype == ATTN_F32) {
        return _mm512_loadu_ps(p);
    }
    __m256i half = _mm256_loadu_si256(p);
    return dtype == ATTN_F16 ? _mm512_cvtph_ps(half)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
/* Only the first `count` lanes; the others are 0, and not read. */
VEC_INLINE vec vec_load_part(const void *p, attn_dtype dtype, int count)
{
    const __mmask16 real = (__mmask16)((1u << count) - 1u);
    if (dtype == ATTN_F32) {
        return _mm512_maskz_loadu_ps(real, p);
    }
    __m256i half = _mm256_maskz_loadu_epi16(real, p);
    return dtype == ATTN_F16 ? _mm512_cvtph_ps(half)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VEC_INLINE vec vec_add_pairs(vec a, vec b)
{
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
/* In each quarter: the four sums of its lanes of a[0] .. a[3]. */
VEC_INLINE vec vec_add_quarters(const vec *a)
{
    __m512d low = _mm512_castps_pd(vec_add_pairs(a[0], a[1])),
            high = _mm512_castps_pd(vec_add_pairs(a[2], a[3]));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
}
VEC_INLINE vec vec_add_halves(vec a, vec b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
/* Lane i: the sum of all lanes of a[i]. */
VEC_INLINE vec vec_sums(const vec *a)
{
    vec low = vec_add_halves(vec_add_quarters(a), vec_add_quarters(a + 4));
    vec high = vec_add_halves(vec_add_quarters(a + 8), vec_add_quarters(a + 12));
    return vec_add_halves(low, high);
}
/* Lane j of a[i] and lane i of a[j] change places: first within quarters, then between them. */
VEC_INLINE void vec_transpose(vec *a)
{
    vec b[VEC_LANES];
    for (int i = 0; i < VEC_LANES; i += 4) {
        __m512d t0 = _mm512_castps_pd(_mm512_unpacklo_ps(a[i], a[i + 1]));
        __m512d t1 = _mm512_castps_pd(_mm512_unpackhi_ps(a[i], a[i + 1]));
        __m512d t2 = _mm512_castps_pd(_mm512_unpacklo_ps(a[i + 2], a[i + 3]));
        __m512d t3 = _mm512_castps_pd(_mm512_unpackhi_ps(a[i + 2], a[i + 3]));
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2));
        b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2));
        b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3));
        b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3));
    }
    for (int i = 0; i < 4; i++) {
        vec even0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88),
            odd0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        vec even1 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88),
            odd1 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        a[i] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        a[i + 12] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
}
/* of lanes without NaN */
VEC_INLINE float vec_greatest(vec a)
{
    return _mm512_reduce_max_ps(a);
}

/* n elements, dense, to fp32 */
VEC_INLINE void vec_widen(float *dst, const uint16_t *src, bool bf16, int64_t n)
{
    const attn_dtype dtype = bf16 ? ATTN_BF16 : ATTN_F16;
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        vec_store(dst + i, vec_load_as(src + i, dtype));
    }
    for (; i < n; i++) {
        dst[i] = bf16 ? attn__bf16_to_f32(src[i]) : attn__f16_to_f32(src[i]);
    }
}

#endif
