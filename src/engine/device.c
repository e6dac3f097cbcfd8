/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - plans and executes in the memory of a GPU.
 *
 * The plan opens the device, chooses the kernel and sizes the workspace; an execute fills in the pointers and
 * enqueues.
 */
#include "engine/engine.h"

const char *attn_device_name(attn_device device)
{
    switch (device) {
    case ATTN_CPU:
        return "cpu";
    case ATTN_CUDA:
        return "cuda";
    }
    return "?";
}

static attn__cuda_tensor dense(int64_t heads, int64_t tokens, int64_t dim)
{
    static _Alignas(256) char there; /* nobody reads it, but rows may look how it is aligned */
    return (attn__cuda_tensor){&there, heads * tokens * dim, tokens * dim, dim};
}

/*
 * A plan is judged and its workspace sized before its tensors are known: as contiguous ones lie, and for the
 * call that needs most: every result is wanted, delta is not given.
 */
static void lay_out(attn__cuda_call *call)
{
    call->q = call->dq = dense(call->heads_q, call->tokens_q, call->dim_qk);
    call->k = call->dk = dense(call->heads_kv, call->tokens_kv, call->dim_qk);
    call->v = call->dv = dense(call->heads_kv, call->tokens_kv, call->dim_v);
    call->o = call->dout = dense(call->heads_q, call->tokens_q, call->dim_v);
    call->lse = dense(call->heads_q, call->tokens_q, 1);
}

static int64_t most_tokens(int64_t total, int64_t batch, int64_t longest)
{
    return total > 0 ? attn__min(total, batch * longest) : batch * longest;
}

attn__cuda_call attn__device_call(const attn_problem *p, const attn_options *options)
{
    static const int64_t unread = 0; /* lists of sequences: rows ask only whether they are there */
    const bool causal = p->mask == ATTN_MASK_CAUSAL, window = p->mask == ATTN_MASK_WINDOW;
    attn__cuda_call call = {
        .dtype = p->dtype,
        .dtype_out = p->dtype_out,
        .batch = p->batch,
        .heads_q = p->heads_q,
        .heads_kv = p->heads_kv,
        .tokens_q = p->tokens_q,
        .tokens_kv = p->tokens_kv,
        .dim_qk = p->dim_qk,
        .dim_v = p->dim_v,
        .scale = (float)p->scale,
        .left = window && p->window_left >= 0 ? p->window_left : attn__unbounded,
        .right = causal                           ? 0
                 : window && p->window_right >= 0 ? p->window_right
                                                  : attn__unbounded,
        .shifted = p->placed != 0,
        .shift = p->first_q - p->first_kv,
        .cu_q = p->total_q > 0 ? &unread : NULL,
        .cu_kv = p->total_q > 0 ? &unread : NULL,
        .total_q = most_tokens(p->total_q, p->batch, p->tokens_q),
        .total_kv = most_tokens(p->total_kv, p->batch, p->tokens_kv),
        .sms = options->sms,
        .deterministic = options->deterministic != 0,
    };
    call.most_q = call.total_q;
    call.most_kv = call.total_kv;
    lay_out(&call);
    return call;
}

static attn_status check_options(const attn_options *o)
{
    if (o->workers > 1 || o->resident > 1 || o->spool != NULL || o->interest_set != NULL) {
        return attn__fail(ATTN_EUNSUPPORTED, "tensors in a GPU's memory are computed by one worker without a "
                                             "spool: leave out workers, resident, spool and interest_set");
    }
    if (!o->in_memory && !o->backward) {
        return attn__fail(ATTN_EUNSUPPORTED,
                          "a plan for a GPU takes tensors in its memory: set options.in_memory");
    }
    if (o->sms < 0) {
        return attn__fail(ATTN_EINVAL, "sms is %d; it is the most multiprocessors to use, or 0 for all",
                          o->sms);
    }
    return ATTN_OK;
}

