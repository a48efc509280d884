// Attention over what was selected: exact tokens, tokens outside the clusters, and centroid summaries, in one softmax.
//
// Written in CUDA: a unit of work is what 8 KiB of keys and values (or of summaries' values) are, for either kind, so the
// copies of one kind are on their way while those of the other are computed, and the blocks that share a row merge what
// they found without another launch. `attend_impl.py` says what the arguments are; `triton_impl.py` has the same in
// Triton, for other types and for queries in several rotations.
//
// The units of all rows (a row: a request's key-value head) stand one behind the other and are cut into equal runs, a
// block each. Of a block's run every warp takes every WARPS-th unit, STAGES of them on their way or being computed
// (`cp.async`). A run may span rows; block p writes its part of row r to place p + r, which is unique since both only
// grow. When a block has been through its run it waits for those that share its rows, and each merges a piece: so all
// blocks must run at once, which a cooperative launch makes sure of.
//
// Little code, since it is read from memory once a layer: one place that fetches, one that computes, for both kinds.
//
// Set by the compiler: DIM (64 or 128, of keys and values), GROUP (1 to 8 query heads), KV_HEADS, STAGES, BLOCKS (that a
// multiprocessor has room for), LEAST (units of a block, where there are so few), BFLOAT16 (float16 otherwise).

#define WARPS 2
#define THREADS (32 * WARPS)
#include "warp.cuh"

#define LOG2_E 1.4426950408889634f
#define LOG_2 0.6931471805599453f
#define SUMMARIES 32  // of a unit: their values are as many bytes as keys and values of COLUMNS tokens
#define LOGIT_ROW (SUMMARIES + 4)  // floats between two queries' logits of a unit: no bank twice
#define UNIT (2 * CHUNK + GROUP * LOGIT_ROW * 4)  // bytes of a stage

// Take the columns of another warp in, both `finish`ed.
__device__ __forceinline__ void join(Found &found, const float *other) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float top = other[(4 * STEPS + n) * 32 + lane], weight = other[(4 * STEPS + 2 + n) * 32 + lane];
        const float both = fmaxf(top, found.top[n]), level = both == NOTHING ? 0 : both;
        const float a = exp2_of(found.top[n] - level), b = exp2_of(top - level);
        found.top[n] = both;
        found.weight[n] = found.weight[n] * a + weight * b;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int i = n; i < 4; i += 2)
                found.sum[step][i] = found.sum[step][i] * a + other[(4 * step + i) * 32 + lane] * b;
    }
}

__device__ __forceinline__ void leave(float *other, const Found &found) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) other[(4 * step + i) * 32 + lane] = found.sum[step][i];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        other[(4 * STEPS + n) * 32 + lane] = found.top[n];
        other[(4 * STEPS + 2 + n) * 32 + lane] = found.weight[n];
    }
}

