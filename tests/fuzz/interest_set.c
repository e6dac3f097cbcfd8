/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interest_set.c - fuzz target: any integers as an interest set.  What is accepted covers every difference of
 * Z_W, counted here; what is refused does not.
 *
 * Input: W in two bytes, then the elements in two bytes each, as signed numbers.
 */
#include <string.h>

#include "fuzz.h"
#include "quorum/quorum.h"

enum { ELEMENTS = 128, WORKERS = 2048 };

static int64_t number(const uint8_t *data)
{
    int64_t value = data[0] | data[1] << 8;
    return value < 32768 ? value : value - 65536;
}

static int64_t uncovered(int64_t workers, const int64_t *set, int64_t size)
{
    static unsigned char seen[WORKERS + 1];
    int64_t missing = 0;
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < size; i++) {
        for (int64_t j = 0; j < size; j++) {
            seen[attn__mod(set[i] - set[j], workers)] = 1;
        }
    }
    for (int64_t d = 0; d < workers; d++) {
        missing += seen[d] == 0;
    }
    return missing;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int64_t set[ELEMENTS], count = 0;
    attn__cover cover;
    if (size < 2) {
        return 0;
    }
    int64_t workers = 1 + attn__mod(number(data), WORKERS);
    for (size_t at = 2; at + 1 < size && count < ELEMENTS; at += 2) {
        set[count++] = number(data + at);
    }
    size_t before = attn__memory_now();
    attn_status status = attn__cover_user(&cover, workers, set, count);
    int64_t missing = uncovered(workers, set, count);
    FUZZ_EXPECT((status == ATTN_OK) == (missing == 0 && count > 0));
    if (status == ATTN_OK) {
        FUZZ_EXPECT(cover.workers == workers && cover.size >= 1 && cover.size <= count && cover.set[0] == 0);
        for (int64_t i = 0; i < cover.size; i++) {
            FUZZ_EXPECT(cover.set[i] >= 0 && cover.set[i] < workers);
            FUZZ_EXPECT(i == 0 || cover.set[i] > cover.set[i - 1]);
        }
        FUZZ_EXPECT(uncovered(workers, cover.set, cover.size) == 0);
        attn__cover_free(&cover);
    }
    FUZZ_EXPECT(attn__memory_now() == before);
    return 0;
}
