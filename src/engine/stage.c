/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage.c - a rank's share on a GPU, for inputs that are not in its memory: files, or arrays of the host.
 *
 * Each resident worker has three streams.  What it reads goes in chunks through a ring of pinned buffers to
 * the copy stream; the compute stream takes up a pair of groups as soon as the copies that it needs are made,
 * and folds it into the partial of its query group, which stays on the GPU; the return stream brings
 * finished partials back.  The host only reads, enqueues, and hands over the partial before the last: while
 * it reads key group g + 1, or query group i + 1, the GPU computes with g, or i.
 *
 *     memory of the GPU   K and V of the quorum, two query groups, two partials, the kernel's workspace
 *     pinned memory       two partials, RING chunks
 *
 * Where a worker has one query group only, so has the GPU.
 *
 * The plan owns all of it: its first execute takes it, since who only looks at a plan needs none, and later
 * ones allocate nothing; one execute of such a plan runs at a time.
 */
#include <string.h>

#include "attn/cuda.h"
#include "engine/worker.h"

enum { RING = 3, PAIR = 2 };

/* Of one read: long enough for a file's and the bus's full speed. */
enum { CHUNK = 32 << 20 };

/* A partial on its way back. */
typedef struct parcel {
    attn__piece piece;
    double begin;
    bool on_its_way;
} parcel;

typedef struct slot {
    void *copy, *compute, *back; /* streams */
    void *copied;                /* event: all copies so far */
    void *emptied[RING];         /* the ring's buffer has been copied */
    void *computed[PAIR];        /* the partial is finished, its queries are free */
    void *returned[PAIR];        /* it is in pinned memory */
    char *device, *pinned;       /* allocations, and their parts: */
    char *k, *v, *q[PAIR], *partial[PAIR], *workspace;
    char *ring[RING];
    float *result[PAIR];
    int64_t chunks, groups; /* so far: who is next in the ring and in the pair */
    parcel parcels[PAIR];
} slot;

struct attn__stage {
    atomic_flag busy;
    bool open; /* the slots have their memory, streams and events */
    int64_t slots;
    slot slot[];
};

static int64_t round_up(int64_t bytes)
{
    return attn__ceil_div(bytes, 256) * 256;
}

/* ---- the plan ---- */

/* The largest kernel call: a query group against a key group, folded into a partial. */
static attn__cuda_call largest_call(const attn_plan *plan, int64_t workers)
{
    attn__cuda_call call = plan->call;
    call.dtype_out = ATTN_F32;
    call.tokens_q = attn__ceil_div(plan->problem.tokens_q, workers);
    call.tokens_kv = attn__ceil_div(plan->problem.tokens_kv, workers);
    call.total_q = call.batch * call.tokens_q;
    call.total_kv = call.batch * call.tokens_kv;
    call.shifted = true;
    call.merge = true;
    return call;
}

static int64_t chunk_bytes(const attn_plan *plan, const attn__space *s)
{
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    int64_t batch = plan->problem.batch;
    int64_t row = attn__max(bytes.q, attn__max(bytes.k, bytes.v)) / batch;
    int64_t all = row * attn__max(s->q_rows, s->kv_rows);
    return round_up(attn__max(row, attn__min(all, CHUNK)));
}

attn_status attn__stage_plan(attn_plan *plan, const char *kernel, int64_t workers, int64_t size_q,
                             int64_t size_kv)
{
    const attn_problem *p = &plan->problem;
    const attn__bytes bytes = attn__problem_bytes(p);
    const attn__cuda_call call = largest_call(plan, workers);
    ATTN__TRY(attn__cuda_choose(&plan->cuda, &call, false, kernel));
    attn__space s = {0};
    s.pair = attn__min(PAIR, size_q);
    s.q_rows = attn__ceil_div(p->tokens_q, workers);
    s.kv_rows = attn__min(p->tokens_kv, size_kv * attn__ceil_div(p->tokens_kv, workers));
    s.gather =
        round_up(s.kv_rows * bytes.k) + round_up(s.kv_rows * bytes.v) + s.pair * round_up(s.q_rows * bytes.q);
    s.partial = s.pair * round_up(s.q_rows * bytes.o);
    s.thread = round_up((int64_t)plan->cuda->forward_workspace(&call, plan->gpu));
    s.device = plan->resident * (s.gather + s.partial + s.thread);
    s.pinned = plan->resident * (s.partial + RING * chunk_bytes(plan, &s));
    s.lists = attn__aligned(2 * workers * (int64_t)sizeof(attn_pair)) +
              attn__aligned((size_q + 2 * size_kv) * (int64_t)sizeof(int64_t));
    s.tiler = attn__tiler_space(plan, workers, size_q);
    s.worker = s.lists;
    s.total = 64 + attn__resident_space(plan->resident) + plan->resident * s.worker + s.tiler;
    plan->space = s;
    return ATTN_OK;
}

