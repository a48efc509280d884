// Attention to the chosen tokens and summaries of every row (a request's key-value head), as `_attend` in `triton_impl.py`.
//
// Written in CUDA: a warp is a program. It reads 16 tokens or summaries at a time, STAGES chunks on their way or being
// computed, across both lists, with no barrier but its own. The work of all rows, in units of 16 summaries, is cut into
// equal runs, one a warp; a run may span rows, and warp p writes its part of row r to place p + r. `_merge` joins them.
//
// Set by the compiler: DIM (64 or 128, of keys and values), GROUP (1 to 8), KV_HEADS, STAGES, BLOCKS (that a
// multiprocessor has room for), BFLOAT16 (float16 otherwise).

#include "warp.cuh"

#define COST 2  // of a chunk of tokens: keys and values
#define LOG2_E 1.4426950408889634f

// Units of work of a row, at least one, so that somebody writes its part.
__device__ __forceinline__ int work_of(const int *counts, const int *dense_counts, int row, int rows) {
    if (row >= rows) return 0;
    const int tokens = counts[5 * row + 4], summaries = counts[5 * row + 2], dense = dense_counts[row / KV_HEADS];
    const int chunks = (tokens + COLUMNS - 1) / COLUMNS + (dense + COLUMNS - 1) / COLUMNS;
    return max(1, chunks * COST + (summaries + COLUMNS - 1) / COLUMNS);
}

