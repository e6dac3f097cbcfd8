/* SPDX-License-Identifier: Apache-2.0 */
/* test_base.c - errors, tracked memory, dtype conversions over all halves, the hash, the CPU mask. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static void test_status_texts(void **state)
{
    (void)state;
    assert_string_equal(attn_strerror(ATTN_OK), "ok");
    assert_string_equal(attn_strerror(ATTN_ELOST), "worker lost");
    assert_string_equal(attn_strerror((attn_status)99), "unknown status");
    assert_int_equal(attn__fail(ATTN_EIO, "%s %d", "disk", 7), ATTN_EIO);
    assert_string_equal(attn_last_error(), "disk 7");
    assert_int_equal(attn_fail(ATTN_EINVAL, "own words"), ATTN_EINVAL);
    assert_string_equal(attn_last_error(), "own words");
}

static void test_memory_is_counted(void **state)
{
    (void)state;
    size_t before = attn__memory_now();
    char *a = attn__alloc(1000), *b = attn__alloc_zero(5);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal((uintptr_t)a % 64, 0);
    assert_int_equal(b[4], 0);
    assert_true(attn__memory_now() >= before + 1005);
    assert_true(attn__memory_peak() >= attn__memory_now());
    attn__free(a);
    attn__free(b);
    attn__free(NULL);
    assert_int_equal(attn__memory_now(), before);
}

/* One large workspace is kept for the next that has room in it, and counts as freed; nothing else gets it. */
static void test_a_workspace_is_kept(void **state)
{
    enum { MIB = 1024 * 1024 };
    (void)state;
    size_t before = attn__memory_now();
    char *first = attn__alloc_workspace(5 * MIB);
    assert_non_null(first);
    first[0] = 1;
    attn__free_workspace(first);
    assert_int_equal(attn__memory_now(), before);
    char *array = attn__alloc(3 * MIB);
    assert_ptr_not_equal(array, first);
    attn__free(array);
    char *smaller = attn__alloc_workspace(3 * MIB), *other = attn__alloc_workspace(3 * MIB);
    assert_ptr_equal(smaller, first);
    assert_non_null(other);
    assert_true(other + 3 * MIB <= smaller || smaller + 5 * MIB <= other);
    assert_true(attn__memory_now() < before + 7 * MIB);
    attn__free_workspace(smaller);
    attn__free_workspace(other); /* takes the place of the one that was kept */
    char *again = attn__alloc_workspace(2 * MIB), *larger = attn__alloc_workspace(9 * MIB);
    assert_ptr_equal(again, other);
    assert_non_null(larger);
    attn__free_workspace(again);
    attn__free_workspace(larger);
    assert_int_equal(attn__memory_now(), before);
}

static void test_memory_fails_on_request(void **state)
{
    (void)state;
    attn__memory_fail_after(1);
    void *first = attn__alloc(1), *second = attn__alloc(1), *third = attn__alloc(1);
    assert_non_null(first);
    assert_null(second);
    assert_non_null(third);
    attn__memory_fail_after(-1);
    attn__free(first);
    attn__free(third);
    assert_null(attn__alloc_array(INT64_MAX, 8));
    assert_null(attn__alloc_array(-1, 8));
    assert_null(attn__alloc(SIZE_MAX));
}

static void test_overflow_checks(void **state)
{
    (void)state;
    int64_t x = 0;
    assert_true(attn__mul(INT64_C(1) << 31, INT64_C(1) << 31, &x));
    assert_false(attn__mul(INT64_C(1) << 32, INT64_C(1) << 31, &x));
    assert_true(attn__mul(0, INT64_MAX, &x));
    assert_false(attn__add(INT64_MAX, 1, &x));
    assert_int_equal(attn__mod(-3, 7), 4);
}

/* Every half goes up and comes back; halves in order have fp32 values in order. */
static void test_every_half_round_trips(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float up = attn__f16_to_f32((uint16_t)h), bup = attn__bf16_to_f32((uint16_t)h);
        if (isnan(up)) {
            assert_true(isnan(attn__f16_to_f32(attn__f32_to_f16(up))));
        } else {
            assert_int_equal(attn__f32_to_f16(up), h);
        }
        if (isnan(bup)) {
            assert_true(isnan(attn__bf16_to_f32(attn__f32_to_bf16(bup))));
        } else {
            assert_int_equal(attn__f32_to_bf16(bup), h);
        }
    }
    assert_true(attn__f16_to_f32(0x3c00) == 1.0f);
    assert_true(attn__f16_to_f32(1) == 0x1p-24f);
    assert_true(attn__f16_to_f32(0x7bff) == 65504.0f);
    assert_true(attn__bf16_to_f32(0x3f80) == 1.0f);
}

