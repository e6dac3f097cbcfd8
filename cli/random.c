/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random.c - counter-based normals.
 *
 * Box-Muller in double, rounded to fp32 once, so that the last bits of log, sin and cos, in which C libraries
 * differ, hardly ever reach the result.  Uniforms are (x + 1/2) / 2^32: never 0, so the logarithm is finite;
 * the largest normal is sqrt(2 * 33 * ln 2) = 6.76.  About 15 ns an element on one core.
 */
#include "random.h"

#include "bytes.h"

#if ATTN_HAVE_RANDOM123
#include <Random123/philox.h>
#include <math.h>
#include <string.h>

attn_status cli_random_ready(void)
{
    return ATTN_OK;
}

static void box_muller(uint32_t a, uint32_t b, float out[2])
{
    const double turn = 6.283185307179586476925287;
    double radius = sqrt(-2 * log((a + 0.5) * 0x1p-32)), angle = turn * ((b + 0.5) * 0x1p-32);
    out[0] = (float)(radius * cos(angle));
    out[1] = (float)(radius * sin(angle));
}

static void normal_block(uint64_t seed, attn_operand operand, uint64_t block, float out[4])
{
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t counter = {{(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)operand, 0}};
    philox4x32_ctr_t words = philox4x32(counter, key);
    box_muller(words.v[0], words.v[1], out);
    box_muller(words.v[2], words.v[3], out + 2);
}

void cli_random_normal(uint64_t seed, attn_operand operand, int64_t first, int64_t count, float *dst)
{
    while (count > 0) {
        float block[4];
        int64_t lane = first % 4, take = count < 4 - lane ? count : 4 - lane;
        normal_block(seed, operand, (uint64_t)(first / 4), block);
        memcpy(dst, block + lane, (size_t)take * sizeof *dst);
        first += take;
        count -= take;
        dst += take;
    }
}

#else

attn_status cli_random_ready(void)
{
    return cli_refuse(ATTN_EUNSUPPORTED,
                      "random inputs need Random123, and this program was built without it: "
                      "install librandom123-dev and build again");
}

/* Never reached: cli_random_ready() comes first. */
void cli_random_normal(uint64_t seed, attn_operand operand, int64_t first, int64_t count, float *dst)
{
    (void)seed;
    (void)operand;
    (void)first;
    for (int64_t i = 0; i < count; i++) {
        dst[i] = 0;
    }
}

#endif

enum {
    PIECE = 2048, /* elements that one thread makes at a time, in some 50 us */
    MANY = 32,    /* pieces worth waking other threads for */
};

attn_status cli_random_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                            void *dst, int64_t head_stride)
{
    const cli_random *random = data;
    const attn_problem *p = &random->problem;
    int64_t heads = operand == ATTN_Q ? p->heads_q : p->heads_kv;
    int64_t tokens = operand == ATTN_Q ? p->tokens_q : p->tokens_kv;
    int64_t dim = operand == ATTN_V ? p->dim_v : p->dim_qk;
    int64_t pieces = (count * dim + PIECE - 1) / PIECE;
    size_t size = attn_dtype_size(p->dtype);
    bool together = !random->alone && heads * pieces >= MANY;
#pragma omp parallel for schedule(static) if (together)
    for (int64_t i = 0; i < heads * pieces; i++) {
        float piece[PIECE];
        int64_t head = i / pieces, done = i % pieces * PIECE;
        int64_t take = count * dim - done < PIECE ? count * dim - done : PIECE;
        int64_t begin = ((batch * heads + head) * tokens + first) * dim + done;
        cli_random_normal(random->seed, operand, begin, take, piece);
        cli_from_f32((char *)dst + (size_t)(head * head_stride + done) * size, (cli_dtype)p->dtype, piece,
                     take);
    }
    return ATTN_OK;
}
