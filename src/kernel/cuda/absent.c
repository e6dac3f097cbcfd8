/* SPDX-License-Identifier: Apache-2.0 */
/*
 * absent.c - in place of the CUDA kernels where the library is built without CUDA's compiler.
 */
#include <stddef.h>

#include "kernel/cuda/cuda.h"

const attn__cuda_kernel *const attn__cuda_kernels[] = {NULL};

attn_status attn__cuda_open(const attn__cuda_device **device, int ordinal)
{
    (void)device;
    return attn__fail(
        ATTN_EUNSUPPORTED,
        "GPU %d cannot be used: this library was built without CUDA; install NVIDIA's CUDA toolkit 13 "
        "(nvcc) and build again, or use the device cpu",
        ordinal);
}
