/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.c - the command line of a verb, parsed by the verb's option table (cli.h).
 *
 *     --name value   --name=value   -h   --flag   --   (the rest are operands)
 *
 * Defaults are texts in the table and go through the same parsers as a user's values, so that what --help
 * shows is what holds.  A message names the option, the value, and what is legal.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define WHY 160

/* ---- near misses ------------------------------------------------------------------------------------ */

#define WORD 40

static int least_of(int a, int b, int c)
{
    int least = a < b ? a : b;
    return least < c ? least : c;
}

/* Edits (insert, delete, replace, swap of neighbours) from a to b, by rows of the usual table; long words
 * are far from everything. */
static int edits(const char *a, const char *b)
{
    int row[3][WORD + 1];
    size_t size_a = strlen(a), size_b = strlen(b);
    if (size_a > WORD || size_b > WORD) {
        return WORD;
    }
    for (size_t j = 0; j <= size_b; j++) {
        row[0][j] = (int)j;
    }
    for (size_t i = 1; i <= size_a; i++) {
        int *above = row[(i - 1) % 3], *two_above = row[(i + 1) % 3], *now = row[i % 3];
        now[0] = (int)i;
        for (size_t j = 1; j <= size_b; j++) {
            int replace = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            now[j] = least_of(above[j] + 1, now[j - 1] + 1, replace);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                two_above[j - 2] + 1 < now[j]) {
                now[j] = two_above[j - 2] + 1;
            }
        }
    }
    return row[size_a % 3][size_b];
}

/* Near: at most a third of the letters wrong, or the one word that begins like this. */
const char *cli_nearest(const char *text, const char *const *words)
{
    const char *best = NULL;
    int best_edits = WORD, prefixed = 0;
    const char *prefix = NULL;
    size_t size = strlen(text);
    for (int i = 0; words[i] != NULL; i++) {
        int distance = edits(text, words[i]);
        if (distance < best_edits) {
            best_edits = distance;
            best = words[i];
        }
        if (size >= 2 && strncmp(text, words[i], size) == 0) {
            prefixed++;
            prefix = words[i];
        }
    }
    if (best != NULL && best_edits <= (int)(strlen(best) + 2) / 3) {
        return best;
    }
    return prefixed == 1 ? prefix : NULL;
}

/* ---- one value -------------------------------------------------------------------------------------- */

/* "--tokens" or "-h" for messages */
static int usage(const cli_verb *verb, const cli_option *option, const char *value, const char *why)
{
    return cli_error(CLI_USAGE, "--%s %s: %s ('attn %s --help' explains)", option->name, value, why,
                     verb->name);
}

/* Index of word in "first|second|third", or -1. */
static int find_choice(const char *choices, const char *word)
{
    size_t size = strlen(word);
    for (int index = 0;; index++) {
        const char *end = strchr(choices, '|');
        size_t length = end != NULL ? (size_t)(end - choices) : strlen(choices);
        if (length == size && memcmp(choices, word, size) == 0) {
            return index;
        }
        if (end == NULL) {
            return -1;
        }
        choices = end + 1;
    }
}

/* "table|md|csv" as "table, md or csv" */
static void list_choices(const char *choices, char *text, size_t size)
{
    size_t at = 0;
    for (const char *from = choices; *from != '\0' && at + 5 < size; from++) {
        if (*from == '|') {
            const char *between = strchr(from + 1, '|') != NULL ? ", " : " or ";
            at += (size_t)snprintf(text + at, size - at, "%s", between);
        } else {
            text[at++] = *from;
        }
    }
    text[at] = '\0';
}

static bool set_choice(const cli_option *option, const char *text, int *value, char *why, size_t why_size)
{
    int index = find_choice(option->argument, text);
    if (index < 0) {
        char legal[WHY / 2];
        list_choices(option->argument, legal, sizeof(legal));
        snprintf(why, why_size, "it must be %s", legal);
        return false;
    }
    *value = index;
    return true;
}

/* "first,third": the indices as the text of a list of integers, which is then parsed as such. */
static bool set_choices(const cli_option *option, const char *text, cli_ints *list, char *why,
                        size_t why_size)
{
    char indices[WHY];
    size_t at = 0;
    for (const char *from = text; from != NULL && at + 4 < sizeof(indices);) {
        char word[WORD];
        int index = 0;
        snprintf(word, sizeof(word), "%.*s", (int)strcspn(from, ","), from);
        if (!set_choice(option, word, &index, why, why_size)) {
            return false;
        }
        at += (size_t)snprintf(indices + at, sizeof(indices) - at, "%s%d", at > 0 ? "," : "", index);
        from = strchr(from, ',');
        from += from != NULL ? 1 : 0;
    }
    return cli_parse_ints(indices, 0, INT64_MAX, list, why, why_size);
}

