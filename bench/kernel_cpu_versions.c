/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu_versions.c - two or more builds of the library against each other, in one process, in turn.
 *
 *     kernel_cpu_versions [--pass forward|backward] [--dtype NAME] [--dim D] [--tokens N] [--heads H]
 *                         [--threads T] [--kernel NAME] [--seconds S] [--huge] [--free] OLD.so NEW.so ...
 *
 * METHOD.  A round is one call of each library on the same arrays, each the first in its turn.  What disturbs
 * the machine for longer than a round disturbs all, and falls out of the ratio of a round's times: printed
 * are quartiles of the times and of the ratios to the first library, above 1: faster.  Workspace is on small
 * pages, or --huge ones.  Results that differ from the first library's are told, with their distance.
 *
 * --free  One thread, AMX: a round counts if the core's other hyperthread sleeps before and after each call,
 * that is if 12 tile products and 8 tile loads take as long with `nop`s between them as without; beside one
 * that is awake they take 1.6 times as long without (docs/perf/cpu_amx.md, "Two hyperthreads").  Where it
 * does not sleep, the next processor is tried.
 */
#define _GNU_SOURCE /* sched_setaffinity, madvise */

#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

enum { VERSIONS = 16, ROUNDS = 4096, ARRAYS = 8, HUGE_PAGE = 2 * 1024 * 1024 };

typedef struct options {
    bool backward, huge, alone;
    const char *dtype, *kernel; /* NULL: fp32 and bf16; the library's choice */
    int64_t dim, tokens, heads; /* dim 0: 64 and 128 */
    int threads;
    double seconds; /* a case */
} options;

typedef struct version {
    const char *path;
    attn_status (*create)(attn_plan **, const attn_problem *, const attn_options *);
    void (*destroy)(attn_plan *);
    size_t (*workspace)(const attn_plan *);
    attn_status (*forward)(const attn_plan *, const attn_io *, void *);
    attn_status (*backward)(const attn_plan *, const attn_gradients *, void *);
    const char *(*error)(void);
    attn_plan *plan;
    double *times, *ratios; /* [ROUNDS] */
} version;

/* One case: q, k, v, dout, o, dq, dk and dv, the last four in fp32. */
typedef struct arrays {
    attn_problem problem;
    int64_t count;
    void *array[ARRAYS];
    float *lse, *first; /* first: the results of the first library */
    void *workspace;
    size_t bytes; /* of the workspace */
} arrays;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "kernel_cpu_versions: %s: %s\n", what, why);
    exit(1);
}

/* ---- a core alone ---- */

#if defined(__x86_64__) && defined(__GNUC__)

#include "kernel_cpu_tiles.h"

#else

static bool core_is_free(void)
{
    return true;
}

#endif

static void next_core(void)
{
    static long core;
    cpu_set_t set;
    CPU_ZERO(&set);
    core = (core + 1) % sysconf(_SC_NPROCESSORS_ONLN);
    CPU_SET((size_t)core, &set);
    (void)sched_setaffinity(0, sizeof set, &set);
}

/* ---- a case ---- */

static float next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

/* What a version computes, where that is fp32: o, or dq, dk and dv side by side. */
static float *results(const options *o, const arrays *a)
{
    return a->array[o->backward ? 5 : 4];
}

static int64_t result_count(const options *o, const arrays *a)
{
    return a->count * (o->backward ? 3 : 1);
}

static void open_arrays(arrays *a, const options *o, const attn_problem *problem)
{
    *a = (arrays){.problem = *problem,
                  .count = problem->heads_q * problem->tokens_q * problem->dim_qk,
                  .lse = attn__alloc_array(problem->heads_q * problem->tokens_q, sizeof(float))};
    float *all = attn__alloc_array(ARRAYS * a->count, sizeof(float));
    a->first = attn__alloc_array(result_count(o, a), sizeof(float));
    if (all == NULL || a->lse == NULL || a->first == NULL) {
        fail("arrays", attn_last_error());
    }
    uint64_t state = 1;
    for (int i = 0; i < ARRAYS; i++) {
        a->array[i] = all + i * a->count;
    }
    for (int i = 0; i < 4; i++) {
        float *values = a->array[7];
        for (int64_t j = 0; j < a->count; j++) {
            values[j] = 2.0f * (next_random(&state) + next_random(&state));
        }
        attn_from_f32(a->array[i], problem->dtype, 1, values, a->count);
    }
}

static void close_arrays(arrays *a)
{
    attn__free(a->array[0]), attn__free(a->lse), attn__free(a->first);
    (void)munmap(a->workspace, a->bytes);
}

