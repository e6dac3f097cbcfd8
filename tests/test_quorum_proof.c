/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quorum_proof.c - equal load, refusals, one worker of a million, the coverage proof, and every
 * allocation of the schedule failed in turn.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "quorum_case.h"

/* ---- balance ---- */

static void spread_of(const attn__schedule *s, int64_t *least, int64_t *most)
{
    attn__band band = attn__schedule_layout(s)->band;
    int64_t workers = attn__schedule_layout(s)->workers;
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
    *least = INT64_MAX;
    *most = 0;
    for (int64_t rank = 0; rank < workers; rank++) {
        int64_t cells = 0;
        int64_t count = attn__schedule_pairs(s, rank, pairs);
        for (int64_t i = 0; i < count; i++) {
            attn__block_rows r = attn__schedule_rows(s, pairs[i]);
            cells += attn__band_cells(band, r.q_first, r.q_count, r.kv_first, r.kv_count);
        }
        *least = attn__min(*least, cells);
        *most = attn__max(*most, cells);
    }
    attn__free(pairs);
}

/*
 * With groups of n tokens: W blocks for every worker without a mask, and exactly W/2 blocks (and half a
 * diagonal block's edge) with a causal one.  Only an even W and an odd n leave half a row over: n / 2 rows
 * against n - n / 2.
 */
static void balance_even_groups(void **state)
{
    (void)state;
    for (int64_t workers = 1; workers <= 130; workers++) {
        int64_t n = pick(1, 9);
        attn__layout layout = {workers, n * workers, n * workers, open_band, false};
        int64_t least, most;
        attn__schedule *s = cyclic(&layout);
        spread_of(s, &least, &most);
        attn__schedule_free(s);
        assert_int_equal(least, workers * n * n);
        assert_int_equal(most, workers * n * n);
        layout.band = make_band(CAUSAL, layout.tokens_q, layout.tokens_kv);
        s = cyclic(&layout);
        spread_of(s, &least, &most);
        attn__schedule_free(s);
        int64_t odd = workers % 2 == 0 && n % 2 == 1 ? n : 0;
        assert_int_equal(most - least, odd);
        assert_int_equal(most + least, (workers - 1) * n * n + n * (n + 1));
    }
}

/* Groups of n and n + 1 tokens: no block is larger than (n + 1)^2 or smaller than n^2. */
static void balance_any_tokens(void **state)
{
    (void)state;
    for (int round = 0; round < 300; round++) {
        int64_t workers = pick(2, 150);
        int64_t tokens = pick(workers, 20 * workers);
        int64_t n = tokens / workers;
        for (int kind = OPEN; kind <= CAUSAL; kind++) {
            attn__layout layout = {workers, tokens, tokens, make_band(kind, tokens, tokens), false};
            int64_t least, most;
            attn__schedule *s = cyclic(&layout);
            spread_of(s, &least, &most);
            attn__schedule_free(s);
            int64_t blocks = kind == OPEN ? workers : attn__ceil_div(workers, 2);
            assert_true(most - least <= blocks * (2 * n + 1) + n + 1);
        }
    }
}

/* The published rule at even W: W + 1 blocks below W/2, W - 1 above. */
static void classic_is_unbalanced(void **state)
{
    (void)state;
    for (int64_t workers = 2; workers <= 60; workers += 2) {
        attn__layout layout = {workers, 4 * workers, 4 * workers, open_band, true};
        int64_t least, most;
        attn__schedule *s = cyclic(&layout);
        spread_of(s, &least, &most);
        attn__schedule_free(s);
        assert_int_equal(least, 16 * (workers - 1));
        assert_int_equal(most, 16 * (workers + 1));
    }
}

/* ---- edges ---- */

static void refusals(void **state)
{
    (void)state;
    attn__cover cover;
    attn__schedule *s;
    attn__layout good = {7, 10, 10, open_band, false};
    assert_int_equal(attn__cover_best(&cover, 8), ATTN_OK);
    assert_int_equal(attn__schedule_cyclic(&s, &good, &cover), ATTN_EINVAL); /* a set of Z_8 */
    assert_null(s);
    cover.size--;
    good.workers = 8;
    assert_int_equal(attn__schedule_cyclic(&s, &good, &cover), ATTN_EINVAL); /* no cover any more */
    assert_null(s);
    attn__cover_free(&cover);
    static const int64_t bad[][3] = {{0, 10, 10}, {-1, 10, 10}, {INT64_MAX, 10, 10}, {4, 0, 10},
                                     {4, 10, 0},  {4, -1, 10},  {4, INT64_MAX, 10}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        attn__layout layout = {bad[i][0], bad[i][1], bad[i][2], open_band, false};
        assert_int_equal(attn__schedule_rectangular(&s, &layout, 1), ATTN_EINVAL);
        assert_null(s);
    }
    assert_int_equal(attn__schedule_rectangular(&s, &good, 0), ATTN_EINVAL);
    assert_int_equal(attn__schedule_rectangular(&s, &good, 9), ATTN_EINVAL);
    attn__schedule_free(NULL);
}

