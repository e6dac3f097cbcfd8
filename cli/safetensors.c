/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - a strict reader and a writer of .safetensors headers.
 *
 * A file is the length of its header (8 bytes, little-endian), the header, and the data.  The header is one
 * JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from the start of
 * the data, beside an optional "__metadata__" of strings.  The format promises that the tensors fill the data
 * without a hole and without overlap; that, every size and every name is checked before anything is read.
 * The header (up to 100 MB) streams through a small window; what is kept is 24 bytes a tensor.
 * Cost: O(tensors * log tensors).
 */
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_read.h"

enum { DEPTH = 16, NAME = 1024, HEADER_MOST = 100000000, TENSORS_MOST = 1 << 18, ALIGN = 8 };

/* What is kept of each tensor, to find overlaps, holes and names that stand twice. */
typedef struct extent {
    int64_t begin, end;
    uint64_t name; /* hash: that two names of one file share it is as good as impossible */
} extent;

typedef struct entry { /* one tensor as its header tells */
    char dtype[16];
    cli_array array;
    int64_t begin, end;
    bool has_dtype, has_shape, has_offsets;
} entry;

typedef struct listing {
    cli_json_in in;
    const char *name, *usual; /* what is looked for */
    extent *extent;
    int64_t count, room;
    int64_t data; /* bytes behind the header */
    entry chosen;
    bool found;      /* chosen is set: the tensor called name, or usual, or the first */
    bool exact;      /* and it is called so */
    char names[400]; /* for the message: the first ones */
} listing;

static const struct {
    const char *name;
    int size;
    int dtype; /* cli_dtype, or -1: not read */
} dtypes[] = {
    {"F32", 4, CLI_F32}, {"F16", 2, CLI_F16}, {"BF16", 2, CLI_BF16}, {"F64", 8, CLI_F64},
    {"BOOL", 1, -1},     {"U8", 1, -1},       {"I8", 1, -1},         {"F8_E4M3", 1, -1},
    {"F8_E5M2", 1, -1},  {"U16", 2, -1},      {"I16", 2, -1},        {"U32", 4, -1},
    {"I32", 4, -1},      {"U64", 8, -1},      {"I64", 8, -1},        {"C64", 8, -1},
};

