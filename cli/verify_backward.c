/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_backward.c - gradients against the fp64 reference.
 *
 * Tolerances, in the terms of verify.c: u = 2^-24, d, n keys, m rows that share a key, S >= every |score|;
 * and B = max|v| max|dO| >= every |dP|, r the unit roundoff of the dtype that results and o are stored in.
 * - P = exp(S - lse) from an lse in fp32:   relative error    e = u (S (sqrt(d) + 4) + 3 (S + log n) + 4)
 * - dS = P (dP - D), where o in D is rounded:                 P g,   g = B (2 e + u (sqrt(d_v) + 6) + r + 2
 * w) where some kernels round P and dS of 16-bit inputs to their dtype, by w (0 for others), as in verify.c
 * - dQ sums over keys whose weights add up to 1:     scale max|k| (g + 2 B u (sqrt(n) + 3))
 *   dK over rows whose weights add up to W:          scale max|q| W (g + 2 B u (sqrt(m) + 3))
 *   dV                                               max|dO| W (e + w + u (sqrt(m) + 3))
 *   and r |ref| for rounding, where W of a key is what the reference says dV is for dO = 1.
 * - As in verify.c the sharp test is the mean square: errors of the many terms cancel, so it must keep to
 *   (2 e + w + r) rms(ref) and, for what is left where the reference cancels, the bounds above over the
 * square root of the number of terms, with root mean squares for the largest elements and sqrt(d_v) rms(v)
 * rms(dO) for B, the size of a product of vectors that have nothing to do with each other.
 */
#include "verify_backward.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DQ, DK, DV, KINDS };

typedef struct limits {
    double part[KINDS]; /* for weights that add up to 1 */
    double rms_part[KINDS];
    double share;     /* of |ref|, of an element */
    double rms_share; /* of the rms of the reference */
    double terms[KINDS];
    double step; /* half of fp16's smallest step */
} limits;

typedef struct sums {
    double error, reference, weight; /* of squares */
    int64_t elements;
    double largest;
} sums;

typedef struct compare {
    const cli_slopes *slopes;
    cli_slopes_verdict *verdict;
    cli_tensor got[KINDS];
    limits limits;
    sums sums[KINDS];
    int64_t *rows, *keys;
    double *want[KINDS], *weight, *spare; /* weight: dV for dO = 1 */
    void *ones;
} compare;

/* ---- tolerances ---- */

static limits limits_of(const cli_slopes *s)
{
    const attn_problem *p = s->problem;
    const double u = 0x1p-24, group = (double)(p->heads_q / p->heads_kv);
    cli_tensor q = cli_tensor_of(p, ATTN_Q, s->io->q), k = cli_tensor_of(p, ATTN_K, s->io->k);
    cli_tensor v = cli_tensor_of(p, ATTN_V, s->io->v), dout = cli_tensor_out(p, p->dtype, s->io->dout);
    cli_extent eq = cli_tensor_extent(&q), ek = cli_tensor_extent(&k), ev = cli_tensor_extent(&v);
    cli_extent ed = cli_tensor_extent(&dout);
    double n = (double)p->tokens_kv, m = group * (double)p->tokens_q;
    double cells = attn_problem_flops(p) / (2.0 * (double)((p->dim_qk + p->dim_v) * p->batch * p->heads_q));
    double r = p->dtype_out == ATTN_F16 ? 0x1p-11 : p->dtype_out == ATTN_BF16 ? 0x1p-8 : u;
    double scale = fabs(p->scale), scores = scale * eq.row * ek.row, b = ev.row * ed.row;
    double w = s->rounds_scores ? cli_score_rounding(p, scores) : cli_weight_rounding(p, s->kernel);
    double e = u * (scores * (sqrt((double)p->dim_qk) + 4) + 3 * (scores + log(n)) + 4);
    double g = 2 * e + u * (sqrt((double)p->dim_v) + 6) + r + 2 * w; /* of b */
    double usual = sqrt((double)p->dim_v) * ev.rms * ed.rms, sum_n = u * (sqrt(n) + 3),
           sum_m = u * (sqrt(m) + 3);
    return (limits){
        .part = {[DQ] = scale * ek.element * b * (g + 2 * sum_n),
                 [DK] = scale * eq.element * b * (g + 2 * sum_m),
                 [DV] = ed.element * (e + w + sum_m)},
        .rms_part = {[DQ] = scale * ek.rms * usual * (g + 2 * sum_n),
                     [DK] = scale * eq.rms * usual * (g + 2 * sum_m),
                     [DV] = ed.rms * (e + w + sum_m)},
        .share = r,
        .rms_share = 2 * e + w + r,
        .terms = {[DQ] = fmax(1, cells / (double)p->tokens_q),
                  [DK] = fmax(1, group * cells / n),
                  [DV] = fmax(1, group * cells / n)},
        .step = p->dtype_out == ATTN_F16 ? 0x1p-25 : 0,
    };
}

