/* SPDX-License-Identifier: Apache-2.0 */
/*
 * micro.inc.h - the innermost loops of flash.inc.h and flash_backward.inc.h: the products, in the vector
 * vocabulary.
 *
 * METHOD.  Register blocking as in any matrix product (Goto & van de Geijn, ACM TOMS 34(3), 2008), but with
 * one operand broadcast straight from memory and the other, two vectors wide, from the L1 cache: m rows take
 * m + 2 loads for 2 m FMAs, and 2 m accumulators never leave the registers.
 *
 * COST.  m = 6 (16 registers): 8 loads to 12 FMAs; m = 12 (32 registers): 14 to 24.  A core that does two
 * loads and two FMAs a cycle is bound by the FMAs from m = 2 on; m >= 4 also hides their latency of 4 cycles.
 *
 * A panel of few queries is narrow: one broadcast of 2 or 4 dims (flash_shape) serves 2 or 3 vectors, in
 * which a query has as many lanes side by side, a dim each.  3 vectors take m + 3 loads for 3 m FMAs.
 */
#include "kernel/cpu/flash_ask.inc.h"

#ifndef VEC_PAIRS
/* What needs these is compiled and then left out. */
enum { FLASH_PAIRS = false };
VEC_INLINE vec vec_set_pair(const float *p)
{
    return vec_set(*p);
}
VEC_INLINE vec vec_set_four(const float *p)
{
    return vec_set(*p);
}
VEC_INLINE vec vec_mix_low(vec a, vec b)
{
    return vec_add(a, b);
}
VEC_INLINE vec vec_mix_high(vec a, vec b)
{
    return vec_add(a, b);
}
VEC_INLINE vec vec_even(vec a, vec b)
{
    return vec_add(a, b);
}
VEC_INLINE vec vec_odd(vec a, vec b)
{
    return vec_add(a, b);
}
#else
enum { FLASH_PAIRS = true };
#endif

/* How a panel lies in vectors: Q^T and O^T are [dim / dims][query][dims], `vectors` of them a row. */
typedef struct flash_shape {
    int dims, vectors;
} flash_shape;

enum { FLASH_WIDE = 3 * VEC_LANES }; /* a row of any shape, at most */
static const flash_shape flash_whole = {1, 2};

