/* SPDX-License-Identifier: Apache-2.0 */
/*
 * completion.c - completion scripts for bash, zsh and fish, made from the verbs' tables: verbs, options, the
 * words of a choice, file names.
 *
 * A verb of two words ("bench cqs") is a group's word, after which the words of the group are offered, and
 * then a branch of its own under the name of its man page ("bench-cqs").
 */
#include <string.h>

#include "cli.h"

/* "a|b|c" as "a b c" */
static void write_words(FILE *file, const char *choices)
{
    for (; *choices != '\0'; choices++) {
        fputc(*choices == '|' ? ' ' : *choices, file);
    }
}

static int word_size(const char *name)
{
    return (int)strcspn(name, " ");
}

/* Whether the verb's first word stands in the table for the first time. */
static bool first_of_group(int index)
{
    const char *name = cli_verbs[index]->name;
    size_t size = (size_t)word_size(name);
    for (int i = 0; i < index; i++) {
        if ((size_t)word_size(cli_verbs[i]->name) == size && memcmp(cli_verbs[i]->name, name, size) == 0) {
            return false;
        }
    }
    return true;
}

static void write_verbs(FILE *file)
{
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const char *name = cli_verbs[i]->name;
        if (first_of_group(i)) {
            fprintf(file, "%s%.*s", i > 0 ? " " : "", word_size(name), name);
        }
    }
}

/* The second words of the group that verb `index` opens. */
static void write_seconds(FILE *file, int index)
{
    char first[CLI_NAME];
    const char *name = cli_verbs[index]->name, *between = "";
    snprintf(first, sizeof(first), "%.*s", word_size(name), name);
    for (int i = index; cli_verbs[i] != NULL; i++) {
        const char *second = cli_verb_second(cli_verbs[i], first);
        if (second != NULL) {
            fprintf(file, "%s%s", between, second);
            between = " ";
        }
    }
}

/* "    bench) " before_words "attention cqs" after_words, a line for each group */
static void write_groups(FILE *file, const char *before_words, const char *after_words)
{
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const char *name = cli_verbs[i]->name;
        if (first_of_group(i) && name[word_size(name)] == ' ') {
            fprintf(file, "    %.*s)%s", word_size(name), name, before_words);
            write_seconds(file, i);
            fputs(after_words, file);
        }
    }
}

/* What may follow a verb without dashes. */
static void write_operands(FILE *file, const cli_verb *verb)
{
    if (cli_operand_words(verb)) {
        write_words(file, verb->operand);
    } else if (verb == &cli_verb_help) {
        write_verbs(file);
    }
}

/* ---- bash ------------------------------------------------------------------------------------------- */

static void bash_verb(FILE *file, const cli_verb *verb)
{
    char page[CLI_NAME];
    fprintf(file, "    %s)\n        case $previous in\n", cli_verb_page(verb, page));
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        if (option->kind == CLI_TITLE || option->kind == CLI_FLAG) {
            continue;
        }
        fprintf(file, "        --%s) ", option->name);
        if (option->kind == CLI_CHOICE || option->kind == CLI_CHOICES) {
            fputs("mapfile -t COMPREPLY < <(compgen -W '", file);
            write_words(file, option->argument);
            fputs("' -- \"$word\"); return ;;\n", file);
        } else if (option->file) {
            fputs("mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return ;;\n", file);
        } else {
            fputs("return ;;\n", file);
        }
    }
    fputs("        esac\n        words='", file);
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        if (option->kind != CLI_TITLE) {
            fprintf(file, "--%s ", option->name);
        }
    }
    write_operands(file, verb);
    fputs("' ;;\n", file);
}

static void bash(FILE *file)
{
    fputs("# bash completion for attn; made by 'attn completion bash'\n"
          "_attn() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=\n"
          "    # --name=value comes as three words\n"
          "    if [[ $word == = ]]; then word=; fi\n"
          "    if [[ $previous == = ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi\n"
          "    if [[ $COMP_CWORD -eq 1 ]]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W '",
          file);
    write_verbs(file);
    fputs(" --help --version' -- \"$word\"); return\n    fi\n"
          "    local verb=${COMP_WORDS[1]} second=\n    case $verb in\n",
          file);
    write_groups(file, " second='", "' ;;\n");
    fputs("    esac\n    if [[ -n $second && $COMP_CWORD -eq 2 ]]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W \"$second --help\" -- \"$word\"); return\n    fi\n"
          "    if [[ -n $second ]]; then verb+=-${COMP_WORDS[2]}; fi\n    case $verb in\n",
          file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        bash_verb(file, cli_verbs[i]);
    }
    fputs("    esac\n    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n}\n"
          "complete -o filenames -o bashdefault -F _attn attn\n",
          file);
}

/* ---- zsh -------------------------------------------------------------------------------------------- */

/* Inside '...' and inside [...] of _arguments */
static void write_zsh(FILE *file, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '\'') {
            fputs("'\\''", file);
        } else {
            fputs(strchr("[]:\\", *text) != NULL ? "\\" : "", file);
            fputc(*text, file);
        }
    }
}

