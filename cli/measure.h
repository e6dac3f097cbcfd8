/* SPDX-License-Identifier: Apache-2.0 */
/*
 * measure.h - what the benches and `attn check` share: a case in a process of its own, statistics of samples,
 * the status of a row.
 */
#ifndef ATTN_CLI_MEASURE_H
#define ATTN_CLI_MEASURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attn/attn.h"

/* What became of a case.  Each is a row; none ends a sweep. */
typedef enum cli_row_status {
    CLI_ROW_OK,
    CLI_ROW_WRONG,   /* outside the tolerance */
    CLI_ROW_OOM,     /* does not fit into the memory */
    CLI_ROW_REFUSED, /* nobody takes it */
    CLI_ROW_FAILED,
    CLI_ROW_PLANNED /* by --dry-run */
} cli_row_status;

/* "ok", "WRONG", "OOM", "refused", "failed", "planned" */
const char *cli_row_word(cli_row_status status);
/* That of a failed call. */
cli_row_status cli_row_status_of(attn_status status);
/* Whether a row in this state has numbers. */
bool cli_row_measured(cli_row_status status);

typedef struct cli_spread {
    double mean, std, median, min, max; /* std: of the sample, n - 1 */
} cli_spread;

/* Of count >= 1 values, which it sorts. */
cli_spread cli_spread_of(double *values, int64_t count);

/*
 * Runs work(data, result) in a child process, so that its peak memory is its own and its failure is its own
 * too, and brings back the `bytes` of result, whose first member is a cli_row_status, which is returned.  A
 * child that says nothing (killed for its memory, a crash) is OOM or FAILED, and text[size], a part of
 * result, tells why.  The child is killed when its parent ends, whatever ended that (on Linux).  The caller
 * must not have used OpenMP: its threads do not survive a fork.
 */
typedef void (*cli_child_fn)(const void *data, void *result);
cli_row_status cli_child_run(cli_child_fn work, const void *data, void *result, size_t bytes, char *text,
                             size_t size);

/* The `index`th word of a list "naive,flash" in word[room]; false past its end, and for a list of NULL. */
bool cli_word_at(const char *list, int index, char *word, size_t room);

#endif
