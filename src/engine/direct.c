/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.c - one worker without a spool: what a kernel call gives is the result, and goes where it belongs.
 *
 * Tensors are read in place; a source is read whole into the arena first and then is tensors too.  An item is
 * one query tile of one (sequence, head): one kernel call over all its keys.  Items are numbered through all
 * sequences, the sequence with the most keys first, the last tile first: under a causal mask that is the long
 * one, and short ones fill up the end.  Which item a number means is found among the sequences' first
 * numbers, in O(log batch).
 */
#include "engine/engine.h"

typedef struct direct {
    attn__run *run;
    attn_tensor in[3]; /* where q, k and v lie */
    int64_t *order;    /* sequences by falling number of keys */
    int64_t *first;    /* [batch + 1]: items of those before in that order */
    char *threads;
} direct;

int64_t attn__direct_rows(const attn_problem *problem)
{
    return problem->tokens_q;
}

static int64_t thread_space(const attn_plan *plan)
{
    int64_t tile = plan->tile_q * (plan->problem.dim_v + 1) * (int64_t)sizeof(float);
    return attn__aligned((int64_t)plan->kernel->scratch(&plan->shape)) + attn__aligned(tile);
}

attn__space attn__direct_space(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    attn__bytes bytes = attn__problem_bytes(p);
    attn__space s = {.q_rows = p->tokens_q, .kv_rows = p->tokens_kv};
    if (!plan->in_memory) {
        s.gather = attn__aligned(s.q_rows * bytes.q) + attn__aligned(s.kv_rows * bytes.k) +
                   attn__aligned(s.kv_rows * bytes.v);
    }
    s.lists = 2 * attn__aligned((p->batch + 1) * (int64_t)sizeof(int64_t));
    s.thread = thread_space(plan);
    return s;
}

/* ---- inputs ---- */

/* All of one operand into the arena, which becomes a tensor. */
static attn_status read_operand(direct *d, attn_operand operand, char **at)
{
    const attn_problem *p = &d->run->plan->problem;
    const attn_source *source = &d->run->io->source;
    int64_t heads = attn__heads(p, operand), tokens = attn__tokens(p, operand), dim = attn__dim(p, operand);
    int64_t plane = tokens * dim, bytes = heads * plane * (int64_t)attn_dtype_size(p->dtype);
    char *arena = attn__take(at, p->batch * bytes);
    d->in[operand] = (attn_tensor){arena, {heads * plane, plane, dim, 1}};
    for (int64_t b = 0; b < p->batch; b++) {
        ATTN__TRY(source->read(source->data, operand, b, 0, tokens, arena + b * bytes, plane));
    }
    return ATTN_OK;
}

static attn_status gather(direct *d, char **at)
{
    const attn_problem *p = &d->run->plan->problem;
    attn__bytes bytes = attn__problem_bytes(p);
    double begin = attn__now();
    ATTN__TRY(read_operand(d, ATTN_K, at));
    ATTN__TRY(read_operand(d, ATTN_V, at));
    ATTN__TRY(attn__run_event(d->run, (attn_event){.step = ATTN_STEP_GATHER,
                                                   .group = -1,
                                                   .begin = begin,
                                                   .bytes = p->tokens_kv * (bytes.k + bytes.v)}));
    begin = attn__now();
    ATTN__TRY(read_operand(d, ATTN_Q, at));
    return attn__run_event(
        d->run, (attn_event){.step = ATTN_STEP_GATHER, .begin = begin, .bytes = p->tokens_q * bytes.q});
}

/* ---- items ---- */

static int64_t items_of(const attn_plan *plan, const attn__sequence *s)
{
    return plan->problem.heads_q * attn__ceil_div(s->q_count, plan->tile_q);
}

static void number_items(direct *d)
{
    const attn_plan *plan = d->run->plan;
    const attn__sequences *sequences = &d->run->io->sequences;
    int64_t batch = plan->problem.batch;
    for (int64_t b = 0; b < batch; b++) {
        d->first[b] = attn__sequence_at(sequences, b).kv_count; /* free until the order is known */
    }
    attn__sort_falling(d->order, d->first, batch);
    d->first[0] = 0;
    for (int64_t i = 0; i < batch; i++) {
        attn__sequence s = attn__sequence_at(sequences, d->order[i]);
        d->first[i + 1] = d->first[i] + items_of(plan, &s);
    }
}

/* Rows of the result go straight to their place where they can, through a tile otherwise. */
static attn_status emit(const direct *d, attn__block *block, const attn__sequence *s, int64_t head,
                        char *scratch, float *tile)
{
    const attn_plan *plan = d->run->plan;
    const attn_problem *p = &plan->problem;
    const attn__memory_io *io = d->run->io;
    bool in_place = io->sink.data == io && p->dtype_out == ATTN_F32 && io->o.stride[3] == 1;
    int64_t token = s->q_first + block->first;
    block->o = tile;
    block->o_stride = p->dim_v;
    block->lse = tile + plan->tile_q * p->dim_v;
    if (in_place) {
        block->o = attn__tensor_at(&io->o, ATTN_F32, s->batch, head, token);
        block->o_stride = io->o.stride[2];
    }
    plan->kernel->forward(block, scratch);
    if (!in_place) {
        return io->sink.write(io->sink.data, s->batch, head, token, block->count, block->o, block->o_stride,
                              block->lse);
    }
    if (io->lse.data != NULL) {
        attn_from_f32(attn__tensor_at(&io->lse, ATTN_F32, s->batch, head, token), ATTN_F32, io->lse.stride[2],
                      block->lse, block->count);
    }
    return ATTN_OK;
}

