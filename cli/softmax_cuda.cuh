/* SPDX-License-Identifier: Apache-2.0 */
/*
 * softmax_cuda.cuh - rows of the score matrix on a GPU, for one element type: define ELEMENT, WIDEN, NARROW and the
 * names of the two kernels, ROWS and SLOPES, then include.
 *
 * A row is taken by blockDim.x threads, a warp or a block, and a block takes blockDim.y rows.  The first pass keeps a
 * running maximum and sum in each thread (Milakov & Gimelshein, arXiv 1805.02867), which the row's threads then join;
 * the second writes.  So a row is read twice, the second time out of a cache where rows are short.  16 bytes are
 * moved at a time: `pitch`, the elements from a row to the next, is a multiple of that.
 */

#define LANES ((int)(16 / sizeof(ELEMENT)))

/* softmax of s[0 .. seen) of each row in place, zeros behind it, and lse */
extern "C" __global__ void __launch_bounds__(BLOCK)
    ROWS(ELEMENT *scores, float *lse, long long rows, long long keys, long long pitch, int causal)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const long long seen = row >= rows ? 0 : causal ? row % keys + 1 : keys, end = row >= rows ? 0 : pitch;
    const long long first = (long long)threadIdx.x * LANES, stride = (long long)blockDim.x * LANES;
    ELEMENT *s = scores + row * pitch;
    union {
        uint4 all;
        ELEMENT each[LANES];
    } x;
    float most = -INFINITY, sum = 0;
    for (long long j = first; j < seen; j += stride) {
        float value[LANES], peak = most;
        x.all = *(const uint4 *)(s + j);
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            value[i] = j + i < seen ? WIDEN(x.each[i]) : -INFINITY;
            peak = fmaxf(peak, value[i]);
        }
        sum *= most == peak ? 1.0f : __expf(most - peak);
        most = peak;
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            sum += value[i] == -INFINITY ? 0.0f : __expf(value[i] - most);
        }
    }
    join_row(&most, &sum);
    const float share = 1.0f / sum;
    for (long long j = first; j < end; j += stride) {
        x.all = *(const uint4 *)(s + j);
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            x.each[i] = NARROW(j + i < seen ? __expf(WIDEN(x.each[i]) - most) * share : 0.0f);
        }
        *(uint4 *)(s + j) = x.all;
    }
    if (threadIdx.x == 0 && row < rows) {
        lse[row] = most + logf(sum);
    }
}

/* dS = P * (dP - D) in place of dP; what lies behind the keys counts for nothing, and what becomes of it is read by nobody */
extern "C" __global__ void __launch_bounds__(BLOCK)
    SLOPES(ELEMENT *slopes, const ELEMENT *weights, long long rows, long long keys, long long pitch)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, end = row < rows ? keys : 0;
    const long long first = (long long)threadIdx.x * LANES, stride = (long long)blockDim.x * LANES;
    ELEMENT *s = slopes + row * pitch;
    const ELEMENT *w = weights + row * pitch;
    union {
        uint4 all;
        ELEMENT each[LANES];
    } x, p;
    float delta = 0;
    for (long long j = first; j < end; j += stride) {
        x.all = *(const uint4 *)(s + j);
        p.all = *(const uint4 *)(w + j);
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            delta += j + i < keys ? WIDEN(p.each[i]) * WIDEN(x.each[i]) : 0.0f;
        }
    }
    delta = add_row(delta);
    for (long long j = first; j < end; j += stride) {
        x.all = *(const uint4 *)(s + j);
        p.all = *(const uint4 *)(w + j);
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            x.each[i] = NARROW(WIDEN(p.each[i]) * (WIDEN(x.each[i]) - delta));
        }
        *(uint4 *)(s + j) = x.all;
    }
}

#undef LANES
#undef ELEMENT
#undef WIDEN
#undef NARROW
#undef ROWS
#undef SLOPES
