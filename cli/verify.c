/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - a result against the fp64 reference.
 *
 * Tolerances.  Let u = 2^-24, d = dim_qk, n the keys, S = |scale| max|q| max|k| >= every |score|, V = max|v|.
 * - A score is a dot product of d terms whose sizes add up to at most S.  Rounding errors of a sum behave as
 * a random walk (Higham & Mary, A new approach to probabilistic rounding error analysis, 2019): sqrt(d) u S;
 *   the factor scale log2(e), its product and the exponential add a few u S:   D = u S (sqrt(d) + 4).
 * - A weight exp(s - max) is off by a factor 1 +- D; o is a quotient of two sums over n such weights, each a
 *   random walk of sqrt(n) u, rescaled and merged a few times:                 E = 2 D + u (sqrt(n) + 16).
 * - Some kernels round the weights of bf16 inputs to bf16, by w = 2^-8, and some those of fp16 inputs to
 * fp16, by 2^-11 (0 for others): V w more, w in the mean square.
 * - A program that keeps scores and weights in the inputs' dtype, of unit roundoff r', makes the weights
 * wrong by w = r' (S + 2), and lse too: r' S for a score, r' for its weight, and as much for their sum.
 * - o is rounded to its dtype with unit roundoff r (below fp16's normal range the step is fixed: 2^-25):
 *       |o - ref| <= V (E + w) + r |ref|,        |lse - ref| <= E + u (S + log n).
 * - The errors of a row's weights are independent, and so cancel in the mean square: it must keep to E in
 *   proportion to the reference, where a reference that is small because its terms cancel counts with the
 *   size V / sqrt(n) that is left of them:
 *       rms(o - ref) <= (E + w + r) rms(ref) + (E + w) V / sqrt(n).
 *   This one is the sharp test: leaving out one key in n changes a row by about rms(ref) / sqrt(n). A row
 * whose reference is not finite must not be finite either, and the reverse.
 */
#include "verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, KEYS = 256 }; /* query rows of one reference call; tokens of one read */

/* ---- tolerances ---- */

double cli_weight_rounding(const attn_problem *p, const char *kernel)
{
    attn_verdict row = ATTN_INIT(attn_verdict);
    for (int64_t i = 0; kernel != NULL && attn_kernel_verdict(NULL, i, &row) == ATTN_OK; i++) {
        if (strcmp(row.name, kernel) == 0) {
            return row.rounds_weights >= 1 && p->dtype == ATTN_BF16  ? 0x1p-8
                   : row.rounds_weights >= 2 && p->dtype == ATTN_F16 ? 0x1p-11
                                                                     : 0;
        }
    }
    return 0;
}

double cli_score_rounding(const attn_problem *p, double scores)
{
    const double r = p->dtype == ATTN_F16 ? 0x1p-11 : p->dtype == ATTN_BF16 ? 0x1p-8 : 0x1p-24;
    return r * (scores + 2);
}

cli_tolerance cli_tolerance_of(const attn_problem *p, const char *kernel, bool rounds_scores,
                               const cli_bounds *bounds, cli_dtype out)
{
    const double u = 0x1p-24;
    double r = out == CLI_F16 ? 0x1p-11 : out == CLI_BF16 ? 0x1p-8 : u;
    double step = out == CLI_F16 ? 0x1p-25 : 0;
    double n = (double)p->tokens_kv;
    double scores = fabs(p->scale) * bounds->q * bounds->k;
    double weights = u * scores * (sqrt((double)p->dim_qk) + 4);
    double e = 2 * weights + u * (sqrt(n) + 16);
    double w = rounds_scores ? cli_score_rounding(p, scores) : cli_weight_rounding(p, kernel), sums = e + w;
    return (cli_tolerance){
        .o = bounds->v * sums + step,
        .o_share = r,
        .rms = sums * bounds->v / sqrt(n) + step,
        .rms_share = sums + r,
        .lse = e + u * (scores + log(n)) + (rounds_scores ? w : 0),
    };
}

/* Folds `count` rows of `dim` elements: the longest row, the largest element. */
static void fold_rows(const float *x, int64_t count, int64_t dim, double *longest, double *largest)
{
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int64_t c = 0; c < dim; c++) {
            double value = (double)x[i * dim + c];
            if (isfinite(value)) {
                sum += value * value;
                *largest = fmax(*largest, fabs(value));
            }
        }
        *longest = fmax(*longest, sqrt(sum));
    }
}

static int64_t operand_heads(const attn_problem *p, attn_operand x)
{
    return x == ATTN_Q ? p->heads_q : p->heads_kv;
}

static int64_t operand_dim(const attn_problem *p, attn_operand x)
{
    return x == ATTN_V ? p->dim_v : p->dim_qk;
}

