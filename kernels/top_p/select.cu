// Top-p over clusters: a block of threads for each query head, a thread block cluster for each key-value head.
//
// Written in CUDA, since a search is a chain of short dependent steps: Triton has neither weighted histograms nor a
// memory that its programs share.
// `cuda_impl.py` says what the arguments are; the masses and the order of equals are those of `triton_impl.py`.
//
// A head's masses are whole numbers, in units of 2^-30 of its sum, kept in registers as the bits of a float, which are
// ordered as they are: thread t has clusters 4 (t + k THREADS) to 4 (t + k THREADS) + 3 for each k. A round adds up the
// masses of the open range in BINS bins and goes on in the bin where the sum from above reaches p: three rounds for 30
// bits, both stages at once. Sums of whole numbers do not depend on the order of atomics: every run gives the same sets.
//
// Then the blocks of a cluster read each other's sets through distributed shared memory, each for its part of the
// clusters, and write the lists; with WIDTH also what the lists stand for, eight threads an exact cluster.
//
// With DIM the cluster first works out the logits itself: every block those of some of the clusters for all heads, as
// matrix products of 16 bits, written to memory, where each then reads those of its head. One launch less, and while some
// thread block clusters search, others read centroids.
//
// Set by the compiler: GROUP, THREADS, QUADS (four clusters each, of a thread), BINS, BY_COUNT, RUN, ALIGN, WIDTH (of a
// tile of clusters; 0: lists only), RESIDENT (threads that are to fit a multiprocessor, which share 65,536 registers), DIM
// (components of a centroid; 0: logits are given), and with DIM what instructions.cuh asks for, and FP8 (centroids are
// float8 e4m3, else of 16 bits as queries are).

#include "instructions.cuh"
#include "block.cuh"

#if FP8
typedef unsigned char Centroid;
#else
typedef u16 Centroid;
#endif

#define UNITS 1073741824.0f
#define PER_THREAD (2 * BINS / THREADS)
#define LEVELS (8 * BINS)  // bytes before the levels
#define POOL_OF(a, b) ((a) > (b) ? (a) : (b))
#define POOL POOL_OF(LEVELS + 4 * QUADS * THREADS, 32 * THREADS)

template <int N>
struct Number {
    static constexpr int VALUE = N;
};

struct Stage {
    int low;  // the open range of order bits: mass(>= low) >= need > beyond = mass(>= low + span)
    unsigned span;
    int beyond;
    int need;
    int equal;  // mass of the clusters at `low`, once the range is that one number
    int open;
};

__device__ __forceinline__ int mass_of(int key) {
    return BY_COUNT ? 1 : static_cast<int>(__int_as_float(key));
}

#if DIM
// A lane's components of a centroid, 16 bytes at a time, are neighbours: which component comes first is of no matter to a
// product, so long as the query's stand likewise.
#define LOADED (FP8 ? 16 : 8)  // components of 16 bytes
#define LOADS (DIM / LOADED / 4)  // of a lane, for a cluster
#define AT_ONCE (FP8 ? 2 : 1)  // times 16 clusters: as many bytes on their way with either kind

// The query of head lane / 4 as right operands, and what its products are to be multiplied with: 1, or with FP8 the power
// of two by which the query was divided, so that float16 holds it.
__device__ __forceinline__ float load_query(unsigned (&right)[LOADS][LOADED / 2], const u16* __restrict__ query) {
    const int lane = threadIdx.x % 32;
    const u16* const from = query + lane / 4 * DIM + lane % 4 * LOADED;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
        for (int j = 0; j < LOADED / 8; ++j) {
            uint4 four = {0, 0, 0, 0};
            if (lane / 4 < GROUP) four = load_once(from + 4 * LOADED * i + 8 * j);
            right[i][4 * j] = four.x, right[i][4 * j + 1] = four.y, right[i][4 * j + 2] = four.z;
            right[i][4 * j + 3] = four.w;
        }
    }
#if FP8
    float most = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
        for (int j = 0; j < LOADED; ++j) most = fmaxf(most, fabsf(widened(right[i][j / 2], j % 2)));
    }
    for (int by = 1; by < 4; by *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, by));
    // Of the largest one's size, 2^(exponent - 127); at least what has an inverse.
    const unsigned exponent = max(__float_as_uint(most) >> 23, 1u);
    const float down = __uint_as_float((254 - min(exponent, 253u)) << 23);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
        for (int j = 0; j < LOADED / 2; ++j)
            right[i][j] = packed_halves(widened(right[i][j], 0) * down, widened(right[i][j], 1) * down);
    }
    return __uint_as_float(min(exponent, 253u) << 23);
