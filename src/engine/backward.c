/* SPDX-License-Identifier: Apache-2.0 */
/* backward.c - the gradients of a problem on one worker. */
#include "engine/engine.h"

attn_status attn_execute_backward(const attn_plan *plan, const attn_gradients *io, void *workspace)
{
    (void)plan, (void)io, (void)workspace;
    return attn__fail(ATTN_EUNSUPPORTED, "gradients are not built yet");
}

attn_status attn_backward(const attn_problem *problem, const attn_gradients *io, const attn_options *options)
{
    (void)problem, (void)io, (void)options;
    return attn__fail(ATTN_EUNSUPPORTED, "gradients are not built yet");
}

attn_status attn_reference_backward(const attn_problem *problem, const attn_gradients *io, int64_t batch,
                                    int64_t head, const int64_t *rows, int64_t row_count, double *dq,
                                    const int64_t *keys, int64_t key_count, double *dk, double *dv)
{
    (void)problem, (void)io, (void)batch, (void)head, (void)rows, (void)row_count, (void)dq;
    (void)keys, (void)key_count, (void)dk, (void)dv;
    return attn__fail(ATTN_EUNSUPPORTED, "gradients are not built yet");
}
