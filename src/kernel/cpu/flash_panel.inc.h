/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_panel.inc.h - one panel of queries against one tile of keys; a part of flash.inc.h, which includes
 * it.
 *
 * A panel touches only the keys that one of its queries sees; of those only the rows of S^T that not every
 * query sees pay for the mask.
 *
 * NaN.  vec_max ignores a NaN score, so the maximum stays a number and the NaN goes into P, sum and O of its
 * own lane.  A masked score is replaced, not multiplied.  A masked value meets P = 0, and 0 * NaN would leak:
 * rows of V that some query of the panel must not see are checked first, and non-finite ones are added lane
 * by lane under the mask.
 */

/*
 * s becomes exp2(s - max), repeated; max and sum move on, fade gets what older sums shrink by.  A lane
 * without a score yet has max = -inf; it subtracts 0 instead, since inf - inf is NaN.
 */
VEC_INLINE void softmax_lanes(const flash_shape shape, float *s, int64_t count, float *max, float *sum,
                              float *fade)
{
    const int n = flash_vectors(shape);
    vec most[2], less[2], sums[2], fades[2], lanes[3];
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        most[c] = vec_load(max + c * VEC_LANES);
    }
    raise_max(n, s, flash_row(shape), count, most);
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        less[c] = vec_select(vec_less(vec_set(-INFINITY), most[c]), most[c], vec_set(0.0f));
        fades[c] = flash_exp2(vec_sub(vec_load(max + c * VEC_LANES), less[c]));
        sums[c] = vec_set(0.0f); /* of this tile alone, for a small rounding error */
        vec_store(max + c * VEC_LANES, most[c]);
    }
    for (int64_t j = 0; j < count; j++, s += flash_row(shape)) {
        vec p[2];
        FLASH_UNROLL
        for (int c = 0; c < n; c++) {
            p[c] = flash_exp2(vec_sub(vec_load(s + c * VEC_LANES), less[c]));
            sums[c] = vec_add(sums[c], p[c]);
        }
        flash_repeat(shape, p, lanes);
        FLASH_UNROLL
        for (int c = 0; c < shape.vectors; c++) {
            vec_store(s + c * VEC_LANES, lanes[c]);
        }
    }
    FLASH_UNROLL
    for (int c = 0; c < n; c++) {
        vec_store(sum + c * VEC_LANES, vec_fma(vec_load(sum + c * VEC_LANES), fades[c], sums[c]));
    }
    flash_repeat(shape, fades, lanes);
    FLASH_UNROLL
    for (int c = 0; c < shape.vectors; c++) {
        vec_store(fade + c * VEC_LANES, lanes[c]);
    }
}

#define SOFTMAX_LANES(dims, vectors)                                                                         \
    static void softmax_##dims##_##vectors(float *s, int64_t count, float *max, float *sum, float *fade)     \
    {                                                                                                        \
        softmax_lanes((flash_shape){dims, vectors}, s, count, max, sum, fade);                               \
    }
FLASH_SHAPES(SOFTMAX_LANES)

static void softmax_panel(const flash_shape shape, float *s, int64_t count, float *max, float *sum,
                          float *fade)
{
    static void (*const lanes[][4])(float *, int64_t, float *, float *, float *) = FLASH_BY_SHAPE(softmax);
    lanes[shape.dims][shape.vectors](s, count, max, sum, fade);
}

/* O^T of a narrow panel takes in one key under the mask: queries that do not see it are left alone. */
static void narrow_masked(const flash_shape shape, float *ot, const flash_band *band, int64_t position,
                          const float *v, int64_t dim, const float *p)
{
    for (int i = 0; i < flash_queries(shape); i++) {
        const int64_t apart = position - band->row - i;
        if (apart < band->lo || apart > band->hi) {
            continue;
        }
        for (int64_t d = 0; d < dim; d++) {
            ot[d / shape.dims * flash_row(shape) + i * shape.dims + d % shape.dims] +=
                v[d] * p[i * shape.dims];
        }
    }
}

/*
 * O^T takes in the keys from .. to, of which [whole_from, whole_to) are seen by every lane.  The others are
 * cut out and added under the mask if their values are not finite.
 */
static void add_values(const flash_state *state, const flash_shape shape, float *ot, float *fade,
                       const flash_band *band, flash_tile *tile, int64_t from, int64_t to, int64_t whole_from,
                       int64_t whole_to)
{
    const int64_t dim = state->block->dim_v;
    const int row = flash_row(shape);
    int64_t start = from;
    for (int64_t j = from; j < to; j++) {
        if (j == whole_from) {
            j = whole_to; /* no need to look */
        }
        const float *v = tile->v.at + j * tile->v.token, *p = state->p + (j - from) * row;
        if (j >= to || all_finite(v, dim)) {
            continue;
        }
        value_panel(shape, ot, fade, &tile->v, start, j, dim, state->p + (start - from) * row);
        if (shape.dims == 1) {
            value_masked(flash_vectors(shape), ot, band, tile->first + j, v, dim, p);
        } else {
            narrow_masked(shape, ot, band, tile->first + j, v, dim, p);
        }
        for (int i = 0; i < FLASH_WIDE; i++) {
            fade[i] = 1.0f; /* has been applied */
        }
        start = j + 1;
    }
    if (start < to) {
        value_panel(shape, ot, fade, &tile->v, start, to, dim, state->p + (start - from) * row);
    }
}

static void panel_step(const flash_state *state, int64_t panel, flash_tile *tile)
{
    const attn__block *block = state->block;
    const int64_t rows = attn__min(PANEL, block->count - panel * PANEL);
    const flash_shape shape = panel_shape(block, panel);
    const int n = flash_vectors(shape), row = flash_row(shape);
    const flash_band band = {block->first + panel * PANEL, block->lo, block->hi};
    const int64_t last = band.row + rows - 1;

    /* Offsets in the tile: [from, to) is seen by some row, [whole_from, whole_to) by every row. */
    int64_t from = attn__max(0, band.row + band.lo - tile->first);
    int64_t to = attn__min(tile->count, last + band.hi + 1 - tile->first);
    if (from >= to) {
        return;
    }
    int64_t whole_from = attn__min(to, attn__max(from, last + band.lo - tile->first));
    int64_t whole_to = attn__max(whole_from, attn__min(to, band.row + band.hi + 1 - tile->first));

    float fade[FLASH_WIDE];
    float *ot = state->ot + panel * block->dim_v * PANEL;
    score_panel(shape, state->p, row, &tile->k, from, to, state->qt + panel * block->dim_qk * PANEL,
                block->dim_qk);
    mask_scores(n, state->p, row, &band, tile->first + from, whole_from - from);
    mask_scores(n, state->p + (whole_to - from) * row, row, &band, tile->first + whole_to, to - whole_to);
    softmax_panel(shape, state->p, to - from, state->max + panel * PANEL, state->sum + panel * PANEL, fade);
    add_values(state, shape, ot, fade, &band, tile, from, to, whole_from, whole_to);
}
