/* SPDX-License-Identifier: Apache-2.0 */
/*
 * help.c - --help, and the verbs `help` and `completion`.
 *
 * All text is made from the verbs' tables (cli.h); so are the man pages (man.c) and the shells' completion
 * (completion.c).  Examples come first, because they are what most people look for.
 */
#include <string.h>

#include "cli.h"

/* Options' names take this many columns; longer ones have their help on the next line. */
#define NAMES  32
#define INDENT 2

static const char program_summary[] = "exact attention, cut by cyclic quorum sets into independent workers";

static void print_examples(FILE *file, const cli_example *examples, int most)
{
    if (examples == NULL) {
        return;
    }
    fputs("Examples:\n", file);
    for (int i = 0; examples[i].command != NULL && i < most; i++) {
        fprintf(file, "  %s\n      %s\n", examples[i].command, examples[i].what);
    }
    fputc('\n', file);
}

/* "-h, --help" or "    --tokens N[,N..]" */
static int print_name(FILE *file, const cli_option *option)
{
    char letter[8] = "    ";
    if (option->letter != 0) {
        snprintf(letter, sizeof(letter), "-%c, ", option->letter);
    }
    const char *argument = option->kind == CLI_FLAG ? "" : option->argument;
    return fprintf(file, "%*s%s--%s%s%s%s", INDENT, "", letter, option->name, argument[0] != '\0' ? " " : "",
                   argument, option->kind == CLI_CHOICES ? "[,..]" : "");
}

static void print_option(FILE *file, const cli_option *option, int width)
{
    char text[600];
    if (option->kind == CLI_TITLE) {
        fprintf(file, "\n%s:\n", option->help);
        return;
    }
    int at = print_name(file, option);
    if (at > NAMES - 2) {
        fputc('\n', file);
        at = 0;
    }
    bool shown = option->fallback != NULL && option->fallback[0] != '\0';
    bool words = shown && option->fallback[0] == '('; /* "(stdout)": brackets are there */
    size_t length = shown ? strlen(option->fallback) : 0;
    snprintf(text, sizeof(text), "%s%s%.*s%s", option->help, shown ? " (default: " : "",
             (int)(words ? length - 2 : length), shown ? option->fallback + (words ? 1 : 0) : "",
             shown ? ")" : "");
    cli_wrap(file, text, at, NAMES, width);
}

/* All verbs, or those whose name begins with the word `first`. */
static void list_verbs(FILE *file, const char *first, int width)
{
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        if (first == NULL || cli_verb_second(cli_verbs[i], first) != NULL) {
            int at = fprintf(file, "  %s", cli_verbs[i]->name);
            cli_wrap(file, cli_verbs[i]->summary, at, 20, width);
        }
    }
}

void cli_help_group(FILE *file, const char *word)
{
    fprintf(file, "Usage: attn %s WORD [OPTION]...\n\nVerbs:\n", word);
    list_verbs(file, word, cli_terminal_width(file));
    fprintf(file, "\nattn %s WORD --help tells the options of each.\n", word);
}

static void help_program(FILE *file)
{
    int width = cli_terminal_width(file);
    fprintf(file, "attn: %s\n\n", program_summary);
    fputs("Examples:\n", file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const cli_example *examples = cli_verbs[i]->examples;
        if (examples != NULL && i < 3) {
            fprintf(file, "  %s\n      %s\n", examples[0].command, examples[0].what);
        }
    }
    fputs("\nUsage: attn VERB [OPTION]...\n\nVerbs:\n", file);
    list_verbs(file, NULL, width);
    fputs("\nattn VERB --help tells the options of a verb, attn help VERB also what it does;\n"
          "attn --version tells the version and what this build has.\n",
          file);
}

