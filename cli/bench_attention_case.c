/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attention_case.c - one case of `bench attention`, in a child process.
 *
 * In this order: can the contestant do it, does it fit into the memory, tensors with fresh random inputs and
 * poisoned outputs (NaN), the peak of multiply-adds, the first call apart, warm-up, samples with the outputs
 * poisoned again before the last, the peak again (the larger counts, since what disturbs only slows), the
 * largest resident memory, and then, which no number contains, the comparison with the fp64 reference.
 *
 * On a GPU time is between two events, with as many calls between them as take some milliseconds, and memory
 * is what the case has left less of: free memory of the GPU before the tensors less that after the last call.
 *
 * Errors are of sampled rows (and keys, for dK and dV) of sampled heads.  Where a head has at most REMADE
 * cells the reference of a gradient begins at q, k, v and dO alone; else it reads the lse and o of the
 * contestant's forward pass, whose rows are compared too.
 */
#include "bench_attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "contest_store.h"
#include "memory.h"
#include "tensors.h"
#include "verify_backward.h"

enum {
    PLANES = 16,      /* heads that are compared, of all batches */
    SLOPE_PLANES = 2, /* likewise for gradients, each of which takes longer */
    REMADE = 1 << 20,
};

typedef struct bench {
    const attention_case *a;
    contest_case c; /* with the number of threads filled in */
    attention_result *result;
    contest_store store;
    void *state;
    void *begin, *end;     /* events of the GPU */
    int64_t calls;         /* of a sample */
    int64_t free_at_first; /* bytes of the GPU's memory */
    double *samples;
    char kernel[64]; /* of ours, at work; empty: the rival */
} bench;

/* ---- memory ---- */

static bool on_gpu(const bench *b)
{
    return b->c.place.device == ATTN_CUDA;
}

static attn_status check_memory(bench *b)
{
    const attention_case *a = b->a;
    int64_t beside = 0, limit = a->mem_limit;
    attn_status status = a->who.predict(&a->who, &b->c, &beside);
    if (status != ATTN_OK) {
        return status;
    }
    double total = contest_store_bytes(&b->c) + (double)beside;
    total += on_gpu(b) ? 0 : (double)cli_memory_program(b->c.threads);
    if (limit == 0) {
        limit = on_gpu(b) ? b->free_at_first : cli_memory_available();
    }
    if (total > 0x1p62) {
        return cli_refuse(ATTN_ELIMIT, "larger than any memory");
    }
    b->result->predicted = (int64_t)total;
    if (limit > 0 && b->result->predicted > limit) {
        char need[CLI_NUMBER], have[CLI_NUMBER];
        return cli_refuse(ATTN_ELIMIT, "needs %s, the limit is %s", cli_bytes(need, total),
                          cli_bytes(have, (double)limit));
    }
    return ATTN_OK;
}

static int64_t memory_now(const bench *b)
{
    return on_gpu(b) ? b->free_at_first - cli_place_free_bytes(b->c.place) : cli_memory_now();
}

/* ---- timing ---- */

static attn_status start_clock(bench *b, double *now)
{
    *now = cli_now();
    return on_gpu(b) ? attn_cuda_event_record(b->c.place.gpu, b->begin, NULL) : ATTN_OK;
}

static attn_status read_clock(bench *b, double since, double *seconds)
{
    const int gpu = b->c.place.gpu;
    *seconds = cli_now() - since;
    if (!on_gpu(b)) {
        return ATTN_OK;
    }
    attn_status status = attn_cuda_event_record(gpu, b->end, NULL);
    return status == ATTN_OK ? attn_cuda_event_elapsed(gpu, b->begin, b->end, seconds) : status;
}

/* Some calls, the seconds of one; of BOTH, what is taken between its halves is told where `before` is not
 * NULL. */
static attn_status call(bench *b, int64_t calls, double *seconds, int64_t *before)
{
    const contestant *who = &b->a->who;
    double begin;
    attn_status status = start_clock(b, &begin);
    for (int64_t i = 0; i < calls && status == ATTN_OK; i++) {
        if (b->c.pass == CONTEST_BOTH && before != NULL) {
            status = who->run(b->state, CONTEST_FORWARD);
            *before = memory_now(b);
            status = status == ATTN_OK ? who->run(b->state, CONTEST_BACKWARD) : status;
        } else {
            status = who->run(b->state, b->c.pass);
        }
    }
    b->result->unwaited = (cli_now() - begin) / (double)calls;
    if (status == ATTN_OK) {
        status = read_clock(b, begin, seconds);
    }
    *seconds /= (double)calls;
    return status;
}

/* Warms up; then as many calls are a sample as its clock needs. */
static attn_status warm_up(bench *b)
{
    const double enough = 4e-3; /* seconds: a thousand times the clock's step and a launch */
    const int64_t most = 200;
    double one = b->result->first;
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < b->a->warmup && status == ATTN_OK; i++) {
        status = call(b, 1, &one, NULL);
    }
    b->calls = 1;
    if (on_gpu(b) && status == ATTN_OK) {
        status = call(b, 3, &one, NULL);
        b->calls = one * (double)most < enough ? most : one < enough ? (int64_t)(enough / one) + 1 : 1;
    }
    return status;
}

