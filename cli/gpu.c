/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.c - what the library and NVML tell of a GPU.
 *
 * NVML, which the driver brings, is loaded when it is asked for; without it clock and power are not known.
 * The peak of multiply-adds is that of a large product of matrices by cuBLASLt (product_cuda.h), or without
 * that library NVIDIA's figure for the SXM boards, which no chip sustains.
 */
#include "gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "product_cuda.h"

/* ---- NVML ---- */

/* The few functions and numbers that are used (nvml.h, NVIDIA Management Library API Reference). */
typedef struct nvml {
    int (*init)(void);
    int (*handle)(const char *bus, void **device);
    int (*clock)(void *device, int type, unsigned *mhz);
    int (*clock_most)(void *device, int type, unsigned *mhz);
    int (*power)(void *device, unsigned *milliwatt);
    int (*power_most)(void *device, unsigned *milliwatt);
    int (*driver)(char *text, unsigned size);
} nvml;
enum { NVML_CLOCK_SM = 1, NVML_FUNCTIONS = sizeof(nvml) / sizeof(void *) };

static bool load_nvml(nvml *n)
{
    static const char *const names[] = {"nvmlInit_v2",
                                        "nvmlDeviceGetHandleByPciBusId_v2",
                                        "nvmlDeviceGetClockInfo",
                                        "nvmlDeviceGetMaxClockInfo",
                                        "nvmlDeviceGetPowerUsage",
                                        "nvmlDeviceGetEnforcedPowerLimit",
                                        "nvmlSystemGetDriverVersion"};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *found[NVML_FUNCTIONS] = {NULL};
    bool all = library != NULL;
    for (int i = 0; i < NVML_FUNCTIONS && all; i++) {
        found[i] = dlsym(library, names[i]);
        all = found[i] != NULL;
    }
    memcpy(n, found, sizeof *n);
    return all && n->init() == 0;
}

static bool open_nvml(nvml *n, int gpu, void **device)
{
    attn_cuda_info info = ATTN_INIT(attn_cuda_info);
    return load_nvml(n) && attn_cuda_look(gpu, &info) == ATTN_OK && n->handle(info.bus, device) == 0;
}

cli_gpu_state cli_gpu_now(int gpu)
{
    nvml n;
    void *device;
    unsigned mhz = 0, milliwatt = 0;
    if (!open_nvml(&n, gpu, &device)) {
        return (cli_gpu_state){0, 0};
    }
    if (n.clock(device, NVML_CLOCK_SM, &mhz) != 0) {
        mhz = 0;
    }
    if (n.power(device, &milliwatt) != 0) {
        milliwatt = 0;
    }
    return (cli_gpu_state){(int)mhz, (int)((milliwatt + 500) / 1000)};
}

static void ask_nvml(int gpu, cli_gpu *seen)
{
    nvml n;
    void *device;
    unsigned mhz = 0, milliwatt = 0;
    if (!open_nvml(&n, gpu, &device)) {
        return;
    }
    if (n.driver(seen->driver, sizeof seen->driver) != 0) {
        seen->driver[0] = '\0';
    }
    seen->clock_most = n.clock_most(device, NVML_CLOCK_SM, &mhz) == 0 ? (int)mhz : 0;
    seen->power_most = n.power_most(device, &milliwatt) == 0 ? (int)((milliwatt + 500) / 1000) : 0;
}

/* ---- the peak ---- */

static void find_peaks(int gpu, unsigned asked, cli_gpu *seen)
{
    /* NVIDIA H100 Tensor Core GPU data sheet, SXM: dense, without sparsity; H200 has the same */
    static const double sheet[CLI_GPU_DTYPES] = {
        [ATTN_F32] = 66.9e12, [ATTN_F16] = 989.4e12, [ATTN_BF16] = 989.4e12};
    const int size = 8192, size_f32 = 4096;
    bool measured = true;
    for (int dtype = 0; dtype < CLI_GPU_DTYPES && measured; dtype++) {
        if ((asked >> dtype & 1) != 0) {
            const int n = dtype == ATTN_F32 ? size_f32 : size;
            seen->peak[dtype] = product_peak(gpu, (attn_dtype)dtype, n);
            measured = seen->peak[dtype] > 0;
        }
    }
    snprintf(seen->peak_of, sizeof seen->peak_of, "%s",
             measured ? "a product of matrices of 8192 (f32: 4096) rows by cuBLASLt, measured"
                      : "data sheet, SXM");
    for (int dtype = 0; dtype < CLI_GPU_DTYPES && !measured; dtype++) {
        seen->peak[dtype] = (asked >> dtype & 1) != 0 ? sheet[dtype] : 0;
    }
}

/* ---- the processes ---- */

typedef struct question {
    int gpu;
    unsigned peaks;
} question;

static void look(const void *data, void *result)
{
    const question *asked = data;
    cli_gpu *seen = result;
    seen->info.size = sizeof seen->info;
    if (attn_cuda_look(asked->gpu, &seen->info) != ATTN_OK) {
        seen->status = CLI_ROW_REFUSED;
        snprintf(seen->text, sizeof seen->text, "%s", attn_last_error());
        return;
    }
    ask_nvml(asked->gpu, seen);
    if (asked->peaks != 0) {
        find_peaks(asked->gpu, asked->peaks, seen);
    }
}

void cli_gpu_look(int gpu, unsigned peaks, cli_gpu *seen)
{
    const question asked = {gpu, peaks};
    seen->status = cli_child_run(look, &asked, seen, sizeof *seen, seen->text, sizeof seen->text);
}

void cli_gpu_json(cli_json *json, const cli_gpu *seen)
{
    cli_json_text(json, "name", seen->info.name);
    cli_json_text(json, "bus", seen->info.bus);
    cli_json_int(json, "compute_capability", 10 * seen->info.major + seen->info.minor);
    cli_json_int(json, "sms", seen->info.sms);
    cli_json_int(json, "memory_bytes", (int64_t)seen->info.memory);
    cli_json_int(json, "available_bytes", (int64_t)seen->info.memory_free);
    cli_json_int(json, "l2_bytes", (int64_t)seen->info.l2);
    cli_json_int(json, "cuda", seen->info.driver);
    cli_json_text(json, "driver", seen->driver[0] != '\0' ? seen->driver : NULL);
    cli_json_int(json, "clock_most_mhz", seen->clock_most);
    cli_json_int(json, "power_most_w", seen->power_most);
}

typedef struct rows {
    cli_row_status status; /* first, for cli_child_run() */
    char text[80];
    int count;
    attn_verdict row[CLI_KERNELS]; /* whose texts are the library's, at the same place in both processes */
} rows;

static void list_rows(const void *data, void *result)
{
    rows *list = result;
    attn_verdict row = ATTN_INIT(attn_verdict);
    const attn_device device = *(const attn_device *)data;
    for (int64_t i = 0; attn_kernel_verdict(NULL, i, &row) == ATTN_OK && list->count < CLI_KERNELS; i++) {
        if (row.device == device) {
            list->row[list->count++] = row;
        }
    }
}

int cli_kernel_rows(attn_device device, attn_verdict row[CLI_KERNELS])
{
    rows list = {.count = 0};
    (void)cli_child_run(list_rows, &device, &list, sizeof list, list.text, sizeof list.text);
    memcpy(row, list.row, sizeof list.row);
    return list.count;
}
