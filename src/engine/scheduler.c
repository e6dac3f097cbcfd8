/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scheduler.c - problem and options to plan: the kernel, W, the quorum, who computes at once, and every byte
 * of workspace.  All that execute would have to decide or allocate is settled here; no data is touched.
 *
 * With a memory limit and no W, the smallest W whose workspace fits is taken: each W is only counted, by
 * attn__space(), from the size of its interest set.
 */
#include <limits.h>
#include <string.h>

#include "attn/cuda.h"
#include "engine/engine.h"

/* The largest W that a memory limit is answered with: beyond it tasks are too small to be worth their files.
 */
enum { SEARCH_MAX = 4096 };

/* No machine has this much memory, and sums of a few such sizes stay below 2^63. */
#define SPACE_MAX (INT64_C(1) << 56)

/* ---- memory ---- */

/* The workspace of workers that make partials, with quorums of size_q and size_kv groups. */
static attn__space worker_space(const attn_plan *plan, int64_t workers, int64_t size_q, int64_t size_kv)
{
    const attn_problem *p = &plan->problem;
    attn__bytes bytes = attn__problem_bytes(p);
    attn__space s = {0};
    s.q_rows = attn__ceil_div(p->tokens_q, workers);
    s.kv_rows = attn__min(p->tokens_kv, size_kv * attn__ceil_div(p->tokens_kv, workers));
    if (!plan->in_memory) {
        s.gather = attn__aligned(s.kv_rows * bytes.k) + attn__aligned(s.kv_rows * bytes.v) +
                   attn__aligned(s.q_rows * bytes.q);
    }
    s.partial = attn__aligned(s.q_rows * bytes.o);
    s.lists = attn__aligned(2 * workers * (int64_t)sizeof(attn_pair)) +
              attn__aligned((size_q + 2 * size_kv) * (int64_t)sizeof(int64_t));
    s.thread = attn__aligned((int64_t)plan->kernel->scratch(&plan->shape)) +
               attn__aligned(size_kv * (int64_t)sizeof(attn__span));
    s.tiler = attn__tiler_space(plan, workers, size_q);
    return s;
}

static bool fits(const attn_plan *plan, int64_t limit)
{
    const int64_t bytes = plan->gpu != NULL ? plan->space.device : plan->space.total;
    return bytes <= (limit == 0 ? SPACE_MAX : limit);
}

/* Lays out the workspace. */
static attn__space space_of(const attn_plan *plan, int64_t workers, int64_t size_q, int64_t size_kv)
{
    attn__space s = plan->backward ? attn__backward_space(plan)
                    : plan->direct ? attn__direct_space(plan)
                                   : worker_space(plan, workers, size_q, size_kv);
    s.worker = s.gather + s.partial + s.lists + plan->threads * s.thread;
    bool huge = (double)plan->resident * (double)s.worker + (double)s.tiler > (double)SPACE_MAX;
    s.total =
        huge ? INT64_MAX : 64 + attn__resident_space(plan->resident) + plan->resident * s.worker + s.tiler;
    return s;
}

/* ---- W ---- */

/* The kernel's row and scratch depend on the largest task. */
static attn_status choose_kernel(attn_plan *plan, int64_t workers, int64_t size_kv, const char *name)
{
    const attn_problem *p = &plan->problem;
    plan->shape = (attn__shape){
        .dtype = p->dtype,
        .dim_qk = p->dim_qk,
        .dim_v = p->dim_v,
        .rows = plan->direct ? attn__direct_rows(p) : attn__ceil_div(p->tokens_q, workers),
        .keys = attn__min(p->tokens_kv, size_kv * attn__ceil_div(p->tokens_kv, workers)),
        .backward = plan->backward,
    };
    ATTN__TRY(attn__kernel_choose(&plan->kernel, &plan->shape, name));
    const attn__kernel *k = plan->kernel;
    plan->tile_q = attn__max(1, plan->backward ? k->backward_tile_q(&plan->shape) : k->tile_q(&plan->shape));
    plan->call_rows = plan->tile_q;
    plan->shape.keep_keys = plan->direct && k->keeps_keys != NULL && k->keeps_keys(&plan->shape);
    if ((plan->backward ? k->backward_scratch : k->scratch)(&plan->shape) > SPACE_MAX >> 8) {
        return attn__fail(ATTN_ELIMIT,
                          "the %s kernel's scratch overflows; use more workers or another kernel",
                          plan->kernel->name);
    }
    return ATTN_OK;
}

