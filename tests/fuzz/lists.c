/* SPDX-License-Identifier: Apache-2.0 */
/* lists.c - fuzz target: any text as the values of command-line options. */
#include <math.h>
#include <string.h>

#include "cli/cli.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[4096], why[256] = "";
    size_t length = size < sizeof text ? size : sizeof text - 1;
    memcpy(text, data, length);
    text[length] = '\0';

    cli_ints list = {NULL, 0};
    if (cli_parse_ints(text, -5, 1000000, &list, why, sizeof why)) {
        FUZZ_EXPECT(list.count > 0 && list.item != NULL);
    } else {
        FUZZ_EXPECT(why[0] != '\0' && list.count == 0);
    }
    for (int64_t i = 0; i < list.count; i++) {
        FUZZ_EXPECT(list.item[i] >= -5 && list.item[i] <= 1000000);
    }
    free(list.item);

    int64_t value = 42;
    why[0] = '\0';
    bool parsed = cli_parse_int(text, -7, INT64_MAX, &value, why, sizeof why);
    FUZZ_EXPECT(parsed ? value >= -7 : why[0] != '\0');
    why[0] = '\0';
    parsed = cli_parse_bytes(text, 1, INT64_MAX, &value, why, sizeof why);
    FUZZ_EXPECT(parsed ? value >= 1 : why[0] != '\0');
    double real = 0;
    why[0] = '\0';
    parsed = cli_parse_real(text, -1e9, 1e9, &real, why, sizeof why);
    FUZZ_EXPECT(parsed ? isfinite(real) && fabs(real) <= 1e9 : why[0] != '\0');
    return 0;
}
