/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_program.c - main() of the test programs of the GPU: options, the kernels, counts.  See cuda_case.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

enum { SKIPPED = 77, TOLD = 40 };

cuda_program cuda;

void cuda_expect(bool ok, const char *format, ...)
{
    if (ok) {
        return;
    }
    if (cuda.wrong++ < TOLD) {
        va_list list;
        va_start(list, format);
        (void)fputs("WRONG ", stdout);
        (void)vprintf(format, list);
        (void)fputs("\n", stdout);
        va_end(list);
        (void)fflush(stdout);
    }
}

void cuda_conclude(void)
{
    static int64_t known;
    const int64_t fresh = cuda.wrong - known;
    known = cuda.wrong;
    assert_int_equal(fresh, 0);
}

static void list_rows(void)
{
    attn_verdict row = ATTN_INIT(attn_verdict);
    for (int64_t i = 0; attn_kernel_verdict(NULL, i, &row) == ATTN_OK; i++) {
        const bool wanted = cuda.kernel == NULL || strcmp(cuda.kernel, row.name) == 0;
        if (row.device == ATTN_CUDA && wanted && cuda.row_count < CUDA_KERNELS) {
            cuda.rows[cuda.row_count++] = row;
        }
    }
}

static bool take_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            cuda.small = true;
        } else if (strcmp(argv[i], "--kernel") == 0 && i + 1 < argc) {
            cuda.kernel = argv[++i];
        } else if (strcmp(argv[i], "--gpu") == 0 && i + 1 < argc) {
            cuda.gpu = (int)strtol(argv[++i], NULL, 10);
        } else {
            (void)fprintf(stderr, "usage: %s [--small] [--kernel NAME] [--gpu N]\n", argv[0]);
            return false;
        }
    }
    return true;
}

int cuda_main(int argc, char **argv, const char *name, const struct CMUnitTest *tests, size_t count)
{
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    if (!take_options(argc, argv)) {
        return 2;
    }
    if (attn_cuda_look(cuda.gpu, &info) != ATTN_OK) {
        (void)printf("GPU tests skipped: %s\n", attn_last_error());
        return SKIPPED;
    }
    list_rows();
    if (cuda.row_count == 0) {
        (void)printf("GPU tests skipped: the kernel table has no such row for a GPU\n");
        return SKIPPED;
    }
    int failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    (void)printf("%s on %s with %d kernels: %lld forward, %lld backward, %lld refused, %lld wrong\n", name,
                 info.name, cuda.row_count, (long long)cuda.forward, (long long)cuda.backward,
                 (long long)cuda.refused, (long long)cuda.wrong);
    return failed;
}
