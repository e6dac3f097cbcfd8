/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quorum_cost.c - traffic of one worker against a count by hand, and the cost table against published
 * volumes.
 *
 * Volumes are in the unit U = the queries of one group: with q, o and dO of g bytes a row, k and v of one
 * byte each and no statistics, K and V of a group are 2/g U, as for grouped-query attention with g query
 * heads a key head.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "quorum_case.h"

enum { ROWS = 4 }; /* tokens of a group, where a unit is wanted */

static const attn__band causal_band = {-ATTN__BAND_OPEN, 0};

/* ---- one worker, counted again ---- */

/* The traffic from its definition, with a flag for each group. */
static attn__traffic traffic_by_hand(const attn__schedule *s, int64_t rank, const attn_pair *pairs,
                                     int64_t count, const attn__bytes *bytes)
{
    const attn__layout *layout = attn__schedule_layout(s);
    attn__traffic t = {0};
    for (int64_t group = 0; group < layout->workers; group++) {
        bool used_q = false, used_kv = false;
        for (int64_t i = 0; i < count; i++) {
            used_q |= pairs[i].q == group;
            used_kv |= pairs[i].kv == group;
        }
        int64_t nq = attn__group_count(layout->tokens_q, layout->workers, group);
        int64_t nk = attn__group_count(layout->tokens_kv, layout->workers, group);
        if (group != rank) {
            int64_t inputs = used_q * nq * bytes->q + used_kv * nk * (bytes->k + bytes->v);
            t.bytes_in += inputs;
            t.bytes_out += used_q * nq * bytes->o;
            t.backward_in += inputs + used_q * nq * (bytes->out + 2 * bytes->stat);
            t.backward_out += inputs;
            t.messages += (used_q || used_kv) + used_q;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        attn__block_rows r = attn__schedule_rows(s, pairs[i]);
        t.cells += attn__band_cells(layout->band, r.q_first, r.q_count, r.kv_first, r.kv_count);
    }
    return t;
}

static void traffic_random(void **state)
{
    (void)state;
    for (int round = 0; round < 400; round++) {
        attn__layout layout = {.workers = pick(1, 90), .tokens_q = pick(1, 400), .band = open_band};
        layout.tokens_kv = pick(0, 1) ? layout.tokens_q : pick(1, 400);
        layout.classic = pick(0, 3) == 0;
        if (pick(0, 1)) {
            layout.band.hi = layout.tokens_kv - layout.tokens_q;
        }
        if (pick(0, 2) == 0) {
            layout.band.lo = layout.tokens_kv - layout.tokens_q - pick(0, 100);
        }
        attn__bytes bytes = {pick(1, 99), pick(1, 99), pick(1, 99), pick(1, 99), pick(1, 99), pick(1, 99)};
        attn__cover cover;
        attn__schedule *s;
        assert_int_equal(attn__cover_best(&cover, layout.workers), ATTN_OK);
        if (round % 2) {
            assert_int_equal(attn__schedule_cyclic(&s, &layout, &cover), ATTN_OK);
        } else {
            assert_int_equal(attn__schedule_rectangular(&s, &layout, pick(1, layout.workers)), ATTN_OK);
        }
        attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
        for (int64_t rank = 0; rank < layout.workers; rank++) {
            attn__traffic got;
            int64_t count = attn__schedule_pairs(s, rank, pairs);
            attn__traffic want = traffic_by_hand(s, rank, pairs, count, &bytes);
            assert_int_equal(attn__schedule_traffic(s, rank, pairs, count, &bytes, &got), ATTN_OK);
            assert_memory_equal(&got, &want, sizeof got);
        }
        attn__free(pairs);
        attn__schedule_free(s);
        attn__cover_free(&cover);
    }
}

static void traffic_overflows(void **state)
{
    (void)state;
    attn__layout layout = {2, INT64_C(1) << 50, INT64_C(1) << 50, open_band, false};
    attn__bytes bytes = {1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 8};
    attn_pair pairs[4];
    attn__traffic traffic;
    attn__schedule *s;
    assert_int_equal(attn__schedule_rectangular(&s, &layout, 1), ATTN_OK);
    int64_t count = attn__schedule_pairs(s, 0, pairs);
    assert_int_equal(attn__schedule_traffic(s, 0, pairs, count, &bytes, &traffic), ATTN_EINVAL);
    attn__schedule_free(s);
}

/* ---- the table, in units ---- */

static attn__bytes bytes_of(int64_t g)
{
    return (attn__bytes){.q = g, .k = 1, .v = 1, .o = g, .out = g, .stat = 0};
}

/* The table for `workers` with g query heads a key head; fit: the set that suits a causal mask. */
static void costs(int64_t workers, int64_t g, attn__band band, bool fit, attn_cost rows[4])
{
    attn__cover cover;
    attn__layout layout = {workers, ROWS * workers, ROWS * workers, band, false};
    attn__bytes bytes = bytes_of(g);
    assert_int_equal(attn__cover_best(&cover, workers), ATTN_OK);
    if (fit) {
        assert_int_equal(attn__cover_fit_causal(&cover, ROWS * workers, 2 * g, 2), ATTN_OK);
    }
    assert_int_equal(attn__cost_table(&layout, &cover, 64 * g, 64, &bytes, rows), ATTN_OK);
    attn__cover_free(&cover);
}

static void assert_units(double got, double want, int64_t g)
{
    assert_true(fabs(got / (double)(ROWS * g) - want) < 0.0051 * want + 1e-9);
}

/* {W, ring, a, b, rectangular, cyclic} without a mask; -1: not compared (an even W shares its half difference
 * by direction, which spares more groups than published). */
static const double full_one[][6] = {
    {3, 4, 1, 3, 4, 4},         {7, 12, 2, 4, 8, 8},           {13, 24, 3, 5, 12, 12},
    {21, 40, 3, 7, 16, 16},     {31, 60, 4, 8, 20, 20},        {57, 112, 6, 10, 28, 28},
    {64, 126, 8, 8, 28, -1},    {111, 220, 8, 14, 40, 44},     {133, 264, 9, 15, 44, 44},
    {256, 510, 16, 16, 60, -1}, {1057, 2112, 28, 38, 128, 128}};
static const double full_eight[][6] = {
    {3, .5, 1, 3, .5, 2.25},       {7, 1.5, 1, 7, 1.5, 4.5},         {13, 3, 1, 13, 3, 6.75},
    {21, 5, 2, 11, 4.5, 9},        {31, 7.5, 2, 16, 5.75, 11.25},    {57, 14, 3, 19, 8.5, 15.75},
    {64, 15.75, 3, 22, 9.25, -1},  {111, 27.5, 4, 28, 12.75, 24.75}, {133, 33, 4, 34, 14.25, 24.75},
    {256, 63.75, 6, 43, 20.5, -1}, {1057, 264, 11, 97, 44, 72}};

static void check_full(const double want[6], int64_t g)
{
    attn_cost rows[4];
    costs((int64_t)want[0], g, open_band, false, rows);
    assert_string_equal(rows[0].scheme, "cyclic");
    assert_string_equal(rows[1].scheme, "rectangular");
    assert_string_equal(rows[2].scheme, "ring");
    assert_string_equal(rows[3].scheme, "ulysses");
    assert_units(rows[2].in_mean + rows[2].out_mean, want[1], g);
    assert_int_equal(rows[1].a, (int64_t)want[2]);
    assert_int_equal(rows[1].b, (int64_t)want[3]);
    assert_units(rows[1].in_mean + rows[1].out_mean, want[4], g);
    if (want[5] >= 0) {
        assert_units(rows[0].in_mean + rows[0].out_mean, want[5], g);
        assert_units(rows[0].in_max + rows[0].out_max, want[5], g);
        /* backward (k - 1)(3 + 4/g) */
        assert_units(rows[0].backward_in_mean + rows[0].backward_out_mean,
                     (double)(rows[0].a - 1) * (3 + 4 / (double)g), g);
    }
    assert_true(rows[0].in_mean + rows[0].out_mean <= (double)(ROWS * (rows[0].a - 1) * (2 * g + 2)));
    assert_true(fabs(rows[0].balance - 1) < 1e-12);
    assert_true(fabs(rows[1].balance - 1) < 1e-12);
    assert_true(fabs(rows[2].balance - 1) < 1e-12);
}

static void published_full(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof full_one / sizeof full_one[0]; i++) {
        check_full(full_one[i], 1);
        check_full(full_eight[i], 8);
    }
}

