/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_common.inc.h - what the tiled kernels share whatever computes their products: exp2, the scratch,
 * dense rows, the mask along the lanes, values under the mask, and the probes of one instruction set.
 *
 * COST.  exp2: 14 operations a vector, 10 on AVX-512 (docs/exp.md).
 */
#include <math.h>
#include <string.h>

enum { PANEL = 2 * VEC_LANES }; /* queries side by side: two vectors */

/* Unrolls the loop that follows: its trip count is a constant once the function is inlined, and the
 * accumulators live in registers only if every index is a constant. */
#if defined(__clang__)
#define FLASH_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define FLASH_UNROLL _Pragma("GCC unroll 32")
#else
#define FLASH_UNROLL
#endif

/* Asks for the cache line at p; FAR: into the L2 alone. */
#if defined(__GNUC__)
#define FLASH_PREFETCH(p)     __builtin_prefetch(p)
#define FLASH_PREFETCH_FAR(p) __builtin_prefetch(p, 0, 1)
#else
#define FLASH_PREFETCH(p)     ((void)(p))
#define FLASH_PREFETCH_FAR(p) ((void)(p))
#endif
enum { LINE = 64, LINE_FLOATS = LINE / sizeof(float) }; /* bytes */

/* ---- exp2 ---------------------------------------------------------------------------------------- */

#ifndef VEC_POWERS
/* x less the nearest integer n: adding 1.5 * 2^23 rounds x to it, and 127 more puts the biased exponent in
 * the low bits of *t. */
VEC_INLINE vec vec_fraction(vec x, vec *t)
{
    const vec magic = vec_set(0x1.8p23f + 127.0f);
    *t = vec_add(x, magic);
    return vec_sub(x, vec_sub(*t, magic));
}

/* p * 2^n, but 0 for x < -126.  A product, not an integer addition to the exponent: that would turn some NaNs
 * into numbers. */
VEC_INLINE vec vec_times_power(vec p, vec t, vec x)
{
    return vec_select(vec_less(x, vec_set(-126.0f)), vec_set(0.0f), vec_mul(p, vec_exponent(t)));
}
#endif

/*
 * 2^x for x <= 127: 0 below -126, exactly 1 at 0, NaN for NaN.  x = n + f with |f| <= 1/2.  2^f = 1 + f *
 * p(f), nearly minimax with fp32 coefficients, off by 7.1e-9; 1.18 * 2^-24 in all (docs/exp.md).
 */
VEC_INLINE vec flash_exp2(vec x)
{
    vec n;
    const vec f = vec_fraction(x, &n);
    vec p = vec_set(0x1.4c13e0p-13f);
    p = vec_fma(p, f, vec_set(0x1.5fbfd0p-10f));
    p = vec_fma(p, f, vec_set(0x1.3b21c8p-7f));
    p = vec_fma(p, f, vec_set(0x1.c6ada8p-5f));
    p = vec_fma(p, f, vec_set(0x1.ebfbe6p-3f));
    p = vec_fma(p, f, vec_set(0x1.62e432p-1f));
    p = vec_fma(p, f, vec_set(1.0f));
    return vec_times_power(p, n, x);
}

/* ---- scratch and rows --------------------------------------------------------------------------- */

enum { SCRATCH_ALIGN = 64 / 4 }; /* floats */

/* Takes `floats` from the scratch at *used; a NULL scratch only counts. */
static float *take(float *scratch, size_t *used, int64_t floats)
{
    float *taken = scratch == NULL ? NULL : scratch + *used;
    *used += (size_t)(attn__ceil_div(floats, SCRATCH_ALIGN) * SCRATCH_ALIGN);
    return taken;
}

/* count elements, `stride` apart, from element `offset` of src on, to dense fp32 */
static void widen(float *dst, const void *src, int64_t offset, attn_dtype dtype, int64_t stride,
                  int64_t count)
{
    const void *from = attn__element(src, dtype, offset);
    if (stride != 1) {
        attn_to_f32(dst, from, dtype, stride, count);
    } else if (dtype == ATTN_F32) {
        memcpy(dst, from, sizeof(float) * (size_t)count);
    } else {
        vec_widen(dst, from, dtype == ATTN_BF16, count);
    }
}

/* ---- the mask ------------------------------------------------------------------------------------- */

/* The mask along one panel's lanes. */
typedef struct flash_band {
    int64_t row; /* position of lane 0 */
    int64_t lo, hi;
} flash_band;

/* Lanes from `lane` on that see the key at `position`: lo <= position - row <= hi. */
static vec_mask visible(const flash_band *band, int64_t position, int64_t lane)
{
    int64_t first = position - band->hi - band->row - lane;
    int64_t last = position - band->lo - band->row - lane + 1;
    return vec_between((int32_t)attn__min(attn__max(first, 0), VEC_LANES),
                       (int32_t)attn__min(attn__max(last, 0), VEC_LANES));
}

/* Scores of keys that not every lane sees: -inf where the lane does not.  n vectors of lanes, rows of s s_row
 * apart. */
