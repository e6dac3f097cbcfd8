/* SPDX-License-Identifier: Apache-2.0 */
/* check.c - see check.h. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "check.h"

/* ---- random numbers ---- */

uint64_t check_random(uint64_t *seed)
{
    uint64_t z = *seed += 0x9e3779b97f4a7c15u; /* Steele, Lea & Flood, OOPSLA 2014 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double check_uniform(uint64_t *seed)
{
    return (double)(check_random(seed) >> 11) * 0x1p-53;
}

double check_normal(uint64_t *seed)
{
    double radius = sqrt(-2.0 * log(1.0 - check_uniform(seed))); /* Box & Muller */
    return radius * cos(6.28318530717958647692 * check_uniform(seed));
}

int64_t check_between(uint64_t *seed, int64_t least, int64_t most)
{
    return least + (int64_t)(check_random(seed) % (uint64_t)(most - least + 1));
}

/* ---- buffers ---- */

void check_buffer_open(check_buffer *buffer, size_t bytes, size_t align, bool at_end)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t inside = (bytes + page - 1) / page * page;
    int zero = open("/dev/zero", O_RDWR);
    assert_true(zero >= 0);
    buffer->map_bytes = inside + 2 * page;
    buffer->map = mmap(NULL, buffer->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    assert_true(buffer->map != MAP_FAILED);
    close(zero);
    char *begin = (char *)buffer->map + page;
    assert_int_equal(mprotect(buffer->map, page, PROT_NONE), 0);
    assert_int_equal(mprotect(begin + inside, page, PROT_NONE), 0);
    memset(begin, 0xff, inside);
    buffer->bytes = bytes;
    buffer->data = at_end ? begin + (inside - bytes) / align * align : begin;
}

void check_buffer_close(check_buffer *buffer)
{
    if (buffer->map != NULL) {
        munmap(buffer->map, buffer->map_bytes);
    }
    *buffer = (check_buffer){0};
}

void check_poison(void *data, size_t bytes)
{
    memset(data, 0xff, bytes);
}

bool check_poisoned(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        if (at[i] != 0xff) {
            return false;
        }
    }
    return true;
}

/* ---- tolerances ---- */

static double relative_bound(const check_bound *bound)
{
    const double u = 0x1p-24;
    return u * ((sqrt((double)bound->dim_qk) + 2.0) * bound->score + sqrt((double)bound->keys) + 4.0);
}

double check_bound_o(const check_bound *bound)
{
    const double step = bound->step * sqrt((double)bound->keys);
    return (2.0 * relative_bound(bound) + bound->round + step) * bound->value;
}

double check_bound_rms(const check_bound *bound, double rms)
{
    const double most = bound->value / sqrt((double)bound->keys);
    const double step = bound->step * sqrt((double)bound->keys) * bound->value;
    return (2.0 * relative_bound(bound) + bound->round) * (rms + most) + step;
}

double check_bound_lse(const check_bound *bound, double lse)
{
    return relative_bound(bound) + 0x1p-24 * fabs(lse);
}

static double weight_bound(const check_slope *s)
{
    return 0x1p-24 * ((sqrt((double)s->bound.dim_qk) + 2.0) * s->bound.score + 3.0 * s->lse + 4.0);
}

/* of dS, relative to p, summed over `terms` */
static double slope_bound(const check_slope *s, int64_t terms)
{
    const double u = 0x1p-24;
    const double cell =
        s->slope * (2.0 * (weight_bound(s) + s->bound.round) + u * (sqrt((double)s->dim_v) + 6.0));
    return cell + 2.0 * s->slope * u * (sqrt((double)terms) + 3.0);
}

static double before_bound(const check_slope *s, int64_t terms)
{
    return 0x1p-24 * (sqrt((double)terms) + 1.0) * s->before;
}

/* of a sum over `terms` whose one factor goes to fp16 */
static double step_bound(const check_slope *s, int64_t terms)
{
    return s->bound.step * sqrt((double)terms);
}

double check_bound_dq(const check_slope *s)
{
    const int64_t n = s->bound.keys;
    return s->scale * s->k * (slope_bound(s, n) + step_bound(s, n)) + before_bound(s, n);
}