/* {W, mean for g = 1, mean for g = 8}: causal masks, where every pair of a Singer set is used. */
static void published_causal(void **state)
{
    static const double want[][3] = {{3, 2, .8333},     {7, 4.857, 2.6071}, {13, 8.46, 4.7},
                                     {21, 12.4, 6.9},   {31, 16.2, 9.1},    {57, 24.2, 13.6},
                                     {133, 40.7, 22.9}, {1057, 124, 69.8}};
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        for (int64_t g = 1; g <= 8; g += 7) {
            attn_cost rows[4];
            costs((int64_t)want[i][0], g, causal_band, true, rows);
            double published = want[i][g == 1 ? 1 : 2] * (double)(ROWS * g);
            assert_true(rows[0].in_mean + rows[0].out_mean <= published * 1.006);
            assert_true(rows[0].in_mean + rows[0].out_mean >= published * 0.98);
            assert_true(fabs(rows[0].balance - 1) < 1e-12); /* odd W */
        }
    }
}

/* The causal fit against all multiples and translates of the set, counted in bytes: nothing is better. */
static void causal_fit_is_least(void **state)
{
    (void)state;
    for (int64_t workers = 2; workers <= 26; workers++) {
        int64_t g = pick(1, 8);
        attn_cost rows[4];
        attn__cover table, other;
        attn__layout layout = {workers, ROWS * workers, ROWS * workers, causal_band, false};
        attn__bytes bytes = bytes_of(g);
        costs(workers, g, causal_band, true, rows);
        double fitted = rows[0].in_mean + rows[0].out_mean;
        assert_int_equal(attn__cover_table(&table, workers), ATTN_OK);
        for (int64_t i = 0; i < workers * table.size; i++) {
            int64_t moved[16];
            for (int64_t j = 0; j < table.size; j++) {
                moved[j] = (table.set[j] - table.set[i % table.size]) * (i / table.size);
            }
            if (attn__cover_missing(workers, moved, table.size, NULL, 0) == 0) {
                /* sorted, with 0 first, as user's sets are; 0 is the least residue already */
                assert_int_equal(attn__cover_user(&other, workers, moved, table.size), ATTN_OK);
                assert_int_equal(attn__cost_table(&layout, &other, g, 1, &bytes, rows), ATTN_OK);
                assert_true(fitted <= (rows[0].in_mean + rows[0].out_mean) * (1 + 1e-12));
                attn__cover_free(&other);
            }
        }
        attn__cover_free(&table);
    }
}

