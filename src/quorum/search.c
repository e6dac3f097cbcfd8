/* SPDX-License-Identifier: Apache-2.0 */
/*
 * search.c - simulated annealing for small difference covers; it found the built-in table (table.c).
 *
 * State: `size` residues, 0 always among them, and for each d of 1..W/2 how many pairs differ by d or W - d.
 * Cost: how many d have no pair.  A move replaces one element, half of the time by one that is d away from
 * another element for an uncovered d, else by any residue; it changes 2(k - 1) counts.  A move that costs c
 * more is accepted with probability p^c; p falls geometrically over a walk, and walks with fresh random sets
 * follow each other until one ends at cost 0 or the time is up.
 *
 * All arithmetic is in integers and the clock is only read to stop, so a seed that succeeds gives the same
 * set on every machine.  Cost: O(W) memory, O(k) a move.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "quorum/cover.h"

enum {
    MOVES_PER_ELEMENT = 60000, /* of a short walk; every fourth is eight times as long */
    MOVES_PER_STEP = 256,      /* between two changes of p, and two looks at the clock */
    WORSE_MAX = 16             /* moves that cost this much more are never accepted */
};

/* p of the first move in 32-bit fixed point, e^-1; the last has about e^-5.  Found by trial. */
#define ACCEPT_FIRST 1580030168u

typedef struct walk {
    int64_t workers, size;
    int64_t *set;
    int64_t *pairs; /* pairs[d], d in 0..W/2: pairs that differ by d or W - d; pairs[0] is never 0 */
    int64_t cost;
    uint64_t random;
    uint32_t accept[WORSE_MAX];
} walk;

/* SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t next_random(walk *w)
{
    uint64_t z = w->random += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* 0..n-1, for n < 2^31; the bias of 2^-32 n does no harm here. */
static int64_t random_below(walk *w, int64_t n)
{
    return (int64_t)(((next_random(w) >> 32) * (uint64_t)n) >> 32);
}

/* The smaller of d and W - d, for residues a and b. */
static inline int64_t distance(const walk *w, int64_t a, int64_t b)
{
    int64_t d = a < b ? b - a : a - b;
    return d <= w->workers - d ? d : w->workers - d;
}

/* Counts the pairs of x with the other elements, all but set[skip], in or out. */
static void count_in(walk *w, int64_t x, int64_t skip)
{
    for (int64_t i = 0; i < w->size; i++) {
        if (i != skip) {
            w->cost -= w->pairs[distance(w, x, w->set[i])]++ == 0;
        }
    }
}

static void count_out(walk *w, int64_t x, int64_t skip)
{
    for (int64_t i = 0; i < w->size; i++) {
        if (i != skip) {
            w->cost += --w->pairs[distance(w, x, w->set[i])] == 0;
        }
    }
}

static bool holds(const walk *w, int64_t x)
{
    for (int64_t i = 0; i < w->size; i++) {
        if (w->set[i] == x) {
            return true;
        }
    }
    return false;
}

static void start(walk *w)
{
    memset(w->pairs, 0, (size_t)(w->workers / 2 + 1) * sizeof *w->pairs);
    w->pairs[0] = 1;
    w->cost = w->workers / 2;
    int64_t size = w->size;
    w->size = 0;
    while (w->size < size) {
        int64_t x = w->size == 0 ? 0 : random_below(w, w->workers);
        if (!holds(w, x)) {
            count_in(w, x, -1);
            w->set[w->size++] = x;
        }
    }
}

/* A residue that covers some uncovered difference together with an element. */
static int64_t aimed(walk *w)
{
    int64_t half = w->workers / 2;
    int64_t d = random_below(w, half + 1);
    while (w->pairs[d] != 0) { /* cost > 0: there is one */
        d = d == half ? 1 : d + 1;
    }
    int64_t from = w->set[random_below(w, w->size)];
    return (from + (next_random(w) >> 63 ? d : w->workers - d)) % w->workers;
}

