/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.c - tensor maps for the copy engine.
 */
#include "kernel/cuda/map.h"

#include <string.h>

_Static_assert(sizeof(attn__tile_map) == sizeof(CUtensorMap), "a tensor map is opaque to the kernels");

bool attn__cuda_aligned(const attn__cuda_tensor *t, size_t size)
{
    const int64_t step = (int64_t)(16 / size);
    return ((uintptr_t)t->data & 15) == 0 && t->batch % step == 0 && t->head % step == 0 &&
           t->token % step == 0;
}

bool attn__cuda_map_fits(const attn__cuda_tensor *t)
{
    /* elements: strides stay below 2^40 bytes, and a ragged array's tokens below 2^34 (attn__cuda_map) */
    const int64_t most = INT64_C(1) << 38, token_most = INT64_C(1) << 32;
    return attn__cuda_aligned(t, 2) && t->batch >= 0 && t->head >= 0 && t->token >= 0 && t->batch < most &&
           t->head < most && t->token < token_most;
}

/* In bytes; a dimension of one element may have any stride, so it gets one that is fine. */
static cuuint64_t stride_of(int64_t count, int64_t stride)
{
    return count > 1 ? (cuuint64_t)stride * 2 : 512;
}

attn_status attn__cuda_map(attn__tile_map *map, attn_dtype dtype, const attn__cuda_tensor *tensor,
                           int64_t dim, int64_t heads, int64_t tokens, int64_t batch, bool ragged, int rows,
                           void *anything)
{
    const cuuint64_t token = stride_of(ragged ? 2 : tokens, tensor->token);
    cuuint64_t sizes[5] = {(cuuint64_t)dim, (cuuint64_t)attn__max(tokens, 1), (cuuint64_t)heads,
                           (cuuint64_t)batch, 1};
    cuuint64_t strides[4] = {token, stride_of(heads, tensor->head), stride_of(batch, tensor->batch), 16};
    if (ragged) {
        sizes[1] = ATTN__TILE_RAGGED;
        sizes[3] = sizes[4] = 0x7fff0000;
        strides[2] = token;
        strides[3] = (UINT64_C(1) << 34) - token;
    }
    const cuuint32_t box[5] = {64, (cuuint32_t)rows, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap made;
    ATTN__TRY(attn__cuda_check(
        attn__cuda.tensor_map(
            &made, dtype == ATTN_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
            tensor->data != NULL ? tensor->data : anything, sizes, strides, box, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled"));
    memcpy(map, &made, sizeof made);
    return ATTN_OK;
}
