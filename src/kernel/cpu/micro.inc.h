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
 * Panels of few queries are one vector wide: 2 m rows then, 13 loads to 12 FMAs or 25 to 24, and loads are
 * the limit.  So where dims are in whole pairs (FLASH_PAIRED) one broadcast of two dims serves two vectors:
 * the first half of the queries, each in two lanes, even dim and odd dim, and the second half.  Then m is as
 * above.
 */
#include "kernel/cpu/flash_common.inc.h"

#ifndef VEC_PAIRS
/* What needs these is compiled and then left out. */
enum { FLASH_PAIRS = false };
VEC_INLINE vec vec_set_pair(const float *p)
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

/* How the lanes of a panel are used: one vector of queries, two, or one with dims in pairs. */
typedef enum flash_shape { FLASH_ONE, FLASH_TWO, FLASH_PAIRED } flash_shape;

/* Of `rows` queries. */
static flash_shape flash_shape_of(int64_t rows, int64_t dim_qk, int64_t dim_v)
{
    if (rows > VEC_LANES) {
        return FLASH_TWO;
    }
    return FLASH_PAIRS && dim_qk % 2 == 0 && dim_v % 2 == 0 ? FLASH_PAIRED : FLASH_ONE;
}

/* Vectors of scores, maxima and sums. */
static int flash_vectors(const flash_shape shape)
{
    return shape == FLASH_TWO ? 2 : 1;
}

/* ---- rows, and what memory does meanwhile --------------------------------------------------------- */

/*
 * What lies behind some rows of K or V, asked for while these are computed with.  Left alone, memory stands
 * still while a core multiplies, and the core while memory delivers; many requests at once wait for each
 * other.  So each `period` elements that a micro-kernel takes bring a request for one line, in good time and
 * evenly, into the L2; every ASK_STEPS steps, since a micro-kernel has no register left for them.
 */
enum { ASK_STEPS = 8 };

typedef struct flash_ask {
    uintptr_t at;        /* the next line */
    int64_t lines, skip; /* of a row; bytes from the end of its last one to the next row */
    int64_t line;        /* of this row */
    int64_t period, used;
} flash_ask;

/* Keys or values for some panels, fp32 with dense dims. */
typedef struct flash_rows {
    const float *at;
    int64_t token;
    flash_ask ask;
} flash_rows;

VEC_INLINE void ask(flash_ask *next, int64_t elements)
{
    next->used += elements;
    while (next->used >= next->period) {
        next->used -= next->period;
        FLASH_PREFETCH_FAR((const void *)next->at);
        next->at += LINE;
        if (++next->line == next->lines) {
            next->line = 0;
            next->at += (uintptr_t)next->skip;
        }
    }
}

/* ---- micro-kernels ------------------------------------------------------------------------------- */

/* Rows of a micro-kernel, at most. */
VEC_INLINE int flash_most(const flash_shape shape)
{
    return shape == FLASH_ONE ? 2 * VEC_ROWS : VEC_ROWS;
}

/* Rows of the next micro-kernel when `left` remain: pieces of 4 and more keep the FMA units busy (8 chains),
 * so 8 is cut 4 + 4 and not 6 + 2. */
