/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.h - the frame of the program `attn`: option tables, errors and exit codes, output in five formats,
 * progress, summary and pictures.  It sees nothing of the library but include/attn.
 *
 * A verb is one constant struct (cli_verb) in one file, and a row of cli_verbs[] (main.c).  Its option table
 * is the only description of its options: parsing, --help, the man page and the shells' completion are all
 * made from it, so that they cannot differ.  Writing a verb:
 *
 *     typedef struct run_args { cli_common common; int64_t workers; bool verify; } run_args;  // common first
 *
 *     static const cli_option run_options[] = {
 *         {.name = "workers", .kind = CLI_INT, CLI_TO(run_args, workers), .argument = "W",
 *          .fallback = "1", .least = 1, .help = "cut the work for W workers"},
 *         {.name = "verify", .kind = CLI_FLAG, CLI_TO(run_args, verify), .help = "compare with fp64"},
 *         CLI_HEADING("Output"), CLI_OPTION_FORMAT, CLI_OPTION_OUTPUT, CLI_OPTION_HELP, CLI_OPTIONS_END};
 *
 *     static int run_verb(const void *values) { const run_args *args = values; ... return CLI_OK; }
 *
 *     const cli_verb cli_verb_run = {.name = "run", .summary = "...", .options = run_options,
 *                                    .size = sizeof(run_args), .run = run_verb, ...};
 *
 * main() parses the command line into zeroed memory of verb->size bytes, applies the defaults, answers
 * --help, calls run and returns its exit code.  Data goes to the output (cli_out), everything else to stderr.
 */
#ifndef ATTN_CLI_H
#define ATTN_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "attn/attn.h"

#if defined(__GNUC__)
#define CLI_PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define CLI_PRINTF(text, args)
#endif

#define CLI_SCHEMA_VERSION 1

/* ---- exit codes and messages (report.c)-------------------------------------------------------------- */

enum {
    CLI_OK = 0,
    CLI_WRONG = 1,      /* wrong results, a proof or a verification that failed */
    CLI_USAGE = 2,      /* the command line, or what it asks for, makes no sense */
    CLI_MISSING = 3,    /* a device, library or memory is missing */
    CLI_IO = 4,         /* a file cannot be read, written or understood */
    CLI_LOST = 5,       /* a worker was lost */
    CLI_CANCELED = 130, /* stopped by the user */
};

/* Prints "attn: ..." and a newline on stderr; returns code: `return cli_error(CLI_USAGE, "...", x);` */
int cli_error(int code, const char *format, ...) CLI_PRINTF(2, 3);
/* "attn: warning: ..." on stderr */
void cli_warn(const char *format, ...) CLI_PRINTF(1, 2);

/* The exit code of a library status. */
int cli_code(attn_status status);
/* Prints the library's error text for a failed call (its short text when there is none); returns
 * cli_code(status).  ATTN_OK prints nothing and is CLI_OK. */
int cli_fail(attn_status status);

/* ---- memory (report.c)----------------------------------------------------------------------------- */

/* Zeroed memory for count items of size bytes, freed with free().  Without memory, or on overflow, the
 * program ends with a message and CLI_MISSING, after removing an unfinished output.  For small things: big
 * buffers belong to who knows what to do without them. */
void *cli_alloc(int64_t count, size_t size);
char *cli_strdup(const char *text);

/* ---- options (options.c, values.c)
 * --------------------------------------------------------------------------- */

typedef enum cli_kind {
    CLI_FLAG,   /* bool: no value on the command line */
    CLI_TEXT,   /* const char *: points into argv; empty text is refused */
    CLI_INT,    /* int64_t: 12, 40k = 40000, 2M, 1G, 4Ki = 4096, Mi, Gi */
    CLI_REAL,   /* double: finite */
    CLI_BYTES,  /* int64_t: 512, 64k = 64000, 1.5GiB, 160MiB, 2G, 1TB */
    CLI_INTS,   /* cli_ints: a,b,c and first-last, first-last+step, first-last*factor; repeating it extends */
    CLI_CHOICE, /* int: index in .argument, which is "first|second|third" */
    CLI_CHOICES, /* cli_ints: such indices, "first,third"; repeating it extends */
    CLI_TITLE,   /* not an option: a heading of --help */
} cli_kind;

