/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quorum_case.h - random numbers, masks, schedules and the cover check that the tests of src/quorum share.
 * cmocka.h must be included first.
 */
#ifndef ATTN_TESTS_QUORUM_CASE_H
#define ATTN_TESTS_QUORUM_CASE_H

#include "quorum/quorum.h"

enum { OPEN = 0, CAUSAL, WINDOW, LEFT_ONLY, RIGHT_ONLY, NOTHING, BANDS };

static const attn__band open_band = {-ATTN__BAND_OPEN, ATTN__BAND_OPEN};

/* xorshift64; every test program starts from the same number. */
static uint64_t case_state = 20260101;

static inline int64_t pick(int64_t from, int64_t to)
{
    case_state ^= case_state << 13;
    case_state ^= case_state >> 7;
    case_state ^= case_state << 17;
    return from + (int64_t)(case_state % (uint64_t)(to - from + 1));
}

static inline attn__band make_band(int kind, int64_t tokens_q, int64_t tokens_kv)
{
    int64_t shift = tokens_kv - tokens_q;
    switch (kind) {
    case CAUSAL:
        return (attn__band){-ATTN__BAND_OPEN, shift};
    case WINDOW:
        return (attn__band){shift - pick(0, tokens_kv), shift + pick(0, tokens_kv)};
    case LEFT_ONLY:
        return (attn__band){shift - pick(0, tokens_kv), ATTN__BAND_OPEN};
    case RIGHT_ONLY:
        return (attn__band){-ATTN__BAND_OPEN, shift + pick(0, tokens_kv)};
    case NOTHING: /* far outside: no cell is visible */
        return (attn__band){3 * (tokens_q + tokens_kv), ATTN__BAND_OPEN};
    default:
        return open_band;
    }
}

static inline attn__schedule *cyclic(const attn__layout *layout)
{
    attn__cover cover;
    attn__schedule *s;
    assert_int_equal(attn__cover_best(&cover, layout->workers), ATTN_OK);
    if (pick(0, 1)) {
        assert_int_equal(attn__cover_fit(&cover, layout->tokens_kv), ATTN_OK);
        assert_int_equal(attn__cover_fit_causal(&cover, layout->tokens_kv, pick(0, 3), pick(0, 3)), ATTN_OK);
    }
    assert_int_equal(attn__schedule_cyclic(&s, layout, &cover), ATTN_OK);
    attn__cover_free(&cover);
    return s;
}

/* Covers Z_W, starts with 0, ascends; by a count that shares nothing with the library's. */
static inline void assert_cover(const attn__cover *cover, int64_t workers)
{
    assert_int_equal(cover->workers, workers);
    assert_true(cover->size >= 1);
    assert_int_equal(cover->set[0], 0);
    unsigned char *seen = attn__alloc_zero((size_t)workers);
    assert_non_null(seen);
    for (int64_t i = 0; i < cover->size; i++) {
        assert_true(i == 0 || cover->set[i] > cover->set[i - 1]);
        assert_true(cover->set[i] < workers);
        for (int64_t j = 0; j < cover->size; j++) {
            seen[attn__mod(cover->set[i] - cover->set[j], workers)] = 1;
        }
    }
    for (int64_t d = 0; d < workers; d++) {
        assert_int_equal(seen[d], 1);
    }
    attn__free(seen);
}

#endif
