/* SPDX-License-Identifier: Apache-2.0 */
/* files.h - small files for the tests of file formats; each test includes it after cmocka.h. */
#ifndef ATTN_TESTS_FILES_H
#define ATTN_TESTS_FILES_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A folder of this test's own, under TMPDIR; *path is freed by files_folder_remove(). */
static inline char *files_folder(void)
{
    const char *base = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
    size_t room = strlen(base) + 32;
    char *path = malloc(room);
    assert_non_null(path);
    snprintf(path, room, "%s/attn-test-XXXXXX", base);
    assert_non_null(mkdtemp(path));
    return path;
}

static inline void files_folder_remove(char *path)
{
    assert_int_equal(rmdir(path), 0);
    free(path);
}

/* The folder of a test program that uses files_set_up() and files_tear_down(). */
static char *files_own;

static inline int files_set_up(void **state)
{
    (void)state;
    files_own = files_folder();
    return 0;
}

static inline int files_tear_down(void **state)
{
    (void)state;
    files_folder_remove(files_own);
    return 0;
}

/* folder/name in a static buffer; eight of them in turn. */
static inline const char *files_path(const char *folder, const char *name)
{
    static char path[8][512];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
    return path[next];
}

static inline void files_write(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static inline size_t files_read(const char *path, void *data, size_t room)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t bytes = fread(data, 1, room, file);
    assert_int_equal(fclose(file), 0);
    return bytes;
}

/* Numbers of splitmix64, for random cases that are the same each time. */
static inline uint64_t files_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
