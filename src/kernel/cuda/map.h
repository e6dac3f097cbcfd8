/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.h - tensor maps: how the copy engine reads a tile of tokens of one head out of an array.
 */
#ifndef ATTN_CUDA_MAP_H
#define ATTN_CUDA_MAP_H

#include "kernel/cuda/driver.h"

/*
 * A map of boxes of `rows` tokens by 64 dims, with 128-byte swizzle, zeros outside of the array; coordinates
 * are dim, token, head, batch and 0.  `ragged`: the batch's sequences lie one after another along the token
 * axis, and coordinates are those of ATTN__TILE_RAGGED (params.h).  An array without elements may have any
 * address: `anything` is one of device memory.
 */
attn_status attn__cuda_map(attn__tile_map *map, attn_dtype dtype, const attn__cuda_tensor *tensor,
                           int64_t dim, int64_t heads, int64_t tokens, int64_t batch, bool ragged, int rows,
                           void *anything);

/* Can the copy engine read it?  Elements of 2 bytes; it must begin at a multiple of 16 bytes, and so must
 * each of its batches, heads and tokens. */
bool attn__cuda_map_fits(const attn__cuda_tensor *tensor);
/* The same alignment alone, for elements of any size. */
bool attn__cuda_aligned(const attn__cuda_tensor *tensor, size_t size);

#endif
