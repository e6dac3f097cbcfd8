/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.c - fuzz target: any bytes as a .safetensors file.  What is accepted lies within the file. */
#include "cli/safetensors.h"
#include "fuzz_file.h"

static void try_name(const cli_reader *reader, const char *name)
{
    cli_array array;
    attn_status status = cli_safetensors_open(reader, name, "q", &array);
    FUZZ_EXPECT(status == ATTN_OK || status == ATTN_EIO || status == ATTN_ENOMEM);
    if (status != ATTN_OK) {
        FUZZ_EXPECT(attn_last_error()[0] != '\0');
        return;
    }
    int64_t bytes = array.count * (int64_t)cli_dtype_size(array.dtype);
    FUZZ_EXPECT(array.rank >= 0 && array.rank <= CLI_RANK && array.count >= 0 && bytes >= 0);
    FUZZ_EXPECT(array.offset >= 10 && array.offset + bytes <= reader->size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cli_reader reader = fuzz_file(data, size);
    try_name(&reader, NULL);
    try_name(&reader, "k");
    return 0;
}
