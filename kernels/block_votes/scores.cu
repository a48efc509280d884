// Scores of memory blocks by the similarity `max` (`compare.cuh` says how). `cuda_impl.py` says what the arguments are.

#include "block_votes/compare.cuh"

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ int larger(int a, int b) { return max(a, b); }

// The largest product of each of the thread's two rows of a tile, times the scale of the row's span, or what is larger.
__device__ __forceinline__ float largest_product(float best, const Products &products, const Tile &tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Sum most = products.sum[0][0][2 * half];
#pragma unroll
        for (int group = 0; group < WIDTH * SETS; ++group) {
            const Sum (&of)[4] = products.sum[group / WIDTH][group % WIDTH];
            most = larger(most, larger(of[2 * half], of[2 * half + 1]));
        }
        const float scaled = PACKED ? static_cast<float>(most) * tile.scale[half] : static_cast<float>(most);
        best = fmaxf(best, tile.used[half] ? scaled : NOTHING);
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
scores(const u16 *query, const int *query_counts, const unsigned char *vectors, const float *scales, const int *counts,
       const int *ids, const Number *blocks, float *out, int max_blocks) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ __align__(128) Query shared;
    const int lane = threadIdx.x % 32, request = blockIdx.y;
    query += static_cast<i64>(request) * COLUMNS * DIM, query_counts += request * (COLUMNS / MOST_Q);
    ids += static_cast<i64>(request) * max_blocks, out += static_cast<i64>(request) * max_blocks;
    const int all = blocks_there(blocks[request], max_blocks);

    // Where the query has no vector, its first one stands: a largest product stays as it is.
    const int spoken = first_spoken(query_counts);
    const int there = spoken < 0 ? 0 : all;
    const Memory memory = {vectors, scales, counts, ids, max_blocks, there};
    Walk walk(memory);
    const float scale = load_query(shared, query, query_counts, max(spoken, 0));

    float best = NOTHING;
    walk.each([&](const Tile (&tiles)[TOGETHER], int block, bool last) {
        multiply_tiles(tiles, shared, [&](const Products &products, const Tile &tile) {
            best = largest_product(best, products, tile);
        });
        if (!last) return;
#pragma unroll
        for (int apart = 16; apart; apart /= 2) best = fmaxf(best, __shfl_xor_sync(FULL, best, apart));
        if (lane == 0 && block < there) out[block] = best > NOTHING ? best * scale : best;
        best = NOTHING;
    });
    const int warps = walk.warps;
    for (int block = blockIdx.x * WARPS + threadIdx.x / 32; block < max_blocks; block += warps)
        if (lane == 0 && block >= there) out[block] = NOTHING;
}
