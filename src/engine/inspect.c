/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inspect.c - a plan looked at: summary, groups, one rank's lists, proof, costs, and the verdicts of the
 * kernel table. Nothing here changes a plan; what it returns is what execute will do, since both ask the same
 * schedule.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

const attn_problem *attn_plan_problem(const attn_plan *plan)
{
    return plan != NULL ? &plan->problem : NULL;
}

size_t attn_plan_workspace(const attn_plan *plan)
{
    return plan != NULL ? (size_t)plan->space.total : 0;
}

static attn_status check_out(const attn_plan *plan, const void *out, size_t size, size_t want,
                             const char *name)
{
    if (plan == NULL || out == NULL || size != want) {
        return attn__fail(ATTN_EINVAL, "%s: give a plan, and a struct whose size field is set", name);
    }
    return ATTN_OK;
}

/* ---- spreads ---- */

static void spread_add(attn_spread *spread, double *sum, double *squares, double value)
{
    spread->min = fmin(spread->min, value);
    spread->max = fmax(spread->max, value);
    *sum += value;
    *squares += value * value;
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Offsets that are in A or in B, ascending; returns how many. */
static int64_t union_offsets(const attn_plan *plan, int64_t *offsets)
{
    int64_t count = plan->set_q_size + plan->set_kv_size, kept = 0;
    memcpy(offsets, plan->sets, (size_t)count * sizeof *offsets);
    qsort(offsets, (size_t)count, sizeof *offsets, compare);
    for (int64_t i = 0; i < count; i++) {
        if (kept == 0 || offsets[kept - 1] != offsets[i]) {
            offsets[kept++] = offsets[i];
        }
    }
    return kept;
}

/*
 * Tokens held over all workers, in O(k log k) for any W: worker i holds one token more for each offset u with
 * i + u among the last r groups, that is for i in a circular interval of length r; between the ends of these
 * intervals nothing changes.
 */
static void subsequence_spread(attn_spread *spread, const int64_t *offsets, int64_t count, int64_t workers,
                               int64_t tokens, int64_t *ends)
{
    int64_t base = count * (tokens / workers), rest = tokens % workers, level = 0;
    double mean = (double)count * (double)tokens / (double)workers, squares = 0;
    *spread = (attn_spread){.min = INFINITY, .max = -INFINITY, .mean = mean};
    for (int64_t i = 0; i < count; i++) { /* an end is 2 * position, +1 where the interval begins */
        int64_t begin = attn__mod(-rest - offsets[i], workers), end = attn__mod(begin + rest, workers);
        ends[2 * i] = 2 * begin + 1;
        ends[2 * i + 1] = 2 * end;
        level += rest > 0 && end < begin && end > 0; /* covers worker 0 by wrapping around */
    }
    qsort(ends, (size_t)(2 * count), sizeof *ends, compare);
    for (int64_t i = 0, at = 0; at < workers;) {
        for (; i < 2 * count && ends[i] / 2 == at; i++) {
            bool counts = rest > 0 && (at > 0 || ends[i] % 2 == 1); /* an end at 0 was never counted in */
            level += counts ? (ends[i] % 2 == 1 ? 1 : -1) : 0;
        }
        int64_t next = i < 2 * count ? ends[i] / 2 : workers;
        double value = (double)(base + level);
        spread->min = fmin(spread->min, value);
        spread->max = fmax(spread->max, value);
        squares += (double)(next - at) * (value - mean) * (value - mean);
        at = next;
    }
    spread->std = sqrt(squares / (double)workers);
}

/* A worker's subsequence is counted on the longer side, where queries and keys differ in number. */
static attn_operand longer_side(const attn_plan *plan)
{
    return plan->problem.tokens_kv > plan->problem.tokens_q ? ATTN_K : ATTN_Q;
}

/* ---- summary ---- */

static void finish_spread(attn_spread *spread, double sum, double squares, int64_t count)
{
    spread->mean = sum / (double)count;
    spread->std = sqrt(fmax(0, squares / (double)count - spread->mean * spread->mean));
}

/* Counts each worker's cells and bytes. */
static attn_status count_ranks(const attn_plan *plan, attn_summary *s)
{
    int64_t workers = plan->layout.workers;
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(plan->schedule), sizeof *pairs);
    attn_spread *spreads[] = {&s->cells_worker, &s->bytes_in, &s->bytes_out};
    double sums[3] = {0}, squares[3] = {0};
    if (pairs == NULL) {
        return ATTN_ENOMEM;
    }
    for (int i = 0; i < 3; i++) {
        *spreads[i] = (attn_spread){.min = INFINITY, .max = -INFINITY};
    }
    attn_status status = ATTN_OK;
    for (int64_t rank = 0; rank < workers && status == ATTN_OK; rank++) {
        attn__traffic traffic;
        int64_t count = attn__schedule_pairs(plan->schedule, rank, pairs);
        status = attn__schedule_traffic(plan->schedule, rank, pairs, count, &bytes, &traffic);
        spread_add(spreads[0], &sums[0], &squares[0], (double)traffic.cells);
        spread_add(spreads[1], &sums[1], &squares[1], (double)traffic.bytes_in);
        spread_add(spreads[2], &sums[2], &squares[2], (double)traffic.bytes_out);
    }
    for (int i = 0; i < 3; i++) {
        finish_spread(spreads[i], sums[i], squares[i], workers);
    }
    s->ranks_counted = workers;
    attn__free(pairs);
    return status;
}

