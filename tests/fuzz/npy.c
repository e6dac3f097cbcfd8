/* SPDX-License-Identifier: Apache-2.0 */
/* npy.c - fuzz target: any bytes as a .npy file.  What is accepted fits the file and can be written again. */
#include <string.h>

#include "cli/npy.h"
#include "fuzz_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cli_array array, again;
    cli_reader reader = fuzz_file(data, size);
    attn_status status = cli_npy_open(&reader, &array);
    FUZZ_EXPECT(status == ATTN_OK || status == ATTN_EIO || status == ATTN_ENOMEM);
    if (status != ATTN_OK) {
        FUZZ_EXPECT(attn_last_error()[0] != '\0');
        return 0;
    }
    int64_t bytes = array.count * (int64_t)cli_dtype_size(array.dtype);
    FUZZ_EXPECT(array.rank >= 0 && array.rank <= CLI_RANK && array.count >= 0 && bytes >= 0);
    FUZZ_EXPECT(array.offset > 0 && array.offset + bytes == (int64_t)size);
    /* our own header for the same array is read as the same array */
    char header[CLI_NPY_HEADER];
    size_t length = cli_npy_header(&array, header);
    FUZZ_EXPECT(length <= sizeof header && length % 64 == 0);
    uint8_t *copy = calloc(1, length + (size_t)bytes);
    FUZZ_EXPECT(copy != NULL);
    memcpy(copy, header, length);
    reader = fuzz_file(copy, length + (size_t)bytes);
    FUZZ_EXPECT(cli_npy_open(&reader, &again) == ATTN_OK);
    FUZZ_EXPECT(again.rank == array.rank && again.count == array.count && again.dtype == array.dtype);
    FUZZ_EXPECT(memcmp(again.shape, array.shape, sizeof array.shape) == 0);
    free(copy);
    return 0;
}
