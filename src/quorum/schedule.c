/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.c - which blocks each worker computes.
 *
 * Worker i holds the query groups i + A and the key groups i + B.  For every difference d of Z_W one (a, b)
 * of A x B with b - a = d is fixed for all workers; worker i computes the block (i + a, i + b).  The block
 * (x, y) then belongs to the one worker x - a with the (a, b) of y - x: every block once.
 *
 * Cyclic: A = B = I.  One unordered pair {a, b} serves d and -d, so that a worker computes both directions.
 * For even W the two directions of d = W/2 are one and the same difference: workers i and i + W/2 hold the
 * same pair of groups and share its two blocks (see share_of).
 *
 * Rectangular: A = {0..a-1}, B = {0, -a, -2a, ..}: d = -(alpha + a t) for one alpha < a and one t.
 *
 * The chosen (a, b) are stored as a sparse matrix by rows: columns of row a, ascending.  A task list is that
 * matrix read from the offset on where adding the rank wraps around, and is thereby sorted.
 *
 * Source: cyclic quorums for all pairs, Kleinheksel & Somani, IEEE TPDS 29 (2018) 391-402.
 * Cost: O(k^2 + W) time and O(k + W) memory to create; O(W) time and no memory for a task list.
 */
#include <inttypes.h>
#include <string.h>

#include "quorum/cover.h"

struct attn__schedule {
    attn__layout layout;
    bool cyclic;
    int64_t size_q, size_kv;
    int64_t *set_q, *set_kv; /* ascending; set_q[0] = set_kv[0] = 0 */
    int64_t *row;            /* size_q + 1: row a has the entries row[a]..row[a + 1] */
    uint32_t *column;        /* indices into set_kv, ascending in a row */
};

/* ---- creation ---- */

static attn_status check_layout(const attn__layout *layout)
{
    ATTN__TRY(attn__cover_check_workers(layout->workers));
    int64_t limit = ATTN__BAND_OPEN / 2;
    if (layout->tokens_q < 1 || layout->tokens_kv < 1 || layout->tokens_q > limit ||
        layout->tokens_kv > limit) {
        return attn__fail(ATTN_EINVAL, "%" PRId64 " query and %" PRId64 " key tokens: give 1 to %" PRId64,
                          layout->tokens_q, layout->tokens_kv, limit);
    }
    return ATTN_OK;
}

/* Allocates all arrays; `entries` is the number of (a, b) chosen. */
static attn_status create(attn__schedule **schedule, const attn__layout *layout, int64_t size_q,
                          int64_t size_kv, int64_t entries)
{
    *schedule = NULL;
    attn__schedule *s = attn__alloc_zero(sizeof *s);
    if (s == NULL) {
        return ATTN_ENOMEM;
    }
    s->layout = *layout;
    s->layout.band.lo = attn__max(layout->band.lo, -ATTN__BAND_OPEN);
    s->layout.band.hi = attn__min(layout->band.hi, ATTN__BAND_OPEN);
    s->size_q = size_q;
    s->size_kv = size_kv;
    s->set_q = attn__alloc_array(size_q, sizeof *s->set_q);
    s->set_kv = attn__alloc_array(size_kv, sizeof *s->set_kv);
    s->row = attn__alloc_array(size_q + 1, sizeof *s->row);
    s->column = attn__alloc_array(entries, sizeof *s->column);
    if (s->set_q == NULL || s->set_kv == NULL || s->row == NULL || s->column == NULL) {
        attn__schedule_free(s);
        return ATTN_ENOMEM;
    }
    *schedule = s;
    return ATTN_OK;
}

void attn__schedule_free(attn__schedule *schedule)
{
    if (schedule != NULL) {
        attn__free(schedule->set_q);
        attn__free(schedule->set_kv);
        attn__free(schedule->row);
        attn__free(schedule->column);
        attn__free(schedule);
    }
}

/* ---- the cyclic quorum ---- */

static int64_t fold(int64_t difference, int64_t workers)
{
    int64_t d = difference < 0 ? -difference : difference;
    return attn__min(d, workers - d);
}

bool attn__choose_pairs(const attn__cover *cover, attn__chosen *pick)
{
    const attn__chosen nothing = {UINT32_MAX, UINT32_MAX};
    int64_t half = cover->workers / 2;
    int64_t left = half;
    for (int64_t d = 1; d <= half; d++) {
        pick[d] = nothing;
    }
    pick[0] = (attn__chosen){0, 0};
    for (int64_t i = 0; i < cover->size; i++) {
        for (int64_t j = i + 1; j < cover->size; j++) {
            int64_t d = fold(cover->set[j] - cover->set[i], cover->workers);
            if (pick[d].low == UINT32_MAX) {
                pick[d] = (attn__chosen){(uint32_t)i, (uint32_t)j};
                left--;
            }
        }
    }
    return left == 0;
}

