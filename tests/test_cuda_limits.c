/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_limits.c - where the GPU's kernels end: tensors beyond 2^31 elements, which they take, and what
 * they refuse with words that say what to do.
 */
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

static attn_options options_of(bool backward, const char *kernel)
{
    return (attn_options){.size = sizeof(attn_options),
                          .device = ATTN_CUDA,
                          .gpu = cuda.gpu,
                          .in_memory = 1,
                          .backward = backward,
                          .kernel = kernel};
}

/* ---- beyond 2^31 elements ---- */

/* A tensor whose sequences, heads or tokens lie so far apart that the last one begins beyond 2^31 elements,
 * and one where they lie side by side, from and to which its bytes are copied. */
typedef struct far_tensor {
    const cuda_tensor *near;
    char *block;
    attn_tensor t;
    int64_t count;       /* of what lies apart */
    int64_t apart, size; /* bytes from one to the next; of one */
} far_tensor;

/* axis: which lies apart; those before it have one element. */
static void far_open(far_tensor *x, const cuda_tensor *near, int axis, bool input)
{
    const case_tensor *t = &near->host;
    const int64_t bytes = (int64_t)attn_dtype_size(t->dtype), far = INT64_C(1) << 31;
    *x = (far_tensor){.near = near, .count = t->size[axis]};
    int64_t stride = 1;
    for (int i = 3; i >= 0; i--) {
        if (i == axis) {
            x->size = stride * bytes;
            stride = (far / (t->size[i] > 1 ? t->size[i] - 1 : 1) / 64 + 1) * 64;
            x->apart = stride * bytes;
        }
        x->t.stride[i] = stride;
        stride *= t->size[i];
    }
    void *block = NULL;
    assert_int_equal(attn_cuda_alloc(cuda.gpu, &block, (size_t)((x->count - 1) * x->apart + x->size)),
                     ATTN_OK);
    x->t.data = x->block = block;
    for (int64_t i = 0; i < x->count; i++) {
        char *there = x->block + i * x->apart;
        const char *from = near->block + CUDA_GUARD + i * x->size;
        assert_int_equal(input ? attn_cuda_copy(cuda.gpu, there, from, (size_t)x->size, NULL)
                               : attn_cuda_fill(cuda.gpu, there, 0xff, (size_t)x->size, NULL),
                         ATTN_OK);
    }
}

/* Brings an output to its near place, and ends. */
static void far_close(far_tensor *x, bool output)
{
    for (int64_t i = 0; i < x->count && output; i++) {
        char *to = x->near->block + CUDA_GUARD + i * x->size;
        assert_int_equal(attn_cuda_copy(cuda.gpu, to, x->block + i * x->apart, (size_t)x->size, NULL),
                         ATTN_OK);
    }
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
    attn_cuda_free(cuda.gpu, x->block);
}

/* The same where it lies side by side. */
static attn_status run_near(const cuda_case *c, bool backward, const attn_options *o)
{
    const attn_io io = cuda_case_io(c);
    const attn_gradients g = cuda_case_gradients(c);
    return backward ? attn_backward(&c->problem, &g, o) : attn_forward(&c->problem, &io, o);
}

static void try_far(cuda_case *c, int axis, bool backward, const attn_verdict *row)
{
    enum { Q, K, V, O, DOUT, DQ, DK, DV, ALL };
    const cuda_tensor *near[ALL] = {&c->q,    &c->k,  &c->v,  backward ? &c->given_o : &c->o,
                                    &c->dout, &c->dq, &c->dk, &c->dv};
    const int count = backward ? ALL : O + 1;
    far_tensor x[ALL];
    const attn_options o = options_of(backward, row->name);
    cuda_case_reset(c, backward);
    for (int i = 0; i < count; i++) {
        far_open(&x[i], near[i], axis, i <= V || (backward && i <= DOUT));
    }
    attn_io io = cuda_case_io(c);
    attn_gradients g = cuda_case_gradients(c);
    io.q = g.q = x[Q].t, io.k = g.k = x[K].t, io.v = g.v = x[V].t, io.o = g.o = x[O].t;
    if (backward) {
        g.dout = x[DOUT].t, g.dq = x[DQ].t, g.dk = x[DK].t, g.dv = x[DV].t;
    }
    const attn_status status =
        backward ? attn_backward(&c->problem, &g, &o) : attn_forward(&c->problem, &io, &o);
    for (int i = 0; i < count; i++) {
        far_close(&x[i], i == O ? !backward : i >= DQ);
    }
    if (status == ATTN_EUNSUPPORTED) {
        cuda_expect(run_near(c, backward, &o) == status, "%s takes it only where it lies near: %s", row->name,
                    attn_last_error());
        cuda.refused++;
        return;
    }
    cuda_expect(status == ATTN_OK, "%s: %s", row->name, attn_last_error());
    *(backward ? &cuda.backward : &cuda.forward) += 1;
    cuda_case_fetch(c, backward);
    cuda_case_compare(c, backward, row);
}

