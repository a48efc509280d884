// The spans of tiles whose heads are summed, and how many index vectors each of them gets: a block of threads a tile.
//
// The scores of all spans (Ltri-LLM, equations 4 and 5) are sums over triangles. They are made in shared memory by sums
// down the columns and then along the rows, of which four threads do a quarter each. Rows lie there behind each other, as
// long as they are: triangular numbers are all different modulo 32, so threads of neighbouring rows meet different banks.
// Then each thread finds the best span of half an anti-diagonal, and the best of all are kept, one after the other
// (Appendix E). `cuda_impl.py` says what the arguments are; the order of first tokens is that of `triton_impl.py`.
//
// Set by the compiler: BLOCK (tokens of a tile, a power of two from 16 to 128), THREADS (4 BLOCK), SPANS (at most).

#include "instructions.cuh"

#define WARPS (THREADS / 32)
#define PARTS 4
#define PART (BLOCK / PARTS)
#define LINES (2 * BLOCK)   // anti-diagonals, of which the last is none
#define LINE_WARPS (LINES / 32)
#define AHEAD 16  // heads, or rows, that are read before the first is added

struct Shared {
    float score[BLOCK * (BLOCK + 1) / 2];
    float column[PARTS][BLOCK], row[PARTS][BLOCK];
    u64 line[LINES];
    u64 best[2][LINE_WARPS];
    float seen[WARPS], given[WARPS];
    int first[SPANS], end[SPANS], count[SPANS];
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

// Calls `look` with the rows of a thread's quarter of a column, and the entries there, 0 above the diagonal.
template <class Look>
__device__ __forceinline__ void each_row(const float *summed, int there, Look look) {
    constexpr int together = PART < AHEAD ? PART : AHEAD;
    const int column = threadIdx.x % BLOCK, begin = threadIdx.x / BLOCK * PART;
    for (int from = begin; from < begin + PART; from += together) {
        float x[together];
#pragma unroll
        for (int i = 0; i < together; ++i)
            x[i] = from + i < there && column <= from + i ? summed[(from + i) * BLOCK + column] : 0.0f;
#pragma unroll
        for (int i = 0; i < together; ++i) look(from + i, x[i]);
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

// The score of the span from x to y is score[y][x] and row[x / PART][y].
__device__ __forceinline__ void set_scores(const float *summed, int there, float level, Shared &shared) {
    const int part = threadIdx.x / BLOCK, at = threadIdx.x % BLOCK;
    float total = 0.0f;
    each_row(summed, there, [&](int row, float x) {
        if (at > row) return;
        if (row < there) total += x - level;
        shared.score[place_of(row, at)] = total;
    });
    shared.column[part][at] = total;
    __syncthreads();
    add_parts<true>(shared.column);
    total = 0.0f;
#pragma unroll 8
    for (int i = PART - 1; i >= 0; --i) {
        const int column = part * PART + i;
        if (column > at) continue;
        total += shared.score[place_of(at, column)] + shared.column[at / PART][column];
        shared.score[place_of(at, column)] = total;
    }
    shared.row[part][at] = total;
    __syncthreads();
    add_parts<false>(shared.row);
}

// The best span of an anti-diagonal x + y, of equals the shortest, as a number to be compared: the bits of its score, 8 bits
// by which the first anti-diagonal comes first, and 8 bits of its first token. 0 where no score is above 0.
__device__ __forceinline__ u64 candidate_of(int there, Shared &shared) {
    const int line = threadIdx.x % LINES, half = threadIdx.x / LINES, warp = line / 32 * 32;
    const int begin = max(half * (BLOCK / 2), (warp + 1) / 2);
    const int end = min(min((half + 1) * (BLOCK / 2), there), warp + 32);
    float best = 0.0f;
    int best_row = 0;
#pragma unroll 1  // left to itself, NVRTC comes to no end
    for (int row = begin; row < end; ++row) {
        const int column = line - row;
        if (column < 0 || column > row) continue;
        const float score = shared.score[place_of(row, column)] + shared.row[column / PART][row];
        if (score > best) best = score, best_row = row;
    }
    u64 found = best > 0.0f ? static_cast<u64>(__float_as_uint(best)) << 8 | (BLOCK - 1 - best_row) : 0;
    if (half) shared.line[line] = found;
    __syncthreads();
    if (half) return 0;
    found = larger(found, shared.line[line]);
    if (!found) return 0;
    const int first = line - (BLOCK - 1 - static_cast<int>(found & 0xff));
    return found >> 8 << 16 | static_cast<u64>(LINES - 1 - line) << 8 | first;
}

struct Span {
    int first, end;
    float score;
};

__device__ __forceinline__ Span span_of(u64 candidate) {
    const int first = candidate & 0xff, line = LINES - 1 - static_cast<int>(candidate >> 8 & 0xff);
    return {first, line - first + 1, __uint_as_float(static_cast<unsigned>(candidate >> 16))};
}

// The best of all threads' candidates.
__device__ __forceinline__ u64 best_of(u64 candidate, u64 (&shared)[LINE_WARPS]) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) candidate = larger(candidate, __shfl_xor_sync(FULL, candidate, apart));
    if (threadIdx.x < LINES && threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = candidate;
    __syncthreads();
    candidate = shared[0];
#pragma unroll
    for (int warp = 1; warp < LINE_WARPS; ++warp) candidate = larger(candidate, shared[warp]);
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

// Index vectors of a span (equation 7), in all threads.
__device__ __forceinline__ int count_of(const Span &span, const float *summed, int there, float level, float rate, int most,
                                        bool by_row, bool by_column, Shared &shared) {
    const int tokens = span.end - span.first;
    by_row = by_row && span.first > 0, by_column = by_column && span.end < there;
    float beside = 0.0f, own = span.score + level * static_cast<float>(tokens * (tokens + 1) / 2);
    if (by_row || by_column) {
        const int thread = threadIdx.x, column = thread % BLOCK;
        const bool inside = column >= span.first && column < span.end;
        float seen = 0.0f, given = 0.0f;
        each_row(summed, there, [&](int row, float x) {
            if (row >= span.first && row < span.end) seen += x;
            if (inside) given += x;
        });
#pragma unroll
        for (int apart = 16; apart; apart /= 2)
            seen += __shfl_xor_sync(FULL, seen, apart), given += __shfl_xor_sync(FULL, given, apart);
        if (thread % 32 == 0) shared.seen[thread / 32] = seen, shared.given[thread / 32] = given;
        __syncthreads();
        seen = given = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) seen += shared.seen[warp], given += shared.given[warp];
        __syncthreads();
        // The diagonal is the triangle's edge: what rows attend to before the span is what they attend to, less what they
        // attend to in the span, and likewise for columns.
        if (by_row) beside += fmaxf(seen - own, 0.0f);
        if (by_column) beside += fmaxf(given - own, 0.0f);
    }
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
        set_scores(summed, there, level, shared);
        u64 own = candidate_of(there, shared);
        for (; number < spans; ++number) {
            const u64 top = best_of(own, shared.best[number % 2]);
            if (!top && number) break;
            const Span span = top ? span_of(top) : Span{0, there, 0.0f};  // one that is the whole tile
            const int count = count_of(span, summed, there, level, rate, most, by_row, by_column, shared);
            if (thread == 0)
                shared.first[number] = span.first, shared.end[number] = span.end, shared.count[number] = count;
            if (own == top || (own && overlap(span_of(own), span, phi, boxes))) own = 0;
        }
        __syncthreads();
    }
    // In the order of first tokens.
    for (int i = thread; i < spans; i += THREADS) {
        if (i >= number) {
            counts[i] = 0;
            continue;
        }
        const auto order = [&](int span) { return shared.first[span] * LINES + shared.end[span]; };
        int place = 0;
        for (int other = 0; other < number; ++other) place += order(other) < order(i);
        bounds[2 * place] = shared.first[i], bounds[2 * place + 1] = shared.end[i], counts[place] = shared.count[i];
    }
}
