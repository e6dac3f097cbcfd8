/* SPDX-License-Identifier: Apache-2.0 */
/*
 * softmax_cuda.cuh - rows of the score matrix on a GPU, for one element type: define ELEMENT, WIDEN, NARROW and the
 * names of the two kernels, ROWS and SLOPES, then include.
 *
 * A row is taken by blockDim.x threads, a warp or a block, and a block takes blockDim.y rows.  The first pass keeps a
 * running maximum and sum in each thread (Milakov & Gimelshein, arXiv 1805.02867), which the row's threads then join;
 * the second writes.  So a row is read twice, the second time out of a cache where rows are short.  16 bytes are
 * moved at a time where `wide` says that rows begin at their multiples.
 */

#define LANES ((int)(16 / sizeof(ELEMENT)))

#define LOAD(x, from)                                                                                        \
    if (wide) {                                                                                              \
        (x).all = *(const uint4 *)(from);                                                                    \
    } else {                                                                                                 \
        (x).each[0] = *(from);                                                                               \
    }
#define STORE(to, x)                                                                                         \
    if (wide) {                                                                                              \
        *(uint4 *)(to) = (x).all;                                                                            \
    } else {                                                                                                 \
        *(to) = (x).each[0];                                                                                 \
    }

/* softmax of s[0 .. seen) of each row in place, zeros behind it, and lse */
extern "C" __global__ void __launch_bounds__(BLOCK)
    ROWS(ELEMENT *scores, float *lse, long long rows, long long keys, int causal, int wide)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const long long seen = row >= rows ? 0 : causal ? row % keys + 1 : keys, end = row >= rows ? 0 : keys;
    const int step = wide ? LANES : 1;
    const long long first = (long long)threadIdx.x * step, stride = (long long)blockDim.x * step;
    ELEMENT *s = scores + row * keys;
    union {
        uint4 all;
        ELEMENT each[LANES];
    } x;
    float most = -INFINITY, sum = 0;
    for (long long j = first; j < seen; j += stride) {
        float value[LANES], peak = most;
        LOAD(x, s + j)
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            value[i] = i < step && j + i < seen ? WIDEN(x.each[i]) : -INFINITY;
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
        LOAD(x, s + j)
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            x.each[i] = NARROW(j + i < seen ? __expf(WIDEN(x.each[i]) - most) * share : 0.0f);
        }
        STORE(s + j, x)
    }
    if (threadIdx.x == 0 && row < rows) {
        lse[row] = most + logf(sum);
    }
}

/* dS = P * (dP - D) in place of dP */
extern "C" __global__ void __launch_bounds__(BLOCK)
    SLOPES(ELEMENT *slopes, const ELEMENT *weights, long long rows, long long keys, int wide)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, end = row < rows ? keys : 0;
    const int step = wide ? LANES : 1;
    const long long first = (long long)threadIdx.x * step, stride = (long long)blockDim.x * step;
    ELEMENT *s = slopes + row * keys;
    const ELEMENT *w = weights + row * keys;
    union {
        uint4 all;
        ELEMENT each[LANES];
    } x, p;
    float delta = 0;
    for (long long j = first; j < end; j += stride) {
        LOAD(x, s + j)
        LOAD(p, w + j)
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            delta += i < step ? WIDEN(p.each[i]) * WIDEN(x.each[i]) : 0.0f;
        }
    }
    delta = add_row(delta);
    for (long long j = first; j < end; j += stride) {
        LOAD(x, s + j)
        LOAD(p, w + j)
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            x.each[i] = NARROW(WIDEN(p.each[i]) * (WIDEN(x.each[i]) - delta));
        }
        STORE(s + j, x)
    }
}

#undef LANES
#undef LOAD
#undef STORE
#undef ELEMENT
#undef WIDEN
#undef NARROW
#undef ROWS
#undef SLOPES