static void test_beyond_31_bits(void **state)
{
    (void)state;
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    enum { BATCH, HEAD, TOKEN };
    static const struct {
        int axis;
        const char *problem;
    } cases[] = {{HEAD, "heads=2,tokens=200,dim=128,dtype=bf16,out=bf16,causal"},
                 {HEAD, "heads=2,tokens=2,kv_tokens=700,dim=64,dtype=f16,out=f16"},
                 {BATCH, "batch=2,heads=3,tokens=200,dim=64,dtype=f16,out=f16"},
                 {BATCH, "batch=2,heads=1,tokens=9,kv_tokens=300,dim=128,dtype=bf16,out=bf16"},
                 {TOKEN, "heads=1,tokens=200,dim=128,dtype=bf16,out=bf16,causal"},
                 {TOKEN, "heads=1,tokens=3,kv_tokens=300,dim=64,dtype=f16,out=f16"},
                 {HEAD, "heads=2,tokens=200,dim=256,dtype=bf16,out=bf16"},
                 {TOKEN, "heads=1,tokens=70,kv_tokens=130,dim=128,dtype=f32,causal"},
                 {BATCH, "batch=2,heads=2,tokens=90,dim=256,dtype=f32"}};
    assert_int_equal(attn_cuda_look(cuda.gpu, &info), ATTN_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cuda_case c = {.problem = parse(cases[i].problem), .backward = true, .rows = 20, .seed = 31};
        /* 8 arrays of gradients, and room for what else there is */
        const size_t bytes = (8 * attn_dtype_size(c.problem.dtype) << 31) + ((size_t)6 << 30);
        if (cuda.small || info.memory_free < bytes) {
            (void)printf("beyond 2^31 elements, %s: skipped, for want of %zu GiB\n", cases[i].problem,
                         bytes >> 30);
            continue;
        }
        cuda_case_open(&c);
        for (int k = 0; k < cuda.row_count; k++) {
            try_far(&c, cases[i].axis, false, &cuda.rows[k]);
            try_far(&c, cases[i].axis, true, &cuda.rows[k]);
        }
        cuda_case_close(&c);
    }
    cuda_conclude();
}

/* ---- refusals ---- */

static void expect_refusal(attn_status got, attn_status want, const char *words)
{
    cuda_expect(got == want && strstr(attn_last_error(), words) != NULL,
                "status %d, not %d, and \"%s\" says nothing of \"%s\"", (int)got, (int)want,
                got != ATTN_OK ? attn_last_error() : "", words);
}

/* Of an axis of one element any stride is right: nobody refuses it, and it changes no bit. */
static void test_single_axes(void **state)
{
    (void)state;
    enum { KEYS = 40, DIM = 64 };
    cuda_case c = {.problem = parse("heads=1,tokens=1,kv_tokens=40,dim=64,dtype=bf16,out=bf16"), .seed = 9};
    cuda_case_open(&c);
    for (int k = 0; k < cuda.row_count; k++) {
        const attn_options o = options_of(false, cuda.rows[k].name);
        attn_io io = cuda_case_io(&c);
        attn_tensor *t[] = {&io.q, &io.o, &io.k, &io.v};
        uint16_t out[2][DIM] = {{0}};
        attn_status status[2];
        for (int odd = 0; odd < 2; odd++) {
            for (int i = 0; i < 4 && odd; i++) {
                const int64_t strides[] = {-7, 13, i < 2 ? -3 : DIM, 1};
                memcpy(t[i]->stride, strides, sizeof strides);
            }
            assert_int_equal(attn_cuda_fill(cuda.gpu, io.o.data, 0xff, sizeof out[odd], NULL), ATTN_OK);
            status[odd] = attn_forward(&c.problem, &io, &o);
            assert_int_equal(attn_cuda_copy(cuda.gpu, out[odd], io.o.data, sizeof out[odd], NULL), ATTN_OK);
        }
        cuda_expect(status[1] == status[0] && memcmp(out[0], out[1], sizeof out[0]) == 0,
                    "%s, odd strides: %s", cuda.rows[k].name, attn_last_error());
    }
    cuda_case_close(&c);
    cuda_conclude();
}

