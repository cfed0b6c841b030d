// Maps the tokens of a batch to the slots of the compressed KV states that they close, for one or more caches in
// one launch. cupy_slots/_cpu.py mirrors it in NumPy; cupy_slots/_gpu.py launches it.
//
// A block owns consecutive tiles of tokens (one tile in a decode step) and works on one tile at a time:
//
//   1. request phase: each thread holds a few requests in registers. A request with tokens in the tile leaves a mark
//      at its first token there, and at every 32-token segment that it runs into.
//   2. token phase: a token's request is the last mark at or before it in its segment, found with one ballot, or
//      else the one that runs into the segment. A token that closes a state reads its page id and its own slot, both
//      at once, and `slot_mapping` is not read for any other token.
//
// So two dependent reads of global memory lie between launch and store. A kernel of nothing but those two reads and
// the store takes 1.6 to 1.75 times a fill on an H200, which bounds every design; a binary search per token adds
// log2(requests) more reads. Tiles within one request skip the marks and their barriers, and at a ratio of 4 or more a
// thread maps four of their tokens with one division and 16-byte stores: a million tokens of one request take 5.6 us,
// against 8.5 us one by one, where instructions were the limit.
//
// "From the first entry of query_start_loc that falls, all is padding" takes a look at every entry, so each block
// takes it. While the requests fit the block's registers that costs nothing, they are there anyway. Else a block first
// scans query_start_loc, and moves its window of requests along with its tiles; the launch keeps blocks few then.
//
// Built twice: with 32-bit indices, where all sums and quotients of valid values fit 32 bits, for int32 offsets and
// lengths (WIDE 0), and with 64-bit indices for the rest (WIDE 1). Values from device memory are never trusted: sums
// and products are taken unsigned, where they wrap, and an index is used only after it was compared with its bounds.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

#if WIDE
typedef i64 index_t;
typedef u64 uindex_t;
#else
typedef int index_t;
typedef u32 uindex_t;
#endif

constexpr i64 PAD = -1;
constexpr uindex_t LOWEST = (uindex_t)1 << (8 * sizeof(index_t) - 1);
constexpr int SEGMENT = 32;
constexpr int REQUESTS_PER_THREAD = 2;
constexpr int QUAD = 4;
constexpr u32 ALL_LANES = 0xffffffffu;

struct IntArray {  // int32 or int64 items, `stride` bytes apart
    const char* first;
    i64 stride;
    i64 itemsize;
};

struct Divisor {
    u64 value;
    u64 multiplier;  // n / value == n * multiplier >> shift, for every n < 2^31
    u64 shift;
};

struct Group {  // one compressed cache
    i64* out;
    i64 out_len;
    Divisor compress_ratio;
    Divisor block_size;
    Divisor interleave;    // in states, with either context-parallel layout
    IntArray block_table;  // stride: between columns
    i64 block_table_row_stride;
    i64 num_columns;
    IntArray slot_mapping;  // first is null: nothing is masked
};

struct Batch {
    IntArray query_start_loc;
    IntArray seq_lens;  // not read where positions are given
    i64 num_requests;
    i64 num_tokens;
    IntArray positions;  // first is null: computed from seq_lens
    i64 tile_size;  // tokens of a tile: at most blockDim.x, in whole warps
    i64 tiles_per_block;
    i64 seek_owner;  // requests are so long that whole tiles often belong to one
    Divisor dcp_world_size;
    i64 dcp_rank;  // -1: ownership is not checked
    Group groups[MAX_GROUPS];
};

struct Mark {
    index_t request;  // -1: none
    index_t base;     // position of the request's token t: t + base
};

struct Marks {
    Mark* starts;   // one a token of the tile: the request that starts there
    Mark* carries;  // one a segment: the request that runs into it

    __device__ __forceinline__ void clear() const {
        starts[threadIdx.x].request = -1;
        if (threadIdx.x % SEGMENT == 0) carries[threadIdx.x / SEGMENT].request = -1;
    }

    __device__ __forceinline__ Mark at(int token) const {
        const u32 at_or_before = ALL_LANES >> (SEGMENT - 1 - threadIdx.x % SEGMENT);
        const u32 started = __ballot_sync(ALL_LANES, starts[token].request >= 0) & at_or_before;
        return started ? starts[(token | (SEGMENT - 1)) - __clz(started)] : carries[token / SEGMENT];
    }
};

