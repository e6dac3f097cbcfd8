/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dot_amx.h - products of bf16 parts (attn__dot in rows.h) on AMX tiles.
 *
 * METHOD.  2 x 2 tiles of C, 32 x 32 sums, stay in registers while the depth goes by 32 at a time: 4 tiles
 * are loaded for 4 products.  The parts of x are x cut after each 8 bits (Henry, Tang & Heinecke, ARITH 2019,
 * arXiv 1904.06376).  All pairs of parts at one depth come together, each with an operand of the pair before:
 * 7 operand loads for 6 pairs, and memory goes through the caches once.
 *
 * ROUNDING.  A tile product sums its 16 even and its 16 odd terms apart, by FMA in fp32, then adds both to C
 * (Intel SDM, TDPBF16PS).  Subnormal inputs and results count as 0.
 *
 * COST.  16 cycles a tile product (16384 FLOPs), 8 for the lines of a tile that is loaded; more beside a busy
 * hyperthread, see DOT_APART.  A passes once where B is read again for each 32 rows: its loads say so, and
 * leave the first-level cache to B and to what the vectors work on.
 *
 * Include it after dot_few.h, inside a region compiled for "amx-tile,amx-bf16".
 */
#ifndef ATTN_DOT_AMX_H
#define ATTN_DOT_AMX_H

#ifdef ATTN__EMULATE_AMX
#include "kernel/cpu/amx_emulated.h"
#endif

enum { DOT_PARTS = 3, TILE_ROWS = 16, TILE_DEPTH = 32 };

/* Bytes from one row to the next in the squares of A, and of B. */
enum { DOT_A_ROW = sizeof(uint16_t) * ATTN__SQUARE, DOT_B_ROW = 2 * DOT_A_ROW };

/* Some compilers do not know that tile loads read memory: what they read must be there. */
#define DOT_FENCE() __asm__ volatile("" ::: "memory")

/*
 * Tile instructions with others between them.  At times a product right after another costs 43 cycles and a
 * load 32, it seems whenever the core's other hyperthread is awake; with 10 and 5 others between, even of
 * those that do nothing, 24 and 21.  Else they cost 16 and 8 either way (docs/perf/cpu_amx.md, "Two
 * hyperthreads").
 */
#define DOT_APART(count) __asm__ volatile(".rept " #count "\n\tnop\n\t.endr")
#define DOT_LOAD(tile, from, row)                                                                            \
    do {                                                                                                     \
        _tile_loadd(tile, from, row);                                                                        \
        DOT_APART(5);                                                                                        \
    } while (0)
#define DOT_LOAD_A(tile, from)                                                                               \
    do {                                                                                                     \
        _tile_stream_loadd(tile, from, DOT_A_ROW);                                                           \
        DOT_APART(5);                                                                                        \
    } while (0)
#define DOT_MULTIPLY(c, a, b)                                                                                \
    do {                                                                                                     \
        _tile_dpbf16ps(c, a, b);                                                                             \
        DOT_APART(10);                                                                                       \
    } while (0)

