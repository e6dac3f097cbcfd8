/* SPDX-License-Identifier: Apache-2.0 */
/* machine.cpp - see machine.h. */
#include <algorithm>
#include <map>
#include <vector>

#include <ucontext.h>

#include "machine.h"

#define KERNELS(X)                                                                                           \
    X(fma_forward_64, attn__fma_forward)                                                                     \
    X(fma_forward_128, attn__fma_forward)                                                                    \
    X(fma_forward_256, attn__fma_forward)                                                                    \
    X(fma_forward_512, attn__fma_forward)                                                                    \
    X(bf16x3_forward_64, attn__fma_forward)                                                                  \
    X(bf16x3_forward_128, attn__fma_forward)                                                                 \
    X(bf16x3_forward_256, attn__fma_forward)                                                                 \
    X(bf16x3_parts, attn__bf16x3_parts)                                                                      \
    X(bf16x3_backward_keys_64, attn__bf16x3_pass)                                                            \
    X(bf16x3_backward_keys_128, attn__bf16x3_pass)                                                           \
    X(bf16x3_backward_queries_64, attn__bf16x3_pass)                                                         \
    X(bf16x3_backward_queries_128, attn__bf16x3_pass)                                                        \
    X(fma_backward_64, attn__fma_backward)                                                                   \
    X(fma_backward_128, attn__fma_backward)                                                                  \
    X(fma_backward_256, attn__fma_backward)                                                                  \
    X(fma_copy, attn__fma_copy)                                                                              \
    X(fma_before, attn__fma_rows)                                                                            \
    X(fma_after, attn__fma_rows)

#define DECLARE(name, type)                                                                                  \
    extern "C" void name(type);                                                                              \
    static void run_##name(const void *params)                                                               \
    {                                                                                                        \
        name(*(const type *)params);                                                                         \
    }
KERNELS(DECLARE)

struct machine_kernel {
    const char *name;
    void (*run)(const void *params);
};
static const machine_kernel kernels[] = {
#define ROW_OF(name, type) {#name, run_##name},
    KERNELS(ROW_OF)};

enum { SHARED = 232448, STACK = 1 << 17, WARPS = 32 };

struct copy {
    uint32_t to;
    const void *from;
    int bytes, size;
};
struct thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    const unsigned *waits = nullptr; /* while it holds `generation` */
    unsigned generation = 0;
    std::vector<copy> open;
    std::vector<std::vector<copy>> groups;
};
struct barrier {
    unsigned arrived = 0, generation = 0, count = 0;
};

machine_index blockIdx, gridDim;
char shared[SHARED] __attribute__((aligned(1024)));

static std::vector<thread> threads;
static ucontext_t scheduler;
static unsigned current;
static barrier block_barrier, warp_barrier[WARPS], named_barrier[16];
static std::map<uint32_t, barrier> shared_barrier; /* by address */
static bool votes, vote;
static char exchange[WARPS][32 * 64];
static const machine_kernel *running;
static const void *running_params;

unsigned machine_thread()
{
    return current;
}

static void arrive(barrier *b, unsigned count)
{
    if (++b->arrived == count) {
        b->arrived = 0;
        b->generation++;
    }
}
/* until it is not `generation` any more */
static void wait_while(const barrier *b, unsigned generation)
{
    if (b->generation == generation) {
        threads[current].waits = &b->generation;
        threads[current].generation = generation;
        swapcontext(&threads[current].context, &scheduler);
    }
}
static void meet(barrier *b, unsigned count)
{
    const unsigned generation = b->generation;
    arrive(b, count);
    wait_while(b, generation);
}
void machine_sync()
{
    meet(&block_barrier, (unsigned)threads.size());
}
bool machine_any(bool value)
{
    votes = votes || value;
    machine_sync();
    vote = votes;
    machine_sync();
    votes = false;
    machine_sync();
    return vote;
}
void machine_sync_warp()
{
    meet(&warp_barrier[current / 32], 32);
}
void machine_sync_some(unsigned id, unsigned count)
{
    meet(&named_barrier[id], count);
}
void machine_barrier_init(uint32_t at, unsigned count)
{
    shared_barrier[at].count = count;
}
void machine_barrier_arrive(uint32_t at)
{
    arrive(&shared_barrier.at(at), shared_barrier.at(at).count);
}
void machine_barrier_wait(uint32_t at, unsigned parity)
{
    const barrier *b = &shared_barrier.at(at);
    if (b->generation % 2 == parity) {
        wait_while(b, b->generation);
    }
}
const char *machine_exchange(const void *mine, size_t bytes)
{
    char *slots = exchange[current / 32];
    memcpy(slots + current % 32 * 64, mine, bytes);
    machine_sync_warp();
    return slots;
}

void machine_copy(uint32_t to, const void *from, int bytes, int size)
{
    threads[current].open.push_back({to, from, bytes, size});
}
void machine_commit()
{
    threads[current].groups.push_back(std::move(threads[current].open));
    threads[current].open.clear();
}
void machine_wait(size_t groups)
{
    std::vector<std::vector<copy>> &waiting = threads[current].groups;
    while (waiting.size() > groups) {
        for (const copy &c : waiting.front()) {
            memset(shared + c.to, 0, (size_t)c.size);
            if (c.bytes > 0) {
                memcpy(shared + c.to, c.from, (size_t)c.bytes);
            }
        }
        waiting.erase(waiting.begin());
    }
}

static void begin_thread()
{
    running->run(running_params);
    threads[current].done = true;
    swapcontext(&threads[current].context, &scheduler);
}

/* All threads in turn until all are done; the order changes, the same way each time.  Threads that wait for
 * one that is done would wait for ever on a GPU. */
static void run_block(unsigned count)
{
    threads = std::vector<thread>(count);
    std::vector<unsigned> order;
    memset(shared, 0xff, sizeof shared);
    shared_barrier.clear();
    for (unsigned i = 0; i < count; i++) {
        thread &t = threads[i];
        t.stack.resize(STACK);
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = STACK;
        t.context.uc_link = nullptr;
        makecontext(&t.context, begin_thread, 0);
        order.push_back(i);
    }
    uint64_t state = 1;
    for (bool alive = true; alive;) {
        alive = false;
        for (size_t i = count - 1; i > 0; i--) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            std::swap(order[i], order[(state >> 33) % (i + 1)]);
        }
        for (unsigned i : order) {
            const thread &t = threads[i];
            if (!t.done && (t.waits == nullptr || *t.waits != t.generation)) {
                alive = true;
                current = i;
                swapcontext(&scheduler, &threads[i].context);
            }
        }
    }
    for (const thread &t : threads) {
        if (!t.done) {
            fprintf(stderr, "%s: a thread waits at a barrier that others never reach\n", running->name);
            abort();
        }
    }
}

const machine_kernel *machine_find(const char *name)
{
    for (const machine_kernel &kernel : kernels) {
        if (strcmp(kernel.name, name) == 0) {
            return &kernel;
        }
    }
    return nullptr;
}

void machine_run(const machine_kernel *kernel, unsigned grid, unsigned block, const void *params)
{
    running = kernel;
    running_params = params;
    gridDim.x = grid;
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = i;
        run_block(block);
    }
}
