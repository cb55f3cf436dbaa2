/* SPDX-License-Identifier: Apache-2.0 */
#include "emulator.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"
#include "fiber.h"

__thread emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

__thread Place place;

namespace {

constexpr int LANES = 32, MOST_THREADS = 1024, MOST_CLUSTER = 16;
constexpr int BARRIERS =
    FIRST_GROUP_BARRIER + MOST_THREADS / GROUP_THREADS + 1; /* the last one: clusters of one block */
constexpr size_t STACK_BYTES = 128 << 10;
constexpr int MOST_PENDING = 8; /* kernels that have not run yet */

/* ---- threads, warps and blocks --------------------------------------------------------------- */

struct Copy {
    void *to;
    const void *from;
    int bytes, group;
};

struct Thread {
    Fiber fiber;
    bool ended;
    const unsigned *word; /* not NULL: the thread waits until this word is no longer `seen` */
    unsigned seen;
    std::vector<Copy> copies; /* that have not been done */
    int groups;               /* of copies that have been ended */
    unsigned cluster_arrivals;
};

/* An exchange of values among the lanes of one mask. Two sets of values are used in turns, because one lane may still
 * read those of one exchange when another has come to the next. */
struct Exchange {
    unsigned mask, arrived, generation;
    uint64_t values[2][LANES];
};
struct Warp {
    unsigned running; /* lanes that have not ended */
    std::vector<std::unique_ptr<Exchange>> exchanges;
};
struct Barrier {
    int arrived, wanted; /* threads; wanted: 0 for all that have not ended */
    unsigned generation;
};

struct Cluster {
    unsigned blocks;
    char *shared[MOST_CLUSTER];
    std::atomic<unsigned> arrived{0}, expected{0}; /* in all; expected: threads of all its blocks */
    std::atomic<int> ended{0};
    std::mutex mutex;
    std::condition_variable changed;
};

struct Launched;

/* A block while it runs, on the operating system thread that runs it. */
struct Block {
    Launched *launched;
    unsigned index;
    Cluster *cluster;
    int threads, running, current;
    bool progress;          /* since the scheduler's last round, a thread has ended or passed a barrier */
    bool triggered, waited; /* a thread has called start_next_kernel; wait_for_previous_kernel */
    Barrier barriers[BARRIERS];
    std::vector<Warp> warps;
};

/* A grid that was launched. */
struct Launched {
    Grid grid;
    unsigned blocks;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> taken; /* blocks that somebody runs or has run */
    unsigned next = 0;       /* all blocks before it are taken */
    unsigned ended = 0;
    bool may_pass = true;           /* wait_for_previous_kernel returns */
    int early = 0;                  /* blocks that were started before the previous kernel */
    int parked = 0;                 /* of these, that wait for it */
    int untriggered = 0;            /* of these, that have not called start_next_kernel */
    std::atomic<bool> stuck{false}; /* a block waits for another one, which may not have started */
    std::vector<std::unique_ptr<Cluster>> clusters;

    bool passes() {
        std::lock_guard<std::mutex> lock(mutex);
        return may_pass;
    }
};

/* What one operating system thread needs to run blocks. */
struct Runner {
    Block block;
    Context scheduler;
    std::vector<Thread> threads;
    char *stacks;