#else
    return 1;
#endif
}

// Logits of some of a row's clusters for all heads, the clusters' sizes counted in.
__device__ __forceinline__ void score(const u16* __restrict__ query, const Centroid* __restrict__ centroids,
                                      const int* __restrict__ sizes, const int* __restrict__ tiles,
                                      const int* __restrict__ sized, float scale, int n, int kv_heads, int kv_head,
                                      int width, float* logits) {
    const int lane = threadIdx.x % 32, pair = lane % 4;
    unsigned right[LOADS][LOADED / 2];
    const float own_factor = load_query(right, query) * scale;
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) factor[j] = FP8 ? __shfl_sync(FULL, own_factor, 4 * (2 * pair + j)) : own_factor;
    constexpr int TURN = 16 * AT_ONCE;
    for (int cell = TURN * (blockIdx.x * WARPS + threadIdx.x / 32); cell < n; cell += TURN * GROUP * WARPS) {
        uint4 upper[AT_ONCE][LOADS], lower[AT_ONCE][LOADS];
        int size[AT_ONCE][2];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            const int at = min(cell + 16 * a, n - 16);  // the last ones twice, with nothing else to do
            const int tile = at / WIDTH, place = at % WIDTH + lane / 4;
            const Centroid* const from =
                centroids + ((static_cast<i64>(tiles[tile]) * kv_heads + kv_head) * WIDTH + place) * DIM + LOADED * pair;
            const int* const size_of = sizes + (static_cast<i64>(sized[tile]) * kv_heads + kv_head) * WIDTH + place;
            size[a][0] = size_of[0], size[a][1] = size_of[8];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                upper[a][i] = load_once(from + 4 * LOADED * i);
                lower[a][i] = load_once(from + 8 * DIM + 4 * LOADED * i);
            }
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            float sum[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const unsigned up[4] = {upper[a][i].x, upper[a][i].y, upper[a][i].z, upper[a][i].w};
                const unsigned low[4] = {lower[a][i].x, lower[a][i].y, lower[a][i].z, lower[a][i].w};
#if FP8
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const unsigned four[4] = {halves_of(up[j]), halves_of(low[j]), halves_of(up[j] >> 16),
                                              halves_of(low[j] >> 16)};
                    multiply_halves(sum, four, right[i][2 * j], right[i][2 * j + 1]);
                }
#else
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const unsigned four[4] = {up[j], low[j], up[j + 1], low[j + 1]};
                    multiply(sum, four, right[i][j], right[i][j + 1]);
                }
#endif
            }
            const int at = min(cell + 16 * a, n - 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int head = 2 * pair + j % 2, own = size[a][j / 2];
                // A cut cluster, of a size below 0, has no mass: its tokens are exact.
                if (head < GROUP) {
                    logits[static_cast<size_t>(head) * width + at + lane / 4 + j / 2 * 8] =
                        own > 0 ? sum[j] * factor[j % 2] + __logf(static_cast<float>(own)) : NOTHING;
                }
            }
        }
    }
}
#endif

