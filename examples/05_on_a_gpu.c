/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 05_on_a_gpu.c - a plan for a GPU, and an execute on a stream of one's own.  No CUDA header and no CUDA
 * library is needed: attn/cuda.h has memory and streams.  All value rows are the same, so each output row
 * must be it.
 */
#include <attn/cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>

enum { GPU = 0, HEADS = 8, TOKENS = 2048, DIM = 128, SIZE = HEADS * TOKENS * DIM, BYTES = SIZE * 2 };
static uint16_t host[3][SIZE], out[SIZE]; /* bf16, [heads][tokens][dim] */

#define TRY(call)                                                                                            \
    if ((call) != ATTN_OK) {                                                                                 \
        fprintf(stderr, "%s\n", attn_last_error());                                                          \
        return 1;                                                                                            \
    }

int main(void)
{
    attn_cuda_info gpu = ATTN_INIT(attn_cuda_info);
    if (attn_cuda_look(GPU, &gpu) != ATTN_OK) {
        printf("skipped: %s\n", attn_last_error());
        return 77;
    }
    for (int i = 0; i < SIZE; i++) {
        float row[3] = {sinf((float)i), cosf(3.0f * (float)i), (float)(i % DIM) / DIM};
        for (int x = 0; x < 3; x++) {
            attn_from_f32(&host[x][i], ATTN_BF16, 1, &row[x], 1);
        }
    }
    attn_problem problem = {.size = sizeof problem,
                            .heads_q = HEADS,
                            .tokens_q = TOKENS,
                            .dim_qk = DIM,
                            .dtype = ATTN_BF16,
                            .dtype_out = ATTN_BF16,
                            .mask = ATTN_MASK_CAUSAL};
    attn_options options = {.size = sizeof options, .device = ATTN_CUDA, .gpu = GPU, .in_memory = 1};
    attn_io io = ATTN_INIT(attn_io);
    attn_plan *plan;
    void *workspace = NULL;
    TRY(attn_plan_create(&plan, &problem, &options));
    TRY(attn_cuda_stream_create(GPU, &io.stream));
    attn_tensor *tensor[] = {&io.q, &io.k, &io.v, &io.o};
    for (int x = 0; x < 4; x++) {
        TRY(attn_cuda_alloc(GPU, &tensor[x]->data, BYTES));
    }
    for (int x = 0; x < 3; x++) {
        TRY(attn_cuda_copy(GPU, tensor[x]->data, host[x], BYTES, io.stream));
    }
    if (attn_plan_workspace(plan) > 0) {
        TRY(attn_cuda_alloc(GPU, &workspace, attn_plan_workspace(plan)));
    }
    TRY(attn_execute(plan, &io, workspace)); /* enqueues; any number of times */
    TRY(attn_cuda_copy(GPU, out, io.o.data, BYTES, io.stream));
    TRY(attn_cuda_wait(GPU, io.stream));
    float error = 0;
    for (int i = 0; i < SIZE; i++) {
        float o;
        attn_to_f32(&o, &out[i], ATTN_BF16, 1, 1);
        error = fmaxf(error, fabsf(o - (float)(i % DIM) / DIM));
    }
    printf("%s: %d rows, error %g\n", gpu.name, HEADS * TOKENS, (double)error);
    for (int x = 0; x < 4; x++) {
        attn_cuda_free(GPU, tensor[x]->data);
    }
    attn_cuda_free(GPU, workspace);
    attn_cuda_stream_destroy(GPU, io.stream);
    attn_plan_destroy(plan);
    return error < 4e-3f ? 0 : 1; /* bf16 has 8 bits */
}
