/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture.c - the model of a picture: rectangles of cells, each of one worker, taken from the task lists of
 * attn_plan_rank(), so that the picture shows the schedule that runs.
 *
 * Neighbouring blocks of one worker are merged along the keys, then along the queries.  With more than
 * MOST_BLOCKS blocks nobody could see them, and the file would be huge: then the matrix is cut to GRID x GRID
 * squares, each in the colour of the worker that owns the cell in its middle, and the user is told.
 */
#include <stdlib.h>
#include <string.h>

#include "picture.h"

#define MOST_BLOCKS  25600 /* 160 workers */
#define GRID         256
#define MOST_WORKERS 2048

#define OPEN_BAND (INT64_MAX / 4)

/* ---- masks ----------------------------------------------------------------------------------------------
 */

static void set_band(picture_model *picture, const attn_problem *problem)
{
    int64_t shift =
        problem->placed ? problem->first_q - problem->first_kv : problem->tokens_kv - problem->tokens_q;
    picture->lo = -OPEN_BAND;
    picture->hi = OPEN_BAND;
    if (problem->mask == ATTN_MASK_CAUSAL) {
        picture->hi = shift;
    } else if (problem->mask == ATTN_MASK_WINDOW) {
        picture->lo = problem->window_left >= 0 ? shift - problem->window_left : picture->lo;
        picture->hi = problem->window_right >= 0 ? shift + problem->window_right : picture->hi;
    }
}

bool picture_visible(const picture_model *picture, int64_t query, int64_t key)
{
    return key - query >= picture->lo && key - query <= picture->hi;
}

static int64_t clamp(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value > most ? most : value;
}

/* First hidden column of a row above the band, or the first visible one below it. */
static int64_t edge(const picture_model *picture, int side, int64_t row)
{
    return clamp(side > 0 ? row + picture->hi + 1 : row + picture->lo, picture->tokens_kv);
}

static int put(double (*points)[2], int at, int64_t col, int64_t row)
{
    points[at][0] = (double)col;
    points[at][1] = (double)row;
    return at + 1;
}

int picture_hidden(const picture_model *picture, int side, double (*points)[2])
{
    int64_t rows = picture->tokens_q, far = side > 0 ? picture->tokens_kv : 0;
    int at = 0;
    if (edge(picture, side, side > 0 ? 0 : rows - 1) == far) {
        return 0;
    }
    if (rows <= PICTURE_STAIRS) {
        for (int64_t row = 0; row < rows; row++) {
            at = put(points, at, edge(picture, side, row), row);
            at = put(points, at, edge(picture, side, row), row + 1);
        }
    } else {
        /* straight lines with bends where the edge meets the first and the last column */
        int64_t offset = side > 0 ? picture->hi + 1 : picture->lo;
        int64_t bends[] = {0, clamp(-offset, rows), clamp(picture->tokens_kv - offset, rows), rows};
        for (int i = 0; i < 4; i++) {
            at = put(points, at, edge(picture, side, bends[i]), bends[i]);
        }
    }
    at = put(points, at, far, rows);
    return put(points, at, far, 0);
}

/* ---- blocks ----------------------------------------------------------------------------------------------
 */

/* Cells of a pair, the half that `part` names. */
static picture_rect block(const attn_plan *plan, const attn_pair *pair, int64_t rank)
{
    picture_rect rect = {.rank = rank};
    attn_plan_group(plan, ATTN_Q, pair->q, &rect.row, &rect.rows);
    attn_plan_group(plan, ATTN_K, pair->kv, &rect.col, &rect.cols);
    int64_t half = rect.rows / 2;
    if (pair->part == 1) {
        rect.rows = half;
    } else if (pair->part == 2) {
        rect.row += half;
        rect.rows -= half;
    }
    return rect;
}

static void append(picture_model *picture, picture_rect rect)
{
    if (rect.rows == 0 || rect.cols == 0) {
        return;
    }
    if (picture->count == picture->room) {
        picture->room = picture->room > 0 ? 2 * picture->room : 256;
        picture_rect *rects = cli_alloc(picture->room, sizeof(*rects));
        if (picture->count > 0) {
            memcpy(rects, picture->rects, (size_t)picture->count * sizeof(*rects));
        }
        free(picture->rects);
        picture->rects = rects;
    }
    picture->rects[picture->count++] = rect;
}

static int by_rank_and_row(const void *left, const void *right)
{
    const picture_rect *a = left, *b = right;
    const int64_t keys[][2] = {{a->rank, b->rank}, {a->row, b->row}, {a->col, b->col}};
    for (int i = 0; i < 3; i++) {
        if (keys[i][0] != keys[i][1]) {
            return keys[i][0] < keys[i][1] ? -1 : 1;
        }
    }
    return 0;
}

