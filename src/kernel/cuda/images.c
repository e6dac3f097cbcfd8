/* SPDX-License-Identifier: Apache-2.0 */
/*
 * images.c - the cubins, taken into this object as they are.
 *
 * cubins.inc.h, which the build writes, has a line CUBIN(name, "path") for each.
 */
#include "kernel/cuda/driver.h"

/* The assembler reads the file; 64 bytes is the alignment that the driver asks of an ELF image. */
#define CUBIN(name, path)                                                                                    \
    __asm__(".pushsection .rodata\n"                                                                         \
            ".balign 64\n"                                                                                   \
            "attn__cubin_" #name ":\n"                                                                       \
            ".incbin \"" path "\"\n"                                                                         \
            "attn__cubin_end_" #name ":\n"                                                                   \
            ".byte 0\n"                                                                                      \
            ".popsection\n");                                                                                \
    extern const unsigned char attn__cubin_##name[] __attribute__((visibility("hidden")));                   \
    extern const unsigned char attn__cubin_end_##name[] __attribute__((visibility("hidden")));
#include "cubins.inc.h"
#undef CUBIN

const attn__cuda_image attn__cuda_images[] = {
#define CUBIN(name, path) {#name, attn__cubin_##name, attn__cubin_end_##name},
#include "cubins.inc.h"
#undef CUBIN
    {NULL, NULL, NULL},
};
_Static_assert(sizeof attn__cuda_images / sizeof *attn__cuda_images <= ATTN__CUDA_IMAGES + 1,
               "driver.c keeps ATTN__CUDA_IMAGES modules a device: raise it");
