/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_forward_params.h - what the launcher of the Hopper forward kernel hands to it, in words that both C11
 * and nvcc read.
 */
#ifndef ATTN_FLASH_FORWARD_PARAMS_H
#define ATTN_FLASH_FORWARD_PARAMS_H

#include "kernel/cuda/params.h"

enum {
    /* dims padded to 64, 128, 256 (of 64: rows of a tile): keys of a step */
    ATTN__FORWARD_KEYS_64_256 = 64,
    ATTN__FORWARD_KEYS_64_192 = 128,
    ATTN__FORWARD_KEYS_64_128 = 128,
    ATTN__FORWARD_KEYS_128 = 128,
    ATTN__FORWARD_KEYS_128_LONG = 176,
    ATTN__FORWARD_KEYS_256 = 80,
    /* bytes of shared memory, as the kernels lay it out (they check it) */
    ATTN__FORWARD_SHARED_64_256 = 2 * 32768 + 16 * 8192 + 1024,
    ATTN__FORWARD_SHARED_64_192 = 2 * 24576 + 8 * 16384 + 1024,
    ATTN__FORWARD_SHARED_64_128 = 2 * 16384 + 8 * 16384 + 1024,
    ATTN__FORWARD_SHARED_128 = 2 * 32768 + 4 * 32768 + 1024,
    ATTN__FORWARD_SHARED_128_LONG = 32768 + 4 * 45056 + 1024,
    ATTN__FORWARD_SHARED_256 = 65536 + 4 * 40960 + 1024,
};

typedef struct attn__forward_params {
    attn__tile_map q, k, v;
    attn__cuda_tensor o, lse;
    attn__cuda_tensor q_rows, k_rows, v_rows; /* what the maps show, for rows that are computed anew */
    const int64_t *cu_q, *cu_kv;
    int32_t *taken; /* zero: tiles that blocks have taken, beside the first of each; NULL: they are dealt out
                       evenly */
    float scale, scale_log2;       /* both not negative */
    int32_t batch, heads_q, group; /* group = heads_q / heads_kv */
    int32_t tokens_q, tokens_kv;   /* of a sequence, at most */
    int32_t dim_qk, dim_v;
    int32_t left, right, shift, shifted; /* see cuda.h; sides at most FAR */
    int32_t tiles_q;                     /* of a sequence, at most */
    int32_t together;                    /* heads whose tiles take turns, the last rows first; 0: no turns */
    int32_t last;                        /* from this head on all take turns with each other */
    int32_t tiles;                       /* of all heads and sequences */
    int32_t negate;                      /* the scale was negative: scores change their sign */
    int32_t out_f32, merge;
} attn__forward_params;

#endif
