// Sums in half, which `fast` products take: how they come to the float ones, and how one that overflowed is found out.
#pragma once

#include "mma.cuh"

// Of 16 rows x 8 columns.
__device__ inline void fold(float (&to)[4], const unsigned (&part)[2]) {
    const float2 upper = to_floats(part[0]), lower = to_floats(part[1]);
    to[0] += upper.x, to[1] += upper.y, to[2] += lower.x, to[3] += lower.y;
}

// Of 16 columns, and of kBeside blocks of 16 rows from block m on. A pair after the other, and not four sums at a time
// as above: so a kernel of conv takes 15 registers less.
template <int kBlocks, int kBeside>
__device__ inline void fold(float (&sums)[2][kBlocks][4], int m, const unsigned (&part)[2][kBeside][2]) {
#pragma unroll
    for (int i = 0; i < 4 * kBeside; i++) {
        const float2 pair = to_floats(part[i / 2 % 2][i / 4][i % 2]);
        sums[i / 2 % 2][m + i / 4][i % 2 * 2] += pair.x;
        sums[i / 2 % 2][m + i / 4][i % 2 * 2 + 1] += pair.y;
    }
}

// A half sum that overflowed is infinite, and then so is the float one it was added to, or NaN, for ever. All threads
// of a block ask together, and get one answer.
template <int kGroups, int kBlocks>
__device__ inline bool any_lost(const float (&sums)[kGroups][2][kBlocks][4]) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < kGroups * 2 * kBlocks * 4; i++) {
        zero = fmaf(sums[i / (8 * kBlocks)][i / (4 * kBlocks) % 2][i / 4 % kBlocks][i % 4], 0.0f, zero);
    }
    return __syncthreads_or(!(zero == 0.0f));
}