static attn_status take_samples(bench *b)
{
    const attention_case *a = b->a;
    attention_result *r = b->result;
    double begin = cli_now();
    attn_status status = warm_up(b);
    while (status == ATTN_OK && r->samples < a->repeat) {
        double spent = cli_now() - begin, each = r->samples > 0 ? spent / (double)r->samples : 0;
        bool over = a->seconds > 0 && r->samples > 0 && spent + each > a->seconds;
        bool last = over || r->samples + 1 == a->repeat;
        if (last) {
            status = contest_store_poison(&b->store);
        }
        status = status == ATTN_OK ? call(b, b->calls, &b->samples[r->samples++], NULL) : status;
        if (over) {
            break;
        }
    }
    if (on_gpu(b) && status == ATTN_OK) {
        r->state = cli_gpu_now(b->c.place.gpu);
    }
    return status;
}

static double peak_of(const bench *b)
{
    const double blink = 0.02; /* seconds for the peak, before and after */
    return on_gpu(b) ? b->a->peak_flops : attn_peak_flops(b->a->who.peak(b->state), b->c.threads, blink);
}

static attn_status measure(bench *b)
{
    const contestant *who = &b->a->who;
    attention_result *r = b->result;
    attn_status status = contest_store_poison(&b->store);
    r->peak_flops = peak_of(b);
    if (b->c.pass == CONTEST_BACKWARD && status == ATTN_OK) {
        status = who->run(b->state, CONTEST_FORWARD);
        status = status == ATTN_OK ? cli_place_wait(b->c.place) : status;
        r->before = memory_now(b);
    }
    if (status == ATTN_OK) {
        status = call(b, 1, &r->first, &r->before);
    }
    if (status == ATTN_OK) {
        status = take_samples(b);
    }
    if (status == ATTN_OK) {
        r->time = cli_spread_of(b->samples, r->samples);
        r->peak_flops = fmax(r->peak_flops, peak_of(b));
    }
    if (status == ATTN_OK && b->a->turns > 0) {
        status = call(b, b->a->turns, &r->turns, NULL);
        r->turns *= (double)b->a->turns;
    }
    r->peak = on_gpu(b) ? memory_now(b) : cli_memory_peak();
    return status == ATTN_OK ? contest_store_fetch(&b->store) : status;
}

/* ---- comparing ---- */

typedef struct reader {
    const float *lse;
    cli_tensor o;
} reader;

static attn_status read_result(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *o, float *lse)
{
    const reader *r = data;
    for (int64_t i = 0; i < count; i++) {
        cli_tensor_row(&r->o, batch, head, first + i, o + i * r->o.dim);
        lse[i] = r->lse[(batch * r->o.heads + head) * r->o.tokens + first + i];
    }
    return ATTN_OK;
}

static attn_status compare_forward(bench *b)
{
    const attn_problem *p = &b->c.problem;
    attention_result *r = b->result;
    cli_tensor inputs[3] = {cli_tensor_of(p, ATTN_Q, (attn_tensor){.data = b->store.here.q}),
                            cli_tensor_of(p, ATTN_K, (attn_tensor){.data = b->store.here.k}),
                            cli_tensor_of(p, ATTN_V, (attn_tensor){.data = b->store.here.v})};
    attn_source source = {.size = sizeof source, .data = inputs, .read = cli_tensors_read};
    reader data = {.lse = b->store.here.lse,
                   .o = cli_tensor_out(p, p->dtype_out, (attn_tensor){.data = b->store.here.o})};
    cli_verdict verdict;
    cli_verify verify = {
        .problem = p,
        .kernel = b->kernel[0] != '\0' ? b->kernel : NULL,
        .rounds_scores = b->a->who.rounds_scores,
        .source = &source,
        .out = (cli_dtype)p->dtype_out,
        .rows = b->a->rows,
        .planes = PLANES,
        .seed = b->a->seed,
        .has_lse = true,
        .read = read_result,
        .data = &data,
    };
    attn_status status = cli_verify_run(&verify, &verdict);
    if (status == ATTN_OK) {
        r->status = verdict.passed ? CLI_ROW_OK : CLI_ROW_WRONG;
        if (!verdict.passed) {
            snprintf(r->text, sizeof r->text, "forward: %.3g times what it may differ", verdict.ratio);
        }
        if (b->c.pass != CONTEST_BACKWARD) {
            r->max_error = verdict.max_error;
            r->relative = verdict.relative;
        }
    }
    return status;
}