static attn_status bound_operand(const attn_problem *p, const attn_source *source, attn_operand x, void *raw,
                                 float *values, double *longest, double *largest)
{
    int64_t tokens = x == ATTN_Q ? p->tokens_q : p->tokens_kv, heads = operand_heads(p, x);
    int64_t dim = operand_dim(p, x);
    for (int64_t batch = 0; batch < p->batch; batch++) {
        for (int64_t first = 0; first < tokens; first += KEYS) {
            int64_t count = tokens - first < KEYS ? tokens - first : KEYS;
            attn_status status = source->read(source->data, x, batch, first, count, raw, count * dim);
            if (status != ATTN_OK) {
                return status;
            }
            cli_to_f32(values, raw, (cli_dtype)p->dtype, heads * count * dim);
            fold_rows(values, heads * count, dim, longest, largest);
        }
    }
    return ATTN_OK;
}

/* Elements of the largest read. */
static int64_t piece_elements(const attn_problem *p)
{
    int64_t heads = p->heads_q > p->heads_kv ? p->heads_q : p->heads_kv;
    return KEYS * heads * (p->dim_qk > p->dim_v ? p->dim_qk : p->dim_v);
}

attn_status cli_bounds_of(const attn_problem *p, const attn_source *source, cli_bounds *bounds)
{
    double ignored = 0;
    size_t elements = (size_t)piece_elements(p);
    void *raw = malloc(elements * attn_dtype_size(p->dtype));
    float *values = malloc(elements * sizeof *values);
    *bounds = (cli_bounds){0};
    attn_status status = raw != NULL && values != NULL ? ATTN_OK : cli_refuse(ATTN_ENOMEM, "out of memory");
    if (status == ATTN_OK) {
        status = bound_operand(p, source, ATTN_Q, raw, values, &bounds->q, &ignored);
    }
    if (status == ATTN_OK) {
        status = bound_operand(p, source, ATTN_K, raw, values, &bounds->k, &ignored);
    }
    if (status == ATTN_OK) {
        status = bound_operand(p, source, ATTN_V, raw, values, &ignored, &bounds->v);
    }
    free(raw);
    free(values);
    return status;
}

/* ---- comparing ---- */

typedef struct compare {
    const cli_verify *verify;
    cli_verdict *verdict;
    double error_sum, reference_sum; /* of squares */
    int64_t elements;
    int64_t rows[CHUNK];
    double *o, *lse; /* the reference's */
    float *got, got_lse;
} compare;

static bool agree(double x, double reference, double tolerance)
{
    if (isnan(reference) || isinf(reference)) {
        return isnan(reference) ? isnan(x) : x == reference;
    }
    return fabs(x - reference) <= tolerance;
}

/* A finite reference beyond fp16's range is written as inf. */
static double as_written(double x, cli_dtype out)
{
    return out == CLI_F16 && fabs(x) >= 65520 ? copysign((double)INFINITY, x) : x;
}

static bool row_finite(const double *o, int64_t dim)
{
    bool finite = true;
    for (int64_t c = 0; c < dim && finite; c++) {
        finite = isfinite(o[c]);
    }
    return finite;
}

static void compare_row(compare *c, int64_t batch, int64_t head, int64_t row, const double *o, double lse)
{
    cli_verdict *v = c->verdict;
    int64_t dim = c->verify->problem->dim_v;
    bool right = true, finite = row_finite(o, dim);
    for (int64_t i = 0; i < dim; i++) {
        double got = (double)c->got[i], want = as_written(o[i], c->verify->out);
        double limit = v->tolerance.o + v->tolerance.o_share * fabs(want);
        /* inf and NaN in a row's inputs may end as either, by the order of sums; both say "not finite" */
        right = right && (finite ? agree(got, want, limit) : isfinite(got) == isfinite(want));
        if (isfinite(want) && isfinite(got)) {
            v->ratio = got != want ? fmax(v->ratio, fabs(got - want) / limit) : v->ratio;
            v->max_error = fmax(v->max_error, fabs(got - want));
            v->max_limit = fmax(v->max_limit, limit);
            c->error_sum += (got - want) * (got - want);
            c->reference_sum += want * want;
            c->elements++;
        } else if (isfinite(want) && finite) { /* infinitely far from it */
            v->ratio = v->max_error = (double)INFINITY;
        }
    }
    if (v->has_lse) {
        double got = (double)c->got_lse;
        bool exact = isfinite(lse) || (finite && lse == -INFINITY);
        right = right && (exact ? agree(got, lse, v->tolerance.lse) : !isfinite(got));
        if (isfinite(lse)) {
            v->lse_error = fmax(v->lse_error, isfinite(got) ? fabs(got - lse) : (double)INFINITY);
        }
        v->ratio = fmax(v->ratio, v->lse_error / v->tolerance.lse);
    }
    v->rows++;
    v->nonfinite += finite ? 0 : 1;
    if (!right && v->wrong++ == 0) {
        v->at[0] = batch;
        v->at[1] = head;
        v->at[2] = row;
    }
}

