/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge.cu - the end of few.cuh: the parts of a tile, which several blocks have worked on, become its
 * rows.  Where all tiles have the same number of parts, and few, few_merge_direct.cu does it.
 *
 * A block has some rows of one tile.  These rows of all parts are asked for at once, as far as there is room, so
 * that one latency is waited for.  Their maxima and sums of weights are asked for first, apart: from them a warp
 * makes the weights of a row's parts while the columns are on their way.  Then each thread adds up 4 columns of a
 * row, over all parts or, where there are more threads than columns, over every second, third.. of them.  What
 * several threads have found is added in order, so the bits depend on the parts alone.
 *
 * COST.  Reads the parts, which lie in the second-level cache, and writes the rows: 3 us with the start of the
 * kernel, nearly all of it latency.  What starts while few is still at work does everything once in vain, with one part, so that
 * instructions and addresses are at hand.
 */
#include "kernel/cuda/few_share.cuh"

enum {
    SUMS = FEW_MERGE_SUMS,
    THREADS = FEW_MERGE_THREADS,
    WARPS = THREADS / 32,
    MOST_ROWS = THREADS / 2 /* of 8 dims */
};

/* What the parts so far have come to: a row's maximum, in powers of 2, its sum of weights, and by what its columns fade
 * before the parts of this round are added. */
typedef struct merge_row {
    float most, sum, fade;
} merge_row;

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
    merge_tile t = {};
    if (p->each > 0) {
        few_place at = few_tile_number(p, number);
        t.sequence = at.sequence;
        t.b = at.b;
        t.head = at.head;
        t.index = at.index;
        t.rows = at.tile.rows;
        t.parts = (unsigned)p->each / (p->pairs ? 2 : 1);
        t.first = (unsigned)number * t.parts;
        return t;
    }
    few_cut cut = few_cut_of(p);
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
        t.rows = min(t.sequence.n_q * p->group - t.index * p->height, p->height);
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
    unsigned bytes;  /* of these rows in a part, but for the last one's maximum and sum of weights */
} merge_work;

/* From row `first` on, of which there may be none. */
FEW merge_work work_of(const few_params *p, const merge_tile *t, int first)
{
    merge_work w;
    w.first = first;
    w.rows = min(t->rows - first, p->merge_rows);
    w.columns = p->dim_v / 4;
    w.members = THREADS / max(w.rows * w.columns, 1);
    w.bytes = (unsigned)((w.rows - 1) * FEW_PART_ROW(p->dim_v) + p->dim_v) * 4;
    return w;
}

/* A thread's work in it. */
typedef struct merge_place {
    int member, item; /* items are rows times columns in fours */
    int column;       /* the first of 4 */
    int number;       /* of the row among the block's */
    few_row row;
} merge_place;

FEW merge_place place_of(const few_params *p, const merge_tile *t, const merge_work *w)
{
    merge_place at;
    int items = w->rows * w->columns;
    at.member = (int)threadIdx.x / items;
    at.item = (int)threadIdx.x - at.member * items;
    at.number = at.item / w->columns;
    at.column = 4 * (at.item - at.number * w->columns);
    at.row = few_row_of(p, &t->sequence, t->b, t->head, t->index, w->first + at.number);
    return at;
}

/* Where a row of a part of the tile is.  The first part ends a block's share, the others begin one. */
FEW const float *part_row(const few_params *p, const merge_tile *t, unsigned part, int row)
{
    int64_t place = (int64_t)(t->first + part) * 2 + (part == 0 && !p->pairs);
    return p->parts + (place * p->rows + row) * FEW_PART_ROW(p->dim_v);
}

/* Asks for these rows of the parts begin .. begin + count - 1, to shared memory.  Its addresses are part_row()'s, made
 * by additions. */
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
            ptx_copy_16(at, part == 0 && !p->pairs ? from + half : from, 16);
            from += 2 * WARPS * half;
            at += step;
        }
    }
}

/* Asks for the maxima and sums of weights of the same rows, SUMS floats a row of a part: each warp for the rows that it
 * weighs, so that it need not wait for the others. */
FEW void load_sums(const few_params *p, const merge_tile *t, const merge_work *w, unsigned begin, unsigned count,
                   uint32_t to)
{
    for (int row = (int)threadIdx.x / 32; row < w->rows; row += WARPS) {
#pragma unroll 4
        for (unsigned part = threadIdx.x % 32; part < count; part += 32) {
            ptx_copy_16(to + (row * p->merge_parts + part) * (SUMS * 4),
                        part_row(p, t, begin + part, w->first + row) + p->dim_v, 16);
        }
    }
}

