/* SPDX-License-Identifier: Apache-2.0 */
/*
 * man.c - manual pages in roff's man macros, made from the verbs' tables.
 *
 * attn.1 for the program, attn-VERB.1 for each verb ("bench cqs": attn-bench-cqs.1).  No date stands in them,
 * so that a build can be repeated bit for bit.
 */
#include <ctype.h>
#include <string.h>

#include "cli.h"

/* Text in roff: minus signs that can be pasted, no accidental requests. */
static void write_roff(FILE *file, const char *text)
{
    bool line_start = true;
    for (; *text != '\0'; text++) {
        if (line_start && (*text == '.' || *text == '\'')) {
            fputs("\\&", file);
        }
        line_start = *text == '\n';
        if (*text == '\\') {
            fputs("\\e", file);
        } else if (*text == '-') {
            fputs("\\-", file);
        } else {
            fputc(*text, file);
        }
    }
}

static void write_paragraphs(FILE *file, const char *text)
{
    for (; *text != '\0'; text++) {
        size_t size = strcspn(text, "\n");
        char line[2048];
        snprintf(line, sizeof(line), "%.*s", (int)size, text);
        write_roff(file, line);
        text += size;
        if (*text == '\0') {
            break;
        }
        if (text[1] == '\n') {
            fputs("\n.PP\n", file);
            text++;
        } else {
            fputc('\n', file);
        }
    }
    fputc('\n', file);
}

/* page: "attn", "attn-plan" */
static void write_title(FILE *file, const char *page, const char *summary)
{
    char capitals[2 * CLI_NAME];
    snprintf(capitals, sizeof(capitals), "%s", page);
    for (char *letter = capitals; *letter != '\0'; letter++) {
        *letter = (char)toupper((unsigned char)*letter);
    }
    fputs(".TH \"", file);
    write_roff(file, capitals);
    fprintf(file, "\" 1 \"\" \"attn %s\" \"attn manual\"\n.SH NAME\n", attn_version());
    write_roff(file, page);
    fputs(" \\- ", file);
    write_roff(file, summary);
    fputc('\n', file);
}

static void write_option(FILE *file, const cli_option *option)
{
    if (option->kind == CLI_TITLE) {
        fputs(".SS ", file);
        write_roff(file, option->help);
        fputc('\n', file);
        return;
    }
    fputs(".TP\n", file);
    if (option->letter != 0) {
        fprintf(file, "\\fB\\-%c\\fR, ", option->letter);
    }
    fputs("\\fB\\-\\-", file);
    write_roff(file, option->name);
    fputs("\\fR", file);
    if (option->kind != CLI_FLAG) {
        fputs(" \\fI", file);
        write_roff(file, option->argument);
        fputs(option->kind == CLI_CHOICES ? "[,..]\\fR" : "\\fR", file);
    }
    fputc('\n', file);
    write_roff(file, option->help);
    if (option->fallback != NULL) {
        const char *text = option->fallback;
        char plain[200];
        snprintf(plain, sizeof(plain), "%s", text[0] == '(' ? text + 1 : text);
        if (text[0] == '(') {
            plain[strlen(plain) - 1] = '\0';
        }
        fputs("; default: ", file);
        write_roff(file, plain);
    }
    fputs(".\n", file);
}

static void write_examples(FILE *file, const cli_example *examples)
{
    if (examples == NULL || examples[0].command == NULL) {
        return;
    }
    fputs(".SH EXAMPLES\n", file);
    for (; examples->command != NULL; examples++) {
        fputs(".TP\n\\fB", file);
        write_roff(file, examples->command);
        fputs("\\fR\n", file);
        write_roff(file, examples->what);
        fputs(".\n", file);
    }
}

