/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h - a result against the fp64 reference, and the tolerances that decide. */
#ifndef ATTN_CLI_VERIFY_H
#define ATTN_CLI_VERIFY_H

#include "bytes.h"

/* Sizes of the data on which rounding errors depend: over all finite elements. */
typedef struct cli_bounds {
    double q, k; /* longest row, Euclidean */
    double v;    /* largest |element| */
} cli_bounds;

/* What a correct result may differ from the reference; see verify.c for the derivation. */
typedef struct cli_tolerance {
    double o, o_share;     /* |o - ref| <= o + o_share |ref| */
    double rms, rms_share; /* root mean square of o - ref <= rms + rms_share * that of ref */
    double lse;            /* |lse - ref| */
} cli_tolerance;

/* What the named kernel of the table rounds weights by, relative: 2^-8, 2^-11 or, mostly, 0.  NULL: another
 * program. */
double cli_weight_rounding(const attn_problem *problem, const char *kernel);

/* rounds_scores: another program that rounds scores and weights to the dtype of the inputs. */
cli_tolerance cli_tolerance_of(const attn_problem *problem, const char *kernel, bool rounds_scores,
                               const cli_bounds *bounds, cli_dtype out);
/* By how much that makes the weights wrong, relative; `scores` bounds every |score|. */
double cli_score_rounding(const attn_problem *problem, double scores);

/* One pass over a source, in small pieces. */
attn_status cli_bounds_of(const attn_problem *problem, const attn_source *source, cli_bounds *bounds);

typedef struct cli_verdict {
    int64_t rows;          /* compared, over all batches and heads */
    int64_t nonfinite;     /* rows where the reference itself is NaN or inf */
    int64_t wrong;         /* rows outside the tolerance */
    int64_t at[3];         /* batch, head, row of the first one */
    double max_error;      /* max of abs(o - ref) */
    double max_limit;      /* and what it may be where the reference is largest */
    double relative;       /* ||o - ref|| / ||ref|| */
    double rms, rms_limit; /* root mean square of o - ref, and what it may be */
    double lse_error;
    double ratio; /* largest error as a share of what it may be: above 1 is wrong */
    bool has_lse;
    bool passed;
    cli_bounds bounds;
    cli_tolerance tolerance;
} cli_verdict;

/* What is compared, and how the caller hears of it. */
typedef struct cli_verify {
    const attn_problem *problem;
    const attn_source *source;
    const char *kernel; /* that computed it, a row of the kernel table; NULL: another program */
    bool rounds_scores; /* as in cli_tolerance_of() */
    cli_dtype out;      /* the dtype that o was rounded to */
    int64_t rows;       /* per batch and head, spread over the sequence at random; 0: all */
    int64_t planes;     /* (batch, head)s, spread over all; 0: all */
    uint64_t seed;
    bool has_lse;
    /* rows first..first+count of a result: o[count][dim_v], lse[count] */
    attn_status (*read)(void *data, int64_t batch, int64_t head, int64_t first, int64_t count, float *o,
                        float *lse);
    void *data;
    int (*step)(void *data, int64_t rows); /* rows just compared; nonzero stops with ATTN_ECANCELED */
    void *step_data;
} cli_verify;

attn_status cli_verify_run(const cli_verify *verify, cli_verdict *verdict);

/* Bytes that it allocates, here and in attn_reference(). */
int64_t cli_verify_bytes(const attn_problem *problem);

#endif
