// Activations that ride along on another kernel's last pass.
#pragma once

// The argument of `activate`: mirrored by ACTIVATIONS in ops/views/planes.py.
constexpr int kNone = 0, kSilu = 1, kRelu = 2;

// v / (1 + exp(-v)) in five instructions. The approximate exponential and reciprocal are off by a few units of 2^-23,
// far below half precision; flushing denormals changes nothing here, because 1 is added to the one and v multiplied
// with the other. Where exp(-v) overflows the result is -0, as it should be; -inf gives NaN, as torch's does.
__device__ inline float silu(float v) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return v * inverse;
}

template <int N>
__device__ inline void silu(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = silu(v[i]);
}

// Written so that NaN stays NaN.
__device__ inline float relu(float v) {
    return v < 0.0f ? 0.0f : v;
}

__device__ inline float activate(float v, int kind) {
    if (kind == kSilu) return silu(v);
    return kind == kRelu ? relu(v) : v;
}

// The same for an array, with one decision for all of it.
template <int N>
__device__ inline void activate(float (&v)[N], int kind) {
    if (kind == kSilu) {
        silu(v);
    } else if (kind == kRelu) {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = relu(v[i]);
    }
}
