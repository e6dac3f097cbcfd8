/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_portable.h - the vector vocabulary (see flash.inc.h) without any instruction set in mind.
 *
 * gcc and clang turn their 16-byte vector type into SSE2, NEON, ... or scalar code, whatever the target has;
 * any other compiler gets vectors of one lane in plain C.  Both give the same values (no fused multiply-add
 * unless the compiler fuses by itself).
 */
#ifndef ATTN_VEC_PORTABLE_H
#define ATTN_VEC_PORTABLE_H

#include <string.h>

enum { VEC_ROWS = 6 };

#if defined(__GNUC__) && !defined(ATTN__ONE_LANE)

enum { VEC_LANES = 4 };
typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_mask __attribute__((vector_size(16)));
#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec vec_set(float x)
{
    return (vec){x, x, x, x};
}
VEC_INLINE vec vec_exponent(vec a)
{
    return (vec)((vec_mask)a << 23);
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return a < b;
}
VEC_INLINE vec vec_select(vec_mask mask, vec yes, vec no)
{
    return (vec)((mask & (vec_mask)yes) | (~mask & (vec_mask)no));
}
VEC_INLINE vec_mask vec_between(int32_t first, int32_t last)
{
    vec_mask lane = {0, 1, 2, 3};
    return (lane >= first) & (lane < last);
}
/* fp16 or bf16 to fp32.  The exponent and mantissa of an fp16 number, as those of an fp32 number, are the
 * number times 2^-112; inf and NaN keep their highest exponent. */
VEC_INLINE vec vec_of_halves(const void *p, attn_dtype dtype)
{
    typedef uint16_t halves __attribute__((vector_size(8)));
    halves half;
    memcpy(&half, p, sizeof half);
    vec_mask bits = __builtin_convertvector(half, vec_mask);
    if (dtype == ATTN_BF16) {
        return (vec)(bits << 16);
    }
    vec_mask size = (bits & 0x7fff) << 13;
    vec_mask wide = (vec_mask)((vec)size * 0x1p112f) | ((size >= 0x0f800000) & 0x7f800000);
    return (vec)(wide | (bits & 0x8000) << 16);
}

#else

enum { VEC_LANES = 1 };
typedef float vec;
typedef bool vec_mask;
#define VEC_INLINE static inline

VEC_INLINE vec vec_set(float x)
{
    return x;
}
VEC_INLINE vec vec_exponent(vec a)
{
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    bits <<= 23;
    memcpy(&a, &bits, sizeof a);
    return a;
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return a < b;
}
VEC_INLINE vec vec_select(vec_mask mask, vec yes, vec no)
{
    return mask ? yes : no;
}
VEC_INLINE vec_mask vec_between(int32_t first, int32_t last)
{
    return first <= 0 && 0 < last;
}
VEC_INLINE vec vec_of_halves(const void *p, attn_dtype dtype)
{
    float x;
    attn_to_f32(&x, p, dtype, 1, 1);
    return x;
}

#endif

VEC_INLINE vec vec_load(const float *p)
{
    vec a;
    memcpy(&a, p, sizeof a);
    return a;
}
VEC_INLINE void vec_store(float *p, vec a)
{
    memcpy(p, &a, sizeof a);
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return a + b;
}
VEC_INLINE vec vec_sub(vec a, vec b)
{
    return a - b;
}
VEC_INLINE vec vec_mul(vec a, vec b)
{
    return a * b;
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}
VEC_INLINE vec vec_max(vec a, vec b)
{
    return vec_select(vec_less(b, a), a, b); /* b where a is NaN */
}
VEC_INLINE vec vec_min(vec a, vec b)
{
    return vec_select(vec_less(a, b), a, b); /* b where b is NaN */
}

/* The lanes of dtype at p, widened. */
VEC_INLINE vec vec_load_as(const void *p, attn_dtype dtype)
{
    return dtype == ATTN_F32 ? vec_load(p) : vec_of_halves(p, dtype);
}
/* Only the first `count` lanes; the others are 0, and not read. */
VEC_INLINE vec vec_load_part(const void *p, attn_dtype dtype, int count)
{
    float lanes[VEC_LANES] = {0};
    attn_to_f32(lanes, p, dtype, 1, count);
    return vec_load(lanes);
}

/* Lane i: the sum of all lanes of a[i]. */
VEC_INLINE vec vec_sums(const vec *a)
{
    float sums[VEC_LANES];
    for (int i = 0; i < VEC_LANES; i++) {
        float lanes[VEC_LANES];
        vec_store(lanes, a[i]);
        sums[i] = 0.0f;
        for (int j = 0; j < VEC_LANES; j++) {
            sums[i] += lanes[j];
        }
    }
    return vec_load(sums);
}
/* Lane j of a[i] and lane i of a[j] change places. */
VEC_INLINE void vec_transpose(vec *a)
{
    float from[VEC_LANES * VEC_LANES], to[VEC_LANES * VEC_LANES];
    memcpy(from, a, sizeof from);
    for (int i = 0; i < VEC_LANES; i++) {
        for (int j = 0; j < VEC_LANES; j++) {
            to[j * VEC_LANES + i] = from[i * VEC_LANES + j];
        }
    }
    memcpy(a, to, sizeof to);
}
/* of lanes without NaN */
VEC_INLINE float vec_greatest(vec a)
{
    float lanes[VEC_LANES];
    vec_store(lanes, a);
    float greatest = lanes[0];
    for (int i = 1; i < VEC_LANES; i++) {
        greatest = lanes[i] > greatest ? lanes[i] : greatest;
    }
    return greatest;
}

/* n elements, dense, to fp32 */
VEC_INLINE void vec_widen(float *dst, const uint16_t *src, bool bf16, int64_t n)
{
    attn_to_f32(dst, src, bf16 ? ATTN_BF16 : ATTN_F16, 1, n);
}

#endif
