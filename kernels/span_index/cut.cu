// The spans of tiles whose heads are summed, and how many index vectors each of them gets: a block of threads a tile.
//
// The scores of all spans (Ltri-LLM, equations 4 and 5) are sums over triangles. They are made in shared memory by sums
// down the columns and then along the rows, of which four threads do a quarter each. Rows lie there behind each other, as
// long as they are: triangular numbers are all different modulo 32, so threads of neighbouring rows meet different banks.
// Then the best span of each anti-diagonal is found, and the best of all are kept, one after the other (Appendix E).
// `cuda_impl.py` says what the arguments are; the order of first tokens is that of `triton_impl.py`.
//
// Set by the compiler: BLOCK (tokens of a tile, a power of two from 16 to 128), THREADS (4 BLOCK), SPANS (at most).

#include "instructions.cuh"

#define WARPS (THREADS / 32)
#define PARTS 4
#define PART (BLOCK / PARTS)
#define LINES (2 * BLOCK)                // anti-diagonals, of which the last is none
#define LANES (BLOCK < 32 ? BLOCK : 32)  // of a warp that have a row together
#define LOOKS (BLOCK / 8 + 1)            // spans that a thread looks at
#define AHEAD 32                         // heads that are read before the first is added

struct Span {
    int first, end;
    float score;
};

struct Shared {
    float score[BLOCK * (BLOCK + 1) / 2];
    float column[PARTS][BLOCK], row[PARTS][BLOCK];
    u64 best[2][WARPS];
    float seen[BLOCK / LANES][BLOCK], given[PARTS][BLOCK];
    Span span[SPANS];
    int count[SPANS];
};

__device__ __forceinline__ int place_of(int row, int column) { return row * (row + 1) / 2 + column; }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a < b ? b : a; }

// Heads' thresholds, added in the order in which attention was: where all heads are flat, scores are exactly 0.
__device__ __forceinline__ float level_of(const float *thresholds, int heads) {
    float total = 0.0f;
    for (int first = 0; first < heads; first += AHEAD) {
        float x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) x[i] = first + i < heads ? thresholds[first + i] : 0.0f;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) total += x[i];
    }
    return total;
}

// Numbers that LANES lanes have, PART each, summed over these: `number[0]` is then the sum of the one that is returned. Called
// without APART and LEFT, which are the distance of lanes that exchange numbers, and how many each of them goes on with.
template <int APART = LANES / 2, int LEFT = PART / 2>
__device__ __forceinline__ int sum_over_lanes(float (&number)[PART]) {
    if constexpr (APART == 0) {
        return 0;
    } else if constexpr (LEFT == 0) {
        number[0] += __shfl_xor_sync(FULL, number[0], APART);
        return sum_over_lanes<APART / 2, 0>(number);
    } else {
        const bool upper = threadIdx.x & APART;
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const float given = upper ? number[i] : number[i + LEFT];
            number[i] = (upper ? number[i + LEFT] : number[i]) + __shfl_xor_sync(FULL, given, APART);
        }
        return (upper ? LEFT : 0) + sum_over_lanes<APART / 2, LEFT / 2>(number);
    }
}

// The sums of the parts before a thread's own, or of those behind it, in the place of its own.
template <bool BEFORE>
__device__ __forceinline__ void add_parts(float (&sums)[PARTS][BLOCK]) {
    const int part = threadIdx.x / BLOCK, at = threadIdx.x % BLOCK;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int other = BEFORE ? i : PARTS - 1 - i;
        if (BEFORE ? other < part : other > part) total += sums[other][at];
    }
    __syncthreads();
    sums[part][at] = total;
    __syncthreads();
}

