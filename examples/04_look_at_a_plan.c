/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 04_look_at_a_plan.c - who holds what and who computes what, for the example of the CQS-Attention
 * literature: 10 tokens, 7 workers, interest set {0, 1, 3}.  Touches no data.
 */
#include <attn/attn.h>
#include <stdio.h>

static void print_rank(const attn_rank *rank)
{
    printf("worker %d holds groups", (int)rank->rank);
    for (int64_t i = 0; i < rank->group_count; i++) {
        printf(" %d", (int)rank->groups[i]);
    }
    printf(" (%d tokens), computes", (int)rank->tokens);
    for (int64_t i = 0; i < rank->pair_count; i++) {
        printf(" (%d,%d)", (int)rank->pairs[i].q, (int)rank->pairs[i].kv);
    }
    printf(": %d cells\n", (int)rank->cells);
}

/* Every worker's list, the cells they sum up to, and the library's proof that no cell is missing or double.
 */
static int look(const attn_plan *plan)
{
    int64_t cells = 0;
    for (int64_t i = 0; i < 7; i++) {
        attn_rank rank = ATTN_INIT(attn_rank);
        if (attn_plan_rank(plan, i, &rank) != ATTN_OK) {
            return 0;
        }
        print_rank(&rank);
        cells += rank.cells;
        attn_rank_free(&rank);
    }
    attn_proof proof = ATTN_INIT(attn_proof);
    if (attn_plan_prove(plan, &proof) != ATTN_OK) {
        return 0;
    }
    printf("%d cells, %d owned exactly once\n", (int)proof.cells, (int)proof.once);
    return cells == 10 * 10 && proof.cells == cells && proof.once == cells;
}

int main(void)
{
    static const int64_t set[] = {0, 1, 3};
    attn_problem problem = {.size = sizeof problem, .tokens_q = 10, .dim_qk = 64};
    attn_options options = {
        .size = sizeof options, .workers = 7, .interest_set = set, .interest_size = 3, .classic = 1};
    attn_plan *plan;
    if (attn_plan_create(&plan, &problem, &options) != ATTN_OK) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 1;
    }
    for (int64_t group = 0; group < 7; group++) {
        int64_t first, count;
        attn_plan_group(plan, ATTN_Q, group, &first, &count);
        printf("group %d: tokens %d to %d\n", (int)group, (int)first, (int)(first + count - 1));
    }
    int right = look(plan);
    attn_plan_destroy(plan);
    return right ? 0 : 1;
}
