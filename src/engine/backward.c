/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backward.c - the gradients of a problem on one worker (Dao et al., arXiv 2205.14135, appendix B).
 *
 *     prepare   by query tile: lse and delta dense, dq to zero
 *     work      by range of keys: dk and dv of the range, its part of dq (ranges.c)
 *     finish    by query tile: dq out of fp32, where it is stored in 16 bits
 *
 * Where the memory limit has no room for dq in fp32 (dq_apart), `work` leaves it out, and a last pass makes
 * it query tile by query tile, with S and dP once more: 7 products instead of 5, in the same bits.
 *
 * Where dq, dk and dv are fp32 with dense dims they are summed in their place.  Cost: 2.5 times the forward
 * FLOPs; memory beside scratch: lse and delta, and, unless apart, dq in fp32 where it is stored in 16
 * bits: each range of keys adds to it in turn, and it is rounded once.
 */
#include <string.h>

#include "engine/backward.h"

/* Query rows of a head, over all sequences, at most. */
static int64_t rows_of_head(const attn_problem *p)
{
    const int64_t rows = p->batch * p->tokens_q;
    return p->total_q > 0 ? attn__min(p->total_q, rows) : rows;
}

/* Places for query tiles: attn__first_place(). */
static int64_t places_of(const attn_plan *plan)
{
    return rows_of_head(&plan->problem) / plan->tile_q + plan->problem.batch;
}

attn__space attn__backward_space(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    const int64_t real = (int64_t)sizeof(float), integer = (int64_t)sizeof(int64_t);
    const int64_t rows = rows_of_head(p) * p->heads_q;
    attn__space s = {.q_rows = p->tokens_q, .kv_rows = p->tokens_kv};
    s.lists = 2 * attn__aligned(p->batch * integer) + attn__aligned((attn__ranges_most(plan) + 1) * integer);
    s.partial = 2 * attn__aligned(rows * real);
    if (!plan->dq_apart) {
        s.partial += attn__aligned(p->dtype_out != ATTN_F32 ? rows * p->dim_qk * real : 0) +
                     attn__aligned(places_of(plan) * p->heads_q * (int64_t)sizeof(atomic_uint));
    }
    s.thread = attn__range_space(plan);
    return s;
}

static void lay_out(attn__backward *b)
{
    const attn_plan *plan = b->plan;
    const attn_problem *p = &plan->problem;
    const int64_t real = (int64_t)sizeof(float), integer = (int64_t)sizeof(int64_t);
    const int64_t rows = rows_of_head(p) * p->heads_q;
    char *at = b->run.workspace;
    b->places = places_of(plan);
    b->order = attn__take(&at, p->batch * integer);
    b->count = attn__take(&at, p->batch * integer);
    b->first = attn__take(&at, (attn__ranges_most(plan) + 1) * integer);
    b->lse = attn__take(&at, rows * real);
    b->delta = attn__take(&at, rows * real);
    if (!plan->dq_apart) {
        if (p->dtype_out != ATTN_F32) {
            b->dq = attn__take(&at, rows * p->dim_qk * real);
        }
        b->turns = attn__take(&at, b->places * p->heads_q * (int64_t)sizeof(atomic_uint));
    }
    b->threads = at;
    if (b->io.dq.data == NULL) {
        b->dq = NULL;
    }
}

/* ---- by query tile ---- */

typedef struct tile {
    attn__sequence s;
    int64_t head, row, count;
} tile;

/* The last sequence whose tiles begin at `place` or before it.  near: one that is not behind it, or -1. */
static int64_t sequence_of(const attn__backward *b, int64_t place, int64_t near)
{
    const int64_t batch = b->plan->problem.batch;
    if (near < 0) {
        int64_t high = batch;
        for (near = 0; high - near > 1;) {
            int64_t middle = near + (high - near) / 2;
            *(attn__first_place(b, middle) <= place ? &near : &high) = middle;
        }
    }
    while (near + 1 < batch && attn__first_place(b, near + 1) <= place) {
        near++;
    }
    return near;
}

/* The rows of a number in [0, places * heads_q), of which a thread asks for rising ones; none where no tile
 * is. near: its last sequence, or -1. */
