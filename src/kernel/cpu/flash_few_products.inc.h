/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_few_products.inc.h - S = Q K^T and O += P V of a few query rows; a part of flash_few.inc.h, which
 * includes it.
 *
 * MEMORY.  What a processor foresees is one row of K or V after the other, each from its begin to its end.
 * So the loops over keys are outside and those over dims inside, one key at once.  Where the sums of V of all
 * dims do not fit into registers, those of one row stay in the L1 (few_wide); those of more rows are added up
 * in strips of dims, over a small block of keys, whose rows the first strip touches in order.
 *
 * That keeps pace with memory while the arithmetic takes much less time than the reading.  Where it does not
 * (few_set_ahead: busy), memory would wait: then the arithmetic carries requests for what lies far ahead,
 * even in time.  Strips of V, and keys of K that are taken several at once, are not read in order, but they
 * are asked for in order, a share by each group: memory is a third slower otherwise.  Products that are
 * written out for as many dims as there are cost less than a loop over dims: so 1 row keeps pace, and with
 * AVX-512 2, 4 or 5 do (few_known).
 */
VEC_INLINE void few_fetch(const char *at, int64_t near)
{
    FLASH_PREFETCH((const void *)((uintptr_t)at + (uintptr_t)near));
}

VEC_INLINE void few_fetch_row(const char *at, int64_t near, int64_t bytes)
{
    for (int64_t byte = 0; byte < bytes; byte += LINE) {
        few_fetch(at + byte, near);
    }
}

/* Loads a number of each line of the row itself, in order. */
VEC_INLINE void few_touch_row(const char *at, int64_t bytes)
{
    for (int64_t byte = 0; byte < bytes; byte += LINE) {
        (void)*(const volatile char *)(at + byte);
    }
}

/* A vector of a row; whole, or its first `width` lanes. */
VEC_INLINE vec few_vec(const void *p, const attn_dtype dtype, const bool whole, int64_t width)
{
    return whole ? vec_load_as(p, dtype) : vec_load_part(p, dtype, (int)width);
}

/* Lines that are asked for at once. */
VEC_INLINE int few_lines(const attn_dtype dtype)
{
    const int lines = 4 * VEC_LANES * (int)few_size(dtype) / LINE;
    return lines > 1 ? lines : 1;
}

/* What a group asks for while it goes over the keys from .. to: of as many rows far ahead its share, in
 * order. Shorter rows than are asked for at once are left to the processor, but rows without a gap are one.
 */
VEC_INLINE flash_ask few_ask(const attn_dtype dtype, const few_group *group, const few_rows *rows,
                             int64_t dim, int64_t from, int64_t to)
{
    const int n = few_lines(dtype);
    const int64_t size = few_size(dtype), askers = group->askers;
    const bool run = rows->token == dim * size;
    const int64_t lines = run ? INT64_MAX / LINE : attn__ceil_div(dim * size, LINE);
    if (rows->far == 0 || askers == 0 || lines < n) {
        return (flash_ask){.period = FLASH_NEVER};
    }
    const int64_t first = (to - from) * group->asker / askers;
    return (flash_ask){.at = (uintptr_t)rows->at + (uintptr_t)(rows->far + (from + first) * rows->token),
                       .left = lines,
                       .lines = lines,
                       .skip = rows->token - lines * LINE,
                       .period = askers * (run ? LINE / size : dim / (attn__ceil_div(lines, n) * n)),
                       .near = rows->l1};
}

/* ---- S = Q K^T ------------------------------------------------------------------------------------ */

/* sum[i] += q[i] . k over one vector of dims, m rows */
VEC_INLINE void few_dot(const int m, const attn_dtype dtype, const bool whole, vec *sum, const float *q,
                        int64_t q_row, const char *k, int64_t byte, int64_t near, int64_t width)
{
    if (m < FEW_GROUP && byte % LINE == 0) {
        few_fetch(k + byte, near);
    }
    const vec x = few_vec(k + byte, dtype, whole, width);
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        sum[i] = vec_fma(x, vec_load(q + i * q_row), sum[i]);
    }
}

/* sum[i] = q[i] . k, one key.  The vectors of dims take turns to add to several sums, so that an FMA does not
 * wait for the one before; one sum a row is enough where nothing comes between, since dim is `known`: the
 * next key's begins meanwhile.
 */