    Runner() : threads(MOST_THREADS) {
        stacks = static_cast<char *>(mmap(nullptr, MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    }
    ~Runner() {
        munmap(stacks, MOST_THREADS * STACK_BYTES);
    }
};
thread_local Runner *runner;

Thread &own_thread() {
    return runner->threads[runner->block.current];
}

void switch_to_scheduler() {
    switch_context(own_thread().fiber.context, runner->scheduler);
}

/* Waits until another thread has changed the word. */
void wait_while(const unsigned &word, unsigned seen) {
    Thread &thread = own_thread();
    thread.word = &word;
    thread.seen = seen;
    while (word == seen)
        switch_to_scheduler();
    thread.word = nullptr;
}

/* Releases the threads that wait at a barrier, if all have arrived. */
void look_at(Block &block, Barrier &barrier) {
    if (barrier.arrived == 0 || barrier.arrived < (barrier.wanted ? barrier.wanted : block.running))
        return;
    barrier.arrived = 0;
    barrier.generation++;
    block.progress = true;
}

/* The same for an exchange between lanes. */
void look_at(Block &block, const Warp &warp, Exchange &all) {
    if (all.arrived == 0 || (all.mask & warp.running & ~all.arrived) != 0)
        return;
    for (int i = 0; i < LANES; i++)
        if (!(all.arrived >> i & 1))
            all.values[all.generation % 2][i] = NO_VALUE;
    all.arrived = 0;
    all.generation++;
    block.progress = true;
}

void enter_thread() {
    Block &block = runner->block;
    block.launched->grid.kernel();
    Warp &warp = block.warps[block.current / LANES];
    own_thread().ended = true;
    block.progress = true;
    block.running--;
    warp.running &= ~(1u << block.current % LANES);
    for (Barrier &barrier : block.barriers)
        look_at(block, barrier);
    for (const auto &all : warp.exchanges)
        look_at(block, warp, *all);
    for (;;) /* never resumed */
        switch_to_scheduler();
}

void set_place(int thread) {
    const Index size = blockDim;
    const unsigned t = static_cast<unsigned>(thread);
    threadIdx = {t % size.x, t / size.x % size.y, t / (size.x * size.y)};
    place.lane = t % LANES;
}

/* The order in which the threads of a block run between two barriers; RAFTER_EMULATOR_ORDER=backward reverses it. */
bool runs_backward() {
    static const bool backward = [] {
        const char *const order = getenv("RAFTER_EMULATOR_ORDER");
        return order && strcmp(order, "backward") == 0;
    }();
    return backward;
}

/* Runs each thread once, up to where it waits. Returns whether any of them made progress. */
bool run_threads(Block &block) {
    block.progress = false;
    for (int i = 0; i < block.threads; i++) {
        const int t = runs_backward() ? block.threads - 1 - i : i;
        const Thread &thread = runner->threads[t];
        if (thread.ended || (thread.word && *thread.word == thread.seen))
            continue;
        block.current = t;
        set_place(t);
        switch_context(runner->scheduler, runner->threads[t].fiber.context);
    }
    return block.progress;
}

/* Suspends a block of an early kernel, all of whose threads wait for the previous kernel. */
void park(Block &block) {
    Launched &launched = *block.launched;
    std::unique_lock<std::mutex> lock(launched.mutex);
    launched.parked++;
    launched.untriggered += !block.triggered;
    launched.changed.notify_all();
    launched.changed.wait(lock, [&] { return launched.may_pass; });
    launched.parked--;
}

void start_block(Block &block, Launched &launched, unsigned index, Cluster *cluster) {
    const dim3 size = launched.grid.threads, grid = launched.grid.blocks;
    block.launched = &launched;
    block.index = index;
    block.cluster = cluster;
    block.threads = block.running = static_cast<int>(size.x * size.y * size.z);
    block.triggered = block.waited = false;
    memset(block.barriers, 0, sizeof block.barriers);
    block.warps.clear();
    block.warps.resize((block.threads + LANES - 1) / LANES);
    blockIdx = {index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
    blockDim = {size.x, size.y, size.z};
    gridDim = {grid.x, grid.y, grid.z};
    place.cluster_blocks = launched.grid.cluster;
    place.cluster_rank = index % launched.grid.cluster;
    for (int t = 0; t < block.threads; t++) {
        Thread &thread = runner->threads[t];
        thread.ended = false;
        thread.word = nullptr;
        thread.copies.clear();
        thread.groups = 0;
        thread.cluster_arrivals = 0;
        thread.fiber.start(runner->stacks + t * STACK_BYTES, STACK_BYTES, enter_thread);
        block.warps[t / LANES].running |= 1u << t % LANES;
    }
    char *const shared = launched.grid.shared();
    memset(shared, 0xff, launched.grid.shared_bytes + EMULATED_GUARD_BYTES);
    if (cluster) {
        std::unique_lock<std::mutex> lock(cluster->mutex);
        cluster->shared[place.cluster_rank] = shared;
        cluster->expected += static_cast<unsigned>(block.threads);
        if (cluster->expected == cluster->blocks * static_cast<unsigned>(block.threads))
            cluster->changed.notify_all();
        cluster->changed.wait(
            lock, [&] { return cluster->expected == cluster->blocks * static_cast<unsigned>(block.threads); });
    }
}

void end_block(Block &block) {
    if (block.launched->grid.overlaps && block.index == 0 && !block.waited)
        fail("a kernel that may start before the one before it has ended does not wait for it");
    const char *const guard = block.launched->grid.shared() + block.launched->grid.shared_bytes;
    for (int i = 0; i < EMULATED_GUARD_BYTES; i++)
        if (guard[i] != static_cast<char>(0xff))
            fail("a kernel has written past its dynamic shared memory");
    if (block.cluster) { /* others may use its shared memory until they have ended too */
        std::unique_lock<std::mutex> lock(block.cluster->mutex);
        block.cluster->ended++;
        block.cluster->changed.notify_all();
        block.cluster->changed.wait(lock,
                                    [&] { return block.cluster->ended == static_cast<int>(block.cluster->blocks); });
    }
}

void run_block(Launched &launched, unsigned index, Cluster *cluster) {
    typedef std::chrono::steady_clock Clock;
    constexpr std::chrono::milliseconds STUCK(2), HUNG(120000);
    static thread_local Runner own;
    runner = &own;
    Block &block = own.block;
    start_block(block, launched, index, cluster);
    bool waits = false;
    Clock::time_point since;
    while (block.running > 0) {
        if (run_threads(block)) {
            waits = false;
            continue;
        }
        if (!waits)
            since = Clock::now();
        waits = true;
        if (!launched.passes()) {
            park(block);
            waits = false;
            continue;
        }
        if (Clock::now() - since > STUCK)
            launched.stuck = true;
        if (Clock::now() - since > HUNG)
            fail("a block waits for ever");
        sched_yield();
    }
    end_block(block);
    std::lock_guard<std::mutex> lock(launched.mutex);
    launched.ended++;
    launched.changed.notify_all();
}

/* ---- operating system threads that run blocks ------------------------------------------------ */

struct Pool {
    std::mutex mutex;
    std::condition_variable given;
    std::deque<std::function<void()>> jobs;
    int idle = 0;

    /* Runs it at once, on a thread of its own. */
    void run(std::function<void()> job) {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(std::move(job));
        if (idle >= static_cast<int>(jobs.size())) {
            given.notify_one();
            return;
        }
        std::thread([this] {
            std::unique_lock<std::mutex> own(mutex);
            for (;;) {
                idle++;
                given.wait(own, [&] { return !jobs.empty(); });
                idle--;
                const std::function<void()> next = std::move(jobs.front());
                jobs.pop_front();
                own.unlock();
                next();
                own.lock();
            }
        }).detach();
    }
};
Pool &pool() {
    static Pool *const all = new Pool; /* never deleted: its threads outlive main */
    return *all;
}

/* Runs a cluster of blocks, or one block if there are no clusters, from `first` on. */
void start_blocks(const std::shared_ptr<Launched> &shared, unsigned first) {
    Launched &launched = *shared;
    const unsigned count = launched.grid.cluster;
    Cluster *cluster = nullptr;
    if (count > 1) {
        launched.clusters.push_back(std::make_unique<Cluster>());
        cluster = launched.clusters.back().get();
        cluster->blocks = count;
    }
    for (unsigned i = 0; i < count; i++)
        pool().run([shared, first, i, cluster] { run_block(*shared, first + i, cluster); });
}

/* Takes the next cluster or block that nobody runs; false: there is none. */
bool take(Launched &launched, unsigned *first) {
    std::lock_guard<std::mutex> lock(launched.mutex);
    const unsigned count = launched.grid.cluster;
    while (launched.next < launched.blocks && launched.taken[launched.next])
        launched.next += count;
    *first = launched.next;
    if (launched.next >= launched.blocks)
        return false;
    for (unsigned i = 0; i < count; i++)
        launched.taken[launched.next + i] = true;
    return true;
}

/* ---- kernels that have not run --------------------------------------------------------------- */

std::mutex queue_mutex;
std::deque<std::shared_ptr<Launched>> queue;

void wait_for_ended(Launched &launched, unsigned count) {
    std::unique_lock<std::mutex> lock(launched.mutex);
    launched.changed.wait(lock, [&] { return launched.ended >= count; });
}

/* Runs the blocks of a kernel that have not been run. */
void complete(const std::shared_ptr<Launched> &shared) {
    Launched &launched = *shared;
    {
        std::lock_guard<std::mutex> lock(launched.mutex);
        launched.may_pass = true;
        launched.changed.notify_all();
    }
    unsigned first;
    if (launched.grid.cooperative) {
        while (take(launched, &first))
            start_blocks(shared, first);
    } else if (launched.grid.cluster > 1) {
        wait_for_ended(launched, static_cast<unsigned>(launched.early));
        while (take(launched, &first)) {
            const unsigned before = launched.ended;
            start_blocks(shared, first);
            wait_for_ended(launched, before + launched.grid.cluster);
        }
    } else {
        /* One block after the other; more at a time if one waits for another. */
        constexpr int MOST_AT_ONCE = 1024;
        int workers = 0;
        std::unique_lock<std::mutex> lock(launched.mutex);
        while (launched.ended < launched.blocks) {
            if (workers == 0 || (launched.stuck && workers < MOST_AT_ONCE)) {
                launched.stuck = false;
                workers++;
                pool().run([shared] {
                    unsigned mine;
                    while (take(*shared, &mine))
                        run_block(*shared, mine, nullptr);
                });
            }
            launched.changed.wait_for(lock, std::chrono::milliseconds(1),
                                      [&] { return launched.ended >= launched.blocks; });
        }
    }
    wait_for_ended(launched, launched.blocks);
}

void finish_first() {
    complete(queue.front());
    queue.pop_front();
}

void finish_queue() {
    while (!queue.empty())
        finish_first();
}

/* Runs a few blocks of a kernel up to where they wait for the kernel before it, which has not run. */
void start_early(const std::shared_ptr<Launched> &shared) {
    Launched &launched = *shared;
    launched.may_pass = false;
    std::vector<unsigned> firsts = {0};
    if (launched.grid.cluster == 1 && launched.blocks > 1)
        firsts.push_back(launched.blocks - 1);
    launched.early = static_cast<int>(firsts.size() * launched.grid.cluster);
    for (const unsigned first : firsts) {
        for (unsigned i = 0; i < launched.grid.cluster; i++)
            launched.taken[first + i] = true;
        start_blocks(shared, first);
    }
    std::unique_lock<std::mutex> lock(launched.mutex);
    launched.changed.wait(lock, [&] { return launched.parked + static_cast<int>(launched.ended) >= launched.early; });
}

} // namespace

void fail(const char *what) {
    fprintf(stderr, "emulator: %s (block %u of %u, thread %u of %u)\n", what, blockIdx.x, gridDim.x, threadIdx.x,
            blockDim.x);
    abort();
}

void launch(Grid grid) {
    const auto launched = std::make_shared<Launched>();
    launched->blocks = grid.blocks.x * grid.blocks.y * grid.blocks.z;
    launched->taken.resize(launched->blocks);
    launched->grid = std::move(grid);
    std::lock_guard<std::mutex> lock(queue_mutex);
    if (!launched->grid.overlaps || queue.empty() || queue.back()->grid.stream != launched->grid.stream ||
        queue.size() >= MOST_PENDING) {
        finish_queue();
    } else {
        /* A kernel may start when all blocks of the previous one have called start_next_kernel or ended. If some
         * block of that one does so only after its own wait, all earlier kernels must have ended. */
        if (queue.back()->untriggered > 0)
            while (queue.size() > 1)
                finish_first();
        start_early(launched);
    }
    queue.push_back(launched);
}

void finish() {
    std::lock_guard<std::mutex> lock(queue_mutex);
    finish_queue();
}

/* ---- what kernels call ----------------------------------------------------------------------- */

void yield() {
    switch_to_scheduler();
}

void passed() {
    runner->block.progress = true;
}

void sync_threads(int number, int threads) {
    Block &block = runner->block;
    Barrier &barrier = block.barriers[number];
    const unsigned generation = barrier.generation;
    barrier.wanted = threads;
    barrier.arrived++;
    look_at(block, barrier);
    wait_while(barrier.generation, generation);
}

const uint64_t *exchange(unsigned mask, uint64_t value) {
    Block &block = runner->block;
    const unsigned own = 1u << place.lane;
    Warp &warp = block.warps[block.current / LANES];
    if (!(mask & own))
        fail("a thread is not in the mask that it names");
    Exchange *all = nullptr;
    for (const auto &one : warp.exchanges)
        if (one->mask == mask)
            all = one.get();
    if (!all) {
        warp.exchanges.push_back(std::make_unique<Exchange>());
        all = warp.exchanges.back().get();
        all->mask = mask;
    }
    const unsigned generation = all->generation;
    uint64_t(&values)[LANES] = all->values[generation % 2];
    values[place.lane] = value;
    all->arrived |= own;
    look_at(block, warp, *all);
    wait_while(all->generation, generation);
    return values;
}

void cluster_arrive() {
    runner->block.cluster ? (void)runner->block.cluster->arrived++ : (void)0;
    own_thread().cluster_arrivals++;
}

void cluster_wait() {
    Cluster *const cluster = runner->block.cluster;
    if (!cluster)
        return sync_threads(BARRIERS - 1, 0);
    const unsigned wanted = own_thread().cluster_arrivals * cluster->expected;
    while (cluster->arrived < wanted)
        switch_to_scheduler();
    runner->block.progress = true;
}

void *in_cluster(const void *shared, unsigned rank) {
    const Block &block = runner->block;
    char *const address = static_cast<char *>(const_cast<void *>(shared));
    if (!block.cluster)
        return address;
    return block.cluster->shared[rank] + (address - block.cluster->shared[place.cluster_rank]);
}

void start_next_kernel() {
    runner->block.triggered = true;
}

void wait_for_previous_kernel() {
    Launched &launched = *runner->block.launched;
    runner->block.waited = true;
    while (!launched.passes())
        switch_to_scheduler();
}

void copy_async(void *to, const void *from, int bytes) {
    own_thread().copies.push_back({to, from, bytes, own_thread().groups});
}

void copy_commit() {
    own_thread().groups++;
}

void copy_wait(int groups) {
    Thread &thread = own_thread();
    const int before = thread.groups - groups;
    auto rest = thread.copies.begin();
    for (; rest != thread.copies.end() && rest->group < before; ++rest)
        memcpy(rest->to, rest->from, static_cast<size_t>(rest->bytes));
    thread.copies.erase(thread.copies.begin(), rest);
}

} // namespace emulator

int __syncthreads_or(int predicate) {
    static thread_local int any[2]; /* in turns: see Exchange */
    static thread_local int turn;
    emulator::sync_threads(0, 0);
    if (threadIdx.x == 0 && threadIdx.y == 0)
        turn ^= 1, any[turn] = 0;
    emulator::sync_threads(0, 0);
    any[turn] |= predicate != 0;
    emulator::sync_threads(0, 0);
    return any[turn];
}
