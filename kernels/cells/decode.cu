// Decoding over cells: one new token of each request; a block has a share of the columns of one key-value head.
//
// Written in CUDA, since a key has to be rotated between shared memory and the matrix product: here it is in the
// registers that the product takes it from. Triton writes rotated keys to shared memory and reads them again, with
// barriers between; `cuda_impl.py` says what the arguments are, and `decode_impl.py` has the same in Triton.
//
// Every warp goes its own way through every WARPS-th chunk of 16 columns, STAGES chunks on their way or being computed
// (`cp.async`), and barriers are those of a warp. At the end the warps' results are merged; the blocks of a head wait for
// each other, merge theirs, and count the query in the scores: a second launch would find the logits outside the caches.
//
// Set by the compiler: DIM (64 or 128, of keys and values, all of a key rotated, NeoX pairs), GROUP (1 to 8), KV_HEADS,
// LANES (KV_HEADS or 1), SCORES, MAXIMUM (of the heads of a score, their mean otherwise), STAGES, BLOCKS (that a
// multiprocessor has room for), MAX_SPLITS (shares, a multiple of 32), BFLOAT16 (float16 otherwise).

#define WARPS 2
#include "warp.cuh"

#define HALF (DIM / 2)
#define RADIANS 1.4629180792671596e-09f  // 2 pi / 2^32

// Rotation by `turns` 2^-32ths of a whole one.
__device__ __forceinline__ void turn_of(unsigned turns, float &cosine, float &sine) {
    cos_sin(static_cast<float>(static_cast<int>(turns)) * RADIANS, cosine, sine);
}

// 16 columns from shared memory. `position` is the first one's, `valid` of them count, at least one.
// Logits are left in `logit`: of column lane / 4 for both queries, then of the one 8 behind.
__device__ __forceinline__ void attend(
    Found &found, float (&logit)[4], unsigned keys, unsigned values, int position, int valid, float scale,
    const unsigned (&query)[STEPS][2], const unsigned (&phase)[STEPS / 2][4]) {
    const int lane = threadIdx.x % 32;
    float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
    const int column = lane % 8 + (lane / 8) % 2 * 8, piece = lane / 16;
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step) {
        unsigned a[4], b[4];
        load_tiles(a, keys + offset_of(column, 2 * step + piece));
        load_tiles(b, keys + offset_of(column, 2 * step + piece + PIECES / 2));
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {  // columns +0, +8, +0, +8; components +0, +0, +8, +8
            const unsigned at = position + lane / 4 + tile % 2 * 8;
            float x[2], y[2];
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                float cosine, sine;
                turn_of(at * phase[step][tile / 2 * 2 + which], cosine, sine);
                const float u = widened(a[tile], which), v = widened(b[tile], which);
                x[which] = u * cosine - v * sine;
                y[which] = v * cosine + u * sine;
            }
            a[tile] = packed(x[0], x[1]);
            b[tile] = packed(y[0], y[1]);
        }
        multiply(first, a, query[step][0], query[step][1]);
        multiply(second, b, query[step + STEPS / 2][0], query[step + STEPS / 2][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        logit[i] = (first[i] + second[i]) * scale;
        if (lane / 4 + i / 2 * 8 >= valid) logit[i] = NOTHING;
    }
    add(found, logit, values);
}

#if SCORES
// Logits of a column: one number of each query of the group, side by side, as float16 below the largest that their warp
// had seen, which every chunk has beside them. Their bytes count beside the caches', and an error of 2^-11 of what a
// logit is below the largest is one of at most 2^-12 of the largest probability.
__device__ __forceinline__ void store_logits(u16 *to, int of, float one, float two) {
    const unsigned both = packed_halves(one, two);
#if GROUP % 2 == 0
    *reinterpret_cast<unsigned *>(to + of) = both;
#else
    to[of] = static_cast<u16>(both);
    if (of + 1 < GROUP) to[of + 1] = static_cast<u16>(both >> 16);
#endif
}

