// Logits of every centroid of a request's tiles, with the sizes and first members of their clusters, as `_scores` in
// `triton_impl.py`, for queries in one rotation.
//
// Written in CUDA: a warp is a program. It reads 16 centroids at a time, STAGES chunks on their way or being computed.
// A row's (a request's key-value head's) chunks are dealt to as many warps as the grid is wide.
//
// Set by the compiler: DIM (64 or 128), GROUP (1 to 8), KV_HEADS, WIDTH (clusters of a tile, a multiple of 16), SIZED
// (whether sizes and first members come from other tiles), STAGES, BLOCKS (that a multiprocessor has room for), BFLOAT16
// (float16 otherwise).

#include "warp.cuh"

#define LN_2 0.6931471805599453f

extern "C" __global__ void __launch_bounds__(32, BLOCKS) score_centroids(
    const u16 *__restrict__ query, const u16 *__restrict__ centroids, const int *__restrict__ sizes,
    const int *__restrict__ starts, const int *__restrict__ tiles, const int *__restrict__ tile_counts,
    const int *__restrict__ sized, float *__restrict__ logits, int *__restrict__ out_sizes, int *__restrict__ out_starts,
    i64 stride_query, i64 most_tiles, float scale) {
    alignas(128) __shared__ unsigned char memory[STAGES][CHUNK];
    const int lane = threadIdx.x, head = blockIdx.y;
    const i64 request = blockIdx.z, row = request * KV_HEADS + head, cells = most_tiles * WIDTH;
    const int chunks = tile_counts[request] * (WIDTH / COLUMNS);
    const unsigned stages = shared_address(memory);

    unsigned q[STEPS][2];
    load_queries(q, query + request * stride_query + head * GROUP * DIM);

    // First centroid of a chunk, and first cluster whose size counts.
    struct Place { i64 centroid, cluster; };
    const auto place_of = [&](int chunk) {
        if (chunk >= chunks) return Place{0, 0};
        const i64 at = request * most_tiles + chunk * COLUMNS / WIDTH;
        const int within = chunk * COLUMNS % WIDTH;
        const i64 centroid = (static_cast<i64>(tiles[at]) * KV_HEADS + head) * WIDTH + within;
        return Place{centroid, SIZED ? (static_cast<i64>(sized[at]) * KV_HEADS + head) * WIDTH + within : centroid};
    };
    int size[STAGES], start[STAGES];  // of the chunk's cluster lane % 16
    const auto fetch = [&](int chunk, Place place, int stage) {
        constexpr int ROWS = 32 / PIECES;  // that the warp copies at a time
        const bool there = chunk < chunks;
#pragma unroll
        for (int i = 0; i < COLUMNS / ROWS; ++i) {
            const int column = i * ROWS + lane / PIECES, piece = lane % PIECES;
            copy16(stages + stage * CHUNK + offset_of(column, piece), centroids + (place.centroid + column) * DIM + piece * 8,
                   there);
        }
        commit();
        size[stage] = there ? sizes[place.cluster + lane % COLUMNS] : 0;
        start[stage] = there ? starts[place.cluster + lane % COLUMNS] : 0;
    };

    const int by = gridDim.x;
    Place place = place_of(blockIdx.x);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        fetch(blockIdx.x + i * by, place, i);
        place = place_of(blockIdx.x + (i + 1) * by);
    }
    for (int first = blockIdx.x; first < chunks; first += STAGES * by) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            const int chunk = first + i * by;
            if (chunk >= chunks) break;
            wait<STAGES - 1>();
            __syncwarp();
            float logit[4];
            score(logit, stages + i * CHUNK, q);
            const i64 cell = static_cast<i64>(chunk) * COLUMNS;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int column = lane / 4 + n / 2 * 8, of = lane % 4 * 2 + n % 2;
                const int own = __shfl_sync(FULL, size[i], column);
                const float x = own > 0 ? logit[n] * scale + __log2f(own) * LN_2 : NOTHING;
                if (of < GROUP) logits[(row * GROUP + of) * cells + cell + column] = x;
            }
            if (lane < COLUMNS) {
                out_sizes[row * cells + cell + lane] = size[i];
                out_starts[row * cells + cell + lane] = start[i];
            }
            __syncwarp();
            fetch(chunk + STAGES * by, place, i);
            place = place_of(chunk + (STAGES + 1) * by);
        }
    }
    wait<0>();
}
