/* SPDX-License-Identifier: Apache-2.0 */
/*
 * npy.c - a strict reader and a writer of .npy headers.
 *
 * A file is the magic "\x93NUMPY", a version, the length of the header (2 bytes in version 1, 4 in 2 and 3,
 * little-endian), the header, and the elements.  The header is a Python dictionary display with exactly the
 * keys 'descr', 'fortran_order' and 'shape', padded with spaces and ended by a newline.  The parser takes
 * just this: no expression is evaluated, each key stands once, numbers are plain decimal.  It reads the
 * header alone, at most 64 KiB of it, and checks the length of the file against the shape.
 */
#include "npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAGIC = 8, HEADER_MOST = 65536, ALIGN = 64 };

/* A cursor over the header text; `why` is set at the first thing that is wrong. */
typedef struct scan {
    const char *at, *end;
    const char *why;
} scan;

static bool fail(scan *s, const char *why)
{
    if (s->why == NULL) {
        s->why = why;
    }
    return false;
}

static void skip_space(scan *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\t' || *s->at == '\r')) {
        s->at++;
    }
}

static bool accept(scan *s, char c)
{
    skip_space(s);
    if (s->at < s->end && *s->at == c) {
        s->at++;
        return true;
    }
    return false;
}

static bool accept_word(scan *s, const char *word)
{
    size_t length = strlen(word);
    skip_space(s);
    if ((size_t)(s->end - s->at) >= length && memcmp(s->at, word, length) == 0) {
        s->at += length;
        return true;
    }
    return false;
}

/* A quoted string of printable ASCII without escapes: no legal header has any. */
static bool parse_text(scan *s, char *text, size_t capacity)
{
    size_t length = 0;
    char quote = accept(s, '\'') ? '\'' : '"';
    if (quote == '"' && !accept(s, '"')) {
        return fail(s, "a quoted string is missing");
    }
    for (; s->at < s->end && *s->at != quote; s->at++) {
        if (*s->at < ' ' || *s->at > '~' || *s->at == '\\' || length + 1 >= capacity) {
            return fail(s, "a string is too long or has strange characters");
        }
        text[length++] = *s->at;
    }
    text[length] = '\0';
    return accept(s, quote) || fail(s, "a string does not end");
}

static bool parse_count(scan *s, int64_t *value)
{
    int digits = 0;
    *value = 0;
    skip_space(s);
    for (; s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++, digits++) {
        int digit = *s->at - '0';
        if (*value > (INT64_MAX - digit) / 10) {
            return fail(s, "a number of the shape does not fit 63 bits");
        }
        *value = *value * 10 + digit;
    }
    if (digits == 0 && s->at < s->end && *s->at == '-') {
        return fail(s, "a number of the shape is negative");
    }
    return digits > 0 || fail(s, "the shape is no tuple of numbers");
}

/* "()", "(3,)", "(3, 4)", "(3, 4,)": a single number needs its comma, as in Python. */
static bool parse_shape(scan *s, cli_array *array)
{
    bool comma = true;
    array->rank = 0;
    if (!accept(s, '(')) {
        return fail(s, "the shape is no tuple of numbers");
    }
    while (!accept(s, ')')) {
        if (!comma || array->rank == CLI_RANK) {
            return fail(s,
                        comma ? "the array has more than 8 dimensions" : "the shape is no tuple of numbers");
        }
        if (!parse_count(s, &array->shape[array->rank++])) {
            return false;
        }
        comma = accept(s, ',');
    }
    return (array->rank != 1 || comma) || fail(s, "the shape is no tuple of numbers");
}

typedef struct fields {
    char descr[64];
    bool fortran;
    bool has_descr, has_order, has_shape;
} fields;

