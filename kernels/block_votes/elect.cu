// The election among memory blocks: a block of threads a request, no sorting, and few steps that wait for each other.
//
// To find the best K of n blocks, threads are dealt into groups, of which each says its best block. The K best of these
// are K different blocks, so none of the K best of all is worse than the worst of them: it is the bar. What reaches the
// bar is listed, usually little more than K blocks, and each of these is ranked by comparing it with all others, 32 at
// once. Where too many reach it, the best are found one after the other. Neighbours, which are often alike, lie in
// different groups. A thread knows its best block, and how good its next one is, so that it seldom looks at all of its
// blocks again. `cuda_election.py` says what the arguments are; what is elected is what `triton_impl.py` elects.
//
// Set by the compiler: THREADS, LANES (threads of a group, a power of two up to 32, so that there are 32 groups or more).

#include "instructions.cuh"

#define INCLUSIVE 0  // `types.VOTES`
#define OFF 2
#define WARPS (THREADS / 32)
#define GROUPS (THREADS / LANES)
#define HELD 8      // blocks of a thread that stay in registers
#define LISTED 512  // blocks that may reach the bar

// What blocks are ordered by: `first`, at least ELIGIBLE for those that are, and where it is equal, `second`.
struct Key {
    u64 first;        // votes and score; or one of them, and `second`, so that none are equal
    unsigned second;  // the smaller a block's number, the larger
};

#define ELIGIBLE (1ull << 32)

__device__ __forceinline__ u64 joined(unsigned high, unsigned low) { return static_cast<u64>(high) << 32 | low; }

__device__ __forceinline__ bool less(const Key &a, const Key &b) {
    return a.first < b.first || (a.first == b.first && a.second < b.second);
}

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a < b ? b : a; }

// A score's bits in its order, in which both zeros are one; 0 where there is none.
__device__ __forceinline__ unsigned ordered(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);
    return score > NOTHING ? bits & 0x80000000u ? ~bits : bits | 0x80000000u : 0;
}

__device__ __forceinline__ int number_of(const Key &key) { return static_cast<int>(~key.second); }

// Of a thread's blocks, which it takes in their order, so that the first of equals stays.
struct Best {
    Key key = {0, 0};
    u64 next = 0;  // `first` of the second best

    __device__ __forceinline__ void take(const Key &other) {
        const bool better = key.first < other.first;
        next = larger(next, better ? key.first : other.first);
        if (better) key = other;
    }
};

struct Ballot {
    const float *votes, *scores;  // scores are null in a layer in which no head votes
    int blocks;
    float weight;
    bool adds;  // the layer's own choice counts
    u64 least;  // key of the layer's own choice
    float vote[HELD];
    unsigned order[HELD];  // of scores

    __device__ __forceinline__ unsigned order_at(int block) const { return ordered(scores ? scores[block] : 0.0f); }

    __device__ __forceinline__ void read() {
        const float *from = scores ? scores : votes;
        float score[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = min(static_cast<int>(threadIdx.x) + i * THREADS, blocks - 1);
            vote[i] = votes[at], score[i] = from[at];
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            order[i] = ordered(scores ? score[i] : 0.0f);
            if (static_cast<int>(threadIdx.x) + i * THREADS >= blocks) order[i] = 0;
        }
    }

    // Calls `look` with the thread's blocks from the i-th, their votes and the order of their scores.
    template <class Look>
    __device__ __forceinline__ void look_up(int i, Look look) const {
#pragma unroll 1
        for (int block = threadIdx.x + i * THREADS; block < blocks; block += THREADS)
            look(block, votes[block], order_at(block));
    }

    // The same of all, after `read`; a block that there is not has the order 0.
    template <class Look>
    __device__ __forceinline__ void each(Look look) const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) look(static_cast<int>(threadIdx.x) + i * THREADS, vote[i], order[i]);
        look_up(HELD, look);
    }

    // The vote of one of the thread's blocks, as it was read.
    __device__ __forceinline__ float vote_at(int block) const {
        const int number = block / THREADS;
        float found = number < HELD ? vote[0] : votes[block];
#pragma unroll
        for (int i = 1; i < HELD; ++i)
            if (i == number) found = vote[i];
        return found;
    }

    __device__ __forceinline__ Key own(int block, unsigned order) const {
        const unsigned second = ~static_cast<unsigned>(block);
        return {joined(order, second), second};
    }

    __device__ __forceinline__ Key counted(int block, float vote, unsigned order) const {
        const unsigned second = ~static_cast<unsigned>(block);
        if (adds && joined(order, second) >= least) vote += weight;
        return {joined(order && vote > 0.0f ? __float_as_uint(vote) : 0, scores ? order : second), second};
    }

    template <bool OWN>
    __device__ __forceinline__ Key key(int block, float vote, unsigned order) const {
        return OWN ? own(block, order) : counted(block, vote, order);
    }
};

struct Shared {
    u64 best[WARPS][33];  // of each thread; a column more, so that a column's numbers lie in different banks
    u64 group[GROUPS];
    u64 bar, least;
    Key listed[LISTED];
    int count;
};

