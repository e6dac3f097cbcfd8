/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.c - text for people: sizes and times with units, the terminal's abilities, wrapped paragraphs.
 */
#include <langinfo.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli.h"

const char *cli_bytes(char text[CLI_NUMBER], double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t unit = 0;
    /* 1023.995 would round to 1024.00 */
    while (bytes >= 1023.995 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1024;
        unit++;
    }
    bool whole = unit == 0 && bytes == floor(bytes);
    snprintf(text, CLI_NUMBER, whole ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return text;
}

const char *cli_seconds(char text[CLI_NUMBER], double seconds)
{
    if (seconds < 0.9995e-3) {
        snprintf(text, CLI_NUMBER, "%.1f us", 1e6 * seconds);
    } else if (seconds < 0.9995) {
        snprintf(text, CLI_NUMBER, "%.1f ms", 1e3 * seconds);
    } else if (seconds < 59.95) {
        snprintf(text, CLI_NUMBER, "%.1f s", seconds);
    } else if (seconds < 3599.5) {
        int whole = (int)(seconds + 0.5);
        snprintf(text, CLI_NUMBER, "%d min %02d s", whole / 60, whole % 60);
    } else if (seconds < 3.6e9) {
        long long minutes = (long long)(seconds / 60 + 0.5);
        snprintf(text, CLI_NUMBER, "%lld h %02lld min", minutes / 60, minutes % 60);
    } else {
        snprintf(text, CLI_NUMBER, "ages");
    }
    return text;
}

bool cli_utf8(void)
{
    const char *codeset = nl_langinfo(CODESET);
    return strcmp(codeset, "UTF-8") == 0 || strcmp(codeset, "utf8") == 0;
}

/* no-color.org: any value but an empty one */
bool cli_use_color(int when, FILE *file)
{
    if (when != CLI_AUTO) {
        return when == CLI_ALWAYS;
    }
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    if ((no_color != NULL && no_color[0] != '\0') || term == NULL || strcmp(term, "dumb") == 0) {
        return false;
    }
    return isatty(fileno(file)) != 0;
}

int cli_terminal_width(FILE *file)
{
    const char *columns = getenv("COLUMNS");
    long width = columns != NULL ? strtol(columns, NULL, 10) : 0;
#ifdef TIOCGWINSZ
    struct winsize size;
    if (width <= 0 && ioctl(fileno(file), TIOCGWINSZ, &size) == 0) {
        width = size.ws_col;
    }
#endif
    return width <= 0 ? 80 : width < 40 ? 40 : width > 500 ? 500 : (int)width;
}

/* Columns of a word: UTF-8 continuation bytes take none. */
static int columns_of(const char *word, size_t size)
{
    int columns = 0;
    for (size_t i = 0; i < size; i++) {
        columns += ((unsigned char)word[i] & 0xc0) != 0x80 ? 1 : 0;
    }
    return columns;
}

void cli_wrap(FILE *file, const char *text, int at, int indent, int width)
{
    bool fresh = true; /* at the begin of a line: no blank before the word */
    if (at < indent) {
        fprintf(file, "%*s", indent - at, "");
        at = indent;
    }
    while (*text != '\0') {
        if (*text == '\n') {
            text += strspn(text, "\n");
            fprintf(file, "\n\n%*s", indent, "");
            at = indent;
            fresh = true;
        }
        size_t size = strcspn(text, " \n");
        int columns = columns_of(text, size);
        if (!fresh && at + 1 + columns > width) {
            fprintf(file, "\n%*s", indent, "");
            at = indent;
            fresh = true;
        }
        fprintf(file, "%s%.*s", fresh ? "" : " ", (int)size, text);
        at += columns + (fresh ? 0 : 1);
        fresh = false;
        text += size;
        text += strspn(text, " ");
    }
    fputc('\n', file);
}
