/* SPDX-License-Identifier: Apache-2.0 */
/* 00_one_call.c - arrays in, arrays out.  All value rows are the same here, so each output row must be it. */
#include <attn/attn.h>
#include <math.h>
#include <stdio.h>

enum { HEADS = 4, TOKENS = 1000, DIM = 64, SIZE = HEADS * TOKENS * DIM };
static float q[SIZE], k[SIZE], v[SIZE], o[SIZE]; /* [heads][tokens][dim] */

int main(void)
{
    for (int i = 0; i < SIZE; i++) {
        q[i] = sinf((float)i), k[i] = cosf(3.0f * (float)i), v[i] = (float)(i % DIM) / DIM;
    }
    attn_problem problem = {.size = sizeof problem, .heads_q = HEADS, .tokens_q = TOKENS, .dim_qk = DIM};
    attn_io io = {.size = sizeof io, .q.data = q, .k.data = k, .v.data = v, .o.data = o};
    if (attn_forward(&problem, &io, NULL) != ATTN_OK) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 1;
    }
    float error = 0;
    for (int i = 0; i < SIZE; i++) {
        error = fmaxf(error, fabsf(o[i] - v[i]));
    }
    printf("%d rows, error %g\n", HEADS * TOKENS, (double)error);
    return error < 1e-4f ? 0 : 1;
}
