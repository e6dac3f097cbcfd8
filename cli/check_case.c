/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_case.c - one case of `attn check` with one kernel, through the public interface, in a child process.
 *
 * Forward and, where the kernel has gradients, backward: against the fp64 reference, and twice with different
 * numbers of threads over differently poisoned outputs.  Of each byte of an output the two runs must then say
 * the same (an element: the bits do not depend on the threads) or each its own poison (a gap between rows,
 * which is the caller's); and there must be as many gaps as the strides leave.
 *
 * On a GPU it runs twice, too, with arrays in its memory; gradients once in the mode that repeats its bits
 * and once in the other, so that theirs need not agree.
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
    unsigned char *there;           /* on a GPU: the same in its memory */
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

static bool on_gpu(const check *k)
{
    return k->c->place.device == ATTN_CUDA;
}

/* ---- arrays ---- */

/* Strides of a layout, the element where [0][0][0][0] lies, and how many elements there are, gaps included.
 */
static int64_t lay_out(check_layout layout, cli_tensor *t, int64_t *first)
{
    int64_t *s = t->at.stride,
            pad = layout == CHECK_PADDED    ? 3
                  : layout == CHECK_ALIGNED ? 16
                                            : 0,
            row = t->dim + pad;
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
    if (on_gpu(k)) {
        a->there = cli_place_alloc(k->c->place, a->bytes);
        if (a->there == NULL) {
            return false;
        }
    }
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

/* An array where it is computed, or here. */
static attn_tensor tensor_of(const check *k, int which, bool here)
{
    const array *a = &k->a[which];
    attn_tensor t = a->t.at;
    if (!here && on_gpu(k)) {
        t.data = a->there + ((unsigned char *)t.data - a->buffer);
    }
    return t;
}

static attn_gradients gradients_of(const check *k, bool here)
{
    return (attn_gradients){.size = sizeof(attn_gradients),
                            .q = tensor_of(k, Q, here),
                            .k = tensor_of(k, K, here),
                            .v = tensor_of(k, V, here),
                            .o = tensor_of(k, O, here),
                            .lse = tensor_of(k, LSE, here),
                            .dout = tensor_of(k, DOUT, here),
                            .dq = tensor_of(k, DQ, here),
                            .dk = tensor_of(k, DK, here),
                            .dv = tensor_of(k, DV, here)};
}

/* ---- running ---- */

/* Arrays first..last to the GPU, or back. */
static attn_status move(const check *k, int first, int last, bool there)
{
    attn_status status = ATTN_OK;
    for (int i = first; i <= last && on_gpu(k) && status == ATTN_OK; i++) {
        const array *a = &k->a[i];
        status =
            cli_place_copy(k->c->place, there ? a->there : a->buffer, there ? a->buffer : a->there, a->bytes);
    }
    return status;
}

/* A fault of the GPU is no refusal. */
static attn_status end_of_run(const check *k, attn_status status)
{
    const attn_status waited = cli_place_wait(k->c->place);
    return waited != ATTN_OK ? ATTN_EIO : status;
}

static attn_status run_plan(check *k, bool backward, const attn_plan *plan, void *workspace, int poison)
{
    const attn_gradients gradients = gradients_of(k, false);
    const int first = backward ? DQ : O, last = backward ? DV : LSE;
    attn_io io = {.size = sizeof io,
                  .q = gradients.q,
                  .k = gradients.k,
                  .v = gradients.v,
                  .o = gradients.o,
                  .lse = gradients.lse};
    attn_status status = cli_place_fill(k->c->place, workspace, POISON, attn_plan_workspace(plan));
    for (int i = first; i <= last; i++) {
        memset(k->a[i].buffer, poison, k->a[i].bytes);
    }
    status = status == ATTN_OK ? move(k, first, last, true) : status;
    if (status != ATTN_OK) {
        return status;
    }
    status =
        backward ? attn_execute_backward(plan, &gradients, workspace) : attn_execute(plan, &io, workspace);
    status = end_of_run(k, status);
    return status == ATTN_OK ? move(k, first, last, false) : status;
}

/* turn: the first run or the second. */
static attn_status execute(check *k, bool backward, int turn)
{
    const check_case *c = k->c;
    attn_options options = {
        .size = sizeof options,
        .workers = backward ? 1 : c->workers,
        .resident = on_gpu(k) ? 1 : 2,
        .threads = turn == 0 ? 1 : 3,
        .in_memory = 1,
        .backward = backward,
        .device = c->place.device,
        .gpu = c->place.gpu,
        .deterministic = turn == 0,
        .kernel = k->kernel,
    };
    attn_plan *plan = NULL;
    attn_status status = attn_plan_create(&plan, &c->problem, &options);
    if (status != ATTN_OK) {
        return status;
    }
    void *workspace = cli_place_alloc(c->place, attn_plan_workspace(plan));
    status = workspace != NULL ? run_plan(k, backward, plan, workspace, turn == 0 ? POISON : OTHER_POISON)
                               : ATTN_ENOMEM;
    cli_place_free(c->place, workspace);
    attn_plan_destroy(plan);
    return status;
}

/* What two runs say of an output; NULL: as it should be.  alike: their bits must agree. */
static const char *compare_runs(const array *a, bool alike)
{
    size_t gaps = 0;
    for (size_t i = 0; i < a->bytes; i++) {
        bool gap = a->before[i] == POISON && a->buffer[i] == OTHER_POISON;
        gaps += gap;
        if (alike && !gap && a->before[i] != a->buffer[i]) {
            return "the bits depend on the number of threads or on chance, or on what the output held before";
        }
    }
    const cli_tensor *t = &a->t;
    size_t elements = (size_t)(t->batch * t->heads * t->tokens * t->dim) * attn_dtype_size(t->dtype);
    const bool right = alike ? gaps == a->bytes - elements : gaps >= a->bytes - elements;
    return right ? NULL : "it writes between its rows, or leaves out some";
}

/* Runs twice; the results of the second stay. */
static attn_status run_twice(check *k, bool backward)
{
    int first = backward ? DQ : O, last = backward ? DV : LSE;
    attn_status status = execute(k, backward, 0);
    for (int i = first; i <= last; i++) {
        memcpy(k->a[i].before, k->a[i].buffer, k->a[i].bytes);
    }
    if (status == ATTN_OK) {
        status = execute(k, backward, 1);
    }
    for (int i = first; i <= last && status == ATTN_OK; i++) {
        static const char *const names[] = {[O] = "o", [LSE] = "lse", [DQ] = "dq", [DK] = "dk", [DV] = "dv"};
        const char *wrong = compare_runs(&k->a[i], !backward || !on_gpu(k));
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
    const attn_gradients io = gradients_of(k, true);
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

static attn_status run_passes(check *k)
{
    if (!open_arrays(k)) {
        return ATTN_ENOMEM;
    }
    fill_inputs(k);
    attn_status status = move(k, Q, DOUT, true);
    status = status == ATTN_OK ? forward(k) : status;
    return status == ATTN_OK ? backward(k) : status;
}

static void run_case(const check_case *c, const char *kernel, check_result *result)
{
    check k = {.c = c, .kernel = kernel, .result = result};
    attn_status status = run_passes(&k);
    if (status != ATTN_OK) {
        result->status = cli_row_status_of(status);
        snprintf(result->text, sizeof result->text, "%s", attn_last_error());
    }
    for (int i = 0; i < ARRAYS; i++) {
        free(k.a[i].buffer);
        free(k.a[i].before);
        if (on_gpu(&k)) {
            cli_place_free(c->place, k.a[i].there);
        }
    }
}

typedef struct batch {
    cli_row_status status; /* first, for cli_child_run() */
    char text[360];
    const check_case *c;
    const char *kernel;
    int count, done;
    check_result result[CHECK_TOGETHER];
} batch;

/* The kernel's plans tell their own threads; what else would use OpenMP (the reference, in many short steps)
 * is faster alone, since waiting threads spin and others may want their cores. */
static void run_batch(const void *data, void *result)
{
    const batch *asked = data;
    batch *b = result;
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    bool going = true;
    while (b->done < asked->count && going) {
        check_result *one = &b->result[b->done];
        run_case(&asked->c[b->done], asked->kernel, one);
        going = one->status == CLI_ROW_OK || one->status == CLI_ROW_REFUSED;
        b->done++;
    }
}

int check_run(const check_case *c, int count, const char *kernel, check_result result[CHECK_TOGETHER])
{
    const int most = c->place.device == ATTN_CUDA ? CHECK_TOGETHER : 1;
    const batch asked = {.c = c, .kernel = kernel, .count = count < most ? count : most};
    batch *got = cli_alloc(1, sizeof *got);
    (void)cli_child_run(run_batch, &asked, got, sizeof *got, got->text, sizeof got->text);
    int done = got->done;
    memcpy(result, got->result, (size_t)done * sizeof *result);
    if (done == 0 && asked.count > 1) { /* it said nothing: of which case? */
        done = check_run(c, 1, kernel, result);
    } else if (done == 0) {
        const check_result dead = {.status = got->status == CLI_ROW_OOM ? CLI_ROW_OOM : CLI_ROW_FAILED};
        done = 1;
        result[0] = dead;
        snprintf(result[0].text, sizeof result[0].text, "%s", got->text);
    }
    free(got);
    return done;
}
