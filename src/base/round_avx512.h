/* SPDX-License-Identifier: Apache-2.0 */
/* round_avx512.h - bf16 of 16 fp32 at once: to nearest, ties to even, a NaN quiet, as attn__f32_to_bf16(). */
#ifndef ATTN_BASE_ROUND_AVX512_H
#define ATTN_BASE_ROUND_AVX512_H

#include <immintrin.h>

__attribute__((always_inline, target("avx512f,avx512bw"))) static inline __m256i attn__round_16(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_mask_or_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                                 _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

#endif
