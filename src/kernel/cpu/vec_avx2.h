/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_avx2.h - the vector vocabulary (see flash.inc.h) in AVX2, FMA and F16C: 8 lanes, 16 registers.
 *
 * Include it after <immintrin.h> and inside a region compiled for "avx2,fma,f16c".
 */
#ifndef ATTN_VEC_AVX2_H
#define ATTN_VEC_AVX2_H

#include <string.h>

enum { VEC_LANES = 8, VEC_ROWS = 6 };

typedef __m256 vec;
typedef __m256 vec_mask; /* all ones or all zeros in each lane */

#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec vec_set(float x)
{
    return _mm256_set1_ps(x);
}
/* As in vec_avx512.h. */
#define VEC_PAIRS
VEC_INLINE vec vec_set_pair(const float *p)
{
    double pair;
    memcpy(&pair, p, sizeof pair);
    return _mm256_castpd_ps(_mm256_set1_pd(pair));
}
VEC_INLINE vec vec_set_four(const float *p)
{
    return _mm256_broadcast_ps((const __m128 *)p);
}
VEC_INLINE vec vec_mix_low(vec a, vec b)
{
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
VEC_INLINE vec vec_mix_high(vec a, vec b)
{
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
VEC_INLINE vec vec_fours(vec a) /* of a vector of pairs 0, 2, 1, 3 */
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8));
}
VEC_INLINE vec vec_even(vec a, vec b)
{
    return vec_fours(_mm256_shuffle_ps(a, b, 0x88));
}
VEC_INLINE vec vec_odd(vec a, vec b)
{
    return vec_fours(_mm256_shuffle_ps(a, b, 0xdd));
}
VEC_INLINE vec vec_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
VEC_INLINE void vec_store(float *p, vec a)
{
    _mm256_storeu_ps(p, a);
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}
VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}
VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
VEC_INLINE vec vec_max(vec a, vec b)
{
    return _mm256_max_ps(a, b); /* b where a is NaN */
}
VEC_INLINE vec vec_min(vec a, vec b)
{
    return _mm256_min_ps(a, b); /* b where b is NaN */
}
VEC_INLINE vec vec_exponent(vec a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
VEC_INLINE vec vec_select(vec_mask mask, vec yes, vec no)
{
    return _mm256_blendv_ps(no, yes, mask);
}
/* lanes first <= lane < last */
VEC_INLINE vec_mask vec_between(int32_t first, int32_t last)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(below, within));
}

/* The lanes of dtype at p, widened. */
VEC_INLINE vec vec_load_as(const void *p, attn_dtype dtype)
{
    if (dtype == ATTN_F32) {
        return _mm256_loadu_ps(p);
    }
    __m128i half = _mm_loadu_si128(p);
    return dtype == ATTN_F16 ? _mm256_cvtph_ps(half)
                             : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
/* Only the first `count` lanes; the others are 0, and not read. */
VEC_INLINE vec vec_load_part(const void *p, attn_dtype dtype, int count)
{
    if (dtype == ATTN_F32) {
        return _mm256_maskload_ps(p, _mm256_castps_si256(vec_between(0, count)));
    }
    uint16_t part[8] = {0}; /* AVX2 has no masked load of 2 bytes */
    memcpy(part, p, sizeof part[0] * (size_t)count);
    return vec_load_as(part, dtype);
}

VEC_INLINE vec vec_add_pairs(vec a, vec b)
{
    return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
}
/* In each half: the four sums of its lanes of a[0] .. a[3]. */
VEC_INLINE vec vec_add_quarters(const vec *a)
{
    __m256d low = _mm256_castps_pd(vec_add_pairs(a[0], a[1])),
            high = _mm256_castps_pd(vec_add_pairs(a[2], a[3]));
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
}
/* Lane i: the sum of all lanes of a[i]. */
VEC_INLINE vec vec_sums(const vec *a)
{
    vec low = vec_add_quarters(a), high = vec_add_quarters(a + 4);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
/* Lane j of a[i] and lane i of a[j] change places: first within halves, then between them. */
VEC_INLINE void vec_transpose(vec *a)
{
    vec b[VEC_LANES];
    for (int i = 0; i < VEC_LANES; i += 4) {
        __m256d t0 = _mm256_castps_pd(_mm256_unpacklo_ps(a[i], a[i + 1]));
        __m256d t1 = _mm256_castps_pd(_mm256_unpackhi_ps(a[i], a[i + 1]));
        __m256d t2 = _mm256_castps_pd(_mm256_unpacklo_ps(a[i + 2], a[i + 3]));
        __m256d t3 = _mm256_castps_pd(_mm256_unpackhi_ps(a[i + 2], a[i + 3]));
        b[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(t0, t2));
        b[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(t0, t2));
        b[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(t1, t3));
        b[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(t1, t3));
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        a[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
/* of lanes without NaN */
VEC_INLINE float vec_greatest(vec a)
{
    a = _mm256_max_ps(a, _mm256_permute2f128_ps(a, a, 1));
    a = _mm256_max_ps(a, _mm256_permute_ps(a, 0x4e));
    a = _mm256_max_ps(a, _mm256_permute_ps(a, 0xb1));
    return _mm256_cvtss_f32(a);
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
