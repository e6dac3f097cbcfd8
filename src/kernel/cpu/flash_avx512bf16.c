/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_avx512bf16.c - the row flash-avx512bf16: flash_dot.inc.h over products of bf16 pairs on vectors (AMD
 * since 2022, Intel since 2020 in some).
 *
 * bf16 only: an instruction does two FMAs' work, which the parts of fp16 and fp32 would use up.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   (ATTN__CPU_AVX2 | ATTN__CPU_AVX512 | ATTN__CPU_AVX512_BF16)
#define FLASH_NAME    "flash-avx512bf16"
#define FLASH_SUMMARY "tiled, running maximum, 16 lanes of bf16 pairs"
#define FLASH_ROW     attn__flash_avx512bf16
#define FLASH_PROBE   attn__probe_avx512bf16

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "base/round_avx512.h"

#define DOT_MOST_PARTS 1 /* of an operand that is worth its products */
#define DOT_DECLINES                                                                                         \
    (attn__cpu_pairs() ? NULL                                                                                \
                       : "is slower than FMAs except on AMD's processors; asked for by name it is taken")

#if defined(__clang__)
#pragma clang attribute push(                                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prefer-vector-width=512")
#endif

#include "kernel/cpu/vec_avx512.h"

#include "kernel/cpu/flash_common.inc.h"

#include "kernel/cpu/dot_pack.h"

#include "kernel/cpu/dot_few.h"

#include "kernel/cpu/dot_avx512bf16.h"

#include "kernel/cpu/flash_dot.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
#include "kernel/cpu/absent.inc.h"
#endif
