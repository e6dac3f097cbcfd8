/* SPDX-License-Identifier: Apache-2.0 */
/*
 * results.h - o and lse into files: the sink of an execute.
 *
 * o takes the shape of q with v's last dimension, in q's layout; lse is [n], [h, n] or [b, h, n] in either
 * layout, fp32.  The files appear under their names, complete and synced, at cli_result_commit(); until then,
 * and after any failure, older files of those names stay as they are.
 */
#ifndef ATTN_CLI_RESULTS_H
#define ATTN_CLI_RESULTS_H

#include "arrays.h"

typedef struct cli_result {
    cli_writer o, lse;
    cli_array o_array, lse_array;
    cli_view view; /* of o */
    bool has_o, has_lse;
} cli_result;

#define CLI_RESULT_CLOSED                                                                                    \
    {                                                                                                        \
        .o = CLI_WRITER_CLOSED, .lse = CLI_WRITER_CLOSED                                                     \
    }

/* What is wanted; a path of NULL: not wanted, or with `scratch` kept in an unnamed file for reading back. */
typedef struct cli_result_want {
    const char *o_path, *lse_path;
    cli_dtype dtype; /* of o */
    cli_layout layout;
    int rank; /* of q: 2, 3 or 4 */
    bool scratch;
} cli_result_want;

/* Whether the path can hold dtype: .npy has no bf16.  ATTN_EINVAL for a name that is neither .npy nor
 * .safetensors. */
attn_status cli_result_dtype(const char *path, cli_dtype wanted, cli_dtype *dtype);

/* Creates the files, reserves their room and writes their headers. */
attn_status cli_result_open(cli_result *result, const attn_problem *problem, const cli_result_want *want);

/* attn_sink.write; data is a cli_result.  Any number of threads, different rows. */
attn_status cli_result_write(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                             const float *o, int64_t o_stride, const float *lse);

/* Reads rows back, as fp32: o[count][dim_v] and, if there is lse, lse[count]. */
attn_status cli_result_read(const cli_result *result, int64_t batch, int64_t head, int64_t first,
                            int64_t count, float *o, float *lse);

attn_status cli_result_commit(cli_result *result);
/* Removes what was not committed. */
void cli_result_close(cli_result *result);

/* Writes one operand of a source to a .npy or .safetensors file in [b, h, n, d] order. */
attn_status cli_operand_save(const attn_source *source, const attn_problem *problem, attn_operand operand,
                             const char *path);

/* Likewise to an unnamed file, which *writer keeps open; *array says what is in it. */
attn_status cli_operand_scratch(const attn_source *source, const attn_problem *problem, attn_operand operand,
                                cli_writer *writer, cli_array *array);

#endif