static void *part(char **at, int64_t bytes)
{
    char *here = *at;
    *at += round_up(bytes);
    return here;
}

static void lay_out(slot *s, const attn_plan *plan)
{
    const attn__bytes bytes = attn__problem_bytes(&plan->problem);
    const attn__space *space = &plan->space;
    char *device = s->device, *pinned = s->pinned;
    s->k = part(&device, space->kv_rows * bytes.k);
    s->v = part(&device, space->kv_rows * bytes.v);
    for (int64_t i = 0; i < space->pair; i++) {
        s->q[i] = part(&device, space->q_rows * bytes.q);
        s->partial[i] = part(&device, space->q_rows * bytes.o);
        s->result[i] = part(&pinned, space->q_rows * bytes.o);
    }
    s->workspace = device;
    for (int i = 0; i < RING; i++) {
        s->ring[i] = part(&pinned, chunk_bytes(plan, space));
    }
}

static attn_status open_slot(slot *s, const attn_plan *plan)
{
    const int gpu = plan->gpu->ordinal;
    const int64_t slots = plan->resident;
    void *device, *pinned, **streams[] = {&s->copy, &s->compute, &s->back};
    void **events[] = {&s->copied,      &s->emptied[0],  &s->emptied[1],  &s->emptied[2],
                       &s->computed[0], &s->computed[1], &s->returned[0], &s->returned[1]};
    ATTN__TRY(attn_cuda_alloc(gpu, &device, (size_t)(plan->space.device / slots)));
    s->device = device;
    ATTN__TRY(attn_cuda_alloc_host(gpu, &pinned, (size_t)(plan->space.pinned / slots)));
    s->pinned = pinned;
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        ATTN__TRY(attn_cuda_stream_create(gpu, streams[i]));
    }
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        ATTN__TRY(attn_cuda_event_create(gpu, events[i]));
    }
    lay_out(s, plan);
    return ATTN_OK;
}

static void close_slot(slot *s, int gpu)
{
    attn_cuda_event_destroy(gpu, s->copied);
    for (int i = 0; i < RING; i++) {
        attn_cuda_event_destroy(gpu, s->emptied[i]);
    }
    for (int i = 0; i < PAIR; i++) {
        attn_cuda_event_destroy(gpu, s->computed[i]);
        attn_cuda_event_destroy(gpu, s->returned[i]);
    }
    attn_cuda_stream_destroy(gpu, s->copy);
    attn_cuda_stream_destroy(gpu, s->compute);
    attn_cuda_stream_destroy(gpu, s->back);
    attn_cuda_free_host(gpu, s->pinned);
    attn_cuda_free(gpu, s->device);
}

attn_status attn__stage_open(attn_plan *plan)
{
    plan->stage = attn__alloc_zero(sizeof *plan->stage + (size_t)plan->resident * sizeof(slot));
    if (plan->stage == NULL) {
        return ATTN_ENOMEM;
    }
    atomic_flag_clear(&plan->stage->busy);
    plan->stage->slots = plan->resident;
    return ATTN_OK;
}

static void close_slots(const attn_plan *plan)
{
    attn__stage *stage = plan->stage;
    for (int64_t i = 0; i < stage->slots; i++) {
        close_slot(&stage->slot[i], plan->gpu->ordinal);
        memset(&stage->slot[i], 0, sizeof stage->slot[i]);
    }
    stage->open = false;
}

