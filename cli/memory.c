/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - resident memory, from /proc where there is one (proc(5): VmRSS, VmHWM, MemAvailable), else the
 * peak from getrusage().
 */
#define _DEFAULT_SOURCE /* ru_maxrss */

#include "memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The number of kB behind `key` at the start of a line. */
static int64_t read_line(const char *path, const char *key)
{
    char line[256];
    int64_t bytes = -1;
    FILE *file = fopen(path, "r");
    while (file != NULL && bytes < 0 && fgets(line, sizeof line, file) != NULL) {
        long long kib;
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), ": %lld kB", &kib) == 1) {
            bytes = (int64_t)kib * 1024;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return bytes;
}

int64_t cli_memory_now(void)
{
    return read_line("/proc/self/status", "VmRSS");
}

int64_t cli_memory_peak(void)
{
    int64_t peak = read_line("/proc/self/status", "VmHWM");
    struct rusage usage;
    if (peak < 0 && getrusage(RUSAGE_SELF, &usage) == 0) {
        peak = (int64_t)usage.ru_maxrss * 1024; /* kB on Linux and the BSDs */
    }
    return peak;
}

int64_t cli_memory_available(void)
{
    return read_line("/proc/meminfo", "MemAvailable");
}

int64_t cli_memory_program(int64_t threads)
{
    const int64_t step = INT64_C(16) << 20;
    const int64_t thread = INT64_C(256)
                           << 10; /* stack: 64 KiB to read, 32 KiB to write, the kernels' frames */
    const int64_t other = INT64_C(1) << 20;
    int64_t now = cli_memory_now();
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    threads = threads > 0 ? threads : cores > 0 ? cores : 1;
    return (now > 0 ? (now + step - 1) / step * step : step) + threads * thread + other;
}
