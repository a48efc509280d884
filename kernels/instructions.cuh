// The instructions that C++ has no words for, one function each. Tests have another file in its place, for a CPU.
//
// Set before: BFLOAT16 (float16 otherwise; of no matter where no numbers of 16 bits are).

#define FULL 0xffffffffu
#define NOTHING __int_as_float(0xff800000)  // -inf

typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#if BFLOAT16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned bits;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// float16, whatever TYPE is.
__device__ __forceinline__ unsigned packed_halves(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ float widened_half(unsigned bits, int which) {
    float value;
    const u16 half = static_cast<u16>(which ? bits >> 16 : bits);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ float widened(unsigned bits, int which) {
#if BFLOAT16
    return __uint_as_float(which ? bits & 0xffff0000u : bits << 16);
#else
    return widened_half(bits, which);
#endif
}

__device__ __forceinline__ u16 narrowed(float value) {
    u16 bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cos and sin of an angle between -pi and pi, good to 2^-20.
__device__ __forceinline__ void cos_sin(float angle, float &cosine, float &sine) {
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine) : "f"(angle));
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine) : "f"(angle));
}

// Where something in shared memory lies, as the functions below take it.
__device__ __forceinline__ unsigned shared_address(const void *there) {
    return static_cast<unsigned>(__cvta_generic_to_shared(there));
}

// Four tiles of 8 x 8: lane i gives the address of row i % 8 of tile i / 8, and gets of each the elements 2 (i % 4) and
// behind of row i / 4.
__device__ __forceinline__ void load_tiles(unsigned (&tile)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_tiles_transposed(unsigned (&tile)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ unsigned transposed(unsigned tile) {
    unsigned other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(tile));
    return other;
}

// sum += left [16, 16] · right [16, 8]
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

// Likewise of float16, whatever TYPE is.
__device__ __forceinline__ void multiply_halves(float (&sum)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

// What products are told of the tiles of a right side of so many times 8 vectors: where they are, and how far apart.
__device__ __forceinline__ u64 tiles_at(unsigned right, int count) {
    return (right & 0x3ffff) >> 4 | static_cast<u64>(count * 128 >> 4) << 16 | static_cast<u64>(128 >> 4) << 32;
}

// sum (+)= left [64, 16] · right [16, 48] or [16, 8], of four warps together and asynchronous: their left rows lie below each
// other, and the right side in shared memory, in tiles of 8 vectors with 8 components each, 128 bytes a tile. `right` says
// where; the tiles of the other 8 components lie behind them. It is called between `begin_products` and `end_products`, and
// `left` and `sum` must not be touched before `wait_for_products`: `settle` says so to the compiler.
__device__ __forceinline__ void multiply_shared(float (&sum)[6][4], const unsigned (&left)[4], unsigned right, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %29, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
                 "{%24, %25, %26, %27}, %28, adds, 1, 1, 0;}"
                 : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]),
                   "+f"(sum[1][0]), "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]),
                   "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),
                   "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]),
                   "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
                   "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(tiles_at(right, 6)),
                   "r"(static_cast<int>(adds)));
}

__device__ __forceinline__ void multiply_shared(float (&sum)[1][4], const unsigned (&left)[4], unsigned right, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, adds, 1, 1, 0;}"
                 : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(tiles_at(right, 1)),
                   "r"(static_cast<int>(adds)));
}

