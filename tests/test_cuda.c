/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda.c - every kernel for the GPU against the fp64 reference, forward and backward, over a grid of
 * shapes.
 *
 * Lengths are those with which attention kernels are usually tested: around tile sizes, primes, one query,
 * one key, more queries than keys and the reverse.  Each meets each mask; head groups, dimensions, dtypes and
 * layouts take turns, with periods that share no factor.  Then each dimension with each dtype, and the inputs
 * that provoke: huge scores, rising scores, equal weights, NaN, rows without keys, negative scales.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

static const int64_t lengths[][2] = {
    {1, 1},       {64, 128},    {128, 192},   {256, 256}, {239, 1},   {799, 3},     {113, 203}, {113, 128},
    {128, 217},   {113, 211},   {108, 256},   {256, 512}, {384, 256}, {640, 128},   {512, 256}, {1023, 1024},
    {1024, 1023}, {4096, 4096}, {4224, 4224}, {1, 3000},  {7, 4100},  {150, 16500},
};
static const int64_t dims[][2] = {{128, 128}, {64, 64},  {256, 256}, {40, 40},  {96, 96},
                                  {72, 72},   {64, 128}, {192, 128}, {80, 112}, {8, 8}};
static const int64_t heads[][2] = {{6, 6}, {6, 2}, {4, 1}};
enum {
    LENGTHS = sizeof lengths / sizeof lengths[0],
    DIMS = sizeof dims / sizeof dims[0],
    HEADS = sizeof heads / sizeof heads[0]
};

static attn_problem problem_of(const int64_t length[2], const int64_t head[2], const int64_t dim[2],
                               attn_dtype dtype)
{
    return (attn_problem){.size = sizeof(attn_problem),
                          .batch = length[0] * length[1] < 1 << 18 ? 3 : 1,
                          .heads_q = head[0],
                          .heads_kv = head[1],
                          .tokens_q = length[0],
                          .tokens_kv = length[1],
                          .dim_qk = dim[0],
                          .dim_v = dim[1],
                          .dtype = dtype,
                          .dtype_out = dtype};
}

static void set_mask(attn_problem *p, int mask, int64_t turn)
{
    p->mask = (attn_mask)mask;
    if (p->mask == ATTN_MASK_WINDOW) {
        p->window_left = turn % 3 == 0 ? -1 : 37 * (turn % 8);
        p->window_right = turn % 3 == 1 ? -1 : 11 * (turn % 5);
    }
}

/* Opens, tries with every kernel, closes. */
static void try_case(cuda_case c)
{
    const attn_options options = ATTN_INIT(attn_options);
    const int64_t cells = c.problem.tokens_q * c.problem.tokens_kv;
    c.backward = c.kind != CUDA_RISING; /* its small weights are subnormal, and so are gradients of them */
    c.rows = cells <= 1 << 13 ? 0 : cells <= 1 << 21 ? 24 : 10;
    cuda_case_open(&c);
    cuda_case_try(&c, &options);
    cuda_case_close(&c);
}

static void test_lengths(void **state)
{
    (void)state;
    for (int i = 0; i < LENGTHS; i++) {
        for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_WINDOW; mask++) {
            const int turn = 3 * i + mask;
            const int64_t cells = lengths[i][0] * lengths[i][1];
            if (cuda.small && (cells > 1 << 15 || turn % 4 != 0)) {
                continue;
            }
            /* long ones in the dimensions that kernels are made for, which take turns by themselves */
            attn_problem p =
                problem_of(lengths[i], heads[(i + mask) % HEADS],
                           dims[cells > 1 << 20 ? turn % 3 : turn % DIMS], (attn_dtype)(turn / 2 % 3));
            set_mask(&p, mask, turn);
            if (turn % 4 == 0) {
                p.dtype_out = ATTN_F32;
            }
            try_case((cuda_case){.problem = p, .layout = turn % CUDA_LAYOUTS, .seed = (uint64_t)turn});
        }
    }
    cuda_conclude();
}

static void test_dims(void **state)
{
    (void)state;
    static const int64_t length[] = {200, 333}, odd[][2] = {{33, 5}, {1, 1}, {111, 111}, {512, 512}};
    for (int i = 0; i < DIMS; i++) {
        for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
            if (cuda.small && (i + dtype) % 5 != 0) {
                continue;
            }
            attn_problem p = problem_of(length, heads[i % HEADS], dims[i], (attn_dtype)dtype);
            set_mask(&p, (i + dtype) % 2, 0);
            try_case((cuda_case){.problem = p, .layout = (i + dtype) % CUDA_LAYOUTS, .seed = 900});
        }
    }
    for (int i = 0; i < 4 && !cuda.small; i++) { /* rows of odd bytes, which only some take */
        attn_problem p = problem_of(length, heads[0], odd[i], (attn_dtype)(i % 3));
        try_case((cuda_case){.problem = p, .seed = 950});
    }
    cuda_conclude();
}

/* All that the tensor cores' kernels take, with other dims of values, for a full tile and for a few rows. */
static void test_every_multiple_of_8(void **state)
{
    (void)state;
    static const int64_t length[] = {130, 150}, few[] = {3, 500};
    for (int64_t dim = 8; dim <= 256; dim += cuda.small ? 120 : 8) {
        const int64_t equal[] = {dim, dim}, other[] = {dim, 264 - dim};
        const attn_dtype dtype = dim / 8 % 2 == 0 ? ATTN_F16 : ATTN_BF16;
        attn_problem p = problem_of(length, heads[dim / 8 % HEADS], equal, dtype);
        set_mask(&p, ATTN_MASK_CAUSAL, 0);
        p.batch = 1;
        try_case((cuda_case){.problem = p, .layout = (int)(dim / 8 % CUDA_LAYOUTS), .seed = 910});
        p = problem_of(few, heads[dim / 8 % HEADS], other, dtype);
        p.batch = 1;
        try_case((cuda_case){.problem = p, .layout = (int)(dim / 8 % CUDA_LAYOUTS), .seed = 911});
    }
    cuda_conclude();
}

