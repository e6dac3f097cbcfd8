/* SPDX-License-Identifier: Apache-2.0 */
/*
 * values.c - the values that options take: integers, bytes, reals and lists of integers.
 *
 *     integer   12  -3  40k  2M  1G  4Ki  1Mi  1Gi            k = 1000, Ki = 1024
 *     bytes     512  64kB  1.5GiB  2T  100B                   likewise; B may follow; at most 6 decimals
 *     list      a,b,c where each is an integer or a range
 *     range     first-last  first-last+step  first-last*factor
 *
 * Strict: a value is used whole or refused with a reason; every overflow is refused.
 */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* A list longer than this is a slip, not a sweep. */
#define LIST_MOST (1 << 20)

static bool refuse(char *why, size_t why_size, const char *reason)
{
    snprintf(why, why_size, "%s", reason);
    return false;
}

static bool in_range(int64_t value, int64_t least, int64_t most, char *why, size_t why_size)
{
    if (value >= least && value <= most) {
        return true;
    }
    if (value < least) {
        snprintf(why, why_size, "it must be at least %lld", (long long)least);
    } else {
        snprintf(why, why_size, "it must be at most %lld", (long long)most);
    }
    return false;
}

/* The multiplier of k, M, G, T (1000 each) or Ki, Mi, Gi, Ti (1024 each); moves past it. */
static int64_t read_suffix(const char **text)
{
    static const char letters[] = "kMGT";
    const char *at = **text == 'K' ? letters : (**text != '\0' ? strchr(letters, **text) : NULL);
    if (at == NULL) {
        return 1;
    }
    *text += 1;
    int64_t base = 1000;
    if (**text == 'i') {
        base = 1024;
        *text += 1;
    }
    int64_t product = base;
    for (; at > letters; at--) {
        product *= base;
    }
    return product;
}

/* Digits as a number that is not negative; moves past them. */
static bool read_digits(const char **text, int64_t *value, char *why, size_t why_size)
{
    if (!isdigit((unsigned char)**text)) {
        return refuse(why, why_size, "it is not a number");
    }
    int64_t sum = 0;
    for (; isdigit((unsigned char)**text); *text += 1) {
        int64_t digit = **text - '0';
        if (sum > (INT64_MAX - digit) / 10) {
            return refuse(why, why_size, "it is too large for 64 bits");
        }
        sum = 10 * sum + digit;
    }
    *value = sum;
    return true;
}

/* One integer with its sign and suffix; moves past it. */
static bool read_int(const char **text, int64_t *value, char *why, size_t why_size)
{
    bool negative = **text == '-';
    if (negative || **text == '+') {
        *text += 1;
    }
    int64_t number = 0;
    if (!read_digits(text, &number, why, why_size)) {
        return false;
    }
    int64_t factor = read_suffix(text);
    if (number > INT64_MAX / factor) {
        return refuse(why, why_size, "it is too large for 64 bits");
    }
    *value = negative ? -number * factor : number * factor;
    return true;
}

bool cli_parse_int(const char *text, int64_t least, int64_t most, int64_t *value, char *why, size_t why_size)
{
    int64_t number = 0;
    if (!read_int(&text, &number, why, why_size)) {
        return false;
    }
    if (*text != '\0') {
        return refuse(why, why_size, "it is not a whole number (suffixes: k, M, G, Ki, Mi, Gi)");
    }
    if (!in_range(number, least, most, why, why_size)) {
        return false;
    }
    *value = number;
    return true;
}

/* The digits after a decimal point as millionths; moves past them. */
static bool read_millionths(const char **text, int64_t *value, char *why, size_t why_size)
{
    int64_t unit = 1000000;
    *value = 0;
    if (!isdigit((unsigned char)**text)) {
        return refuse(why, why_size, "digits must follow the point");
    }
    for (; isdigit((unsigned char)**text); *text += 1) {
        unit /= 10;
        if (unit == 0) {
            return refuse(why, why_size, "it has more than 6 decimals");
        }
        *value += unit * (**text - '0');
    }
    return true;
}

