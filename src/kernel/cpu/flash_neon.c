/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_neon.c - the row flash-neon: flash.inc.h over Advanced SIMD, which every 64-bit ARM processor has.
 *
 * 12 x 8 micro-kernels: 24 accumulators, 2 vectors of queries and 1 broadcast fill 27 of 32 registers.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   ATTN__CPU_NEON
#define FLASH_NAME    "flash-neon"
#define FLASH_SUMMARY "tiled, running maximum, 4 lanes of fp32 with FMA"
#define FLASH_ROW     attn__flash_neon
#define FLASH_PROBE   attn__probe_neon

#if defined(__aarch64__) && defined(__GNUC__)

#include <arm_neon.h>

#include "kernel/cpu/vec_neon.h"

#include "kernel/cpu/flash.inc.h"

#else
#include "kernel/cpu/absent.inc.h"
#endif