static void share_threads(attn_plan *plan, const attn_options *options, int64_t workers)
{
    int threads = options->threads > 0 ? options->threads : attn__threads_max();
    plan->resident = attn__min(attn__max(options->resident, 1), workers);
    plan->threads = (int)attn__max(1, threads / plan->resident);
}

/*
 * Shorter query tiles where there are few of them for the threads, so that all end together.  Where keys are
 * seen from the first one on, the bits of a row do not depend on where its tile begins (kernel.h; tiles stay
 * multiples of a step).  Elsewhere, and where a spool may go on with other threads, the tiles are those
 * for ASSUMED threads.  A kernel asked for against its own advice keeps its tiles.  Which sequences are of
 * few queries stays as it was.
 */
static void shorten_tiles(attn_plan *plan)
{
    enum { STEP = 128, KEPT_STEP = 64, TILES = 4, ASSUMED = 8 }; /* TILES: for each thread */
    const attn_problem *p = &plan->problem;
    const int64_t step = plan->shape.keep_keys ? KEPT_STEP : STEP;
    const bool from_first = p->mask != ATTN_MASK_WINDOW || p->window_left < 0;
    const int threads = plan->direct && from_first ? plan->threads : ASSUMED;
    if (plan->backward || threads == 1 || attn__kernel_reluctance(plan->kernel, &plan->shape) != NULL) {
        return;
    }
    const double planes = (double)p->batch * (double)p->heads_q;
    while (plan->tile_q >= 2 * step &&
           planes * (double)attn__ceil_div(plan->shape.rows, plan->tile_q) < TILES * (double)threads) {
        plan->tile_q = plan->tile_q / 2 / step * step;
    }
    const int64_t few = plan->direct ? attn__min(attn__few_rows(p), plan->call_rows) : 0;
    plan->call_rows = attn__max(plan->tile_q, few);
    plan->shape.rows = attn__min(plan->shape.rows, plan->call_rows);
}

/* Everything that W and the quorum's sizes decide. */
static attn_status size_up(attn_plan *plan, const attn_options *options, int64_t workers, int64_t size_q,
                           int64_t size_kv)
{
    plan->layout.workers = workers;
    if (plan->gpu != NULL && plan->in_memory) {
        return attn__device_plan(plan, options);
    }
    if (plan->gpu != NULL) {
        share_threads(plan, options, workers);
        return attn__stage_plan(plan, options->kernel, workers, size_q, size_kv);
    }
    plan->direct = workers == 1 && !plan->spooled && !plan->backward && plan->gpu == NULL;
    share_threads(plan, options, workers);
    ATTN__TRY(choose_kernel(plan, workers, size_kv, options->kernel));
    shorten_tiles(plan);
    plan->range_keys = plan->backward ? attn__range_keys(plan) : 0;
    plan->dq_apart = false;
    plan->space = space_of(plan, workers, size_q, size_kv);
    if (plan->backward && plan->problem.dtype_out != ATTN_F32 && !fits(plan, options->memory_limit)) {
        plan->dq_apart = true;
        plan->space = space_of(plan, workers, size_q, size_kv);
    }
    return ATTN_OK;
}

static attn_status over_limit(const attn_plan *plan, int64_t limit)
{
    if (plan->backward) {
        return attn__fail(
            ATTN_ELIMIT,
            "the gradients need %lld bytes of workspace, the limit leaves %lld; use fewer threads "
            "or a larger limit",
            (long long)plan->space.total, (long long)limit);
    }
    if (plan->gpu != NULL) {
        return attn__fail(
            ATTN_ELIMIT,
            "W = %lld needs %lld bytes of the GPU's memory, the limit leaves %lld; use more workers, fewer "
            "resident ones, or a larger limit",
            (long long)plan->layout.workers, (long long)plan->space.device, (long long)limit);
    }
    return attn__fail(
        ATTN_ELIMIT,
        "W = %lld needs %lld bytes of workspace, the limit leaves %lld; use more workers, fewer resident "
        "ones, a spool folder, or a larger limit",
        (long long)plan->layout.workers, (long long)plan->space.total, (long long)limit);
}