/* After a failure another execute may try again. */
static attn_status open_slots(const attn_plan *plan)
{
    attn__stage *stage = plan->stage;
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < stage->slots && status == ATTN_OK; i++) {
        status = open_slot(&stage->slot[i], plan);
    }
    stage->open = true;
    if (status != ATTN_OK) {
        close_slots(plan);
    }
    return status;
}

void attn__stage_close(attn_plan *plan)
{
    if (plan->stage != NULL && plan->stage->open) {
        close_slots(plan);
    }
    attn__free(plan->stage);
    plan->stage = NULL;
}

/* ---- an execute ---- */

attn_status attn__stage_begin(const attn_plan *plan)
{
    attn__stage *stage = plan->stage;
    if (atomic_flag_test_and_set(&stage->busy)) {
        return attn__fail(ATTN_EINVAL,
                          "a plan for a GPU with inputs outside its memory runs one execute at a "
                          "time; make a plan for each");
    }
    attn_status status = stage->open ? ATTN_OK : open_slots(plan);
    if (status != ATTN_OK) {
        atomic_flag_clear(&stage->busy);
        return status;
    }
    for (int64_t i = 0; i < stage->slots; i++) {
        memset(stage->slot[i].parcels, 0, sizeof stage->slot[i].parcels);
        stage->slot[i].chunks = stage->slot[i].groups = 0;
    }
    return ATTN_OK;
}

attn_status attn__stage_finish(const attn_plan *plan, attn_status status)
{
    /* after a failure too nothing may still be at work on the plan's memory */
    for (int64_t i = 0; i < plan->stage->slots; i++) {
        const slot *s = &plan->stage->slot[i];
        void *streams[] = {s->copy, s->compute, s->back};
        for (size_t j = 0; j < sizeof streams / sizeof *streams && status == ATTN_OK; j++) {
            status = attn_cuda_wait(plan->gpu->ordinal, streams[j]);
        }
        for (size_t j = 0; j < sizeof streams / sizeof *streams && status != ATTN_OK; j++) {
            attn__cuda_settle(plan->gpu, streams[j]);
        }
    }
    atomic_flag_clear(&plan->stage->busy);
    return status;
}

/* ---- gather ---- */

/* Rows [first, first + count) of one batch entry, to rows from `row` of an array of `rows` rows a plane. */
static attn_status send_chunk(attn__rank_work *w, const attn_get *from, char *to, int64_t row, int64_t rows)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    const int gpu = plan->gpu->ordinal;
    slot *s = &plan->stage->slot[w->slot];
    const int64_t turn = s->chunks++ % RING, heads = attn__heads(p, from->operand);
    const int64_t bytes = attn__dim(p, from->operand) * (int64_t)attn_dtype_size(p->dtype);
    attn_get get = *from;
    void *ticket;
    get.dst = s->ring[turn];
    get.head_stride = get.count * attn__dim(p, get.operand);
    if (s->chunks > RING) {
        ATTN__TRY(attn_cuda_event_wait(gpu, s->emptied[turn]));
    }
    ATTN__TRY(w->comm.ops->get_begin(&w->comm, &get, &ticket));
    ATTN__TRY(w->comm.ops->get_wait(&w->comm, ticket));
    for (int64_t h = 0; h < heads; h++) {
        ATTN__TRY(attn_cuda_copy(gpu, to + ((get.batch * heads + h) * rows + row) * bytes,
                                 s->ring[turn] + h * get.count * bytes, (size_t)(get.count * bytes),
                                 s->copy));
    }
    return attn_cuda_event_record(gpu, s->emptied[turn], s->copy);
}

