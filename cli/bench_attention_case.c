/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attention_case.c - one case of `bench attention`, in a child process.
 *
 * In this order: can the contestant do it, does it fit into the memory, tensors with fresh random inputs and
 * poisoned outputs (NaN), the peak of multiply-adds, the first call apart, warm-up, samples with the outputs
 * poisoned again before the last, the peak again (the larger counts, since what disturbs only slows), the
 * largest resident memory, and then, which no number contains, the comparison with the fp64 reference.
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

#include "memory.h"
#include "random.h"
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
    contest_tensors t;
    void *state;
    double *samples;
    char kernel[64]; /* of ours, at work; empty: the rival */
} bench;

/* ---- memory ---- */

static int64_t elements(const attn_problem *p, attn_operand x)
{
    int64_t heads = x == ATTN_Q ? p->heads_q : p->heads_kv, tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv;
    return p->batch * heads * tokens * (x == ATTN_V ? p->dim_v : p->dim_qk);
}

static int64_t elements_out(const attn_problem *p)
{
    return p->batch * p->heads_q * p->tokens_q * p->dim_v;
}

/* As doubles, so that nothing overflows. */
static double tensor_bytes(const bench *b)
{
    const attn_problem *p = &b->c.problem;
    double in = (double)attn_dtype_size(p->dtype), out = (double)attn_dtype_size(p->dtype_out);
    double rows = (double)p->batch * (double)p->heads_q * (double)p->tokens_q;
    double keys = (double)p->batch * (double)p->heads_kv * (double)p->tokens_kv;
    double d = (double)p->dim_qk, dv = (double)p->dim_v, inputs = rows * d + keys * (d + dv);
    double bytes = in * inputs + out * rows * dv + 4 * rows;
    return b->c.pass == CONTEST_FORWARD ? bytes : bytes + in * rows * dv + out * inputs;
}

