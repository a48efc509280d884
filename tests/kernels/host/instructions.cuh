// What `kernels/instructions.cuh` has, and what CUDA's compiler knows, for a CPU: so that kernels run where there is no GPU.
//
// A block is a thread of the operating system, a CUDA thread a context in it, and a warp's threads meet where an
// instruction is one of all of them. Fragments of matrix products lie in lanes as PTX says. Asynchronous copies happen as
// late as they may, and what they will overwrite is spoilt as early as it may. Not shown: races that need time to pass
// between two steps that no barrier parts, and the rounding of the GPU's own functions.

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict
#define __shared__ static thread_local

#define FULL 0xffffffffu
#define NOTHING (-INFINITY)

typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;
using std::max;
using std::min;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
struct Index { unsigned x, y, z; };

static thread_local Index threadIdx, blockIdx, gridDim;

// ---- threads of a block ----

struct Copy { unsigned to; const void *from; bool there; int bytes; };

// What a product is going to write, and does not before it is waited for.
struct Awaited { void *sum; size_t bytes; unsigned found[6][4]; };

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    std::vector<Copy> copies;
    std::vector<std::vector<Copy>> groups;
    std::vector<Awaited> awaited;
    int waits = 0;  // for the blocks of the cluster
};

// Where so many threads meet and see what each has brought.
struct Meeting {
    alignas(16) unsigned char brought[2][32][32];
    int expected = 32, count = 0, times = 0;
};

// Blocks that see each other's shared memory.
struct Cluster {
    std::atomic<int> arrived{0};
    std::atomic<bool> stuck{false};
    std::atomic<int> least{1 << 30};  // times that a block that has ended arrived
    char *anchors[16];
};

struct Block {
    Cluster *cluster;
    int arrived = 0;  // threads at the cluster's barriers
    std::vector<Thread> threads;
    std::vector<Meeting> warps;
    Meeting all;
    std::vector<int> brought[2];
    ucontext_t scheduler;
    Thread *now = nullptr;
    long progress = 0;
    bool outside = false;  // somebody waits for another block
};

static thread_local Block *block;

inline void pass() { swapcontext(&block->now->context, &block->scheduler); }

inline void meet(Meeting &meeting) {
    if (++meeting.count == meeting.expected) {
        meeting.count = 0, ++meeting.times, ++block->progress;
        return;
    }
    for (const int times = meeting.times; times == meeting.times;) pass();
}

// What each lane of the warp brings.
template <class T>
inline const T (&gathered(const T &own))[32] {
    static_assert(sizeof(T) <= 32, "");
    Meeting &warp = block->warps[threadIdx.x / 32];
    auto &table = *reinterpret_cast<T(*)[32]>(warp.brought[warp.times % 2]);
    table[threadIdx.x % 32] = own;
    meet(warp);
    return table;
}

