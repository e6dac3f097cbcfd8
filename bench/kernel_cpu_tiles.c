/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu_tiles.c - what AMX's tile instructions cost, alone on a core and beside a busy hyperthread,
 * with and without other instructions between them.
 *
 *     kernel_cpu_tiles [ROUNDS]      400 unless told; pin it: taskset -c 4 kernel_cpu_tiles
 *     kernel_cpu_tiles --free        exit status 0 if the processor's other hyperthread sleeps, else 4
 *
 * METHOD.  Each loop is a few instructions 1000 times over, after 100 times unmeasured.  A round is all loops
 * in turn.  `both` - 12 products and 8 loads, about what fp32 has in the kernels - takes one of two times: a
 * round is slow if it takes 1.6 times its least there, and it counts if the next round's is of the same kind.
 * Printed are medians of each kind in ns.  What the core's other hyperthread does is not known here; that
 * `nop`s take longer says that it is awake.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "kernel_cpu_tiles.h"

LOOP(products, PRODUCTS(""))
LOOP(products_5, PRODUCTS(NOPS(5)))
LOOP(products_10, PRODUCTS(NOPS(10)))
LOOP(products_20, PRODUCTS(NOPS(20)))
LOOP(loads, LOADS(""))
LOOP(loads_5, LOADS(NOPS(5)))
LOOP(loads_10, LOADS(NOPS(10)))
LOOP(both_4, BOTH(NOPS(4), NOPS(4)))
LOOP(both_12, BOTH(NOPS(12), NOPS(12)))
LOOP(both_24, BOTH(NOPS(24), NOPS(24)))
LOOP(both_fma, BOTH(FMAS_12, FMAS_12))
LOOP(both_then_fma, BOTH("", "") FMAS_240)
LOOP(depth, DEPTH("", ""))
LOOP(depth_10_5, DEPTH(NOPS(10), NOPS(5)))
LOOP(fmas, FMAS_240)
LOOP(nops, NOPS(480))

static const struct {
    const char *name;
    void (*run)(int64_t times, const char *tiles);
} loops[] = {
    {"both: 12 products, 8 loads", both},
    {"  4 nop after each", both_4},
    {"  10 after a product, 5 after a load", both_10_5},
    {"  12 nop after each", both_12},
    {"  24 nop after each", both_24},
    {"  12 FMAs after each", both_fma},
    {"  240 FMAs after all", both_then_fma},
    {"12 products", products},
    {"  5 nop after each", products_5},
    {"  10 nop after each", products_10},
    {"  20 nop after each", products_20},
    {"8 tile loads from L1", loads},
    {"  5 nop after each", loads_5},
    {"  10 nop after each", loads_10},
    {"fp32, 32 deep: 24 products, 14 loads", depth},
    {"  10 after a product, 5 after a load", depth_10_5},
    {"240 FMAs of 64 bytes", fmas},
    {"480 nop", nops},
};
enum { LOOPS = sizeof loops / sizeof loops[0], TIMES = 1000 };

typedef double round_times[LOOPS]; /* ns */

static void measure(round_times *times, int64_t rounds, const char *tiles)
{
    for (int64_t r = 0; r < rounds; r++) {
        for (int i = 0; i < LOOPS; i++) {
            loops[i].run(TIMES / 10, tiles);
            const double begin = attn__now();
            loops[i].run(TIMES, tiles);
            times[r][i] = (attn__now() - begin) / TIMES * 1e9;
        }
    }
}

static int compare(const void *x, const void *y)
{
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* Prints the median of a loop over the rounds that are slow, or not; "-" if there are none. */
static void print_median(const round_times *times, int64_t rounds, double limit, int loop, bool slow,
                         double *list)
{
    size_t count = 0;
    for (int64_t r = 0; r + 1 < rounds; r++) {
        if ((times[r][0] > limit) == slow && (times[r + 1][0] > limit) == slow) {
            list[count++] = times[r][loop];
        }
    }
    qsort(list, count, sizeof *list, compare);
    if (count == 0) {
        printf("%10s", "-");
    } else {
        printf("%10.1f", list[count / 2]);
    }
}

static void print_rounds(const round_times *times, int64_t rounds, double *list)
{
    double least = times[0][0];
    int64_t slow = 0;
    for (int64_t r = 0; r < rounds; r++) {
        least = times[r][0] < least ? times[r][0] : least;
    }
    for (int64_t r = 0; r < rounds; r++) {
        slow += times[r][0] > 1.6 * least;
    }
    printf("%-40s%10s%10s   (ns; %lld of %lld rounds are slow)\n", "loop", "fast", "slow", (long long)slow,
           (long long)rounds);
    for (int i = 0; i < LOOPS; i++) {
        printf("%-40s", loops[i].name);
        print_median(times, rounds, 1.6 * least, i, false, list);
        print_median(times, rounds, 1.6 * least, i, true, list);
        printf("\n");
    }
}

int main(int count, char **words)
{
    const bool ask = count > 1 && strcmp(words[1], "--free") == 0;
    const int64_t rounds = count > 1 && !ask ? strtoll(words[1], NULL, 10) : 400;
    if (rounds < 2) {
        fprintf(stderr, "kernel_cpu_tiles: at least 2 rounds\n");
        return 2;
    }
    if ((attn__cpu() & ATTN__CPU_AMX) == 0) {
        fprintf(stderr, "kernel_cpu_tiles: this CPU or system has no AMX, or ATTN_ISA hides it\n");
        return 3;
    }
    if (ask) {
        return core_is_free() ? 0 : 4;
    }
    round_times *times = calloc((size_t)rounds, sizeof *times);
    double *list = calloc((size_t)rounds, sizeof *list);
    uint16_t *tiles = aligned_alloc(64, TILES * 1024); /* a row of a tile is a line */
    if (times == NULL || list == NULL || tiles == NULL) {
        fprintf(stderr, "kernel_cpu_tiles: no memory for %lld rounds\n", (long long)rounds);
        return 1;
    }
    fill_tiles(tiles);
    set_tiles();
    measure(times, rounds, (const char *)tiles);
    print_rounds((const round_times *)times, rounds, list);
    free(tiles);
    free(list);
    free(times);
    return 0;
}

#else

int main(void)
{
    fprintf(stderr, "kernel_cpu_tiles: AMX is of x86-64\n");
    return 3;
}

#endif
