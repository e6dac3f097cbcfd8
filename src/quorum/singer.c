/* SPDX-License-Identifier: Apache-2.0 */
/*
 * singer.c - Singer difference sets: k = q + 1 for W = q^2 + q + 1, q a prime power; no smaller cover exists.
 *
 * A recurrence s(n+3) = a s(n+2) + b s(n+1) + c s(n) over GF(q) moves the state (s(n), s(n+1), s(n+2)), seen
 * as a point of the projective plane, which has W = q^2 + q + 1 points.  If the orbit of (0, 0, 1) has all W
 * of them, the step is a Singer cycle, and the times n at which the state lies on the line s(n) = 0 are a
 * perfect difference set: each d of Z_W other than 0 is the difference of exactly one pair.  We walk the
 * recurrences of irreducible cubics until one has the full orbit; about every other one has.
 *
 * Elements of GF(q) are stored as discrete logarithms to a primitive element g, so that a product is a sum
 * and a sum is one look-up of the Zech logarithm: g^i + g^j = g^(i + zech(j - i)), zech(d) = log(1 + g^d).
 *
 * Source: J. Singer, A theorem in finite projective geometry and some applications to number theory, Trans.
 * AMS 43 (1938) 377-385.  Cost: O(q) memory, O(W) steps for each recurrence tried; q = 997 takes some ten ms.
 */
#include "quorum/cover.h"

/* Larger orders would make a plan wait for seconds: 4096^2 steps are some tenths. */
enum { ORDER_MAX = 4096 };

/* GF(q), q = p^m.  Logarithms lie in 0..q-2, and q-1 stands for log 0. */
typedef struct field {
    int32_t p, m, q;
    int32_t zero;  /* q - 1 */
    int32_t *zech; /* q - 1 logarithms */
} field;

/* ---- the field ---- */

/* p and m with q = p^m; false if q is no prime power. */
static bool split_prime_power(int32_t q, int32_t *p, int32_t *m)
{
    int32_t prime = 2;
    while (prime * prime <= q && q % prime != 0) {
        prime++;
    }
    *p = q % prime == 0 ? prime : q;
    *m = 0;
    while (q > 1 && q % *p == 0) {
        q /= *p;
        ++*m;
    }
    return q == 1 && *m > 0;
}

/*
 * x times a polynomial, modulo x^m - tail(x); polynomials over GF(p) are numbers in base p, the coefficient
 * of x^0 lowest.
 */
static int32_t times_x(const field *f, int32_t poly, int32_t tail)
{
    int32_t top = poly / (f->q / f->p);
    int32_t rest = poly % (f->q / f->p) * f->p;
    int32_t sum = 0;
    for (int32_t unit = 1; unit < f->q; unit *= f->p) {
        sum += (rest / unit + top * (tail / unit % f->p)) % f->p * unit;
    }
    return sum;
}

/* power[i] = x^i for all i < q - 1; false if x is not primitive modulo x^m - tail. */
static bool list_powers(const field *f, int32_t tail, int32_t *power)
{
    int32_t poly = 1;
    for (int32_t i = 0; i < f->q - 1; i++) {
        if (poly == 0 || (i > 0 && poly == 1)) {
            return false;
        }
        power[i] = poly;
        poly = times_x(f, poly, tail);
    }
    return poly == 1;
}

/* Finds a primitive polynomial and tabulates zech(d) = log(1 + x^d); scratch holds 2q numbers. */
static void fill_zech(field *f, int32_t *scratch)
{
    int32_t *power = scratch;
    int32_t *log = scratch + f->q;
    int32_t tail = 1; /* a primitive one exists for every q, so the search ends */
    while (!list_powers(f, tail, power)) {
        tail++;
    }
    log[0] = f->zero;
    for (int32_t i = 0; i < f->q - 1; i++) {
        log[power[i]] = i;
    }
    for (int32_t d = 0; d < f->q - 1; d++) {
        bool carry = power[d] % f->p == f->p - 1;
        f->zech[d] = log[carry ? power[d] - (f->p - 1) : power[d] + 1];
    }
}

