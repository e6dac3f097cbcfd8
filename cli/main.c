/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the program `attn`: finds the verb, parses its options, runs it, returns its exit code.
 *
 * The list of verbs is here; each verb is one file and one constant struct (cli.h).
 */
#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cli.h"

const cli_verb *const cli_verbs[] = {
    &cli_verb_run,
    &cli_verb_plan,
    &cli_verb_check,
    &cli_verb_bench_attention,
    &cli_verb_bench_cqs,
    &cli_verb_info,
    &cli_verb_help,
    &cli_verb_completion,
    NULL,
};

/* ---- finding a verb --------------------------------------------------------------------------------- */

const char *cli_verb_second(const cli_verb *verb, const char *word)
{
    size_t size = strlen(word);
    return strncmp(verb->name, word, size) == 0 && verb->name[size] == ' ' ? verb->name + size + 1 : NULL;
}

bool cli_verb_group(const char *word)
{
    bool found = false;
    for (int i = 0; cli_verbs[i] != NULL && !found; i++) {
        found = cli_verb_second(cli_verbs[i], word) != NULL;
    }
    return found;
}

const char *cli_verb_page(const cli_verb *verb, char text[CLI_NAME])
{
    snprintf(text, CLI_NAME, "%s", verb->name);
    for (char *at = text; *at != '\0'; at++) {
        *at = *at == ' ' ? '-' : *at;
    }
    return text;
}

static void unknown_verb(const char *name)
{
    const char *names[32] = {NULL};
    for (int i = 0; cli_verbs[i] != NULL && i < 31; i++) {
        names[i] = cli_verbs[i]->name;
    }
    const char *near = cli_nearest(name, names);
    const char *what = name[0] == '-' ? "option" : "verb";
    if (near != NULL) {
        cli_error(CLI_USAGE, "unknown %s '%s': did you mean '%s'? ('attn help' lists the verbs)", what, name,
                  near);
    } else {
        cli_error(CLI_USAGE, "unknown %s '%s': 'attn help' lists the verbs", what, name);
    }
}

/* The second word is missing, or nobody's. */
static void unknown_second(const char *first, const char *second)
{
    char legal[200];
    size_t at = 0;
    for (int i = 0; cli_verbs[i] != NULL && at < sizeof(legal); i++) {
        const char *word = cli_verb_second(cli_verbs[i], first);
        if (word != NULL) {
            at += (size_t)snprintf(legal + at, sizeof(legal) - at, "%s%s", at > 0 ? " or " : "", word);
        }
    }
    if (second == NULL) {
        cli_error(CLI_USAGE, "attn %s needs a word: %s", first, legal);
    } else {
        cli_error(CLI_USAGE, "attn %s %s: it must be %s", first, second, legal);
    }
}

const cli_verb *cli_find_verb(char *const *words, int count, int *used)
{
    const char *second = count > 1 ? words[1] : NULL;
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const char *tail = cli_verb_second(cli_verbs[i], words[0]);
        bool both = tail != NULL && second != NULL && strcmp(tail, second) == 0;
        if (both || strcmp(cli_verbs[i]->name, words[0]) == 0) {
            *used = both ? 2 : 1;
            return cli_verbs[i];
        }
    }
    if (cli_verb_group(words[0])) {
        unknown_second(words[0], second);
    } else {
        unknown_verb(words[0]);
    }
    return NULL;
}

/* ---- the program ------------------------------------------------------------------------------------ */

/* stdout that cannot take the data (a full disk, a closed pipe) must not pass for success. */
static int finish(int code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return cli_error(CLI_IO, "cannot write to the standard output: %s", strerror(errno));
    }
    return code;
}

/* --threads holds for all that the program does, also where no plan counts threads (fp64 reference, random
 * inputs). */
static void use_threads(const cli_common *common)
{
#ifdef _OPENMP
    if (common->threads > 0) {
        omp_set_num_threads((int)common->threads);
    }
#else
    (void)common;
#endif
}

static int run_verb(const cli_verb *verb, int argc, char **argv)
{
    void *values = cli_alloc(1, verb->size);
    int code = cli_parse(verb, argc, argv, values);
    if (code == CLI_OK) {
        const cli_common *common = values;
        if (common->help) {
            cli_help(stdout, verb);
        } else {
            use_threads(common);
            code = verb->run(values);
        }
    }
    cli_free(verb, values);
    free(values);
    return code;
}

int main(int argc, char **argv)
{
    setlocale(LC_CTYPE, ""); /* for UTF-8 alone: numbers keep their point */
    if (argc < 2) {
        cli_help(stderr, NULL);
        return CLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        cli_help(stdout, NULL);
        return finish(CLI_OK);
    }
    if (strcmp(argv[1], "--version") == 0) {
        cli_version(stdout);
        return finish(CLI_OK);
    }
    if (argc > 2 && cli_verb_group(argv[1]) &&
        (strcmp(argv[2], "--help") == 0 || strcmp(argv[2], "-h") == 0)) {
        cli_help_group(stdout, argv[1]);
        return finish(CLI_OK);
    }
    int used = 0;
    const cli_verb *verb = cli_find_verb(argv + 1, argc - 1, &used);
    if (verb == NULL) {
        return CLI_USAGE;
    }
    return finish(run_verb(verb, argc - 1 - used, argv + 1 + used));
}
