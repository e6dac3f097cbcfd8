/* SPDX-License-Identifier: Apache-2.0 */
/*
 * contest.h - who is measured by `bench attention`, behind one small interface.
 *
 *   contest.c         ours: flash (the first row of the kernel table that takes the problem) and each row of
 *                     the table by itself
 *   contest_naive.c   two matrix products by OpenBLAS and a softmax between them, with the score matrix
 *   contest_naive_cuda.c   the same on a GPU, by cuBLASLt
 *
 * A contestant says why it cannot do a case, tells the memory that it will take beside the tensors, is set up
 * once, and then runs a pass any number of times over the same tensors without allocating.  On a GPU the
 * tensors are in its memory, and a run only enqueues on the default stream.
 */
#ifndef ATTN_CLI_CONTEST_H
#define ATTN_CLI_CONTEST_H

#include <stdbool.h>

#include "place.h"

typedef enum contest_pass { CONTEST_FORWARD, CONTEST_BACKWARD, CONTEST_BOTH } contest_pass;

/* Contiguous [batch, heads, tokens, dim] in the problem's dtypes; lse and delta are fp32.  What only the
 * backward pass needs is NULL in a forward one. */
typedef struct contest_tensors {
    void *q, *k, *v, *o, *lse;
    void *dout, *dq, *dk, *dv;
} contest_tensors;

typedef struct contest_case {
    attn_problem problem; /* checked */
    contest_pass pass;    /* BACKWARD: forward runs once, outside of the clock */
    int threads;
    cli_place place;
} contest_case;

typedef struct contestant contestant;
struct contestant {
    const char *name;
    const char *kernel; /* of our table; NULL: the first that takes the problem, or not ours */
    bool rounds_scores; /* not ours: scores and weights are rounded to the dtype of the inputs */
    /* NULL, or in text[size] and returned why it cannot do the case */
    const char *(*can_do)(const contestant *self, const contest_case *c, char *text, size_t size);
    /* The others are NULL where can_do() always has a reason. */
    /* bytes beside the tensors, after can_do() */
    attn_status (*predict)(const contestant *self, const contest_case *c, int64_t *bytes);
    /* *state is freed with free_state(), also after a failure */
    attn_status (*setup)(const contestant *self, const contest_case *c, const contest_tensors *tensors,
                         void **state);
    attn_status (*run)(void *state, contest_pass pass);
    const char *(*isa)(const void *state); /* the instruction set that it runs on, after setup() */
    const char *(*peak)(
        const void *state); /* our kernel at work, whose peak it is measured against; NULL: none */
    void (*free_state)(void *state);
};

enum { CONTESTANTS = 24 };

/* All on a device: flash, every row of its kernel table but the table's own naive, the rival naive; returns
 * how many. */
int contest_all(contestant list[CONTESTANTS], attn_device device);

extern const contestant contest_naive;      /* contest_naive.c */
extern const contestant contest_naive_cuda; /* contest_naive_cuda.c */

#endif