/* A list of integers; owned by the values, freed by cli_free(). */
typedef struct cli_ints {
    int64_t *item;
    int64_t count;
} cli_ints;

typedef struct cli_option {
    const char *name; /* without the dashes; NULL ends a table */
    char letter;      /* -h; 0: none */
    cli_kind kind;
    size_t offset;        /* of the value in the verb's struct: CLI_TO(struct, member) */
    const char *argument; /* name of the value in --help; the legal words of choices, parted by | */
    const char
        *fallback;    /* default: text that is parsed like a user's; "(words)" are shown only; NULL: zero */
    const char *help; /* one sentence, no full stop; wrapped by --help */
    int64_t least, most; /* legal range of INT, REAL, BYTES and of each item of INTS; most 0: no bound, so
                            that zeros refuse negative values */
    bool file;           /* TEXT names a file: the shells complete file names */
} cli_option;

#define CLI_TO(type, member) .offset = offsetof(type, member)
#define CLI_HEADING(text)                                                                                    \
    {                                                                                                        \
        .name = "", .kind = CLI_TITLE, .help = (text)                                                        \
    }
#define CLI_OPTIONS_END                                                                                      \
    {                                                                                                        \
        .name = NULL                                                                                         \
    }

typedef enum cli_format {
    CLI_FORMAT_TABLE,
    CLI_FORMAT_MD,
    CLI_FORMAT_CSV,
    CLI_FORMAT_JSON,
    CLI_FORMAT_JSONL
} cli_format;
typedef enum cli_when { CLI_AUTO, CLI_ALWAYS, CLI_NEVER } cli_when;

struct cli_verb;

/* First member of every verb's struct. */
typedef struct cli_common {
    const struct cli_verb *verb;
    uint64_t given;  /* bit i: row i of the option table stood on the command line; ask cli_given() */
    char **operands; /* what is not an option, in argv */
    int operand_count;
    int format;         /* cli_format */
    const char *output; /* NULL: stdout */
    int64_t threads;    /* 0: as many as OpenMP gives */
    int device;         /* attn_device */
    int64_t gpu;
    int color;    /* cli_when */
    int progress; /* cli_when */
    bool help;
} cli_common;

/* Rows for a verb's table: those that it takes. */
#define CLI_OPTION_FORMAT                                                                                    \
    {                                                                                                        \
        .name = "format", .kind = CLI_CHOICE, CLI_TO(cli_common, format),                                    \
        .argument = "table|md|csv|json|jsonl", .fallback = "table", .help = "how the data is written"        \
    }
#define CLI_OPTION_OUTPUT                                                                                    \
    {                                                                                                        \
        .name = "output", .kind = CLI_TEXT, CLI_TO(cli_common, output), .argument = "FILE", .file = true,    \
        .fallback = "(stdout)", .help = "write the data to FILE, which appears only when it is complete"     \
    }
#define CLI_OPTION_THREADS                                                                                   \
    {                                                                                                        \
        .name = "threads", .kind = CLI_INT, CLI_TO(cli_common, threads), .argument = "N", .least = 1,        \
        .most = 65536, .fallback = "(one a core)", .help = "threads that compute"                            \
    }
#define CLI_OPTION_DEVICE                                                                                    \
    {                                                                                                        \
        .name = "device", .kind = CLI_CHOICE, CLI_TO(cli_common, device), .argument = "cpu|cuda",            \
        .fallback = "cpu", .help = "where it is computed; cuda: an NVIDIA GPU of the Hopper generation"      \
    }
#define CLI_OPTION_GPU                                                                                       \
    {                                                                                                        \
        .name = "gpu", .kind = CLI_INT, CLI_TO(cli_common, gpu), .argument = "N", .most = 63,                \
        .fallback = "0", .help = "which GPU, as CUDA counts them"                                            \
    }
