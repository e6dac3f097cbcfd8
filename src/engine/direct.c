/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.c - one worker without a spool: what a kernel call gives is the result, and goes where it belongs.
 *
 * Tensors are read in place; a source is read whole into the arena first and then is tensors too.  An item is
 * one query tile of one (sequence, head): one kernel call over all its keys.  Items are numbered through all
 * sequences, the sequence with the most keys first, the last tile first: under a causal mask that is the long
 * one, and short ones fill up the end.  Which item a number means is found among the sequences' first
 * numbers, in O(log batch).
 *
 * A thread stays with the items of one (sequence, kv head) while there are any, since its caches and the
 * kernel's scratch hold those keys, and then helps with the next that has some.  Threads begin apart, each
 * where its share of the work begins.
 */
#include "engine/direct.h"

int64_t attn__direct_rows(const attn_problem *problem)
{
    return attn__max(problem->tokens_q, attn__few_rows(problem));
}

static int64_t thread_space(const attn_plan *plan)
{
    const attn_problem *p = &plan->problem;
    int64_t result = plan->call_rows * (int64_t)sizeof(float), element = (int64_t)attn_dtype_size(p->dtype);
    return attn__aligned((int64_t)plan->kernel->scratch(&plan->shape)) + attn__aligned(result * p->dim_v) +
           attn__aligned(result) + attn__aligned(attn__few_rows(p) * p->dim_qk * element);
}

attn__forward_thread attn__forward_space(const attn__forward *f)
{
    const attn_plan *plan = f->run->plan;
    int64_t result = plan->call_rows * (int64_t)sizeof(float);
    char *at = f->threads + attn__thread() * plan->space.thread;
    attn__forward_thread space = {.scratch = attn__take(&at, (int64_t)plan->kernel->scratch(&plan->shape))};
    space.o = attn__take(&at, result * plan->problem.dim_v);
    space.lse = attn__take(&at, result);
    space.q = at;
    return space;
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
    s.lists = 2 * attn__aligned((p->batch + 1) * (int64_t)sizeof(int64_t)) +
              attn__aligned(p->batch * p->heads_kv * (int64_t)sizeof(attn__queue));
    s.partial = attn__few_lay_out(NULL, plan, NULL);
    s.thread = thread_space(plan);
    return s;
}

/* ---- inputs ---- */

/* All of one operand into the arena, which becomes a tensor. */
static attn_status read_operand(attn__forward *f, attn_operand operand, char **at)
{
    const attn_problem *p = &f->run->plan->problem;
    const attn_source *source = &f->run->io->source;
    int64_t heads = attn__heads(p, operand), tokens = attn__tokens(p, operand), dim = attn__dim(p, operand);
    int64_t plane = tokens * dim, bytes = heads * plane * (int64_t)attn_dtype_size(p->dtype);
    char *arena = attn__take(at, p->batch * bytes);
    f->in[operand] = (attn_tensor){arena, {heads * plane, plane, dim, 1}};
    for (int64_t b = 0; b < p->batch; b++) {
        ATTN__TRY(source->read(source->data, operand, b, 0, tokens, arena + b * bytes, plane));
    }
    return ATTN_OK;
}

static attn_status gather(attn__forward *f, char **at)
{
    const attn_problem *p = &f->run->plan->problem;
    attn__bytes bytes = attn__problem_bytes(p);
    double begin = attn__now();
    ATTN__TRY(read_operand(f, ATTN_K, at));
    ATTN__TRY(read_operand(f, ATTN_V, at));
    ATTN__TRY(attn__run_event(f->run, (attn_event){.step = ATTN_STEP_GATHER,
                                                   .group = -1,
                                                   .begin = begin,
                                                   .bytes = p->tokens_kv * (bytes.k + bytes.v)}));
    begin = attn__now();
    ATTN__TRY(read_operand(f, ATTN_Q, at));
    return attn__run_event(
        f->run, (attn_event){.step = ATTN_STEP_GATHER, .begin = begin, .bytes = p->tokens_q * bytes.q});
}

