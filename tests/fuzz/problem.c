/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c - fuzz target: any text as a problem.  What is accepted is legal, prints, and reads back the
 * same. */
#include <math.h>
#include <string.h>

#include "attn/attn.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[2048], printed[1024];
    size_t length = size < sizeof text ? size : sizeof text - 1;
    memcpy(text, data, length);
    text[length] = '\0';
    attn_problem p = {.size = 77}, again;
    if (attn_problem_parse(&p, text) != ATTN_OK) {
        FUZZ_EXPECT(p.size == 77 && attn_last_error()[0] != '\0');
        return 0;
    }
    FUZZ_EXPECT(p.tokens_q >= 1 && p.tokens_kv >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0);
    FUZZ_EXPECT(p.dim_qk >= 1 && p.dim_qk <= 512 && p.dim_v >= 1 && p.dim_v <= 512 && isfinite(p.scale));
    FUZZ_EXPECT(attn_problem_flops(&p) >= 0);
    size_t need = attn_problem_print(&p, printed, sizeof printed);
    FUZZ_EXPECT(need < sizeof printed && strlen(printed) == need);
    FUZZ_EXPECT(attn_problem_parse(&again, printed) == ATTN_OK);
    FUZZ_EXPECT(again.batch == p.batch && again.heads_q == p.heads_q && again.heads_kv == p.heads_kv);
    FUZZ_EXPECT(again.tokens_q == p.tokens_q && again.tokens_kv == p.tokens_kv);
    FUZZ_EXPECT(again.dim_qk == p.dim_qk && again.dim_v == p.dim_v && again.dtype == p.dtype);
    FUZZ_EXPECT(again.mask == p.mask && again.window_left == p.window_left);
    FUZZ_EXPECT(again.window_right == p.window_right && again.dtype_out == p.dtype_out);
    /* attn_problem_print() gives the scale 17 digits */
    FUZZ_EXPECT(memcmp(&again.scale, &p.scale, sizeof p.scale) == 0);
    return 0;
}