/* Parses text into the option's place; false with the reason in why. */
static bool set_value(const cli_option *option, const char *text, void *values, char *why, size_t why_size)
{
    char *place = (char *)values + option->offset;
    int64_t most = option->most != 0 ? option->most : INT64_MAX;
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)(void *)place = true;
        return true;
    case CLI_TEXT:
        if (text[0] == '\0') {
            snprintf(why, why_size, "the value is empty");
            return false;
        }
        *(const char **)(void *)place = text;
        return true;
    case CLI_INT:
        return cli_parse_int(text, option->least, most, (int64_t *)(void *)place, why, why_size);
    case CLI_BYTES:
        return cli_parse_bytes(text, option->least, most, (int64_t *)(void *)place, why, why_size);
    case CLI_REAL:
        return cli_parse_real(text, (double)option->least, (double)most, (double *)(void *)place, why,
                              why_size);
    case CLI_INTS:
        return cli_parse_ints(text, option->least, most, (cli_ints *)(void *)place, why, why_size);
    case CLI_CHOICE:
        return set_choice(option, text, (int *)(void *)place, why, why_size);
    case CLI_CHOICES:
        return set_choices(option, text, (cli_ints *)(void *)place, why, why_size);
    case CLI_TITLE:
        break;
    }
    return true;
}

/* Defaults that are values, for what the command line did not give. */
static int set_defaults(const cli_verb *verb, void *values)
{
    const cli_common *common = values;
    for (int i = 0; verb->options[i].name != NULL; i++) {
        const cli_option *option = &verb->options[i];
        char why[WHY];
        if (option->fallback == NULL || option->fallback[0] == '(' || (common->given >> i & 1) != 0) {
            continue;
        }
        if (!set_value(option, option->fallback, values, why, sizeof(why))) {
            return cli_error(CLI_USAGE, "default of --%s %s: %s", option->name, option->fallback, why);
        }
    }
    return CLI_OK;
}

/* ---- the command line ------------------------------------------------------------------------------- */

static int unknown_option(const cli_verb *verb, const char *name)
{
    const char *names[65] = {NULL};
    int count = 0;
    for (const cli_option *option = verb->options; option->name != NULL && count < 64; option++) {
        if (option->kind != CLI_TITLE) {
            names[count++] = option->name;
        }
    }
    const char *near = cli_nearest(name, names);
    if (near != NULL) {
        return cli_error(CLI_USAGE,
                         "unknown option --%s: did you mean --%s? ('attn %s --help' lists the options)", name,
                         near, verb->name);
    }
    return cli_error(CLI_USAGE, "unknown option --%s: 'attn %s --help' lists the options", name, verb->name);
}

/* Row of the option called name[size], or -1. */
static int find_option(const cli_verb *verb, const char *name, size_t size)
{
    for (int i = 0; verb->options[i].name != NULL; i++) {
        const cli_option *option = &verb->options[i];
        if (option->kind != CLI_TITLE && strlen(option->name) == size &&
            memcmp(option->name, name, size) == 0) {
            return i;
        }
    }
    return -1;
}

static int find_letter(const cli_verb *verb, char letter)
{
    for (int i = 0; verb->options[i].name != NULL; i++) {
        if (verb->options[i].letter == letter) {
            return i;
        }
    }
    return -1;
}

/* The long option in argv[*at], with its value; moves *at past what it used. */
static int parse_long(const cli_verb *verb, int argc, char **argv, int *at, void *values)
{
    cli_common *common = values;
    const char *name = argv[*at] + 2;
    const char *equals = strchr(name, '=');
    size_t size = equals != NULL ? (size_t)(equals - name) : strlen(name);
    int row = find_option(verb, name, size);
    *at += 1;
    if (row < 0) {
        char word[64];
        snprintf(word, sizeof(word), "%.*s", size < 60 ? (int)size : 60, name);
        return unknown_option(verb, word);
    }
    const cli_option *option = &verb->options[row];
    const char *text = equals != NULL ? equals + 1 : NULL;
    if (option->kind == CLI_FLAG) {
        if (text != NULL) {
            return cli_error(CLI_USAGE, "--%s takes no value", option->name);
        }
    } else if (text == NULL) {
        if (*at >= argc) {
            return cli_error(CLI_USAGE, "--%s needs a value: --%s %s", option->name, option->name,
                             option->argument);
        }
        text = argv[*at];
        *at += 1;
    }
    char why[WHY];
    if (!set_value(option, text, values, why, sizeof(why))) {
        return usage(verb, option, text[0] != '\0' ? text : "''", why);
    }
    common->given |= UINT64_C(1) << row;
    return CLI_OK;
}