/* One kernel call: a query tile of one head against all keys. */
static attn_status compute_tile(const direct *d, const attn__sequence *s, int64_t head, int64_t tile)
{
    const attn_plan *plan = d->run->plan;
    const attn_problem *p = &plan->problem;
    int64_t row = tile * plan->tile_q, kv_head = head / (p->heads_q / p->heads_kv);
    const attn_tensor *q = &d->in[ATTN_Q], *k = &d->in[ATTN_K], *v = &d->in[ATTN_V];
    char *at = d->threads + attn__thread() * plan->space.thread;
    char *scratch = attn__take(&at, (int64_t)plan->kernel->scratch(&plan->shape));
    const attn__span span = {.count = s->kv_count,
                             .k = attn__tensor_at(k, p->dtype, s->batch, kv_head, s->kv_first),
                             .v = attn__tensor_at(v, p->dtype, s->batch, kv_head, s->kv_first),
                             .k_token = k->stride[2],
                             .k_dim = k->stride[3],
                             .v_token = v->stride[2],
                             .v_dim = v->stride[3]};
    attn__block block = {.dtype = p->dtype,
                         .dim_qk = p->dim_qk,
                         .dim_v = p->dim_v,
                         .scale = (float)p->scale,
                         .lo = s->band.lo,
                         .hi = s->band.hi,
                         .first = row,
                         .count = attn__min(plan->tile_q, s->q_count - row),
                         .q = attn__tensor_at(q, p->dtype, s->batch, head, s->q_first + row),
                         .q_token = q->stride[2],
                         .q_dim = q->stride[3],
                         .spans = &span,
                         .span_count = s->kv_count > 0 ? 1 : 0};
    return emit(d, &block, s, head, scratch, (float *)(void *)at);
}

static attn_status compute_item(const direct *d, int64_t item)
{
    const attn_plan *plan = d->run->plan;
    int64_t low = 0, high = plan->problem.batch; /* first[low] <= item < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(d->first[middle] <= item ? &low : &high) = middle;
    }
    attn__sequence s = attn__sequence_at(&d->run->io->sequences, d->order[low]);
    int64_t tiles = attn__ceil_div(s.q_count, plan->tile_q), at = item - d->first[low];
    return compute_tile(d, &s, at / tiles, tiles - 1 - at % tiles);
}

/* ---- all of it ---- */

/* Visible cells of a sequence, on average. */
static int64_t mean_cells(const direct *d)
{
    const attn__sequences *sequences = &d->run->io->sequences;
    int64_t batch = d->run->plan->problem.batch, cells = 0;
    for (int64_t b = 0; b < batch; b++) {
        attn__sequence s = attn__sequence_at(sequences, b);
        int64_t more = attn__band_cells(s.band, 0, s.q_count, 0, s.kv_count);
        if (!attn__add(cells, more, &cells)) {
            return INT64_MAX / batch;
        }
    }
    return cells / batch;
}

static attn_status compute(const direct *d)
{
    const attn_plan *plan = d->run->plan;
    int64_t items = d->first[plan->problem.batch], cells = mean_cells(d);
    double flops = attn__flops(&plan->problem, cells);
    int64_t slices = attn__slices(plan, flops, items);
    bool together = attn__worth_threads(flops);
    for (int64_t slice = 0; slice < slices; slice++) {
        int64_t from = items * slice / slices, to = items * (slice + 1) / slices;
        double begin = attn__now();
#pragma omp parallel for schedule(dynamic) num_threads(plan->threads) if (together)
        for (int64_t item = from; item < to; item++) {
            attn__run_failed(d->run, compute_item(d, item));
        }
        if (attn__run_stopped(d->run)) {
            return attn__fail(d->run->status, "%s", d->run->text);
        }
        ATTN__TRY(attn__run_event(
            d->run, (attn_event){.step = ATTN_STEP_COMPUTE,
                                 .begin = begin,
                                 .cells = cells * (slice + 1) / slices - cells * slice / slices}));
    }
    return ATTN_OK;
}

attn_status attn__direct(attn__run *run)
{
    const attn_plan *plan = run->plan;
    direct d = {.run = run, .in = {run->io->in[0], run->io->in[1], run->io->in[2]}};
    int64_t list = (plan->problem.batch + 1) * (int64_t)sizeof(int64_t);
    char *at = run->workspace;
    d.order = attn__take(&at, list);
    d.first = attn__take(&at, list);
    d.threads = at + plan->space.gather + plan->space.partial;
    if (run->io->source.data != run->io) {
        ATTN__TRY(gather(&d, &at));
    }
    number_items(&d);
    return compute(&d);
}
