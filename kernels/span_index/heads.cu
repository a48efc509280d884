// What spans are cut out of: each head's threshold (Ltri-LLM, equation 5), and attention summed over heads.
//
// A block of threads finds the threshold of one tile and head: the two entries around a quantile. It holds all entries in
// registers, counts them in BINS bins between the smallest and the largest, goes on with the bin that has the quantile, and
// ranks what is left of it when that is little: two rounds where bisection takes twenty. Bins are of the entries' bits,
// which are ordered as the entries are, so both entries are exact, and only their interpolation rounds. Other blocks sum
// some rows of a tile over its heads, an entry a thread. `cuda_impl.py` says what the arguments are.
//
// Set by the compiler: BLOCK (tokens of a tile, a power of two from 16 to 128), THREADS (at least BLOCK, at most BLOCK^2),
// BITS (its logarithm to base 2).

#include "instructions.cuh"

#define WARPS (THREADS / 32)
#define BINS THREADS  // 2^BITS
#define PAIRS (BLOCK * BLOCK / 2)  // entries of rows r and BLOCK - 1 - r together, but the first one's on the diagonal
#define HELD ((PAIRS + THREADS - 1) / THREADS)
#define STRIP (THREADS / BLOCK)  // rows that a block sums
#define LISTED 64
#define AHEAD 32  // heads that are read before the first is added
#define NONE 0xffffffffu

struct Shared {
    unsigned least[WARPS], most[WARPS];
    int count[BINS], warp[WARPS];
    int bin, below, inside;
    unsigned listed[LISTED], key;
    int places, within;
};

__device__ __forceinline__ float number(float x) { return x == x ? x : 0.0f; }

// An entry's bits in its order.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(number(x) + 0.0f);
    return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float entry_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The least and the largest key of all threads.
__device__ __forceinline__ void reduce(unsigned &least, unsigned &most, Shared &shared) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) {
        least = min(least, __shfl_xor_sync(FULL, least, apart));
        most = max(most, __shfl_xor_sync(FULL, most, apart));
    }
    const int thread = threadIdx.x;
    if (thread % 32 == 0) shared.least[thread / 32] = least, shared.most[thread / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) least = min(least, shared.least[warp]), most = max(most, shared.most[warp]);
    __syncthreads();
}

// Entries of a head on and below the diagonal; NONE where there is none. Of rows r and BLOCK - 1 - r, which have BLOCK entries
// together but for one on the diagonal, BLOCK threads have an entry each, and others one of a row STRIP rows on.
struct Entries {
    unsigned keys[HELD + 1];

    __device__ __forceinline__ void read(const float *tile, int there, i64 stride_row) {
        const int place = threadIdx.x % BLOCK, first = threadIdx.x / BLOCK;
        const float *of_longer = tile + (BLOCK - 1 - first) * stride_row + place;
        const float *of_shorter = tile + first * (stride_row + 1) + place - BLOCK;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int shorter = first + i * STRIP;
            const bool second = place + shorter >= BLOCK;
            const int row = second ? shorter : BLOCK - 1 - shorter;
            keys[i] = shorter < BLOCK / 2 && row < there ? ordered(second ? *of_shorter : *of_longer) : NONE;
            of_longer -= STRIP * stride_row, of_shorter += STRIP * (stride_row + 1);
        }
        const int row = threadIdx.x;
        keys[HELD] = row < BLOCK / 2 && row < there ? ordered(tile[row * (stride_row + 1)]) : NONE;
    }

    // Calls `look` with the thread's keys, and NONE where it has none.
    template <class Look>
    __device__ __forceinline__ void each(Look look) const {
#pragma unroll
        for (int i = 0; i <= HELD; ++i) look(keys[i]);
    }

    // The same of those between two, less the first of them.
    template <class Look>
    __device__ __forceinline__ void each_from(unsigned low, unsigned high, Look look) const {
        each([&](unsigned key) {
            if (key - low <= high - low) look(key - low);
        });
    }
};

