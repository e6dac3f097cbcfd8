/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bytes.c - positioned reads, files that appear only when complete, and element types.
 *
 * A file under construction is ".NAME.part" beside its target: a fixed name, so that a killed run leaves at
 * most one of them and the next run takes it over; a lock on it keeps two runs apart.  The lock is taken on
 * an open file while another process may rename that very file away, hence the check afterwards that the name
 * still means the file that was locked.
 */
#define _XOPEN_SOURCE 700 /* realpath */

#include "bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

attn_status cli_refuse(attn_status status, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return attn_fail(status, text);
}

/* ---- element types ---- */

size_t cli_dtype_size(cli_dtype dtype)
{
    return dtype == CLI_F64 ? 8 : attn_dtype_size((attn_dtype)dtype);
}

const char *cli_dtype_name(cli_dtype dtype)
{
    return dtype == CLI_F64 ? "f64" : attn_dtype_name((attn_dtype)dtype);
}

bool cli_array_measure(cli_array *array)
{
    int64_t room = INT64_MAX / (int64_t)cli_dtype_size(array->dtype);
    array->count = 1;
    for (int i = 0; i < array->rank; i++) {
        if (array->shape[i] < 0 || (array->shape[i] > 0 && array->count > room / array->shape[i])) {
            return false;
        }
        array->count *= array->shape[i];
    }
    return true;
}

const char *cli_array_shape(const cli_array *array, char text[CLI_SHAPE_TEXT])
{
    int at = snprintf(text, CLI_SHAPE_TEXT, "[");
    for (int i = 0; i < array->rank; i++) {
        at += snprintf(text + at, (size_t)(CLI_SHAPE_TEXT - at), "%s%lld", i > 0 ? ", " : "",
                       (long long)array->shape[i]);
    }
    snprintf(text + at, (size_t)(CLI_SHAPE_TEXT - at), "]");
    return text;
}

void cli_to_f32(float *dst, const void *src, cli_dtype dtype, int64_t count)
{
    if (dtype != CLI_F64) {
        attn_to_f32(dst, src, (attn_dtype)dtype, 1, count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        dst[i] = (float)((const double *)src)[i];
    }
}

void cli_from_f32(void *dst, cli_dtype dtype, const float *src, int64_t count)
{
    if (dtype != CLI_F64) {
        attn_from_f32(dst, (attn_dtype)dtype, 1, src, count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        ((double *)dst)[i] = (double)src[i];
    }
}

/* A multiply and a shift for every 8 bytes; the length of each piece is mixed in last. */
uint64_t cli_hash(uint64_t hash, const void *data, size_t bytes)
{
    const uint64_t odd = 0x9e3779b97f4a7c15u; /* 2^64 / golden ratio */
    const char *at = data;
    for (size_t left = bytes; left > 0;) {
        uint64_t word = 0;
        size_t take = left < sizeof word ? left : sizeof word;
        memcpy(&word, at, take);
        hash = (hash ^ word) * odd;
        hash ^= hash >> 32;
        at += take;
        left -= take;
    }
    hash = (hash ^ bytes) * odd;
    return hash ^ hash >> 29;
}

/* ---- reading ---- */

attn_status cli_reader_open(cli_reader *reader, const char *path)
{
    struct stat about;
    *reader = (cli_reader){.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), .path = path};
    if (reader->fd < 0 || fstat(reader->fd, &about) != 0) {
        attn_status status = cli_refuse(ATTN_EIO, "cannot open %s: %s", path, strerror(errno));
        cli_reader_close(reader);
        return status;
    }
    if (!S_ISREG(about.st_mode)) {
        cli_reader_close(reader);
        return cli_refuse(ATTN_EIO, "%s is not a regular file; arrays are read by position", path);
    }
    reader->size = (int64_t)about.st_size;
    return ATTN_OK;
}

attn_status cli_reader_read(const cli_reader *reader, void *dst, size_t bytes, int64_t offset)
{
    char *at = dst;
    while (bytes > 0) {
        ssize_t got = pread(reader->fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return cli_refuse(ATTN_EIO, "cannot read %s: %s", reader->path, strerror(errno));
        }
        if (got == 0) {
            return cli_refuse(ATTN_EIO, "%s ends at byte %lld, in the middle of its data", reader->path,
                              (long long)offset);
        }
        at += got;
        bytes -= (size_t)got;
        offset += got;
    }
    return ATTN_OK;
}

void cli_reader_close(cli_reader *reader)
{
    if (reader->fd >= 0) {
        (void)close(reader->fd);
        reader->fd = -1;
    }
}

char *cli_real_path(const char *path)
{
    return realpath(path, NULL);
}

/* ---- writing ---- */

/* The real name behind `path`: a link is followed, so that its target is replaced and not the link. */
static attn_status real_name(const char *path, char **name)
{
    struct stat about;
    *name = NULL;
    if (path[0] == '\0' || path[strlen(path) - 1] == '/') {
        return cli_refuse(ATTN_EIO, "cannot write \"%s\": it names no file", path);
    }
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode)) {
        return cli_refuse(ATTN_EIO, "cannot write %s: it is not a regular file", path);
    }
    *name = lstat(path, &about) == 0 && S_ISLNK(about.st_mode) ? realpath(path, NULL) : strdup(path);
    if (*name == NULL) {
        return cli_refuse(ATTN_EIO, "cannot write %s: %s", path, strerror(errno));
    }
    return ATTN_OK;
}

static char *part_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    int folder = slash == NULL ? 0 : (int)(slash - path) + 1;
    size_t room = strlen(path) + sizeof "..part";
    char *name = malloc(room);
    if (name != NULL) {
        snprintf(name, room, "%.*s.%s.part", folder, path, path + folder);
    }
    return name;
}

