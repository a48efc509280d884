// The election among memory blocks: a block of threads a request, no sorting, and few steps that wait for each other.
//
// To find the best K of n blocks, threads are dealt into groups, and each group says the best of its blocks. The K best of
// these are K different blocks, so none of the K best of all is worse than the worst of them: it is the bar. What reaches
// the bar is listed, usually little more than K blocks, and each is ranked by comparing it with all others of the list.
// Where too many reach it, the best are found one after the other. Neighbours, which are often alike, lie in different
// groups. `cuda_impl.py` says what the arguments are; what is elected is what `triton_impl.py` elects.
//
// Set by the compiler: KEPT (blocks to choose, at most), SCORED, MODE (INCLUSIVE, PRECEDING or OFF, see below), WEIGHTS (each
// request has a weight), THREADS, LANES (threads of a group, a power of two up to 32).

#include "instructions.cuh"

#define INCLUSIVE 0  // as in `types.VOTES`
#define PRECEDING 1
#define OFF 2
#define GROUPS (THREADS / LANES)
#define LISTED 512  // blocks that may reach the bar

// What blocks are ordered by; 0 for those that are not eligible. No two eligible blocks are equal.
struct Key {
    u64 first;        // votes and score, or score
    unsigned second;  // the smaller a block's number, the larger
};

__device__ __forceinline__ bool less(const Key &a, const Key &b) {
    return a.first < b.first || (a.first == b.first && a.second < b.second);
}

// A number's bits in its order; both zeros are one.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Ballot {
    const float *votes, *scores;
    int blocks;  // that there are
    float weight;
    Key least;  // of the layer's own choice; in an inclusive vote, the layer's weight is added to theirs

    __device__ __forceinline__ Key own(int block) const {
        const float score = SCORED ? scores[block] : 0.0f;
        if (!(score > NOTHING)) return {0, 0};
        return {static_cast<u64>(ordered(score)) << 32, ~static_cast<unsigned>(block)};
    }

    __device__ __forceinline__ bool chosen(int block) const {
        const Key key = own(block);
        return key.second && !less(key, least);
    }

    __device__ __forceinline__ Key counted(int block) const {
        const float score = SCORED ? scores[block] : 0.0f;
        if (!(score > NOTHING)) return {0, 0};
        float votes_of = votes[block];
        if (SCORED && MODE == INCLUSIVE && chosen(block)) votes_of += weight;
        if (!(votes_of > 0.0f)) return {0, 0};
        return {static_cast<u64>(ordered(votes_of)) << 32 | ordered(score), ~static_cast<unsigned>(block)};
    }

    template <bool OWN>
    __device__ __forceinline__ Key key(int block) const {
        if (block >= blocks) return {0, 0};
        return OWN ? own(block) : counted(block);
    }
};

struct Shared {
    Key best[GROUPS];
    Key bar;
    Key listed[LISTED];
    Key found[KEPT];
    int count;
};

template <int WIDTH>
__device__ __forceinline__ Key largest(Key key) {
#pragma unroll
    for (int apart = WIDTH / 2; apart; apart /= 2) {
        const Key other = {__shfl_xor_sync(FULL, key.first, apart), __shfl_xor_sync(FULL, key.second, apart)};
        if (less(key, other)) key = other;
    }
    return key;
}

// How many of some keys are larger.
__device__ __forceinline__ int rank_of(const Key &key, const Key *keys, int count) {
    int rank = 0;
    for (int i = 0; i < count; ++i) rank += less(key, keys[i]);
    return rank;
}

// The best KEPT blocks by their ranks, in shared.found; 0 behind the last that is eligible.
template <bool OWN>
__device__ __forceinline__ void search(const Ballot &ballot, Shared &shared) {
    const int thread = threadIdx.x, first = thread % 32 * (THREADS / 32) + thread / 32;
    Key best = {0, 0};
    for (int block = first; block < ballot.blocks; block += THREADS) {
        const Key key = ballot.key<OWN>(block);
        if (less(best, key)) best = key;
    }
    best = largest<LANES>(best);
    if (thread % LANES == 0) shared.best[thread / LANES] = best;
    if (thread < KEPT) shared.found[thread] = {0, 0};
    if (thread == 0) shared.count = 0, shared.bar = {0, 0};
    __syncthreads();
    if (thread < GROUPS) {
        const Key own = shared.best[thread];
        if (own.second && rank_of(own, shared.best, GROUPS) == KEPT - 1) shared.bar = own;
    }
    __syncthreads();
    const Key bar = shared.bar;
    for (int block = first; block < ballot.blocks; block += THREADS) {
        const Key key = ballot.key<OWN>(block);
        if (!key.second || less(key, bar)) continue;
        const int place = atomicAdd(&shared.count, 1);
        if (place < LISTED) shared.listed[place] = key;
    }
    __syncthreads();
    const int count = shared.count;
    if (count <= LISTED) {
        if (thread < count) {
            const Key own = shared.listed[thread];
            const int rank = rank_of(own, shared.listed, count);
            if (rank < KEPT) shared.found[rank] = own;
        }
        __syncthreads();
        return;
    }
    Key last = {~0ull, ~0u};
    for (int rank = 0; rank < KEPT && last.second; ++rank) {
        best = {0, 0};
        for (int block = first; block < ballot.blocks; block += THREADS) {
            const Key key = ballot.key<OWN>(block);
            if (less(key, last) && less(best, key)) best = key;
        }
        best = largest<32>(best);
        if (thread % 32 == 0) shared.listed[thread / 32] = best;
        __syncthreads();
        last = {0, 0};
        for (int warp = 0; warp < THREADS / 32; ++warp)
            if (less(last, shared.listed[warp])) last = shared.listed[warp];
        if (thread == 0) shared.found[rank] = last;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
elect(float *votes, const float *scores, int *out, const float *weights, float weight, int max_blocks, int count) {
    __shared__ Shared shared;
    const int thread = threadIdx.x;
    const i64 row = static_cast<i64>(blockIdx.x) * max_blocks;
    votes += row, scores += row, out += static_cast<i64>(blockIdx.x) * count;
    Ballot ballot = {votes, scores, max_blocks, WEIGHTS ? weights[blockIdx.x] : weight, {~0ull, ~0u}};
    if (SCORED) {
        search<true>(ballot, shared);
        if (MODE == OFF && thread < count) out[thread] = shared.found[thread].second ? ~shared.found[thread].second : -1;
        int fewest = count;
        while (fewest && !shared.found[fewest - 1].second) --fewest;
        if (fewest) ballot.least = shared.found[fewest - 1];
        __syncthreads();
    }
    if (MODE != OFF) {
        search<false>(ballot, shared);
        if (thread < count) out[thread] = shared.found[thread].second ? ~shared.found[thread].second : -1;
        __syncthreads();  // all threads have read the votes as they were
    }
    if (SCORED)
        for (int block = thread; block < max_blocks; block += THREADS)
            if (ballot.chosen(block)) votes[block] += ballot.weight;
}