static tile tile_at(const attn__backward *b, int64_t number, int64_t *near)
{
    const int64_t tile_q = b->plan->tile_q, heads = b->plan->problem.heads_q, place = number / heads;
    *near = sequence_of(b, place, *near);
    tile t = {.head = number % heads, .s = attn__sequence_at(&b->sequences, *near)};
    t.row = (place - attn__first_place(b, *near)) * tile_q;
    t.count = attn__max(0, attn__min(tile_q, t.s.q_count - t.row));
    return t;
}

static attn__rows rows_at(const attn_tensor *t, attn_dtype dtype, const tile *at)
{
    return (attn__rows){attn__tensor_at(t, dtype, at->s.batch, at->head, at->s.q_first + at->row), dtype,
                        t->stride[2], t->stride[3]};
}

static void prepare(attn__backward *b, int64_t number, int64_t *near)
{
    const attn_plan *plan = b->plan;
    const attn_problem *p = &plan->problem;
    tile t = tile_at(b, number, near);
    if (b->turns != NULL) {
        atomic_init(&b->turns[number], 0);
    }
    if (t.count == 0) {
        return;
    }
    int64_t at = attn__row_at(b, &t.s, t.head, t.row);
    attn__rows lse = rows_at(&b->io.lse, ATTN_F32, &t);
    attn_to_f32(b->lse + at, lse.data, ATTN_F32, lse.token, t.count);
    if (b->io.delta.data != NULL) {
        attn__rows delta = rows_at(&b->io.delta, ATTN_F32, &t);
        attn_to_f32(b->delta + at, delta.data, ATTN_F32, delta.token, t.count);
    } else {
        attn__rows o = rows_at(&b->io.o, p->dtype_out, &t), dout = rows_at(&b->io.dout, p->dtype, &t);
        attn__delta(b->delta + at, &o, &dout, t.count, p->dim_v);
    }
    if (b->dq != NULL) {
        memset(b->dq + at * p->dim_qk, 0, (size_t)(t.count * p->dim_qk) * sizeof *b->dq);
    } else if (b->io.dq.data != NULL && !b->io.accumulate && !plan->dq_apart) {
        attn__put_zeros(plan, &b->io.dq, t.s.batch, t.head, t.s.q_first + t.row, t.count, p->dim_qk);
    }
}

static void finish(attn__backward *b, int64_t number, int64_t *near)
{
    int64_t dim = b->plan->problem.dim_qk;
    tile t = tile_at(b, number, near);
    if (t.count == 0) {
        return;
    }
    attn__put_rows(b->plan, &b->io.dq, t.s.batch, t.head, t.s.q_first + t.row, t.count, dim,
                   b->dq + attn__row_at(b, &t.s, t.head, t.row) * dim, b->io.accumulate);
}

static void finish_apart(attn__backward *b, int64_t number, int64_t *near)
{
    const attn_plan *plan = b->plan;
    const tile t = tile_at(b, number, near);
    if (t.count > 0) {
        const float *dq = attn__ranges_queries(b, *near, t.head, t.row / plan->tile_q);
        attn__put_rows(plan, &b->io.dq, t.s.batch, t.head, t.s.q_first + t.row, t.count, plan->problem.dim_qk,
                       dq, b->io.accumulate);
    }
}

/* Is there enough to do for several threads? */
static bool worth_threads(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    const int64_t cells = attn__band_cells(plan->band, 0, p->tokens_q, 0, p->tokens_kv);
    return attn__worth_threads(2.5 * attn__flops(p, cells));
}

/* Each thread has rising numbers, as tile_at() wants them. */
static void each_tile(attn__backward *b, void (*work)(attn__backward *, int64_t, int64_t *))
{
    const bool together = worth_threads(b->plan);
    const int64_t numbers = b->places * b->plan->problem.heads_q;
#pragma omp parallel num_threads(b->plan->threads) if (together)
    {
        int64_t near = -1;
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t number = 0; number < numbers; number++) {
            work(b, number, &near);
        }
    }
}

static attn_status compute(attn__backward *b)
{
    const attn_plan *plan = b->plan;
    const bool together = worth_threads(plan);
    const bool apart = plan->dq_apart && b->io.dq.data != NULL;
    each_tile(b, prepare);
    attn__ranges_number(b);
    if (!apart || b->io.dk.data != NULL || b->io.dv.data != NULL) {
#pragma omp parallel num_threads(plan->threads) if (together)
        attn__ranges_work(b);
    }
    if (attn__run_stopped(&b->run)) {
        return attn__fail(b->run.status, "%s", b->run.text);
    }
    if (apart || b->dq != NULL) {
        each_tile(b, apart ? finish_apart : finish);
    }
    return ATTN_OK;
}

