// Means of clusters: sums of vectors by label, as whole numbers in shared memory.
//
// Written in CUDA, since Triton has no atomics on shared memory. Whole numbers add up to the same in any order, so that
// every run gives the same clusters, and shared memory adds integers in one instruction (floats take a loop).
// `cuda_impl.py` says what the arguments are.
//
// A block has CLUSTERS clusters of one segment, head and layer. It reads all labels of the segment, lists the tokens
// that are its own, CHUNK at a time, and adds their vectors up, a warp a token. A component is counted in units of a
// power of two that leaves room for the sum of all tokens at their largest (`largest`): for 8,192 tokens at most 2^-16 of
// the component's largest magnitude in the segment, and a mean is off by at most half of that.
//
// Set by the compiler: DIM (64, 128 or 256), THREADS, CHUNK, BFLOAT16 (float16 otherwise).

#include "instructions.cuh"

#define CLUSTERS (8192 / DIM)  // 32 KB of sums
#define LANE_DIM (DIM / 32)
#define WARPS (THREADS / 32)
#define AHEAD 4  // vectors that a warp loads before it adds them

// Components LANE_DIM * lane and following of a vector, as they lie in memory.
struct alignas(2 * LANE_DIM) Piece { u16 at[LANE_DIM]; };

// Exponent of the unit of a component: n values of at most `largest` are at most 2^30 units.
__device__ __forceinline__ int unit_exponent(float largest, int n) {
    const int log_n = 32 - __clz(max(n - 1, 0));  // n <= 2^log_n; 0 for 1
    const int above = static_cast<int>((__float_as_uint(largest) >> 23) & 255) - 126;  // largest < 2^above
    return max(above + log_n - 30, -120);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((exponent + 127) << 23); }

__device__ __forceinline__ float warp_sum(float value) {
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(FULL, value, by);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_clusters(
    const u16* const* caches,  // [layers] -> [num_slots, heads, DIM]
    const int* slots,          // [tokens]
    const int* segments,       // [num_segments, 4] first token, tokens, first cell, clusters
    const int* labels,         // [layers, heads, tokens] cells
    const float* largest,      // [layers, num_segments, heads, DIM] largest magnitude
    const float* means,        // [layers, num_segments, heads, DIM] of a segment
    u16* centres,              // [layers, heads, cells, DIM] written unless `last`, where a cluster has tokens
    float* biases,             // [layers, heads, cells] likewise
    u16* out,                  // [layers, cells / width, heads, width, DIM] written if `last`; 0 for empty clusters
    int num_segments, int tokens, int cells, int width, int l2, int last) {
    __shared__ int sums[CLUSTERS * DIM];  // component LANE_DIM * lane + j of a cluster at j * 32 + lane
    __shared__ int sizes[CLUSTERS];
    __shared__ int listed_slots[CHUNK];
    __shared__ u16 listed_clusters[CHUNK];
    __shared__ int listed;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, heads = gridDim.y;
    const int segment = blockIdx.z % num_segments, layer = blockIdx.z / num_segments;
    const int* own = segments + 4 * segment;
    const int token = own[0], length = own[1], cell = own[2];
    const int count = last ? (own[3] + width - 1) / width * width : own[3];  // the padding of tiles gets its zeros too
    const int first = blockIdx.x * CLUSTERS;
    if (first >= count) return;
    const int mine = min(CLUSTERS, count - first);
    const u16* cache = caches[layer];
    const int* label_of = labels + (static_cast<i64>(layer) * heads + head) * tokens + token;
    const i64 row = (static_cast<i64>(layer) * num_segments + segment) * heads + head;

    float units[LANE_DIM];  // of a component, in one
    int exponents[LANE_DIM];
    for (int j = 0; j < LANE_DIM; ++j) {
        exponents[j] = unit_exponent(largest[row * DIM + LANE_DIM * lane + j], length);
        units[j] = power_of_two(-exponents[j]);
    }
    for (int i = threadIdx.x; i < CLUSTERS * DIM; i += THREADS) sums[i] = 0;
    for (int i = threadIdx.x; i < CLUSTERS; i += THREADS) sizes[i] = 0;

    for (int begin = 0; begin < length; begin += CHUNK) {
        __syncthreads();
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            const int number = begin + i;
            const int cluster = number < length ? label_of[number] - cell - first : -1;
            const bool here = static_cast<unsigned>(cluster) < static_cast<unsigned>(mine);
            const unsigned all = __ballot_sync(FULL, here);
            int place = 0;
            if (lane == 0 && all) place = atomicAdd(&listed, __popc(all));
            place = __shfl_sync(FULL, place, 0) + __popc(all & ((1u << lane) - 1));
            if (here) {
                listed_slots[place] = slots[token + number];
                listed_clusters[place] = static_cast<u16>(cluster);
                atomicAdd(&sizes[cluster], 1);
            }
        }
        __syncthreads();
        for (int i = warp * AHEAD; i < listed; i += WARPS * AHEAD) {
            Piece pieces[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const i64 slot = listed_slots[min(i + a, listed - 1)];
                pieces[a] = reinterpret_cast<const Piece*>(cache + (slot * heads + head) * DIM)[lane];
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (i + a >= listed) break;
                int* sum = sums + listed_clusters[i + a] * DIM + lane;
#pragma unroll
                for (int j = 0; j < LANE_DIM; ++j)
                    atomicAdd(sum + 32 * j, __float2int_rn(widened(pieces[a].at[j], 0) * units[j]));
            }
        }
    }
    __syncthreads();

    for (int c = warp; c < mine; c += WARPS) {
        const int size = sizes[c];
        const float share = 1.0f / static_cast<float>(max(size, 1));
        const i64 place = static_cast<i64>(cell) + first + c;
        Piece made;
        float bias = 0.0f;
#pragma unroll
        for (int j = 0; j < LANE_DIM; ++j) {
            const float sum = static_cast<float>(sums[c * DIM + 32 * j + lane]) * power_of_two(exponents[j]);
            const float mean = size ? sum * share : 0.0f;
            const float middle = last ? 0.0f : means[row * DIM + LANE_DIM * lane + j];
            made.at[j] = narrowed(mean - middle);
            // The bias belongs to the centre as it is stored.
            const float centre = widened(made.at[j], 0);
            bias -= centre * middle + (l2 ? 0.5f * centre * centre : 0.0f);
        }
        if (last) {
            const i64 tile = static_cast<i64>(layer) * (cells / width) + place / width;
            reinterpret_cast<Piece*>(out + ((tile * heads + head) * width + place % width) * DIM)[lane] = made;
        } else if (size) {  // a cluster that lost all its tokens stays where it is
            const i64 at = (static_cast<i64>(layer) * heads + head) * cells + place;
            reinterpret_cast<Piece*>(centres + at * DIM)[lane] = made;
            bias = warp_sum(bias);
            if (lane == 0) biases[at] = bias;
        }
    }
}