static attn_status summarize_tokens(const attn_plan *plan, attn_summary *s)
{
    int64_t most = plan->set_q_size + plan->set_kv_size;
    int64_t *offsets = attn__alloc_array(3 * most, sizeof *offsets);
    if (offsets == NULL) {
        return ATTN_ENOMEM;
    }
    int64_t count = union_offsets(plan, offsets);
    subsequence_spread(&s->subsequence, offsets, count, plan->layout.workers,
                       attn__tokens(&plan->problem, longer_side(plan)), offsets + most);
    attn__free(offsets);
    return ATTN_OK;
}

attn_status attn_plan_summary(const attn_plan *plan, attn_summary *summary)
{
    ATTN__TRY(
        check_out(plan, summary, summary != NULL ? summary->size : 0, sizeof *summary, "attn_plan_summary"));
    const attn__space *space = &plan->space;
    attn_summary s = {
        .size = sizeof s,
        .workers = plan->layout.workers,
        .resident = plan->resident,
        .threads = plan->threads,
        .quorum = plan->quorum,
        .classic = plan->layout.classic,
        .quorum_q = plan->set_q_size,
        .quorum_kv = plan->set_kv_size,
        .set_q = attn__plan_set_q(plan),
        .set_kv = attn__plan_set_kv(plan),
        .set_origin = plan->quorum == ATTN_QUORUM_CYCLIC ? plan->cover.origin : "rectangular",
        .cells = attn__band_cells(plan->band, 0, plan->problem.tokens_q, 0, plan->problem.tokens_kv),
        .kernel = attn__plan_kernel(plan),
        .spooled = plan->spooled,
        .workspace = space->total,
        .workspace_gather = plan->stage != NULL ? 0 : plan->resident * space->gather,
        .workspace_partial = (plan->stage != NULL ? 0 : plan->resident * space->partial) + space->tiler,
        .workspace_kernel = plan->stage != NULL ? 0 : plan->resident * plan->threads * space->thread,
        .device_memory = space->device,
        .pinned_memory = space->pinned,
    };
    ATTN__TRY(summarize_tokens(plan, &s));
    if (plan->layout.workers <= ATTN__COUNTED) {
        ATTN__TRY(count_ranks(plan, &s));
    }
    *summary = s;
    return ATTN_OK;
}

/* ---- groups and ranks ---- */

void attn_plan_group(const attn_plan *plan, attn_operand side, int64_t group, int64_t *first, int64_t *count)
{
    int64_t tokens = attn__tokens(&plan->problem, side), workers = plan->layout.workers;
    *first = attn__group_first(tokens, workers, group);
    *count = attn__group_count(tokens, workers, group);
}

/* Which groups the pairs read: ascending, each once. */
static int64_t list_needs(const attn_rank *rank, bool kv, int64_t *needs)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < rank->pair_count; i++) {
        needs[i] = kv ? rank->pairs[i].kv : rank->pairs[i].q;
    }
    qsort(needs, (size_t)rank->pair_count, sizeof *needs, compare);
    for (int64_t i = 0; i < rank->pair_count; i++) {
        if (kept == 0 || needs[kept - 1] != needs[i]) {
            needs[kept++] = needs[i];
        }
    }
    return kept;
}

