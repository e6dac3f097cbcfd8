/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c - the monotonic clock, in seconds. */
#include <time.h>

#include "base/base.h"

double attn__now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
