/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cover.h - what the files of this module share about difference covers and schedules.  Everybody else
 * includes quorum.h.
 */
#ifndef ATTN_QUORUM_COVER_H
#define ATTN_QUORUM_COVER_H

#include <stdio.h>

#include "quorum/quorum.h"

/* Most workers: products of two residues fit in 62 bits, and a residue in 32. */
#define ATTN__WORKERS_MAX (INT64_C(1) << 30)

/* Fails with the range that is allowed. */
attn_status attn__cover_check_workers(int64_t workers);

/* Allocates set[size], contents undefined; on failure *cover holds nothing to free. */
attn_status attn__cover_new(attn__cover *cover, int64_t workers, int64_t size, const char *origin);

/* The ways to make a cover, best origin first; each gives ATTN_EUNSUPPORTED where it has none. */
typedef struct attn__construction {
    const char *origin;
    attn_status (*make)(attn__cover *cover, int64_t workers);
} attn__construction;
enum { ATTN__CONSTRUCTIONS = 3 };
extern const attn__construction attn__constructions[ATTN__CONSTRUCTIONS];

/* For qsort. */
int attn__compare_int64(const void *left, const void *right);

/* The unordered pair of indices into a cover that serves the differences d and -d; low = high only for d = 0.
 */
typedef struct attn__chosen {
    uint32_t low, high;
} attn__chosen;

/* The first pair in the order of the set for each d, into pick[0..W/2]; false if some d has none. */
bool attn__choose_pairs(const attn__cover *cover, attn__chosen *pick);

#endif
