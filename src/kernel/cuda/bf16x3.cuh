/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16x3.cuh - fp32 as three of bf16: how numbers are cut into parts, where the parts lie, which of them are multiplied.
 *
 * METHOD.  x = a + b + c, each the bf16 nearest to what the ones before leave: 3 x 8 bits are the 24 of fp32, so nothing of x
 * is lost.  Of the nine products of two numbers the three smallest, b c, c b and c c, are left out, 2^-26 of x y at most; the
 * others are summed from the smallest to the largest (the idea of Henry, Tang & Heinecke, arXiv 1904.06376).
 */
#ifndef ATTN_BF16X3_CUH
#define ATTN_BF16X3_CUH

#define TYPE "bf16"
#include "kernel/cuda/fma_params.h"
#include "kernel/cuda/wgmma.cuh"

enum { PARTS = 3 };

/* the six products' parts, the smallest first */
#define LEFT(n)  ((n) == 0 ? 2 : (n) == 1 || (n) == 3 ? 1 : 0)
#define RIGHT(n) ((n) == 2 ? 2 : (n) == 1 || (n) == 4 ? 1 : 0)

static __device__ __forceinline__ void split(uint32_t *a, uint32_t *b, uint32_t *c, float x, float y)
{
    *a = ptx_pack_bf16(x, y);
    x -= __uint_as_float(*a << 16);
    y -= __uint_as_float(*a & 0xffff0000u);
    *b = ptx_pack_bf16(x, y);
    *c = ptx_pack_bf16(x - __uint_as_float(*b << 16), y - __uint_as_float(*b & 0xffff0000u));
}

/* Eight numbers of a row to the parts of a tile of `rows` rows of `width`. */
static __device__ __forceinline__ void put_parts(char *tile, const int rows, const int width, int row, int chunk, const float *x)
{
    uint4 a, b, c;
    split(&a.x, &b.x, &c.x, x[0], x[1]);
    split(&a.y, &b.y, &c.y, x[2], x[3]);
    split(&a.z, &b.z, &c.z, x[4], x[5]);
    split(&a.w, &b.w, &c.w, x[6], x[7]);
    char *to = tile + chunk / 8 * (rows * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
    *(uint4 *)to = a;
    *(uint4 *)(to + rows * width * 2) = b;
    *(uint4 *)(to + 2 * rows * width * 2) = c;
}

/* Eight numbers from `column` on of a row that has `dim` of `width`; zeros if it is not there. */
static __device__ __forceinline__ void fetch(float *x, const attn__fma_array *array, const float *row, int column, int dim,
                                             const int width, bool there)
{
    if (array->wide && dim == width) {
        float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
        if (there) {
            low = *(const float4 *)(row + column);
            high = *(const float4 *)(row + column + 4);
        }
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = there && column + i < dim ? row[column + i] : 0.0f;
        }
    }
}

/* An address that is made anew here: else the descriptors of all products are made once, and fill registers. */
static __device__ __forceinline__ uint32_t anew(uint32_t address)
{
    asm volatile("" : "+r"(address));
    return address;
}

#endif