extern "C" __global__ void __cluster_dims__(GROUP, 1, 1) __launch_bounds__(THREADS, RESIDENT / THREADS)
#if DIM
score_and_select(const u16* __restrict__ query, const Centroid* __restrict__ centroids, const int* __restrict__ sized,
                 long long query_stride, float scale, float* logits,  // other blocks write them, too
#else
select_clusters(const float* __restrict__ logits,
#endif
                const int* __restrict__ sizes, const int* __restrict__ starts, const int* __restrict__ cells,
                const float* __restrict__ p, int* __restrict__ counts,
                int* __restrict__ exact, int* __restrict__ prefix, int* __restrict__ shift, int* __restrict__ approx,
                const int* __restrict__ members, const int* __restrict__ tiles, int* __restrict__ slots,
                int* __restrict__ summaries, long long most_members, long long most_tokens, int most_tiles,
                int kv_heads, int width) {
    __shared__ __align__(16) unsigned char pool[POOL];
    int* const bins = reinterpret_cast<int*>(pool);  // two of BINS
    // [QUADS * THREADS], a byte for each cluster: bit 0 the first stage, bit 1 the second.
    unsigned* const levels = reinterpret_cast<unsigned*>(pool + LEVELS);
    __shared__ u64 scratch64[WARPS];
    __shared__ float tops[WARPS], sums[WARPS];
    __shared__ int totals[WARPS], waves[2][WARPS];
    __shared__ Stage stages[2][2];
    __shared__ int own[5];  // of this block's part: exact clusters, their tokens, approximated ones, filled, numbers
    __shared__ int run_starts[ALIGN > 1 ? THREADS + 1 : 1];

    const int thread = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
    const int request = row / kv_heads;
    const int n = min(cells[request], width);
    const int quads = (n + 3) / 4;
    const float p1 = p[request * 2], p2 = p[request * 2 + 1];
    const size_t out = static_cast<size_t>(row) * width;
    const float* const of_head = logits + (static_cast<size_t>(row) * GROUP + head) * width;
    // Whether four numbers are loaded at once.
    const bool whole =
        width % 4 == 0 && (reinterpret_cast<size_t>(logits) | reinterpret_cast<size_t>(sizes) |
                            reinterpret_cast<size_t>(starts)) %
                               16 == 0;
    // Where the size and the first member of a cluster are.
    const auto place_of = [&](int cell) {
#if DIM
        const i64 tile = sized[static_cast<size_t>(request) * most_tiles + cell / WIDTH];
        return (tile * kv_heads + row % kv_heads) * WIDTH + cell % WIDTH;
#else
        return out + cell;
#endif
    };
#if DIM
    score(query + request * query_stride + row % kv_heads * GROUP * DIM, centroids, sizes,
          tiles + static_cast<size_t>(request) * most_tiles, sized + static_cast<size_t>(request) * most_tiles, scale, n,
          kv_heads, row % kv_heads, width, logits + static_cast<size_t>(row) * GROUP * width);
    arrive_at_cluster();
#endif

    // With room for EACH groups of four clusters a thread: no more than this row needs, since its registers are few.
    const auto select = [&](auto number) {
        constexpr int EACH = number.VALUE;
        constexpr int PARTS = (EACH + GROUP - 1) / GROUP;  // of a block's part, so many times THREADS quads
        constexpr bool EARLY = EACH <= 4;  // first members come with the sizes; more clusters leave no registers for it
        // Keys are logits, then exponentials (-1 where there is no cluster), then order bits.
        float x[EACH][4];
        const auto load_logits = [&] {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const int cell = 4 * (thread + k * THREADS);
#pragma unroll
                for (int j = 0; j < 4; ++j) x[k][j] = NOTHING;
                if (whole && cell + 3 < n) {
                    const float4 four = *reinterpret_cast<const float4*>(of_head + cell);
                    x[k][0] = four.x, x[k][1] = four.y, x[k][2] = four.z, x[k][3] = four.w;
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (cell + j < n) x[k][j] = of_head[cell + j];
                    }
                }
            }
        };
        if (!DIM) load_logits();
        // This block's part of the clusters: whole runs. What it needs of them is on its way while the search goes on.
        const int run_quads = RUN > 4 ? RUN / 4 : 1;
        const int part = ((quads + GROUP - 1) / GROUP + run_quads - 1) / run_quads * run_quads;
        const int begin = min(head * part, quads), end = min(begin + part, quads);
        int size[PARTS][4], start[PARTS][4], tile[PARTS];
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
            const int quad = begin + thread + k * THREADS;
            tile[k] = 0;
            if (WIDTH && quad < end) tile[k] = tiles[static_cast<size_t>(request) * most_tiles + 4 * quad / max(1, WIDTH)];
#pragma unroll
            for (int j = 0; j < 4; ++j) size[k][j] = 0;
            if (quad < end) {
                if (whole && 4 * quad + 3 < n) {
                    const auto place = place_of(4 * quad);
                    const int4 four = *reinterpret_cast<const int4*>(sizes + place);
                    size[k][0] = four.x, size[k][1] = four.y, size[k][2] = four.z, size[k][3] = four.w;
                    if (EARLY) {
                        const int4 more = *reinterpret_cast<const int4*>(starts + place);
                        start[k][0] = more.x, start[k][1] = more.y, start[k][2] = more.z, start[k][3] = more.w;
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (4 * quad + j < n) {
                            const auto place = place_of(4 * quad + j);
                            size[k][j] = sizes[place];
                            if (EARLY) start[k][j] = starts[place];
                        }
                    }
                }
            }
        }

        if (DIM) {
            wait_for_cluster();
            load_logits();
        }

        float top = NOTHING;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