VEC_INLINE void few_key(const int m, const int64_t known, const attn_dtype dtype, vec *sum, const float *q,
                        int64_t q_row, const char *k, int64_t dim, int64_t near)
{
    enum { L = VEC_LANES };
    const int turns = known > 0 ? 1 : m == 1 ? 4 : 2;
    const int64_t size = few_size(dtype);
    vec sums[2 * FEW_LARGE];
    FLASH_UNROLL
    for (int i = 0; i < turns * m; i++) {
        sums[i] = vec_set(0.0f);
    }
    int64_t d = 0;
    FLASH_UNROLL
    for (; d < known; d += L) {
        few_dot(m, dtype, true, sums, q + d, q_row, k, d * size, near, L);
    }
    for (; d + turns * L <= dim; d += turns * L) {
        FLASH_UNROLL
        for (int t = 0; t < turns; t++) {
            few_dot(m, dtype, true, sums + t * m, q + d + t * L, q_row, k, (d + t * L) * size, near, L);
        }
    }
    for (; d + L <= dim; d += L) {
        few_dot(m, dtype, true, sums, q + d, q_row, k, d * size, near, L);
    }
    if (d < dim) {
        few_dot(m, dtype, false, sums, q + d, q_row, k, d * size, near, dim - d);
    }
    FLASH_UNROLL
    for (int t = turns / 2; t > 0; t /= 2) {
        FLASH_UNROLL
        for (int i = 0; i < t * m; i++) {
            sums[i] = vec_add(sums[i], sums[i + t * m]);
        }
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        sum[i] = sums[i];
    }
}

/* acc[i * n + j] = q[i] . k[j]: n keys at once, which share the loads of q as m rows share those of k */
VEC_INLINE void few_square(const int m, const int n, const attn_dtype dtype, vec *acc, const float *q,
                           int64_t q_row, const char *const *k, int64_t dim, flash_ask *asked)
{
    enum { L = VEC_LANES };
    const int64_t size = few_size(dtype);
    flash_ask next = *asked;
    FLASH_UNROLL
    for (int i = 0; i < m * n; i++) {
        acc[i] = vec_set(0.0f);
    }
    for (int64_t d = 0; d < dim; d += L) {
        const bool whole = d + L <= dim;
        vec x[L];
        ask(&next, few_lines(dtype), n * (whole ? L : dim - d));
        FLASH_UNROLL
        for (int j = 0; j < n; j++) {
            x[j] = few_vec(k[j] + d * size, dtype, whole, dim - d);
        }
        FLASH_UNROLL
        for (int i = 0; i < m; i++) {
            const vec row = vec_load(q + i * q_row + d);
            FLASH_UNROLL
            for (int j = 0; j < n; j++) {
                acc[i * n + j] = vec_fma(x[j], row, acc[i * n + j]);
            }
        }
    }
    *asked = next;
}

/* s[i][j] = the sum of all lanes of acc[i * n + j].  acc has room for whole vectors of sums; those that are
 * none repeat others, so that the compiler adds them up once. */
VEC_INLINE void few_store_sums(const int m, const int n, float *s, int64_t s_row, vec *acc)
{
    enum { L = VEC_LANES };
    float sums[2 * L];
    FLASH_UNROLL
    for (int i = 0; i < m * n; i += L) {
        FLASH_UNROLL
        for (int j = m * n - i; j < L; j++) {
            acc[i + j] = acc[i + j % n];
        }
        vec_store(sums + i, vec_sums(acc + i));
    }
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        memcpy(s + i * s_row, sums + i * n, sizeof(float) * (size_t)n);
    }
}

/* The scores of m rows and the keys from .. to, in steps of n: up to n - 1 scores behind them are those of
 * the last key.  known: the dims, if they are known when compiled, or 0. */