static attn_status fill_rank(const attn_plan *plan, attn_rank *r)
{
    int64_t capacity = attn__schedule_capacity(plan->schedule), workers = plan->layout.workers;
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    attn__traffic traffic;
    r->groups = attn__alloc_array(plan->set_q_size + plan->set_kv_size, sizeof *r->groups);
    r->pairs = attn__alloc_array(capacity, sizeof *r->pairs);
    r->needs_q = attn__alloc_array(capacity, sizeof *r->needs_q);
    r->needs_kv = attn__alloc_array(capacity, sizeof *r->needs_kv);
    if (r->groups == NULL || r->pairs == NULL || r->needs_q == NULL || r->needs_kv == NULL) {
        return ATTN_ENOMEM;
    }
    r->group_count = union_offsets(plan, r->groups);
    for (int64_t i = 0; i < r->group_count; i++) {
        r->groups[i] = attn__mod(r->groups[i] + r->rank, workers);
        int64_t tokens = attn__tokens(&plan->problem, longer_side(plan));
        r->tokens += attn__group_count(tokens, workers, r->groups[i]);
    }
    qsort(r->groups, (size_t)r->group_count, sizeof *r->groups, compare);
    r->pair_count = attn__schedule_pairs(plan->schedule, r->rank, r->pairs);
    r->needs_q_count = list_needs(r, false, r->needs_q);
    r->needs_kv_count = list_needs(r, true, r->needs_kv);
    ATTN__TRY(attn__schedule_traffic(plan->schedule, r->rank, r->pairs, r->pair_count, &bytes, &traffic));
    r->cells = traffic.cells;
    r->bytes_in = traffic.bytes_in;
    r->bytes_out = traffic.bytes_out;
    return ATTN_OK;
}

attn_status attn_plan_rank(const attn_plan *plan, int64_t rank, attn_rank *out)
{
    ATTN__TRY(check_out(plan, out, out != NULL ? out->size : 0, sizeof *out, "attn_plan_rank"));
    if (rank < 0 || rank >= plan->layout.workers) {
        return attn__fail(ATTN_EINVAL, "rank %lld: ranks go from 0 to %lld", (long long)rank,
                          (long long)plan->layout.workers - 1);
    }
    *out = (attn_rank){.size = sizeof *out, .rank = rank};
    attn_status status = fill_rank(plan, out);
    if (status != ATTN_OK) {
        attn_rank_free(out);
    }
    return status;
}

void attn_rank_free(attn_rank *out)
{
    if (out != NULL) {
        attn__free(out->groups);
        attn__free(out->pairs);
        attn__free(out->needs_q);
        attn__free(out->needs_kv);
        *out = (attn_rank){.size = sizeof *out};
    }
}

/* ---- proof and costs ---- */

attn_status attn_plan_prove(const attn_plan *plan, attn_proof *proof)
{
    ATTN__TRY(check_out(plan, proof, proof != NULL ? proof->size : 0, sizeof *proof, "attn_plan_prove"));
    return attn__schedule_prove(plan->schedule, proof);
}

attn_status attn_plan_cost(const attn_plan *plan, int64_t index, attn_cost *cost)
{
    attn_cost rows[4];
    ATTN__TRY(check_out(plan, cost, cost != NULL ? cost->size : 0, sizeof *cost, "attn_plan_cost"));
    if (index < 0 || index >= 4) {
        return attn__fail(ATTN_EINVAL, "the cost table has 4 rows");
    }
    attn__bytes bytes = attn__problem_bytes(&plan->problem);
    ATTN__TRY(attn__cost_table(&plan->layout, &plan->cover, plan->problem.heads_q, plan->problem.heads_kv,
                               &bytes, rows));
    *cost = rows[index];
    cost->size = sizeof *cost;
    return ATTN_OK;
}