/* Eight tiles of 16 rows of 64 bytes.  Each call of a kernel sets them, since others use tiles too. */
static void dot_begin(void)
{
    static const uint8_t config[64] = {
        [0] = 1,   [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64, [28] = 64, [30] = 64,
        [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};
    _tile_loadconfig(config);
}

static void dot_end(void)
{
    _tile_release();
}

/* Pairs of parts in an order in which each shares an operand with the one before and the largest is the last.
 */
enum { DOT_PAIRS = 6, DOT_ALL_PAIRS = (1 << DOT_PAIRS) - 1 };
static const int dot_part_a[DOT_PAIRS] = {2, 1, 1, 0, 0, 0}, dot_part_b[DOT_PAIRS] = {0, 0, 1, 1, 2, 0};

/* The pairs that a product has, as bits. */
VEC_INLINE unsigned dot_pairs(const attn__dot *dot)
{
    static const unsigned of_a[DOT_PARTS] = {0x38, 0x3e, 0x3f}, of_b[DOT_PARTS] = {0x23, 0x2f, 0x3f};
    return of_a[dot->a_parts - 1] & of_b[dot->b_parts - 1];
}

/* How far a list of products has come: the next step is one pair of parts, 32 deep, for up to 2 x 2 tiles of
 * C. */
typedef struct dot_cursor {
    const attn__dot *dot, *end;
    int64_t row, col, k;
    const uint16_t *a, *b; /* the first parts at row, col and k */
    unsigned left;         /* the pairs that this depth still needs */
    int held_a, held_b;    /* parts in tiles 4 to 7, or -1 */
    float *full;           /* C of the block before, still in tiles 0 to 3, or NULL */
    size_t full_row;       /* bytes */
    int64_t full_half;     /* elements */
    bool full_two;
} dot_cursor;

/* Goes to the begin of at->dot, or of the next that is not empty. */
static void dot_enter(dot_cursor *at)
{
    while (at->dot < at->end && at->dot->rows == 0) {
        at->dot++;
    }
    if (at->dot < at->end) {
        at->row = at->col = at->k = 0;
        at->a = at->dot->a, at->b = at->dot->b;
        at->left = dot_pairs(at->dot);
    }
}

/* What the products read must have been written before, and by none of them. */
static void dot_start(dot_cursor *at, const attn__dot *dots, int count)
{
    at->dot = dots, at->end = dots + count;
    at->held_a = at->held_b = -1;
    at->full = NULL, at->full_row = 0, at->full_half = 0; /* also read where nothing is full */
    DOT_FENCE();
    dot_enter(at);
}

/* The steps of a product. */
static int64_t dot_steps(const attn__dot *dot)
{
    return dot->rows == 0 ? 0
                          : __builtin_popcount(dot_pairs(dot)) * attn__ceil_div(dot->rows, 2 * TILE_ROWS) *
                                (dot->cols / (2 * TILE_ROWS)) * (dot->depth / TILE_DEPTH);
}

/* Elements from the first row of at->full to the 17th. */
#define DOT_BELOW(at) (TILE_ROWS * (int64_t)((at)->full_row / sizeof(float)))

/* Tile t of C: what it held goes to memory, and it becomes 0 or what C holds. */
#define DOT_TURN(t, offset, full_offset)                                                                     \
    do {                                                                                                     \
        if (at->full != NULL && ((t) < 2 || at->full_two)) {                                                 \
            _tile_stored(t, at->full + (full_offset), at->full_row);                                         \
        }                                                                                                    \
        if (!dot->add) {                                                                                     \
            _tile_zero(t);                                                                                   \
        } else if ((t) < 2 || two) {                                                                         \
            DOT_LOAD(t, c + (offset), c_row);                                                                \
        }                                                                                                    \
    } while (0)

/* The first step of a block.  The block before, of this product or the one before, leaves its tiles one
 * by one, as late as can be, so that products go on meanwhile. */
VEC_INLINE void dot_begin_block(dot_cursor *at, const uint16_t *a, const uint16_t *b, bool two)
{
    const attn__dot *dot = at->dot;
    const size_t c_row = sizeof *dot->c * (size_t)dot->c_row;
    const int64_t below = TILE_ROWS * dot->c_row, full_below = DOT_BELOW(at);
    const int64_t half = dot->c_half, full_half = at->full_half;
    float *c = dot->c + attn__dot_sum_place(dot, at->row, at->col);
    DOT_LOAD_A(4, a);
    DOT_LOAD(6, b, DOT_B_ROW);
    DOT_TURN(0, 0, 0);
    DOT_MULTIPLY(0, 4, 6);
    DOT_LOAD(7, b + TILE_DEPTH, DOT_B_ROW);
    DOT_TURN(1, half, full_half);
    DOT_MULTIPLY(1, 4, 7);
    if (two) {
        DOT_LOAD_A(5, a + TILE_ROWS * ATTN__SQUARE);
    }
    DOT_TURN(2, below, full_below);
    if (two) {
        DOT_MULTIPLY(2, 5, 6);
    }
    DOT_TURN(3, below + half, full_below + full_half);
    if (two) {
        DOT_MULTIPLY(3, 5, 7);
    }
    at->full = NULL;
}

/* The last block leaves its tiles. */
static void dot_empty(dot_cursor *at)
{
    if (at->full == NULL) {
        return;
    }
    float *below = at->full + DOT_BELOW(at);
    _tile_stored(0, at->full, at->full_row);
    _tile_stored(1, at->full + at->full_half, at->full_row);
    if (at->full_two) {
        _tile_stored(2, below, at->full_row);
        _tile_stored(3, below + at->full_half, at->full_row);
    }
    at->full = NULL;
}

/* Any other step. */
VEC_INLINE void dot_go_on(bool new_a, bool new_b, const uint16_t *a, const uint16_t *b, bool two)
{
    if (new_a) {
        DOT_LOAD_A(4, a);
    }
    if (new_b) {
        DOT_LOAD(6, b, DOT_B_ROW);
        DOT_LOAD(7, b + TILE_DEPTH, DOT_B_ROW);
    }
    DOT_MULTIPLY(0, 4, 6);
    DOT_MULTIPLY(1, 4, 7);
    if (two) {
        if (new_a) {
            DOT_LOAD_A(5, a + TILE_ROWS * ATTN__SQUARE);
        }
        DOT_MULTIPLY(2, 5, 6);
        DOT_MULTIPLY(3, 5, 7);
    }
}

/* After the last pair of a depth: the next depth, the next block, or the next product. */
VEC_INLINE void dot_move(dot_cursor *at, bool two)
{
    const attn__dot *dot = at->dot;
    at->k += TILE_DEPTH;
    if (at->k < dot->depth) {
        at->a += ATTN__SQUARE * ATTN__SQUARE;
        at->b += ATTN__SQUARE * ATTN__SQUARE;
        return;
    }
    at->full = dot->c + attn__dot_sum_place(dot, at->row, at->col);
    at->full_row = sizeof *at->full * (size_t)dot->c_row;
    at->full_half = dot->c_half;
    at->full_two = two;
    at->k = 0;
    at->col += 2 * TILE_ROWS;
    if (at->col >= dot->cols) {
        at->col = 0;
        at->row += 2 * TILE_ROWS;
        if (at->row >= dot->rows) {
            at->dot++;
            dot_enter(at);
            return;
        }
    }
    at->a = dot->a + at->row / ATTN__SQUARE * dot->a_band;
    at->b = dot->b + at->col / ATTN__SQUARE * dot->b_band;
}

/* One step; false if there was none left and all C are complete.  one: both operands of all products have one
 * part.  Whoever takes single steps leaves the tiles alone between them, and ends with dot_finish. */
VEC_INLINE bool dot_step(const bool one, dot_cursor *at)
{
    const attn__dot *dot = at->dot;
    if (dot == at->end) {
        dot_empty(at);
        return false;
    }
    const bool two = dot->rows - at->row > TILE_ROWS;
    if (one) {
        if (at->k == 0) {
            dot_begin_block(at, at->a, at->b, two);
        } else {
            dot_go_on(true, true, at->a, at->b, two);
        }
        dot_move(at, two);
        return true;
    }
    const int pair = __builtin_ctz(at->left), part_a = dot_part_a[pair], part_b = dot_part_b[pair];
    const uint16_t *a = at->a + part_a * dot->a_part, *b = at->b + part_b * dot->b_part;
    if (at->k == 0 && at->held_a < 0) {
        dot_begin_block(at, a, b, two);
    } else {
        dot_go_on(part_a != at->held_a, part_b != at->held_b, a, b, two);
    }
    at->held_a = part_a, at->held_b = part_b;
    at->left &= at->left - 1;
    if (at->left == 0) {
        at->left = dot_pairs(dot);
        at->held_a = at->held_b = -1;
        dot_move(at, two);
    }
    return true;
}

/*
 * The next step or, where none of six at one depth was made yet, all of them, without a branch: for when the
 * vectors have little to do.  Returns the steps, at least 1.
 */
static int64_t dot_stride(dot_cursor *at)
{
    const attn__dot *dot = at->dot;
    if (dot == at->end || at->left != DOT_ALL_PAIRS || dot->rows - at->row <= TILE_ROWS) {
        (void)dot_step(false, at);
        return 1;
    }
    const uint16_t *a = at->a, *b = at->b, *a1 = a + dot->a_part, *b1 = b + dot->b_part;
    if (at->k == 0) {
        dot_begin_block(at, a1 + dot->a_part, b, true);
    } else {
        dot_go_on(true, true, a1 + dot->a_part, b, true);
    }
    dot_go_on(true, false, a1, b, true);
    dot_go_on(false, true, a1, b1, true);
    dot_go_on(true, false, a, b1, true);
    dot_go_on(false, true, a, b1 + dot->b_part, true);
    dot_go_on(false, true, a, b, true);
    dot_move(at, true);
    return DOT_PAIRS;
}

/* What is left of the products. */
static void dot_finish(dot_cursor *at)
{
    DOT_FENCE();
    while (at->dot < at->end) {
        dot_stride(at);
    }
    dot_empty(at);
    DOT_FENCE();
}

static void dot_product(const attn__dot *dot)
{
    dot_cursor at;
    dot_start(&at, dot, 1);
    dot_finish(&at);
}

/* ---- few rows (dot_few.h) ------------------------------------------------------------------------- */

enum {
    FEW_PACKED = 0,
    FEW_SHARE = 10,
    FEW_PV_ROWS = 16,
    FEW_STEP_COST = 2, /* half of P is 0 */
    FEW_P_PARTS = 4,
};

VEC_INLINE int64_t few_least(void)
{
    return 5;
}

static void few_pack_queries(uint16_t *q, int64_t depth, int64_t rows)
{
    (void)q, (void)depth, (void)rows;
}

/* The even dims lie before the odd ones. */
static const int32_t few_order[VEC_LANES] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};

/*
 * V's rows as they lie are operands with dims in pairs where products want keys in pairs.  So a weight meets
 * a pair of dims, once as the pair (p, 0) for the even dims, once as (0, p) for the odd ones: twice the
 * products, which have time, and nothing of V moves.  The parts of P: even keys for even dims, even for odd,
 * odd for even, odd for odd.
 */
VEC_INLINE void few_turn_weights(uint16_t *p, int64_t p_row, const uint16_t *pairs, int64_t pairs_row)
{
    uint16_t turned[PAIR * VEC_LANES * VEC_LANES];
    const __m512i upper = _mm512_set1_epi32(-0x10000);
    const int64_t part = PANEL * p_row;
    dot_transpose(turned, PAIR_LANES, pairs, pairs_row);
    for (int64_t row = 0; row < VEC_LANES; row++, p += p_row) {
        const __m512i both = _mm512_loadu_si512(turned + row * PAIR_LANES);
        _mm512_storeu_si512(p, _mm512_andnot_si512(upper, both));
        _mm512_storeu_si512(p + part, _mm512_slli_epi32(both, 16));
        _mm512_storeu_si512(p + 2 * part, _mm512_srli_epi32(both, 16));
        _mm512_storeu_si512(p + 3 * part, _mm512_and_si512(upper, both));
    }
}

/* Up to 64 keys, a tile of Q for four of K. */
VEC_INLINE void few_qk_block(const few_qk *of, int64_t key, int64_t lane)
{
    const int64_t count = attn__ceil_div(of->keys - key, TILE_ROWS), below = TILE_ROWS * of->k_row;
    const size_t k_row = sizeof *of->k * (size_t)of->k_row, q_row = sizeof *of->q * PAIR * PANEL;
    const uint16_t *k = of->k + key * of->k_row, *q = of->q + PAIR * lane;
    float *s = of->s + key * PANEL + lane;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < of->depth; d += TILE_DEPTH, k += TILE_DEPTH, q += TILE_DEPTH * PANEL) {
        DOT_LOAD(4, q, q_row);
        DOT_LOAD(5, k, k_row);
        DOT_MULTIPLY(0, 5, 4);
        few_ask(of->ahead, of->lines);
        if (count > 1) {
            DOT_LOAD(6, k + below, k_row);
            DOT_MULTIPLY(1, 6, 4);
            few_ask(of->ahead, of->lines);
        }
        if (count > 2) {
            DOT_LOAD(5, k + 2 * below, k_row);
            DOT_MULTIPLY(2, 5, 4);
            few_ask(of->ahead, of->lines);
        }
        if (count > 3) {
            DOT_LOAD(6, k + 3 * below, k_row);
            DOT_MULTIPLY(3, 6, 4);
            few_ask(of->ahead, of->lines);
        }
    }
    _tile_stored(0, s, PANEL * sizeof *s);
    if (count > 1) {
        _tile_stored(1, s + TILE_ROWS * PANEL, PANEL * sizeof *s);
    }
    if (count > 2) {
        _tile_stored(2, s + 2 * TILE_ROWS * PANEL, PANEL * sizeof *s);
    }
    if (count > 3) {
        _tile_stored(3, s + 3 * TILE_ROWS * PANEL, PANEL * sizeof *s);
    }
}

