/* SPDX-License-Identifier: Apache-2.0 */
/*
 * contest.c - our own kernels as contestants: a plan for each pass, over tensors in memory, on one worker.
 *
 * The rows of the kernel table are asked for their names, so that a new kernel takes part without a line
 * here.
 */
#include "contest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

typedef struct ours {
    attn_plan *forward, *backward;
    attn_io io;
    attn_gradients gradients;
    cli_place place;
    void *workspace; /* of the larger plan */
    char kernel[64];
} ours;

static attn_status make_plan(const contestant *self, const contest_case *c, bool backward, attn_plan **plan)
{
    attn_options options = {
        .size = sizeof options,
        .workers = 1,
        .threads = c->threads,
        .in_memory = 1,
        .backward = backward,
        .device = c->place.device,
        .gpu = c->place.gpu,
        .kernel = self->kernel,
    };
    return attn_plan_create(plan, &c->problem, &options);
}

static size_t workspace_of(const ours *s)
{
    size_t bytes = attn_plan_workspace(s->forward);
    size_t other = s->backward != NULL ? attn_plan_workspace(s->backward) : 0;
    return bytes > other ? bytes : other;
}

static attn_status make_plans(const contestant *self, const contest_case *c, ours *s)
{
    attn_status status = make_plan(self, c, false, &s->forward);
    if (status == ATTN_OK && c->pass != CONTEST_FORWARD) {
        status = make_plan(self, c, true, &s->backward);
    }
    return status;
}

static void free_ours(void *state)
{
    ours *s = state;
    if (s != NULL) {
        attn_plan_destroy(s->forward);
        attn_plan_destroy(s->backward);
        cli_place_free(s->place, s->workspace);
        free(s);
    }
}

static const char *can_do(const contestant *self, const contest_case *c, char *text, size_t size)
{
    ours s = {0};
    attn_status status = make_plans(self, c, &s);
    if (status != ATTN_OK) {
        snprintf(text, size, "%s", attn_last_error());
    }
    attn_plan_destroy(s.forward);
    attn_plan_destroy(s.backward);
    return status == ATTN_OK ? NULL : text;
}

static attn_status predict(const contestant *self, const contest_case *c, int64_t *bytes)
{
    ours s = {0};
    attn_status status = make_plans(self, c, &s);
    *bytes = status == ATTN_OK ? (int64_t)workspace_of(&s) : 0;
    attn_plan_destroy(s.forward);
    attn_plan_destroy(s.backward);
    return status;
}

static attn_status setup(const contestant *self, const contest_case *c, const contest_tensors *t,
                         void **state)
{
    attn_summary summary = ATTN_INIT(attn_summary);
    ours *s = calloc(1, sizeof *s);
    *state = s;
    if (s == NULL) {
        return attn_fail(ATTN_ENOMEM, "out of memory");
    }
    s->place = c->place;
    attn_status status = make_plans(self, c, s);
    if (status == ATTN_OK) {
        status = attn_plan_summary(s->forward, &summary);
    }
    if (status != ATTN_OK) {
        return status;
    }
    snprintf(s->kernel, sizeof s->kernel, "%s", summary.kernel);
    s->io = (attn_io){.size = sizeof s->io,
                      .q = {.data = t->q},
                      .k = {.data = t->k},
                      .v = {.data = t->v},
                      .o = {.data = t->o},
                      .lse = {.data = t->lse}};
    s->gradients = (attn_gradients){.size = sizeof s->gradients,
                                    .q = {.data = t->q},
                                    .k = {.data = t->k},
                                    .v = {.data = t->v},
                                    .o = {.data = t->o},
                                    .lse = {.data = t->lse},
                                    .dout = {.data = t->dout},
                                    .dq = {.data = t->dq},
                                    .dk = {.data = t->dk},
                                    .dv = {.data = t->dv}};
    s->workspace = cli_place_alloc(c->place, workspace_of(s));
    return s->workspace != NULL ? ATTN_OK : ATTN_ENOMEM;
}

static attn_status run(void *state, contest_pass pass)
{
    const ours *s = state;
    attn_status status = ATTN_OK;
    if (pass != CONTEST_BACKWARD) {
        status = attn_execute(s->forward, &s->io, s->workspace);
    }
    if (status == ATTN_OK && pass != CONTEST_FORWARD) {
        status = attn_execute_backward(s->backward, &s->gradients, s->workspace);
    }
    return status;
}

/* "avx512" of "flash-avx512" */
static const char *isa(const void *state)
{
    const ours *s = state;
    const char *dash = strrchr(s->kernel, '-');
    return dash != NULL ? dash + 1 : s->kernel;
}

static const char *peak(const void *state)
{
    const ours *s = state;
    return s->kernel;
}

static contestant ours_called(const char *name, const char *kernel)
{
    return (contestant){
        .name = name,
        .kernel = kernel,
        .can_do = can_do,
        .predict = predict,
        .setup = setup,
        .run = run,
        .isa = isa,
        .peak = peak,
        .free_state = free_ours,
    };
}

int contest_all(contestant list[CONTESTANTS], attn_device device)
{
    attn_verdict row[CLI_KERNELS];
    const int rows = cli_kernel_rows(device, row);
    int count = 0;
    list[count++] = ours_called("flash", NULL);
    for (int i = 0; i < rows && count + 1 < CONTESTANTS; i++) {
        if (strcmp(row[i].name, contest_naive.name) != 0) { /* whose name is the rival's */
            list[count++] = ours_called(row[i].name, row[i].name);
        }
    }
    list[count++] = device == ATTN_CUDA ? contest_naive_cuda : contest_naive;
    return count;
}