static bool parse_entry(scan *s, fields *h, cli_array *array)
{
    char key[32];
    if (!parse_text(s, key, sizeof key) || !accept(s, ':')) {
        return fail(s, "a key has no value");
    }
    if (strcmp(key, "descr") == 0 && !h->has_descr) {
        h->has_descr = true;
        skip_space(s);
        if (s->at < s->end && *s->at == '[') {
            return fail(s, "its elements are records; save one plain array of float32");
        }
        return parse_text(s, h->descr, sizeof h->descr);
    }
    if (strcmp(key, "fortran_order") == 0 && !h->has_order) {
        h->has_order = true;
        h->fortran = accept_word(s, "True");
        return h->fortran || accept_word(s, "False") || fail(s, "fortran_order is neither True nor False");
    }
    if (strcmp(key, "shape") == 0 && !h->has_shape) {
        h->has_shape = true;
        return parse_shape(s, array);
    }
    return fail(s, "a key is unknown or stands twice");
}

static bool parse_header(scan *s, fields *h, cli_array *array)
{
    bool comma = true;
    if (!accept(s, '{')) {
        return fail(s, "it is no dictionary");
    }
    while (!accept(s, '}')) {
        if (!comma) {
            return fail(s, "a comma is missing");
        }
        if (!parse_entry(s, h, array)) {
            return false;
        }
        comma = accept(s, ',');
    }
    skip_space(s);
    if (s->at < s->end) {
        return fail(s, "something follows the dictionary");
    }
    return (h->has_descr && h->has_order && h->has_shape) ||
           fail(s, "descr, fortran_order or shape is missing");
}

/* The dtype that descr names, or a refusal with the line of Python that helps. */
static attn_status find_dtype(const char *path, const char *descr, cli_dtype *dtype)
{
    static const struct {
        const char *descr;
        cli_dtype dtype;
    } known[] = {{"<f4", CLI_F32}, {"<f2", CLI_F16}, {"<f8", CLI_F64}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(descr, known[i].descr) == 0) {
            *dtype = known[i].dtype;
            return ATTN_OK;
        }
    }
    if (descr[0] == '>') {
        return cli_refuse(ATTN_EIO,
                          "%s is big-endian ('%s'); convert it: np.save(f, np.load(f).astype('<f4'))", path,
                          descr);
    }
    if (strcmp(descr, "<V2") == 0 || strcmp(descr, "|V2") == 0) {
        return cli_refuse(ATTN_EIO,
                          "%s has elements of type '%s', perhaps bf16, which .npy cannot name; "
                          "save it as .safetensors",
                          path, descr);
    }
    return cli_refuse(ATTN_EIO,
                      "%s has elements of type '%s'; '<f4', '<f2' and '<f8' are read: "
                      "np.save(f, np.load(f).astype('<f4'))",
                      path, descr);
}

static attn_status check_size(const cli_reader *reader, cli_array *array)
{
    char shape[CLI_SHAPE_TEXT];
    if (!cli_array_measure(array)) {
        return cli_refuse(ATTN_EIO, "%s has a shape that is too large: %s", reader->path,
                          cli_array_shape(array, shape));
    }
    int64_t want = array->count * (int64_t)cli_dtype_size(array->dtype), have = reader->size - array->offset;
    if (want != have) {
        return cli_refuse(ATTN_EIO, "%s is %s: its header says %s %s, %lld bytes, and %lld bytes follow it",
                          reader->path, have < want ? "cut off" : "too long", cli_dtype_name(array->dtype),
                          cli_array_shape(array, shape), (long long)want, (long long)have);
    }
    return ATTN_OK;
}

