/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward_queries_64.cu - dQ of fp32 inputs by six products of bf16, dims up to 64.
 */
#define NAME       bf16x3_backward_queries_64
#define KEYS       0
#define HEAD_DIM   64
#define PRODUCT_S  wgmma_64_ss
#include "kernel/cuda/bf16x3_backward.cuh"
