/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_ask.inc.h - what lies behind some rows of K or V, asked for while these are computed with.
 *
 * Left alone, memory stands still while a core multiplies, and the core while memory delivers; many requests
 * at once wait for each other.  So each `period` elements that are taken bring a request for one line, in
 * order, in good time and evenly, into the L2, or into the L1 where that is better (attn__cpu_asks_l1).
 * Micro-kernels have no register left for it and must stop: they do when ASK_LINES are due, since each stop
 * costs time, and more lines at once would wait for each other.
 */
#include "kernel/cpu/flash_common.inc.h"

enum { ASK_LINES = 4 };

typedef struct flash_ask {
    uintptr_t at;        /* the next line */
    int64_t left;        /* lines of this row, from there on */
    int64_t lines, skip; /* of a row; bytes from the end of its last one to the next row */
    int64_t period;      /* elements for a line; FLASH_NEVER: nothing is asked for */
    int64_t used;
    bool near; /* into the L1 */
} flash_ask;
static const int64_t FLASH_NEVER = INT64_MAX / 64; /* it is multiplied by lines and dims */

/* The next n lines, all of this row. */
VEC_INLINE void ask_row(flash_ask *next, const int n)
{
    const uintptr_t at = next->at;
    if (next->near) {
        FLASH_UNROLL
        for (int i = 0; i < n; i++) {
            FLASH_PREFETCH((const void *)(at + (uintptr_t)(i * LINE)));
        }
    } else {
        FLASH_UNROLL
        for (int i = 0; i < n; i++) {
            FLASH_PREFETCH_FAR((const void *)(at + (uintptr_t)(i * LINE)));
        }
    }
    next->at = at + (uintptr_t)(n * LINE);
    next->left -= n;
}

/* So many more elements have been taken.  n lines are asked for at once; those before the last ones of a row
 * again, if less than n are left. */
VEC_INLINE void ask(flash_ask *next, const int n, int64_t elements)
{
    next->used += elements;
    while (next->used >= next->period * n) {
        next->used -= next->period * n;
        if (next->left == 0) {
            next->at += (uintptr_t)next->skip;
            next->left = next->lines;
        }
        if (n > 1 && next->left < n) {
            next->at -= (uintptr_t)((n - next->left) * LINE);
            next->left = n;
        }
        ask_row(next, n);
    }
}
