/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fit.c - the multiple of an interest set that suits these tokens, and this mask.
 *
 * Longest subsequence: a quorum of k groups holds k*q tokens and one more for each group among the last r,
 * where N = qW + r.  Those r groups are a cyclic interval, so the longest subsequence is k*q plus the most
 * elements of the set that an interval of r residues holds: O(k) by two pointers.
 *
 * Causal traffic: a pair of groups needs the queries of the higher and the keys of the lower one.  As the
 * rank goes around, the offset s is below all its partners for as many ranks as the gap down to the nearest
 * partner is wide, and needs no queries then; likewise for the gap up, and keys.  Summed over all offsets but
 * 0, which is at home, the gaps are what the mask saves: O(k^2 + W) for a set.
 *
 * Both try multiples by the units of Z_W in turn, and stop when a fixed amount of work is done.
 */
#include <stdlib.h>
#include <string.h>

#include "quorum/cover.h"

/* Elements that attn__cover_fit moves, and steps that attn__cover_fit_causal takes, at most: some ten ms
 * each. */
enum { FIT_BUDGET = 1 << 18, CAUSAL_BUDGET = 1 << 23 };

/* ---- the longest subsequence ---- */

/* The most elements of an ascending set that an interval of `length` residues, cyclic, holds. */
static int64_t densest(int64_t workers, const int64_t *set, int64_t size, int64_t length)
{
    int64_t best = 0;
    int64_t end = 0; /* elements begin..end-1, counted on around the circle, lie in the interval */
    for (int64_t begin = 0; begin < size && length > 0; begin++) {
        while (end < begin + size && set[end % size] + end / size * workers < set[begin] + length) {
            end++;
        }
        best = attn__max(best, end - begin);
    }
    return best;
}

int64_t attn__cover_longest(const attn__cover *cover, int64_t tokens)
{
    int64_t rest = tokens % cover->workers;
    return cover->size * (tokens / cover->workers) + densest(cover->workers, cover->set, cover->size, rest);
}

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* A fit in progress: the best multiple so far, and how many elements may still be moved. */
typedef struct fit {
    int64_t *best;      /* size elements */
    int64_t *scratch;   /* size elements */
    int64_t length;     /* groups that hold one token more */
    int64_t most;       /* of best */
    const char *origin; /* of best */
    int64_t budget;
} fit;

/* Tries the multiples of one set by the units 1, 2, ... up to W/2 (-u mirrors u, which changes nothing). */
static void fit_multiples(fit *f, const attn__cover *cover, int64_t least)
{
    int64_t workers = cover->workers;
    for (int64_t unit = 1; unit <= attn__max(1, workers / 2) && f->most > least && f->budget > 0; unit++) {
        if (gcd(unit, workers) != 1) {
            continue;
        }
        for (int64_t i = 0; i < cover->size; i++) {
            f->scratch[i] = cover->set[i] * unit % workers;
        }
        qsort(f->scratch, (size_t)cover->size, sizeof *f->scratch, attn__compare_int64);
        int64_t most = densest(workers, f->scratch, cover->size, f->length);
        if (most < f->most) {
            int64_t *swap = f->best;
            f->best = f->scratch;
            f->scratch = swap;
            f->most = most;
            f->origin = cover->origin;
        }
        f->budget -= cover->size;
    }
}

/* Lets the other constructions that give a set of the same size compete. */
static attn_status fit_others(fit *f, const attn__cover *cover, int64_t least)
{
    for (int i = 0; i < ATTN__CONSTRUCTIONS && f->most > least; i++) {
        if (strcmp(attn__constructions[i].origin, cover->origin) == 0) {
            continue;
        }
        attn__cover other;
        attn_status status = attn__constructions[i].make(&other, cover->workers);
        if (status == ATTN_EUNSUPPORTED) {
            continue;
        }
        ATTN__TRY(status);
        if (other.size == cover->size) {
            f->budget = FIT_BUDGET;
            fit_multiples(f, &other, least);
        }
        attn__cover_free(&other);
    }
    return ATTN_OK;
}

attn_status attn__cover_fit(attn__cover *cover, int64_t tokens)
{
    int64_t rest = tokens % cover->workers;
    /* the mean over all intervals, rounded up: no multiple can do better */
    int64_t least = attn__ceil_div(cover->size * rest, cover->workers);
    fit f = {.length = rest, .budget = FIT_BUDGET, .origin = cover->origin};
    f.most = densest(cover->workers, cover->set, cover->size, rest);
    if (f.most <= least || strcmp(cover->origin, "user") == 0) {
        return ATTN_OK;
    }
    f.best = attn__alloc_array(cover->size, sizeof *f.best);
    f.scratch = attn__alloc_array(cover->size, sizeof *f.scratch);
    attn_status status = ATTN_ENOMEM;
    if (f.best != NULL && f.scratch != NULL) {
        memcpy(f.best, cover->set, (size_t)cover->size * sizeof *f.best);
        fit_multiples(&f, cover, least);
        status = fit_others(&f, cover, least);
    }
    if (status == ATTN_OK) {
        memcpy(cover->set, f.best, (size_t)cover->size * sizeof *f.best);
        cover->origin = f.origin;
    }
    attn__free(f.best);
    attn__free(f.scratch);
    return status;
}

