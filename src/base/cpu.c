/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.c - which instruction sets this CPU and operating system offer, masked by ATTN_ISA; how far ahead the
 * caches want to be asked, and whether products of pairs are fast.
 *
 * ATTN_ISA names a level; features above it are hidden, so that one machine can run the test suite once for
 * each level.  An unknown name hides nothing, but with it no plan is made (attn__cpu_check_isa).
 *
 * Linux gives a process the state of AMX tiles only when asked (arch_prctl,
 * Documentation/arch/x86/xstate.rst); the answer holds for all its threads.  A build that emulates AMX has it
 * wherever there is AVX512-BF16.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#ifdef ATTN__EMULATE_AMX
enum { EMULATES = true };
#else
enum { EMULATES = false };
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* What the operating system saves at a context switch: without it a feature must not be used. */
static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint32_t detect(void)
{
    enum { OSXSAVE = 1 << 27, FMA = 1 << 12, F16C = 1 << 29, YMM = 0x6, ZMM = 0xe6, TILES = 0x60000 };
    uint32_t a, b, c, d, features = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & OSXSAVE) == 0) {
        return 0;
    }
    bool fma = (c & FMA) != 0 && (c & F16C) != 0;
    uint64_t saved = saved_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        return 0;
    }
    if ((saved & YMM) == YMM && fma && (b & 1u << 5) != 0) {
        features |= ATTN__CPU_AVX2;
    }
    uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    if ((features & ATTN__CPU_AVX2) != 0 && (saved & ZMM) == ZMM && (b & avx512) == avx512) {
        features |= ATTN__CPU_AVX512;
    }
    uint32_t amx = 1u << 22 | 1u << 24; /* BF16, TILE */
    bool tiles = EMULATES || ((saved & TILES) == TILES && (d & amx) == amx);
    if ((features & ATTN__CPU_AVX512) != 0 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5) != 0) {
        features |= ATTN__CPU_AVX512_BF16 | (tiles ? ATTN__CPU_AMX : 0u);
    }
    return features;
}
#elif defined(__aarch64__)
static uint32_t detect(void)
{
    return ATTN__CPU_NEON; /* part of the architecture */
}
#else
static uint32_t detect(void)
{
    return 0;
}
#endif

/* Whether the system lets this process use tiles, from now on. */
static bool ask_for_tiles(void)
{
#if defined(__x86_64__) && defined(__linux__)
    enum { ARCH_PRCTL = 158, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    int64_t result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"((int64_t)ARCH_PRCTL), "D"((int64_t)REQUEST_PERMISSION), "S"((int64_t)TILE_DATA)
                     : "rcx", "r11", "memory");
    return result == 0;
#else
    return false;
#endif
}

/* Does ATTN_ISA name no level? */
static atomic_bool unknown_level;

static uint32_t allowed(void)
{
    static const struct {
        const char *name;
        uint32_t features;
    } levels[] = {
        {"ref", 0},
        {"avx2", ATTN__CPU_AVX2},
        {"avx512", ATTN__CPU_AVX2 | ATTN__CPU_AVX512},
        {"avx512bf16", ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16},
        {"amx", ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16 | ATTN__CPU_AMX},
        {"neon", ATTN__CPU_NEON},
    };
    const char *isa = getenv("ATTN_ISA");
    for (size_t i = 0; isa != NULL && i < sizeof levels / sizeof levels[0]; i++) {
        if (strcmp(isa, levels[i].name) == 0) {
            return levels[i].features;
        }
    }
    atomic_store(&unknown_level, isa != NULL && isa[0] != '\0');
    return UINT32_MAX;
}

enum { UNKNOWN = 1u << 31 };
static atomic_uint cached = UNKNOWN;

uint32_t attn__cpu(void)
{
    uint32_t features = atomic_load(&cached);
    if (features == UNKNOWN) {
        features = detect() & allowed();
        if ((features & ATTN__CPU_AMX) != 0 && !EMULATES && !ask_for_tiles()) {
            features &= ~(uint32_t)ATTN__CPU_AMX;
        }
        atomic_store(&cached, features);
    }
    return features;
}

attn_status attn__cpu_check_isa(void)
{
    (void)attn__cpu();
    if (atomic_load(&unknown_level)) {
        return attn__fail(ATTN_EINVAL,
                          "the environment variable ATTN_ISA names no instruction set; the levels are "
                          "ref, avx2, avx512, avx512bf16, amx and neon");
    }
    return ATTN_OK;
}

void attn__cpu_override(uint32_t features)
{
    atomic_store(&cached, features);
}

#if defined(__x86_64__)
/* AMD's family, 0 if this is another's. */
static uint32_t family_of_amd(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    (void)__get_cpuid(0, &a, &b, &c, &d);
    if (b != signature_AMD_ebx || c != signature_AMD_ecx || d != signature_AMD_edx) {
        return 0;
    }
    (void)__get_cpuid(1, &a, &b, &c, &d);
    return (a >> 8 & 15) + (a >> 20 & 255); /* base and extension */
}

static bool is_intel(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    (void)__get_cpuid(0, &a, &b, &c, &d);
    return b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
}
#else
static uint32_t family_of_amd(void)
{
    return 0;
}

static bool is_intel(void)
{
    return false;
}
#endif

enum { ZEN5_FAMILY = 26 };

/* For attn__cpu_ahead and attn__cpu_asks_l1: what was fastest where it was measured. */
static int measured_ahead(void)
{
    enum { INTEL = 4096, ZEN5 = 8192 };
    return is_intel() ? INTEL : family_of_amd() >= ZEN5_FAMILY ? ZEN5 : 0;
}

static int measured_asks_l1(void)
{
    return family_of_amd() >= ZEN5_FAMILY;
}

static int measured_pairs(void)
{
    return family_of_amd() != 0;
}

/* What `find` answers, asked once: a virtual machine takes long over an answer of the processor. */
static int once(atomic_int *known, int (*find)(void))
{
    int value = atomic_load(known);
    if (value < 0) {
        value = find();
        atomic_store(known, value);
    }
    return value;
}

int64_t attn__cpu_ahead(void)
{
    static atomic_int known = -1;
    return once(&known, measured_ahead);
}

bool attn__cpu_asks_l1(void)
{
    static atomic_int known = -1;
    return once(&known, measured_asks_l1) != 0;
}

bool attn__cpu_pairs(void)
{
    static atomic_int known = -1;
    return once(&known, measured_pairs) != 0;
}

const char *attn__cpu_name(uint32_t feature)
{
    switch (feature) {
    case ATTN__CPU_AVX2:
        return "avx2";
    case ATTN__CPU_AVX512:
        return "avx512";
    case ATTN__CPU_AVX512_BF16:
        return "avx512bf16";
    case ATTN__CPU_AMX:
        return "amx";
    case ATTN__CPU_NEON:
        return "neon";
    default:
        return "?";
    }
}
