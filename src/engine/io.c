/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io.c - tensors in memory, seen as a source and a sink, so that the engine knows only one kind of each.
 *
 * A tensor that is read in place (always with W = 1; else with in_memory) does not pass through here: its
 * strides go to the kernel.
 */
#include <string.h>

#include "engine/engine.h"

/* No stride is given: it is contiguous. */
static bool is_contiguous(const attn_tensor *t)
{
    return t->stride[0] == 0 && t->stride[1] == 0 && t->stride[2] == 0 && t->stride[3] == 0;
}

void attn__tensor_strides(attn_tensor *tensor, int64_t heads, int64_t tokens, int64_t dim)
{
    int64_t *s = tensor->stride;
    if (is_contiguous(tensor)) {
        s[3] = 1;
        s[2] = dim;
        s[1] = dim * tokens;
        s[0] = dim * tokens * heads;
    }
}

void attn__copy_row(void *dst, const void *src, int64_t element, int64_t stride, int64_t dim)
{
    if (stride == 1) {
        memcpy(dst, src, (size_t)(dim * element));
        return;
    }
    for (int64_t c = 0; c < dim; c++) {
        memcpy((char *)dst + c * element, (const char *)src + c * stride * element, (size_t)element);
    }
}

static attn_status read_tensor(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                               void *dst, int64_t head_stride)
{
    const attn__memory_io *memory = data;
    const attn_tensor *t = &memory->in[operand];
    const attn_problem *p = memory->problem;
    int64_t element = (int64_t)attn_dtype_size(p->dtype), dim = attn__dim(p, operand);
    for (int64_t h = 0; h < attn__heads(p, operand); h++) {
        for (int64_t i = 0; i < count; i++) {
            int64_t from = batch * t->stride[0] + h * t->stride[1] + (first + i) * t->stride[2];
            attn__copy_row((char *)dst + (h * head_stride + i * dim) * element,
                           (const char *)t->data + from * element, element, t->stride[3], dim);
        }
    }
    return ATTN_OK;
}

static attn_status write_tensor(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                                const float *o, int64_t o_stride, const float *lse)
{
    const attn__memory_io *memory = data;
    const attn_problem *p = memory->problem;
    int64_t element = (int64_t)attn_dtype_size(p->dtype_out);
    for (int64_t i = 0; i < count; i++) {
        const int64_t *s = memory->o.stride;
        int64_t to = batch * s[0] + head * s[1] + (first + i) * s[2];
        attn_from_f32((char *)memory->o.data + to * element, p->dtype_out, s[3], o + i * o_stride, p->dim_v);
        if (memory->lse.data != NULL) {
            s = memory->lse.stride;
            ((float *)memory->lse.data)[batch * s[0] + head * s[1] + (first + i) * s[2]] = lse[i];
        }
    }
    return ATTN_OK;
}

/* Rows to be folded into what is there. */
static attn_status merge_tensor(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                                const float *o, int64_t o_stride, const float *lse)
{
    const attn__memory_io *memory = data;
    for (int64_t i = 0; i < count; i++) {
        float *to = attn__tensor_at(&memory->o, ATTN_F32, batch, head, first + i);
        float *to_lse = attn__tensor_at(&memory->lse, ATTN_F32, batch, head, first + i);
        attn__merge(to, 0, to_lse, o + i * o_stride, 0, lse + i, 1, memory->problem->dim_v);
    }
    return ATTN_OK;
}

static attn_status check_inputs(const attn_io *io)
{
    if (io->source != NULL && (io->cu_seqlens_q != NULL || io->cu_seqlens_kv != NULL)) {
        return attn__fail(ATTN_EINVAL, "cu_seqlens cut tensors in memory into sequences; a source has none");
    }
    if (io->source == NULL && (io->q.data == NULL || io->k.data == NULL || io->v.data == NULL)) {
        return attn__fail(ATTN_EINVAL, "attn_io: give q, k and v as tensors, or a source");
    }
    if (io->source != NULL && (io->source->size != sizeof(attn_source) || io->source->read == NULL)) {
        return attn__fail(ATTN_EINVAL, "attn_source: set its size field and read");
    }
    return ATTN_OK;
}

static attn_status check_merge(const attn_problem *problem, const attn_io *io)
{
    if (io->sink != NULL || io->lse.data == NULL || problem->dtype_out != ATTN_F32) {
        return attn__fail(ATTN_EINVAL,
                          "merge folds into a partial: give o as an fp32 tensor (out=f32), and lse");
    }
    if (io->o.stride[3] != 1 && !is_contiguous(&io->o)) {
        return attn__fail(ATTN_EINVAL, "merge needs an o whose dims are dense: set its stride[3] to 1");
    }
    return ATTN_OK;
}

typedef struct named {
    const char *name;
    const void *data;
} named;

/* The first `written` of these arrays against all behind them. */
static attn_status check_apart(const attn_problem *problem, const named *arrays, int count, int written)
{
    const bool empty = problem->tokens_q == 0 || problem->tokens_kv == 0;
    for (int i = 0; i < written && !empty; i++) {
        for (int j = i + 1; j < count && arrays[i].data != NULL; j++) {
            if (arrays[i].data == arrays[j].data) {
                return attn__fail(ATTN_EINVAL,
                                  "%s begins where %s does: give it memory of its own, a result must not "
                                  "overlap any other array",
                                  arrays[i].name, arrays[j].name);
            }
        }
    }
    return ATTN_OK;
}

