/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backward_case.h - one random problem with the gradient of its output, in random layouts, run through
 * attn_execute_backward() and compared with attn_reference_backward().
 *
 * Every array, and the workspace, lies flush against an unreadable page.
 */
#ifndef ATTN_TESTS_BACKWARD_CASE_H
#define ATTN_TESTS_BACKWARD_CASE_H

#include "sequence_case.h"

typedef struct backward_case {
    /* set these, then backward_case_open() */
    attn_problem problem;
    int64_t *cu_q, *cu_kv; /* [batch + 1], freed by backward_case_close(); NULL: equal lengths */
    int no_dq, no_dk, no_dv, accumulate, give_delta;
    /* made by backward_case_open() */
    case_tensor q, k, v, o, lse, delta, dout;
    case_tensor dq, dk, dv;              /* written by a run */
    case_tensor dq0, dk0, dv0;           /* what they hold before, for accumulate */
    double *want_dq, *want_dk, *want_dv; /* [tensor batch][head][token][dim], without what was before */
    check_slope slope;
} backward_case;

/* Random everything; sequences of unequal length in one case of three. */
backward_case backward_case_random(uint64_t *seed, int64_t most_tokens);
/* A case with several ranges of keys. */
backward_case backward_case_long(const char *text, int unequal, int accumulate);
/* Random inputs, o and lse from the fp64 forward, and the answer. */
void backward_case_open(backward_case *c, uint64_t seed);
void backward_case_close(backward_case *c);

attn_gradients backward_case_io(const backward_case *c);
/* Outputs become what they were at first; then plan, poisoned workspace of exactly its size, execute. */
attn_status backward_case_run(backward_case *c, const attn_options *options);
void backward_case_compare(const backward_case *c, const char *what);
void backward_case_describe(char *text, size_t capacity, const backward_case *c, const attn_options *o);
/* A random row of the table that has gradients and takes the problem here. */
const char *backward_case_kernel(const attn_problem *p, uint64_t *seed);

#endif
