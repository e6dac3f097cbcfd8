/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.h - what launchers hand to kernels of several kinds, in words that both C11 and nvcc read.
 */
#ifndef ATTN_CUDA_PARAMS_H
#define ATTN_CUDA_PARAMS_H

#include <stdint.h>

/* An array in device memory.  Strides in elements, of batch, head and token; the dims of a row are dense.
 * data NULL: not there. */
typedef struct attn__cuda_tensor {
    void *data;
    int64_t batch, head, token;
} attn__cuda_tensor;

/* A CUtensorMap (map.h), of which device code knows the address alone. */
typedef struct attn__tile_map {
    uint64_t opaque[16];
} __attribute__((aligned(128))) attn__tile_map;

enum {
    ATTN__TILE_TOKENS = 1 << 28, /* most tokens, and farthest a shift: sums of four of them fit in 32 bits */
    ATTN__TILE_FAR = 1 << 30,    /* an unbounded side of the band */
    /*
     * Ragged batches.  A token coordinate counts up to RAGGED, so that the copy engine itself puts zeros
     * behind the end of a sequence: token i of a sequence of n that begins at token c is coordinates RAGGED -
     * n + i, c + n and RAGGED along three dimensions of strides s, s and 2^34 - s: RAGGED * 2^34 = 2^64 is
     * nothing.
     */
    ATTN__TILE_RAGGED = 1 << 30,
};

#endif
