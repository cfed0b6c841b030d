// Runs a kernel's blocks one after the other, with the threads of a block as fibres, and fails a launch with a message
// where a GPU would hang or be left to chance:
//
//   * a barrier, or a collective of a warp, that not every thread it is for comes to;
//   * two threads that use the same byte of shared memory, one of them to write, with no barrier between, whatever came
//     of it. A kernel built with -fsanitize=thread reports its accesses to the functions `__tsan_*` below, which stand
//     in for that sanitizer's own library. Built with other sanitizers, it is held to its results alone.
//
// A fibre runs until it waits. The order of blocks and threads is the launch's: ascending, descending, or shuffled
// anew behind every barrier. Shared memory is full of random bits when a block starts, and ends at the launch's size.

#include <link.h>
#include <ucontext.h>

#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_builtins.h"

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t MOST_SHARED = 48 << 10;  // that a launch gets without a word to the driver
constexpr unsigned MOST_THREADS = 1024;

dim3 threadIdx, blockIdx, blockDim, gridDim;

// The kernels' dynamic shared memory: `extern __shared__ T shared[]`.
alignas(16) thread_local unsigned char shared[MOST_SHARED];

extern "C" {
void call_kernel(void** arguments);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace {

enum State { READY, WAITING, RETURNED };

struct Thread {
    int id;
    dim3 index;
    State state;
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};

    // What it waits at; a mask of 0 is the whole block.
    const char* name;
    int line;
    unsigned mask;
    uint64_t value;
    uint64_t values[WARP];  // of its warp, once they have met
    int holding;            // predicates of the block that hold, once it has met

    bool with(const Thread& other) const {
        return state == WAITING && other.state == WAITING && line == other.line && mask == other.mask &&
               std::strcmp(name, other.name) == 0;
    }
    std::string where() const {
        const std::string who = "thread " + std::to_string(id);
        return state == RETURNED ? who + " has returned" : who + " waits at " + name + ", line " + std::to_string(line);
    }
};

std::vector<Thread> pool;
int block_size;
Thread* running;
ucontext_t scheduler;
std::string failure;
void** kernel_arguments;
std::mt19937 random_bits;
unsigned order;

void leave() { swapcontext(&running->context, &scheduler); }

[[noreturn]] void fail_thread(const std::string& reason) {
    failure = reason;
    leave();
    __builtin_unreachable();
}

void run_fibre() {
    call_kernel(kernel_arguments);
    running->state = RETURNED;
    leave();
}

void start(Thread& thread, int id) {
    thread.id = id;
    thread.index = {id % blockDim.x, id / blockDim.x % blockDim.y, id / blockDim.x / blockDim.y};
    thread.state = READY;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.context, run_fibre, 0);
}

void resume(Thread& thread) {
    running = &thread;
    threadIdx = thread.index;
    swapcontext(&scheduler, &thread.context);
}

void put_in_order(std::vector<int>& ids) {
    std::iota(ids.begin(), ids.end(), 0);
    if (order == 1) std::reverse(ids.begin(), ids.end());
    if (order > 1) std::shuffle(ids.begin(), ids.end(), random_bits);
}

// ---- shared memory ----

struct Region {
    unsigned char* first;
    size_t size;
};

Region find_shared_memory() {
    Region region = {shared, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* found) {
            auto* region = static_cast<Region*>(found);
            auto* first = static_cast<unsigned char*>(object->dlpi_tls_data);
            for (int i = 0; i < object->dlpi_phnum; ++i) {
                const size_t size = object->dlpi_phdr[i].p_memsz;
                if (object->dlpi_phdr[i].p_type != PT_TLS || region->first < first || region->first >= first + size)
                    continue;
                *region = {first, size};
                return 1;
            }
            return 0;
        },
        &region);
    return region;
}

Region memory;

void fill_with_random_bits(size_t dynamic_bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(shared, MOST_SHARED);
    for (size_t i = 0; i < memory.size; ++i) memory.first[i] = random_bits();
    if (__asan_poison_memory_region)
        __asan_poison_memory_region(shared + dynamic_bytes, MOST_SHARED - dynamic_bytes);
}

// ---- races ----

struct Access {
    int thread = -1;
    bool atomic = false;
    unsigned block_interval = 0;  // barriers of the block before it
    unsigned warp_interval = 0;   // __syncwarps of the warp before it
};

// The last accesses to a byte, by different threads.
struct Byte {
    Access writes[2];
    Access reads[2];
};

std::vector<Byte> history;
unsigned block_interval;
unsigned warp_intervals[MOST_THREADS / WARP];
int last_barrier_line;

void check(size_t offset, const Access& before, const Access& now) {
    if (before.thread < 0 || before.thread == now.thread || before.block_interval < now.block_interval) return;
    if (before.thread / WARP == now.thread / WARP && before.warp_interval < now.warp_interval) return;
    if (before.atomic && now.atomic) return;
    fail_thread("race: threads " + std::to_string(before.thread) + " and " + std::to_string(now.thread) + " use byte " +
                std::to_string(offset) + " of shared memory with no barrier between, after line " +
                std::to_string(last_barrier_line));
}

void check_and_note(size_t offset, bool write, const Access& now) {
    Byte& byte = history[offset];
    for (const Access& before : byte.writes) check(offset, before, now);
    if (write)
        for (const Access& before : byte.reads) check(offset, before, now);
    Access* accesses = write ? byte.writes : byte.reads;
    if (accesses[0].thread != now.thread) accesses[1] = accesses[0];
    accesses[0] = now;
}

