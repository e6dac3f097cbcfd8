/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: the parts of a tile, which several blocks have worked on, become its
 * rows.
 *
 * A block has some rows of one tile.  These rows of all parts are asked for at once, as far as there is room, so
 * that one latency is waited for; then each thread adds up 4 columns of a row, over all parts or, where there
 * are more threads than columns, over every second, third.. of them.  What several threads have found is added
 * in order, so the bits depend on the parts alone.
 *
 * COST.  Reads the parts, which lie in the second-level cache, and writes the rows: 3 us with the start of the
 * kernel, nearly all of it latency.  What starts while few is still at work does everything once in vain, with one part, so that
 * instructions and addresses are at hand.
 */
#include "kernel/cuda/few_share.cuh"

enum { THREADS = FEW_MERGE_THREADS, WARPS = THREADS / 32 };

/* Sums over some of the parts: of 4 columns; the row's maximum, in powers of 2, and its sum. */
typedef struct merge_sums {
    float4 o;
    float most, sum;
} merge_sums;

/* A tile that has parts, if parts > 1: the first is of block `first`. */
typedef struct merge_tile {
    few_sequence sequence;
    int b, head, index;
    int rows;
    unsigned first, parts;
} merge_tile;

/* The tile of this number, or the one that block `number` begins and does not end. */
FEW merge_tile find_tile(const few_params *p, int number)
{
    few_cut cut = few_cut_of(p);
    merge_tile t = {};
    unsigned from, units;
    if (p->by_tile) {
        int head = number / p->tiles;
        t.index = number - head * p->tiles;
        t.b = head / p->heads_kv;
        t.head = head - t.b * p->heads_kv;
        if (t.b >= p->batch) {
            return t;
        }
        t.sequence = few_sequence_of(p, t.b);
        if (t.index >= t.sequence.tiles) {
            return t;
        }
        units = few_tile_of(p, &t.sequence, t.index).units;
        from = few_units_of(p, 0, t.b) + (unsigned)t.head * few_head_units(p, &t.sequence, t.sequence.tiles) +
               few_head_units(p, &t.sequence, t.index);
    } else {
        if ((unsigned)number >= cut.blocks || cut.total == 0) {
            return t;
        }
        unsigned last = few_first_of(&cut, (unsigned)number + 1) - 1;
        few_place at = few_find(p, last);
        t.sequence = at.sequence;
        t.b = at.b;
        t.head = at.head;
        t.index = at.index;
        units = at.tile.units;
        from = last - at.first;
        units = from < few_first_of(&cut, (unsigned)number) ? 0 : units;
    }
    if (units > 0) {
        t.rows = min(t.sequence.n_q * p->group - t.index * FEW_ROWS, (int)FEW_ROWS);
        t.first = few_block_of(&cut, from);
        t.parts = few_block_of(&cut, from + units - 1) - t.first + 1;
    }
    return t;
}

/* What a block merges: rows of a tile, and how its threads share them. */
typedef struct merge_work {
    int first, rows; /* of the tile */
    int columns;     /* of a row, in fours */
    int members;     /* threads that have the same columns of the same row */
    unsigned bytes;  /* of these rows in a part */
} merge_work;

/* From row `first` on, of which there may be none. */
FEW merge_work work_of(const few_params *p, const merge_tile *t, int first)
{
    merge_work w;
    w.first = first;
    w.rows = min(t->rows - first, p->merge_rows);
    w.columns = p->dim_v / 4;
    w.members = THREADS / max(w.rows * w.columns, 1);
    w.bytes = (unsigned)(w.rows * FEW_PART_ROW(p->dim_v) * 4);
    return w;
}

/* A thread's work in it. */
typedef struct merge_place {
    int member, item; /* items are rows times columns in fours */
    int column;       /* the first of 4 */
    int in_part;      /* floats of these rows of a part before this row */
    few_row row;
} merge_place;

FEW merge_place place_of(const few_params *p, const merge_tile *t, const merge_work *w)
{
    merge_place at;
    int items = w->rows * w->columns;
    at.member = (int)threadIdx.x / items;
    at.item = (int)threadIdx.x - at.member * items;
    int row = at.item / w->columns;
    at.column = 4 * (at.item - row * w->columns);
    at.in_part = row * FEW_PART_ROW(p->dim_v);
    at.row = few_row_of(p, &t->sequence, t->b, t->head, t->index, w->first + row);
    return at;
}

/* These rows of the parts begin .. begin + count - 1, to shared memory.  The first part ends a block's share, the
 * others begin one. */