static void open_plans(version *versions, int count, const options *o, arrays *a)
{
    const attn_options plain = {.size = sizeof plain,
                                .threads = o->threads,
                                .in_memory = 1,
                                .backward = o->backward,
                                .kernel = o->kernel};
    for (int i = 0; i < count; i++) {
        version *v = &versions[i];
        if (v->create(&v->plan, &a->problem, &plain) != ATTN_OK) {
            fail(v->path, v->error());
        }
        a->bytes = v->workspace(v->plan) > a->bytes ? v->workspace(v->plan) : a->bytes;
    }
    a->bytes = (a->bytes / HUGE_PAGE + 2) * HUGE_PAGE;
    a->workspace = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a->workspace == MAP_FAILED) {
        fail("workspace", "no memory");
    }
    (void)madvise(a->workspace, a->bytes, o->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

/* One call; seconds. */
static double run(const version *v, const options *o, const arrays *a)
{
    void *const *x = a->array;
    const double begin = attn__now();
    attn_status status;
    if (o->backward) {
        const attn_gradients g = {.size = sizeof g,
                                  .q.data = x[0],
                                  .k.data = x[1],
                                  .v.data = x[2],
                                  .o.data = x[4],
                                  .lse.data = a->lse,
                                  .dout.data = x[3],
                                  .dq.data = x[5],
                                  .dk.data = x[6],
                                  .dv.data = x[7]};
        status = v->backward(v->plan, &g, a->workspace);
    } else {
        const attn_io io = {.size = sizeof io,
                            .q.data = x[0],
                            .k.data = x[1],
                            .v.data = x[2],
                            .o.data = x[4],
                            .lse.data = a->lse};
        status = v->forward(v->plan, &io, a->workspace);
    }
    if (status != ATTN_OK) {
        fail(v->path, v->error());
    }
    return attn__now() - begin;
}

/* o and lse for the gradients, by the first library. */
static void make_forward(const version *v, const options *o, const arrays *a)
{
    const options plain = {.threads = o->threads};
    const attn_options forward = {.size = sizeof forward, .threads = o->threads, .in_memory = 1};
    version other = *v;
    arrays b = *a;
    if (v->create(&other.plan, &a->problem, &forward) != ATTN_OK) {
        fail(v->path, v->error());
    }
    b.workspace = attn__alloc(v->workspace(other.plan));
    if (b.workspace == NULL) {
        fail("workspace", attn_last_error());
    }
    (void)run(&other, &plain, &b);
    attn__free(b.workspace);
    v->destroy(other.plan);
}

/* The first call of each, and what its results are apart from those of the first library. */
static void compare(const version *versions, int count, const options *o, const arrays *a)
{
    const float *now = results(o, a);
    for (int i = 0; i < count; i++) {
        double apart = 0, size = 0;
        (void)run(&versions[i], o, a);
        if (i == 0) {
            memcpy(a->first, now, sizeof *now * (size_t)result_count(o, a));
        }
        for (int64_t j = 0; j < result_count(o, a); j++) {
            const double first = (double)a->first[j], difference = (double)now[j] - first;
            apart += difference * difference;
            size += first * first;
        }
        if (!(apart == 0)) {
            printf("%s differs by %.2g\n", versions[i].path, sqrt(apart / size));
        }
    }
}

/* One round to times[round]; false if the core was not free. */
static bool take_round(version *versions, int count, const options *o, const arrays *a, int turn, int round)
{
    for (int i = 0; i < count; i++) {
        version *v = &versions[(i + turn) % count];
        if (o->alone && !core_is_free()) {
            return false;
        }
        v->times[round] = run(v, o, a);
    }
    return !o->alone || core_is_free();
}

static int take_rounds(version *versions, int count, const options *o, const arrays *a, int *turns)
{
    const double end = attn__now() + o->seconds;
    int rounds = 0;
    for (*turns = 0; attn__now() < end && rounds < ROUNDS; ++*turns) {
        if (take_round(versions, count, o, a, *turns, rounds)) {
            rounds++;
        } else {
            next_core();
        }
    }
    return rounds;
}

static int order(const void *x, const void *y)
{
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static void print_quartiles(double *list, int count, double factor)
{
    qsort(list, (size_t)count, sizeof *list, order);
    for (int i = 1; i <= 3; i++) {
        printf(" %9.3f", list[i * (count - 1) / 4] * factor);
    }
}

static void print(version *versions, int count, int rounds)
{
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < count; i++) {
            versions[i].ratios[r] = versions[0].times[r] / versions[i].times[r];
        }
    }
    for (int i = 0; i < count && rounds > 0; i++) {
        printf("%-24s", versions[i].path);
        print_quartiles(versions[i].times, rounds, 1e3);
        printf("   ");
        print_quartiles(versions[i].ratios, rounds, 1.0);
        printf("\n");
    }
    fflush(stdout);
}

