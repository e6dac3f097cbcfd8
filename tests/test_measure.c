/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_measure.c - what measuring stands on: statistics, cases in processes of their own, the measured peak,
 * and the verification of gradients, which must find every kind of error that it is there for.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cli/cli.h"
#include "cli/contest.h"
#include "cli/measure.h"
#include "cli/softmax.h"
#include "cli/verify_backward.h"

/* ---- statistics and words ---- */

static void test_spread(void **state)
{
    double values[] = {4, 1, 3, 2}, one[] = {7};
    (void)state;
    cli_spread s = cli_spread_of(values, 4);
    assert_true(s.mean == 2.5 && s.median == 2.5);
    assert_true(fabs(s.std - sqrt(5.0 / 3)) < 1e-12);
    assert_true(s.min == 1 && s.max == 4);
    assert_true(cli_spread_of(values, 3).median == 2); /* sorted by now */
    s = cli_spread_of(one, 1);
    assert_true(s.std == 0 && s.median == 7 && s.min == 7 && s.max == 7);
}

static void test_words(void **state)
{
    char word[8];
    (void)state;
    assert_true(cli_word_at("flash,naive", 1, word, sizeof word));
    assert_string_equal(word, "naive");
    assert_false(cli_word_at("flash,naive", 2, word, sizeof word));
    assert_false(cli_word_at(NULL, 0, word, sizeof word));
    assert_true(cli_word_at("a-very-long-word", 0, word, sizeof word));
    assert_string_equal(word, "a-very-");
}

typedef struct choices_args {
    cli_common common;
    cli_ints list;
} choices_args;

static void test_choices(void **state)
{
    static const cli_option options[] = {{.name = "pass",
                                          .kind = CLI_CHOICES,
                                          CLI_TO(choices_args, list),
                                          .argument = "forward|backward|both",
                                          .fallback = "both",
                                          .help = "x"},
                                         CLI_OPTIONS_END};
    const cli_verb verb = {.name = "test", .options = options, .size = sizeof(choices_args)};
    char *given[] = {"--pass", "both,forward", "--pass=backward", NULL}, *wrong[] = {"--pass", "both,", NULL};
    choices_args args = {0};
    (void)state;
    assert_int_equal(cli_parse(&verb, 3, given, &args), CLI_OK);
    assert_int_equal(args.list.count, 3);
    assert_true(args.list.item[0] == 2 && args.list.item[1] == 0 && args.list.item[2] == 1);
    cli_free(&verb, &args);
    memset(&args, 0, sizeof args);
    assert_int_equal(cli_parse(&verb, 0, given, &args), CLI_OK);
    assert_true(args.list.count == 1 && args.list.item[0] == 2);
    cli_free(&verb, &args);
    memset(&args, 0, sizeof args);
    assert_int_equal(cli_parse(&verb, 2, wrong, &args), CLI_USAGE);
    cli_free(&verb, &args);
}

/* ---- children ---- */

typedef struct outcome {
    cli_row_status status;
    char text[100];
    int answer;
} outcome;

static void answer(const void *data, void *result)
{
    outcome *o = result;
    o->status = CLI_ROW_WRONG;
    o->answer = *(const int *)data + 1;
}

static void die(const void *data, void *result)
{
    (void)result;
    (void)raise(*(const int *)data);
}

static void test_child(void **state)
{
    outcome o;
    int number = 41;
    (void)state;
    assert_int_equal(cli_child_run(answer, &number, &o, sizeof o, o.text, sizeof o.text), CLI_ROW_WRONG);
    assert_int_equal(o.answer, 42);
    number = SIGKILL;
    assert_int_equal(cli_child_run(die, &number, &o, sizeof o, o.text, sizeof o.text), CLI_ROW_OOM);
    assert_non_null(strstr(o.text, "memory"));
    number = SIGUSR1;
    assert_int_equal(cli_child_run(die, &number, &o, sizeof o, o.text, sizeof o.text), CLI_ROW_FAILED);
    assert_non_null(strstr(o.text, "signal"));
}

/* Says who it is, then waits.  `data` is the end of a pipe, which only this process and its parent hold. */
static void wait_for_ever(const void *data, void *result)
{
    const pid_t me = getpid();
    (void)result;
    if (write(*(const int *)data, &me, sizeof me) == (ssize_t)sizeof me) {
        for (;;) {
            (void)pause();
        }
    }
}

