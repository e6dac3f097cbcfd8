/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_merge_direct.cu - few_merge.cu where tiles are cut alike and have few parts.
 *
 * A thread has 4 columns of a row, and takes those of up to FEW_DIRECT parts into registers at once, with their maxima and
 * sums of weights: one latency of the second-level cache, no shared memory, and nobody waits for another warp.  Where there
 * are more parts, it goes round again or, where all blocks begin while few is at work, several lanes share the columns.
 *
 * COST.  As few_merge.cu, less what goes by shared memory.
 */
#include "kernel/cuda/few_share.cuh"

/* What its parts so far have come to: the row's maximum, in powers of 2, its sum of weights, and the columns. */
typedef struct direct_sum {
    float most, sum;
    float4 o;
} direct_sum;

/* From L2: what is read before few has ended shall not be found later. */
FEW float4 load_4(const float *x)
{
    return __ldcg((const float4 *)x);
}

FEW float2 load_2(const float *x)
{
    return __ldcg((const float2 *)x);
}

/* A thread's place: 4 columns of a row of a tile, if it has any.  The lanes of a warp are cut into as many runs as there are
 * members; those of one run have neighbouring columns, and the same lane of each run the same columns. */
typedef struct direct_place {
    bool any;
    int column, member;
    const float *part; /* the row in the tile's first part */
    few_row row;
} direct_place;

/* Of the tile of this number, from row `first` on. */
FEW direct_place place_of(const few_params *p, int number, int first)
{
    const few_place tile = few_tile_number(p, number);
    const int columns = p->dim_v / 4, run = 32 / p->members, lane = (int)threadIdx.x % 32;
    const int item = (int)threadIdx.x / 32 * run + lane % run, in_block = item / columns, row = first + in_block;
    const int64_t place = (int64_t)number * p->each * (p->pairs ? 1 : 2); /* of the parts: two a block, or a pair of them */
    direct_place at;
    at.any = row < tile.tile.rows && in_block < p->merge_rows;
    at.column = 4 * (item - in_block * columns);
    at.member = lane / run;
    at.part = p->parts + (place * p->rows + row) * FEW_PART_ROW(p->dim_v);
    at.row = few_row_of(p, &tile.sequence, tile.b, tile.head, tile.index, row);
    return at;
}

/* Adds the parts begin, begin + members, .., of which there are less than `parts`, FEW_DIRECT of them. */
FEW void add_parts(const few_params *p, direct_sum *s, const direct_place *at, int begin, int parts)
{
    const int64_t half = (int64_t)p->rows * FEW_PART_ROW(p->dim_v); /* floats of one of a block's two parts */
    const float *x = at->part + begin * 2 * half;
    float4 o[FEW_DIRECT];
    float2 ends[FEW_DIRECT];
    float most = s->most;
#pragma unroll
    for (int i = 0; i < FEW_DIRECT; i++) {
        const float *row = begin == 0 && i == 0 && !p->pairs ? x + half : x; /* the first part ends a block's share */
        ends[i] = make_float2(-INFINITY, 0.0f);
        o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (begin + i * p->members < parts) {
            ends[i] = load_2(row + p->dim_v);
            o[i] = load_4(row + at->column);
        }
        x += p->members * 2 * half;
    }
#pragma unroll
    for (int i = 0; i < FEW_DIRECT; i++) {
        most = fmaxf(most, ends[i].x);
    }
    float used = most == -INFINITY ? 0.0f : most, fade = ptx_exp2(s->most - used);
    s->most = most;
    s->sum *= fade;
    s->o.x *= fade;
    s->o.y *= fade;
    s->o.z *= fade;
    s->o.w *= fade;
#pragma unroll
    for (int i = 0; i < FEW_DIRECT; i++) {
        float w = ptx_exp2(ends[i].x - used);
        s->sum += ends[i].y * w;
        s->o.x += o[i].x * w;
        s->o.y += o[i].y * w;
        s->o.z += o[i].z * w;
        s->o.w += o[i].w * w;
    }
}

/* What all members have found, to each of them. */
FEW void add_members(const few_params *p, direct_sum *s)
{
    for (int step = 32 / p->members; step < 32; step *= 2) {
        float most = fmaxf(s->most, __shfl_xor_sync(~0u, s->most, step));
        float fade = ptx_exp2(s->most - (most == -INFINITY ? 0.0f : most));
        float *x[] = {&s->sum, &s->o.x, &s->o.y, &s->o.z, &s->o.w};
        s->most = most;
#pragma unroll
        for (int i = 0; i < 5; i++) {
            *x[i] *= fade;
            *x[i] += __shfl_xor_sync(~0u, *x[i], step);
        }
    }
}

/* The columns of the place, from `parts` parts.  Not really: only what leads to it. */
FEW void merge_place(const few_params *p, const direct_place *at, int parts, bool really)
{
    direct_sum s = {-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    few_end end;
    if (at->any) {
#pragma unroll 1
        for (int begin = at->member; begin < parts; begin += FEW_DIRECT * p->members) {
            add_parts(p, &s, at, begin, parts);
        }
    }
    add_members(p, &s);
    if (at->any) {
        end = few_end_of(p, s.most, s.sum, at->row.lse);
    }
    if (p->merge) {
        __syncthreads(); /* all have read the lse that was there */
    }
    if (at->any && at->member == 0 && really) {
        few_store(p, at->row.o + at->column, end, s.o.x, s.o.y);
        few_store(p, at->row.o + at->column + 2, end, s.o.z, s.o.w);
        if (at->column == 0 && at->row.lse != nullptr) {
            *at->row.lse = end.lse;
        }
    }
}

/* No more registers than few leaves on a multiprocessor, if it leaves any. */
extern "C" __global__ void __maxnreg__(FEW_DIRECT_REGISTERS) few_merge_direct(const __grid_constant__ few_params params)
{
    const few_params *p = &params;
    int number = (int)blockIdx.x / p->row_blocks, first = ((int)blockIdx.x - number * p->row_blocks) * p->merge_rows;
    int parts = p->each / (p->pairs ? 2 : 1);
    bool really = blockIdx.x >= (unsigned)p->early;
    ptx_grid_go();
    direct_place at = place_of(p, number, first);
    if (really) {
        ptx_grid_wait();
    }
#pragma unroll 1
    while (true) {
        merge_place(p, &at, really ? parts : 1, really);
        if (!really) {
            really = true;
            ptx_grid_wait();
            continue;
        }
        first += p->row_blocks * p->merge_rows;
        if (first >= p->rows) {
            break;
        }
        at = place_of(p, number, first);
    }
}
