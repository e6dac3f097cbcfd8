/* SPDX-License-Identifier: Apache-2.0 */
/*
 * completion.c - completion scripts for bash, zsh and fish, made from the verbs' tables: verbs, options, the
 * words of a choice, file names.
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

static void write_verbs(FILE *file)
{
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        fprintf(file, "%s%s", i > 0 ? " " : "", cli_verbs[i]->name);
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
    fprintf(file, "    %s)\n        case $previous in\n", verb->name);
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        if (option->kind == CLI_TITLE || option->kind == CLI_FLAG) {
            continue;
        }
        fprintf(file, "        --%s) ", option->name);
        if (option->kind == CLI_CHOICE) {
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
    fputs(" --help --version' -- \"$word\"); return\n    fi\n    case ${COMP_WORDS[1]} in\n", file);
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
    fprintf(file, " \\\n            '%s--%s%s[", option->kind == CLI_INTS ? "*" : "", option->name,
            option->kind == CLI_FLAG ? "" : "=");
    write_zsh(file, option->help);
    fputc(']', file);
    if (option->kind == CLI_CHOICE) {
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
        fprintf(file, "        '%s:", cli_verbs[i]->name);
        write_zsh(file, cli_verbs[i]->summary);
        fputs("'\n", file);
    }
    fputs(
        "    )\n    if (( CURRENT == 2 )); then\n        _describe verb verbs\n        return\n    fi\n"
        "    local verb=$words[2]\n    words=(\"attn $verb\" \"${(@)words[3,-1]}\")\n    (( CURRENT -= 1 ))\n"
        "    case $verb in\n",
        file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const cli_verb *verb = cli_verbs[i];
        fprintf(file, "    %s)\n        _arguments", verb->name);
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

static void fish_option(FILE *file, const cli_verb *verb, const cli_option *option)
{
    fprintf(file, "complete -c attn -n '__fish_seen_subcommand_from %s' -l %s", verb->name, option->name);
    if (option->letter != 0) {
        fprintf(file, " -s %c", option->letter);
    }
    if (option->kind == CLI_CHOICE) {
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
        fprintf(file, "complete -c attn -n __fish_use_subcommand -a %s -d ", cli_verbs[i]->name);
        write_fish(file, cli_verbs[i]->summary);
        fputc('\n', file);
    }
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        const cli_verb *verb = cli_verbs[i];
        if (verb->operand != NULL) {
            fprintf(file, "complete -c attn -n '__fish_seen_subcommand_from %s' -a '", verb->name);
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