/* The header's place in the file, from the fixed part in front of it. */
static attn_status find_header(const cli_reader *reader, int64_t *begin, int64_t *length)
{
    unsigned char head[MAGIC + 4] = {0};
    if (reader->size < MAGIC + 2) {
        return cli_refuse(ATTN_EIO, "%s is no .npy file: it has only %lld bytes", reader->path,
                          (long long)reader->size);
    }
    size_t take = reader->size < (int64_t)sizeof head ? (size_t)reader->size : sizeof head;
    attn_status status = cli_reader_read(reader, head, take, 0);
    if (status != ATTN_OK) {
        return status;
    }
    if (memcmp(head, "\x93NUMPY", 6) != 0) {
        return cli_refuse(ATTN_EIO, "%s is no .npy file: it does not begin with \\x93NUMPY", reader->path);
    }
    if (head[6] < 1 || head[6] > 3 || head[7] != 0) {
        return cli_refuse(ATTN_EIO, "%s has .npy version %d.%d; 1.0, 2.0 and 3.0 are read", reader->path,
                          head[6], head[7]);
    }
    *length = head[MAGIC] | (int64_t)head[MAGIC + 1] << 8;
    *begin = MAGIC + 2;
    if (head[6] > 1) {
        *length |= (int64_t)head[MAGIC + 2] << 16 | (int64_t)head[MAGIC + 3] << 24;
        *begin = MAGIC + 4;
    }
    if (*length > reader->size - *begin || *length > HEADER_MOST) {
        return cli_refuse(ATTN_EIO, "%s has a header of %lld bytes; the file has %lld, and %d are read",
                          reader->path, (long long)*length, (long long)reader->size, HEADER_MOST);
    }
    return ATTN_OK;
}

attn_status cli_npy_open(const cli_reader *reader, cli_array *array)
{
    int64_t begin = 0, length = 0;
    fields h = {.descr = ""};
    *array = (cli_array){.rank = 0};
    attn_status status = find_header(reader, &begin, &length);
    if (status != ATTN_OK) {
        return status;
    }
    char *text = malloc((size_t)length + 1);
    if (text == NULL) {
        return cli_refuse(ATTN_ENOMEM, "no memory for the header of %s", reader->path);
    }
    status = cli_reader_read(reader, text, (size_t)length, begin);
    if (status == ATTN_OK) {
        scan s = {.at = text, .end = text + length};
        if (!parse_header(&s, &h, array)) {
            status = cli_refuse(ATTN_EIO, "%s has a bad header, at byte %lld: %s", reader->path,
                                (long long)(begin + (s.at - text)), s.why);
        }
    }
    free(text);
    array->offset = begin + length;
    if (status == ATTN_OK) {
        status = find_dtype(reader->path, h.descr, &array->dtype);
    }
    if (status == ATTN_OK && h.fortran && array->rank > 1) {
        status = cli_refuse(
            ATTN_EIO, "%s is in Fortran order; convert it: np.save(f, np.ascontiguousarray(np.load(f)))",
            reader->path);
    }
    return status == ATTN_OK ? check_size(reader, array) : status;
}

/* NumPy leaves room for the first dimension to grow to 21 digits in place, then pads to 64 bytes. */
size_t cli_npy_header(const cli_array *array, char header[CLI_NPY_HEADER])
{
    static const char *const descr[] = {
        [CLI_F32] = "<f4", [CLI_F16] = "<f2", [CLI_BF16] = "", [CLI_F64] = "<f8"};
    enum { START = MAGIC + 2, GROWTH = 21 };
    char *text = header + START, first[32] = "";
    int room = CLI_NPY_HEADER - START;
    int at = snprintf(text, (size_t)room, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                      descr[array->dtype]);
    for (int i = 0; i < array->rank; i++) {
        at +=
            snprintf(text + at, (size_t)(room - at), "%s%lld", i > 0 ? ", " : "", (long long)array->shape[i]);
    }
    at += snprintf(text + at, (size_t)(room - at), "%s), }", array->rank == 1 ? "," : "");
    if (array->rank > 0) {
        at += GROWTH - snprintf(first, sizeof first, "%lld", (long long)array->shape[0]);
    }
    int length = (START + at + 1) / ALIGN * ALIGN + ALIGN - START; /* NumPy pads by 1 to 64, never by 0 */
    int written = (int)strlen(text);
    memset(text + written, ' ', (size_t)(length - written));
    text[length - 1] = '\n';
    memcpy(header, "\x93NUMPY\x01\x00", MAGIC);
    header[MAGIC] = (char)(length & 255);
    header[MAGIC + 1] = (char)(length >> 8);
    return (size_t)(START + length);
}
