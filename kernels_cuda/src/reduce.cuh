// Sums over a warp and over a block. The order of additions depends only on the block's shape: the same input gives the
// same bits every time.
#pragma once

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// Shared memory for block sums: one slot per warp the block may have, zero where it has fewer. A second sum in a row
// needs a second set of slots: a barrier separates writing from reading, none separates reading from the next writing.
template <int kWarps>
struct __align__(16) Slots {
    static_assert(kWarps % 4 == 0, "slots are read four at a time");
    float of_warp[kWarps];
};

// Before the first sum; the caller's next barrier is the one inside block_sum.
template <int kWarps, int kSets>
__device__ inline void clear(Slots<kWarps> (&sets)[kSets]) {
    float* all = sets[0].of_warp;
    for (int i = threadIdx.x; i < kWarps * kSets; i += blockDim.x) all[i] = 0;
    __syncthreads();
}

// The sum over the block, in every thread.
template <int kWarps>
__device__ inline float block_sum(float v, Slots<kWarps>& slots) {
    v = warp_sum(v);
    if (blockDim.x == 32) return v;
    if (threadIdx.x % 32 == 0) slots.of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(slots.of_warp + i);
        total += (four.x + four.y) + (four.z + four.w);
    }
    return total;
}
