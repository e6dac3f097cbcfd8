/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json_read.c - the strict JSON reader: RFC 8259 without any extension, UTF-8 checked (RFC 3629).
 *
 * One byte of look-ahead is enough for JSON, so the text streams through a window of 4 KiB.
 */
#include "json_read.h"

#include <string.h>

void cli_json_in_begin(cli_json_in *in, const cli_reader *reader, int64_t begin, int64_t end)
{
    in->reader = reader;
    in->next = begin;
    in->end = end;
    in->at = in->filled = 0;
    in->status = ATTN_OK;
    in->why = NULL;
}

int64_t cli_json_where(const cli_json_in *in)
{
    return in->next - (in->filled - in->at);
}

bool cli_json_fail(cli_json_in *in, const char *why)
{
    if (in->why == NULL) {
        in->why = why;
    }
    return false;
}

/* The next byte, or -1 at the end or after a failure. */
static int peek(cli_json_in *in)
{
    if (in->at == in->filled) {
        int64_t left = in->end - in->next;
        int fill = left < (int64_t)sizeof in->window ? (int)left : (int)sizeof in->window;
        if (in->why != NULL || fill <= 0) {
            return -1;
        }
        in->status = cli_reader_read(in->reader, in->window, (size_t)fill, in->next);
        if (in->status != ATTN_OK) {
            cli_json_fail(in, "it cannot be read");
            return -1;
        }
        in->at = 0;
        in->filled = fill;
        in->next += fill;
    }
    return in->why != NULL ? -1 : (unsigned char)in->window[in->at];
}

static int take(cli_json_in *in)
{
    int c = peek(in);
    if (c >= 0) {
        in->at++;
    }
    return c;
}

static void skip_space(cli_json_in *in)
{
    for (int c = peek(in); c == ' ' || c == '\n' || c == '\r' || c == '\t'; c = peek(in)) {
        in->at++;
    }
}

bool cli_json_accept(cli_json_in *in, char c)
{
    skip_space(in);
    if (peek(in) == c) {
        in->at++;
        return true;
    }
    return false;
}

bool cli_json_expect(cli_json_in *in, char c)
{
    if (cli_json_accept(in, c)) {
        return true;
    }
    switch (c) {
    case '{':
        return cli_json_fail(in, "an object is expected");
    case '[':
        return cli_json_fail(in, "an array is expected");
    case ':':
        return cli_json_fail(in, "a colon is missing");
    default:
        return cli_json_fail(in, "a comma or a closing bracket is missing");
    }
}

bool cli_json_more(cli_json_in *in, char close, bool *first)
{
    bool was_first = *first;
    *first = false;
    if (cli_json_accept(in, close)) {
        return false;
    }
    if (!was_first) {
        return cli_json_expect(in, ',');
    }
    return peek(in) >= 0 || cli_json_fail(in, "the text ends too early");
}

/* ---- strings ---- */

typedef struct sink {
    char *text;
    size_t length, capacity;
} sink;

static bool put(cli_json_in *in, sink *to, int byte)
{
    if (to->text == NULL) {
        return true;
    }
    if (to->length + 1 >= to->capacity) {
        return cli_json_fail(in, "a name is too long");
    }
    to->text[to->length++] = (char)byte;
    return true;
}

static bool put_code(cli_json_in *in, sink *to, uint32_t code)
{
    if (code < 0x80) {
        return put(in, to, (int)code);
    }
    if (code < 0x800) {
        return put(in, to, (int)(0xc0 | code >> 6)) && put(in, to, (int)(0x80 | (code & 63)));
    }
    if (code < 0x10000) {
        return put(in, to, (int)(0xe0 | code >> 12)) && put(in, to, (int)(0x80 | (code >> 6 & 63))) &&
               put(in, to, (int)(0x80 | (code & 63)));
    }
    return put(in, to, (int)(0xf0 | code >> 18)) && put(in, to, (int)(0x80 | (code >> 12 & 63))) &&
           put(in, to, (int)(0x80 | (code >> 6 & 63))) && put(in, to, (int)(0x80 | (code & 63)));
}

static bool take_hex4(cli_json_in *in, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++) {
        static const char digits[] = "0123456789abcdef";
        int c = take(in);
        const char *digit = c > 0 ? strchr(digits, c >= 'A' && c <= 'F' ? c + ('a' - 'A') : c) : NULL;
        if (digit == NULL) {
            return cli_json_fail(in, "\\u needs four hexadecimal digits");
        }
        *code = *code << 4 | (uint32_t)(digit - digits);
    }
    return true;
}

/* \uXXXX, or the two of a surrogate pair; the backslash and the u are taken. */
static bool take_unicode(cli_json_in *in, sink *to)
{
    uint32_t code, low;
    if (!take_hex4(in, &code)) {
        return false;
    }
    if (code >= 0xd800 && code < 0xe000) {
        if (code >= 0xdc00 || take(in) != '\\' || take(in) != 'u' || !take_hex4(in, &low) || low < 0xdc00 ||
            low >= 0xe000) {
            return cli_json_fail(in, "half of a surrogate pair is missing");
        }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code == 0) {
        return cli_json_fail(in, "a string has a NUL character");
    }
    return put_code(in, to, code);
}

