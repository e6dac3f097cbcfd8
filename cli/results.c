/* SPDX-License-Identifier: Apache-2.0 */
/*
 * results.c - rows of o and lse to their places in a file, and back.
 *
 * Rows come finished, once each, for one (batch, head): each write converts into a buffer of 16 KiB and goes
 * out by position, so that threads need no lock.
 */
#include "results.h"

#include <stdlib.h>
#include <string.h>

#include "npy.h"
#include "safetensors.h"

enum { PIECE = 4096 }; /* elements of a buffer */

static bool is_npy(const char *path)
{
    size_t length = strlen(path);
    return length >= 4 && strcmp(path + length - 4, ".npy") == 0;
}

static bool is_safetensors(const char *path)
{
    static const char end[] = ".safetensors";
    size_t length = strlen(path), tail = sizeof end - 1;
    return length >= tail && strcmp(path + length - tail, end) == 0;
}

attn_status cli_result_dtype(const char *path, cli_dtype wanted, cli_dtype *dtype)
{
    *dtype = wanted;
    if (path == NULL || is_safetensors(path)) {
        return ATTN_OK;
    }
    if (!is_npy(path)) {
        return cli_refuse(ATTN_EINVAL, "%s: arrays are written to files called .npy or .safetensors", path);
    }
    if (wanted == CLI_BF16) {
        *dtype = CLI_F32;
    }
    return ATTN_OK;
}

/* ---- shapes ---- */

/* [b, h, n, d] in the layout's order, without the leading ones that q does not have either. */
static void o_shape(cli_array *array, const attn_problem *p, cli_layout layout, int rank)
{
    int64_t full[4] = {p->batch, p->heads_q, p->tokens_q, p->dim_v};
    if (layout == CLI_BNHD && rank > 2) {
        full[1] = p->tokens_q;
        full[2] = p->heads_q;
    }
    array->rank = rank;
    memcpy(array->shape, full + (4 - rank), (size_t)rank * sizeof full[0]);
}

static void lse_shape(cli_array *array, const attn_problem *p, int rank)
{
    int64_t full[3] = {p->batch, p->heads_q, p->tokens_q};
    array->rank = rank - 1;
    memcpy(array->shape, full + (4 - rank), (size_t)(rank - 1) * sizeof full[0]);
}

/* ---- opening ---- */

static attn_status open_file(cli_writer *writer, cli_array *array, const char *path, const char *name)
{
    char header[CLI_NPY_HEADER > CLI_SAFETENSORS_HEADER ? CLI_NPY_HEADER : CLI_SAFETENSORS_HEADER];
    size_t length = 0;
    if (!cli_array_measure(array)) {
        return cli_refuse(ATTN_EINVAL, "%s would be too large", name);
    }
    if (path != NULL) {
        length = is_npy(path) ? cli_npy_header(array, header) : cli_safetensors_header(array, name, header);
    }
    array->offset = (int64_t)length;
    int64_t bytes = array->count * (int64_t)cli_dtype_size(array->dtype);
    if (bytes > INT64_MAX - array->offset) {
        return cli_refuse(ATTN_EINVAL, "%s would be too large", name);
    }
    attn_status status = path != NULL ? cli_writer_open(writer, path, array->offset + bytes)
                                      : cli_writer_scratch(writer, bytes);
    return status == ATTN_OK && length > 0 ? cli_writer_write(writer, header, length, 0) : status;
}

attn_status cli_result_open(cli_result *result, const attn_problem *problem, const cli_result_want *want)
{
    attn_status status = ATTN_OK;
    *result = (cli_result)CLI_RESULT_CLOSED;
    result->has_o = want->o_path != NULL || want->scratch;
    result->has_lse = want->lse_path != NULL || want->scratch;
    result->o_array.dtype = want->dtype;
    result->lse_array.dtype = CLI_F32;
    o_shape(&result->o_array, problem, want->layout, want->rank);
    lse_shape(&result->lse_array, problem, want->rank);
    (void)cli_view_of(&result->o_array, want->layout, &result->view);
    if (result->has_o) {
        status = open_file(&result->o, &result->o_array, want->o_path, "o");
    }
    if (status == ATTN_OK && result->has_lse) {
        status = open_file(&result->lse, &result->lse_array, want->lse_path, "lse");
    }
    if (status != ATTN_OK) {
        cli_result_close(result);
    }
    return status;
}

/* ---- rows ---- */

/* Byte position of row `row` of (batch, head). */
static int64_t o_place(const cli_result *r, int64_t batch, int64_t head, int64_t row)
{
    const cli_view *view = &r->view;
    int64_t element = batch * view->batch_step + head * view->head_step + row * view->token_step;
    return r->o_array.offset + element * (int64_t)cli_dtype_size(r->o_array.dtype);
}

static int64_t lse_place(const cli_result *r, int64_t batch, int64_t head, int64_t row)
{
    return r->lse_array.offset +
           ((batch * r->view.heads + head) * r->view.tokens + row) * (int64_t)sizeof(float);
}

/* Rows that lie together in the file and fit the buffer; always at least one: dim is at most 512. */
static int64_t rows_at_once(const cli_result *r)
{
    return r->view.token_step == r->view.dim ? PIECE / r->view.dim : 1;
}

