/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tf32x3_forward_128.cu - attention of fp32 inputs by three products of tf32, dims up to 128.
 */
#define NAME     tf32x3_forward_128
#define HEAD_DIM 128
#define WARPS    4
#define BLOCKS   2
#define BLOCK_K  64
#include "kernel/cuda/tf32x3_forward.cuh"
