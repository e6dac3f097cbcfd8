/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cli.c - the frame of the program: values, lists, option tables.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cli/cli.h"

#define WHY 200

/* ---- random numbers (xorshift64*) ---------------------------------------------------------------------- */

static uint64_t next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* ---- values -----------------------------------------------------------------------------------------------
 */

static void test_integers(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {{"0", 0},
                {"12", 12},
                {"+5", 5},
                {"-3", -3},
                {"40k", 40000},
                {"2M", 2000000},
                {"1G", 1000000000},
                {"3T", INT64_C(3000000000000)},
                {"4Ki", 4096},
                {"1Mi", 1 << 20},
                {"2Gi", INT64_C(1) << 31},
                {"9223372036854775807", INT64_MAX},
                {"-9223372036854775807", -INT64_MAX}};
    static const char *const bad[] = {"",
                                      " 1",
                                      "1 ",
                                      "x",
                                      "1x",
                                      "1.5",
                                      "0x10",
                                      "k",
                                      "--1",
                                      "+-1",
                                      "1kk",
                                      "1e",
                                      "1,2",
                                      "1-2",
                                      "1KiB",
                                      "9223372036854775808",
                                      "9223372036854775807k",
                                      "99999999999999999999999999",
                                      "\xff"};
    char why[WHY];
    int64_t value;
    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_true(cli_parse_int(good[i].text, INT64_MIN, INT64_MAX, &value, why, WHY));
        assert_int_equal(value, good[i].value);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        value = 77;
        why[0] = '\0';
        assert_false(cli_parse_int(bad[i], INT64_MIN, INT64_MAX, &value, why, WHY));
        assert_int_equal(value, 77);
        assert_true(strlen(why) > 0);
    }
    assert_false(cli_parse_int("5", 6, 10, &value, why, WHY));
    assert_string_equal(why, "it must be at least 6");
    assert_false(cli_parse_int("11", 6, 10, &value, why, WHY));
    assert_string_equal(why, "it must be at most 10");
}

static void test_bytes(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {{"0", 0},
                {"512", 512},
                {"512B", 512},
                {"64k", 64000},
                {"64kB", 64000},
                {"64KiB", 65536},
                {"160MiB", INT64_C(160) << 20},
                {"1.5GiB", INT64_C(3) << 29},
                {"0.25MiB", 1 << 18},
                {"2.000001k", 2000},
                {"1.000001M", 1000001},
                {"1TiB", INT64_C(1) << 40},
                {"8388607TiB", INT64_C(8388607) << 40}};
    static const char *const bad[] = {"",      "-1",  "-0.5k", ".5k",   "1.k",        "1.0000001k",
                                      "1.5.5", "GiB", "1GiBB", "1 GiB", "8388608TiB", "9223372036854775807k",
                                      "1e9",   "inf"};
    char why[WHY];
    int64_t value;
    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_true(cli_parse_bytes(good[i].text, 0, INT64_MAX, &value, why, WHY));
        assert_int_equal(value, good[i].value);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(cli_parse_bytes(bad[i], 0, INT64_MAX, &value, why, WHY));
    }
}

static void test_reals(void **state)
{
    static const char *const bad[] = {"", " 1", "1 ", "nan", "inf", "-inf", "1e999", "1x", "x"};
    char why[WHY];
    double value = 0;
    (void)state;
    assert_true(cli_parse_real("0.125", 0, 1, &value, why, WHY));
    assert_true(value == 0.125);
    assert_true(cli_parse_real("-1e-3", -1, 1, &value, why, WHY));
    assert_true(value == -1e-3);
    assert_false(cli_parse_real("2", 0, 1, &value, why, WHY));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(cli_parse_real(bad[i], -1e300, 1e300, &value, why, WHY));
    }
}

static void assert_list(const char *text, const int64_t *want, int64_t count)
{
    char why[WHY];
    cli_ints list = {NULL, 0};
    assert_true(cli_parse_ints(text, INT64_MIN, INT64_MAX, &list, why, WHY));
    assert_int_equal(list.count, count);
    for (int64_t i = 0; i < count; i++) {
        assert_int_equal(list.item[i], want[i]);
    }
    free(list.item);
}

