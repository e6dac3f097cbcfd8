/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_case_run.c - cases run on the GPU and compared.  See cuda_case.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_case.h"

void cuda_case_text(const cuda_case *c, char text[400])
{
    static const char *const layouts[] = {"bhnd", "bnhd", "padded"};
    static const char *const kinds[] = {"", ", huge", ", equal", ", nan"};
    char problem[256];
    (void)attn_problem_print(&c->problem, problem, sizeof problem);
    (void)snprintf(text, 400, "%s; %s%s%s%s%s", problem, layouts[c->layout], kinds[c->kind],
                   c->cu_q != NULL ? ", varlen" : "", c->accumulate ? ", accumulate" : "",
                   c->give_delta ? ", delta" : "");
}

/* ---- running ---- */

attn_io cuda_case_io(const cuda_case *c)
{
    attn_io io = ATTN_INIT(attn_io);
    io.q = cuda_tensor_there(&c->q), io.k = cuda_tensor_there(&c->k), io.v = cuda_tensor_there(&c->v);
    io.o = cuda_tensor_there(&c->o), io.lse = cuda_tensor_there(&c->lse);
    io.cu_seqlens_q = c->cu_there[0], io.cu_seqlens_kv = c->cu_there[1];
    if (c->cu_q != NULL) {
        io.total_q = c->cu_q[c->problem.batch], io.total_kv = c->cu_kv[c->problem.batch];
    }
    return io;
}

attn_gradients cuda_case_gradients(const cuda_case *c)
{
    const attn_io in = cuda_case_io(c);
    attn_gradients io = ATTN_INIT(attn_gradients);
    io.q = in.q, io.k = in.k, io.v = in.v, io.dout = cuda_tensor_there(&c->dout);
    io.lse = cuda_tensor_there(&c->given_lse);
    if (c->give_delta) {
        io.delta = cuda_tensor_there(&c->delta);
    } else {
        io.o = cuda_tensor_there(&c->given_o);
    }
    if (!c->no_dq) {
        io.dq = cuda_tensor_there(&c->dq);
    }
    if (!c->no_dk) {
        io.dk = cuda_tensor_there(&c->dk);
    }
    if (!c->no_dv) {
        io.dv = cuda_tensor_there(&c->dv);
    }
    io.accumulate = c->accumulate;
    io.cu_seqlens_q = in.cu_seqlens_q, io.cu_seqlens_kv = in.cu_seqlens_kv;
    io.total_q = in.total_q, io.total_kv = in.total_kv;
    return io;
}

static int outputs(cuda_case *c, bool backward, cuda_tensor *list[3])
{
    list[0] = backward ? &c->dq : &c->o;
    list[1] = backward ? &c->dk : &c->lse;
    list[2] = &c->dv;
    return backward ? 3 : 2;
}

void cuda_case_reset(cuda_case *c, bool backward)
{
    cuda_tensor *list[3];
    const int count = outputs(c, backward, list);
    for (int i = 0; i < count; i++) {
        const size_t bytes = list[i]->host.buffer.bytes;
        assert_int_equal(attn_cuda_fill(cuda.gpu, list[i]->block, 0xff, bytes + 2 * CUDA_GUARD, NULL),
                         ATTN_OK);
        if (backward && c->accumulate) {
            assert_int_equal(
                attn_cuda_copy(cuda.gpu, list[i]->block + CUDA_GUARD, c->before[i].buffer.data, bytes, NULL),
                ATTN_OK);
        }
    }
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
}

/* Whether the zones around `bytes` in a block are still poison. */
static bool guarded(const char *block, size_t bytes)
{
    static char zone[CUDA_GUARD];
    bool whole = true;
    for (int i = 0; i < 2; i++) {
        const char *from = i == 0 ? block : block + CUDA_GUARD + bytes;
        assert_int_equal(attn_cuda_copy(cuda.gpu, zone, from, CUDA_GUARD, NULL), ATTN_OK);
        assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
        whole = whole && check_poisoned(zone, CUDA_GUARD);
    }
    return whole;
}

void cuda_case_fetch(cuda_case *c, bool backward)
{
    cuda_tensor *list[3];
    const int count = outputs(c, backward, list);
    for (int i = 0; i < count; i++) {
        check_buffer *to = &list[i]->host.buffer;
        assert_int_equal(attn_cuda_copy(cuda.gpu, to->data, list[i]->block + CUDA_GUARD, to->bytes, NULL),
                         ATTN_OK);
    }
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
}

