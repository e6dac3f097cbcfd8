/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_neon.h - the vector vocabulary (see flash.inc.h) in Advanced SIMD of AArch64: 4 lanes, 32 registers.
 *
 * Include it after <arm_neon.h>; every AArch64 processor has these instructions.
 */
#ifndef ATTN_VEC_NEON_H
#define ATTN_VEC_NEON_H

enum { VEC_LANES = 4, VEC_ROWS = 12 };

typedef float32x4_t vec;
typedef uint32x4_t vec_mask; /* all ones or all zeros in each lane */

#define VEC_INLINE static inline __attribute__((always_inline))

VEC_INLINE vec vec_set(float x)
{
    return vdupq_n_f32(x);
}
VEC_INLINE vec vec_load(const float *p)
{
    return vld1q_f32(p);
}
VEC_INLINE void vec_store(float *p, vec a)
{
    vst1q_f32(p, a);
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return vaddq_f32(a, b);
}
VEC_INLINE vec vec_sub(vec a, vec b)
{
    return vsubq_f32(a, b);
}
VEC_INLINE vec vec_mul(vec a, vec b)
{
    return vmulq_f32(a, b);
}
VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}
VEC_INLINE vec vec_max(vec a, vec b)
{
    return vmaxnmq_f32(a, b); /* the number where one is NaN: b where a is */
}
VEC_INLINE vec vec_min(vec a, vec b)
{
    return vminq_f32(a, b); /* NaN where either is */
}
VEC_INLINE vec vec_exponent(vec a)
{
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23));
}
VEC_INLINE vec_mask vec_less(vec a, vec b)
{
    return vcltq_f32(a, b);
}
VEC_INLINE vec vec_select(vec_mask mask, vec yes, vec no)
{
    return vbslq_f32(mask, yes, no);
}
/* lanes first <= lane < last */
VEC_INLINE vec_mask vec_between(int32_t first, int32_t last)
{
    const int32x4_t lane = vcombine_s32(vcreate_s32(UINT64_C(1) << 32), vcreate_s32(UINT64_C(3) << 32 | 2));
    return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
}

/* The lanes of dtype at p, widened. */
VEC_INLINE vec vec_load_as(const void *p, attn_dtype dtype)
{
    if (dtype == ATTN_F32) {
        return vld1q_f32(p);
    }
    const uint16x4_t half = vld1_u16(p);
    return dtype == ATTN_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(half))
                             : vreinterpretq_f32_u32(vshll_n_u16(half, 16));
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
    return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3]));
}
/* of lanes without NaN */
VEC_INLINE float vec_greatest(vec a)
{
    return vmaxvq_f32(a);
}

/* a[i][j] becomes a[j][i] */
VEC_INLINE void vec_transpose(vec *a)
{
    const float32x4_t low01 = vtrn1q_f32(a[0], a[1]), high01 = vtrn2q_f32(a[0], a[1]);
    const float32x4_t low23 = vtrn1q_f32(a[2], a[3]), high23 = vtrn2q_f32(a[2], a[3]);
    a[0] = vcombine_f32(vget_low_f32(low01), vget_low_f32(low23));
    a[1] = vcombine_f32(vget_low_f32(high01), vget_low_f32(high23));
    a[2] = vcombine_f32(vget_high_f32(low01), vget_high_f32(low23));
    a[3] = vcombine_f32(vget_high_f32(high01), vget_high_f32(high23));
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
