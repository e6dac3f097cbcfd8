/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dot_few.h - the operands of few query rows of bf16 (flash_dot_few.inc.h), and what memory is asked for
 * while they are multiplied.  A dot_<isa>.h gives
 *
 *     few_multiply_qk(few_qk), few_multiply_pv(few_pv)
 *     few_turn_weights       weights of 16 rows and 32 keys, [pair of keys][row][2], into P of few_pv
 *     few_pack_queries       what few_qk wants changed in Q^T, [pair of dims][PANEL][2]
 *     few_order              how the dims of O lie
 *     few_least              rows; with less the vectors of flash_few.inc.h are faster
 *     FEW_PACKED             up to so many rows S is packed, see few_qk: 12, or 0
 *     FEW_SHARE              of 16 lines that are asked for, during products; the others during the softmax
 *     FEW_PV_ROWS            rows of the least step of few_pv; of few_qk's, where S is packed
 *     FEW_STEP_COST          how many steps of few_qk one of as many rows of few_pv takes as long as
 *     FEW_P_PARTS            bf16 of P for a weight
 *
 * Include it after flash_common.inc.h and dot_pack.h.
 */
#ifndef ATTN_DOT_FEW_H
#define ATTN_DOT_FEW_H

/* Bytes that the L2, or the L1 if `near`, is asked for line by line: rows, or one run of them where they lie
 * side by side. */
typedef struct few_ahead {
    uintptr_t at, end; /* of the row at hand */
    int64_t rows;      /* after it */
    int64_t bytes, token;
    bool near;
    const struct few_ahead *next; /* what follows, or NULL */
} few_ahead;

/* `rows` rows of `bytes` at `data`, `token` bytes apart; then `next`. */
VEC_INLINE few_ahead few_ahead_of(const void *data, int64_t rows, int64_t bytes, int64_t token,
                                  const few_ahead *next)
{
    const bool run = bytes == token;
    const int64_t row = run ? rows * bytes : bytes;
    const uintptr_t at = (uintptr_t)data;
    return (few_ahead){at, at + (uintptr_t)row, run ? 0 : rows - 1, row, token, attn__cpu_asks_l1(), next};
}

/* A row has been asked for: the next row, or what follows; false if that was all. */
VEC_INLINE bool few_turn(few_ahead *ahead)
{
    if (ahead->rows > 0) {
        ahead->rows--;
        ahead->at = ahead->end + (uintptr_t)(ahead->token - ahead->bytes);
        ahead->end = ahead->at + (uintptr_t)ahead->bytes;
        return true;
    }
    if (ahead->next != NULL) {
        *ahead = *ahead->next;
        return true;
    }
    return false;
}

/* Asks for the next `lines` lines, if there are as many. */
VEC_INLINE void few_ask(few_ahead *ahead, int64_t lines)
{
    while (lines > 0 && (ahead->at < ahead->end || few_turn(ahead))) {
        const int64_t left = (int64_t)(ahead->end - ahead->at + LINE - 1) / LINE;
        const uintptr_t stop = ahead->at + (uintptr_t)(LINE * attn__min(lines, left));
        lines -= left;
        for (uintptr_t at = ahead->at; at < stop; at += LINE) {
            if (ahead->near) {
                FLASH_PREFETCH((const void *)at);
            } else {
                FLASH_PREFETCH_FAR((const void *)at);
            }
        }
        ahead->at = stop;
    }
}

/*
 * S^T[keys][16 n] = K Q^T, K where it lies, up to a multiple of 16 keys: K[key][d] is k[key * k_row + d].  Q
 * is as few_pack_queries leaves it for `rows`; rows that are not there may be anything.  depth % 32 = 0.
 *
 * Of up to FEW_PACKED rows S is packed: 4 rows of 4 keys share a vector, or 8 rows of 2.  Of 8, or 4, keys
 * the even ones lie before the odd ones, in PANEL floats, so that lane by lane they are pairs of keys.  9 to
 * 12 rows are 8, and 4 from s + 8 * (keys up to a multiple of 32) on.
 */
typedef struct few_qk {
    const uint16_t *k, *q;
    int64_t k_row;
    float *s; /* [keys][PANEL], or packed */
    int64_t rows, keys, n, depth;
    few_ahead *ahead;
    int64_t lines; /* are asked for a product of 16 x 16 x 32 */
} few_qk;

/*
 * O[rows][dims] += P V, V where it lies: V[key][d] is v[key * v_row + d].  P is as few_turn_weights leaves
 * it; O has room for a multiple of 16 rows.  keys % 32 = dims % 32 = 0.
 */
typedef struct few_pv {
    const uint16_t *p, *v;
    int64_t p_row, v_row;
    float *o; /* of 32 dims d lies at few_order[d], and d + 16 at 8 more, for d < 16 */
    int64_t o_row;
    int64_t rows, keys, dims;
    few_ahead *ahead;
    int64_t lines; /* are asked for a product of tiles, or a step of 8 x 32 x 32 */
} few_pv;

#endif
