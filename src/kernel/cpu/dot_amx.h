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

enum { DOT_PARTS = 3, TILE_ROWS = 16, TILE_DEPTH = 32 };

/* Tile loads are unknown to some compilers as readers of memory: what they read must be there. */
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

/* Tiles 4 and 5 from A, tiles 6 and 7 from B, at one step of 32 along the depth. */
VEC_INLINE void dot_load_a(const int m, const attn__dot *dot, const uint16_t *a)
{
    const size_t row = sizeof *a * (size_t)dot->a_row;
    _tile_loadd(4, a, row);
    if (m == 2) {
        _tile_loadd(5, a + TILE_ROWS * dot->a_row, row);
    }
}

VEC_INLINE void dot_load_b(const attn__dot *dot, const uint16_t *b)
{
    const size_t row = sizeof *b * (size_t)dot->b_row;
    _tile_loadd(6, b, row);
    _tile_loadd(7, b + TILE_DEPTH, row);
}

/* C, 16 * m rows by 32, in tiles 0 to 3. */
VEC_INLINE void dot_multiply(const int m)
{
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (m == 2) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* The pairs of parts (0, 2), (0, 1), (1, 1), (1, 0), (2, 0), as far as they exist: each needs one new
 * operand. */
VEC_INLINE void dot_small(const int m, const attn__dot *dot, const uint16_t *a, const uint16_t *b)
{
    const int64_t a_part = dot->a_part, b_part = dot->b_part;
    dot_load_a(m, dot, a);
    if (dot->b_parts > 2) {
        dot_load_b(dot, b + 2 * b_part);
        dot_multiply(m);
    }
    if (dot->b_parts > 1) {
        dot_load_b(dot, b + b_part);
        dot_multiply(m);
    }
    if (dot->a_parts > 1) {
        dot_load_a(m, dot, a + a_part);
        if (dot->b_parts > 1) {
            dot_multiply(m);
        }
        dot_load_b(dot, b);
        dot_multiply(m);
    }
    if (dot->a_parts > 2) {
        dot_load_a(m, dot, a + 2 * a_part);
        dot_multiply(m);
    }
}

VEC_INLINE void dot_load(const int m, const attn__dot *dot, const float *c)
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
    if (m == 2) {
        _tile_loadd(2, c + TILE_ROWS * dot->c_row, row);
        _tile_loadd(3, c + TILE_ROWS * dot->c_row + TILE_ROWS, row);
    }
}

VEC_INLINE void dot_store(const int m, const attn__dot *dot, float *c)
{
    const size_t row = sizeof *c * (size_t)dot->c_row;
    _tile_stored(0, c, row);
    _tile_stored(1, c + TILE_ROWS, row);
    if (m == 2) {
        _tile_stored(2, c + TILE_ROWS * dot->c_row, row);
        _tile_stored(3, c + TILE_ROWS * dot->c_row + TILE_ROWS, row);
    }
}

/* 16 * m rows by 32 of C, whole depth */
VEC_INLINE void dot_tiles(const int m, const attn__dot *dot, const uint16_t *a, const uint16_t *b, float *c)
{
    dot_load(m, dot, c);
    for (int64_t k = 0; k < dot->depth && (dot->a_parts > 1 || dot->b_parts > 1); k += TILE_DEPTH) {
        dot_small(m, dot, a + k, b + k / 2 * dot->b_row);
    }
    for (int64_t k = 0; k < dot->depth; k += TILE_DEPTH) {
        dot_load_a(m, dot, a + k);
        dot_load_b(dot, b + k / 2 * dot->b_row);
        dot_multiply(m);
    }
    dot_store(m, dot, c);
}

static void dot_product(const attn__dot *dot)
{
    DOT_FENCE();
    for (int64_t col = 0; col < dot->cols; col += 2 * TILE_ROWS) {
        const uint16_t *b = dot->b + 2 * col;
        int64_t row = 0;
        for (; row + 2 * TILE_ROWS <= dot->rows; row += 2 * TILE_ROWS) {
            dot_tiles(2, dot, dot->a + row * dot->a_row, b, dot->c + row * dot->c_row + col);
        }
        if (row < dot->rows) {
            dot_tiles(1, dot, dot->a + row * dot->a_row, b, dot->c + row * dot->c_row + col);
        }
    }
    DOT_FENCE();
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
