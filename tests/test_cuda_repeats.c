/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_repeats.c - the GPU's kernels called again and again: the same bits a thousand times, and calls
 * captured into a graph.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

static attn_problem parse(const char *text)
{
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, text), ATTN_OK);
    return p;
}

/* ---- the same bits ---- */

/* A plan of one row with its workspace; false where it takes no such problem. */
typedef struct prepared {
    attn_plan *plan;
    void *workspace;
} prepared;

/* sms: multiprocessors at most, or 0. */
static bool prepare(prepared *x, const cuda_case *c, bool backward, const char *kernel, int sms)
{
    attn_options o = {
        .size = sizeof o, .device = ATTN_CUDA, .gpu = cuda.gpu, .in_memory = 1, .backward = backward};
    o.kernel = kernel;
    o.deterministic = 1;
    o.sms = sms;
    *x = (prepared){0};
    const attn_status status = attn_plan_create(&x->plan, &c->problem, &o);
    if (status == ATTN_EUNSUPPORTED) {
        cuda.refused++;
        return false;
    }
    assert_int_equal(status, ATTN_OK);
    assert_int_equal(attn_cuda_alloc(cuda.gpu, &x->workspace, attn_plan_workspace(x->plan) + 1), ATTN_OK);
    return true;
}

static void finish(prepared *x)
{
    attn_plan_destroy(x->plan);
    attn_cuda_free(cuda.gpu, x->workspace);
}

static attn_status execute(const prepared *x, const cuda_case *c, bool backward, void *stream)
{
    attn_io io = cuda_case_io(c);
    attn_gradients gradients = cuda_case_gradients(c);
    io.stream = gradients.stream = stream;
    return backward ? attn_execute_backward(x->plan, &gradients, x->workspace)
                    : attn_execute(x->plan, &io, x->workspace);
}

typedef struct bits {
    char *copy[3];
} bits;

static const cuda_tensor *output(const cuda_case *c, bool backward, int i)
{
    return i == 0 ? (backward ? &c->dq : &c->o) : i == 1 ? (backward ? &c->dk : &c->lse) : &c->dv;
}

static void keep(bits *b, const cuda_case *c, bool backward)
{
    for (int i = 0; i < (backward ? 3 : 2); i++) {
        case_tensor_keep(&output(c, backward, i)->host, &b->copy[i]);
    }
}

static bool same(const bits *b, const cuda_case *c, bool backward)
{
    bool equal = true;
    for (int i = 0; i < (backward ? 3 : 2); i++) {
        const check_buffer *now = &output(c, backward, i)->host.buffer;
        equal = equal && memcmp(b->copy[i], now->data, now->bytes) == 0;
    }
    return equal;
}

static void drop(bits *b)
{
    for (int i = 0; i < 3; i++) {
        free(b->copy[i]);
    }
}

static void repeat(cuda_case *c, bool backward, const attn_verdict *row, int sms)
{
    const int times = cuda.small ? 10 : 1000;
    prepared x;
    bits first = {{NULL, NULL, NULL}};
    if (!prepare(&x, c, backward, row->name, sms)) {
        return;
    }
    for (int i = 0; i < times; i++) {
        cuda_case_reset(c, backward);
        assert_int_equal(execute(&x, c, backward, NULL), ATTN_OK);
        cuda_case_fetch(c, backward);
        if (i == 0) {
            keep(&first, c, backward);
            cuda_case_compare(c, backward, row);
        } else if (!same(&first, c, backward)) {
            cuda_expect(false, "%s, %s: other bits in repeat %d", row->name,
                        backward ? "backward" : "forward", i);
            break;
        }
        *(backward ? &cuda.backward : &cuda.forward) += 1;
    }
    drop(&first);
    finish(&x);
}

static void test_bits_repeat(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int sms;
    } problems[] = {
        {"batch=2,heads=8,tokens=515,dim=128,dtype=bf16,out=bf16,causal", 0},
        {"heads=16,kv_heads=4,tokens=700,dim=64,dtype=f16,out=f16", 0},
        {"heads=4,tokens=500,dim=256,dtype=bf16,out=bf16,causal", 0},
        {"heads=8,kv_heads=2,tokens=1,kv_tokens=9000,dim=128,dtype=bf16,out=bf16", 0},
        {"heads=8,kv_heads=2,tokens=10,kv_tokens=9000,dim=128,dtype=bf16,out=bf16", 0},
        {"heads=1,tokens=64,kv_tokens=12900,dim=128,dtype=bf16,out=bf16,causal", 4}, /* long shares */
        {"heads=1,tokens=33,kv_tokens=7001,dim=256,dtype=f16,out=f16", 4},
        {"heads=4,tokens=300,dim=64,dtype=f32", 0},
        {"heads=4,tokens=300,dim=256,dtype=f32", 0}};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        cuda_case c = {.problem = parse(problems[i].text), .backward = true, .rows = 6, .seed = i};
        cuda_case_open(&c);
        for (int k = 0; k < cuda.row_count; k++) {
            repeat(&c, false, &cuda.rows[k], problems[i].sms);
            repeat(&c, true, &cuda.rows[k], problems[i].sms);
        }
        cuda_case_close(&c);
    }
    cuda_conclude();
}

