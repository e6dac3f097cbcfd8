/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peak.c - the FLOP/s of multiply-adds on registers, which a kernel's speed is a share of.
 *
 * Each thread runs slices of about a millisecond until the time is over; its best slice counts, since on a
 * machine that does other work everything else is noise from above.  The threads run at once, so that they
 * share clocks and cores as they do in a kernel.
 */
#include <string.h>

#include "engine/engine.h"

static const attn__kernel *find(const char *name)
{
    const attn__shape plain = {.dim_qk = 64, .dim_v = 64, .rows = 64, .keys = 64};
    for (const attn__kernel *const *row = attn__kernels; *row != NULL; row++) {
        bool asked =
            name != NULL ? strcmp((*row)->name, name) == 0 : attn__kernel_refusal(*row, &plain) == NULL;
        if (asked && (*row)->peak != NULL && (~attn__cpu() & (*row)->needs) == 0) {
            return *row;
        }
    }
    return NULL;
}

static double best_slice(const attn__kernel *kernel, double seconds)
{
    const double slice = 1e-3;
    double best = 0, start = attn__now();
    int64_t rounds = 1000;
    volatile float keep;
    do {
        float sink;
        double begin = attn__now();
        double flops = (double)kernel->peak(rounds, &sink), took = attn__now() - begin;
        keep = sink;
        if (took < slice / 2) {
            rounds *= 2;
        } else if (flops / took > best) {
            best = flops / took;
        }
    } while (attn__now() - start < seconds || best == 0);
    (void)keep;
    return best;
}

double attn_peak_flops(const char *kernel, int threads, double seconds)
{
    const attn__kernel *row = find(kernel);
    double sum = 0;
    if (row == NULL) {
        return 0;
    }
    if (threads < 1) {
        threads = attn__threads_max();
    }
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    sum += best_slice(row, seconds);
    return sum;
}
