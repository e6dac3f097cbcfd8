/* SPDX-License-Identifier: Apache-2.0 */
/*
 * problem.c - what is to be computed: defaults, checks, and the string form that program, tests, logs and
 * spool share, "batch=1,heads=4,kv_heads=4,tokens=30000,dim=64,causal".
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { DIM_MAX = 512 };

/* 2^40 tokens and heads keep every position, sum of positions and stride far from 2^63. */
static const int64_t count_max = INT64_C(1) << 40;

static attn_status check_count(const char *name, int64_t value, int64_t max)
{
    if (value < 1 || value > max) {
        return attn__fail(ATTN_EINVAL, "%s is %lld; it must be from 1 to %lld", name, (long long)value,
                          (long long)max);
    }
    return ATTN_OK;
}

static void fill_defaults(attn_problem *p)
{
    p->batch = p->batch == 0 ? 1 : p->batch;
    p->heads_q = p->heads_q == 0 ? 1 : p->heads_q;
    p->heads_kv = p->heads_kv == 0 ? p->heads_q : p->heads_kv;
    p->tokens_kv = p->tokens_kv == 0 ? p->tokens_q : p->tokens_kv;
    p->dim_v = p->dim_v == 0 ? p->dim_qk : p->dim_v;
    if (p->mask != ATTN_MASK_WINDOW) {
        p->window_left = p->window_right = 0;
    }
    if (!p->placed) {
        p->first_q = p->first_kv = 0;
    }
}

static attn_status check_totals(const attn_problem *p)
{
    if (p->total_q == 0 && p->total_kv == 0) {
        return ATTN_OK;
    }
    if (p->total_q < 1 || p->total_kv < 1 || p->total_q > count_max || p->total_kv > count_max) {
        return attn__fail(ATTN_EINVAL,
                          "total %lld:%lld: tokens of all sequences are from 1 to 2^40, or both 0",
                          (long long)p->total_q, (long long)p->total_kv);
    }
    if (p->placed) {
        return attn__fail(ATTN_EINVAL, "a problem of several sequences (total) cannot be placed (at=Q:K)");
    }
    return ATTN_OK;
}

static attn_status check_sizes(const attn_problem *p)
{
    ATTN__TRY(check_count("batch", p->batch, count_max));
    ATTN__TRY(check_count("heads", p->heads_q, count_max));
    ATTN__TRY(check_count("kv_heads", p->heads_kv, count_max));
    ATTN__TRY(check_count("tokens", p->tokens_q, count_max));
    ATTN__TRY(check_count("kv_tokens", p->tokens_kv, count_max));
    ATTN__TRY(check_count("dim", p->dim_qk, DIM_MAX));
    ATTN__TRY(check_count("dim_v", p->dim_v, DIM_MAX));
    if (p->heads_q % p->heads_kv != 0) {
        return attn__fail(ATTN_EINVAL, "kv_heads (%lld) must divide heads (%lld)", (long long)p->heads_kv,
                          (long long)p->heads_q);
    }
    int64_t elements = p->batch;
    bool fits = attn__mul(elements, p->heads_q, &elements);
    fits = fits && attn__mul(elements, attn__max(p->tokens_q, p->tokens_kv), &elements);
    fits = fits && attn__mul(elements, 8 * DIM_MAX, &elements);
    if (!fits) {
        return attn__fail(ATTN_EINVAL, "batch x heads x tokens overflows 64 bits; give smaller sizes");
    }
    return check_totals(p);
}

static attn_status check_mask(const attn_problem *p)
{
    if ((unsigned)p->mask > ATTN_MASK_WINDOW) {
        return attn__fail(ATTN_EINVAL, "mask %d is unknown; use full, causal or window", (int)p->mask);
    }
    if (p->window_left < -1 || p->window_right < -1 || p->window_left > count_max ||
        p->window_right > count_max) {
        return attn__fail(ATTN_EINVAL, "window %lld:%lld: each side is a number of keys, or -1 for no bound",
                          (long long)p->window_left, (long long)p->window_right);
    }
    if (p->first_q < 0 || p->first_kv < 0 || p->first_q > count_max || p->first_kv > count_max) {
        return attn__fail(ATTN_EINVAL, "at %lld:%lld: the first positions are from 0 to 2^40",
                          (long long)p->first_q, (long long)p->first_kv);
    }
    return ATTN_OK;
}

attn_status attn_problem_check(attn_problem *problem)
{
    if (problem == NULL || problem->size != sizeof *problem) {
        return attn__fail(ATTN_EINVAL, "attn_problem: set its size field to sizeof(attn_problem)");
    }
    attn_problem p = *problem;
    fill_defaults(&p);
    ATTN__TRY(check_sizes(&p));
    ATTN__TRY(check_mask(&p));
    if (attn_dtype_size(p.dtype) == 0 || attn_dtype_size(p.dtype_out) == 0) {
        return attn__fail(ATTN_EINVAL, "dtype %d is unknown; use f32, f16 or bf16", (int)p.dtype);
    }
    p.scale = p.scale == 0 ? 1 / sqrt((double)p.dim_qk) : p.scale;
    if (!isfinite(p.scale) || fabs(p.scale) > 1e30) {
        return attn__fail(ATTN_EINVAL, "scale %g must be a finite number of ordinary size", p.scale);
    }
    *problem = p;
    return ATTN_OK;
}