/* The weights of a row's `count` parts, each in place of its maximum; by a warp.  begins: there were none before. */
FEW void weigh_parts(merge_row *row, float *sums, int count, bool begins)
{
    float before = begins ? -INFINITY : row->most, most = before, sum = 0.0f;
#pragma unroll 1
    for (int i = (int)(threadIdx.x % 32); i < count; i += 32) {
        most = fmaxf(most, sums[i * SUMS]);
    }
    for (int step = 1; step < 32; step *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    float used = most == -INFINITY ? 0.0f : most, fade = ptx_exp2(before - used);
#pragma unroll 1
    for (int i = (int)(threadIdx.x % 32); i < count; i += 32) {
        float weight = ptx_exp2(sums[i * SUMS] - used);
        sum += sums[i * SUMS + 1] * weight;
        sums[i * SUMS] = weight;
    }
    for (int step = 1; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        merge_row now = {most, begins ? sum : row->sum * fade + sum, fade};
        *row = now;
    }
}

/* Adds every step-th of `count` parts, which lie `stride` floats apart; x: these columns of the first; weights: where
 * its weight is, SUMS floats apart. */
FEW void add_parts(float4 *o, const float *x, const float *weights, int count, int step, int stride)
{
#pragma unroll 8
    for (int i = 0; i < count; i += step) {
        float4 y = *(const float4 *)(x + i * stride);
        float w = weights[i * SUMS];
        o->x += y.x * w;
        o->y += y.y * w;
        o->z += y.z * w;
        o->w += y.w * w;
    }
}

/* What the other threads with the same columns have found, to the first of them. */
FEW void add_members(const merge_work *w, float4 *o, const merge_place *at)
{
    __shared__ float4 found[THREADS];
    if (w->members == 1) {
        return;
    }
    found[threadIdx.x] = *o;
    __syncthreads();
    for (int i = 1; at->member == 0 && i < w->members; i++) {
        float4 y = found[at->item + i * w->rows * w->columns];
        o->x += y.x;
        o->y += y.y;
        o->z += y.z;
        o->w += y.w;
    }
}

/* The rows from `parts` parts.  Not really: only what leads to it. */
FEW void merge_rows(const few_params *p, const merge_tile *t, const merge_work *w, const merge_place *at, int parts,
                    bool really, unsigned char *shared)
{
    __shared__ merge_row rows[MOST_ROWS];
    int row = FEW_PART_ROW(p->dim_v), stride = (int)w->bytes / 4, skip = at->number * row + at->member * stride;
    float *from = (float *)shared, *sums = from + p->merge_parts * stride;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    few_end end;
    for (int begin = 0; begin < parts; begin += p->merge_parts) {
        if (begin > 0) {
            __syncthreads(); /* the parts before have been added */
        }
        int count = min(parts - begin, p->merge_parts);
        load_sums(p, t, w, (unsigned)begin, (unsigned)count, ptx_shared(sums));
        ptx_copy_commit();
        load_parts(p, t, w, (unsigned)begin, (unsigned)count, ptx_shared(shared));
        ptx_copy_commit();
        PTX_COPY_WAIT(1);
        __syncwarp();
        for (int i = (int)threadIdx.x / 32; i < w->rows; i += WARPS) {
            weigh_parts(&rows[i], sums + i * p->merge_parts * SUMS, count, begin == 0);
        }
        PTX_COPY_WAIT(0);
        __syncthreads();
        /* that of the last round counts; here its latency lies beside the sums */
        end = few_end_of(p, rows[at->number].most, rows[at->number].sum, at->row.lse);
        if (at->member < w->members) {
            float fade = rows[at->number].fade;
            float4 faded = {o.x * fade, o.y * fade, o.z * fade, o.w * fade};
            o = faded;
            add_parts(&o, from + skip + at->column, sums + (at->number * p->merge_parts + at->member) * SUMS,
                      count - at->member, w->members, stride);
        }
    }
    add_members(w, &o, at);
    bool writes = really && at->member == 0;
    if (writes) {
        few_store(p, at->row.o + at->column, end, o.x, o.y);
        few_store(p, at->row.o + at->column + 2, end, o.z, o.w);
    }
    __syncthreads(); /* all have read the lse that was there */
    if (writes && at->column == 0 && at->row.lse != nullptr) {
        *at->row.lse = end.lse;
    }
}

/* 8: no more than FEW_MERGE_REGISTERS, which is what few leaves on a multiprocessor. */
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