static bool take_escape(cli_json_in *in, sink *to)
{
    static const char from[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    int c = take(in);
    if (c == 'u') {
        return take_unicode(in, to);
    }
    const char *found = c > 0 ? strchr(from, c) : NULL;
    if (found == NULL) {
        return cli_json_fail(in, "an escape is unknown");
    }
    return put(in, to, means[found - from]);
}

/* The rest of a UTF-8 sequence that begins with `lead`; the shortest form only, no surrogates. */
static bool take_utf8(cli_json_in *in, sink *to, int lead)
{
    int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    uint32_t least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
    uint32_t code = (uint32_t)lead & (0x3fu >> more);
    bool legal = lead >= 0xc2 && lead <= 0xf4;
    for (int i = 0; legal && i < more; i++) {
        int c = take(in);
        legal = c >= 0x80 && c < 0xc0;
        code = code << 6 | ((uint32_t)c & 63);
    }
    if (!legal || code < least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        return cli_json_fail(in, "a string is not UTF-8");
    }
    return put_code(in, to, code);
}

bool cli_json_in_text(cli_json_in *in, char *text, size_t capacity)
{
    sink to = {.text = text, .capacity = capacity};
    if (!cli_json_accept(in, '"')) {
        return cli_json_fail(in, "a string is expected");
    }
    for (;;) {
        int c = take(in);
        bool fine = true;
        if (c < ' ') {
            return cli_json_fail(in, c < 0 ? "a string does not end" : "a string has a control character");
        }
        if (c == '"') {
            break;
        }
        if (c == '\\') {
            fine = take_escape(in, &to);
        } else if (c >= 0x80) {
            fine = take_utf8(in, &to, c);
        } else {
            fine = put(in, &to, c);
        }
        if (!fine) {
            return false;
        }
    }
    if (text != NULL) {
        text[to.length] = '\0';
    }
    return true;
}

/* ---- numbers and the rest ---- */

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

bool cli_json_in_count(cli_json_in *in, int64_t *value)
{
    skip_space(in);
    if (!is_digit(peek(in))) {
        return cli_json_fail(in, "a number 0, 1, 2, ... is expected");
    }
    *value = take(in) - '0';
    if (*value == 0 && is_digit(peek(in))) {
        return cli_json_fail(in, "a number has a leading zero");
    }
    while (is_digit(peek(in))) {
        int digit = take(in) - '0';
        if (*value > (INT64_MAX - digit) / 10) {
            return cli_json_fail(in, "a number does not fit 63 bits");
        }
        *value = *value * 10 + digit;
    }
    int c = peek(in);
    if (c == '.' || c == 'e' || c == 'E') {
        return cli_json_fail(in, "a number 0, 1, 2, ... is expected");
    }
    return true;
}

static bool take_digits(cli_json_in *in)
{
    if (!is_digit(peek(in))) {
        return cli_json_fail(in, "a digit is missing");
    }
    while (is_digit(peek(in))) {
        in->at++;
    }
    return true;
}

static bool skip_number(cli_json_in *in)
{
    if (peek(in) == '-') {
        in->at++;
    }
    if (peek(in) == '0') {
        in->at++;
    } else if (!take_digits(in)) {
        return false;
    }
    if (peek(in) == '.') {
        in->at++;
        if (!take_digits(in)) {
            return false;
        }
    }
    if (peek(in) == 'e' || peek(in) == 'E') {
        in->at++;
        if (peek(in) == '+' || peek(in) == '-') {
            in->at++;
        }
        return take_digits(in);
    }
    return true;
}

static bool skip_word(cli_json_in *in, const char *word)
{
    for (; *word != '\0'; word++) {
        if (take(in) != *word) {
            return cli_json_fail(in, "a value is expected");
        }
    }
    return true;
}

/* Recursion is bounded by depth, which the caller chooses. */
static bool skip_members(cli_json_in *in, char close, int depth)
{
    bool first = true;
    if (depth == 0) {
        return cli_json_fail(in, "it is nested too deep");
    }
    while (cli_json_more(in, close, &first)) {
        if (close == '}' && (!cli_json_in_text(in, NULL, 0) || !cli_json_expect(in, ':'))) {
            return false;
        }
        if (!cli_json_skip(in, depth - 1)) {
            return false;
        }
    }
    return in->why == NULL;
}

bool cli_json_skip(cli_json_in *in, int depth)
{
    skip_space(in);
    switch (peek(in)) {
    case '{':
        in->at++;
        return skip_members(in, '}', depth);
    case '[':
        in->at++;
        return skip_members(in, ']', depth);
    case '"':
        return cli_json_in_text(in, NULL, 0);
    case 't':
        return skip_word(in, "true");
    case 'f':
        return skip_word(in, "false");
    case 'n':
        return skip_word(in, "null");
    case -1:
        return cli_json_fail(in, "the text ends too early");
    default:
        return skip_number(in);
    }
}

bool cli_json_done(cli_json_in *in)
{
    skip_space(in);
    return peek(in) < 0 ? in->why == NULL : cli_json_fail(in, "something follows the value");
}
