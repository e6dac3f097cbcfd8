/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c - the monotonic clock, in seconds. */
#ifndef _POSIX_C_SOURCE /* for a build by plain cc */
#define _POSIX_C_SOURCE 200809L
#endif

#include <time.h>

#include "base/base.h"

double attn__now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
