/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cli_file.c - a file that the program was stopped at the moment it was made does not stay.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/cli.h"

static int sent; /* the signal that comes when the file is there and nobody knows it yet; or 0 */

/* In place of libc's, for cli_file_open() too. */
int mkstemp(char *name)
{
    memcpy(name + strlen(name) - 6, "000001", 6);
    const int descriptor = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (sent != 0) {
        raise(sent);
    }
    return descriptor;
}

static int files_in(const char *folder)
{
    int count = 0;
    DIR *all = opendir(folder);
    assert_non_null(all);
    for (const struct dirent *one = readdir(all); one != NULL; one = readdir(all)) {
        count += one->d_name[0] != '.';
    }
    closedir(all);
    return count;
}

static void test_stopped_while_it_opens(void **state)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    char folder[] = "/tmp/attn-test-XXXXXX", path[64];
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/out", folder);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            char *temporary;
            sent = signals[i];
            (void)cli_file_open(path, &temporary);
            _exit(0);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 128 + signals[i]);
        assert_int_equal(files_in(folder), 0);
    }
    assert_int_equal(rmdir(folder), 0);
}

/* One that nobody stops is whole, or not there, and the next one can be stopped again. */
static void test_kept_or_not(void **state)
{
    char folder[] = "/tmp/attn-test-XXXXXX", path[64];
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/out", folder);
    for (int keep = 0; keep < 2; keep++) {
        char *temporary = NULL;
        sigset_t blocked;
        FILE *file = cli_file_open(path, &temporary);
        assert_non_null(file);
        assert_int_equal(sigprocmask(SIG_SETMASK, NULL, &blocked), 0);
        assert_false(sigismember(&blocked, SIGTERM));
        assert_true(fputs("text", file) >= 0);
        assert_int_equal(cli_file_close(file, path, temporary, keep == 1), CLI_OK);
        assert_int_equal(files_in(folder), keep);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stopped_while_it_opens),
        cmocka_unit_test(test_kept_or_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