/* ---- comparing ---- */

static void note_wrong(compare *c, int kind, int64_t batch, int64_t head, int64_t token)
{
    static const char *const names[] = {"dq", "dk", "dv"};
    cli_slopes_verdict *v = c->verdict;
    if (v->wrong++ == 0) {
        snprintf(v->where, sizeof v->where, "%s, batch %lld, head %lld, %s %lld", names[kind],
                 (long long)batch, (long long)head, kind == DQ ? "row" : "key", (long long)token);
    }
}

/* One row of a gradient; weight: what its weights add up to. */
static void compare_row(compare *c, int kind, int64_t batch, int64_t head, int64_t token, const double *want,
                        double weight)
{
    const cli_tensor *t = &c->got[kind];
    sums *sum = &c->sums[kind];
    float got[512];
    double part = c->limits.part[kind] * weight, ratio = 0;
    bool right = true, finite = true;
    cli_tensor_row(t, batch, head, token, got);
    for (int64_t i = 0; i < t->dim; i++) {
        finite = finite && isfinite(want[i]);
    }
    for (int64_t i = 0; i < t->dim; i++) {
        double x = (double)got[i], error = fabs(x - want[i]);
        double limit = part + c->limits.share * fabs(want[i]) + c->limits.step;
        if (!finite || !isfinite(x)) {
            right = right && isfinite(x) == isfinite(want[i]);
            if (finite) { /* infinitely far from it */
                ratio = sum->largest = (double)INFINITY;
            }
            continue;
        }
        ratio = fmax(ratio, error > 0 ? error / limit : 0);
        sum->largest = fmax(sum->largest, error);
        sum->error += error * error;
        sum->reference += want[i] * want[i];
        sum->weight += weight * weight;
        sum->elements++;
    }
    c->verdict->ratio = fmax(c->verdict->ratio, ratio);
    if (!right || ratio > 1) {
        note_wrong(c, kind, batch, head, token);
    }
}

/* One at random in each of `total` equal stretches of the tokens. */
static void choose(int64_t *chosen, int64_t total, int64_t tokens, uint64_t *random)
{
    for (int64_t i = 0; i < total; i++) {
        int64_t from = i * tokens / total, width = (i + 1) * tokens / total - from;
        *random = *random * 6364136223846793005u + 1442695040888963407u; /* Knuth's LCG: MMIX */
        chosen[i] = from + (int64_t)(*random >> 33) % (width > 0 ? width : 1);
    }
}

static int64_t count_of(const cli_slopes *s, int64_t tokens)
{
    return s->rows == 0 || s->rows > tokens ? tokens : s->rows;
}

static attn_status compare_keys(compare *c, const attn_gradients *io, int64_t batch, int64_t kv)
{
    const attn_problem *p = c->slopes->problem;
    const attn_gradients *given = c->slopes->io;
    int64_t head = kv * (p->heads_q / p->heads_kv), count = count_of(c->slopes, p->tokens_kv);
    attn_gradients ones = {
        .size = sizeof ones,
        .q = io->q,
        .k = io->k,
        .v = io->v,
        .o = io->o,
        .lse = given->lse,
        .dout = {.data = c->ones, .stride = {0, 0, 0, 1}},
    };
    attn_status status =
        attn_reference_backward(p, io, batch, head, NULL, 0, NULL, c->keys, count, c->want[DK], c->want[DV]);
    if (status == ATTN_OK) {
        status = attn_reference_backward(p, &ones, batch, head, NULL, 0, NULL, c->keys, count, c->spare,
                                         c->weight);
    }
    for (int64_t i = 0; i < count && status == ATTN_OK; i++) {
        double weight = c->weight[i * p->dim_v];
        weight = isfinite(weight) ? fabs(weight) : 0;
        compare_row(c, DK, batch, kv, c->keys[i], c->want[DK] + i * p->dim_qk, weight);
        compare_row(c, DV, batch, kv, c->keys[i], c->want[DV] + i * p->dim_v, weight);
    }
    return status;
}

static attn_status compare_rows(compare *c, const attn_gradients *io, int64_t batch, int64_t head)
{
    const attn_problem *p = c->slopes->problem;
    int64_t count = count_of(c->slopes, p->tokens_q);
    attn_status status =
        attn_reference_backward(p, io, batch, head, c->rows, count, c->want[DQ], NULL, 0, NULL, NULL);
    for (int64_t i = 0; i < count && status == ATTN_OK; i++) {
        compare_row(c, DQ, batch, head, c->rows[i], c->want[DQ] + i * p->dim_qk, 1);
    }
    return status;
}