static attn_status send_group(attn__rank_work *w, attn_operand operand, int64_t group, char *to, int64_t row,
                              int64_t rows)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    const int64_t tokens = attn__tokens(p, operand), workers = plan->layout.workers;
    const int64_t first = attn__group_first(tokens, workers, group);
    const int64_t count = attn__group_count(tokens, workers, group);
    const int64_t token =
        attn__heads(p, operand) * attn__dim(p, operand) * (int64_t)attn_dtype_size(p->dtype);
    const int64_t most = attn__max(1, chunk_bytes(plan, &plan->space) / token);
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t at = 0; at < count; at += most) {
            const attn_get get = {.operand = operand,
                                  .batch = b,
                                  .group = group,
                                  .first = first + at,
                                  .count = attn__min(most, count - at)};
            ATTN__TRY(send_chunk(w, &get, to, row + at, rows));
        }
    }
    return ATTN_OK;
}

/* ---- compute ---- */

static attn__cuda_tensor dense(char *data, int64_t heads, int64_t rows, int64_t dim, int64_t row,
                               int64_t element)
{
    return (attn__cuda_tensor){data + row * dim * element, heads * rows * dim, rows * dim, dim};
}

/* Which of its buffers the slot's next query group has. */
static int64_t turn_of(const attn_plan *plan, const slot *s)
{
    return s->groups % plan->space.pair;
}

/* Enqueues the kernel of one pair. */
static attn_status fold_pair(const attn__rank_work *w, const attn__piece *t, attn_pair pair, int64_t held)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    const slot *s = &plan->stage->slot[w->slot];
    const int64_t turn = turn_of(plan, s), n = t->group_count, element = (int64_t)attn_dtype_size(p->dtype);
    const int64_t real = (int64_t)sizeof(float), key_row = w->offset[held];
    const attn__block_rows rows = attn__schedule_rows(plan->schedule, pair);
    const int64_t row = rows.q_first - t->group_first;
    char *o = s->partial[turn], *lse = o + p->batch * p->heads_q * n * p->dim_v * real;
    attn__cuda_call call = largest_call(plan, plan->layout.workers);
    call.tokens_q = rows.q_count;
    call.tokens_kv = rows.kv_count;
    call.total_q = call.batch * rows.q_count;
    call.total_kv = call.batch * rows.kv_count;
    call.shift = rows.q_first - rows.kv_first;
    call.q = dense(s->q[turn], p->heads_q, n, p->dim_qk, row, element);
    call.k = dense(s->k, p->heads_kv, w->held_rows, p->dim_qk, key_row, element);
    call.v = dense(s->v, p->heads_kv, w->held_rows, p->dim_v, key_row, element);
    call.o = dense(o, p->heads_q, n, p->dim_v, row, real);
    call.lse = dense(lse, p->heads_q, n, 1, row, real);
    return plan->cuda->forward(&call, plan->gpu, s->workspace, s->compute);
}

/* The pairs of `t` with the held group number `held`, once all copies so far are made. */
static attn_status fold_group(const attn__rank_work *w, const attn__piece *t, int64_t held)
{
    for (int64_t i = 0; i < t->pair_count; i++) {
        if (t->pairs[i].kv == w->held[held]) {
            ATTN__TRY(fold_pair(w, t, t->pairs[i], held));
        }
    }
    return ATTN_OK;
}

/* The compute stream waits for all that the copy stream has been given. */
static attn_status wait_for_copies(const attn_plan *plan, const slot *s)
{
    ATTN__TRY(attn_cuda_event_record(plan->gpu->ordinal, s->copied, s->copy));
    return attn__cuda_after(plan->gpu, s->compute, s->copied);
}

/* Keys for the rank's first query group, computed with as they come. */
static attn_status gather_and_fold(attn__rank_work *w, const attn__piece *t)
{
    const attn_plan *plan = w->run->plan;
    slot *s = &plan->stage->slot[w->slot];
    const double begin = attn__now();
    const attn__bytes bytes = attn__problem_bytes(&plan->problem);
    for (int64_t i = 0; i < w->held_count; i++) {
        ATTN__TRY(send_group(w, ATTN_K, w->held[i], s->k, w->offset[i], w->held_rows));
        ATTN__TRY(send_group(w, ATTN_V, w->held[i], s->v, w->offset[i], w->held_rows));
        ATTN__TRY(wait_for_copies(plan, s));
        ATTN__TRY(fold_group(w, t, i));
        if (attn__run_stopped(w->run)) {
            return attn__fail(ATTN_ECANCELED, "another worker failed");
        }
    }
    w->gathered = true;
    return attn__worker_gathered(w, -1, begin, w->held_rows * (bytes.k + bytes.v));
}

