/* SPDX-License-Identifier: Apache-2.0 */
/*
 * micro.inc.h - the innermost loops of flash.inc.h and flash_backward.inc.h: exp2 and the products, in the
 * vector vocabulary.
 *
 * METHOD.  Register blocking as in any matrix product (Goto & van de Geijn, ACM TOMS 34(3), 2008), but with
 * one operand broadcast straight from memory and the other, two vectors wide, from the L1 cache: m rows take
 * m + 2 loads for 2 m FMAs, and 2 m accumulators never leave the registers.
 *
 * COST.  m = 6 (16 registers): 8 loads to 12 FMAs; m = 12 (32 registers): 14 to 24.  A core that does two
 * loads and two FMAs a cycle is bound by the FMAs from m = 2 on; m >= 4 also hides their latency of 4 cycles.
 */
enum { PANEL = 2 * VEC_LANES }; /* queries of a micro-kernel */

/* Unrolls the loop that follows: its trip count is a constant once the function is inlined, and the
 * accumulators live in registers only if every index is a constant. */
#if defined(__clang__)
#define FLASH_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define FLASH_UNROLL _Pragma("GCC unroll 16")
#else
#define FLASH_UNROLL
#endif

/* Asks for the cache line at p. */
#if defined(__GNUC__)
#define FLASH_PREFETCH(p) __builtin_prefetch(p)
#else
#define FLASH_PREFETCH(p) ((void)(p))
#endif
enum { LINE = 64, LINE_FLOATS = LINE / sizeof(float) }; /* bytes */

/* ---- exp2 ---------------------------------------------------------------------------------------- */

/*
 * 2^x for x <= 127: 0 below -126, exactly 1 at 0, NaN for NaN.  x = n + f with |f| <= 1/2; adding 1.5 * 2^23
 * rounds x to the integer n, and 127 more puts the biased exponent in the low bits.  2^f = 1 + f * p(f),
 * nearly minimax with fp32 coefficients, off by 7.1e-9; 1.18 * 2^-24 in all (docs/exp.md).
 */
VEC_INLINE vec flash_exp2(vec x)
{
    const vec magic = vec_set(0x1.8p23f + 127.0f);
    vec t = vec_add(x, magic);
    vec f = vec_sub(x, vec_sub(t, magic));
    vec p = vec_set(0x1.4c13e0p-13f);
    p = vec_fma(p, f, vec_set(0x1.5fbfd0p-10f));
    p = vec_fma(p, f, vec_set(0x1.3b21c8p-7f));
    p = vec_fma(p, f, vec_set(0x1.c6ada8p-5f));
    p = vec_fma(p, f, vec_set(0x1.ebfbe6p-3f));
    p = vec_fma(p, f, vec_set(0x1.62e432p-1f));
    p = vec_fma(p, f, vec_set(1.0f));
    /* A product, not an integer addition to the exponent: that would turn some NaNs into numbers. */
    return vec_select(vec_less(x, vec_set(-126.0f)), vec_set(0.0f), vec_mul(p, vec_exponent(t)));
}

/* ---- micro-kernels ------------------------------------------------------------------------------- */

/* Rows of the next micro-kernel when `left` remain: pieces of 4 and more keep the FMA units busy (8 chains),
 * so 8 is cut 4 + 4 and not 6 + 2. */
static int flash_step(int64_t left)
{
    if (left >= VEC_ROWS && left != 8) {
        return VEC_ROWS;
    }
    if (VEC_ROWS > 8 && left >= 8) {
        return 8;
    }
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* s[m][PANEL] = k[m][dim] * qt[dim][PANEL], rows of s s_row apart */
VEC_INLINE void score_rows(const int m, float *s, int64_t s_row, const float *k, int64_t k_token,
                           const float *qt, int64_t dim)
{
    vec acc[VEC_ROWS][2];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        acc[i][0] = vec_set(0.0f);
        acc[i][1] = vec_set(0.0f);
    }
    for (int64_t d = 0; d < dim; d++) {
        vec q0 = vec_load(qt + d * PANEL);
        vec q1 = vec_load(qt + d * PANEL + VEC_LANES);
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            vec x = vec_set(k[i * k_token + d]);
            acc[i][0] = vec_fma(x, q0, acc[i][0]);
            acc[i][1] = vec_fma(x, q1, acc[i][1]);
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        vec_store(s + i * s_row, acc[i][0]);
        vec_store(s + i * s_row + VEC_LANES, acc[i][1]);
    }
}

