/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - what the fuzz targets share.
 *
 * Replay: link a target with driver.c and give it corpus/<target>.  Fuzz: compile with
 * clang -fsanitize=fuzzer,address,undefined, leave driver.c out, and run it on a copy of the corpus.
 */
#ifndef ATTN_TESTS_FUZZ_H
#define ATTN_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A promise that must hold for any input. */
#define FUZZ_EXPECT(promise)                                                                                 \
    do {                                                                                                     \
        if (!(promise)) {                                                                                    \
            fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #promise);                            \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
