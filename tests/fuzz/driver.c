/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - replays files through a fuzz target, without a fuzzer: each argument is a file or a folder of
 * files.
 *
 * A target defines LLVMFuzzerTestOneInput() and aborts when a promise is broken; linked with
 * -fsanitize=fuzzer instead of this file it is a real fuzzer (see fuzz.h).
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

static int replay_file(const char *path)
{
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    /* a copy of exactly this size, so that a sanitizer sees reads beyond it */
    uint8_t *copy = malloc(size > 0 ? size : 1);
    if (copy == NULL) {
        return 1;
    }
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    return 0;
}

static int replay(const char *path, int *count)
{
    char name[4096];
    int failed = 0;
    DIR *folder = opendir(path);
    if (folder == NULL) {
        *count += 1;
        return replay_file(path);
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (entry->d_name[0] != '.') {
            snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
            failed += replay(name, count);
        }
    }
    closedir(folder);
    return failed;
}

int main(int argc, char **argv)
{
    int count = 0, failed = 0;
    for (int i = 1; i < argc; i++) {
        failed += replay(argv[i], &count);
    }
    printf("%d inputs replayed\n", count);
    return count > 0 && failed == 0 ? 0 : 1;
}