#pragma unroll
            for (int j = 0; j < 4; ++j) top = fmaxf(top, x[k][j]);
        }
        top = block_max(top, tops);
        const bool nothing = top == NOTHING;
        if (nothing) top = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            if (k * THREADS < quads) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float weight = fminf(__expf(x[k][j] - top), 1.0f);  // none may exceed the first's
                    sum += weight;
                    x[k][j] = x[k][j] > NOTHING ? weight : -1.0f;
                }
            }
        }
        const float inverse = 1.0f / fmaxf(block_sum(sum, sums), 1.0f);
        int key[EACH][4];
        int total = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
#pragma unroll
            for (int j = 0; j < 4; ++j) key[k][j] = -1;
            if (k * THREADS < quads) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float share = x[k][j] * inverse, mass = truncf(share * UNITS);
                    const bool there = share >= 0.0f;
                    key[k][j] = !there ? -1 : BY_COUNT ? __float_as_int(share) + 1 : __float_as_int(mass);
                    total += !there ? 0 : BY_COUNT ? 1 : static_cast<int>(mass);
                }
            }
        }
        total = __reduce_add_sync(FULL, total);
        if (thread % 32 == 0) totals[thread / 32] = total;
        __syncthreads();

        // Bounds of the search, as in `triton_impl._search`: n clusters below slack / n weigh less than what may be left
        // out.
        if (thread < 2) {
            total = 0;
            for (int warp = 0; warp < WARPS; ++warp) total += totals[warp];
            const float share = thread ? p2 : p1;
            Stage stage;
            int low = 1;
            if (BY_COUNT) {
                stage.need = min(static_cast<int>(ceilf(fmaxf(share, 0.0f))), total);
            } else {
                stage.need = min(static_cast<int>(fmax(ceil(static_cast<double>(share) * total), 0.0)), total);
                const float slack = 0.999999f / static_cast<float>(max(n, 1));
                low = __float_as_int(fmaxf(static_cast<float>(total - stage.need) * slack, 1.0f));
            }
            // The heaviest is the one whose exponential is 1.
            const int most = nothing ? 0 : BY_COUNT ? __float_as_int(inverse) + 1 : __float_as_int(truncf(inverse * UNITS));
            stage.low = min(low, most);
            stage.span = static_cast<unsigned>(most + 1 - stage.low);
            stage.beyond = 0;
            stage.equal = 0;
            stage.open = stage.need > 0;
            stages[0][thread] = stage;
        }
        for (int i = thread; i < 2 * BINS; i += THREADS) bins[i] = 0;
        __syncthreads();

        Stage one = stages[0][0], two = stages[0][1];
        for (int round = 0; round < 32 && (one.open || two.open); ++round) {
            // Bits of a number in a range that the bins leave out.
            const int shift1 = max(0, 32 - __clz(one.span - 1) - (31 - __clz(BINS)));
            const int shift2 = max(0, 32 - __clz(two.span - 1) - (31 - __clz(BINS)));
            const unsigned span1 = one.open ? one.span : 0, span2 = two.open ? two.span : 0;
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (k * THREADS < quads) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const unsigned at1 = static_cast<unsigned>(key[k][j] - one.low);
                        const unsigned at2 = static_cast<unsigned>(key[k][j] - two.low);
                        if (at1 < span1) atomicAdd(&bins[at1 >> shift1], mass_of(key[k][j]));
                        if (at2 < span2) atomicAdd(&bins[BINS + (at2 >> shift2)], mass_of(key[k][j]));
                    }
                }
            }
            __syncthreads();
            // From the highest bin down: threads of the first half sum the first stage's bins, the others the second's.
            const int half = thread / (THREADS / 2), place = thread % (THREADS / 2);
            const int first = half * BINS + BINS - (place + 1) * PER_THREAD;
            int bin_mass[PER_THREAD];
            int mass = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                bin_mass[i] = bins[first + i];
                bins[first + i] = 0;
                mass += bin_mass[i];
            }
            int above = mass;
            for (int by = 1; by < 32; by *= 2) {
                const int other = __shfl_up_sync(FULL, above, by);
                if (thread % 32 >= by) above += other;
            }
            if (thread % 32 == 31) waves[round % 2][thread / 32] = above;
            const Stage mine = half ? two : one;
            if (place == 0 && !mine.open) stages[(round + 1) % 2][half] = mine;
            __syncthreads();
            const int wave = thread % 32 < place / 32 ? waves[round % 2][half * WARPS / 2 + thread % 32] : 0;
            above += mine.beyond - mass + __reduce_add_sync(FULL, wave);
            if (mine.open && above < mine.need && above + mass >= mine.need) {
                const int by = half ? shift2 : shift1;
                int in_bin = 0, at = 0;
                bool searching = true;
#pragma unroll
                for (int i = PER_THREAD - 1; i >= 0; --i) {
                    if (searching) {
                        in_bin = bin_mass[i];
                        at = i;
                        searching = i > 0 && above + in_bin < mine.need;
                        above += searching ? in_bin : 0;
                    }
                }
                const unsigned offset = static_cast<unsigned>(first + at - half * BINS) << by;
                Stage found = mine;
                found.low = mine.low + static_cast<int>(offset);
                found.span = min(1u << by, mine.span - offset);
                found.beyond = above;
                found.equal = in_bin;
                found.open = found.span > 1;
                stages[(round + 1) % 2][half] = found;
            }
            __syncthreads();
            one = stages[(round + 1) % 2][0];
            two = stages[(round + 1) % 2][1];
        }

        // Sets: of equal clusters only the first are taken.
        {
            const int unit1 = BY_COUNT ? 1 : max(1, mass_of(one.low)), unit2 = BY_COUNT ? 1 : max(1, mass_of(two.low));
            const bool some1 = one.need > 0, some2 = two.need > 0;
            const int wanted1 = (one.need - one.beyond + unit1 - 1) / unit1;
            const int wanted2 = (two.need - two.beyond + unit2 - 1) / unit2;
            const bool ties = (some1 && wanted1 < one.equal / unit1) || (some2 && wanted2 < two.equal / unit2);
            const bool all1 = !BY_COUNT && p1 >= 1.0f, all2 = !BY_COUNT && p2 >= 1.0f;
            // Every cluster has a key of at least 0, none one of 0x7fffffff.
            const int from1 = all1 ? 0 : some1 ? one.low : 0x7fffffff, from2 = all2 ? 0 : some2 ? two.low : 0x7fffffff;
            u64 seen = 0;  // of the two stages' equals, 32 bits each
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (k * THREADS < quads) {
                    unsigned level = 0;
                    u64 rank = 0;
                    if (ties) {
                        u64 all;
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            rank += static_cast<u64>(key[k][j] == one.low) | static_cast<u64>(key[k][j] == two.low) << 32;
                        }
                        rank = seen + block_scan(rank, scratch64, all);
                        seen += all;
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int one_key = key[k][j];
                        bool taken1 = one_key >= from1, taken2 = one_key >= from2;
                        if (ties) {
                            const bool same1 = one_key == one.low, same2 = one_key == two.low;
                            if (same1 && !all1 && static_cast<int>(rank & FULL) >= wanted1) taken1 = false;
                            if (same2 && !all2 && static_cast<int>(rank >> 32) >= wanted2) taken2 = false;
                            rank += static_cast<u64>(same1) | static_cast<u64>(same2) << 32;
                        }
                        level |= (static_cast<unsigned>(taken1) | static_cast<unsigned>(taken2) << 1) << (8 * j);
                    }
                    levels[thread + k * THREADS] = level;
                }
            }
        }
        arrive_at_cluster();
        wait_for_cluster();

        unsigned chosen[PARTS];  // bit j: cluster j of the quad is exact, bit 4 + j: approximated
        u64 before[PARTS];       // exact clusters (20 bits), approximated ones (20), numbers of tokens (24)
        int some_exact = 0, some_tokens = 0, some_approx = 0, some_filled = 0, extent = 0;
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
            chosen[k] = 0;
            before[k] = 0;
            if (begin + k * THREADS < end) {
                const int quad = begin + thread + k * THREADS;
                unsigned level = 0;
                if (quad < end) {
#pragma unroll
                    for (int block = 0; block < GROUP; ++block) level |= load_of_block(levels + quad, block);
                }
                u64 packed = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const unsigned taken = level >> (8 * j) & 3;
                    // Of a cut cluster the tokens that are there are exact; having no mass, it has no level.
                    const bool is_exact = taken & 2 || size[k][j] < 0, is_approx = !is_exact && taken == 1;
                    chosen[k] |= static_cast<unsigned>(is_exact) << j | static_cast<unsigned>(is_approx) << (4 + j);
                    packed += static_cast<u64>(is_exact) | static_cast<u64>(is_approx) << 13 |
                              static_cast<u64>(size[k][j] != 0) << 26 |
                              static_cast<u64>(is_exact ? abs(size[k][j]) : 0) << 39;
                }
                u64 all;
                const u64 sum_before = block_scan(packed, scratch64, all);
                const int all_tokens = static_cast<int>(all >> 39);
                int number = static_cast<int>(sum_before >> 39), room = all_tokens;
                if (ALIGN > 1) {  // the tokens of each run begin at a multiple of ALIGN
                    run_starts[thread] = number;
                    if (thread == 0) run_starts[THREADS] = all_tokens;
                    __syncthreads();
                    const int first = thread / run_quads * run_quads;
                    const int in_run = run_starts[min(first + run_quads, THREADS)] - run_starts[first];
                    const bool last = thread == first + run_quads - 1;
                    u64 filling;
                    number += static_cast<int>(
                        block_scan(last ? (in_run + ALIGN - 1) / ALIGN * ALIGN - in_run : 0, scratch64, filling));
                    room += static_cast<int>(filling);
                }
                before[k] = static_cast<u64>(some_exact + static_cast<int>(sum_before & 0x1fff)) |
                            static_cast<u64>(some_approx + static_cast<int>(sum_before >> 13 & 0x1fff)) << 20 |
                            static_cast<u64>(extent + number) << 40;
                some_exact += static_cast<int>(all & 0x1fff);
                some_approx += static_cast<int>(all >> 13 & 0x1fff);
                some_filled += static_cast<int>(all >> 26 & 0x1fff);
                some_tokens += all_tokens;
                extent += room;
            }
        }
        if (thread == 0) {
            own[0] = some_exact, own[1] = some_tokens, own[2] = some_approx, own[3] = some_filled, own[4] = extent;
        }
        arrive_at_cluster();
        wait_for_cluster();
        int at_exact = 0, at_approx = 0, at_number = 0, all = 0;
