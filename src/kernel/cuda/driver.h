/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h - what the launchers use of the CUDA driver, and helpers over it.  The only header that includes
 * <cuda.h>; for .c files of this folder, not for device code.
 */
#ifndef ATTN_CUDA_DRIVER_H
#define ATTN_CUDA_DRIVER_H

#include <cuda.h>

#include "kernel/cuda/cuda.h"

/* X(member, symbol of libcuda.so.1).  The symbol's type is the header's declaration of it. */
#define ATTN__CUDA_FUNCTIONS(X)                                                                              \
    X(init, cuInit)                                                                                          \
    X(error_string, cuGetErrorString)                                                                        \
    X(driver_version, cuDriverGetVersion)                                                                    \
    X(device_count, cuDeviceGetCount)                                                                        \
    X(device_get, cuDeviceGet)                                                                               \
    X(device_name, cuDeviceGetName)                                                                          \
    X(device_bus, cuDeviceGetPCIBusId)                                                                       \
    X(device_attribute, cuDeviceGetAttribute)                                                                \
    X(device_memory, cuDeviceTotalMem)                                                                       \
    X(context_retain, cuDevicePrimaryCtxRetain)                                                              \
    X(context_set, cuCtxSetCurrent)                                                                          \
    X(context_push, cuCtxPushCurrent)                                                                        \
    X(context_pop, cuCtxPopCurrent)                                                                          \
    X(module_load, cuModuleLoadData)                                                                         \
    X(module_function, cuModuleGetFunction)                                                                  \
    X(capture_mode, cuThreadExchangeStreamCaptureMode)                                                       \
    X(function_set, cuFuncSetAttribute)                                                                      \
    X(launch, cuLaunchKernelEx)                                                                              \
    X(memset_async, cuMemsetD8Async)                                                                         \
    X(memset_words_async, cuMemsetD32Async)                                                                  \
    X(tensor_map, cuTensorMapEncodeTiled)                                                                    \
    X(memory_alloc, cuMemAlloc)                                                                              \
    X(memory_free, cuMemFree)                                                                                \
    X(memory_info, cuMemGetInfo)                                                                             \
    X(host_alloc, cuMemAllocHost)                                                                            \
    X(host_free, cuMemFreeHost)                                                                              \
    X(copy_to_device, cuMemcpyHtoDAsync)                                                                     \
    X(copy_to_host, cuMemcpyDtoHAsync)                                                                       \
    X(copy, cuMemcpyAsync)                                                                                   \
    X(stream_create, cuStreamCreate)                                                                         \
    X(stream_destroy, cuStreamDestroy)                                                                       \
    X(stream_wait, cuStreamSynchronize)                                                                      \
    X(stream_wait_event, cuStreamWaitEvent)                                                                  \
    X(event_create, cuEventCreate)                                                                           \
    X(event_destroy, cuEventDestroy)                                                                         \
    X(event_record, cuEventRecord)                                                                           \
    X(event_wait, cuEventSynchronize)                                                                        \
    X(event_time, cuEventElapsedTime)

typedef struct attn__cuda_api {
#define ATTN__CUDA_MEMBER(member, symbol) __typeof__(&symbol) member;
    ATTN__CUDA_FUNCTIONS(ATTN__CUDA_MEMBER)
#undef ATTN__CUDA_MEMBER
} attn__cuda_api;

/* Valid once attn__cuda_open() has succeeded. */
extern attn__cuda_api attn__cuda;

/* Turns a driver error into a failure: "what: CUDA's words". */
attn_status attn__cuda_check(CUresult result, const char *what);
#define ATTN__CUDA_TRY(call) ATTN__TRY(attn__cuda_check((call), #call))

/* Makes the device's context current for this thread until leave; every launcher runs between the two. */
attn_status attn__cuda_enter(const attn__cuda_device *device);
void attn__cuda_leave(void);

/* The kernel `name` of the cubin `image` (its .cu file's name without suffix), loaded once a device, with
 * leave to use `shared` bytes of dynamic shared memory: as many in every call, since threads share it. */
attn_status attn__cuda_function(CUfunction *function, const attn__cuda_device *device, const char *image,
                                const char *name, unsigned shared);

/*
 * Enqueues one kernel.  arguments: pointers to its parameters.  overlap: programmatic dependent launch, for a
 * kernel that waits by griddepcontrol.wait before it touches what its predecessor writes.
 */
typedef struct attn__cuda_launch {
    CUfunction function;
    unsigned grid[3], block, shared;
    unsigned cluster; /* blocks of a cluster along x; 0: none */
    bool overlap;
    void *stream;
} attn__cuda_launch;
attn_status attn__cuda_enqueue(const attn__cuda_launch *launch, void **arguments);

/* The cubins (images.c): name, first byte and the byte past the end; ends with a NULL name. */
typedef struct attn__cuda_image {
    const char *name;
    const unsigned char *begin, *end;
} attn__cuda_image;
enum { ATTN__CUDA_IMAGES = 64 }; /* at most */
extern const attn__cuda_image attn__cuda_images[];

#endif
