/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_cuda.c - batched products by cuBLASLt, and the peak that a large one reaches.
 *
 * The library is loaded, not linked: only the contestant naive and the peak need it, and its half a gigabyte
 * is no part of any other command.  It thinks in columns; C = A B by rows is C^T = B^T A^T by columns, so
 * that the operands change places.
 */
#include "product_cuda.h"

#if ATTN_HAVE_CUBLASLT

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "random.h"

#define CUBLASLT_FUNCTIONS(X)                                                                                \
    X(create, cublasLtCreate)                                                                                \
    X(version, cublasLtGetVersion)                                                                           \
    X(desc_create, cublasLtMatmulDescCreate)                                                                 \
    X(desc_destroy, cublasLtMatmulDescDestroy)                                                               \
    X(desc_set, cublasLtMatmulDescSetAttribute)                                                              \
    X(layout_create, cublasLtMatrixLayoutCreate)                                                             \
    X(layout_destroy, cublasLtMatrixLayoutDestroy)                                                           \
    X(layout_set, cublasLtMatrixLayoutSetAttribute)                                                          \
    X(preference_create, cublasLtMatmulPreferenceCreate)                                                     \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy)                                                   \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute)                                                  \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                             \
    X(matmul, cublasLtMatmul)

static struct {
#define MEMBER(member, symbol) __typeof__(&symbol) member;
    CUBLASLT_FUNCTIONS(MEMBER)
#undef MEMBER
    cublasLtHandle_t handle;
    void *workspace;
    char title[40];
} lt;

static const size_t workspace_bytes = (size_t)32 << 20; /* what NVIDIA advises for Hopper */

struct product {
    product_want want;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[3]; /* of B, A and C, as the library sees them: first, second, result */
    cublasLtMatmulAlgo_t algo;
};

/* ---- the library ---- */

static bool find_functions(void *library)
{
    void *found;
#define FIND(member, symbol)                                                                                 \
    found = dlsym(library, #symbol);                                                                         \
    if (found == NULL) {                                                                                     \
        return false;                                                                                        \
    }                                                                                                        \
    memcpy(&lt.member, &found, sizeof found);
    CUBLASLT_FUNCTIONS(FIND)
#undef FIND
    return true;
}

const char *product_missing(int gpu)
{
    static const char none[] = "cuBLASLt cannot be loaded: NVIDIA's CUDA toolkit 13 brings libcublasLt.so.13";
    if (lt.handle != NULL) {
        return NULL;
    }
    void *library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        library = dlopen("/usr/local/cuda/lib64/libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL || !find_functions(library)) {
        return none;
    }
    if (attn_cuda_use(gpu) != ATTN_OK || attn_cuda_alloc(gpu, &lt.workspace, workspace_bytes) != ATTN_OK) {
        return "no memory of the GPU for cuBLASLt";
    }
    if (lt.create(&lt.handle) != CUBLAS_STATUS_SUCCESS) {
        lt.handle = NULL;
        return none;
    }
    const size_t version = lt.version();
    snprintf(lt.title, sizeof lt.title, "cuBLASLt %zu.%zu", version / 10000, version / 100 % 100);
    return NULL;
}

const char *product_library(void)
{
    return lt.title;
}

int64_t product_workspace(void)
{
    return (int64_t)workspace_bytes;
}

/* ---- one product ---- */

static cudaDataType_t type_of(attn_dtype dtype)
{
    return dtype == ATTN_F16 ? CUDA_R_16F : dtype == ATTN_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* A matrix of `rows` rows of `row` elements, which lie `pitch` apart if not 0: columns to the library. */
static bool make_layout(product *p, int which, int64_t rows, int64_t row, int64_t pitch, int64_t stride)
{
    const int32_t batch = (int32_t)p->want.batch;
    cublasLtMatrixLayout_t *l = &p->layout[which];
    return lt.layout_create(l, type_of(p->want.dtype), (uint64_t)row, (uint64_t)rows,
                            pitch > 0 ? pitch : row) == CUBLAS_STATUS_SUCCESS &&
           lt.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch) ==
               CUBLAS_STATUS_SUCCESS &&
           lt.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride) ==
               CUBLAS_STATUS_SUCCESS;
}

static bool describe(product *p)
{
    const product_want *w = &p->want;
    const cublasOperation_t a = w->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t b = w->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    return lt.desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           lt.desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &b, sizeof b) == CUBLAS_STATUS_SUCCESS &&
           lt.desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &a, sizeof a) == CUBLAS_STATUS_SUCCESS &&
           make_layout(p, 0, w->transpose_b ? w->n : w->k, w->transpose_b ? w->k : w->n, 0, w->stride_b) &&
           make_layout(p, 1, w->transpose_a ? w->k : w->m, w->transpose_a ? w->m : w->k, w->row_a,
                       w->stride_a) &&
           make_layout(p, 2, w->m, w->n, w->row_c, w->stride_c);
}

static bool choose_algorithm(product *p)
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    int count = 0;
    if (lt.preference_create(&preference) != CUBLAS_STATUS_SUCCESS) {
        return false;
    }
    bool found = lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                   sizeof workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
                 lt.heuristic(lt.handle, p->desc, p->layout[0], p->layout[1], p->layout[2], p->layout[2],
                              preference, 1, &best, &count) == CUBLAS_STATUS_SUCCESS &&
                 count == 1;
    if (found) {
        p->algo = best.algo;
    }
    (void)lt.preference_destroy(preference);
    return found;
}