static void run_case(version *versions, int count, const options *o, attn_dtype dtype, int64_t dim,
                     bool causal)
{
    const attn_problem problem = {.size = sizeof problem,
                                  .heads_q = o->heads,
                                  .tokens_q = o->tokens,
                                  .dim_qk = dim,
                                  .dtype = dtype,
                                  .mask = causal ? ATTN_MASK_CAUSAL : ATTN_MASK_FULL};
    arrays a;
    int turns;
    open_arrays(&a, o, &problem);
    open_plans(versions, count, o, &a);
    if (o->backward) {
        make_forward(&versions[0], o, &a);
    }
    compare(versions, count, o, &a);
    const int rounds = take_rounds(versions, count, o, &a, &turns);
    printf("%s %s d = %lld %s, %lld heads, %d threads: %d of %d rounds; ms, ratios to the first\n",
           o->backward ? "backward" : "forward", attn_dtype_name(dtype), (long long)dim,
           causal ? "causal" : "full", (long long)o->heads, o->threads, rounds, turns);
    print(versions, count, rounds);
    for (int i = 0; i < count; i++) {
        versions[i].destroy(versions[i].plan);
    }
    close_arrays(&a);
}

/* ---- the program ---- */

/* A function of a library; dlsym gives it as an object pointer. */
static void find(void *function, void *library, const char *path, const char *name)
{
    void *address = dlsym(library, name);
    if (address == NULL) {
        fail(path, dlerror());
    }
    memcpy(function, &address, sizeof address);
}

static void open_version(version *v, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fail("dlopen", dlerror());
    }
    v->path = path;
    find(&v->create, library, path, "attn_plan_create");
    find(&v->destroy, library, path, "attn_plan_destroy");
    find(&v->workspace, library, path, "attn_plan_workspace");
    find(&v->forward, library, path, "attn_execute");
    find(&v->backward, library, path, "attn_execute_backward");
    find(&v->error, library, path, "attn_last_error");
    v->times = attn__alloc_array(ROUNDS, sizeof *v->times);
    v->ratios = attn__alloc_array(ROUNDS, sizeof *v->ratios);
    if (v->times == NULL || v->ratios == NULL) {
        fail(path, attn_last_error());
    }
}

static void refuse(const char *why, const char *word)
{
    fprintf(stderr, "kernel_cpu_versions: %s%s\n", why, word);
    exit(2);
}

/* Reads the options; returns the index of the first library's path. */
static int read_options(options *o, int count, char **words)
{
    int i = 1;
    for (; i < count && strncmp(words[i], "--", 2) == 0; i++) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : "";
        i += strcmp(word, "--huge") != 0 && strcmp(word, "--free") != 0;
        if (strcmp(word, "--huge") == 0) {
            o->huge = true;
        } else if (strcmp(word, "--free") == 0) {
            o->alone = true;
        } else if (strcmp(word, "--pass") == 0) {
            o->backward = strcmp(value, "backward") == 0;
            if (!o->backward && strcmp(value, "forward") != 0) {
                refuse("--pass forward or backward, not ", value);
            }
        } else if (strcmp(word, "--dtype") == 0) {
            o->dtype = value;
            if (strcmp(value, "f32") != 0 && strcmp(value, "f16") != 0 && strcmp(value, "bf16") != 0) {
                refuse("--dtype f32, f16 or bf16, not ", value);
            }
        } else if (strcmp(word, "--kernel") == 0) {
            o->kernel = value;
        } else if (strcmp(word, "--dim") == 0) {
            o->dim = strtoll(value, NULL, 10);
        } else if (strcmp(word, "--tokens") == 0) {
            o->tokens = strtoll(value, NULL, 10);
        } else if (strcmp(word, "--heads") == 0) {
            o->heads = strtoll(value, NULL, 10);
        } else if (strcmp(word, "--threads") == 0) {
            o->threads = (int)strtol(value, NULL, 10);
        } else if (strcmp(word, "--seconds") == 0) {
            o->seconds = strtod(value, NULL);
        } else {
            refuse("unknown option ", word);
        }
    }
    return i;
}

static bool wanted(const options *o, attn_dtype dtype)
{
    return o->dtype == NULL ? dtype != ATTN_F16 : strcmp(o->dtype, attn_dtype_name(dtype)) == 0;
}

int main(int count, char **words)
{
    options o = {.tokens = 2048, .heads = 1, .threads = 1, .seconds = 5.0};
    const int first = read_options(&o, count, words), libraries = count - first;
    if (libraries < 1 || libraries > VERSIONS) {
        refuse("name 1 to 16 libraries after the options", "");
    }
    if (o.alone && (o.threads != 1 || (attn__cpu() & ATTN__CPU_AMX) == 0)) {
        refuse("--free is for one thread and a CPU with AMX", "");
    }
    version versions[VERSIONS] = {{0}};
    for (int i = 0; i < libraries; i++) {
        open_version(&versions[i], words[first + i]);
    }
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
        for (int64_t dim = 64; dim <= 128 && wanted(&o, dtype); dim *= 2) {
            run_case(versions, libraries, &o, dtype, o.dim > 0 ? o.dim : dim, false);
            run_case(versions, libraries, &o, dtype, o.dim > 0 ? o.dim : dim, true);
            if (o.dim > 0) {
                break;
            }
        }
    }
    return 0;
}
