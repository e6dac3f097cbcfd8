/* SPDX-License-Identifier: Apache-2.0 */
/* verify_backward.h - gradients against the fp64 reference, and the tolerances that decide. */
#ifndef ATTN_CLI_VERIFY_BACKWARD_H
#define ATTN_CLI_VERIFY_BACKWARD_H

#include "tensors.h"
#include "verify.h"

/* What is compared. */
typedef struct cli_slopes {
    const attn_problem *problem;
    const char *kernel; /* as in cli_verify, like the next */
    bool rounds_scores;
    /* q, k, v, o, lse, dout: what the gradients were made from; dq, dk, dv: the gradients.  Its own delta is
     * not looked at. */
    const attn_gradients *io;
    bool anew; /* the reference makes its own lse and delta, in the time of all cells; else it reads io's */
    int64_t rows;   /* per (batch, head), rows of dq and keys of dk and dv; 0: all */
    int64_t planes; /* (batch, kv head)s, spread over all; 0: all */
    uint64_t seed;
} cli_slopes;

typedef struct cli_slopes_verdict {
    /* The largest of dq, dk and dv; relative only of those that are more than what rounding may leave: equal
     * keys, say, have dQ = 0. */
    double max_error, relative;
    double ratio;   /* largest error as a share of what it may be: above 1 is wrong */
    int64_t wrong;  /* rows */
    char where[96]; /* the first of them */
    bool passed;
} cli_slopes_verdict;

attn_status cli_slopes_run(const cli_slopes *slopes, cli_slopes_verdict *verdict);

#endif
