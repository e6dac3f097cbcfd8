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
    X(bf16x3_backward_keys_256, attn__bf16x3_pass)                                                           \
    X(bf16x3_backward_queries_64, attn__bf16x3_pass)                                                         \
    X(bf16x3_backward_queries_128, attn__bf16x3_pass)                                                        \
    X(bf16x3_backward_queries_256, attn__bf16x3_pass)                                                        \
    X(fma_backward_64, attn__fma_backward)                                                                   \
    X(fma_backward_128, attn__fma_backward)                                                                  \
    X(fma_backward_256, attn__fma_backward)                                                                  \
    X(fma_copy, attn__fma_copy)                                                                              \
    X(fma_before, attn__fma_rows)                                                                            \
    X(fma_after, attn__fma_rows)                                                                             \
    X(fma_sum, attn__fma_sum)

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

enum { SHARED = 232448, STACK = 1 << 17, WARPS = 32, CLUSTER = 2 };

struct copy {
    uint32_t to;
    const void *from;
    int bytes, size;
};
struct barrier {
    unsigned arrived = 0, generation = 0, count = 0;
    int64_t bytes = 0; /* expected, less those that are there */
};
struct block {
    unsigned index = 0;
    barrier all, warp[WARPS], named[16];
    std::map<uint32_t, barrier> in_memory; /* by address */
    bool votes = false, vote = false;
    char exchange[WARPS][32 * 64];
};
struct thread {
    ucontext_t context;
    std::vector<char> stack;
    unsigned rank = 0, index = 0; /* of its block in the cluster; in the block */
    bool done = false;
    const unsigned *waits = nullptr; /* while it holds `generation` */
    unsigned generation = 0;
    std::vector<copy> open;
    std::vector<std::vector<copy>> groups;
};

machine_index blockIdx, gridDim;
char (*machine_memory)[];

static char memory[CLUSTER][SHARED] __attribute__((aligned(1024)));
static std::vector<block> blocks; /* of the cluster */
static std::vector<thread> threads;
static ucontext_t scheduler;
static unsigned current;
static unsigned current_rank, current_thread; /* its own */
static barrier cluster_barrier;
static const machine_kernel *running;
static const void *running_params;

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", running->name, what);
    abort();
}
static block &here()
{
    return blocks[current_rank];
}
unsigned machine_thread()
{
    return current_thread;
}
unsigned machine_rank()
{
    return current_rank;
}

/* The end of a phase if all have arrived, threads and bytes. */
static void settle(barrier *b, unsigned count)
{
    if (b->arrived > count) {
        fail("more arrivals at a barrier than it counts");
    }
    if (b->arrived == count && b->bytes == 0) {
        b->arrived = 0;
        b->generation++;
    }
}
static void arrive(barrier *b, unsigned count)
{
    b->arrived++;
    settle(b, count);
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
    meet(&here().all, (unsigned)(threads.size() / blocks.size()));
}
void machine_sync_cluster()
{
    meet(&cluster_barrier, (unsigned)threads.size());
}
bool machine_any(bool value)
{
    block *b = &here();
    b->votes = b->votes || value;
    machine_sync();
    b->vote = b->votes;
    machine_sync();
    b->votes = false;
    machine_sync();
    return b->vote;
}
void machine_sync_warp()
{
    meet(&here().warp[machine_thread() / 32], 32);
}
void machine_sync_some(unsigned id, unsigned count)
{
    meet(&here().named[id], count);
}

/* An address of another block has its rank, and 1, in the highest byte. */
uint32_t machine_remote(uint32_t at, unsigned rank)
{
    return at | (rank + 1) << 24;
}
static unsigned rank_of(uint32_t at)
{
    return at >> 24 > 0 ? (at >> 24) - 1 : machine_rank();
}
char *machine_at(uint32_t at)
{
    return memory[rank_of(at)] + (at & 0xffffffu);
}
static barrier *barrier_at(uint32_t at)
{
    return &blocks[rank_of(at)].in_memory.at(at & 0xffffffu);
}
void machine_barrier_init(uint32_t at, unsigned count)
{
    here().in_memory[at].count = count;
}
void machine_barrier_arrive(uint32_t at, uint32_t bytes)
{
    barrier *b = barrier_at(at);
    b->bytes += bytes;
    arrive(b, b->count);
}
void machine_barrier_bytes(uint32_t at, uint32_t bytes)
{
    barrier *b = barrier_at(at);
    b->bytes -= bytes;
    settle(b, b->count);
}
void machine_barrier_wait(uint32_t at, unsigned parity)
{
    const barrier *b = barrier_at(at);
    if (b->generation % 2 == parity) {
        wait_while(b, b->generation);
    }
}
const char *machine_exchange(const void *mine, size_t bytes)
{
    char *slots = here().exchange[machine_thread() / 32];
    memcpy(slots + machine_thread() % 32 * 64, mine, bytes);
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
            memset(machine_at(c.to), 0, (size_t)c.size);
            if (c.bytes > 0) {
                memcpy(machine_at(c.to), c.from, (size_t)c.bytes);
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

static void go_on(unsigned i)
{
    current = i;
    current_rank = threads[i].rank, current_thread = threads[i].index;
    blockIdx.x = here().index;
    machine_memory = reinterpret_cast<char(*)[]>(memory[current_rank]);
    swapcontext(&scheduler, &threads[i].context);
}

/* `count` threads of each block from `first` on. */
static void open_cluster(unsigned first, unsigned cluster, unsigned count)
{
    threads = std::vector<thread>(count * cluster);
    blocks = std::vector<block>(cluster);
    cluster_barrier = barrier();
    memset(memory, 0xff, sizeof memory);
    for (unsigned i = 0; i < cluster; i++) {
        blocks[i].index = first + i;
    }
    for (unsigned i = 0; i < threads.size(); i++) {
        thread &t = threads[i];
        t.rank = i / count, t.index = i % count;
        t.stack.resize(STACK);
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = STACK;
        t.context.uc_link = nullptr;
        makecontext(&t.context, begin_thread, 0);
    }
}

/* All threads in turn until all are done; the order changes, the same way each time.  Threads that wait for
 * one that is done would wait for ever on a GPU. */
static void run_cluster(unsigned first, unsigned cluster, unsigned count)
{
    std::vector<unsigned> order;
    open_cluster(first, cluster, count);
    for (unsigned i = 0; i < threads.size(); i++) {
        order.push_back(i);
    }
    uint64_t state = 1;
    for (bool alive = true; alive;) {
        alive = false;
        for (size_t i = order.size() - 1; i > 0; i--) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            std::swap(order[i], order[(state >> 33) % (i + 1)]);
        }
        for (unsigned i : order) {
            const thread &t = threads[i];
            if (!t.done && (t.waits == nullptr || *t.waits != t.generation)) {
                alive = true;
                go_on(i);
            }
        }
    }
    for (const thread &t : threads) {
        if (!t.done) {
            fail("a thread waits at a barrier that others never reach");
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

void machine_run(const machine_kernel *kernel, unsigned grid, unsigned block, unsigned cluster,
                 const void *params)
{
    running = kernel;
    running_params = params;
    gridDim.x = grid;
    if (cluster > CLUSTER || grid % cluster != 0) {
        fail("the grid is not of whole clusters");
    }
    for (unsigned first = 0; first < grid; first += cluster) {
        run_cluster(first, cluster, block);
    }
}
