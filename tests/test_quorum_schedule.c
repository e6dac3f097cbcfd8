/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quorum_schedule.c - groups, bands and task lists: every visible cell owned exactly once, by brute
 * force, for random N, W, masks and quorums; the published rules.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "quorum_case.h"

/* ---- groups and bands ---- */

static void groups_partition(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        int64_t workers = pick(1, 200);
        int64_t tokens = round % 2 ? pick(1, 1000) : pick(1, INT64_C(1) << 40);
        int64_t next = 0;
        for (int64_t g = 0; g < workers; g++) {
            int64_t count = attn__group_count(tokens, workers, g);
            assert_int_equal(attn__group_first(tokens, workers, g), next);
            assert_int_equal(count, tokens / workers + (g >= workers - tokens % workers));
            next += count;
        }
        assert_int_equal(next, tokens);
    }
}

static int64_t cells_by_force(attn__band band, int64_t q, int64_t nq, int64_t k, int64_t nk)
{
    int64_t cells = 0;
    for (int64_t i = q; i < q + nq; i++) {
        for (int64_t j = k; j < k + nk; j++) {
            cells += band.lo <= j - i && j - i <= band.hi;
        }
    }
    return cells;
}

static void band_small(void **state)
{
    (void)state;
    for (int round = 0; round < 20000; round++) {
        int64_t q = pick(0, 40);
        int64_t k = pick(0, 40);
        int64_t nq = pick(0, 12);
        int64_t nk = pick(0, 12);
        attn__band band = {pick(-60, 60), pick(-60, 60)};
        if (round % 4 == 0) {
            band.lo = -ATTN__BAND_OPEN;
        }
        if (round % 4 == 1) {
            band.hi = ATTN__BAND_OPEN;
        }
        assert_int_equal(attn__band_cells(band, q, nq, k, nk), cells_by_force(band, q, nq, k, nk));
    }
}

/* Long sequences: known counts, and pieces that add up; a count above 2^63 - 1 stops there. */
static void band_large(void **state)
{
    (void)state;
    int64_t n = INT64_C(1) << 31;
    int64_t far = INT64_C(1) << 40;
    attn__band causal = {-ATTN__BAND_OPEN, 0};
    attn__band window = {-1000, 1000};
    assert_int_equal(attn__band_cells(open_band, 0, n, far, n), n * n);
    assert_int_equal(attn__band_cells(causal, 0, n, 0, n), n / 2 * (n + 1));
    assert_int_equal(attn__band_cells(causal, far, n, far, n), n / 2 * (n + 1));
    assert_int_equal(attn__band_cells(causal, far, n, 0, n), n * n);
    assert_int_equal(attn__band_cells(causal, 0, n, far, n), 0);
    /* the whole band of a 2^40 square, though the triangles beside it do not fit in 63 bits */
    assert_int_equal(attn__band_cells(window, 0, far, 0, far), 2001 * far - 1000 * 1001);
    assert_int_equal(attn__band_cells((attn__band){INT64_MIN, INT64_MAX}, 0, n, 0, n), n * n);
    assert_int_equal(attn__band_cells(open_band, 0, far, 0, far), INT64_MAX);
    assert_int_equal(attn__band_cells(causal, 0, far, 0, far), INT64_MAX);
    for (int round = 0; round < 2000; round++) {
        int64_t q = pick(0, far);
        int64_t k = attn__max(0, q + pick(-n, n));
        int64_t nq = pick(1, n);
        int64_t nk = pick(1, n);
        int64_t cut_q = pick(0, nq);
        int64_t cut_k = pick(0, nk);
        attn__band band = {pick(-2 * n, n), pick(-n, 2 * n)};
        int64_t whole = attn__band_cells(band, q, nq, k, nk);
        int64_t sum = attn__band_cells(band, q, cut_q, k, cut_k) +
                      attn__band_cells(band, q, cut_q, k + cut_k, nk - cut_k) +
                      attn__band_cells(band, q + cut_q, nq - cut_q, k, cut_k) +
                      attn__band_cells(band, q + cut_q, nq - cut_q, k + cut_k, nk - cut_k);
        assert_int_equal(sum, whole);
    }
}

