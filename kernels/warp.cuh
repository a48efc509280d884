// Attention of one warp: 16 columns at a time, up to eight queries of one key-value head, in matrix products of 16 bits.
//
// Keys are the left operand of the first product: keys · query, [16 columns, 8 queries]. So are values, transposed, of
// the second: values · weights, [components, 8 queries]. Its right operand is the first product's result, transposed in
// registers (`movmatrix`). A chunk is 16 columns of keys, or of values, in shared memory.
//
// Set before: DIM (64 or 128, of keys and values), GROUP (1 to 8 queries), BFLOAT16 (float16 otherwise).

#include "instructions.cuh"

#define COLUMNS 16  // of a chunk: rows of a matrix product
#define STEPS (DIM / 16)  // products over the components
#define PIECES (DIM / 8)  // of 16 bytes
#define CHUNK (COLUMNS * DIM * 2)  // bytes

// Where piece `piece` of a column lies in a chunk; the same piece of eight columns lies in different banks.
__device__ __forceinline__ unsigned offset_of(int column, int piece) {
    return column * (DIM * 2) + ((piece ^ (column & 7)) << 4);
}

// What a warp knows of the columns it has seen. A thread has the queries `pair` and `pair` + 1 with pair = 2 (lane % 4),
// and of every 16 components those at lane / 4 and 8 behind.
struct Found {
    float top[2];     // largest logit, to base 2
    float weight[2];  // of this thread's columns; of all of them after `finish`
    float sum[STEPS][4];
};

// The queries of a key-value head, as the right operand of the first product; zeros behind the last one.
__device__ __forceinline__ void load_queries(unsigned (&query)[STEPS][2], const u16 *head) {
    const int lane = threadIdx.x % 32;
    const bool there = lane / 4 < GROUP;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u16 *from = head + lane / 4 * DIM + 16 * step + lane % 4 * 2;
        query[step][0] = there ? *reinterpret_cast<const unsigned *>(from) : 0;
        query[step][1] = there ? *reinterpret_cast<const unsigned *>(from + 8) : 0;
    }
}

__device__ __forceinline__ void begin(Found &found) {
#pragma unroll
    for (int i = 0; i < 2; ++i) found.top[i] = NOTHING, found.weight[i] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) found.sum[step][i] = 0;
}

// Take in a chunk. `logit`, to base 2, of column lane / 4 for both queries, then of the one 8 behind: -inf where nothing
// is to be seen. `values`: address of the chunk in shared memory; no NaN anywhere.
__device__ __forceinline__ void add(Found &found, const float (&logit)[4], unsigned values) {
    const int lane = threadIdx.x % 32;
    float p[4];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        float top = fmaxf(logit[q], logit[q + 2]);
        for (int by = 4; by < 32; by *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, by));
        top = fmaxf(top, found.top[q]);
        const float level = top == NOTHING ? 0 : top;
        const float shrink = exp2_of(found.top[q] - level);
        found.top[q] = top;
        p[q] = exp2_of(logit[q] - level);
        p[q + 2] = exp2_of(logit[q + 2] - level);
        found.weight[q] = found.weight[q] * shrink + p[q] + p[q + 2];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            found.sum[step][q] *= shrink;
            found.sum[step][q + 2] *= shrink;
        }
    }
    const unsigned low = transposed(packed(p[0], p[1])), high = transposed(packed(p[2], p[3]));
    const int row = lane % 8 + lane / 16 * 8, part = (lane / 8) % 2;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned v[4];
        load_tiles_transposed(v, values + offset_of(row, 2 * step + part));
        multiply(found.sum[step], v, low, high);
    }
}

// Have `weight` of all columns in every thread.
__device__ __forceinline__ void finish(Found &found) {
    for (int n = 0; n < 2; ++n)
        for (int by = 4; by < 32; by *= 2) found.weight[n] += __shfl_xor_sync(FULL, found.weight[n], by);
}

#define FOUND ((4 * STEPS + 4) * 32)  // floats that a warp leaves

// What a warp has found, `finish`ed: 16 components of a pair of queries in every lane, number by number.
__device__ __forceinline__ void leave(float *to, const Found &found) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(4 * step + i) * 32 + lane] = found.sum[step][i];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        to[(4 * STEPS + n) * 32 + lane] = found.top[n];
        to[(4 * STEPS + 2 + n) * 32 + lane] = found.weight[n];
    }
}