bool cli_parse_bytes(const char *text, int64_t least, int64_t most, int64_t *value, char *why,
                     size_t why_size)
{
    int64_t whole = 0, millionths = 0;
    if (*text == '-') {
        return refuse(why, why_size, "it must not be negative");
    }
    if (!read_digits(&text, &whole, why, why_size)) {
        return false;
    }
    if (*text == '.') {
        text++;
        if (!read_millionths(&text, &millionths, why, why_size)) {
            return false;
        }
    }
    int64_t factor = read_suffix(&text);
    text += *text == 'B' ? 1 : 0;
    if (*text != '\0') {
        return refuse(why, why_size, "it is not a size like 512, 64k, 160MiB or 1.5GiB");
    }
    /* factor <= 2^40 and millionths < 10^6 < 2^20, so that only the whole part can overflow */
    int64_t fraction = millionths * factor / 1000000;
    if (whole > (INT64_MAX - fraction) / factor) {
        return refuse(why, why_size, "it is too large for 64 bits");
    }
    if (!in_range(whole * factor + fraction, least, most, why, why_size)) {
        return false;
    }
    *value = whole * factor + fraction;
    return true;
}

bool cli_parse_real(const char *text, double least, double most, double *value, char *why, size_t why_size)
{
    char *end = NULL;
    double number = strtod(text, &end);
    if (end == text || *end != '\0' || isspace((unsigned char)text[0])) {
        return refuse(why, why_size, "it is not a number");
    }
    if (!isfinite(number)) {
        return refuse(why, why_size, "it must be finite");
    }
    if (!(number >= least && number <= most)) {
        snprintf(why, why_size, "it must be from %g to %g", least, most);
        return false;
    }
    *value = number;
    return true;
}

/* ---- lists ------------------------------------------------------------------------------------------ */

static bool append(cli_ints *list, int64_t value, char *why, size_t why_size)
{
    if (list->count >= LIST_MOST) {
        return refuse(why, why_size, "the list is too long");
    }
    /* room doubles at each power of two: the count alone tells when */
    if ((list->count & (list->count - 1)) == 0) {
        int64_t room = list->count == 0 ? 1 : 2 * list->count;
        int64_t *item = cli_alloc(room, sizeof(*item));
        if (list->count > 0) {
            memcpy(item, list->item, (size_t)list->count * sizeof(*item));
        }
        free(list->item);
        list->item = item;
    }
    list->item[list->count++] = value;
    return true;
}

/* first, first + step, ... or first, first * factor, ... up to last */
static bool append_range(cli_ints *list, int64_t first, int64_t last, char operation, int64_t by, char *why,
                         size_t why_size)
{
    if (last < first) {
        return refuse(why, why_size, "the range ends before it begins");
    }
    if (operation == '*' && (by < 2 || first < 1)) {
        return refuse(why, why_size, "a range with * needs a first value from 1 and a factor from 2");
    }
    if (operation == '+' && by < 1) {
        return refuse(why, why_size, "a range with + needs a step from 1");
    }
    for (int64_t value = first;;) {
        if (!append(list, value, why, why_size)) {
            return false;
        }
        /* the distance of two int64_t fits uint64_t */
        uint64_t left = (uint64_t)last - (uint64_t)value;
        bool ends = operation == '*' ? value > last / by : left < (uint64_t)by;
        if (ends) {
            return true;
        }
        value = operation == '*' ? value * by : value + by;
    }
}

/* One item: an integer or a range; moves past it. */
static bool read_item(const char **text, int64_t least, int64_t most, cli_ints *list, char *why,
                      size_t why_size)
{
    int64_t first = 0, last = 0, by = 1;
    if (!read_int(text, &first, why, why_size) || !in_range(first, least, most, why, why_size)) {
        return false;
    }
    if (**text != '-') {
        return append(list, first, why, why_size);
    }
    *text += 1;
    if (!read_int(text, &last, why, why_size) || !in_range(last, least, most, why, why_size)) {
        return false;
    }
    char operation = '+';
    if (**text == '+' || **text == '*') {
        operation = **text;
        *text += 1;
        if (!read_int(text, &by, why, why_size)) {
            return false;
        }
    }
    return append_range(list, first, last, operation, by, why, why_size);
}

bool cli_parse_ints(const char *text, int64_t least, int64_t most, cli_ints *list, char *why, size_t why_size)
{
    cli_ints longer = {NULL, 0};
    bool good = true;
    for (int64_t i = 0; good && i < list->count; i++) {
        good = append(&longer, list->item[i], why, why_size);
    }
    while (good) {
        good = read_item(&text, least, most, &longer, why, why_size);
        if (!good || *text == '\0') {
            break;
        }
        if (*text != ',') {
            good = refuse(why, why_size, "it is not a list like 4,7,8 or 1-64*2 or 10k-50k+10k");
        }
        text++;
    }
    if (!good) {
        free(longer.item);
        return false;
    }
    free(list->item);
    *list = longer;
    return true;
}