__device__ __forceinline__ i64 load(const IntArray& array, const char* address) {
    return array.itemsize == 8 ? *(const i64*)address : *(const int*)address;
}

__device__ __forceinline__ index_t load_index(const IntArray& array, index_t i) {
    const char* address = array.first + i * array.stride;
#if WIDE
    return load(array, address);
#else
    return *(const int*)address;
#endif
}

// Many instructions, since the hardware has no 64-bit division: inlined, it would double the time to compile.
__device__ __noinline__ u64 divide(u64 n, u64 divisor) {
    return ((n | divisor) >> 32) == 0 ? (u32)n / (u32)divisor : n / divisor;
}

__device__ __forceinline__ uindex_t quotient(uindex_t n, const Divisor& divisor) {
#if WIDE
    return divide(n, divisor.value);
#else
    return (u32)((u64)n * (u32)divisor.multiplier >> (u32)divisor.shift);
#endif
}

// Whether this rank owns the state, which becomes its index among this rank's states.
__device__ __forceinline__ bool localize(const Batch& batch, const Group& group, uindex_t& state) {
    if (batch.dcp_world_size.value == 1) return true;
    const uindex_t run = quotient(state, group.interleave);
    const uindex_t turn = quotient(run, batch.dcp_world_size);
    const uindex_t owner = run - turn * (uindex_t)batch.dcp_world_size.value;
    state += (turn - run) * (uindex_t)group.interleave.value;
    return batch.dcp_rank < 0 || owner == (u64)batch.dcp_rank;
}

struct Window {  // REQUESTS_PER_THREAD requests a thread, `blockDim.x` apart
    index_t first;
    index_t begin[REQUESTS_PER_THREAD];
    index_t end[REQUESTS_PER_THREAD];
    index_t length[REQUESTS_PER_THREAD];

