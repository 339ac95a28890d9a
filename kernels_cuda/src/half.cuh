// What every kernel includes: CUDA's half, its range, how two of them become floats and back, and the 64-bit integer
// that products of sizes are computed in.
#pragma once

#include <cuda_fp16.h>

using i64 = long long;

// Compute capability 6.1 knows no such parameters, and no kernel takes the address of one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#undef __grid_constant__
#define __grid_constant__
#endif

// What is finite and beyond 65504 as 65504 with its sign. Infinities and NaN stay.
__device__ inline float within_halves(float v) {
    return fabsf(v) < __uint_as_float(0x7f800000u) ? fminf(fmaxf(v, -65504.0f), 65504.0f) : v;
}

__device__ inline float2 to_floats(unsigned word) {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return __half22float2(pair);
}

// Rounds to nearest even, once: everything before it was float.
__device__ inline unsigned to_halves(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    unsigned word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}