static int by_rank_and_col(const void *left, const void *right)
{
    const picture_rect *a = left, *b = right;
    const int64_t keys[][2] = {{a->rank, b->rank}, {a->col, b->col}, {a->cols, b->cols}, {a->row, b->row}};
    for (int i = 0; i < 4; i++) {
        if (keys[i][0] != keys[i][1]) {
            return keys[i][0] < keys[i][1] ? -1 : 1;
        }
    }
    return 0;
}

/* Runs along the keys, then along the queries. */
static void merge(picture_model *picture)
{
    picture_rect *rects = picture->rects;
    int64_t kept = 0;
    if (picture->count == 0) {
        return;
    }
    qsort(rects, (size_t)picture->count, sizeof(*rects), by_rank_and_row);
    for (int64_t i = 1; i < picture->count; i++) {
        picture_rect *last = &rects[kept];
        if (rects[i].rank == last->rank && rects[i].row == last->row && rects[i].rows == last->rows &&
            rects[i].col == last->col + last->cols) {
            last->cols += rects[i].cols;
        } else {
            rects[++kept] = rects[i];
        }
    }
    picture->count = kept + 1;
    kept = 0;
    qsort(rects, (size_t)picture->count, sizeof(*rects), by_rank_and_col);
    for (int64_t i = 1; i < picture->count; i++) {
        picture_rect *last = &rects[kept];
        if (rects[i].rank == last->rank && rects[i].col == last->col && rects[i].cols == last->cols &&
            rects[i].row == last->row + last->rows) {
            last->rows += rects[i].rows;
        } else {
            rects[++kept] = rects[i];
        }
    }
    picture->count = kept + 1;
}

/* ---- squares ---------------------------------------------------------------------------------------------
 */

/* The cell in the middle of square i of n over `tokens`. */
static int64_t middle(int64_t i, int64_t n, int64_t tokens)
{
    return (int64_t)(((double)i + 0.5) * (double)tokens / (double)n);
}

/* The first square whose middle is not before `token`. */
static int64_t first_square(int64_t token, int64_t n, int64_t tokens)
{
    int64_t i = clamp((int64_t)((double)token * (double)n / (double)tokens) - 1, n);
    while (i < n && middle(i, n, tokens) < token) {
        i++;
    }
    return i;
}

static void paint(const picture_model *picture, picture_rect rect, int64_t rows, int64_t cols,
                  int32_t *owners)
{
    int64_t row_end = first_square(rect.row + rect.rows, rows, picture->tokens_q);
    int64_t col_end = first_square(rect.col + rect.cols, cols, picture->tokens_kv);
    int64_t col_begin = first_square(rect.col, cols, picture->tokens_kv);
    for (int64_t i = first_square(rect.row, rows, picture->tokens_q); i < row_end; i++) {
        for (int64_t j = col_begin; j < col_end; j++) {
            owners[i * cols + j] = (int32_t)rect.rank;
        }
    }
}

attn_status picture_owners(const picture_model *picture, int64_t rows, int64_t cols, int32_t **owners)
{
    int32_t *grid = cli_alloc(rows * cols, sizeof(*grid));
    for (int64_t i = 0; i < rows * cols; i++) {
        grid[i] = PICTURE_NOBODY;
    }
    for (int64_t i = 0; i < picture->summary.workers; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        attn_status status = attn_plan_rank(picture->plan, i, &rank);
        if (status != ATTN_OK) {
            free(grid);
            return status;
        }
        for (int64_t j = 0; j < rank.pair_count; j++) {
            paint(picture, block(picture->plan, &rank.pairs[j], i), rows, cols, grid);
        }
        attn_rank_free(&rank);
    }
    *owners = grid;
    return ATTN_OK;
}

/* ---- the whole --------------------------------------------------------------------------------------------
 */

static attn_status collect_blocks(picture_model *picture)
{
    for (int64_t i = 0; i < picture->summary.workers; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        attn_status status = attn_plan_rank(picture->plan, i, &rank);
        if (status != ATTN_OK) {
            return status;
        }
        picture->cells[i] = rank.cells;
        for (int64_t j = 0; j < rank.pair_count && picture->grid == 0; j++) {
            append(picture, block(picture->plan, &rank.pairs[j], i));
        }
        attn_rank_free(&rank);
    }
    return ATTN_OK;
}

