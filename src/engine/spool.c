/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spool.c - partials on disk, so that a killed run goes on where it was.  Format: docs/spool.md.
 *
 * A folder holds a manifest (what is computed, by whom, with which kernel: text, written first) and one piece
 * for each finished (rank, query group).  A piece is written to a temporary name, synced, renamed, and the
 * folder synced, so that under its real name it is whole or absent.  Its head carries the manifest's hash and
 * a checksum; a piece that fails either is told and computed again.  A manifest of another problem is
 * refused.  A lock keeps a second process out.
 */
#ifndef _POSIX_C_SOURCE /* for a build by plain cc */
#define _POSIX_C_SOURCE 200809L
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"

#define MANIFEST "manifest.txt"
#define LOCK     "lock"

enum { NAME_MAX_LENGTH = 80, CHUNK = 1 << 16 };

typedef struct piece_head {
    char magic[8];
    uint64_t fingerprint;
    int64_t rank, group, first, count, planes, dim;
    uint64_t payload; /* checksum of what follows: lse[planes][count], then o[planes][count][dim] */
    uint64_t head;    /* checksum of the fields above */
} piece_head;

_Static_assert(sizeof(piece_head) == 80, "the piece format has no padding");
_Static_assert(sizeof(float) == 4, "pieces hold IEEE binary32");

static const char piece_magic[8] = "ATTNPC1";

/* ---- manifest ---- */

static size_t print_set(char *text, size_t at, const char *name, const int64_t *set, int64_t size)
{
    at += (size_t)sprintf(text + at, "%s ", name);
    for (int64_t i = 0; i < size; i++) {
        at += (size_t)sprintf(text + at, "%s%lld", i > 0 ? "," : "", (long long)set[i]);
    }
    return at + (size_t)sprintf(text + at, "\n");
}

char *attn__spool_manifest(const attn_plan *plan, const char *key)
{
    char problem[512];
    size_t sets = 24 * (size_t)(plan->set_q_size + plan->set_kv_size);
    char *text = attn__alloc(2048 + sets + strlen(key));
    if (text == NULL) {
        return NULL;
    }
    attn_problem_print(&plan->problem, problem, sizeof problem);
    size_t at =
        (size_t)sprintf(text, "attn spool 1\nversion %s\nproblem %s\nworkers %lld\nclassic %d\n",
                        attn_version(), problem, (long long)plan->layout.workers, plan->layout.classic);
    at = print_set(text, at, "query groups", attn__plan_set_q(plan), plan->set_q_size);
    at = print_set(text, at, "key groups", attn__plan_set_kv(plan), plan->set_kv_size);
    at += (size_t)sprintf(text + at, "kernel %s tile %lld\ndata ", attn__plan_kernel(plan),
                          (long long)plan->tile_q);
    for (const char *c = key; *c != '\0'; c++) {
        text[at++] = (char)((unsigned char)*c < ' ' ? ' ' : *c);
    }
    text[at++] = '\n';
    text[at] = '\0';
    return text;
}

/* ---- files ---- */

static attn_status io_error(const attn__run *run, const char *what, const char *name)
{
    int error = errno;
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
        return attn__fail(
            ATTN_EIO, "%s %s/%s: %s; finished tasks are kept there: make room and run the same command again",
            what, run->plan->spool, name, strerror(error));
    }
    return attn__fail(ATTN_EIO, "%s %s/%s: %s", what, run->plan->spool, name, strerror(error));
}

static bool write_all(int file, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t done = write(file, at, bytes);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return false;
        }
        at += done;
        bytes -= (size_t)done;
    }
    return true;
}

/* false with errno 0: the file ends too soon */
static bool read_all(int file, void *data, size_t bytes, off_t offset)
{
    char *at = data;
    errno = 0;
    while (bytes > 0) {
        ssize_t done = pread(file, at, bytes, offset);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return false;
        }
        at += done;
        offset += done;
        bytes -= (size_t)done;
    }
    return true;
}

/* What is written is on the disk, then has its real name, then the name is on the disk. */
static bool publish(int folder, int file, const char *temporary, const char *name)
{
    bool done = fsync(file) == 0;
    done = close(file) == 0 && done;
    return done && renameat(folder, temporary, folder, name) == 0 && fsync(folder) == 0;
}

