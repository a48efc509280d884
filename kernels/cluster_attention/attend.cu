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

// Runs of equal length, but for one unit: the first `more` have it.
struct Runs {
    unsigned each, more;
    __device__ __forceinline__ int begin(unsigned run) const { return run * each + min(run, more); }
    __device__ __forceinline__ int of(unsigned unit) const {
        const unsigned longer = more * (each + 1);
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
    const int lane = threadIdx.x % 32, program = blockIdx.x;
    const int warp = __shfl_sync(FULL, threadIdx.x / 32, 0);  // the same in all lanes, as the compiler sees now
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
    const Runs runs{static_cast<unsigned>(all_units) / programs, static_cast<unsigned>(all_units) % programs};
    const int run_begin = runs.begin(program), run_end = runs.begin(program + 1);
    if (run_begin >= until_here - own_units && run_begin < until_here) {
        int row = mine, end = until_here - own_units;
        for (int units; (units = units_of(row), end + units <= run_begin); ++row) end += units;
        first_row[0] = row, first_row[1] = end;
    }
    __syncthreads();

    // In registers of threads: of an address in uniform ones the compiler (CUDA 13.0) makes copies with a policy illegal.
    const unsigned stages = shared_address(memory[threadIdx.x / 32]);
    float *const left = reinterpret_cast<float *>(memory[0][0]);  // what the warps have found
    // Where a lane's pieces of the first eight columns go in a stage; those of the next eight, behind them.
    constexpr int AT_ONCE = 32 / PIECES, PERIOD = 8 / AT_ONCE;  // columns that a warp copies at a time
    const int piece = lane % PIECES;
    unsigned target[PERIOD];
#pragma unroll
    for (int i = 0; i < PERIOD; ++i) target[i] = offset_of(i * AT_ONCE + lane / PIECES, piece);
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

        // Where this lane's column of the next two units lies: lane % 16 of tokens, `lane` of summaries; and whose logits
        // those have.
        int place[2] = {-1, -1}, cell[2] = {0, 0};
        const auto look = [&](int unit) {
            place[0] = place[1], cell[0] = cell[1];
            place[1] = -1;
            if (unit >= until) return;
            const bool of_exact = unit < exact_units, of_tokens = unit < token_units;
            const int *const list = of_exact ? row_slots : of_tokens ? row_dense : row_summaries;
            const int first = of_exact ? unit : unit - (of_tokens ? exact_units : token_units);
            const int column = of_tokens ? first * COLUMNS + lane % COLUMNS : first * SUMMARIES + lane;
            if (column >= (of_exact ? exact : of_tokens ? own : averaged)) return;
            place[1] = list[column];
            if (!of_tokens) cell[1] = row_cells[column];
        };
        // Copies a unit, and says which of its columns are there. Two chunks: of keys and of values, or of two halves.
        const auto fetch = [&](int unit, unsigned stage) {
            const bool of_tokens = unit < token_units;
            const u16 *const one = (of_tokens ? keys + head * DIM : means) + piece * 8;
            const u16 *const two = (of_tokens ? values + head * DIM : means) + piece * 8;
            const unsigned apart = of_tokens ? KV_HEADS * DIM : DIM;
            const unsigned there = __ballot_sync(FULL, place[0] >= 0);
            if (unit < until) {
#pragma unroll
                for (int i = 0; i < SUMMARIES / AT_ONCE; ++i) {
                    const int at = __shfl_sync(FULL, place[0], i * AT_ONCE + lane / PIECES);
                    const u16 *const from = i < COLUMNS / AT_ONCE ? one : two;
                    copy16(
                        stage + target[i % PERIOD] + i / PERIOD * (8 * DIM * 2),
                        from + static_cast<u64>(static_cast<unsigned>(at)) * apart, at >= 0, once);
                }
                if (!of_tokens) {
                    const float *from = row_logits + cell[0];
#pragma unroll
                    for (int of = 0; of < GROUP; ++of, from += cells)
                        copy4(stage + 2 * CHUNK + (of * LOGIT_ROW + lane) * 4, from, place[0] >= 0);
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
        look(since + warp + WARPS);
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
            look(next + 2 * WARPS);
            stage = stage + UNIT == stages + STAGES * UNIT ? stages : stage + UNIT;
        }
        wait<0>();
        finish(found);
        __syncthreads();
        leave(left + warp * FOUND, found);
        __syncthreads();
        const bool whole = run_begin <= row_begin && row_end <= run_end;  // nobody else has a part of this row
        // The warps' results together: four components of a head at a time.
        for (int unit = threadIdx.x; unit < GROUP * DIM / 4; unit += THREADS) {
            const int of = unit / (DIM / 4), at = unit % (DIM / 4) * 4;
            const float *const numbers = left + (4 * STEPS + of % 2) * 32 + of / 2;
            const float *const sums = left + (at / 16 * 4 + at % 16 / 8 * 2 + of % 2) * 32 + at % 8 * 4 + of / 2;
            float top = NOTHING, weight = 0, sum[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < WARPS; ++i) top = fmaxf(top, numbers[i * FOUND]);
            const float level = top == NOTHING ? 0 : top;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const float share = exp2_of(numbers[i * FOUND] - level);
                weight += share * numbers[i * FOUND + 64];
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] += share * sums[i * FOUND + 4 * j];
            }
            const float by = weight > 0 ? 1 / weight : 0, both = weight > 0 ? top + __log2f(weight) : NOTHING;
            const i64 to = (whole ? row : program + static_cast<i64>(row)) * GROUP + of;
            if (whole) {
                const uint2 bits = {packed(sum[0] * by, sum[1] * by), packed(sum[2] * by, sum[3] * by)};
                *reinterpret_cast<uint2 *>(out + to * DIM + at) = bits;
            } else {
                *reinterpret_cast<float4 *>(parts + to * DIM + at) =
                    float4{sum[0] * by, sum[1] * by, sum[2] * by, sum[3] * by};
            }
            if (at == 0) (whole ? lse : part_lse)[to] = whole ? both * LOG_2 : both;
        }
        __syncthreads();  // `left` is free, and everything is written
        if (!whole && threadIdx.x == 0) arrive(arrived + 2 * row);
        if (row_end >= run_end) break;
        row_begin = row_end;
    }

