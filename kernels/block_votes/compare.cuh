// Memory blocks and a query whose vectors are multiplied: a warp a block, whose vectors it holds in registers. What is made
// of the products is said by the kernels that include this: `scores.cu`, `mass.cu`.
//
// Written in CUDA, since a block is a chain of dependent loads, and Triton's programs hold too much to have many of them
// at once: here a warp reads the next block while it compares one. The query's vectors lie in shared memory.
//
// Four warps multiply together: vectors of the index, 16 of each warp's block, are the left operand of matrix products,
// [64 vectors, 16 components], and the query's the right one, [16 components, 48 vectors, or 8]. Which components come together
// in a product is of no matter as long as both sides agree: so a thread reads pieces of 16 bytes that lie beside those of
// its neighbours, and has, without exchanging anything, what a product wants of it.
//
// Packed vectors are multiplied as whole numbers of 8 bits, 32 components at once: one product has a word of each thread's
// piece, the low four bits of its bytes and the high four. The query's vectors are rounded to 8 bits for that.
//
// Set by the compiler: DIM (components of a vector), SPANS, MOST (of an entry: spans, and vectors of one), MOST_Q (vectors
// of a query's span), COLUMNS (of all of them), PACKED (vectors have 4 bits a component), WIDE (`blocks` has 64 bits),
// THREADS and RESIDENT (of a block of the grid, and how many of these a multiprocessor has at once), and what
// instructions.cuh asks for.

#include "instructions.cuh"

#define ROWS (SPANS * MOST)
#define TILES ((ROWS + 15) / 16)
#define STEPS (DIM / (PACKED ? 32 : 16))  // products over the components
#define WIDTH (COLUMNS <= 8 ? 1 : 6)  // tiles of 8 vectors of the query that a product takes
#define SETS ((COLUMNS + 8 * WIDTH - 1) / (8 * WIDTH))  // products over the query's vectors
#define LINE (PACKED ? DIM / 2 : 2 * DIM)  // bytes of a vector
#define PIECES (LINE / 64)                 // that a thread has of a vector
#define QUARTERS (PACKED ? 2 * PIECES : PIECES)  // pieces of a vector of the query that one of four threads takes
#define WHOLE (PACKED ? 2 : 1)  // words of 16 bytes that such a piece has
#define WARPS (THREADS / 32)
#define TURNS ((SETS * WIDTH * QUARTERS + WARPS - 1) / WARPS)  // of a warp, in which it takes these
#define TOGETHER (!PACKED ? 1 : TILES < 3 ? TILES : 3)  // tiles that are read at once
#define PARTS ((TILES + TOGETHER - 1) / TOGETHER)        // of a block

#if WIDE
typedef i64 Number;
#else
typedef int Number;
#endif

#if PACKED
typedef int Sum;
#else
typedef float Sum;
#endif

// 16 vectors: of a thread, pieces of the rows lane / 4 and 8 behind.
struct Tile {
    uint4 piece[2][PIECES];
    float scale[2];
    bool used[2];
};

// The query: for each product tiles of 8 vectors with 16 bytes each.
struct Query {
    unsigned words[SETS][STEPS][2][WIDTH][8][4];
#if PACKED
    float largest[WARPS];
#endif
};
static_assert(sizeof(Query) <= 48 << 10, "a block of the grid has so much shared memory");

__device__ __forceinline__ unsigned word_of(const uint4 &piece, int number) {
    return number == 0 ? piece.x : number == 1 ? piece.y : number == 2 ? piece.z : piece.w;
}

__device__ __forceinline__ void load(Tile (&tiles)[TOGETHER], int part, int entry, bool there,
                                     const unsigned char *vectors, const float *scales, const int *counts) {
    const int lane = threadIdx.x % 32;
    const uint4 zeros = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * (part * TOGETHER + i) + 8 * half + lane / 4;
            const bool real = there && row < ROWS;
            Tile &tile = tiles[i];
            tile.used[half] = false;
            if (real) {
                const i64 span = static_cast<i64>(entry) * SPANS + row / MOST;
                tile.used[half] = row % MOST < counts[span];
                tile.scale[half] = PACKED ? scales[span] : 1.0f;
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const i64 at = (static_cast<i64>(entry) * ROWS + row) * LINE + (4 * piece + lane % 4) * 16;
                tile.piece[half][piece] = real ? load_once(vectors + at) : zeros;
            }
        }
    }
}

