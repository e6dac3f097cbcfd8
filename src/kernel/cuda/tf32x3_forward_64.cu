/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tf32x3_forward_64.cu - attention of fp32 inputs by three products of tf32, dims up to 64.
 */
#define NAME     tf32x3_forward_64
#define HEAD_DIM 64
#define WARPS    4
#define BLOCKS   3
#define BLOCK_K  64
#include "kernel/cuda/tf32x3_forward.cuh"
