/* SPDX-License-Identifier: Apache-2.0 */
/*
 * npy.h - NumPy's .npy files, versions 1 to 3: finding the array, and writing the header.
 * Format: numpy/lib/format.py and NEP 1.
 */
#ifndef ATTN_CLI_NPY_H
#define ATTN_CLI_NPY_H

#include "bytes.h"

/*
 * Reads the header: C order, '<f4', '<f2' or '<f8'.  Everything else, and a file that is longer or shorter
 * than its header says, is refused with ATTN_EIO and a text that tells what to do.
 */
attn_status cli_npy_open(const cli_reader *reader, cli_array *array);

/* A version 1 header as NumPy writes it, byte for byte.  bf16 has no name in this format: not for it. */
#define CLI_NPY_HEADER 512
size_t cli_npy_header(const cli_array *array, char header[CLI_NPY_HEADER]);

#endif