static void test_inputs_that_provoke(void **state)
{
    (void)state;
    static const int64_t length[] = {260, 300}, few[] = {4, 900};
    for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
        for (int kind = CUDA_HUGE; kind < CUDA_KINDS; kind++) {
            for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_CAUSAL; mask++) {
                const int64_t *dim = dims[(kind + dtype) % 3];
                attn_problem p = problem_of(length, heads[kind % HEADS], dim, (attn_dtype)dtype);
                attn_problem cache = problem_of(few, heads[kind % HEADS], dim, (attn_dtype)dtype);
                set_mask(&p, mask, 0);
                set_mask(&cache, mask, 0);
                try_case((cuda_case){.problem = p, .kind = (cuda_kind)kind, .seed = 77});
                try_case((cuda_case){.problem = cache, .kind = (cuda_kind)kind, .seed = 78});
            }
        }
    }
    cuda_conclude();
}

static void test_rows_without_keys_and_scales(void **state)
{
    (void)state;
    static const int64_t more[] = {500, 130}, length[] = {190, 190}, few[] = {9, 400};
    static const double scales[] = {-0.3, 1e-30, 2};
    for (int dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
        for (int i = 0; i < 3; i++) {
            attn_problem p = problem_of(more, heads[i], dims[i], (attn_dtype)dtype);
            set_mask(&p, ATTN_MASK_CAUSAL, 0); /* rows 0..369 see none */
            try_case((cuda_case){.problem = p, .layout = i, .seed = 5});
            p = problem_of(length, heads[i], dims[i], (attn_dtype)dtype);
            p.mask = ATTN_MASK_WINDOW; /* far to the left: the first rows see none, others few */
            p.window_left = 150, p.placed = 1, p.first_q = 60, p.first_kv = 100;
            try_case((cuda_case){.problem = p, .layout = i, .seed = 6});
            p = problem_of(length, heads[i], dims[i], (attn_dtype)dtype);
            p.scale = scales[i];
            try_case((cuda_case){.problem = p, .seed = 7});
            p = problem_of(few, heads[i], dims[i], (attn_dtype)dtype);
            p.scale = scales[i];
            p.mask = ATTN_MASK_WINDOW, p.window_left = 3, p.window_right = 0;
            p.placed = 1, p.first_q = 0, p.first_kv = 5; /* rows 0..4 see none */
            try_case((cuda_case){.problem = p, .seed = 8});
        }
    }
    cuda_conclude();
}

/* As caches are read: rows that fill tiles of every height, and more than one; keys that several blocks
 * share, as pairs and alone, tiles of equal length and of others. */
static void test_few_queries(void **state)
{
    (void)state;
    static const int64_t length[][2] = {{16, 4096}, {16, 8192}, {33, 5000}, {64, 4096}, {128, 2100}};
    static const int64_t head[][2] = {{8, 2}, {16, 2}, {10, 2}, {8, 1}, {3, 3}};
    for (int i = 0; i < 5 && !cuda.small; i++) {
        for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_WINDOW; mask++) {
            for (int dtype = ATTN_F16; dtype <= ATTN_BF16; dtype++) {
                attn_problem p =
                    problem_of(length[i], head[i], dims[(i + mask + dtype) % 3], (attn_dtype)dtype);
                set_mask(&p, mask, i);
                p.batch = 1;
                try_case((cuda_case){.problem = p, .layout = i % CUDA_LAYOUTS, .seed = (uint64_t)(300 + i)});
            }
        }
    }
    cuda_conclude();
}

/* Groups whose queries and sums of dQ are more than a GPU's L2 cache keeps, 69 to 78 MB of the heads that
 * take turns: gradients meet queries in another order there. */
static void test_groups_beyond_the_cache(void **state)
{
    (void)state;
    static const int64_t length[][2] = {{2100, 2100}, {1100, 1300}, {1200, 1000}};
    static const int64_t head[][2] = {{64, 2}, {64, 2}, {32, 2}},
                         dim[][2] = {{64, 64}, {128, 120}, {256, 256}};
    for (int i = 0; i < 3 && !cuda.small; i++) {
        for (int dtype = ATTN_F16; dtype <= ATTN_BF16; dtype++) {
            attn_problem p = problem_of(length[i], head[i], dim[i], (attn_dtype)dtype);
            set_mask(&p, ATTN_MASK_CAUSAL, 0);
            p.batch = 1;
            try_case((cuda_case){.problem = p, .layout = i % CUDA_LAYOUTS, .seed = (uint64_t)(400 + i)});
        }
    }
    cuda_conclude();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_dims),
        cmocka_unit_test(test_every_multiple_of_8),
        cmocka_unit_test(test_inputs_that_provoke),
        cmocka_unit_test(test_rows_without_keys_and_scales),
        cmocka_unit_test(test_few_queries),
        cmocka_unit_test(test_groups_beyond_the_cache),
    };
    return cuda_main(argc, argv, "cuda", tests, sizeof tests / sizeof tests[0]);
}