static void mask_scores(const int n, float *s, int64_t s_row, const flash_band *band, int64_t position,
                        int64_t count)
{
    const vec never = vec_set(-INFINITY);
    for (int64_t j = 0; j < count; j++) {
        for (int64_t lane = 0; lane < n * VEC_LANES; lane += VEC_LANES) {
            float *at = s + j * s_row + lane;
            vec_store(at, vec_select(visible(band, position + j, lane), vec_load(at), never));
        }
    }
}

/* Raises the maxima of n vectors of lanes by `count` keys, rows of s s_row apart; NaN does not count. */
VEC_INLINE void raise_max(const int n, const float *s, int64_t s_row, int64_t count, vec *max)
{
    vec even[2], odd[2]; /* a second set of chains hides the latency of the maximum */
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        even[c] = odd[c] = max[c];
    }
    for (int64_t j = 0; j < count / 2; j++) {
        const float *at = s + 2 * j * s_row;
        FLASH_UNROLL
        for (int c = 0; c < n; c++) {
            even[c] = vec_max(vec_load(at + c * VEC_LANES), even[c]);
            odd[c] = vec_max(vec_load(at + s_row + c * VEC_LANES), odd[c]);
        }
    }
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        if (count % 2 != 0) {
            odd[c] = vec_max(vec_load(s + (count - 1) * s_row + c * VEC_LANES), odd[c]);
        }
        max[c] = vec_max(odd[c], even[c]);
    }
}

/* Whether all of v[dim] is finite: no exponent is all ones. */
static bool all_finite(const float *v, int64_t dim)
{
    uint32_t most = 0;
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits;
        memcpy(&bits, v + d, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000;
}

/* O^T takes in one key under the mask: lanes that do not see it are left alone, whatever v holds. */
static void value_masked(const int n, float *ot, const flash_band *band, int64_t position, const float *v,
                         int64_t dim, const float *p)
{
    for (int64_t lane = 0; lane < n * VEC_LANES; lane += VEC_LANES) {
        vec_mask seen = visible(band, position, lane);
        vec weight = vec_load(p + lane);
        for (int64_t d = 0; d < dim; d++) {
            float *at = ot + d * PANEL + lane;
            vec old = vec_load(at);
            vec_store(at, vec_select(seen, vec_fma(vec_set(v[d]), weight, old), old));
        }
    }
}

/* ---- the probe ----------------------------------------------------------------------------------- */

static void probe_exp2(float *y, const float *x, int64_t count)
{
    int64_t i = 0;
    for (; i + VEC_LANES <= count; i += VEC_LANES) {
        vec_store(y + i, flash_exp2(vec_load(x + i)));
    }
    for (; i < count; i++) {
        float lanes[VEC_LANES];
        vec_store(lanes, flash_exp2(vec_set(x[i])));
        y[i] = lanes[0];
    }
}

static int64_t probe_peak(int64_t rounds, float *sink)
{
    const vec half = vec_set(0.5f), one = vec_set(1.0f);
    vec acc[VEC_ROWS][2];
    /* Chains that are equal, or that begin at 2 and stay there, compilers merge or drop. */
    FLASH_UNROLL
    for (int i = 0; i < VEC_ROWS; i++) {
        acc[i][0] = vec_set((float)(2 * i + 3));
        acc[i][1] = vec_set((float)(2 * i + 4));
    }
    for (int64_t r = 0; r < rounds; r++) {
        FLASH_UNROLL
        for (int i = 0; i < VEC_ROWS; i++) {
            acc[i][0] = vec_fma(acc[i][0], half, one);
            acc[i][1] = vec_fma(acc[i][1], half, one);
        }
    }
    vec total = vec_set(0.0f);
    FLASH_UNROLL
    for (int i = 0; i < VEC_ROWS; i++) {
        total = vec_add(total, vec_add(acc[i][0], acc[i][1]));
    }
    float lanes[VEC_LANES];
    vec_store(lanes, total);
    *sink = lanes[0];
    return rounds * VEC_ROWS * 2 * VEC_LANES * 2;
}

/* Adds up an array, with as many chains as hide the latency of an addition. */
static float probe_read(const void *array, size_t bytes)
{
    enum { CHAINS = 8 };
    const float *at = array;
    const int64_t count = (int64_t)(bytes / sizeof(float));
    vec sum[CHAINS];
    FLASH_UNROLL
    for (int i = 0; i < CHAINS; i++) {
        sum[i] = vec_set(0.0f);
    }
    for (int64_t j = 0; j + CHAINS * VEC_LANES <= count; j += CHAINS * VEC_LANES) {
        FLASH_UNROLL
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = vec_add(sum[i], vec_load(at + j + i * VEC_LANES));
        }
    }
    FLASH_UNROLL
    for (int i = 1; i < CHAINS; i++) {
        sum[0] = vec_add(sum[0], sum[i]);
    }
    float lanes[VEC_LANES];
    vec_store(lanes, sum[0]);
    return lanes[0];
}
