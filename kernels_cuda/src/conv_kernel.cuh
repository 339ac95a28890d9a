// A kernel of a convolution: the product of a block, and what is done to it.
#pragma once

#include "conv_epilogue.cuh"

template <class Cut, bool kFast>
__device__ inline void conv(const ConvParams& p) {
    using Out = ConvEpilogue<Cut>;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Cut::kBytes >= Cut::kThreads / 32 * Out::kBytes);

    const Cut product{p, shared_address(memory)};
    typename Cut::Sums sums;
    product.template multiply_all<kFast>(sums);
    if (kFast && any_lost(sums)) product.template multiply_all<false>(sums);
    const int3 at = product.corner();
    float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
    Out{p}.run(corner, sums, at.x, at.y + Cut::warp_row(), at.z + Cut::warp_column());
}

// What the host must know of a cut: image rows, channels and threads of a block, bytes of shared memory.
#define CONV(NAME, FAST, ...)                                                                             \
    extern "C" __device__ int NAME##_cut[] = {Conv<__VA_ARGS__>::kImageRows, Conv<__VA_ARGS__>::kColumns, \
                                              Conv<__VA_ARGS__>::kThreads, Conv<__VA_ARGS__>::kBytes};    \
    extern "C" __global__ void __launch_bounds__(Conv<__VA_ARGS__>::kThreads)                             \
        NAME(const __grid_constant__ ConvParams p) {                                                      \
        conv<Conv<__VA_ARGS__>, FAST>(p);                                                                 \
    }
// A warp's part is 64 pixels by 48 channels, or by 96: then a block has half as many warps, and reads two thirds as
// much from shared memory, which else binds. On sm_75 the latter do not fit the registers.
constexpr int kAcross = kHasAsyncCopy ? 1 : 2, kGroupsOf96 = 6 / kAcross;