/* ---- execute ---- */

attn_status attn__gradients_open(attn_gradients *io, attn__sequences *s, const attn_problem *p,
                                 const attn_gradients *from)
{
    if (from == NULL || from->size != sizeof *from) {
        return attn__fail(ATTN_EINVAL, "attn_gradients: set its size field to sizeof(attn_gradients)");
    }
    if (from->q.data == NULL || from->k.data == NULL || from->v.data == NULL || from->dout.data == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_gradients: give q, k, v and dout as tensors");
    }
    ATTN__TRY(attn__sequences_open(s, p, from->cu_seqlens_q, from->cu_seqlens_kv));
    int64_t queries = attn__sequences_tokens(s, ATTN_Q), keys = attn__sequences_tokens(s, ATTN_K);
    ATTN__TRY(attn__gradients_apart(p, from, queries, keys));
    *io = *from;
    attn__tensor_strides(&io->q, p->heads_q, queries, p->dim_qk);
    attn__tensor_strides(&io->k, p->heads_kv, keys, p->dim_qk);
    attn__tensor_strides(&io->v, p->heads_kv, keys, p->dim_v);
    attn__tensor_strides(&io->o, p->heads_q, queries, p->dim_v);
    attn__tensor_strides(&io->lse, p->heads_q, queries, 1);
    attn__tensor_strides(&io->delta, p->heads_q, queries, 1);
    attn__tensor_strides(&io->dout, p->heads_q, queries, p->dim_v);
    attn__tensor_strides(&io->dq, p->heads_q, queries, p->dim_qk);
    attn__tensor_strides(&io->dk, p->heads_kv, keys, p->dim_qk);
    attn__tensor_strides(&io->dv, p->heads_kv, keys, p->dim_v);
    return ATTN_OK;
}

attn_status attn_execute_backward(const attn_plan *plan, const attn_gradients *io, void *workspace)
{
    attn__backward b = {.plan = plan};
    if (plan != NULL && plan->gpu != NULL && plan->backward) {
        return attn__device_backward(plan, io, workspace);
    }
    if (plan == NULL || workspace == NULL) {
        return attn__fail(ATTN_EINVAL,
                          "attn_execute_backward needs a plan and attn_plan_workspace() bytes of workspace");
    }
    if (!plan->backward) {
        return attn__fail(ATTN_EINVAL, "the plan was made without options.backward, for attn_execute");
    }
    ATTN__TRY(attn__gradients_open(&b.io, &b.sequences, &plan->problem, io));
    if (io->lse.data == NULL || (io->o.data == NULL && io->delta.data == NULL)) {
        return attn__fail(ATTN_EINVAL, "attn_gradients: give lse, and o or delta, from the forward pass");
    }
    ATTN__TRY(attn__run_open(&b.run, plan, workspace));
    atomic_init(&b.next, 0);
    atomic_init(&b.cells, 0);
    lay_out(&b);
    attn_status status = compute(&b);
    attn__run_close(&b.run);
    return status;
}

attn_status attn_backward(const attn_problem *problem, const attn_gradients *io, const attn_options *options)
{
    attn_options o = options != NULL ? *options : ATTN_INIT(attn_options);
    attn_problem copy;
    attn_plan *plan;
    o.backward = 1;
    o.in_memory = 1;
    if (io != NULL && io->size == sizeof *io) {
        problem = attn__problem_with_totals(&copy, problem, &o, io->cu_seqlens_q, io->cu_seqlens_kv,
                                            io->total_q, io->total_kv);
    }
    ATTN__TRY(attn_plan_create(&plan, problem, &o));
    void *workspace;
    attn_status status = attn__workspace_open(&workspace, plan);
    if (status == ATTN_OK) {
        status = attn_execute_backward(plan, io, workspace);
        status = attn__workspace_close(workspace, plan, io != NULL ? io->stream : NULL, status);
    }
    attn_plan_destroy(plan);
    return status;
}