/* ---- items ---- */

static int64_t items_of(const attn_plan *plan, const attn__sequence *s)
{
    int64_t tasks = attn__few_of(plan, s).tasks;
    if (tasks > 0) {
        return plan->problem.heads_kv * tasks;
    }
    return plan->problem.heads_q * attn__ceil_div(s->q_count, plan->tile_q);
}

/* Of the sequence's items; it is the i-th in order. */
static double cost_of(const attn__forward *f, int64_t i)
{
    attn__sequence s = attn__sequence_at(&f->run->io->sequences, f->order[i]);
    return (double)(f->first[i + 1] - f->first[i]) * (double)s.kv_count;
}

static void number_items(attn__forward *f)
{
    const attn_plan *plan = f->run->plan;
    const attn__sequences *sequences = &f->run->io->sequences;
    int64_t batch = plan->problem.batch;
    for (int64_t b = 0; b < batch; b++) {
        f->first[b] = attn__sequence_at(sequences, b).kv_count; /* free until the order is known */
    }
    attn__sort_falling(f->order, f->first, batch);
    f->first[0] = 0;
    for (int64_t i = 0; i < batch; i++) {
        attn__sequence s = attn__sequence_at(sequences, f->order[i]);
        f->first[i + 1] = f->first[i] + items_of(plan, &s);
        f->cost += cost_of(f, i);
        f->in_order |= attn__few_of(plan, &s).tasks > 0; /* as few.c wants them */
    }
}

static void open_queues(attn__forward *f)
{
    const attn_problem *p = &f->run->plan->problem;
    f->queue_count = f->in_order ? 1 : p->batch * p->heads_kv;
    for (int64_t i = 0; i < f->queue_count; i++) {
        const int64_t sequence = i / p->heads_kv, head = i % p->heads_kv, begin = f->first[sequence];
        const int64_t items = (f->first[sequence + 1] - begin) / p->heads_kv;
        attn__queue *queue = &f->queues[i];
        queue->begin = f->in_order ? 0 : begin + head * items;
        queue->end = f->in_order ? f->first[p->batch] : queue->begin + items;
        atomic_init(&queue->next, queue->begin);
    }
}

attn__block attn__forward_block(const attn__forward *f, const attn__sequence *s, int64_t kv_head, int64_t key,
                                int64_t count, attn__span *span)
{
    const attn_problem *p = &f->run->plan->problem;
    const attn_tensor *k = &f->in[ATTN_K], *v = &f->in[ATTN_V];
    *span = (attn__span){.first = key,
                         .count = count,
                         .k = attn__tensor_at(k, p->dtype, s->batch, kv_head, s->kv_first + key),
                         .v = attn__tensor_at(v, p->dtype, s->batch, kv_head, s->kv_first + key),
                         .k_token = k->stride[2],
                         .k_dim = k->stride[3],
                         .v_token = v->stride[2],
                         .v_dim = v->stride[3]};
    return (attn__block){.dtype = p->dtype,
                         .dim_qk = p->dim_qk,
                         .dim_v = p->dim_v,
                         .scale = (float)p->scale,
                         .lo = s->band.lo,
                         .hi = s->band.hi,
                         .spans = span,
                         .span_count = count > 0 ? 1 : 0};
}

/* Where an item's number leads. */
typedef struct place {
    attn__sequence s;
    int64_t sequence; /* in f->order */
    attn__few few;
    int64_t at;         /* of the sequence's items */
    int64_t head, tile; /* unless it is one of few queries */
} place;

