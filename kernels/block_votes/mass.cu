// Scores of memory blocks by the similarity `mass`: the attention that a block's vectors get among those of all blocks.
// `compare.cuh` says how vectors are multiplied, `cuda_mass.py` what the arguments are.
//
// The index is read once. `levels` leaves, for each block and each of the query's vectors, the logarithm of the sum of the
// exponentials, and for each block of its grid that of all of its blocks; `masses` joins the latter, and makes shares of the
// former. Logarithms are those to the base of 2.
//
// For each of the query's vectors a warp has a number from which exponents are taken, and not the largest product of each
// block: what is far below it has no share anyway. The number is 0 until the sums of the first block that has vectors are too
// small for that, or those of any block too large. Then all four warps, which multiply together, multiply once more, and take
// the largest product for their number: of the block at hand, or the number so far where that is larger.
//
// Blocks of the grid of `masses` may begin while `levels` runs where each multiprocessor has room for one of them beside its
// blocks of `levels` (BESIDE). Where there is no such room, the first multiprocessors that end would get several of them, and
// the others none, so they may begin when all blocks of `levels` have compared theirs.
//
// Set by the compiler: what compare.cuh asks for, BESIDE, and of `masses` THREADS_OF_MASSES and TAKEN (threads of a block of
// the grid, and how many memory blocks it takes).

#include "block_votes/compare.cuh"

#define GROUPS ((COLUMNS + 7) / 8)  // of 8 vectors of the query, of which a thread has two
#define OWN (2 * GROUPS)
#define KEPT (OWN % 4 ? OWN / 2 : OWN % 8 ? OWN / 4 : OWN / 8)  // of these, once lanes have shared them out
#define LOW -3e38f                                              // less than any logarithm
#define MUCH 1e30f                                              // a sum of exponentials that is far too large
#define LITTLE 1e-15f                                           // and one that is too small to begin with

static_assert(SPANS == 1 && SETS == 1, "a block has one span, and a product the whole query");

// Of two lanes each keeps half of its columns while their number is even, and both keep all where it is odd: so the 8 lanes
// that have the same columns share them out. Calls `keep(i, other, apart)`: column i of what is left is what was at i, or,
// in the upper lane, at `other`; `other` is -1 where it is both.
template <class Keep>
__device__ __forceinline__ void share_out(Keep keep) {
    int count = OWN;
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2) {
        const bool halves = count % 2 == 0;
        if (halves) count /= 2;
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i)
            if (i < count) keep(i, halves ? i + count : -1, apart);
    }
}

// Each lane's columns of what all 8 have together.
__device__ __forceinline__ void add_up(float (&own)[OWN]) {
    share_out([&](int i, int other, int apart) {
        const bool upper = threadIdx.x & apart;
        float kept = own[i], given = own[i];
        if (other >= 0) kept = upper ? own[other] : own[i], given = upper ? own[i] : own[other];
        own[i] = kept + __shfl_xor_sync(FULL, given, apart);
    });
}

// The same of what all 8 have alike.
__device__ __forceinline__ void keep_own(float (&kept)[KEPT], const float (&all)[OWN]) {
    float own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) own[i] = all[i];
    share_out([&](int i, int other, int apart) {
        if (other >= 0 && threadIdx.x & apart) own[i] = own[other];
    });
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = own[i];
}

// The query's vectors that a lane keeps.
__device__ __forceinline__ void keep_vectors(int (&vectors)[KEPT]) {
    float all[OWN], kept[KEPT];
#pragma unroll
    for (int i = 0; i < OWN; ++i) all[i] = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    keep_own(kept, all);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) vectors[i] = static_cast<int>(kept[i]);
}