/* Down is to nearest, ties to even: no half is nearer than the one chosen. */
static void test_rounding_is_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7bff; h++) {
        float low = attn__f16_to_f32((uint16_t)h), high = attn__f16_to_f32((uint16_t)(h + 1));
        float middle = low + (high - low) / 2;
        assert_int_equal(attn__f32_to_f16(middle), h % 2 == 0 ? h : h + 1);
        assert_int_equal(attn__f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(attn__f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
        assert_int_equal(attn__f32_to_f16(-middle), (h % 2 == 0 ? h : h + 1) | 0x8000u);
    }
    assert_int_equal(attn__f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(attn__f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(attn__f32_to_f16(1e30f), 0x7c00);
    assert_int_equal(attn__f32_to_bf16(1.00390625f), 0x3f80); /* tie: down to even */
    assert_int_equal(attn__f32_to_bf16(1.01171875f), 0x3f82); /* tie: up to even */
}

static void test_strided_conversion(void **state)
{
    (void)state;
    uint16_t halves[6] = {0x3c00, 0, 0x4000, 0, 0x4200, 0};
    float out[3], back[6] = {0};
    attn_to_f32(out, halves, ATTN_F16, 2, 3);
    assert_true(out[0] == 1 && out[1] == 2 && out[2] == 3);
    attn_from_f32(back, ATTN_F32, 2, out, 3);
    assert_true(back[0] == 1 && back[1] == 0 && back[2] == 2 && back[4] == 3);
    attn_from_f32(halves + 5, ATTN_F16, -2, out, 3);
    assert_int_equal(halves[5], 0x3c00);
    assert_int_equal(halves[1], 0x4200);
}

/* A row becomes what its numbers become one by one, at every length and on every level. */
static void test_rows_are_rounded_as_numbers_are(void **state)
{
    (void)state;
    enum { LENGTHS = 40 };
    const uint32_t level[] = {attn__cpu(), attn__cpu() & ATTN__CPU_AVX2, 0};
    float row[LENGTHS];
    uint32_t bits = 0; /* each step a number of another exponent, with subnormals, infinities and NaN */
    for (int round = 0; round < 40000; round++) {
        for (int i = 0; i < LENGTHS; i++, bits += 0x01357911u) {
            memcpy(row + i, &bits, sizeof bits);
        }
        attn__cpu_override(level[round % 3]);
        const int64_t length = round % (LENGTHS + 1);
        for (int dtype = ATTN_F16; dtype <= ATTN_BF16; dtype++) {
            uint16_t to[LENGTHS + 1];
            memset(to, 0x55, sizeof to);
            attn_from_f32(to, (attn_dtype)dtype, 1, row, length);
            for (int64_t i = 0; i < length; i++) {
                assert_int_equal(to[i],
                                 dtype == ATTN_F16 ? attn__f32_to_f16(row[i]) : attn__f32_to_bf16(row[i]));
            }
            assert_int_equal(to[length], 0x5555);
        }
    }
    attn__cpu_override(level[0]);
}

static void test_hash_sees_every_bit_and_length(void **state)
{
    (void)state;
    unsigned char data[100] = {0};
    for (size_t length = 0; length < sizeof data; length++) {
        uint64_t whole = attn__hash(0, data, length);
        assert_true(whole != attn__hash(0, data, length + 1));
        assert_true(whole != attn__hash(1, data, length));
        for (size_t bit = 0; bit < 8 * length; bit++) {
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
            assert_true(attn__hash(0, data, length) != whole);
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
    }
}

static void test_cpu_mask(void **state)
{
    (void)state;
    uint32_t real = attn__cpu();
    attn__cpu_override(0);
    assert_int_equal(attn__cpu(), 0);
    attn__cpu_override(real);
    assert_int_equal(attn__cpu(), real);
    assert_string_equal(attn__cpu_name(ATTN__CPU_AVX2), "avx2");
    assert_string_equal(attn__cpu_name(ATTN__CPU_AVX512_BF16), "avx512bf16");
    assert_string_equal(attn__cpu_name(ATTN__CPU_AMX), "amx");
}

/* Against what Linux says of the processor, which under an emulator is another one's. */
static void test_cpu_ahead(void **state)
{
    (void)state;
    const int64_t ahead = attn__cpu_ahead();
    bool intel = false, amd = false;
    int family = 0;
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        intel = intel || strstr(line, "GenuineIntel") != NULL;
        amd = amd || strstr(line, "AuthenticAMD") != NULL;
        (void)sscanf(line, "cpu family : %d", &family);
    }
    if (file != NULL) {
        fclose(file);
    }
#if defined(__x86_64__)
    assert_int_equal(ahead, intel ? 4096 : amd && family >= 26 ? 8192 : 0);
#else
    (void)intel, (void)amd, (void)family;
    assert_int_equal(ahead, 0);
#endif
    assert_int_equal(attn__cpu_ahead(), ahead);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status_texts),
        cmocka_unit_test(test_memory_is_counted),
        cmocka_unit_test(test_a_workspace_is_kept),
        cmocka_unit_test(test_memory_fails_on_request),
        cmocka_unit_test(test_overflow_checks),
        cmocka_unit_test(test_every_half_round_trips),
        cmocka_unit_test(test_rounding_is_to_nearest_even),
        cmocka_unit_test(test_strided_conversion),
        cmocka_unit_test(test_rows_are_rounded_as_numbers_are),
        cmocka_unit_test(test_hash_sees_every_bit_and_length),
        cmocka_unit_test(test_cpu_mask),
        cmocka_unit_test(test_cpu_ahead),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
