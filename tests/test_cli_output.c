/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cli_output.c - the frame of the program: JSON, tables, text for people.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/cli.h"

/* ---- random numbers (xorshift64*) ---------------------------------------------------------------------- */

static uint64_t next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* ---- what a writer wrote --------------------------------------------------------------------------------
 */

static char *contents(FILE *file)
{
    long size = ftell(file);
    char *text = calloc((size_t)size + 1, 1);
    assert_non_null(text);
    rewind(file);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    fclose(file);
    return text;
}

static void assert_written(FILE *file, const char *want)
{
    char *text = contents(file);
    assert_string_equal(text, want);
    free(text);
}

/* ---- JSON -------------------------------------------------------------------------------------------------
 */

static void test_json(void **state)
{
    cli_json json;
    FILE *file = tmpfile();
    (void)state;
    assert_non_null(file);
    cli_json_begin(&json, file, true);
    cli_json_object(&json, NULL);
    cli_json_int(&json, "least", INT64_MIN);
    cli_json_real(&json, "tenth", 0.1);
    cli_json_real(&json, "nan", NAN);
    cli_json_real(&json, "inf", INFINITY);
    cli_json_bool(&json, "yes", true);
    cli_json_text(&json, "none", NULL);
    cli_json_ints(&json, "ints", (int64_t[]){1, -2, 3}, 3);
    cli_json_array(&json, "rows");
    cli_json_object(&json, NULL);
    cli_json_end(&json);
    cli_json_object(&json, NULL);
    cli_json_int(&json, "a", 1);
    cli_json_end(&json);
    cli_json_array(&json, NULL);
    cli_json_end(&json);
    cli_json_end(&json);
    cli_json_end(&json);
    assert_written(file,
                   "{\"least\": -9223372036854775808, \"tenth\": 0.1, \"nan\": null, \"inf\": null, "
                   "\"yes\": true, \"none\": null, \"ints\": [1, -2, 3], \"rows\": [{}, {\"a\": 1}, []]}\n");
}

static void test_json_text(void **state)
{
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"plain", "\"plain\""},
        {"\"\\/", "\"\\\"\\\\/\""},
        {"\n\t\x01\x7f", "\"\\u000a\\u0009\\u0001\\u007f\""},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
        {"\xff", "\"\\ufffd\""},                                  /* no lead byte */
        {"a\xc3", "\"a\\ufffd\""},                                /* cut short */
        {"\xc0\xaf", "\"\\ufffd\\ufffd\""},                       /* overlong */
        {"\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\""},            /* a surrogate */
        {"\xf4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""}, /* beyond U+10FFFF */
        {"\xe2\x82x", "\"\\ufffd\\ufffdx\""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cli_json json;
        FILE *file = tmpfile();
        assert_non_null(file);
        cli_json_begin(&json, file, true);
        cli_json_text(&json, NULL, cases[i].text);
        assert_written(file, cases[i].want);
    }
}

/* Reals read back to the same bits. */
static void test_json_reals(void **state)
{
    uint64_t seed = 777;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        uint64_t bits = next(&seed);
        double value, back;
        memcpy(&value, &bits, sizeof(value));
        if (!isfinite(value)) {
            continue;
        }
        cli_json json;
        FILE *file = tmpfile();
        assert_non_null(file);
        cli_json_begin(&json, file, true);
        cli_json_real(&json, NULL, value);
        char *text = contents(file);
        back = strtod(text, NULL);
        assert_memory_equal(&back, &value, sizeof(value));
        free(text);
    }
}

/* ---- tables
 * -------------------------------------------------------------------------------------------------- */

static const cli_column columns[] = {
    {.key = "name", .title = "Name", .kind = CLI_CELL_TEXT, .width = 6},
    {.key = "count", .title = "Count", .kind = CLI_CELL_INT, .width = 5},
    {.key = "time_ms", .title = "Time", .kind = CLI_CELL_REAL, .precision = 2, .width = 6},
    {.key = "bytes", .title = "Bytes", .kind = CLI_CELL_BYTES, .width = 9},
    {.key = "ok", .title = "Ok", .kind = CLI_CELL_BOOL, .width = 3},
};

static FILE *write_table(cli_format format)
{
    cli_out out = {.file = tmpfile(), .format = format};
    cli_table table;
    assert_non_null(out.file);
    cli_json_begin(&out.json, out.file, true);
    cli_table_begin(&table, &out, "rows", columns, 5);
    cli_table_text(&table, "a|\"b\",c");
    cli_table_int(&table, 12);
    cli_table_real(&table, 1.005);
    cli_table_int(&table, 1536);
    cli_table_int(&table, 1);
    cli_table_text(&table, NULL);
    cli_table_missing(&table);
    cli_table_real(&table, NAN);
    cli_table_missing(&table);
    cli_table_int(&table, 0);
    cli_table_end(&table);
    return out.file;
}

