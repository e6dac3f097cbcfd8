/* SPDX-License-Identifier: Apache-2.0 */
/* machine.c - facts about this machine and this build.  What the system does not tell is left out. */
#include "machine.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown compiler"
#endif

#if defined(NDEBUG)
#define BUILD_KIND "release"
#else
#define BUILD_KIND "debug"
#endif

const char *cli_compiler(void)
{
    return COMPILER;
}

const char *cli_build(void)
{
    return BUILD_KIND;
}

/* The value of "key : value" in a file of such lines, cut to size; false if it is not there. */
static bool read_field(const char *path, const char *key, char *value, size_t size)
{
    FILE *file = fopen(path, "r");
    char line[4096];
    bool found = false;
    while (!found && file != NULL && fgets(line, sizeof(line), file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) == 0 && colon != NULL) {
            colon += 1 + strspn(colon + 1, " \t");
            colon[strcspn(colon, "\n")] = '\0';
            snprintf(value, size, "%s", colon);
            found = true;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static bool has_word(const char *words, const char *word)
{
    size_t size = strlen(word);
    for (const char *at = strstr(words, word); at != NULL; at = strstr(at + 1, word)) {
        bool starts = at == words || at[-1] == ' ';
        if (starts && (at[size] == ' ' || at[size] == '\0')) {
            return true;
        }
    }
    return false;
}

static void read_features(cli_machine *host)
{
    static const char *const known[] = {"avx2",     "fma",      "f16c",     "avx512f",
                                        "avx512bw", "avx512dq", "avx512vl", "avx512_bf16",
                                        "amx_tile", "amx_bf16", "asimd",    "sve"};
    char flags[4096] = "";
    if (!read_field("/proc/cpuinfo", "flags", flags, sizeof(flags))) {
        read_field("/proc/cpuinfo", "Features", flags, sizeof(flags));
    }
    size_t at = 0;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (has_word(flags, known[i])) {
            at += (size_t)snprintf(host->features + at, sizeof(host->features) - at, "%s%s",
                                   at > 0 ? " " : "", known[i]);
        }
    }
}

void cli_machine_look(cli_machine *host)
{
    char text[64] = "";
    memset(host, 0, sizeof(*host));
    if (!read_field("/proc/cpuinfo", "model name", host->model, sizeof(host->model))) {
        snprintf(host->model, sizeof(host->model), "unknown");
    }
    read_features(host);
    host->isa = getenv("ATTN_ISA");
    host->cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (read_field("/proc/meminfo", "MemTotal", text, sizeof(text))) {
        host->memory = 1024 * (int64_t)strtoll(text, NULL, 10);
    }
    if (read_field("/proc/meminfo", "MemAvailable", text, sizeof(text))) {
        host->available = 1024 * (int64_t)strtoll(text, NULL, 10);
    }
}

void cli_machine_json(cli_json *json, const cli_machine *host)
{
    cli_json_text(json, "cpu", host->model);
    cli_json_text(json, "features", host->features);
    cli_json_text(json, "isa_limit", host->isa);
    cli_json_int(json, "cores", host->cores);
    cli_json_int(json, "memory_bytes", host->memory);
    cli_json_int(json, "available_bytes", host->available);
}