/* Both directions of every chosen pair, row by row. */
static void fill_cyclic(attn__schedule *s, const attn__chosen *pick)
{
    int64_t entry = 0;
    for (int64_t i = 0; i < s->size_q; i++) {
        s->row[i] = entry;
        for (int64_t j = 0; j < s->size_kv; j++) {
            attn__chosen c = pick[fold(s->set_kv[j] - s->set_q[i], s->layout.workers)];
            if (c.low == attn__min(i, j) && c.high == attn__max(i, j)) {
                s->column[entry++] = (uint32_t)j;
            }
        }
    }
    s->row[s->size_q] = entry;
}

static attn_status check_cover(const attn__layout *layout, const attn__cover *cover)
{
    if (cover->workers != layout->workers || cover->size < 1 || cover->set[0] != 0) {
        return attn__fail(ATTN_EINVAL,
                          "the interest set belongs to Z_%" PRId64 ", but there are %" PRId64 " workers",
                          cover->workers, layout->workers);
    }
    return ATTN_OK;
}

attn_status attn__schedule_cyclic(attn__schedule **schedule, const attn__layout *layout,
                                  const attn__cover *cover)
{
    *schedule = NULL;
    ATTN__TRY(check_layout(layout));
    ATTN__TRY(check_cover(layout, cover));
    attn__chosen *pick = attn__alloc_array(layout->workers / 2 + 1, sizeof *pick);
    if (pick == NULL) {
        return ATTN_ENOMEM;
    }
    attn_status status;
    if (attn__choose_pairs(cover, pick)) {
        /* W differences, and for even W the second direction of W/2 */
        status = create(schedule, layout, cover->size, cover->size, layout->workers + 1);
    } else {
        status = attn__fail(ATTN_EINVAL, "the interest set does not cover Z_%" PRId64, layout->workers);
    }
    if (status == ATTN_OK) {
        attn__schedule *s = *schedule;
        s->cyclic = true;
        memcpy(s->set_q, cover->set, (size_t)cover->size * sizeof *s->set_q);
        memcpy(s->set_kv, cover->set, (size_t)cover->size * sizeof *s->set_kv);
        fill_cyclic(s, pick);
    }
    attn__free(pick);
    return status;
}

/* ---- the rectangular quorum ---- */

/* Row alpha holds the keys -a t with alpha + a t < W: t = 0 first, then from the largest t down, ascending.
 */
static void fill_rectangular(attn__schedule *s)
{
    int64_t workers = s->layout.workers;
    int64_t a = s->size_q;
    int64_t entry = 0;
    for (int64_t t = 0; t < s->size_kv; t++) {
        s->set_kv[t == 0 ? 0 : s->size_kv - t] = t == 0 ? 0 : workers - a * t;
    }
    for (int64_t alpha = 0; alpha < a; alpha++) {
        s->set_q[alpha] = alpha;
        s->row[alpha] = entry;
        s->column[entry++] = 0;
        for (int64_t t = s->size_kv - 1; t > 0; t--) {
            if (alpha + a * t < workers) {
                s->column[entry++] = (uint32_t)(s->size_kv - t);
            }
        }
    }
    s->row[a] = entry;
}

attn_status attn__schedule_rectangular(attn__schedule **schedule, const attn__layout *layout, int64_t a)
{
    *schedule = NULL;
    ATTN__TRY(check_layout(layout));
    if (a < 1 || a > layout->workers) {
        return attn__fail(ATTN_EINVAL, "a rectangle %" PRId64 " groups high: give 1 to %" PRId64, a,
                          layout->workers);
    }
    ATTN__TRY(create(schedule, layout, a, attn__ceil_div(layout->workers, a), layout->workers));
    fill_rectangular(*schedule);
    return ATTN_OK;
}

/* ---- reading ---- */

const attn__layout *attn__schedule_layout(const attn__schedule *schedule)
{
    return &schedule->layout;
}

void attn__schedule_sets(const attn__schedule *schedule, const int64_t **set_q, int64_t *size_q,
                         const int64_t **set_kv, int64_t *size_kv)
{
    *set_q = schedule->set_q;
    *size_q = schedule->size_q;
    *set_kv = schedule->set_kv;
    *size_kv = schedule->size_kv;
}