/* What is made for each shape is a function of its own: in one, compilers run short of registers. */
#define FLASH_SHAPES(make) make(1, 1) make(1, 2) make(2, 2) make(2, 3) make(4, 2) make(4, 3)
#define FLASH_BY_SHAPE(made)                                                                                 \
    {                                                                                                        \
        [1] = {[1] = made##_1_1, [2] = made##_1_2}, [2] = {[2] = made##_2_2, [3] = made##_2_3},              \
        [4] = {[2] = made##_4_2, [3] = made##_4_3},                                                          \
    }

/* Of `rows` queries: the narrowest shape that holds them. */
static flash_shape flash_shape_of(int64_t rows, int64_t dim_qk, int64_t dim_v)
{
    for (int dims = 4; dims > 1 && FLASH_PAIRS; dims /= 2) {
        for (int vectors = 2; vectors <= 3; vectors++) {
            if (rows * dims <= vectors * VEC_LANES && dim_qk % dims == 0 && dim_v % dims == 0) {
                return (flash_shape){dims, vectors};
            }
        }
    }
    return (flash_shape){1, rows > VEC_LANES ? 2 : 1};
}

VEC_INLINE int flash_queries(const flash_shape shape)
{
    return shape.vectors * VEC_LANES / shape.dims;
}

/* Vectors of scores, maxima and sums: a lane a query. */
VEC_INLINE int flash_vectors(const flash_shape shape)
{
    return shape.vectors > shape.dims ? 2 : 1;
}

/* From row to row of these and of weights, for any shape no less than PANEL. */
VEC_INLINE int flash_row(const flash_shape shape)
{
    return shape.vectors == 3 ? FLASH_WIDE : PANEL;
}

/* A query's lane of a, of flash_vectors, becomes `dims` lanes. */
VEC_INLINE void flash_repeat(const flash_shape shape, const vec *a, vec *lanes)
{
    lanes[0] = a[0];
    lanes[1] = lanes[2] = a[flash_vectors(shape) - 1];
    FLASH_UNROLL
    for (int dims = shape.dims; dims > 1; dims /= 2) {
        const vec first = lanes[0], second = dims == 4 ? first : lanes[1];
        lanes[0] = vec_mix_low(first, first);
        lanes[1] = vec_mix_high(first, first);
        lanes[2] = vec_mix_low(second, second);
    }
}

/* Keys or values for some panels, fp32 with dense dims. */
typedef struct flash_rows {
    const float *at;
    int64_t token;
    flash_ask ask;
} flash_rows;

/* ---- micro-kernels ------------------------------------------------------------------------------- */

/* Rows of a micro-kernel, at most. */
VEC_INLINE int flash_most(const flash_shape shape)
{
    return 2 * VEC_ROWS / shape.vectors;
}

/* Rows of the next micro-kernel when `left` remain: pieces of 4 and more keep the FMA units busy (8 chains),
 * so 8 is cut 4 + 4 and not 6 + 2. */
VEC_INLINE int flash_step(const int most, int64_t left)
{
    if (left >= most && (left != 8 || most == 8)) {
        return most;
    }
    if (most > 8 && left >= 8) {
        return 8;
    }
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Steps of a micro-kernel until ASK_LINES are due. */
VEC_INLINE int64_t flash_ask_steps(const int m, const flash_shape shape, const flash_ask *next)
{
    return attn__max(ASK_LINES * next->period / (m * shape.dims), 2);
}

/* `dims` numbers, over and over. */
VEC_INLINE vec flash_broadcast(const flash_shape shape, const float *p)
{
    return shape.dims == 4 ? vec_set_four(p) : shape.dims == 2 ? vec_set_pair(p) : vec_set(*p);
}

/* s[lanes] = the sums of each query's lanes of acc */
VEC_INLINE void flash_store_sums(const flash_shape shape, float *s, vec *acc)
{
    FLASH_UNROLL
    for (int dims = shape.dims; dims > 1; dims /= 2) {
        acc[0] = vec_add(vec_even(acc[0], acc[1]), vec_odd(acc[0], acc[1]));
        acc[1] = shape.vectors == 3 ? vec_add(vec_even(acc[2], acc[2]), vec_odd(acc[2], acc[2])) : acc[0];
        acc[2] = acc[1];
    }
    vec_store(s, acc[0]);
    if (flash_vectors(shape) == 2) {
        vec_store(s + VEC_LANES, acc[1]);
    }
}

/* s[m][lanes] = k[m][dim] * qt[dim / dims][lanes][dims]; rows of s s_row apart */
VEC_INLINE void score_rows(const int m, const flash_shape shape, float *s, int64_t s_row, const float *k,
                           int64_t k_token, const float *qt, int64_t dim, flash_ask *asked)
{
    flash_ask next = *asked;
    vec acc[2 * VEC_ROWS][3];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        FLASH_UNROLL
        for (int c = 0; c < shape.vectors; c++) {
            acc[i][c] = vec_set(0.0f);
        }
    }
    const float *fourth[(2 * VEC_ROWS + 3) / 4]; /* of k: 24 rows are more than there are address registers */
    FLASH_UNROLL
    for (int i = 0; i < (m + 3) / 4; i++) {
        fourth[i] = k + 4 * i * k_token;
    }
    const int64_t steps = flash_ask_steps(m, shape, &next);
    for (int64_t d = 0, end; d < dim;) {
        end = attn__min(d + steps * shape.dims, dim);
        ask(&next, 1, m * (end - d));
        for (; d < end; d += shape.dims, qt += flash_row(shape)) {
            vec q[3];
            FLASH_UNROLL
            for (int c = 0; c < shape.vectors; c++) {
                q[c] = vec_load(qt + c * VEC_LANES);
            }
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                const vec x = flash_broadcast(shape, &fourth[i / 4][i % 4 * k_token]);
                FLASH_UNROLL
                for (int c = 0; c < shape.vectors; c++) {
                    acc[i][c] = vec_fma(x, q[c], acc[i][c]);
                }
            }
            FLASH_UNROLL
            for (int i = 0; i < (m + 3) / 4; i++) {
                fourth[i] += shape.dims;
            }
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        flash_store_sums(shape, s + i * s_row, acc[i]);
    }
    *asked = next;
}

VEC_INLINE void score_lanes(const flash_shape shape, float *s, int64_t s_row, flash_rows *rows, int64_t from,
                            int64_t to, const float *qt, int64_t dim)
{
    const int most = flash_most(shape);
    const int64_t token = rows->token;
    const float *k = rows->at + from * token;
    int m;
    for (; from < to; from += m, s += m * s_row, k += m * token) {
        m = flash_step(most, to - from);
        if (m == most) {
            score_rows(most, shape, s, s_row, k, token, qt, dim, &rows->ask);
        } else if (most > 8 && m == 8) {
            score_rows(most > 8 ? 8 : 1, shape, s, s_row, k, token, qt, dim, &rows->ask);
        } else if (m == 4) {
            score_rows(4, shape, s, s_row, k, token, qt, dim, &rows->ask);
        } else if (m == 2) {
            score_rows(2, shape, s, s_row, k, token, qt, dim, &rows->ask);
        } else {
            score_rows(1, shape, s, s_row, k, token, qt, dim, &rows->ask);
        }
    }
}

#define SCORE_LANES(dims, vectors)                                                                           \
    static void score_##dims##_##vectors(float *s, int64_t s_row, flash_rows *rows, int64_t from,            \
                                         int64_t to, const float *qt, int64_t dim)                           \
    {                                                                                                        \
        score_lanes((flash_shape){dims, vectors}, s, s_row, rows, from, to, qt, dim);                        \
    }
FLASH_SHAPES(SCORE_LANES)

/* S^T of the keys from .. to and one panel */
static void score_panel(const flash_shape shape, float *s, int64_t s_row, flash_rows *rows, int64_t from,
                        int64_t to, const float *qt, int64_t dim)
{
    static void (*const lanes[][4])(float *, int64_t, flash_rows *, int64_t, int64_t, const float *,
                                    int64_t) = FLASH_BY_SHAPE(score);
    lanes[shape.dims][shape.vectors](s, s_row, rows, from, to, qt, dim);
}

/* ot[m][lanes] = ot * fade + v[count][m * dims]^T * p[count][lanes]; p and fade have flash_repeat's lanes.
 * The new keys are summed apart from the old ones: blocks of a sum keep its rounding error small, and one FMA
 * at the end is no dearer than a product before. */
VEC_INLINE void value_rows(const int m, const flash_shape shape, float *ot, const float *fade, const float *v,
                           int64_t v_token, const float *p, int64_t count, flash_ask *asked)
{
    flash_ask next = *asked;
    vec acc[2 * VEC_ROWS][3];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        FLASH_UNROLL
        for (int c = 0; c < shape.vectors; c++) {
            acc[i][c] = vec_set(0.0f);
        }
    }
    const int64_t steps = flash_ask_steps(m, shape, &next);
    for (int64_t j = 0, end; j < count;) {
        end = attn__min(j + steps, count);
        ask(&next, 1, m * shape.dims * (end - j));
        for (; j < end; j++, p += flash_row(shape), v += v_token) {
            vec lanes[3];
            FLASH_UNROLL
            for (int c = 0; c < shape.vectors; c++) {
                lanes[c] = vec_load(p + c * VEC_LANES);
            }
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                const vec x = flash_broadcast(shape, v + shape.dims * i);
                FLASH_UNROLL
                for (int c = 0; c < shape.vectors; c++) {
                    acc[i][c] = vec_fma(x, lanes[c], acc[i][c]);
                }
            }
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        FLASH_UNROLL
        for (int c = 0; c < shape.vectors; c++) {
            float *at = ot + i * flash_row(shape) + c * VEC_LANES;
            vec_store(at, vec_fma(vec_load(at), vec_load(fade + c * VEC_LANES), acc[i][c]));
        }
    }
    *asked = next;
}

