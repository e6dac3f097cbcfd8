/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 02_workers.c - the same problem cut into W independent workers by a cyclic quorum schedule.
 *
 * Each worker holds a few of the W token groups and computes its own blocks of the score matrix; no worker
 * needs another one's result.  Three of them run at a time here, as threads; the Tiler merges what they hand
 * over.  The result must be that of one worker, to rounding, and the same bits whatever runs at a time.
 */
#include <attn/attn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 2, TOKENS = 1001, DIM = 48, SIZE = HEADS * TOKENS * DIM };

static float q[SIZE], k[SIZE], v[SIZE];
static float one[SIZE], many[SIZE], again[SIZE];

static void fill(float *x, unsigned seed)
{
    for (int i = 0; i < SIZE; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
    }
}

static int forward(float *o, int64_t workers, int64_t resident)
{
    attn_problem problem = {.size = sizeof problem, .heads_q = HEADS, .tokens_q = TOKENS, .dim_qk = DIM};
    attn_options options = {.size = sizeof options, .workers = workers, .resident = resident};
    attn_io io = {.size = sizeof io, .q.data = q, .k.data = k, .v.data = v, .o.data = o};
    if (attn_forward(&problem, &io, &options) != ATTN_OK) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 0;
    }
    return 1;
}

int main(void)
{
    fill(q, 1);
    fill(k, 2);
    fill(v, 3);
    if (!forward(one, 1, 1)) {
        return 1;
    }
    static const int64_t workers[] = {2, 4, 7, 8, 13, 31};
    int wrong = 0;
    for (size_t w = 0; w < sizeof workers / sizeof workers[0]; w++) {
        if (!forward(many, workers[w], 3 < workers[w] ? 3 : workers[w]) || !forward(again, workers[w], 1)) {
            return 1;
        }
        float error = 0;
        for (int i = 0; i < SIZE; i++) {
            error = fmaxf(error, fabsf(many[i] - one[i]));
        }
        int same = memcmp(many, again, sizeof many) == 0;
        printf("%2d workers: differs from one worker by %.1e; %s bits one at a time\n", (int)workers[w],
               (double)error, same ? "same" : "OTHER");
        wrong |= !(error < 1e-5f) || !same; /* |o| <= 1: some 80 ulp of fp32 */
    }
    return wrong;
}
