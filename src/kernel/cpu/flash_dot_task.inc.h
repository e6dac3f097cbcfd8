/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_task.inc.h - which panel meets which tile of keys, and when; a part of flash_dot.inc.h, which
 * includes it.
 *
 * ORDER.  All panels meet a tile before any meets the next one.  A panel's tasks keep their order, so its
 * sums do, however many panels and tiles are at work at once.
 */

/*
 * A panel and the keys of a tile that it sees, as offsets in the tile: [from, to) is seen by some row,
 * [whole_from, whole_to) by every row, [begin, end) is computed.
 */
typedef struct dot_task {
    const dot_tile *tile;
    int64_t panel;
    flash_band band;
    int64_t from, to, whole_from, whole_to, begin, end;
    float *s;          /* [end - begin][PANEL] */
    uint16_t *p;       /* [part][(end - begin) / 2][PANEL][2] */
    float *ot;         /* [width][PANEL] */
    float *sums;       /* what V^T P^T is added to: ot, or of more parts than one apart */
    float fade[PANEL]; /* what older sums shrink by */
    bool moved;        /* a fade is not 1 */
    bool first;        /* there are no older sums */
} dot_task;

/* How far a call has come. */
typedef struct dot_walk {
    const attn__span *span; /* the one behind that of the tile */
    int64_t spans;          /* from there on */
    int64_t first, end;     /* keys behind the tile that some row sees */
    int64_t tiles;          /* so far */
    const dot_tile *tile;   /* the last of them, or NULL */
    int64_t panel;          /* the next to meet it */
} dot_walk;

static dot_walk walk_of(const attn__block *block)
{
    return (dot_walk){.span = block->spans, .spans = block->span_count};
}

/* Goes on to the next tile, unless there is none or its place is still that of a task's. */
static bool next_tile(const dot_state *state, dot_walk *walk, const dot_task *before, const dot_task *now)
{
    const attn__block *block = state->block;
    for (; walk->first >= walk->end; walk->span++, walk->spans--) {
        if (walk->spans == 0) {
            return false;
        }
        walk->first = attn__max(walk->span->first, block->first + block->lo);
        walk->end = attn__min(walk->span->first + walk->span->count, block->first + block->count + block->hi);
    }
    const int64_t i = walk->tiles % state->places;
    const dot_tile *place = &state->tiles[i];
    if ((before != NULL && before->tile == place) || (now != NULL && now->tile == place)) {
        return false;
    }
    walk->tile = load_tile(state, i, walk->span - 1, walk->first, walk->end);
    walk->tiles++;
    walk->first += state->tile_k;
    walk->panel = 0;
    return true;
}

/* What of the tile the next panel sees; false if that is nothing. */
static bool next_panel(const dot_state *state, dot_walk *walk, dot_task *task)
{
    const attn__block *block = state->block;
    const dot_tile *tile = task->tile = walk->tile;
    task->panel = walk->panel++;
    task->band = (flash_band){block->first + task->panel * PANEL, block->lo, block->hi};
    const int64_t row = task->band.row - tile->first;
    const int64_t last = attn__min(row + PANEL, block->first + block->count - tile->first) - 1;
    task->from = attn__max(0, row + block->lo);
    task->to = attn__min(tile->count, last + block->hi + 1);
    task->whole_from = attn__min(task->to, attn__max(task->from, last + block->lo));
    task->whole_to = attn__max(task->whole_from, attn__min(task->to, row + block->hi + 1));
    task->begin = task->from / KEY_STEP * KEY_STEP;
    task->end = round_up(task->to, KEY_STEP);
    return task->from < task->to;
}

/* The task of this turn; false if there is none, or none before those at work have come further. */
static bool next_task(const dot_state *state, dot_walk *walk, int64_t turn, const dot_task *before,
                      const dot_task *now, dot_task *task)
{
    do {
        if ((walk->tile == NULL || walk->panel == state->panels) && !next_tile(state, walk, before, now)) {
            return false;
        }
    } while (!next_panel(state, walk, task));
    task->s = state->s + turn % 2 * state->tile_k * PANEL;
    task->p = state->p + turn % 2 * state->p_parts * state->tile_k * PANEL;
    task->ot = state->ot + task->panel * state->width * PANEL;
    task->first = !state->begun[task->panel];
    task->sums = state->parts == 1 || task->first ? task->ot : state->fresh + turn % 2 * state->width * PANEL;
    state->begun[task->panel] = true;
    return true;
}