static attn_status write_file(attn__run *run, const char *name, const void *const *parts, const size_t *bytes,
                              int count)
{
    char temporary[NAME_MAX_LENGTH + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    int file = openat(run->spool_folder, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) {
        return io_error(run, "cannot write", name);
    }
    bool done = true;
    for (int i = 0; i < count && done; i++) {
        done = write_all(file, parts[i], bytes[i]);
    }
    if (!done) {
        int error = errno;
        close(file);
        errno = error;
    } else {
        done = publish(run->spool_folder, file, temporary, name);
    }
    if (!done) {
        attn_status status = io_error(run, "cannot write", name);
        unlinkat(run->spool_folder, temporary, 0);
        return status;
    }
    return ATTN_OK;
}

/* ---- the folder ---- */

/* A process that was just killed keeps its locks until it is gone, which a write to a slow disk delays: waits
 * for up to PATIENCE tries.  0, or the last try's errno. */
static int lock_patiently(int file)
{
    enum { PATIENCE = 100 }; /* of 50 ms: 5 s */
    const struct timespec pause = {.tv_nsec = 50000000};
    for (int tries = 1;; tries++) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (fcntl(file, F_SETLK, &lock) == 0) {
            return 0;
        }
        if ((errno != EACCES && errno != EAGAIN) || tries == PATIENCE) {
            return errno;
        }
        nanosleep(&pause, NULL);
    }
}

