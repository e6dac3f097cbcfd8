/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_spool.c - partials on disk: the same bits with a spool and without, stopped and resumed, damaged and
 * mended; a foreign or busy spool is refused; nothing is left behind.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "engine_case.h"

static char folder[64];

typedef struct seen {
    int left; /* events until the stop; -1: never */
    int resumed, computed, warned;
} seen;

static int watch(void *data, const attn_event *event)
{
    seen *s = data;
    s->resumed += event->step == ATTN_STEP_RESUME && event->text == NULL;
    s->computed += event->step == ATTN_STEP_COMPUTE;
    s->warned += event->text != NULL;
    return s->left >= 0 && s->left-- == 0;
}

static attn_options with_spool(seen *s)
{
    *s = (seen){.left = -1};
    return (attn_options){.size = sizeof(attn_options),
                          .workers = 7,
                          .threads = 2,
                          .spool = folder,
                          .spool_key = "case",
                          .event = watch,
                          .event_data = s};
}

static void remove_spool(const engine_case *c, const attn_options *o)
{
    attn_plan *plan;
    assert_int_equal(attn_plan_create(&plan, &c->problem, o), ATTN_OK);
    assert_int_equal(attn_spool_remove(plan), ATTN_OK);
    attn_plan_destroy(plan);
    assert_int_equal(access(folder, F_OK), -1);
}

/* The bits that the case has without a spool. */
static float *plain_bits(engine_case *c, size_t *bytes)
{
    attn_options o = {.size = sizeof o, .workers = 7};
    assert_int_equal(case_run(c, &o, 1), ATTN_OK);
    case_compare(c, "without a spool");
    *bytes = (size_t)(case_rows(c) * c->problem.dim_v) * sizeof(float);
    float *bits = malloc(*bytes);
    assert_non_null(bits);
    memcpy(bits, c->o, *bytes);
    return bits;
}

static void open_case(engine_case *c)
{
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, "batch=2,heads=2,tokens=45,dim=8,causal"), ATTN_OK);
    case_open(c, &p, 11);
}

static void test_stopped_anywhere_and_resumed(void **state)
{
    (void)state;
    engine_case c;
    size_t bytes;
    seen s;
    open_case(&c);
    float *bits = plain_bits(&c, &bytes);
    int resumed = 0;
    for (int stop = 0;; stop++) {
        attn_options o = with_spool(&s);
        s.left = stop;
        attn_status status = case_run(&c, &o, 1);
        if (status == ATTN_OK) {
            assert_true(stop > 40);
            remove_spool(&c, &o);
            break;
        }
        assert_int_equal(status, ATTN_ECANCELED);
        o = with_spool(&s);
        o.resident = 1 + stop % 3;
        assert_int_equal(case_run(&c, &o, stop % 2), ATTN_OK);
        assert_memory_equal(c.o, bits, bytes);
        resumed += s.resumed;
        remove_spool(&c, &o);
    }
    assert_true(resumed > 100);
    free(bits);
    case_close(&c);
}

/* Does something to each piece in turn; the run tells it and mends it. */
static void test_damaged_pieces(void **state)
{
    (void)state;
    engine_case c;
    size_t bytes;
    seen s;
    open_case(&c);
    float *bits = plain_bits(&c, &bytes);
    attn_options o = with_spool(&s);
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    int pieces = 0;
    for (int round = 0; round < 200; round++) {
        char name[128];
        snprintf(name, sizeof name, "%s/rank%d-group%d.piece", folder, round % 7, round / 7 % 7);
        int file = open(name, O_RDWR);
        if (file < 0) {
            continue;
        }
        struct stat info;
        pieces++;
        assert_int_equal(fstat(file, &info), 0);
        off_t at = (off_t)(round * 7919) % info.st_size;
        unsigned char byte;
        if (round % 3 == 0) {
            assert_int_equal(ftruncate(file, at), 0);
        } else {
            assert_int_equal(pread(file, &byte, 1, at), 1);
            byte ^= (unsigned char)(1 << round % 8);
            assert_int_equal(pwrite(file, &byte, 1, at), 1);
        }
        close(file);
        o = with_spool(&s);
        assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
        assert_int_equal(s.warned, 1);
        assert_int_equal(s.computed, 1);
        assert_memory_equal(c.o, bits, bytes);
    }
    assert_true(pieces > 50);
    /* One piece in another's place. */
    char a[128], b[128];
    snprintf(a, sizeof a, "%s/rank1-group1.piece", folder);
    snprintf(b, sizeof b, "%s/rank2-group2.piece", folder);
    assert_int_equal(rename(a, b), 0);
    o = with_spool(&s);
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    assert_int_equal(s.warned, 1);
    assert_memory_equal(c.o, bits, bytes);
    remove_spool(&c, &o);
    free(bits);
    case_close(&c);
}