attn_status attn_interest_search(int64_t workers, int64_t size, double seconds, uint64_t seed, int64_t *set,
                                 int64_t capacity, int64_t *found)
{
    attn__cover best;
    if (workers < 1 || size < 0 || set == NULL || found == NULL || !(seconds >= 0)) {
        return attn__fail(ATTN_EINVAL, "attn_interest_search needs workers and seconds, and room for a set");
    }
    ATTN__TRY(attn__cover_best(&best, workers));
    int64_t want = size > 0 ? size : best.size;
    attn__cover_free(&best);
    *found = 0;
    if (want > capacity) {
        return attn__fail(ATTN_EINVAL, "a set of %lld does not fit into %lld places", (long long)want,
                          (long long)capacity);
    }
    return attn__cover_search(workers, want, seconds, seed, set, found);
}

/* ---- the kernel table ---- */

/* Why it is not taken for this shape, or only when asked for by name. */
static const char *objection(const attn__kernel *kernel, const attn__shape *shape)
{
    const char *reason = attn__kernel_refusal(kernel, shape);
    return reason != NULL ? reason : attn__kernel_reluctance(kernel, shape);
}

/* The same of this machine alone: of the dtype that a kernel has least against. */
static const char *objection_here(const attn__kernel *kernel)
{
    attn__shape plain = {.dim_qk = 64, .dim_v = 64, .rows = 256, .keys = 256};
    const char *reason = NULL;
    for (plain.dtype = ATTN_F32; plain.dtype <= ATTN_BF16; plain.dtype++) {
        reason = objection(kernel, &plain);
        if (reason == NULL) {
            return NULL;
        }
    }
    return reason;
}

/* Row `index` of the CPU's table. */
static attn_verdict judge_cpu(const attn_plan *plan, int64_t index)
{
    const attn__kernel *kernel = attn__kernels[index];
    attn_verdict verdict = {
        .size = sizeof verdict,
        .name = kernel->name,
        .summary = kernel->summary,
        .chosen = plan != NULL && plan->kernel == kernel,
        .rounds_weights = kernel->rounds_weights,
        .device = ATTN_CPU,
    };
    if (plan == NULL) {
        verdict.reason = objection_here(kernel);
    } else {
        verdict.reason =
            verdict.chosen ? attn__kernel_refusal(kernel, &plan->shape) : objection(kernel, &plan->shape);
    }
    return verdict;
}

/* Row `index` of the GPU's; without a plan, for GPU 0. */
static attn_verdict judge_cuda(const attn_plan *plan, int64_t index)
{
    const attn__cuda_kernel *kernel = attn__cuda_kernels[index];
    const attn__cuda_device *device;
    attn_verdict verdict = {
        .size = sizeof verdict,
        .name = kernel->name,
        .summary = kernel->summary,
        .rounds_weights = kernel->rounds_weights ? 2 : 0,
        .device = ATTN_CUDA,
    };
    if (plan == NULL) {
        verdict.reason = attn__cuda_open(&device, 0) == ATTN_OK ? NULL : "needs a Hopper GPU and its driver";
        return verdict;
    }
    verdict.chosen = plan->cuda == kernel;
    verdict.reason = attn__cuda_refusal(kernel, &plan->call, plan->backward);
    if (verdict.reason == NULL && !verdict.chosen) {
        verdict.reason = attn__cuda_reluctance(kernel, &plan->call, plan->backward);
    }
    return verdict;
}

attn_status attn_kernel_verdict(const attn_plan *plan, int64_t index, attn_verdict *verdict)
{
    int64_t cpu = 0, cuda = 0;
    while (attn__kernels[cpu] != NULL) {
        cpu++;
    }
    while (attn__cuda_kernels[cuda] != NULL) {
        cuda++;
    }
    /* a plan has the table of its device, the machine has both */
    const int64_t rows_cpu = plan != NULL && plan->gpu != NULL ? 0 : cpu;
    const int64_t rows_cuda = plan != NULL && plan->gpu == NULL ? 0 : cuda;
    if (verdict == NULL || verdict->size != sizeof *verdict || index < 0 || index >= rows_cpu + rows_cuda) {
        return attn__fail(ATTN_EINVAL, "the kernel table has %lld rows; set the verdict's size field",
                          (long long)(rows_cpu + rows_cuda));
    }
    *verdict = index < rows_cpu ? judge_cpu(plan, index) : judge_cuda(plan, index - rows_cpu);
    return ATTN_OK;
}