static void few_multiply_qk(const few_qk *of)
{
    DOT_FENCE();
    for (int64_t key = 0; key < of->keys; key += 4 * TILE_ROWS) {
        for (int64_t lane = 0; lane < of->n * TILE_ROWS; lane += TILE_ROWS) {
            few_qk_block(of, key, lane);
        }
    }
    DOT_FENCE();
}

/* 16 rows by up to 64 dims of O. */
VEC_INLINE void few_pv_block(const few_pv *of, int64_t row, int64_t dim)
{
    const bool two = of->dims - dim > PAIR_LANES;
    const size_t p_row = sizeof *of->p * (size_t)of->p_row, v_row = 2 * sizeof *of->v * (size_t)of->v_row;
    const int64_t part = PANEL * of->p_row;
    const size_t o_row = sizeof *of->o * (size_t)of->o_row;
    const uint16_t *p = of->p + row * of->p_row, *v = of->v + dim;
    float *o = of->o + row * of->o_row + dim;
    DOT_LOAD(0, o, o_row);
    DOT_LOAD(1, o + TILE_ROWS, o_row);
    if (two) {
        DOT_LOAD(2, o + 2 * TILE_ROWS, o_row);
        DOT_LOAD(3, o + 3 * TILE_ROWS, o_row);
    }
    for (int64_t half = 0; half < of->keys / TILE_ROWS; half++) { /* the even keys of 32, then the odd ones */
        const uint16_t *even = p + half / 2 * TILE_DEPTH + half % 2 * 2 * part, *odd = even + part;
        const uint16_t *from = v + (half / 2 * TILE_DEPTH + half % 2) * of->v_row;
        DOT_LOAD(4, even, p_row);
        DOT_LOAD(6, from, v_row);
        DOT_MULTIPLY(0, 4, 6);
        DOT_LOAD(5, odd, p_row);
        DOT_MULTIPLY(1, 5, 6);
        if (two) {
            DOT_LOAD(7, from + TILE_DEPTH, v_row);
            DOT_MULTIPLY(2, 4, 7);
            DOT_MULTIPLY(3, 5, 7);
        }
        few_ask(of->ahead, of->lines * (two ? 4 : 2));
    }
    _tile_stored(0, o, o_row);
    _tile_stored(1, o + TILE_ROWS, o_row);
    if (two) {
        _tile_stored(2, o + 2 * TILE_ROWS, o_row);
        _tile_stored(3, o + 3 * TILE_ROWS, o_row);
    }
}