static attn_status lock_folder(attn__run *run)
{
    run->spool_lock = openat(run->spool_folder, LOCK, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (run->spool_lock < 0) {
        return io_error(run, "cannot write", LOCK);
    }
    errno = lock_patiently(run->spool_lock);
    if (errno == EACCES || errno == EAGAIN) {
        return attn__fail(ATTN_EIO,
                          "the spool %s is in use by another process; wait for it or use another folder",
                          run->plan->spool);
    }
    return errno == 0 ? ATTN_OK : io_error(run, "cannot lock", LOCK);
}

/* Names the first line in which two manifests differ. */
static attn_status refuse(const attn_plan *plan, const char *theirs)
{
    const char *ours = plan->manifest;
    size_t line = 0;
    for (size_t i = 0; ours[i] == theirs[i] && ours[i] != '\0'; i++) {
        line = ours[i] == '\n' ? i + 1 : line;
    }
    int have = (int)strcspn(theirs + line, "\n"), want = (int)strcspn(ours + line, "\n");
    return attn__fail(
        ATTN_EMISMATCH,
        "the spool %s belongs to another problem: it has \"%.*s\", this run is \"%.*s\"; use another "
        "folder or remove that one",
        plan->spool, have < 200 ? have : 200, theirs + line, want < 200 ? want : 200, ours + line);
}

static attn_status check_manifest(attn__run *run)
{
    const attn_plan *plan = run->plan;
    size_t length = strlen(plan->manifest);
    int file = openat(run->spool_folder, MANIFEST, O_RDONLY | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) {
        const void *part = plan->manifest;
        return write_file(run, MANIFEST, &part, &length, 1);
    }
    if (file < 0) {
        return io_error(run, "cannot read", MANIFEST);
    }
    char theirs[8192]; /* a longer manifest is compared by its beginning and its length */
    struct stat info;
    ssize_t got = fstat(file, &info) == 0 ? pread(file, theirs, sizeof theirs - 1, 0) : -1;
    attn_status status = got < 0 ? io_error(run, "cannot read", MANIFEST) : ATTN_OK;
    close(file);
    ATTN__TRY(status);
    theirs[got] = '\0';
    bool same = (size_t)info.st_size == length && memcmp(theirs, plan->manifest, (size_t)got) == 0;
    return same ? ATTN_OK : refuse(plan, theirs);
}

/* Tells early that the disk will not hold all pieces. */
static attn_status check_room(attn__run *run)
{
    const attn_plan *plan = run->plan;
    struct statvfs disk;
    char text[512];
    if (fstatvfs(run->spool_folder, &disk) != 0) {
        return ATTN_OK;
    }
    double room = (double)disk.f_bavail * (double)disk.f_frsize;
    double need = (double)plan->set_q_size * (double)plan->problem.tokens_q *
                  (double)attn__problem_bytes(&plan->problem).o;
    if (room >= need) {
        return ATTN_OK;
    }
    snprintf(text, sizeof text, "the spool %s may need %.0f MB, and its disk has %.0f MB left", plan->spool,
             need / 1e6, room / 1e6);
    return attn__run_event(
        run,
        (attn_event){.step = ATTN_STEP_RESUME, .rank = -1, .group = -1, .begin = attn__now(), .text = text});
}

attn_status attn__spool_open(attn__run *run)
{
    const char *spool = run->plan->spool;
    run->spool_folder = run->spool_lock = -1;
    if (mkdir(spool, 0777) != 0 && errno != EEXIST) {
        return attn__fail(ATTN_EIO, "cannot make the spool folder %s: %s", spool, strerror(errno));
    }
    run->spool_folder = open(spool, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (run->spool_folder < 0) {
        return attn__fail(ATTN_EIO, "cannot open the spool folder %s: %s", spool, strerror(errno));
    }
    ATTN__TRY(lock_folder(run));
    ATTN__TRY(check_manifest(run));
    return check_room(run);
}

void attn__spool_close(attn__run *run)
{
    if (run->spool_lock >= 0) {
        close(run->spool_lock);
    }
    if (run->spool_folder >= 0) {
        close(run->spool_folder);
    }
    run->spool_lock = run->spool_folder = -1;
}

/* ---- pieces ---- */

static void piece_name(char *name, int64_t rank, int64_t group)
{
    snprintf(name, NAME_MAX_LENGTH, "rank%lld-group%lld.piece", (long long)rank, (long long)group);
}

static uint64_t hash_chunks(uint64_t hash, const void *data, size_t bytes)
{
    const char *at = data;
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t take = bytes - done < CHUNK ? bytes - done : CHUNK;
        hash = attn__hash(hash, at + done, take);
    }
    return hash;
}

static piece_head head_of(const attn_plan *plan, int64_t rank, int64_t group)
{
    piece_head head = {
        .fingerprint = plan->fingerprint,
        .rank = rank,
        .group = group,
        .first = attn__group_first(plan->problem.tokens_q, plan->layout.workers, group),
        .count = attn__group_count(plan->problem.tokens_q, plan->layout.workers, group),
        .planes = plan->problem.batch * plan->problem.heads_q,
        .dim = plan->problem.dim_v,
    };
    memcpy(head.magic, piece_magic, sizeof head.magic);
    return head;
}

static uint64_t head_hash(const piece_head *head)
{
    return attn__hash(0, head, offsetof(piece_head, head));
}

attn_status attn__spool_write(attn__run *run, const attn_partial *partial)
{
    char name[NAME_MAX_LENGTH];
    piece_head head = head_of(run->plan, partial->rank, partial->group);
    size_t rows = (size_t)(head.planes * head.count);
    const void *parts[] = {&head, partial->lse, partial->o};
    size_t bytes[] = {sizeof head, rows * sizeof(float), rows * (size_t)head.dim * sizeof(float)};
    head.payload = hash_chunks(hash_chunks(0, parts[1], bytes[1]), parts[2], bytes[2]);
    head.head = head_hash(&head);
    piece_name(name, partial->rank, partial->group);
    return write_file(run, name, parts, bytes, 3);
}

/* The checksum of `bytes` bytes from `offset` on, by the same chunks as hash_chunks(). */
static bool hash_file(int file, off_t offset, size_t bytes, uint64_t *hash)
{
    char chunk[CHUNK];
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t take = bytes - done < CHUNK ? bytes - done : CHUNK;
        if (!read_all(file, chunk, take, offset + (off_t)done)) {
            return false;
        }
        *hash = attn__hash(*hash, chunk, take);
    }
    return true;
}