static void test_foreign_spool_is_refused(void **state)
{
    (void)state;
    engine_case c;
    seen s;
    open_case(&c);
    attn_options o = with_spool(&s), other;
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    assert_int_equal(case_run(&c, (other = o, other.spool_key = "other data", &other), 1), ATTN_EMISMATCH);
    assert_non_null(strstr(attn_last_error(), "other data"));
    assert_int_equal(case_run(&c, (other = o, other.workers = 6, &other), 1), ATTN_EMISMATCH);
    assert_non_null(strstr(attn_last_error(), "workers 7"));
    assert_int_equal(case_run(&c, (other = o, other.kernel = "reference", &other), 1), ATTN_EMISMATCH);
    attn_problem p = c.problem;
    c.problem.scale *= 2;
    assert_int_equal(case_run(&c, &o, 1), ATTN_EMISMATCH);
    c.problem = p;
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    remove_spool(&c, &o);
    case_close(&c);
}

static int hold_lock(void *data, const attn_event *event)
{
    int *pipe_end = data;
    char byte;
    (void)event;
    return write(pipe_end[1], "x", 1) != 1 || read(pipe_end[2], &byte, 1) != 1;
}

static void test_busy_spool_is_refused(void **state)
{
    (void)state;
    engine_case c;
    seen s;
    int to_parent[2], to_child[2];
    char byte;
    open_case(&c);
    attn_options o = with_spool(&s);
    assert_int_equal(pipe(to_parent) + pipe(to_child), 0);
    pid_t child = fork();
    if (child == 0) { /* one thread: OpenMP's pool does not survive a fork */
        close(to_child[1]);
        o.threads = 1;
        int ends[3] = {0, to_parent[1], to_child[0]};
        o.event = hold_lock;
        o.event_data = ends;
        _exit(case_run(&c, &o, 1) == ATTN_ECANCELED ? 0 : 1);
    }
    close(to_parent[1]);
    close(to_child[0]);
    assert_int_equal(read(to_parent[0], &byte, 1), 1);
    assert_int_equal(case_run(&c, &o, 1), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "in use"));
    close(to_child[1]); /* the child's read ends, it cancels */
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    close(to_parent[0]);
    assert_int_equal(case_run(&c, &o, 1), ATTN_OK);
    remove_spool(&c, &o);
    case_close(&c);
}

static void test_folder_cannot_be_made(void **state)
{
    (void)state;
    engine_case c;
    seen s;
    open_case(&c);
    attn_options o = with_spool(&s);
    o.spool = "/no/such/folder";
    assert_int_equal(case_run(&c, &o, 1), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "/no/such/folder"));
    o.spool = "/dev/null";
    assert_int_equal(case_run(&c, &o, 1), ATTN_EIO);
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stopped_anywhere_and_resumed), cmocka_unit_test(test_damaged_pieces),
        cmocka_unit_test(test_foreign_spool_is_refused),     cmocka_unit_test(test_busy_spool_is_refused),
        cmocka_unit_test(test_folder_cannot_be_made),
    };
    snprintf(folder, sizeof folder, "/tmp/attn-test-spool-%ld", (long)getpid());
    return cmocka_run_group_tests_name("spool", tests, NULL, NULL);
}
