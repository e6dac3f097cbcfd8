/* SPDX-License-Identifier: Apache-2.0 */
/*
 * info.c - the verb `info`: the version, this machine, the kernel table, and what this build has.
 *
 * The kernel tables judge themselves (attn_kernel_verdict).  Facts about the machine come from the system,
 * the GPU's driver and NVML: what they do not tell is left out.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "gpu.h"
#include "machine.h"

/* Bits that the build passes for optional packages. */
#ifndef ATTN_HAVE_CAIRO
#define ATTN_HAVE_CAIRO 0
#endif
#ifndef ATTN_HAVE_RANDOM123
#define ATTN_HAVE_RANDOM123 0
#endif
#ifndef ATTN_HAVE_OPENBLAS
#define ATTN_HAVE_OPENBLAS 0
#endif
#ifndef ATTN_HAVE_CMOCKA
#define ATTN_HAVE_CMOCKA 0
#endif
#if !defined(ATTN_HAVE_OPENMP) && defined(_OPENMP)
#define ATTN_HAVE_OPENMP 1
#elif !defined(ATTN_HAVE_OPENMP)
#define ATTN_HAVE_OPENMP 0
#endif

/* ---- what the build has ------------------------------------------------------------------------------ */

typedef struct part {
    const char *name;
    int built_in;
    const char *use;
    const char *package; /* of Debian, which brings what is missing */
} part;

static const part parts[] = {
    {"OpenMP", ATTN_HAVE_OPENMP, "threads of one worker", "gcc"},
    {"cairo", ATTN_HAVE_CAIRO, "pictures in PNG", "libcairo2-dev"},
    {"Random123", ATTN_HAVE_RANDOM123, "random inputs (--random)", "librandom123-dev"},
    {"OpenBLAS", ATTN_HAVE_OPENBLAS, "the contestant naive of bench attention", "libopenblas-dev"},
    {"cmocka", ATTN_HAVE_CMOCKA, "the unit tests", "libcmocka-dev"},
};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

void cli_version(FILE *file)
{
    fprintf(file, "attn %s\n%s build, %s\n", attn_version(), cli_build(), cli_compiler());
    for (int i = 0; i < PARTS; i++) {
        fprintf(file, "%c%s%s", parts[i].built_in ? '+' : '-', parts[i].name, i + 1 < PARTS ? " " : "\n");
    }
}

static bool next_kernel(int64_t index, attn_verdict *verdict)
{
    memset(verdict, 0, sizeof(*verdict));
    verdict->size = sizeof(*verdict);
    return attn_kernel_verdict(NULL, index, verdict) == ATTN_OK;
}

/* Those that the driver has; of none, gpu[0] tells why.  Before the kernels are asked, who open a GPU here.
 */
enum { GPUS = 16 };

static int look_at_gpus(cli_gpu gpu[GPUS])
{
    int count = 0;
    while (count < GPUS) {
        cli_gpu_look(count, 0, &gpu[count]);
        if (gpu[count].status != CLI_ROW_OK) {
            break;
        }
        count++;
    }
    return count;
}

/* ---- writing ----------------------------------------------------------------------------------------- */

static void write_json(cli_json *json, const cli_machine *host, const cli_gpu *gpu, int gpus)
{
    cli_json_object(json, NULL);
    cli_json_int(json, "schema_version", CLI_SCHEMA_VERSION);
    cli_json_text(json, "version", attn_version());
    cli_json_text(json, "build", cli_build());
    cli_json_text(json, "compiler", cli_compiler());
    cli_json_object(json, "machine");
    cli_machine_json(json, host);
    cli_json_end(json);
    cli_json_array(json, "gpus");
    for (int i = 0; i < gpus; i++) {
        cli_json_object(json, NULL);
        cli_gpu_json(json, &gpu[i]);
        cli_json_end(json);
    }
    cli_json_end(json);
    cli_json_text(json, "gpu_missing", gpus == 0 ? gpu[0].text : NULL);
    cli_json_array(json, "kernels");
    attn_verdict verdict;
    for (int64_t i = 0; next_kernel(i, &verdict); i++) {
        cli_json_object(json, NULL);
        cli_json_text(json, "name", verdict.name);
        cli_json_text(json, "summary", verdict.summary);
        cli_json_text(json, "device", attn_device_name(verdict.device));
        cli_json_bool(json, "usable", verdict.reason == NULL);
        cli_json_text(json, "reason", verdict.reason);
        cli_json_end(json);
    }
    cli_json_end(json);
    cli_json_array(json, "parts");
    for (int i = 0; i < PARTS; i++) {
        cli_json_object(json, NULL);
        cli_json_text(json, "name", parts[i].name);
        cli_json_bool(json, "built_in", parts[i].built_in != 0);
        cli_json_text(json, "use", parts[i].use);
        cli_json_text(json, "package", parts[i].package);
        cli_json_end(json);
    }
    cli_json_end(json);
    cli_json_end(json);
}

static void row(cli_table *table, const char *section, const char *name, const char *value,
                const char *detail)
{
    cli_table_text(table, section);
    cli_table_text(table, name);
    cli_table_text(table, value);
    cli_table_text(table, detail);
}