void note(const void* address, size_t size, bool write, bool atomic = false) {
    const size_t offset = static_cast<const unsigned char*>(address) - memory.first;
    if (offset >= memory.size) return;
    const Access now = {running->id, atomic, block_interval, warp_intervals[running->id / WARP]};
    for (size_t i = offset; i < offset + size; ++i) check_and_note(i, write, now);
}

// ---- blocks ----

// Until no thread of the block can go on. A unit's threads run as far as they get before the next unit's start.
void run_until_all_wait() {
    std::vector<int> lanes(WARP), warps((block_size + WARP - 1) / WARP), ids;
    put_in_order(warps);
    for (int warp : warps) {
        put_in_order(lanes);
        for (int lane : lanes)
            if (warp * WARP + lane < block_size) ids.push_back(warp * WARP + lane);
    }
    const size_t unit = order > 1 && random_bits() % 2 ? ids.size() : WARP;
    for (size_t first = 0; first < ids.size(); first += unit) {
        for (bool moved = true; moved;) {
            moved = false;
            for (size_t i = first; i < std::min(first + unit, ids.size()); ++i) {
                if (pool[ids[i]].state != READY) continue;
                resume(pool[ids[i]]);
                if (!failure.empty()) return;
                moved = true;
            }
        }
    }
}

// Whether there is more to run.
bool pass_barrier() {
    int holding = 0;
    for (int i = 0; i < block_size; ++i) {
        const bool both_returned = pool[i].state == RETURNED && pool[0].state == RETURNED;
        if (!both_returned && !pool[i].with(pool[0])) {
            failure = "not all threads come together: " + pool[0].where() + ", " + pool[i].where();
            return false;
        }
        holding += pool[i].value != 0;
    }
    if (pool[0].state == RETURNED) return false;
    last_barrier_line = pool[0].line;
    ++block_interval;
    for (int i = 0; i < block_size; ++i) {
        pool[i].holding = holding;
        pool[i].state = READY;
    }
    return true;
}

void run_block(size_t dynamic_bytes) {
    fill_with_random_bits(dynamic_bytes);
    ++block_interval;
    last_barrier_line = 0;
    for (int i = 0; i < block_size; ++i) start(pool[i], i);
    do run_until_all_wait();
    while (failure.empty() && pass_barrier());
}

void wait(const char* name, int line, unsigned mask, uint64_t value) {
    running->state = WAITING;
    running->name = name;
    running->line = line;
    running->mask = mask;
    running->value = value;
}

}  // namespace

// ---- what the kernel calls ----

int emulated::barrier(const char* name, int line, bool predicate) {
    wait(name, line, 0, predicate);
    leave();
    return running->holding;
}

const uint64_t* emulated::exchange(const char* name, int line, unsigned mask, uint64_t value) {
    const int first = running->id / WARP * WARP;
    if (!(mask >> running->id % WARP & 1)) fail("a collective's mask leaves out its caller", line);
    if (first + WARP > block_size && mask >> (block_size - first)) fail("a collective's mask names no thread", line);
    wait(name, line, mask, value);
    uint64_t values[WARP] = {};
    for (int lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (!pool[first + lane].with(*running)) {
            leave();
            return running->values;
        }
        values[lane] = pool[first + lane].value;
    }
    if (std::strcmp(name, "__syncwarp") == 0) ++warp_intervals[first / WARP];
    for (int lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        std::memcpy(pool[first + lane].values, values, sizeof values);
        pool[first + lane].state = READY;
    }
    leave();
    return running->values;
}

void emulated::fail(const char* reason, int line) {
    fail_thread(reason + (", line " + std::to_string(line)) + ": thread " + std::to_string(running->id));
}

void emulated::note_atomic(const void* address, int size) { note(address, size, true, true); }

#define TSAN_ACCESS(size)                                                           \
    void __tsan_read##size(void* address) { note(address, size, false); }           \
    void __tsan_write##size(void* address) { note(address, size, true); }           \
    void __tsan_unaligned_read##size(void* address) { note(address, size, false); } \
    void __tsan_unaligned_write##size(void* address) { note(address, size, true); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* address, size_t size) { note(address, size, false); }
void __tsan_write_range(void* address, size_t size) { note(address, size, true); }
TSAN_ACCESS(1)
TSAN_ACCESS(2)
TSAN_ACCESS(4)
TSAN_ACCESS(8)
TSAN_ACCESS(16)

// What cuLaunchKernel does, at once. Returns null, or what went wrong.
const char* launch(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned dynamic_bytes, void** arguments, unsigned launch_order) {
    memory = find_shared_memory();
    gridDim = {grid_x, grid_y, grid_z};
    blockDim = {block_x, block_y, block_z};
    block_size = block_x * block_y * block_z;
    const unsigned blocks = grid_x * grid_y * grid_z;
    failure.clear();
    if (blocks == 0 || block_size == 0 || block_size > int(MOST_THREADS) || grid_y > 65535 || grid_z > 65535)
        return "no GPU takes such a grid or block";
    if (dynamic_bytes > MOST_SHARED - (memory.size - MOST_SHARED)) return "more shared memory than a block may have";

    if (pool.size() < size_t(block_size)) pool.resize(block_size);
    history.resize(memory.size);
    kernel_arguments = arguments;
    order = launch_order;
    random_bits.seed(order);
    std::vector<int> ids(blocks);
    put_in_order(ids);
    for (unsigned id : ids) {
        blockIdx = {id % grid_x, id / grid_x % grid_y, id / grid_x / grid_y};
        run_block(dynamic_bytes);
        if (!failure.empty()) return failure.c_str();
    }
    return nullptr;
}
}