#define CLI_OPTION_COLOR                                                                                     \
    {                                                                                                        \
        .name = "color", .kind = CLI_CHOICE, CLI_TO(cli_common, color), .argument = "auto|always|never",     \
        .fallback = "auto", .help = "colours in the terminal; auto respects NO_COLOR and TERM=dumb"          \
    }
#define CLI_OPTION_PROGRESS                                                                                  \
    {                                                                                                        \
        .name = "progress", .kind = CLI_CHOICE, CLI_TO(cli_common, progress),                                \
        .argument = "auto|always|never", .fallback = "auto",                                                 \
        .help = "progress bar on stderr; auto: when stderr is a terminal"                                    \
    }
/* What the benches share; `type` has the members mem_limit, seed and dry_run. */
#define CLI_OPTION_MEM_LIMIT(type)                                                                           \
    {                                                                                                        \
        .name = "mem-limit", .kind = CLI_BYTES, CLI_TO(type, mem_limit), .argument = "BYTES", .least = 1,    \
        .fallback = "(what the machine has)",                                                                \
        .help = "a case whose process would take more is a row with the status OOM"                          \
    }
#define CLI_OPTION_SEED(type)                                                                                \
    {                                                                                                        \
        .name = "seed", .kind = CLI_INT, CLI_TO(type, seed), .argument = "N", .fallback = "0",               \
        .help = "seed of the random inputs"                                                                  \
    }
#define CLI_OPTION_DRY_RUN(type)                                                                             \
    {                                                                                                        \
        .name = "dry-run", .kind = CLI_FLAG, CLI_TO(type, dry_run),                                          \
        .help = "plan the cases and predict their memory, compute nothing"                                   \
    }
#define CLI_OPTION_HELP                                                                                      \
    {                                                                                                        \
        .name = "help", .letter = 'h', .kind = CLI_FLAG, CLI_TO(cli_common, help),                           \
        .help = "show this help and exit"                                                                    \
    }

typedef struct cli_example {
    const char *command; /* the whole line: "attn plan --tokens 10" */
    const char *what;    /* a few words */
} cli_example;

typedef struct cli_verb {
    const char *name;            /* "plan"; two words, "bench cqs", where one word has several */
    const char *summary;         /* one line, for the list of verbs */
    const char *description;     /* paragraphs parted by "\n\n", for --help and the man page */
    const cli_example *examples; /* ends with {NULL, NULL}; the first three are in --help */
    const char *operand; /* what may follow: its legal words "bash|zsh|fish", or in capitals the name of
                            something free, "FILE"; NULL: nothing */
    int operand_least, operand_most;
    const cli_option *options; /* at most 64 rows */
    size_t size;               /* of the verb's struct, which begins with a cli_common */
    int (*run)(const void *values);
} cli_verb;

/* All verbs, ends with NULL (main.c). */
extern const cli_verb *const cli_verbs[];
extern const cli_verb cli_verb_info, cli_verb_plan, cli_verb_run, cli_verb_check, cli_verb_bench_attention,
    cli_verb_bench_cqs, cli_verb_help, cli_verb_completion;

/* What follows `word` and a space in the name of a verb, or NULL: "cqs" of "bench cqs" for "bench". */
const char *cli_verb_second(const cli_verb *verb, const char *word);
/* Whether word is the first of two-word names. */
bool cli_verb_group(const char *word);
/* The verb whose name is words[0], or words[0] and words[1]; *used tells how many.  NULL, with a message on
 * stderr: there is none. */
const cli_verb *cli_find_verb(char *const *words, int count, int *used);
/* Its name with '-' for the space, as in the names of man pages; in text[CLI_NAME], which is returned. */
#define CLI_NAME 64
const char *cli_verb_page(const cli_verb *verb, char text[CLI_NAME]);

/* Fills values (zeroed, verb->size bytes) from argv[0..argc), the words after the verb.  On a usage error
 * says what is legal on stderr and returns CLI_USAGE. */