// Has `found` called, in one thread, with the number of each of so many keys and that of all that are before it.
template <class Before, class Found>
__device__ __forceinline__ void rank(int count, Before before, Found found) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int mine = threadIdx.x / 32; mine < count; mine += WARPS) {
        int rank = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += 32)
            rank += __popc(__ballot_sync(FULL, first + lane < count && before(first + lane, mine)));
        if (lane == 0) found(mine, rank);
    }
}

// The key of the best block of the K-th best group, less than ELIGIBLE where there are fewer groups with such a block.
__device__ __forceinline__ void set_bar(u64 best, int kept, Shared &shared) {
    const int thread = threadIdx.x, group = thread / LANES;
    shared.best[thread / 32][thread % 32] = best;
    if (thread == 0) shared.bar = 0, shared.count = 0;
    __syncthreads();
    u64 most = shared.best[group / 32 + thread % LANES * (GROUPS / 32)][group % 32];
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) most = larger(most, __shfl_xor_sync(FULL, most, apart));
    if (thread % LANES == 0) shared.group[group] = most;
    __syncthreads();
    const auto before = [&](int a, int b) {
        return shared.group[a] > shared.group[b] || (shared.group[a] == shared.group[b] && a < b);
    };
    rank(GROUPS, before, [&](int mine, int rank) {
        if (rank == kept - 1) shared.bar = shared.group[mine];
    });
    __syncthreads();
}

// The best blocks, where `out` is given, and for OWN the key of the last of them, 0 where there is none.
template <bool OWN>
__device__ __forceinline__ void search(const Ballot &ballot, const Best &best, int kept, int *out, Shared &shared) {
    const int thread = threadIdx.x;
    set_bar(best.key.first, kept, shared);
    const u64 bar = larger(shared.bar, ELIGIBLE);
    const auto list = [&](const Key &key) {
        const int place = atomicAdd(&shared.count, 1);
        if (place < LISTED) shared.listed[place] = key;
    };
    if (best.key.first >= bar) list(best.key);
    if (best.next >= bar)
        ballot.each([&](int block, float vote, unsigned order) {
            const Key key = ballot.key<OWN>(block, vote, order);
            if (key.first >= bar && key.second != best.key.second) list(key);
        });
    __syncthreads();
    const int count = shared.count;
    if (count <= LISTED) {
        const auto before = [&](int a, int b) { return less(shared.listed[b], shared.listed[a]); };
        rank(count, before, [&](int mine, int rank) {
            if (rank < kept && out) out[rank] = number_of(shared.listed[mine]);
            if (OWN && rank == min(count, kept) - 1) shared.least = shared.listed[mine].first;
        });
        if (out && thread >= count && thread < kept) out[thread] = -1;
        __syncthreads();
        return;
    }
    Key last = {~0ull, ~0u};
#pragma unroll 1
    for (int rank = 0; rank < kept; ++rank) {  // there are more than LISTED
        Key most = {0, 0};
        ballot.look_up(0, [&](int block, float vote, unsigned order) {
            const Key key = ballot.key<OWN>(block, vote, order);
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
#pragma unroll 1
        for (int warp = 1; warp < WARPS; ++warp)
            if (less(last, shared.listed[warp])) last = shared.listed[warp];
        if (thread == 0 && out) out[rank] = number_of(last);
        if (OWN && thread == 0) shared.least = last.first;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
elect(float *votes, const float *scores, int *out, const float *weights, float weight, int max_blocks, int kept, int mode) {
    wait_for_launch_before();
    __shared__ Shared shared;
    const i64 row = static_cast<i64>(blockIdx.x) * max_blocks;
    votes += row, out += static_cast<i64>(blockIdx.x) * kept;
    Ballot ballot;
    ballot.votes = votes, ballot.scores = scores ? scores + row : nullptr, ballot.blocks = max_blocks;
    ballot.weight = weights ? weights[blockIdx.x] : weight, ballot.adds = scores && mode == INCLUSIVE;
    ballot.read();
    Best own;
    if (scores) {
        if (threadIdx.x == 0) shared.least = 0;
        ballot.each([&](int block, float, unsigned order) { own.take(ballot.own(block, order)); });
        search<true>(ballot, own, kept, mode == OFF ? out : nullptr, shared);
        ballot.least = larger(shared.least, ELIGIBLE);
    }
    if (mode != OFF) {
        Best counted;
        ballot.each([&](int block, float vote, unsigned order) { counted.take(ballot.counted(block, vote, order)); });
        search<false>(ballot, counted, kept, out, shared);
    }
    if (!scores) return;
    const int best = number_of(own.key);
    if (own.key.first >= ballot.least) votes[best] = ballot.vote_at(best) + ballot.weight;
    if (own.next >= ballot.least)
        ballot.look_up(0, [&](int block, float vote, unsigned order) {
            const Key key = ballot.own(block, order);
            if (key.first >= ballot.least && key.second != own.key.second) votes[block] = vote + ballot.weight;
        });
}
