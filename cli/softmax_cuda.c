/* SPDX-License-Identifier: Apache-2.0 */
/*
 * softmax_cuda.c - the kernels of softmax_cuda.cu, a cubin inside of the program, through the CUDA driver,
 * which is loaded when they are first wanted.
 */
#include "product_cuda.h"

#if ATTN_HAVE_CUBLASLT

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* The assembler reads the file, whose path the build gives; 64 bytes is what the driver asks of an ELF image.
 */
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        "cli_softmax_cubin:\n"
        ".incbin \"" ATTN_SOFTMAX_CUBIN "\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const unsigned char cli_softmax_cubin[] __attribute__((visibility("hidden")));

static struct {
    __typeof__(&cuModuleLoadData) load;
    __typeof__(&cuModuleGetFunction) find;
    __typeof__(&cuLaunchKernel) launch;
    CUmodule module;
} driver;

static attn_status failed(const char *what, int result)
{
    char text[120];
    snprintf(text, sizeof text, "%s: CUDA error %d", what, result);
    return attn_fail(ATTN_EIO, text);
}

static attn_status load(void)
{
    static const char *const names[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found[3] = {NULL};
    if (driver.module != NULL) {
        return ATTN_OK;
    }
    for (int i = 0; i < 3; i++) {
        found[i] = library != NULL ? dlsym(library, names[i]) : NULL;
        if (found[i] == NULL) {
            return attn_fail(ATTN_EUNSUPPORTED, "the CUDA driver cannot be loaded");
        }
    }
    memcpy(&driver, found, sizeof found);
    const CUresult result = driver.load(&driver.module, cli_softmax_cubin);
    return result == CUDA_SUCCESS ? ATTN_OK : failed("cuModuleLoadData", (int)result);
}

/* A warp a row, or for long rows a block of 256 threads. */
static attn_status launch(int gpu, const char *kernel, attn_dtype dtype, int64_t rows, int64_t keys,
                          void **arguments)
{
    const unsigned threads = keys <= 2048 ? 32 : 256, together = 256 / threads;
    const unsigned blocks = (unsigned)((rows + together - 1) / together);
    char name[40];
    CUfunction function;
    attn_status status = attn_cuda_use(gpu);
    status = status == ATTN_OK ? load() : status;
    if (status != ATTN_OK) {
        return status;
    }
    snprintf(name, sizeof name, "softmax_%s_%s", kernel, attn_dtype_name(dtype));
    CUresult result = driver.find(&function, driver.module, name);
    if (result == CUDA_SUCCESS) {
        result = driver.launch(function, blocks, 1, 1, threads, together, 1, 0, NULL, arguments, NULL);
    }
    return result == CUDA_SUCCESS ? ATTN_OK : failed(name, (int)result);
}

int64_t softmax_pitch(int64_t keys)
{
    return (keys + 7) / 8 * 8;
}

attn_status softmax_rows(int gpu, attn_dtype dtype, void *scores, float *lse, int64_t rows, int64_t keys,
                         bool causal)
{
    long long all = rows, count = keys;
    long long pitch = softmax_pitch(keys);
    int banded = causal;
    void *arguments[] = {&scores, &lse, &all, &count, &pitch, &banded};
    return launch(gpu, "rows", dtype, rows, keys, arguments);
}

attn_status softmax_slopes(int gpu, attn_dtype dtype, void *slopes, const void *weights, int64_t rows,
                           int64_t keys)
{
    long long all = rows, count = keys;
    long long pitch = softmax_pitch(keys);
    void *arguments[] = {&slopes, &weights, &all, &count, &pitch};
    return launch(gpu, "slopes", dtype, rows, keys, arguments);
}

#endif
