/* SPDX-License-Identifier: Apache-2.0 */
/* tensors.h - arrays in memory with any strides, as `bench attention` and `check` use them. */
#ifndef ATTN_CLI_TENSORS_H
#define ATTN_CLI_TENSORS_H

#include "attn/attn.h"

/* A tensor and what the interface leaves to the problem; strides may all be zero: contiguous. */
typedef struct cli_tensor {
    attn_tensor at;
    attn_dtype dtype;
    int64_t batch, heads, tokens, dim;
} cli_tensor;

/* Dense strides filled in; data, dtype and sizes of an operand of a checked problem. */
cli_tensor cli_tensor_of(const attn_problem *problem, attn_operand operand, attn_tensor tensor);
/* Of o or dout: heads and tokens of q, the last dimension of v. */
cli_tensor cli_tensor_out(const attn_problem *problem, attn_dtype dtype, attn_tensor tensor);

/* One row as fp32. */
void cli_tensor_row(const cli_tensor *tensor, int64_t batch, int64_t head, int64_t token, float *row);
/* And back, rounded. */
void cli_tensor_set(const cli_tensor *tensor, int64_t batch, int64_t head, int64_t token, const float *row);

/* An attn_source over q, k and v in memory: data is a cli_tensor[3]. */
attn_status cli_tensors_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                             void *dst, int64_t head_stride);

/* Longest row, largest element and root mean square of the elements, of what is finite. */
typedef struct cli_extent {
    double row, element, rms;
} cli_extent;
cli_extent cli_tensor_extent(const cli_tensor *tensor);

#endif
