/* SPDX-License-Identifier: Apache-2.0 */
/*
 * contest_store.c - the tensors of a case of `bench attention`: in this process, where inputs are made and
 * results are compared, and where it is computed, which on the CPU is the same.
 */
#include "contest_store.h"

#include <string.h>

#include "random.h"

static int64_t elements(const attn_problem *p, attn_operand x)
{
    int64_t heads = x == ATTN_Q ? p->heads_q : p->heads_kv, tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv;
    return p->batch * heads * tokens * (x == ATTN_V ? p->dim_v : p->dim_qk);
}

static int64_t elements_out(const attn_problem *p)
{
    return p->batch * p->heads_q * p->tokens_q * p->dim_v;
}

double contest_store_bytes(const contest_case *c)
{
    const attn_problem *p = &c->problem;
    double in = (double)attn_dtype_size(p->dtype), out = (double)attn_dtype_size(p->dtype_out);
    double rows = (double)p->batch * (double)p->heads_q * (double)p->tokens_q;
    double keys = (double)p->batch * (double)p->heads_kv * (double)p->tokens_kv;
    double d = (double)p->dim_qk, dv = (double)p->dim_v, inputs = rows * d + keys * (d + dv);
    double bytes = in * inputs + out * rows * dv + 4 * rows;
    return c->pass == CONTEST_FORWARD ? bytes : bytes + in * rows * dv + out * inputs;
}

typedef struct array {
    void **there, **here;
    int64_t bytes;
    enum { INPUT, FORWARD, BACKWARD } role; /* an input, or a result of that pass */
} array;

enum { ARRAYS = 9 };

/* Those of the pass; returns how many. */
static int list_arrays(contest_store *s, array list[ARRAYS])
{
    const attn_problem *p = &s->c->problem;
    const int64_t in = (int64_t)attn_dtype_size(p->dtype), out = (int64_t)attn_dtype_size(p->dtype_out);
    const int64_t q = elements(p, ATTN_Q), k = elements(p, ATTN_K), v = elements(p, ATTN_V),
                  o = elements_out(p);
    contest_tensors *t = &s->there, *h = &s->here;
    const array all[ARRAYS] = {
        {&t->q, &h->q, in * q, INPUT},
        {&t->k, &h->k, in * k, INPUT},
        {&t->v, &h->v, in * v, INPUT},
        {&t->o, &h->o, out * o, FORWARD},
        {&t->lse, &h->lse, p->batch * p->heads_q * p->tokens_q * (int64_t)sizeof(float), FORWARD},
        {&t->dout, &h->dout, in * o, INPUT},
        {&t->dq, &h->dq, out * q, BACKWARD},
        {&t->dk, &h->dk, out * k, BACKWARD},
        {&t->dv, &h->dv, out * v, BACKWARD},
    };
    memcpy(list, all, sizeof all);
    return s->c->pass == CONTEST_FORWARD ? 5 : ARRAYS;
}

attn_status contest_store_poison(contest_store *s)
{
    array list[ARRAYS];
    const int count = list_arrays(s, list);
    attn_status status = ATTN_OK;
    for (int i = 0; i < count && status == ATTN_OK; i++) {
        const bool kept = list[i].role == FORWARD && s->c->pass == CONTEST_BACKWARD;
        if (list[i].role != INPUT && !kept) {
            status = cli_place_fill(s->c->place, *list[i].there, 0xff, (size_t)list[i].bytes);
        }
    }
    return status;
}

static void fill(void *data, cli_random *random, attn_operand x)
{
    const attn_problem *p = &random->problem;
    int64_t tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv, dim = x == ATTN_V ? p->dim_v : p->dim_qk;
    int64_t one = elements(p, x) / p->batch * (int64_t)attn_dtype_size(p->dtype);
    for (int64_t i = 0; i < p->batch; i++) {
        (void)cli_random_read(random, x, i, 0, tokens, (char *)data + i * one, tokens * dim);
    }
}

static void fill_inputs(contest_store *s, uint64_t seed)
{
    const attn_problem *p = &s->c->problem;
    cli_random inputs = {.problem = *p, .seed = seed}, slope = inputs;
    slope.problem.dim_qk = p->dim_v; /* dO is shaped like q with v's last dimension */
    slope.seed = ~seed;
    fill(s->here.q, &inputs, ATTN_Q);
    fill(s->here.k, &inputs, ATTN_K);
    fill(s->here.v, &inputs, ATTN_V);
    if (s->here.dout != NULL) {
        fill(s->here.dout, &slope, ATTN_Q);
    }
}

attn_status contest_store_open(contest_store *s, uint64_t seed)
{
    array list[ARRAYS];
    const int count = list_arrays(s, list);
    attn_status status = ATTN_OK;
    bool enough = true;
    for (int i = 0; i < count && enough; i++) {
        *list[i].here = cli_place_alloc((cli_place){.device = ATTN_CPU}, (size_t)list[i].bytes);
        enough = *list[i].here != NULL;
    }
    if (!enough) {
        return ATTN_ENOMEM;
    }
    fill_inputs(s, seed);
    for (int i = 0; i < count && status == ATTN_OK; i++) {
        if (s->c->place.device != ATTN_CUDA) {
            *list[i].there = *list[i].here;
            continue;
        }
        *list[i].there = cli_place_alloc(s->c->place, (size_t)list[i].bytes);
        status = *list[i].there != NULL ? ATTN_OK : ATTN_ENOMEM;
        if (status == ATTN_OK && list[i].role == INPUT) {
            status = cli_place_copy(s->c->place, *list[i].there, *list[i].here, (size_t)list[i].bytes);
        }
    }
    return status;
}

attn_status contest_store_fetch(contest_store *s)
{
    array list[ARRAYS];
    const int count = list_arrays(s, list);
    attn_status status = ATTN_OK;
    for (int i = 0; i < count && status == ATTN_OK && s->c->place.device == ATTN_CUDA; i++) {
        if (list[i].role != INPUT) {
            status = cli_place_copy(s->c->place, *list[i].here, *list[i].there, (size_t)list[i].bytes);
        }
    }
    return status;
}

void contest_store_close(contest_store *s)
{
    array list[ARRAYS];
    const int count = list_arrays(s, list);
    for (int i = 0; i < count; i++) {
        cli_place_free((cli_place){.device = ATTN_CPU}, *list[i].here);
        if (s->c->place.device == ATTN_CUDA) {
            cli_place_free(s->c->place, *list[i].there);
        }
    }
}