VEC_INLINE void few_scores_of(const int m, const bool square, const int64_t known, const attn_dtype dtype,
                              const few_state *state, const few_group *group, const few_rows *keys,
                              int64_t from, int64_t to)
{
    enum { L = VEC_LANES };
    const int n = L / (m < FEW_GROUP ? m : FEW_GROUP);
    const int64_t dim = known > 0 ? known : state->block->dim_qk, q_row = known > 0 ? known : state->q_row;
    const float *q = state->q + group->row * q_row;
    float *s = state->p + group->row * state->p_row;
    flash_ask next = few_ask(dtype, group, keys, dim, from, to);
    for (int64_t key = from; key < to; key += n) {
        vec acc[2 * L];
        const char *at[L];
        FLASH_UNROLL
        for (int j = 0; j < n; j++) {
            at[j] = keys->at + attn__min(key + j, to - 1) * keys->token;
            if (!square) {
                vec sum[FEW_LARGE];
                if (m >= FEW_GROUP && known == 0) {
                    ask(&next, few_lines(dtype), dim);
                }
                few_key(m, known, dtype, sum, q, q_row, at[j], dim, keys->near);
                FLASH_UNROLL
                for (int i = 0; i < m; i++) {
                    acc[i * n + j] = sum[i];
                }
            }
        }
        if (square) {
            few_square(m, n, dtype, acc, q, q_row, at, dim, &next);
        }
        few_store_sums(m, n, s + key, state->p_row, acc);
    }
}

/* Written out for the dims that few_known took; known: can it have taken any?  Else a loop over dims. */
VEC_INLINE void few_scores_by(const int m, const bool known, const bool square, const attn_dtype dtype,
                              const few_state *state, const few_group *group, const few_rows *keys,
                              int64_t from, int64_t to)
{
    if (known && keys->known == 64) {
        few_scores_of(m, false, 64, dtype, state, group, keys, from, to);
    } else if (known && keys->known == 128) {
        few_scores_of(m, false, 128, dtype, state, group, keys, from, to);
    } else if (known && m < FEW_GROUP && keys->known == 256) {
        few_scores_of(m, false, 256, dtype, state, group, keys, from, to);
    } else {
        few_scores_of(m, square, 0, dtype, state, group, keys, from, to);
    }
}

VEC_INLINE void few_scores_as(const attn_dtype dtype, const few_state *state, const few_group *group,
                              const few_rows *keys, int64_t from, int64_t to)
{
    enum { SQUARES = VEC_LANES >= 16 }; /* fewer keys at once gain nothing */
    const bool known = FEW_KNOWN && dtype == ATTN_F32;
    if (group->m == 4) {
        few_scores_by(FEW_GROUP >= 4 ? 4 : 1, known, SQUARES, dtype, state, group, keys, from, to);
    } else if (group->m == 5) {
        few_scores_by(FEW_LARGE >= 5 ? 5 : 1, known, SQUARES, dtype, state, group, keys, from, to);
    } else if (group->m == 6) {
        few_scores_by(FEW_LARGE >= 6 ? 6 : 1, false, SQUARES, dtype, state, group, keys, from, to);
    } else if (group->m == 3) {
        few_scores_by(FEW_THREE ? 3 : 1, false, false, dtype, state, group, keys, from, to);
    } else if (group->m == 2) {
        few_scores_by(FEW_GROUP >= 2 ? 2 : 1, FEW_KNOWN, false, dtype, state, group, keys, from, to);
    } else {
        few_scores_by(1, FEW_KNOWN_ONE, false, dtype, state, group, keys, from, to);
    }
}

static void few_scores(const few_state *state, const few_group *group, const few_rows *keys, int64_t from,
                       int64_t to)
{
    if (keys->dtype == ATTN_F32) {
        few_scores_as(ATTN_F32, state, group, keys, from, to);
    } else if (keys->dtype == ATTN_F16) {
        few_scores_as(ATTN_F16, state, group, keys, from, to);
    } else {
        few_scores_as(ATTN_BF16, state, group, keys, from, to);
    }
}

/* ---- O += P V ------------------------------------------------------------------------------------- */