static void test_tables(void **state)
{
    (void)state;
    assert_written(write_table(CLI_FORMAT_TABLE), "Name    Count    Time      Bytes   Ok\n"
                                                  "------  -----  ------  ---------  ---\n"
                                                  "a|\"b\",c     12    1.00   1.50 KiB  yes\n"
                                                  "-           -       -          -   no\n");
    assert_written(write_table(CLI_FORMAT_MD), "| Name | Count | Time | Bytes | Ok |\n"
                                               "|---|--:|--:|--:|--:|\n"
                                               "| a\\|\"b\",c | 12 | 1.00 | 1.50 KiB | yes |\n"
                                               "| - | - | - | - | no |\n");
    assert_written(write_table(CLI_FORMAT_CSV), "name,count,time_ms,bytes,ok\n"
                                                "\"a|\"\"b\"\",c\",12,1.005,1536,yes\n"
                                                ",,,,no\n");
    assert_written(
        write_table(CLI_FORMAT_JSONL),
        "{\"name\": \"a|\\\"b\\\",c\", \"count\": 12, \"time_ms\": 1.005, \"bytes\": 1536, \"ok\": true}\n"
        "{\"name\": null, \"count\": null, \"time_ms\": null, \"bytes\": null, \"ok\": false}\n");
    char *text = contents(write_table(CLI_FORMAT_JSON));
    assert_non_null(strstr(text, "{\"schema_version\": 1, \"rows\": [{\"name\": "));
    free(text);
}

/* ---- text
 * -------------------------------------------------------------------------------------------------- */

static void test_text(void **state)
{
    char text[CLI_NUMBER];
    (void)state;
    assert_string_equal(cli_bytes(text, 0), "0 B");
    assert_string_equal(cli_bytes(text, 1023), "1023 B");
    assert_string_equal(cli_bytes(text, 1024), "1.00 KiB");
    assert_string_equal(cli_bytes(text, 1048575), "1.00 MiB"); /* not 1024.00 KiB */
    assert_string_equal(cli_bytes(text, 1.5 * (1 << 30)), "1.50 GiB");
    assert_string_equal(cli_seconds(text, 12.34), "12.3 s");
    assert_string_equal(cli_seconds(text, 0.0125), "12.5 ms");
    assert_string_equal(cli_seconds(text, 59.96), "1 min 00 s");
    assert_string_equal(cli_seconds(text, 184), "3 min 04 s");
    assert_string_equal(cli_seconds(text, 3599.6), "1 h 00 min");
    FILE *file = tmpfile();
    assert_non_null(file);
    cli_wrap(file, "one two three four\n\nfive", 0, 2, 11);
    assert_written(file, "  one two\n  three\n  four\n\n  five\n");
}

/* ---- progress
 * ----------------------------------------------------------------------------------------------- */

/* stderr goes to a file during the call. */
static char *stderr_of(void (*call)(void))
{
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stderr);
    int kept = dup(STDERR_FILENO);
    assert_true(kept >= 0);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    call();
    fflush(stderr);
    assert_true(dup2(kept, STDERR_FILENO) >= 0);
    close(kept);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    return contents(file);
}

static void run_bar(void)
{
    cli_common common = {.progress = CLI_ALWAYS};
    cli_progress progress;
    cli_progress_begin(&progress, &common, "work", 1000);
    cli_progress_skip(&progress, 500);
    for (double end = cli_now() + 0.35; cli_now() < end;) {
        cli_progress_add(&progress, 1e-3);
    }
    cli_progress_end(&progress);
}

static void run_no_bar(void)
{
    cli_common common = {.progress = CLI_NEVER};
    cli_progress progress;
    cli_progress_begin(&progress, &common, "work", 1000);
    cli_progress_add(&progress, 500);
    cli_progress_end(&progress);
}

/* At most 10 times a second, in ASCII under the C locale, and gone at the end. */
static void test_progress(void **state)
{
    int drawn = 0;
    (void)state;
    char *text = stderr_of(run_bar);
    for (const char *at = strstr(text, "\rwork ["); at != NULL; at = strstr(at + 1, "\rwork [")) {
        drawn++;
    }
    assert_in_range(drawn, 2, 5);
    assert_non_null(strstr(text, "work [############............]  50 %"));
    for (const char *letter = text; *letter != '\0'; letter++) {
        assert_true((unsigned char)*letter < 0x80);
    }
    assert_string_equal(text + strlen(text) - 4, "\r\033[K");
    free(text);
    text = stderr_of(run_no_bar);
    assert_string_equal(text, "");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json),   cmocka_unit_test(test_json_text), cmocka_unit_test(test_json_reals),
        cmocka_unit_test(test_tables), cmocka_unit_test(test_text),      cmocka_unit_test(test_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