/* Copies a case's first head of K and V, or its first sequence, over all others. */
static void repeat_first(const cuda_tensor *x, int axis)
{
    const case_tensor *t = &x->host;
    const int64_t size =
        (axis == 0 ? t->size[1] : 1) * t->size[2] * t->size[3] * (int64_t)attn_dtype_size(t->dtype);
    char *first = x->block + CUDA_GUARD;
    for (int64_t i = 1; i < t->size[0] * (axis == 0 ? 1 : t->size[1]); i++) {
        assert_int_equal(attn_cuda_copy(cuda.gpu, first + i * size, first, (size_t)size, NULL), ATTN_OK);
    }
}

/* Outputs of a forward pass, or gradients, all in one. */
static void fetch_all(const cuda_case *c, bool backward, char *to)
{
    const cuda_tensor *x[] = {backward ? &c->dq : &c->o, &c->dk, &c->dv};
    for (int i = 0; i < (backward ? 3 : 1); i++) {
        const int64_t *size = x[i]->host.size;
        const size_t bytes =
            (size_t)(size[0] * size[1] * size[2] * size[3]) * attn_dtype_size(x[i]->host.dtype);
        assert_int_equal(attn_cuda_copy(cuda.gpu, to, x[i]->block + CUDA_GUARD, bytes, NULL), ATTN_OK);
        to += bytes;
    }
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
}

/* Heads, or sequences, that share their keys and values by a stride of 0 get what copies of these get. */
static void try_broadcast(cuda_case *c, int axis, bool backward, const attn_verdict *row)
{
    static char out[2][1 << 21];
    attn_options o = options_of(backward, row->name);
    attn_status status[2];
    o.deterministic = 1;
    memset(out, 0, sizeof out);
    for (int shared = 0; shared < 2; shared++) {
        attn_io io = cuda_case_io(c);
        attn_gradients g = cuda_case_gradients(c);
        cuda_case_reset(c, backward);
        if (shared) {
            io.k.stride[axis] = io.v.stride[axis] = g.k.stride[axis] = g.v.stride[axis] = 0;
        }
        status[shared] = backward ? attn_backward(&c->problem, &g, &o) : attn_forward(&c->problem, &io, &o);
        fetch_all(c, backward, out[shared]);
    }
    cuda_expect(status[0] == status[1] && memcmp(out[0], out[1], sizeof out[0]) == 0,
                "%s, %s, stride 0 of axis %d: %s", row->name, backward ? "backward" : "forward", axis,
                status[1] == ATTN_OK ? "other bits" : attn_last_error());
    *(backward ? &cuda.backward : &cuda.forward) += status[1] == ATTN_OK;
}

static void test_broadcast(void **state)
{
    (void)state;
    static const char *const problems[] = {
        "batch=2,heads=4,tokens=3,kv_tokens=700,dim=64,dtype=bf16,out=bf16",
        "batch=3,heads=4,kv_heads=2,tokens=40,kv_tokens=300,dim=128,dtype=f16,out=f16,causal",
        "batch=2,heads=3,tokens=65,kv_tokens=130,dim=256,dtype=bf16,out=bf16",
        "batch=2,heads=2,tokens=50,kv_tokens=90,dim=64,dtype=f32"};
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        for (int axis = 0; axis < 2; axis++) {
            cuda_case c = {.problem = parse(problems[i]), .backward = true, .rows = 2, .seed = 12};
            cuda_case_open(&c);
            repeat_first(&c.k, axis);
            repeat_first(&c.v, axis);
            for (int k = 0; k < cuda.row_count; k++) {
                try_broadcast(&c, axis, false, &cuda.rows[k]);
                try_broadcast(&c, axis, true, &cuda.rows[k]);
            }
            cuda_case_close(&c);
        }
    }
    cuda_conclude();
}

/* Is it computed, or refused with words about 16 bytes? */
static bool refused_well(attn_status status)
{
    return status == ATTN_OK ||
           (status == ATTN_EUNSUPPORTED && (strstr(attn_last_error(), "16 bytes") != NULL ||
                                            strstr(attn_last_error(), "no gradients") != NULL ||
                                            strstr(attn_last_error(), "fp32 inputs") != NULL));
}