/*
 * The workspace of any call that the plan allows.  Unless it was told totals, an execute may come with a
 * batch of unequal lengths, whose sequences are laid out one by one and take more than as many equal ones.  A
 * row that needs nothing for equal ones gets no workspace for the others either, and does without.
 */
static size_t most_workspace(const attn_plan *plan)
{
    static const int64_t unread = 0;
    size_t (*const of)(const attn__cuda_call *, const attn__cuda_device *) =
        plan->backward ? plan->cuda->backward_workspace : plan->cuda->forward_workspace;
    const size_t bytes = of(&plan->call, plan->gpu);
    if (bytes == 0 || plan->call.cu_q != NULL || plan->call.shifted) {
        return bytes;
    }
    attn__cuda_call unequal = plan->call;
    unequal.cu_q = unequal.cu_kv = &unread;
    const size_t more = of(&unequal, plan->gpu);
    return more > bytes ? more : bytes;
}

attn_status attn__device_plan(attn_plan *plan, const attn_options *options)
{
    ATTN__TRY(check_options(options));
    ATTN__TRY(attn__cuda_choose(&plan->cuda, &plan->call, plan->backward, options->kernel));
    const size_t bytes = most_workspace(plan);
    plan->resident = 1;
    plan->threads = 1;
    plan->space = (attn__space){.q_rows = plan->problem.tokens_q, .kv_rows = plan->problem.tokens_kv};
    /* whose parts lie on multiples of 256 bytes, wherever the caller's begins */
    plan->space.total = plan->space.thread = plan->space.worker = bytes > 0 ? (int64_t)bytes + 256 : 0;
    if (options->memory_limit > 0 && plan->space.total > options->memory_limit) {
        return attn__fail(ATTN_ELIMIT, "%s needs %lld bytes of workspace, the limit leaves %lld; raise it",
                          plan->cuda->name, (long long)plan->space.total, (long long)options->memory_limit);
    }
    return ATTN_OK;
}

/* ---- execute ---- */

/* What the kernel gets of the caller's workspace: NULL if the plan needs none, whatever came. */
static void *aligned(const attn_plan *plan, void *workspace)
{
    return plan->space.total > 0 ? (char *)workspace + (-(uintptr_t)workspace & 255) : NULL;
}

/* Of an axis of one element no stride is ever used: any may have been given, and none is to be judged. */
static int64_t stride_of(int64_t count, int64_t stride)
{
    return count > 1 ? stride : 0;
}

/* The lengths of its axes are given: for the strides of a tensor that has none. */
static attn_status take(attn__cuda_tensor *to, const attn_tensor *from, const char *name, attn_dtype dtype,
                        int64_t batch, int64_t heads, int64_t tokens, int64_t dim)
{
    attn_tensor t = *from;
    attn__tensor_strides(&t, heads, tokens, dim);
    if ((uintptr_t)t.data % attn_dtype_size(dtype) != 0) {
        return attn__fail(ATTN_EINVAL,
                          "%s begins in the middle of an element: its address is no multiple of %zu", name,
                          attn_dtype_size(dtype));
    }
    if (t.data != NULL && dim > 1 && t.stride[3] != 1) {
        return attn__fail(
            ATTN_EUNSUPPORTED,
            "%s: on a GPU the dims of a token are dense; its stride[3] is %lld, copy it to an array "
            "where it is 1",
            name, (long long)t.stride[3]);
    }
    *to = (attn__cuda_tensor){t.data, stride_of(batch, t.stride[0]), stride_of(heads, t.stride[1]),
                              stride_of(tokens, t.stride[2])};
    return ATTN_OK;
}