/* Smallest W within the limit; leaves the plan sized up for it. */
static attn_status search_workers(attn_plan *plan, const attn_options *options)
{
    int64_t most = attn__min(SEARCH_MAX, attn__max(plan->problem.tokens_q, plan->problem.tokens_kv));
    int64_t least_bytes = INT64_MAX, least_workers = 1;
    for (int64_t w = 1; w <= most; w++) {
        attn__cover cover;
        ATTN__TRY(attn__cover_best(&cover, w));
        int64_t k = cover.size;
        attn__cover_free(&cover);
        attn_status status = size_up(plan, options, w, k, k);
        if (status != ATTN_OK && status != ATTN_ELIMIT) {
            return status;
        }
        if (status == ATTN_OK && fits(plan, options->memory_limit)) {
            return ATTN_OK;
        }
        const int64_t bytes = plan->gpu != NULL ? plan->space.device : plan->space.total;
        if (bytes < least_bytes) {
            least_bytes = bytes;
            least_workers = w;
        }
    }
    return attn__fail(
        ATTN_ELIMIT,
        "no number of workers fits into %lld bytes of %s; the least is %lld bytes with W = %lld%s",
        (long long)options->memory_limit, plan->gpu != NULL ? "the GPU's memory" : "workspace",
        (long long)least_bytes, (long long)least_workers,
        plan->spooled || plan->gpu != NULL ? "" : "; with a spool folder it is less");
}

/* ---- quorums ---- */

/* The multiple of the set whose longest subsequence is least; under a causal mask, of those the one that
 * moves the fewest bytes. */
static attn_status fit_cover(attn_plan *plan)
{
    int64_t tokens = attn__max(plan->problem.tokens_q, plan->problem.tokens_kv);
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    ATTN__TRY(attn__cover_fit(&plan->cover, tokens));
    if (plan->problem.mask != ATTN_MASK_CAUSAL) {
        return ATTN_OK;
    }
    return attn__cover_fit_causal(&plan->cover, tokens, bytes.q + bytes.o, bytes.k + bytes.v);
}

static attn_status find_cover(attn_plan *plan, const attn_options *options)
{
    int64_t workers = plan->layout.workers;
    if (options->interest_set != NULL) {
        return attn__cover_user(&plan->cover, workers, options->interest_set, options->interest_size);
    }
    ATTN__TRY(attn__cover_best(&plan->cover, workers));
    return options->classic ? ATTN_OK : fit_cover(plan);
}

static attn_status build_schedule(attn_plan *plan, int64_t rectangle)
{
    if (plan->quorum == ATTN_QUORUM_CYCLIC) {
        return attn__schedule_cyclic(&plan->schedule, &plan->layout, &plan->cover);
    }
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    int64_t a = rectangle > 0 ? rectangle : attn__rectangle_best(&plan->layout, &bytes);
    return attn__schedule_rectangular(&plan->schedule, &plan->layout, a);
}

static attn_status copy_sets(attn_plan *plan)
{
    const int64_t *a, *b;
    attn__schedule_sets(plan->schedule, &a, &plan->set_q_size, &b, &plan->set_kv_size);
    plan->sets = attn__alloc_array(plan->set_q_size + plan->set_kv_size, sizeof *plan->sets);
    if (plan->sets == NULL) {
        return ATTN_ENOMEM;
    }
    memcpy(plan->sets, a, (size_t)plan->set_q_size * sizeof *a);
    memcpy(plan->sets + plan->set_q_size, b, (size_t)plan->set_kv_size * sizeof *b);
    return ATTN_OK;
}

static attn_status build(attn_plan *plan, const attn_options *options, attn_quorum quorum)
{
    plan->quorum = quorum;
    ATTN__TRY(build_schedule(plan, options->rectangle));
    ATTN__TRY(copy_sets(plan));
    ATTN__TRY(size_up(plan, options, plan->layout.workers, plan->set_q_size, plan->set_kv_size));
    return fits(plan, options->memory_limit) ? ATTN_OK : over_limit(plan, options->memory_limit);
}