static void few_multiply_pv(const few_pv *of)
{
    DOT_FENCE();
    for (int64_t dim = 0; dim < of->dims; dim += 4 * TILE_ROWS) {
        for (int64_t row = 0; row < of->rows; row += TILE_ROWS) {
            few_pv_block(of, row, dim);
        }
    }
    DOT_FENCE();
}

static int64_t probe_dot_peak(int64_t rounds, float *sink)
{
    enum { PRODUCTS = 4, FLOPS = 2 * TILE_ROWS * TILE_ROWS * TILE_DEPTH };
    float sums[TILE_ROWS * TILE_ROWS];
    uint16_t data[2][TILE_ROWS * TILE_DEPTH]; /* of 1 to 2, both signs: zeros would cost less power */
    uint32_t state = 1;
    for (int i = 0; i < 2 * TILE_ROWS * TILE_DEPTH; i++) {
        state = state * 1664525u + 1013904223u;
        data[i / (TILE_ROWS * TILE_DEPTH)][i % (TILE_ROWS * TILE_DEPTH)] =
            (uint16_t)(0x3f80u | (state >> 16 & 0x807fu));
    }
    dot_begin();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    DOT_FENCE();
    DOT_LOAD(4, data[0], TILE_DEPTH * sizeof **data);
    DOT_LOAD(5, data[1], TILE_DEPTH * sizeof **data);
    for (int64_t r = 0; r < rounds; r++) {
        DOT_MULTIPLY(0, 4, 5);
        DOT_MULTIPLY(1, 4, 5);
        DOT_MULTIPLY(2, 4, 5);
        DOT_MULTIPLY(3, 4, 5);
    }
    _tile_stored(0, sums, TILE_ROWS * sizeof *sums);
    DOT_FENCE();
    dot_end();
    *sink = sums[0];
    return rounds * PRODUCTS * FLOPS;
}

#endif