int64_t attn__schedule_capacity(const attn__schedule *schedule)
{
    return schedule->row[schedule->size_q];
}

attn__block_rows attn__schedule_rows(const attn__schedule *schedule, attn_pair pair)
{
    const attn__layout *layout = &schedule->layout;
    attn__block_rows rows;
    rows.q_first = attn__group_first(layout->tokens_q, layout->workers, pair.q);
    rows.q_count = attn__group_count(layout->tokens_q, layout->workers, pair.q);
    rows.kv_first = attn__group_first(layout->tokens_kv, layout->workers, pair.kv);
    rows.kv_count = attn__group_count(layout->tokens_kv, layout->workers, pair.kv);
    int64_t lower = rows.q_count / 2;
    if (pair.part == 1) {
        rows.q_count = lower;
    } else if (pair.part == 2) {
        rows.q_first += lower;
        rows.q_count -= lower;
    }
    return rows;
}

/* Some cell is visible: the differences key - query of a block are an interval without gaps. */
static bool visible(const attn__schedule *s, attn_pair pair)
{
    attn__block_rows rows = attn__schedule_rows(s, pair);
    attn__band band = s->layout.band;
    int64_t least = rows.kv_first - (rows.q_first + rows.q_count - 1);
    int64_t most = rows.kv_first + rows.kv_count - 1 - rows.q_first;
    return rows.q_count > 0 && rows.kv_count > 0 && band.lo <= band.hi && band.lo <= most && least <= band.hi;
}

enum { NO_SHARE = -1 };

/*
 * What of the block (rank + a, rank + b) is the worker's: part 0, 1 or 2, or NO_SHARE.  Only the half
 * difference of a cyclic quorum has two owners.  Published rule: the lower half of the workers computes both
 * blocks, so their load is W + 1 blocks, the others' W - 1.  Better: without a mask each of the two takes the
 * direction that its own offsets name; with a mask, which may cut one of the two blocks away, half of the
 * rows of both.
 */
static int share_of(const attn__schedule *s, int64_t rank, int64_t a, int64_t b)
{
    int64_t workers = s->layout.workers;
    if (!s->cyclic || a == b || 2 * (a < b ? b - a : a - b) != workers) {
        return 0;
    }
    bool lower = rank < workers / 2;
    if (s->layout.classic) {
        return lower ? 0 : NO_SHARE;
    }
    attn__band band = s->layout.band;
    if (band.lo == -ATTN__BAND_OPEN && band.hi == ATTN__BAND_OPEN) {
        return a < b ? 0 : NO_SHARE;
    }
    return lower ? 1 : 2;
}

/* The first index whose offset wraps around when rank is added. */
static int64_t wrap_index(const int64_t *set, int64_t size, int64_t workers, int64_t rank)
{
    int64_t low = 0;
    int64_t high = size;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (set[middle] + rank >= workers) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Appends the worker's share of row `a`, keys ascending; wrap is wrap_index of the key offsets. */
static int64_t append_row(const attn__schedule *s, int64_t rank, int64_t a, int64_t wrap, attn_pair *pairs)
{
    int64_t workers = s->layout.workers;
    int64_t begin = s->row[a];
    int64_t length = s->row[a + 1] - begin;
    int64_t turn = 0; /* entries before the one that wraps first */
    while (turn < length && s->column[begin + turn] < wrap) {
        turn++;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < length; i++) {
        int64_t at = begin + (i + turn < length ? i + turn : i + turn - length);
        int64_t b = s->set_kv[s->column[at]];
        int part = share_of(s, rank, s->set_q[a], b);
        attn_pair pair = {(rank + s->set_q[a]) % workers, (rank + b) % workers, part};
        if (part != NO_SHARE && visible(s, pair)) {
            pairs[count++] = pair;
        }
    }
    return count;
}

int64_t attn__schedule_pairs(const attn__schedule *schedule, int64_t rank, attn_pair *pairs)
{
    int64_t workers = schedule->layout.workers;
    int64_t wrap_q = wrap_index(schedule->set_q, schedule->size_q, workers, rank);
    int64_t wrap_kv = wrap_index(schedule->set_kv, schedule->size_kv, workers, rank);
    int64_t count = 0;
    for (int64_t i = 0; i < schedule->size_q; i++) {
        count += append_row(schedule, rank, (wrap_q + i) % schedule->size_q, wrap_kv, pairs + count);
    }
    return count;
}
