/* SPDX-License-Identifier: Apache-2.0 */
/* test_safetensors.c - the .safetensors reader and writer, and the strict JSON reader under it. */
#define _XOPEN_SOURCE 700

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/json_read.h"
#include "cli/safetensors.h"
#include "files.h"

static attn_status open_bytes(const void *bytes, size_t size, const char *name, cli_array *array)
{
    cli_reader reader;
    const char *path = files_path(files_own, "x.safetensors");
    files_write(path, bytes, size);
    assert_int_equal(cli_reader_open(&reader, path), ATTN_OK);
    attn_status status = cli_safetensors_open(&reader, name, "q", array);
    cli_reader_close(&reader);
    assert_int_equal(unlink(path), 0);
    return status;
}

/* A file of this header and `data` zero bytes behind it. */
static attn_status open_text(const char *text, size_t data, const char *name, cli_array *array)
{
    size_t length = strlen(text), size = 8 + length + data;
    unsigned char *bytes = calloc(1, size);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)((uint64_t)length >> 8 * i);
    }
    memcpy(bytes + 8, text, length);
    attn_status status = open_bytes(bytes, size, name, array);
    free(bytes);
    return status;
}

#define ONE "{\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define QKV                                                                                                  \
    "{\"__metadata__\":{\"format\":\"pt\"},"                                                                 \
    "\"q\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[24,36]},"                                    \
    "\"k\":{\"dtype\":\"BF16\",\"shape\":[4,3],\"data_offsets\":[0,24]},"                                    \
    "\"v\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[36,44]}}   "

static void good_headers(void **state)
{
    cli_array array;
    (void)state;
    assert_int_equal(open_text(ONE "}", 24, NULL, &array), ATTN_OK);
    assert_int_equal(array.dtype, CLI_F32);
    assert_int_equal(array.rank, 2);
    assert_int_equal(array.shape[1], 3);
    assert_int_equal(array.offset, 8 + strlen(ONE) + 1);
    assert_int_equal(open_text(QKV, 44, NULL, &array), ATTN_OK); /* the one called q */
    assert_int_equal(array.dtype, CLI_F16);
    assert_int_equal(array.offset, 8 + strlen(QKV) + 24);
    assert_int_equal(open_text(QKV, 44, "k", &array), ATTN_OK);
    assert_int_equal(array.dtype, CLI_BF16);
    assert_int_equal(array.offset, 8 + strlen(QKV));
    assert_int_equal(
        open_text("{\"\\u0071\\ud83d\\ude00\\n\":{\"shape\":[],\"dtype\":\"F64\",\"data_offsets\""
                  ":[0,8],\"later\":[{\"a\":[1e5,-0.5,true,false,null,\"\\\"\"]}]}}",
                  8, "q\xf0\x9f\x98\x80\n", &array),
        ATTN_OK);
    assert_int_equal(array.count, 1);
    assert_int_equal(
        open_text("{\"e\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[0,0]}}", 0, NULL, &array),
        ATTN_OK);
    assert_int_equal(array.count, 0);
}

typedef struct bad {
    const char *text;
    size_t data;
    const char *name, *says;
} bad;

