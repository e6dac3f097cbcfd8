/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spool.c - fuzz target: any bytes in the place of a file of a spool.
 *
 * A small problem is computed once, so that its spool is complete.  Then each input replaces one file (the
 * first byte says which: the manifest or a piece) and the problem is computed again: it must succeed, with
 * the damaged piece computed again, or refuse the manifest, and nothing else.
 */
#include <dirent.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "attn/attn.h"
#include "fuzz.h"

enum { N = 6, D = 2, FILES = 64, BYTES = 4096 };

typedef struct kept {
    char name[256];
    char bytes[BYTES];
    size_t size;
} kept;

static struct {
    char folder[64];
    attn_plan *plan;
    void *workspace;
    float q[N * D], k[N * D], v[N * D], o[N * D], lse[N], want[N * D];
    kept file[FILES]; /* the complete spool */
    size_t files;
} state;

static attn_status execute(void)
{
    attn_io io = {.size = sizeof io,
                  .q = {.data = state.q},
                  .k = {.data = state.k},
                  .v = {.data = state.v},
                  .o = {.data = state.o},
                  .lse = {.data = state.lse}};
    memset(state.o, 0xff, sizeof state.o);
    return attn_execute(state.plan, &io, state.workspace);
}

static void write_file(const char *name, const void *data, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", state.folder, name);
    FILE *file = fopen(path, "wb");
    FUZZ_EXPECT(file != NULL);
    FUZZ_EXPECT(fwrite(data, 1, size, file) == size);
    FUZZ_EXPECT(fclose(file) == 0);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const kept *)a)->name, ((const kept *)b)->name);
}

static void keep_files(void)
{
    DIR *folder = opendir(state.folder);
    FUZZ_EXPECT(folder != NULL);
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char path[512];
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, "lock") == 0) {
            continue;
        }
        kept *k = &state.file[state.files++];
        FUZZ_EXPECT(state.files <= FILES);
        snprintf(k->name, sizeof k->name, "%s", entry->d_name);
        snprintf(path, sizeof path, "%s/%s", state.folder, entry->d_name);
        FILE *file = fopen(path, "rb");
        FUZZ_EXPECT(file != NULL);
        k->size = fread(k->bytes, 1, sizeof k->bytes, file);
        fclose(file);
    }
    closedir(folder);
    qsort(state.file, state.files, sizeof state.file[0], by_name);
}

static void clean_up(void)
{
    (void)!attn_spool_remove(state.plan);
    attn_plan_destroy(state.plan);
    free(state.workspace);
}

/* In memory if there is such a folder: each run syncs its files. */
static void set_up(void)
{
    attn_problem problem = {.size = sizeof problem, .tokens_q = N, .dim_qk = D, .mask = ATTN_MASK_CAUSAL};
    snprintf(state.folder, sizeof state.folder, "%s/attn-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    FUZZ_EXPECT(mkdtemp(state.folder) != NULL);
    attn_options options = {
        .size = sizeof options, .workers = 3, .threads = 1, .spool = state.folder, .in_memory = 1};
    for (int i = 0; i < N * D; i++) {
        state.q[i] = (float)(i % 5) - 2;
        state.k[i] = (float)(i % 7) - 3;
        state.v[i] = (float)i;
    }
    FUZZ_EXPECT(attn_plan_create(&state.plan, &problem, &options) == ATTN_OK);
    state.workspace = malloc(attn_plan_workspace(state.plan));
    FUZZ_EXPECT(state.workspace != NULL && execute() == ATTN_OK);
    memcpy(state.want, state.o, sizeof state.want);
    keep_files();
    FUZZ_EXPECT(state.files > 3);
    atexit(clean_up);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (state.plan == NULL) {
        set_up();
    }
    if (size == 0) {
        return 0;
    }
    const kept *k = &state.file[data[0] % state.files];
    bool same = size - 1 == k->size && memcmp(data + 1, k->bytes, k->size) == 0;
    bool manifest = strstr(k->name, ".piece") == NULL;
    write_file(k->name, data + 1, size - 1);
    attn_status status = execute();
    if (manifest) {
        FUZZ_EXPECT(status == (same ? ATTN_OK : ATTN_EMISMATCH));
        write_file(k->name, k->bytes, k->size);
        return 0;
    }
    FUZZ_EXPECT(status == ATTN_OK);
    if (same) {
        FUZZ_EXPECT(memcmp(state.o, state.want, sizeof state.o) == 0);
    }
    write_file(k->name, k->bytes, k->size); /* a fuzzer can forge a checksum: such a piece would stay */
    return 0;
}