static attn_status execute(cuda_case *c, bool backward, const attn_plan *plan)
{
    const attn_io io = cuda_case_io(c);
    const attn_gradients gradients = cuda_case_gradients(c);
    const size_t bytes = attn_plan_workspace(plan);
    void *block = NULL;
    assert_int_equal(attn_cuda_alloc(cuda.gpu, &block, bytes + 2 * CUDA_GUARD), ATTN_OK);
    assert_int_equal(attn_cuda_fill(cuda.gpu, block, 0xff, bytes + 2 * CUDA_GUARD, NULL), ATTN_OK);
    assert_int_equal(attn_cuda_wait(cuda.gpu, NULL), ATTN_OK);
    void *workspace = bytes > 0 ? (char *)block + CUDA_GUARD : NULL;
    attn_status status =
        backward ? attn_execute_backward(plan, &gradients, workspace) : attn_execute(plan, &io, workspace);
    attn_status waited = attn_cuda_wait(cuda.gpu, NULL);
    if (waited != ATTN_OK) { /* a fault leaves the context unusable, and nothing more can be tested */
        char text[400];
        cuda_case_text(c, text);
        fail_msg("%s: %s", text, attn_last_error());
    }
    cuda_expect(guarded(block, bytes), "writes beyond its workspace of %zu bytes", bytes);
    attn_cuda_free(cuda.gpu, block);
    return status;
}

attn_status cuda_case_run(cuda_case *c, bool backward, const attn_options *options)
{
    attn_options o = *options;
    attn_plan *plan;
    o.device = ATTN_CUDA;
    o.gpu = cuda.gpu;
    o.in_memory = 1;
    o.backward = backward;
    attn_status status = attn_plan_create(&plan, &c->problem, &o);
    if (status != ATTN_OK) {
        return status;
    }
    cuda_case_reset(c, backward);
    status = execute(c, backward, plan);
    attn_plan_destroy(plan);
    cuda_case_fetch(c, backward);
    return status;
}

/* ---- comparing ---- */

/* What is wrong with one array. */
typedef struct finding {
    int64_t elements, wrong, nan, first_token, last_token;
    case_row at;
    int64_t d;
    double got, want, tolerance, worst; /* of the first wrong one; worst: of all, in tolerances */
    double error, reference;            /* squares, of what is finite */
} finding;

static void compare_row(finding *f, const case_tensor *x, case_row at, const double *want, double tolerance,
                        const case_tensor *before)
{
    const int64_t dim = x->size[3];
    for (int64_t d = 0; d < dim; d++) {
        const double got = case_tensor_get(x, at.batch, at.head, at.token, d);
        const double old = before != NULL ? case_tensor_get(before, at.batch, at.head, at.token, d) : 0;
        const double sum = want[d] + old,
                     limit = tolerance + check_half_unit(x->dtype, fabs(sum) + tolerance);
        const bool blind = want[d] == -INFINITY, finite = isfinite(want[d]); /* blind: an lse */
        const bool right = blind ? got == want[d] : finite ? fabs(got - sum) <= limit : !isfinite(got);
        f->elements++;
        if (finite && isfinite(got)) {
            f->error += (got - sum) * (got - sum);
            f->reference += sum * sum;
            f->worst = fabs(got - sum) > 0 ? fmax(f->worst, fabs(got - sum) / limit) : f->worst;
        }
        if (right) {
            continue;
        }
        if (f->wrong++ == 0) {
            f->at = at, f->d = d, f->got = got, f->want = sum, f->tolerance = limit;
            f->first_token = f->last_token = at.token;
        }
        f->nan += isnan(got) != 0;
        f->first_token = at.token < f->first_token ? at.token : f->first_token;
        f->last_token = at.token > f->last_token ? at.token : f->last_token;
    }
}

/* What lies between the elements is still poison, and so are the zones around. */
static bool untouched(const cuda_tensor *x)
{
    const case_tensor *t = &x->host;
    char *copy = NULL;
    case_tensor_keep(t, &copy);
    const size_t row = (size_t)t->size[3] * attn_dtype_size(t->dtype);
    for (int64_t i = 0; i < case_tensor_rows(t); i++) {
        const case_row at = case_tensor_row(t, i);
        const char *element = case_tensor_at(t, at.batch, at.head, at.token, 0);
        check_poison(copy + (element - (char *)t->buffer.data), row);
    }
    const bool kept = check_poisoned(copy, t->buffer.bytes);
    free(copy);
    return kept && guarded(x->block, t->buffer.bytes);
}

static void report(const cuda_case *c, const char *kernel, const char *what, const cuda_tensor *x,
                   const finding *f, double rms_bound, bool gaps)
{
    char text[400];
    const double n = f->elements > 0 ? (double)f->elements : 1;
    const double rms = sqrt(f->error / n);
    cuda_case_text(c, text);
    cuda_expect(
        f->wrong == 0,
        "%s, %s: %lld of %lld elements (%lld NaN, tokens %lld..%lld); first [%lld][%lld][%lld][%lld] = "
        "%.9g, not %.9g +- %.2g; rms error %.3g of %.3g; worst %.3g times; %s",
        kernel, what, (long long)f->wrong, (long long)f->elements, (long long)f->nan,
        (long long)f->first_token, (long long)f->last_token, (long long)f->at.batch, (long long)f->at.head,
        (long long)f->at.token, (long long)f->d, f->got, f->want, f->tolerance, rms, sqrt(f->reference / n),
        f->worst, text);
    if (f->wrong == 0 && rms_bound > 0) {
        cuda_expect(rms <= rms_bound, "%s, %s: rms error %.3g, more than %.3g; %s", kernel, what, rms,
                    rms_bound, text);
    }
    cuda_expect(!gaps || untouched(x), "%s, %s: writes between its rows or around the array; %s", kernel,
                what, text);
}

