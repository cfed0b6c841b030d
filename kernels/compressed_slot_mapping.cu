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
// the store takes 1.6 to 1.7 times a fill on an H200, which bounds every design; a binary search per token adds
// log2(requests) more reads. Tiles that lie within one request skip the marks and their barriers.
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
    i64 tiles_per_block;
    i64 tokens_per_thread;
    Divisor dcp_world_size;
    Divisor cp_interleave;
    i64 dcp_rank;  // -1: ownership is not checked
    i64 shard_states;
    Group groups[MAX_GROUPS];
};

struct Mark {
    index_t request;  // -1: none
    index_t base;     // position of the request's token t: t + base
};

struct Marks {
    Mark* starts;   // one a token of the tile: the request that starts there
    Mark* carries;  // one a segment: the request that runs into it

    __device__ __forceinline__ void clear(int tokens) const {
        for (int token = threadIdx.x; token < tokens; token += blockDim.x) starts[token].request = -1;
        for (int segment = threadIdx.x; segment < tokens / SEGMENT; segment += blockDim.x) carries[segment].request = -1;
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

// Replaces `n`, a position or a state, by its index among this rank's; false where another rank owns it.
__device__ __forceinline__ bool localize(const Batch& batch, uindex_t& n) {
    const uindex_t run = quotient(n, batch.cp_interleave);
    const uindex_t turn = quotient(run, batch.dcp_world_size);
    const uindex_t owner = run - turn * (uindex_t)batch.dcp_world_size.value;
    if (batch.dcp_rank >= 0 && owner != (u64)batch.dcp_rank) return false;
    n = turn * (uindex_t)batch.cp_interleave.value + (n - run * (uindex_t)batch.cp_interleave.value);
    return true;
}

// Whether the token at `position` closes a state of this rank, and which, as this rank counts states.
__device__ __forceinline__ bool closes(const Batch& batch, const Group& group, index_t position, uindex_t& state) {
    if (position < 0) return false;
    const uindex_t end = (uindex_t)position + 1;
    const uindex_t states = quotient(end, group.compress_ratio);
    if (states * group.compress_ratio.value != end) return false;
    state = states - 1;
    if (batch.dcp_world_size.value == 1) return true;
    if (batch.shard_states) return localize(batch, state);
    uindex_t local_position = position;
    if (!localize(batch, local_position)) return false;
    state = quotient(local_position, group.compress_ratio);
    return true;
}

template <int REQUESTS>
struct Window {  // REQUESTS requests a thread, `blockDim.x` apart
    index_t first;
    index_t begin[REQUESTS];
    index_t end[REQUESTS];
    index_t length[REQUESTS];

    __device__ __forceinline__ index_t request(int i) const { return first + i * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ index_t past() const { return first + REQUESTS * blockDim.x; }

    __device__ __forceinline__ void read(const Batch& batch, index_t from) {
        first = from;
#pragma unroll
        for (int i = 0; i < REQUESTS; ++i) {
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
        for (int i = REQUESTS - 1; i >= 0; --i)
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
        for (int i = 0; i < REQUESTS; ++i) {
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
        for (int i = 0; i < REQUESTS; ++i) {
            if (begin[i] > token || !has_tokens(i, num_requests, token, end[i])) continue;
            owner = mark(i);
            owner_end = end[i];
        }
    }
};

// Maps TOKENS tokens a thread, `blockDim.x` apart, so that their reads are under way together.
template <int TOKENS, typename MarkAt>
__device__ __forceinline__ void map_tile(const Batch& batch, const Group& group, index_t tile, index_t mapped_end,
                                         index_t end, const MarkAt& mark_at) {
    Mark mark[TOKENS];
    i64 page[TOKENS], own_slot[TOKENS];
    uindex_t state[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) mark[i] = mark_at(i * blockDim.x + threadIdx.x);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const index_t token = tile + i * blockDim.x + threadIdx.x;
        page[i] = own_slot[i] = -1;
        state[i] = 0;
        if (mark[i].request < 0 || token >= mapped_end) continue;
        const index_t position = batch.positions.first ? load_index(batch.positions, token)
                                                       : (index_t)((uindex_t)token + (uindex_t)mark[i].base);
        if (!closes(batch, group, position, state[i])) continue;
        const IntArray& slots = group.slot_mapping;
        own_slot[i] = slots.first ? load(slots, slots.first + token * slots.stride) : 0;
        const uindex_t column = quotient(state[i], group.block_size);
        state[i] -= column * (uindex_t)group.block_size.value;
        const IntArray& table = group.block_table;
        if (column < (u64)group.num_columns)
            page[i] = load(table, table.first + mark[i].request * group.block_table_row_stride + column * table.stride);
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const index_t token = tile + i * blockDim.x + threadIdx.x;
        const bool mapped = page[i] >= 0 && own_slot[i] != PAD;
        const i64 slot = (i64)((u64)page[i] * group.block_size.value + state[i]);
        if (token < end) group.out[token] = mapped ? slot : PAD;
    }
}

// Finds the first offset that falls, and a request at or not far before the one of `token`.
__device__ void scan(const Batch& batch, index_t token, index_t& first_fall, index_t& first_request) {
    const index_t num_requests = batch.num_requests;
    if (threadIdx.x == 0) {
        first_fall = num_requests;
        first_request = 0;
    }
    const index_t probe = threadIdx.x * ((num_requests + blockDim.x - 1) / blockDim.x);
    const bool starts_before = probe < num_requests && load_index(batch.query_start_loc, probe) <= token;
    index_t fall = num_requests;
#pragma unroll 8
    for (index_t request = threadIdx.x; request < num_requests; request += blockDim.x) {
        const index_t begin = load_index(batch.query_start_loc, request);
        const index_t end = load_index(batch.query_start_loc, request + 1);
        if (end < begin && request < fall) fall = request;
    }
    __syncthreads();
    if (fall < num_requests) atomicMin(&first_fall, fall);
    __syncthreads();
    if (starts_before && probe < first_fall) atomicMax(&first_request, probe);
    __syncthreads();
}

template <int REQUESTS, int TOKENS>
__device__ __forceinline__ void map_block(const Batch& batch, const Group& group) {
    extern __shared__ Mark shared[];
    __shared__ index_t first_fall, first_request, owner_end;
    __shared__ Mark owner;
    const int tile_size = TOKENS * blockDim.x;
    const Marks marks = {shared, shared + tile_size};
    index_t tile = (index_t)blockIdx.x * (index_t)batch.tiles_per_block * tile_size;
    index_t block_end = tile + (index_t)batch.tiles_per_block * tile_size;
    if (block_end > group.out_len) block_end = group.out_len;
    if (tile >= batch.num_tokens || batch.num_requests == 0) {
        for (index_t token = tile + threadIdx.x; token < block_end; token += blockDim.x) group.out[token] = PAD;
        return;
    }

    index_t num_requests = batch.num_requests;
    Window<REQUESTS> window;
    if (num_requests > REQUESTS * blockDim.x) {
        scan(batch, tile, first_fall, first_request);
        num_requests = first_fall;
    }
    window.read(batch, num_requests > REQUESTS * blockDim.x ? first_request : 0);
    index_t requests_end = load_index(batch.query_start_loc, num_requests);
    marks.clear(tile_size);
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
        const index_t tile_end = tile + tile_size;
        window.put_marks(marks, num_requests, tile, tile_end);
        while (window.past() < num_requests && load_index(batch.query_start_loc, window.past()) < tile_end) {
            window.read(batch, window.past());
            window.put_marks(marks, num_requests, tile, tile_end);
        }
        __syncthreads();
        map_tile<TOKENS>(batch, group, tile, mapped_end, block_end, [&](int offset) { return marks.at(offset); });
        tile = tile_end;
        if (tile >= block_end) return;

        if (threadIdx.x == 0) owner_end = 0;
        __syncthreads();
        window.put_owner(owner, owner_end, num_requests, tile);
        __syncthreads();
        const index_t same_owner_until = owner_end;
        for (const Mark mark = owner; tile + tile_size <= same_owner_until; tile += tile_size) {
            map_tile<TOKENS>(batch, group, tile, mapped_end, block_end, [&](int) { return mark; });
            if (tile + tile_size >= block_end) return;
        }
        marks.clear(tile_size);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(WIDE ? 512 : 1024) compressed_slot_mapping(const __grid_constant__ Batch batch) {
    const Group& group = batch.groups[blockIdx.y];
    if (batch.tokens_per_thread > 1)
        map_block<4, 4>(batch, group);
    else if (batch.num_requests <= blockDim.x)
        map_block<1, 1>(batch, group);
    else
        map_block<2, 1>(batch, group);
}
