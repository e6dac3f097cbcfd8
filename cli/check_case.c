/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_case.c - one case of `attn check` with one kernel, through the public interface, in a child process.
 *
 * Forward and, where the kernel has gradients, backward: against the fp64 reference, and twice with different
 * numbers of threads over differently poisoned outputs.  Of each byte of an output the two runs must then say
 * the same (an element: the bits do not depend on the threads) or each its own poison (a gap between rows,
 * which is the caller's); and there must be as many gaps as the strides leave.
 */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "random.h"
#include "tensors.h"
#include "verify_backward.h"

typedef struct array {
    cli_tensor t;
    unsigned char *buffer, *before; /* before: what the first run wrote, outputs only */
    size_t bytes;
} array;

enum { Q, K, V, DOUT, INPUTS, O = INPUTS, LSE, DQ, DK, DV, ARRAYS };

typedef struct check {
    const check_case *c;
    const char *kernel;
    check_result *result;
    array a[ARRAYS];
} check;

enum { POISON = 0xff, OTHER_POISON = 0xee };

/* ---- arrays ---- */

/* Strides of a layout, the element where [0][0][0][0] lies, and how many elements there are, gaps included.
 */
static int64_t lay_out(check_layout layout, cli_tensor *t, int64_t *first)
{
    int64_t *s = t->at.stride, pad = layout == CHECK_PADDED ? 3 : 0, row = t->dim + pad;
    *first = 0;
    s[3] = 1;
    s[2] = row;
    s[1] = t->tokens * row + pad;
    if (layout == CHECK_BNHD) {
        s[1] = row;
        s[2] = t->heads * row;
    } else if (layout == CHECK_TRANSPOSED) {
        s[2] = 1;
        s[3] = t->tokens;
    } else if (layout == CHECK_REVERSED) {
        s[2] = -row;
        *first = (t->tokens - 1) * row;
    }
    s[0] = t->heads * (t->tokens * row + pad) + pad;
    return t->batch * s[0];
}

static bool open_array(check *k, int which, cli_tensor t)
{
    array *a = &k->a[which];
    int64_t first = 0, count = lay_out(k->c->layout, &t, &first);
    size_t size = attn_dtype_size(t.dtype);
    a->bytes = (size_t)count * size;
    a->buffer = malloc(a->bytes);
    a->before = which >= INPUTS ? malloc(a->bytes) : NULL;
    if (a->buffer == NULL || (which >= INPUTS && a->before == NULL)) {
        return false;
    }
    memset(a->buffer, POISON, a->bytes);
    t.at.data = a->buffer + (size_t)first * size;
    a->t = t;
    return true;
}

static bool open_arrays(check *k)
{
    const attn_problem *p = &k->c->problem;
    const attn_tensor none = {0};
    cli_tensor lse = cli_tensor_out(p, ATTN_F32, none), slope[3];
    lse.dim = 1;
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        slope[x] = cli_tensor_of(p, (attn_operand)x, none);
        slope[x].dtype = p->dtype_out;
    }
    return open_array(k, Q, cli_tensor_of(p, ATTN_Q, none)) &&
           open_array(k, K, cli_tensor_of(p, ATTN_K, none)) &&
           open_array(k, V, cli_tensor_of(p, ATTN_V, none)) &&
           open_array(k, DOUT, cli_tensor_out(p, p->dtype, none)) &&
           open_array(k, O, cli_tensor_out(p, p->dtype_out, none)) && open_array(k, LSE, lse) &&
           open_array(k, DQ, slope[ATTN_Q]) && open_array(k, DK, slope[ATTN_K]) &&
           open_array(k, DV, slope[ATTN_V]);
}

static void fill(const check *k, int which)
{
    const cli_tensor *t = &k->a[which].t;
    bool alike = k->c->kind == CHECK_EQUAL && (which == Q || which == K);
    float row[512];
    for (int64_t i = 0; i < t->batch * t->heads * t->tokens; i++) {
        uint64_t seed = which == DOUT ? ~k->c->seed : k->c->seed;
        attn_operand operand = which == DOUT ? ATTN_Q : (attn_operand)which;
        cli_random_normal(seed, operand, alike ? 0 : i * t->dim, t->dim, row);
        cli_tensor_set(t, i / t->tokens / t->heads, i / t->tokens % t->heads, i % t->tokens, row);
    }
}

