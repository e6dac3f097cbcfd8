/* SPDX-License-Identifier: Apache-2.0 */
/*
 * softmax_cuda.cuh - rows of the score matrix on a GPU, for one element type: define ELEMENT, WIDEN, NARROW and the
 * names of the two kernels, ROWS and SLOPES, then include.
 *
 * A block takes a row.  The first pass keeps a running maximum and sum in each thread (Milakov & Gimelshein,
 * arXiv 1805.02867), which the block then joins; the second writes.  So a row is read twice, the second time out
 * of a cache where rows are short.  16 bytes are moved at a time where `wide` says that rows begin at their
 * multiples.
 */

/* softmax of s[0 .. seen) of each row in place, zeros behind it, and lse */
extern "C" __global__ void __launch_bounds__(BLOCK) ROWS(ELEMENT *scores, float *lse, long long keys, int causal, int wide)
{
    const long long row = blockIdx.x, seen = causal ? row % keys + 1 : keys;
    const int step = wide ? 16 / sizeof(ELEMENT) : 1;
    ELEMENT *s = scores + row * keys;
    union {
        uint4 all;
        ELEMENT each[16 / sizeof(ELEMENT)];
    } x;
    float most = -INFINITY, sum = 0;
    for (long long j = (long long)threadIdx.x * step; j < seen; j += (long long)BLOCK * step) {
        if (wide) {
            x.all = *(const uint4 *)(s + j);
        } else {
            x.each[0] = s[j];
        }
#pragma unroll
        for (int i = 0; i < (int)(16 / sizeof(ELEMENT)); i++) {
            if (i < step && j + i < seen) {
                join(&most, &sum, WIDEN(x.each[i]), 1.0f);
            }
        }
    }
    join_block(&most, &sum);
    const float total = most + logf(sum);
    for (long long j = (long long)threadIdx.x * step; j < keys; j += (long long)BLOCK * step) {
        if (wide) {
            x.all = *(const uint4 *)(s + j);
        } else {
            x.each[0] = s[j];
        }
#pragma unroll
        for (int i = 0; i < (int)(16 / sizeof(ELEMENT)); i++) {
            x.each[i] = NARROW(j + i < seen ? __expf(WIDEN(x.each[i]) - most) / sum : 0.0f);
        }
        if (wide) {
            *(uint4 *)(s + j) = x.all;
        } else {
            s[j] = x.each[0];
        }
    }
    if (threadIdx.x == 0) {
        lse[row] = total;
    }
}

/* dS = P * (dP - D) in place of dP */
extern "C" __global__ void __launch_bounds__(BLOCK) SLOPES(ELEMENT *slopes, const ELEMENT *weights, long long keys, int wide)
{
    const long long row = blockIdx.x;
    const int step = wide ? 16 / sizeof(ELEMENT) : 1;
    ELEMENT *s = slopes + row * keys;
    const ELEMENT *w = weights + row * keys;
    union {
        uint4 all;
        ELEMENT each[16 / sizeof(ELEMENT)];
    } x, p;
    float delta = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (long long j = (long long)threadIdx.x * step; j < keys; j += (long long)BLOCK * step) {
            if (wide) {
                x.all = *(const uint4 *)(s + j);
                p.all = *(const uint4 *)(w + j);
            } else {
                x.each[0] = s[j];
                p.each[0] = w[j];
            }
#pragma unroll
            for (int i = 0; i < (int)(16 / sizeof(ELEMENT)); i++) {
                const float weight = i < step ? WIDEN(p.each[i]) : 0, slope = i < step ? WIDEN(x.each[i]) : 0;
                if (pass == 0) {
                    delta += weight * slope;
                } else {
                    x.each[i] = NARROW(weight * (slope - delta));
                }
            }
            if (pass == 1 && wide) {
                *(uint4 *)(s + j) = x.all;
            } else if (pass == 1) {
                s[j] = x.each[0];
            }
        }
        delta = pass == 0 ? add_block(delta) : delta;
    }
}

#undef ELEMENT
#undef WIDEN
#undef NARROW
#undef ROWS
#undef SLOPES