VEC_INLINE void value_lanes(const flash_shape shape, float *ot, const float *fade, flash_rows *rows,
                            int64_t from, int64_t to, int64_t dim, const float *p)
{
    const int most = flash_most(shape), dims = shape.dims;
    const int64_t token = rows->token, count = to - from;
    const float *v = rows->at + from * token;
    int m;
    for (int64_t d = 0; d < dim; d += m * dims, ot += m * flash_row(shape), v += m * dims) {
        m = flash_step(most, (dim - d) / dims);
        if (m == most) {
            value_rows(most, shape, ot, fade, v, token, p, count, &rows->ask);
        } else if (most > 8 && m == 8) {
            value_rows(most > 8 ? 8 : 1, shape, ot, fade, v, token, p, count, &rows->ask);
        } else if (m == 4) {
            value_rows(4, shape, ot, fade, v, token, p, count, &rows->ask);
        } else if (m == 2) {
            value_rows(2, shape, ot, fade, v, token, p, count, &rows->ask);
        } else {
            value_rows(1, shape, ot, fade, v, token, p, count, &rows->ask);
        }
    }
}

#define VALUE_LANES(dims, vectors)                                                                           \
    static void value_##dims##_##vectors(float *ot, const float *fade, flash_rows *rows, int64_t from,       \
                                         int64_t to, int64_t dim, const float *p)                            \
    {                                                                                                        \
        value_lanes((flash_shape){dims, vectors}, ot, fade, rows, from, to, dim, p);                         \
    }
FLASH_SHAPES(VALUE_LANES)

/* O^T of one panel takes in the values from .. to, of weights p[count][flash_row] */
static void value_panel(const flash_shape shape, float *ot, const float *fade, flash_rows *rows, int64_t from,
                        int64_t to, int64_t dim, const float *p)
{
    static void (*const lanes[][4])(float *, const float *, flash_rows *, int64_t, int64_t, int64_t,
                                    const float *) = FLASH_BY_SHAPE(value);
    lanes[shape.dims][shape.vectors](ot, fade, rows, from, to, dim, p);
}