#pragma unroll
        for (int block = 0; block < GROUP; ++block) {
            if (block < head) {
                at_exact += load_of_block(own, block);
                at_approx += load_of_block(own + 2, block);
                at_number += load_of_block(own + 4, block);
            }
            if (head == 0 && thread < 5) all += load_of_block(own + thread, block);
        }
        arrive_at_cluster();  // nobody's shared memory is read by others from here on
        if (head == 0 && thread < 5) counts[row * 5 + thread] = all;
        if (WIDTH) wait_for_cluster();
        const int kv_head = row % kv_heads;
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
            int cell = 4 * (begin + thread + k * THREADS);
            int place = at_exact + static_cast<int>(before[k] & 0xfffff);
            int other = at_approx + static_cast<int>(before[k] >> 20 & 0xfffff);
            int number = at_number + static_cast<int>(before[k] >> 40);
            // The exact clusters of this warp: first member, first number.
            int2* const listed = reinterpret_cast<int2*>(pool) + 128 * (thread / 32);
            const int first = __shfl_sync(FULL, place, 0);
#pragma unroll
            for (int j = 0; j < 4; ++j, ++cell) {
                if (chosen[k] >> j & 1) {
                    const int begins = EARLY ? start[k][j] : starts[place_of(cell)];
                    if (WIDTH) listed[place - first] = make_int2(begins, number);
                    exact[out + place] = cell;
                    prefix[out + place] = number;
                    shift[out + place++] = begins - number;
                    number += abs(size[k][j]);
                } else if (chosen[k] >> (4 + j) & 1) {
                    if (WIDTH) summaries[out + other] = (tile[k] * kv_heads + kv_head) * WIDTH + cell % max(1, WIDTH);
                    approx[out + other++] = cell;
                }
            }
            if (WIDTH) {
                const int last = __shfl_sync(FULL, place, 31) - first, stop = __shfl_sync(FULL, number, 31);
                const int* const of_kv_head = members + kv_head * most_members;
                int* const of_row = slots + row * most_tokens;
                __syncwarp();
                for (int i = thread % 32 / 8; i < last; i += 4) {
                    const int2 one = listed[i];
                    const int after = i + 1 < last ? listed[i + 1].y : stop;
#pragma unroll 4
                    for (int at = one.y + thread % 8; at < after; at += 8) of_row[at] = of_kv_head[one.x + (at - one.y)];
                }
                __syncwarp();
            }
        }
        if (!WIDTH) wait_for_cluster();
    };
    // The most frequent way last: a compiler that turns the order around has its code come next.
    if (QUADS > 8 && quads > 8 * THREADS) {
        select(Number<QUADS>());
    } else if (QUADS > 4 && quads > 4 * THREADS) {
        select(Number<(QUADS > 8 ? 8 : QUADS)>());
    } else {
        select(Number<(QUADS > 4 ? 4 : QUADS)>());
    }
}
