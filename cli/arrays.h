/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrays.h - q, k and v in files as the problem and the source of an execute.
 *
 * Each operand is a .npy file or a tensor of a .safetensors file ("FILE" or "FILE:NAME").  Nothing is loaded:
 * the source reads what a worker asks for, by position, through small fixed buffers.
 */
#ifndef ATTN_CLI_ARRAYS_H
#define ATTN_CLI_ARRAYS_H

#include "bytes.h"

/*
 * Order of the dimensions.  With fewer than four, batch and then heads are 1 and left out:
 *     bhnd   [n, d], [h, n, d], [b, h, n, d]
 *     bnhd   [n, d], [n, h, d], [b, n, h, d]
 */
typedef enum cli_layout { CLI_BHND = 0, CLI_BNHD = 1 } cli_layout;

/* The four sizes of an array and the distance of neighbours in elements; [dim] lies dense. */
typedef struct cli_view {
    int64_t batch, heads, tokens, dim;
    int64_t batch_step, head_step, token_step;
} cli_view;

/* false: the array's rank is not 2, 3 or 4 */
bool cli_view_of(const cli_array *array, cli_layout layout, cli_view *view);

typedef struct cli_input {
    cli_layout layout;
    char *path[3]; /* without ":NAME" */
    cli_reader reader[3];
    cli_array array[3];
    cli_view view[3];
} cli_input;

#define CLI_INPUT_CLOSED                                                                                     \
    {                                                                                                        \
        .reader = { CLI_READER_CLOSED, CLI_READER_CLOSED, CLI_READER_CLOSED }                                \
    }

/* Opens q, k, v and checks that they fit each other.  Files: ATTN_EIO; shapes: ATTN_EINVAL. */
attn_status cli_input_open(cli_input *input, const char *const spec[3], cli_layout layout);
void cli_input_close(cli_input *input);

/* Sizes and dtype (f64 files are read as f32); mask and scale stay as they are. */
void cli_input_problem(const cli_input *input, attn_problem *problem);

/* attn_source.read; data is a cli_input.  Any number of threads. */
attn_status cli_input_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                           void *dst, int64_t head_stride);

/* What one pass over all three arrays finds. */
typedef struct cli_scan {
    uint64_t hash;        /* of contents, dtypes and shapes; the files' names do not matter */
    int64_t nonfinite;    /* NaN and inf, as read */
    attn_operand operand; /* place of the first one */
    int64_t batch, head, token, dim;
} cli_scan;

/* step (or NULL) is told the bytes read; it returns nonzero to stop with ATTN_ECANCELED. */
attn_status cli_input_scan(const cli_input *input, cli_scan *scan, int (*step)(void *data, int64_t bytes),
                           void *data);

#endif
