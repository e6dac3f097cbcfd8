/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture_term.c - the matrix in the terminal: two columns a square, with the worker's letter, on its colour
 * where the terminal has colours.
 *
 * 24-bit colours where COLORTERM says so, else the 6 x 6 x 6 cube of the 256-colour terminals.  With more
 * tokens than fit, each square stands for the cell in its middle.
 */
#include <stdlib.h>
#include <string.h>

#include "picture.h"

#define MOST_SQUARES 64
#define LETTERS      62

typedef enum color_depth { PLAIN, CUBE, TRUE_COLOR } color_depth;

static color_depth find_depth(const cli_common *common, FILE *file)
{
    const char *colorterm = getenv("COLORTERM");
    if (!cli_use_color(common->color, file)) {
        return PLAIN;
    }
    bool all = colorterm != NULL && (strcmp(colorterm, "truecolor") == 0 || strcmp(colorterm, "24bit") == 0);
    return all ? TRUE_COLOR : CUBE;
}

/* Nearest of the levels 0, 95, 135, 175, 215, 255 */
static int cube_level(uint8_t value)
{
    return value < 48 ? 0 : value < 115 ? 1 : (value - 35) / 40;
}

static void set_background(FILE *file, color_depth depth, picture_color color)
{
    int ink = picture_is_light(color) ? 16 : 231;
    if (depth == TRUE_COLOR) {
        fprintf(file, "\033[38;5;%d;48;2;%d;%d;%dm", ink, color.red, color.green, color.blue);
    } else if (depth == CUBE) {
        fprintf(file, "\033[38;5;%d;48;5;%dm", ink,
                16 + 36 * cube_level(color.red) + 6 * cube_level(color.green) + cube_level(color.blue));
    }
}

/* Two columns: a letter for each of up to 62 workers, else the last two digits of the rank. */
static void print_label(char text[8], int64_t rank, int64_t workers)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    if (workers <= LETTERS) {
        snprintf(text, 8, "%c ", letters[rank]);
    } else {
        snprintf(text, 8, "%02d", (int)(rank % 100));
    }
}

static void draw_square(const picture_model *picture, FILE *file, color_depth depth, int32_t owner,
                        bool visible)
{
    char text[8];
    if (!visible || owner == PICTURE_NOBODY) {
        set_background(file, depth, visible ? picture_paper : picture_masked);
        fputs(visible ? "? " : ". ", file);
    } else {
        print_label(text, owner, picture->summary.workers);
        set_background(file, depth, picture_rank_color(owner));
        fputs(text, file);
    }
}

static void draw_legend(const picture_model *picture, FILE *file, color_depth depth, int width)
{
    int64_t workers = picture->summary.workers, shown = workers < LETTERS ? workers : LETTERS;
    int at = 0;
    for (int64_t i = 0; i < shown; i++) {
        char label[8], text[64];
        print_label(label, i, workers);
        int size = snprintf(text, sizeof(text), " worker %lld  ", (long long)i);
        if (at > 0 && at + 2 + size > width) {
            fputc('\n', file);
            at = 0;
        }
        set_background(file, depth, picture_rank_color(i));
        fputs(label, file);
        fprintf(file, "%s%s", depth == PLAIN ? "" : "\033[0m", text);
        at += 2 + size;
    }
    if (shown < workers) {
        fprintf(file, "and %lld more", (long long)(workers - shown));
    }
    fputc('\n', file);
}

static int64_t middle(int64_t i, int64_t squares, int64_t tokens)
{
    return (int64_t)(((double)i + 0.5) * (double)tokens / (double)squares);
}

static int64_t squares_of(int64_t tokens, int width)
{
    int64_t most = (width - 2) / 2 < MOST_SQUARES ? (width - 2) / 2 : MOST_SQUARES;
    return tokens < most ? tokens : most;
}

int picture_terminal(const picture_model *picture, FILE *file, const cli_common *common)
{
    int width = cli_terminal_width(file);
    int64_t rows = squares_of(picture->tokens_q, width), cols = squares_of(picture->tokens_kv, width);
    color_depth depth = find_depth(common, file);
    int32_t *owners = NULL;
    char title[400];
    attn_status status = picture_owners(picture, rows, cols, &owners);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    picture_title(picture, title, sizeof(title));
    cli_wrap(file, title, 0, 0, width);
    for (int64_t i = 0; i < rows; i++) {
        fputs("  ", file);
        for (int64_t j = 0; j < cols; j++) {
            bool visible = picture_visible(picture, middle(i, rows, picture->tokens_q),
                                           middle(j, cols, picture->tokens_kv));
            draw_square(picture, file, depth, owners[i * cols + j], visible);
        }
        fprintf(file, "%s\n", depth == PLAIN ? "" : "\033[0m");
    }
    free(owners);
    draw_legend(picture, file, depth, width);
    if (rows < picture->tokens_q || cols < picture->tokens_kv) {
        fprintf(file, "(%lld x %lld squares: each shows the cell in its middle)\n", (long long)rows,
                (long long)cols);
    }
    return CLI_OK;
}
