/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost.c - what a schedule makes each worker move, hold and compute, next to ring attention and Ulysses.
 *
 * Every token group is at home on the worker of its number, before and after.  "In" is what a worker's tasks
 * read and it does not have; "out" is what it computed for rows that are at home elsewhere.  On the mean over
 * all workers as much is sent as is received, so in + out is the volume that a worker receives.  Only groups
 * that some visible block needs are counted.  Formulas, sources and an example: docs/costs.md.
 *
 * Cost: O(W) a worker for its own numbers (O(k^2 log W) for the material list); O(W^2) for the table up to
 * ATTN__COUNTED workers, O(sqrt(W)) above.
 */
#include <inttypes.h>

#include "quorum/cover.h"

/* ---- one worker ---- */

/* Rows and groups that a task list touches; "away": at home on another worker. */
typedef struct material {
    int64_t q_rows, q_rows_away, q_groups_away;
    int64_t kv_rows, kv_rows_away;
    int64_t sources; /* workers that some of it comes from */
} material;

/* The first pair of a sorted list that is not before (q, kv). */
static int64_t lower_bound(const attn_pair *pairs, int64_t count, int64_t q, int64_t kv)
{
    int64_t low = 0;
    int64_t high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        attn_pair pair = pairs[middle];
        if (pair.q < q || (pair.q == q && pair.kv < kv)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool needs_q(const attn_pair *pairs, int64_t count, int64_t q)
{
    int64_t at = lower_bound(pairs, count, q, 0);
    return at < count && pairs[at].q == q;
}

/* Some query group of the worker meets the key group; mostly one of the first does. */
static bool needs_kv(const attn__schedule *s, int64_t rank, const attn_pair *pairs, int64_t count, int64_t kv)
{
    const int64_t *set_q, *set_kv;
    int64_t size_q, size_kv;
    attn__schedule_sets(s, &set_q, &size_q, &set_kv, &size_kv);
    int64_t workers = attn__schedule_layout(s)->workers;
    for (int64_t a = 0; a < size_q; a++) {
        int64_t q = (rank + set_q[a]) % workers;
        int64_t at = lower_bound(pairs, count, q, kv);
        if (at < count && pairs[at].q == q && pairs[at].kv == kv) {
            return true;
        }
    }
    return false;
}

static material list_material(const attn__schedule *s, int64_t rank, const attn_pair *pairs, int64_t count)
{
    const attn__layout *layout = attn__schedule_layout(s);
    const int64_t *set_q, *set_kv;
    int64_t size_q, size_kv;
    attn__schedule_sets(s, &set_q, &size_q, &set_kv, &size_kv);
    material m = {0};
    for (int64_t i = 0; i < count; i++) {
        if (i == 0 || pairs[i].q != pairs[i - 1].q) {
            int64_t rows = attn__group_count(layout->tokens_q, layout->workers, pairs[i].q);
            bool away = pairs[i].q != rank;
            m.q_rows += rows;
            m.q_rows_away += away ? rows : 0;
            m.q_groups_away += away;
            m.sources += away;
        }
    }
    for (int64_t b = 0; b < size_kv; b++) {
        int64_t kv = (rank + set_kv[b]) % layout->workers;
        if (needs_kv(s, rank, pairs, count, kv)) {
            int64_t rows = attn__group_count(layout->tokens_kv, layout->workers, kv);
            bool away = kv != rank;
            m.kv_rows += rows;
            m.kv_rows_away += away ? rows : 0;
            m.sources += away && !needs_q(pairs, count, kv);
        }
    }
    return m;
}

/* sum += rows * bytes; false on overflow */
static bool add_bytes(int64_t *sum, int64_t rows, int64_t bytes)
{
    int64_t product;
    return attn__mul(rows, bytes, &product) && attn__add(*sum, product, sum);
}

static bool weigh(const material *m, const attn__bytes *bytes, attn__traffic *traffic)
{
    int64_t q = m->q_rows_away;
    int64_t kv = m->kv_rows_away;
    return add_bytes(&traffic->bytes_in, q, bytes->q) && add_bytes(&traffic->bytes_in, kv, bytes->k) &&
           add_bytes(&traffic->bytes_in, kv, bytes->v) && add_bytes(&traffic->bytes_out, q, bytes->o) &&
           /* backward: q, k, v again, dO, lse and D come in; dQ, dK and dV go out */
           add_bytes(&traffic->backward_in, 1, traffic->bytes_in) &&
           add_bytes(&traffic->backward_in, q, bytes->out) &&
           add_bytes(&traffic->backward_in, q, bytes->stat) &&
           add_bytes(&traffic->backward_in, q, bytes->stat) &&
           add_bytes(&traffic->backward_out, 1, traffic->bytes_in);
}

static attn_status measure(const attn__schedule *s, int64_t rank, const attn_pair *pairs, int64_t count,
                           const attn__bytes *bytes, attn__traffic *traffic, material *m)
{
    attn__band band = attn__schedule_layout(s)->band;
    *traffic = (attn__traffic){0};
    *m = list_material(s, rank, pairs, count);
    traffic->messages = m->sources + m->q_groups_away;
    bool fits = weigh(m, bytes, traffic);
    for (int64_t i = 0; i < count && fits; i++) {
        attn__block_rows rows = attn__schedule_rows(s, pairs[i]);
        int64_t cells = attn__band_cells(band, rows.q_first, rows.q_count, rows.kv_first, rows.kv_count);
        fits = attn__add(traffic->cells, cells, &traffic->cells);
    }
    if (!fits) {
        return attn__fail(ATTN_EINVAL, "worker %" PRId64 " moves more than 2^63 bytes: use more workers",
                          rank);
    }
    return ATTN_OK;
}

attn_status attn__schedule_traffic(const attn__schedule *schedule, int64_t rank, const attn_pair *pairs,
                                   int64_t count, const attn__bytes *bytes, attn__traffic *traffic)
{
    material m;
    return measure(schedule, rank, pairs, count, bytes, traffic, &m);
}

/* ---- all workers of a schedule ---- */

static void raise_to(double *most, double x)
{
    *most = x > *most ? x : *most;
}

/* Adds one worker; sums stand in the _mean fields until finish_means. */
static void add_worker(attn_cost *cost, const attn__traffic *t, const material *m, const attn__bytes *bytes)
{
    double inputs = (double)m->q_rows * (double)bytes->q + (double)m->kv_rows * (double)(bytes->k + bytes->v);
    double partials = (double)m->q_rows * (double)bytes->o;
    cost->in_mean += (double)t->bytes_in;
    cost->out_mean += (double)t->bytes_out;
    cost->backward_in_mean += (double)t->backward_in;
    cost->backward_out_mean += (double)t->backward_out;
    raise_to(&cost->in_max, (double)t->bytes_in);
    raise_to(&cost->out_max, (double)t->bytes_out);
    raise_to(&cost->backward_in_max, (double)t->backward_in);
    raise_to(&cost->backward_out_max, (double)t->backward_out);
    cost->root_out += inputs;
    cost->root_in += partials;
    raise_to(&cost->memory, inputs + partials);
    cost->messages = attn__max(cost->messages, t->messages);
}

static void finish_means(attn_cost *cost, int64_t workers, double cells, double cells_most)
{
    cost->in_mean /= (double)workers;
    cost->out_mean /= (double)workers;
    cost->backward_in_mean /= (double)workers;
    cost->backward_out_mean /= (double)workers;
    cost->balance = cells > 0 ? cells_most * (double)workers / cells : 1;
}

static attn_status count_workers(const attn__schedule *s, const attn__bytes *bytes, attn_cost *cost)
{
    int64_t workers = attn__schedule_layout(s)->workers;
    attn_pair *pairs = attn__alloc_array(attn__schedule_capacity(s), sizeof *pairs);
    if (pairs == NULL) {
        return ATTN_ENOMEM;
    }
    attn_status status = ATTN_OK;
    double cells = 0;
    double cells_most = 0;
    for (int64_t rank = 0; rank < workers && status == ATTN_OK; rank++) {
        attn__traffic traffic;
        material m;
        int64_t count = attn__schedule_pairs(s, rank, pairs);
        status = measure(s, rank, pairs, count, bytes, &traffic, &m);
        add_worker(cost, &traffic, &m, bytes);
        cells += (double)traffic.cells;
        raise_to(&cells_most, (double)traffic.cells);
    }
    finish_means(cost, workers, cells, cells_most);
    attn__free(pairs);
    return status;
}

/* Above ATTN__COUNTED workers: every worker as if it needed all of its quorum, full groups. */
static void estimate_workers(const attn__layout *layout, const attn__bytes *bytes, attn_cost *cost)
{
    double workers = (double)layout->workers;
    double kv = (double)(bytes->k + bytes->v);
    double q_mean = (double)layout->tokens_q / workers;
    double kv_mean = (double)layout->tokens_kv / workers;
    double q_most = (double)attn__ceil_div(layout->tokens_q, layout->workers);
    double kv_most = (double)attn__ceil_div(layout->tokens_kv, layout->workers);
    double a = (double)cost->a;
    double b = (double)cost->b;
    double statistics = (double)bytes->out + 2 * (double)bytes->stat;
    cost->in_mean = (a - 1) * q_mean * (double)bytes->q + (b - 1) * kv_mean * kv;
    cost->in_max = (a - 1) * q_most * (double)bytes->q + (b - 1) * kv_most * kv;
    cost->out_mean = (a - 1) * q_mean * (double)bytes->o;
    cost->out_max = (a - 1) * q_most * (double)bytes->o;
    cost->backward_in_mean = cost->in_mean + (a - 1) * q_mean * statistics;
    cost->backward_in_max = cost->in_max + (a - 1) * q_most * statistics;
    cost->backward_out_mean = cost->in_mean;
    cost->backward_out_max = cost->in_max;
    cost->root_out = a * (double)layout->tokens_q * (double)bytes->q + b * (double)layout->tokens_kv * kv;
    cost->root_in = a * (double)layout->tokens_q * (double)bytes->o;
    cost->memory = a * q_most * (double)(bytes->q + bytes->o) + b * kv_most * kv;
    cost->balance = 1;
}

/* Takes the schedule (NULL where `made` says that making it failed), and frees it. */
static attn_status cost_of(attn_status made, attn__schedule *s, const attn__bytes *bytes, attn_cost *cost)
{
    ATTN__TRY(made);
    const int64_t *set_q, *set_kv;
    attn__schedule_sets(s, &set_q, &cost->a, &set_kv, &cost->b);
    attn_status status = count_workers(s, bytes, cost);
    attn__schedule_free(s);
    return status;
}

static attn_status cost_cyclic(const attn__layout *layout, const attn__cover *cover, const attn__bytes *bytes,
                               attn_cost *cost)
{
    *cost = (attn_cost){
        .size = sizeof *cost, .scheme = "cyclic", .a = cover->size, .b = cover->size, .possible = 1};
    if (layout->workers > ATTN__COUNTED) {
        estimate_workers(layout, bytes, cost);
        cost->messages = 2 * (cover->size - 1);
        return ATTN_OK;
    }
    attn__schedule *s;
    attn_status made = attn__schedule_cyclic(&s, layout, cover);
    return cost_of(made, s, bytes, cost);
}

static attn_status cost_rectangular(const attn__layout *layout, const attn__bytes *bytes, attn_cost *cost)
{
    int64_t a = attn__rectangle_best(layout, bytes);
    int64_t b = attn__ceil_div(layout->workers, a);
    *cost = (attn_cost){.size = sizeof *cost, .scheme = "rectangular", .a = a, .b = b, .possible = 1};
    if (layout->workers > ATTN__COUNTED) {
        estimate_workers(layout, bytes, cost);
        cost->messages = 2 * (a - 1) + b - 1;
        return ATTN_OK;
    }
    attn__schedule *s;
    attn_status made = attn__schedule_rectangular(&s, layout, a);
    return cost_of(made, s, bytes, cost);
}

/* ---- ring and Ulysses, by formula ---- */

/* Most cells of a worker over the mean, when each computes its own query group against all keys. */
static double ring_balance(const attn__layout *layout)
{
    double cells = 0;
    double most = 0;
    for (int64_t rank = 0; rank < layout->workers; rank++) {
        int64_t first = attn__group_first(layout->tokens_q, layout->workers, rank);
        int64_t count = attn__group_count(layout->tokens_q, layout->workers, rank);
        double own = (double)attn__band_cells(layout->band, first, count, 0, layout->tokens_kv);
        cells += own;
        raise_to(&most, own);
    }
    return cells > 0 ? most * (double)layout->workers / cells : 1;
}

/* Queries stay; keys and values pass by, whatever the mask.  Backward, their gradients travel with them. */
static void cost_ring(const attn__layout *layout, const attn__bytes *bytes, attn_cost *cost)
{
    int64_t workers = layout->workers;
    double kv = (double)(bytes->k + bytes->v);
    double tokens = (double)layout->tokens_kv;
    double q_most = (double)attn__ceil_div(layout->tokens_q, workers);
    double kv_most = (double)attn__ceil_div(layout->tokens_kv, workers);
    *cost = (attn_cost){.size = sizeof *cost, .scheme = "ring", .a = 1, .b = workers, .possible = 1};
    cost->in_mean = (tokens - tokens / (double)workers) * kv;
    cost->in_max = (double)(layout->tokens_kv - layout->tokens_kv / workers) * kv;
    cost->backward_in_mean = cost->in_mean;
    cost->backward_in_max = cost->in_max;
    cost->backward_out_mean = cost->backward_out_max = workers > 1 ? tokens * kv : 0;
    cost->root_out = (double)layout->tokens_q * (double)bytes->q + tokens * kv;
    cost->root_in = (double)layout->tokens_q * (double)bytes->o;
    cost->memory = q_most * (double)(bytes->q + bytes->o) + (workers > 1 ? 3 : 1) * kv_most * kv;
    cost->balance = ring_balance(layout);
    cost->messages = workers - 1;
}

/* One all-to-all turns token groups of all heads into all tokens of some heads, another one turns them back.
 */
static void cost_ulysses(const attn__layout *layout, int64_t heads_kv, const attn__bytes *bytes,
                         attn_cost *cost)
{
    int64_t workers = layout->workers;
    double away = (double)(workers - 1) / (double)workers;
    double kv = (double)(bytes->k + bytes->v);
    double q_mean = (double)layout->tokens_q / (double)workers;
    double kv_mean = (double)layout->tokens_kv / (double)workers;
    double q_most = (double)attn__ceil_div(layout->tokens_q, workers);
    double kv_most = (double)attn__ceil_div(layout->tokens_kv, workers);
    *cost = (attn_cost){.size = sizeof *cost, .scheme = "ulysses", .possible = heads_kv % workers == 0};
    if (!cost->possible) {
        cost->why = "the number of workers does not divide heads_kv";
        return;
    }
    cost->in_mean = away * (q_mean * (double)bytes->q + kv_mean * kv);
    cost->in_max = away * (q_most * (double)bytes->q + kv_most * kv);
    cost->out_mean = away * q_mean * (double)bytes->out;
    cost->out_max = away * q_most * (double)bytes->out;
    cost->backward_in_mean = cost->out_mean; /* dO; q, k and v are still there */
    cost->backward_in_max = cost->out_max;
    cost->backward_out_mean = cost->in_mean; /* dQ, dK, dV */
    cost->backward_out_max = cost->in_max;
    cost->root_out = (double)layout->tokens_q * (double)bytes->q + (double)layout->tokens_kv * kv;
    cost->root_in = (double)layout->tokens_q * (double)bytes->out;
    cost->memory = 2 * (q_most * (double)(bytes->q + bytes->out) + kv_most * kv);
    cost->balance = 1;
    cost->messages = 2 * (workers - 1);
}

/* ---- the table ---- */

int64_t attn__rectangle_best(const attn__layout *layout, const attn__bytes *bytes)
{
    double per_q = (double)layout->tokens_q * (double)(bytes->q + bytes->o);
    double per_kv = (double)layout->tokens_kv * (double)(bytes->k + bytes->v);
    int64_t workers = layout->workers;
    int64_t best = 1;
    double least = (double)(workers - 1) * per_kv;
    /* of all a with the same b = ceil(W/a) only the smallest matters, so each step skips the others */
    for (int64_t a = 2, b; a <= workers; a = b > 1 ? attn__ceil_div(workers, b - 1) : workers + 1) {
        b = attn__ceil_div(workers, a);
        double volume = (double)(a - 1) * per_q + (double)(b - 1) * per_kv;
        if (volume < least) {
            least = volume;
            best = a;
        }
    }
    return best;
}

attn_status attn__cost_table(const attn__layout *layout, const attn__cover *cover, int64_t heads_q,
                             int64_t heads_kv, const attn__bytes *bytes, attn_cost rows[4])
{
    if (heads_q < 1 || heads_kv < 1 || heads_q % heads_kv != 0) {
        return attn__fail(
            ATTN_EINVAL, "%" PRId64 " query heads on %" PRId64 " key heads: the second must divide the first",
            heads_q, heads_kv);
    }
    ATTN__TRY(cost_cyclic(layout, cover, bytes, &rows[0]));
    ATTN__TRY(cost_rectangular(layout, bytes, &rows[1]));
    cost_ring(layout, bytes, &rows[2]);
    cost_ulysses(layout, heads_kv, bytes, &rows[3]);
    return ATTN_OK;
}