static void move(walk *w)
{
    int64_t index = 1 + random_below(w, w->size - 1);
    int64_t old = w->set[index];
    int64_t fresh = next_random(w) >> 63 ? aimed(w) : random_below(w, w->workers);
    if (holds(w, fresh)) {
        return;
    }
    int64_t before = w->cost;
    count_out(w, old, index);
    count_in(w, fresh, index);
    int64_t worse = w->cost - before;
    if (worse <= 0 || (worse < WORSE_MAX && next_random(w) >> 32 < w->accept[worse])) {
        w->set[index] = fresh;
        return;
    }
    count_out(w, fresh, index);
    count_in(w, old, index);
}

static void set_acceptance(walk *w, uint64_t p)
{
    uint64_t power = UINT32_MAX;
    for (int i = 0; i < WORSE_MAX; i++) {
        w->accept[i] = (uint32_t)power;
        power = power * p >> 32;
    }
}

/* One walk; true when it ends on a cover. */
static bool anneal(walk *w, int64_t moves, double deadline)
{
    int64_t steps = attn__max(1, moves / MOVES_PER_STEP);
    /* 16 more bits keep the fall by the factor 1 - 4 / steps, e^-4 in all, exact enough for long walks */
    uint64_t p = (uint64_t)ACCEPT_FIRST << 16;
    start(w);
    for (int64_t step = 0; step < steps && w->cost > 0; step++) {
        if (attn__now() > deadline) {
            return false;
        }
        set_acceptance(w, p >> 16);
        for (int i = 0; i < MOVES_PER_STEP && w->cost > 0; i++) {
            move(w);
        }
        p -= p / (uint64_t)steps * 4;
    }
    return w->cost == 0;
}

static void sort(int64_t *set, int64_t size)
{
    for (int64_t i = 1; i < size; i++) {
        int64_t x = set[i];
        int64_t at = i;
        for (; at > 0 && set[at - 1] > x; at--) {
            set[at] = set[at - 1];
        }
        set[at] = x;
    }
}

/* Walks until one succeeds. */
static bool search(walk *w, double deadline)
{
    if (w->size >= w->workers) {
        w->size = w->workers;
        for (int64_t i = 0; i < w->size; i++) {
            w->set[i] = i;
        }
        return true;
    }
    for (int64_t round = 0; attn__now() <= deadline; round++) {
        int64_t moves = MOVES_PER_ELEMENT * w->size * (round % 4 == 3 ? 8 : 1);
        if (anneal(w, moves, deadline)) {
            sort(w->set, w->size);
            return true;
        }
    }
    return false;
}

/* Refuses what the counting bound k(k - 1) + 1 >= W excludes. */
static attn_status check_size(int64_t workers, int64_t size)
{
    if (size < 1 || (size < ATTN__WORKERS_MAX && size * (size - 1) + 1 < workers)) {
        return attn__fail(ATTN_EINVAL,
                          "%" PRId64 " elements have too few differences to cover Z_%" PRId64
                          "; ask for more elements",
                          size, workers);
    }
    return ATTN_OK;
}

attn_status attn__cover_search(int64_t workers, int64_t size, double seconds, uint64_t seed, int64_t *set,
                               int64_t *found)
{
    *found = 0;
    double deadline = attn__now() + seconds;
    ATTN__TRY(attn__cover_check_workers(workers));
    if (!(seconds >= 0) || isinf(seconds)) {
        return attn__fail(ATTN_EINVAL, "a search needs a time limit that is not negative");
    }
    ATTN__TRY(check_size(workers, size));
    walk w = {.workers = workers, .size = size, .set = set, .random = seed};
    w.pairs = attn__alloc_array(workers / 2 + 1, sizeof *w.pairs);
    if (w.pairs == NULL) {
        return ATTN_ENOMEM;
    }
    if (search(&w, deadline)) {
        *found = w.size;
    }
    attn__free(w.pairs);
    return ATTN_OK;
}