inline void __syncwarp() { gathered(0); }
inline void __syncthreads() { meet(block->all); }
inline int __syncthreads_or(int own) {
    std::vector<int> &brought = block->brought[block->all.times % 2];  // by each thread, at every other meeting
    brought.resize(block->threads.size());
    brought[threadIdx.x] = own;
    meet(block->all);
    return std::any_of(brought.begin(), brought.end(), [](int each) { return each != 0; });
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T> inline T __shfl_sync(unsigned, T own, int lane, int width = 32) {
    return gathered(own)[threadIdx.x % 32 / width * width + lane % width];
}
template <class T> inline T __shfl_xor_sync(unsigned, T own, int by) { return gathered(own)[threadIdx.x % 32 ^ by]; }
template <class T> inline T __shfl_up_sync(unsigned, T own, int by, int width = 32) {
    const int lane = threadIdx.x % 32;
    return gathered(own)[lane % width < by ? lane : lane - by];
}
inline int __reduce_add_sync(unsigned, int own) {
    const int (&all)[32] = gathered(own);
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += all[lane];
    return sum;
}
inline unsigned __ballot_sync(unsigned, bool own) {
    const int (&all)[32] = gathered(static_cast<int>(own));
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
    return bits;
}
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int atomicAdd(int *number, int by) { return __atomic_fetch_add(number, by, __ATOMIC_SEQ_CST); }
template <class T> inline T __ldcg(const T *from) {
    if (reinterpret_cast<size_t>(from) % sizeof(T)) {
        std::fprintf(stderr, "%zu bytes are read from an address that is no multiple of them\n", sizeof(T));
        std::abort();
    }
    return *from;
}
inline float __log2f(float x) { return std::log2(x); }
inline float __logf(float x) { return std::log(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// ---- instructions ----

inline float as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float __int_as_float(int bits) { return as_float(bits); }
inline float __uint_as_float(unsigned bits) { return as_float(bits); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned __float_as_uint(float value) { return __float_as_int(value); }

inline unsigned narrowed_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline unsigned packed_halves(float low, float high) { return narrowed_half(low) | narrowed_half(high) << 16; }
inline float widened_half(unsigned bits, int which) {
    const u16 own = static_cast<u16>(which ? bits >> 16 : bits);
    _Float16 half;
    std::memcpy(&half, &own, 2);
    return static_cast<float>(half);
}

inline unsigned narrowed(float value) {
#if BFLOAT16
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    return narrowed_half(value);
#endif
}
inline unsigned packed(float low, float high) { return narrowed(low) | narrowed(high) << 16; }
inline float widened(unsigned bits, int which) {
#if BFLOAT16
    return as_float((which ? bits >> 16 : bits & 0xffff) << 16);
#else
    return widened_half(bits, which);
#endif
}

inline float exp2_of(float x) { return std::exp2(x); }
inline void cos_sin(float angle, float &cosine, float &sine) { cosine = std::cos(angle), sine = std::sin(angle); }

static thread_local char anchor;
inline unsigned shared_address(const void *there) {
    return static_cast<unsigned>(static_cast<const char *>(there) - &anchor);
}
inline char *at_address(unsigned address) { return &anchor + static_cast<int>(address); }

inline unsigned element(unsigned address, int index) { return reinterpret_cast<u16 *>(at_address(address))[index]; }

inline void load_tiles(unsigned (&tile)[4], unsigned address) {
    const int lane = threadIdx.x % 32;
    const unsigned (&row)[32] = gathered(address);
    for (int i = 0; i < 4; ++i) {
        const unsigned from = row[8 * i + lane / 4];
        tile[i] = element(from, lane % 4 * 2) | element(from, lane % 4 * 2 + 1) << 16;
    }
    __syncwarp();  // nobody goes on to write what another still reads
}

inline void load_tiles_transposed(unsigned (&tile)[4], unsigned address) {
    const int lane = threadIdx.x % 32;
    const unsigned (&row)[32] = gathered(address);
    for (int i = 0; i < 4; ++i) {
        const int first = 8 * i + lane % 4 * 2;
        tile[i] = element(row[first], lane / 4) | element(row[first + 1], lane / 4) << 16;
    }
    __syncwarp();
}

inline unsigned transposed(unsigned tile) {
    const int lane = threadIdx.x % 32;
    const unsigned (&all)[32] = gathered(tile);
    const auto at = [&](int row, int column) { return all[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
    return at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
}

// sum += left · right, of words with PER numbers each.
template <int PER, class Number, class Widened>
inline void product(Number (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high, Widened widened_by) {
    struct Operands { unsigned left[4], right[2]; };
    const int lane = threadIdx.x % 32;
    const Operands (&all)[32] = gathered(Operands{{left[0], left[1], left[2], left[3]}, {low, high}});
    for (int n = 0; n < 4; ++n) {
        const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
        for (int k = 0; k < 8 * PER; ++k) {
            const int word = k / PER % 4, half = k / PER / 4;
            const unsigned a = all[row % 8 * 4 + word].left[row / 8 + half * 2], b = all[column * 4 + word].right[half];
            sum[n] += widened_by(a, k % PER) * widened_by(b, k % PER);
        }
    }
}
inline void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    product<2>(sum, left, low, high, widened);
}
inline void multiply(int (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    product<4>(sum, left, low, high, [](unsigned bits, int which) { return static_cast<signed char>(bits >> 8 * which); });
}
inline void multiply_halves(float (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    product<2>(sum, left, low, high, widened_half);
}
template <class Number, int TILES>
inline void multiply_shared(Number (&sum)[TILES][4], const unsigned (&left)[4], unsigned right, bool adds) {
    const unsigned place = threadIdx.x % 32 / 4 * 16 + threadIdx.x % 4 * 4;
    const auto word = [&](int tile) { return *reinterpret_cast<unsigned *>(at_address(right + tile * 128 + place)); };
    auto &all = block->now->awaited;
    auto own = std::find_if(all.begin(), all.end(), [&](const Awaited &each) { return each.sum == sum; });
    if (own == all.end()) {
        own = all.insert(all.end(), Awaited{sum, sizeof(sum), {}});
        std::memcpy(own->found, sum, sizeof(sum));
    }
    Number found[TILES][4];
    std::memcpy(found, own->found, sizeof(found));
    for (int i = 0; i < TILES; ++i) {
        if (!adds) found[i][0] = found[i][1] = found[i][2] = found[i][3] = 0;
        multiply(found[i], left, word(i), word(TILES + i));
    }
    std::memcpy(own->found, found, sizeof(found));
    using Limits = std::numeric_limits<Number>;
    // Until it is waited for:
    std::fill(&sum[0][0], &sum[0][0] + 4 * TILES, Limits::has_quiet_NaN ? Limits::quiet_NaN() : Limits::max());
}
inline void wait_for_launch_before() {}  // `on_host.kernel` looks for it
inline void let_next_launch_begin() {}

template <class Number, int TILES>
inline void settle(Number (&)[TILES][4]) {}
inline void settle(unsigned (&)[4]) {}
inline void show_to_products() {}
inline void begin_products() { __syncthreads(); }  // all four warps of a block do
inline void end_products() {}
inline void wait_for_products() {
    for (const Awaited &each : block->now->awaited) std::memcpy(each.sum, each.found, each.bytes);
    block->now->awaited.clear();
    __syncwarp();
}
inline unsigned halves_of(unsigned quarters) {
    const auto value = [](unsigned bits) {
        const int exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = (bits & 0x7f) == 0x7f ? NAN
                           : exponent            ? std::ldexp(8.0f + fraction, exponent - 10)
                                                 : std::ldexp(1.0f * fraction, -9);
        return bits & 0x80 ? -size : size;
    };
    return packed_halves(value(quarters & 0xff), value(quarters >> 8 & 0xff));
}

inline unsigned signed_fours(unsigned bits) {
    unsigned numbers = 0;
    for (int i = 0; i < 32; i += 8) numbers |= (((bits >> i & 15) - 8) * 16 & 0xff) << i;
    return numbers;
}
inline unsigned bytes_of(const float (&x)[4]) {
    unsigned numbers = 0;
    for (int i = 0; i < 4; ++i) numbers |= (static_cast<int>(std::nearbyint(x[i])) & 0xff) << 8 * i;
    return numbers;
}

inline uint4 load_once(const void *from) { return __ldcg(static_cast<const uint4 *>(from)); }

// There is no L2 cache whose lines could go.
inline u64 first_to_go() { return 0; }
inline u64 last_to_go(float share) {
    if (!(share > 0 && share <= 1)) {
        std::fprintf(stderr, "a share of %g of the lines is to stay\n", share);
        std::abort();
    }
    return 0;
}
template <int BYTES> inline void aligned(const void *there) {
    if (reinterpret_cast<size_t>(there) % BYTES) {
        std::fprintf(stderr, "%d bytes are copied to or from an address that is no multiple of them\n", BYTES);
        std::abort();
    }
}
inline void store8(void *to, uint2 two, u64) {
    aligned<8>(to);
    *static_cast<uint2 *>(to) = two;
}

inline void copy16(unsigned to, const void *from, bool there, u64) {
    aligned<16>(at_address(to));
    if (there) aligned<16>(from);
    std::memset(at_address(to), 0xff, 16);  // not a number, in all types
    block->now->copies.push_back({to, from, there, 16});
}
inline void copy4(unsigned to, const void *from, bool there) {
    aligned<4>(at_address(to));
    if (there) aligned<4>(from);
    std::memset(at_address(to), 0xff, 4);
    block->now->copies.push_back({to, from, there, 4});
}
inline void commit() {
    block->now->groups.push_back(std::move(block->now->copies));
    block->now->copies.clear();
}
template <int LEFT>
inline void wait() {
    auto &groups = block->now->groups;
    while (groups.size() > LEFT) {
        for (const Copy &each : groups.front()) {
            std::memset(at_address(each.to), 0, each.bytes);
            if (each.there) std::memcpy(at_address(each.to), each.from, each.bytes);
        }
        groups.erase(groups.begin());
    }
}

inline void arrive(int *number) { __atomic_fetch_add(number, 1, __ATOMIC_RELEASE); }
inline void wait_until(const int *number, int least) {
    while (__atomic_load_n(number, __ATOMIC_ACQUIRE) < least) block->outside = true, pass();
}

// ---- thread block clusters ----

inline void arrive_at_cluster() {
    if (++block->arrived % block->threads.size() == 0) ++block->cluster->arrived;
}
inline void wait_for_cluster() {
    const int all = ++block->now->waits * CLUSTER;
    while (block->cluster->arrived < all) {
        if (block->now->waits > block->cluster->least) block->cluster->stuck = true;
        block->outside = true, pass();
    }
}
inline unsigned load_of_block(const void *own, int number) {
    unsigned value;
    std::memcpy(&value, block->cluster->anchors[number] + (static_cast<const char *>(own) - &anchor), 4);
    return value;
}
