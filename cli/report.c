/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - messages on stderr, exit codes, and the memory of small things.
 *
 * Every message begins with "attn:" and says what to do; every verb ends with one of the exit codes of cli.h.
 */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* ---- messages --------------------------------------------------------------------------------------- */

int cli_error(int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("attn: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return code;
}

void cli_warn(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("attn: warning: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

int cli_code(attn_status status)
{
    switch (status) {
    case ATTN_OK:
        return CLI_OK;
    case ATTN_EINVAL:
    case ATTN_ELIMIT:
        return CLI_USAGE;
    case ATTN_ENOMEM:
    case ATTN_EUNSUPPORTED:
        return CLI_MISSING;
    case ATTN_EIO:
    case ATTN_EMISMATCH:
        return CLI_IO;
    case ATTN_ELOST:
        return CLI_LOST;
    case ATTN_ECANCELED:
        return CLI_CANCELED;
    }
    return CLI_USAGE;
}

int cli_fail(attn_status status)
{
    if (status == ATTN_OK) {
        return CLI_OK;
    }
    const char *text = attn_last_error();
    return cli_error(cli_code(status), "%s", text[0] != '\0' ? text : attn_strerror(status));
}

/* ---- memory ----------------------------------------------------------------------------------------- */

void *cli_alloc(int64_t count, size_t size)
{
    void *memory = count < 0 ? NULL : calloc(count > 0 ? (size_t)count : 1, size > 0 ? size : 1);
    if (memory == NULL) {
        exit(cli_error(CLI_MISSING, "out of memory"));
    }
    return memory;
}

char *cli_strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    return memcpy(cli_alloc(1, size), text, size);
}