/* ---- sums of gradients ---------------------------------------------------------------------------- */

/*
 * out[row][dim] += factor * sum over c of w[row, c] * x[c][dim]: dV, dK (rows are keys, c queries) and dQ
 * (the other way round).  w is P^T or dS^T, broadcast from where it lies; x is cut into strips of PANEL dims,
 * so that a strip is dense and stays in the L1 cache.  Row r takes c from r + low to r + high only: the mask.
 */
typedef struct flash_product {
    float *out;
    int64_t out_token;
    const float *w;
    const float *x; /* [strip][x_rows][PANEL] */
    int64_t x_rows;
    int64_t rows, count, dim;
    int64_t low, high;
    float factor;
} flash_product;

/* The dims at the end that fill no vector. */
static void add_part(float *out, int64_t out_token, const float *sum, int rows, int64_t width, float factor)
{
    for (int i = 0; i < rows; i++) {
        for (int64_t d = 0; d < width; d++) {
            out[i * out_token + d] += factor * sum[i * PANEL + d];
        }
    }
}

/* m rows by n vectors, of which `width` dims are real */
VEC_INLINE void gradient_rows(const int m, const int n, const int64_t w_row, const int64_t w_step,
                              const flash_product *product, float *out, const float *w, const float *x,
                              int64_t count, int64_t width)
{
    vec acc[VEC_ROWS][2];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        acc[i][0] = vec_set(0.0f);
        acc[i][1] = vec_set(0.0f);
        FLASH_PREFETCH(out + i * product->out_token);
        if (n * VEC_LANES > LINE_FLOATS) {
            FLASH_PREFETCH(out + i * product->out_token + LINE_FLOATS);
        }
    }
    for (int64_t c = 0; c < count; c++) {
        vec x0 = vec_load(x);
        vec x1 = n == 2 ? vec_load(x + VEC_LANES) : x0;
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            vec y = vec_set(w[i * w_row]);
            acc[i][0] = vec_fma(y, x0, acc[i][0]);
            acc[i][1] = n == 2 ? vec_fma(y, x1, acc[i][1]) : acc[i][1];
        }
        w += w_step;
        x += PANEL;
    }
    if (width == n * VEC_LANES) {
        const vec factor = vec_set(product->factor);
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            float *at = out + i * product->out_token;
            vec_store(at, vec_fma(acc[i][0], factor, vec_load(at)));
            if (n == 2) {
                vec_store(at + VEC_LANES, vec_fma(acc[i][1], factor, vec_load(at + VEC_LANES)));
            }
        }
    } else {
        float sum[VEC_ROWS * PANEL];
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            vec_store(sum + i * PANEL, acc[i][0]);
            vec_store(sum + i * PANEL + VEC_LANES, acc[i][1]);
        }
        add_part(out, product->out_token, sum, m, width, product->factor);
    }
}

/* One strip of n vectors, all rows. */
VEC_INLINE void gradient_strip(const int n, const int64_t w_row, const int64_t w_step,
                               const flash_product *product, float *out, const float *x, int64_t width)
{
    int m;
    for (int64_t row = 0; row < product->rows; row += m, out += m * product->out_token) {
        m = flash_step(VEC_ROWS, product->rows - row);
        int64_t from = attn__max(0, row + product->low);
        int64_t count = attn__min(product->count, row + m + product->high) - from;
        if (count <= 0) {
            continue;
        }
        const float *w = product->w + row * w_row + from * w_step, *at = x + from * PANEL;
        if (m == VEC_ROWS) {
            gradient_rows(VEC_ROWS, n, w_row, w_step, product, out, w, at, count, width);
        } else if (VEC_ROWS > 8 && m == 8) {
            gradient_rows(VEC_ROWS > 8 ? 8 : 1, n, w_row, w_step, product, out, w, at, count, width);
        } else if (m == 4) {
            gradient_rows(4, n, w_row, w_step, product, out, w, at, count, width);
        } else if (m == 2) {
            gradient_rows(2, n, w_row, w_step, product, out, w, at, count, width);
        } else {
            gradient_rows(1, n, w_row, w_step, product, out, w, at, count, width);
        }
    }
}

VEC_INLINE void gradient_strips(const int64_t w_row, const int64_t w_step, const flash_product *product)
{
    for (int64_t d = 0; d < product->dim; d += PANEL) {
        const float *x = product->x + d * product->x_rows;
        const int64_t width = attn__min(PANEL, product->dim - d);
        if (width > VEC_LANES) {
            gradient_strip(2, w_row, w_step, product, product->out + d, x, width);
        } else {
            gradient_strip(1, w_row, w_step, product, product->out + d, x, width);
        }
    }
}