/* ---- hand over ---- */

static attn_status deliver(attn__rank_work *w, int64_t turn)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    slot *s = &plan->stage->slot[w->slot];
    parcel *home = &s->parcels[turn];
    if (!home->on_its_way) {
        return ATTN_OK;
    }
    home->on_its_way = false;
    ATTN__TRY(attn_cuda_event_wait(plan->gpu->ordinal, s->returned[turn]));
    ATTN__TRY(attn__run_event(w->run, (attn_event){.step = ATTN_STEP_COMPUTE,
                                                   .rank = w->comm.rank,
                                                   .group = home->piece.group,
                                                   .begin = home->begin,
                                                   .cells = attn__pairs_cells(plan, &home->piece)}));
    float *o = s->result[turn];
    return attn__worker_hand_over(w, &home->piece, o,
                                  o + p->batch * p->heads_q * home->piece.group_count * p->dim_v);
}

/* The finished partial comes back; its turn's queries and rows are free after `computed` and `returned`. */
static attn_status send_back(attn__rank_work *w, const attn__piece *t, double begin)
{
    const attn_plan *plan = w->run->plan;
    const int gpu = plan->gpu->ordinal;
    slot *s = &plan->stage->slot[w->slot];
    const int64_t turn = turn_of(plan, s);
    const int64_t bytes = t->group_count * attn__problem_bytes(&plan->problem).o;
    ATTN__TRY(attn_cuda_event_record(gpu, s->computed[turn], s->compute));
    ATTN__TRY(attn__cuda_after(plan->gpu, s->back, s->computed[turn]));
    ATTN__TRY(attn_cuda_copy(gpu, s->result[turn], s->partial[turn], (size_t)bytes, s->back));
    ATTN__TRY(attn_cuda_event_record(gpu, s->returned[turn], s->back));
    s->parcels[turn] = (parcel){.piece = *t, .begin = begin, .on_its_way = true};
    s->groups++;
    return ATTN_OK;
}

attn_status attn__stage_group(attn__rank_work *w, const attn__piece *t)
{
    const attn_plan *plan = w->run->plan;
    const attn_problem *p = &plan->problem;
    slot *s = &plan->stage->slot[w->slot];
    const int64_t turn = turn_of(plan, s), planes = p->batch * p->heads_q;
    const double begin = attn__now();
    if (s->groups >= plan->space.pair) { /* its buffers are those of an earlier group */
        ATTN__TRY(attn__cuda_after(plan->gpu, s->copy, s->computed[turn]));
    }
    ATTN__TRY(send_group(w, ATTN_Q, t->group, s->q[turn], 0, t->group_count));
    ATTN__TRY(attn__worker_gathered(w, t->group, begin, t->group_count * attn__problem_bytes(p).q));
    ATTN__TRY(deliver(w, turn));
    ATTN__TRY(attn__cuda_identity(plan->gpu, (float *)(void *)s->partial[turn],
                                  planes * t->group_count * p->dim_v, planes * t->group_count, s->compute));
    ATTN__TRY(wait_for_copies(plan, s));
    if (!w->gathered) {
        ATTN__TRY(gather_and_fold(w, t));
    } else {
        for (int64_t i = 0; i < w->held_count; i++) {
            ATTN__TRY(fold_group(w, t, i));
        }
    }
    ATTN__TRY(send_back(w, t, begin));
    return deliver(w, turn_of(plan, s)); /* whose buffers the next group takes */
}

attn_status attn__stage_end(attn__rank_work *w)
{
    /* the next rank's keys go where this one's are */
    const attn_plan *plan = w->run->plan;
    slot *s = &plan->stage->slot[w->slot];
    for (int64_t i = 0; i < plan->space.pair; i++) {
        ATTN__TRY(deliver(w, (s->groups + i) % plan->space.pair));
    }
    return ATTN_OK;
}
