/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - a streaming JSON writer (RFC 8259): nothing is held back, memory is a few bytes a level.
 *
 * Text goes out as valid UTF-8 whatever comes in: control characters are escaped, a byte that is not part of
 * a well-formed sequence becomes U+FFFD.  Integers are written whole (readers with doubles are exact to
 * 2^53), reals with 17 digits so that they read back to the same bits, or fewer where those do.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define LEVELS ((int)(sizeof(((cli_json *)NULL)->filled) / sizeof(bool)))

void cli_json_begin(cli_json *json, FILE *file, bool compact)
{
    memset(json, 0, sizeof(*json));
    json->file = file;
    json->compact = compact;
}

static void new_line(const cli_json *json)
{
    if (!json->compact) {
        fprintf(json->file, "\n%*s", 2 * json->depth, "");
    }
}

/* Bytes of the well-formed UTF-8 sequence at text, or 0 (table 3-7 of the Unicode standard). */
static size_t utf8_length(const unsigned char *text)
{
    unsigned char first = text[0], second = text[1];
    size_t length = first < 0x80   ? 1
                    : first < 0xc2 ? 0
                    : first < 0xe0 ? 2
                    : first < 0xf0 ? 3
                    : first < 0xf5 ? 4
                                   : 0;
    unsigned char low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    unsigned char high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (length > 1 && (second < low || second > high)) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return length;
}

static void write_text(FILE *file, const char *value)
{
    const unsigned char *text = (const unsigned char *)value;
    fputc('"', file);
    while (*text != '\0') {
        size_t length = utf8_length(text);
        if (length == 0) {
            fputs("\\ufffd", file);
            text++;
        } else if (*text == '"' || *text == '\\') {
            fprintf(file, "\\%c", *text++);
        } else if (*text < 0x20 || *text == 0x7f) {
            fprintf(file, "\\u%04x", *text++);
        } else {
            fwrite(text, 1, length, file);
            text += length;
        }
    }
    fputc('"', file);
}

/* What stands before each value: comma, line break, key. */
static void lead(cli_json *json, const char *key)
{
    if (json->depth > 0) {
        if (json->filled[json->depth]) {
            fputs(json->compact ? ", " : ",", json->file);
        }
        json->filled[json->depth] = true;
        new_line(json);
    }
    if (key != NULL) {
        write_text(json->file, key);
        fputs(": ", json->file);
    }
}

static void open_level(cli_json *json, const char *key, bool is_array)
{
    lead(json, key);
    fputc(is_array ? '[' : '{', json->file);
    if (json->depth < LEVELS - 1) { /* documents are 6 deep at most */
        json->depth++;
    }
    json->filled[json->depth] = false;
    json->is_array[json->depth] = is_array;
}

void cli_json_object(cli_json *json, const char *key)
{
    open_level(json, key, false);
}

void cli_json_array(cli_json *json, const char *key)
{
    open_level(json, key, true);
}

void cli_json_end(cli_json *json)
{
    bool filled = json->filled[json->depth], is_array = json->is_array[json->depth];
    json->depth--;
    if (filled) {
        new_line(json);
    }
    fputc(is_array ? ']' : '}', json->file);
    if (json->depth == 0) {
        fputc('\n', json->file);
    }
}

void cli_json_int(cli_json *json, const char *key, int64_t value)
{
    lead(json, key);
    fprintf(json->file, "%" PRId64, value);
}

void cli_json_real(cli_json *json, const char *key, double value)
{
    char text[40];
    if (!isfinite(value)) {
        cli_json_null(json, key);
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value) {
            break;
        }
    }
    lead(json, key);
    fputs(text, json->file);
}

void cli_json_text(cli_json *json, const char *key, const char *value)
{
    if (value == NULL) {
        cli_json_null(json, key);
        return;
    }
    lead(json, key);
    write_text(json->file, value);
}

void cli_json_bool(cli_json *json, const char *key, bool value)
{
    lead(json, key);
    fputs(value ? "true" : "false", json->file);
}

void cli_json_null(cli_json *json, const char *key)
{
    lead(json, key);
    fputs("null", json->file);
}

void cli_json_ints(cli_json *json, const char *key, const int64_t *value, int64_t count)
{
    lead(json, key);
    fputc('[', json->file);
    for (int64_t i = 0; i < count; i++) {
        fprintf(json->file, "%s%" PRId64, i > 0 ? ", " : "", value[i]);
    }
    fputc(']', json->file);
}