/* Whether `path` still names the file behind fd. */
static bool still_named(int fd, const char *path)
{
    struct stat file, name;
    return fstat(fd, &file) == 0 && stat(path, &name) == 0 && file.st_ino == name.st_ino &&
           file.st_dev == name.st_dev;
}

/* A process that was just killed keeps its locks until it is gone, which a write to a slow disk delays: a
 * lock is waited for, 100 times 50 ms. */
static attn_status lock_part(cli_writer *writer)
{
    const struct timespec pause = {.tv_nsec = 50000000};
    for (int tries = 1;; tries++) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        writer->fd = open(writer->temporary, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (writer->fd < 0) {
            return cli_refuse(ATTN_EIO, "cannot write %s: %s", writer->path, strerror(errno));
        }
        bool busy = fcntl(writer->fd, F_SETLK, &lock) != 0 && (errno == EACCES || errno == EAGAIN);
        if (busy && tries >= 100) {
            return cli_refuse(ATTN_EIO, "cannot write %s: another process is writing it", writer->path);
        }
        if (!busy && still_named(writer->fd, writer->temporary)) {
            return ATTN_OK;
        }
        (void)close(writer->fd);
        if (busy) {
            nanosleep(&pause, NULL);
        }
    }
}

/* What to do about a disk that takes no more. */
static const char *full(int error)
{
    return error == ENOSPC || error == EDQUOT || error == EFBIG ? "; free some space or write elsewhere" : "";
}

static attn_status reserve(cli_writer *writer, int64_t size)
{
    int error = 0;
    if (ftruncate(writer->fd, 0) != 0) {
        error = errno;
    } else if (size > 0) {
        error = posix_fallocate(writer->fd, 0, (off_t)size);
    }
    if (error == 0 || error == EOPNOTSUPP || error == EINVAL) {
        return ATTN_OK; /* a file system that cannot reserve: writing will tell */
    }
    return cli_refuse(ATTN_EIO, "cannot reserve %lld bytes for %s: %s%s", (long long)size, writer->path,
                      strerror(error), full(error));
}

static void writer_free(cli_writer *writer)
{
    if (writer->fd >= 0) {
        (void)close(writer->fd);
    }
    free(writer->path);
    free(writer->temporary);
    *writer = (cli_writer)CLI_WRITER_CLOSED;
}

attn_status cli_writer_open(cli_writer *writer, const char *path, int64_t size)
{
    *writer = (cli_writer)CLI_WRITER_CLOSED;
    attn_status status = real_name(path, &writer->path);
    if (status == ATTN_OK) {
        writer->temporary = part_name(writer->path);
        status = writer->temporary != NULL ? lock_part(writer) : cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    if (status != ATTN_OK) {
        writer_free(writer); /* without removing: the part may be another process's */
        return status;
    }
    status = reserve(writer, size);
    if (status != ATTN_OK) {
        cli_writer_close(writer);
    }
    return status;
}

attn_status cli_writer_scratch(cli_writer *writer, int64_t size)
{
    const char *folder = getenv("TMPDIR");
    size_t room = strlen(folder != NULL ? folder : "/tmp") + sizeof "/attn-XXXXXX";
    *writer = (cli_writer){.fd = -1, .path = malloc(room)};
    if (writer->path == NULL) {
        return cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    snprintf(writer->path, room, "%s/attn-XXXXXX", folder != NULL ? folder : "/tmp");
    writer->fd = mkstemp(writer->path);
    if (writer->fd < 0) {
        attn_status status =
            cli_refuse(ATTN_EIO, "cannot make a scratch file %s: %s; TMPDIR names its folder", writer->path,
                       strerror(errno));
        writer_free(writer);
        return status;
    }
    (void)unlink(writer->path); /* without a name it goes away by itself */
    attn_status status = reserve(writer, size);
    if (status != ATTN_OK) {
        writer_free(writer);
    }
    return status;
}

attn_status cli_writer_write(const cli_writer *writer, const void *src, size_t bytes, int64_t offset)
{
    const char *at = src;
    while (bytes > 0) {
        ssize_t put = pwrite(writer->fd, at, bytes, (off_t)offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0) {
            return cli_refuse(ATTN_EIO, "cannot write %s: %s%s", writer->path, strerror(errno), full(errno));
        }
        at += put;
        bytes -= (size_t)put;
        offset += put;
    }
    return ATTN_OK;
}

/* A rename is safe against a crash only when the folder that holds the name is on the disk too. */
static void sync_folder(const char *path)
{
    char *folder = strdup(path);
    if (folder == NULL) {
        return;
    }
    char *slash = strrchr(folder, '/');
    if (slash != NULL) {
        slash[slash == folder ? 1 : 0] = '\0';
    }
    int fd = open(slash != NULL ? folder : ".", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd); /* some file systems cannot sync a folder; the data is safe all the same */
        (void)close(fd);
    }
    free(folder);
}

attn_status cli_writer_commit(cli_writer *writer)
{
    if (writer->temporary == NULL) {
        return ATTN_OK; /* a scratch file */
    }
    if (fsync(writer->fd) != 0 || rename(writer->temporary, writer->path) != 0) {
        return cli_refuse(ATTN_EIO, "cannot finish %s: %s", writer->path, strerror(errno));
    }
    sync_folder(writer->path);
    free(writer->temporary);
    writer->temporary = NULL;
    return ATTN_OK;
}

void cli_writer_close(cli_writer *writer)
{
    if (writer->fd >= 0 && writer->temporary != NULL) {
        (void)unlink(writer->temporary);
    }
    writer_free(writer);
}
