/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine_case.h - one random problem with its arrays, run through the engine in some way and compared with
 * the fp64 reference.  Shared by the tests of the engine.
 */
#ifndef ATTN_TESTS_ENGINE_CASE_H
#define ATTN_TESTS_ENGINE_CASE_H

#include "attn/attn.h"

typedef struct engine_case {
    attn_problem problem;
    void *q, *k, *v; /* [b][h][n][d], or [b][n][h][d] when `interleaved` */
    int interleaved;
    attn_tensor tensor[3];
    float *o, *lse;            /* contiguous [b][h][n][d] and [b][h][n], poisoned by case_poison() */
    double *want_o, *want_lse; /* the fp64 reference, made by case_open() */
    int reads;                 /* of the source */
    int fail_read_at;          /* the source fails at this read; -1: never */
} engine_case;

/* A uniformly random integer in [0, n). */
int64_t case_random(uint64_t *seed, int64_t n);
/* Random sizes, GQA, masks, dtypes: everything small. */
attn_problem case_problem(uint64_t *seed, int64_t most_tokens);
/* Normal random inputs and the reference. */
void case_open(engine_case *c, const attn_problem *problem, uint64_t seed);
void case_close(engine_case *c);

int64_t case_rows(const engine_case *c);
void case_poison(engine_case *c);
/* io over the tensors (from_source 0), or over a source and a sink that copy (1). */
attn_io case_io(engine_case *c, int from_source, attn_source *source, attn_sink *sink);
/* Plans, allocates the workspace and runs; the workspace is poisoned before. */
attn_status case_run(engine_case *c, const attn_options *options, int from_source);
/* Fails the test unless o and lse are within tolerance of the reference. */
void case_compare(const engine_case *c, const char *what);

#endif