// The score of the span from x to y is score[y][x] and row[x / PART][y]. `seen` are the sums of attention in rows, of LANES
// columns each, and `given` those in columns, of a part each. `summed` is 0 above the diagonal and behind the last row.
__device__ __forceinline__ void set_scores(const float *summed, float level, Shared &shared) {
    const int part = threadIdx.x / BLOCK, at = threadIdx.x % BLOCK;
    float x[PART], total = 0.0f, given = 0.0f;
#pragma unroll
    for (int i = 0; i < PART; ++i) x[i] = summed[(part * PART + i) * BLOCK + at];
    int place = place_of(part * PART, at);
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        const int row = part * PART + i;
        given += x[i];
        if (at <= row) shared.score[place] = total += x[i] - level;
        place += row + 1;
    }
    shared.column[part][at] = total, shared.given[part][at] = given;
    const int summed_row = part * PART + sum_over_lanes(x);
    if (LANES <= PART || at % (LANES / PART) == 0) shared.seen[at / LANES][summed_row] = x[0];
    __syncthreads();
    add_parts<true>(shared.column);
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        const int column = part * PART + i;
        x[i] = column <= at ? shared.score[place_of(at, column)] + shared.column[at / PART][column] : 0.0f;
    }
    total = 0.0f;
#pragma unroll
    for (int i = PART - 1; i >= 0; --i) {
        const int column = part * PART + i;
        total += x[i];
        if (column <= at) shared.score[place_of(at, column)] = total;
    }
    shared.row[part][at] = total;
    __syncthreads();
    add_parts<false>(shared.row);
}

// A candidate's score and last token, of equal scores the first one's.
struct Best {
    float score = 0.0f;
    int row = 0;

    __device__ __forceinline__ void take(float other, int its_row) {
        row = other > score ? its_row : row, score = fmaxf(score, other);
    }

    __device__ __forceinline__ u64 bits() const {
        return score > 0.0f ? static_cast<u64>(__float_as_uint(score)) << 8 | (BLOCK - 1 - row) : 0;
    }
};

// The best span of an anti-diagonal x + y, of equals the shortest, as a number to be compared: the bits of its score, 8 bits
// by which the first anti-diagonal comes first, and 8 bits of its first token. 0 where no score is above 0.
//
// Anti-diagonals `line` and BLOCK + `line` have together BLOCK / 2 + 1 spans, of which each of four neighbouring threads
// looks at a quarter. The first of them returns the best of the one, the second of the other, and the others 0.
__device__ __forceinline__ u64 candidate_of(int there, const Shared &shared) {
    const int part = threadIdx.x % PARTS, line = threadIdx.x / PARTS, shortest = (line + 1) / 2;
    Best low, high;
#pragma unroll
    for (int i = 0; i < LOOKS; ++i) {
        const int row = shortest + part * LOOKS + i;
        const bool second = row > line;
        const int last = second ? shortest + BLOCK / 2 + row - line - 1 : row;
        const int first = (second ? BLOCK + line : line) - last;
        const bool real = last < there;
        const int x = real ? first : 0, y = real ? last : 0;
        const float score = real ? shared.score[place_of(y, x)] + shared.row[x / PART][y] : 0.0f;
        low.take(second ? 0.0f : score, last), high.take(second ? score : 0.0f, last);
    }
    u64 one = low.bits(), other = high.bits();
#pragma unroll
    for (int apart = 1; apart < PARTS; apart *= 2) {
        one = larger(one, __shfl_xor_sync(FULL, one, apart));
        other = larger(other, __shfl_xor_sync(FULL, other, apart));
    }
    const u64 found = part == 0 ? one : part == 1 ? other : 0;
    if (!found) return 0;
    const int own_line = part ? BLOCK + line : line, first = own_line - (BLOCK - 1 - static_cast<int>(found & 0xff));
    return found >> 8 << 16 | static_cast<u64>(LINES - 1 - own_line) << 8 | first;
}

__device__ __forceinline__ Span span_of(u64 candidate) {
    const int first = candidate & 0xff, line = LINES - 1 - static_cast<int>(candidate >> 8 & 0xff);
    return {first, line - first + 1, __uint_as_float(static_cast<unsigned>(candidate >> 16))};
}

// The best of all threads' candidates.
__device__ __forceinline__ u64 best_of(u64 candidate, u64 (&shared)[WARPS]) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) candidate = larger(candidate, __shfl_xor_sync(FULL, candidate, apart));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = candidate;
    __syncthreads();
    candidate = shared[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) candidate = larger(candidate, shared[warp]);
    return candidate;
}