    // Merge the rows that others have parts of: at most the first of this run and the last.
    for (int which = 0; which < 2; ++which) {
        const int row = which ? last : first_row[0], start = which ? row_begin : first_row[1];
        if (which && last == first_row[0]) break;
        const int end = start + units_of(row);
        const int first_program = runs.of(start), blocks = runs.of(end - 1) - first_program + 1;
        constexpr int COMPONENTS = GROUP * STEPS;  // 16 at a time
        const int merging = min(blocks, (COMPONENTS + WARPS - 1) / WARPS);  // the others have brought their parts
        if (blocks == 1 || program - first_program >= merging) continue;
        if (threadIdx.x == 0) {
            wait_until(arrived + 2 * row, blocks);
            if (atomicAdd(arrived + 2 * row + 1, 1) == merging - 1) {  // nobody waits any more
                arrived[2 * row + 1] = 0;
                __threadfence();
                arrived[2 * row] = 0;
            }
        }
        __syncthreads();
        // 16 components of a head at a time, eight parts side by side.
        for (int unit = (program - first_program) * WARPS + warp; unit < COMPONENTS; unit += merging * WARPS) {
            const int of = unit / STEPS, at = unit % STEPS * 16 + lane % 4 * 4;
            const i64 place = (first_program + static_cast<i64>(row)) * GROUP + of;
            float top = NOTHING, weight = 0, sum[4] = {0, 0, 0, 0};
#pragma unroll 2
            for (int i = lane / 4; i < blocks; i += 8) {
                const i64 part = place + static_cast<i64>(i) * GROUP;
                const float level = __ldcg(part_lse + part);
                const float4 each = __ldcg(reinterpret_cast<const float4 *>(parts + part * DIM + at));
                const float both = fmaxf(top, level), safe = both == NOTHING ? 0 : both;
                const float old = exp2_of(top - safe), share = exp2_of(level - safe);
                top = both, weight = weight * old + share;
                sum[0] = sum[0] * old + share * each.x, sum[1] = sum[1] * old + share * each.y;
                sum[2] = sum[2] * old + share * each.z, sum[3] = sum[3] * old + share * each.w;
            }
            float most = top;
            for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, by));
            const float share = exp2_of(top - (most == NOTHING ? 0 : most));
            weight *= share;
            for (int by = 4; by < 32; by *= 2) weight += __shfl_xor_sync(FULL, weight, by);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] *= share;
                for (int by = 4; by < 32; by *= 2) sum[i] += __shfl_xor_sync(FULL, sum[i], by);
            }
            const float by = weight > 0 ? 1 / weight : 0;
            if (lane / 4 == 0) {
                const uint2 bits = {packed(sum[0] * by, sum[1] * by), packed(sum[2] * by, sum[3] * by)};
                *reinterpret_cast<uint2 *>(out + (row * static_cast<i64>(GROUP) + of) * DIM + at) = bits;
            }
            if (lane == 0 && unit % STEPS == 0)
                lse[row * static_cast<i64>(GROUP) + of] = weight > 0 ? (most + __log2f(weight)) * LOG_2 : NOTHING;
        }
    }
}
