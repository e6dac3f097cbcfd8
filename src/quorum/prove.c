/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prove.c - counts how many workers own each visible cell.
 *
 * Every block of a task list is all, the lower or the upper half of a query group against a key group, so one
 * counter for each (half query group, key group) tells the owners of all its cells.  The counters are filled
 * from the task lists of all workers, strip by strip of query groups so that memory stays bounded, and
 * nothing of how a schedule is made enters.  The total that the counts are to reach comes from the mask
 * alone, row by row. Cost: O(W^2) blocks for each strip; one strip does up to W = 5792.
 */
#include <string.h>

#include "quorum/cover.h"

/* Counters in memory at once, and the most rows that are counted one by one. */
enum { STRIP_COUNTERS = 1 << 26, ROWS_COUNTED = 1 << 24 };

/* The query groups first..first+groups, two counters a key group each; 2 stands for "twice or more". */
typedef struct counters {
    int64_t first, groups;
    unsigned char *owners;
} counters;

static unsigned char *owners_of(const counters *strip, int64_t workers, int64_t q, int half, int64_t kv)
{
    return &strip->owners[((q - strip->first) * 2 + half) * workers + kv];
}

static void bump(unsigned char *owners)
{
    *owners = (unsigned char)(*owners + (*owners < 2));
}

/* Counts the blocks of all workers that lie in the strip. */
static void count_owners(const attn__schedule *schedule, const counters *strip, attn_pair *pairs)
{
    int64_t workers = attn__schedule_layout(schedule)->workers;
    memset(strip->owners, 0, (size_t)(strip->groups * 2 * workers));
    for (int64_t rank = 0; rank < workers; rank++) {
        int64_t count = attn__schedule_pairs(schedule, rank, pairs);
        for (int64_t i = 0; i < count; i++) {
            attn_pair pair = pairs[i];
            if (pair.q < strip->first || pair.q >= strip->first + strip->groups) {
                continue;
            }
            if (pair.part != 2) {
                bump(owners_of(strip, workers, pair.q, 0, pair.kv));
            }
            if (pair.part != 1) {
                bump(owners_of(strip, workers, pair.q, 1, pair.kv));
            }
        }
    }
}

/* Adds the strip's visible cells to the proof, by their number of owners. */
static void add_cells(const attn__schedule *schedule, const counters *strip, attn_proof *proof)
{
    const attn__layout *layout = attn__schedule_layout(schedule);
    for (int64_t q = strip->first; q < strip->first + strip->groups; q++) {
        for (int half = 0; half < 2; half++) {
            for (int64_t kv = 0; kv < layout->workers; kv++) {
                attn__block_rows rows = attn__schedule_rows(schedule, (attn_pair){q, kv, half + 1});
                int64_t cells =
                    attn__band_cells(layout->band, rows.q_first, rows.q_count, rows.kv_first, rows.kv_count);
                unsigned char owners = *owners_of(strip, layout->workers, q, half, kv);
                *(owners == 0 ? &proof->missing : owners == 1 ? &proof->once : &proof->repeated) += cells;
            }
        }
    }
}

/* Visible cells by the mask alone: row by row, for very long inputs in closed form. */
static int64_t count_visible(const attn__layout *layout)
{
    if (layout->tokens_q > ROWS_COUNTED) {
        return attn__band_cells(layout->band, 0, layout->tokens_q, 0, layout->tokens_kv);
    }
    int64_t cells = 0;
    for (int64_t i = 0; i < layout->tokens_q; i++) {
        int64_t first = attn__max(0, i + layout->band.lo);
        int64_t last = attn__min(layout->tokens_kv - 1, i + layout->band.hi);
        cells += attn__max(0, last - first + 1);
    }
    return cells;
}

attn_status attn__schedule_prove(const attn__schedule *schedule, attn_proof *proof)
{
    const attn__layout *layout = attn__schedule_layout(schedule);
    int64_t all;
    if (!attn__mul(layout->tokens_q, layout->tokens_kv, &all)) {
        return attn__fail(ATTN_EUNSUPPORTED, "more than 2^63 cells cannot be counted: use fewer tokens");
    }
    int64_t most = attn__max(1, STRIP_COUNTERS / (2 * layout->workers));
    counters strip = {.groups = attn__min(most, layout->workers)};
    strip.owners = attn__alloc_array(strip.groups, (size_t)(2 * layout->workers));
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(schedule), sizeof *pairs);
    if (strip.owners == NULL || pairs == NULL) {
        attn__free(strip.owners);
        attn__free(pairs);
        return ATTN_ENOMEM;
    }
    proof->cells = count_visible(layout);
    proof->once = proof->missing = proof->repeated = 0;
    for (; strip.first < layout->workers; strip.first += strip.groups) {
        strip.groups = attn__min(most, layout->workers - strip.first);
        count_owners(schedule, &strip, pairs);
        add_cells(schedule, &strip, proof);
    }
    attn__free(strip.owners);
    attn__free(pairs);
    return ATTN_OK;
}