FEW void load_parts(const few_params *p, const merge_tile *t, const merge_work *w, unsigned begin, unsigned count,
                    uint32_t to)
{
    const int64_t half = (int64_t)p->rows * FEW_PART_ROW(p->dim_v) * 4; /* bytes of one of a block's two parts */
    const unsigned warp = threadIdx.x / 32, step = WARPS * w->bytes;
    const char *first = (const char *)p->parts + (int64_t)(t->first + begin + warp) * 2 * half +
                        (int64_t)w->first * FEW_PART_ROW(p->dim_v) * 4;
    for (unsigned piece = threadIdx.x % 32 * 16; piece < w->bytes; piece += 32 * 16) {
        const char *from = first + piece;
        uint32_t at = to + warp * w->bytes + piece;
#pragma unroll 4
        for (unsigned part = begin + warp; part < begin + count; part += WARPS) {
            ptx_copy_16(at, part == 0 ? from + half : from, 16);
            from += 2 * WARPS * half;
            at += step;
        }
    }
    ptx_copy_wait_all();
    __syncthreads();
}

/* Adds every step-th of `count` parts that lie `stride` floats apart; x: these columns of the first, below: what is behind
 * that row's columns. */
FEW void add_parts(merge_sums *s, const float *x, const float *below, int count, int step, int stride)
{
    float most = s->most;
#pragma unroll 4
    for (int i = 0; i < count; i += step) {
        most = fmaxf(most, below[i * stride]);
    }
    float used = most == -INFINITY ? 0.0f : most, fade = ptx_exp2(s->most - used);
    merge_sums all = {{s->o.x * fade, s->o.y * fade, s->o.z * fade, s->o.w * fade}, most, s->sum * fade};
#pragma unroll 4
    for (int i = 0; i < count; i += step) {
        float4 o = *(const float4 *)(x + i * stride);
        float weight = ptx_exp2(below[i * stride] - used);
        all.sum += below[i * stride + 1] * weight;
        all.o.x += o.x * weight;
        all.o.y += o.y * weight;
        all.o.z += o.z * weight;
        all.o.w += o.w * weight;
    }
    *s = all;
}

/* What the other threads with the same columns have found, to the first of them. */
FEW void add_members(const merge_work *w, merge_sums *s, const merge_place *at)
{
    __shared__ __align__(16) float found[THREADS][8];
    float *mine = found[threadIdx.x];
    *(float4 *)mine = s->o;
    *(float2 *)(mine + 4) = make_float2(s->most, s->sum);
    __syncthreads();
    if (at->member == 0 && w->members > 1) {
        int items = w->rows * w->columns;
        const float *next = found[at->item + items];
        add_parts(s, next, next + 4, w->members - 1, 1, items * 8);
    }
}

/* The rows from `parts` parts.  Not really: only what leads to it. */
FEW void merge_rows(const few_params *p, const merge_tile *t, const merge_work *w, const merge_place *at, int parts,
                    bool really, unsigned char *shared)
{
    int stride = (int)w->bytes / 4;
    const float *from = (const float *)shared + at->in_part;
    merge_sums s = {{0.0f, 0.0f, 0.0f, 0.0f}, -INFINITY, 0.0f};
    for (int begin = 0; begin < parts; begin += p->merge_parts) {
        int count = min(parts - begin, p->merge_parts);
        load_parts(p, t, w, (unsigned)begin, (unsigned)count, ptx_shared(shared));
        if (at->member < w->members) {
            int skip = at->member * stride;
            add_parts(&s, from + at->column + skip, from + p->dim_v + skip, count - at->member, w->members, stride);
        }
        __syncthreads();
    }
    add_members(w, &s, at);
    bool writes = really && at->member == 0;
    few_end end = few_end_of(p, s.most, s.sum, at->row.lse);
    if (writes) {
        few_store(p, at->row.o + at->column, end, s.o.x, s.o.y);
        few_store(p, at->row.o + at->column + 2, end, s.o.z, s.o.w);
    }
    __syncthreads(); /* all have read the lse that was there */
    if (writes && at->column == 0 && at->row.lse != nullptr) {
        *at->row.lse = end.lse;
    }
}

/* 8: no more than 64 registers, which is what few leaves on a multiprocessor. */
extern "C" __global__ void __launch_bounds__(FEW_MERGE_THREADS, 8)
    few_merge(const __grid_constant__ few_params params)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const few_params *p = &params;
    int number = (int)blockIdx.x / p->row_blocks; /* of tile or block */
    ptx_grid_go();
    merge_tile tile = find_tile(p, number);
    merge_work work = work_of(p, &tile, ((int)blockIdx.x - number * p->row_blocks) * p->merge_rows);
    if (tile.parts < 2 || work.rows <= 0) {
        ptx_grid_wait(); /* or what comes after this kernel would not wait for the one before it */
        return;
    }
    merge_place place = place_of(p, &tile, &work);
    bool really = blockIdx.x >= (unsigned)p->early;
    if (really) {
        ptx_grid_wait();
    }
#pragma unroll 1
    while (true) {
        merge_rows(p, &tile, &work, &place, really ? (int)tile.parts : 1, really, shared);
        if (!really) {
            really = true;
            ptx_grid_wait();
            continue;
        }
        int next = work.first + p->row_blocks * p->merge_rows;
        if (next >= tile.rows) {
            break;
        }
        work = work_of(p, &tile, next);
        place = place_of(p, &tile, &work);
    }
}
