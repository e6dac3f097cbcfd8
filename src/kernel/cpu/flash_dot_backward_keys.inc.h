/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_backward_keys.inc.h - dV += P^T dO and dK += dS^T Q of a tile, a part of
 * flash_dot_backward.inc.h, which includes it.
 *
 * METHOD.  Blocks of 32 keys, one after the other: while the tiles multiply for one, the vectors add what
 * they found for the one before.
 */

/* Keys that a block of P^T and dS^T has products for: panels [from, to) see some of it. */
typedef struct backward_block {
    int64_t key, from, to;
} backward_block;

/* The first block from *key on that a panel sees some of; false if there is none. */
static bool next_block(const backward_state *state, const backward_tile *tile, int64_t *key,
                       backward_block *block)
{
    for (; *key < tile->count; *key += BLOCK) {
        *block = (backward_block){.key = *key, .from = state->panels};
        for (int64_t panel = 0; panel < state->panels; panel++) {
            const backward_task task = task_of(state, panel, tile);
            if (task.begin <= *key && *key < task.end) {
                block->from = attn__min(block->from, panel);
                block->to = panel + 1;
            }
        }
        if (block->from < block->to) {
            *key += BLOCK;
            return true;
        }
    }
    return false;
}

/* P^T dO (half 0) or dS^T Q (1) of a block. */
static void keys_dot(const backward_state *state, const backward_block *block, int64_t half,
                     const uint16_t *strips, int64_t pad, float *c, attn__dot *to)
{
    to->a = (const uint16_t *)cells_of(state, 0, block->key, half, block->from);
    to->a_band = PAIR * state->band;
    to->a_part = PAIR * state->array;
    to->a_parts = state->weight_parts;
    to->b = strips + block->from * PANEL * PANEL;
    to->b_band = state->parts * state->lanes * PANEL;
    to->b_part = state->lanes * PANEL;
    to->b_parts = state->parts;
    to->c = c;
    to->c_band = BLOCK * pad;
    to->c_row = pad;
    to->c_half = VEC_LANES;
    to->rows = BLOCK;
    to->cols = pad;
    to->depth = (block->to - block->from) * PANEL;
    to->add = false;
}

/* Fills the queue with dV and dK of a block, to `sums`; each row that is added beside it is a share. */
static void queue_block(const backward_state *state, const backward_tile *tile, const backward_block *block,
                        float *sums, dot_queue *queue)
{
    const int64_t qk = state->pad_qk, v = state->pad_v;
    int products = 0;
    if (block != NULL && tile->dv != NULL) {
        keys_dot(state, block, 0, state->dout, v, sums + BLOCK * qk, &queue->dots[products++]);
    }
    if (block != NULL && tile->dk != NULL) {
        keys_dot(state, block, 1, state->q, qk, sums, &queue->dots[products++]);
    }
    start_queue(queue, products, 2 * BLOCK);
}

/* Adds `rows` rows of sums, `sum_row` apart, `dim` wide; beside it the queue goes on. */
static void add_sums(float *out, int64_t token, const float *sums, int64_t sum_row, int64_t rows, int64_t dim,
                     dot_queue *queue)
{
    for (int64_t i = 0; i < rows; i++, out += token, sums += sum_row) {
        take_strides(queue);
        for (int64_t d = 0; d < dim; d += VEC_LANES) {
            const vec_mask real = vec_between(0, (int32_t)attn__min(VEC_LANES, dim - d));
            const vec sum = vec_add(_mm512_maskz_loadu_ps(real, out + d), vec_load(sums + d));
            _mm512_mask_storeu_ps(out + d, real, sum);
        }
    }
}

/* Adds the sums of a block to dV and dK. */
static void add_block(const backward_state *state, const backward_tile *tile, const backward_block *block,
                      const float *sums, dot_queue *queue)
{
    const attn__gradient *g = state->gradient;
    const attn__gradient_span *span = tile->span;
    const int64_t count = attn__min(BLOCK, tile->count - block->key), qk = state->pad_qk;
    if (tile->dv != NULL) {
        add_sums(tile->dv + block->key * span->dv_token, span->dv_token, sums + BLOCK * qk, state->pad_v,
                 count, g->dim_v, queue);
    }
    if (tile->dk != NULL) {
        add_sums(tile->dk + block->key * span->dk_token, span->dk_token, sums, qk, count, g->dim_qk, queue);
    }
}

/* dV and dK of all blocks: the products of one beside the additions of the one before. */
static void add_products(const backward_state *state, const backward_tile *tile)
{
    const int64_t size = BLOCK * (state->pad_qk + state->pad_v);
    backward_block blocks[2];
    const backward_block *before = NULL;
    int64_t key = 0;
    for (int turn = 0;; turn ^= 1) {
        const backward_block *now = next_block(state, tile, &key, &blocks[turn]) ? &blocks[turn] : NULL;
        dot_queue queue;
        if (now == NULL && before == NULL) {
            break;
        }
        queue_block(state, tile, now, state->sums + turn * size, &queue);
        if (before != NULL) {
            add_block(state, tile, before, state->sums + (turn ^ 1) * size, &queue);
        }
        dot_finish(&queue.at);
        before = now;
    }
}
