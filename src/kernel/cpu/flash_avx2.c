/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_avx2.c - the row flash-avx2: flash.inc.h over AVX2 + FMA (Intel since 2013, AMD since 2015).
 *
 * 6 x 16 micro-kernels: 12 accumulators, 2 vectors of queries and 1 broadcast fill 15 of 16 registers.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   ATTN__CPU_AVX2
#define FLASH_NAME    "flash-avx2"
#define FLASH_SUMMARY "tiled, running maximum, 8 lanes of fp32 with FMA"
#define FLASH_ROW     attn__flash_avx2
#define FLASH_PROBE   attn__probe_avx2

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernel/cpu/vec_avx2.h"

#include "kernel/cpu/flash.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
#include "kernel/cpu/absent.inc.h"
#endif
