// Tiles for the tensor cores: fragments, swizzled shared memory, and the one place that knows which instruction there
// is.
//
// Everything is counted in k-steps of 16. From sm_80 on a k-step is one mma.m16n8k16; on sm_75 it is two mma.m16n8k8.
// The fragments are the same registers in both: A of m16n8k16 is {k 0-7: 2 registers, k 8-15: 2 registers}, B is
// {k 0-7, k 8-15}, so code above this file does not see the difference.
//
//   A  16 rows x 16 k       4 registers   lane 4g+t holds rows g, g+8; k 2t, 2t+1 (+8)
//   B  16 k x 8 columns     2 registers   column g; k 2t, 2t+1 (+8)
//   C  16 rows x 8 columns  4 floats or 2 registers of halves: rows g, g+8; columns 2t, 2t+1
//
// C of one product is A of the next: two neighbouring C tiles, rounded to halves, are one A fragment (see attention).
//
// Shared memory. A tile is rows of kColumns halves without padding. ldmatrix reads 16 bytes from each of eight
// neighbouring rows at a time; the unit index is XORed with bits of the row so that these lie in eight different
// 16-byte banks. The XOR only touches address bits that a k-step's constant offset touches too, so each lane computes
// one address per operand and reaches every fragment of the tile by a constant XOR and a constant offset.
#pragma once

#include "half.cuh"

#if __CUDA_ARCH__ >= 800
constexpr bool kHasAsyncCopy = true;
#else
constexpr bool kHasAsyncCopy = false;
#endif
#if __CUDA_ARCH__ >= 900 || __CUDA_ARCH__ < 700
constexpr bool kHasInt4 = false;
#else
constexpr bool kHasInt4 = true;
#endif
#if __CUDA_ARCH__ < 700
constexpr bool kHasTensorCores = false;
#else
constexpr bool kHasTensorCores = true;
#endif

__device__ inline unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Which thread this is, asked anew: what is derived from it is then not kept in registers over a loop that has none
// left.
__device__ inline int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
__device__ inline int lane_again() {
    return thread_again() & 31;
}

// ---- swizzled tiles ----------------------------------------------------------------------------------------------

template <int kColumns>
struct SwizzledTile {
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kUnits = kColumns / 8;  // of 16 bytes
    // Rows whose bytes are a multiple of 128 all start in the same bank: XOR three bits. Rows of 64 or 192 bytes
    // alternate between two banks already: XOR two bits of the row pair.
    static constexpr bool kAligned = kRowBytes % 128 == 0;
    static constexpr int kMask = kAligned ? 7 : 3;
    static_assert(kRowBytes % 64 == 0, "no swizzle for this row size");

    __device__ static int twist(int row) { return kAligned ? row & 7 : (row >> 1) & 3; }
    __device__ static int offset(int row, int unit) { return row * kRowBytes + ((unit ^ twist(row)) << 4); }

    // What a lane adds to the tile's address for ldmatrix of 16 rows x 16 columns.
    // As rows of B (row = column of the product): registers are {rows 0-7: k lo, k hi, rows 8-15: k lo, k hi}.
    __device__ static int lane_of_rows(int lane) { return offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1); }
    // As k of B, transposed on the way, and as rows of A: {rows 0-7, rows 8-15} of columns 0-7, then of columns 8-15.
    __device__ static int lane_of_k(int lane) { return offset(lane & 15, lane >> 4); }

    // From a lane's address to that of 16 columns further on, `step` times, and 16 rows further on, `group` times.
    __device__ static unsigned at(unsigned lane_address, int step, int group) {
        const int unit = 2 * step;
        return (lane_address ^ ((unit & kMask) << 4)) + ((unit & ~kMask) << 4) + group * 16 * kRowBytes;
    }
};

__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Four words of one lane.
__device__ inline void load_words(unsigned (&r)[4], unsigned address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void store_words(unsigned address, const unsigned (&r)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ inline void store_word(unsigned address, unsigned word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// ---- products ----------------------------------------------------------------------------------------------------

// c += a * b over one k-step: float or half accumulators.
__device__ inline void mma_half_step(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
__device__ inline void mma_half_step(unsigned (&c)[2], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a0), "r"(a1), "r"(b));
}
#if __CUDA_ARCH__ >= 800
__device__ inline void mma_step(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_step(unsigned (&c)[2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// 8-bit integers: a k-step is 32 of them, which lie in the registers as 16 halves do. Sums are exact.
#if __CUDA_ARCH__ >= 800
__device__ inline void mma_step(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ inline void mma_half_step(int (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a0), "r"(b));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(a1), "r"(b));
}
#endif

// 4-bit integers, two in a byte: a k-step is 64 of them. Sums are exact.
//
// From sm_90 on, and on sm_61, there are no instructions for them. Of eight numbers in a register the even ones, moved
// up, and the odd ones are four bytes each, 16 times as large; the order along k is the same in both operands. A sum is
// then 256 times as large as it should be.
struct Int4Sum {
    int units;

    __device__ operator float() const { return float(kHasInt4 ? units : units >> 8); }
};

template <typename Sum>
constexpr bool kIsInteger = true;
template <>
constexpr bool kIsInteger<float> = false;

__device__ inline unsigned even_numbers(unsigned packed) {
    return (packed << 4) & 0xf0f0f0f0u;
}
__device__ inline unsigned odd_numbers(unsigned packed) {
    return packed & 0xf0f0f0f0u;
}

#if __CUDA_ARCH__ >= 900
__device__ inline void mma_step(Int4Sum (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int (&units)[4] = reinterpret_cast<int (&)[4]>(c);
    const unsigned even[4] = {even_numbers(a[0]), even_numbers(a[1]), even_numbers(a[2]), even_numbers(a[3])};
    const unsigned odd[4] = {odd_numbers(a[0]), odd_numbers(a[1]), odd_numbers(a[2]), odd_numbers(a[3])};
    mma_step(units, even, even_numbers(b0), even_numbers(b1));
    mma_step(units, odd, odd_numbers(b0), odd_numbers(b1));
}
#elif __CUDA_ARCH__ >= 800
__device__ inline void mma_step(Int4Sum (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0].units), "+r"(c[1].units), "+r"(c[2].units), "+r"(c[3].units)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ inline void mma_half_step(Int4Sum (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0].units), "+r"(c[1].units)
        : "r"(a0), "r"(b));
    asm("mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2].units), "+r"(c[3].units)
        : "r"(a1), "r"(b));
}
#endif

// One k-step of kM x 2 tiles: kM blocks of 16 rows times 16 columns, whose B fragments one ldmatrix brought:
// {k lo, k hi} of columns 0-7, then of columns 8-15. On sm_75 all first halves go before all second halves, so that
// neighbouring instructions do not wait for each other's accumulator.
template <int kM, typename C, int kRegisters>
__device__ inline void multiply(C (&c0)[kM][kRegisters], C (&c1)[kM][kRegisters], const unsigned (&a)[kM][4],
                                const unsigned (&b)[4]) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (int m = 0; m < kM; m++) mma_step(c0[m], a[m], b[0], b[1]);
#pragma unroll
    for (int m = 0; m < kM; m++) mma_step(c1[m], a[m], b[2], b[3]);
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int m = 0; m < kM; m++) mma_half_step(c0[m], a[m][2 * half], a[m][2 * half + 1], b[half]);
#pragma unroll
        for (int m = 0; m < kM; m++) mma_half_step(c1[m], a[m][2 * half], a[m][2 * half + 1], b[2 + half]);
    }
#endif
}
