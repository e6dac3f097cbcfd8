/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - the verb `check` in its parts.
 *
 *   check.c        the verb: every kernel over the grid, a line each
 *   check_grid.c   the grid of cases
 *   check_case.c   one case with one kernel, in a process of its own
 */
#ifndef ATTN_CLI_CHECK_H
#define ATTN_CLI_CHECK_H

#include "cli.h"
#include "measure.h"
#include "place.h"

/* How the arrays lie in memory. */
typedef enum check_layout {
    CHECK_BHND,       /* contiguous */
    CHECK_BNHD,       /* heads of a token side by side */
    CHECK_PADDED,     /* gaps behind rows, heads and batches */
    CHECK_ALIGNED,    /* the same of whole 16 bytes */
    CHECK_TRANSPOSED, /* tokens side by side, dims apart */
    CHECK_REVERSED,   /* tokens in falling order */
    CHECK_LAYOUTS
} check_layout;

typedef enum check_kind {
    CHECK_PLAIN, /* normal random numbers */
    CHECK_HUGE,  /* one logit that is larger than all others by thousands */
    CHECK_EQUAL, /* all queries and all keys are the same: equal weights */
    CHECK_NAN,   /* a NaN in one query, one key and one value: it stays in the rows that see it */
    CHECK_KINDS
} check_kind;

typedef struct check_case {
    attn_problem problem; /* checked */
    check_layout layout;
    check_kind kind;
    int64_t workers; /* of the forward pass */
    cli_place place;
    int64_t rows; /* of each head that are compared; 0: all */
    bool anew;    /* the reference of gradients begins at q, k, v and dO alone */
    uint64_t seed;
} check_case;

/* "bnhd, nan": what the problem's text does not tell. */
#define CHECK_TEXT 80
const char *check_case_text(const check_case *c, char text[CHECK_TEXT]);

/* The cases, freed with free(); quick: those that take seconds. */
check_case *check_grid(bool quick, uint64_t seed, cli_place place, int *count);

typedef struct check_result {
    cli_row_status status; /* first, for cli_child_run(); REFUSED: the kernel does not take the case */
    char text[360];
    bool has_backward;
    double forward, backward;             /* largest error as a share of what it may be */
    double forward_error, backward_error; /* ||x - ref|| / ||ref|| */
} check_result;

/* Runs some cases, each in a process of its own; on a GPU, whose opening takes longer than a case, all in
 * one, which ends at the first that fails.  Returns how many have a result. */
enum { CHECK_TOGETHER = 16 };
int check_run(const check_case *c, int count, const char *kernel, check_result result[CHECK_TOGETHER]);

#endif