/* Sets every element of one token of all heads, or with `one` a single element. */
static void put(const check *k, int which, int64_t token, float value, bool one)
{
    const cli_tensor *t = &k->a[which].t;
    float row[512];
    for (int64_t i = 0; i < t->batch * t->heads; i++) {
        cli_tensor_row(t, i / t->heads, i % t->heads, token, row);
        for (int64_t d = 0; d < (one ? 1 : t->dim); d++) {
            row[d] = value;
        }
        cli_tensor_set(t, i / t->heads, i % t->heads, token, row);
    }
}

static void fill_inputs(const check *k)
{
    const attn_problem *p = &k->c->problem;
    for (int which = Q; which < INPUTS; which++) {
        fill(k, which);
    }
    if (k->c->kind == CHECK_HUGE) { /* a score of 24^2 sqrt(d), thousands */
        put(k, Q, p->tokens_q / 2, 24, false);
        put(k, K, p->tokens_kv / 3, 24, false);
    } else if (k->c->kind == CHECK_NAN) {
        put(k, Q, p->tokens_q / 4, NAN, true);
        put(k, K, p->tokens_kv - 9, NAN, true);
        put(k, V, p->tokens_kv - 5, NAN, true);
    }
}

static attn_gradients gradients_of(const check *k)
{
    return (attn_gradients){.size = sizeof(attn_gradients),
                            .q = k->a[Q].t.at,
                            .k = k->a[K].t.at,
                            .v = k->a[V].t.at,
                            .o = k->a[O].t.at,
                            .lse = k->a[LSE].t.at,
                            .dout = k->a[DOUT].t.at,
                            .dq = k->a[DQ].t.at,
                            .dk = k->a[DK].t.at,
                            .dv = k->a[DV].t.at};
}

/* ---- running ---- */