VEC_INLINE int flash_step(const int most, int64_t left)
{
    if (left >= most && left != 8) {
        return most;
    }
    if (most > 8 && left >= 8) {
        return 8;
    }
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* One number for all lanes, or two for pairs of them. */
VEC_INLINE vec flash_broadcast(const flash_shape shape, const float *p)
{
    return shape == FLASH_PAIRED ? vec_set_pair(p) : vec_set(*p);
}

/* s[m][lanes] = k[m][dim] * qt[dim][lanes], or qt[dim / 2][lanes in pairs]; rows of s s_row apart */
VEC_INLINE void score_rows(const int m, const flash_shape shape, float *s, int64_t s_row, const float *k,
                           int64_t k_token, const float *qt, int64_t dim, flash_ask *asked)
{
    const int dims = shape == FLASH_PAIRED ? 2 : 1;
    flash_ask next = *asked;
    vec acc[2 * VEC_ROWS][2];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        acc[i][0] = vec_set(0.0f);
        acc[i][1] = vec_set(0.0f);
    }
    const float *fourth[(2 * VEC_ROWS + 3) / 4]; /* of k: 24 rows are more than there are address registers */
    FLASH_UNROLL
    for (int i = 0; i < (m + 3) / 4; i++) {
        fourth[i] = k + 4 * i * k_token;
    }
    for (int64_t d = 0, end; d < dim;) {
        end = attn__min(d + ASK_STEPS, dim);
        ask(&next, m * (end - d));
        for (; d < end; d += dims, qt += PANEL) {
            vec q0 = vec_load(qt);
            vec q1 = shape == FLASH_ONE ? q0 : vec_load(qt + VEC_LANES);
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                vec x = flash_broadcast(shape, &fourth[i / 4][i % 4 * k_token]);
                acc[i][0] = vec_fma(x, q0, acc[i][0]);
                acc[i][1] = shape == FLASH_ONE ? acc[i][1] : vec_fma(x, q1, acc[i][1]);
            }
            FLASH_UNROLL
            for (int i = 0; i < (m + 3) / 4; i++) {
                fourth[i] += dims;
            }
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        const vec even = vec_even(acc[i][0], acc[i][1]), odd = vec_odd(acc[i][0], acc[i][1]);
        vec_store(s + i * s_row, shape == FLASH_PAIRED ? vec_add(even, odd) : acc[i][0]);
        if (shape == FLASH_TWO) {
            vec_store(s + i * s_row + VEC_LANES, acc[i][1]);
        }
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

/* S^T of the keys from .. to and one panel */
static void score_panel(const flash_shape shape, float *s, int64_t s_row, flash_rows *rows, int64_t from,
                        int64_t to, const float *qt, int64_t dim)
{
    if (shape == FLASH_TWO) {
        score_lanes(FLASH_TWO, s, s_row, rows, from, to, qt, dim);
    } else if (shape == FLASH_ONE) {
        score_lanes(FLASH_ONE, s, s_row, rows, from, to, qt, dim);
    } else {
        score_lanes(FLASH_PAIRED, s, s_row, rows, from, to, qt, dim);
    }
}

/* The two vectors of lanes of weights, or of what else there is one of for a query, at p. */
VEC_INLINE void flash_lanes(const flash_shape shape, const float *p, vec lanes[2])
{
    const vec first = vec_load(p);
    lanes[0] = shape == FLASH_PAIRED ? vec_mix_low(first, first) : first;
    lanes[1] = shape == FLASH_PAIRED ? vec_mix_high(first, first)
               : shape == FLASH_TWO  ? vec_load(p + VEC_LANES)
                                     : first;
}

/* ot[m][lanes] = ot * fade + v[count][m]^T * p[count][lanes], or m pairs of dims.  The new keys are summed
 * apart from the old ones: blocks of a sum keep its rounding error small, and one FMA at the end is no dearer
 * than a product before. */
VEC_INLINE void value_rows(const int m, const flash_shape shape, float *ot, const float *fade, const float *v,
                           int64_t v_token, const float *p, int64_t count, flash_ask *asked)
{
    const int dims = shape == FLASH_PAIRED ? 2 : 1;
    flash_ask next = *asked;
    vec acc[2 * VEC_ROWS][2], lanes[2];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        acc[i][0] = vec_set(0.0f);
        acc[i][1] = vec_set(0.0f);
    }
    for (int64_t j = 0, end; j < count;) {
        end = attn__min(j + ASK_STEPS, count);
        ask(&next, m * dims * (end - j));
        for (; j < end; j++) {
            flash_lanes(shape, p + j * PANEL, lanes);
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                vec x = flash_broadcast(shape, v + dims * i);
                acc[i][0] = vec_fma(x, lanes[0], acc[i][0]);
                acc[i][1] = shape == FLASH_ONE ? acc[i][1] : vec_fma(x, lanes[1], acc[i][1]);
            }
            v += v_token;
        }
    }
    flash_lanes(shape, fade, lanes);
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        float *at = ot + i * PANEL;
        vec_store(at, vec_fma(vec_load(at), lanes[0], acc[i][0]));
        if (shape != FLASH_ONE) {
            vec_store(at + VEC_LANES, vec_fma(vec_load(at + VEC_LANES), lanes[1], acc[i][1]));
        }
    }
    *asked = next;
}

VEC_INLINE void value_lanes(const flash_shape shape, float *ot, const float *fade, flash_rows *rows,
                            int64_t from, int64_t to, int64_t dim, const float *p)
{
    const int most = flash_most(shape), dims = shape == FLASH_PAIRED ? 2 : 1;
    const int64_t token = rows->token, count = to - from;
    const float *v = rows->at + from * token;
    int m;
    for (int64_t d = 0; d < dim; d += m * dims, ot += m * PANEL, v += m * dims) {
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

/* O^T of one panel takes in the values from .. to, of weights p[count][PANEL] */
static void value_panel(const flash_shape shape, float *ot, const float *fade, flash_rows *rows, int64_t from,
                        int64_t to, int64_t dim, const float *p)
{
    if (shape == FLASH_TWO) {
        value_lanes(FLASH_TWO, ot, fade, rows, from, to, dim, p);
    } else if (shape == FLASH_ONE) {
        value_lanes(FLASH_ONE, ot, fade, rows, from, to, dim, p);
    } else {
        value_lanes(FLASH_PAIRED, ot, fade, rows, from, to, dim, p);
    }
}

/* x[dim][PANEL], of which VEC_LANES lanes are used, to x[dim / 2][lanes in pairs], and back. */
static void pair_dims(float *x, int64_t dim)
{
    for (int64_t i = 0; i < dim / 2; i++) {
        const vec even = vec_load(x + 2 * i * PANEL), odd = vec_load(x + (2 * i + 1) * PANEL);
        vec_store(x + i * PANEL, vec_mix_low(even, odd));
        vec_store(x + i * PANEL + VEC_LANES, vec_mix_high(even, odd));
    }
}

static void part_dims(float *x, int64_t dim)
{
    for (int64_t i = dim / 2 - 1; i >= 0; i--) {
        const vec low = vec_load(x + i * PANEL), high = vec_load(x + i * PANEL + VEC_LANES);
        vec_store(x + 2 * i * PANEL, vec_even(low, high));
        vec_store(x + (2 * i + 1) * PANEL, vec_odd(low, high));
    }
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
