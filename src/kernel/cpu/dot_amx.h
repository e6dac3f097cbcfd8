/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dot_amx.h - products of bf16 parts (attn__dot in rows.h) on AMX tiles.
 *
 * METHOD.  2 x 2 tiles of C, 32 x 32 sums, stay in registers while the depth goes by 32 at a time: 4 tiles
 * are loaded for 4 products.  The parts of x are x cut after each 8 bits (Henry, Tang & Heinecke, ARITH 2019,
 * arXiv 1904.06376); pairs of small parts are summed first, so that what is rounded away is small against C.
 *
 * ROUNDING.  A tile product sums its 16 even and its 16 odd terms apart, by FMA in fp32, then adds both to C
 * (Intel SDM, TDPBF16PS).  Subnormal inputs and results count as 0.
 *
 * COST.  16 cycles a tile product (16384 FLOPs), 8 for the lines of a tile that is loaded.
 *
 * Include it inside a region compiled for "amx-tile,amx-bf16".
 */
#ifndef ATTN_DOT_AMX_H
#define ATTN_DOT_AMX_H

enum { DOT_PARTS = 3, DOT_PAIRS = 6, TILE_ROWS = 16, TILE_DEPTH = 32 };

/* Some compilers do not know that tile loads read memory: what they read must be there. */
#define DOT_FENCE() __asm__ volatile("" ::: "memory")

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

/*
 * How far a product has come.  A step is 32 deep, for 2 x 2 tiles of C (1 x 2 at the end of odd rows); after
 * the last of a block one more stores it, so that who does other work between steps does not wait for the
 * sums.
 */
typedef struct dot_cursor {
    const attn__dot *dot;
    int64_t row, col, k;                          /* row >= dot->rows: done */
    int pair, pairs;                              /* of parts; pair == pairs: the block is to be stored */
    int64_t a_pair[DOT_PAIRS], b_pair[DOT_PAIRS]; /* where the parts of each begin */
} dot_cursor;

static dot_cursor dot_start(const attn__dot *dot)
{
    dot_cursor at = {.dot = dot};
    for (int sum = DOT_PARTS - 1; sum >= 0; sum--) {
        for (int i = 0; i <= sum; i++) {
            if (i < dot->a_parts && sum - i < dot->b_parts) {
                at.a_pair[at.pairs] = i * dot->a_part;
                at.b_pair[at.pairs++] = (sum - i) * dot->b_part;
            }
        }
    }
    return at;
}

/* The steps of a product. */
static int64_t dot_steps(const dot_cursor *at)
{
    const attn__dot *dot = at->dot;
    const int64_t blocks = attn__ceil_div(dot->rows, 2 * TILE_ROWS) * (dot->cols / (2 * TILE_ROWS));
    return blocks * (at->pairs * (dot->depth / TILE_DEPTH) + 1);
}

/* C, one or two rows of tiles, from memory to tiles 0 to 3, or zeros. */
VEC_INLINE void dot_load(const attn__dot *dot, const float *c, bool two)
{
    const size_t row = sizeof *c * (size_t)dot->c_row;
    if (!dot->add) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, c, row);
    _tile_loadd(1, c + TILE_ROWS, row);
    if (two) {
        _tile_loadd(2, c + TILE_ROWS * dot->c_row, row);
        _tile_loadd(3, c + TILE_ROWS * dot->c_row + TILE_ROWS, row);
    }
}

VEC_INLINE void dot_store(const attn__dot *dot, float *c, bool two)
{
    const size_t row = sizeof *c * (size_t)dot->c_row;
    _tile_stored(0, c, row);
    _tile_stored(1, c + TILE_ROWS, row);
    if (two) {
        _tile_stored(2, c + TILE_ROWS * dot->c_row, row);
        _tile_stored(3, c + TILE_ROWS * dot->c_row + TILE_ROWS, row);
    }
}

VEC_INLINE void dot_multiply(const attn__dot *dot, const uint16_t *a, const uint16_t *b, bool two)
{
    const size_t a_row = sizeof *a * (size_t)dot->a_row, b_row = sizeof *b * (size_t)dot->b_row;
    _tile_loadd(6, b, b_row);
    _tile_loadd(4, a, a_row);
    _tile_loadd(7, b + TILE_DEPTH, b_row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
        _tile_loadd(5, a + TILE_ROWS * dot->a_row, a_row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* One step; false if there was none left.  Whoever takes single steps leaves the tiles alone between them and
 * sees to it that what a step reads has been written. */
VEC_INLINE bool dot_step(dot_cursor *at)
{
    const attn__dot *dot = at->dot;
    if (at->row >= dot->rows) {
        return false;
    }
    const bool two = dot->rows - at->row > TILE_ROWS;
    float *c = dot->c + at->row * dot->c_row + at->col;
    if (at->pair == at->pairs) {
        dot_store(dot, c, two);
        at->pair = 0;
        at->col += 2 * TILE_ROWS;
        if (at->col >= dot->cols) {
            at->col = 0;
            at->row += 2 * TILE_ROWS;
        }
        return true;
    }
    if (at->pair == 0 && at->k == 0) {
        dot_load(dot, c, two);
    }
    dot_multiply(dot, dot->a + at->a_pair[at->pair] + at->row * dot->a_row + at->k,
                 dot->b + at->b_pair[at->pair] + at->k / 2 * dot->b_row + 2 * at->col, two);
    at->k += TILE_DEPTH;
    if (at->k >= dot->depth) {
        at->k = 0;
        at->pair++;
    }
    return true;
}

/* What is left of a product. */
static void dot_finish(dot_cursor *at)
{
    DOT_FENCE();
    while (dot_step(at)) {
    }
    DOT_FENCE();
}

static void dot_product(const attn__dot *dot)
{
    dot_cursor at = dot_start(dot);
    dot_finish(&at);
}

static int64_t probe_dot_peak(int64_t rounds, float *sink)
{
    enum { PRODUCTS = 4, FLOPS = 2 * TILE_ROWS * TILE_ROWS * TILE_DEPTH };
    float sums[TILE_ROWS * TILE_ROWS];
    dot_begin();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, TILE_ROWS * sizeof *sums);
    DOT_FENCE();
    dot_end();
    *sink = sums[0];
    return rounds * PRODUCTS * FLOPS;
}

#endif