static attn_status check_memory(bench *b)
{
    const attention_case *a = b->a;
    int64_t beside = 0, limit = a->mem_limit > 0 ? a->mem_limit : cli_memory_available();
    attn_status status = a->who.predict(&a->who, &b->c, &beside);
    if (status != ATTN_OK) {
        return status;
    }
    double total = tensor_bytes(b) + (double)beside + (double)cli_memory_program(b->c.threads);
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

static void poison(void *data, int64_t count, attn_dtype dtype)
{
    if (data != NULL) {
        memset(data, 0xff, (size_t)count * attn_dtype_size(dtype));
    }
}

static void poison_outputs(bench *b)
{
    const attn_problem *p = &b->c.problem;
    if (b->c.pass != CONTEST_BACKWARD) {
        poison(b->t.o, elements_out(p), p->dtype_out);
        poison(b->t.lse, p->batch * p->heads_q * p->tokens_q, ATTN_F32);
    }
    poison(b->t.dq, elements(p, ATTN_Q), p->dtype_out);
    poison(b->t.dk, elements(p, ATTN_K), p->dtype_out);
    poison(b->t.dv, elements(p, ATTN_V), p->dtype_out);
}

static bool fill(void **array, cli_random *random, attn_operand x)
{
    const attn_problem *p = &random->problem;
    int64_t tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv, dim = x == ATTN_V ? p->dim_v : p->dim_qk;
    size_t size = attn_dtype_size(p->dtype);
    size_t one = (size_t)(elements(p, x) / p->batch) * size;
    *array = malloc((size_t)p->batch * one);
    for (int64_t i = 0; i < p->batch && *array != NULL; i++) {
        void *at = (char *)*array + (size_t)i * one;
        (void)cli_random_read(random, x, i, 0, tokens, at, tokens * dim);
    }
    return *array != NULL;
}

static attn_status make_tensors(bench *b)
{
    const attn_problem *p = &b->c.problem;
    contest_tensors *t = &b->t;
    cli_random inputs = {.problem = *p, .seed = b->a->seed}, slope = inputs;
    size_t out = attn_dtype_size(p->dtype_out);
    slope.problem.dim_qk = p->dim_v; /* dO is shaped like q with v's last dimension */
    slope.seed = ~b->a->seed;
    bool enough =
        fill(&t->q, &inputs, ATTN_Q) && fill(&t->k, &inputs, ATTN_K) && fill(&t->v, &inputs, ATTN_V);
    t->o = malloc((size_t)elements_out(p) * out);
    t->lse = malloc((size_t)(p->batch * p->heads_q * p->tokens_q) * sizeof *t->lse);
    b->samples = malloc((size_t)b->a->repeat * sizeof *b->samples);
    enough = enough && t->o != NULL && t->lse != NULL && b->samples != NULL;
    if (b->c.pass != CONTEST_FORWARD && enough) {
        enough = fill(&t->dout, &slope, ATTN_Q);
        t->dq = malloc((size_t)elements(p, ATTN_Q) * out);
        t->dk = malloc((size_t)elements(p, ATTN_K) * out);
        t->dv = malloc((size_t)elements(p, ATTN_V) * out);
        enough = enough && t->dq != NULL && t->dk != NULL && t->dv != NULL;
    }
    return enough ? ATTN_OK : cli_refuse(ATTN_ENOMEM, "out of memory");
}

static void free_tensors(contest_tensors *t)
{
    void *all[] = {t->q, t->k, t->v, t->o, t->lse, t->dout, t->dq, t->dk, t->dv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        free(all[i]);
    }
}

/* ---- timing ---- */

/* One call; of BOTH, what is resident between its halves is told where `before` is not NULL. */
static attn_status call(bench *b, double *seconds, int64_t *before)
{
    const contestant *who = &b->a->who;
    double begin = cli_now();
    attn_status status;
    if (b->c.pass == CONTEST_BOTH && before != NULL) {
        status = who->run(b->state, CONTEST_FORWARD);
        *before = cli_memory_now();
        status = status == ATTN_OK ? who->run(b->state, CONTEST_BACKWARD) : status;
    } else {
        status = who->run(b->state, b->c.pass);
    }
    *seconds = cli_now() - begin;
    return status;
}

static attn_status take_samples(bench *b)
{
    const attention_case *a = b->a;
    attention_result *r = b->result;
    attn_status status = ATTN_OK;
    double ignored, begin = cli_now();
    for (int64_t i = 0; i < a->warmup && status == ATTN_OK; i++) {
        status = call(b, &ignored, NULL);
    }
    while (status == ATTN_OK && r->samples < a->repeat) {
        double spent = cli_now() - begin, each = r->samples > 0 ? spent / (double)r->samples : 0;
        bool over = a->seconds > 0 && r->samples > 0 && spent + each > a->seconds;
        bool last = over || r->samples + 1 == a->repeat;
        if (last) {
            poison_outputs(b);
        }
        status = call(b, &b->samples[r->samples++], NULL);
        if (over) {
            break;
        }
    }
    return status;
}

static attn_status measure(bench *b)
{
    const contestant *who = &b->a->who;
    attention_result *r = b->result;
    const double blink = 0.02; /* seconds for the peak, before and after */
    const char *of = who->peak(b->state);
    attn_status status = ATTN_OK;
    poison_outputs(b);
    r->peak_flops = attn_peak_flops(of, b->c.threads, blink);
    if (b->c.pass == CONTEST_BACKWARD) {
        status = who->run(b->state, CONTEST_FORWARD);
        r->before = cli_memory_now();
    }
    if (status == ATTN_OK) {
        status = call(b, &r->first, &r->before);
    }
    if (status == ATTN_OK) {
        status = take_samples(b);
    }
    if (status == ATTN_OK) {
        r->time = cli_spread_of(b->samples, r->samples);
        r->peak_flops = fmax(r->peak_flops, attn_peak_flops(of, b->c.threads, blink));
    }
    r->peak = cli_memory_peak();
    return status;
}

/* ---- comparing ---- */

typedef struct reader {
    const contest_tensors *t;
    cli_tensor o;
} reader;

static attn_status read_result(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                               float *o, float *lse)
{
    const reader *r = data;
    for (int64_t i = 0; i < count; i++) {
        cli_tensor_row(&r->o, batch, head, first + i, o + i * r->o.dim);
        lse[i] = r->t->lse[(batch * r->o.heads + head) * r->o.tokens + first + i];
    }
    return ATTN_OK;
}

static attn_status compare_forward(bench *b)
{
    const attn_problem *p = &b->c.problem;
    attention_result *r = b->result;
    cli_tensor inputs[3] = {cli_tensor_of(p, ATTN_Q, (attn_tensor){.data = b->t.q}),
                            cli_tensor_of(p, ATTN_K, (attn_tensor){.data = b->t.k}),
                            cli_tensor_of(p, ATTN_V, (attn_tensor){.data = b->t.v})};
    attn_source source = {.size = sizeof source, .data = inputs, .read = cli_tensors_read};
    reader data = {.t = &b->t, .o = cli_tensor_out(p, p->dtype_out, (attn_tensor){.data = b->t.o})};
    cli_verdict verdict;
    cli_verify verify = {
        .problem = p,
        .kernel = b->kernel[0] != '\0' ? b->kernel : NULL,
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
        .q = {.data = b->t.q},
        .k = {.data = b->t.k},
        .v = {.data = b->t.v},
        .o = {.data = b->t.o},
        .lse = {.data = b->t.lse},
        .dout = {.data = b->t.dout},
        .dq = {.data = b->t.dq},
        .dk = {.data = b->t.dk},
        .dv = {.data = b->t.dv},
    };
    cli_slopes slopes = {.problem = p,
                         .kernel = b->kernel[0] != '\0' ? b->kernel : NULL,
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

static attn_status run_steps(bench *b)
{
    const contestant *who = &b->a->who;
    attention_result *r = b->result;
    const char *reason = who->can_do(who, &b->c, r->text, sizeof r->text);
    if (reason != NULL) {
        return cli_refuse(ATTN_EUNSUPPORTED, "%s", reason);
    }
    attn_status status = check_memory(b);
    if (status != ATTN_OK || b->a->dry_run) {
        return status;
    }
    status = make_tensors(b);
    if (status == ATTN_OK) {
        status = who->setup(who, &b->c, &b->t, &b->state);
    }
    if (status == ATTN_OK) {
        const char *kernel = who->peak(b->state);
        snprintf(b->kernel, sizeof b->kernel, "%s", kernel != NULL ? kernel : "");
        snprintf(r->isa, sizeof r->isa, "%s", who->isa(b->state));
        status = measure(b);
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
#ifdef _OPENMP
    b.c.threads = b.c.threads > 0 ? b.c.threads : omp_get_max_threads();
    omp_set_num_threads(b.c.threads);
#else
    b.c.threads = 1;
#endif
    b.result->status = CLI_ROW_PLANNED;
    b.result->threads = b.c.threads;
    b.result->flops = flops_of(&b.c);
    attn_status status = run_steps(&b);
    if (status != ATTN_OK) {
        b.result->status = cli_row_status_of(status);
        snprintf(b.result->text, sizeof b.result->text, "%s", attn_last_error());
    }
    free_tensors(&b.t);
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