static attn_status execute(check *k, bool backward, int threads, int poison)
{
    const check_case *c = k->c;
    attn_options options = {
        .size = sizeof options,
        .workers = backward ? 1 : c->workers,
        .resident = 2,
        .threads = threads,
        .in_memory = 1,
        .backward = backward,
        .kernel = k->kernel,
    };
    attn_io io = {.size = sizeof io,
                  .q = k->a[Q].t.at,
                  .k = k->a[K].t.at,
                  .v = k->a[V].t.at,
                  .o = k->a[O].t.at,
                  .lse = k->a[LSE].t.at};
    const attn_gradients gradients = gradients_of(k);
    attn_plan *plan = NULL;
    attn_status status = attn_plan_create(&plan, &c->problem, &options);
    if (status != ATTN_OK) {
        return status;
    }
    void *workspace = malloc(attn_plan_workspace(plan));
    if (workspace != NULL) {
        memset(workspace, POISON, attn_plan_workspace(plan));
        for (int i = backward ? DQ : O; i < (backward ? ARRAYS : DQ); i++) {
            memset(k->a[i].buffer, poison, k->a[i].bytes);
        }
        status = backward ? attn_execute_backward(plan, &gradients, workspace)
                          : attn_execute(plan, &io, workspace);
    } else {
        status = cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    free(workspace);
    attn_plan_destroy(plan);
    return status;
}

/* What two runs say of an output; NULL: as it should be. */
static const char *compare_runs(const array *a)
{
    size_t gaps = 0;
    for (size_t i = 0; i < a->bytes; i++) {
        bool gap = a->before[i] == POISON && a->buffer[i] == OTHER_POISON;
        gaps += gap;
        if (!gap && a->before[i] != a->buffer[i]) {
            return "the bits depend on the number of threads, or on what the output held before";
        }
    }
    const cli_tensor *t = &a->t;
    size_t elements = (size_t)(t->batch * t->heads * t->tokens * t->dim) * attn_dtype_size(t->dtype);
    return gaps == a->bytes - elements ? NULL : "it writes between its rows, or leaves out some";
}

/* Runs twice; the results of the second stay. */
static attn_status run_twice(check *k, bool backward)
{
    int first = backward ? DQ : O, last = backward ? DV : LSE;
    attn_status status = execute(k, backward, 1, POISON);
    for (int i = first; i <= last; i++) {
        memcpy(k->a[i].before, k->a[i].buffer, k->a[i].bytes);
    }
    if (status == ATTN_OK) {
        status = execute(k, backward, 3, OTHER_POISON);
    }
    for (int i = first; i <= last && status == ATTN_OK; i++) {
        static const char *const names[] = {[O] = "o", [LSE] = "lse", [DQ] = "dq", [DK] = "dk", [DV] = "dv"};
        const char *wrong = compare_runs(&k->a[i]);
        if (wrong != NULL) {
            k->result->status = CLI_ROW_WRONG;
            snprintf(k->result->text, sizeof k->result->text, "%s: %s", names[i], wrong);
        }
    }
    return status;
}

/* ---- comparing ---- */

static attn_status read_result(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *o, float *lse)
{
    const check *k = data;
    for (int64_t i = 0; i < count; i++) {
        cli_tensor_row(&k->a[O].t, batch, head, first + i, o + i * k->a[O].t.dim);
        cli_tensor_row(&k->a[LSE].t, batch, head, first + i, lse + i);
    }
    return ATTN_OK;
}

static attn_status forward(check *k)
{
    const check_case *c = k->c;
    check_result *r = k->result;
    cli_tensor inputs[3] = {k->a[Q].t, k->a[K].t, k->a[V].t};
    attn_source source = {.size = sizeof source, .data = inputs, .read = cli_tensors_read};
    cli_verdict verdict;
    cli_verify verify = {.problem = &c->problem,
                         .kernel = k->kernel,
                         .source = &source,
                         .out = (cli_dtype)c->problem.dtype_out,
                         .rows = c->rows,
                         .seed = c->seed,
                         .has_lse = true,
                         .read = read_result,
                         .data = k};
    attn_status status = run_twice(k, false);
    if (status != ATTN_OK) {
        return status;
    }
    status = cli_verify_run(&verify, &verdict);
    if (status == ATTN_OK) {
        r->forward = verdict.ratio;
        r->forward_error = verdict.relative;
        if (!verdict.passed) {
            r->status = CLI_ROW_WRONG;
            snprintf(r->text, sizeof r->text,
                     "forward, batch %lld, head %lld, row %lld: %.3g times what it may differ",
                     (long long)verdict.at[0], (long long)verdict.at[1], (long long)verdict.at[2],
                     verdict.ratio);
        }
    }
    return status;
}

static attn_status backward(check *k)
{
    const check_case *c = k->c;
    check_result *r = k->result;
    const attn_gradients io = gradients_of(k);
    cli_slopes slopes = {.problem = &c->problem,
                         .kernel = k->kernel,
                         .io = &io,
                         .anew = c->anew,
                         .rows = c->rows,
                         .seed = c->seed};
    cli_slopes_verdict verdict;
    attn_status status = run_twice(k, true);
    if (status == ATTN_EUNSUPPORTED) {
        return ATTN_OK; /* this kernel computes no gradients */
    }
    if (status != ATTN_OK) {
        return status;
    }
    status = cli_slopes_run(&slopes, &verdict);
    if (status == ATTN_OK) {
        r->has_backward = true;
        r->backward = verdict.ratio;
        r->backward_error = verdict.relative;
        if (!verdict.passed) {
            r->status = CLI_ROW_WRONG;
            snprintf(r->text, sizeof r->text, "backward, %s: %.3g times what it may differ", verdict.where,
                     verdict.ratio);
        }
    }
    return status;
}

/* ---- the child ---- */

/* The kernel's plans tell their own threads; what else would use OpenMP (the reference, in many short steps)
 * is faster alone, since waiting threads spin and others may want their cores. */
static void run_case(const void *data, void *result)
{
    check k = *(const check *)data;
    k.result = result;
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    attn_status status = ATTN_OK;
    if (open_arrays(&k)) {
        fill_inputs(&k);
        status = forward(&k);
        if (status == ATTN_OK) {
            status = backward(&k);
        }
    } else {
        status = cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    if (status != ATTN_OK) {
        k.result->status = cli_row_status_of(status);
        snprintf(k.result->text, sizeof k.result->text, "%s", attn_last_error());
    }
    for (int i = 0; i < ARRAYS; i++) {
        free(k.a[i].buffer);
        free(k.a[i].before);
    }
}

check_result check_run(const check_case *c, const char *kernel)
{
    check k = {.c = c, .kernel = kernel};
    check_result result = {0};
    result.status = cli_child_run(run_case, &k, &result, sizeof result, result.text, sizeof result.text);
    return result;
}
