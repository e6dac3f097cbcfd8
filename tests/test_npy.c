/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_npy.c - the .npy reader and writer, element conversions, and files that appear only when complete.
 *
 * The headers below are what NumPy 2.4 writes (numpy.lib.format.write_array_header_1_0); the bad ones are
 * each one step away from a good one.
 */
#define _XOPEN_SOURCE 700

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "cli/npy.h"
#include "files.h"

/* Writes version, header text (padded to `length` if that is longer) and `data` zero bytes; opens it. */
static attn_status open_text(int version, const char *text, size_t data, cli_array *array)
{
    char bytes[8192] = "\x93NUMPY";
    size_t length = strlen(text), begin = version == 1 ? 10 : 12;
    bytes[6] = (char)version;
    bytes[8] = (char)(length & 255);
    bytes[9] = (char)(length >> 8);
    memcpy(bytes + begin, text, length);
    const char *path = files_path(files_own, "x.npy");
    files_write(path, bytes, begin + length + data);
    cli_reader reader;
    assert_int_equal(cli_reader_open(&reader, path), ATTN_OK);
    attn_status status = cli_npy_open(&reader, array);
    cli_reader_close(&reader);
    assert_int_equal(unlink(path), 0);
    return status;
}

static void good_headers(void **state)
{
    static const struct {
        int version;
        const char *text;
        cli_dtype dtype;
        int rank;
        int64_t first, count;
    } cases[] = {
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (10, 6), }   \n", CLI_F32, 2, 10, 60},
        {2, "{'descr': '<f4', 'fortran_order': False, 'shape': (10, 6), }\n", CLI_F32, 2, 10, 60},
        {3, "{'descr': '<f2', 'fortran_order': False, 'shape': (7,), }\n", CLI_F16, 1, 7, 7},
        {1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 1, 3), }\n", CLI_F64, 3, 2, 6},
        {1, "{\"shape\":(2,3),\"descr\":\"<f4\",\"fortran_order\":False}", CLI_F32, 2, 2, 6},
        {1, "  {'fortran_order':False,'descr':'<f4','shape':(2,3,)}\n", CLI_F32, 2, 2, 6},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", CLI_F32, 0, 0, 1},
        {1, "{'descr': '<f4', 'fortran_order': True, 'shape': (5,), }\n", CLI_F32, 1, 5, 5},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 64), }\n", CLI_F32, 2, 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cli_array array;
        size_t bytes = (size_t)cases[i].count * cli_dtype_size(cases[i].dtype);
        if (open_text(cases[i].version, cases[i].text, bytes, &array) != ATTN_OK) {
            fail_msg("case %zu: %s", i, attn_last_error());
        }
        assert_int_equal(array.dtype, cases[i].dtype);
        assert_int_equal(array.rank, cases[i].rank);
        assert_int_equal(array.count, cases[i].count);
        assert_int_equal(array.rank > 0 ? array.shape[0] : 0, cases[i].first);
        assert_int_equal(array.offset, (cases[i].version == 1 ? 10 : 12) + (int64_t)strlen(cases[i].text));
        /* one byte less or more than the shape says */
        assert_int_equal(open_text(cases[i].version, cases[i].text, bytes + 1, &array), ATTN_EIO);
        assert_non_null(strstr(attn_last_error(), "too long"));
        if (bytes > 0) {
            assert_int_equal(open_text(cases[i].version, cases[i].text, bytes - 1, &array), ATTN_EIO);
            assert_non_null(strstr(attn_last_error(), "cut off"));
        }
    }
}

static void bad_headers(void **state)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }\n", "big-endian"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }\n", "astype('<f4')"},
        {"{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }\n", "'|O'"},
        {"{'descr': '<V2', 'fortran_order': False, 'shape': (2, 3), }\n", "safetensors"},
        {"{'descr': '', 'fortran_order': False, 'shape': (2, 3), }\n", "''"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3), }\n", "records"},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", "ascontiguousarray"},
        {"{'descr': '<f4', 'fortran_order': true, 'shape': (2, 3), }\n", "neither True nor False"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 3), }\n", "negative"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2 3), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (6), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': [2, 3], }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,, 3), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (,), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2.0, 3), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0x2, 3), }\n", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808, 3), }\n", "63 bits"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }\n", "too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807,), }\n", "too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }\n", "8 dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, }\n", "missing"},
        {"{'descr': '<f4', 'shape': (2, 3), }\n", "missing"},
        {"{'fortran_order': False, 'shape': (2, 3), }\n", "missing"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", "twice"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'more': 1}\n", "unknown"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (2, 3), }\n", "comma"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } + {}\n", "follows"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), \n", "quoted"},
        {"{'descr': '<f4, 'fortran_order': False, 'shape': (2, 3), }\n", "bad header"},
        {"{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (2, 3), }\n", "strange"},
        {"__import__('os').system('true')\n", "dictionary"},
        {"", "dictionary"},
        {"\n", "dictionary"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cli_array array;
        assert_int_equal(open_text(1, cases[i].text, 24, &array), ATTN_EIO);
        if (strstr(attn_last_error(), cases[i].says) == NULL) {
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, attn_last_error(), cases[i].says);
        }
    }
}

