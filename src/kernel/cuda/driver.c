/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - the CUDA driver, loaded when it is first asked for, and the kernels in it.
 *
 * Of the driver's library only the symbols of driver.h are used, by the names that <cuda.h> gives them, so a
 * driver as new as the toolkit that built this library is enough.  All state is behind one lock.  A plan
 * opens the device; the first launch of a kernel loads it, also into a stream that is being captured.
 */
#include "kernel/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { DEVICES = 64 };

/* A device and the cubins that it has loaded, in the order of attn__cuda_images. */
typedef struct opened {
    attn__cuda_device device;
    bool open;
    CUmodule modules[ATTN__CUDA_IMAGES];
} opened;

attn__cuda_api attn__cuda;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static opened devices[DEVICES];
static bool loaded;

attn_status attn__cuda_check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS) {
        return ATTN_OK;
    }
    const char *words = NULL;
    if (attn__cuda.error_string(result, &words) != CUDA_SUCCESS || words == NULL) {
        words = "an error without a name";
    }
    attn_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? ATTN_ENOMEM : ATTN_EIO;
    return attn__fail(status, "%s: CUDA says: %s (%d)", what, words, (int)result);
}

/* ISO C has no cast from the object pointer that dlsym gives to a function; POSIX promises that they agree.
 */
static bool find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

static attn_status load_driver(void)
{
    if (loaded) {
        return ATTN_OK;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return attn__fail(ATTN_EUNSUPPORTED,
                          "no CUDA driver: libcuda.so.1 cannot be loaded (%s); install "
                          "NVIDIA's driver, or use the device cpu",
                          dlerror());
    }
#define TEXT_OF(symbol) #symbol
#define TEXT(symbol)    TEXT_OF(symbol)
#define FIND(member, symbol)                                                                                 \
    if (!find(library, TEXT(symbol), &attn__cuda.member)) {                                                  \
        return attn__fail(ATTN_EUNSUPPORTED,                                                                 \
                          "the CUDA driver has no %s: it is older than the toolkit that built this "         \
                          "library (CUDA %d.%d); install a newer driver",                                    \
                          TEXT(symbol), CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);                      \
    }
    ATTN__CUDA_FUNCTIONS(FIND)
#undef FIND
#undef TEXT
#undef TEXT_OF
    CUresult result = attn__cuda.init(0);
    if (result == CUDA_ERROR_NO_DEVICE) {
        return attn__fail(ATTN_EUNSUPPORTED, "the CUDA driver sees no GPU here; use the device cpu");
    }
    ATTN__TRY(attn__cuda_check(result, "cuInit"));
    loaded = true;
    return ATTN_OK;
}

static attn_status attribute(int *value, CUdevice_attribute which, CUdevice device)
{
    return attn__cuda_check(attn__cuda.device_attribute(value, which, device), "cuDeviceGetAttribute");
}