// Those of a chunk's columns `since` to `until`.
__device__ __forceinline__ void store_chunk(
    u16 *to, const float (&logit)[4], const float (&top)[2], int since, int until, u64 policy) {
    const int lane = threadIdx.x % 32;
#if GROUP % 4 == 0
    // Two lanes have two queries of two columns each: after an exchange, four of one.
    const unsigned one = packed_halves(logit[0] - top[0], logit[1] - top[1]);
    const unsigned two = packed_halves(logit[2] - top[0], logit[3] - top[1]);
    const unsigned other = __shfl_xor_sync(FULL, lane % 2 ? one : two, 1);
    const int column = lane / 4 + lane % 2 * 8;
    if (lane % 4 < GROUP / 2 && column >= since && column < until) {
        const uint2 four = lane % 2 ? uint2{other, two} : uint2{one, other};
        store8(to + column * GROUP + lane % 4 / 2 * 4, four, policy);
    }
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = lane / 4 + half * 8, pair = lane % 4 * 2;
        if (pair < GROUP && column >= since && column < until)
            store_logits(to + column * GROUP, pair, logit[2 * half] - top[0], logit[2 * half + 1] - top[1]);
    }
#endif
}

#define PAIRS ((GROUP + 1) / 2)

__device__ __forceinline__ void load_logits(unsigned (&pair)[PAIRS], const u16 *from) {
#if GROUP == 8
    const uint4 four = __ldcg(reinterpret_cast<const uint4 *>(from));
    pair[0] = four.x, pair[1] = four.y, pair[2] = four.z, pair[3] = four.w;
#elif GROUP == 4
    const uint2 two = __ldcg(reinterpret_cast<const uint2 *>(from));
    pair[0] = two.x, pair[1] = two.y;
#elif GROUP % 2 == 0
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) pair[i] = __ldcg(reinterpret_cast<const unsigned *>(from) + i);
#else
#pragma unroll
    for (int of = 0; of < GROUP; ++of) {
        const unsigned half = __ldcg(from + of);
        pair[of / 2] = of % 2 ? pair[of / 2] | half << 16 : half;
    }
#endif
}

__device__ __forceinline__ void load_tops(float (&top)[GROUP], const float *from) {
#if GROUP % 4 == 0
#pragma unroll
    for (int of = 0; of < GROUP; of += 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4 *>(from + of));
        top[of] = four.x, top[of + 1] = four.y, top[of + 2] = four.z, top[of + 3] = four.w;
    }
#else
#pragma unroll
    for (int of = 0; of < GROUP; ++of) top[of] = __ldcg(from + of);
#endif
}
#endif

