/* SPDX-License-Identifier: Apache-2.0 */
/*
 * public.c - include/attn/cuda.h over the driver: each call opens the GPU, which costs a lock, and makes its
 * context current.
 */
#include "attn/cuda.h"

#include <string.h>

#include "kernel/cuda/driver.h"

#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

/* Between enter and leave `call` is one call of the driver. */
#define ON_GPU(gpu, call, what)                                                                              \
    do {                                                                                                     \
        const attn__cuda_device *device_;                                                                    \
        ATTN__TRY(attn__cuda_open(&device_, gpu));                                                           \
        ATTN__TRY(attn__cuda_enter(device_));                                                                \
        CUresult result_ = (call);                                                                           \
        attn__cuda_leave();                                                                                  \
        return attn__cuda_check(result_, what);                                                              \
    } while (0)

static attn_status look(const attn__cuda_device *device, attn_cuda_info *info)
{
    CUdevice handle;
    ATTN__CUDA_TRY(attn__cuda.device_get(&handle, device->ordinal));
    ATTN__CUDA_TRY(attn__cuda.device_bus(info->bus, (int)sizeof info->bus, handle));
    ATTN__CUDA_TRY(attn__cuda.driver_version(&info->driver));
    ATTN__CUDA_TRY(attn__cuda.memory_info(&info->memory_free, &info->memory));
    return ATTN_OK;
}

attn_status attn_cuda_look(int gpu, attn_cuda_info *info)
{
    const attn__cuda_device *device;
    if (info == NULL || info->size != sizeof *info) {
        return attn__fail(ATTN_EINVAL, "attn_cuda_info: set its size field to sizeof(attn_cuda_info)");
    }
    ATTN__TRY(attn__cuda_open(&device, gpu));
    attn_cuda_info seen = {.size = sizeof seen,
                           .major = device->major,
                           .minor = device->minor,
                           .sms = device->sms,
                           .l2 = device->l2};
    memcpy(seen.name, device->name, sizeof seen.name);
    ATTN__TRY(attn__cuda_enter(device));
    attn_status status = look(device, &seen);
    attn__cuda_leave();
    ATTN__TRY(status);
    *info = seen;
    return ATTN_OK;
}

attn_status attn_cuda_use(int gpu)
{
    const attn__cuda_device *device;
    ATTN__TRY(attn__cuda_open(&device, gpu));
    return attn__cuda_check(attn__cuda.context_set((CUcontext)device->context), "cuCtxSetCurrent");
}

attn_status attn_cuda_alloc(int gpu, void **memory, size_t bytes)
{
    const attn__cuda_device *device;
    ATTN__TRY(attn__cuda_open(&device, gpu));
    return attn__cuda_alloc(memory, device, bytes);
}

void attn_cuda_free(int gpu, void *memory)
{
    const attn__cuda_device *device;
    if (attn__cuda_open(&device, gpu) == ATTN_OK) {
        attn__cuda_free(memory, device);
    }
}

attn_status attn_cuda_alloc_host(int gpu, void **memory, size_t bytes)
{
    const attn__cuda_device *device;
    ATTN__TRY(attn__cuda_open(&device, gpu));
    ATTN__TRY(attn__cuda_enter(device));
    const CUresult result = attn__cuda.host_alloc(memory, bytes);
    attn__cuda_leave();
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        return attn__fail(
            ATTN_ENOMEM,
            "the host has no %zu bytes left that can be pinned for copies to the GPU; free some, "
            "or cut the work into more workers",
            bytes);
    }
    return attn__cuda_check(result, "cuMemAllocHost");
}

static attn_status free_host(int gpu, void *memory)
{
    ON_GPU(gpu, attn__cuda.host_free(memory), "cuMemFreeHost");
}

void attn_cuda_free_host(int gpu, void *memory)
{
    if (memory != NULL) {
        (void)free_host(gpu, memory);
    }
}

attn_status attn_cuda_copy(int gpu, void *dst, const void *src, size_t bytes, void *stream)
{
    ON_GPU(gpu, attn__cuda.copy(ADDRESS(dst), ADDRESS(src), bytes, (CUstream)stream), "cuMemcpyAsync");
}

attn_status attn_cuda_fill(int gpu, void *dst, unsigned char byte, size_t bytes, void *stream)
{
    ON_GPU(gpu, attn__cuda.memset_async(ADDRESS(dst), byte, bytes, (CUstream)stream), "cuMemsetD8Async");
}

attn_status attn_cuda_stream_create(int gpu, void **stream)
{
    ON_GPU(gpu, attn__cuda.stream_create((CUstream *)stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static attn_status destroy_stream(int gpu, void *stream)
{
    ON_GPU(gpu, attn__cuda.stream_destroy((CUstream)stream), "cuStreamDestroy");
}

void attn_cuda_stream_destroy(int gpu, void *stream)
{
    if (stream != NULL) {
        (void)destroy_stream(gpu, stream);
    }
}

attn_status attn_cuda_wait(int gpu, void *stream)
{
    const attn__cuda_device *device;
    ATTN__TRY(attn__cuda_open(&device, gpu));
    return attn__cuda_wait(device, stream);
}

attn_status attn_cuda_event_create(int gpu, void **event)
{
    ON_GPU(gpu, attn__cuda.event_create((CUevent *)event, CU_EVENT_DEFAULT), "cuEventCreate");
}

static attn_status destroy_event(int gpu, void *event)
{
    ON_GPU(gpu, attn__cuda.event_destroy((CUevent)event), "cuEventDestroy");
}

void attn_cuda_event_destroy(int gpu, void *event)
{
    if (event != NULL) {
        (void)destroy_event(gpu, event);
    }
}

attn_status attn_cuda_event_record(int gpu, void *event, void *stream)
{
    ON_GPU(gpu, attn__cuda.event_record((CUevent)event, (CUstream)stream), "cuEventRecord");
}

static attn_status elapsed(int gpu, void *begin, void *end, float *milliseconds)
{
    ON_GPU(gpu, attn__cuda.event_time(milliseconds, (CUevent)begin, (CUevent)end), "cuEventElapsedTime");
}

attn_status attn_cuda_event_wait(int gpu, void *event)
{
    ON_GPU(gpu, attn__cuda.event_wait((CUevent)event), "cuEventSynchronize");
}

attn_status attn_cuda_event_elapsed(int gpu, void *begin, void *end, double *seconds)
{
    float milliseconds = 0;
    ATTN__TRY(attn_cuda_event_wait(gpu, end));
    ATTN__TRY(elapsed(gpu, begin, end, &milliseconds));
    *seconds = (double)milliseconds / 1000;
    return ATTN_OK;
}
