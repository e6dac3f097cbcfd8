/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_grid.c - the cases of `attn check`.
 *
 * Lengths are those with which attention kernels are usually tested: around tile sizes, primes, one query,
 * more queries than keys and the reverse.  Each meets each mask; head groups, dimensions, dtypes and layouts
 * take turns, with periods that share no factor, so that every value of one meets every value of the others.
 * Then each dimension with each dtype, and the cases that provoke.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"

typedef struct grid {
    check_case *list;
    int count, room;
    uint64_t seed;
    cli_place place;
    bool quick;
} grid;

/* Layouts take turns: on a GPU dims are dense, and most kernels want rows at multiples of 16 bytes. */
static check_layout layout_of(const grid *g, int64_t turn)
{
    static const check_layout cpu[] = {CHECK_BHND, CHECK_BNHD, CHECK_PADDED, CHECK_TRANSPOSED,
                                       CHECK_REVERSED};
    static const check_layout cuda[] = {CHECK_BHND, CHECK_BNHD, CHECK_ALIGNED, CHECK_ALIGNED, CHECK_PADDED};
    return (g->place.device == ATTN_CUDA ? cuda : cpu)[turn % 5];
}

static const int64_t lengths[][2] = {
    {1, 1},     {64, 128},  {128, 192}, {256, 256}, {239, 1},   {799, 3},     {113, 203},
    {113, 128}, {128, 217}, {113, 211}, {108, 256}, {256, 512}, {384, 256},   {640, 128},
    {512, 256}, {7, 13},    {1, 1000},  {5, 2048},  {300, 299}, {1023, 1024}, {1024, 1023},
};
static const int64_t dims[][2] = {
    {64, 64}, {128, 128}, {1, 1},   {80, 80},   {32, 32},  {96, 96}, {7, 7},     {256, 256}, {16, 16},
    {40, 40}, {192, 128}, {72, 72}, {111, 111}, {64, 128}, {33, 5},  {512, 512}, {3, 65},
};
static const int64_t heads[][2] = {{4, 4}, {4, 2}, {6, 1}};
enum {
    LENGTHS = sizeof lengths / sizeof lengths[0],
    DIMS = sizeof dims / sizeof dims[0],
    HEADS = sizeof heads / sizeof heads[0]
};

static void add(grid *g, attn_problem problem, check_layout layout, check_kind kind, int64_t workers)
{
    const int64_t many = 9000; /* cells of a head that are all compared */
    if (attn_problem_check(&problem) != ATTN_OK) {
        return;
    }
    if (g->count == g->room) {
        int room = g->room > 0 ? 2 * g->room : 64;
        check_case *list = cli_alloc(room, sizeof *list);
        if (g->count > 0) {
            memcpy(list, g->list, (size_t)g->count * sizeof *list);
        }
        free(g->list);
        g->list = list;
        g->room = room;
    }
    int64_t group = problem.heads_q / problem.heads_kv, cells = problem.tokens_q * problem.tokens_kv;
    g->list[g->count] = (check_case){
        .problem = problem,
        .layout = layout,
        .kind = kind,
        .workers = g->place.device == ATTN_CUDA ? 1 : workers,
        .place = g->place,
        .rows = cells <= many ? 0 : 24,
        .anew = cells * group * (problem.dim_qk + problem.dim_v) <= 256 * many,
        .seed = g->seed + (uint64_t)g->count,
    };
    g->count++;
}

static attn_problem problem_of(int64_t queries, int64_t keys, const int64_t head[2], const int64_t dim[2],
                               attn_dtype dtype)
{
    return (attn_problem){.size = sizeof(attn_problem),
                          .batch = queries * keys < 1 << 17 ? 2 : 1,
                          .heads_q = head[0],
                          .heads_kv = head[1],
                          .tokens_q = queries,
                          .tokens_kv = keys,
                          .dim_qk = dim[0],
                          .dim_v = dim[1],
                          .dtype = dtype,
                          .dtype_out = dtype};
}