static attn_status open_bytes(const void *bytes, size_t size)
{
    cli_array array;
    cli_reader reader;
    const char *path = files_path(files_own, "y.npy");
    files_write(path, bytes, size);
    assert_int_equal(cli_reader_open(&reader, path), ATTN_OK);
    attn_status status = cli_npy_open(&reader, &array);
    cli_reader_close(&reader);
    assert_int_equal(unlink(path), 0);
    return status;
}

/* A good file cut at every length, and with every byte of its header changed, is refused or means what it
 * says. */
static void damaged(void **state)
{
    char file[512];
    cli_array array = {.dtype = CLI_F32, .rank = 2, .shape = {3, 5}};
    (void)state;
    assert_true(cli_array_measure(&array));
    size_t header = cli_npy_header(&array, file), size = header + 60;
    memset(file + header, 0, 60);
    assert_int_equal(open_bytes(file, size), ATTN_OK);
    for (size_t cut = 0; cut < size; cut++) {
        assert_int_equal(open_bytes(file, cut), ATTN_EIO);
    }
    for (size_t at = 0; at < header; at++) {
        char old = file[at];
        for (int change = 1; change < 256; change *= 2) {
            file[at] = (char)(old ^ change);
            attn_status status = open_bytes(file, size);
            /* the only harmless changes: white space, the version, and quotes are not among single bits of
             * anything else than spaces */
            assert_true(status == ATTN_EIO || (status == ATTN_OK && (old == ' ' || old == '\n' || at == 6)));
        }
        file[at] = old;
    }
    memcpy(file + 6, "\x04\x00", 2);
    assert_int_equal(open_bytes(file, size), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "version 4.0"));
    memcpy(file + 6, "\x02\x00\xff\xff\xff\xff", 6);
    assert_int_equal(open_bytes(file, size), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "4294967295"));
}

