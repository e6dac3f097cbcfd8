/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu_tiles.h - loops of AMX's tile instructions in assembler, for kernel_cpu_tiles.c and
 * kernel_cpu_versions.c; x86-64 only.
 */
#ifndef ATTN_BENCH_KERNEL_CPU_TILES_H
#define ATTN_BENCH_KERNEL_CPU_TILES_H

#include <math.h>
#include <stdint.h>

#include "base/base.h"

/* Words of the assembler: %1 tiles of 1 KiB in memory, %2 the 64 bytes from row to row. */
#define AGAIN(count, word)  "\t.rept " #count "\n\t" word "\n\t.endr\n"
#define NOPS(count)         AGAIN(count, "nop")
#define FMA(sum)            "\tvfmadd231ps %%zmm15, %%zmm14, %%zmm" #sum "\n"
#define FMAS_12             FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9) FMA(10) FMA(11)
#define FMAS_48             FMAS_12 FMAS_12 FMAS_12 FMAS_12
#define FMAS_240            FMAS_48 FMAS_48 FMAS_48 FMAS_48 FMAS_48
#define PRODUCT(c, a, b)    "\ttdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c "\n"
#define LOAD(tile, offset)  "\ttileloadd " #offset "(%1,%2,1), %%tmm" #tile "\n"
#define FOUR(gap)           PRODUCT(0, 4, 6) gap PRODUCT(1, 4, 7) gap PRODUCT(2, 5, 6) gap PRODUCT(3, 5, 7) gap
#define PRODUCTS(gap)       FOUR(gap) FOUR(gap) FOUR(gap)
#define PAIR(t, u, at, gap) LOAD(t, at) gap LOAD(u, at + 1024) gap
#define LOADS(gap)          PAIR(4, 5, 0, gap) PAIR(6, 7, 2048, gap) PAIR(4, 5, 4096, gap) PAIR(6, 7, 6144, gap)
#define BOTH(gap, after_load)                                                                                \
    PAIR(4, 5, 0, after_load)                                                                                \
    PAIR(6, 7, 2048, after_load)                                                                             \
    FOUR(gap) PAIR(6, 7, 4096, after_load) FOUR(gap) PAIR(4, 5, 6144, after_load) FOUR(gap)

/* What fp32 has for 32 dims: six pairs of parts, each with an operand of the pair before (dot_amx.h). */
#define NEW_A(gap, after_load)                                                                               \
    LOAD(4, 0)                                                                                               \
    after_load PRODUCT(0, 4, 6) gap PRODUCT(1, 4, 7) gap LOAD(5, 1024) after_load PRODUCT(2, 5, 6)           \
        gap PRODUCT(3, 5, 7) gap
#define NEW_B(gap, after_load) PAIR(6, 7, 2048, after_load) FOUR(gap)
#define DEPTH(gap, after_load)                                                                               \
    PAIR(6, 7, 4096, after_load)                                                                             \
    NEW_A(gap, after_load)                                                                                   \
    NEW_A(gap, after_load)                                                                                   \
    NEW_B(gap, after_load) NEW_A(gap, after_load) NEW_B(gap, after_load) NEW_B(gap, after_load)

#define LOOP(name, words)                                                                                    \
    static void name(int64_t times, const char *tiles)                                                       \
    {                                                                                                        \
        __asm__ volatile("vzeroall\n1:\n" words "\tdec %0\n\tjnz 1b"                                         \
                         : "+r"(times)                                                                       \
                         : "r"(tiles), "r"((int64_t)64)                                                      \
                         : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",   \
                           "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15");                              \
    }

/* 12 products and 8 loads, about what fp32 has in the kernels; the same with what the kernels put between. */
LOOP(both, BOTH("", ""))
LOOP(both_10_5, BOTH(NOPS(10), NOPS(5)))

enum { TILES = 16 };

static void set_tiles(void)
{
    static const uint8_t config[64] = {
        [0] = 1,   [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64, [28] = 64, [30] = 64,
        [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

/* Numbers from 1 to 2 of both signs in TILES tiles of 1 KiB: zeros would cost less. */
static void fill_tiles(uint16_t *tiles)
{
    for (int i = 0; i < TILES * 512; i++) {
        tiles[i] = (uint16_t)(0x3f80 | (i * 37 & 0x7f) | (i * 7 & 1) << 15);
    }
}

/* Seconds of 50 rounds of a loop, the least of three times. */
static double loop_time(void (*loop)(int64_t times, const char *tiles), const char *tiles)
{
    double least = INFINITY;
    for (int i = 0; i < 3; i++) {
        const double begin = attn__now();
        loop(50, tiles);
        least = fmin(least, attn__now() - begin);
    }
    return least;
}

/* Whether this processor's other hyperthread sleeps: tile instructions take as long without `nop`s between
 * them. Needs AMX; clobbers the tiles. */
static bool core_is_free(void)
{
    static _Alignas(64) uint16_t tiles[TILES * 512];
    if (tiles[0] == 0) {
        fill_tiles(tiles);
    }
    set_tiles();
    both(1000, (const char *)tiles); /* the unit may have to wake up */
    const bool alone =
        loop_time(both, (const char *)tiles) < 1.25 * loop_time(both_10_5, (const char *)tiles);
    __asm__ volatile("tilerelease");
    return alone;
}

#endif