/* ---- causal traffic ---- */

/* A causal fit in progress. */
typedef struct causal_fit {
    attn__cover multiple;  /* of the set, by the unit in turn */
    attn__cover translate; /* of the multiple */
    int64_t *best;
    attn__chosen *pick; /* W/2 + 1 */
    int64_t *down, *up; /* of each offset: the gap to its nearest partner */
    double weight_q, weight_kv;
    double most; /* saved by best; negative: nothing tried yet */
    int64_t budget;
} causal_fit;

/* Bytes that a causal mask saves, summed over all ranks, in units of the weights. */
static double saved(causal_fit *f, const attn__cover *cover)
{
    int64_t workers = cover->workers;
    for (int64_t i = 0; i < cover->size; i++) {
        f->down[i] = f->up[i] = workers; /* without a partner nothing is needed */
    }
    if (!attn__choose_pairs(cover, f->pick)) {
        return -1;
    }
    for (int64_t d = 1; d <= workers / 2; d++) {
        attn__chosen pair = f->pick[d];
        int64_t gap = cover->set[pair.high] - cover->set[pair.low];
        f->up[pair.low] = attn__min(f->up[pair.low], gap);
        f->down[pair.high] = attn__min(f->down[pair.high], gap);
        f->down[pair.low] = attn__min(f->down[pair.low], workers - gap);
        f->up[pair.high] = attn__min(f->up[pair.high], workers - gap);
    }
    double sum = 0;
    for (int64_t i = 1; i < cover->size; i++) {
        sum += f->weight_q * (double)f->down[i] + f->weight_kv * (double)f->up[i];
    }
    return sum;
}

/* Tries every element of the multiple as the home. */
static void try_homes(causal_fit *f)
{
    int64_t size = f->multiple.size;
    int64_t workers = f->multiple.workers;
    const int64_t *from = f->multiple.set;
    for (int64_t home = 0; home < size && f->budget > 0; home++) {
        for (int64_t i = 0; i < size; i++) {
            f->translate.set[i] = attn__mod(from[(home + i) % size] - from[home], workers);
        }
        double sum = saved(f, &f->translate);
        if (sum > f->most) {
            f->most = sum;
            memcpy(f->best, f->translate.set, (size_t)size * sizeof *f->best);
        }
        f->budget -= size * size + workers;
    }
}

static void try_units(causal_fit *f, const attn__cover *cover, int64_t tokens)
{
    int64_t workers = cover->workers;
    int64_t longest = attn__cover_longest(cover, tokens);
    for (int64_t unit = 1; (unit == 1 || unit < workers) && f->budget > 0; unit++) {
        if (gcd(unit, workers) == 1) {
            for (int64_t i = 0; i < cover->size; i++) {
                f->multiple.set[i] = cover->set[i] * unit % workers;
            }
            qsort(f->multiple.set, (size_t)cover->size, sizeof *f->multiple.set, attn__compare_int64);
            if (attn__cover_longest(&f->multiple, tokens) <= longest) {
                try_homes(f);
            }
        }
        f->budget -= cover->size;
    }
}

attn_status attn__cover_fit_causal(attn__cover *cover, int64_t tokens, int64_t weight_q, int64_t weight_kv)
{
    int64_t size = cover->size;
    if (strcmp(cover->origin, "user") == 0 || size * size + cover->workers > CAUSAL_BUDGET) {
        return ATTN_OK;
    }
    causal_fit f = {.budget = CAUSAL_BUDGET, .most = -1};
    f.weight_q = (double)weight_q;
    f.weight_kv = (double)weight_kv;
    f.multiple = f.translate = *cover;
    int64_t *memory = attn__alloc_array(5 * size, sizeof *memory);
    f.pick = attn__alloc_array(cover->workers / 2 + 1, sizeof *f.pick);
    if (memory == NULL || f.pick == NULL) {
        attn__free(memory);
        attn__free(f.pick);
        return ATTN_ENOMEM;
    }
    f.best = memory;
    f.multiple.set = memory + size;
    f.translate.set = memory + 2 * size;
    f.down = memory + 3 * size;
    f.up = memory + 4 * size;
    memcpy(f.best, cover->set, (size_t)size * sizeof *f.best);
    try_units(&f, cover, tokens);
    memcpy(cover->set, f.best, (size_t)size * sizeof *f.best);
    attn__free(memory);
    attn__free(f.pick);
    return ATTN_OK;
}
