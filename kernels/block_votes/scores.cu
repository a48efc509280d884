// Scores of memory blocks by the similarity `max`: a warp a block, which copies the next ones while it compares one.
//
// Written in CUDA, since a block is a chain of dependent loads, and Triton's programs hold too much to have many of them
// at once: here a warp keeps the query's vectors in registers for all of its blocks, and has several tiles of the index
// on their way to shared memory. `cuda_impl.py` says what the arguments are; scores are those of `triton_impl.py`.
//
// Vectors of the index are the left operand of matrix products, [16 vectors, 16 components], and the query's the right
// one, [16 components, 8 vectors]. Which components come together in a product is of no matter as long as both sides
// agree: so a thread reads pieces of 16 bytes that lie beside those of its neighbours, and has, without exchanging
// anything, what a product wants of it. Of packed vectors, a product has the bytes 4 i + k and 4 i + k + 2 of a piece,
// and of each the component in its low four bits and the one in its high four bits.
//
// Set by the compiler: DIM (components of a vector), SPANS, MOST (of an entry: spans, and vectors of one), MOST_Q (vectors
// of a query's span), COLUMNS (of all of them), PACKED (vectors have 4 bits a component), WIDE (`blocks` has 64 bits),
// THREADS, RESIDENT (blocks of so many threads that a multiprocessor has at once), and what instructions.cuh asks for.

#include "instructions.cuh"

#define ROWS (SPANS * MOST)
#define TILES ((ROWS + 15) / 16)
#define STEPS (DIM / 16)            // products over the components
#define GROUPS ((COLUMNS + 7) / 8)  // products over the query's vectors
#define LINE (PACKED ? DIM / 2 : 2 * DIM)  // bytes of a vector
#define PIECES (LINE / 64)                 // that a thread has of a vector
#define AHEAD (PIECES == 1 ? 6 : PIECES == 2 ? 4 : 2)  // tiles of a warp that are on their way

#if WIDE
typedef i64 Number;
#else
typedef int Number;
#endif

// 16 vectors: of each thread, pieces of the rows lane / 4 and 8 behind, and how many vectors their spans have.
struct Tile {
    uint4 piece[2][PIECES][32];
    int count[2][32];
    float scale[PACKED ? 2 : 1][32];
};

__device__ __forceinline__ unsigned word_of(const uint4 &piece, int number) {
    return number == 0 ? piece.x : number == 1 ? piece.y : number == 2 ? piece.z : piece.w;
}

// First byte of a thread's piece in a vector.
__device__ __forceinline__ int begin_of(int piece) { return (4 * piece + threadIdx.x % 4) * 16; }

__device__ __forceinline__ void copy(Tile &tile, int number, i64 entry, const unsigned char *vectors, const float *scales,
                                     const int *counts) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * number + 8 * half + lane / 4;
        const bool there = row < ROWS;
        const i64 span = entry * SPANS + (there ? row / MOST : 0);
        const unsigned char *line = vectors + (entry * ROWS + (there ? row : 0)) * LINE;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            copy16(shared_address(&tile.piece[half][piece][lane]), line + begin_of(piece), there);
        copy4(shared_address(&tile.count[half][lane]), counts + span, there);
        if (PACKED) copy4(shared_address(&tile.scale[PACKED * half][lane]), scales + span, there);
    }
}

// What a thread has of a tile in a product: components of row lane / 4, of the row 8 behind, and again.
__device__ __forceinline__ void operand(unsigned (&left)[4], const uint4 (&pieces)[2][PIECES], int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (PACKED) {
            const unsigned word = word_of(pieces[half][step / 8], step % 8 / 2) >> step % 2 * 8;
            left[half] = signed_fours(word), left[half + 2] = signed_fours(word >> 4);
        } else {
            const uint4 &piece = pieces[half][step / 2];
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

// The largest product of a tile's vectors and the query's that this thread has.
__device__ __forceinline__ float compared(float best, const Tile &tile, int number,
                                          const unsigned (&right)[GROUPS][STEPS][2]) {
    const int lane = threadIdx.x % 32;
    uint4 pieces[2][PIECES];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) pieces[half][piece] = tile.piece[half][piece][lane];
    float sum[GROUPS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned left[4];
        operand(left, pieces, step);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            multiply(sum[group], left, right[group][step][0], right[group][step][1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = fmaxf(sum[0][2 * half], sum[0][2 * half + 1]);
#pragma unroll
        for (int group = 1; group < GROUPS; ++group)
            largest = fmaxf(largest, fmaxf(sum[group][2 * half], sum[group][2 * half + 1]));
        if (PACKED) largest *= tile.scale[PACKED * half][lane];  // no scale is less than 0
        const int row = 16 * number + 8 * half + lane / 4;
        if (row < ROWS && row % MOST < tile.count[half][lane]) best = fmaxf(best, largest);
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
    int there = all < max_blocks ? static_cast<int>(all) : max_blocks;

    // Vectors that there are not are the first that there is, once more: that changes no maximum.
    const auto given = [&](int column) {
        return column < COLUMNS && column % MOST_Q < query_counts[column / MOST_Q];
    };
    int some = COLUMNS;
    for (int span = 0; span < COLUMNS / MOST_Q && some == COLUMNS; ++span)
        if (query_counts[span] > 0) some = span * MOST_Q;
    if (some == COLUMNS) there = 0;  // nothing is compared
    unsigned right[GROUPS][STEPS][2];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int column = 8 * group + lane / 4;
        load_query(right[group], query + (given(column) ? column : there ? some : 0) * DIM);
    }

    // A lane knows the entry of one of the warp's next 32 blocks: numbers are read beforehand, all at once.
    __shared__ Tile tiles[THREADS / 32][AHEAD];
    Tile *const own = tiles[threadIdx.x / 32];
    int mine = 0, turn = 32, coming = first, part = 0;  // what is copied next
    i64 entry = 0;
    const auto copy_next = [&](Tile &tile) {
        if (coming < there) {
            if (part == 0) {
                if (turn == 32) {
                    const i64 at = coming + static_cast<i64>(lane) * warps;
                    mine = at < there ? ids[at] : 0, turn = 0;
                }
                entry = __shfl_sync(FULL, mine, turn++);
            }
            copy(tile, part, entry, vectors, scales, counts);
            if (++part == TILES) part = 0, coming += warps;
        }
        commit();
    };
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) copy_next(own[i]);
    int slot = 0;
    for (int block = first; block < max_blocks; block += warps) {
        float best = NOTHING;
        if (block < there) {
#pragma unroll 1
            for (int number = 0; number < TILES; ++number) {
                wait<AHEAD - 1>();
                best = compared(best, own[slot], number, right);
                copy_next(own[slot]);
                slot = slot == AHEAD - 1 ? 0 : slot + 1;
            }
#pragma unroll
            for (int apart = 16; apart; apart /= 2) best = fmaxf(best, __shfl_xor_sync(FULL, best, apart));
        }
        if (lane == 0) out[block] = best;
    }
    wait<0>();
}
