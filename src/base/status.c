/* SPDX-License-Identifier: Apache-2.0 */
/* status.c - status texts, the per-thread error text, the version.  The error text is the library's only
 * per-thread state. */
#include <stdarg.h>
#include <stdio.h>

#include "base/base.h"

static _Thread_local char last_error[1024];

const char *attn_strerror(attn_status status)
{
    switch (status) {
#define ATTN_STATUS_TEXT(symbol, value, text)                                                                \
    case symbol:                                                                                             \
        return text;
        ATTN_STATUS_LIST(ATTN_STATUS_TEXT)
#undef ATTN_STATUS_TEXT
    }
    return "unknown status";
}

const char *attn_last_error(void)
{
    return last_error;
}

attn_status attn__fail(attn_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

attn_status attn_fail(attn_status status, const char *text)
{
    return attn__fail(status, "%s", text != NULL ? text : attn_strerror(status));
}

#define STRING_OF(x)        #x
#define VERSION_OF(a, b, c) STRING_OF(a) "." STRING_OF(b) "." STRING_OF(c)

const char *attn_version(void)
{
    return VERSION_OF(ATTN_VERSION_MAJOR, ATTN_VERSION_MINOR, ATTN_VERSION_PATCH);
}