/* Rows at..at+count of the `total` that are looked at: all of them, or one at random in each of `total` equal
 * stretches of the sequence. */
static void choose_rows(compare *c, uint64_t *random, int64_t at, int64_t count, int64_t total)
{
    int64_t tokens = c->verify->problem->tokens_q;
    for (int64_t i = 0; i < count; i++) {
        double from = (double)(at + i) * (double)tokens / (double)total;
        double width = (double)tokens / (double)total;
        *random = *random * 6364136223846793005u + 1442695040888963407u; /* Knuth's LCG: MMIX */
        int64_t row = (int64_t)(from + width * ((double)(*random >> 40) * 0x1p-24));
        c->rows[i] = total == tokens ? at + i : row < tokens ? row : tokens - 1;
    }
}

static attn_status compare_chunk(compare *c, int64_t batch, int64_t head, int64_t count)
{
    const cli_verify *verify = c->verify;
    int64_t dim = verify->problem->dim_v;
    attn_io io = {.size = sizeof io, .source = verify->source};
    attn_status status = attn_reference(verify->problem, &io, batch, head, c->rows, count, c->o, c->lse);
    for (int64_t i = 0; i < count && status == ATTN_OK; i++) {
        status = verify->read(verify->data, batch, head, c->rows[i], 1, c->got, &c->got_lse);
        if (status == ATTN_OK) {
            compare_row(c, batch, head, c->rows[i], c->o + i * dim, c->lse[i]);
        }
    }
    if (status == ATTN_OK && verify->step != NULL && verify->step(verify->step_data, count) != 0) {
        status = cli_refuse(ATTN_ECANCELED, "stopped");
    }
    return status;
}

static attn_status compare_all(compare *c)
{
    const attn_problem *p = c->verify->problem;
    int64_t asked = c->verify->rows, total = asked == 0 || asked > p->tokens_q ? p->tokens_q : asked;
    int64_t all = p->batch * p->heads_q, planes = c->verify->planes;
    uint64_t random = c->verify->seed;
    planes = planes == 0 || planes > all ? all : planes;
    for (int64_t i = 0; i < planes; i++) {
        int64_t plane = i * all / planes;
        for (int64_t at = 0; at < total; at += CHUNK) {
            int64_t count = total - at < CHUNK ? total - at : CHUNK;
            choose_rows(c, &random, at, count, total);
            attn_status status = compare_chunk(c, plane / p->heads_q, plane % p->heads_q, count);
            if (status != ATTN_OK) {
                return status;
            }
        }
    }
    return ATTN_OK;
}

static void conclude(const compare *c)
{
    cli_verdict *v = c->verdict;
    double elements = c->elements > 0 ? (double)c->elements : 1;
    double reference = sqrt(c->reference_sum / elements);
    v->rms = sqrt(c->error_sum / elements);
    v->rms_limit = v->tolerance.rms + v->tolerance.rms_share * reference;
    v->relative = c->reference_sum > 0 ? sqrt(c->error_sum / c->reference_sum)
                  : c->error_sum > 0   ? INFINITY
                                       : 0;
    v->ratio = v->rms > 0 ? fmax(v->ratio, v->rms / v->rms_limit) : v->ratio;
    v->passed = v->wrong == 0 && v->rms <= v->rms_limit;
}

attn_status cli_verify_run(const cli_verify *verify, cli_verdict *verdict)
{
    int64_t dim = verify->problem->dim_v;
    *verdict = (cli_verdict){.has_lse = verify->has_lse};
    compare *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return cli_refuse(ATTN_ENOMEM, "out of memory");
    }
    c->verify = verify;
    c->verdict = verdict;
    c->o = malloc((size_t)(CHUNK * dim) * sizeof *c->o);
    c->lse = malloc(CHUNK * sizeof *c->lse);
    c->got = malloc((size_t)dim * sizeof *c->got);
    attn_status status = c->o != NULL && c->lse != NULL && c->got != NULL
                             ? cli_bounds_of(verify->problem, verify->source, &verdict->bounds)
                             : cli_refuse(ATTN_ENOMEM, "out of memory");
    if (status == ATTN_OK) {
        verdict->tolerance = cli_tolerance_of(verify->problem, verify->kernel, verify->rounds_scores,
                                              &verdict->bounds, verify->out);
        status = compare_all(c);
    }
    if (status == ATTN_OK) {
        conclude(c);
    }
    free(c->o);
    free(c->lse);
    free(c->got);
    free(c);
    return status;
}

int64_t cli_verify_bytes(const attn_problem *p)
{
    int64_t raw = piece_elements(p) * (int64_t)(sizeof(float) + attn_dtype_size(p->dtype));
    int64_t rows = CHUNK * (2 * p->dim_v + p->dim_qk + 8) * (int64_t)sizeof(double);
    int64_t keys = KEYS * (p->dim_qk + p->dim_v) * (int64_t)sizeof(double);
    return raw + rows + keys;
}