static int parse_letters(const cli_verb *verb, const char *word, void *values)
{
    cli_common *common = values;
    for (const char *letter = word + 1; *letter != '\0'; letter++) {
        int row = find_letter(verb, *letter);
        if (row < 0 || verb->options[row].kind != CLI_FLAG) {
            return cli_error(
                CLI_USAGE,
                "unknown option %s: 'attn %s --help' lists the options (long ones have two dashes)", word,
                verb->name);
        }
        *(bool *)(void *)((char *)values + verb->options[row].offset) = true;
        common->given |= UINT64_C(1) << row;
    }
    return CLI_OK;
}

bool cli_operand_words(const cli_verb *verb)
{
    return verb->operand != NULL && !isupper((unsigned char)verb->operand[0]);
}

static int check_operands(const cli_verb *verb, const cli_common *common)
{
    int count = common->operand_count;
    if (count > verb->operand_most) {
        const char *extra = common->operands[verb->operand_most];
        if (verb->operand == NULL) {
            return cli_error(CLI_USAGE, "'%s': attn %s takes options only ('attn %s --help' lists them)",
                             extra, verb->name, verb->name);
        }
        return cli_error(CLI_USAGE, "'%s' is one word too many after 'attn %s'", extra, verb->name);
    }
    if (count < verb->operand_least && !common->help) {
        char legal[WHY];
        list_choices(verb->operand, legal, sizeof(legal));
        return cli_error(CLI_USAGE, "attn %s needs a word: %s", verb->name, legal);
    }
    if (cli_operand_words(verb)) {
        for (int i = 0; i < count; i++) {
            if (find_choice(verb->operand, common->operands[i]) < 0) {
                char legal[WHY];
                list_choices(verb->operand, legal, sizeof(legal));
                return cli_error(CLI_USAGE, "attn %s %s: it must be %s", verb->name, common->operands[i],
                                 legal);
            }
        }
    }
    return CLI_OK;
}

/* Else the CPU would compute what somebody meant for a GPU. */
static int check_gpu(const cli_common *common)
{
    if (cli_given(common, "gpu") && common->device != ATTN_CUDA) {
        return cli_error(CLI_USAGE, "--gpu tells which GPU computes: add --device cuda, or leave it out");
    }
    return CLI_OK;
}

int cli_parse(const cli_verb *verb, int argc, char **argv, void *values)
{
    cli_common *common = values;
    common->verb = verb;
    common->operands = cli_alloc(argc + 1, sizeof(*common->operands));
    int code = CLI_OK;
    for (int at = 0; at < argc && code == CLI_OK;) {
        const char *word = argv[at];
        if (strcmp(word, "--") == 0) {
            while (++at < argc) {
                common->operands[common->operand_count++] = argv[at];
            }
        } else if (word[0] == '-' && word[1] == '-') {
            code = parse_long(verb, argc, argv, &at, values);
        } else if (word[0] == '-' && word[1] != '\0') {
            code = parse_letters(verb, word, values);
            at++;
        } else {
            common->operands[common->operand_count++] = argv[at++];
        }
    }
    if (code == CLI_OK) {
        code = check_operands(verb, common);
    }
    code = code == CLI_OK ? set_defaults(verb, values) : code;
    return code == CLI_OK && !common->help ? check_gpu(common) : code;
}

void cli_free(const cli_verb *verb, void *values)
{
    cli_common *common = values;
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        if (option->kind == CLI_INTS || option->kind == CLI_CHOICES) {
            cli_ints *list = (cli_ints *)(void *)((char *)values + option->offset);
            free(list->item);
            list->item = NULL;
        }
    }
    free(common->operands);
    common->operands = NULL;
}

bool cli_given(const cli_common *common, const char *name)
{
    int row = find_option(common->verb, name, strlen(name));
    return row >= 0 && (common->given >> row & 1) != 0;
}
