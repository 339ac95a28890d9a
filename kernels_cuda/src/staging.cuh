// From global memory to a swizzled tile, a step ahead of its use. Two ways behind one interface:
//
//   sm_80 on   cp.async: the copy unit writes shared memory itself. fetch() starts it, store() does nothing, arrived()
//              waits for the thread's own copies.
//   sm_75      fetch() loads into registers and store() writes them to shared memory later, when the loads have had
//              the time of a matrix product to arrive. arrived() does nothing.
//
// Either way a __syncthreads() after arrived() makes the tile visible to the block. Rows from `rows` on are zero: what
// lies there in memory is never read, so it cannot come back as 0 * NaN.
#pragma once

#include "mma.cuh"

// kRows x kColumns elements, of a tile whose rows are kPitch long.
// kAgain: see thread_again().
template <int kRows, int kColumns, int kThreads, int kPitch = kColumns, bool kAgain = true>
struct Stage {
    using Tile = SwizzledTile<kPitch>;
    static constexpr int kUnits = kColumns / 8;

    // Lanes of a row, and the units of a row each takes: all at once where the block is whole rows wide, else in thirds
    // of 4 units, which the swizzle leaves together.
    static constexpr int kLanes = kThreads % kUnits == 0 ? kUnits : 4;
    static constexpr int kAcross = kUnits / kLanes;
    static constexpr int kRowsAtOnce = kThreads / kLanes;
    static constexpr int kDown = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && (kRowsAtOnce > kRows || kRows % kRowsAtOnce == 0), "rows keep their twist");

    uint4 held[kHasAsyncCopy ? 1 : kDown * kAcross];

    __device__ void fetch(unsigned tile, const __half* from, i64 stride, int rows) {
        const unsigned x = kAgain ? thread_again() : int(threadIdx.x), row0 = x / kLanes, column = x % kLanes;
        if (kRowsAtOnce > kRows && row0 >= kRows) return;
        tile += Tile::offset(row0, column);
        const __half* source = from + row0 * stride + column * 8;
#pragma unroll
        for (int i = 0; i < kDown; i++) {
            const bool exists = int(row0) + i * kRowsAtOnce < rows;
#pragma unroll
            for (int j = 0; j < kAcross; j++) {
#if __CUDA_ARCH__ >= 800
                // A source of 0 bytes is not read: the 16 bytes become zero.
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                 tile + i * kRowsAtOnce * Tile::kRowBytes + j * kLanes * 16),
                             "l"(source + j * kLanes * 8), "r"(exists ? 16 : 0)
                             : "memory");
#else
                // Volatile: the load starts here, not where its value is wanted.
                uint4& unit = held[i * kAcross + j];
                asm volatile(
                    "{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, "
                    "0;\n"
                    "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                    : "=&r"(unit.x), "=&r"(unit.y), "=&r"(unit.z), "=&r"(unit.w)
                    : "l"(source + j * kLanes * 8), "r"(unsigned(exists)));
#endif
            }
            source += kRowsAtOnce * stride;
        }
    }

    __device__ void store(unsigned tile) {
#if __CUDA_ARCH__ < 800
        const unsigned x = kAgain ? thread_again() : int(threadIdx.x), row0 = x / kLanes, column = x % kLanes;
        if (kRowsAtOnce > kRows && row0 >= kRows) return;
        tile += Tile::offset(row0, column);
#pragma unroll
        for (int i = 0; i < kDown; i++) {
#pragma unroll
            for (int j = 0; j < kAcross; j++) {
                const uint4& unit = held[i * kAcross + j];
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + i * kRowsAtOnce * Tile::kRowBytes +
                                                                              j * kLanes * 16),
                             "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                             : "memory");
            }
        }
#endif
    }
};

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the newest kPending groups of this thread have arrived.
template <int kPending>
__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