// What a thread has of a tile in a product: components of row lane / 4, of the row 8 behind, and again.
__device__ __forceinline__ void operand(unsigned (&left)[4], const Tile &tile, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (PACKED) {
            const unsigned word = word_of(tile.piece[half][step / 4], step % 4);
            left[half] = signed_fours(word), left[half + 2] = signed_fours(word >> 4);
        } else {
            const uint4 &piece = tile.piece[half][step / 2];
            left[half] = word_of(piece, step % 2 * 2), left[half + 2] = word_of(piece, step % 2 * 2 + 1);
        }
    }
}

// Where a piece of the query belongs that a warp takes in a turn; behind the last there is nothing to take.
struct Place {
    int set, tile, quarter;

    __device__ __forceinline__ explicit Place(int turn) {
        const int i = threadIdx.x / 32 + turn * WARPS;
        set = i / QUARTERS / WIDTH, tile = i / QUARTERS % WIDTH, quarter = i % QUARTERS;
    }
};

// The largest magnitude of all numbers that threads have, and of what is far smaller than any query.
__device__ __forceinline__ float largest_of(const uint4 (&pieces)[TURNS][WHOLE], Query &query) {
    float largest = 0.0f;
#if PACKED
#pragma unroll
    for (int i = 0; i < TURNS * WHOLE * 8; ++i) {
        const unsigned two = word_of(pieces[i / 8 / WHOLE][i / 8 % WHOLE], i / 2 % 4);
        largest = fmaxf(largest, fabsf(widened(two, i % 2)));
    }
#pragma unroll
    for (int apart = 16; apart; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, apart));
    if (threadIdx.x % 32 == 0) query.largest[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, query.largest[warp]);
#endif
    return fmaxf(largest, 1e-30f);  // so that 127 divided by it is a number
}

// Put the query's vectors where products want them, and return by what products are multiplied. Where there is none, the
// vector `spoken` stands.
//
// Threads of a warp take a piece of 4 of each of 8 vectors, so that they write to different banks. Pieces are as long as
// those of the index have components: 8, or 16 for each half of a packed vector.
__device__ __forceinline__ float load_query(Query &query, const u16 *from, const int *counts, int spoken) {
    const int lane = threadIdx.x % 4, row = threadIdx.x / 4 % 8;
    uint4 pieces[TURNS][WHOLE];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const Place place(turn);
        const int column = (place.set * WIDTH + place.tile) * 8 + row, quarter = place.quarter;
        const bool given = column < COLUMNS && column % MOST_Q < counts[column / MOST_Q];
        const u16 *vector = from + (given ? column : spoken) * DIM;
        if (PACKED) {
            const int half = quarter / PIECES, piece = quarter % PIECES;
            const auto *two = reinterpret_cast<const uint4 *>(vector + half * (DIM / 2) + (4 * piece + lane) * 16);
            pieces[turn][0] = two[0], pieces[turn][PACKED] = two[1];
        } else {
            pieces[turn][0] = *reinterpret_cast<const uint4 *>(vector + (4 * quarter + lane) * 8);
        }
    }
    const float largest = PACKED ? largest_of(pieces, query) : 127.0f;
    const float factor = __fdiv_rn(127.0f, largest);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const Place place(turn);
        if (place.set >= SETS) break;
        const int quarter = place.quarter;
        const auto word = [&](int step, int half) -> unsigned & {
            return query.words[place.set][step][half][place.tile][row][lane];
        };
        if (PACKED) {
            const int half = quarter / PIECES, piece = quarter % PIECES;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint4 &eight = pieces[turn][step / 2 * PACKED];
                float x[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    x[j] = __fmul_rn(widened(word_of(eight, step % 2 * 2 + j / 2), j % 2), factor);
                word(4 * piece + step, half) = bytes_of(x);
            }
        } else {
            const uint4 &four = pieces[turn][0];
            word(2 * quarter, 0) = four.x, word(2 * quarter, 1) = four.y;
            word(2 * quarter + 1, 0) = four.z, word(2 * quarter + 1, 1) = four.w;
        }
    }
    show_to_products();
    __syncthreads();
    return __fdiv_rn(largest, 127.0f) * (PACKED ? 0.0625f : 1.0f);  // packed components are 16 times as large
}

