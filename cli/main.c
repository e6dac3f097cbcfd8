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
    &cli_verb_run, &cli_verb_plan, &cli_verb_bench, &cli_verb_info, &cli_verb_help, &cli_verb_completion,
    NULL};

static const cli_verb *find_verb(const char *name)
{
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        if (strcmp(cli_verbs[i]->name, name) == 0) {
            return cli_verbs[i];
        }
    }
    return NULL;
}

static int unknown_verb(const char *name)
{
    const char *names[32] = {NULL};
    for (int i = 0; cli_verbs[i] != NULL && i < 31; i++) {
        names[i] = cli_verbs[i]->name;
    }
    const char *near = cli_nearest(name, names);
    const char *what = name[0] == '-' ? "option" : "verb";
    if (near != NULL) {
        return cli_error(CLI_USAGE, "unknown %s '%s': did you mean '%s'? ('attn help' lists the verbs)", what,
                         name, near);
    }
    return cli_error(CLI_USAGE, "unknown %s '%s': 'attn help' lists the verbs", what, name);
}

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
    const cli_verb *verb = find_verb(argv[1]);
    if (verb == NULL) {
        return unknown_verb(argv[1]);
    }
    return finish(run_verb(verb, argc - 2, argv + 2));
}