static attn_status compare_backward(bench *b)
{
    const attn_problem *p = &b->c.problem;
    attention_result *r = b->result;
    double cells = (double)p->tokens_q * (double)p->tokens_kv * (double)(p->heads_q / p->heads_kv);
    attn_gradients io = {
        .size = sizeof io,
        .q = {.data = b->store.here.q},
        .k = {.data = b->store.here.k},
        .v = {.data = b->store.here.v},
        .o = {.data = b->store.here.o},
        .lse = {.data = b->store.here.lse},
        .dout = {.data = b->store.here.dout},
        .dq = {.data = b->store.here.dq},
        .dk = {.data = b->store.here.dk},
        .dv = {.data = b->store.here.dv},
    };
    cli_slopes slopes = {.problem = p,
                         .kernel = b->kernel[0] != '\0' ? b->kernel : NULL,
                         .rounds_scores = b->a->who.rounds_scores,
                         .io = &io,
                         .anew = cells <= REMADE,
                         .rows = b->a->rows,
                         .planes = SLOPE_PLANES,
                         .seed = b->a->seed};
    cli_slopes_verdict verdict;
    attn_status status = cli_slopes_run(&slopes, &verdict);
    if (status == ATTN_OK) {
        r->max_error = fmax(r->max_error, verdict.max_error);
        r->relative = fmax(r->relative, verdict.relative);
        if (!verdict.passed) {
            r->status = CLI_ROW_WRONG;
            snprintf(r->text, sizeof r->text, "%s: %.3g times what it may differ", verdict.where,
                     verdict.ratio);
        }
    }
    return status;
}

/* ---- the child ---- */

static double flops_of(const contest_case *c)
{
    static const double factor[] = {[CONTEST_FORWARD] = 1, [CONTEST_BACKWARD] = 2.5, [CONTEST_BOTH] = 3.5};
    return attn_problem_flops(&c->problem) * factor[c->pass];
}

/* The GPU's context, which is no case's memory, and its clock. */
static attn_status open_gpu(bench *b)
{
    const int gpu = b->c.place.gpu;
    if (!on_gpu(b)) {
        return ATTN_OK;
    }
    attn_status status = attn_cuda_event_create(gpu, &b->begin);
    status = status == ATTN_OK ? attn_cuda_event_create(gpu, &b->end) : status;
    b->free_at_first = cli_place_free_bytes(b->c.place);
    return status;
}

static attn_status run_steps(bench *b)
{
    const contestant *who = &b->a->who;
    attention_result *r = b->result;
    attn_status status = open_gpu(b);
    if (status != ATTN_OK) {
        return status;
    }
    const char *reason = who->can_do(who, &b->c, r->text, sizeof r->text);
    if (reason != NULL) {
        return cli_refuse(ATTN_EUNSUPPORTED, "%s", reason);
    }
    status = check_memory(b);
    if (status != ATTN_OK || b->a->dry_run) {
        return status;
    }
    b->samples = malloc((size_t)b->a->repeat * sizeof *b->samples);
    status = b->samples != NULL ? contest_store_open(&b->store, b->a->seed)
                                : cli_refuse(ATTN_ENOMEM, "out of memory");
    if (status == ATTN_OK) {
        status = who->setup(who, &b->c, &b->store.there, &b->state);
    }
    if (status == ATTN_OK) {
        const char *kernel = who->peak(b->state);
        snprintf(b->kernel, sizeof b->kernel, "%s", kernel != NULL ? kernel : "");
        snprintf(r->isa, sizeof r->isa, "%s", who->isa(b->state));
        status = measure(b);
        if (status == ATTN_EUNSUPPORTED) { /* no refusal any more: something broke */
            status = ATTN_EIO;
        }
    }
    who->free_state(b->state); /* the reference needs room too */
    b->state = NULL;
    if (status == ATTN_OK) {
        status = compare_forward(b);
    }
    if (status == ATTN_OK && b->c.pass != CONTEST_FORWARD) {
        status = compare_backward(b);
    }
    return status;
}

static void run_case(const void *data, void *result)
{
    bench b = {.a = data, .result = result};
    b.c = b.a->c;
    b.store.c = &b.c;
#ifdef _OPENMP
    b.c.threads = b.c.threads > 0 ? b.c.threads : omp_get_max_threads();
    omp_set_num_threads(b.c.threads);
#else
    b.c.threads = 1;
#endif
    b.result->status = CLI_ROW_PLANNED;
    b.result->threads = on_gpu(&b) ? 0 : b.c.threads;
    b.result->flops = flops_of(&b.c);
    attn_status status = run_steps(&b);
    if (status != ATTN_OK) {
        b.result->status = cli_row_status_of(status);
        snprintf(b.result->text, sizeof b.result->text, "%s", attn_last_error());
    }
    contest_store_close(&b.store);
    free(b.samples);
}

attention_result attention_measure(const attention_case *c)
{
    attention_result result = {0};
    if (c->refusal != NULL) {
        result.status = CLI_ROW_REFUSED;
        snprintf(result.text, sizeof result.text, "%s", c->refusal);
        return result;
    }
    result.status = cli_child_run(run_case, c, &result, sizeof result, result.text, sizeof result.text);
    return result;
}