static void ring_and_ulysses(void **state)
{
    (void)state;
    attn_cost rows[4];
    costs(64, 1, open_band, false, rows);
    assert_int_equal(rows[3].possible, 1);
    assert_units(rows[3].in_mean + rows[3].out_mean, 4 * 63.0 / 64, 1);
    assert_units(rows[3].backward_in_mean + rows[3].backward_out_mean, 4 * 63.0 / 64, 1);
    assert_units(rows[2].backward_in_mean + rows[2].backward_out_mean, 254, 1);
    assert_int_equal(rows[2].messages, 63);
    assert_int_equal(rows[3].messages, 126);
    costs(64, 1, causal_band, false, rows);
    assert_true(rows[2].balance > 1.9); /* the last worker of a contiguous ring does nearly twice the mean */
    costs(31, 1, open_band, false, rows);
    assert_int_equal(rows[3].possible, 0); /* 31 does not divide 64 */
    assert_non_null(rows[3].why);
    costs(1, 1, open_band, false, rows);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(rows[i].possible, 1);
        assert_true(
            rows[i].in_mean + rows[i].out_mean + rows[i].backward_in_mean + rows[i].backward_out_mean == 0);
        assert_int_equal(rows[i].messages, 0);
    }
}

/* A central root: k times all inputs out, k times all partials back (W = 7, k = 3). */
static void central_root(void **state)
{
    (void)state;
    attn_cost rows[4];
    costs(7, 2, open_band, false, rows);
    double queries = ROWS * 7 * 2;
    assert_true(rows[0].root_out == 3 * 2 * queries);
    assert_true(rows[0].root_in == 3 * queries);
    assert_true(rows[0].memory == 3 * ROWS * (2 + 2 + 2));
    assert_true(rows[2].root_out == 2 * queries);
    assert_true(rows[2].root_in == queries);
}