static void written_as_numpy(void **state)
{
    static const struct {
        cli_array array;
        const char *text;
    } cases[] = {
        {{.dtype = CLI_F32, .rank = 2, .shape = {10, 64}},
         "{'descr': '<f4', 'fortran_order': False, 'shape': (10, 64), }"},
        {{.dtype = CLI_F16, .rank = 1, .shape = {3}},
         "{'descr': '<f2', 'fortran_order': False, 'shape': (3,), }"},
        {{.dtype = CLI_F64, .rank = 0}, "{'descr': '<f8', 'fortran_order': False, 'shape': (), }"},
        {{.dtype = CLI_F32, .rank = 4, .shape = {2, 4, 30000, 64}},
         "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 30000, 64), }"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char header[CLI_NPY_HEADER];
        size_t length = strlen(cases[i].text);
        assert_int_equal(cli_npy_header(&cases[i].array, header), 128);
        assert_memory_equal(header, "\x93NUMPY\x01\x00\x76\x00", 10);
        assert_memory_equal(header + 10, cases[i].text, length);
        for (size_t at = 10 + length; at < 127; at++) {
            assert_int_equal(header[at], ' ');
        }
        assert_int_equal(header[127], '\n');
    }
}

static void round_trip(void **state)
{
    uint64_t random = 7;
    (void)state;
    for (int round = 0; round < 500; round++) {
        static const cli_dtype dtypes[] = {CLI_F32, CLI_F16, CLI_F64};
        char file[CLI_NPY_HEADER + 8 * 4096] = "";
        cli_array array = {.dtype = dtypes[files_random(&random) % 3],
                           .rank = (int)(files_random(&random) % 6)};
        for (int i = 0; i < array.rank; i++) {
            array.shape[i] = (int64_t)(files_random(&random) % 6);
        }
        cli_array got;
        cli_reader reader;
        assert_true(cli_array_measure(&array));
        size_t header = cli_npy_header(&array, file);
        size_t bytes = header + (size_t)array.count * cli_dtype_size(array.dtype);
        assert_true(bytes < sizeof file || array.count > 4096);
        if (array.count > 4096) {
            continue;
        }
        const char *path = files_path(files_own, "r.npy");
        files_write(path, file, bytes);
        assert_int_equal(cli_reader_open(&reader, path), ATTN_OK);
        assert_int_equal(cli_npy_open(&reader, &got), ATTN_OK);
        cli_reader_close(&reader);
        unlink(path);
        assert_int_equal(got.dtype, array.dtype);
        assert_int_equal(got.rank, array.rank);
        assert_int_equal(got.offset, header);
        assert_memory_equal(got.shape, array.shape, sizeof array.shape);
    }
}

/* ---- elements ---- */

static double f16_value(unsigned half)
{
    int exponent = (int)(half >> 10 & 31), fraction = (int)(half & 1023);
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return (half & 0x8000u) != 0 ? -size : size;
}

static void every_half(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 65536; i++) {
        uint16_t half = (uint16_t)i, back;
        float wide, top;
        uint32_t bits = i << 16;
        cli_to_f32(&wide, &half, CLI_F16, 1);
        cli_from_f32(&back, CLI_F16, &wide, 1);
        if ((i & 0x7c00u) == 0x7c00u && (i & 1023u) != 0) {
            assert_true(isnan(wide));
            assert_true((back & 0x7c00u) == 0x7c00u && (back & 1023u) != 0);
        } else {
            assert_int_equal(back, half);
            assert_true((i & 0x7fffu) == 0x7c00u ? isinf(wide) : (double)wide == f16_value(i));
        }
        cli_to_f32(&top, &half, CLI_BF16, 1);
        assert_memory_equal(&top, &bits, 4);
        cli_from_f32(&back, CLI_BF16, &top, 1);
        assert_true(isnan(top) ? (back & 0x7f80u) == 0x7f80u && (back & 0x7fu) != 0 : back == half);
    }
}

/* Nearest even: the result is a half whose distance is least, and even when two are equally far. */
static void rounds_to_nearest_even(void **state)
{
    uint64_t random = 3;
    (void)state;
    for (int round = 0; round < 200000; round++) {
        unsigned low = (unsigned)(files_random(&random) % 0x7bff);
        double a = f16_value(low), b = f16_value(low + 1), weight = (double)(files_random(&random) % 17) / 16;
        float x = (float)(a + (b - a) * weight); /* exact: 11 bits and 4 more */
        uint16_t half;
        cli_from_f32(&half, CLI_F16, &x, 1);
        unsigned want = weight < 0.5 || (weight == 0.5 && low % 2 == 0) ? low : low + 1;
        assert_int_equal(half, want);
        uint32_t bits = (low << 16) + (uint32_t)(weight * 16) * 4096;
        memcpy(&x, &bits, 4);
        cli_from_f32(&half, CLI_BF16, &x, 1);
        if (low < 0x7f7f) {
            assert_int_equal(half, want);
        }
    }
    const float huge[] = {65519.996f, 65520.0f, 1e30f, -65520.0f};
    const uint16_t want[] = {0x7bff, 0x7c00, 0x7c00, 0xfc00};
    uint16_t got[4];
    cli_from_f32(got, CLI_F16, huge, 4);
    assert_memory_equal(got, want, sizeof got);
}

static void hash_sees_each_byte(void **state)
{
    unsigned char data[100] = {0};
    uint64_t plain = cli_hash(0, data, sizeof data);
    (void)state;
    for (size_t at = 0; at < sizeof data; at++) {
        data[at] = 1;
        assert_true(cli_hash(0, data, sizeof data) != plain);
        data[at] = 0;
        assert_true(cli_hash(0, data, at) != plain);
    }
    assert_true(cli_hash(1, data, sizeof data) != plain);
}

