/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 03_out_of_core.c - arrays that stay on disk, computed within a memory limit.
 *
 * q, k and v lie in one file, o goes to another, and the library sees neither: it asks a source for token
 * rows and gives finished rows to a sink.  Given a limit, it takes the smallest W whose workers fit; partial
 * results go through a spool folder, which also lets an interrupted run go on where it was.
 */
#define _POSIX_C_SOURCE 200809L

#include <attn/attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { HEADS = 2, TOKENS = 10000, DIM = 32, LIMIT = 2 << 20 };
#define OPERAND_BYTES ((off_t)HEADS * TOKENS * DIM * (off_t)sizeof(float))

/* Files with arrays [heads][tokens][dim]: q, k, v one after another; o. */
typedef struct files {
    int in, out;
} files;

static off_t place(int64_t head, int64_t token)
{
    return (off_t)((head * TOKENS + token) * DIM) * (off_t)sizeof(float);
}

/* pread and pwrite carry their own position, so that threads need no lock. */
static attn_status read_tokens(void *data, attn_operand operand, int64_t batch, int64_t first, int64_t count,
                               void *dst, int64_t head_stride)
{
    const files *f = data;
    (void)batch; /* there is only one */
    size_t bytes = (size_t)count * DIM * sizeof(float);
    for (int64_t head = 0; head < HEADS; head++) {
        float *rows = (float *)dst + head * head_stride;
        if (pread(f->in, rows, bytes, (off_t)operand * OPERAND_BYTES + place(head, first)) !=
            (ssize_t)bytes) {
            return attn_fail(ATTN_EIO, "cannot read the inputs");
        }
    }
    return ATTN_OK;
}

static attn_status write_rows(void *data, int64_t batch, int64_t head, int64_t first, int64_t count,
                              const float *o, int64_t o_stride, const float *lse)
{
    const files *f = data;
    (void)batch;
    (void)lse;
    for (int64_t i = 0; i < count; i++) {
        size_t bytes = DIM * sizeof(float);
        if (pwrite(f->out, o + i * o_stride, bytes, place(head, first + i)) != (ssize_t)bytes) {
            return attn_fail(ATTN_EIO, "cannot write the result");
        }
    }
    return ATTN_OK;
}

static int make_inputs(FILE *in)
{
    unsigned seed = 1;
    for (int i = 0; i < 3 * HEADS * TOKENS * DIM; i++) {
        seed = seed * 1664525u + 1013904223u;
        float x = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
        if (fwrite(&x, sizeof x, 1, in) != 1) {
            return 0;
        }
    }
    return fflush(in) == 0;
}

/* Some rows of the result file against the fp64 reference, which reads through the same source. */
static int check(const attn_plan *plan, const attn_io *io, const files *f)
{
    static const int64_t rows[] = {0, 7777, TOKENS - 1};
    double expected[3][DIM], lse[3], error = 0;
    for (int head = 0; head < HEADS; head++) {
        if (attn_reference(attn_plan_problem(plan), io, 0, head, rows, 3, expected[0], lse) != ATTN_OK) {
            return 0;
        }
        for (int r = 0; r < 3; r++) {
            float o[DIM];
            if (pread(f->out, o, sizeof o, place(head, rows[r])) != (ssize_t)sizeof o) {
                return 0;
            }
            for (int c = 0; c < DIM; c++) {
                error = fmax(error, fabs((double)o[c] - expected[r][c]));
            }
        }
    }
    printf("error %.1e\n", error);
    return error < 1e-5;
}

static int compute(files *f, const char *spool)
{
    attn_problem problem = {.size = sizeof problem, .heads_q = HEADS, .tokens_q = TOKENS, .dim_qk = DIM};
    attn_options options = {.size = sizeof options, .memory_limit = LIMIT, .spool = spool};
    attn_source source = {.size = sizeof source, .data = f, .read = read_tokens};
    attn_sink sink = {.size = sizeof sink, .data = f, .write = write_rows};
    attn_io io = {.size = sizeof io, .source = &source, .sink = &sink};
    attn_plan *plan = NULL;
    attn_summary summary = ATTN_INIT(attn_summary);
    if (attn_plan_create(&plan, &problem, &options) != ATTN_OK ||
        attn_plan_summary(plan, &summary) != ATTN_OK) {
        attn_plan_destroy(plan);
        return 0;
    }
    printf("%.1f MB of arrays, %.1f MB of workspace, %d workers\n", 4 * (double)OPERAND_BYTES / 1e6,
           (double)summary.workspace / 1e6, (int)summary.workers);
    void *workspace = malloc(attn_plan_workspace(plan) + 1);
    int right = workspace != NULL && summary.workspace <= LIMIT &&
                attn_execute(plan, &io, workspace) == ATTN_OK && check(plan, &io, f) &&
                attn_spool_remove(plan) == ATTN_OK;
    free(workspace);
    attn_plan_destroy(plan);
    return right;
}

int main(void)
{
    char spool[] = "/tmp/attn-example-XXXXXX";
    FILE *in = tmpfile(), *out = tmpfile(); /* gone when the program ends */
    int right = 0;
    if (in != NULL && out != NULL && mkdtemp(spool) != NULL && make_inputs(in)) {
        files f = {.in = fileno(in), .out = fileno(out)};
        right = compute(&f, spool);
    }
    if (!right) {
        fprintf(stderr, "wrong: %s\n", attn_last_error());
    }
    return right ? 0 : 1;
}