/* A case must not go on computing when the program that wants its result was killed. */
static void test_child_ends_with_parent(void **state)
{
    int ends[2];
    pid_t child;
    (void)state;
    assert_int_equal(pipe(ends), 0);
    pid_t parent = fork();
    if (parent == 0) {
        outcome o;
        (void)cli_child_run(wait_for_ever, &ends[1], &o, sizeof o, o.text, sizeof o.text);
        _exit(0);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &child, sizeof child), sizeof child);
    assert_int_equal(kill(parent, SIGTERM), 0);
    assert_int_equal(waitpid(parent, NULL, 0), parent);
    struct pollfd end = {.fd = ends[0], .events = POLLIN};
    const bool ended = poll(&end, 1, 20000) == 1; /* the last copy of the other end is closed */
    if (!ended) {
        (void)kill(child, SIGKILL);
    }
    close(ends[0]);
    assert_true(ended);
}

/* ---- contestants and the peak ---- */

static void compare_with_table(attn_device device)
{
    contestant list[CONTESTANTS];
    const int count = contest_all(list, device);
    attn_verdict row = ATTN_INIT(attn_verdict);
    int rows = 0;
    assert_string_equal(list[0].name, "flash");
    assert_string_equal(list[count - 1].name, "naive");
    for (int64_t i = 0; attn_kernel_verdict(NULL, i, &row) == ATTN_OK; i++) {
        if (row.device == device && strcmp(row.name, "naive") != 0) {
            assert_string_equal(list[++rows].name, row.name);
        }
    }
    assert_int_equal(count, rows + 2);
}

static void test_contestants(void **state)
{
    (void)state;
    compare_with_table(ATTN_CPU);
    compare_with_table(ATTN_CUDA);
}

static void test_peak(void **state)
{
    (void)state;
    assert_true(attn_peak_flops("nosuch", 1, 0.001) == 0);
    assert_true(attn_peak_flops("naive", 1, 0.001) == 0);
    double portable = attn_peak_flops("flash-portable", 1, 0.01), best = attn_peak_flops(NULL, 1, 0.01);
    assert_true(portable > 1e6 && portable < 1e13);
    assert_true(best > 1e6 && best < 1e13);
}

/* ---- softmax ---- */

/* Rows of every length around the lanes, with a score that is far behind. */
static void test_softmax(void **state)
{
    enum { MOST = 100 };
    uint64_t seed = 3;
    (void)state;
    for (int seen = 1; seen <= MOST; seen++) {
        float s[MOST + 1], weight[MOST], dp[MOST];
        double exact[MOST], sum = 0, delta = 0;
        for (int j = 0; j < MOST; j++) {
            s[j] = (float)(5 * check_normal(&seed));
            dp[j] = (float)check_normal(&seed);
        }
        s[seen / 2] -= seen > 1 ? 300 : 0;
        s[MOST] = 7;
        double most = -INFINITY;
        for (int j = 0; j < seen; j++) {
            most = fmax(most, (double)s[j]);
        }
        for (int j = 0; j < seen; j++) {
            exact[j] = exp((double)s[j] - most);
            sum += exact[j];
        }
        float lse = cli_softmax_row(s, seen, MOST);
        assert_true(fabs((double)lse - most - log(sum)) < 1e-6 * (fabs(most) + 1));
        for (int j = 0; j < MOST; j++) {
            assert_true(fabs((double)s[j] - (j < seen ? exact[j] / sum : 0)) < 1e-6);
            weight[j] = s[j];
            delta += (double)weight[j] * (double)dp[j];
        }
        assert_true(s[MOST] == 7);
        float before[MOST];
        memcpy(before, dp, sizeof dp);
        cli_softmax_slope(dp, weight, MOST);
        for (int j = 0; j < MOST; j++) {
            assert_true(fabs((double)dp[j] - (double)weight[j] * ((double)before[j] - delta)) < 1e-6);
        }
    }
}

/* ---- gradients ---- */

enum { TOKENS = 61, HEADS = 4, KV_HEADS = 2, DIM = 24 };

typedef struct slopes_case {
    attn_problem p;
    float q[HEADS * TOKENS * DIM], k[HEADS * TOKENS * DIM], v[HEADS * TOKENS * DIM], o[HEADS * TOKENS * DIM];
    float dout[HEADS * TOKENS * DIM], dq[HEADS * TOKENS * DIM], dk[HEADS * TOKENS * DIM];
    float dv[HEADS * TOKENS * DIM], lse[HEADS * TOKENS];
    attn_gradients io;
} slopes_case;

