/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.c - where data goes: stdout, or a file that appears only when it is complete.
 *
 * A file is written under a temporary name in the folder where it will stand, synced, and renamed: a reader
 * never sees half of it, and an older file of that name stays if anything fails.  The temporary file goes
 * away on exit and on SIGINT, SIGTERM and SIGHUP.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

/* ---- the unfinished file ---------------------------------------------------------------------------- */

/* The one piece of global state: exit and signal handlers have no other way to know. */
static char *volatile unfinished;

static void remove_unfinished(void)
{
    char *path = unfinished;
    unfinished = NULL;
    if (path != NULL) {
        unlink(path);
    }
}

static void on_signal(int number)
{
    remove_unfinished();
    _exit(128 + number);
}

static const int watched[] = {SIGINT, SIGTERM, SIGHUP};
enum { WATCHED = sizeof(watched) / sizeof(watched[0]) };

/* A verb's own handler (run stops cleanly) is left in place. */
static void watch_signals(void)
{
    for (int i = 0; i < WATCHED; i++) {
        struct sigaction old;
        if (sigaction(watched[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL) {
            struct sigaction action;
            memset(&action, 0, sizeof(action));
            action.sa_handler = on_signal;
            sigemptyset(&action.sa_mask);
            sigaction(watched[i], &action, NULL);
        }
    }
}

/* Signals wait until `before` is the mask again: the name of a file and what is known of it change together.
 */
static void hold_signals(sigset_t *before)
{
    sigset_t held;
    sigemptyset(&held);
    for (int i = 0; i < WATCHED; i++) {
        sigaddset(&held, watched[i]);
    }
    pthread_sigmask(SIG_BLOCK, &held, before);
}

static void watch(char *temporary)
{
    static bool registered;
    if (!registered) {
        registered = atexit(remove_unfinished) == 0;
        watch_signals();
    }
    unfinished = temporary;
}

/* ---- files ------------------------------------------------------------------------------------------ */

/* mkstemp() gives mode 0600; a new file has what the umask leaves. */
static void usual_mode(int descriptor)
{
    mode_t mask = umask(0);
    umask(mask);
    (void)fchmod(descriptor, 0666 & ~mask);
}

FILE *cli_file_open(const char *path, char **temporary)
{
    size_t size = strlen(path) + sizeof(".XXXXXX");
    char *name = cli_alloc((int64_t)size, 1);
    snprintf(name, size, "%s.XXXXXX", path);
    sigset_t before;
    hold_signals(&before);
    int descriptor = mkstemp(name);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    if (file == NULL) {
        cli_error(CLI_IO, "cannot write %s: %s", path, strerror(errno));
        if (descriptor >= 0) {
            close(descriptor);
            unlink(name);
        }
        free(name);
    } else {
        usual_mode(descriptor);
        watch(name);
        *temporary = name;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return file;
}

int cli_file_close(FILE *file, const char *path, char *temporary, bool keep)
{
    int code = CLI_OK;
    if (keep && (fflush(file) != 0 || ferror(file) || fsync(fileno(file)) != 0)) {
        code = cli_error(CLI_IO, "cannot write %s: %s", path, strerror(errno));
        keep = false;
    }
    if (fclose(file) != 0 && keep) {
        code = cli_error(CLI_IO, "cannot write %s: %s", path, strerror(errno));
        keep = false;
    }
    if (keep && rename(temporary, path) != 0) {
        code = cli_error(CLI_IO, "cannot rename %s to %s: %s", temporary, path, strerror(errno));
        keep = false;
    }
    if (!keep) {
        unlink(temporary);
    }
    if (unfinished == temporary) {
        unfinished = NULL;
    }
    free(temporary);
    return code;
}

/* ---- a verb's output -------------------------------------------------------------------------------- */

int cli_out_open(cli_out *out, const cli_common *common)
{
    memset(out, 0, sizeof(*out));
    out->format = (cli_format)common->format;
    out->path = common->output;
    out->file = stdout;
    if (out->path != NULL) {
        out->file = cli_file_open(out->path, &out->temporary);
        if (out->file == NULL) {
            return CLI_IO;
        }
    }
    cli_json_begin(&out->json, out->file, out->format == CLI_FORMAT_JSONL);
    return CLI_OK;
}

int cli_out_close(cli_out *out, int code)
{
    if (out->path != NULL) {
        int closed = cli_file_close(out->file, out->path, out->temporary, code <= CLI_WRONG);
        return closed != CLI_OK ? closed : code;
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        clearerr(stdout);
        return cli_error(CLI_IO, "cannot write to the standard output: %s", strerror(errno));
    }
    return code;
}