attn_status cli_result_write(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                             const float *o, int64_t o_stride, const float *lse)
{
    const cli_result *r = data;
    int64_t size = (int64_t)cli_dtype_size(r->o_array.dtype), dim = r->view.dim, step = rows_at_once(r);
    for (int64_t row = 0; r->has_o && row < count; row += step) {
        char piece[PIECE * 8];
        int64_t take = count - row < step ? count - row : step;
        for (int64_t i = 0; i < take; i++) {
            cli_from_f32(piece + i * dim * size, r->o_array.dtype, o + (row + i) * o_stride, dim);
        }
        attn_status status =
            cli_writer_write(&r->o, piece, (size_t)(take * dim * size), o_place(r, batch, head, first + row));
        if (status != ATTN_OK) {
            return status;
        }
    }
    return r->has_lse
               ? cli_writer_write(&r->lse, lse, (size_t)count * sizeof *lse, lse_place(r, batch, head, first))
               : ATTN_OK;
}

attn_status cli_result_read(const cli_result *r, int64_t batch, int64_t head, int64_t first, int64_t count,
                            float *o, float *lse)
{
    cli_reader o_reader = {.fd = r->o.fd, .path = r->o.path};
    cli_reader lse_reader = {.fd = r->lse.fd, .path = r->lse.path};
    int64_t size = (int64_t)cli_dtype_size(r->o_array.dtype), dim = r->view.dim, step = rows_at_once(r);
    for (int64_t row = 0; row < count; row += step) {
        char piece[PIECE * 8];
        int64_t take = count - row < step ? count - row : step;
        attn_status status = cli_reader_read(&o_reader, piece, (size_t)(take * dim * size),
                                             o_place(r, batch, head, first + row));
        if (status != ATTN_OK) {
            return status;
        }
        cli_to_f32(o + row * dim, piece, r->o_array.dtype, take * dim);
    }
    return r->has_lse ? cli_reader_read(&lse_reader, lse, (size_t)count * sizeof *lse,
                                        lse_place(r, batch, head, first))
                      : ATTN_OK;
}

/* ---- the end ---- */

attn_status cli_result_commit(cli_result *result)
{
    attn_status status = result->has_lse ? cli_writer_commit(&result->lse) : ATTN_OK;
    if (status == ATTN_OK && result->has_o) {
        status = cli_writer_commit(&result->o);
    }
    return status;
}

void cli_result_close(cli_result *result)
{
    cli_writer_close(&result->o);
    cli_writer_close(&result->lse);
}

/* ---- inputs to keep ---- */

static attn_status copy_operand(const attn_source *source, const attn_problem *p, attn_operand operand,
                                const cli_array *array, const cli_writer *writer)
{
    int64_t heads = array->shape[1], tokens = array->shape[2], dim = array->shape[3];
    int64_t size = (int64_t)attn_dtype_size(p->dtype), step = (int64_t)1 << 16; /* elements of a buffer */
    int64_t rows = step / (heads * dim) > 0 ? step / (heads * dim) : 1;
    char *piece = malloc((size_t)(rows * heads * dim * size));
    attn_status status = piece != NULL ? ATTN_OK : cli_refuse(ATTN_ENOMEM, "out of memory");
    for (int64_t batch = 0; batch < p->batch && status == ATTN_OK; batch++) {
        for (int64_t row = 0; row < tokens && status == ATTN_OK; row += rows) {
            int64_t take = tokens - row < rows ? tokens - row : rows;
            status = source->read(source->data, operand, batch, row, take, piece, take * dim);
            for (int64_t head = 0; head < heads && status == ATTN_OK; head++) {
                int64_t element = ((batch * heads + head) * tokens + row) * dim;
                status = cli_writer_write(writer, piece + head * take * dim * size,
                                          (size_t)(take * dim * size), array->offset + element * size);
            }
        }
    }
    free(piece);
    return status;
}

/* path NULL: an unnamed file. */
static attn_status save_operand(const attn_source *source, const attn_problem *p, attn_operand operand,
                                const char *path, cli_writer *writer, cli_array *array)
{
    *array = (cli_array){.dtype = (cli_dtype)p->dtype,
                         .rank = 4,
                         .shape = {p->batch, operand == ATTN_Q ? p->heads_q : p->heads_kv,
                                   operand == ATTN_Q ? p->tokens_q : p->tokens_kv,
                                   operand == ATTN_V ? p->dim_v : p->dim_qk}};
    const char *name = operand == ATTN_Q ? "q" : operand == ATTN_K ? "k" : "v";
    attn_status status = open_file(writer, array, path, name);
    return status == ATTN_OK ? copy_operand(source, p, operand, array, writer) : status;
}

attn_status cli_operand_save(const attn_source *source, const attn_problem *p, attn_operand operand,
                             const char *path)
{
    cli_writer writer = CLI_WRITER_CLOSED;
    cli_array array;
    attn_status status = save_operand(source, p, operand, path, &writer, &array);
    if (status == ATTN_OK) {
        status = cli_writer_commit(&writer);
    }
    cli_writer_close(&writer);
    return status;
}

attn_status cli_operand_scratch(const attn_source *source, const attn_problem *p, attn_operand operand,
                                cli_writer *writer, cli_array *array)
{
    return save_operand(source, p, operand, NULL, writer, array);
}