/* Not a result whose elements share memory, as one that was broadcast has them.  tokens: along its token
 * axis. dim 0: there is no such axis. */
static attn_status check_spread(const char *name, const attn_tensor *t, int64_t batch, int64_t heads,
                                int64_t tokens, int64_t dim)
{
    static const char *const axis[] = {"batch", "head", "token", "dim"};
    const int64_t counts[] = {batch, heads, tokens, dim};
    for (int i = 0; i < 4 && tokens > 0 && t->data != NULL && !is_contiguous(t); i++) {
        if (counts[i] > 1 && t->stride[i] == 0) {
            return attn__fail(ATTN_EINVAL,
                              "%s has a %s stride of 0: a result needs memory of its own for each element",
                              name, axis[i]);
        }
    }
    return ATTN_OK;
}

attn_status attn__io_apart(const attn_problem *problem, const attn_io *io, int64_t tokens)
{
    const named arrays[] = {
        {"o", io->o.data}, {"lse", io->lse.data}, {"q", io->q.data}, {"k", io->k.data}, {"v", io->v.data}};
    const int64_t batch = io->cu_seqlens_q != NULL ? 1 : problem->batch, heads = problem->heads_q;
    ATTN__TRY(check_spread("o", &io->o, batch, heads, tokens, problem->dim_v));
    ATTN__TRY(check_spread("lse", &io->lse, batch, heads, tokens, 0));
    return check_apart(problem, arrays, 5, 2);
}

attn_status attn__gradients_apart(const attn_problem *problem, const attn_gradients *io, int64_t queries,
                                  int64_t keys)
{
    const named arrays[] = {{"dq", io->dq.data},      {"dk", io->dk.data},   {"dv", io->dv.data},
                            {"q", io->q.data},        {"k", io->k.data},     {"v", io->v.data},
                            {"o", io->o.data},        {"lse", io->lse.data}, {"dout", io->dout.data},
                            {"delta", io->delta.data}};
    const attn_problem *p = problem;
    const int64_t batch = io->cu_seqlens_q != NULL ? 1 : p->batch;
    ATTN__TRY(check_spread("dq", &io->dq, batch, p->heads_q, queries, p->dim_qk));
    ATTN__TRY(check_spread("dk", &io->dk, batch, p->heads_kv, keys, p->dim_qk));
    ATTN__TRY(check_spread("dv", &io->dv, batch, p->heads_kv, keys, p->dim_v));
    return check_apart(problem, arrays, 10, 3);
}

static attn_status check_outputs(const attn_io *io)
{
    if (io->sink != NULL && io->cu_seqlens_q != NULL) {
        return attn__fail(ATTN_EINVAL, "cu_seqlens cut tensors in memory into sequences; give o, not a sink");
    }
    if (io->sink == NULL && io->o.data == NULL) {
        return attn__fail(ATTN_EINVAL, "attn_io: give o as a tensor, or a sink");
    }
    if (io->sink != NULL && (io->sink->size != sizeof(attn_sink) || io->sink->write == NULL)) {
        return attn__fail(ATTN_EINVAL, "attn_sink: set its size field and write");
    }
    return ATTN_OK;
}

attn_status attn__io_inputs(attn__memory_io *memory, const attn_problem *problem, const attn_io *io)
{
    if (io == NULL || io->size != sizeof *io) {
        return attn__fail(ATTN_EINVAL, "attn_io: set its size field to sizeof(attn_io)");
    }
    ATTN__TRY(check_inputs(io));
    *memory = (attn__memory_io){.problem = problem, .in = {io->q, io->k, io->v}};
    attn__sequences *s = &memory->sequences;
    ATTN__TRY(attn__sequences_open(s, problem, io->cu_seqlens_q, io->cu_seqlens_kv));
    for (int x = ATTN_Q; x <= ATTN_V; x++) {
        attn_operand operand = (attn_operand)x;
        attn__tensor_strides(&memory->in[x], attn__heads(problem, operand),
                             attn__sequences_tokens(s, operand), attn__dim(problem, operand));
    }
    memory->source =
        io->source != NULL ? *io->source : (attn_source){sizeof(attn_source), memory, read_tensor};
    return ATTN_OK;
}

attn_status attn__io_open(attn__memory_io *memory, const attn_problem *problem, const attn_io *io)
{
    ATTN__TRY(attn__io_inputs(memory, problem, io));
    ATTN__TRY(check_outputs(io));
    const int64_t tokens = attn__sequences_tokens(&memory->sequences, ATTN_Q);
    ATTN__TRY(attn__io_apart(problem, io, tokens));
    if (io->merge) {
        ATTN__TRY(check_merge(problem, io));
    }
    memory->o = io->o;
    memory->lse = io->lse;
    attn__tensor_strides(&memory->o, problem->heads_q, tokens, problem->dim_v);
    attn__tensor_strides(&memory->lse, problem->heads_q, tokens, 1);
    const attn_sink sink = {sizeof(attn_sink), memory, io->merge ? merge_tensor : write_tensor};
    memory->merge = io->merge != 0;
    memory->sink = io->sink != NULL ? *io->sink : sink;
    return ATTN_OK;
}
