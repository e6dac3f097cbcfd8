/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_absent.c - in place of the CUDA kernels, and of all of include/attn/cuda.h, where the library is built
 * without CUDA's compiler.
 */
#include <stddef.h>

#include "attn/cuda.h"
#include "kernel/cuda/cuda.h"

const attn__cuda_kernel *const attn__cuda_kernels[] = {NULL};

static attn_status absent(int gpu)
{
    return attn__fail(
        ATTN_EUNSUPPORTED,
        "GPU %d cannot be used: this library was built without CUDA; install NVIDIA's CUDA toolkit "
        "13 (nvcc) and build again, or use the device cpu",
        gpu);
}

/* What a device would be is never known here, so that nothing after its opening is ever reached. */
#define ABSENT(name, ...)                                                                                    \
    attn_status name(__VA_ARGS__)                                                                            \
    {                                                                                                        \
        return absent(gpu);                                                                                  \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"

attn_status attn__cuda_open(const attn__cuda_device **device, int ordinal)
{
    return absent(ordinal);
}

attn_status attn__cuda_alloc(void **memory, const attn__cuda_device *device, size_t bytes)
{
    return absent(0);
}

attn_status attn__cuda_wait(const attn__cuda_device *device, void *stream)
{
    return absent(0);
}

attn_status attn__cuda_after(const attn__cuda_device *device, void *stream, void *event)
{
    return absent(0);
}

attn_status attn__cuda_identity(const attn__cuda_device *device, float *o, int64_t count, int64_t rows,
                                void *stream)
{
    return absent(0);
}

void attn__cuda_settle(const attn__cuda_device *device, void *stream) {}

void attn__cuda_free(void *memory, const attn__cuda_device *device) {}

ABSENT(attn_cuda_look, int gpu, attn_cuda_info *info)
ABSENT(attn_cuda_use, int gpu)
ABSENT(attn_cuda_alloc, int gpu, void **memory, size_t bytes)
ABSENT(attn_cuda_alloc_host, int gpu, void **memory, size_t bytes)
ABSENT(attn_cuda_copy, int gpu, void *dst, const void *src, size_t bytes, void *stream)
ABSENT(attn_cuda_fill, int gpu, void *dst, unsigned char byte, size_t bytes, void *stream)
ABSENT(attn_cuda_stream_create, int gpu, void **stream)
ABSENT(attn_cuda_wait, int gpu, void *stream)
ABSENT(attn_cuda_event_create, int gpu, void **event)
ABSENT(attn_cuda_event_record, int gpu, void *event, void *stream)
ABSENT(attn_cuda_event_wait, int gpu, void *event)
ABSENT(attn_cuda_event_elapsed, int gpu, void *begin, void *end, double *seconds)

void attn_cuda_free(int gpu, void *memory) {}

void attn_cuda_free_host(int gpu, void *memory) {}

void attn_cuda_stream_destroy(int gpu, void *stream) {}

void attn_cuda_event_destroy(int gpu, void *event) {}
