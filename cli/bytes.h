/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bytes.h - arrays in files: where the bytes are, what they mean, and how they get in and out.
 *
 * A cli_reader reads by position (pread), so that any number of threads may share it and no more than the
 * caller's buffer is ever resident: files are not mapped, because mapped pages count as the process's memory.
 * A cli_writer builds its file under a temporary name in the same folder; the file of the real name changes
 * only at commit, in one rename.  Failures set the library's error text (attn_last_error) and return a
 * status.
 */
#ifndef ATTN_CLI_BYTES_H
#define ATTN_CLI_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attn/attn.h"

#if defined(__GNUC__)
#define CLI_REFUSE_FORMAT __attribute__((format(printf, 2, 3)))
#else
#define CLI_REFUSE_FORMAT
#endif

/* Sets the error text and returns status. */
attn_status cli_refuse(attn_status status, const char *format, ...) CLI_REFUSE_FORMAT;

/* ---- what an array is ----------------------------------------------------------------------------- */

/* Element types in files, little-endian.  The first three are attn_dtype's, with the same values. */
typedef enum cli_dtype {
    CLI_F32 = ATTN_F32,
    CLI_F16 = ATTN_F16,
    CLI_BF16 = ATTN_BF16,
    CLI_F64 = 3
} cli_dtype;

size_t cli_dtype_size(cli_dtype dtype);
const char *cli_dtype_name(cli_dtype dtype); /* "f32", ... */

#define CLI_RANK 8

/* One dense C-ordered array inside a file. */
typedef struct cli_array {
    cli_dtype dtype;
    int rank;
    int64_t shape[CLI_RANK];
    int64_t count;  /* elements, the product of shape */
    int64_t offset; /* of its first byte in the file */
} cli_array;

/* Sets count from shape; false if it or the number of bytes overflows. */
bool cli_array_measure(cli_array *array);
/* "[2, 30000, 64]" in a buffer of the caller, which is returned. */
#define CLI_SHAPE_TEXT 200
const char *cli_array_shape(const cli_array *array, char text[CLI_SHAPE_TEXT]);

/* `count` elements to fp32.  f64 rounds to nearest: what does not fit becomes inf. */
void cli_to_f32(float *dst, const void *src, cli_dtype dtype, int64_t count);
/* `count` fp32 elements to dtype, rounded to nearest even. */
void cli_from_f32(void *dst, cli_dtype dtype, const float *src, int64_t count);

/* 64 bits of a stream of bytes, chained from `hash`; finds accidents, not attacks. */
uint64_t cli_hash(uint64_t hash, const void *data, size_t bytes);

/* ---- reading ---------------------------------------------------------------------------------------- */

typedef struct cli_reader {
    int fd;
    const char *path; /* the caller's */
    int64_t size;
} cli_reader;

#define CLI_READER_CLOSED                                                                                    \
    {                                                                                                        \
        .fd = -1                                                                                             \
    }

/* A regular file; anything else is refused.  ATTN_EIO. */
attn_status cli_reader_open(cli_reader *reader, const char *path);
/* All of `bytes` from `offset`, or ATTN_EIO. */
attn_status cli_reader_read(const cli_reader *reader, void *dst, size_t bytes, int64_t offset);
void cli_reader_close(cli_reader *reader); /* twice is fine */

/* The path without links, freed by the caller; NULL if there is no such file. */
char *cli_real_path(const char *path);

/* ---- writing ---------------------------------------------------------------------------------------- */

typedef struct cli_writer {
    int fd;          /* open for reading too */
    char *path;      /* the file's real name, links resolved */
    char *temporary; /* ".NAME.part" beside it; NULL once it is committed, and for a scratch file */
} cli_writer;

#define CLI_WRITER_CLOSED                                                                                    \
    {                                                                                                        \
        .fd = -1                                                                                             \
    }

/*
 * Begins a file of `size` bytes and reserves them on the disk, so that a full disk is found before the work
 * and not after it.  Another process that writes the same file is refused.
 */
attn_status cli_writer_open(cli_writer *writer, const char *path, int64_t size);
/* A file without a name in TMPDIR, for results that nobody keeps. */
attn_status cli_writer_scratch(cli_writer *writer, int64_t size);
attn_status cli_writer_write(const cli_writer *writer, const void *src, size_t bytes, int64_t offset);
/* Syncs and renames; the file stays open, for reading back. */
attn_status cli_writer_commit(cli_writer *writer);
/* Removes what was not committed, so that an older file of the real name stays.  Twice is fine. */
void cli_writer_close(cli_writer *writer);

#endif
