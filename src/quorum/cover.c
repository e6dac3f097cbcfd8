/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cover.c - cyclic difference covers: checking a set, the user's set, the best known set.
 *
 * A set S covers Z_W when every d of Z_W is b - a mod W for some a, b of S.  Multiplying by a unit of Z_W,
 * reflecting and translating keep the property.  Three sources give sets: the table of searched sets
 * (table.c), Singer's difference sets (singer.c) and Wichmann's rulers (wichmann.c).
 * Cost: O(min(k^2, pairs seen until all is covered) + W) time and O(W) memory to check a set.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "quorum/cover.h"

/* Uncovered differences that the refusal of a user's set lists. */
enum { MISSING_SHOWN = 12 };

int attn__compare_int64(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left;
    int64_t b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Sorts, and drops what is there twice; returns how many are left. */
static int64_t sort_unique(int64_t *set, int64_t size)
{
    qsort(set, (size_t)size, sizeof *set, attn__compare_int64);
    int64_t kept = 0;
    for (int64_t i = 0; i < size; i++) {
        if (kept == 0 || set[kept - 1] != set[i]) {
            set[kept++] = set[i];
        }
    }
    return kept;
}

attn_status attn__cover_check_workers(int64_t workers)
{
    if (workers < 1 || workers > ATTN__WORKERS_MAX) {
        return attn__fail(ATTN_EINVAL, "%" PRId64 " workers: give a number from 1 to %" PRId64, workers,
                          (int64_t)ATTN__WORKERS_MAX);
    }
    return ATTN_OK;
}

attn_status attn__cover_new(attn__cover *cover, int64_t workers, int64_t size, const char *origin)
{
    *cover = (attn__cover){.workers = workers, .size = size, .origin = origin};
    cover->set = attn__alloc_array(size, sizeof *cover->set);
    return cover->set == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void attn__cover_free(attn__cover *cover)
{
    attn__free(cover->set);
    *cover = (attn__cover){0};
}

/* ---- checking ---- */

/* Marks the differences of the set, folded to 0..W/2; returns how many of those are marked.  Stops early when
 * all are, which for large sets is long before all pairs have been seen. */
static int64_t mark_differences(unsigned char *seen, int64_t workers, const int64_t *set, int64_t size)
{
    int64_t marked = 0;
    for (int64_t i = 0; i < size; i++) {
        for (int64_t j = 0; j <= i && marked <= workers / 2; j++) {
            int64_t d = attn__mod(set[i] - set[j], workers);
            d = attn__min(d, workers - d);
            marked += !seen[d];
            seen[d] = 1;
        }
    }
    return marked;
}

int64_t attn__cover_missing(int64_t workers, const int64_t *set, int64_t size, int64_t *missing,
                            int64_t capacity)
{
    unsigned char *seen = attn__alloc_zero((size_t)(workers / 2 + 1));
    if (seen == NULL) {
        return -1;
    }
    int64_t count = 0;
    if (mark_differences(seen, workers, set, size) <= workers / 2) {
        for (int64_t d = 0; d < workers; d++) {
            if (!seen[attn__min(d, workers - d)]) {
                if (count < capacity) {
                    missing[count] = d;
                }
                count++;
            }
        }
    }
    attn__free(seen);
    return count;
}

/* The refusal of a set that leaves `count` differences uncovered, the first of them in missing[]. */
static attn_status refuse(int64_t workers, const int64_t *missing, int64_t count)
{
    char list[MISSING_SHOWN * 24] = "";
    size_t used = 0;
    for (int64_t i = 0; i < attn__min(count, MISSING_SHOWN); i++) {
        int wrote = snprintf(list + used, sizeof list - used, "%s%" PRId64, i > 0 ? ", " : "", missing[i]);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return attn__fail(
        ATTN_EINVAL,
        "the interest set does not cover Z_%" PRId64 ": %" PRId64
        " differences are no b - a of its elements (%s%s); add elements, or leave it out to use "
        "the best known set",
        workers, count, list, count > MISSING_SHOWN ? ", ..." : "");
}

attn_status attn__cover_user(attn__cover *cover, int64_t workers, const int64_t *set, int64_t size)
{
    *cover = (attn__cover){0};
    ATTN__TRY(attn__cover_check_workers(workers));
    if (set == NULL || size < 1) {
        return attn__fail(ATTN_EINVAL, "the interest set is empty: give at least one element");
    }
    ATTN__TRY(attn__cover_new(cover, workers, size, "user"));
    for (int64_t i = 0; i < size; i++) {
        cover->set[i] = attn__mod(set[i], workers);
    }
    cover->size = sort_unique(cover->set, size);
    int64_t first = cover->set[0]; /* a translate covers the same differences, and holds its own group */
    for (int64_t i = 0; i < cover->size; i++) {
        cover->set[i] -= first;
    }
    int64_t missing[MISSING_SHOWN];
    int64_t count = attn__cover_missing(workers, cover->set, cover->size, missing, MISSING_SHOWN);
    if (count != 0) {
        attn__cover_free(cover);
        return count < 0 ? ATTN_ENOMEM : refuse(workers, missing, count);
    }
    return ATTN_OK;
}

/* ---- choosing ---- */

const attn__construction attn__constructions[ATTN__CONSTRUCTIONS] = {
    {"table", attn__cover_table},
    {"singer", attn__cover_singer},
    {"wichmann", attn__cover_wichmann},
};

attn_status attn__cover_best(attn__cover *cover, int64_t workers)
{
    *cover = (attn__cover){0};
    ATTN__TRY(attn__cover_check_workers(workers));
    for (int i = 0; i < ATTN__CONSTRUCTIONS; i++) {
        attn__cover other;
        attn_status status = attn__constructions[i].make(&other, workers);
        if (status == ATTN_EUNSUPPORTED) {
            continue;
        }
        if (status != ATTN_OK) {
            attn__cover_free(cover);
            return status;
        }
        if (cover->set == NULL || other.size < cover->size) {
            attn__cover swap = *cover;
            *cover = other;
            other = swap;
        }
        attn__cover_free(&other);
    }
    return ATTN_OK;
}
