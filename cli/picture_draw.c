/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture_draw.c - the layout of a picture: title on top, the matrix with its axes, the legend to the right.
 *
 * The matrix keeps its proportions within SIDE pixels.  Token groups are marked while their borders can be
 * told apart.
 */
#include <string.h>

#include "picture.h"

#define SIDE     640.0 /* pixels of the longer side of the matrix */
#define LEFT     70.0
#define TOP      64.0
#define BOTTOM   40.0
#define ENTRY    17.0 /* height of a line in the legend */
#define COLUMN   170.0
#define LINES    37 /* of one legend column */
#define COLUMNS  3
#define NARROW   4.0  /* pixels: narrower groups have no border */
#define LABELED  16.0 /* pixels: narrower groups have no number */
#define SMALLEST 24.0

typedef struct picture_layout {
    const picture_model *picture;
    picture_canvas *canvas;
    double width, height; /* of the matrix */
    double x_scale, y_scale;
} picture_layout;

static void set_size(picture_layout *layout)
{
    double rows = (double)layout->picture->tokens_q, cols = (double)layout->picture->tokens_kv;
    layout->width = rows > cols ? SIDE * cols / rows : SIDE;
    layout->height = rows > cols ? SIDE : SIDE * rows / cols;
    layout->width = layout->width < SMALLEST ? SMALLEST : layout->width;
    layout->height = layout->height < SMALLEST ? SMALLEST : layout->height;
    layout->x_scale = layout->width / cols;
    layout->y_scale = layout->height / rows;
}

/* ---- the matrix -----------------------------------------------------------------------------------------
 */

static void draw_workers(const picture_layout *layout)
{
    const picture_model *picture = layout->picture;
    picture_canvas *canvas = layout->canvas;
    for (int64_t i = 0; i < picture->count;) {
        int64_t rank = picture->rects[i].rank;
        char tip[96];
        snprintf(tip, sizeof(tip), "worker %lld: %lld cells", (long long)rank,
                 (long long)picture->cells[rank]);
        canvas->begin_shape(canvas, picture_rank_color(rank), picture_rank_hatch(rank), tip);
        for (; i < picture->count && picture->rects[i].rank == rank; i++) {
            const picture_rect *rect = &picture->rects[i];
            canvas->rect(canvas, LEFT + (double)rect->col * layout->x_scale,
                         TOP + (double)rect->row * layout->y_scale, (double)rect->cols * layout->x_scale,
                         (double)rect->rows * layout->y_scale);
        }
        canvas->end_shape(canvas);
    }
}

static void draw_mask(const picture_layout *layout)
{
    double points[PICTURE_POINTS][2];
    for (int side = -1; side <= 1; side += 2) {
        int count = picture_hidden(layout->picture, side, points);
        for (int i = 0; i < count; i++) {
            points[i][0] = LEFT + points[i][0] * layout->x_scale;
            points[i][1] = TOP + points[i][1] * layout->y_scale;
        }
        if (count > 0) {
            layout->canvas->polygon(layout->canvas, points, count, picture_masked);
        }
    }
}

/* ---- the axes -------------------------------------------------------------------------------------------
 */

/* Borders and numbers of the groups along one axis. */
static void draw_groups(const picture_layout *layout, bool columns)
{
    const picture_model *picture = layout->picture;
    picture_canvas *canvas = layout->canvas;
    int64_t workers = picture->summary.workers;
    double scale = columns ? layout->x_scale : layout->y_scale;
    double size = (columns ? layout->width : layout->height) / (double)workers;
    for (int64_t group = 0; group < workers && size >= NARROW; group++) {
        int64_t first = 0, count = 0;
        char text[32];
        attn_plan_group(picture->plan, columns ? ATTN_K : ATTN_Q, group, &first, &count);
        double at = (double)first * scale, middle = ((double)first + (double)count / 2) * scale;
        if (first > 0 && count > 0) {
            double x = columns ? LEFT + at : LEFT, y = columns ? TOP : TOP + at;
            canvas->line(canvas, x, y, columns ? x : LEFT + layout->width, columns ? TOP + layout->height : y,
                         0.35);
        }
        if (count > 0 && size >= LABELED) {
            snprintf(text, sizeof(text), "%lld", (long long)group);
            canvas->text(canvas, columns ? LEFT + middle : LEFT - 6, columns ? TOP - 6 : TOP + middle + 4, 11,
                         columns ? PICTURE_MIDDLE : PICTURE_RIGHT, text);
        }
    }
    if (size < LABELED) {
        char text[32];
        int64_t tokens = columns ? picture->tokens_kv : picture->tokens_q;
        snprintf(text, sizeof(text), "%lld", (long long)tokens);
        canvas->text(canvas, columns ? LEFT : LEFT - 6, columns ? TOP - 6 : TOP + 10, 11,
                     columns ? PICTURE_LEFT : PICTURE_RIGHT, "0");
        canvas->text(canvas, columns ? LEFT + layout->width : LEFT - 6,
                     columns ? TOP - 6 : TOP + layout->height, 11, PICTURE_RIGHT, text);
    }
}