/* The chosen (batch, kv head)s: their keys, and the rows of each one's first query head. */
static attn_status compare_all(compare *c)
{
    const cli_slopes *s = c->slopes;
    const attn_problem *p = s->problem;
    int64_t all = p->batch * p->heads_kv, group = p->heads_q / p->heads_kv;
    int64_t planes = s->planes == 0 || s->planes > all ? all : s->planes;
    uint64_t random = s->seed;
    attn_gradients io = *s->io;
    attn_status status = ATTN_OK;
    io.delta = (attn_tensor){0};
    if (s->anew) {
        io.lse = (attn_tensor){0};
    }
    for (int64_t i = 0; i < planes && status == ATTN_OK; i++) {
        int64_t plane = i * all / planes, batch = plane / p->heads_kv, kv = plane % p->heads_kv;
        choose(c->rows, count_of(s, p->tokens_q), p->tokens_q, &random);
        choose(c->keys, count_of(s, p->tokens_kv), p->tokens_kv, &random);
        status = compare_keys(c, &io, batch, kv);
        for (int64_t head = kv * group; head < (kv + 1) * group && status == ATTN_OK; head++) {
            status = compare_rows(c, &io, batch, head);
            head += planes < all ? group : 0; /* a sample needs one head of a group */
        }
    }
    return status;
}

static void conclude(compare *c)
{
    cli_slopes_verdict *v = c->verdict;
    for (int kind = DQ; kind < KINDS; kind++) {
        const sums *s = &c->sums[kind];
        double n = s->elements > 0 ? (double)s->elements : 1, rms = sqrt(s->error / n);
        double limit = c->limits.rms_share * sqrt(s->reference / n) +
                       c->limits.rms_part[kind] * sqrt(s->weight / n / c->limits.terms[kind]) +
                       c->limits.step;
        double noise = c->limits.rms_part[kind] * sqrt(s->weight / c->limits.terms[kind]);
        double relative = s->reference > noise * noise ? sqrt(s->error / s->reference) : 0;
        v->max_error = fmax(v->max_error, s->largest);
        v->relative = fmax(v->relative, relative);
        if (rms > 0) {
            v->ratio = fmax(v->ratio, rms / limit);
        }
        if (rms > limit && v->wrong++ == 0) {
            snprintf(v->where, sizeof v->where, "%s: the root mean square of the error",
                     kind == DQ   ? "dq"
                     : kind == DK ? "dk"
                                  : "dv");
        }
    }
    v->passed = v->wrong == 0;
}

static bool make_room(compare *c)
{
    const attn_problem *p = c->slopes->problem;
    size_t rows = (size_t)count_of(c->slopes, p->tokens_q), keys = (size_t)count_of(c->slopes, p->tokens_kv);
    size_t d = (size_t)p->dim_qk, dv = (size_t)p->dim_v;
    float one[512];
    c->rows = calloc(rows, sizeof *c->rows);
    c->keys = calloc(keys, sizeof *c->keys);
    c->want[DQ] = malloc(rows * d * sizeof(double));
    c->want[DK] = malloc(keys * d * sizeof(double));
    c->want[DV] = malloc(keys * dv * sizeof(double));
    c->spare = malloc(keys * d * sizeof(double));
    c->weight = malloc(keys * dv * sizeof(double));
    c->ones = malloc(dv * attn_dtype_size(p->dtype));
    for (size_t i = 0; i < dv; i++) {
        one[i] = 1;
    }
    if (c->ones != NULL) {
        attn_from_f32(c->ones, p->dtype, 1, one, p->dim_v);
    }
    return c->rows != NULL && c->keys != NULL && c->want[DQ] != NULL && c->want[DK] != NULL &&
           c->want[DV] != NULL && c->spare != NULL && c->weight != NULL && c->ones != NULL;
}

attn_status cli_slopes_run(const cli_slopes *slopes, cli_slopes_verdict *verdict)
{
    const attn_problem *p = slopes->problem;
    compare c = {.slopes = slopes, .verdict = verdict, .limits = limits_of(slopes)};
    memset(verdict, 0, sizeof *verdict);
    c.got[DQ] = cli_tensor_of(p, ATTN_Q, slopes->io->dq);
    c.got[DK] = cli_tensor_of(p, ATTN_K, slopes->io->dk);
    c.got[DV] = cli_tensor_of(p, ATTN_V, slopes->io->dv);
    for (int kind = DQ; kind < KINDS; kind++) {
        c.got[kind].dtype = p->dtype_out;
    }
    attn_status status = make_room(&c) ? compare_all(&c) : cli_refuse(ATTN_ENOMEM, "out of memory");
    if (status == ATTN_OK) {
        conclude(&c);
    }
    free(c.rows);
    free(c.keys);
    for (int kind = DQ; kind < KINDS; kind++) {
        free(c.want[kind]);
    }
    free(c.spare);
    free(c.weight);
    free(c.ones);
    return status;
}