/* Above ATTN__COUNTED workers the formulas stand in; on a full mask with equal groups they agree with the
 * count. */
static void formulas_meet_counts(void **state)
{
    (void)state;
    attn_cost counted[4];
    attn_cost estimated[4];
    costs(1723, 1, open_band, false, counted);   /* 41^2 + 41 + 1 */
    costs(2257, 1, open_band, false, estimated); /* 47^2 + 47 + 1 */
    assert_true(counted[0].in_mean == 41 * ROWS * 3);
    assert_true(estimated[0].in_mean == 47 * ROWS * 3);
    assert_true(counted[0].out_max == 41 * ROWS);
    assert_true(estimated[0].out_max == 47 * ROWS);
    assert_int_equal(counted[0].messages, 2 * 41);
    assert_int_equal(estimated[0].messages, 2 * 47);
    for (int i = 0; i < 2; i++) {
        const attn_cost *c = i == 0 ? &counted[1] : &estimated[1];
        assert_true(c->in_mean == (double)(ROWS * (c->a - 1 + 2 * (c->b - 1))));
        int64_t apart = 2 * (c->a - 1) + c->b - 1; /* a key group may come with a query group of its number */
        assert_true(c->messages <= apart && (i == 1 ? c->messages == apart : c->messages >= apart - c->a));
        assert_true(c->memory == (double)(ROWS * 2 * (c->a + c->b)));
    }
}

/* No a moves fewer bytes than the chosen one, and no smaller one as few. */
static void best_rectangle(void **state)
{
    (void)state;
    for (int round = 0; round < 400; round++) {
        attn__layout layout = {pick(1, 3000), pick(1, 9999), pick(1, 9999), open_band, false};
        attn__bytes bytes = {pick(1, 64), pick(1, 64), pick(1, 64), pick(1, 64), 1, 1};
        int64_t best = 1;
        int64_t least = INT64_MAX;
        for (int64_t a = 1; a <= layout.workers; a++) {
            int64_t volume = (a - 1) * layout.tokens_q * (bytes.q + bytes.o) +
                             (attn__ceil_div(layout.workers, a) - 1) * layout.tokens_kv * (bytes.k + bytes.v);
            if (volume < least) {
                least = volume;
                best = a;
            }
        }
        assert_int_equal(attn__rectangle_best(&layout, &bytes), best);
    }
}

static void refusals(void **state)
{
    (void)state;
    attn_cost rows[4];
    attn__cover cover;
    attn__bytes bytes = bytes_of(1);
    attn__layout layout = {7, 10, 10, open_band, false};
    assert_int_equal(attn__cover_best(&cover, 7), ATTN_OK);
    assert_int_equal(attn__cost_table(&layout, &cover, 8, 3, &bytes, rows), ATTN_EINVAL);
    assert_int_equal(attn__cost_table(&layout, &cover, 0, 1, &bytes, rows), ATTN_EINVAL);
    size_t before = attn__memory_now();
    attn_status status = ATTN_ENOMEM;
    for (int64_t allowed = 0; status != ATTN_OK; allowed++) {
        attn__memory_fail_after(allowed);
        status = attn__cost_table(&layout, &cover, 8, 2, &bytes, rows);
        attn__memory_fail_after(-1);
        assert_true(status == ATTN_OK || status == ATTN_ENOMEM);
        assert_int_equal(attn__memory_now(), before);
    }
    attn__cover_free(&cover);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(traffic_random),       cmocka_unit_test(traffic_overflows),
        cmocka_unit_test(published_full),       cmocka_unit_test(published_causal),
        cmocka_unit_test(causal_fit_is_least),  cmocka_unit_test(ring_and_ulysses),
        cmocka_unit_test(central_root),         cmocka_unit_test(best_rectangle),
        cmocka_unit_test(formulas_meet_counts), cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