static place place_of(const attn__forward *f, int64_t item)
{
    const attn_plan *plan = f->run->plan;
    int64_t low = 0, high = plan->problem.batch; /* first[low] <= item < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(f->first[middle] <= item ? &low : &high) = middle;
    }
    place w = {.s = attn__sequence_at(&f->run->io->sequences, f->order[low]),
               .sequence = f->order[low],
               .at = item - f->first[low]};
    int64_t tiles = attn__ceil_div(w.s.q_count, plan->tile_q);
    w.few = attn__few_of(plan, &w.s);
    w.head = w.at / tiles;
    w.tile = tiles - 1 - w.at % tiles;
    return w;
}

static const void *queries_at(const attn__forward *f, const place *w)
{
    const attn_plan *plan = f->run->plan;
    return attn__tensor_at(&f->in[ATTN_Q], plan->problem.dtype, w->s.batch, w->head,
                           w->s.q_first + w->tile * plan->tile_q);
}

/* Of the item that a thread at this queue is likely to take next, if it is a tile. */
static const void *next_queries(const attn__forward *f, int64_t queue)
{
    for (int64_t i = queue; i < attn__min(queue + 2, f->queue_count); i++) {
        const int64_t next = atomic_load(&f->queues[i].next);
        if (next < f->queues[i].end) {
            const place w = place_of(f, next);
            return w.few.tasks > 0 ? NULL : queries_at(f, &w);
        }
    }
    return NULL;
}

/* A query tile of one head against all keys, out of a queue; same_keys: the thread's last item was of that
 * queue, too.  Rows of the result go straight to their place where they can, through a tile otherwise. */
static attn_status compute_tile(const attn__forward *f, const place *w, int64_t queue, bool same_keys)
{
    const attn_plan *plan = f->run->plan;
    const attn_problem *p = &plan->problem;
    const attn__memory_io *io = f->run->io;
    const bool half = p->dtype_out != ATTN_F32;
    const bool in_place =
        io->sink.data == io && !io->merge && io->o.stride[3] == 1 && (!half || plan->kernel->rounds_results);
    const attn__sequence *s = &w->s;
    int64_t head = w->head, row = w->tile * plan->tile_q, token = s->q_first + row;
    attn__forward_thread space = attn__forward_space(f);
    attn__span span;
    attn__block block = attn__forward_block(f, s, head / (p->heads_q / p->heads_kv), 0, s->kv_count, &span);
    block.first = row;
    block.count = attn__min(plan->tile_q, s->q_count - row);
    block.q = queries_at(f, w);
    block.next_q = next_queries(f, queue);
    block.keep_keys =
        plan->shape.keep_keys && !f->in_order && f->queues[queue].end > f->queues[queue].begin + 1;
    block.same_keys = !f->in_order && same_keys;
    block.q_token = f->in[ATTN_Q].stride[2];
    block.q_dim = f->in[ATTN_Q].stride[3];
    block.o = in_place && !half ? attn__tensor_at(&io->o, ATTN_F32, s->batch, head, token) : space.o;
    block.o_stride = in_place ? io->o.stride[2] : p->dim_v;
    if (in_place && half) {
        block.half_o = attn__tensor_at(&io->o, p->dtype_out, s->batch, head, token);
        block.half_dtype = p->dtype_out;
    }
    block.lse = space.lse;
    plan->kernel->forward(&block, space.scratch);
    if (!in_place) {
        return io->sink.write(io->sink.data, s->batch, head, token, block.count, block.o, block.o_stride,
                              block.lse);
    }
    if (io->lse.data != NULL) {
        attn_from_f32(attn__tensor_at(&io->lse, ATTN_F32, s->batch, head, token), ATTN_F32, io->lse.stride[2],
                      block.lse, block.count);
    }
    return ATTN_OK;
}

static attn_status compute_item(attn__forward *f, int64_t item, int64_t queue, bool same_keys)
{
    const place w = place_of(f, item);
    if (w.few.tasks > 0) {
        return attn__few_compute(f, &w.s, w.sequence, &w.few, w.at);
    }
    return compute_tile(f, &w, queue, same_keys);
}

/* ---- all of it ---- */

/* What all sequences cost. */
typedef struct work {
    int64_t cells; /* visible, of a sequence on average */
    double flops;  /* a kernel call costs as if it had a vector of rows at least */
} work;

static work count_work(const attn__forward *f)
{
    enum { VECTOR = 32 };
    const attn_plan *plan = f->run->plan;
    const attn_problem *p = &plan->problem;
    int64_t sum = 0;
    double cells = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        attn__sequence s = attn__sequence_at(&f->run->io->sequences, b);
        attn__few few = attn__few_of(plan, &s);
        int64_t seen = attn__band_cells(s.band, 0, s.q_count, 0, s.kv_count);
        double rows = (double)attn__max(few.rows, VECTOR) * (double)p->heads_kv;
        cells += few.tasks > 0 ? (double)(few.end - few.begin) * rows : (double)seen * (double)p->heads_q;
        sum = attn__add(sum, seen, &seen) ? seen : INT64_MAX;
    }
    return (work){sum / p->batch, 2 * cells * (double)(p->dim_qk + p->dim_v)};
}

