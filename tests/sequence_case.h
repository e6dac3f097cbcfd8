/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence_case.h - one random problem in tensors of random layouts, of sequences of equal or unequal length,
 * run on one worker and compared with the fp64 reference.
 *
 * Every array, and the workspace, lies flush against an unreadable page.
 */
#ifndef ATTN_TESTS_SEQUENCE_CASE_H
#define ATTN_TESTS_SEQUENCE_CASE_H

#include "check.h"

/* A tensor between guard pages; elements that its strides leave out are poison. */
typedef struct case_tensor {
    check_buffer buffer;
    attn_tensor t;     /* strides may be all zero, as a user gives them */
    int64_t stride[4]; /* what they mean */
    int64_t size[4];   /* batch, heads, tokens, dim */
    attn_dtype dtype;
    double most, norm; /* largest element, largest row; by case_tensor_fill() */
} case_tensor;

/* A random layout, poisoned. */
void case_tensor_open(case_tensor *x, attn_dtype dtype, int64_t batch, int64_t heads, int64_t tokens,
                      int64_t dim, uint64_t *seed);
/* With these strides, of dense dims; all zero: contiguous. */
void case_tensor_place(case_tensor *x, attn_dtype dtype, const int64_t size[4], const int64_t stride[4]);
void case_tensor_close(case_tensor *x);
/* Normal random numbers. */
void case_tensor_fill(case_tensor *x, uint64_t *seed);
double case_tensor_get(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d);
void case_tensor_set(case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d, double value);
/* Every row in turn: i from 0 to case_tensor_rows(). */
typedef struct case_row {
    int64_t batch, head, token;
} case_row;
int64_t case_tensor_rows(const case_tensor *x);
/* Where an element lies. */
void *case_tensor_at(const case_tensor *x, int64_t batch, int64_t head, int64_t token, int64_t d);
case_row case_tensor_row(const case_tensor *x, int64_t i);
/* Fails the test if what lies between the elements is no longer poison. */
void case_tensor_padding(const case_tensor *x);
/* The same tensor from a token on. */
attn_tensor case_tensor_cut(const case_tensor *x, int64_t token);
/* A copy of all its bytes, padding too, in *copy, which the caller frees; NULL is made anew. */
void case_tensor_keep(const case_tensor *x, char **copy);

/* Tokens of a sequence: its first in the tensors and how many; its batch in the tensors. */
typedef struct case_piece {
    int64_t batch, q_first, q_count, kv_first, kv_count;
} case_piece;
case_piece case_piece_of(const attn_problem *p, const int64_t *cu_q, const int64_t *cu_kv, int64_t b);
/* Random cumulative lengths of at most `most`, some 0; [batch + 1], the caller frees them. */
int64_t *case_lengths(uint64_t *seed, int64_t batch, int64_t most);

typedef struct sequence_case {
    /* set these, then sequence_case_open() */
    attn_problem problem;
    int64_t *cu_q, *cu_kv; /* freed by sequence_case_close(); NULL: equal lengths */
    /* made by sequence_case_open() */
    case_tensor q, k, v, o, lse;
} sequence_case;

/* The row of the kernel table that a plan takes: another shape by the same row has the same bits. */
const char *case_kernel(const attn_problem *p, const attn_options *options);

/* Random inputs. */
void sequence_case_open(sequence_case *c, uint64_t seed);
void sequence_case_close(sequence_case *c);
attn_io sequence_case_io(const sequence_case *c);
/* Poisons the outputs; then plan, poisoned workspace of exactly its size, execute. */
attn_status sequence_case_run(sequence_case *c, const attn_options *options);
/* Fails the test unless o and lse are within tolerance of the fp64 reference and nothing else was written. */
void sequence_case_compare(const sequence_case *c, const char *what);
/* The same bits from 1, 2, 3 and 5 threads; compares the first with the reference. */
void sequence_case_threads(sequence_case *c, const char *what);
/* The same bits from each sequence alone. */
void sequence_case_alone(sequence_case *c, const char *what);

#endif