static void draw_axes(const picture_layout *layout)
{
    picture_canvas *canvas = layout->canvas;
    double right = LEFT + layout->width, bottom = TOP + layout->height;
    bool numbered = layout->width / (double)layout->picture->summary.workers >= LABELED;
    draw_groups(layout, true);
    draw_groups(layout, false);
    canvas->line(canvas, LEFT, TOP, right, TOP, 1);
    canvas->line(canvas, LEFT, bottom, right, bottom, 1);
    canvas->line(canvas, LEFT, TOP, LEFT, bottom, 1);
    canvas->line(canvas, right, TOP, right, bottom, 1);
    canvas->text(canvas, LEFT, bottom + 20, 12, PICTURE_LEFT,
                 numbered ? "key groups from left to right, query groups from top to bottom"
                          : "keys from left to right, queries from top to bottom");
}

/* ---- the legend -----------------------------------------------------------------------------------------
 */

static int64_t legend_entries(const picture_model *picture)
{
    int64_t most = (int64_t)LINES * COLUMNS;
    return picture->summary.workers < most ? picture->summary.workers : most;
}

static int64_t legend_columns(const picture_model *picture)
{
    return (legend_entries(picture) + LINES - 1) / LINES;
}

static bool has_mask(const picture_model *picture)
{
    double points[PICTURE_POINTS][2];
    return picture_hidden(picture, 1, points) > 0 || picture_hidden(picture, -1, points) > 0;
}

static void draw_entry(const picture_layout *layout, int64_t line, picture_color color, int hatch,
                       const char *text)
{
    picture_canvas *canvas = layout->canvas;
    double x = LEFT + layout->width + 24 + COLUMN * (double)(line / LINES),
           y = TOP + ENTRY * (double)(line % LINES);
    canvas->begin_shape(canvas, color, hatch, text);
    canvas->rect(canvas, x, y, 12, 12);
    canvas->end_shape(canvas);
    canvas->text(canvas, x + 18, y + 10, 12, PICTURE_LEFT, text);
}

static void draw_legend(const picture_layout *layout)
{
    const picture_model *picture = layout->picture;
    int64_t entries = legend_entries(picture), line = 0;
    char text[96];
    for (; line < entries; line++) {
        snprintf(text, sizeof(text), "worker %lld: %lld cells", (long long)line,
                 (long long)picture->cells[line]);
        draw_entry(layout, line, picture_rank_color(line), picture_rank_hatch(line), text);
    }
    double y = TOP + ENTRY * LINES + 10, x = LEFT + layout->width + 24;
    if (entries < picture->summary.workers) {
        snprintf(text, sizeof(text), "and %lld more workers",
                 (long long)(picture->summary.workers - entries));
        layout->canvas->text(layout->canvas, x, y, 12, PICTURE_LEFT, text);
    }
    if (has_mask(picture)) {
        layout->canvas->begin_shape(layout->canvas, picture_masked, 0, "masked");
        layout->canvas->rect(layout->canvas, LEFT + layout->width - 70, TOP + layout->height + 10, 12, 12);
        layout->canvas->end_shape(layout->canvas);
        layout->canvas->text(layout->canvas, LEFT + layout->width - 52, TOP + layout->height + 20, 12,
                             PICTURE_LEFT, "masked");
    }
}

int picture_draw(const picture_model *picture, picture_canvas *canvas)
{
    picture_layout layout = {.picture = picture, .canvas = canvas};
    char title[400];
    set_size(&layout);
    double height = layout.height > ENTRY * LINES ? layout.height : ENTRY * LINES;
    if (legend_entries(picture) < LINES && layout.height < ENTRY * LINES) {
        double lines = ENTRY * (double)(legend_entries(picture) + 1);
        height = layout.height > lines ? layout.height : lines;
    }
    picture_title(picture, title, sizeof(title));
    canvas->begin(canvas, LEFT + layout.width + 24 + COLUMN * (double)legend_columns(picture) + 20,
                  TOP + height + BOTTOM, title);
    canvas->text(canvas, LEFT, 24, 15, PICTURE_LEFT, title);
    draw_workers(&layout);
    draw_mask(&layout);
    draw_axes(&layout);
    draw_legend(&layout);
    return canvas->end(canvas);
}
