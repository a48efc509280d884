// The election among memory blocks: a block of threads a request, no sorting, and few steps that wait for each other.
//
// To find the best K of n blocks, threads are dealt into groups, of which each says its best block. The K best of these
// are K different blocks, so none of the K best of all is worse than the worst of them: it is the bar. What reaches the
// bar is listed, usually little more than K blocks, and each of these is ranked by comparing it with all others. Where
// too many reach it, the best are found one after the other. Neighbours, which are often alike, lie in different groups.
// Most threads have no block that reaches the bar, or none with a vote, and need not look at theirs again.
// `cuda_election.py` says what the arguments are; what is elected is what `triton_impl.py` elects.
//
// Set by the compiler: THREADS, LANES (threads of a group, a power of two up to 32, so that there are 32 groups or more).

#include "instructions.cuh"

#define INCLUSIVE 0  // `types.VOTES`
#define OFF 2
#define WARPS (THREADS / 32)
#define GROUPS (THREADS / LANES)
#define LISTED 512  // blocks that may reach the bar

// What blocks are ordered by: `first`, 0 for those that are not eligible, and where it is equal, `second`.
struct Key {
    u64 first;        // votes and score; or one of them, and again `second`, so that none are equal
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

__device__ __forceinline__ int number_of(const Key &key) { return static_cast<int>(~key.second); }

struct Ballot {
    const float *votes, *scores;  // scores are null in a layer in which no head votes
    int blocks;
    float weight;
    bool adds;  // the layer's own choice counts
    u64 least;  // key of the layer's own choice, not 0

    // Calls `look` with each of the thread's blocks, its votes and its score; TOGETHER of them are read at once.
    template <int TOGETHER, class Look>
    __device__ __forceinline__ void each(Look look) const {
        for (int first = threadIdx.x; first < blocks; first += TOGETHER * THREADS) {
            float vote[TOGETHER], score[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int block = first + i * THREADS;
                vote[i] = block < blocks ? votes[block] : 0.0f;
                score[i] = block < blocks && scores ? scores[block] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int block = first + i * THREADS;
                if (block < blocks) look(block, vote[i], score[i]);
            }
        }
    }

    __device__ __forceinline__ Key own(int block, float score) const {
        const unsigned second = ~static_cast<unsigned>(block);
        return {score > NOTHING ? static_cast<u64>(ordered(score)) << 32 | second : 0, second};
    }

    __device__ __forceinline__ Key counted(int block, float vote, float score) const {
        if (adds && own(block, score).first >= least) vote += weight;
        const unsigned second = ~static_cast<unsigned>(block), then = scores ? ordered(score) : second;
        return {score > NOTHING && vote > 0.0f ? static_cast<u64>(ordered(vote)) << 32 | then : 0, second};
    }

    template <bool OWN>
    __device__ __forceinline__ Key key(int block, float vote, float score) const {
        return OWN ? own(block, score) : counted(block, vote, score);
    }
};

struct Shared {
    u64 best[WARPS][33];  // of each thread; a column more, so that a column's numbers lie in different banks
    u64 group[GROUPS];
    u64 bar, least;
    Key listed[LISTED];
    int count;
};

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a < b ? b : a; }

// What the K-th best group has: 0 where there are fewer groups with a block.
__device__ __forceinline__ void set_bar(u64 best, int kept, Shared &shared) {
    const int thread = threadIdx.x, group = thread / LANES;
    shared.best[thread / 32][thread % 32] = best;
    __syncthreads();
    u64 most = shared.best[group / 32 + thread % LANES * (GROUPS / 32)][group % 32];
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) most = larger(most, __shfl_xor_sync(FULL, most, apart));
    if (thread % LANES == 0) shared.group[group] = most;
    if (thread == 0) shared.bar = 0, shared.least = 0, shared.count = 0;
    __syncthreads();
    if (thread < GROUPS) {
        const u64 mine = shared.group[thread];
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < GROUPS; ++i) rank += shared.group[i] > mine || (shared.group[i] == mine && i < thread);
        if (rank == kept - 1) shared.bar = mine;
    }
    __syncthreads();
}