double check_bound_dk(const check_slope *s)
{
    const double sum = s->column * slope_bound(s, s->rows) + step_bound(s, s->rows);
    return s->scale * s->q * sum + before_bound(s, s->rows);
}

double check_bound_dv(const check_slope *s)
{
    const double sum = 0x1p-24 * (sqrt((double)s->rows) + 3.0);
    const double weights = s->column * (weight_bound(s) + s->bound.round + sum) + step_bound(s, s->rows);
    return s->dout * weights + before_bound(s, s->rows);
}

double check_half_unit(attn_dtype dtype, double x)
{
    switch (dtype) {
    case ATTN_F16:
        return fmax(0x1p-11 * fabs(x), 0x1p-25); /* 11 bits; subnormals lie 2^-24 apart */
    case ATTN_BF16:
        return 0x1p-8 * fabs(x);
    default:
        return 0;
    }
}

check_bound check_bound_normal(const attn_problem *problem)
{
    /* q.k has deviation sqrt(d); 6 of these, or the product of two extreme normals where d is small. */
    const double dim = (double)problem->dim_qk;
    const double scale = problem->scale == 0.0 ? 1.0 / sqrt(dim) : fabs(problem->scale);
    const int64_t keys = problem->tokens_kv == 0 ? problem->tokens_q : problem->tokens_kv;
    return (check_bound){.score = scale * (6.0 * sqrt(dim) + 36.0),
                         .value = 6.0,
                         .round = problem->dtype == ATTN_BF16 ? 0x1p-8 : 0.0,
                         .dim_qk = problem->dim_qk,
                         .keys = keys};
}

/* Whether x is `want` within `bound`, or the same kind of NaN or inf. */
static bool close_to(double x, double want, double bound)
{
    if (isnan(want)) {
        return isnan(x);
    }
    if (isinf(want)) {
        return x == want || isnan(x); /* NaN: inf met a weight that underflowed */
    }
    return fabs(x - want) <= bound; /* false for NaN */
}

void check_gradient(const char *what, int64_t row, int64_t dim, const float *x, const double *want,
                    double tolerance)
{
    for (int64_t d = 0; d < dim; d++) {
        if (!close_to((double)x[d], want[d], tolerance)) {
            fail_msg("%s[%lld][%lld] = %.9g, not %.9g +- %.2g", what, (long long)row, (long long)d,
                     (double)x[d], want[d], tolerance);
        }
    }
}

void check_rows(const char *what, const check_bound *bound, int64_t rows, int64_t dim_v, const float *o,
                int64_t o_stride, const float *lse, const double *want_o, const double *want_lse)
{
    const double tolerance = check_bound_o(bound);
    for (int64_t i = 0; i < rows; i++) {
        const bool blind = want_lse[i] == -INFINITY;
        if (!close_to((double)lse[i], want_lse[i], check_bound_lse(bound, want_lse[i])) ||
            blind != (lse[i] == -INFINITY)) {
            fail_msg("%s: lse[%lld] = %.9g, not %.9g +- %.2g", what, (long long)i, (double)lse[i],
                     want_lse[i], check_bound_lse(bound, want_lse[i]));
        }
        for (int64_t d = 0; d < dim_v; d++) {
            double x = (double)o[i * o_stride + d], want = want_o[i * dim_v + d];
            if (!close_to(x, want, blind ? 0.0 : tolerance)) {
                fail_msg("%s: o[%lld][%lld] = %.9g, not %.9g +- %.2g", what, (long long)i, (long long)d, x,
                         want, blind ? 0.0 : tolerance);
            }
        }
    }
}

void check_partial(const char *what, const attn_problem *problem, int64_t rows, const float *o,
                   const float *lse, const double *want_o, const double *want_lse)
{
    const check_bound bound = check_bound_normal(problem);
    const int64_t dim_v = problem->dim_v == 0 ? problem->dim_qk : problem->dim_v;
    check_rows(what, &bound, rows, dim_v, o, dim_v, lse, want_o, want_lse);
}