static attn_status open_device(opened *slot, int ordinal)
{
    attn__cuda_device *d = &slot->device;
    CUdevice device;
    int l2;
    ATTN__CUDA_TRY(attn__cuda.device_get(&device, ordinal));
    ATTN__TRY(attribute(&d->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    ATTN__TRY(attribute(&d->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    ATTN__TRY(attribute(&d->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    ATTN__TRY(attribute(&l2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device));
    ATTN__CUDA_TRY(attn__cuda.device_memory(&d->memory, device));
    ATTN__CUDA_TRY(attn__cuda.device_name(d->name, (int)sizeof d->name, device));
    if (d->major != 9 || d->minor != 0) {
        return attn__fail(ATTN_EUNSUPPORTED,
                          "GPU %d is a %s of compute capability %d.%d; the CUDA kernels are "
                          "for Hopper, 9.0 (H100, H200, GH200); use the device cpu",
                          ordinal, d->name, d->major, d->minor);
    }
    CUcontext context;
    ATTN__CUDA_TRY(attn__cuda.context_retain(&context, device));
    d->l2 = (size_t)l2;
    d->ordinal = ordinal;
    d->context = context;
    slot->open = true;
    return ATTN_OK;
}

static attn_status open_locked(const attn__cuda_device **device, int ordinal)
{
    ATTN__TRY(load_driver());
    int count = 0;
    ATTN__CUDA_TRY(attn__cuda.device_count(&count));
    if (ordinal < 0 || ordinal >= count || ordinal >= DEVICES) {
        return attn__fail(ATTN_EUNSUPPORTED, "there is no GPU %d: the CUDA driver sees %d, counted from 0",
                          ordinal, count);
    }
    if (!devices[ordinal].open) {
        ATTN__TRY(open_device(&devices[ordinal], ordinal));
    }
    *device = &devices[ordinal].device;
    return ATTN_OK;
}

attn_status attn__cuda_open(const attn__cuda_device **device, int ordinal)
{
    pthread_mutex_lock(&lock);
    attn_status status = open_locked(device, ordinal);
    pthread_mutex_unlock(&lock);
    return status == ATTN_EIO ? ATTN_EUNSUPPORTED : status; /* a GPU that does not start is not there */
}

attn_status attn__cuda_enter(const attn__cuda_device *device)
{
    return attn__cuda_check(attn__cuda.context_push((CUcontext)device->context), "cuCtxPushCurrent");
}

void attn__cuda_leave(void)
{
    CUcontext context;
    (void)attn__cuda.context_pop(&context); /* fails only if there is none, which enter has seen to */
}

/* Loading allocates memory, which a thread that captures a stream may not do by default: CUDA cannot tell
 * that it has nothing to do with what is captured.  Here it has not. */
static attn_status load_image(CUmodule *module, const attn__cuda_image *image)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    ATTN__CUDA_TRY(attn__cuda.capture_mode(&mode));
    attn_status status = attn__cuda_check(attn__cuda.module_load(module, image->begin), image->name);
    (void)attn__cuda.capture_mode(&mode); /* back to what it was; the driver has just taken the same call */
    return status;
}

static attn_status find_module(CUmodule *module, opened *slot, const char *image)
{
    int64_t index = 0;
    while (attn__cuda_images[index].name != NULL && strcmp(attn__cuda_images[index].name, image) != 0) {
        index++;
    }
    if (attn__cuda_images[index].name == NULL) {
        return attn__fail(ATTN_EUNSUPPORTED, "this library was built without the CUDA kernels of %s", image);
    }
    if (slot->modules[index] == NULL) {
        ATTN__TRY(load_image(&slot->modules[index], &attn__cuda_images[index]));
    }
    *module = slot->modules[index];
    return ATTN_OK;
}

attn_status attn__cuda_function(CUfunction *function, const attn__cuda_device *device, const char *image,
                                const char *name, unsigned shared)
{
    CUmodule module = NULL;
    pthread_mutex_lock(&lock);
    attn_status status = find_module(&module, &devices[device->ordinal], image);
    pthread_mutex_unlock(&lock);
    ATTN__TRY(status);
    ATTN__TRY(attn__cuda_check(attn__cuda.module_function(function, module, name), name));
    return attn__cuda_check(
        attn__cuda.function_set(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared),
        name);
}

attn_status attn__cuda_enqueue(const attn__cuda_launch *launch, void **arguments)
{
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (launch->cluster > 0) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim.x = launch->cluster;
        attributes[count].value.clusterDim.y = attributes[count].value.clusterDim.z = 1;
        count++;
    }
    if (launch->overlap) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    CUlaunchConfig config = {
        .gridDimX = launch->grid[0],
        .gridDimY = launch->grid[1],
        .gridDimZ = launch->grid[2],
        .blockDimX = launch->block,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = launch->shared,
        .hStream = (CUstream)launch->stream,
        .attrs = attributes,
        .numAttrs = count,
    };
    return attn__cuda_check(attn__cuda.launch(&config, launch->function, arguments, NULL),
                            "cuLaunchKernelEx");
}

attn_status attn__cuda_alloc(void **memory, const attn__cuda_device *device, size_t bytes)
{
    CUdeviceptr address = 0;
    ATTN__TRY(attn__cuda_enter(device));
    CUresult result = attn__cuda.memory_alloc(&address, bytes);
    attn__cuda_leave();
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
        return attn__cuda_check(result, "cuMemAlloc");
    }
    if (result != CUDA_SUCCESS) {
        return attn__fail(ATTN_ENOMEM, "the GPU has no %zu bytes left; free some, or give it less to do",
                          bytes);
    }
    *memory = (void *)(uintptr_t)address;
    return ATTN_OK;
}

void attn__cuda_free(void *memory, const attn__cuda_device *device)
{
    if (memory != NULL && attn__cuda_enter(device) == ATTN_OK) {
        (void)attn__cuda.memory_free((CUdeviceptr)(uintptr_t)memory); /* an earlier fault would show again */
        attn__cuda_leave();
    }
}

attn_status attn__cuda_wait(const attn__cuda_device *device, void *stream)
{
    ATTN__TRY(attn__cuda_enter(device));
    CUresult result = attn__cuda.stream_wait((CUstream)stream);
    attn__cuda_leave();
    return attn__cuda_check(result, "cuStreamSynchronize");
}

void attn__cuda_settle(const attn__cuda_device *device, void *stream)
{
    if (stream != NULL && attn__cuda.context_push((CUcontext)device->context) == CUDA_SUCCESS) {
        (void)attn__cuda.stream_wait((CUstream)stream);
        attn__cuda_leave();
    }
}

attn_status attn__cuda_after(const attn__cuda_device *device, void *stream, void *event)
{
    ATTN__TRY(attn__cuda_enter(device));
    CUresult result = attn__cuda.stream_wait_event((CUstream)stream, (CUevent)event, CU_EVENT_WAIT_DEFAULT);
    attn__cuda_leave();
    return attn__cuda_check(result, "cuStreamWaitEvent");
}

attn_status attn__cuda_identity(const attn__cuda_device *device, float *o, int64_t count, int64_t rows,
                                void *stream)
{
    const unsigned minus_infinity = 0xff800000u;
    const CUdeviceptr zeros = (CUdeviceptr)(uintptr_t)o, lse = (CUdeviceptr)(uintptr_t)(o + count);
    ATTN__TRY(attn__cuda_enter(device));
    CUresult result = attn__cuda.memset_words_async(zeros, 0, (size_t)count, (CUstream)stream);
    if (result == CUDA_SUCCESS) {
        result = attn__cuda.memset_words_async(lse, minus_infinity, (size_t)rows, (CUstream)stream);
    }
    attn__cuda_leave();
    return attn__cuda_check(result, "cuMemsetD32Async");
}