int cli_parse(const cli_verb *verb, int argc, char **argv, void *values);
/* Whether operand lists legal words. */
bool cli_operand_words(const cli_verb *verb);
/* Frees the lists in values, not values itself. */
void cli_free(const cli_verb *verb, void *values);
/* Whether the option stood on the command line. */
bool cli_given(const cli_common *common, const char *name);

/* The parsers by themselves (also for fuzzing).  true, or false with the reason in why[why_size]; *list is
 * extended, and left alone on failure. */
bool cli_parse_int(const char *text, int64_t least, int64_t most, int64_t *value, char *why, size_t why_size);
bool cli_parse_bytes(const char *text, int64_t least, int64_t most, int64_t *value, char *why,
                     size_t why_size);
bool cli_parse_real(const char *text, double least, double most, double *value, char *why, size_t why_size);
bool cli_parse_ints(const char *text, int64_t least, int64_t most, cli_ints *list, char *why,
                    size_t why_size);

/* The word of words[] (NULL-terminated) that text may have been meant to be, or NULL. */
const char *cli_nearest(const char *text, const char *const *words);

/* ---- output (json.c, output.c)
 * ------------------------------------------------------------------------------ */

/* Streaming JSON: objects and arrays open and close like brackets, values go in between.  Inside an array
 * and at the top the key is NULL.  Text is escaped (invalid UTF-8 becomes U+FFFD), numbers that are not
 * finite are null. */
typedef struct cli_json {
    FILE *file;
    int depth;
    bool compact;      /* no line breaks (jsonl) */
    bool filled[32];   /* something stands in this level */
    bool is_array[32]; /* for the closing bracket */
} cli_json;

void cli_json_begin(cli_json *json, FILE *file, bool compact);
void cli_json_object(cli_json *json, const char *key);
void cli_json_array(cli_json *json, const char *key);
void cli_json_end(cli_json *json); /* closes the innermost object or array; the outermost ends the line */
void cli_json_int(cli_json *json, const char *key, int64_t value);
void cli_json_real(cli_json *json, const char *key, double value);
void cli_json_text(cli_json *json, const char *key, const char *value); /* NULL: null */
void cli_json_bool(cli_json *json, const char *key, bool value);
void cli_json_null(cli_json *json, const char *key);
void cli_json_ints(cli_json *json, const char *key, const int64_t *value, int64_t count); /* on one line */

/* Where a verb's data goes: stdout, or a temporary file beside --output that is renamed at the end. */
typedef struct cli_out {
    FILE *file;
    cli_format format;
    cli_json json; /* for the formats json (indented) and jsonl (compact) */
    const char *path;
    char *temporary;
} cli_out;

/* CLI_OK, or CLI_IO with a message. */
int cli_out_open(cli_out *out, const cli_common *common);
/* Flushes, checks and, unless code is an error above CLI_WRONG, renames; returns code, or CLI_IO with a
 * message if the data did not all arrive. */
int cli_out_close(cli_out *out, int code);

/* A file that appears only when complete: cli_file_open() gives a stream to a temporary name in the same
 * folder (*temporary, freed by close); cli_file_close() syncs and renames it, or removes it if !keep.
 * Messages and CLI_IO on failure.  One unfinished file at a time is removed on exit or Ctrl-C. */
FILE *cli_file_open(const char *path, char **temporary);
int cli_file_close(FILE *file, const char *path, char *temporary, bool keep);

/* ---- tables (table.c) ------------------------------------------------------------------------------- */

typedef enum cli_cell { CLI_CELL_TEXT, CLI_CELL_INT, CLI_CELL_REAL, CLI_CELL_BYTES, CLI_CELL_BOOL } cli_cell;

typedef struct cli_column {
    const char *key;   /* in csv and json, unit included: "time_ms" */
    const char *title; /* in table and md */
    cli_cell kind;     /* BYTES: "1.50 MiB" for people, the number of bytes for machines */
    int precision;     /* digits after the point of a REAL for people; machines get all of them */
    int width;         /* at least this wide in the table format; 0: the title's width, or 8 */
} cli_column;

#define CLI_COLUMNS 48