static attn_status take_lengths(attn__cuda_call *call, const attn_problem *p, const int64_t *cu_q,
                                const int64_t *cu_kv, int64_t total_q, int64_t total_kv)
{
    ATTN__TRY(attn__sequences_lists(p, cu_q, cu_kv));
    if (cu_q == NULL) {
        return ATTN_OK;
    }
    if (total_q < 0 || total_kv < 0 || total_q > call->total_q || total_kv > call->total_kv) {
        return attn__fail(ATTN_EINVAL,
                          "total_q and total_kv are the last numbers of cu_seqlens, at most those of the "
                          "problem and at most batch times the longest sequence; they are %lld and %lld",
                          (long long)total_q, (long long)total_kv);
    }
    /* attn_forward() and attn_backward() plan for one token if there is none */
    if (total_q == 0 && total_kv == 0 && (call->total_q > 1 || call->total_kv > 1)) {
        return attn__fail(ATTN_EINVAL,
                          "total_q and total_kv are both 0: nothing waits for the GPU to read the last "
                          "numbers of cu_seqlens, so give them, too");
    }
    call->cu_q = cu_q;
    call->cu_kv = cu_kv;
    call->total_q = total_q;
    call->total_kv = total_kv;
    return ATTN_OK;
}

/* q, k and v; tokens[0] and [1] are set to those along the token axes of queries and keys. */
static attn_status take_inputs(attn__cuda_call *call, const attn_problem *p, const attn_tensor *q,
                               const attn_tensor *k, const attn_tensor *v, int64_t tokens[2])
{
    const bool varlen = call->cu_q != NULL;
    const int64_t batch = varlen ? 1 : p->batch;
    tokens[0] = varlen ? call->total_q : p->tokens_q;
    tokens[1] = varlen ? call->total_kv : p->tokens_kv;
    if (q->data == NULL || k->data == NULL || v->data == NULL) {
        return attn__fail(ATTN_EINVAL, "give q, k and v as tensors in the GPU's memory");
    }
    ATTN__TRY(take(&call->q, q, "q", p->dtype, batch, p->heads_q, tokens[0], p->dim_qk));
    ATTN__TRY(take(&call->k, k, "k", p->dtype, batch, p->heads_kv, tokens[1], p->dim_qk));
    return take(&call->v, v, "v", p->dtype, batch, p->heads_kv, tokens[1], p->dim_v);
}

static attn_status check_workspace(const attn_plan *plan, const void *workspace)
{
    if (plan->space.total > 0 && workspace == NULL) {
        return attn__fail(ATTN_EINVAL, "give attn_plan_workspace() bytes of the GPU's memory as workspace");
    }
    return ATTN_OK;
}

/* The tensors that came may lie as the plan's kernel cannot read them. */
static attn_status check_tensors(const attn_plan *plan, const attn__cuda_call *call)
{
    const char *reason = attn__cuda_refusal(plan->cuda, call, plan->backward);
    if (reason != NULL) {
        return attn__fail(ATTN_EUNSUPPORTED, "kernel '%s' does not take these tensors: %s", plan->cuda->name,
                          reason);
    }
    return ATTN_OK;
}

attn_status attn__device_forward(const attn_plan *plan, const attn_io *io, void *workspace)
{
    const attn_problem *p = &plan->problem;
    attn__cuda_call call = plan->call;
    int64_t tokens[2];
    if (io == NULL || io->size != sizeof *io) {
        return attn__fail(ATTN_EINVAL, "attn_io: set its size field to sizeof(attn_io)");
    }
    if (io->source != NULL || io->sink != NULL || io->o.data == NULL) {
        return attn__fail(ATTN_EINVAL, "on a GPU give tensors in its memory, o too; no source and no sink");
    }
    ATTN__TRY(attn__io_apart(p, io, io->cu_seqlens_q != NULL ? io->total_q : p->tokens_q));
    ATTN__TRY(check_workspace(plan, workspace));
    ATTN__TRY(take_lengths(&call, p, io->cu_seqlens_q, io->cu_seqlens_kv, io->total_q, io->total_kv));
    ATTN__TRY(take_inputs(&call, p, &io->q, &io->k, &io->v, tokens));
    const int64_t batch = call.cu_q != NULL ? 1 : p->batch;
    ATTN__TRY(take(&call.o, &io->o, "o", p->dtype_out, batch, p->heads_q, tokens[0], p->dim_v));
    ATTN__TRY(take(&call.lse, &io->lse, "lse", ATTN_F32, batch, p->heads_q, tokens[0], 1));
    call.merge = io->merge != 0;
    if (call.merge && (p->dtype_out != ATTN_F32 || call.lse.data == NULL)) {
        return attn__fail(ATTN_EINVAL,
                          "merge folds into a partial: give o as an fp32 tensor (out=f32), and lse");
    }
    ATTN__TRY(check_tensors(plan, &call));
    return plan->cuda->forward(&call, plan->gpu, aligned(plan, workspace), io->stream);
}