static attn_status field_create(field *f, int32_t q, int32_t p, int32_t m)
{
    *f = (field){.p = p, .m = m, .q = q, .zero = q - 1};
    int32_t *scratch = attn__alloc_array(2 * (int64_t)q, sizeof *scratch);
    f->zech = attn__alloc_array(q, sizeof *f->zech);
    if (scratch == NULL || f->zech == NULL) {
        attn__free(scratch);
        attn__free(f->zech);
        return ATTN_ENOMEM;
    }
    fill_zech(f, scratch);
    attn__free(scratch);
    return ATTN_OK;
}

static inline int32_t multiply(const field *f, int32_t i, int32_t j)
{
    if (i == f->zero || j == f->zero) {
        return f->zero;
    }
    return i + j < f->zero ? i + j : i + j - f->zero;
}

static inline int32_t add(const field *f, int32_t i, int32_t j)
{
    if (i == f->zero || j == f->zero) {
        return i == f->zero ? j : i;
    }
    return multiply(f, i, f->zech[j >= i ? j - i : j - i + f->zero]);
}

/* ---- the recurrence ---- */

typedef struct recurrence {
    int32_t a, b, c;
} recurrence;

static inline int32_t next(const field *f, recurrence r, const int32_t s[3])
{
    return add(f, multiply(f, r.a, s[2]), add(f, multiply(f, r.b, s[1]), multiply(f, r.c, s[0])));
}

/* A cubic is irreducible when it has no root: x^3 = a x^2 + b x + c, x = 0 excluded by c. */
static bool irreducible(const field *f, recurrence r)
{
    for (int32_t x = 0; x < f->zero; x++) {
        int32_t square = multiply(f, x, x);
        const int32_t powers[3] = {0, x, square}; /* log 1 = 0 */
        if (next(f, r, powers) == multiply(f, square, x)) {
            return false;
        }
    }
    return true;
}

/* Writes the times at which the orbit of (0, 0, 1) meets the line s(n) = 0; false if the orbit is too short.
 */
static bool walk(const field *f, recurrence r, int64_t workers, int64_t *set)
{
    int32_t s[3] = {f->zero, f->zero, 0};
    int64_t count = 0;
    for (int64_t n = 0; n < workers; n++) {
        if (s[0] == f->zero) {
            if (count > f->q || (n > 0 && s[1] == f->zero)) {
                return false;
            }
            set[count++] = n;
        }
        int32_t after = next(f, r, s);
        s[0] = s[1];
        s[1] = s[2];
        s[2] = after;
    }
    return count == f->q + 1 && s[0] == f->zero && s[1] == f->zero;
}

/* Cubics in a fixed order.  (a, b, c) and (ua, u^2 b, u^3 c) have the same orbit, so three c are enough. */
static void find_cycle(const field *f, int64_t workers, int64_t *set)
{
    for (int64_t trial = 0;; trial++) {
        recurrence r;
        r.c = (int32_t)(trial % 3 % f->zero);
        r.b = (int32_t)(trial / 3 % f->q);
        r.a = (int32_t)(trial / 3 / f->q % f->q);
        if (irreducible(f, r) && walk(f, r, workers, set)) {
            return; /* primitive cubics exist over every field */
        }
    }
}

/* q with q^2 + q + 1 = workers, or 0. */
static int32_t plane_order(int64_t workers)
{
    for (int32_t q = 2; q <= ORDER_MAX; q++) {
        int64_t points = (int64_t)q * q + q + 1;
        if (points >= workers) {
            return points == workers ? q : 0;
        }
    }
    return 0;
}

attn_status attn__cover_singer(attn__cover *cover, int64_t workers)
{
    *cover = (attn__cover){0};
    int32_t q = plane_order(workers);
    int32_t p;
    int32_t m;
    if (q == 0 || !split_prime_power(q, &p, &m)) {
        return ATTN_EUNSUPPORTED;
    }
    field f;
    ATTN__TRY(field_create(&f, q, p, m));
    attn_status status = attn__cover_new(cover, workers, q + 1, "singer");
    if (status == ATTN_OK) {
        find_cycle(&f, workers, cover->set);
    }
    attn__free(f.zech);
    return status;
}
