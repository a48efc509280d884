// Largest value, sum and sums before each thread, over the threads of a block.
//
// Set before: THREADS (a multiple of 32, of the block); instructions.cuh is included.

#define WARPS (THREADS / 32)

// Each of these has its own scratch, which no thread writes again before every thread has read it.
__device__ __forceinline__ float block_max(float value, float* scratch) {
    for (int by = 16; by; by /= 2) value = fmaxf(value, __shfl_xor_sync(FULL, value, by));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[threadIdx.x % WARPS];
    for (int by = WARPS / 2; by; by /= 2) value = fmaxf(value, __shfl_xor_sync(FULL, value, by));
    return value;
}

__device__ __forceinline__ float block_sum(float value, float* scratch) {
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(FULL, value, by);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[threadIdx.x % WARPS];
    for (int by = WARPS / 2; by; by /= 2) value += __shfl_xor_sync(FULL, value, by);
    return value;
}

// Sum over the threads before this one; `total` over all.
__device__ u64 block_scan(u64 value, u64* scratch, u64& total) {
    u64 sum = value;
    for (int by = 1; by < 32; by *= 2) {
        const u64 other = __shfl_up_sync(FULL, sum, by);
        if (threadIdx.x % 32 >= by) sum += other;
    }
    if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    u64 warps = scratch[threadIdx.x % WARPS];
    const u64 own = warps;
    for (int by = 1; by < WARPS; by *= 2) {
        const u64 other = __shfl_up_sync(FULL, warps, by, WARPS);
        if (threadIdx.x % WARPS >= by) warps += other;
    }
    total = __shfl_sync(FULL, warps, WARPS - 1, WARPS);
    const u64 before = __shfl_sync(FULL, warps - own, threadIdx.x / 32, WARPS);
    __syncthreads();
    return before + sum - value;
}
