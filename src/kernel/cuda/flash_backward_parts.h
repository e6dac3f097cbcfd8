/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_parts.h - into how many parts a group of query heads is cut for the gradients on Hopper.
 */
#ifndef ATTN_FLASH_BACKWARD_PARTS_H
#define ATTN_FLASH_BACKWARD_PARTS_H

#include "kernel/cuda/cuda.h"

/*
 * A divisor of the group.  `clusters` take tiles of `tile_keys` keys of one part each, in steps of
 * `tile_queries` queries.  Reads nothing of the call that may change between the calls of one plan: the
 * workspace depends on it.
 */
int64_t attn__flash_backward_parts(const attn__cuda_call *call, int64_t tile_queries, int64_t tile_keys,
                                   int64_t clusters);

#endif
