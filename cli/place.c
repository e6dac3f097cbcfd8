/* SPDX-License-Identifier: Apache-2.0 */
/* place.c - see place.h. */
#include "place.h"

#include <stdlib.h>
#include <string.h>

void *cli_place_alloc(cli_place place, size_t bytes)
{
    enum { LINE = 64 }; /* a vector that crosses lines takes longer */
    void *memory = NULL;
    const size_t some = bytes > 0 ? bytes : 1;
    if (place.device == ATTN_CUDA) {
        return attn_cuda_alloc(place.gpu, &memory, some) == ATTN_OK ? memory : NULL;
    }
    memory = some <= SIZE_MAX - LINE ? aligned_alloc(LINE, (some + LINE - 1) / LINE * LINE) : NULL;
    if (memory == NULL) {
        (void)attn_fail(ATTN_ENOMEM, "out of memory");
    }
    return memory;
}

void cli_place_free(cli_place place, void *memory)
{
    if (place.device == ATTN_CUDA) {
        attn_cuda_free(place.gpu, memory);
    } else {
        free(memory);
    }
}

attn_status cli_place_fill(cli_place place, void *memory, unsigned char byte, size_t bytes)
{
    if (place.device == ATTN_CUDA) {
        return attn_cuda_fill(place.gpu, memory, byte, bytes, NULL);
    }
    memset(memory, byte, bytes);
    return ATTN_OK;
}

attn_status cli_place_copy(cli_place place, void *dst, const void *src, size_t bytes)
{
    if (place.device == ATTN_CUDA) {
        attn_status status = attn_cuda_copy(place.gpu, dst, src, bytes, NULL);
        return status == ATTN_OK ? cli_place_wait(place) : status;
    }
    memcpy(dst, src, bytes);
    return ATTN_OK;
}

attn_status cli_place_wait(cli_place place)
{
    return place.device == ATTN_CUDA ? attn_cuda_wait(place.gpu, NULL) : ATTN_OK;
}

int64_t cli_place_free_bytes(cli_place place)
{
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    if (place.device != ATTN_CUDA || attn_cuda_look(place.gpu, &info) != ATTN_OK) {
        return 0;
    }
    return (int64_t)info.memory_free;
}