// Go on with the bin of keys between `low` and `high` that has the key with `index` keys before it. `below` keys are less
// than `low`, and `within` at most `high`.
__device__ __forceinline__ void narrow(const Entries &entries, int index, unsigned &low, unsigned &high, int &below,
                                       int &within, Shared &shared) {
    const int thread = threadIdx.x, lane = thread % 32;
    const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - BITS);
    shared.count[thread] = 0;
    __syncthreads();
    entries.each_from(low, high, [&](unsigned ahead) { atomicAdd(&shared.count[ahead >> shift], 1); });
    __syncthreads();
    const int own = shared.count[thread];
    int up_to = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(FULL, up_to, apart);
        if (lane >= apart) up_to += other;
    }
    if (lane == 31) shared.warp[thread / 32] = up_to;
    __syncthreads();
    int before = below + up_to - own;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) before += warp < thread / 32 ? shared.warp[warp] : 0;
    if (before <= index && index < before + own) shared.bin = thread, shared.below = before, shared.inside = own;
    __syncthreads();
    low += static_cast<unsigned>(shared.bin) << shift, high = low + min(high - low, (1u << shift) - 1);
    below = shared.below, within = below + shared.inside;
}

// The quantile of a head's entries, interpolated as torch.quantile does.
__device__ __forceinline__ float threshold(const Entries &entries, int there, float theta, Shared &shared) {
    const int thread = threadIdx.x, lane = thread % 32, all = there * (there + 1) / 2;
    const float rank = __fmul_rn(theta, static_cast<float>(all - 1)), whole = floorf(rank), share = rank - whole;
    const int index = static_cast<int>(whole);
    unsigned low = NONE, high = 0;
    entries.each([&](unsigned key) { low = min(low, key), high = max(high, key + 1); });  // NONE + 1 is 0
    reduce(low, high, shared);
    --high;
    int below = 0, within = all;
    while (low < high && within - below > LISTED) narrow(entries, index, low, high, below, within, shared);
    unsigned key = low;
    if (low < high) {
        if (thread == 0) shared.places = 0;
        __syncthreads();
        entries.each_from(low, high, [&](unsigned ahead) { shared.listed[atomicAdd(&shared.places, 1)] = low + ahead; });
        __syncthreads();
        const int count = within - below;
#pragma unroll 1
        for (int i = thread / 32; i < count; i += WARPS) {
            const unsigned mine = shared.listed[i];
            int less = below, up_to = below;
#pragma unroll 1
            for (int first = 0; first < count; first += 32) {
                const unsigned other = first + lane < count ? shared.listed[first + lane] : NONE;
                less += __popc(__ballot_sync(FULL, other < mine)), up_to += __popc(__ballot_sync(FULL, other <= mine));
            }
            if (lane == 0 && less <= index && index < up_to) shared.key = mine, shared.within = up_to;
        }
        __syncthreads();
        key = shared.key, within = shared.within;
    }
    const float least = entry_of(key);
    if (within > index + 1 || share == 0.0f) return least;
    unsigned ahead = NONE, unused = 0;
    entries.each([&](unsigned other) { ahead = min(ahead, other - (key + 1)); });  // those before wrap around
    reduce(ahead, unused, shared);
    const float most = entry_of(key + 1 + ahead), apart = most - least;
    return share < 0.5f ? __fadd_rn(least, __fmul_rn(share, apart)) : __fadd_rn(most, -__fmul_rn(1.0f - share, apart));
}

// An entry summed over heads, in their order.
__device__ __forceinline__ float summed_over(const float *at, int heads, i64 stride_head) {
    float total = 0.0f;
    for (int first = 0; first < heads; first += AHEAD) {
        float x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) x[i] = first + i < heads ? at[(first + i) * stride_head] : 0.0f;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) total += number(x[i]);
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
heads(const float *tiles, const int *rows, float *thresholds, float *summed, float theta, int count, i64 stride_tile,
      i64 stride_head, i64 stride_row) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ Shared shared;
    const int part = blockIdx.x, tile = blockIdx.y, there = min(rows[tile], BLOCK);
    if (there <= 0) return;
    tiles += tile * stride_tile;
    if (part < count) {
        Entries entries;
        entries.read(tiles + part * stride_head, there, stride_row);
        const float found = threshold(entries, there, theta, shared);
        if (threadIdx.x == 0) thresholds[static_cast<i64>(tile) * count + part] = found;
    } else {
        const int row = (part - count) * STRIP + threadIdx.x / BLOCK, column = threadIdx.x % BLOCK;
        const bool on = row < there && column <= row;
        const float total = on ? summed_over(tiles + row * stride_row + column, count, stride_head) : 0.0f;
        summed[(static_cast<i64>(tile) * BLOCK + row) * BLOCK + column] = total;
    }
}
