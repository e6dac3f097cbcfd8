/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradient_case.h - a kernel_case and the gradient of its output, with an answer in fp64 computed here from
 * whole score rows, independent of src/kernel/reference.c.
 *
 * The outputs begin with random contents, since kernels add to them; every array lies between guard pages.
 */
#ifndef ATTN_TESTS_GRADIENT_CASE_H
#define ATTN_TESTS_GRADIENT_CASE_H

#include "kernel_case.h"

/* A gradient: rows `token` = dim + 3 apart, poison between them. */
typedef struct gradient_array {
    check_buffer buffer;
    int64_t rows, dim, token;
    float *before; /* [rows][dim] */
    double *want;  /* [rows][dim] */
    bool *touched; /* [rows]: something is added */
} gradient_array;

typedef struct gradient_case {
    kernel_case base; /* set it, then gradient_case_open() */
    kernel_layout dout_layout;
    bool apart;    /* a call for each span, not one for all */
    int64_t steps; /* not 0: a call for each so many steps of keys that the kernel has, of the first span */
    bool no_dq, no_dk, no_dv;
    bool never;   /* dq's turn never comes */
    int64_t mute; /* not 0: each mute-th row is told lse = -inf, whatever it sees */
    /* made by gradient_case_open() */
    kernel_array dout;
    gradient_array dq, dk[KERNEL_SPANS], dv[KERNEL_SPANS];
    /* made by gradient_case_solve() */
    float *lse, *delta;
    double *column; /* weight that each key of a span got: [span][key] */
    check_slope slope;
} gradient_case;

gradient_case gradient_case_random(uint64_t *seed, int64_t most_keys);
gradient_case gradient_case_plain(int64_t rows, int64_t keys, int64_t dim, bool causal);
void gradient_case_open(gradient_case *g, uint64_t *seed);
void gradient_case_close(gradient_case *g);

/* Other queries and dO for the same keys: the next query head of a group.  dq begins anew. */
void gradient_case_next_head(gradient_case *g, uint64_t *seed);
/* lse, delta and what the kernel is to add, for what the arrays hold now; added to the answer so far. */
void gradient_case_solve(gradient_case *g);

/* The outputs become what they were at first. */
void gradient_case_reset(gradient_case *g);
/* Adds all rows in the kernel's tiles, with a poisoned scratch; fails the test if padding was written. */
void gradient_case_run(gradient_case *g, const attn__kernel *kernel);
void gradient_case_compare(const gradient_case *g, const attn__kernel *kernel);
/* The rows of the table that take g, gradients and all, on this machine; ends with NULL. */
const attn__kernel *const *gradient_rows(const gradient_case *g);

#endif