/* ---- files that appear only when complete ---- */

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static void old_file_stays(void **state)
{
    char text[16] = "";
    cli_writer writer;
    const char *path = files_path(files_own, "out.npy"), *part = files_path(files_own, ".out.npy.part");
    (void)state;
    files_write(path, "old", 3);
    assert_int_equal(cli_writer_open(&writer, path, 100), ATTN_OK);
    assert_true(exists(part));
    assert_int_equal(cli_writer_write(&writer, "new", 3, 0), ATTN_OK);
    cli_writer_close(&writer);
    cli_writer_close(&writer);
    assert_false(exists(part));
    assert_int_equal(files_read(path, text, sizeof text), 3);
    assert_memory_equal(text, "old", 3);
    files_write(part, "left by a killed run", 20);
    assert_int_equal(cli_writer_open(&writer, path, 4), ATTN_OK);
    assert_int_equal(cli_writer_write(&writer, "new!", 4, 0), ATTN_OK);
    assert_int_equal(cli_writer_commit(&writer), ATTN_OK);
    assert_false(exists(part));
    assert_int_equal(pread(writer.fd, text, 4, 0), 4); /* still open for reading back */
    cli_writer_close(&writer);
    assert_int_equal(files_read(path, text, sizeof text), 4);
    assert_memory_equal(text, "new!", 4);
    assert_int_equal(unlink(path), 0);
}

static void unwritable(void **state)
{
    cli_writer writer;
    (void)state;
    assert_int_equal(cli_writer_open(&writer, files_path(files_own, "no/such/out.npy"), 1), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "No such file"));
    assert_int_equal(cli_writer_open(&writer, files_own, 1), ATTN_EIO);
    assert_non_null(strstr(attn_last_error(), "not a regular file"));
    assert_int_equal(cli_writer_open(&writer, "/dev/null", 1), ATTN_EIO);
    assert_int_equal(cli_writer_open(&writer, "", 1), ATTN_EIO);
    cli_reader reader;
    assert_int_equal(cli_reader_open(&reader, files_path(files_own, "missing.npy")), ATTN_EIO);
    assert_int_equal(cli_reader_open(&reader, files_own), ATTN_EIO);
    assert_int_equal(cli_reader_open(&reader, "/dev/null"), ATTN_EIO);
}

static void links_are_followed(void **state)
{
    struct stat about;
    cli_writer writer;
    const char *path = files_path(files_own, "real.npy"), *link = files_path(files_own, "link.npy");
    (void)state;
    files_write(path, "old", 3);
    assert_int_equal(symlink(path, link), 0);
    assert_int_equal(cli_writer_open(&writer, link, 5), ATTN_OK);
    assert_int_equal(cli_writer_commit(&writer), ATTN_OK);
    cli_writer_close(&writer);
    assert_int_equal(lstat(link, &about), 0);
    assert_true(S_ISLNK(about.st_mode));
    assert_int_equal(stat(path, &about), 0);
    assert_int_equal(about.st_size, 5);
    unlink(link);
    unlink(path);
}

/* Two processes never build the same file. */
static void one_writer_at_a_time(void **state)
{
    int status;
    cli_writer writer;
    const char *path = files_path(files_own, "both.npy");
    (void)state;
    assert_int_equal(cli_writer_open(&writer, path, 10), ATTN_OK);
    pid_t child = fork();
    if (child == 0) {
        cli_writer second;
        bool refused = cli_writer_open(&second, path, 10) == ATTN_EIO &&
                       strstr(attn_last_error(), "another process") != NULL;
        _exit(refused ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(exists(files_path(files_own, ".both.npy.part"))); /* the second one did not remove it */
    cli_writer_close(&writer);
}

/* A limit on file sizes stands for a full disk: found when the room is reserved, and nothing is left. */
static void no_room(void **state)
{
    int status;
    const char *path = files_path(files_own, "big.npy");
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        cli_writer writer;
        struct rlimit limit = {1 << 16, 1 << 16};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        bool refused = cli_writer_open(&writer, path, 1 << 20) == ATTN_EIO &&
                       strstr(attn_last_error(), "reserve") != NULL;
        refused = refused && cli_writer_open(&writer, path, 1 << 10) == ATTN_OK &&
                  cli_writer_write(&writer, "x", 1, 1 << 20) == ATTN_EIO;
        cli_writer_close(&writer);
        _exit(refused ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_false(exists(path));
    assert_false(exists(files_path(files_own, ".big.npy.part")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_headers),
        cmocka_unit_test(bad_headers),
        cmocka_unit_test(damaged),
        cmocka_unit_test(written_as_numpy),
        cmocka_unit_test(round_trip),
        cmocka_unit_test(every_half),
        cmocka_unit_test(rounds_to_nearest_even),
        cmocka_unit_test(hash_sees_each_byte),
        cmocka_unit_test(old_file_stays),
        cmocka_unit_test(unwritable),
        cmocka_unit_test(links_are_followed),
        cmocka_unit_test(one_writer_at_a_time),
        cmocka_unit_test(no_room),
    };
    return cmocka_run_group_tests(tests, files_set_up, files_tear_down);
}