/* NULL if the piece is whole and ours, or what is wrong with it. */
static const char *judge(int file, const piece_head *want)
{
    piece_head head;
    struct stat info;
    size_t rows = (size_t)(want->planes * want->count);
    size_t lse = rows * sizeof(float), o = lse * (size_t)want->dim;
    if (fstat(file, &info) != 0 || (size_t)info.st_size != sizeof head + lse + o) {
        return "has the wrong length";
    }
    if (!read_all(file, &head, sizeof head, 0) || head.head != head_hash(&head)) {
        return "has a damaged head";
    }
    if (memcmp(&head, want, offsetof(piece_head, payload)) != 0) {
        return "belongs to another problem";
    }
    uint64_t hash = 0;
    if (!hash_file(file, sizeof head, lse, &hash) || !hash_file(file, (off_t)(sizeof head + lse), o, &hash)) {
        return "cannot be read";
    }
    return hash == head.payload ? NULL : "is damaged";
}

attn_status attn__spool_find(attn__run *run, int64_t rank, int64_t group, bool *found)
{
    char name[NAME_MAX_LENGTH], text[512];
    piece_head want = head_of(run->plan, rank, group);
    *found = false;
    piece_name(name, rank, group);
    int file = openat(run->spool_folder, name, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return errno == ENOENT ? ATTN_OK : io_error(run, "cannot read", name);
    }
    const char *wrong = judge(file, &want);
    close(file);
    *found = wrong == NULL;
    if (*found) {
        return ATTN_OK;
    }
    snprintf(text, sizeof text, "%s/%s %s: it is computed again", run->plan->spool, name, wrong);
    return attn__run_event(
        run, (attn_event){
                 .step = ATTN_STEP_RESUME, .rank = rank, .group = group, .begin = attn__now(), .text = text});
}

attn_status attn__spool_read(attn__run *run, int64_t rank, int64_t group, int64_t plane, int64_t row,
                             int64_t count, float *o, float *lse)
{
    char name[NAME_MAX_LENGTH];
    piece_head head = head_of(run->plan, rank, group);
    piece_name(name, rank, group);
    int file = openat(run->spool_folder, name, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return io_error(run, "cannot read", name);
    }
    int64_t at = plane * head.count + row, rows = head.planes * head.count;
    off_t lse_at = (off_t)sizeof head + (off_t)(at * (int64_t)sizeof(float));
    off_t o_at = (off_t)sizeof head + (off_t)((rows + at * head.dim) * (int64_t)sizeof(float));
    bool done = read_all(file, lse, (size_t)count * sizeof *lse, lse_at) &&
                read_all(file, o, (size_t)(count * head.dim) * sizeof *o, o_at);
    attn_status status = ATTN_OK;
    if (!done) {
        status =
            errno != 0
                ? io_error(run, "cannot read", name)
                : attn__fail(ATTN_EIO, "%s/%s became shorter while it was in use; run the same command again",
                             run->plan->spool, name);
    }
    close(file);
    return status;
}

/* ---- removal ---- */

attn_status attn_spool_remove(const attn_plan *plan)
{
    if (plan == NULL || !plan->spooled) {
        return attn__fail(ATTN_EINVAL, "the plan has no spool");
    }
    int folder = open(plan->spool, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) {
        return errno == ENOENT ? ATTN_OK
                               : attn__fail(ATTN_EIO, "cannot open the spool folder %s: %s", plan->spool,
                                            strerror(errno));
    }
    for (int64_t rank = 0; rank < plan->layout.workers; rank++) {
        for (int64_t a = 0; a < plan->set_q_size; a++) {
            char name[NAME_MAX_LENGTH], temporary[NAME_MAX_LENGTH + 8];
            piece_name(name, rank, attn__mod(rank + attn__plan_set_q(plan)[a], plan->layout.workers));
            snprintf(temporary, sizeof temporary, "%s.tmp", name);
            unlinkat(folder, name, 0);
            unlinkat(folder, temporary, 0);
        }
    }
    unlinkat(folder, MANIFEST, 0);
    unlinkat(folder, LOCK, 0);
    close(folder);
    if (rmdir(plan->spool) != 0 && errno != ENOTEMPTY && errno != EEXIST) {
        return attn__fail(ATTN_EIO, "cannot remove the spool folder %s: %s", plan->spool, strerror(errno));
    }
    return ATTN_OK;
}