attn__band attn__mask_band(const attn_problem *p, int64_t shift)
{
    attn__band band = {-ATTN__BAND_OPEN, ATTN__BAND_OPEN};
    if (p->mask == ATTN_MASK_CAUSAL) {
        band.hi = shift;
    }
    if (p->mask == ATTN_MASK_WINDOW) {
        band.lo = p->window_left < 0 ? band.lo : shift - p->window_left;
        band.hi = p->window_right < 0 ? band.hi : shift + p->window_right;
    }
    return band;
}

attn__band attn__problem_band(const attn_problem *p)
{
    return attn__mask_band(p, p->placed ? p->first_q - p->first_kv : p->tokens_kv - p->tokens_q);
}

attn__bytes attn__problem_bytes(const attn_problem *p)
{
    int64_t element = (int64_t)attn_dtype_size(p->dtype);
    int64_t planes_q = p->batch * p->heads_q, planes_kv = p->batch * p->heads_kv;
    return (attn__bytes){
        .q = planes_q * p->dim_qk * element,
        .k = planes_kv * p->dim_qk * element,
        .v = planes_kv * p->dim_v * element,
        .o = planes_q * (p->dim_v + 1) * (int64_t)sizeof(float),
        .out = planes_q * p->dim_v * element,
        .stat = planes_q * (int64_t)sizeof(float),
    };
}

double attn_problem_flops(const attn_problem *problem)
{
    attn_problem p = *problem;
    if (attn_problem_check(&p) != ATTN_OK) {
        return 0;
    }
    double cells = (double)attn__band_cells(attn__problem_band(&p), 0, p.tokens_q, 0, p.tokens_kv);
    return 2 * cells * (double)(p.dim_qk + p.dim_v) * (double)(p.batch * p.heads_q);
}

/* ---- the string form ---- */

static attn_status parse_count(const char *name, const char *text, int64_t *value)
{
    static const struct {
        const char *suffix;
        int64_t factor;
    } suffixes[] = {{"", 1}, {"k", 1000}, {"M", 1000000}, {"Ki", 1024}, {"Mi", 1048576}};
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        int64_t factor = suffixes[i].factor;
        if (strcmp(end, suffixes[i].suffix) == 0 && end != text && errno == 0 && text[0] != ' ' &&
            number >= -1 && number <= INT64_MAX / factor) {
            *value = number * factor;
            return ATTN_OK;
        }
    }
    return attn__fail(ATTN_EINVAL, "%s=%s: want a whole number, with k, M, Ki or Mi behind it if you like",
                      name, text);
}

static attn_status parse_dtype(const char *name, const char *text, attn_dtype *dtype)
{
    for (int i = ATTN_F32; i <= ATTN_BF16; i++) {
        if (strcmp(text, attn_dtype_name((attn_dtype)i)) == 0) {
            *dtype = (attn_dtype)i;
            return ATTN_OK;
        }
    }
    return attn__fail(ATTN_EINVAL, "%s=%s: want f32, f16 or bf16", name, text);
}

/* Two counts with a colon between them; `want` is what the user is told where there is none. */
static attn_status parse_pair(const char *name, const char *want, char *text, int64_t *left, int64_t *right)
{
    char *colon = strchr(text, ':');
    if (colon == NULL) {
        return attn__fail(ATTN_EINVAL, "%s=%s: want %s", name, text, want);
    }
    *colon = '\0';
    ATTN__TRY(parse_count(name, text, left));
    return parse_count(name, colon + 1, right);
}

static attn_status parse_scale(const char *text, double *scale)
{
    char *end;
    *scale = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(*scale) || *scale == 0) {
        return attn__fail(ATTN_EINVAL, "scale=%s: want a finite number that is not 0", text);
    }
    return ATTN_OK;
}

enum {
    F_BATCH,
    F_HEADS,
    F_KV_HEADS,
    F_TOKENS,
    F_KV_TOKENS,
    F_DIM,
    F_DIM_V,
    F_DTYPE,
    F_OUT,
    F_SCALE,
    F_CAUSAL,
    F_WINDOW,
    F_AT,
    F_TOTAL,
    FIELDS
};
static const char *const field_names[FIELDS] = {"batch",  "heads",  "kv_heads", "tokens", "kv_tokens",
                                                "dim",    "dim_v",  "dtype",    "out",    "scale",
                                                "causal", "window", "at",       "total"};

