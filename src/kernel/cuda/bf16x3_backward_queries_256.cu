/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward_queries_256.cu - dQ of fp32 inputs by six products of bf16, dims up to 256.
 */
#define NAME       bf16x3_backward_queries_256
#define KEYS       0
#define HEAD_DIM   256
#define PRODUCT_S  wgmma_32_ss
#include "kernel/cuda/bf16x3_backward_pair.cuh"
