/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - .safetensors files: finding one tensor, and writing the header of a file with one.
 * Format: https://github.com/huggingface/safetensors, README and tensor.rs.
 */
#ifndef ATTN_CLI_SAFETENSORS_H
#define ATTN_CLI_SAFETENSORS_H

#include "bytes.h"

/*
 * Finds the tensor called `name`; NULL: the only one of the file, or else the one called `usual`.  F32, F16,
 * BF16 and F64 are read.  The whole header is checked.  ATTN_EIO with a text that lists the names.
 */
attn_status cli_safetensors_open(const cli_reader *reader, const char *name, const char *usual,
                                 cli_array *array);

/* The length and the JSON of a file that holds `array` as `name` (plain ASCII, at most 32 characters). */
#define CLI_SAFETENSORS_HEADER 512
size_t cli_safetensors_header(const cli_array *array, const char *name, char header[CLI_SAFETENSORS_HEADER]);

#endif