/* o[m rows][r vectors] += sum over keys from .. to of p v; the keys are summed apart from the older ones */
VEC_INLINE void few_strip(const int m, const int r, const attn_dtype dtype, const bool whole,
                          const few_state *state, const few_group *group, int64_t d, const few_rows *values,
                          int64_t from, int64_t to, flash_ask *asked)
{
    flash_ask next = *asked;
    const int64_t size = few_size(dtype), o_row = state->o_row, width = state->block->dim_v - d;
    const bool fetch = m > 1 && d == 0 && values->near != 0; /* the whole row, for all strips */
    const bool touch = m > 1 && d == 0 && !fetch && values->far == 0 && width > r * VEC_LANES;
    const float *p = state->p + group->row * state->p_row;
    const char *v = values->at + from * values->token + d * size;
    float *o = state->o + group->row * o_row + d;
    vec acc[FEW_GROUP * FEW_SUMS]; /* no more than registers, whatever m */
    FLASH_UNROLL
    for (int i = 0; i < m * r; i++) {
        acc[i] = vec_set(0.0f);
    }
    for (int64_t j = from; j < to; j++, v += values->token) {
        if (fetch) {
            few_fetch_row(v, values->near, width * size);
        } else if (touch) {
            few_touch_row(v, width * size);
        }
        FLASH_UNROLL
        for (int c = 0; c < r; c++) {
            const char *at = v + c * VEC_LANES * size;
            if (m == 1 && c * VEC_LANES * size % LINE == 0) {
                few_fetch(at, values->near);
            }
            const vec x = few_vec(at, dtype, whole, width);
            FLASH_UNROLL
            for (int i = 0; i < m; i++) {
                acc[i * r + c] = vec_fma(x, vec_set(p[i * state->p_row + j]), acc[i * r + c]);
            }
        }
        if (m > 1) {
            ask(&next, few_lines(dtype), whole ? r * VEC_LANES : width);
        }
    }
    *asked = next;
    FLASH_UNROLL
    for (int i = 0; i < m; i++) {
        FLASH_UNROLL
        for (int c = 0; c < r; c++) {
            float *at = o + i * o_row + c * VEC_LANES;
            vec_store(at, vec_add(vec_load(at), acc[i * r + c]));
        }
    }
}

/* In strips of `most` vectors, and what is left of the dims in less: 8 are 4 and 4, not 6 and 2. */
VEC_INLINE void few_strips(const int m, const int most, const attn_dtype dtype, const few_state *state,
                           const few_group *group, const few_rows *values, int64_t from, int64_t to)
{
    enum { L = VEC_LANES };
    const int64_t dim = state->block->dim_v;
    flash_ask next = few_ask(dtype, group, values, dim, from, to);
    for (int64_t d = 0; d < dim;) {
        const int64_t left = (dim - d) / L;
        if (left >= most && (left != 8 || 8 % most == 0)) {
            few_strip(m, most, dtype, true, state, group, d, values, from, to, &next);
            d += most * L;
        } else if (most > 4 && left >= 4) {
            few_strip(m, most > 4 ? 4 : 1, dtype, true, state, group, d, values, from, to, &next);
            d += 4 * L;
        } else if (most > 2 && left >= 2) {
            few_strip(m, most > 2 ? 2 : 1, dtype, true, state, group, d, values, from, to, &next);
            d += 2 * L;
        } else {
            few_strip(m, 1, dtype, left > 0, state, group, d, values, from, to, &next);
            d += L;
        }
    }
}

/* sum += p v, one key and row */
VEC_INLINE void few_add(const attn_dtype dtype, float *sum, vec p, const char *v, int64_t dim)
{
    enum { L = VEC_LANES };
    const int64_t size = few_size(dtype);
    int64_t d = 0;
    for (; d + L <= dim; d += L) {
        vec_store(sum + d, vec_fma(few_vec(v + d * size, dtype, true, L), p, vec_load(sum + d)));
    }
    if (d < dim) {
        vec_store(sum + d, vec_fma(few_vec(v + d * size, dtype, false, dim - d), p, vec_load(sum + d)));
    }
}

/* o += sum over keys from .. to of p v, one row of more dims than a strip has.  Strips would not read V in
 * order, so only the sums of the first dims stay in registers, the others in the L1. */