/* What ATTN_ISA does; or that it names no level, in which case no plan is made. */
static const char *isa_detail(void)
{
    const attn_problem least = {.size = sizeof least, .tokens_q = 1, .dim_qk = 8};
    attn_plan *plan;
    if (attn_plan_create(&plan, &least, NULL) != ATTN_OK) {
        return attn_last_error();
    }
    attn_plan_destroy(plan);
    return "hides what is above the level that it names";
}

static void write_machine(cli_table *table, const cli_machine *host)
{
    char number[CLI_NUMBER], other[CLI_NUMBER], text[96];
    snprintf(text, sizeof(text), "%s build, %.70s", cli_build(), cli_compiler());
    row(table, "attn", "version", attn_version(), text);
    row(table, "machine", "cpu", host->model, host->features);
    row(table, "machine", "ATTN_ISA", host->isa != NULL ? host->isa : "not set", isa_detail());
    snprintf(number, sizeof(number), "%lld", (long long)host->cores);
    const char *threads = getenv("OMP_NUM_THREADS");
    snprintf(text, sizeof(text), "OMP_NUM_THREADS=%.40s", threads != NULL ? threads : "(not set)");
    row(table, "machine", "cores", number, text);
    if (host->memory > 0) {
        snprintf(text, sizeof(text), "%s available now", cli_bytes(other, (double)host->available));
        row(table, "machine", "memory", cli_bytes(number, (double)host->memory), text);
    }
}

static void write_gpus(cli_table *table, const cli_gpu *gpu, int gpus)
{
    if (gpus == 0) {
        row(table, "gpu", "0", "missing", gpu[0].text);
    }
    for (int i = 0; i < gpus; i++) {
        const attn_cuda_info *info = &gpu[i].info;
        char number[16], memory[CLI_NUMBER], left[CLI_NUMBER], text[200];
        snprintf(number, sizeof number, "%d", i);
        snprintf(text, sizeof text, "%d SMs, %s of memory, %s free now, CUDA %d.%d%s%s", info->sms,
                 cli_bytes(memory, (double)info->memory), cli_bytes(left, (double)info->memory_free),
                 info->driver / 1000, info->driver % 1000 / 10, gpu[i].driver[0] != '\0' ? ", driver " : "",
                 gpu[i].driver);
        row(table, "gpu", number, info->name, text);
    }
}

static void write_rows(cli_out *out, const cli_machine *host, const cli_gpu *gpu, int gpus)
{
    static const cli_column columns[] = {{.key = "section", .title = "Section", .width = 8},
                                         {.key = "name", .title = "Name", .width = 14},
                                         {.key = "value", .title = "Value", .width = 12},
                                         {.key = "detail", .title = "Detail", .width = 40}};
    cli_table table;
    cli_table_begin(&table, out, "info", columns, 4);
    write_machine(&table, host);
    write_gpus(&table, gpu, gpus);
    attn_verdict verdict;
    for (int64_t i = 0; next_kernel(i, &verdict); i++) {
        char text[400];
        snprintf(text, sizeof(text), "%s%s%s", verdict.summary, verdict.reason != NULL ? "; refused: " : "",
                 verdict.reason != NULL ? verdict.reason : "");
        row(&table, "kernel", verdict.name, verdict.reason == NULL ? "usable" : "refused", text);
    }
    for (int i = 0; i < PARTS; i++) {
        char text[200];
        snprintf(text, sizeof(text), "%s%s%s", parts[i].use, parts[i].built_in ? "" : "; Debian package ",
                 parts[i].built_in ? "" : parts[i].package);
        row(&table, "part", parts[i].name, parts[i].built_in ? "built in" : "missing", text);
    }
    cli_table_end(&table);
}

/* ---- the verb ---------------------------------------------------------------------------------------- */

typedef struct info_args {
    cli_common common;
} info_args;

static int info_run(const void *values)
{
    const info_args *args = values;
    cli_machine host;
    cli_out out;
    int code = cli_out_open(&out, &args->common);
    if (code != CLI_OK) {
        return code;
    }
    cli_gpu *gpu = cli_alloc(GPUS, sizeof *gpu);
    const int gpus = look_at_gpus(gpu);
    cli_machine_look(&host);
    if (out.format == CLI_FORMAT_JSON) {
        write_json(&out.json, &host, gpu, gpus);
    } else {
        write_rows(&out, &host, gpu, gpus);
    }
    free(gpu);
    return cli_out_close(&out, CLI_OK);
}

static const cli_option info_options[] = {CLI_OPTION_FORMAT, CLI_OPTION_OUTPUT, CLI_OPTION_HELP,
                                          CLI_OPTIONS_END};

static const cli_example info_examples[] = {
    {"attn info", "what this machine and this build offer"},
    {"attn info --format json", "the same for a program"},
    {"ATTN_ISA=ref attn info", "the kernels that are left without vector instructions"},
    {NULL, NULL},
};

const cli_verb cli_verb_info = {
    .name = "info",
    .summary = "tell version, machine, kernels and what this build has",
    .description =
        "Lists the GPUs that kernels can use, the kernel tables of the CPU and of the GPU, best first, with "
        "the reason "
        "why a kernel cannot run on this machine, and "
        "each optional part of the program: built in, or missing and which Debian package brings it.",
    .examples = info_examples,
    .options = info_options,
    .size = sizeof(info_args),
    .run = info_run,
};