static void unbuild(attn_plan *plan)
{
    attn__schedule_free(plan->schedule);
    attn__free(plan->sets);
    plan->schedule = NULL;
    plan->sets = NULL;
}

/* AUTO: the kind of quorum whose largest worker receives and sends the fewest bytes, of those that fit and
 * whose load is within a tenth of even (a contiguous rectangle of a causal mask is not). */
static attn_status build_auto(attn_plan *plan, const attn_options *options)
{
    const double even = 1.1;
    double best_bytes = 0;
    attn_quorum best = ATTN_QUORUM_AUTO;
    for (int64_t i = 0; i < 2; i++) {
        attn_cost cost = ATTN_INIT(attn_cost);
        attn_quorum quorum = i == 0 ? ATTN_QUORUM_CYCLIC : ATTN_QUORUM_RECTANGULAR;
        attn_status status = build(plan, options, quorum);
        if (status == ATTN_OK) {
            status = attn_plan_cost(plan, i, &cost);
        }
        unbuild(plan);
        if (status != ATTN_OK && status != ATTN_ELIMIT) {
            return status;
        }
        double bytes = cost.in_max + cost.out_max;
        bool legal = status == ATTN_OK && (cost.balance <= even || i == 0);
        if (legal && (best == ATTN_QUORUM_AUTO || bytes < best_bytes)) {
            best = quorum;
            best_bytes = bytes;
        }
    }
    return build(plan, options, best == ATTN_QUORUM_AUTO ? ATTN_QUORUM_CYCLIC : best);
}

/* ---- options ---- */

static attn_status check_options(const attn_options *o, const attn_problem *p)
{
    if (o->size != sizeof *o) {
        return attn__fail(ATTN_EINVAL, "attn_options: set its size field to sizeof(attn_options)");
    }
    if (o->workers < 0 || o->resident < 0 || o->memory_limit < 0 || o->threads < 0 || o->rectangle < 0) {
        return attn__fail(ATTN_EINVAL,
                          "workers, resident, threads, rectangle and the memory limit cannot be negative");
    }
    if (o->workers > INT64_C(1) << 31) {
        return attn__fail(ATTN_EINVAL, "workers is %lld; at most 2^31", (long long)o->workers);
    }
    if ((unsigned)o->device > ATTN_CUDA) {
        return attn__fail(ATTN_EINVAL, "device %d is unknown; use cpu or cuda", (int)o->device);
    }
    if ((unsigned)o->quorum > ATTN_QUORUM_AUTO) {
        return attn__fail(ATTN_EINVAL, "quorum %d is unknown; use cyclic, rectangular or auto",
                          (int)o->quorum);
    }
    if (o->interest_set != NULL && (o->interest_size < 1 || o->workers == 0)) {
        return attn__fail(ATTN_EINVAL, "an interest set belongs to a number of workers: give both");
    }
    if (o->interest_set != NULL && o->quorum != ATTN_QUORUM_CYCLIC) {
        return attn__fail(ATTN_EINVAL, "an interest set makes a cyclic quorum; leave out the other kind");
    }
    if (o->classic && (o->quorum != ATTN_QUORUM_CYCLIC)) {
        return attn__fail(ATTN_EINVAL, "the classic rules are those of a cyclic quorum");
    }
    if (o->rectangle > attn__max(o->workers, 1) && o->rectangle > p->tokens_q) {
        return attn__fail(ATTN_EINVAL, "rectangle %lld has more query groups than there are",
                          (long long)o->rectangle);
    }
    return ATTN_OK;
}

static attn_status check_backward(const attn_options *o)
{
    if (o->backward && (o->workers > 1)) {
        return attn__fail(ATTN_EUNSUPPORTED, "gradients are computed by one worker: set workers to 0 or 1");
    }
    if (o->backward && o->spool != NULL) {
        return attn__fail(ATTN_EUNSUPPORTED, "gradients have no partials for a spool folder: leave it out");
    }
    return ATTN_OK;
}

