// Stands in for the CUDA built-ins that kernels/*.cu use, so that a C++ compiler takes those files as they are.
//
// The threads of a block are fibres of one OS thread (emulator.cpp). So `thread_local` can mean `__shared__`: it is the
// one keyword of C++ that both makes a local variable static and may follow `extern`. The thread-local storage of the
// built object is the shared memory of the block that runs, and nothing else.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local

struct dim3 {
    unsigned x, y, z;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) int4 {
    int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct alignas(16) longlong2 {
    long long x, y;
};
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

using std::max;
using std::min;

namespace emulated {

// Both wait until all the others are at the same `line`, and fail the launch where one of them cannot come there.
// `barrier` is for the whole block and counts the threads whose predicate holds; `exchange` is for the lanes of `mask`
// and returns the 32 values of the warp, 0 for other lanes.
int barrier(const char* name, int line, bool predicate);
const uint64_t* exchange(const char* name, int line, unsigned mask, uint64_t value);

[[noreturn]] void fail(const char* reason, int line);
void note_atomic(const void* address, int size);

template <typename T>
struct same {
    using type = T;
};

// Calls a kernel by the driver's array of pointers to its arguments.
template <typename Argument>
void call(void (*kernel)(Argument), void** arguments) {
    kernel(*static_cast<Argument*>(arguments[0]));
}

}  // namespace emulated

#define EMULATED_KERNEL(name) \
    extern "C" void call_kernel(void** arguments) { emulated::call(name, arguments); }

inline void __syncthreads(int line = __builtin_LINE()) { emulated::barrier("__syncthreads", line, false); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return emulated::barrier("__syncthreads_count", line, predicate);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return emulated::barrier("__syncthreads_or", line, predicate) > 0;
}
inline void __syncwarp(unsigned mask = 0xffffffff, int line = __builtin_LINE()) {
    emulated::exchange("__syncwarp", line, mask, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    const uint64_t* values = emulated::exchange("__ballot_sync", line, mask, predicate);
    unsigned set = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (values[lane]) set |= 1u << lane;
    return set;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    const uint64_t* values = emulated::exchange("__shfl_sync", line, mask, bits);
    if (!(mask >> (source & 31) & 1)) emulated::fail("__shfl_sync reads a lane that is not in its mask", line);
    std::memcpy(&value, &values[source & 31], sizeof value);
    return value;
}

inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
T __ldg(const T* address) {
    return *address;
}

// Fibres change only where they wait, so that a plain update is atomic.
#define EMULATED_ATOMIC(name, update)                                                                         \
    template <typename T>                                                                                     \
    __attribute__((noinline, no_sanitize("thread"))) T name(T* address, typename emulated::same<T>::type x) { \
        emulated::note_atomic(address, sizeof(T));                                                            \
        const T old = *address;                                                                               \
        *address = update;                                                                                    \
        return old;                                                                                           \
    }
EMULATED_ATOMIC(atomicMax, max(old, x))
EMULATED_ATOMIC(atomicMin, min(old, x))
