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

/* Pieces of one instance of the flash template; all NULL where the build has no such instance. */
typedef struct attn__probe {
    int lanes;
    void (*exp2)(float *y, const float *x, int64_t count); /* any count; see docs/exp.md */
    int64_t (*peak)(int64_t rounds, float *sink);          /* runs FMAs and nothing else; returns the FLOPs */
    float (*read)(const void *array, size_t bytes);        /* adds up what lies there, as floats */
} attn__probe;

extern const attn__kernel attn__flash_avx512, attn__flash_avx2, attn__flash_portable; /* cpu/flash_*.c */
extern const attn__kernel attn__kernel_reference;                                     /* reference.c */
extern const attn__kernel attn__kernel_naive;                                         /* naive.c */

extern const attn__probe attn__probe_avx512, attn__probe_avx2, attn__probe_portable;

#endif