/* One worker of a million: at once, in O(k^2 + W). */
static void million_workers(void **state)
{
    static const int64_t ranks[] = {0, 1, 499999, 1000002};
    (void)state;
    attn__layout layout = {1000003, INT64_C(1) << 40, INT64_C(1) << 40, {-ATTN__BAND_OPEN, 0}, false};
    attn__schedule *s = cyclic(&layout);
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
    assert_true(attn__schedule_capacity(s) <= 2 * layout.workers);
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        double begin = attn__now();
        int64_t count = attn__schedule_pairs(s, ranks[i], pairs);
        assert_true(attn__now() - begin < 2);
        assert_int_equal(count,
                         (layout.workers + 1) / 2); /* causal: one of each two blocks, and the diagonal */
        attn__traffic traffic;
        attn__bytes bytes = {4, 4, 4, 8, 4, 4};
        assert_int_equal(attn__schedule_traffic(s, ranks[i], pairs, count, &bytes, &traffic), ATTN_OK);
    }
    attn__free(pairs);
    attn__schedule_free(s);
}

/* The proof is able to fail: one offset of a finished schedule is changed, so that blocks of one difference
 * are computed as blocks of another. */
static void proof_finds_damage(void **state)
{
    (void)state;
    attn__layout layout = {21, 63, 63, open_band, false};
    attn__schedule *s;
    attn_proof proof = ATTN_INIT(attn_proof);
    const int64_t *set_q, *set_kv;
    int64_t size_q, size_kv;
    assert_int_equal(attn__schedule_rectangular(&s, &layout, 4), ATTN_OK);
    attn__schedule_sets(s, &set_q, &size_q, &set_kv, &size_kv);
    int64_t *damaged = (int64_t *)(uintptr_t)&set_kv[size_kv - 1];
    assert_int_equal(*damaged, 17);
    *damaged = 18; /* keys -3 instead of -4: the differences 14..17 become 15..18 */
    assert_int_equal(attn__schedule_prove(s, &proof), ATTN_OK);
    assert_int_equal(proof.cells, 63 * 63);
    assert_int_equal(proof.missing, 21 * 9);
    assert_int_equal(proof.repeated, 21 * 9);
    assert_int_equal(proof.once, 63 * 63 - 2 * 21 * 9);
    attn__schedule_free(s);
}

/* Groups of millions of tokens, more of them than rows are counted one by one. */
static void proof_of_large(void **state)
{
    (void)state;
    attn__layout layout = {1057, INT64_C(3) << 30, INT64_C(3) << 29,
                           make_band(CAUSAL, INT64_C(3) << 30, INT64_C(3) << 29), false};
    attn__schedule *s = cyclic(&layout);
    attn_proof proof = ATTN_INIT(attn_proof);
    assert_int_equal(attn__schedule_prove(s, &proof), ATTN_OK);
    assert_int_equal(proof.once, proof.cells);
    assert_int_equal(proof.missing + proof.repeated, 0);
    int64_t n = INT64_C(3) << 29; /* the lower right triangle: keys n, the last n queries */
    assert_int_equal(proof.cells, n / 2 * (n + 1));
    attn__schedule_free(s);
    layout.tokens_q = layout.tokens_kv = INT64_C(1) << 40;
    layout.band = open_band;
    s = cyclic(&layout);
    assert_int_equal(attn__schedule_prove(s, &proof), ATTN_EUNSUPPORTED);
    attn__schedule_free(s);
}

static attn_status plan_and_prove(const attn__layout *layout, const attn__cover *cover)
{
    attn__schedule *s;
    attn_proof proof = ATTN_INIT(attn_proof);
    attn_status status = attn__schedule_cyclic(&s, layout, cover);
    if (status == ATTN_OK) {
        status = attn__schedule_prove(s, &proof);
    }
    attn__schedule_free(s);
    if (status == ATTN_OK) {
        status = attn__schedule_rectangular(&s, layout, 3);
        attn__schedule_free(s);
    }
    return status;
}

static void memory_fails(void **state)
{
    (void)state;
    attn__layout layout = {20, 50, 60, open_band, false};
    attn__cover cover;
    assert_int_equal(attn__cover_best(&cover, 20), ATTN_OK);
    size_t before_all = attn__memory_now();
    attn_status status = ATTN_ENOMEM;
    int64_t allowed = 0;
    for (; status != ATTN_OK; allowed++) {
        attn__memory_fail_after(allowed);
        status = plan_and_prove(&layout, &cover);
        attn__memory_fail_after(-1);
        assert_true(status == ATTN_OK || status == ATTN_ENOMEM);
        assert_int_equal(attn__memory_now(), before_all);
    }
    assert_true(allowed > 10);
    attn__cover_free(&cover);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(balance_even_groups),   cmocka_unit_test(balance_any_tokens),
        cmocka_unit_test(classic_is_unbalanced), cmocka_unit_test(refusals),
        cmocka_unit_test(million_workers),       cmocka_unit_test(proof_finds_damage),
        cmocka_unit_test(proof_of_large),        cmocka_unit_test(memory_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