/*
 * Rows are written and flushed one by one.  table: aligned columns; md, csv: as usual; jsonl: an object a
 * row; json: an array of objects under `name`, in the object that is open in out->json, or else in a
 * document of its own with schema_version.  Cells are given in the order of the columns; the last one ends
 * the row.
 */
typedef struct cli_table {
    cli_out *out;
    const cli_column *columns;
    int count;
    int next;      /* column of the next cell */
    bool document; /* the table opened the JSON document */
} cli_table;

void cli_table_begin(cli_table *table, cli_out *out, const char *name, const cli_column *columns, int count);
void cli_table_text(cli_table *table, const char *value);         /* NULL: missing */
void cli_table_int(cli_table *table, int64_t value);              /* INT, BYTES and BOOL columns */
void cli_table_real(cli_table *table, double value);              /* not finite: missing */
void cli_table_known(cli_table *table, bool known, double value); /* a real, or missing */
void cli_table_missing(cli_table *table);                         /* "-", empty, null */
void cli_table_end(cli_table *table);

/* ---- text for people (text.c) ------------------------------------------------------------------------ */

/* "1.50 GiB"; "12.3 s", "3 min 04 s"; in a buffer of the caller, which is returned. */
#define CLI_NUMBER 32
const char *cli_bytes(char text[CLI_NUMBER], double bytes);
const char *cli_seconds(char text[CLI_NUMBER], double seconds);

bool cli_utf8(void);                      /* whether the locale's characters are UTF-8 */
bool cli_use_color(int when, FILE *file); /* cli_when; NO_COLOR, TERM=dumb, not a terminal: no */
int cli_terminal_width(FILE *file);       /* columns: COLUMNS, the terminal's, or 80 */
/* Writes text in lines of at most `width` columns, each after `indent` spaces; "\n\n" parts paragraphs.
 * The cursor stands at column `at`. */
void cli_wrap(FILE *file, const char *text, int at, int indent, int width);

/* ---- progress (progress.c) --------------------------------------------------------------------------- */

/* One bar on stderr with time left, redrawn at most 10 times a second, ASCII unless the locale is UTF-8.
 * Not thread-safe: the events of attn_execute() come one at a time. */
typedef struct cli_progress {
    bool on;
    bool utf8;
    const char *label;
    double total, done;
    double begin, drawn; /* seconds */
    double skipped;      /* done without work (resumed): not counted for the speed */
} cli_progress;

/* common->progress decides whether it shows.  total in any unit; <= 0: no share, only the time. */
void cli_progress_begin(cli_progress *progress, const cli_common *common, const char *label, double total);
void cli_progress_add(cli_progress *progress, double amount);
void cli_progress_skip(cli_progress *progress, double amount); /* done before: counts as done, not as speed */
void cli_progress_end(cli_progress *progress);                 /* clears the line */
/* Clears the line so that a message can be printed; the next add draws it again. */
void cli_progress_hide(cli_progress *progress);
double cli_now(void); /* seconds, monotonic */

/* ---- what plan and run share -------------------------------------------------------------------------- */

/* summary.c: the summary that CQS users know: subsequences, ratios to N, histogram, cells, bytes, balance. */
int cli_summary_print(FILE *file, const attn_plan *plan);
/* The same as members of the object that is open in json. */
int cli_summary_json(cli_json *json, const attn_plan *plan);

/* picture.c: draws the schedule of the plan: FILE.svg, FILE.png, or "-" in the terminal (to `file`). Returns
 * an exit code; the message is printed. */
int cli_picture(const attn_plan *plan, const char *path, FILE *file, const cli_common *common);

/* info.c: "attn 0.1.0", then what this build has, on one line each */
void cli_version(FILE *file);

/* help.c, man.c, completion.c; verb NULL: the program's own page */
void cli_help(FILE *file, const cli_verb *verb);
/* The verbs whose first word is `word`. */
void cli_help_group(FILE *file, const char *word);
void cli_man(FILE *file, const cli_verb *verb);
/* shell: index in "bash|zsh|fish" */
void cli_completion(FILE *file, int shell);

#endif
