/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_amx.c - the row flash-amx: flash_dot.inc.h over AMX tiles (Intel since 2023, under Linux 5.16 or
 * later).
 *
 * All dtypes: bf16 as it is, fp16 as two parts of bf16, fp32 as three.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   (ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16 | ATTN__CPU_AMX)
#define FLASH_NAME    "flash-amx"
#define FLASH_SUMMARY "tiled, running maximum, products of bf16 tiles: fp32 in 3 parts, fp16 in 2"
#define FLASH_ROW     attn__flash_amx
#define FLASH_PROBE   attn__probe_amx

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "base/round_avx512.h"

#define DOT_MOST_PARTS 3 /* of an operand that is worth its products */
#define DOT_DECLINES   NULL

#if defined(__clang__)
#pragma clang attribute push(                                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,fma,f16c"))),     \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target(                                                                                          \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,fma,f16c,prefer-vector-width=512")
#endif

#include "kernel/cpu/vec_avx512.h"

#include "kernel/cpu/flash_common.inc.h"

#include "kernel/cpu/dot_pack.h"

#include "kernel/cpu/dot_few.h"

#include "kernel/cpu/dot_amx.h"

#include "kernel/cpu/flash_dot.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
#include "kernel/cpu/absent.inc.h"
#endif