attn_status product_open(product **made, int gpu, const product_want *want)
{
    const char *missing = product_missing(gpu);
    product *p = calloc(1, sizeof *p);
    *made = p;
    if (p == NULL) {
        return attn_fail(ATTN_ENOMEM, "out of memory");
    }
    if (missing != NULL) {
        return attn_fail(ATTN_EUNSUPPORTED, missing);
    }
    p->want = *want;
    return describe(p) && choose_algorithm(p)
               ? ATTN_OK
               : attn_fail(ATTN_EUNSUPPORTED, "cuBLASLt has no such product of matrices");
}

void product_close(product *p)
{
    if (p == NULL) {
        return;
    }
    for (int i = 0; i < 3; i++) {
        if (p->layout[i] != NULL) {
            (void)lt.layout_destroy(p->layout[i]);
        }
    }
    if (p->desc != NULL) {
        (void)lt.desc_destroy(p->desc);
    }
    free(p);
}

attn_status product_run(const product *p, const void *a, const void *b, void *c)
{
    const cublasStatus_t status =
        lt.matmul(lt.handle, p->desc, &p->want.alpha, b, p->layout[0], a, p->layout[1], &p->want.beta, c,
                  p->layout[2], c, p->layout[2], &p->algo, lt.workspace, workspace_bytes, NULL);
    char text[80];
    snprintf(text, sizeof text, "cublasLtMatmul: status %d", (int)status);
    return status == CUBLAS_STATUS_SUCCESS ? ATTN_OK : attn_fail(ATTN_EIO, text);
}

/* ---- the peak ---- */

/* Zeros would take less power and so run faster than what is worth measuring. */
static attn_status fill(int gpu, attn_dtype dtype, void *there, int64_t count)
{
    enum { PIECE = 1 << 20 };
    const int64_t size = (int64_t)attn_dtype_size(dtype);
    float *values = malloc(PIECE * sizeof *values);
    void *rounded = malloc(PIECE * sizeof *values);
    attn_status status =
        values != NULL && rounded != NULL ? ATTN_OK : attn_fail(ATTN_ENOMEM, "out of memory");
    if (status == ATTN_OK) {
        cli_random_normal(1, ATTN_Q, 0, PIECE, values);
        attn_from_f32(rounded, dtype, 1, values, PIECE);
    }
    for (int64_t i = 0; i < count && status == ATTN_OK; i += PIECE) {
        const int64_t take = count - i < PIECE ? count - i : PIECE;
        status = attn_cuda_copy(gpu, (char *)there + i * size, rounded, (size_t)(take * size), NULL);
    }
    free(values);
    free(rounded);
    return status;
}

/* Seconds of one product: the median of some runs of several each. */
static attn_status time_product(int gpu, const product *p, const void *a, const void *b, void *c,
                                double *seconds)
{
    enum { RUNS = 7, CALLS = 8 };
    void *begin = NULL, *end = NULL;
    double times[RUNS];
    attn_status status = attn_cuda_event_create(gpu, &begin);
    status = status == ATTN_OK ? attn_cuda_event_create(gpu, &end) : status;
    for (int run = -1; run < RUNS && status == ATTN_OK; run++) { /* -1: to warm up */
        status = attn_cuda_event_record(gpu, begin, NULL);
        for (int i = 0; i < CALLS && status == ATTN_OK; i++) {
            status = product_run(p, a, b, c);
        }
        status = status == ATTN_OK ? attn_cuda_event_record(gpu, end, NULL) : status;
        status =
            status == ATTN_OK ? attn_cuda_event_elapsed(gpu, begin, end, &times[run < 0 ? 0 : run]) : status;
    }
    if (status == ATTN_OK) {
        *seconds = cli_spread_of(times, RUNS).median / CALLS;
    }
    attn_cuda_event_destroy(gpu, begin);
    attn_cuda_event_destroy(gpu, end);
    return status;
}

double product_peak(int gpu, attn_dtype dtype, int size)
{
    const int64_t n = size, count = n * n;
    const size_t bytes = (size_t)count * attn_dtype_size(dtype);
    const product_want want = {
        .dtype = dtype, .m = n, .n = n, .k = n, .transpose_b = true, .alpha = 1, .batch = 1};
    void *x[3] = {NULL, NULL, NULL};
    product *p = NULL;
    double seconds = 0;
    attn_status status = cli_random_ready();
    status = status == ATTN_OK ? product_open(&p, gpu, &want) : status;
    for (int i = 0; i < 3 && status == ATTN_OK; i++) {
        status = attn_cuda_alloc(gpu, &x[i], bytes);
        status = status == ATTN_OK ? fill(gpu, dtype, x[i], count) : status;
    }
    status = status == ATTN_OK ? time_product(gpu, p, x[0], x[1], x[2], &seconds) : status;
    for (int i = 0; i < 3; i++) {
        attn_cuda_free(gpu, x[i]);
    }
    product_close(p);
    return status == ATTN_OK ? 2.0 * (double)n * (double)count / seconds : 0;
}

#else

const char *product_missing(int gpu)
{
    (void)gpu;
    return "built without cuBLASLt: install NVIDIA's CUDA toolkit 13 and build again";
}

double product_peak(int gpu, attn_dtype dtype, int size)
{
    (void)gpu, (void)dtype, (void)size;
    return 0;
}

#endif
