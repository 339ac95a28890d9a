// A float as two halves that add up to it: its value, and what rounding took from that. 22 significant digits of
// the 24.
#pragma once

#include "packs.cuh"

// NaN stays NaN.
__device__ inline float saturated(float v) {
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

// The value saturates, and nothing is left of what it could not hold.
__device__ inline void split(const float (&in)[kPack], Pack<__half>& value, Pack<__half>& rest) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) {
        const float low = saturated(in[2 * i]), high = saturated(in[2 * i + 1]);
        value.words[i] = to_halves(low, high);
        const float2 held = to_floats(value.words[i]);
        rest.words[i] = to_halves(low - held.x, high - held.y);
    }
}

// The same of one element.
__device__ inline void split(float v, __half& value, __half& rest) {
    v = saturated(v);
    value = __float2half_rn(v);
    rest = __float2half_rn(v - __half2float(value));
}