static void write_tail(FILE *file, const cli_verb *self)
{
    static const char *const status[][2] = {
        {"0", "all went well"},
        {"1", "wrong results: a verification or a proof failed"},
        {"2", "the command line makes no sense, or the problem does not fit in the given limit"},
        {"3", "a device, a library or memory is missing"},
        {"4", "a file cannot be read, written or understood"},
        {"5", "a worker was lost"},
        {"130", "stopped by the user"},
    };
    static const char *const environment[][2] = {
        {"ATTN_ISA",
         "ref, neon, avx2, avx512, avx512bf16 or amx: use kernels of that level of the instruction set "
         "and those below; with another value nothing is computed"},
        {"OMP_NUM_THREADS", "threads, where --threads is not given"},
        {"NO_COLOR", "if set and not empty: no colours"},
        {"COLUMNS", "width of the terminal"},
    };
    fputs(".SH EXIT STATUS\n", file);
    for (size_t i = 0; i < sizeof(status) / sizeof(status[0]); i++) {
        fprintf(file, ".TP\n.B %s\n%s.\n", status[i][0], status[i][1]);
    }
    fputs(".SH ENVIRONMENT\n", file);
    for (size_t i = 0; i < sizeof(environment) / sizeof(environment[0]); i++) {
        fprintf(file, ".TP\n.B %s\n", environment[i][0]);
        write_roff(file, environment[i][1]);
        fputs(".\n", file);
    }
    fputs(".SH SEE ALSO\n", file);
    const char *between = "";
    if (self != NULL) {
        fputs("\\fBattn\\fR(1)", file);
        between = ", ";
    }
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        if (cli_verbs[i] != self) {
            char page[CLI_NAME];
            fprintf(file, "%s\\fBattn\\-", between);
            write_roff(file, cli_verb_page(cli_verbs[i], page));
            fputs("\\fR(1)", file);
            between = ", ";
        }
    }
    fputc('\n', file);
}

static void man_program(FILE *file)
{
    write_title(file, "attn", "exact attention, cut by cyclic quorum sets into independent workers");
    fputs(".SH SYNOPSIS\n\\fBattn\\fR \\fIVERB\\fR [\\fIOPTION\\fR]...\n.br\n\\fBattn \\-\\-version\\fR\n",
          file);
    fputs(".SH DESCRIPTION\n", file);
    write_paragraphs(
        file,
        "Computes softmax(scale Q K^T + mask) V exactly, over arrays in files that may be larger than "
        "memory. The tokens are cut into W token groups; a cyclic quorum schedule gives each of W "
        "workers about 1/sqrt(W) of the tokens and 1/W of the cells, so that every (query, key) cell is "
        "computed by exactly one worker and no worker needs to talk to another.\n\n"
        "Data goes to the standard output, in the format of --format; messages and progress go to the "
        "standard error.\n\n"
        "Numbers take the suffixes k, M, G (1000) and Ki, Mi, Gi (1024). Lists are a,b,c and may hold "
        "ranges: first-last, first-last+step, first-last*factor.");
    fputs(".SH VERBS\n", file);
    for (int i = 0; cli_verbs[i] != NULL; i++) {
        fprintf(file, ".TP\n.B %s\n", cli_verbs[i]->name);
        write_roff(file, cli_verbs[i]->summary);
        fputs(".\n", file);
    }
    write_tail(file, NULL);
}

void cli_man(FILE *file, const cli_verb *verb)
{
    if (verb == NULL) {
        man_program(file);
        return;
    }
    char page[CLI_NAME], title[2 * CLI_NAME];
    snprintf(title, sizeof(title), "attn-%s", cli_verb_page(verb, page));
    write_title(file, title, verb->summary);
    fprintf(file, ".SH SYNOPSIS\n\\fBattn %s\\fR [\\fIOPTION\\fR]...", verb->name);
    if (verb->operand != NULL) {
        fprintf(file, verb->operand_least > 0 ? " \\fI%s\\fR" : " [\\fI%s\\fR]", verb->operand);
    }
    fputc('\n', file);
    if (verb->description != NULL) {
        fputs(".SH DESCRIPTION\n", file);
        write_paragraphs(file, verb->description);
    }
    fputs(".SH OPTIONS\n", file);
    for (const cli_option *option = verb->options; option->name != NULL; option++) {
        write_option(file, option);
    }
    write_examples(file, verb->examples);
    write_tail(file, verb);
}