/* How the kernel rounds weights. */
static void set_rounding(check_bound *bound, const cuda_case *c, const attn_verdict *kernel)
{
    bound->round = kernel->rounds_weights >= 1 && c->problem.dtype == ATTN_BF16  ? 0x1p-8
                   : kernel->rounds_weights >= 2 && c->problem.dtype == ATTN_F16 ? 0x1p-11
                                                                                 : 0;
    bound->step = kernel->rounds_weights >= 2 && c->problem.dtype == ATTN_F16 ? 0x1p-25 : 0;
}

static void compare_forward(const cuda_case *c, const attn_verdict *kernel)
{
    const attn_problem *p = &c->problem;
    check_bound bound = c->bound;
    finding o = {0}, lse = {0};
    set_rounding(&bound, c, kernel);
    for (int64_t plane = 0; plane < p->batch * p->heads_q; plane++) {
        const case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, plane / p->heads_q);
        for (int64_t i = 0; i < c->count[0] && c->chosen[0][i] < s.q_count; i++) {
            const case_row at = {s.batch, plane % p->heads_q, s.q_first + c->chosen[0][i]};
            const double *want = c->want_o + (plane * c->count[0] + i) * p->dim_v;
            const double *want_lse = c->want_lse + plane * c->count[0] + i;
            const bool blind = *want_lse == -INFINITY;
            compare_row(&o, &c->o.host, at, want, blind ? 0 : check_bound_o(&bound), NULL);
            compare_row(&lse, &c->lse.host, at, want_lse, check_bound_lse(&bound, *want_lse), NULL);
        }
    }
    const double n = o.elements > 0 ? (double)o.elements : 1, rms = sqrt(o.reference / n);
    report(c, kernel->name, "o", &c->o, &o, check_bound_rms(&bound, rms) + check_half_unit(p->dtype_out, rms),
           true);
    report(c, kernel->name, "lse", &c->lse, &lse, 0, true);
}

/* dq over the rows, or dk or dv over the keys. */
static void compare_gradient(const cuda_case *c, const attn_verdict *kernel, int which, const cuda_tensor *x)
{
    static const char *const names[] = {"dq", "dk", "dv"};
    const attn_problem *p = &c->problem;
    const int side = which > 0;
    const int64_t heads = side ? p->heads_kv : p->heads_q, dim = x->host.size[3];
    check_slope slope = c->slope;
    finding f = {0};
    set_rounding(&slope.bound, c, kernel);
    for (int64_t plane = 0; plane < p->batch * heads; plane++) {
        const case_piece s = case_piece_of(p, c->cu_q, c->cu_kv, plane / heads);
        const int64_t tokens = side ? s.kv_count : s.q_count, first = side ? s.kv_first : s.q_first;
        for (int64_t i = 0; i < c->count[side] && c->chosen[side][i] < tokens; i++) {
            const int64_t index = plane * c->count[side] + i;
            const double column = side ? c->column[index] : 0;
            slope.column = isfinite(column) ? column : 1;
            compare_row(&f, &x->host, (case_row){s.batch, plane % heads, first + c->chosen[side][i]},
                        c->want[which] + index * dim,
                        which == 0   ? check_bound_dq(&slope)
                        : which == 1 ? check_bound_dk(&slope)
                                     : check_bound_dv(&slope),
                        c->accumulate ? &c->before[which] : NULL);
        }
    }
    report(c, kernel->name, names[which], x, &f, 0, !c->accumulate);
}

void cuda_case_compare(const cuda_case *c, bool backward, const attn_verdict *kernel)
{
    if (!backward) {
        compare_forward(c, kernel);
        return;
    }
    if (!c->no_dq) {
        compare_gradient(c, kernel, 0, &c->dq);
    }
    if (!c->no_dk) {
        compare_gradient(c, kernel, 1, &c->dk);
    }
    if (!c->no_dv) {
        compare_gradient(c, kernel, 2, &c->dv);
    }
}

void cuda_case_try(cuda_case *c, const attn_options *options)
{
    char text[400];
    cuda_case_text(c, text);
    for (int i = 0; i < cuda.row_count; i++) {
        for (int backward = 0; backward <= (int)c->backward; backward++) {
            attn_options o = *options;
            o.kernel = cuda.rows[i].name;
            attn_status status = cuda_case_run(c, backward, &o);
            if (status == ATTN_EUNSUPPORTED) {
                cuda.refused++;
                continue;
            }
            *(backward ? &cuda.backward : &cuda.forward) += 1;
            cuda_expect(status == ATTN_OK, "%s: %s; %s", o.kernel, attn_last_error(), text);
            if (status == ATTN_OK) {
                cuda_case_compare(c, backward, &cuda.rows[i]);
            }
        }
    }
}
