/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_case.h - one problem in a GPU's memory, computed through the public interface by named rows of the
 * kernel table, and compared with the fp64 reference.  Shared by the test programs of the GPU.
 *
 * Each array lies between two guard zones of poison, which must still be poison afterwards, like what the
 * strides leave out.  Gradients are made from o and lse of the CPU's forward pass, so that they can be tested
 * without a forward kernel.
 *
 * A wrong result does not end a program: it is told and counted, and the rest is tested too.
 */
#ifndef ATTN_TESTS_CUDA_CASE_H
#define ATTN_TESTS_CUDA_CASE_H

#include "attn/cuda.h"
#include "sequence_case.h"

struct CMUnitTest;

/* ---- the program ---- */

enum { CUDA_KERNELS = 16 };

typedef struct cuda_program {
    int gpu;
    bool small;         /* --small: few and small cases, for a run under a checker */
    const char *kernel; /* --kernel NAME: only this row */
    attn_verdict rows[CUDA_KERNELS];
    int row_count;
    int64_t forward, backward, refused, wrong; /* runs */
} cuda_program;
extern cuda_program cuda;

/* main() of such a program.  Without a GPU it says so and returns 77. */
int cuda_main(int argc, char **argv, const char *name, const struct CMUnitTest *tests, size_t count);
/* Counts a wrong result, with the reason, unless ok. */
void cuda_expect(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The end of each test: fails it if anything was wrong since the last. */
void cuda_conclude(void);

/* ---- cases ---- */

enum { CUDA_BHND, CUDA_BNHD, CUDA_PADDED, CUDA_LAYOUTS };
enum { CUDA_GUARD = 4096 }; /* bytes of a guard zone */

typedef enum cuda_kind {
    CUDA_PLAIN,   /* normal random numbers */
    CUDA_HUGE,    /* one logit that is larger than all others by thousands */
    CUDA_EQUAL,   /* all queries and all keys are the same */
    CUDA_NAN,     /* NaN in one query, one key and one value */
    CUDA_RISING,  /* the farther left a key, the larger its logits, up to hundreds */
    CUDA_GROWING, /* the farther right a key, the larger its logits, up to tens */
    CUDA_KINDS
} cuda_kind;

typedef struct cuda_tensor {
    case_tensor host; /* inputs as given, outputs as they came back */
    char *block;      /* on the GPU, guard zones included; NULL: never made */
} cuda_tensor;
attn_tensor cuda_tensor_there(const cuda_tensor *x);

typedef struct cuda_case {
    /* set these, then cuda_case_open() */
    attn_problem problem;
    int64_t *cu_q, *cu_kv; /* [batch + 1], freed by cuda_case_close(); NULL: equal lengths */
    int layout;
    cuda_kind kind;
    int64_t rows;  /* of each head that are compared; 0: all */
    bool backward; /* gradients too */
    bool no_dq, no_dk, no_dv, accumulate, give_delta;
    uint64_t seed;
    /* made by cuda_case_open() */
    cuda_tensor q, k, v, o, lse;
    cuda_tensor dout, given_o, given_lse, delta, dq, dk, dv;
    case_tensor before[3]; /* what dq, dk and dv hold before, for accumulate */
    int64_t *cu_there[2];
    int64_t *chosen[2], count[2]; /* rows and keys that are compared */
    double *want_o, *want_lse;    /* [batch][head][chosen][dim] */
    double *want[3], *column;     /* of dq, dk, dv; what the weights of a key add up to */
    check_bound bound;
    check_slope slope;
} cuda_case;

/* Random inputs, and the answers of the rows and keys that are compared. */
void cuda_case_open(cuda_case *c);
void cuda_case_close(cuda_case *c);
void cuda_case_text(const cuda_case *c, char text[400]);

/* The arrays there. */
attn_io cuda_case_io(const cuda_case *c);
attn_gradients cuda_case_gradients(const cuda_case *c);

/* Outputs poisoned (or, to accumulate, as they were), a plan, a poisoned workspace between guard zones,
 * execute, wait, outputs fetched.  options: kernel, sms, deterministic. */
attn_status cuda_case_run(cuda_case *c, bool backward, const attn_options *options);
void cuda_case_reset(cuda_case *c, bool backward);
void cuda_case_fetch(cuda_case *c, bool backward);
/* Compares what was fetched; `kernel`: that made it. */
void cuda_case_compare(const cuda_case *c, bool backward, const attn_verdict *kernel);
/* Run and compare with each row that takes the case, counted. */
void cuda_case_try(cuda_case *c, const attn_options *options);

#endif
