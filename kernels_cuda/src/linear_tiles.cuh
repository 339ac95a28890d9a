// The two operands of a matrix product on their way to shared memory. Like staging.cuh, and besides: rows are cut at k,
// and the rows of a pair of weights alternate.
#pragma once

#include "staging.cuh"

constexpr int kStepK = 32;  // elements of k that a tile holds at least: two k-steps, rows of 64 bytes

// kRows x kAcross elements. A row is brought by as many lanes as it has units of 16 bytes.
// kPaired: rows come from two matrices in turns, 32 of one, then the same 32 of the other.
template <int kRows, int kThreads, bool kPaired, int kAcross = kStepK>
struct Operand {
    using Tile = SwizzledTile<kAcross>;
    static constexpr int kLanes = kAcross / 8;
    static constexpr int kAtOnce = kThreads / kLanes;
    static constexpr int kDown = kRows / kAtOnce;
    static_assert(kRows % kAtOnce == 0 && kAtOnce % 8 == 0, "rows keep their twist");

    uint4 held[kHasAsyncCopy ? 1 : kDown];
    const __half* source;  // where this lane's column of the tile's first row lies, of the matrix its first row is of
    const __half *one, *two;  // the matrices
    int exist;                // rows of the matrix from this lane's first on

    // Row of the matrix, counted from the lane's first, that stands i steps down the tile.
    __device__ static constexpr int row_of(int i) {
        if (!kPaired) return i * kAtOnce;
        return i * kAtOnce / 64 * 32 + (kAtOnce < 32 ? i * kAtOnce % 32 : 0);
    }
    __device__ static constexpr bool is_other(int i) { return kPaired && kAtOnce < 64 && i * kAtOnce % 64 >= 32; }

    __device__ Operand(const __half* one, const __half* two, i64 row0, int rows, int stride) {
        const int row = thread_again() / kLanes;
        const bool second = kPaired && row % 64 >= 32;
        const int first = kPaired ? row / 64 * 32 + row % 32 : row;
        exist = rows - first;
        const i64 offset = (row0 + first) * stride + thread_again() % kLanes * 8;
        source = (second ? two : one) + offset;
        this->one = one, this->two = two;
    }

    // Starts to bring the tile whose first column is k0, of k in all: call it for one tile after the other. Behind the
    // last there are only zeros, and nothing is read.
    __device__ void fetch(unsigned tile, int stride, int k0, int k, int from_step = 0, int to_step = kDown) {
        tile += Tile::offset(thread_again() / kLanes, thread_again() % kLanes);
        const int rows = k0 + thread_again() % kLanes * 8 < k ? exist : 0;
#pragma unroll
        for (int i = 0; i < kDown; i++) {
            if (i < from_step || i >= to_step) continue;
            const bool exists = row_of(i) < rows;
            int apart;  // asked anew, so that no row's address is kept in registers from tile to tile
            asm volatile("mov.u32 %0, %1;" : "=r"(apart) : "r"(stride));
            const char* from = reinterpret_cast<const char*>(source) + i64(apart) * (row_of(i) * 2);
            if (is_other(i)) {
                i64 gap;  // likewise
                asm volatile("sub.s64 %0, %1, %2;" : "=l"(gap) : "l"(two), "l"(one));
                from += gap;
            }
#if __CUDA_ARCH__ >= 800
            // A source of 0 bytes is not read: the 16 bytes become zero.
            asm volatile(
                "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(tile + i * kAtOnce * Tile::kRowBytes),
                "l"(from), "r"(exists ? 16 : 0)
                : "memory");
#else
            // Volatile: the load starts here, not where its value is wanted.
            uint4& unit = held[i];
            asm volatile(
                "{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                : "=&r"(unit.x), "=&r"(unit.y), "=&r"(unit.z), "=&r"(unit.w)
                : "l"(from), "r"(unsigned(exists)));
#endif
        }
        if (to_step < kDown) return;
        source += kAcross;
    }

    __device__ void store(unsigned tile, int from_step = 0, int to_step = kDown) {
#if __CUDA_ARCH__ < 800
        tile += Tile::offset(thread_again() / kLanes, thread_again() % kLanes);
#pragma unroll
        for (int i = 0; i < kDown; i++) {
            if (i < from_step || i >= to_step) continue;
            const uint4& unit = held[i];
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + i * kAtOnce * Tile::kRowBytes),
                         "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                         : "memory");
        }
#endif
    }
};