/* ---- a schedule against its definition ---- */

static bool holds(const int64_t *set, int64_t size, int64_t x)
{
    for (int64_t i = 0; i < size; i++) {
        if (set[i] == x) {
            return true;
        }
    }
    return false;
}

static bool before(attn_pair a, attn_pair b)
{
    return a.q < b.q || (a.q == b.q && (a.kv < b.kv || (a.kv == b.kv && a.part < b.part)));
}

/* Sorted, in the worker's two quorums, and with something to do. */
static void assert_task_list(const attn__schedule *s, int64_t rank, const attn_pair *pairs, int64_t count)
{
    const attn__layout *layout = attn__schedule_layout(s);
    const int64_t *set_q, *set_kv;
    int64_t size_q, size_kv;
    attn__schedule_sets(s, &set_q, &size_q, &set_kv, &size_kv);
    assert_true(count <= attn__schedule_capacity(s));
    for (int64_t i = 0; i < count; i++) {
        attn_pair pair = pairs[i];
        attn__block_rows rows = attn__schedule_rows(s, pair);
        assert_true(i == 0 || before(pairs[i - 1], pair));
        assert_true(holds(set_q, size_q, attn__mod(pair.q - rank, layout->workers)));
        assert_true(holds(set_kv, size_kv, attn__mod(pair.kv - rank, layout->workers)));
        assert_true(attn__band_cells(layout->band, rows.q_first, rows.q_count, rows.kv_first, rows.kv_count) >
                    0);
    }
}

/* Marks every cell of every worker in owners[tokens_q][tokens_kv]; writes each worker's visible cells. */
static void mark_cells(const attn__schedule *s, unsigned char *owners, int64_t *cells)
{
    const attn__layout *layout = attn__schedule_layout(s);
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
    assert_non_null(pairs);
    for (int64_t rank = 0; rank < layout->workers; rank++) {
        int64_t count = attn__schedule_pairs(s, rank, pairs);
        assert_task_list(s, rank, pairs, count);
        cells[rank] = 0;
        for (int64_t i = 0; i < count; i++) {
            attn__block_rows r = attn__schedule_rows(s, pairs[i]);
            for (int64_t q = r.q_first; q < r.q_first + r.q_count; q++) {
                for (int64_t k = r.kv_first; k < r.kv_first + r.kv_count; k++) {
                    owners[q * layout->tokens_kv + k]++;
                    cells[rank] += layout->band.lo <= k - q && k - q <= layout->band.hi;
                }
            }
        }
    }
    attn__free(pairs);
}

/* Every visible cell has one owner; the proof says the same. */
static void assert_exactly_once(const attn__schedule *s, int64_t *cells)
{
    attn__layout layout = *attn__schedule_layout(s);
    unsigned char *owners = attn__alloc_zero((size_t)(layout.tokens_q * layout.tokens_kv));
    assert_non_null(owners);
    mark_cells(s, owners, cells);
    int64_t visible = 0;
    int64_t counted = 0;
    for (int64_t q = 0; q < layout.tokens_q; q++) {
        for (int64_t k = 0; k < layout.tokens_kv; k++) {
            if (layout.band.lo <= k - q && k - q <= layout.band.hi) {
                assert_int_equal(owners[q * layout.tokens_kv + k], 1);
                visible++;
            }
        }
    }
    for (int64_t rank = 0; rank < layout.workers; rank++) {
        counted += cells[rank];
    }
    assert_int_equal(counted, visible);
    attn__free(owners);
    attn_proof proof = ATTN_INIT(attn_proof);
    assert_int_equal(attn__schedule_prove(s, &proof), ATTN_OK);
    assert_int_equal(proof.cells, visible);
    assert_int_equal(proof.once, visible);
    assert_int_equal(proof.missing, 0);
    assert_int_equal(proof.repeated, 0);
}