static void test_lists(void **state)
{
    static const char *const bad[] = {"",       ",",
                                      "1,",     ",1",
                                      "1,,2",   "1;2",
                                      "1-",     "5-1",
                                      "1-9+",   "1-9*",
                                      "1-9*1",  "1-9*0",
                                      "1-9+0",  "0-9*2",
                                      "1-9-2",  "1-9+2+2",
                                      "-4-8*2", "1 2",
                                      "1-9 ",   "1-99999999999",
                                      "1-9+-1", "9223372036854775808"};
    char why[WHY];
    (void)state;
    assert_list("7", (int64_t[]){7}, 1);
    assert_list("4,7,8,31", (int64_t[]){4, 7, 8, 31}, 4);
    assert_list("3-6", (int64_t[]){3, 4, 5, 6}, 4);
    assert_list("1-100*10", (int64_t[]){1, 10, 100}, 3);
    assert_list("3-50*4,5", (int64_t[]){3, 12, 48, 5}, 4);
    assert_list("10k-50k+20k", (int64_t[]){10000, 30000, 50000}, 3);
    assert_list("-1,0", (int64_t[]){-1, 0}, 2);
    assert_list("-3--1", (int64_t[]){-3, -2, -1}, 3);
    assert_list("5-5", (int64_t[]){5}, 1);
    assert_list("9223372036854775806-9223372036854775807", (int64_t[]){INT64_MAX - 1, INT64_MAX}, 2);
    assert_list("4611686018427387904-9223372036854775807*2", (int64_t[]){INT64_C(1) << 62}, 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cli_ints list = {NULL, 0};
        assert_false(cli_parse_ints(bad[i], INT64_MIN, INT64_MAX, &list, why, WHY));
        assert_null(list.item);
    }
}

/* Random lists of items and ranges against what they were made from; and they extend, or stay alone. */
static void test_random_lists(void **state)
{
    uint64_t seed = 12345;
    (void)state;
    for (int round = 0; round < 2000; round++) {
        int64_t want[200], count = 0;
        char text[2000] = "", why[WHY];
        size_t at = 0;
        for (uint64_t item = 0, items = 1 + next(&seed) % 6; item < items; item++) {
            int64_t first = (int64_t)(next(&seed) % 2000) - 1000, step = 1 + (int64_t)(next(&seed) % 9);
            int64_t last = first + (int64_t)(next(&seed) % 20);
            bool range = next(&seed) % 2 == 0;
            at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%lld", item > 0 ? "," : "",
                                   (long long)first);
            if (range) {
                at += (size_t)snprintf(text + at, sizeof(text) - at, "-%lld+%lld", (long long)last,
                                       (long long)step);
            }
            for (int64_t value = first; value <= (range ? last : first); value += step) {
                want[count++] = value;
            }
        }
        cli_ints list = {NULL, 0};
        assert_true(cli_parse_ints(text, -2000, 2000, &list, why, WHY));
        assert_int_equal(list.count, count);
        assert_memory_equal(list.item, want, (size_t)count * sizeof(want[0]));
        assert_false(cli_parse_ints("1,2,x", -2000, 2000, &list, why, WHY));
        assert_int_equal(list.count, count);
        assert_true(cli_parse_ints("77", -2000, 2000, &list, why, WHY));
        assert_int_equal(list.count, count + 1);
        assert_int_equal(list.item[count], 77);
        free(list.item);
    }
}

/* ---- option tables
 * ------------------------------------------------------------------------------------------ */

typedef struct args {
    cli_common common;
    bool flag;
    const char *text;
    int64_t number, bytes;
    double real;
    cli_ints list;
    int choice;
} args;

static int run_nothing(const void *values)
{
    (void)values;
    return CLI_OK;
}

static const cli_option options[] = {
    CLI_HEADING("All kinds"),
    {.name = "flag", .kind = CLI_FLAG, CLI_TO(args, flag), .help = "a flag"},
    {.name = "text", .kind = CLI_TEXT, CLI_TO(args, text), .argument = "TEXT", .help = "a text"},
    {.name = "number",
     .kind = CLI_INT,
     CLI_TO(args, number),
     .argument = "N",
     .fallback = "40k",
     .help = "a number"},
    {.name = "bytes",
     .kind = CLI_BYTES,
     CLI_TO(args, bytes),
     .argument = "B",
     .fallback = "(all)",
     .help = "bytes"},
    {.name = "real",
     .kind = CLI_REAL,
     CLI_TO(args, real),
     .argument = "X",
     .least = -1,
     .most = 1,
     .help = "a real"},
    {.name = "list",
     .kind = CLI_INTS,
     CLI_TO(args, list),
     .argument = "A,B",
     .fallback = "1,2",
     .help = "a list"},
    {.name = "choice",
     .kind = CLI_CHOICE,
     CLI_TO(args, choice),
     .argument = "one|two|three",
     .fallback = "two",
     .help = "a choice"},
    CLI_OPTION_FORMAT,
    CLI_OPTION_OUTPUT,
    CLI_OPTION_HELP,
    CLI_OPTIONS_END,
};

