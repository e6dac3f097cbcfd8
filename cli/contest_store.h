/* SPDX-License-Identifier: Apache-2.0 */
/* contest_store.h - the tensors of a case: fresh random inputs, poisoned outputs. */
#ifndef ATTN_CLI_CONTEST_STORE_H
#define ATTN_CLI_CONTEST_STORE_H

#include "contest.h"

typedef struct contest_store {
    const contest_case *c;
    contest_tensors there; /* where it is computed */
    contest_tensors here;  /* in this process; on the CPU the same */
} contest_store;

/* Bytes of all of them; a double, so that nothing overflows. */
double contest_store_bytes(const contest_case *c);
/* Closed by contest_store_close(), also after a failure. */
attn_status contest_store_open(contest_store *store, uint64_t seed);
void contest_store_close(contest_store *store);
/* NaN into what the pass makes. */
attn_status contest_store_poison(contest_store *store);
/* Results to here. */
attn_status contest_store_fetch(contest_store *store);

#endif