// Runs of equal length, but for one unit: the first `more` have it.
struct Runs {
    int each, more;
    __device__ __forceinline__ int begin(int run) const { return run * each + min(run, more); }
    __device__ __forceinline__ int of(int unit) const {
        const int longer = more * (each + 1);
        return unit < longer ? unit / (each + 1) : more + (unit - longer) / each;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend_selected(
    const u16 *__restrict__ query, const u16 *__restrict__ keys, const u16 *__restrict__ values,
    const u16 *__restrict__ means, const int *__restrict__ slots, const int *__restrict__ summaries,
    const int *__restrict__ dense_slots, const int *__restrict__ dense_counts, const int *__restrict__ counts,
    const int *__restrict__ approx, const float *__restrict__ logits, float *parts, float *part_lse, int *arrived,
    u16 *__restrict__ out, float *__restrict__ lse, i64 stride_query, i64 most_tokens, i64 most_dense, int cells,
    int rows, float scale) {
    alignas(128) __shared__ unsigned char memory[WARPS][STAGES][UNIT];
    __shared__ int totals[WARPS], first_row[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, program = blockIdx.x;
    const u64 once = first_to_go();

    // Units of a row, at least one, so that some block writes every row's output.
    const auto units_of = [&](int row) {
        const int tokens = (counts[5 * row + 4] + COLUMNS - 1) / COLUMNS;
        const int own = (dense_counts[row / KV_HEADS] + COLUMNS - 1) / COLUMNS;
        return max(1, tokens + own + (counts[5 * row + 2] + SUMMARIES - 1) / SUMMARIES);
    };

    // This block's run, and the row in which it begins.
    const int each_thread = (rows + THREADS - 1) / THREADS, mine = threadIdx.x * each_thread;
    int own_units = 0;
    for (int row = mine; row < min(mine + each_thread, rows); ++row) own_units += units_of(row);
    int until_here = own_units;
    for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(FULL, until_here, by);
        if (lane >= by) until_here += before;
    }
    if (lane == 31) totals[warp] = until_here;
    __syncthreads();
    int all_units = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) until_here += totals[i];
        all_units += totals[i];
    }
    const int programs = min(static_cast<int>(gridDim.x), (all_units + LEAST - 1) / LEAST);
    if (program >= programs) return;
    const Runs runs{all_units / programs, all_units % programs};
    const int run_begin = runs.begin(program), run_end = runs.begin(program + 1);
    if (run_begin >= until_here - own_units && run_begin < until_here) {
        int row = mine, end = until_here - own_units;
        for (int units; (units = units_of(row), end + units <= run_begin); ++row) end += units;
        first_row[0] = row, first_row[1] = end;
    }
    __syncthreads();