/* Keys or values for one panel, fp32 with dense dims; and `ahead` rows where they lie in memory that some
 * panel will want soon.  Part `part` of `parts` readers asks the caches for its share of those, a few lines
 * for each micro-kernel. */
typedef struct flash_rows {
    const float *at;
    int64_t token, count;
    const char *next;
    int64_t next_token, next_size; /* bytes */
    int64_t ahead, part, parts;
} flash_rows;

/* Of rows->next, the share of rows first .. first + m. */
static void fetch_ahead(const flash_rows *rows, int64_t first, int m)
{
    const int64_t end = attn__min(first + (rows->part + 1) * m / rows->parts, rows->ahead);
    for (int64_t j = first + rows->part * m / rows->parts; j < end; j++) {
        for (int64_t byte = 0; byte < rows->next_size; byte += LINE) {
            FLASH_PREFETCH(rows->next + j * rows->next_token + byte);
        }
    }
}

/* S^T of some keys and one panel */
static void score_panel(float *s, int64_t s_row, const flash_rows *rows, const float *qt, int64_t dim)
{
    const int64_t k_token = rows->token;
    const float *k = rows->at;
    for (int64_t row = 0; row < rows->count;) {
        int m = flash_step(rows->count - row);
        if (rows->ahead > 0) {
            fetch_ahead(rows, row, m);
        }
        if (m == VEC_ROWS) {
            score_rows(VEC_ROWS, s, s_row, k, k_token, qt, dim);
        } else if (VEC_ROWS > 8 && m == 8) {
            score_rows(VEC_ROWS > 8 ? 8 : 1, s, s_row, k, k_token, qt, dim);
        } else if (m == 4) {
            score_rows(4, s, s_row, k, k_token, qt, dim);
        } else if (m == 2) {
            score_rows(2, s, s_row, k, k_token, qt, dim);
        } else {
            score_rows(1, s, s_row, k, k_token, qt, dim);
        }
        s += m * s_row;
        k += m * k_token;
        row += m;
    }
}

/* ot[m][PANEL] = ot * fade + v[count][m]^T * p[count][PANEL].  The new keys are summed apart from the old
 * ones: blocks of a sum keep its rounding error small, and one FMA at the end is no dearer than a product
 * before. */
VEC_INLINE void value_rows(const int m, float *ot, const float *fade, const float *v, int64_t v_token,
                           const float *p, int64_t count)
{
    vec acc[VEC_ROWS][2];
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        acc[i][0] = vec_set(0.0f);
        acc[i][1] = vec_set(0.0f);
    }
    for (int64_t j = 0; j < count; j++) {
        vec p0 = vec_load(p + j * PANEL);
        vec p1 = vec_load(p + j * PANEL + VEC_LANES);
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            vec x = vec_set(v[i]);
            acc[i][0] = vec_fma(x, p0, acc[i][0]);
            acc[i][1] = vec_fma(x, p1, acc[i][1]);
        }
        v += v_token;
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        float *at = ot + i * PANEL;
        vec_store(at, vec_fma(vec_load(at), vec_load(fade), acc[i][0]));
        vec_store(at + VEC_LANES, vec_fma(vec_load(at + VEC_LANES), vec_load(fade + VEC_LANES), acc[i][1]));
    }
}

/* O^T of one panel takes in `count` keys */
static void value_panel(float *ot, const float *fade, const float *v, int64_t v_token, int64_t dim,
                        const float *p, int64_t count)
{
    while (dim > 0) {
        int m = flash_step(dim);
        if (m == VEC_ROWS) {
            value_rows(VEC_ROWS, ot, fade, v, v_token, p, count);
        } else if (VEC_ROWS > 8 && m == 8) {
            value_rows(VEC_ROWS > 8 ? 8 : 1, ot, fade, v, v_token, p, count);
        } else if (m == 4) {
            value_rows(4, ot, fade, v, v_token, p, count);
        } else if (m == 2) {
            value_rows(2, ot, fade, v, v_token, p, count);
        } else {
            value_rows(1, ot, fade, v, v_token, p, count);
        }
        ot += m * PANEL;
        v += m;
        dim -= m;
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
        m = flash_step(product->rows - row);
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