// Whether two spans overlap by more than phi, as intersection over union.
__device__ __forceinline__ bool overlap(const Span &one, const Span &other, float phi, bool boxes) {
    int common = max(min(one.end, other.end) - max(one.first, other.first), 0);
    int a = one.end - one.first, b = other.end - other.first;
    if (boxes) common *= common, a *= a, b *= b;
    // Rounded to nearest: a threshold of 0.1 is met by one token in ten.
    return __fdiv_rn(static_cast<float>(common), static_cast<float>(a + b - common)) > phi;
}

// Index vectors of a span (equation 7), in all lanes of a warp.
__device__ __forceinline__ int count_of(const Span &span, int there, float level, float rate, int most, bool by_row,
                                        bool by_column, const Shared &shared) {
    const int tokens = span.end - span.first;
    float seen = 0.0f, given = 0.0f, beside = 0.0f;
    for (int token = span.first + threadIdx.x % 32; token < span.end; token += 32) {
#pragma unroll
        for (int i = 0; i < BLOCK / LANES; ++i) seen += shared.seen[i][token];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) given += shared.given[i][token];
    }
#pragma unroll
    for (int apart = 16; apart; apart /= 2)
        seen += __shfl_xor_sync(FULL, seen, apart), given += __shfl_xor_sync(FULL, given, apart);
    // The diagonal is the triangle's edge: what rows attend to before the span is what they attend to, less what they
    // attend to in the span, and likewise for columns.
    const float own = span.score + level * static_cast<float>(tokens * (tokens + 1) / 2);
    if (by_row && span.first > 0) beside += fmaxf(seen - own, 0.0f);
    if (by_column && span.end < there) beside += fmaxf(given - own, 0.0f);
    const float ratio = beside > 0.0f ? fminf(fmaxf(__fdiv_rn(own, beside), 0.0f), 1.0f) : 1.0f;
    const int count = static_cast<int>(static_cast<float>(tokens) * expf(-rate * (1.0f - ratio)));
    return max(min(min(count, most), tokens), 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cut(const float *thresholds, const float *summed, const int *rows, int *bounds, int *counts, float phi, float rate, int heads,
    int spans, int most, int by_row, int by_column, int boxes) {
    wait_for_launch_before();
    __shared__ Shared shared;
    const int thread = threadIdx.x, tile = blockIdx.x, there = min(rows[tile], BLOCK);
    summed += static_cast<i64>(tile) * BLOCK * BLOCK;
    bounds += static_cast<i64>(tile) * spans * 2, counts += static_cast<i64>(tile) * spans;
    int number = 0;
    if (there > 0) {
        const float level = level_of(thresholds + static_cast<i64>(tile) * heads, heads);
        set_scores(summed, level, shared);
        u64 own = candidate_of(there, shared);
        for (; number < spans; ++number) {
            const u64 top = best_of(own, shared.best[number % 2]);
            if (!top && number) break;
            const Span span = top ? span_of(top) : Span{0, there, 0.0f};  // one that is the whole tile
            if (thread == 0) shared.span[number] = span;
            if (own == top || (own && overlap(span_of(own), span, phi, boxes))) own = 0;
        }
        __syncthreads();
        for (int i = thread / 32; i < number; i += WARPS) {
            const int count = count_of(shared.span[i], there, level, rate, most, by_row, by_column, shared);
            if (thread % 32 == 0) shared.count[i] = count;
        }
        __syncthreads();
    }
    // In the order of first tokens.
    for (int i = thread; i < spans; i += THREADS) {
        if (i >= number) {
            counts[i] = 0;
            continue;
        }
        const auto order = [&](int span) { return shared.span[span].first * LINES + shared.span[span].end; };
        int place = 0;
        for (int other = 0; other < number; ++other) place += order(other) < order(i);
        bounds[2 * place] = shared.span[i].first, bounds[2 * place + 1] = shared.span[i].end;
        counts[place] = shared.count[i];
    }
}