// Products of a tile's vectors and the query's.
struct Products {
    unsigned left[STEPS][4];
    Sum sum[SETS][WIDTH][4];

    __device__ __forceinline__ void read(const Tile &tile) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) operand(left[step], tile, step);
    }

    __device__ __forceinline__ void begin(const Query &query) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) settle(left[step]);
        begin_products();
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                multiply_shared(sum[set], left[step], shared_address(query.words[set][step]), step > 0);
        end_products();
    }

    __device__ __forceinline__ void wait() {
        wait_for_products();
#pragma unroll
        for (int set = 0; set < SETS; ++set) settle(sum[set]);
    }
};

// Calls `look(products, tile)` with each tile and its products. While a tile is multiplied, the next one is prepared, and
// the one before is looked at.
template <class Look>
__device__ __forceinline__ void multiply_tiles(const Tile (&tiles)[TOGETHER], const Query &query, Look look) {
    Products products[2];
    products[0].read(tiles[0]);
    products[0].begin(query);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        if (i + 1 < TOGETHER) products[(i + 1) % 2].read(tiles[i + 1]);
        products[i % 2].wait();
        if (i + 1 < TOGETHER) products[(i + 1) % 2].begin(query);
        look(products[i % 2], tiles[i]);
    }
}

// The first span of the query that has vectors, as the number of its first vector; -1 where there is none.
__device__ __forceinline__ int first_spoken(const int *query_counts) {
    int spoken = -1;
    for (int span = COLUMNS / MOST_Q - 1; span >= 0; --span)
        if (query_counts[span] > 0) spoken = span * MOST_Q;
    return spoken;
}

// How many blocks there are, of which `ids` have room for `max_blocks`.
__device__ __forceinline__ int blocks_there(Number all, int max_blocks) {
    return all < max_blocks ? static_cast<int>(all) : max_blocks;
}

// The index of a request's memory.
struct Memory {
    const unsigned char *vectors;
    const float *scales;
    const int *counts, *ids;
    int max_blocks, there;  // blocks that ids have room for, and how many there are
};

// The blocks that a warp compares: the first of them, and every so many-th.
struct Walk {
    const Memory &memory;
    const int warps, ahead = threadIdx.x / 32;
    int block, turn = 0, mine;
    Tile now[TOGETHER];

    // Reads what comes first.
    __device__ __forceinline__ explicit Walk(const Memory &memory)
        : memory(memory), warps(gridDim.x * WARPS), block(blockIdx.x * WARPS + threadIdx.x / 32) {
        mine = entries_of(block);
        read(now, 0, block);
    }

    // A lane knows the entry of one of the warp's next 32 blocks: numbers are read beforehand, all at once, also of blocks
    // that there are not, for that does not wait for how many there are.
    __device__ __forceinline__ int entries_of(int from) const {
        const i64 at = from + static_cast<i64>(threadIdx.x % 32) * warps;
        return at < memory.max_blocks ? memory.ids[at] : 0;
    }

    __device__ __forceinline__ void read(Tile (&tiles)[TOGETHER], int part, int of) const {
        const int entry = __shfl_sync(FULL, mine, turn);
        load(tiles, part, entry, of < memory.there, memory.vectors, memory.scales, memory.counts);
    }

    // Calls `look(tiles, block, last)` with all parts of all blocks, and whether it is a block's last part. Warps go round
    // together: those whose blocks have ended multiply zeros.
    template <class Look>
    __device__ __forceinline__ void each(Look look) {
        int part = 0;
        while (block - ahead < memory.there) {
            const bool last = part == PARTS - 1;
            const int then = last ? block + warps : block;
            if (last && ++turn == 32) turn = 0, mine = entries_of(then);
            Tile next[TOGETHER];
            read(next, last ? 0 : part + 1, then);
            look(now, block, last);
            block = then, part = last ? 0 : part + 1;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) now[i] = next[i];
        }
    }
};
