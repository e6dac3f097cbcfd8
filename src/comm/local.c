/* SPDX-License-Identifier: Apache-2.0 */
/*
 * local.c - the workers of one process as a group: get reads the shared source, put hands the partial to the
 * Tiler in the same address space.  Both are done when begin returns, so a ticket is never needed.
 */
#include "comm/comm.h"

static attn_status get_begin(attn_comm *comm, const attn_get *get, void **ticket)
{
    const attn__local *shared = comm->data;
    *ticket = NULL;
    return shared->source->read(shared->source->data, get->operand, get->batch, get->first, get->count,
                                get->dst, get->head_stride);
}

static attn_status put_begin(attn_comm *comm, const attn_partial *partial, void **ticket)
{
    const attn__local *shared = comm->data;
    *ticket = NULL;
    return shared->deliver(shared->data, partial);
}

static attn_status wait(attn_comm *comm, void *ticket)
{
    (void)comm, (void)ticket;
    return ATTN_OK;
}

/* One process made one plan. */
static attn_status agree(attn_comm *comm, uint64_t fingerprint)
{
    (void)comm, (void)fingerprint;
    return ATTN_OK;
}

static void free_nothing(attn_comm *comm)
{
    (void)comm;
}

static const attn_comm_ops local_ops = {
    .size = sizeof(attn_comm_ops),
    .name = "local",
    .get_begin = get_begin,
    .get_wait = wait,
    .put_begin = put_begin,
    .put_wait = wait,
    .agree = agree,
    .free = free_nothing,
};

attn_comm attn__local_comm(attn__local *shared, int64_t rank, int64_t size)
{
    return (attn_comm){.ops = &local_ops, .rank = rank, .size = size, .data = shared};
}
