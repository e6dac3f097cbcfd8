/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h - the group that the library brings: W workers in one process.  The contract is include/attn/comm.h.
 */
#ifndef ATTN_COMM_INTERNAL_H
#define ATTN_COMM_INTERNAL_H

#include "attn/comm.h"
#include "base/base.h"

/* What the workers of one process share: where token groups come from and where partials go. */
typedef struct attn__local {
    const attn_source *source;
    attn_status (*deliver)(void *data, const attn_partial *partial);
    void *data;
} attn__local;

/* Worker `rank` of `size`; borrows `shared`, allocates nothing. */
attn_comm attn__local_comm(attn__local *shared, int64_t rank, int64_t size);

#endif
