/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrays.c - q, k and v out of files.
 *
 * A read is a walk over runs of the file that lie together: for bhnd one run a head, for bnhd one run for all
 * heads of all tokens asked for.  A run that arrives as it is wanted goes straight to its place; any other
 * one passes through a buffer of 32 KiB, from which the pieces are converted and scattered.
 */
#include "arrays.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "npy.h"
#include "safetensors.h"

enum { PIECE = 4096 }; /* elements that a buffer takes: at most 32 KiB of f64 */

static const char *const operand_names[3] = {"q", "k", "v"};

/* ---- opening ---- */

bool cli_view_of(const cli_array *array, cli_layout layout, cli_view *view)
{
    const int64_t *n = array->shape;
    int rank = array->rank;
    if (rank < 2 || rank > 4) {
        return false;
    }
    int heads_at = layout == CLI_BHND ? rank - 3 : rank - 2,
        tokens_at = layout == CLI_BHND ? rank - 2 : rank - 3;
    view->batch = rank == 4 ? n[0] : 1;
    view->heads = rank >= 3 ? n[heads_at] : 1;
    view->tokens = rank >= 3 ? n[tokens_at] : n[0];
    view->dim = n[rank - 1];
    view->head_step = layout == CLI_BHND ? view->tokens * view->dim : view->dim;
    view->token_step = layout == CLI_BHND ? view->dim : view->heads * view->dim;
    view->batch_step = view->heads * view->tokens * view->dim;
    return true;
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* Splits "FILE:NAME", unless a file has that very name; *name points into spec or is NULL. */
static attn_status split_spec(const char *spec, char **path, const char **name)
{
    struct stat about;
    const char *colon = strrchr(spec, ':');
    *path = strdup(spec);
    *name = NULL;
    if (*path == NULL) {
        return cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    if (colon != NULL && stat(spec, &about) != 0 && errno == ENOENT) {
        (*path)[colon - spec] = '\0';
        *name = colon + 1;
    }
    return ATTN_OK;
}

static attn_status open_operand(cli_input *input, int x, const char *spec)
{
    const char *name;
    attn_status status = split_spec(spec, &input->path[x], &name);
    if (status != ATTN_OK) {
        return status;
    }
    const char *path = input->path[x];
    bool npy = ends_with(path, ".npy");
    if (!npy && !ends_with(path, ".safetensors")) {
        return cli_refuse(ATTN_EIO, "%s: arrays are read from files called .npy or .safetensors", path);
    }
    if (npy && name != NULL) {
        return cli_refuse(ATTN_EIO, "%s: a .npy file holds one array without a name; leave out :%s", path,
                          name);
    }
    status = cli_reader_open(&input->reader[x], path);
    if (status != ATTN_OK) {
        return status;
    }
    return npy ? cli_npy_open(&input->reader[x], &input->array[x])
               : cli_safetensors_open(&input->reader[x], name, operand_names[x], &input->array[x]);
}

/* ---- do q, k and v fit each other? ---- */

static attn_status check_shape(cli_input *input, int x)
{
    char shape[CLI_SHAPE_TEXT];
    const cli_array *array = &input->array[x];
    const char *path = input->path[x];
    if (!cli_view_of(array, input->layout, &input->view[x])) {
        return cli_refuse(ATTN_EINVAL, "%s %s has shape %s; 2, 3 or 4 dimensions are read: %s",
                          operand_names[x], path, cli_array_shape(array, shape),
                          input->layout == CLI_BHND ? "[n, d], [h, n, d] or [b, h, n, d]"
                                                    : "[n, d], [n, h, d] or [b, n, h, d]");
    }
    if (input->view[x].tokens == 0) {
        return cli_refuse(ATTN_EINVAL, "%s %s has shape %s: it has no tokens", operand_names[x], path,
                          cli_array_shape(array, shape));
    }
    if (array->count == 0) {
        return cli_refuse(ATTN_EINVAL, "%s %s has shape %s: it is empty", operand_names[x], path,
                          cli_array_shape(array, shape));
    }
    return ATTN_OK;
}

static attn_status misfit(const cli_input *input, int x, int y, const char *what)
{
    char one[CLI_SHAPE_TEXT], other[CLI_SHAPE_TEXT];
    return cli_refuse(ATTN_EINVAL, "%s %s has shape %s and %s %s has shape %s: %s (layout %s)",
                      operand_names[x], input->path[x], cli_array_shape(&input->array[x], one),
                      operand_names[y], input->path[y], cli_array_shape(&input->array[y], other), what,
                      input->layout == CLI_BHND ? "bhnd" : "bnhd");
}

static cli_dtype read_dtype(const cli_input *input, int x)
{
    return input->array[x].dtype == CLI_F64 ? CLI_F32 : input->array[x].dtype;
}

static attn_status check_dtypes(const cli_input *input)
{
    for (int x = ATTN_K; x <= ATTN_V; x++) {
        if (read_dtype(input, x) != read_dtype(input, ATTN_Q)) {
            return cli_refuse(ATTN_EINVAL, "q %s is %s and %s %s is %s; convert one of them",
                              input->path[ATTN_Q], cli_dtype_name(input->array[ATTN_Q].dtype),
                              operand_names[x], input->path[x], cli_dtype_name(input->array[x].dtype));
        }
    }
    return ATTN_OK;
}

static attn_status check_fit(const cli_input *input)
{
    const cli_view *q = &input->view[ATTN_Q], *k = &input->view[ATTN_K], *v = &input->view[ATTN_V];
    for (int x = ATTN_K; x <= ATTN_V; x++) {
        if (input->array[x].rank != input->array[ATTN_Q].rank) {
            return misfit(input, ATTN_Q, x, "they must have the same number of dimensions");
        }
        if (input->view[x].batch != q->batch) {
            return misfit(input, ATTN_Q, x, "the batch sizes differ");
        }
    }
    if (k->heads != v->heads) {
        return misfit(input, ATTN_K, ATTN_V, "the numbers of heads differ");
    }
    if (k->tokens != v->tokens) {
        return misfit(input, ATTN_K, ATTN_V, "the numbers of tokens differ");
    }
    if (q->dim != k->dim) {
        return misfit(input, ATTN_Q, ATTN_K, "the head dimensions differ");
    }
    if (q->heads % k->heads != 0) {
        return misfit(input, ATTN_Q, ATTN_K, "the heads of k must divide the heads of q");
    }
    return check_dtypes(input);
}

attn_status cli_input_open(cli_input *input, const char *const spec[3], cli_layout layout)
{
    attn_status status = ATTN_OK;
    *input = (cli_input)CLI_INPUT_CLOSED;
    input->layout = layout;
    for (int x = ATTN_Q; x <= ATTN_V && status == ATTN_OK; x++) {
        status = open_operand(input, x, spec[x]);
    }
    for (int x = ATTN_Q; x <= ATTN_V && status == ATTN_OK; x++) {
        status = check_shape(input, x);
    }
    if (status == ATTN_OK) {
        status = check_fit(input);
    }
    if (status != ATTN_OK) {
        cli_input_close(input);
    }
    return status;
}

void cli_input_close(cli_input *input)
{
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        cli_reader_close(&input->reader[x]);
        free(input->path[x]);
        input->path[x] = NULL;
    }
}

void cli_input_problem(const cli_input *input, attn_problem *problem)
{
    problem->batch = input->view[ATTN_Q].batch;
    problem->heads_q = input->view[ATTN_Q].heads;
    problem->heads_kv = input->view[ATTN_K].heads;
    problem->tokens_q = input->view[ATTN_Q].tokens;
    problem->tokens_kv = input->view[ATTN_K].tokens;
    problem->dim_qk = input->view[ATTN_Q].dim;
    problem->dim_v = input->view[ATTN_V].dim;
    problem->dtype = (attn_dtype)read_dtype(input, ATTN_Q);
}

/* ---- the source ---- */

/* One element of the file as the execute wants it. */
static void convert(void *dst, const void *src, cli_dtype dtype, int64_t count)
{
    if (dtype == CLI_F64) {
        cli_to_f32(dst, src, dtype, count);
    } else {
        memcpy(dst, src, (size_t)count * cli_dtype_size(dtype));
    }
}

/* A dense run of elements from `element` of the file to dst. */
static attn_status read_run(const cli_input *input, int x, int64_t element, int64_t count, char *dst)
{
    const cli_array *array = &input->array[x];
    int64_t size = (int64_t)cli_dtype_size(array->dtype);
    if (array->dtype != CLI_F64) {
        return cli_reader_read(&input->reader[x], dst, (size_t)(count * size),
                               array->offset + element * size);
    }
    for (int64_t done = 0; done < count; done += PIECE) {
        double piece[PIECE];
        int64_t take = count - done < PIECE ? count - done : PIECE;
        attn_status status = cli_reader_read(&input->reader[x], piece, (size_t)(take * size),
                                             array->offset + (element + done) * size);
        if (status != ATTN_OK) {
            return status;
        }
        convert(dst + 4 * done, piece, CLI_F64, take);
    }
    return ATTN_OK;
}

/* Elements begin..begin+count of a bnhd run (token, head, dim) to their places. */
static void scatter(const cli_input *input, int x, const char *piece, int64_t begin, int64_t count, char *dst,
                    int64_t head_stride)
{
    const cli_view *view = &input->view[x];
    cli_dtype dtype = input->array[x].dtype;
    int64_t from = (int64_t)cli_dtype_size(dtype), to = (int64_t)cli_dtype_size(read_dtype(input, x));
    for (int64_t done = 0; done < count;) {
        int64_t at = begin + done, c = at % view->dim, head = at / view->dim % view->heads;
        int64_t token = at / view->token_step;
        int64_t take = view->dim - c < count - done ? view->dim - c : count - done;
        convert(dst + to * (head * head_stride + token * view->dim + c), piece + from * done, dtype, take);
        done += take;
    }
}

static attn_status read_bnhd(const cli_input *input, int x, int64_t element, int64_t count, char *dst,
                             int64_t head_stride)
{
    const cli_array *array = &input->array[x];
    int64_t size = (int64_t)cli_dtype_size(array->dtype);
    for (int64_t done = 0; done < count; done += PIECE) {
        char piece[PIECE * 8];
        int64_t take = count - done < PIECE ? count - done : PIECE;
        attn_status status = cli_reader_read(&input->reader[x], piece, (size_t)(take * size),
                                             array->offset + (element + done) * size);
        if (status != ATTN_OK) {
            return status;
        }
        scatter(input, x, piece, done, take, dst, head_stride);
    }
    return ATTN_OK;
}

attn_status cli_input_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                           void *dst, int64_t head_stride)
{
    int x = (int)operand;
    const cli_input *input = data;
    const cli_view *view = &input->view[x];
    int64_t size = (int64_t)cli_dtype_size(read_dtype(input, x));
    int64_t begin = batch * view->batch_step + first * view->token_step;
    if (input->layout == CLI_BNHD && view->heads > 1) {
        return read_bnhd(input, x, begin, count * view->token_step, dst, head_stride);
    }
    for (int64_t head = 0; head < view->heads; head++) {
        attn_status status = read_run(input, x, begin + head * view->head_step, count * view->dim,
                                      (char *)dst + head * head_stride * size);
        if (status != ATTN_OK) {
            return status;
        }
    }
    return ATTN_OK;
}