void cli_help(FILE *file, const cli_verb *verb)
{
    if (verb == NULL) {
        help_program(file);
        return;
    }
    int width = cli_terminal_width(file);
    int at = fprintf(file, "attn %s: ", verb->name);
    cli_wrap(file, verb->summary, at, 0, width);
    fputc('\n', file);
    print_examples(file, verb->examples, 3);
    fprintf(file, "Usage: attn %s [OPTION]...", verb->name);
    if (verb->operand != NULL) {
        fprintf(file, verb->operand_least > 0 ? " %s" : " [%s]", verb->operand);
    }
    fputc('\n', file);
    if (verb->options[0].kind != CLI_TITLE) {
        fputs("\nOptions:\n", file);
    }
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        print_option(file, option, width);
    }
}

/* ---- the verb help ---------------------------------------------------------------------------------- */

typedef struct help_args {
    cli_common common;
    bool man;
} help_args;

static int help_run(const void *values)
{
    const help_args *args = values;
    const cli_verb *verb = NULL;
    int count = args->common.operand_count, used = 0;
    char **words = args->common.operands;
    bool group = count == 1 && !args->man && cli_verb_group(words[0]);
    if (count > 0 && !group) {
        verb = cli_find_verb(words, count, &used);
        if (verb == NULL) {
            return CLI_USAGE;
        }
        if (used < count) {
            return cli_error(CLI_USAGE, "'%s' is one word too many after 'attn help %s'", words[used],
                             verb->name);
        }
    }
    cli_out out;
    int code = cli_out_open(&out, &args->common);
    if (code != CLI_OK) {
        return code;
    }
    if (args->man) {
        cli_man(out.file, verb);
    } else if (group) {
        cli_help_group(out.file, words[0]);
    } else {
        cli_help(out.file, verb);
        if (verb != NULL && verb->description != NULL) {
            fputc('\n', out.file);
            cli_wrap(out.file, verb->description, 0, 0, cli_terminal_width(out.file));
        }
    }
    return cli_out_close(&out, CLI_OK);
}

static const cli_option help_options[] = {
    {.name = "man", .kind = CLI_FLAG, CLI_TO(help_args, man), .help = "write the manual page (roff)"},
    CLI_OPTION_OUTPUT,
    CLI_OPTION_HELP,
    CLI_OPTIONS_END,
};

static const cli_example help_examples[] = {
    {"attn help plan", "what a verb does, and its options"},
    {"attn help --man plan | man -l -", "its manual page"},
    {NULL, NULL},
};

const cli_verb cli_verb_help = {
    .name = "help",
    .summary = "tell what a verb does, or write its manual page",
    .description = "Without a verb, lists the verbs.",
    .examples = help_examples,
    .operand = "VERB",
    .operand_most = 2,
    .options = help_options,
    .size = sizeof(help_args),
    .run = help_run,
};

/* ---- the verb completion ---------------------------------------------------------------------------- */

typedef struct completion_args {
    cli_common common;
} completion_args;

static int completion_run(const void *values)
{
    static const char *const shells[] = {"bash", "zsh", "fish"};
    const completion_args *args = values;
    int shell = 0;
    while (strcmp(shells[shell], args->common.operands[0]) != 0) {
        shell++; /* cli_parse() lets no other word through */
    }
    cli_out out;
    int code = cli_out_open(&out, &args->common);
    if (code != CLI_OK) {
        return code;
    }
    cli_completion(out.file, shell);
    return cli_out_close(&out, CLI_OK);
}

static const cli_option completion_options[] = {CLI_OPTION_OUTPUT, CLI_OPTION_HELP, CLI_OPTIONS_END};

static const cli_example completion_examples[] = {
    {"eval \"$(attn completion bash)\"", "complete verbs, options and their values in this shell"},
    {"attn completion fish --output ~/.config/fish/completions/attn.fish", "and in every shell from now on"},
    {NULL, NULL},
};

const cli_verb cli_verb_completion = {
    .name = "completion",
    .summary = "write the completion script of a shell",
    .description = "Installed packages have the scripts in place; this writes them for everybody else.",
    .examples = completion_examples,
    .operand = "bash|zsh|fish",
    .operand_least = 1,
    .operand_most = 1,
    .options = completion_options,
    .size = sizeof(completion_args),
    .run = completion_run,
};
