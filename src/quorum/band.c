/* SPDX-License-Identifier: Apache-2.0 */
/*
 * band.c - how many cells of a block a band mask leaves visible.
 *
 * The cells with key - query <= t in a block number sum over its rows x of clamp(x, 0, nk), where x runs over
 * nq consecutive integers: a part of zeros, a triangle, and a part of full rows.  The band is the difference
 * of two such counts.  Each is taken modulo 2^64, where sums of any size subtract exactly, and once more in
 * floating point to tell a count that does not fit in an int64_t.  Cost: O(1).
 */
#include "quorum/quorum.h"

/* A count modulo 2^64, and about. */
typedef struct count {
    uint64_t exact;
    double about;
} count;

/* Sum of clamp(x, 0, most) over the `rows` integers from `first` on. */
static count sum_clamped(int64_t first, int64_t rows, int64_t most)
{
    int64_t begin = attn__max(first, 1); /* the triangle: 1 <= x <= most */
    int64_t end = attn__min(first + rows - 1, most);
    int64_t slope = attn__max(0, end - begin + 1);
    int64_t full = attn__min(rows, attn__max(0, first + rows - 1 - most));
    count sum = {(uint64_t)full * (uint64_t)most, (double)full * (double)most};
    if (slope > 0) {
        uint64_t terms = (uint64_t)slope;
        uint64_t ends = (uint64_t)begin + (uint64_t)end; /* odd only if the number of terms is even */
        sum.exact += terms % 2 == 0 ? terms / 2 * ends : ends / 2 * terms;
        sum.about += (double)terms / 2 * (double)ends;
    }
    return sum;
}

/* Cells with key - query <= bound. */
static count cells_up_to(int64_t bound, int64_t q, int64_t nq, int64_t k, int64_t nk)
{
    bound = attn__max(-ATTN__BAND_OPEN, attn__min(bound, ATTN__BAND_OPEN));
    return sum_clamped(q + bound - k + 1, nq, nk);
}

int64_t attn__band_cells(attn__band band, int64_t q, int64_t nq, int64_t k, int64_t nk)
{
    if (nq <= 0 || nk <= 0 || band.lo > band.hi) {
        return 0;
    }
    count upper = cells_up_to(band.hi, q, nq, k, nk);
    count lower = cells_up_to(attn__max(band.lo, -ATTN__BAND_OPEN) - 1, q, nq, k, nk);
    uint64_t cells = upper.exact - lower.exact;
    bool fits = upper.about - lower.about < 9.3e18 && cells <= (uint64_t)INT64_MAX;
    return fits ? (int64_t)cells : INT64_MAX;
}