// Sums of exponentials of a warp's blocks; exponents are products times a scale, less `from`.
struct Sums {
    float from[OWN];       // the same in all 8 lanes
    float kept_from[KEPT];
    float together[KEPT];  // of all blocks
    float block[OWN];      // of a block's parts so far, of which a thread has two rows of each tile
    bool fresh = true;     // no block had vectors yet

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int i = 0; i < OWN; ++i) from[i] = block[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) kept_from[i] = together[i] = 0.0f;
    }

    // Adds a part of a block. `used`: the block has vectors.
    __device__ __forceinline__ void add(const Tile (&tiles)[TOGETHER], const Query &query, float scale, bool used) {
        float sums[OWN];
        sum_up<false>(sums, tiles, query, scale);
        float most = sums[0], least = sums[0];
#pragma unroll
        for (int column = 1; column < OWN; ++column)
            most = fmaxf(most, sums[column]), least = fminf(least, sums[column]);
        const bool small = fresh && tiles[0].used[0] && least < LITTLE;
        if (__syncthreads_or(small || most > MUCH)) {
            raise(tiles, query, scale, used);
            sum_up<true>(sums, tiles, query, scale);
        }
        if (used) fresh = false;
#pragma unroll
        for (int column = 0; column < OWN; ++column) block[column] = sums[column];
    }

    // `block` and what a part adds to it. ROUNDED: products are scaled as in `raise`, so that no exponent is above 0 behind
    // it, however large they are.
    template <bool ROUNDED>
    __device__ __forceinline__ void sum_up(float (&sums)[OWN], const Tile (&tiles)[TOGETHER], const Query &query,
                                           float scale) const {
#pragma unroll
        for (int column = 0; column < OWN; ++column) sums[column] = block[column];
        multiply_tiles(tiles, query, [&](const Products &products, const Tile &tile) {
#pragma unroll
            for (int i = 0; i < 2 * OWN; ++i) {
                const float number = product(products, i / 2, i % 2), less = from[i / 2];
                const float exponent = ROUNDED ? __fmul_rn(number, scale) - less : fmaf(number, scale, -less);
                if (tile.used[i % 2]) sums[i / 2] += exp2_of(exponent);
            }
        });
    }

    // Of one of the thread's columns, and one of its two rows.
    __device__ __forceinline__ static float product(const Products &products, int column, int half) {
        return static_cast<float>(products.sum[0][column / 2][2 * half + column % 2]);
    }

    // Have exponents taken from the largest product, unless there is none.
    __device__ __forceinline__ void raise(const Tile (&tiles)[TOGETHER], const Query &query, float scale, bool used) {
        float most[OWN], before[KEPT];
#pragma unroll
        for (int i = 0; i < OWN; ++i) most[i] = fresh ? LOW : from[i];
#pragma unroll
        for (int i = 0; i < KEPT; ++i) before[i] = kept_from[i];
        multiply_tiles(tiles, query, [&](const Products &products, const Tile &tile) {
#pragma unroll
            for (int i = 0; i < 2 * OWN; ++i)
                if (tile.used[i % 2]) most[i / 2] = fmaxf(most[i / 2], __fmul_rn(product(products, i / 2, i % 2), scale));
        });
        if (!used) return;  // all lanes of the warp
#pragma unroll
        for (int column = 0; column < OWN; ++column) {
#pragma unroll
            for (int apart = 16; apart >= 4; apart /= 2)
                most[column] = fmaxf(most[column], __shfl_xor_sync(FULL, most[column], apart));
            block[column] = fresh ? 0.0f : block[column] * exp2_of(from[column] - most[column]);
            from[column] = most[column];
        }
        keep_own(kept_from, from);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) together[i] = fresh ? 0.0f : together[i] * exp2_of(before[i] - kept_from[i]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT + BESIDE)  // so that there are registers for `masses`, too
levels(const u16 *query, const int *query_counts, const unsigned char *vectors, const float *scales, const int *counts,
       const int *ids, const Number *blocks, float *levels_of_blocks, float *levels_of_programs, int max_blocks,
       float scale_of_products) {
    wait_for_launch_before();
    if (BESIDE) let_next_launch_begin();
    __shared__ __align__(128) Query shared;
    __shared__ float of_warps[WARPS][8 * GROUPS];
    const int request = blockIdx.y;
    query += static_cast<i64>(request) * COLUMNS * DIM, query_counts += request * (COLUMNS / MOST_Q);
    ids += static_cast<i64>(request) * max_blocks;
    levels_of_blocks += static_cast<i64>(request) * max_blocks * COLUMNS;
    levels_of_programs += static_cast<i64>(request) * COLUMNS * gridDim.x;
    const int all = blocks_there(blocks[request], max_blocks), spoken = first_spoken(query_counts);
    const int there = spoken < 0 ? 0 : all;
    const Memory memory = {vectors, scales, counts, ids, max_blocks, there};
    Walk walk(memory);
    const float factor = load_query(shared, query, query_counts, max(spoken, 0)) * scale_of_products;

    Sums sums;
    int kept[KEPT];
    keep_vectors(kept);
    float scale = 0.0f;
    bool begins = true, used = false;
    walk.each([&](const Tile (&tiles)[TOGETHER], int block, bool last) {
        if (begins) {  // a block that has vectors has a first one, in the first lane
            used = __shfl_sync(FULL, static_cast<int>(tiles[0].used[0]), 0);
            scale = __shfl_sync(FULL, tiles[0].used[0] ? tiles[0].scale[0] * factor : 0.0f, 0);
        }
        sums.add(tiles, shared, scale, used);
        begins = last;
        if (!last) return;
        add_up(sums.block);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            sums.together[i] += sums.block[i];
            const float level = used ? fmaxf(sums.kept_from[i] + __log2f(sums.block[i]), LOW) : NOTHING;
            if (block < there && kept[i] < COLUMNS) levels_of_blocks[static_cast<i64>(block) * COLUMNS + kept[i]] = level;
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) sums.block[i] = 0.0f;
    });
    if (!BESIDE) let_next_launch_begin();
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        of_warps[threadIdx.x / 32][kept[i]] = sums.kept_from[i] + __log2f(sums.together[i]);
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    float most = LOW, sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = fmaxf(most, of_warps[warp][threadIdx.x]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += exp2_of(of_warps[warp][threadIdx.x] - most);
    levels_of_programs[threadIdx.x * gridDim.x + blockIdx.x] = most + __log2f(sum);
}

