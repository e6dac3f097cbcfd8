/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_odd.inc.h - what is infinite or NaN, a part of flash_dot.inc.h, which includes it: the scores of
 * queries and keys that products of parts get wrong, and values that were packed as zeros.
 */

/* The score of one query and one key as FMAs would make it. */
static float plain_score(const float *q, const float *k, int64_t dim)
{
    float sum = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        sum += q[d] * k[d];
    }
    return sum;
}

/* Makes the scores of queries and keys that are not finite again. */
static void score_again(const dot_state *state, const dot_tile *tile, const dot_task *task)
{
    const attn__block *block = state->block;
    const int64_t row = task->panel * PANEL, rows = attn__min(PANEL, block->count - row);
    for (int64_t lane = 0; lane < rows; lane++) {
        query_row(state, state->wide, row + lane);
        const bool odd = !all_finite(state->wide, block->dim_qk);
        for (int64_t j = task->from; j < task->to; j++) {
            if (odd || tile->key_odd[j]) {
                task->s[(j - task->begin) * PANEL + lane] =
                    plain_score(state->wide, key_row(state, tile, j, state->other), block->dim_qk);
            }
        }
    }
}

/* Values that are not finite, under the mask. */
static void add_odd_values(const dot_state *state, const dot_tile *tile, const dot_task *task)
{
    for (int64_t j = task->from; j < task->to; j++) {
        if (!tile->value_odd[j]) {
            continue;
        }
        float p[PANEL];
        const int64_t line = j - task->begin;
        for (int64_t lane = 0; lane < PANEL; lane++) {
            p[lane] = 0.0f;
            for (int part = state->p_parts - 1; part >= 0; part--) {
                const uint16_t *at = task->p + part * state->tile_k * PANEL + (line - line % PAIR) * PANEL;
                p[lane] += attn__bf16_to_f32(at[PAIR * lane + line % PAIR]);
            }
        }
        value_masked(2, task->sums, &task->band, tile->first + j, value_row(state, tile, j, state->wide),
                     state->block->dim_v, p);
    }
}
