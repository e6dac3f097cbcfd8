/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h - how much memory the process holds, held at most, and could still get; in bytes, -1: unknown. */
#ifndef ATTN_CLI_MEMORY_H
#define ATTN_CLI_MEMORY_H

#include <stdint.h>

int64_t cli_memory_now(void);       /* resident set */
int64_t cli_memory_peak(void);      /* largest resident set since the process began */
int64_t cli_memory_available(void); /* of the machine, without swapping */

/*
 * What this program needs beside a workspace, when `threads` of it compute: what it holds now, rounded up to
 * a step of 16 MiB so that the same command finds the same number each time, and the buffers of its threads.
 */
int64_t cli_memory_program(int64_t threads);

#endif
