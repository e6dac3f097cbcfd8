/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_portable.c - the row flash-portable: flash.inc.h for any processor and any C11 compiler.
 *
 * On x86-64 it is SSE2 without FMA: about a quarter of what AVX2 gives, and several times the plain-C rows.
 */
#include "kernel/rows.h"

#define FLASH_NEEDS   0
#define FLASH_NAME    "flash-portable"
#define FLASH_SUMMARY "tiled, running maximum, for any processor"
#define FLASH_ROW     attn__flash_portable
#define FLASH_PROBE   attn__probe_portable

#include "kernel/cpu/vec_portable.h"

#include "kernel/cpu/flash.inc.h"
