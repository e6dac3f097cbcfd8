/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - memory, streams and clocks of a GPU, for programs that use attn on one without CUDA's own headers
 * and libraries.  Whoever has these does without this header: pointers, streams and contexts are CUDA's
 * (a stream is a CUstream or cudaStream_t; memory and streams are of the GPU's primary context).
 *
 * `gpu` counts in CUDA's own order.  Every call but attn_cuda_use() makes that GPU's primary context current
 * for its duration only.  All functions may be called by any thread.  Where there is no CUDA driver, no such
 * GPU, none of the Hopper generation, or a library built without CUDA, each fails with ATTN_EUNSUPPORTED and
 * a text that says what is missing.
 */
#ifndef ATTN_CUDA_PUBLIC_H
#define ATTN_CUDA_PUBLIC_H

#include "attn/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_cuda_info {
    size_t size;      /* sizeof(attn_cuda_info), set by the caller */
    char name[128];   /* "NVIDIA H200" */
    char bus[32];     /* its address on the PCI bus, "0000:1b:00.0", as NVML and nvidia-smi know it */
    int major, minor; /* compute capability */
    int sms;          /* multiprocessors */
    int driver;       /* the CUDA version that the driver speaks: 13000 for 13.0 */
    size_t l2;        /* bytes */
    size_t memory, memory_free; /* bytes, now */
} attn_cuda_info;

/* What GPU `gpu` is. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_look(int gpu, attn_cuda_info *info);

/* Makes the GPU's primary context the calling thread's current one, for libraries that want that. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_use(int gpu);

/* `bytes` of the GPU's memory, aligned to 256 bytes, the caller's; free waits for work under way.
 * ATTN_ENOMEM. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_alloc(int gpu, void **memory, size_t bytes);
ATTN_API void attn_cuda_free(int gpu, void *memory);

/* The same of the host's memory, pinned, which copies to and from the GPU reach at full speed. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_alloc_host(int gpu, void **memory, size_t bytes);
ATTN_API void attn_cuda_free_host(int gpu, void *memory);

/* Enqueue a copy between any two of host and device, or a fill with one byte, on `stream`; a copy from or to
 * memory that is not pinned may wait for it. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_copy(int gpu, void *dst, const void *src, size_t bytes,
                                                    void *stream);
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_fill(int gpu, void *dst, unsigned char byte, size_t bytes,
                                                    void *stream);

/* A stream that does not wait for the default one; wait: until all that it was given is done. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_stream_create(int gpu, void **stream);
ATTN_API void attn_cuda_stream_destroy(int gpu, void *stream);
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_wait(int gpu, void *stream);

/* Marks on a stream.  wait: until the GPU has come there; elapsed waits for `end` and gives the seconds that
 * it took between the two. */
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_event_create(int gpu, void **event);
ATTN_API void attn_cuda_event_destroy(int gpu, void *event);
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_event_record(int gpu, void *event, void *stream);
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_event_wait(int gpu, void *event);
ATTN_API ATTN_MUST_CHECK attn_status attn_cuda_event_elapsed(int gpu, void *begin, void *end,
                                                             double *seconds);

#ifdef __cplusplus
}
#endif
#endif