/* Arrays that do not lie on multiples of 16 bytes are computed, or refused with words about these. */
static void test_unaligned(void **state)
{
    (void)state;
    cuda_case c = {.problem = parse("heads=2,tokens=40,dim=64,dtype=bf16,out=bf16"),
                   .layout = CUDA_PADDED,
                   .backward = true,
                   .seed = 8};
    cuda_case_open(&c);
    for (int k = 0; k < cuda.row_count; k++) {
        for (int which = 0; which < 3; which++) {
            attn_io io = cuda_case_io(&c);
            attn_gradients g = cuda_case_gradients(&c);
            attn_tensor *t[] = {&io.q, &io.k, &io.v}, *u[] = {&g.q, &g.k, &g.v};
            const attn_options o = options_of(false, cuda.rows[k].name);
            if (which == 1) {
                t[which]->stride[2] = u[which]->stride[2] = 65; /* inside of the array, whatever lies there */
            } else {
                t[which]->data = (char *)t[which]->data + 2;
                u[which]->data = t[which]->data;
            }
            attn_status status = attn_forward(&c.problem, &io, &o);
            cuda_expect(refused_well(status), "%s, unaligned: %s", cuda.rows[k].name, attn_last_error());
            status = attn_backward(&c.problem, &g, &o);
            cuda_expect(refused_well(status), "%s, unaligned, backward: %s", cuda.rows[k].name,
                        attn_last_error());
        }
    }
    cuda_case_close(&c);
    cuda_conclude();
}

static void test_refusals(void **state)
{
    (void)state;
    cuda_case c = {
        .problem = parse("heads=2,tokens=40,dim=64,dtype=bf16,out=bf16"), .backward = true, .seed = 8};
    cuda_case_open(&c);
    const attn_options good = options_of(false, NULL); /* some row of the table takes it */
    const attn_io io = cuda_case_io(&c);
    attn_options o;
    attn_io i;
    attn_problem p = c.problem;
    const attn_gradients g = cuda_case_gradients(&c);
    attn_gradients h;
    expect_refusal(attn_forward(&p, (i = io, i.merge = 1, &i), &good), ATTN_EINVAL, "merge");
    expect_refusal(attn_forward(&p, (i = io, i.k.data = NULL, &i), &good), ATTN_EINVAL, "q, k and v");
    expect_refusal(attn_forward(&p, (i = io, i.o.data = NULL, &i), &good), ATTN_EINVAL, "o");
    i = io;
    i.q.stride[0] = 2 * 40 * 128, i.q.stride[1] = 40 * 128, i.q.stride[2] = 128, i.q.stride[3] = 2;
    expect_refusal(attn_forward(&p, &i, &good), ATTN_EUNSUPPORTED, "dense");
    i = io;
    i.cu_seqlens_q = (int64_t *)(void *)c.lse.block; /* never read: refused by its total */
    expect_refusal(attn_forward(&p, &i, &good), ATTN_EINVAL, "cu_seqlens");
    i.cu_seqlens_kv = i.cu_seqlens_q;
    i.total_q = i.total_kv = 41;
    expect_refusal(attn_forward(&p, &i, &good), ATTN_EINVAL, "total_q");
    p.placed = 1;
    expect_refusal(attn_forward(&p, &i, &good), ATTN_EINVAL, "placed");
    p = c.problem;
    p.total_q = p.total_kv = 30;
    expect_refusal(attn_forward(&p, &io, &good), ATTN_EINVAL, "total");
    p = c.problem;
    expect_refusal(attn_forward(&p, &io, (o = good, o.workers = 3, &o)), ATTN_EUNSUPPORTED, "workers");
    expect_refusal(attn_forward(&p, &io, (o = good, o.spool = "x", &o)), ATTN_EUNSUPPORTED, "spool");
    expect_refusal(attn_forward(&p, &io, (o = good, o.sms = -1, &o)), ATTN_EINVAL, "sms");
    expect_refusal(attn_forward(&p, &io, (o = good, o.gpu = 63, &o)), ATTN_EUNSUPPORTED, "GPU 63");
    expect_refusal(attn_forward(&p, &io, (o = good, o.kernel = "quantum", &o)), ATTN_EINVAL, "quantum");
    expect_refusal(attn_backward(&p, (h = g, h.lse.data = NULL, &h), &good), ATTN_EINVAL, "lse");
    expect_refusal(attn_backward(&p, (h = g, h.o.data = NULL, &h), &good), ATTN_EINVAL, "delta");
    cuda_case_close(&c);
    cuda_conclude();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beyond_31_bits), cmocka_unit_test(test_single_axes),
        cmocka_unit_test(test_broadcast),      cmocka_unit_test(test_unaligned),
        cmocka_unit_test(test_refusals),
    };
    return cuda_main(argc, argv, "cuda_limits", tests, sizeof tests / sizeof tests[0]);
}
