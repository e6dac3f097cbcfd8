/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture.h - the N x N matrix of a plan as a picture: who computes which cells.
 *
 *   picture.c         the model: rectangles of each worker, merged, from attn_plan_rank(); the size cap
 *   picture_color.c   the palette
 *   picture_draw.c    the layout, drawn on a canvas: title, axes, matrix, legend
 *   picture_svg.c     a canvas that writes SVG
 *   picture_png.c     a canvas that writes PNG through cairo
 *   picture_term.c    the terminal
 *
 * Rows are queries from top to bottom, columns are keys from left to right.
 */
#ifndef ATTN_CLI_PICTURE_H
#define ATTN_CLI_PICTURE_H

#include "cli.h"

/* ---- the model (picture.c) ----------------------------------------------------------------------------- */

/* Cells of one worker, in tokens. */
typedef struct picture_rect {
    int64_t row, rows, col, cols;
    int64_t rank;
} picture_rect;

typedef struct picture_model {
    const attn_plan *plan;
    attn_summary summary;
    int64_t tokens_q, tokens_kv;
    int64_t lo, hi;      /* key j is visible to query i when lo <= j - i <= hi */
    picture_rect *rects; /* by worker */
    int64_t count, room;
    int64_t *cells; /* visible cells of each worker */
    int grid;       /* 0: exact; else squares a side that the matrix was cut to */
} picture_model;

/* Owner of each square of a grid x grid matrix over the cells: a rank, or PICTURE_NOBODY; freed by the
 * caller. A square belongs to the worker of the cell in its middle. */
#define PICTURE_NOBODY (-1)
attn_status picture_owners(const picture_model *picture, int64_t rows, int64_t cols, int32_t **owners);

/* Corners (column, row) of the polygon of cells that the mask hides above (side 1) or below (side -1) the
 * band; writes up to capacity pairs and returns how many there are, 0: none. */
#define PICTURE_STAIRS 512 /* tokens up to which each cell's corner is drawn */
#define PICTURE_POINTS (2 * PICTURE_STAIRS + 8)
int picture_hidden(const picture_model *picture, int side, double (*points)[2]);

bool picture_visible(const picture_model *picture, int64_t query, int64_t key);

/* ---- colours (picture_color.c) ---------------------------------------------------------------------------
 */

typedef struct picture_color {
    uint8_t red, green, blue;
} picture_color;

#define PICTURE_HATCHES 4 /* none, rising, falling, both */

picture_color picture_rank_color(int64_t rank);
int picture_rank_hatch(int64_t rank);
/* Whether black text on this colour reads better than white. */
bool picture_is_light(picture_color color);

extern const picture_color picture_masked, picture_ink, picture_paper;

/* ---- a canvas and the layout (picture_draw.c)
 * -------------------------------------------------------------- */

typedef enum picture_anchor { PICTURE_LEFT, PICTURE_MIDDLE, PICTURE_RIGHT } picture_anchor;

typedef struct picture_canvas picture_canvas;
struct picture_canvas {
    FILE *file;
    void *state; /* of the PNG canvas */
    int shapes;  /* begun so far */
    int hatch;   /* of the shape that is open */
    void (*begin)(picture_canvas *canvas, double width, double height, const char *title);
    /* rectangles added in between are filled as one shape */
    void (*begin_shape)(picture_canvas *canvas, picture_color color, int hatch, const char *tip);
    void (*rect)(picture_canvas *canvas, double x, double y, double width, double height);
    void (*end_shape)(picture_canvas *canvas);
    void (*polygon)(picture_canvas *canvas, double (*points)[2], int count, picture_color color);
    void (*line)(picture_canvas *canvas, double x0, double y0, double x1, double y1, double opacity);
    void (*text)(picture_canvas *canvas, double x, double y, double size, picture_anchor anchor,
                 const char *text);
    int (*end)(picture_canvas *canvas); /* an exit code, with the message printed */
};

int picture_draw(const picture_model *picture, picture_canvas *canvas);

void picture_canvas_svg(picture_canvas *canvas, FILE *file);
/* CLI_MISSING, with the message printed, in a build without cairo. */
int picture_canvas_png(picture_canvas *canvas, FILE *file);
int picture_terminal(const picture_model *picture, FILE *file, const cli_common *common);

/* One line: "10 tokens, 7 workers, ..." */
void picture_title(const picture_model *picture, char *text, size_t size);

#endif
