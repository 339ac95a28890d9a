// Sums over a warp and over a block. The order of additions depends only on the block's shape: the same input gives the
// same bits every time.
#pragma once

constexpr int kMostWarps = 32;

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// The sum over the block, in every thread. `slot` is shared memory for one float per warp. A second sum in a row needs a
// second slot: one barrier separates writing from reading, none separates reading from the next writing.
__device__ inline float block_sum(float v, float* slot) {
    v = warp_sum(v);
    const int warps = blockDim.x / 32;
    if (warps == 1) return v;
    if (threadIdx.x % 32 == 0) slot[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < warps; i++) total += slot[i];
    return total;
}