static void set_mask(attn_problem *p, int mask, int64_t turn)
{
    p->mask = (attn_mask)mask;
    if (p->mask == ATTN_MASK_WINDOW) {
        p->window_left = turn % 3 == 0 ? -1 : turn % 40;
        p->window_right = turn % 3 == 1 ? -1 : turn % 7;
    }
}

static void add_lengths(grid *g)
{
    for (int i = 0; i < LENGTHS; i++) {
        for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_WINDOW; mask++) {
            int64_t turn = 3 * i + mask, queries = lengths[i][0], keys = lengths[i][1];
            bool large = queries * keys > 1 << 17;
            if (g->quick && (queries * keys > 1 << 14 || (i + mask) % 3 != 0)) {
                continue;
            }
            attn_problem p = problem_of(queries, keys, heads[(i + mask) % HEADS],
                                        dims[turn % (large ? 2 : DIMS)], (attn_dtype)((turn / 2) % 3));
            set_mask(&p, mask, turn);
            p.dtype_out = turn % 4 == 0 ? ATTN_F32 : p.dtype;
            add(g, p, layout_of(g, turn), CHECK_PLAIN, 1);
        }
    }
}

static void add_dims(grid *g)
{
    for (int i = 0; i < DIMS; i++) {
        for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
            if (g->quick && (i + dtype) % 3 != 0) {
                continue;
            }
            attn_problem p = problem_of(67, 131, heads[i % HEADS], dims[i], (attn_dtype)dtype);
            set_mask(&p, (i + dtype) % 2, 0);
            add(g, p, layout_of(g, i + dtype), CHECK_PLAIN, 1);
        }
    }
}

/* What provokes, and work that is cut for workers. */
static void add_special(grid *g)
{
    for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
        for (int kind = CHECK_HUGE; kind < CHECK_KINDS; kind++) {
            for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_CAUSAL; mask++) {
                attn_problem p = problem_of(130, 150, heads[kind % HEADS], dims[0], (attn_dtype)dtype);
                set_mask(&p, mask, 0);
                add(g, p, layout_of(g, kind), (check_kind)kind, 1);
            }
        }
        attn_problem keyless =
            problem_of(200, 64, heads[1], dims[0], (attn_dtype)dtype); /* rows 0..135 see none */
        set_mask(&keyless, ATTN_MASK_CAUSAL, 0);
        add(g, keyless, CHECK_BNHD, CHECK_PLAIN, 1);
        attn_problem cut = problem_of(211, 211, heads[1], dims[1], (attn_dtype)dtype);
        set_mask(&cut, dtype % 2, 0);
        add(g, cut, CHECK_BHND, CHECK_PLAIN, 4 + dtype);
    }
    if (!g->quick) {
        attn_problem cache = problem_of(1, 16384, heads[2], dims[1], ATTN_BF16), large = cache;
        add(g, cache, CHECK_BNHD, CHECK_PLAIN, 1);
        large.tokens_q = large.tokens_kv = 2048;
        large.heads_q = large.heads_kv = 1;
        large.dtype = large.dtype_out = ATTN_F32;
        set_mask(&large, ATTN_MASK_CAUSAL, 0);
        add(g, large, CHECK_BHND, CHECK_PLAIN, 1);
    }
}

check_case *check_grid(bool quick, uint64_t seed, cli_place place, int *count)
{
    grid g = {.seed = seed, .place = place, .quick = quick};
    add_lengths(&g);
    add_dims(&g);
    add_special(&g);
    *count = g.count;
    return g.list;
}

const char *check_case_text(const check_case *c, char text[CHECK_TEXT])
{
    static const char *const layouts[] = {"bhnd", "bnhd", "padded", "aligned", "transposed", "reversed"};
    static const char *const kinds[] = {"", ", huge logit", ", all equal", ", nan"};
    char workers[40] = "";
    if (c->workers > 1) {
        snprintf(workers, sizeof workers, ", %lld workers", (long long)c->workers);
    }
    snprintf(text, CHECK_TEXT, "%s%s%s", layouts[c->layout], kinds[c->kind], workers);
    return text;
}