static void zsh_option(FILE *file, const cli_option *option)
{
    bool list = option->kind == CLI_INTS || option->kind == CLI_CHOICES;
    fprintf(file, " \\\n            '%s--%s%s[", list ? "*" : "", option->name,
            option->kind == CLI_FLAG ? "" : "=");
    write_zsh(file, option->help);
    fputc(']', file);
    if (option->kind == CLI_CHOICE || option->kind == CLI_CHOICES) {
        fprintf(file, ":%s:(", option->name);
        write_words(file, option->argument);
        fputc(')', file);
    } else if (option->kind != CLI_FLAG) {
        fputc(':', file);
        write_zsh(file, option->argument);
        fputs(option->file ? ":_files" : ": ", file);
    }
    fputc('\'', file);
}

static void zsh(FILE *file)
{
    fputs("#compdef attn\n# zsh completion for attn; made by 'attn completion zsh'\n"
          "_attn() {\n    local -a verbs\n    verbs=(\n",
          file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const char *name = cli_verbs[i]->name;
        if (first_of_group(i)) {
            fprintf(file, "        '%.*s:", word_size(name), name);
            write_zsh(file, cli_verbs[i]->summary);
            fputs("'\n", file);
        }
    }
    fputs(
        "    )\n    if (( CURRENT == 2 )); then\n        _describe verb verbs\n        return\n    fi\n"
        "    local verb=$words[2]\n    words=(\"attn $verb\" \"${(@)words[3,-1]}\")\n    (( CURRENT -= 1 ))\n"
        "    local -a second\n    case $verb in\n",
        file);
    write_groups(file, " second=(", ") ;;\n");
    fputs("    esac\n    if (( $#second && CURRENT == 2 )); then\n        compadd -a second\n        "
          "return\n    fi\n"
          "    if (( $#second )); then\n        verb=$verb-$words[2]\n"
          "        words=(\"attn $verb\" \"${(@)words[3,-1]}\")\n        (( CURRENT -= 1 ))\n    fi\n"
          "    case $verb in\n",
          file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const cli_verb *verb = cli_verbs[i];
        char page[CLI_NAME];
        fprintf(file, "    %s)\n        _arguments", cli_verb_page(verb, page));
        for (const cli_option *option = verb->options; option->name != NULL; option++) {
            if (option->kind != CLI_TITLE) {
                zsh_option(file, option);
            }
        }
        if (verb->operand != NULL) {
            fputs(" \\\n            '1:what:(", file);
            write_operands(file, verb);
            fputs(")'", file);
        }
        fputs(" ;;\n", file);
    }
    fputs("    esac\n}\ncompdef _attn attn\n", file);
}

/* ---- fish ------------------------------------------------------------------------------------------- */

static void write_fish(FILE *file, const char *text)
{
    fputc('\'', file);
    for (; *text != '\0'; text++) {
        fputs(*text == '\'' || *text == '\\' ? "\\" : "", file);
        fputc(*text, file);
    }
    fputc('\'', file);
}

/* "complete -c attn -n 'the words of the verb are there'" */
static void fish_verb(FILE *file, const cli_verb *verb)
{
    const char *name = verb->name;
    int size = word_size(name);
    fprintf(file, "complete -c attn -n '__fish_seen_subcommand_from %.*s", size, name);
    if (name[size] != '\0') {
        fprintf(file, "; and __fish_seen_subcommand_from %s", name + size + 1);
    }
    fputc('\'', file);
}

static void fish_option(FILE *file, const cli_verb *verb, const cli_option *option)
{
    fish_verb(file, verb);
    fprintf(file, " -l %s", option->name);
    if (option->letter != 0) {
        fprintf(file, " -s %c", option->letter);
    }
    if (option->kind == CLI_CHOICE || option->kind == CLI_CHOICES) {
        fputs(" -x -a '", file);
        write_words(file, option->argument);
        fputc('\'', file);
    } else if (option->kind != CLI_FLAG) {
        fputs(option->file ? " -r -F" : " -x", file);
    }
    fputs(" -d ", file);
    write_fish(file, option->help);
    fputc('\n', file);
}

static void fish(FILE *file)
{
    fputs("# fish completion for attn; made by 'attn completion fish'\ncomplete -c attn -f\n", file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const char *name = cli_verbs[i]->name;
        int size = word_size(name);
        if (first_of_group(i)) {
            fprintf(file, "complete -c attn -n __fish_use_subcommand -a %.*s -d ", size, name);
            write_fish(file, cli_verbs[i]->summary);
            fputc('\n', file);
        }
        if (first_of_group(i) && name[size] == ' ') {
            fprintf(file, "complete -c attn -n '__fish_seen_subcommand_from %.*s' -a '", size, name);
            write_seconds(file, i);
            fputs("'\n", file);
        }
    }
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const cli_verb *verb = cli_verbs[i];
        if (verb->operand != NULL) {
            fish_verb(file, verb);
            fputs(" -a '", file);
            write_operands(file, verb);
            fputs("'\n", file);
        }
        for (const cli_option *option = verb->options; option->name != NULL; option++) {
            if (option->kind != CLI_TITLE) {
                fish_option(file, verb, option);
            }
        }
    }
}

void cli_completion(FILE *file, int shell)
{
    static void (*const writers[])(FILE *) = {bash, zsh, fish};
    writers[shell](file);
}
