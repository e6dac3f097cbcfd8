/* SPDX-License-Identifier: Apache-2.0 */
/*
 * measure.c - a case in a child process whose result comes back through a pipe; statistics; words.
 */
#include "measure.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/* ---- rows ---- */

const char *cli_row_word(cli_row_status status)
{
    static const char *const words[] = {
        [CLI_ROW_OK] = "ok",           [CLI_ROW_WRONG] = "WRONG",   [CLI_ROW_OOM] = "OOM",
        [CLI_ROW_REFUSED] = "refused", [CLI_ROW_FAILED] = "failed", [CLI_ROW_PLANNED] = "planned"};
    return words[status];
}

cli_row_status cli_row_status_of(attn_status status)
{
    switch (status) {
    case ATTN_ELIMIT:
    case ATTN_ENOMEM:
        return CLI_ROW_OOM;
    case ATTN_EINVAL:
    case ATTN_EUNSUPPORTED:
        return CLI_ROW_REFUSED;
    default:
        return CLI_ROW_FAILED;
    }
}

bool cli_row_measured(cli_row_status status)
{
    return status == CLI_ROW_OK || status == CLI_ROW_WRONG;
}

bool cli_word_at(const char *list, int index, char *word, size_t room)
{
    for (; index > 0 && list != NULL; index--) {
        list = strchr(list, ',');
        list = list != NULL ? list + 1 : NULL;
    }
    if (list == NULL) {
        return false;
    }
    snprintf(word, room, "%.*s", (int)strcspn(list, ","), list);
    return true;
}

/* ---- statistics ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

cli_spread cli_spread_of(double *values, int64_t count)
{
    double sum = 0, squares = 0, n = (double)count;
    qsort(values, (size_t)count, sizeof *values, by_value);
    for (int64_t i = 0; i < count; i++) {
        sum += values[i];
    }
    for (int64_t i = 0; i < count; i++) {
        double off = values[i] - sum / n;
        squares += off * off;
    }
    return (cli_spread){
        .mean = sum / n,
        .std = count > 1 ? sqrt(squares / (n - 1)) : 0,
        .median = (values[(count - 1) / 2] + values[count / 2]) / 2,
        .min = values[0],
        .max = values[count - 1],
    };
}

/* ---- the child ---- */

static bool write_all(int fd, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t put = write(fd, at, bytes);
        if (put < 0 && errno != EINTR) {
            return false;
        }
        at += put > 0 ? put : 0;
        bytes -= put > 0 ? (size_t)put : 0;
    }
    return true;
}

static bool read_all(int fd, void *data, size_t bytes)
{
    char *at = data;
    while (bytes > 0) {
        ssize_t got = read(fd, at, bytes);
        if (got == 0 || (got < 0 && errno != EINTR)) {
            return false;
        }
        at += got > 0 ? got : 0;
        bytes -= got > 0 ? (size_t)got : 0;
    }
    return true;
}

/* The child said nothing: killed for its memory, or ended by something else. */
static cli_row_status explain_death(int status, char *text, size_t size)
{
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (killed) {
        snprintf(text, size, "killed, most likely for its memory");
    } else if (WIFSIGNALED(status)) {
        snprintf(text, size, "ended by signal %d", WTERMSIG(status));
    } else {
        snprintf(text, size, "ended with exit code %d", WEXITSTATUS(status));
    }
    return killed ? CLI_ROW_OOM : CLI_ROW_FAILED;
}

/* In a child: it is killed when its parent ends, whatever ended that.  A case that nobody waits for would go
 * on computing beside whatever is measured next. */
static void end_with(pid_t parent)
{
#ifdef __linux__
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != parent) { /* which ended before it was asked for */
        _exit(1);
    }
}

cli_row_status cli_child_run(cli_child_fn work, const void *data, void *result, size_t bytes, char *text,
                             size_t size)
{
    int ends[2], ended = 0;
    cli_row_status status = CLI_ROW_FAILED;
    pid_t child = -1;
    const pid_t parent = getpid();
    /* A child must hold nothing that would be printed twice if its end flushes; ferror keeps an error. */
    (void)fflush(NULL);
    if (pipe(ends) == 0) {
        child = fork();
        if (child == 0) {
            end_with(parent);
            (void)close(ends[0]);
            memset(result, 0, bytes);
            work(data, result);
            _exit(write_all(ends[1], result, bytes) ? 0 : 1);
        }
        (void)close(ends[1]);
        if (child < 0) {
            (void)close(ends[0]);
        }
    }
    if (child < 0) {
        snprintf(text, size, "cannot start a process");
        return status;
    }
    bool told = read_all(ends[0], result, bytes);
    while (waitpid(child, &ended, 0) < 0 && errno == EINTR) {
    }
    (void)close(ends[0]);
    if (!told) {
        memset(result, 0, bytes);
        return explain_death(ended, text, size);
    }
    memcpy(&status, result, sizeof status);
    return status;
}