// Wait until `blocks` blocks have come here, with what they wrote; `arrived` is two zeros, and will be again.
// All of them run at once, as in a cooperative launch, or there is one.
__device__ __forceinline__ void wait_for_all(int *arrived, int blocks) {
    __syncthreads();
    if (threadIdx.x == 0 && blocks > 1) {
        __threadfence();
        atomicAdd(arrived, 1);
        wait_until(arrived, blocks);
        if (atomicAdd(arrived + 1, 1) == blocks - 1) {  // nobody waits any more
            arrived[1] = 0;
            __threadfence();
            arrived[0] = 0;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) decode_cells(
    const u16 *__restrict__ query, const u16 *__restrict__ new_keys, const u16 *__restrict__ new_values, u16 *keys,
    u16 *values, const int *__restrict__ slot, const int *__restrict__ rows, const int *__restrict__ seen,
    const int *__restrict__ skip, const int *__restrict__ fresh, const int *__restrict__ entry_of,
    const unsigned *__restrict__ phases, float *score, float *parts, float *part_lse, u16 *logits, float *tops,
    int *arrived, u16 *__restrict__ out, i64 stride_query, i64 stride_new_key, i64 stride_new_value, i64 stride_key,
    i64 stride_value, int entries, float scale, float beta, float kept) {
    alignas(128) __shared__ unsigned char memory[WARPS][STAGES][2][CHUNK];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y;
    const i64 request = blockIdx.z;
    const int total = seen[request], old = total - 1;  // without the new token
    const int each = ((old + COLUMNS - 1) / COLUMNS + splits - 1) / splits * COLUMNS;
    const int start = split * each + warp * COLUMNS, end = min((split + 1) * each, old);
    const int *list = slot + (static_cast<i64>(rows[request]) * LANES + (LANES > 1 ? head : 0)) * entries;
    const u16 *head_keys = keys + head * DIM, *head_values = values + head * DIM;
#if SCORES
    const int settled = fresh[request] ? skip[request] : total;
    u16 *const target = logits + (request * KV_HEADS + head) * GROUP * static_cast<i64>(entries);
    const int chunks = entries / COLUMNS + 2;  // the new token is one of its own
    float *const target_tops = tops + (request * KV_HEADS + head) * GROUP * static_cast<i64>(chunks);
    const int pair = lane % 4 * 2;  // first of this thread's two queries
#endif

    unsigned q[STEPS][2];
    unsigned phase[STEPS / 2][4];
    load_queries(q, query + request * stride_query + head * GROUP * DIM);
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) phase[step][i] = phases[16 * step + lane % 4 * 2 + i / 2 * 8 + i % 2];

    const unsigned stages = shared_address(memory[warp]);
    // What this launch reads again is to stay in the L2 cache, as much of it as finds room.
    const u64 once = first_to_go();
#if SCORES
    const u64 again = last_to_go(kept);
#endif

    // Slot of a chunk's column lane % 16.
    const auto slot_of = [&](int first) { return first + lane % 16 < end ? list[first + lane % 16] : 0; };
    const auto fetch = [&](int first, int slots, unsigned stage) {
        constexpr int ROWS = 32 / PIECES;  // that the warp copies at a time
#pragma unroll
        for (int i = 0; i < COLUMNS / ROWS; ++i) {
            const int column = i * ROWS + lane / PIECES, piece = lane % PIECES;
            const i64 at = __shfl_sync(FULL, slots, column);
            const unsigned to = stage + offset_of(column, piece);
            const bool there = first + column < end;
            copy16(to, head_keys + at * stride_key + piece * 8, there, once);
            copy16(to + CHUNK, head_values + at * stride_value + piece * 8, there, once);
        }
        commit();
    };

    Found found;
    begin(found);
#if SCORES
    const auto keep_top = [&](int chunk) {
#if GROUP % 2 == 0
        if (lane / 4 == 0 && pair < GROUP)
            *reinterpret_cast<float2 *>(target_tops + chunk * GROUP + pair) = float2{found.top[0], found.top[1]};
#else
#pragma unroll
        for (int n = 0; n < 2; ++n)
            if (lane / 4 == 0 && pair + n < GROUP) target_tops[chunk * GROUP + pair + n] = found.top[n];
#endif
    };
#endif

    constexpr int BY = WARPS * COLUMNS;
    int slots = slot_of(start);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        fetch(start + i * BY, slots, stages + i * 2 * CHUNK);
        slots = slot_of(start + (i + 1) * BY);
    }
    unsigned stage = stages;
    for (int first = start; first < end; first += BY) {
        wait<STAGES - 1>();
        __syncwarp();
        float logit[4];
        const int valid = min(end - first, COLUMNS);
        attend(found, logit, stage, stage + CHUNK, first, valid, scale, q, phase);
#if SCORES
        store_chunk(target + first * static_cast<i64>(GROUP), logit, found.top, settled - first, valid, again);
        keep_top(first / COLUMNS);
#endif
        __syncwarp();
        fetch(first + STAGES * BY, slots, stage);
        slots = slot_of(first + (STAGES + 1) * BY);
        stage = stage + 2 * CHUNK == stages + STAGES * 2 * CHUNK ? stages : stage + 2 * CHUNK;
    }
    wait<0>();
    __syncwarp();

    if (split == splits - 1 && total > 0) {
        // The new token is seen as it is given, and stored rotated back to position 0.
        const u16 *const k = new_keys + request * stride_new_key + head * DIM;
        const u16 *const v = new_values + request * stride_new_value + head * DIM;
        const i64 at = list[old];
        for (int i = threadIdx.x; i < HALF; i += 32 * WARPS) {
            float cosine, sine;
            turn_of(static_cast<unsigned>(old) * phases[i], cosine, sine);
            const float x = widened(k[i], 0), y = widened(k[i + HALF], 0);
            keys[at * stride_key + head * DIM + i] = static_cast<u16>(packed(x * cosine + y * sine, 0));
            keys[at * stride_key + head * DIM + i + HALF] = static_cast<u16>(packed(y * cosine - x * sine, 0));
        }
        for (int i = threadIdx.x; i < DIM; i += 32 * WARPS) values[at * stride_value + head * DIM + i] = v[i];
        if (warp == 0) {
            for (int i = lane; i < CHUNK / 8; i += 32) reinterpret_cast<uint4 *>(memory[0][0][0])[i] = uint4{0, 0, 0, 0};
            __syncwarp();
            for (int i = lane; i < 2 * PIECES; i += 32) {
                const int piece = i % PIECES;
                uint4 *const to = reinterpret_cast<uint4 *>(memory[0][0][i / PIECES] + offset_of(0, piece));
                *to = reinterpret_cast<const uint4 *>(i < PIECES ? k : v)[piece];
            }
            __syncwarp();
            float logit[4];
            attend(found, logit, stages, stages + CHUNK, 0, 1, scale, q, phase);
#if SCORES
            if (lane / 4 == 0 && pair < GROUP && old >= settled)
                store_logits(
                    target + old * static_cast<i64>(GROUP), pair, logit[0] - found.top[0], logit[1] - found.top[1]);
            keep_top((old + COLUMNS - 1) / COLUMNS);
#endif
        }
    }

    finish(found);
    __syncthreads();
    float *const other = reinterpret_cast<float *>(memory[0][0][0]);  // what warp 1 has found, a number of every lane
    if (warp == 1) leave(other, found);
    __syncthreads();
    const i64 first_head = (request * KV_HEADS + head) * GROUP;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float top = other[(4 * STEPS + n) * 32 + lane], weight = other[(4 * STEPS + 2 + n) * 32 + lane];
        const float both = fmaxf(top, found.top[n]), level = both == NOTHING ? 0 : both;
        const float a = exp2_of(found.top[n] - level), b = exp2_of(top - level);
        const float all = found.weight[n] * a + weight * b, by = all > 0 ? 1 / all : 0;
        const int of = lane % 4 * 2 + n;
        if (warp || of >= GROUP) continue;
        const i64 part = (first_head + of) * splits + split;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = found.sum[step][n + 2 * half] * a + other[(4 * step + n + 2 * half) * 32 + lane] * b;
                parts[part * DIM + 16 * step + lane / 4 + 8 * half] = sum * by;
            }
        if (lane / 4 == 0) part_lse[part] = all > 0 ? level + __log2f(all) : NOTHING;
    }
    // Scores of one lane need the heads of all key-value heads, where they share it.
    constexpr int TOGETHER = SCORES && LANES == 1 ? KV_HEADS : 1;  // key-value heads whose blocks wait for each other
    const int blocks = TOGETHER * splits, block = (TOGETHER > 1 ? head * splits : 0) + split;
