/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_params.h - what the launcher few.c tells the kernels of few.cuh and few_merge.cu; for C and CUDA.
 */
#ifndef ATTN_CUDA_FEW_PARAMS_H
#define ATTN_CUDA_FEW_PARAMS_H

#include <stdint.h>

enum {
    FEW_ROWS = 64,              /* of a tile: what one product of a warpgroup has */
    FEW_UNIT = 16,              /* keys: what a block's share is counted in */
    FEW_LEAST = 8,              /* units that are worth a block */
    FEW_THREADS = 192,          /* a warpgroup that computes, a warp that loads K and V, one that loads Q */
    FEW_MERGE_THREADS = 128,    /* of few_merge: it shares a multiprocessor with the blocks of few */
    FEW_MERGE_SHARED = 72 << 10 /* bytes, at most */
};

/* Floats of a row of a part of a tile: its sums, not yet divided, its running maximum, in powers of 2, its
 * sum of weights; the rest keeps rows at multiples of 32 bytes. */
#define FEW_PART_ROW(dim_v) ((dim_v) + 8)

/*
 * Of a block for heads of up to `dim` dims and up to 16 rows (narrow) or 64: keys of a stage of its ring; its
 * bytes, a tile of K or V or, narrow, 64 dims of one; stages; rows of Q; bytes in which warps or, wide,
 * blocks exchange sums; bytes of shared memory: Q, the ring, two barriers for each, and one for the exchange;
 * registers of a thread; blocks of a multiprocessor: sums of 256 dims leave room for one.
 */
#define FEW_KEYS(dim, narrow)   ((dim) == 64 || (narrow) ? 64 : 32)
#define FEW_STAGE(dim, narrow)  ((narrow) ? 64 * 64 * 2 : FEW_KEYS(dim, narrow) * (dim)*2)
#define FEW_STAGES(dim, narrow) ((narrow) ? ((dim) == 256 ? 6 : 3) : (dim) == 256 ? 5 : 4)
#define FEW_Q_ROWS(narrow)      ((narrow) ? 16 : FEW_ROWS)
#define FEW_GATHER(dim, narrow) (128 * ((dim) * ((narrow) ? 2 : 1) + 16))
#define FEW_REGISTERS(dim)      ((dim) == 256 ? 224 : 144)
#define FEW_SHARED(dim, narrow)                                                                              \
    (FEW_Q_ROWS(narrow) * (dim)*2 + 32 + FEW_STAGES(dim, narrow) * (FEW_STAGE(dim, narrow) + 16) +           \
     FEW_GATHER(dim, narrow))
#define FEW_BLOCKS(dim) ((dim) == 256 ? 1 : 2)

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
 * A tile is up to FEW_ROWS rows of one kv head: row r of a sequence is query r / group of query head r %
 * group of that kv head's group.  Tiles are counted by batch, kv head and rows, in this order.
 */
typedef struct few_params {
    few_map k, v;           /* boxes of the keys of a stage */
    few_map k_unit, v_unit; /* boxes of FEW_UNIT keys */
    few_tensor q, values, o, lse;
    const int64_t *cu_q, *cu_kv;
    int64_t left, right, shift; /* the band; left and right at most 2^40 */
    float *parts;               /* [block][2][rows][FEW_PART_ROW(dim_v)] */
    float scale;                /* times log2 e */
    int32_t batch, heads_kv, group;
    int32_t tokens_q, tokens_kv;
    int32_t dim_qk, dim_v;
    int32_t tiles;       /* of one kv head, at most */
    int32_t rows;        /* of a tile, at most */
    int32_t merge_rows;  /* few_merge: of a block */
    int32_t row_blocks;  /* few_merge: blocks that share the rows of a tile */
    int32_t merge_parts; /* few_merge: whose rows have room in shared memory at once */
    int32_t early;       /* few_merge: blocks that start while few is at work */
    int32_t dtype_out;   /* attn_dtype */
    int32_t shifted, merge;
    int32_t pairs;   /* blocks 2i and 2i + 1, a cluster, make one part of one tile */
    int32_t blocks;  /* of few, at most */
    int32_t by_tile; /* few_merge looks at each tile; else, where they are fewer, at each block's last */
} few_params;

#endif