/* ---- graphs ---- */

/* What is used of the driver's graphs, found as the library finds its own. */
typedef struct graphs {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*instantiate)(void **run, void *graph, unsigned long long flags);
    int (*launch)(void *run, void *stream);
    int (*destroy_run)(void *run);
    int (*destroy)(void *graph);
} graphs;

static bool find_graphs(graphs *g)
{
    static const char *const names[] = {"cuStreamBeginCapture_v2",     "cuStreamEndCapture",
                                        "cuGraphInstantiateWithFlags", "cuGraphLaunch",
                                        "cuGraphExecDestroy",          "cuGraphDestroy"};
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *found[6] = {NULL};
    bool all = library != NULL;
    for (int i = 0; i < 6 && all; i++) {
        found[i] = dlsym(library, names[i]);
        all = found[i] != NULL;
    }
    memcpy(g, found, sizeof *g);
    return all && attn_cuda_use(cuda.gpu) == ATTN_OK;
}

static void replay(cuda_case *c, bool backward, void *stream, void *graph, const bits *eager, const char *row,
                   const graphs *g)
{
    void *run = NULL;
    assert_int_equal(g->instantiate(&run, graph, 0), 0);
    for (int i = 0; i < 3; i++) {
        cuda_case_reset(c, backward);
        assert_int_equal(g->launch(run, stream), 0);
        assert_int_equal(attn_cuda_wait(cuda.gpu, stream), ATTN_OK);
        cuda_case_fetch(c, backward);
        cuda_expect(same(eager, c, backward), "%s, %s: other bits from a graph", row,
                    backward ? "backward" : "forward");
    }
    assert_int_equal(g->destroy_run(run), 0);
}

/* The capture comes first: it may have the kernels to load. */
static void capture(cuda_case *c, bool backward, const attn_verdict *row, const graphs *g)
{
    prepared x;
    bits eager = {{NULL, NULL, NULL}};
    void *stream = NULL, *graph = NULL;
    if (!prepare(&x, c, backward, row->name, 0)) {
        return;
    }
    assert_int_equal(attn_cuda_stream_create(cuda.gpu, &stream), ATTN_OK);
    assert_int_equal(g->begin(stream, 0), 0); /* 0: whatever would wait or allocate is an error */
    const attn_status status = execute(&x, c, backward, stream);
    const int ended = g->end(stream, &graph);
    cuda_expect(status == ATTN_OK && ended == 0, "%s: cannot be captured: %s (%d)", row->name,
                attn_last_error(), ended);
    cuda_case_reset(c, backward);
    assert_int_equal(execute(&x, c, backward, NULL), ATTN_OK);
    cuda_case_fetch(c, backward);
    keep(&eager, c, backward);
    if (status == ATTN_OK && ended == 0) {
        replay(c, backward, stream, graph, &eager, row->name, g);
    }
    if (graph != NULL) {
        (void)g->destroy(graph);
    }
    attn_cuda_stream_destroy(cuda.gpu, stream);
    drop(&eager);
    finish(&x);
}

static void capture_all(cuda_case *c, const graphs *g)
{
    cuda_case_open(c);
    for (int k = 0; k < cuda.row_count; k++) {
        capture(c, false, &cuda.rows[k], g);
        capture(c, true, &cuda.rows[k], g);
    }
    cuda_case_close(c);
}

static void test_graphs(void **state)
{
    (void)state;
    graphs g;
    static const char *const problems[] = {
        "batch=2,heads=4,kv_heads=2,tokens=300,dim=128,dtype=bf16,out=bf16,causal",
        "heads=8,kv_heads=2,tokens=1,kv_tokens=9000,dim=128,dtype=bf16,out=bf16",
        "heads=8,kv_heads=2,tokens=10,kv_tokens=9000,dim=128,dtype=bf16,out=bf16",
        "heads=2,tokens=200,dim=64,dtype=f32", "heads=2,tokens=200,dim=256,dtype=f32"};
    static const char *const unequal[] = {
        "batch=5,heads=4,kv_heads=2,tokens=300,dim=128,dtype=bf16,out=bf16,causal",
        "batch=5,heads=4,kv_heads=2,tokens=9,kv_tokens=3000,dim=64,dtype=f16,out=f16",
        "batch=5,heads=2,tokens=200,dim=64,dtype=f32"};
    if (!find_graphs(&g)) {
        skip();
    }
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        capture_all(&(cuda_case){.problem = parse(problems[i]), .backward = true, .rows = 4, .seed = 60}, &g);
    }
    for (size_t i = 0; i < sizeof unequal / sizeof unequal[0]; i++) {
        cuda_case c = {.problem = parse(unequal[i]), .backward = true, .rows = 4, .seed = 61};
        uint64_t seed = 62 + i;
        c.cu_q = case_lengths(&seed, c.problem.batch, c.problem.tokens_q);
        c.cu_kv = case_lengths(&seed, c.problem.batch, c.problem.tokens_kv);
        capture_all(&c, &g);
    }
    cuda_conclude();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graphs), /* first: nothing is loaded yet */
        cmocka_unit_test(test_bits_repeat),
    };
    return cuda_main(argc, argv, "cuda_repeats", tests, sizeof tests / sizeof tests[0]);
}
