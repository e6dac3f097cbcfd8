/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtype.c - element types: names, sizes, conversions to and from fp32 in plain C.
 *
 * fp16 is IEEE 754 binary16, bf16 the upper half of binary32.  Rounding is to nearest, ties to even, on both
 * ways down; subnormals are kept; a NaN stays a (quiet) NaN.  Dense rows of results go down 8 or 16 at a time
 * where the CPU has AVX2 or AVX-512, to the same bits.
 */
#include <string.h>
#if defined(__x86_64__)
#include "base/round_avx512.h"
#endif

#include "base/base.h"

size_t attn_dtype_size(attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_F32:
        return 4;
    case ATTN_F16:
    case ATTN_BF16:
        return 2;
    }
    return 0;
}

const char *attn_dtype_name(attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_F32:
        return "f32";
    case ATTN_F16:
        return "f16";
    case ATTN_BF16:
        return "bf16";
    }
    return "?";
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float attn__bf16_to_f32(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* Without branches, so that compilers turn loops of it into vectors. */
static inline uint16_t bf16_of(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    uint32_t quiet = bits | 0x400000u; /* or rounding could make a NaN inf */
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest) >> 16);
}

uint16_t attn__f32_to_bf16(float x)
{
    return bf16_of(x);
}

float attn__f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) { /* inf, NaN */
        return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    if (magnitude >= 0x400u) { /* normal: exponent bias 15 to 127 */
        return float_of(sign | ((magnitude << 13) + (112u << 23)));
    }
    float x = (float)magnitude * 0x1p-24f; /* subnormal or zero: exact in fp32 */
    return float_of(sign | bits_of(x));
}

uint16_t attn__f32_to_f16(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
    }
    if (magnitude >= 0x477ff000u) { /* 65520 and more round to inf */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude >= 0x38800000u) { /* 2^-14 and more: normal */
        uint32_t even = magnitude >> 13 & 1u;
        return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfffu + even) >> 13));
    }
    /* Subnormal: adding 0.5 makes the FPU round at 2^-24, half's last place. */
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
}

void attn_to_f32(float *dst, const void *src, attn_dtype dtype, int64_t stride, int64_t count)
{
    if (dtype == ATTN_F32) {
        const float *from = src;
        for (int64_t i = 0; i < count; i++) {
            dst[i] = from[i * stride];
        }
        return;
    }
    const uint16_t *from = src;
    for (int64_t i = 0; i < count; i++) {
        uint16_t half = from[i * stride];
        dst[i] = dtype == ATTN_F16 ? attn__f16_to_f32(half) : attn__bf16_to_f32(half);
    }
}

static void narrow_plain(uint16_t *to, attn_dtype dtype, const float *src, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        to[i] = dtype == ATTN_F16 ? attn__f32_to_f16(src[i]) : bf16_of(src[i]);
    }
}

#if defined(__x86_64__)
/* bf16_of() of 8 numbers, in the lower halves. */
__attribute__((target("avx2"))) static __m256i bf16_of_8(const float *src)
{
    const __m256 x = _mm256_loadu_ps(src);
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, nan), 16);
}

/* The three below return how many of `count` numbers they have turned. */

__attribute__((target("avx512f,avx512bw"))) static int64_t bf16_avx512(uint16_t *to, const float *src,
                                                                       int64_t count)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        _mm256_storeu_si256((void *)(to + i), attn__round_16(_mm512_loadu_ps(src + i)));
    }
    return i;
}

__attribute__((target("avx2"))) static int64_t bf16_avx2(uint16_t *to, const float *src, int64_t count)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i mixed = _mm256_packus_epi32(bf16_of_8(src + i), bf16_of_8(src + i + 8));
        _mm256_storeu_si256((void *)(to + i), _mm256_permute4x64_epi64(mixed, 0xd8));
    }
    return i;
}

__attribute__((target("avx2,f16c"))) static int64_t f16_avx2(uint16_t *to, const float *src, int64_t count)
{
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((void *)(to + i), halves);
    }
    return i;
}

static int64_t narrow_whole(uint16_t *to, attn_dtype dtype, const float *src, int64_t count)
{
    const uint32_t cpu = attn__cpu();
    if ((cpu & ATTN__CPU_AVX2) == 0) {
        return 0;
    }
    return dtype == ATTN_F16               ? f16_avx2(to, src, count)
           : (cpu & ATTN__CPU_AVX512) != 0 ? bf16_avx512(to, src, count)
                                           : bf16_avx2(to, src, count);
}
#else
static int64_t narrow_whole(uint16_t *to, attn_dtype dtype, const float *src, int64_t count)
{
    (void)to, (void)dtype, (void)src, (void)count;
    return 0;
}
#endif

/* A dense row of 16-bit numbers. */
static void narrow(uint16_t *to, attn_dtype dtype, const float *src, int64_t count)
{
    const int64_t done = narrow_whole(to, dtype, src, count);
    narrow_plain(to + done, dtype, src + done, count - done);
}

void attn_from_f32(void *dst, attn_dtype dtype, int64_t stride, const float *src, int64_t count)
{
    if (dtype == ATTN_F32) {
        float *to = dst;
        for (int64_t i = 0; i < count; i++) {
            to[i * stride] = src[i];
        }
        return;
    }
    if (stride == 1) {
        narrow(dst, dtype, src, count);
        return;
    }
    uint16_t *to = dst;
    for (int64_t i = 0; i < count; i++) {
        to[i * stride] = dtype == ATTN_F16 ? attn__f32_to_f16(src[i]) : bf16_of(src[i]);
    }
}