static const cli_verb verb = {.name = "test",
                              .summary = "a verb",
                              .operand = "FILE",
                              .operand_most = 1,
                              .options = options,
                              .size = sizeof(args),
                              .run = run_nothing};

static int parse(args *values, const char *const *words)
{
    char *argv[16];
    int argc = 0;
    memset(values, 0, sizeof(*values));
    for (; words[argc] != NULL; argc++) {
        argv[argc] = (char *)(uintptr_t)words[argc];
    }
    int code = cli_parse(&verb, argc, argv, values);
    free(values->common.operands);
    values->common.operands = NULL;
    return code;
}

static void test_options(void **state)
{
    args values;
    (void)state;
    assert_int_equal(parse(&values, (const char *[]){NULL}), CLI_OK);
    assert_int_equal(values.number, 40000);
    assert_int_equal(values.choice, 1);
    assert_int_equal(values.list.count, 2);
    assert_int_equal(values.bytes, 0);
    assert_null(values.text);
    assert_false(cli_given(&values.common, "number"));
    cli_free(&verb, &values);
    const char *words[] = {"--flag",   "--text=a=b", "--number", "7",  "--real",         "-0.5", "file",
                           "--list=5", "--list",     "6-7",      "-h", "--choice=three", NULL};
    assert_int_equal(parse(&values, words), CLI_OK);
    assert_true(values.flag && values.common.help);
    assert_string_equal(values.text, "a=b");
    assert_int_equal(values.number, 7);
    assert_true(values.real == -0.5);
    assert_int_equal(values.list.count, 3); /* the default is gone */
    assert_int_equal(values.list.item[2], 7);
    assert_int_equal(values.choice, 2);
    assert_int_equal(values.common.operand_count, 1);
    assert_true(cli_given(&values.common, "number"));
    assert_false(cli_given(&values.common, "bytes"));
    cli_free(&verb, &values);
}

static void test_bad_options(void **state)
{
    static const char *const bad[][4] = {
        {"--nope"},         {"--text"},     {"--text", ""}, {"--number=-1"}, {"--flag=1"}, {"--list=1,"},
        {"--choice=four"},  {"--choice=o"}, {"--real=1.5"}, {"a", "b"},      {"-z"},       {"-hz"},
        {"--", "--x", "y"}, {"--bytes=-1"}, {"--=1"},       {"---flag"}};
    args values;
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(parse(&values, bad[i]), CLI_USAGE);
        cli_free(&verb, &values);
    }
}

static void test_nearest(void **state)
{
    static const char *const words[] = {"tokens", "kv-tokens", "workers", "window", "causal", "cost", NULL};
    (void)state;
    assert_string_equal(cli_nearest("token", words), "tokens");
    assert_string_equal(cli_nearest("wrokers", words), "workers");
    assert_string_equal(cli_nearest("cuasal", words), "causal");
    assert_string_equal(cli_nearest("wind", words), "window");
    assert_null(cli_nearest("xyzzy", words));
    assert_null(cli_nearest("", words));
    assert_null(cli_nearest("a-word-that-is-very-much-longer-than-any-of-those-in-the-list", words));
}

/* Rows of a table share one 64-bit mask of what was given, and shell and man writers need their texts. */
static void test_verb_tables(void **state)
{
    const cli_verb *const *verbs = cli_verbs;
    (void)state;
    for (int i = 0; verbs[i] != NULL; i++) {
        int rows = 0;
        for (const cli_option *option = verbs[i]->options; option->name != NULL; option++, rows++) {
            assert_non_null(option->help);
            if (option->kind == CLI_TITLE) {
                continue;
            }
            assert_true(option->offset < verbs[i]->size);
            assert_true(option->kind == CLI_FLAG || option->argument != NULL);
            assert_int_not_equal(option->help[strlen(option->help) - 1], '.');
            for (const cli_option *other = verbs[i]->options; other < option; other++) {
                assert_string_not_equal(option->name, other->name);
            }
        }
        assert_true(rows <= 64);
        void *values = calloc(1, verbs[i]->size);
        char *nothing[] = {NULL};
        if (verbs[i]->operand_least == 0) {
            assert_int_equal(cli_parse(verbs[i], 0, nothing, values), CLI_OK); /* every default is legal */
        }
        cli_free(verbs[i], values);
        free(values);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_integers),     cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_reals),        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_random_lists), cmocka_unit_test(test_options),
        cmocka_unit_test(test_bad_options),  cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_verb_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