#define T(dtype, shape, offsets)                                                                             \
    "{\"x\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static const bad bad_cases[] = {
    {QKV, 44, "nope", "it has: q, k, v"},
    {QKV, 44, "v", "I64"},
    {ONE ",\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[24,28]}}", 28, NULL, "x, y"},
    {ONE "}", 23, NULL, "outside the file"},
    {ONE "}", 25, NULL, "bytes follow"},
    {ONE ",\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[20,24]}}", 24, "x", "overlap"},
    {ONE ",\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[28,32]}}", 32, "x", "hole"},
    {ONE ",\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[24,28]}}", 28, "x", "twice"},
    {ONE ",\"\\u0078\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[24,28]}}", 28, "x", "twice"},
    {ONE ",\"__metadata__\":{},\"__metadata__\":{}}", 24, "x", "twice"},
    {ONE ",\"__metadata__\":{\"a\":1}}", 24, "x", "string is expected"},
    {T("F32", "[2,3]", "[0,20]"), 20, NULL, "do not fit"},
    {T("F32", "[2,3]", "[24,0]"), 24, NULL, "outside"},
    {T("F32", "[4294967296,4294967296]", "[0,24]"), 24, NULL, "too large"},
    {T("F32", "[99999999999999999999]", "[0,24]"), 24, NULL, "63 bits"},
    {T("F32", "[-6]", "[0,24]"), 24, NULL, "0, 1, 2"},
    {T("F32", "[6.0]", "[0,24]"), 24, NULL, "0, 1, 2"},
    {T("F32", "[6e0]", "[0,24]"), 24, NULL, "0, 1, 2"},
    {T("F32", "[06]", "[0,24]"), 24, NULL, "leading zero"},
    {T("F32", "[2,3,]", "[0,24]"), 24, NULL, "0, 1, 2"},
    {T("F32", "[1,1,1,1,1,1,1,1,6]", "[0,24]"), 24, NULL, "8 dimensions"},
    {T("F32", "6", "[0,24]"), 24, NULL, "array is expected"},
    {T("F32", "[6]", "[0,24,24]"), 24, NULL, "bracket"},
    {T("F32", "[6]", "[0]"), 24, NULL, "bracket"},
    {T("U8", "[24]", "[0,24]"), 24, NULL, "U8"},
    {T("F4", "[48]", "[0,24]"), 24, NULL, "F4"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[6]}}", 24, NULL, "missing"},
    {"{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", 24, NULL,
     "twice"},
    {"{\"x\":{\"dtype\":F32}}", 24, NULL, "string is expected"},
    {ONE "", 24, NULL, "bracket"},
    {ONE "}x", 24, NULL, "follows"},
    {ONE ",}", 24, NULL, "string is expected"},
    {"[]", 24, NULL, "object is expected"},
    {"{}", 0, NULL, "no tensor"},
    {"{ ", 0, NULL, "too early"},
    {"{\"x", 0, NULL, "does not end"},
    {"{\"\t\":1}", 0, NULL, "control"},
    {"{\"\\x41\":1}", 0, NULL, "escape"},
    {"{\"\\u12g4\":1}", 0, NULL, "hexadecimal"},
    {"{\"\\ud800\":1}", 0, NULL, "surrogate"},
    {"{\"\\udc00\\ud800\":1}", 0, NULL, "surrogate"},
    {"{\"\\u0000\":1}", 0, NULL, "NUL"},
    {"{\"\xff\":1}", 0, NULL, "UTF-8"},
    {"{\"\xc0\xaf\":1}", 0, NULL, "UTF-8"},
    {"{\"\xed\xa0\x80\":1}", 0, NULL, "UTF-8"},
    {"{\"\xf5\x80\x80\x80\":1}", 0, NULL, "UTF-8"},
    {"{\"x\":{\"a\":01}}", 0, NULL, "bracket"},
    {"{\"x\":{\"a\":tru}}", 0, NULL, "value"},
    {"{\"x\":{\"a\":1.}}", 0, NULL, "digit"},
    {"{\"x\":{\"a\":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}}", 0, NULL, "too deep"},
};

static void bad_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_cases / sizeof bad_cases[0]; i++) {
        cli_array array;
        const bad *c = &bad_cases[i];
        if (open_text(c->text, c->data, c->name, &array) != ATTN_EIO) {
            fail_msg("case %zu is not refused: %s", i, c->text);
        }
        if (strstr(attn_last_error(), c->says) == NULL) {
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, attn_last_error(), c->says);
        }
    }
}