static attn_status collect_squares(picture_model *picture)
{
    int32_t *owners = NULL;
    int64_t rows = picture->tokens_q < GRID ? picture->tokens_q : GRID;
    int64_t cols = picture->tokens_kv < GRID ? picture->tokens_kv : GRID;
    attn_status status = picture_owners(picture, rows, cols, &owners);
    if (status != ATTN_OK) {
        return status;
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t row = i / cols, col = i % cols;
        int64_t top = row * picture->tokens_q / rows, left = col * picture->tokens_kv / cols;
        if (owners[i] != PICTURE_NOBODY) {
            append(picture, (picture_rect){.row = top,
                                           .rows = (row + 1) * picture->tokens_q / rows - top,
                                           .col = left,
                                           .cols = (col + 1) * picture->tokens_kv / cols - left,
                                           .rank = owners[i]});
        }
    }
    free(owners);
    return ATTN_OK;
}

static int make(picture_model *picture, const attn_plan *plan)
{
    const attn_problem *problem = attn_plan_problem(plan);
    memset(picture, 0, sizeof(*picture));
    picture->plan = plan;
    picture->summary.size = sizeof(picture->summary);
    picture->tokens_q = problem->tokens_q;
    picture->tokens_kv = problem->tokens_kv;
    set_band(picture, problem);
    attn_status status = attn_plan_summary(plan, &picture->summary);
    if (status != ATTN_OK) {
        return cli_fail(status);
    }
    int64_t workers = picture->summary.workers;
    if (workers > MOST_WORKERS) {
        return cli_error(CLI_USAGE, "a picture shows up to %d workers, this plan has %lld", MOST_WORKERS,
                         (long long)workers);
    }
    picture->grid = workers * workers > MOST_BLOCKS ? GRID : 0;
    picture->cells = cli_alloc(workers, sizeof(*picture->cells));
    status = collect_blocks(picture);
    if (status == ATTN_OK && picture->grid != 0) {
        status = collect_squares(picture);
    }
    merge(picture);
    return cli_fail(status);
}

void picture_title(const picture_model *picture, char *text, size_t size)
{
    static const char *const masks[] = {"full mask", "causal mask", "sliding window"};
    const attn_summary *summary = &picture->summary;
    char set[160] = "";
    size_t at = 0;
    for (int64_t i = 0; i < summary->quorum_q && at < 60 && summary->quorum == ATTN_QUORUM_CYCLIC; i++) {
        at += (size_t)snprintf(set + at, sizeof(set) - at, "%s%lld", i > 0 ? "," : ", interest set {",
                               (long long)summary->set_q[i]);
    }
    if (at > 0) {
        snprintf(set + at, sizeof(set) - at, "%s", at < 60 ? "}" : ",..}");
    } else {
        snprintf(set, sizeof(set), ", %lld x %lld groups a worker", (long long)summary->quorum_q,
                 (long long)summary->quorum_kv);
    }
    snprintf(text, size, "%lld tokens, %lld workers%s, %s%s", (long long)picture->tokens_q,
             (long long)summary->workers, set, masks[attn_plan_problem(picture->plan)->mask],
             summary->classic ? ", classic rules" : "");
}

static bool ends_with(const char *text, const char *end)
{
    size_t size = strlen(text), end_size = strlen(end);
    return size > end_size && strcmp(text + size - end_size, end) == 0;
}

static int draw_file(const picture_model *picture, const char *path, bool png)
{
    picture_canvas canvas;
    char *temporary = NULL;
    FILE *file = cli_file_open(path, &temporary);
    if (file == NULL) {
        return CLI_IO;
    }
    int code = CLI_OK;
    if (png) {
        code = picture_canvas_png(&canvas, file);
    } else {
        picture_canvas_svg(&canvas, file);
    }
    if (code == CLI_OK) {
        code = picture_draw(picture, &canvas);
    }
    int closed = cli_file_close(file, path, temporary, code == CLI_OK);
    return code != CLI_OK ? code : closed;
}

int cli_picture(const attn_plan *plan, const char *path, FILE *file, const cli_common *common)
{
    picture_model picture;
    bool terminal = strcmp(path, "-") == 0, png = ends_with(path, ".png");
    if (!terminal && !png && !ends_with(path, ".svg")) {
        return cli_error(CLI_USAGE,
                         "--picture %s: the name must end in .svg or .png, or be - for the terminal", path);
    }
    if (terminal && common->format != CLI_FORMAT_TABLE) {
        return cli_error(CLI_USAGE,
                         "--picture - draws among the text: use --format table, or a file for the picture");
    }
    int code = make(&picture, plan);
    if (code == CLI_OK && terminal) {
        code = picture_terminal(&picture, file, common);
    } else if (code == CLI_OK) {
        code = draw_file(&picture, path, png);
    }
    if (code == CLI_OK && picture.grid != 0 && !terminal) {
        cli_warn("%lld x %lld blocks are too many to draw: %s shows %d x %d squares, each in the colour of "
                 "the worker "
                 "that owns its middle",
                 (long long)picture.summary.workers, (long long)picture.summary.workers, path, picture.grid,
                 picture.grid);
    }
    free(picture.rects);
    free(picture.cells);
    return code;
}
