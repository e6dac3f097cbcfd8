/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture_png.c - a canvas that writes PNG through cairo, at twice the size of the SVG for sharp screens.
 */
#include "picture.h"

#if ATTN_HAVE_CAIRO

#include <cairo.h>
#include <math.h>
#include <stdlib.h>

#define ZOOM 2.0

static void set_color(cairo_t *cairo, picture_color color)
{
    cairo_set_source_rgb(cairo, color.red / 255.0, color.green / 255.0, color.blue / 255.0);
}

static void png_begin(picture_canvas *canvas, double width, double height, const char *title)
{
    (void)title; /* PNG has no place for it; it is drawn as text */
    cairo_surface_t *surface =
        cairo_image_surface_create(CAIRO_FORMAT_RGB24, (int)(ZOOM * width + 0.5), (int)(ZOOM * height + 0.5));
    cairo_t *cairo = cairo_create(surface);
    cairo_surface_destroy(surface); /* the context holds it */
    cairo_scale(cairo, ZOOM, ZOOM);
    set_color(cairo, picture_paper);
    cairo_paint(cairo);
    cairo_set_antialias(cairo, CAIRO_ANTIALIAS_NONE);
    canvas->state = cairo;
}

static void png_begin_shape(picture_canvas *canvas, picture_color color, int hatch, const char *tip)
{
    (void)tip;
    canvas->hatch = hatch;
    set_color(canvas->state, color);
    cairo_new_path(canvas->state);
}

static void png_rect(picture_canvas *canvas, double x, double y, double width, double height)
{
    cairo_rectangle(canvas->state, x, y, width, height);
}

/* Lines x + slope * y = c for every sixth c, from edge to edge of the box: neighbours' lines meet. */
static void slanted_lines(cairo_t *cairo, double slope, const double box[4])
{
    double x0 = box[0], y0 = box[1], x1 = box[2], y1 = box[3];
    double least = x0 + fmin(slope * y0, slope * y1), most = x1 + fmax(slope * y0, slope * y1);
    for (double c = 6 * floor(least / 6); c <= most; c += 6) {
        cairo_move_to(cairo, c - slope * y0, y0);
        cairo_line_to(cairo, c - slope * y1, y1);
    }
}

/* Hatches the open path and keeps to its inside. */
static void draw_hatch(cairo_t *cairo, int hatch)
{
    double box[4];
    cairo_save(cairo);
    cairo_clip(cairo);
    cairo_clip_extents(cairo, &box[0], &box[1], &box[2], &box[3]);
    if (hatch != 2) { /* rising, or both */
        slanted_lines(cairo, 1, box);
    }
    if (hatch != 1) { /* falling, or both */
        slanted_lines(cairo, -1, box);
    }
    cairo_set_source_rgba(cairo, 0, 0, 0, 0.55);
    cairo_set_line_width(cairo, 1);
    cairo_stroke(cairo);
    cairo_restore(cairo);
}

static void png_end_shape(picture_canvas *canvas)
{
    cairo_fill_preserve(canvas->state);
    if (canvas->hatch > 0) {
        draw_hatch(canvas->state, canvas->hatch);
    }
    cairo_new_path(canvas->state);
}

static void png_polygon(picture_canvas *canvas, double (*points)[2], int count, picture_color color)
{
    cairo_new_path(canvas->state);
    for (int i = 0; i < count; i++) {
        cairo_line_to(canvas->state, points[i][0], points[i][1]);
    }
    set_color(canvas->state, color);
    cairo_fill(canvas->state);
}

static void png_line(picture_canvas *canvas, double x0, double y0, double x1, double y1, double opacity)
{
    cairo_set_source_rgba(canvas->state, picture_ink.red / 255.0, picture_ink.green / 255.0,
                          picture_ink.blue / 255.0, opacity);
    cairo_set_line_width(canvas->state, 1);
    cairo_move_to(canvas->state, x0, y0);
    cairo_line_to(canvas->state, x1, y1);
    cairo_stroke(canvas->state);
}

static void png_text(picture_canvas *canvas, double x, double y, double size, picture_anchor anchor,
                     const char *text)
{
    cairo_text_extents_t extents;
    cairo_select_font_face(canvas->state, "sans-serif", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_font_size(canvas->state, size);
    cairo_text_extents(canvas->state, text, &extents);
    double shift = anchor == PICTURE_LEFT     ? 0
                   : anchor == PICTURE_MIDDLE ? extents.x_advance / 2
                                              : extents.x_advance;
    set_color(canvas->state, picture_ink);
    cairo_move_to(canvas->state, x - shift, y);
    cairo_show_text(canvas->state, text);
}

static cairo_status_t write_some(void *closure, const unsigned char *data, unsigned int size)
{
    return fwrite(data, 1, size, closure) == size ? CAIRO_STATUS_SUCCESS : CAIRO_STATUS_WRITE_ERROR;
}

static int png_end(picture_canvas *canvas)
{
    cairo_t *cairo = canvas->state;
    cairo_status_t status = cairo_status(cairo);
    if (status == CAIRO_STATUS_SUCCESS) {
        status = cairo_surface_write_to_png_stream(cairo_get_target(cairo), write_some, canvas->file);
    }
    cairo_destroy(cairo);
    canvas->state = NULL;
    if (status != CAIRO_STATUS_SUCCESS) {
        int code = status == CAIRO_STATUS_NO_MEMORY ? CLI_MISSING : CLI_IO;
        return cli_error(code, "cannot draw the picture: %s", cairo_status_to_string(status));
    }
    return CLI_OK;
}

int picture_canvas_png(picture_canvas *canvas, FILE *file)
{
    *canvas = (picture_canvas){
        .file = file,
        .begin = png_begin,
        .begin_shape = png_begin_shape,
        .rect = png_rect,
        .end_shape = png_end_shape,
        .polygon = png_polygon,
        .line = png_line,
        .text = png_text,
        .end = png_end,
    };
    return CLI_OK;
}

#else

int picture_canvas_png(picture_canvas *canvas, FILE *file)
{
    (void)canvas;
    (void)file;
    return cli_error(CLI_MISSING,
                     "this build has no cairo, which draws PNG: write FILE.svg, or build with Debian's "
                     "libcairo2-dev installed");
}

#endif