/* Every cut, and every changed bit, of a good file: no crash, and what is accepted is consistent. */
static void damaged(void **state)
{
    char file[8 + sizeof QKV + 44] = "";
    size_t length = strlen(QKV), size = 8 + length + 44;
    cli_array array;
    (void)state;
    file[0] = (char)(length & 255);
    file[1] = (char)(length >> 8);
    memcpy(file + 8, QKV, length);
    assert_int_equal(open_bytes(file, size, NULL, &array), ATTN_OK);
    for (size_t cut = 0; cut < size; cut++) {
        assert_int_equal(open_bytes(file, cut, NULL, &array), ATTN_EIO);
    }
    for (size_t at = 0; at < 8 + length; at++) {
        for (int change = 1; change < 256; change *= 2) {
            file[at] = (char)(file[at] ^ change);
            attn_status status = open_bytes(file, size, NULL, &array);
            assert_true(status == ATTN_EIO || status == ATTN_OK);
            if (status == ATTN_OK) {
                int64_t end = array.offset + array.count * (int64_t)cli_dtype_size(array.dtype);
                assert_true(array.offset >= 8 && end <= (int64_t)size);
            }
            file[at] = (char)(file[at] ^ change);
        }
    }
    memset(file, 0xff, 8);
    assert_int_equal(open_bytes(file, size, NULL, &array), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "18446744073709551615"));
    memset(file, 0, 8);
    assert_int_equal(open_bytes(file, size, NULL, &array), ATTN_EIO);
}

/* Headers longer than the reader's window, with a name across its edge. */
static void long_headers(void **state)
{
    static char text[60000];
    cli_array array;
    (void)state;
    for (size_t shift = 0; shift < 40; shift++) {
        size_t at = (size_t)snprintf(text, sizeof text, "{%*s\"__metadata__\":{\"a\":\"", (int)shift, "");
        memset(text + at, 'm', 4000);
        at += 4000;
        at += (size_t)snprintf(text + at, sizeof text - at, "\"}");
        for (int i = 0; i < 300; i++) {
            at += (size_t)snprintf(
                text + at, sizeof text - at,
                ",\"layer.%d\":{\"dtype\":\"F32\",\"shape\":[1,%d],\"data_offsets\":[%d,%d]}", i, i % 7, 0,
                0);
            /* offsets are filled in below: keep them one after the other */
            at -= sizeof "[0,0]}" - 1;
            int begin = 0;
            for (int j = 0; j < i; j++) {
                begin += 4 * (j % 7);
            }
            at += (size_t)snprintf(text + at, sizeof text - at, "[%d,%d]}", begin, begin + 4 * (i % 7));
        }
        snprintf(text + at, sizeof text - at, "}");
        size_t data = 0;
        for (size_t j = 0; j < 300; j++) {
            data += 4 * (j % 7);
        }
        if (open_text(text, data, "layer.299", &array) != ATTN_OK) {
            fail_msg("%s", attn_last_error());
        }
        assert_int_equal(array.shape[1], 299 % 7);
        assert_int_equal(open_text(text, data, NULL, &array), ATTN_EIO);
        assert_non_null(strstr(attn_last_error(), "300 tensors"));
        assert_non_null(strstr(attn_last_error(), "layer.0, layer.1"));
    }
}

static void round_trip(void **state)
{
    uint64_t random = 11;
    (void)state;
    for (int round = 0; round < 300; round++) {
        char file[CLI_SAFETENSORS_HEADER + 8 * 1024] = "";
        cli_array got, array = {.dtype = (cli_dtype)(files_random(&random) % 4),
                                .rank = (int)(files_random(&random) % 6)};
        for (int i = 0; i < array.rank; i++) {
            array.shape[i] = (int64_t)(files_random(&random) % 5);
        }
        assert_true(cli_array_measure(&array));
        if (array.count > 1024) {
            continue;
        }
        size_t header = cli_safetensors_header(&array, "lse", file);
        assert_int_equal(header % 8, 0);
        size_t bytes = header + (size_t)array.count * cli_dtype_size(array.dtype);
        assert_int_equal(open_bytes(file, bytes, "lse", &got), ATTN_OK);
        assert_int_equal(got.dtype, array.dtype);
        assert_int_equal(got.rank, array.rank);
        assert_int_equal(got.offset, header);
        assert_memory_equal(got.shape, array.shape, sizeof array.shape);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_headers), cmocka_unit_test(bad_headers), cmocka_unit_test(damaged),
        cmocka_unit_test(long_headers), cmocka_unit_test(round_trip),
    };
    return cmocka_run_group_tests(tests, files_set_up, files_tear_down);
}
