/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_file.h - bytes as a file that a cli_reader reads: one unnamed file, used over and over. */
#ifndef ATTN_TESTS_FUZZ_FILE_H
#define ATTN_TESTS_FUZZ_FILE_H

#include <unistd.h>

#include "cli/bytes.h"
#include "fuzz.h"

static inline cli_reader fuzz_file(const uint8_t *data, size_t size)
{
    static FILE *file;
    if (file == NULL) {
        file = tmpfile();
    }
    FUZZ_EXPECT(file != NULL);
    int fd = fileno(file);
    FUZZ_EXPECT(ftruncate(fd, (off_t)size) == 0);
    FUZZ_EXPECT(pwrite(fd, data, size, 0) == (ssize_t)size);
    return (cli_reader){.fd = fd, .path = "input", .size = (int64_t)size};
}

#endif
