// Scores of memory blocks by the similarity `max`: a warp a block, whose vectors it holds in registers.
//
// Written in CUDA, since a block is a chain of dependent loads, and Triton's programs hold too much to have many of them
// at once: here a warp reads the next blocks while it compares one, and keeps the query's vectors for all of them.
// `cuda_impl.py` says what the arguments are; scores are those of `triton_impl.py`.
//
// Vectors of the index are the left operand of matrix products, [16 vectors, 16 components], and the query's the right
// one, [16 components, 8 vectors]. Which components come together in a product is of no matter as long as both sides
// agree: so a thread reads pieces of 16 bytes that lie beside those of its neighbours, and has, without exchanging
// anything, what a product wants of it. Of packed vectors, a product has the bytes 4 i + k and 4 i + k + 2 of a piece,
// and of each the component in its low four bits and the one in its high four bits.
//
// Set by the compiler: DIM (components of a vector), SPANS, MOST (of an entry: spans, and vectors of one), MOST_Q (vectors
// of a query's span), COLUMNS (of all of them), PACKED (vectors have 4 bits a component), WIDE (`blocks` has 64 bits),
// THREADS and RESIDENT (of a block of the grid, and how many of these a multiprocessor has at once), and what
// instructions.cuh asks for.

#include "instructions.cuh"

#define ROWS (SPANS * MOST)
#define TILES ((ROWS + 15) / 16)
#define STEPS (DIM / 16)            // products over the components
#define GROUPS ((COLUMNS + 7) / 8)  // products over the query's vectors
#define LINE (PACKED ? DIM / 2 : 2 * DIM)  // bytes of a vector
#define PIECES (LINE / 64)                 // that a thread has of a vector
#define TOGETHER (!PACKED ? 1 : TILES < 3 ? TILES : 3)  // tiles that are read at once
#define PARTS ((TILES + TOGETHER - 1) / TOGETHER)        // of a block

#if WIDE
typedef i64 Number;
#else
typedef int Number;
#endif

// 16 vectors: of a thread, pieces of the rows lane / 4 and 8 behind.
struct Tile {
    uint4 piece[2][PIECES];
    float scale[2];
    bool used[2];
};

__device__ __forceinline__ unsigned word_of(const uint4 &piece, int number) {
    return number == 0 ? piece.x : number == 1 ? piece.y : number == 2 ? piece.z : piece.w;
}

// First byte of a thread's piece in a vector.
__device__ __forceinline__ int begin_of(int piece) { return (4 * piece + threadIdx.x % 4) * 16; }

__device__ __forceinline__ void load(Tile (&tiles)[TOGETHER], int part, int entry, const unsigned char *vectors,
                                     const float *scales, const int *counts) {
    const int lane = threadIdx.x % 32;
    const uint4 zeros = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * (part * TOGETHER + i) + 8 * half + lane / 4;
            Tile &tile = tiles[i];
            tile.used[half] = false;
            if (row < ROWS) {
                const i64 span = static_cast<i64>(entry) * SPANS + row / MOST;
                tile.used[half] = row % MOST < counts[span];
                tile.scale[half] = PACKED ? scales[span] : 1.0f;
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                tile.piece[half][piece] =
                    row < ROWS ? load_once(vectors + (static_cast<i64>(entry) * ROWS + row) * LINE + begin_of(piece))
                               : zeros;
        }
    }
}

// What a thread has of a tile in a product: components of row lane / 4, of the row 8 behind, and again.
__device__ __forceinline__ void operand(unsigned (&left)[4], const Tile &tile, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (PACKED) {
            const unsigned word = word_of(tile.piece[half][step / 8], step % 8 / 2) >> step % 2 * 8;
            left[half] = signed_fours(word), left[half + 2] = signed_fours(word >> 4);
        } else {
            const uint4 &piece = tile.piece[half][step / 2];
            left[half] = word_of(piece, step % 2 * 2), left[half + 2] = word_of(piece, step % 2 * 2 + 1);
        }
    }
}

