/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random.h - standard normal inputs out of a counter, so that any element can be made alone.
 *
 * Element `index` of a tensor (counted in C order over [batch, heads, tokens, dim]) is lane index % 4 of the
 * Philox4x32-10 block with
 *
 *     key = seed (low word, high word),    counter = (index / 4 low, high, operand, 0),
 *
 * whose words x0, x1 and x2, x3 each make two normals by Box-Muller.  Nothing is kept between calls: a source
 * over this needs no memory, every worker makes the tokens it needs, and all of them agree.
 * Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011); Random123 provides the Philox rounds.
 */
#ifndef ATTN_CLI_RANDOM_H
#define ATTN_CLI_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

#include "attn/attn.h"

/* ATTN_OK, or ATTN_EUNSUPPORTED and what to install: this program was built without Random123. */
attn_status cli_random_ready(void);

/* Elements first..first+count of a tensor as fp32. */
void cli_random_normal(uint64_t seed, attn_operand operand, int64_t first, int64_t count, float *dst);

/* An attn_source of such tensors for a checked problem; elements are rounded to its dtype. */
typedef struct cli_random {
    attn_problem problem;
    uint64_t seed;
    bool alone; /* no threads: whoever forks afterwards, for OpenMP's threads do not survive it */
} cli_random;

/* attn_source.read; data is a cli_random. */
attn_status cli_random_read(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                            void *dst, int64_t head_stride);

#endif