static attn__layout random_layout(int64_t most_workers, int64_t most_tokens)
{
    attn__layout layout = {.workers = pick(1, most_workers)};
    layout.tokens_q = pick(1, pick(0, 3) ? most_tokens : layout.workers);
    layout.tokens_kv = pick(0, 1) ? layout.tokens_q : pick(1, most_tokens);
    layout.band = make_band((int)pick(0, BANDS - 1), layout.tokens_q, layout.tokens_kv);
    layout.classic = pick(0, 3) == 0;
    return layout;
}

static void cyclic_once(void **state)
{
    (void)state;
    for (int round = 0; round < 700; round++) {
        attn__layout layout = random_layout(200, 240);
        int64_t cells[200];
        attn__schedule *s = cyclic(&layout);
        assert_exactly_once(s, cells);
        attn__schedule_free(s);
    }
}

/* Every small W, all masks, fewer tokens than workers and more. */
static void cyclic_small(void **state)
{
    (void)state;
    for (int64_t workers = 1; workers <= 12; workers++) {
        for (int64_t tokens = 1; tokens <= 3 * workers; tokens++) {
            for (int kind = 0; kind < 2 * BANDS; kind++) {
                attn__layout layout = {workers, tokens, tokens, make_band(kind / 2, tokens, tokens),
                                       kind % 2 == 1};
                int64_t cells[12];
                attn__schedule *s = cyclic(&layout);
                assert_exactly_once(s, cells);
                attn__schedule_free(s);
            }
        }
    }
}

static void rectangular_once(void **state)
{
    (void)state;
    for (int round = 0; round < 500; round++) {
        attn__layout layout = random_layout(200, 200);
        int64_t cells[200];
        attn__schedule *s;
        int64_t a = pick(1, pick(0, 1) ? layout.workers : attn__min(layout.workers, 16));
        assert_int_equal(attn__schedule_rectangular(&s, &layout, a), ATTN_OK);
        assert_exactly_once(s, cells);
        attn__schedule_free(s);
    }
}

/* A user's set with more elements than it needs has a choice of pairs; still once. */
static void redundant_sets(void **state)
{
    (void)state;
    for (int round = 0; round < 300; round++) {
        attn__layout layout = random_layout(40, 120);
        int64_t set[60], cells[40];
        int64_t size = 0;
        for (int64_t x = 0; x < layout.workers; x++) {
            if (x <= layout.workers / 2 || pick(0, 1)) {
                set[size++] = x;
            }
        }
        attn__cover cover;
        attn__schedule *s;
        assert_int_equal(attn__cover_user(&cover, layout.workers, set, size), ATTN_OK);
        assert_int_equal(attn__schedule_cyclic(&s, &layout, &cover), ATTN_OK);
        assert_exactly_once(s, cells);
        attn__schedule_free(s);
        attn__cover_free(&cover);
    }
}

/* ---- the published scheme ---- */

static void assert_pairs(const attn__schedule *s, int64_t rank, const int64_t (*want)[2], int64_t count)
{
    attn_pair pairs[64];
    assert_int_equal(attn__schedule_pairs(s, rank, pairs), count);
    for (int64_t i = 0; i < count; i++) {
        assert_int_equal(pairs[i].q, want[i][0]);
        assert_int_equal(pairs[i].kv, want[i][1]);
        assert_int_equal(pairs[i].part, 0);
    }
}