// The same components of one of the query's vectors, of all products.
__device__ __forceinline__ void load_query(unsigned (&right)[STEPS][2], const u16 *from) {
    const auto four = [&](int component) { return *reinterpret_cast<const uint2 *>(from + component); };
    if (PACKED) {
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            const int component = begin_of(step / 8) + step % 8 * 2;
            const uint2 both[2] = {four(component), four(component + DIM / 2)};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                right[step][k] = (both[k].x & 0xffff) | both[k].y << 16;
                right[step + 1][k] = both[k].x >> 16 | (both[k].y & 0xffff0000);
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint2 both = four(begin_of(step / 2) / 2 + step % 2 * 4);
            right[step][0] = both.x, right[step][1] = both.y;
        }
    }
}

// The largest product of a block's vectors and the query's that this thread has, times the scale of the vector's span.
__device__ __forceinline__ float compared(float best, const Tile (&tiles)[TOGETHER],
                                          const unsigned (&right)[GROUPS][STEPS][2]) {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        float sum[GROUPS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned left[4];
            operand(left, tiles[i], step);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                multiply(sum[group], left, right[group][step][0], right[group][step][1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = NOTHING;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                most = fmaxf(most, fmaxf(sum[group][2 * half], sum[group][2 * half + 1]));
            most = PACKED ? most * tiles[i].scale[half] : most;
            best = fmaxf(best, tiles[i].used[half] ? most : NOTHING);
        }
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
scores(const u16 *query, const int *query_counts, const unsigned char *vectors, const float *scales, const int *counts,
       const int *ids, const Number *blocks, float *out, int max_blocks) {
    const int lane = threadIdx.x % 32, request = blockIdx.y;
    const int warps = gridDim.x * (THREADS / 32), first = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    query += static_cast<i64>(request) * COLUMNS * DIM, query_counts += request * (COLUMNS / MOST_Q);
    ids += static_cast<i64>(request) * max_blocks, out += static_cast<i64>(request) * max_blocks;
    const Number all = blocks[request];
    // Where the query has no vector, its first one stands: a largest product stays as it is.
    int spoken = -1;
    for (int span = COLUMNS / MOST_Q - 1; span >= 0; --span)
        if (query_counts[span] > 0) spoken = span * MOST_Q;
    const int there = spoken < 0 ? 0 : all < max_blocks ? static_cast<int>(all) : max_blocks;

    // A lane knows the entry of one of the warp's next 32 blocks: numbers are read beforehand, all at once.
    int block = first, part = 0, turn = 0, mine = 0;
    const auto entries_of = [&](int from) {
        const i64 at = from + static_cast<i64>(lane) * warps;
        return at < there ? ids[at] : 0;
    };
    mine = entries_of(block);
    Tile now[TOGETHER], next[TOGETHER];
    if (block < there) load(now, 0, __shfl_sync(FULL, mine, 0), vectors, scales, counts);
    unsigned right[GROUPS][STEPS][2];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int column = 8 * group + lane / 4;
        const bool given = column < COLUMNS && column % MOST_Q < query_counts[column / MOST_Q];
        load_query(right[group], query + (given ? column : max(spoken, 0)) * DIM);
    }

    float best = NOTHING;
    while (block < there) {
        const bool last = part == PARTS - 1;
        const int then = last ? block + warps : block;
        if (last && ++turn == 32) turn = 0, mine = entries_of(then);
        const int entry = __shfl_sync(FULL, mine, turn);
        if (then < there) load(next, last ? 0 : part + 1, entry, vectors, scales, counts);
        best = compared(best, now, right);
        if (last) {
#pragma unroll
            for (int apart = 16; apart; apart /= 2) best = fmaxf(best, __shfl_xor_sync(FULL, best, apart));
            if (lane == 0) out[block] = best;
            best = NOTHING;
        }
        block = then, part = last ? 0 : part + 1;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) now[i] = next[i];
    }
    for (; block < max_blocks; block += warps)
        if (lane == 0) out[block] = NOTHING;
}
