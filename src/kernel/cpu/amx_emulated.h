/* SPDX-License-Identifier: Apache-2.0 */
/*
 * amx_emulated.h - the tile instructions that dot_amx.h uses, by AVX-512: for tests of flash-amx on a machine
 * without AMX, and by sanitizers, which do not see what the instructions read and write (ATTN_EMULATE_AMX of
 * the build).  Some 30 times slower than the instructions.
 *
 * ROUNDING.  As dot_amx.h tells of a product: FMAs in fp32 over the even and the odd terms, each by itself,
 * then both are added to C.  That subnormal numbers count as 0 is left out.
 */
#ifndef ATTN_AMX_EMULATED_H
#define ATTN_AMX_EMULATED_H

enum { EMULATED_TILES = 8, EMULATED_ROWS = 16, EMULATED_WORDS = 16, EMULATED_BYTES = 64 };

static _Thread_local uint32_t emulated[EMULATED_TILES][EMULATED_ROWS][EMULATED_WORDS];

static void emulated_load(int tile, const void *from, size_t row)
{
    for (int i = 0; i < EMULATED_ROWS; i++) {
        memcpy(emulated[tile][i], (const char *)from + (size_t)i * row, EMULATED_BYTES);
    }
}

static void emulated_store(int tile, void *to, size_t row)
{
    for (int i = 0; i < EMULATED_ROWS; i++) {
        memcpy((char *)to + (size_t)i * row, emulated[tile][i], EMULATED_BYTES);
    }
}

static void emulated_zero(int tile)
{
    memset(emulated[tile], 0, sizeof emulated[tile]);
}

/* The even one of each pair of bf16, or the odd one. */
VEC_INLINE vec emulated_even(__m512i pairs)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

VEC_INLINE vec emulated_odd(__m512i pairs)
{
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)));
}

/* Of tiles alone: sanitizers would make most of the work, and find what they find in loads and stores. */
static void emulated_multiply(int c, int a, int b)
    __attribute__((no_sanitize("address"), no_sanitize("undefined")));

static void emulated_multiply(int c, int a, int b)
{
    for (int i = 0; i < EMULATED_ROWS; i++) {
        vec even = vec_set(0.0f), odd = vec_set(0.0f);
        for (int k = 0; k < EMULATED_WORDS; k++) {
            const __m512i pair = _mm512_set1_epi32((int)emulated[a][i][k]);
            const __m512i row = _mm512_loadu_si512(emulated[b][k]);
            even = vec_fma(emulated_even(pair), emulated_even(row), even);
            odd = vec_fma(emulated_odd(pair), emulated_odd(row), odd);
        }
        float *sums = (float *)emulated[c][i];
        vec_store(sums, vec_add(vec_load(sums), vec_add(even, odd)));
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)            ((void)(config))
#define _tile_release()                     ((void)0)
#define _tile_loadd(tile, from, row)        emulated_load(tile, from, (size_t)(row))
#define _tile_stream_loadd(tile, from, row) emulated_load(tile, from, (size_t)(row))
#define _tile_stored(tile, to, row)         emulated_store(tile, to, (size_t)(row))
#define _tile_zero(tile)                    emulated_zero(tile)
#define _tile_dpbf16ps(c, a, b)             emulated_multiply(c, a, b)

#endif
