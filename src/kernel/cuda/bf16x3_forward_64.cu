/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_forward_64.cu - attention of fp32 inputs by six products of bf16, dims up to 64.
 */
#define NAME       bf16x3_forward_64
#define HEAD_DIM   64
#define BLOCK_K    64
#define STAGES     6
#define PRODUCT_S  wgmma_64_ss
#define PRODUCT_O  wgmma_64_rt
#include "kernel/cuda/bf16x3_forward.cuh"
