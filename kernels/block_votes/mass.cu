// Scores of memory blocks by the similarity `mass`: the attention that a block's vectors get among those of all blocks.
// `compare.cuh` says how vectors are multiplied, `cuda_mass.py` what the arguments are.
//
// The index is read once. `levels` leaves, for each block and each of the query's vectors, the logarithm of the sum of the
// exponentials, and for each block of its grid that of all of its blocks; `masses` joins the latter, and makes shares of the
// former. Logarithms are those to the base of 2.
//
// A block has one span here (SPANS is 1), so that all products of whole numbers have one scale: they are compared, and
// subtracted from the largest, before they are scaled, and the difference is exact.
//
// Set by the compiler: what compare.cuh asks for.

#include "block_votes/compare.cuh"

#define GROUPS ((COLUMNS + 7) / 8)  // of 8 vectors of the query, of which a thread has two
#define OWN (2 * GROUPS)
#define KEPT (OWN % 2 ? OWN : OWN % 4 ? OWN / 2 : OWN % 8 ? OWN / 4 : OWN / 8)  // of these, once lanes have shared them out
#define LOWEST static_cast<Sum>(PACKED ? -(1 << 23) : -3e38f)  // of sums; there is none
#define LOW -3e38f                                             // likewise of logarithms

static_assert(SPANS == 1 && SETS == 1, "a block has one span, and a product the whole query");

// Of numbers whose exponentials are added: the largest, and the sum divided by the exponential of the largest, which is 0
// where there are no numbers.
template <class Number>
struct Level {
    Number most;
    float sum;
};

// 2 to the power of `scale` times how much less a number is. Whole numbers are 2^23 apart at most, unless one is LOWEST:
// the bits of 2^24, less so much, are those of 2^24 less so much, and 2^24 times a scale is exact, so that nothing is
// rounded but the last step.
__device__ __forceinline__ float power(int number, int most, float scale) {
    return exp2_of(fmaf(__uint_as_float(0x4b800000u - (most - number)), scale, -16777216.0f * scale));
}

__device__ __forceinline__ float power(float number, float most, float scale) { return exp2_of((number - most) * scale); }

template <class Number>
__device__ __forceinline__ Level<Number> joined(const Level<Number> &a, const Level<Number> &b, float scale) {
    const bool first = a.most >= b.most;
    const Level<Number> high = first ? a : b, low = first ? b : a;
    return {high.most, fmaf(low.sum, power(low.most, high.most, scale), high.sum)};
}

template <class Number>
__device__ __forceinline__ Level<Number> from_lane(const Level<Number> &level, int apart) {
    return {__shfl_xor_sync(FULL, level.most, apart), __shfl_xor_sync(FULL, level.sum, apart)};
}

// The logarithm of the whole sum.
template <class Number>
__device__ __forceinline__ float whole(const Level<Number> &level, float scale) {
    return level.sum > 0.0f ? fmaf(static_cast<float>(level.most), scale, __log2f(level.sum)) : NOTHING;
}

// Adds the products of a part of a block, of which a thread has two rows of each tile.
__device__ __forceinline__ void add(Level<Sum> (&own)[OWN], const Tile (&tiles)[TOGETHER], const Query &query, float scale,
                                    bool first) {
    Products products[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) products[i].read(tiles[i]);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) products[i].begin(query);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) products[i].wait();
#pragma unroll
    for (int column = 0; column < OWN; ++column) {
        const auto at = [&](int i) { return products[i / 2].sum[0][column / 2][i % 2 * 2 + column % 2]; };
        Level<Sum> level = {LOWEST, 0.0f};
#pragma unroll
        for (int i = 0; i < 2 * TOGETHER; ++i)
            if (tiles[i / 2].used[i % 2]) level.most = larger(level.most, at(i));
#pragma unroll
        for (int i = 0; i < 2 * TOGETHER; ++i)
            if (tiles[i / 2].used[i % 2]) level.sum += power(at(i), level.most, scale);
        own[column] = first ? level : joined(own[column], level, scale);
    }
}

// Joins what the 8 lanes have that have the same columns. Of two lanes each keeps half of them while their number is even,
// and both keep all where it is odd: in the end a lane has KEPT columns from `first_kept` on.
__device__ __forceinline__ void share_out(Level<Sum> (&own)[OWN], float scale) {
    int count = OWN;
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2) {
        const bool halves = count % 2 == 0, upper = threadIdx.x & apart;
        if (halves) count /= 2;
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) {
            if (i >= count) continue;
            Level<Sum> kept = own[i], given = own[i];
            if (halves && upper) kept = own[i + count];
            if (halves && !upper) given = own[i + count];
            own[i] = joined(kept, from_lane(given, apart), scale);
        }
    }
}

