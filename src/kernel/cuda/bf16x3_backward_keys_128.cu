/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3_backward_keys_128.cu - dK and dV of fp32 inputs by six products of bf16, dims up to 128.
 */
#define NAME       bf16x3_backward_keys_128
#define KEYS       1
#define HEAD_DIM   128
#define PRODUCT_S  wgmma_32_ss
#include "kernel/cuda/bf16x3_backward.cuh"