    static __device__ __forceinline__ index_t size() { return REQUESTS_PER_THREAD * blockDim.x; }
    __device__ __forceinline__ index_t request(int i) const { return first + i * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ index_t past() const { return first + size(); }

    __device__ __forceinline__ void read(const Batch& batch, index_t from) {
        first = from;
#pragma unroll
        for (int i = 0; i < REQUESTS_PER_THREAD; ++i) {
            begin[i] = end[i] = length[i] = 0;
            if (request(i) < batch.num_requests) {
                begin[i] = load_index(batch.query_start_loc, request(i));
                end[i] = load_index(batch.query_start_loc, request(i) + 1);
                length[i] = batch.positions.first ? 1 : load_index(batch.seq_lens, request(i));
            }
        }
    }

    __device__ __forceinline__ index_t first_fall(index_t none) const {
        index_t fall = none;
#pragma unroll
        for (int i = REQUESTS_PER_THREAD - 1; i >= 0; --i)
            if (end[i] < begin[i]) fall = request(i);
        return fall;
    }

    __device__ __forceinline__ bool has_tokens(int i, index_t num_requests, index_t from, index_t to) const {
        return from < to && request(i) < num_requests;
    }

    // All positions of a sequence without length are negative, and `length - end` may not fit then.
    __device__ __forceinline__ Mark mark(int i) const {
        const uindex_t base = length[i] > 0 ? (uindex_t)length[i] - (uindex_t)end[i] : LOWEST;
        return {request(i), (index_t)base};
    }

    __device__ __forceinline__ void put_marks(const Marks& marks, index_t num_requests, index_t tile,
                                              index_t tile_end) const {
#pragma unroll
        for (int i = 0; i < REQUESTS_PER_THREAD; ++i) {
            const index_t from = begin[i] > tile ? begin[i] : tile;
            const index_t to = end[i] < tile_end ? end[i] : tile_end;
            if (!has_tokens(i, num_requests, from, to)) continue;
            const int start = from - tile;
            const int last_segment = (int)(to - tile - 1) / SEGMENT;
            marks.starts[start] = mark(i);
#pragma unroll 4
            for (int segment = start / SEGMENT + 1; segment <= last_segment; ++segment) marks.carries[segment] = mark(i);
        }
    }

    // Says which request the token belongs to and where that request ends.
    __device__ __forceinline__ void put_owner(Mark& owner, index_t& owner_end, index_t num_requests,
                                              index_t token) const {
#pragma unroll
        for (int i = 0; i < REQUESTS_PER_THREAD; ++i) {
            if (begin[i] > token || !has_tokens(i, num_requests, token, end[i])) continue;
            owner = mark(i);
            owner_end = end[i];
        }
    }
};

// The slot of a token that closes a state of this rank, or PAD.
__device__ __forceinline__ i64 slot_of(const Group& group, index_t request, index_t token, uindex_t state) {
    const IntArray& slots = group.slot_mapping;
    const IntArray& table = group.block_table;
    const uindex_t column = quotient(state, group.block_size);
    const i64 own_slot = slots.first ? load(slots, slots.first + token * slots.stride) : 0;
    i64 page = -1;
    if (column < (u64)group.num_columns)
        page = load(table, table.first + request * group.block_table_row_stride + column * table.stride);
    return page < 0 || own_slot == PAD ? PAD : (i64)(((u64)page - column) * group.block_size.value + state);
}

__device__ __forceinline__ void map_token(const Batch& batch, const Group& group, const Mark& mark, index_t token,
                                          index_t mapped_end) {
    i64 slot = PAD;
    if (mark.request >= 0 && token < mapped_end) {
        const index_t position = batch.positions.first ? load_index(batch.positions, token)
                                                       : (index_t)((uindex_t)token + (uindex_t)mark.base);
        const uindex_t end = (uindex_t)position + 1;
        const uindex_t states = quotient(end, group.compress_ratio);
        uindex_t state = states - 1;
        if (position >= 0 && states * group.compress_ratio.value == end && localize(batch, group, state))
            slot = slot_of(group, mark.request, token, state);
    }
    group.out[token] = slot;
}

// Maps four tokens of one request, with one division: at a ratio of 4 or more at most one of them closes a state.
__device__ __forceinline__ void map_quad(const Batch& batch, const Group& group, const Mark& mark, index_t token,
                                         index_t mapped_end) {
    i64 slots[QUAD] = {PAD, PAD, PAD, PAD};
    const index_t position = (index_t)((uindex_t)token + (uindex_t)mark.base);
    if (position >= 0) {  // below, the first state would close behind the four
        const uindex_t states = quotient((uindex_t)position + QUAD, group.compress_ratio);
        const uindex_t end = states * (uindex_t)group.compress_ratio.value;
        const index_t closing = token + (index_t)(end - 1 - (uindex_t)position);
        uindex_t state = states - 1;
        if (end > (uindex_t)position && closing < mapped_end && localize(batch, group, state)) {
            const i64 slot = slot_of(group, mark.request, closing, state);
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (token + i == closing) slots[i] = slot;
        }
    }
    i64* out = group.out + token;
    if ((u64)out % sizeof(longlong2) == 0) {
        ((longlong2*)out)[0] = make_longlong2(slots[0], slots[1]);
        ((longlong2*)out)[1] = make_longlong2(slots[2], slots[3]);
    } else {
#pragma unroll
        for (int i = 0; i < QUAD; ++i) out[i] = slots[i];
    }
}

// Whether this thread's share of the offsets falls anywhere.
__device__ bool sees_fall(const Batch& batch) {
    const IntArray& offsets = batch.query_start_loc;
    const index_t num_requests = batch.num_requests;
    bool falls = false;
    index_t scanned = 0;
#if !WIDE
    if (offsets.stride == sizeof(int)) {  // 16 bytes a read
        const index_t head = -((u64)offsets.first / sizeof(int)) % 4;
        const index_t quads = (num_requests + 1 - head) / 4;
        const int4* quad = (const int4*)(offsets.first + head * sizeof(int));
#pragma unroll 4
        for (index_t i = threadIdx.x; i < quads; i += blockDim.x) {
            const int4 q = quad[i];
            const index_t last = head + 4 * i + 3;
            const int next = last < num_requests ? load_index(offsets, last + 1) : q.w;
            falls |= q.y < q.x || q.z < q.y || q.w < q.z || next < q.w;
        }
        if (threadIdx.x < head)
            falls |= load_index(offsets, threadIdx.x + 1) < load_index(offsets, threadIdx.x);
        scanned = head + 4 * quads;
    }
#endif
    for (index_t request = scanned + threadIdx.x; request < num_requests; request += blockDim.x)
        falls |= load_index(offsets, request + 1) < load_index(offsets, request);
    return falls;
}

// Finds the first offset that falls, and a request at or not far before the one of `token`.
__device__ void scan(const Batch& batch, index_t token, index_t& first_fall, index_t& first_request) {
    const index_t num_requests = batch.num_requests;
    const index_t probe = threadIdx.x * ((num_requests + blockDim.x - 1) / blockDim.x);
    const bool starts_before = probe < num_requests && load_index(batch.query_start_loc, probe) <= token;
    if (threadIdx.x == 0) {
        first_fall = num_requests;
        first_request = 0;
    }
    if (__syncthreads_or(sees_fall(batch))) {
        for (index_t request = threadIdx.x; request < num_requests; request += blockDim.x)
            if (load_index(batch.query_start_loc, request + 1) < load_index(batch.query_start_loc, request)) {
                atomicMin(&first_fall, request);
                break;
            }
        __syncthreads();
    }
    if (starts_before && probe < first_fall) atomicMax(&first_request, probe);
    __syncthreads();
}

// 32 registers, where they hold everything, let a multiprocessor keep 2,048 threads; elsewhere they would spill.
#if !WIDE && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
#define LEAST_BLOCKS 2
#else
#define LEAST_BLOCKS 1
#endif

extern "C" __global__ void __launch_bounds__(1024, LEAST_BLOCKS)
    compressed_slot_mapping(const __grid_constant__ Batch batch) {
    extern __shared__ Mark shared[];
    __shared__ index_t first_fall, first_request, owner_end;
    __shared__ Mark owner;
    const Group& group = batch.groups[blockIdx.y];
    const int tile_size = batch.tile_size;
    const Marks marks = {shared, shared + blockDim.x};
    index_t tile = (index_t)blockIdx.x * (index_t)batch.tiles_per_block * tile_size;
    index_t block_end = tile + (index_t)batch.tiles_per_block * tile_size;
    if (block_end > group.out_len) block_end = group.out_len;
    if (tile >= batch.num_tokens || batch.num_requests == 0) {
        for (index_t token = tile + threadIdx.x; token < block_end; token += blockDim.x) group.out[token] = PAD;
        return;
    }

    index_t num_requests = batch.num_requests;
    index_t window_first = 0;
    if (num_requests > Window::size()) {
        scan(batch, tile, first_fall, first_request);
        num_requests = first_fall;
        if (num_requests > Window::size()) window_first = first_request;
    }
    Window window;
    window.read(batch, window_first);
    index_t requests_end = load_index(batch.query_start_loc, num_requests);
    marks.clear();
    if (__syncthreads_or(window.first_fall(num_requests) < num_requests)) {
        if (threadIdx.x == 0) first_fall = num_requests;
        __syncthreads();
        atomicMin(&first_fall, window.first_fall(num_requests));
        __syncthreads();
        num_requests = first_fall;
        requests_end = load_index(batch.query_start_loc, num_requests);
    }
    const index_t mapped_end = requests_end < batch.num_tokens ? requests_end : (index_t)batch.num_tokens;

    while (true) {
        if (batch.seek_owner) {  // skip the marks while one request holds whole tiles
            if (threadIdx.x == 0) owner_end = 0;
            __syncthreads();
            window.put_owner(owner, owner_end, num_requests, tile);
            __syncthreads();
            const Mark mark = owner;
            const index_t owned_end = owner_end < block_end ? owner_end : block_end;
            if (!batch.positions.first && group.compress_ratio.value >= QUAD)
                for (; tile + QUAD * (int)blockDim.x <= owned_end; tile += QUAD * blockDim.x)
                    map_quad(batch, group, mark, tile + QUAD * threadIdx.x, mapped_end);
            for (; tile + (int)blockDim.x <= owned_end; tile += blockDim.x)
                map_token(batch, group, mark, tile + threadIdx.x, mapped_end);
            if (tile >= block_end) return;
        }

        const index_t tile_end = tile + tile_size < block_end ? tile + tile_size : block_end;
        window.put_marks(marks, num_requests, tile, tile_end);
        while (window.past() < num_requests && load_index(batch.query_start_loc, window.past()) < tile_end) {
            window.read(batch, window.past());
            window.put_marks(marks, num_requests, tile, tile_end);
        }
        __syncthreads();
        if (threadIdx.x < tile_size) {
            const Mark mark = marks.at(threadIdx.x);
            if (tile + (int)threadIdx.x < tile_end) map_token(batch, group, mark, tile + threadIdx.x, mapped_end);
        }
        tile += tile_size;
        if (tile >= block_end) return;
        __syncthreads();
        marks.clear();
        if (!batch.seek_owner) __syncthreads();
    }
}