// The best blocks, where `out` is given, and the key of the last of them.
//
// Takes the best key of the thread's blocks.
template <bool OWN>
__device__ __forceinline__ void search(const Ballot &ballot, u64 best, int kept, int *out, Shared &shared) {
    const int thread = threadIdx.x;
    set_bar(best, kept, shared);
    const u64 bar = larger(shared.bar, 1);
    if (best >= bar)
        ballot.each<1>([&](int block, float vote, float score) {
            const Key key = ballot.key<OWN>(block, vote, score);
            if (key.first < bar) return;
            const int place = atomicAdd(&shared.count, 1);
            if (place < LISTED) shared.listed[place] = key;
        });
    __syncthreads();
    const int count = shared.count;
    if (count <= LISTED) {
        if (thread < count) {
            const Key mine = shared.listed[thread];
            int rank = 0;
#pragma unroll 8
            for (int i = 0; i < count; ++i) rank += less(mine, shared.listed[i]);
            if (rank < kept && out) out[rank] = number_of(mine);
            if (rank == min(count, kept) - 1) shared.least = mine.first;
        }
        if (out && thread >= count && thread < kept) out[thread] = -1;
        __syncthreads();
        return;
    }
    Key last = {~0ull, ~0u};
    for (int rank = 0; rank < kept; ++rank) {  // more than LISTED blocks are eligible, and there are kept of them
        Key most = {0, 0};
        ballot.each<1>([&](int block, float vote, float score) {
            const Key key = ballot.key<OWN>(block, vote, score);
            if (less(key, last) && less(most, key)) most = key;
        });
#pragma unroll
        for (int apart = 16; apart; apart /= 2) {
            const Key other = {__shfl_xor_sync(FULL, most.first, apart), __shfl_xor_sync(FULL, most.second, apart)};
            if (less(most, other)) most = other;
        }
        if (thread % 32 == 0) shared.listed[thread / 32] = most;
        __syncthreads();
        last = shared.listed[0];
        for (int warp = 1; warp < WARPS; ++warp)
            if (less(last, shared.listed[warp])) last = shared.listed[warp];
        if (thread == 0 && out) out[rank] = number_of(last);
        if (thread == 0) shared.least = last.first;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
elect(float *votes, const float *scores, int *out, const float *weights, float weight, int max_blocks, int kept, int mode) {
    __shared__ Shared shared;
    const i64 row = static_cast<i64>(blockIdx.x) * max_blocks;
    votes += row, out += static_cast<i64>(blockIdx.x) * kept;
    Ballot ballot = {
        votes, scores ? scores + row : nullptr, max_blocks, weights ? weights[blockIdx.x] : weight,
        scores && mode == INCLUSIVE, 0,
    };
    u64 own = 0, counted = 0;  // the best keys of the thread's blocks
    bool voted = false;
    ballot.each<8>([&](int block, float vote, float score) {
        own = larger(own, ballot.own(block, score).first);
        voted |= vote > 0.0f;
    });
    if (scores) {
        search<true>(ballot, own, kept, mode == OFF ? out : nullptr, shared);
        ballot.least = larger(shared.least, 1);
        __syncthreads();
    }
    const bool chose = scores && own >= ballot.least;
    if (mode != OFF) {
        if (voted || chose)
            ballot.each<4>([&](int block, float vote, float score) {
                counted = larger(counted, ballot.counted(block, vote, score).first);
            });
        search<false>(ballot, counted, kept, out, shared);
    }
    if (chose)
        ballot.each<1>([&](int block, float vote, float score) {
            if (ballot.own(block, score).first >= ballot.least) votes[block] = vote + ballot.weight;
        });
}
