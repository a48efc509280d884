// The election among memory blocks: a block of threads a request, no sorting, and few steps that wait for each other.
//
// To find the best K of n blocks, threads are dealt into groups, of which each says its best block. The K best of these
// are K different blocks, so none of the K best of all is worse than the worst of them: it is the bar. What reaches the
// bar is listed, usually little more than K blocks, and each of these is ranked by comparing it with all others, 32 at
// once. Where too many reach it, the best are found one after the other. Neighbours, which are often alike, lie in
// different groups. A thread knows its best block, and how good its next one is, so that it seldom looks at all of its
// blocks again. `cuda_election.py` says what the arguments are; what is elected is what `triton_impl.py` elects.
//
// The layer's own choice and the blocks with the most votes before it are searched for at once. Where the own choice counts,
// the best of all are among these two: votes only grow, so whatever is among the best without having got the layer's vote,
// was among the best before. Where a weight is less than 0, they do not, and the best are found one after the other.
//
// Set by the compiler: THREADS, LANES (threads of a group, a power of two up to 32, so that there are 32 groups or more).

#include "instructions.cuh"

#define INCLUSIVE 0  // `types.VOTES`
#define OFF 2
#define WARPS (THREADS / 32)
#define GROUPS (THREADS / LANES)
#define HELD 8      // blocks of a thread that stay in registers
#define LISTED 512  // blocks that may reach the bar
#define MOST_KEPT 64  // `types.MAX_COUNT`

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
    float vote = 0.0f;
    u64 next = 0;  // `first` of the second best

    __device__ __forceinline__ void take(const Key &other, float of_other) {
        const bool better = key.first < other.first;
        next = larger(next, better ? key.first : other.first);
        if (better) key = other, vote = of_other;
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

    __device__ __forceinline__ Key own(int block, unsigned order) const {
        const unsigned second = ~static_cast<unsigned>(block);
        return {joined(order, second), second};
    }

    // By the votes before this layer.
    __device__ __forceinline__ Key before(int block, float vote, unsigned order) const {
        const unsigned second = ~static_cast<unsigned>(block);
        return {joined(order && vote > 0.0f ? __float_as_uint(vote) : 0, scores ? order : second), second};
    }

    // By all votes that count in this layer.
    __device__ __forceinline__ Key counted(int block, float vote, unsigned order) const {
        return before(block, adds && own(block, order).first >= least ? vote + weight : vote, order);
    }
};

// What is searched for: the layer's own choice, and the most votes.
enum { OWN, VOTED };

struct Shared {
    u64 best[2][WARPS][33];  // of each thread; a column more, so that a column's numbers lie in different banks
    u64 group[2][GROUPS];
    u64 bar[2], least;
    Key listed[2][LISTED];  // of the own choice, `second` has the votes
    Key chosen[MOST_KEPT];  // the own choice, by all votes
    int count[2];
};

// Has `found` called, in one thread, with the number of each key of two lists of so many, and that of all before it.
template <class Before, class Found>
__device__ __forceinline__ void rank(int own, int voted, Before before, Found found) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < own + voted; i += WARPS) {
        const int list = i < own ? OWN : VOTED, mine = list == OWN ? i : i - own, count = list == OWN ? own : voted;
        int rank = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += 32)
            rank += __popc(__ballot_sync(FULL, first + lane < count && before(list, first + lane, mine)));
        if (lane == 0) found(list, mine, rank);
    }
}

// For each search the key of the best block of the K-th best group, less than ELIGIBLE where there are fewer groups with
// such a block.
__device__ __forceinline__ void set_bars(u64 own, u64 voted, int kept, Shared &shared) {
    const int thread = threadIdx.x, group = thread / LANES;
    shared.best[OWN][thread / 32][thread % 32] = own, shared.best[VOTED][thread / 32][thread % 32] = voted;
    if (thread < 2) shared.bar[thread] = 0, shared.count[thread] = 0;
    if (thread == 0) shared.least = 0;
    __syncthreads();
#pragma unroll
    for (int list = 0; list < 2; ++list) {
        u64 most = shared.best[list][group / 32 + thread % LANES * (GROUPS / 32)][group % 32];
#pragma unroll
        for (int apart = LANES / 2; apart; apart /= 2) most = larger(most, __shfl_xor_sync(FULL, most, apart));
        if (thread % LANES == 0) shared.group[list][group] = most;
    }
    __syncthreads();
    const auto before = [&](int list, int a, int b) {
        const u64 (&of)[GROUPS] = shared.group[list];
        return of[a] > of[b] || (of[a] == of[b] && a < b);
    };
    rank(GROUPS, GROUPS, before, [&](int list, int mine, int rank) {
        if (rank == kept - 1) shared.bar[list] = shared.group[list][mine];
    });
    __syncthreads();
}

// Lists what reaches the bars.
__device__ __forceinline__ void list(const Ballot &ballot, const Best &own, const Best &voted, bool by_votes, Shared &shared) {
    const u64 bar_own = ballot.scores ? larger(shared.bar[OWN], ELIGIBLE) : ~0ull;
    const u64 bar_voted = by_votes ? larger(shared.bar[VOTED], ELIGIBLE) : ~0ull;
    const auto put = [&](int list, const Key &key) {
        const int place = atomicAdd(&shared.count[list], 1);
        if (place < LISTED) shared.listed[list][place] = key;
    };
    if (own.key.first >= bar_own) put(OWN, {own.key.first, __float_as_uint(own.vote)});
    if (voted.key.first >= bar_voted) put(VOTED, voted.key);
    if (own.next >= bar_own || voted.next >= bar_voted)
        ballot.each([&](int block, float vote, unsigned order) {
            const Key as_own = ballot.own(block, order), as_voted = ballot.before(block, vote, order);
            if (as_own.first >= bar_own && as_own.second != own.key.second)
                put(OWN, {as_own.first, __float_as_uint(vote)});
            if (as_voted.first >= bar_voted && as_voted.second != voted.key.second) put(VOTED, as_voted);
        });
    __syncthreads();
}