extern "C" __global__ void __launch_bounds__(32, BLOCKS) attend_clusters(
    const u16 *__restrict__ query, const u16 *__restrict__ keys, const u16 *__restrict__ values,
    const u16 *__restrict__ means, const int *__restrict__ slots, const int *__restrict__ summaries,
    const int *__restrict__ dense_slots, const int *__restrict__ dense_counts, const int *__restrict__ counts,
    const int *__restrict__ approx, const float *__restrict__ logits, float *__restrict__ parts,
    float *__restrict__ part_lse, i64 stride_query, i64 most_cells, i64 most_tokens, i64 most_dense, int rows,
    float scale) {
    alignas(128) __shared__ unsigned char memory[STAGES][2][CHUNK];
    alignas(16) __shared__ float given[STAGES][8][COLUMNS];  // logits of a chunk of summaries
    const int lane = threadIdx.x;
    const unsigned stages = shared_address(memory);
    const unsigned logit_stages = shared_address(given);

    int work = 0;
#pragma unroll 4
    for (int first = 0; first < rows; first += 32) work += work_of(counts, dense_counts, first + lane, rows);
    for (int by = 1; by < 32; by *= 2) work += __shfl_xor_sync(FULL, work, by);
    const i64 programs = min(static_cast<int>(gridDim.x), work), program = blockIdx.x;
    if (program >= programs) return;
    int position = static_cast<int>(program * work / programs);
    const int stop = static_cast<int>((program + 1) * work / programs);

    // The row in which the run begins, and where that row does.
    int row = 0, row_begin = 0;
    for (int first = 0, before = 0; first < rows; first += 32) {
        const int own = work_of(counts, dense_counts, first + lane, rows);
        int until = own;
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(FULL, until, by);
            if (lane >= by) until += other;
        }
        const unsigned ended = __ballot_sync(FULL, before + until <= position);
        row += __popc(ended);
        const int all = __shfl_sync(FULL, until, 31);
        if (ended != FULL) {
            const int at = __popc(ended);
            row_begin = before + __shfl_sync(FULL, until - own, at);
            break;
        }
        before += all;
    }

    while (position < stop) {
        const int request = row / KV_HEADS, head = row % KV_HEADS;
        const int n_exact = counts[5 * row + 4], n_approx = counts[5 * row + 2], n_dense = dense_counts[request];
        const int exact_chunks = (n_exact + COLUMNS - 1) / COLUMNS;
        const int token_chunks = exact_chunks + (n_dense + COLUMNS - 1) / COLUMNS;
        const int row_work = max(1, token_chunks * COST + (n_approx + COLUMNS - 1) / COLUMNS);
        const int since = position - row_begin, until = min(stop - row_begin, row_work);
        // A chunk belongs to the run in which its first unit lies.
        const int token_from = (since + COST - 1) / COST, token_to = min((until + COST - 1) / COST, token_chunks);
        const int tokens = max(0, token_to - token_from);
        const int summary_from = max(since - token_chunks * COST, 0);
        const int summary_to = min(until - token_chunks * COST, (n_approx + COLUMNS - 1) / COLUMNS);
        const int chunks = tokens + max(0, summary_to - summary_from);

        unsigned q[STEPS][2];
        load_queries(q, query + request * stride_query + head * GROUP * DIM);
        const int *const row_slots = slots + row * most_tokens, *const request_slots = dense_slots + request * most_dense;
        const int *const row_summaries = summaries + row * most_cells, *const row_approx = approx + row * most_cells;
        const float *const row_logits = logits + row * GROUP * most_cells;
        const u16 *const head_keys = keys + head * DIM, *const head_values = values + head * DIM;

        // Of column lane % 16 of a chunk: its token's slot or its summary's place, and the summary's cell; -1: nobody.
        struct Place { int at, cell; };
        const auto place_of = [&](int chunk) {
            Place place = {-1, 0};
            if (chunk >= chunks) return place;
            if (chunk < tokens) {
                const int number = token_from + chunk, exact = number < exact_chunks;
                const int at = (number - (exact ? 0 : exact_chunks)) * COLUMNS + lane % COLUMNS;
                if (at < (exact ? n_exact : n_dense)) place.at = exact ? row_slots[at] : request_slots[at];
            } else {
                const int at = (summary_from + chunk - tokens) * COLUMNS + lane % COLUMNS;
                if (at < n_approx) place = {row_summaries[at], row_approx[at]};
            }
            return place;
        };
        // Which columns of the chunk are to be seen, a bit each.
        const auto fetch = [&](int chunk, Place place, int stage) {
            constexpr int ROWS = 32 / PIECES;  // that the warp copies at a time
            const unsigned to = stages + stage * 2 * CHUNK;
            const bool summary = chunk >= tokens;
#pragma unroll
            for (int i = 0; i < COLUMNS / ROWS; ++i) {
                const int column = i * ROWS + lane / PIECES, piece = lane % PIECES;
                const i64 at = __shfl_sync(FULL, place.at, column);
                const unsigned behind = to + offset_of(column, piece);
                const i64 of = (at < 0 ? 0 : at) * (KV_HEADS * DIM) + piece * 8;
                if (summary) {
                    copy16(behind + CHUNK, means + (at < 0 ? 0 : at) * DIM + piece * 8, at >= 0);
                } else {
                    copy16(behind, head_keys + of, at >= 0);
                    copy16(behind + CHUNK, head_values + of, at >= 0);
                }
            }
            if (summary)
#pragma unroll
                for (int i = 0; i < (GROUP * COLUMNS + 31) / 32; ++i) {
                    const int of = (i * 32 + lane) / COLUMNS;  // lane % 16 is the column
                    if (of < GROUP && place.at >= 0) {
                        const unsigned at = logit_stages + ((stage * 8 + of) * COLUMNS + lane % COLUMNS) * 4;
                        copy4(at, row_logits + of * most_cells + place.cell);
                    }
                }
            commit();
            return __ballot_sync(FULL, place.at >= 0) & 0xffff;
        };

        Found found;
        begin(found);
        unsigned seen[STAGES];
        Place place = place_of(0);
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            seen[i] = fetch(i, place, i);
            place = place_of(i + 1);
        }
        for (int first = 0; first < chunks; first += STAGES) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                const int chunk = first + i;
                if (chunk >= chunks) break;
                wait<STAGES - 1>();
                __syncwarp();
                const unsigned at = stages + i * 2 * CHUNK;
                float logit[4];
                if (chunk < tokens) {
                    score(logit, at, q);
#pragma unroll
                    for (int n = 0; n < 4; ++n) logit[n] *= scale * LOG2_E;
                } else {
#pragma unroll
                    for (int n = 0; n < 4; ++n) logit[n] = given[i][lane % 4 * 2 + n % 2][lane / 4 + n / 2 * 8] * LOG2_E;
                }
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (!(seen[i] >> (lane / 4 + n / 2 * 8) & 1) || lane % 4 * 2 + n % 2 >= GROUP) logit[n] = NOTHING;
                add(found, logit, at + CHUNK);
                __syncwarp();
                seen[i] = fetch(chunk + STAGES, place, i);
                place = place_of(chunk + STAGES + 1);
            }
        }
        wait<0>();
        __syncwarp();

        finish(found);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int of = lane % 4 * 2 + n;
            if (of >= GROUP) continue;
            const i64 part = (program + row) * GROUP + of;
            const float weight = found.weight[n], by = weight > 0 ? 1 / weight : 0;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    parts[part * DIM + 16 * step + lane / 4 + 8 * half] = found.sum[step][n + 2 * half] * by;
            if (lane / 4 == 0) part_lse[part] = weight > 0 ? found.top[n] + __log2f(weight) : NOTHING;
        }
        position = row_begin + until;
        row_begin += row_work;
        ++row;
    }
}