/* ---- the pass before the work ---- */

static void place(const cli_input *input, int x, int64_t element, cli_scan *scan)
{
    const cli_view *view = &input->view[x];
    scan->operand = (attn_operand)x;
    scan->batch = element / view->batch_step;
    scan->head = element / view->head_step % view->heads;
    scan->token = element / view->token_step % view->tokens;
    scan->dim = element % view->dim;
}

static void count_nonfinite(const cli_input *input, int x, int64_t begin, const float *piece, int64_t count,
                            cli_scan *scan)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, piece + i, sizeof bits);
        if ((bits & 0x7f800000u) == 0x7f800000u) {
            if (scan->nonfinite++ == 0) {
                place(input, x, begin + i, scan);
            }
        }
    }
}

static attn_status scan_operand(const cli_input *input, int x, cli_scan *scan,
                                int (*step)(void *data, int64_t bytes), void *data)
{
    const cli_array *array = &input->array[x];
    int64_t size = (int64_t)cli_dtype_size(array->dtype);
    int64_t identity[2 + CLI_RANK] = {array->dtype, array->rank};
    memcpy(identity + 2, array->shape, sizeof array->shape);
    scan->hash = cli_hash(scan->hash, identity, sizeof identity);
    for (int64_t done = 0; done < array->count; done += PIECE) {
        char piece[PIECE * 8];
        float values[PIECE];
        int64_t take = array->count - done < PIECE ? array->count - done : PIECE;
        attn_status status =
            cli_reader_read(&input->reader[x], piece, (size_t)(take * size), array->offset + done * size);
        if (status != ATTN_OK) {
            return status;
        }
        scan->hash = cli_hash(scan->hash, piece, (size_t)(take * size));
        cli_to_f32(values, piece, array->dtype, take);
        count_nonfinite(input, x, done, values, take, scan);
        if (step != NULL && step(data, take * size) != 0) {
            return cli_refuse(ATTN_ECANCELED, "stopped");
        }
    }
    return ATTN_OK;
}

attn_status cli_input_scan(const cli_input *input, cli_scan *scan, int (*step)(void *data, int64_t bytes),
                           void *data)
{
    attn_status status = ATTN_OK;
    *scan = (cli_scan){.hash = (uint64_t)input->layout};
    for (int x = ATTN_Q; x <= ATTN_V && status == ATTN_OK; x++) {
        status = scan_operand(input, x, scan, step, data);
    }
    return status;
}