__device__ __forceinline__ int first_kept() {
    int count = OWN, first = 0;
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2)
        if (count % 2 == 0) count /= 2, first += threadIdx.x & apart ? count : 0;
    return first;
}

// The query's vector of a column that a thread has.
__device__ __forceinline__ int vector_of(int column) { return column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2; }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
levels(const u16 *query, const int *query_counts, const unsigned char *vectors, const float *scales, const int *counts,
       const int *ids, const Number *blocks, float *levels_of_blocks, float *levels_of_programs, int max_blocks,
       float scale_of_products) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ __align__(128) Query shared;
    __shared__ float of_warps[WARPS][8 * GROUPS];
    const int request = blockIdx.y;
    query += static_cast<i64>(request) * COLUMNS * DIM, query_counts += request * (COLUMNS / MOST_Q);
    ids += static_cast<i64>(request) * max_blocks;
    levels_of_blocks += static_cast<i64>(request) * max_blocks * COLUMNS;
    levels_of_programs += static_cast<i64>(request) * COLUMNS * gridDim.x;
    const Number all = blocks[request];
    const int spoken = first_spoken(query_counts);
    const int there = spoken < 0 ? 0 : all < max_blocks ? static_cast<int>(all) : max_blocks;
    const Memory memory = {vectors, scales, counts, ids, max_blocks, there};
    Walk walk(memory);
    const float factor = load_query(shared, query, query_counts, max(spoken, 0)) * scale_of_products;

    Level<Sum> own[OWN];
    Level<float> together[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) together[i] = {LOW, 0.0f};
    float scale = 0.0f;
    bool begins = true;
    const int first = first_kept();
    walk.each([&](const Tile (&tiles)[TOGETHER], int block, bool last) {
        if (begins) scale = __shfl_sync(FULL, tiles[0].used[0] ? tiles[0].scale[0] * factor : 0.0f, 0);
        add(own, tiles, shared, scale, begins);
        begins = last;
        if (!last) return;
        share_out(own, scale);
        if (block >= there) return;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int vector = vector_of(first + i);
            const float level = whole(own[i], scale);
            if (vector < COLUMNS) levels_of_blocks[static_cast<i64>(block) * COLUMNS + vector] = level;
            if (level > NOTHING) together[i] = joined(together[i], {level, 1.0f}, 1.0f);
        }
    });
#pragma unroll
    for (int i = 0; i < KEPT; ++i) of_warps[threadIdx.x / 32][vector_of(first + i)] = whole(together[i], 1.0f);
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    Level<float> level = {LOW, 0.0f};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float other = of_warps[warp][threadIdx.x];
        if (other > NOTHING) level = joined(level, {other, 1.0f}, 1.0f);
    }
    levels_of_programs[threadIdx.x * gridDim.x + blockIdx.x] = whole(level, 1.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
masses(const int *query_counts, const Number *blocks, const float *levels_of_blocks, const float *levels_of_programs,
       float *out, int max_blocks, int programs) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ float whole_of[COLUMNS];
    const int request = blockIdx.y, lane = threadIdx.x % 32;
    query_counts += request * (COLUMNS / MOST_Q), out += static_cast<i64>(request) * max_blocks;
    levels_of_blocks += static_cast<i64>(request) * max_blocks * COLUMNS;
    levels_of_programs += static_cast<i64>(request) * COLUMNS * programs;
    const Number all = blocks[request];
    for (int column = threadIdx.x / 32; column < COLUMNS; column += WARPS) {
        Level<float> level = {LOW, 0.0f};
        for (int program = lane; program < programs; program += 32) {
            const float other = levels_of_programs[column * programs + program];
            if (other > NOTHING) level = joined(level, {other, 1.0f}, 1.0f);
        }
#pragma unroll
        for (int apart = 16; apart; apart /= 2) level = joined(level, from_lane(level, apart), 1.0f);
        if (lane == 0) whole_of[column] = whole(level, 1.0f);
    }
    __syncthreads();
    const int block = blockIdx.x * THREADS + threadIdx.x;
    if (block >= max_blocks) return;
    float best = NOTHING;
    if (block < all)
        for (int span = 0; span < COLUMNS / MOST_Q; ++span) {
            const int count = query_counts[span];
            float mass = 0.0f;
            for (int i = 0; i < count; ++i) {
                const int column = span * MOST_Q + i;
                const float level = levels_of_blocks[static_cast<i64>(block) * COLUMNS + column];
                mass = level > NOTHING ? mass + exp2_of(level - whole_of[column]) : NOTHING;
            }
            if (count > 0) best = fmaxf(best, mass);
        }
    out[block] = best;
}
