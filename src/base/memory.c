/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - all heap memory of the library: aligned, counted, and made to fail on request.
 *
 * Each allocation carries a 64-byte head that holds its size, so that freeing can count it back and the
 * caller's part stays on a cache line.  Counters are atomic: plans may be created by several threads.
 *
 * Blocks of half a huge page or more lie on whole ones, where the system has them to give: kernels whose
 * scratch fills the second-level cache would else miss in the TLB, too (docs/perf/cpu_amx_backward.md).  What
 * the last page adds is not counted.
 *
 * Of workspaces on huge pages one is kept for the next: the system clears what it gives, and 2 MiB take it a
 * tenth of a millisecond, which a call that needs its workspace for less than ten would pay each time.  Only
 * workspaces, which live as long as a call: what lives longer would hold a block larger than it needs.
 */
#define _DEFAULT_SOURCE /* madvise */

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/base.h"

enum { HEAD = 64, HUGE_PAGE = 2 * 1024 * 1024, KEPT_MOST = 256 * 1024 * 1024 };

/* At the begin of each allocation. */
typedef struct head {
    size_t room;  /* bytes behind the head, counted */
    size_t whole; /* bytes on huge pages, with the head; 0: none */
} head;

static atomic_size_t bytes_now;
static atomic_size_t bytes_peak;
static atomic_int_least64_t fail_after = -1;
static _Atomic(head *) kept; /* a workspace, or NULL */

static bool fails_now(void)
{
    int64_t left = atomic_load(&fail_after);
    while (left >= 0) {
        if (atomic_compare_exchange_weak(&fail_after, &left, left - 1)) {
            return left == 0;
        }
    }
    return false;
}

static void count_in(size_t bytes)
{
    size_t now = atomic_fetch_add(&bytes_now, bytes) + bytes;
    size_t peak = atomic_load(&bytes_peak);
    while (now > peak && !atomic_compare_exchange_weak(&bytes_peak, &peak, now)) {
    }
}

/* `bytes` on HEAD's boundary, on huge pages if that is worth it; or NULL. */
static head *take(size_t bytes)
{
    const bool huge = bytes >= HUGE_PAGE / 2;
    const size_t whole = huge ? (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : 0;
    head *memory = huge ? aligned_alloc(HUGE_PAGE, whole) : aligned_alloc(HEAD, bytes);
    if (memory == NULL) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (huge) {
        (void)madvise(memory, whole, MADV_HUGEPAGE); /* small pages do, too */
    }
#endif
    memory->whole = whole;
    return memory;
}

/* The same, or what is kept. */
static head *take_kept(size_t bytes)
{
    head *memory = bytes >= HUGE_PAGE / 2 ? atomic_exchange(&kept, NULL) : NULL;
    if (memory != NULL && memory->whole >= bytes) {
        return memory;
    }
    free(memory);
    return take(bytes);
}

static void *allocate(size_t bytes, head *(*from)(size_t))
{
    size_t room = bytes == 0 ? HEAD : (bytes + HEAD - 1) / HEAD * HEAD;
    head *memory = NULL;
    if (bytes <= SIZE_MAX / 2 && !fails_now()) {
        memory = from(room + HEAD);
    }
    if (memory == NULL) {
        (void)attn__fail(ATTN_ENOMEM, "no memory for %zu bytes; use more workers or a memory limit", bytes);
        return NULL;
    }
    memory->room = room;
    count_in(room);
    return (char *)memory + HEAD;
}

void *attn__alloc(size_t bytes)
{
    return allocate(bytes, take);
}

void *attn__alloc_workspace(size_t bytes)
{
    return allocate(bytes, take_kept);
}

void *attn__alloc_zero(size_t bytes)
{
    void *memory = attn__alloc(bytes);
    if (memory != NULL) {
        memset(memory, 0, bytes);
    }
    return memory;
}

void *attn__alloc_array(int64_t count, size_t size)
{
    if (count < 0 || (size > 0 && (uint64_t)count > SIZE_MAX / 2 / size)) {
        (void)attn__fail(ATTN_ENOMEM, "an array of %lld elements of %zu bytes overflows", (long long)count,
                         size);
        return NULL;
    }
    return attn__alloc((size_t)count * size);
}

char *attn__strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = attn__alloc(bytes);
    if (copy != NULL) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

/* Counted back; its head, or NULL. */
static head *head_of(void *memory)
{
    if (memory == NULL) {
        return NULL;
    }
    head *begin = (head *)(void *)((char *)memory - HEAD);
    atomic_fetch_sub(&bytes_now, begin->room);
    return begin;
}

void attn__free(void *memory)
{
    free(head_of(memory));
}

void attn__free_workspace(void *memory)
{
    head *begin = head_of(memory);
    const bool keep = begin != NULL && begin->whole > 0 && begin->whole <= KEPT_MOST;
    free(keep ? atomic_exchange(&kept, begin) : begin);
}

size_t attn__memory_now(void)
{
    return atomic_load(&bytes_now);
}

size_t attn__memory_peak(void)
{
    return atomic_load(&bytes_peak);
}

void attn__memory_fail_after(int64_t count)
{
    atomic_store(&fail_after, count);
}

bool attn__mul(int64_t a, int64_t b, int64_t *product)
{
    if (a != 0 && b > INT64_MAX / a) {
        return false;
    }
    *product = a * b;
    return true;
}

bool attn__add(int64_t a, int64_t b, int64_t *sum)
{
    if (a > INT64_MAX - b) {
        return false;
    }
    *sum = a + b;
    return true;
}
