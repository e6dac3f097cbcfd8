/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - a GPU as `attn info` and the benches tell it.
 *
 * CUDA does not survive a fork, so whoever will run cases in processes of their own asks in such a process,
 * too: cli_gpu_look() and cli_kernel_rows() do.
 */
#ifndef ATTN_CLI_GPU_H
#define ATTN_CLI_GPU_H

#include "attn/cuda.h"
#include "cli.h"
#include "measure.h"

enum { CLI_GPU_DTYPES = 3 };

typedef struct cli_gpu {
    cli_row_status status; /* first, for cli_child_run(); OK, or REFUSED */
    char text[400];        /* why there is none */
    attn_cuda_info info;
    char driver[80]; /* "580.65.06", or empty where NVML does not tell */
    int clock_most;  /* MHz of the SMs, or 0 */
    int power_most;  /* W, or 0 */
    /* FLOP/s of the fastest way to multiply matrices of a dtype, and where that is known from; 0: not asked
     * for */
    double peak[CLI_GPU_DTYPES];
    char peak_of[80];
} cli_gpu;

/* In a process of its own; peaks: bit i asks for that of attn_dtype i, which takes a second. */
void cli_gpu_look(int gpu, unsigned peaks, cli_gpu *seen);
/* As members of the object that is open in json. */
void cli_gpu_json(cli_json *json, const cli_gpu *seen);

/* What the SMs run at and what the board takes, now: MHz and W; 0 where NVML does not tell.  In this process.
 */
typedef struct cli_gpu_state {
    int clock, power;
} cli_gpu_state;
cli_gpu_state cli_gpu_now(int gpu);

/* The kernel table's rows for a device, judged for this machine, in a process of its own; returns how many.
 */
enum { CLI_KERNELS = 32 };
int cli_kernel_rows(attn_device device, attn_verdict rows[CLI_KERNELS]);

#endif