#define WARPS_OF_MASSES (THREADS_OF_MASSES / 32)
#define AHEAD ((TAKEN * COLUMNS + THREADS_OF_MASSES - 1) / THREADS_OF_MASSES)  // levels of blocks that a thread reads
#define AT_ONCE ((RESIDENT * 132 + 31) / 32)  // levels of programs that a lane reads: of all on 132 multiprocessors

extern "C" __global__ void __launch_bounds__(THREADS_OF_MASSES, 2048 / THREADS_OF_MASSES)
masses(const int *query_counts, const Number *blocks, const float *levels_of_blocks, const float *levels_of_programs,
       float *out, int max_blocks, int programs) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ float whole[COLUMNS], shares[TAKEN][COLUMNS | 1];
    __shared__ int counts[COLUMNS / MOST_Q];
    const int request = blockIdx.y, lane = threadIdx.x % 32, first = blockIdx.x * TAKEN;
    query_counts += request * (COLUMNS / MOST_Q), out += static_cast<i64>(request) * max_blocks;
    levels_of_blocks += static_cast<i64>(request) * max_blocks * COLUMNS;
    levels_of_programs += static_cast<i64>(request) * COLUMNS * programs;
    if (threadIdx.x < COLUMNS / MOST_Q) counts[threadIdx.x] = query_counts[threadIdx.x];
    const int end = blocks_there(blocks[request], max_blocks);
    float level[AHEAD];  // also of blocks that there are not: to read them does not wait for how many there are
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = threadIdx.x + i * THREADS_OF_MASSES, block = first + at / COLUMNS;
        const bool kept = at < TAKEN * COLUMNS && block < max_blocks;
        level[i] = kept ? levels_of_blocks[static_cast<i64>(block) * COLUMNS + at % COLUMNS] : NOTHING;
    }
    for (int column = threadIdx.x / 32; column < COLUMNS; column += WARPS_OF_MASSES) {
        float most = LOW, sum = 0.0f;
        for (int begin = 0; begin < programs; begin += 32 * AT_ONCE) {
            float of[AT_ONCE];
            const float before = most;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int program = begin + 32 * i + lane;
                of[i] = program < programs ? levels_of_programs[column * programs + program] : NOTHING;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) most = fmaxf(most, of[i]);
            sum *= exp2_of(before - most);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) sum += exp2_of(of[i] - most);
        }
        float most_of_all = most;
#pragma unroll
        for (int apart = 16; apart; apart /= 2) most_of_all = fmaxf(most_of_all, __shfl_xor_sync(FULL, most_of_all, apart));
        sum *= exp2_of(most - most_of_all);
#pragma unroll
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(FULL, sum, apart);
        if (lane == 0) whole[column] = most_of_all + __log2f(sum);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int at = threadIdx.x + i * THREADS_OF_MASSES;
        const bool there = first + at / COLUMNS < end && level[i] > NOTHING;
        if (at < TAKEN * COLUMNS)
            shares[at / COLUMNS][at % COLUMNS] = there ? exp2_of(level[i] - whole[at % COLUMNS]) : NOTHING;
    }
    __syncthreads();
    const int block = first + threadIdx.x;
    if (threadIdx.x >= TAKEN || block >= max_blocks) return;
    float best = NOTHING;
#pragma unroll
    for (int span = 0; span < COLUMNS / MOST_Q; ++span) {
        const int count = counts[span];
        float mass = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_Q; ++i)
            if (i < count) mass += shares[threadIdx.x][span * MOST_Q + i];
        if (count > 0) best = fmaxf(best, mass);
    }
    out[block] = best;
}
