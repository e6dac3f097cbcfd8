/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_params.h - what the launcher few.c tells the kernels of few.cuh, few_merge.cu and few_merge_direct.cu;
 * for C and CUDA.
 */
#ifndef ATTN_CUDA_FEW_PARAMS_H
#define ATTN_CUDA_FEW_PARAMS_H

#include <stdint.h>

enum {
    FEW_UNIT = 16,              /* keys: what a block's share is counted in */
    FEW_LEAST = 8,              /* units that are worth a block */
    FEW_KEPT_SHARE = 128,       /* bytes: room for the few_share of a warp that keeps it in shared memory */
    FEW_MERGE_THREADS = 128,    /* of few_merge: it shares a multiprocessor with the blocks of few */
    FEW_MERGE_REGISTERS = 64,   /* of a thread of few_merge */
    FEW_DIRECT = 8,             /* parts of a tile that a thread of few_merge_direct reads at once */
    FEW_DIRECT_REGISTERS = 80,  /* of a thread of few_merge_direct */
    FEW_MERGE_SUMS = 4,         /* floats: a row's maximum and sum of weights, and what fills 16 bytes */
    FEW_MERGE_SHARED = 72 << 10 /* bytes, at most */
};

/* Floats of a row of a part of a tile: its sums, not yet divided, its running maximum, in powers of 2, its
 * sum of weights; the rest keeps rows at multiples of 32 bytes. */
#define FEW_PART_ROW(dim_v) ((dim_v) + 8)

/*
 * A block of few.cuh for heads of up to `dim` dims, 64, 128 or 256, and tiles of `height` rows, 16, 64 or
 * 128; split: 64 rows by two warpgroups (few_split.cuh).
 */
/* threads that compute, one warpgroup or two; all, with a warp that loads K and V and one or two that load Q
 */
#define FEW_COMPUTING(height, split) ((height) == 128 || (split) ? 256 : 128)
#define FEW_THREADS(height, split)   ((height) == 128 ? 384 : (split) ? 320 : 192)
/* the ring: keys of a stage; bytes, of a tile of K or V or, of 16 rows and split, 64 or 128 dims of one;
 * stages */
#define FEW_KEYS(dim, height, split)                                                                         \
    ((height) == 128                                              ? ((dim) == 256 ? 64 : 128)                \
     : (dim) == 64 || (height) == 16 || ((split) && (dim) == 128) ? 64                                       \
                                                                  : 32)
#define FEW_STAGE(dim, height, split)                                                                        \
    ((height) == 16 || (split) ? 64 * 64 * 2 : FEW_KEYS(dim, height, split) * (dim)*2)
#define FEW_STAGES(dim, height, split)                                                                       \
    ((split)           ? ((dim) == 256 ? 12 : 8)                                                             \
     : (height) == 16  ? ((dim) == 256 ? 6 : 3)                                                              \
     : (height) == 128 ? ((dim) == 64 ? 6 : 4)                                                               \
     : (dim) == 256    ? 5                                                                                   \
                       : 4)
/* of these, split, for K; a multiple of 4, as the rest */
#define FEW_KEY_RING(dim) ((dim) == 256 ? 8 : 4)
/* bytes in which warps (16 rows) or blocks exchange sums, 0 where there is no room; in which warps keep their
 * shares; in which two warpgroups exchange weights, twice 64 x 64 each, and a number of each row */
#define FEW_GATHER(dim, height, split)                                                                       \
    ((height) == 128 && (dim) == 256                                                                         \
         ? 0                                                                                                 \
         : FEW_COMPUTING(height, split) * ((dim) * ((height) == 16 ? 2 : 1) / ((split) ? 2 : 1) + 16))
#define FEW_KEPT(height)        ((height) == 128 ? 8 * FEW_KEPT_SHARE : 0)
#define FEW_WEIGHTS(dim, split) ((split) ? 4 * 64 * FEW_KEYS(dim, 64, split) * 2 : 0)
#define FEW_TOPS(split)         ((split) ? 2 * 64 * 4 : 0)
/* bytes of shared memory: Q, the ring, two barriers for each, one for the exchange, and those above */
#define FEW_SHARED(dim, height, split)                                                                       \
    ((height) * (dim)*2 + 32 + FEW_STAGES(dim, height, split) * (FEW_STAGE(dim, height, split) + 16) +       \
     FEW_GATHER(dim, height, split) + FEW_KEPT(height) + FEW_WEIGHTS(dim, split) + FEW_TOPS(split))
/* registers of a thread at the start; blocks of a multiprocessor: sums of 256 dims or 128 rows leave room for
 * one, and two warpgroups want no other */
#define FEW_REGISTERS(dim, height, split)                                                                    \
    ((split) ? 128 : (dim) == 64 ? 144 : (height) == 128 ? 168 : (dim) == 256 ? 224 : 144)
#define FEW_BLOCKS(dim, height, split) ((dim) == 256 || (height) == 128 || (split) ? 1 : 2)

/* A CUtensorMap. */
typedef struct few_map {
    uint64_t opaque[16];
} __attribute__((aligned(128))) few_map;

/* As attn__cuda_tensor; strides in elements. */
typedef struct few_tensor {
    void *data;
    int64_t batch, head, token;
} few_tensor;

/*
 * A tile is up to `height` rows of one kv head: row r of a sequence is query r / group of query head r %
 * group of that kv head's group.  Tiles are counted by batch, kv head and rows, in this order.
 */
typedef struct few_params {
    few_map k, v;           /* boxes of the keys of a stage */
    few_map k_unit, v_unit; /* boxes of FEW_UNIT keys */
    few_tensor q, values, o, lse;
    const int64_t *cu_q, *cu_kv;
    int64_t left, right, shift; /* the band; left and right at most 2^40 */
    float *parts;               /* [block][2][rows][FEW_PART_ROW(dim_v)] */
    float scale; /* times log2 e; not negative, and not 0, by which a masked score, -inf, would become NaN */
    int32_t batch, heads_kv, group;
    int32_t tokens_q, tokens_kv;
    int32_t dim_qk, dim_v;
    int32_t height;      /* of a tile: rows that there is room for */
    int32_t tiles;       /* of one kv head, at most */
    int32_t rows;        /* of a tile, at most */
    int32_t merge_rows;  /* merging: of a block */
    int32_t row_blocks;  /* merging: blocks that share the rows of a tile */
    int32_t merge_parts; /* few_merge: whose rows have room in shared memory at once */
    int32_t members;     /* few_merge_direct: lanes that share the parts of the same columns, 1 or 2 */
    int32_t early;       /* merging: blocks that start while few is at work */
    int32_t dtype_out;   /* attn_dtype */
    int32_t shifted, merge;
    int32_t negate;  /* the scale was negative: scores change their sign */
    int32_t pairs;   /* blocks 2i and 2i + 1, a cluster, make one part of one tile */
    int32_t blocks;  /* of few, at most */
    int32_t each;    /* of few, for each tile, if they are cut alike; else 0 */
    int32_t by_tile; /* few_merge looks at each tile; else, where they are fewer, at each block's last */
} few_params;

#endif
