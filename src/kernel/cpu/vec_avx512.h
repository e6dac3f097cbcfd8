/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_avx512.h - the vector vocabulary (see flash.inc.h) in AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
 *
 * Include it after <immintrin.h> and inside a region compiled for "avx512f,avx512bw,avx512dq,avx512vl".
 */
#ifndef ATTN_VEC_AVX512_H
#define ATTN_VEC_AVX512_H

enum { VEC_LANES = 16, VEC_ROWS = 12 };

typedef __m512 vec;
typedef __mmask16 vec_mask;

#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec vec_set(float x)
{
    return _mm512_set1_ps(x);
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
VEC_INLINE vec vec_exponent(vec a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
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

/* n elements, dense, to fp32 */
VEC_INLINE void vec_widen(float *dst, const uint16_t *src, bool bf16, int64_t n)
{
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        __m256i half = _mm256_loadu_si256((const void *)(src + i));
        __m512 wide = bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))
                           : _mm512_cvtph_ps(half);
        _mm512_storeu_ps(dst + i, wide);
    }
    for (; i < n; i++) {
        dst[i] = bf16 ? attn__bf16_to_f32(src[i]) : attn__f16_to_f32(src[i]);
    }
}

#endif