#if SCORES
    // This block's columns to count in, some at a time. What the other blocks write comes last, so what it is added to is
    // on its way before they are waited for, and then a turn ahead; their entries, two turns.
    constexpr int EACH = 8, THREADS = 32 * WARPS, TURN = EACH * THREADS;
    const int share_of = (total - settled + blocks - 1) / blocks;
    const int from = settled + block * share_of + static_cast<int>(threadIdx.x);
    const int to = min(settled + (block + 1) * share_of, total);
    const int *const entries_of = entry_of + request * entries;
    float *const scores = score + (static_cast<i64>(rows[request]) * LANES + (LANES > 1 ? head : 0)) * entries;
    int entry[EACH], next_entry[EACH];
    float old_score[EACH];
    const auto find = [&](int (&found_entry)[EACH], int first) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) found_entry[i] = first + i * THREADS < to ? entries_of[first + i * THREADS] : -1;
    };
    const auto look = [&](float (&found_score)[EACH], const int (&of_entry)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) found_score[i] = of_entry[i] >= 0 ? scores[of_entry[i]] : 0;
    };
    find(entry, from);
    find(next_entry, from + TURN);
    look(old_score, entry);
#endif
    wait_for_all(arrived + 2 * (request * (KV_HEADS / TOGETHER) + (TOGETHER > 1 ? 0 : head)), blocks);

    // Log-sum-exp of every head, a warp a head.
    constexpr int HEADS = TOGETHER * GROUP;
    const i64 lane_head = TOGETHER > 1 ? request * KV_HEADS * GROUP : first_head;
    float *const levels = other;
    for (int of = warp; of < HEADS; of += WARPS) {
        const float *const each_lse = part_lse + (lane_head + of) * splits;
        float level[MAX_SPLITS / 32], top = NOTHING, weight = 0;
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; ++i) {
            level[i] = lane + 32 * i < splits ? __ldcg(each_lse + lane + 32 * i) : NOTHING;
            top = fmaxf(top, level[i]);
        }
        for (int by = 1; by < 32; by *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, by));
        top = top == NOTHING ? 0 : top;
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; ++i) weight += exp2_of(level[i] - top);
        for (int by = 1; by < 32; by *= 2) weight += __shfl_xor_sync(FULL, weight, by);
        // Where nothing was seen every share weighs nothing, whatever is taken off its level.
        if (lane == 0) levels[of] = weight > 0 ? top + __log2f(weight) : 0;
    }
    __syncthreads();

    // The shares' mean: 16 components of a head at a time, eight shares side by side.
    for (int unit = split * WARPS + warp; unit < GROUP * STEPS; unit += splits * WARPS) {
        const int of = unit / STEPS, at = unit % STEPS * 16 + lane % 4 * 4;
        const float level = levels[(TOGETHER > 1 ? head * GROUP : 0) + of];
        const i64 part = (first_head + of) * splits;
        float sum[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (int i = lane / 4; i < splits; i += 8) {
            const float weight = exp2_of(__ldcg(part_lse + part + i) - level);
            const float4 each_sum = __ldcg(reinterpret_cast<const float4 *>(parts + (part + i) * DIM + at));
            sum[0] += weight * each_sum.x, sum[1] += weight * each_sum.y;
            sum[2] += weight * each_sum.z, sum[3] += weight * each_sum.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            for (int by = 4; by < 32; by *= 2) sum[i] += __shfl_xor_sync(FULL, sum[i], by);
        if (lane / 4 == 0) {
            const uint2 bits = {packed(sum[0], sum[1]), packed(sum[2], sum[3])};
            *reinterpret_cast<uint2 *>(out + (first_head + of) * DIM + at) = bits;
        }
    }

#if SCORES
    const u16 *const lane_logits = logits + lane_head * entries;
    const float *const lane_tops = tops + lane_head * chunks;
    for (int first = from; first < to; first += TURN) {
        float received[EACH], next_score[EACH];
        int further[EACH];
        look(next_score, next_entry);
        find(further, first + 2 * TURN);
#pragma unroll
        for (int i = 0; i < EACH; ++i) received[i] = 0;
#pragma unroll 1
        for (int other_head = 0; other_head < TOGETHER; ++other_head) {
            unsigned logit[EACH][PAIRS];
            float top[EACH][GROUP];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int column = first + i * THREADS, chunk = (column < old ? column : old + COLUMNS - 1) / COLUMNS;
                if (entry[i] < 0) continue;
                load_logits(logit[i], lane_logits + (static_cast<i64>(other_head) * entries + column) * GROUP);
                load_tops(top[i], lane_tops + (static_cast<i64>(other_head) * chunks + chunk) * GROUP);
            }
#pragma unroll
            for (int of = 0; of < GROUP; ++of) {
                const float level = levels[other_head * GROUP + of];
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const float p = exp2_of(widened_half(logit[i][of / 2], of % 2) + (top[i][of] - level));
                    received[i] = MAXIMUM ? fmaxf(received[i], p) : received[i] + p;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float now = MAXIMUM ? received[i] : received[i] * (1.0f / HEADS);
            if (entry[i] >= 0) scores[entry[i]] = beta * old_score[i] + (1 - beta) * now;
            entry[i] = next_entry[i], next_entry[i] = further[i], old_score[i] = next_score[i];
        }
    }
#endif
}
