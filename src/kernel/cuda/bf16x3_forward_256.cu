/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_forward_256.cu - attention of fp32 inputs by six products of bf16, dims up to 256.
 */
#define NAME       bf16x3_forward_256
#define HEAD_DIM   256
#define BLOCK_K    32
#define STAGES     2
#define PRODUCT_S  wgmma_32_ss
#define PRODUCT_O  wgmma_128_rt
#include "kernel/cuda/bf16x3_forward.cuh"
