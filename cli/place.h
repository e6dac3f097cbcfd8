/* SPDX-License-Identifier: Apache-2.0 */
/* place.h - memory where it is computed: of this process, or of a GPU, by one set of functions. */
#ifndef ATTN_CLI_PLACE_H
#define ATTN_CLI_PLACE_H

#include "attn/cuda.h"

typedef struct cli_place {
    attn_device device;
    int gpu;
} cli_place;

/* Begins a cache line.  NULL and an error text: out of memory. */
void *cli_place_alloc(cli_place place, size_t bytes);
void cli_place_free(cli_place place, void *memory);
attn_status cli_place_fill(cli_place place, void *memory, unsigned char byte, size_t bytes);
/* Between this process's memory and that of the place; done when it returns. */
attn_status cli_place_copy(cli_place place, void *dst, const void *src, size_t bytes);
/* For all that was enqueued on the default stream. */
attn_status cli_place_wait(cli_place place);
/* Bytes of the GPU's memory that nobody has, 0 elsewhere. */
int64_t cli_place_free_bytes(cli_place place);

#endif