static attn_status parse_positive(const char *name, const char *text, int64_t *value)
{
    ATTN__TRY(parse_count(name, text, value));
    return *value >= 1 ? ATTN_OK : attn__fail(ATTN_EINVAL, "%s=%s: want 1 or more", name, text);
}

static attn_status parse_field(attn_problem *p, int field, char *value)
{
    const char *name = field_names[field];
    int64_t *counts[] = {&p->batch,     &p->heads_q, &p->heads_kv, &p->tokens_q,
                         &p->tokens_kv, &p->dim_qk,  &p->dim_v};
    if (field == F_CAUSAL) {
        p->mask = ATTN_MASK_CAUSAL;
        return value == NULL ? ATTN_OK : attn__fail(ATTN_EINVAL, "causal takes no value");
    }
    if (value == NULL || *value == '\0') {
        return attn__fail(ATTN_EINVAL, "%s needs a value: %s=...", name, name);
    }
    switch (field) {
    case F_DTYPE:
        return parse_dtype(name, value, &p->dtype);
    case F_OUT:
        return parse_dtype(name, value, &p->dtype_out);
    case F_SCALE:
        return parse_scale(value, &p->scale);
    case F_WINDOW:
        p->mask = ATTN_MASK_WINDOW;
        return parse_pair(name, "LEFT:RIGHT, as in window=128:0 (-1: no bound)", value, &p->window_left,
                          &p->window_right);
    case F_AT:
        p->placed = 1;
        return parse_pair(name, "QUERY:KEY, the positions of the first of each", value, &p->first_q,
                          &p->first_kv);
    case F_TOTAL:
        return parse_pair(name, "QUERIES:KEYS, the most of all sequences", value, &p->total_q, &p->total_kv);
    default:
        return parse_positive(name, value, counts[field]);
    }
}

static int field_of(const char *name)
{
    int field = 0;
    while (field < FIELDS && strcmp(name, field_names[field]) != 0) {
        field++;
    }
    return field;
}

attn_status attn_problem_parse(attn_problem *problem, const char *text)
{
    char copy[512];
    attn_problem p = ATTN_INIT(attn_problem);
    unsigned seen = 0;
    if (problem == NULL || text == NULL || strlen(text) >= sizeof copy) {
        return attn__fail(ATTN_EINVAL, "a problem is a text of at most %zu characters", sizeof copy - 1);
    }
    strcpy(copy, text);
    for (char *item = copy, *next; item != NULL; item = next) {
        next = strchr(item, ',');
        if (next != NULL) {
            *next++ = '\0';
        }
        char *value = strchr(item, '=');
        if (value != NULL) {
            *value++ = '\0';
        }
        int field = field_of(item);
        if (field == FIELDS) {
            return attn__fail(ATTN_EINVAL,
                              "\"%s\" is no field of a problem; fields are batch, heads, kv_heads, tokens, "
                              "kv_tokens, dim, dim_v, dtype, out, scale, causal, window, at, total",
                              item);
        }
        if ((seen & 1u << field) != 0) {
            return attn__fail(ATTN_EINVAL, "%s is given twice", item);
        }
        seen |= 1u << field;
        ATTN__TRY(parse_field(&p, field, value));
    }
    if ((seen & 1u << F_CAUSAL) != 0 && (seen & 1u << F_WINDOW) != 0) {
        return attn__fail(ATTN_EINVAL,
                          "causal and window exclude each other; a causal window is window=LEFT:0");
    }
    ATTN__TRY(attn_problem_check(&p));
    *problem = p;
    return ATTN_OK;
}

size_t attn_problem_print(const attn_problem *p, char *text, size_t capacity)
{
    char mask[64] = "", at[64] = "", total[64] = "";
    if (p->mask == ATTN_MASK_CAUSAL) {
        snprintf(mask, sizeof mask, ",causal");
    } else if (p->mask == ATTN_MASK_WINDOW) {
        snprintf(mask, sizeof mask, ",window=%lld:%lld", (long long)p->window_left,
                 (long long)p->window_right);
    }
    if (p->placed) {
        snprintf(at, sizeof at, ",at=%lld:%lld", (long long)p->first_q, (long long)p->first_kv);
    }
    if (p->total_q > 0) {
        snprintf(total, sizeof total, ",total=%lld:%lld", (long long)p->total_q, (long long)p->total_kv);
    }
    int length =
        snprintf(text, capacity,
                 "batch=%lld,heads=%lld,kv_heads=%lld,tokens=%lld,kv_tokens=%lld,dim=%lld,dim_v=%lld,"
                 "dtype=%s,out=%s,scale=%.17g%s%s%s",
                 (long long)p->batch, (long long)p->heads_q, (long long)p->heads_kv, (long long)p->tokens_q,
                 (long long)p->tokens_kv, (long long)p->dim_qk, (long long)p->dim_v,
                 attn_dtype_name(p->dtype), attn_dtype_name(p->dtype_out), p->scale, mask, at, total);
    return length < 0 ? 0 : (size_t)length;
}
