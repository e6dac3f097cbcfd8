/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fma_launch.h - what the launchers of the fp32 kernels share.
 */
#ifndef ATTN_FMA_LAUNCH_H
#define ATTN_FMA_LAUNCH_H

#include "kernel/cuda/backward_parts.h"
#include "kernel/cuda/driver.h"
#include "kernel/cuda/fma_params.h"

/* A kernel, its tiles and its shared memory, which are those of the .cu file of that name; 256 bytes more
 * than the tiles where products read beyond the last of them. */
typedef struct attn__fma_kernel {
    int64_t dim;
    const char *name;
    int64_t queries, keys; /* of a tile */
    unsigned block, shared;
    unsigned cluster; /* blocks that have an item together; 0: one alone */
} attn__fma_kernel;

enum { ATTN__FMA_ROWS_BLOCK = 256 };

/* The first of `kernels` that is wide enough. */
const attn__fma_kernel *attn__fma_fitting(const attn__fma_kernel *kernels, const attn__cuda_call *call);

/* Elements of a row of fp32 in the workspace. */
static inline int64_t attn__fma_padded(int64_t dim)
{
    return attn__ceil_div(dim, 4) * 4;
}

attn__fma_problem attn__fma_problem_of(const attn__cuda_call *call, int64_t parts);
attn__fma_array attn__fma_array_of(const attn__cuda_tensor *tensor, attn_dtype dtype);
/* fp32 rows of `width` in the workspace, in the order batch, head, token; one batch where sequences lie one
 * after another. */
attn__fma_array attn__fma_dense(float *data, int64_t heads, int64_t tokens, const int64_t *ends,
                                int64_t total, int64_t width);

/* Of the kernel only how it is launched is read; image: the .cu file's name without suffix. */
attn_status attn__fma_launch(const attn__cuda_device *device, const char *image,
                             const attn__fma_kernel *kernel, int64_t grid, void *params, void *stream);
/* A kernel of fma_rows.cu, a warp a row. */
attn_status attn__fma_launch_rows(const attn__cuda_call *call, const attn__cuda_device *device,
                                  const char *name, int64_t rows, void *params, void *stream);

/* Into how many parts each group is cut where `kernel` makes dK and dV.  tiles: what they and their steps
 * are; the rest is filled in here. */
int64_t attn__fma_parts(const attn__cuda_call *call, const attn__cuda_device *device,
                        const attn__fma_kernel *kernel, attn__backward_tiles tiles);
/* dK or dV as the kernel writes it: rows of attn__fma_padded(dim) of all parts in `memory`, which is in the
 * workspace, or if that is NULL the tensor. */
attn__fma_array attn__fma_parts_array(const attn__cuda_call *call, int64_t parts, float *memory,
                                      const attn__cuda_tensor *tensor, int64_t dim);
/* The sum of what lies in `memory`, if that is not NULL, to the tensor. */
attn_status attn__fma_add_parts(const attn__cuda_call *call, const attn__cuda_device *device, int64_t parts,
                                float *memory, const attn__cuda_tensor *tensor, int64_t dim, void *stream);

/* The gradients of "bf16x3-sm90". */
size_t attn__bf16x3_backward_workspace(const attn__cuda_call *call, const attn__cuda_device *device);
attn_status attn__bf16x3_backward(const attn__cuda_call *call, const attn__cuda_device *device,
                                  void *workspace, void *stream);

#endif