// The same of numbers of 8 bits with signs, left [64, 32] and right [32, 48] or [32, 8], whose tiles have 16 components a
// vector.
__device__ __forceinline__ void multiply_shared(int (&sum)[6][4], const unsigned (&left)[4], unsigned right, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %29, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
                 "{%24, %25, %26, %27}, %28, adds;}"
                 : "+r"(sum[0][0]), "+r"(sum[0][1]), "+r"(sum[0][2]), "+r"(sum[0][3]),
                   "+r"(sum[1][0]), "+r"(sum[1][1]), "+r"(sum[1][2]), "+r"(sum[1][3]),
                   "+r"(sum[2][0]), "+r"(sum[2][1]), "+r"(sum[2][2]), "+r"(sum[2][3]),
                   "+r"(sum[3][0]), "+r"(sum[3][1]), "+r"(sum[3][2]), "+r"(sum[3][3]),
                   "+r"(sum[4][0]), "+r"(sum[4][1]), "+r"(sum[4][2]), "+r"(sum[4][3]),
                   "+r"(sum[5][0]), "+r"(sum[5][1]), "+r"(sum[5][2]), "+r"(sum[5][3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(tiles_at(right, 6)),
                   "r"(static_cast<int>(adds)));
}

__device__ __forceinline__ void multiply_shared(int (&sum)[1][4], const unsigned (&left)[4], unsigned right, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, adds;}"
                 : "+r"(sum[0][0]), "+r"(sum[0][1]), "+r"(sum[0][2]), "+r"(sum[0][3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(tiles_at(right, 1)),
                   "r"(static_cast<int>(adds)));
}

// Numbers are what they are to be before this, and are not read before it.
template <int TILES>
__device__ __forceinline__ void settle(float (&sum)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i) asm volatile("" : "+f"(sum[i / 4][i % 4])::"memory");
}

template <int TILES>
__device__ __forceinline__ void settle(int (&sum)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i) asm volatile("" : "+r"(sum[i / 4][i % 4])::"memory");
}

__device__ __forceinline__ void settle(unsigned (&left)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(left[i])::"memory");
}

// What all threads have written to shared memory before a barrier is seen by products behind it.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// For kernels that are launched early (`nvrtc.kernel`), first of all: the kernels before are complete behind it.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream may begin, if it is launched early, once all blocks have called this or ended. It is called
// behind `wait_for_launch_before`, so that kernels which begin early see what those before the last one have written.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two float8 (e4m3), the low 16 bits, as two float16.
__device__ __forceinline__ unsigned halves_of(unsigned quarters) {
    unsigned bits;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(static_cast<u16>(quarters)));
    return bits;
}

// The low four bits of each byte, less 8, as a number of 8 bits, 16 times as large.
__device__ __forceinline__ unsigned signed_fours(unsigned bits) { return bits << 4 & 0xf0f0f0f0 ^ 0x80808080; }

// The whole numbers nearest to x[0] to x[3], which are -127 to 127, in one byte each: adding 1.5 * 2^23 leaves a float32 no
// bits below 1, so it is rounded, halves to even, and its last byte is the number.
__device__ __forceinline__ unsigned bytes_of(const float (&x)[4]) {
    unsigned bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(__fadd_rn(x[i], 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const void *from) {
    uint4 four;
    asm("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
        : "l"(from));
    return four;
}

// How the L2 cache is to treat what is read or written: as the first to go, or, a share of the lines, as the last.
__device__ __forceinline__ u64 first_to_go() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 last_to_go(float share) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, %1;" : "=l"(policy) : "f"(share));
    return policy;
}

__device__ __forceinline__ void store8(void *to, uint2 two, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(two.x), "r"(two.y), "l"(policy)
                 : "memory");
}

// 16 bytes from memory to shared memory, or zeros; asynchronous.
__device__ __forceinline__ void copy16(unsigned to, const void *from, bool there, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0), "l"(policy)
                 : "memory");
}

// Four bytes, or zeros; likewise, through the L1 cache.
__device__ __forceinline__ void copy4(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Wait for a number that other blocks add to, and see what they wrote before they did. One fence at the end: a load that
// acquires empties the L1 cache, which other blocks read from, each time.
__device__ __forceinline__ void wait_until(const int *number, int least) {
    int now;
    do asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
    while (now < least);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Add one to a number that others wait for, after everything that this block wrote before its last barrier.
__device__ __forceinline__ void arrive(int *number) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(number) : "memory");
}

// What the blocks of a thread block cluster share. Every thread arrives, then waits for all of them; what was written
// before, to global memory too, is seen after.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// A number in another block's shared memory, where this block has its own.
__device__ __forceinline__ unsigned load_of_block(const void *own, int number) {
    unsigned address, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(number));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