/* The queue at which this thread's share of the work begins. */
static int64_t own_queue(const attn__forward *f)
{
    const attn_problem *p = &f->run->plan->problem;
    double share = f->cost * attn__thread() / attn__team();
    for (int64_t i = 0; i < p->batch && !f->in_order; i++) {
        const double cost = cost_of(f, i);
        if (share < cost) {
            const int64_t head = (int64_t)(share / cost * (double)p->heads_kv);
            return i * p->heads_kv + attn__min(head, p->heads_kv - 1);
        }
        share -= cost;
    }
    return 0;
}

/* The next item of *queue or, where that is empty, of the one after it that is not. */
static int64_t take_item(attn__forward *f, int64_t *queue)
{
    for (;; *queue = (*queue + 1) % f->queue_count) {
        attn__queue *q = &f->queues[*queue];
        if (atomic_load(&q->next) < q->end) {
            const int64_t item = atomic_fetch_add(&q->next, 1);
            if (item < q->end) {
                return item;
            }
        }
    }
}

/* Takes items until those of the slice are done: as many as there are, so that take_item finds one. */
static void work_to(attn__forward *f, int64_t end)
{
    int64_t queue = own_queue(f), last = -1;
    while (atomic_fetch_add(&f->taken, 1) < end) {
        const int64_t item = take_item(f, &queue);
        attn__run_failed(f->run, compute_item(f, item, queue, queue == last));
        last = queue;
    }
}

static attn_status compute(attn__forward *f)
{
    const attn_plan *plan = f->run->plan;
    const work all = count_work(f);
    int64_t items = f->first[plan->problem.batch], slices = attn__slices(plan, all.flops, items);
    bool together = attn__worth_threads(all.flops);
    for (int64_t slice = 0; slice < slices; slice++) {
        double begin = attn__now();
        atomic_store(&f->taken, items * slice / slices);
#pragma omp parallel num_threads(plan->threads) if (together)
        work_to(f, items * (slice + 1) / slices);
        if (attn__run_stopped(f->run)) {
            return attn__fail(f->run->status, "%s", f->run->text);
        }
        int64_t cells = all.cells * (slice + 1) / slices - all.cells * slice / slices;
        ATTN__TRY(
            attn__run_event(f->run, (attn_event){.step = ATTN_STEP_COMPUTE, .begin = begin, .cells = cells}));
    }
    return ATTN_OK;
}

attn_status attn__direct(attn__run *run)
{
    const attn_plan *plan = run->plan;
    attn__forward f = {.run = run, .in = {run->io->in[0], run->io->in[1], run->io->in[2]}};
    int64_t list = (plan->problem.batch + 1) * (int64_t)sizeof(int64_t);
    char *at = run->workspace;
    f.order = attn__take(&at, list);
    f.first = attn__take(&at, list);
    f.queues =
        attn__take(&at, run->plan->problem.batch * run->plan->problem.heads_kv * (int64_t)sizeof *f.queues);
    at += attn__few_lay_out(&f, plan, at);
    f.threads = at + plan->space.gather;
    attn__few_begin(&f);
    atomic_init(&f.taken, 0);
    if (run->io->source.data != run->io) {
        ATTN__TRY(gather(&f, &at));
    }
    number_items(&f);
    open_queues(&f);
    return compute(&f);
}
