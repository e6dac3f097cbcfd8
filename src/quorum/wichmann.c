/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wichmann.c - a difference cover of Z_W in closed form, for every W.
 *
 * A ruler of length L on whose marks every distance 1..L can be measured covers Z_W for all W <= 2L + 1: the
 * distance d gives the differences d and W - d.  Wichmann's rulers have the steps
 *
 *     1^r, r+1, (2r+1)^r, (4r+3)^s, (2r+2)^(r+1), 1^r        (x^n: x, n times)
 *
 * that is 4r + s + 3 marks on the length 4r^2 + 8r + 3 + s(4r + 3).  With s near 2r+1 that is about
 * sqrt(1.5 W) = 1.22 sqrt(W) marks; we try every r and take the s it needs.
 *
 * Sources: B. Wichmann, A note on restricted difference bases, J. London Math. Soc. 38 (1963) 465-466;
 * C. Colbourn, A. Ling, Quorums from difference covers, Inf. Process. Lett. 75 (2000) 9-12.
 * Cost: O(sqrt(W)) time and memory.
 */
#include "quorum/cover.h"

typedef struct ruler {
    int64_t r, s;
    int64_t marks;
} ruler;

/* The shortest list of marks whose length reaches `length`. */
static ruler choose_ruler(int64_t length)
{
    ruler best = {.marks = INT64_MAX};
    for (int64_t r = 0;; r++) {
        int64_t base = 4 * r * r + 8 * r + 3;
        int64_t s = base >= length ? 0 : attn__ceil_div(length - base, 4 * r + 3);
        if (4 * r + s + 3 < best.marks) {
            best = (ruler){.r = r, .s = s, .marks = 4 * r + s + 3};
        }
        if (base >= length) {
            return best;
        }
    }
}

/* Appends `times` marks, each one `step` above the last. */
static int64_t *extend(int64_t *mark, int64_t step, int64_t times)
{
    for (int64_t i = 0; i < times; i++, mark++) {
        mark[0] = mark[-1] + step;
    }
    return mark;
}

attn_status attn__cover_wichmann(attn__cover *cover, int64_t workers)
{
    *cover = (attn__cover){0};
    ATTN__TRY(attn__cover_check_workers(workers));
    int64_t length = workers / 2; /* distances 1..length suffice */
    if (length <= 1) {            /* W = 1: {0}; W = 2, 3: {0, 1} */
        ATTN__TRY(attn__cover_new(cover, workers, length + 1, "wichmann"));
        cover->set[0] = 0;
        (void)extend(cover->set + 1, 1, length);
        return ATTN_OK;
    }
    ruler best = choose_ruler(length);
    ATTN__TRY(attn__cover_new(cover, workers, best.marks, "wichmann"));
    int64_t r = best.r;
    int64_t *mark = cover->set;
    *mark++ = 0;
    mark = extend(mark, 1, r);
    mark = extend(mark, r + 1, 1);
    mark = extend(mark, 2 * r + 1, r);
    mark = extend(mark, 4 * r + 3, best.s);
    mark = extend(mark, 2 * r + 2, r + 1);
    (void)extend(mark, 1, r);
    return ATTN_OK;
}