/* Index in dtypes[], or -1 for a type that came into the format later. */
static int find_dtype(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

/* ---- one tensor ---- */

static bool parse_shape(cli_json_in *in, entry *e)
{
    bool first = true;
    if (!cli_json_expect(in, '[')) {
        return false;
    }
    while (cli_json_more(in, ']', &first)) {
        if (e->array.rank == CLI_RANK) {
            return cli_json_fail(in, "a tensor has more than 8 dimensions");
        }
        if (!cli_json_in_count(in, &e->array.shape[e->array.rank++])) {
            return false;
        }
    }
    return in->why == NULL;
}

static bool parse_offsets(cli_json_in *in, entry *e)
{
    return cli_json_expect(in, '[') && cli_json_in_count(in, &e->begin) && cli_json_expect(in, ',') &&
           cli_json_in_count(in, &e->end) && cli_json_expect(in, ']');
}

static bool once(cli_json_in *in, bool *seen)
{
    if (*seen) {
        return cli_json_fail(in, "a key stands twice");
    }
    *seen = true;
    return true;
}

/* Keys that came into the format later are passed over. */
static bool parse_member(cli_json_in *in, entry *e)
{
    char key[NAME];
    if (!cli_json_in_text(in, key, sizeof key) || !cli_json_expect(in, ':')) {
        return false;
    }
    if (strcmp(key, "dtype") == 0) {
        return once(in, &e->has_dtype) && cli_json_in_text(in, e->dtype, sizeof e->dtype);
    }
    if (strcmp(key, "shape") == 0) {
        return once(in, &e->has_shape) && parse_shape(in, e);
    }
    if (strcmp(key, "data_offsets") == 0) {
        return once(in, &e->has_offsets) && parse_offsets(in, e);
    }
    return cli_json_skip(in, DEPTH);
}

static bool check_entry(cli_json_in *in, entry *e, int64_t data)
{
    if (!e->has_dtype || !e->has_shape || !e->has_offsets) {
        return cli_json_fail(in, "dtype, shape or data_offsets is missing");
    }
    if (e->begin > e->end || e->end > data) {
        return cli_json_fail(in, "data_offsets lie outside the file");
    }
    int type = find_dtype(e->dtype);
    if (type < 0) {
        return true; /* its size is not known; only a chosen one must be */
    }
    int64_t bytes = dtypes[type].size;
    for (int i = 0; i < e->array.rank; i++) {
        int64_t n = e->array.shape[i];
        if (n > 0 && bytes > INT64_MAX / n) {
            return cli_json_fail(in, "a shape is too large");
        }
        bytes *= n;
    }
    return bytes == e->end - e->begin || cli_json_fail(in, "data_offsets do not fit dtype and shape");
}

static bool parse_entry(listing *l, entry *e)
{
    bool first = true;
    *e = (entry){.begin = 0};
    if (!cli_json_expect(&l->in, '{')) {
        return false;
    }
    while (cli_json_more(&l->in, '}', &first)) {
        if (!parse_member(&l->in, e)) {
            return false;
        }
    }
    return l->in.why == NULL && check_entry(&l->in, e, l->data);
}

/* ---- the list ---- */

static bool keep_extent(listing *l, const char *name, const entry *e)
{
    if (l->count == l->room) {
        int64_t room = l->room > 0 ? 2 * l->room : 16;
        extent *grown = room <= TENSORS_MOST ? realloc(l->extent, (size_t)room * sizeof *grown) : NULL;
        if (grown == NULL) {
            return cli_json_fail(&l->in, "there are too many tensors");
        }
        l->extent = grown;
        l->room = room;
    }
    l->extent[l->count++] =
        (extent){.begin = e->begin, .end = e->end, .name = cli_hash(0, name, strlen(name))};
    return true;
}

static void list_name(listing *l, const char *name)
{
    size_t at = strlen(l->names), length = strlen(name);
    if (at + length + 8 < sizeof l->names) {
        snprintf(l->names + at, sizeof l->names - at, "%s%.*s", at > 0 ? ", " : "", (int)length, name);
    } else if (at > 0 && l->names[at - 1] != '.') {
        snprintf(l->names + at, sizeof l->names - at, ", ...");
    }
}

static bool parse_metadata(cli_json_in *in)
{
    bool first = true;
    if (!cli_json_expect(in, '{')) {
        return false;
    }
    while (cli_json_more(in, '}', &first)) {
        if (!cli_json_in_text(in, NULL, 0) || !cli_json_expect(in, ':') || !cli_json_in_text(in, NULL, 0)) {
            return false;
        }
    }
    return in->why == NULL;
}

static bool parse_listing(listing *l)
{
    char name[NAME];
    bool first = true, metadata = false;
    const char *wanted = l->name != NULL ? l->name : l->usual;
    if (!cli_json_expect(&l->in, '{')) {
        return false;
    }
    while (cli_json_more(&l->in, '}', &first)) {
        entry e;
        if (!cli_json_in_text(&l->in, name, sizeof name) || !cli_json_expect(&l->in, ':')) {
            return false;
        }
        if (strcmp(name, "__metadata__") == 0) {
            if (!once(&l->in, &metadata) || !parse_metadata(&l->in)) {
                return false;
            }
            continue;
        }
        if (!parse_entry(l, &e) || !keep_extent(l, name, &e)) {
            return false;
        }
        list_name(l, name);
        bool exact = strcmp(name, wanted) == 0;
        if (exact || !l->found) {
            l->chosen = e;
            l->exact = exact;
            l->found = true;
        }
    }
    return cli_json_done(&l->in);
}

/* ---- the whole file ---- */

static int by_name(const void *a, const void *b)
{
    uint64_t x = ((const extent *)a)->name, y = ((const extent *)b)->name;
    return (x > y) - (x < y);
}

static int by_place(const void *a, const void *b)
{
    const extent *x = a, *y = b;
    int order = (x->begin > y->begin) - (x->begin < y->begin);
    return order != 0 ? order : (x->end > y->end) - (x->end < y->end);
}

static const char *check_extents(listing *l)
{
    int64_t end = 0;
    if (l->count == 0) {
        return "it has no tensor";
    }
    qsort(l->extent, (size_t)l->count, sizeof *l->extent, by_name);
    for (int64_t i = 1; i < l->count; i++) {
        if (l->extent[i].name == l->extent[i - 1].name) {
            return "a name stands twice";
        }
    }
    qsort(l->extent, (size_t)l->count, sizeof *l->extent, by_place);
    for (int64_t i = 0; i < l->count; i++) {
        if (l->extent[i].begin != end) {
            return l->extent[i].begin < end ? "two tensors overlap" : "there is a hole between two tensors";
        }
        end = l->extent[i].end;
    }
    return end == l->data ? NULL : "bytes follow the last tensor";
}

static attn_status choose(const cli_reader *reader, listing *l, int64_t data_at, cli_array *array)
{
    bool only = l->name == NULL && l->count == 1;
    if (!only && !l->exact) {
        if (l->name != NULL) {
            return cli_refuse(ATTN_EIO, "%s has no tensor \"%s\"; it has: %s", reader->path, l->name,
                              l->names);
        }
        return cli_refuse(ATTN_EIO,
                          "%s has %lld tensors and none is called \"%s\"; say which, as %s:NAME: %s",
                          reader->path, (long long)l->count, l->usual, reader->path, l->names);
    }
    int type = find_dtype(l->chosen.dtype);
    if (type < 0 || dtypes[type].dtype < 0) {
        return cli_refuse(ATTN_EIO, "%s holds elements of type %s; F32, F16, BF16 and F64 are read",
                          reader->path, l->chosen.dtype);
    }
    *array = l->chosen.array;
    array->dtype = (cli_dtype)dtypes[type].dtype;
    array->offset = data_at + l->chosen.begin;
    return cli_array_measure(array) ? ATTN_OK : cli_refuse(ATTN_EIO, "%s is too large", reader->path);
}

static attn_status find_header(const cli_reader *reader, int64_t *length)
{
    unsigned char head[8];
    uint64_t value = 0;
    if (reader->size < 8 + 2) {
        return cli_refuse(ATTN_EIO, "%s is no .safetensors file: it has only %lld bytes", reader->path,
                          (long long)reader->size);
    }
    attn_status status = cli_reader_read(reader, head, sizeof head, 0);
    if (status != ATTN_OK) {
        return status;
    }
    for (int i = 0; i < 8; i++) {
        value |= (uint64_t)head[i] << 8 * i;
    }
    if (value > HEADER_MOST || (int64_t)value > reader->size - 8) {
        return cli_refuse(ATTN_EIO,
                          "%s is cut off or no .safetensors file: its header would have %llu bytes, the file "
                          "has %lld, and %d are read",
                          reader->path, (unsigned long long)value, (long long)reader->size, HEADER_MOST);
    }
    *length = (int64_t)value;
    return ATTN_OK;
}

attn_status cli_safetensors_open(const cli_reader *reader, const char *name, const char *usual,
                                 cli_array *array)
{
    int64_t length = 0;
    attn_status status = find_header(reader, &length);
    if (status != ATTN_OK) {
        return status;
    }
    listing *l = calloc(1, sizeof *l); /* the window makes it too large for some stacks */
    if (l == NULL) {
        return cli_refuse(ATTN_ENOMEM, "no memory for the header of %s", reader->path);
    }
    l->name = name;
    l->usual = usual;
    l->data = reader->size - 8 - length;
    cli_json_in_begin(&l->in, reader, 8, 8 + length);
    if (!parse_listing(l)) {
        status = l->in.status != ATTN_OK
                     ? l->in.status
                     : cli_refuse(ATTN_EIO, "%s has a bad header, at byte %lld: %s", reader->path,
                                  (long long)cli_json_where(&l->in), l->in.why);
    } else {
        const char *why = check_extents(l);
        status = why != NULL ? cli_refuse(ATTN_EIO, "%s has a bad header: %s", reader->path, why)
                             : choose(reader, l, 8 + length, array);
    }
    free(l->extent);
    free(l);
    return status;
}

size_t cli_safetensors_header(const cli_array *array, const char *name, char header[CLI_SAFETENSORS_HEADER])
{
    static const char *const types[] = {
        [CLI_F32] = "F32", [CLI_F16] = "F16", [CLI_BF16] = "BF16", [CLI_F64] = "F64"};
    char *text = header + 8;
    int room = CLI_SAFETENSORS_HEADER - 8;
    int at =
        snprintf(text, (size_t)room, "{\"%.32s\":{\"dtype\":\"%s\",\"shape\":[", name, types[array->dtype]);
    for (int i = 0; i < array->rank; i++) {
        at +=
            snprintf(text + at, (size_t)(room - at), "%s%lld", i > 0 ? "," : "", (long long)array->shape[i]);
    }
    at += snprintf(text + at, (size_t)(room - at), "],\"data_offsets\":[0,%lld]}}",
                   (long long)(array->count * (int64_t)cli_dtype_size(array->dtype)));
    while (at % ALIGN != 0) {
        text[at++] = ' ';
    }
    for (int i = 0; i < 8; i++) {
        header[i] = (char)((uint64_t)at >> 8 * i & 255u);
    }
    return 8 + (size_t)at;
}