static slopes_case *open_slopes(attn_mask mask)
{
    slopes_case *s = calloc(1, sizeof *s);
    uint64_t seed = 7;
    assert_non_null(s);
    s->p = (attn_problem){.size = sizeof s->p,
                          .heads_q = HEADS,
                          .heads_kv = KV_HEADS,
                          .tokens_q = TOKENS,
                          .dim_qk = DIM,
                          .mask = mask};
    assert_int_equal(attn_problem_check(&s->p), ATTN_OK);
    float *const inputs[] = {s->q, s->k, s->v, s->dout};
    for (int x = 0; x < 4; x++) {
        for (int i = 0; i < HEADS * TOKENS * DIM; i++) {
            inputs[x][i] = (float)check_normal(&seed);
        }
    }
    attn_io io = {.size = sizeof io,
                  .q = {.data = s->q},
                  .k = {.data = s->k},
                  .v = {.data = s->v},
                  .o = {.data = s->o},
                  .lse = {.data = s->lse}};
    s->io = (attn_gradients){.size = sizeof s->io,
                             .q = io.q,
                             .k = io.k,
                             .v = io.v,
                             .o = io.o,
                             .lse = io.lse,
                             .dout = {.data = s->dout},
                             .dq = {.data = s->dq},
                             .dk = {.data = s->dk},
                             .dv = {.data = s->dv}};
    assert_int_equal(attn_forward(&s->p, &io, NULL), ATTN_OK);
    assert_int_equal(attn_backward(&s->p, &s->io, NULL), ATTN_OK);
    return s;
}

static cli_slopes_verdict judge(const slopes_case *s, bool anew, int64_t rows)
{
    cli_slopes slopes = {.problem = &s->p, .io = &s->io, .anew = anew, .rows = rows, .seed = 1};
    cli_slopes_verdict verdict;
    assert_int_equal(cli_slopes_run(&slopes, &verdict), ATTN_OK);
    return verdict;
}

static void test_slopes_right(void **state)
{
    (void)state;
    for (int mask = ATTN_MASK_FULL; mask <= ATTN_MASK_CAUSAL; mask++) {
        slopes_case *s = open_slopes((attn_mask)mask);
        for (int i = 0; i < 4; i++) {
            cli_slopes_verdict v = judge(s, i % 2 == 0, i < 2 ? 0 : 9);
            assert_true(v.passed && v.wrong == 0);
            assert_true(v.ratio > 0 && v.ratio < 1);
            assert_true(v.max_error > 0 && v.relative > 0 && v.relative < 1e-5);
        }
        free(s);
    }
}

/* A thousandth of the elements, as a key that was forgotten would change them. */
static void slightly_off(slopes_case *s)
{
    for (int row = 0; row < TOKENS; row++) {
        for (int d = 0; d < DIM; d++) {
            s->dq[row * DIM + d] *= 1 + 1e-3f * (float)(row % 3 - 1);
        }
    }
}

static void one_element(slopes_case *s)
{
    s->dk[DIM + 3] += 0.05f;
}

static void not_finite(slopes_case *s)
{
    s->dv[5] = NAN;
}

static void one_head_of_two(slopes_case *s)
{
    for (int i = 0; i < TOKENS * DIM; i++) {
        s->dv[i] *= 0.5f;
    }
}

static void another_scale(slopes_case *s)
{
    for (int i = 0; i < KV_HEADS * TOKENS * DIM; i++) {
        s->dk[i] *= 1.0002f;
    }
}

static void poor_lse(slopes_case *s)
{
    for (int i = 0; i < HEADS * TOKENS; i++) {
        s->lse[i] += 1e-3f;
    }
    assert_int_equal(attn_backward(&s->p, &s->io, NULL), ATTN_OK);
}

static void test_slopes_wrong(void **state)
{
    static void (*const spoil[])(slopes_case * s) = {slightly_off,    one_element,   not_finite,
                                                     one_head_of_two, another_scale, poor_lse};
    (void)state;
    for (size_t i = 0; i < sizeof spoil / sizeof spoil[0]; i++) {
        slopes_case *s = open_slopes(ATTN_MASK_FULL);
        spoil[i](s);
        cli_slopes_verdict v = judge(s, true, 0);
        assert_false(v.passed);
        assert_true(v.wrong > 0 && v.where[0] != '\0');
        free(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_child),
        cmocka_unit_test(test_child_ends_with_parent),
        cmocka_unit_test(test_contestants),
        cmocka_unit_test(test_peak),
        cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_slopes_right),
        cmocka_unit_test(test_slopes_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