attn_status attn__device_backward(const attn_plan *plan, const attn_gradients *io, void *workspace)
{
    const attn_problem *p = &plan->problem;
    attn__cuda_call call = plan->call;
    int64_t n[2];
    if (io == NULL || io->size != sizeof *io) {
        return attn__fail(ATTN_EINVAL, "attn_gradients: set its size field to sizeof(attn_gradients)");
    }
    if (io->dout.data == NULL || io->lse.data == NULL || (io->o.data == NULL && io->delta.data == NULL)) {
        return attn__fail(ATTN_EINVAL,
                          "attn_gradients: give dout, lse, and o or delta, from the forward pass");
    }
    ATTN__TRY(attn__gradients_apart(p, io, io->cu_seqlens_q != NULL ? io->total_q : p->tokens_q,
                                    io->cu_seqlens_kv != NULL ? io->total_kv : p->tokens_kv));
    ATTN__TRY(check_workspace(plan, workspace));
    ATTN__TRY(take_lengths(&call, p, io->cu_seqlens_q, io->cu_seqlens_kv, io->total_q, io->total_kv));
    ATTN__TRY(take_inputs(&call, p, &io->q, &io->k, &io->v, n));
    const int64_t batch = call.cu_q != NULL ? 1 : p->batch;
    ATTN__TRY(take(&call.o, &io->o, "o", p->dtype_out, batch, p->heads_q, n[0], p->dim_v));
    ATTN__TRY(take(&call.lse, &io->lse, "lse", ATTN_F32, batch, p->heads_q, n[0], 1));
    ATTN__TRY(take(&call.delta, &io->delta, "delta", ATTN_F32, batch, p->heads_q, n[0], 1));
    ATTN__TRY(take(&call.dout, &io->dout, "dout", p->dtype, batch, p->heads_q, n[0], p->dim_v));
    ATTN__TRY(take(&call.dq, &io->dq, "dq", p->dtype_out, batch, p->heads_q, n[0], p->dim_qk));
    ATTN__TRY(take(&call.dk, &io->dk, "dk", p->dtype_out, batch, p->heads_kv, n[1], p->dim_qk));
    ATTN__TRY(take(&call.dv, &io->dv, "dv", p->dtype_out, batch, p->heads_kv, n[1], p->dim_v));
    call.accumulate = io->accumulate != 0;
    ATTN__TRY(check_tensors(plan, &call));
    return plan->cuda->backward(&call, plan->gpu, aligned(plan, workspace), io->stream);
}

attn_status attn__device_alloc(void **workspace, const attn_plan *plan)
{
    *workspace = NULL;
    return plan->space.total > 0 ? attn__cuda_alloc(workspace, plan->gpu, (size_t)plan->space.total)
                                 : ATTN_OK;
}

attn_status attn__device_free(void *workspace, const attn_plan *plan, void *stream)
{
    attn_status status = attn__cuda_wait(plan->gpu, stream);
    attn__cuda_free(workspace, plan->gpu);
    return status;
}
