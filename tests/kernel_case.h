/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_case.h - one attention problem of one head, as blocks for a kernel, with an answer in fp64 computed
 * here (whole score rows, two passes), independent of src/kernel/reference.c.
 *
 * Every array lies between guard pages, exactly as large as its strides reach.
 */
#ifndef ATTN_TESTS_KERNEL_CASE_H
#define ATTN_TESTS_KERNEL_CASE_H

#include "check.h"
#include "kernel/rows.h"

enum { KERNEL_SPANS = 6 };

/* How an [n][dim] array lies in memory. */
typedef enum kernel_layout {
    LAYOUT_DENSE,      /* tokens dim apart */
    LAYOUT_PADDED,     /* tokens further apart */
    LAYOUT_TRANSPOSED, /* tokens 1 apart, dims n apart */
    LAYOUT_BACKWARD,   /* tokens in falling order */
    LAYOUT_REVERSED,   /* dims in falling order */
    LAYOUT_COUNT
} kernel_layout;

typedef struct kernel_array {
    check_buffer buffer;
    void *base; /* element [0][0] */
    int64_t token, dim;
} kernel_array;

typedef struct kernel_case {
    /* set these, then kernel_case_open() */
    attn_dtype dtype;
    int64_t dim_qk, dim_v;
    double scale;
    int64_t lo, hi;      /* visible: lo <= key - query <= hi */
    int64_t first, rows; /* queries */
    int64_t span_count;
    int64_t span_first[KERNEL_SPANS], span_keys[KERNEL_SPANS];
    kernel_layout q_layout, k_layout, v_layout;
    /* made by kernel_case_open() */
    kernel_array q, k[KERNEL_SPANS], v[KERNEL_SPANS];
    attn__span spans[KERNEL_SPANS];
    check_buffer o, lse; /* o rows are dim_v + 3 apart */
    int64_t o_stride;
    /* made by kernel_case_solve() */
    double *want_o, *want_lse;
    check_bound bound;
} kernel_case;

/* Random sizes, masks, layouts, spans; at most `most_keys` keys. */
kernel_case kernel_case_random(uint64_t *seed, int64_t most_keys);
/* A dense fp32 case: one span from position 0, rows aligned to its end. */
kernel_case kernel_case_plain(int64_t rows, int64_t keys, int64_t dim, bool causal);

/* Allocates, and fills q, k, v with normal numbers. */
void kernel_case_open(kernel_case *c, uint64_t *seed);
void kernel_case_close(kernel_case *c);

/* An array of c's dtype, filled with normal numbers; its address of an element; an element; all of it as
 * [tokens][dim], to be freed. */
void kernel_array_open(const kernel_case *c, kernel_array *a, kernel_layout layout, int64_t tokens,
                       int64_t dim, uint64_t *seed);
const void *kernel_element(const kernel_case *c, const kernel_array *a, int64_t token, int64_t d);
double kernel_get(const kernel_case *c, const kernel_array *array, int64_t token, int64_t d);
double *kernel_dense(const kernel_case *c, const kernel_array *array, int64_t tokens, int64_t dim);
void kernel_set(const kernel_case *c, kernel_array *array, int64_t token, int64_t d, double x);

bool kernel_sees(const kernel_case *c, int64_t row, int64_t position);

/* The answer for what the arrays hold now. */
void kernel_case_solve(kernel_case *c);
attn__shape kernel_case_shape(const kernel_case *c);
/* Runs all rows in the kernel's tiles, into poisoned outputs with a scratch of NaN, or of numbers; fails the
 * test if padding between rows was written. */
void kernel_case_run(kernel_case *c, const attn__kernel *kernel);
/* What a kernel may be wrong by. */
check_bound kernel_case_bound(const kernel_case *c, const attn__kernel *kernel);
/* Against the answer. */
void kernel_case_compare(const kernel_case *c, const attn__kernel *kernel);
/* The rows of the table that take c on this machine; ends with NULL. */
const attn__kernel *const *kernel_rows(const kernel_case *c);
#define KERNEL_CASE_ROWS(c, row) for (const attn__kernel *const *row = kernel_rows(c); *row != NULL; row++)
/* Runs all these, and compares what each finds with the answer. */
void kernel_case_try(kernel_case *c);
/* The same for a case that is not open yet; opens, solves and closes it. */
void kernel_case_open_and_try(kernel_case *c, uint64_t *seed);

#endif
