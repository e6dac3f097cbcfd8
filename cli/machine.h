/* SPDX-License-Identifier: Apache-2.0 */
/* machine.h - what `attn info` and the benches tell about this machine and this build. */
#ifndef ATTN_CLI_MACHINE_H
#define ATTN_CLI_MACHINE_H

#include "cli.h"

typedef struct cli_machine {
    char model[128];
    char features[256]; /* of those that kernels may use */
    const char *isa;    /* ATTN_ISA, or NULL */
    int64_t cores;
    int64_t memory, available; /* bytes; 0: not known */
} cli_machine;

void cli_machine_look(cli_machine *host);
/* As members of the object that is open in json. */
void cli_machine_json(cli_json *json, const cli_machine *host);

const char *cli_compiler(void); /* "gcc 12.2.0" */
const char *cli_build(void);    /* "release" or "debug" */

#endif
