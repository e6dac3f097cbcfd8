/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - what every module stands on: errors with text, tracked memory that can be made to fail,
 * dtypes, CPU features, a hash, a clock.  It has never heard of attention.
 */
#ifndef ATTN_BASE_H
#define ATTN_BASE_H

#include <stdbool.h>

#include "attn/attn.h"

/* What a function gives is taken back by attn__free: gcc's analyser follows it (script/check-analyser). */
#if defined(__GNUC__) && !defined(__clang__)
#define ATTN__OWNED __attribute__((malloc(attn__free, 1)))
#else
#define ATTN__OWNED
#endif

#if defined(__GNUC__)
#define ATTN__PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define ATTN__PRINTF(text, args)
#endif

/* ---- errors (status.c) ---- */

/* Sets this thread's error text and returns status: `return attn__fail(ATTN_EINVAL, "...", x);` */
attn_status attn__fail(attn_status status, const char *format, ...) ATTN__PRINTF(2, 3);

/* Hands a failure of `call` on to the caller. */
#define ATTN__TRY(call)                                                                                      \
    do {                                                                                                     \
        attn_status attn__status_ = (call);                                                                  \
        if (attn__status_ != ATTN_OK) {                                                                      \
            return attn__status_;                                                                            \
        }                                                                                                    \
    } while (0)

/* ---- memory (memory.c) ---- */

/* All of the library's heap memory.  attn__alloc gives 64-byte aligned memory, never of size 0; NULL
 * with the error text set when there is none.  attn__free(NULL) is fine. */
void attn__free(void *memory);
ATTN__OWNED void *attn__alloc(size_t bytes);
ATTN__OWNED void *attn__alloc_zero(size_t bytes);
/* count * size with the overflow check */
ATTN__OWNED void *attn__alloc_array(int64_t count, size_t size);
ATTN__OWNED char *attn__strdup(const char *text);
/* The same for what lives as long as one call: of 1 MiB or more, one of up to 256 MiB is kept for the next,
 * and counts as freed. */
void *attn__alloc_workspace(size_t bytes);
void attn__free_workspace(void *memory);

/* Bytes that attn__alloc has given and not got back, and the most there ever were. */
size_t attn__memory_now(void);
size_t attn__memory_peak(void);
/* Tests: let `count` more allocations succeed, then fail one; -1: never fail. */
void attn__memory_fail_after(int64_t count);

/* false on overflow; operands not negative */
bool attn__mul(int64_t a, int64_t b, int64_t *product);
bool attn__add(int64_t a, int64_t b, int64_t *sum);

static inline int64_t attn__min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t attn__max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline int64_t attn__ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
/* a mod n in [0, n), for n > 0 */
static inline int64_t attn__mod(int64_t a, int64_t n)
{
    return (a % n + n) % n;
}

/* ---- dtypes (dtype.c) ---- */

float attn__f16_to_f32(uint16_t half);
uint16_t attn__f32_to_f16(float x); /* to nearest even; NaN stays NaN */
float attn__bf16_to_f32(uint16_t half);
uint16_t attn__f32_to_bf16(float x); /* to nearest even; NaN stays NaN */

/* ---- CPU features (cpu.c) ---- */

enum {
    ATTN__CPU_AVX2 = 1u << 0,        /* AVX2, FMA and F16C */
    ATTN__CPU_AVX512 = 1u << 1,      /* F, BW, DQ, VL */
    ATTN__CPU_AVX512_BF16 = 1u << 2, /* products of bf16 pairs on vectors */
    ATTN__CPU_AMX = 1u << 3,         /* tiles and products of bf16 tiles */
    ATTN__CPU_NEON = 1u << 4,        /* Advanced SIMD of AArch64 */
};

/* What this CPU has and ATTN_ISA allows: ATTN_ISA=ref (nothing), neon; avx2, avx512, avx512bf16, amx: that
 * level and those below.  Read once; where tiles are allowed, the first call asks the system for them. */
uint32_t attn__cpu(void);
/* Fails where ATTN_ISA names no level, which hides nothing. */
attn_status attn__cpu_check_isa(void);
/* Tests: replaces what attn__cpu() answers. */
void attn__cpu_override(uint32_t features);
/* How many bytes ahead to ask the caches for what is read once and in order: 0 where the CPU does better
 * alone, as AMD's before Zen 5 do (docs/perf/cpu.md, "Few queries"). */
int64_t attn__cpu_ahead(void);
/* Is the L1, not the L2, to be asked for what few rows of queries need later on?  On AMD's since Zen 5. */
bool attn__cpu_asks_l1(void);
/* Where ATTN__CPU_AVX512_BF16 is: does a product of pairs take no longer than an FMA?  On AMD's (measured on
 * a Zen 5, docs/perf/cpu_amx.md), not on Intel's. */
bool attn__cpu_pairs(void);
/* "avx2", ... of one bit */
const char *attn__cpu_name(uint32_t feature);

/* ---- threads: OpenMP, or one where the compiler has none ---- */

#ifdef _OPENMP
#include <omp.h>
static inline int attn__threads_max(void)
{
    return omp_get_max_threads();
}
static inline int attn__thread(void)
{
    return omp_get_thread_num();
}
/* Threads of the parallel region that asks. */
static inline int attn__team(void)
{
    return omp_get_num_threads();
}
#else
static inline int attn__threads_max(void)
{
    return 1;
}
static inline int attn__thread(void)
{
    return 0;
}
static inline int attn__team(void)
{
    return 1;
}
#endif

/* In a loop that waits for another thread: what shares the core with this one has it meanwhile. */
static inline void attn__relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- the rest (clock.c, hash.c) ---- */

double attn__now(void); /* seconds, monotonic */

/* 64 bits of a stream of bytes: hash = attn__hash(hash, ...) chains; start from 0.  Not cryptographic: finds
 * damage and accidents, not attacks. */
uint64_t attn__hash(uint64_t hash, const void *data, size_t bytes);

#endif
