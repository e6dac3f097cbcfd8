/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - the rows of the kernel table, one a file, and the probes by which tests and benches look inside
 * the vectorised ones.  Only table.c, the rows' own files, tests/ and bench/ include it.
 */
#ifndef ATTN_KERNEL_ROWS_H
#define ATTN_KERNEL_ROWS_H

#include "kernel/kernel.h"

/* Element `index` of an array of dtype. */
static inline const void *attn__element(const void *array, attn_dtype dtype, int64_t index)
{
    return (const char *)array + index * (int64_t)attn_dtype_size(dtype);
}

/*
 * A product of matrices that are sums of bf16 parts (cpu/dot_amx.h, cpu/dot_avx512bf16.h):
 *
 *     C[rows][cols] (+)= sum of A_i[rows][depth] B_j[depth][cols] over the parts with i + j < 3
 *
 * Both lie in squares of 32 x 32, those along the depth side by side.  Element (row, k) of part i of A is
 * a[i * a_part + (row / 32) * a_band + (k / 32) * 1024 + (row % 32) * 32 + k % 32].  B has its depth in
 * pairs: (k, col) of part j is b[j * b_part + (col / 32) * b_band + (k / 2) * 64 + (col % 32) * 2 + k % 2].
 * C has its columns 16 at a time, c_half apart, 32 of them side by side: attn__dot_sum_place().
 * Distances in elements; rows % 16 = cols % 32 = depth % 32 = 0.
 */
typedef struct attn__dot {
    const uint16_t *a, *b;
    int64_t a_band, a_part, b_band, b_part;
    int a_parts, b_parts; /* 1 to 3 */
    float *c;
    int64_t c_band, c_row, c_half; /* from 32 rows, one row, 16 of 32 columns to the next */
    int64_t rows, cols, depth;
    bool add; /* to what C holds */
} attn__dot;

enum { ATTN__SQUARE = 32 };

/* Where element (row, k) of a part of A lies. */
static inline int64_t attn__dot_place(int64_t row, int64_t k, int64_t a_band)
{
    return row / ATTN__SQUARE * a_band + k / ATTN__SQUARE * ATTN__SQUARE * ATTN__SQUARE +
           row % ATTN__SQUARE * ATTN__SQUARE + k % ATTN__SQUARE;
}

/* Where element (row, col) of C lies. */
static inline int64_t attn__dot_sum_place(const attn__dot *dot, int64_t row, int64_t col)
{
    return row / ATTN__SQUARE * dot->c_band + row % ATTN__SQUARE * dot->c_row +
           col / ATTN__SQUARE * ATTN__SQUARE + col % ATTN__SQUARE / 16 * dot->c_half + col % 16;
}

/* Pieces of one instance of the flash template; all NULL where the build has no such instance. */
typedef struct attn__probe {
    int lanes;
    void (*exp2)(float *y, const float *x, int64_t count); /* any count; see docs/exp.md */
    int64_t (*peak)(int64_t rounds, float *sink);          /* runs FMAs and nothing else; returns the FLOPs */
    float (*read)(const void *array, size_t bytes);        /* adds up what lies there, as floats */
    /* Of the instances that compute with bf16: exp2 for weights of one part, one product, and products of
     * tiles and nothing else. */
    void (*weight)(float *y, const float *x, int64_t count);
    void (*dot)(const attn__dot *dot);
    int64_t (*dot_peak)(int64_t rounds, float *sink);
} attn__probe;

/* cpu/flash_*.c */
extern const attn__kernel attn__flash_amx, attn__flash_avx512bf16;
extern const attn__kernel attn__flash_avx512, attn__flash_avx2, attn__flash_neon, attn__flash_portable;
extern const attn__kernel attn__kernel_reference; /* reference.c */
extern const attn__kernel attn__kernel_naive;     /* naive.c */

extern const attn__probe attn__probe_amx, attn__probe_avx512bf16;
extern const attn__probe attn__probe_avx512, attn__probe_avx2, attn__probe_neon, attn__probe_portable;

#endif
