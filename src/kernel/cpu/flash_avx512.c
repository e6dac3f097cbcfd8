/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_avx512.c - the row flash-avx512: flash.inc.h over AVX-512 (Intel since 2017, AMD since 2022).
 *
 * 12 x 32 micro-kernels: 24 accumulators, 2 vectors of queries; the broadcasts ride on the FMAs as memory
 * operands, so 14 loads feed 24 FMAs.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   (ATTN__CPU_AVX2 | ATTN__CPU_AVX512)
#define FLASH_NAME    "flash-avx512"
#define FLASH_SUMMARY "tiled, running maximum, 16 lanes of fp32 with FMA"
#define FLASH_ROW     attn__flash_avx512
#define FLASH_PROBE   attn__probe_avx512

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))),         \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
#endif

#include "kernel/cpu/vec_avx512.h"

#include "kernel/cpu/flash.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
#include "kernel/cpu/absent.inc.h"
#endif