// Has `found` called, in one thread, with the best blocks and their ranks, one after the other. `key` says by what.
template <class KeyOf, class Found>
__device__ __forceinline__ void in_turn(const Ballot &ballot, int kept, Shared &shared, KeyOf key, Found found) {
    Key last = {~0ull, ~0u};
#pragma unroll 1
    for (int rank = 0; rank < kept; ++rank) {
        Key most = {0, 0};
        float votes_of_most = 0.0f;
        ballot.look_up(0, [&](int block, float vote, unsigned order) {
            const Key other = key(block, vote, order);
            if (less(other, last) && less(most, other)) most = other, votes_of_most = vote;
        });
        Key best = most;
#pragma unroll
        for (int apart = 16; apart; apart /= 2) {
            const Key other = {__shfl_xor_sync(FULL, best.first, apart), __shfl_xor_sync(FULL, best.second, apart)};
            if (less(best, other)) best = other;
        }
        if (threadIdx.x % 32 == 0) shared.best[OWN][0][threadIdx.x / 32] = best.first,
                                   shared.best[VOTED][0][threadIdx.x / 32] = best.second;
        __syncthreads();
        last = {0, 0};
#pragma unroll 1
        for (int warp = 0; warp < WARPS; ++warp) {
            const Key other = {shared.best[OWN][0][warp], static_cast<unsigned>(shared.best[VOTED][0][warp])};
            if (less(last, other)) last = other;
        }
        if (last.first < ELIGIBLE) break;
        if (most.first == last.first && most.second == last.second) found(rank, most, votes_of_most);
        __syncthreads();
    }
    __syncthreads();
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
    ballot.least = ~0ull;
    ballot.read();
    Best own, voted;
    ballot.each([&](int block, float vote, unsigned order) {
        if (scores) own.take(ballot.own(block, order), vote);
        if (mode != OFF) voted.take(ballot.before(block, vote, order), vote);
    });
    if (threadIdx.x < kept) out[threadIdx.x] = -1;
    set_bars(own.key.first, voted.key.first, kept, shared);
    list(ballot, own, voted, mode != OFF, shared);

    const auto choose = [&](int rank, u64 key, float vote) {
        const int block = static_cast<int>(~static_cast<unsigned>(key));
        shared.chosen[rank] = ballot.before(block, vote + ballot.weight, static_cast<unsigned>(key >> 32));
        if (mode == OFF) out[rank] = block;
    };
    const int all_own = shared.count[OWN], all_voted = shared.count[VOTED];
    const bool grow = !ballot.adds || ballot.weight >= 0.0f, in_lists = all_voted <= LISTED && grow;
    if (all_own > LISTED)
        in_turn(
            ballot, kept, shared, [&](int block, float, unsigned order) { return ballot.own(block, order); },
            [&](int rank, const Key &key, float vote) { choose(rank, key.first, vote), shared.least = key.first; });
    const int ranked = all_own > LISTED ? 0 : all_own, chosen = min(all_own, kept);
    const auto better = [&](int list, int a, int b) {
        const Key &first = shared.listed[list][a], &second = shared.listed[list][b];
        return list == OWN ? first.first > second.first : less(second, first);
    };
    rank(ranked, in_lists && !ballot.adds ? all_voted : 0, better, [&](int list, int mine, int rank) {
        const Key &key = shared.listed[list][mine];
        if (list == VOTED && rank < kept) out[rank] = number_of(key);
        if (list == OWN && rank < kept) choose(rank, key.first, __uint_as_float(key.second));
        if (list == OWN && rank == chosen - 1) shared.least = key.first;
    });
    __syncthreads();
    ballot.least = larger(shared.least, ELIGIBLE);

    if (!in_lists)
        in_turn(
            ballot, kept, shared,
            [&](int block, float vote, unsigned order) { return ballot.counted(block, vote, order); },
            [&](int rank, const Key &key, float) { out[rank] = number_of(key); });
    if (in_lists && ballot.adds) {
        // Among the own choice and what has the most votes without being chosen.
        const auto key = [&](int i) -> Key {
            if (i < chosen) return shared.chosen[i];
            const Key &other = shared.listed[VOTED][i - chosen];
            return joined(static_cast<unsigned>(other.first), other.second) >= ballot.least ? Key{0, 0} : other;
        };
        rank(0, chosen + all_voted, [&](int, int a, int b) { return less(key(b), key(a)); }, [&](int, int mine, int rank) {
            if (rank < kept && key(mine).first >= ELIGIBLE) out[rank] = number_of(key(mine));
        });
    }
    if (!scores) return;
    if (own.key.first >= ballot.least) votes[number_of(own.key)] = own.vote + ballot.weight;
    if (own.next >= ballot.least)
        ballot.each([&](int block, float vote, unsigned order) {
            const Key key = ballot.own(block, order);
            if (key.first >= ballot.least && key.second != own.key.second) votes[block] = vote + ballot.weight;
        });
}
