// Sums over a warp and over a block. The order of additions depends only on the block's shape: the same input gives the
// same bits every time.
#pragma once

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// Sums over the block, one after another, each in every thread. kWarps: the most the block may have.
//
//     __shared__ BlockSum<8>::Slots slots;
//     BlockSum<8> sum(slots);
//     const float total = sum(mine);
//
// One barrier per sum: it separates writing the slots from reading them. Nothing separates reading from the next sum's
// writing, so consecutive sums take turns between two sets of slots; a set is written again only after the other's
// barrier, which every reader has passed.
template <int kWarps>
class BlockSum {
    static_assert(kWarps % 4 == 0, "slots are read four at a time");

public:
    struct __align__(16) Slots {
        float of_warp[2][kWarps];
    };

    __device__ explicit BlockSum(Slots& slots) : slots_(slots) {
        // A block with fewer warps leaves the rest at zero.
        for (int i = threadIdx.x; i < 2 * kWarps; i += blockDim.x) slots_.of_warp[0][i] = 0;
        __syncthreads();
    }

    __device__ float operator()(float v) {
        v = warp_sum(v);
        if (blockDim.x == 32) return v;
        float* slots = slots_.of_warp[turn_];
        turn_ ^= 1;
        if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
        __syncthreads();
        float total = 0;
#pragma unroll
        for (int i = 0; i < kWarps; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(slots + i);
            total += (four.x + four.y) + (four.z + four.w);
        }
        return total;
    }

private:
    Slots& slots_;
    int turn_ = 0;
};

// sum / count, correctly rounded for all but freak values, given 1 / count: a constant row has exactly its own mean.
__device__ inline float divide(float sum, float count, float inverse_count) {
    const float near = sum * inverse_count;
    return fmaf(fmaf(-near, count, sum), inverse_count, near);
}
