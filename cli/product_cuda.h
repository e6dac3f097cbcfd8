/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_cuda.h - products of matrices on a GPU by cuBLASLt, which is loaded when the first is made, and the
 * softmax between them: what the contestant naive is made of.
 */
#ifndef ATTN_CLI_PRODUCT_CUDA_H
#define ATTN_CLI_PRODUCT_CUDA_H

#include <stdbool.h>

#include "attn/cuda.h"

/* For each of `batch` items C = alpha op(A) op(B) + beta C, row by row: C has m rows of n, op(A) m rows of k,
 * op(B) k rows of n; op transposes if asked to.  Strides in elements from one item to the next; row_a and
 * row_c from one row of A and C as they lie in memory to the next, 0 where they are dense.  Sums in fp32. */
typedef struct product_want {
    attn_dtype dtype;
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    float alpha, beta;
    int64_t batch, stride_a, stride_b, stride_c;
    int64_t row_a, row_c;
} product_want;

typedef struct product product;

/* NULL, or why there are no such products in this build and on this machine; loads the library. */
const char *product_missing(int gpu);
/* "cuBLASLt 13.1" */
const char *product_library(void);
/* Bytes of the GPU's memory that all products of a process share. */
int64_t product_workspace(void);

attn_status product_open(product **made, int gpu, const product_want *want);
void product_close(product *p);
/* On the default stream. */
attn_status product_run(const product *p, const void *a, const void *b, void *c);

/* FLOP/s of the product of two square matrices of random normal numbers, the median of some; 0: unknown. */
double product_peak(int gpu, attn_dtype dtype, int size);

/* Elements from a row of `keys` scores to the next: rows begin at multiples of 16 bytes. */
int64_t softmax_pitch(int64_t keys);
/* Softmax of each of `rows` rows of `keys` scores in place, zeros up to the next row, and their lse.  causal:
 * row i of `keys` rows sees i + 1 keys. On the default stream. */
attn_status softmax_rows(int gpu, attn_dtype dtype, void *scores, float *lse, int64_t rows, int64_t keys,
                         bool causal);
/* dS = P * (dP - D) in place of dP, where D is the row's sum of P * dP. */
attn_status softmax_slopes(int gpu, attn_dtype dtype, void *slopes, const void *weights, int64_t rows,
                           int64_t keys);

#endif
