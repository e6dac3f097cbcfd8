/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - the sequences of a batch: one an entry of the batch axis, or cut out of one token axis by
 * cumulative lengths ("varlen"), so that the rest of the engine knows only one kind.
 */
#include "engine/engine.h"

static attn_status check_list(const char *name, const int64_t *list, int64_t batch, int64_t most,
                              int64_t total)
{
    if (list[0] != 0) {
        return attn__fail(ATTN_EINVAL, "%s[0] is %lld; cumulative lengths begin at 0", name,
                          (long long)list[0]);
    }
    for (int64_t b = 0; b < batch; b++) {
        if (list[b + 1] < list[b]) {
            return attn__fail(ATTN_EINVAL, "%s[%lld] is %lld, less than the %lld before it", name,
                              (long long)b + 1, (long long)list[b + 1], (long long)list[b]);
        }
        if (list[b + 1] - list[b] > most) {
            return attn__fail(ATTN_EINVAL,
                              "%s: sequence %lld has %lld tokens, the problem says at most %lld; raise its "
                              "tokens",
                              name, (long long)b, (long long)(list[b + 1] - list[b]), (long long)most);
        }
    }
    if (total > 0 && list[batch] > total) {
        return attn__fail(ATTN_EINVAL, "%s ends at %lld, the problem says at most %lld; raise its total",
                          name, (long long)list[batch], (long long)total);
    }
    return ATTN_OK;
}

attn_status attn__sequences_lists(const attn_problem *problem, const int64_t *cu_q, const int64_t *cu_kv)
{
    if ((cu_q == NULL) != (cu_kv == NULL)) {
        return attn__fail(ATTN_EINVAL, "give cu_seqlens_q and cu_seqlens_kv, or neither");
    }
    if (cu_q != NULL && problem->placed) {
        return attn__fail(ATTN_EINVAL,
                          "a problem of several sequences (cu_seqlens) cannot be placed (at=Q:K)");
    }
    if (cu_q == NULL && problem->total_q > 0) {
        return attn__fail(ATTN_EINVAL,
                          "the problem tells a total, so its sequences are of unequal length: give "
                          "cu_seqlens_q and cu_seqlens_kv, or leave the total out");
    }
    return ATTN_OK;
}

attn_status attn__sequences_open(attn__sequences *sequences, const attn_problem *problem, const int64_t *cu_q,
                                 const int64_t *cu_kv)
{
    *sequences = (attn__sequences){problem, cu_q, cu_kv};
    ATTN__TRY(attn__sequences_lists(problem, cu_q, cu_kv));
    if (cu_q == NULL) {
        return ATTN_OK;
    }
    ATTN__TRY(check_list("cu_seqlens_q", cu_q, problem->batch, problem->tokens_q, problem->total_q));
    return check_list("cu_seqlens_kv", cu_kv, problem->batch, problem->tokens_kv, problem->total_kv);
}

attn__sequence attn__sequence_at(const attn__sequences *s, int64_t index)
{
    const attn_problem *p = s->problem;
    attn__sequence one = {.batch = index, .q_count = p->tokens_q, .kv_count = p->tokens_kv};
    if (s->cu_q != NULL) {
        one = (attn__sequence){.q_first = s->cu_q[index],
                               .q_count = s->cu_q[index + 1] - s->cu_q[index],
                               .kv_first = s->cu_kv[index],
                               .kv_count = s->cu_kv[index + 1] - s->cu_kv[index]};
    }
    one.rows_before = attn__rows_before(s, index);
    one.band = s->cu_q == NULL ? attn__problem_band(p) : attn__mask_band(p, one.kv_count - one.q_count);
    return one;
}

int64_t attn__sequences_tokens(const attn__sequences *s, attn_operand operand)
{
    if (s->cu_q == NULL) {
        return attn__tokens(s->problem, operand);
    }
    return operand == ATTN_Q ? s->cu_q[s->problem->batch] : s->cu_kv[s->problem->batch];
}

static bool comes_before(const int64_t *key, int64_t a, int64_t b)
{
    return key[a] > key[b] || (key[a] == key[b] && a < b);
}

/* Shell's sort, gaps 9/4 apart: no memory of its own, as execute must have none. */
void attn__sort_falling(int64_t *order, const int64_t *key, int64_t count)
{
    int64_t gap = 1;
    while (gap < count / 3) {
        gap = gap * 9 / 4 + 1;
    }
    for (int64_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (; gap >= 1; gap = gap > 1 ? attn__max(1, gap * 4 / 9) : 0) {
        for (int64_t i = gap; i < count; i++) {
            int64_t x = order[i], j = i;
            for (; j >= gap && comes_before(key, x, order[j - gap]); j -= gap) {
                order[j] = order[j - gap];
            }
            order[j] = x;
        }
    }
}