VEC_INLINE void few_wide(const attn_dtype dtype, const few_state *state, int64_t row, const few_rows *values,
                         int64_t from, int64_t to)
{
    enum { L = VEC_LANES, STRIP = FEW_SUMS * VEC_LANES };
    const int64_t size = few_size(dtype), dim = state->block->dim_v;
    const float *p = state->p + row * state->p_row;
    const char *v = values->at + from * values->token;
    float *o = state->o + row * state->o_row, *sum = state->wide;
    vec acc[FEW_SUMS];
    memset(sum, 0, sizeof(float) * (size_t)state->o_row);
    FLASH_UNROLL
    for (int c = 0; c < FEW_SUMS; c++) {
        acc[c] = vec_set(0.0f);
    }
    for (int64_t j = from; j < to; j++, v += values->token) {
        const vec weight = vec_set(p[j]);
        FLASH_UNROLL
        for (int c = 0; c < FEW_SUMS; c++) {
            if (c * L * size % LINE == 0) {
                few_fetch(v + c * L * size, values->near);
            }
            acc[c] = vec_fma(few_vec(v + c * L * size, dtype, true, L), weight, acc[c]);
        }
        few_fetch_row(v + STRIP * size, values->near, (dim - STRIP) * size);
        few_add(dtype, sum + STRIP, weight, v + STRIP * size, dim - STRIP);
    }
    FLASH_UNROLL
    for (int c = 0; c < FEW_SUMS; c++) {
        vec_store(sum + c * L, acc[c]);
    }
    for (int64_t d = 0; d < state->o_row; d += L) {
        vec_store(o + d, vec_add(vec_load(o + d), vec_load(sum + d)));
    }
}

/* Keys of V that are taken in strips of dims; few of them where these are touched, since memory has nothing
 * to do while the strips after the first read the L1. */
VEC_INLINE int64_t few_touched(int64_t dim, attn_dtype dtype)
{
    const int64_t bytes = dim * few_size(dtype);
    return bytes > FEW_LONG ? FEW_LONG_KEYS : attn__min(few_block(dim, dtype), FEW_TOUCH_BYTES / bytes);
}

/* A few keys after the others, which the L1 holds for the strips, and since errors grow with a sum's length.
 */
VEC_INLINE void few_values_of(const int m, const attn_dtype dtype, const few_state *state,
                              const few_group *group, const few_rows *values, int64_t from, int64_t to)
{
    const int fit = (FEW_REGISTERS - 1) / m - 1; /* beside m weights and a vector of V */
    const int most = fit < FEW_SUMS ? fit : FEW_SUMS;
    const int64_t dim = state->block->dim_v;
    const bool wide = dim > most * VEC_LANES, touched = wide && values->near == 0 && values->far == 0;
    const int64_t block = m > 1 && touched ? few_touched(dim, dtype) : few_block(dim, dtype);
    for (int64_t end; from < to; from = end) {
        end = attn__min(from + block, to);
        if (m == 1 && wide) {
            few_wide(dtype, state, group->row, values, from, end);
        } else {
            few_strips(m, most, dtype, state, group, values, from, end);
        }
    }
}

VEC_INLINE void few_values_as(const attn_dtype dtype, const few_state *state, const few_group *group,
                              const few_rows *values, int64_t from, int64_t to)
{
    if (group->m == 4) {
        few_values_of(FEW_GROUP >= 4 ? 4 : 1, dtype, state, group, values, from, to);
    } else if (group->m == 5) {
        few_values_of(FEW_LARGE >= 5 ? 5 : 1, dtype, state, group, values, from, to);
    } else if (group->m == 6) {
        few_values_of(FEW_LARGE >= 6 ? 6 : 1, dtype, state, group, values, from, to);
    } else if (group->m == 3) {
        few_values_of(FEW_THREE ? 3 : 1, dtype, state, group, values, from, to);
    } else if (group->m == 2) {
        few_values_of(FEW_GROUP >= 2 ? 2 : 1, dtype, state, group, values, from, to);
    } else {
        few_values_of(1, dtype, state, group, values, from, to);
    }
}

static void few_values(const few_state *state, const few_group *group, const few_rows *values, int64_t from,
                       int64_t to)
{
    if (from >= to) {
        return;
    }
    if (values->dtype == ATTN_F32) {
        few_values_as(ATTN_F32, state, group, values, from, to);
    } else if (values->dtype == ATTN_F16) {
        few_values_as(ATTN_F16, state, group, values, from, to);
    } else {
        few_values_as(ATTN_BF16, state, group, values, from, to);
    }
}
