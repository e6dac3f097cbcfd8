/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture_svg.c - a canvas that writes SVG 1.1: one path a worker, so that files stay small.
 */
#include <string.h>

#include "picture.h"

static void write_xml(FILE *file, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", file);
            break;
        case '<':
            fputs("&lt;", file);
            break;
        case '>':
            fputs("&gt;", file);
            break;
        default:
            fputc(*text, file);
        }
    }
}

static void svg_begin(picture_canvas *canvas, double width, double height, const char *title)
{
    static const char *const hatches[] = {"M0 6L6 0", "M0 0L6 6", "M0 6L6 0M0 0L6 6"};
    FILE *file = canvas->file;
    fprintf(file,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" "
            "xmlns:xlink=\"http://www.w3.org/1999/xlink\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
            "%.0f\" "
            "font-family=\"sans-serif\" shape-rendering=\"crispEdges\">\n<title>",
            width, height, width, height);
    write_xml(file, title);
    fputs("</title>\n<defs>\n", file);
    for (int i = 0; i < PICTURE_HATCHES - 1; i++) {
        fprintf(
            file,
            "<pattern id=\"hatch%d\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\"><path d=\"%s\" "
            "stroke=\"#000\" stroke-opacity=\"0.55\" stroke-width=\"1\"/></pattern>\n",
            i + 1, hatches[i]);
    }
    fprintf(file, "</defs>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#%02x%02x%02x\"/>\n",
            picture_paper.red, picture_paper.green, picture_paper.blue);
}

/* A hatched shape is a group of two: <use> draws the path again with the pattern. */
static void svg_begin_shape(picture_canvas *canvas, picture_color color, int hatch, const char *tip)
{
    canvas->shapes++;
    canvas->hatch = hatch;
    fprintf(canvas->file, "<g fill=\"#%02x%02x%02x\"><title>", color.red, color.green, color.blue);
    write_xml(canvas->file, tip);
    fprintf(canvas->file, "</title><path id=\"s%d\" d=\"", canvas->shapes);
}

static void svg_rect(picture_canvas *canvas, double x, double y, double width, double height)
{
    fprintf(canvas->file, "M%.6g %.6gh%.6gv%.6gh%.6gz", x, y, width, height, -width);
}

static void svg_end_shape(picture_canvas *canvas)
{
    fputs("\"/></g>\n", canvas->file);
    if (canvas->hatch > 0) {
        fprintf(canvas->file, "<use xlink:href=\"#s%d\" fill=\"url(#hatch%d)\"/>\n", canvas->shapes,
                canvas->hatch);
    }
}

static void svg_polygon(picture_canvas *canvas, double (*points)[2], int count, picture_color color)
{
    fprintf(canvas->file, "<polygon fill=\"#%02x%02x%02x\" points=\"", color.red, color.green, color.blue);
    for (int i = 0; i < count; i++) {
        fprintf(canvas->file, "%s%.6g,%.6g", i > 0 ? " " : "", points[i][0], points[i][1]);
    }
    fputs("\"/>\n", canvas->file);
}

static void svg_line(picture_canvas *canvas, double x0, double y0, double x1, double y1, double opacity)
{
    fprintf(canvas->file,
            "<line x1=\"%.6g\" y1=\"%.6g\" x2=\"%.6g\" y2=\"%.6g\" stroke=\"#%02x%02x%02x\" "
            "stroke-opacity=\"%.2g\"/>\n",
            x0, y0, x1, y1, picture_ink.red, picture_ink.green, picture_ink.blue, opacity);
}

static void svg_text(picture_canvas *canvas, double x, double y, double size, picture_anchor anchor,
                     const char *text)
{
    static const char *const anchors[] = {"start", "middle", "end"};
    fprintf(canvas->file,
            "<text x=\"%.6g\" y=\"%.6g\" font-size=\"%.6g\" text-anchor=\"%s\" fill=\"#%02x%02x%02x\">", x, y,
            size, anchors[anchor], picture_ink.red, picture_ink.green, picture_ink.blue);
    write_xml(canvas->file, text);
    fputs("</text>\n", canvas->file);
}

static int svg_end(picture_canvas *canvas)
{
    fputs("</svg>\n", canvas->file);
    return CLI_OK; /* cli_file_close() tells whether all arrived */
}

void picture_canvas_svg(picture_canvas *canvas, FILE *file)
{
    *canvas = (picture_canvas){
        .file = file,
        .begin = svg_begin,
        .begin_shape = svg_begin_shape,
        .rect = svg_rect,
        .end_shape = svg_end_shape,
        .polygon = svg_polygon,
        .line = svg_line,
        .text = svg_text,
        .end = svg_end,
    };
}