/* N = 10, W = 7, I = {0, 1, 3}: all nine pairs of a quorum but the two diagonals of others. */
static void published_example(void **state)
{
    static const int64_t set[] = {0, 1, 3};
    static const int64_t first[][2] = {{0, 0}, {0, 1}, {0, 3}, {1, 0}, {1, 3}, {3, 0}, {3, 1}};
    static const int64_t fifth[][2] = {{0, 4}, {0, 5}, {4, 0}, {4, 4}, {4, 5}, {5, 0}, {5, 4}};
    static const int64_t causal[][2] = {{4, 0}, {4, 4}, {5, 0}, {5, 4}};
    (void)state;
    for (int classic = 0; classic < 2; classic++) {
        attn__cover cover;
        attn__schedule *s;
        attn__layout layout = {7, 10, 10, open_band, classic == 1};
        assert_int_equal(attn__cover_user(&cover, 7, set, 3), ATTN_OK);
        assert_int_equal(attn__schedule_cyclic(&s, &layout, &cover), ATTN_OK);
        assert_pairs(s, 0, first, 7);
        assert_pairs(s, 4, fifth, 7);
        attn__schedule_free(s);
        layout.band = make_band(CAUSAL, 10, 10);
        assert_int_equal(attn__schedule_cyclic(&s, &layout, &cover), ATTN_OK);
        assert_pairs(s, 4, causal, 4);
        attn__schedule_free(s);
        attn__cover_free(&cover);
    }
}

/*
 * The published rules from their definition, for any W: of each unordered difference the first two offsets a
 * < b in the order of the set; worker i computes (i + a, i + b) and (i + b, i + a) and its own diagonal; at
 * W/2 only the workers below W/2 do.  wanted[q][kv] counts.
 */
static void mark_published(const attn__cover *cover, int64_t rank, unsigned char *wanted)
{
    int64_t workers = cover->workers;
    unsigned char done[201] = {0};
    wanted[rank * workers + rank] = 1;
    for (int64_t i = 0; i < cover->size; i++) {
        for (int64_t j = i + 1; j < cover->size; j++) {
            int64_t d = cover->set[j] - cover->set[i];
            d = attn__min(d, workers - d);
            if (!done[d] && (2 * d != workers || rank < workers / 2)) {
                int64_t x = (rank + cover->set[i]) % workers;
                int64_t y = (rank + cover->set[j]) % workers;
                wanted[x * workers + y] = wanted[y * workers + x] = 1;
            }
            done[d] = 1;
        }
    }
}

static void classic_is_published(void **state)
{
    (void)state;
    for (int64_t workers = 1; workers <= 200; workers += workers < 60 ? 1 : 7) {
        attn__cover cover;
        attn__schedule *s;
        attn__layout layout = {workers, 3 * workers, 3 * workers, open_band, true};
        assert_int_equal(attn__cover_best(&cover, workers), ATTN_OK);
        assert_int_equal(attn__schedule_cyclic(&s, &layout, &cover), ATTN_OK);
        attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
        unsigned char *wanted = attn__alloc((size_t)(workers * workers));
        for (int64_t rank = 0; rank < workers; rank++) {
            memset(wanted, 0, (size_t)(workers * workers));
            mark_published(&cover, rank, wanted);
            int64_t left = 0;
            for (int64_t i = 0; i < workers * workers; i++) {
                left += wanted[i];
            }
            int64_t count = attn__schedule_pairs(s, rank, pairs);
            assert_int_equal(count, left);
            for (int64_t i = 0; i < count; i++) {
                assert_int_equal(wanted[pairs[i].q * workers + pairs[i].kv], 1);
                assert_int_equal(pairs[i].part, 0);
            }
        }
        attn__free(pairs);
        attn__free(wanted);
        attn__schedule_free(s);
        attn__cover_free(&cover);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_partition),     cmocka_unit_test(band_small),
        cmocka_unit_test(band_large),           cmocka_unit_test(cyclic_once),
        cmocka_unit_test(cyclic_small),         cmocka_unit_test(rectangular_once),
        cmocka_unit_test(redundant_sets),       cmocka_unit_test(published_example),
        cmocka_unit_test(classic_is_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
