/* SPDX-License-Identifier: Apache-2.0 */
/* test_problem.c - problems: defaults, every refusal with its words, the string form there and back, FLOPs.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"

static void test_defaults(void **state)
{
    (void)state;
    attn_problem p = ATTN_INIT(attn_problem);
    p.tokens_q = 10;
    p.dim_qk = 64;
    p.heads_q = 4;
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    assert_int_equal(p.batch, 1);
    assert_int_equal(p.heads_kv, 4);
    assert_int_equal(p.tokens_kv, 10);
    assert_int_equal(p.dim_v, 64);
    assert_true(p.scale == 0.125);
}

static void refuse(attn_problem p, const char *word)
{
    attn_problem before = p;
    assert_int_equal(attn_problem_check(&p), ATTN_EINVAL);
    assert_memory_equal(&p, &before, sizeof p);
    if (strstr(attn_last_error(), word) == NULL) {
        fail_msg("\"%s\" does not name %s", attn_last_error(), word);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    attn_problem good = {.size = sizeof good, .tokens_q = 8, .dim_qk = 8, .heads_q = 6, .heads_kv = 3};
    attn_problem p = good;
    assert_int_equal(attn_problem_check(&p), ATTN_OK);
    refuse((p = good, p.size = 1, p), "size");
    refuse((p = good, p.tokens_q = 0, p), "tokens");
    refuse((p = good, p.tokens_q = -1, p), "tokens");
    refuse((p = good, p.tokens_kv = -1, p), "kv_tokens");
    refuse((p = good, p.batch = -2, p), "batch");
    refuse((p = good, p.heads_kv = 4, p), "divide");
    refuse((p = good, p.dim_qk = 513, p), "dim");
    refuse((p = good, p.dim_v = 513, p), "dim_v");
    refuse((p = good, p.dtype = (attn_dtype)9, p), "dtype");
    refuse((p = good, p.mask = (attn_mask)7, p), "mask");
    refuse((p = good, p.mask = ATTN_MASK_WINDOW, p.window_left = -2, p), "window");
    refuse((p = good, p.placed = 1, p.first_q = -1, p), "at");
    refuse((p = good, p.placed = 1, p.first_kv = INT64_MAX, p), "at");
    refuse((p = good, p.total_q = 5, p), "total");
    refuse((p = good, p.total_q = 5, p.total_kv = -1, p), "total");
    refuse((p = good, p.total_q = 5, p.total_kv = INT64_MAX, p), "total");
    refuse((p = good, p.total_q = 5, p.total_kv = 5, p.placed = 1, p), "placed");
    refuse((p = good, p.scale = INFINITY, p), "scale");
    refuse((p = good, p.scale = NAN, p), "scale");
    refuse((p = good, p.tokens_q = INT64_C(1) << 40, p.batch = INT64_C(1) << 30, p), "overflow");
}

static void test_parse_good(void **state)
{
    (void)state;
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, "tokens=30k,dim=64,heads=4,kv_heads=2,batch=3,dtype=bf16,causal"),
                     ATTN_OK);
    assert_int_equal(p.tokens_q, 30000);
    assert_int_equal(p.heads_kv, 2);
    assert_int_equal(p.dtype, ATTN_BF16);
    assert_int_equal(p.mask, ATTN_MASK_CAUSAL);
    assert_int_equal(
        attn_problem_parse(&p, "dim=8,tokens=2Ki,window=16:-1,scale=-0.5,kv_tokens=7,dim_v=9,out=f16"),
        ATTN_OK);
    assert_int_equal(p.tokens_q, 2048);
    assert_int_equal(p.window_left, 16);
    assert_int_equal(p.window_right, -1);
    assert_true(p.scale == -0.5);
    assert_int_equal(p.dtype_out, ATTN_F16);
    assert_int_equal(p.placed, 0);
    assert_int_equal(attn_problem_parse(&p, "at=4k:16,dim=8,tokens=3"), ATTN_OK);
    assert_int_equal(p.placed, 1);
    assert_int_equal(p.first_q, 4000);
    assert_int_equal(p.first_kv, 16);
    assert_int_equal(p.total_q, 0);
    assert_int_equal(attn_problem_parse(&p, "total=4k:17,dim=8,tokens=3,batch=2000"), ATTN_OK);
    assert_int_equal(p.total_q, 4000);
    assert_int_equal(p.total_kv, 17);
}

static void test_parse_bad(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "tokens",
        "tokens=",
        "tokens=0,dim=8",
        "tokens=-4,dim=8",
        "tokens=8",
        "dim=8",
        "tokens=8,dim=8,",
        "tokens=8,tokens=8,dim=8",
        "tokens=8x,dim=8",
        "tokens=99999999999999999999,dim=8",
        "tokens=8,dim=8,colour=red",
        "tokens=8,dim=8,causal=1",
        "tokens=8,dim=8,causal,window=1:1",
        "tokens=8,dim=8,window=1",
        "tokens=8,dim=8,window=a:b",
        "tokens=8,dim=8,dtype=f64",
        "tokens=8,dim=8,scale=0",
        "tokens=8,dim=8,scale=nan",
        "tokens=8,dim=8,scale=1x",
        "tokens= 8,dim=8",
        "tokens=9000000000000M,dim=8",
        "tokens=8,dim=8,window=-2:0",
        "tokens=8,dim=8,at=3",
        "tokens=8,dim=8,at=-1:0",
        "tokens=8,dim=8,at=0:x",
        "tokens=8,dim=8,at=1:2,at=1:2",
        "tokens=8,dim=8,total=9",
        "tokens=8,dim=8,total=0:9",
        "tokens=8,dim=8,total=9:9,at=1:2",
        "tokens=8,dim=8,heads=3,kv_heads=2",
    };
    attn_problem p = {.size = 77};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (attn_problem_parse(&p, bad[i]) != ATTN_EINVAL || attn_last_error()[0] == '\0') {
            fail_msg("\"%s\" was taken", bad[i]);
        }
        assert_int_equal(p.size, 77);
    }
    char huge[2000];
    memset(huge, '9', sizeof huge);
    huge[sizeof huge - 1] = '\0';
    assert_int_equal(attn_problem_parse(&p, huge), ATTN_EINVAL);
}

static void test_print_reads_back(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "tokens=10,dim=4",
        "tokens=10,kv_tokens=12,dim=4,dim_v=5,causal,scale=0.1",
        "tokens=10,dim=4,window=3:-1,dtype=f16,out=bf16,batch=2,heads=8,kv_heads=4",
        "tokens=10,kv_tokens=4,dim=4,causal,at=0:7",
        "tokens=10,dim=4,at=1000000:0",
        "tokens=10,kv_tokens=4,batch=3,dim=4,causal,total=25:11"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        attn_problem p, q;
        char text[512], cut[8];
        assert_int_equal(attn_problem_parse(&p, texts[i]), ATTN_OK);
        size_t length = attn_problem_print(&p, text, sizeof text);
        assert_int_equal(length, strlen(text));
        assert_int_equal(attn_problem_parse(&q, text), ATTN_OK);
        assert_memory_equal(&p, &q, sizeof p);
        assert_int_equal(attn_problem_print(&p, cut, sizeof cut), length);
        assert_int_equal(strlen(cut), sizeof cut - 1);
    }
}

static void test_flops(void **state)
{
    (void)state;
    attn_problem p;
    assert_int_equal(attn_problem_parse(&p, "tokens=100,dim=64,heads=8,batch=2"), ATTN_OK);
    assert_true(attn_problem_flops(&p) == 4.0 * 2 * 8 * 100 * 100 * 64);
    assert_int_equal(attn_problem_parse(&p, "tokens=100,dim=64,heads=8,batch=2,causal"), ATTN_OK);
    assert_true(attn_problem_flops(&p) == 4.0 * 2 * 8 * 5050 * 64);
    assert_int_equal(attn_problem_parse(&p, "tokens=3,kv_tokens=5,dim=1,dim_v=3,window=1:0"), ATTN_OK);
    assert_true(attn_problem_flops(&p) == 2.0 * 6 * 4); /* two keys a row */
    assert_int_equal(attn_problem_parse(&p, "tokens=3,kv_tokens=4,dim=1,causal,at=5:4"), ATTN_OK);
    assert_true(attn_problem_flops(&p) == 2.0 * (2 + 3 + 4) * 2); /* query 5 sees keys 4 and 5, and so on */
    assert_int_equal(attn_problem_parse(&p, "tokens=3,kv_tokens=4,dim=1,causal,at=0:3"), ATTN_OK);
    assert_true(attn_problem_flops(&p) == 0.0); /* all keys lie ahead */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_parse_good),       cmocka_unit_test(test_parse_bad),
        cmocka_unit_test(test_print_reads_back), cmocka_unit_test(test_flops),
    };
    return cmocka_run_group_tests_name("problem", tests, NULL, NULL);
}