    const unsigned stages = shared_address(memory[warp]);
    float *const other = reinterpret_cast<float *>(memory[0][0]);
    int row_begin = first_row[1];
    int last = first_row[0];  // row of this run
    for (int row = last; row_begin < run_end; ++row) {
        last = row;
        const int row_end = row_begin + units_of(row);
        const int request = row / KV_HEADS, head = row % KV_HEADS;
        const int exact = counts[5 * row + 4], own = dense_counts[request], averaged = counts[5 * row + 2];
        const int exact_units = (exact + COLUMNS - 1) / COLUMNS;
        const int token_units = exact_units + (own + COLUMNS - 1) / COLUMNS;
        const int since = max(run_begin, row_begin) - row_begin, until = min(run_end, row_end) - row_begin;
        const int *const row_slots = slots + row * most_tokens, *const row_dense = dense_slots + request * most_dense;
        const int *const row_summaries = summaries + row * static_cast<i64>(cells);
        const int *const row_cells = approx + row * static_cast<i64>(cells);
        const float *const row_logits = logits + row * static_cast<i64>(GROUP) * cells;

        unsigned q[STEPS][2];
        load_queries(q, query + request * stride_query + static_cast<i64>(head) * GROUP * DIM);

        // Where this lane's column of a unit lies: lane % 16 of tokens, `lane` of summaries; and whose logits those have.
        int place = -1, cell = 0;
        const auto look = [&](int unit) {
            place = -1;
            if (unit >= until) return;
            const bool of_exact = unit < exact_units, of_tokens = unit < token_units;
            const int *const list = of_exact ? row_slots : of_tokens ? row_dense : row_summaries;
            const int first = of_exact ? unit : unit - (of_tokens ? exact_units : token_units);
            const int column = of_tokens ? first * COLUMNS + lane % COLUMNS : first * SUMMARIES + lane;
            if (column >= (of_exact ? exact : of_tokens ? own : averaged)) return;
            place = list[column];
            if (!of_tokens) cell = row_cells[column];
        };
        // Copies a unit, and says which of its columns are there. Two chunks: of keys and of values, or of two halves.
        const auto fetch = [&](int unit, unsigned stage) {
            constexpr int AT_ONCE = 32 / PIECES;  // columns that the warp copies at a time
            const int piece = lane % PIECES;
            const bool of_tokens = unit < token_units;
            const u16 *const one = (of_tokens ? keys + head * DIM : means) + piece * 8;
            const u16 *const two = (of_tokens ? values + head * DIM : means) + piece * 8;
            const int apart = of_tokens ? KV_HEADS * DIM : DIM;
            const unsigned there = __ballot_sync(FULL, place >= 0);
            if (unit < until) {
#pragma unroll
                for (int i = 0; i < SUMMARIES / AT_ONCE; ++i) {
                    const int column = i * AT_ONCE + lane / PIECES, half = i / (COLUMNS / AT_ONCE);
                    const i64 at = static_cast<i64>(__shfl_sync(FULL, place, column)) * apart;
                    const unsigned to = stage + half * CHUNK + offset_of(column % COLUMNS, piece);
                    copy16(to, (half ? two : one) + at, there >> column & 1, once);
                }
                if (!of_tokens) {
                    const float *from = row_logits + cell;
#pragma unroll
                    for (int of = 0; of < GROUP; ++of, from += cells)
                        copy4(stage + 2 * CHUNK + (of * LOGIT_ROW + lane) * 4, from, place >= 0);
                }
            }
            commit();
            return there;
        };

        Found found;
        begin(found);
        unsigned there[STAGES] = {};
        unsigned stage = stages;
        look(since + warp);
        // The first STAGES turns only fetch.
#pragma unroll 1
        for (int unit = since + warp - STAGES * WARPS; unit < until; unit += WARPS) {
            if (unit >= since) {
                wait<STAGES - 1>();
                __syncwarp();
                const bool of_tokens = unit < token_units;
#pragma unroll 1
                for (int half = of_tokens; half < 2; ++half) {
                    const unsigned seen = there[0] >> (of_tokens ? 0 : half * COLUMNS) >> lane / 4;
                    float logit[4];
                    if (of_tokens) {
                        float one[4] = {0, 0, 0, 0}, two[4] = {0, 0, 0, 0};
                        const int column = lane % 8 + (lane / 8) % 2 * 8, piece = lane / 16;
#pragma unroll
                        for (int step = 0; step < STEPS; ++step) {
                            unsigned k[4];
                            load_tiles(k, stage + offset_of(column, 2 * step + piece));
                            multiply(step % 2 ? two : one, k, q[step][0], q[step][1]);
                        }
#pragma unroll
                        for (int i = 0; i < 4; ++i) logit[i] = (one[i] + two[i]) * scale;
                    } else {
                        const unsigned char *const listed = memory[warp][(stage - stages) / UNIT] + 2 * CHUNK;
                        const int column = half * COLUMNS + lane / 4;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int of = min(lane % 4 * 2 + i % 2, GROUP - 1);  // behind the last one nobody looks
                            const int at = of * LOGIT_ROW + column + i / 2 * 8;
                            logit[i] = reinterpret_cast<const float *>(listed)[at] * LOG2_E;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!(seen >> i / 2 * 8 & 1)) logit[i] = NOTHING;
                    add(found, logit, stage + half * CHUNK);
                }
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i + 1 < STAGES; ++i) there[i] = there[i + 1];
            const int next = unit + STAGES * WARPS;
            there[STAGES - 1] = fetch(next, stage);
            look(next + WARPS);
            stage = stage + UNIT == stages + STAGES * UNIT ? stages : stage + UNIT;
        }
        wait<0>();
        finish(found);
        __syncthreads();
        if (warp) leave(other + (warp - 1) * (4 * STEPS + 4) * 32, found);
        __syncthreads();
        const bool whole = run_begin <= row_begin && row_end <= run_end;  // nobody else has a part of this row
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i + 1 < WARPS; ++i) join(found, other + i * (4 * STEPS + 4) * 32);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int of = lane % 4 * 2 + n;
                if (of >= GROUP) continue;
                const float all = found.weight[n], by = all > 0 ? 1 / all : 0;
                const float level = all > 0 ? found.top[n] + __log2f(all) : NOTHING;
                const i64 to = whole ? row * static_cast<i64>(GROUP) + of : (program + static_cast<i64>(row)) * GROUP + of;
                if (lane / 4 == 0) (whole ? lse : part_lse)[to] = whole ? level * LOG_2 : level;
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float sum = found.sum[step][n + 2 * half] * by;
                        const int at = 16 * step + lane / 4 + 8 * half;
                        if (whole) out[to * DIM + at] = narrowed(sum);
                        else parts[to * DIM + at] = sum;
                    }
            }
        }
        __syncthreads();  // `other` is free, and everything is written
        if (!whole && threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrived + 2 * row, 1);
        }
        if (row_end >= run_end) break;
        row_begin = row_end;
    }

    // Merge the rows that others have parts of: at most the first of this run and the last.
    for (int which = 0; which < 2; ++which) {
        const int row = which ? last : first_row[0], start = which ? row_begin : first_row[1];
        if (which && last == first_row[0]) break;
        const int end = start + units_of(row);
        const int first_program = runs.of(start), blocks = runs.of(end - 1) - first_program + 1;
        if (blocks == 1) continue;
        if (threadIdx.x == 0) {
            wait_until(arrived + 2 * row, blocks);
            if (atomicAdd(arrived + 2 * row + 1, 1) == blocks - 1) {  // nobody waits any more
                arrived[2 * row + 1] = 0;
                __threadfence();
                arrived[2 * row] = 0;
            }
        }
        __syncthreads();
        // 16 components of a head at a time, eight parts side by side.
        for (int piece = (program - first_program) * WARPS + warp; piece < GROUP * STEPS; piece += blocks * WARPS) {
            const int of = piece / STEPS, at = piece % STEPS * 16 + lane % 4 * 4;
            const i64 place = (first_program + static_cast<i64>(row)) * GROUP + of;
            float top = NOTHING, weight = 0;
#pragma unroll 1
            for (int i = lane; i < blocks; i += 32) {
                const float level = __ldcg(part_lse + place + static_cast<i64>(i) * GROUP);
                const float both = fmaxf(top, level), safe = both == NOTHING ? 0 : both;
                weight = weight * exp2_of(top - safe) + exp2_of(level - safe);
                top = both;
            }
            for (int by = 1; by < 32; by *= 2) {
                const float others = __shfl_xor_sync(FULL, top, by), theirs = __shfl_xor_sync(FULL, weight, by);
                const float both = fmaxf(top, others), safe = both == NOTHING ? 0 : both;
                weight = weight * exp2_of(top - safe) + theirs * exp2_of(others - safe);
                top = both;
            }
            // Where nothing was seen every part weighs nothing, whatever is taken off its level.
            const float level = weight > 0 ? top + __log2f(weight) : 0;
            float sum[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (int i = lane / 4; i < blocks; i += 8) {
                const i64 part = place + static_cast<i64>(i) * GROUP;
                const float share = exp2_of(__ldcg(part_lse + part) - level);
                const float4 each = __ldcg(reinterpret_cast<const float4 *>(parts + part * DIM + at));
                sum[0] += share * each.x, sum[1] += share * each.y, sum[2] += share * each.z, sum[3] += share * each.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                for (int by = 4; by < 32; by *= 2) sum[i] += __shfl_xor_sync(FULL, sum[i], by);
            if (lane / 4 == 0) {
                const uint2 bits = {packed(sum[0], sum[1]), packed(sum[2], sum[3])};
                *reinterpret_cast<uint2 *>(out + (row * static_cast<i64>(GROUP) + of) * DIM + at) = bits;
            }
            if (lane == 0 && piece % STEPS == 0)
                lse[row * static_cast<i64>(GROUP) + of] = weight > 0 ? level * LOG_2 : NOTHING;
        }
    }
}
