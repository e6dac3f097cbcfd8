/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 01_reuse_plan.c - decide once, compute many times.
 *
 * A plan holds every decision and touches no data; the workspace is yours.  Executing allocates nothing, so
 * the loop below may run in real time.  Each round is compared with the library's fp64 reference.
 */
#include <attn/attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS_Q = 4, HEADS_KV = 2, TOKENS = 300, DIM = 32, ROUNDS = 3 };

static float q[HEADS_Q][TOKENS][DIM], k[HEADS_KV][TOKENS][DIM], v[HEADS_KV][TOKENS][DIM];
static float o[HEADS_Q][TOKENS][DIM];

static void fill(float *x, int count, unsigned seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f; /* in [-1, 1) */
    }
}

/* Largest difference to the reference over some rows of one head; -1 on failure. */
static double compare(const attn_problem *problem, const attn_io *io, int head)
{
    static const int64_t rows[] = {0, 1, TOKENS / 2, TOKENS - 1};
    enum { COUNT = sizeof rows / sizeof rows[0] };
    double expected[COUNT][DIM], lse[COUNT], error = 0;
    if (attn_reference(problem, io, 0, head, rows, COUNT, expected[0], lse) != ATTN_OK) {
        return -1;
    }
    for (int r = 0; r < COUNT; r++) {
        for (int c = 0; c < DIM; c++) {
            error = fmax(error, fabs((double)o[head][rows[r]][c] - expected[r][c]));
        }
    }
    return error;
}

int main(void)
{
    /* Four query heads share two key/value heads; each query sees only keys up to its own position. */
    attn_problem problem = ATTN_INIT(attn_problem);
    problem.heads_q = HEADS_Q;
    problem.heads_kv = HEADS_KV;
    problem.tokens_q = TOKENS;
    problem.dim_qk = DIM;
    problem.mask = ATTN_MASK_CAUSAL;

    attn_plan *plan;
    if (attn_plan_create(&plan, &problem, NULL) != ATTN_OK) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 1;
    }
    void *workspace = malloc(attn_plan_workspace(plan) + 1); /* + 1: never malloc(0) */
    int wrong = workspace == NULL;
    for (unsigned round = 0; round < ROUNDS && !wrong; round++) {
        fill(q[0][0], HEADS_Q * TOKENS * DIM, 3 * round);
        fill(k[0][0], HEADS_KV * TOKENS * DIM, 3 * round + 1);
        fill(v[0][0], HEADS_KV * TOKENS * DIM, 3 * round + 2);
        attn_io io = {.size = sizeof io, .q.data = q, .k.data = k, .v.data = v, .o.data = o};
        if (attn_execute(plan, &io, workspace) != ATTN_OK) {
            fprintf(stderr, "%s\n", attn_last_error());
            wrong = 1;
            break;
        }
        for (int head = 0; head < HEADS_Q; head++) {
            double error = compare(attn_plan_problem(plan), &io, head);
            printf("round %u, head %d: error %.1e\n", round, head, error);
            wrong |= !(error >= 0 && error < 1e-5); /* |o| <= 1, so this is some 80 ulp of fp32 */
        }
    }
    free(workspace);
    attn_plan_destroy(plan);
    return wrong;
}