static attn_status settle(attn_plan *plan, const attn_options *options)
{
    const attn_problem *p = &plan->problem;
    plan->layout = (attn__layout){
        .workers = attn__max(options->workers, 1),
        .tokens_q = p->tokens_q,
        .tokens_kv = p->tokens_kv,
        .band = plan->band,
        .classic = options->classic != 0,
    };
    const bool one = plan->backward || (plan->gpu != NULL && plan->in_memory); /* by their nature */
    if (options->workers == 0 && options->memory_limit > 0 && !one) {
        ATTN__TRY(search_workers(plan, options));
    }
    ATTN__TRY(find_cover(plan, options));
    if (options->quorum == ATTN_QUORUM_AUTO) {
        return build_auto(plan, options);
    }
    return build(plan, options, options->quorum);
}

static attn_status name_run(attn_plan *plan, const attn_options *options)
{
    if (options->spool != NULL) {
        plan->spool = attn__strdup(options->spool);
        if (plan->spool == NULL) {
            return ATTN_ENOMEM;
        }
    }
    if (plan->layout.workers == 1 && !plan->spooled) {
        return ATTN_OK; /* nobody is to agree with it, and each call of attn_forward() would print it */
    }
    plan->manifest = attn__spool_manifest(plan, options->spool_key != NULL ? options->spool_key : "");
    if (plan->manifest == NULL) {
        return ATTN_ENOMEM;
    }
    plan->fingerprint = attn__hash(0, plan->manifest, strlen(plan->manifest));
    return ATTN_OK;
}

/* Without a limit, what the GPU has free, but for a tenth that others may want. */
static attn_status open_gpu(attn_plan *plan, attn_options *options)
{
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    if (options->sms < 0) {
        return attn__fail(ATTN_EINVAL, "sms is %d; it is the most multiprocessors to use, or 0 for all",
                          options->sms);
    }
    ATTN__TRY(attn__cuda_open(&plan->gpu, options->gpu));
    ATTN__TRY(attn_cuda_look(options->gpu, &info));
    plan->call = attn__device_call(&plan->problem, options);
    if (options->memory_limit == 0 && !plan->in_memory) {
        options->memory_limit = (int64_t)(info.memory_free / 10 * 9);
    }
    return ATTN_OK;
}

static attn_status create(attn_plan *plan, const attn_problem *problem, const attn_options *options)
{
    if (problem == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_plan_create needs a problem");
    }
    plan->problem = *problem;
    ATTN__TRY(attn__cpu_check_isa());
    ATTN__TRY(attn_problem_check(&plan->problem));
    ATTN__TRY(check_options(options, &plan->problem));
    ATTN__TRY(check_backward(options));
    plan->band = attn__problem_band(&plan->problem);
    plan->backward = options->backward != 0;
    plan->in_memory = options->in_memory != 0 || plan->backward;
    if (plan->problem.total_q > 0 && !plan->in_memory) {
        return attn__fail(ATTN_EINVAL, "sequences of unequal length (total=Q:K) need tensors in memory: set "
                                       "options.in_memory, or leave the total out");
    }
    plan->spooled = options->spool != NULL;
    plan->event = options->event;
    plan->event_data = options->event_data;
    attn_options o = *options;
    if (o.device == ATTN_CUDA) {
        ATTN__TRY(open_gpu(plan, &o));
    }
    ATTN__TRY(settle(plan, &o));
    ATTN__TRY(name_run(plan, &o));
    return plan->gpu != NULL && !plan->in_memory ? attn__stage_open(plan) : ATTN_OK;
}

attn_status attn_plan_create(attn_plan **plan, const attn_problem *problem, const attn_options *options)
{
    const attn_options defaults = ATTN_INIT(attn_options);
    if (plan == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_plan_create needs a place for the plan");
    }
    *plan = attn__alloc_zero(sizeof **plan);
    if (*plan == NULL) {
        return ATTN_ENOMEM;
    }
    attn_status status = create(*plan, problem, options != NULL ? options : &defaults);
    if (status != ATTN_OK) {
        attn_plan_destroy(*plan);
        *plan = NULL;
    }
    return status;
}

void attn_plan_destroy(attn_plan *plan)
{
    if (plan != NULL) {
        attn__stage_close(plan);
        unbuild(plan);
        attn__cover_free(&plan->cover);
        attn__free(plan->spool);
        attn__free(plan->manifest);
        attn__free(plan);
    }
}
