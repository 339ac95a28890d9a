// bf16 as storage alone: two bytes, the upper half of a float. So every card has it, also those without an instruction
// for it.
#pragma once

#include <cuda_bf16.h>

#include "half.cuh"

// Two elements of a type of two bytes, the lower first.
template <typename T>
__device__ inline float2 two_floats(unsigned word);
template <>
__device__ inline float2 two_floats<__half>(unsigned word) {
    return to_floats(word);
}
template <>
__device__ inline float2 two_floats<__nv_bfloat16>(unsigned word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// A float whose upper half is that of v rounded to bf16, to nearest even; what its lower half holds has no meaning. An
// infinity stays one, and what is too large becomes one. A NaN becomes the one that cvt.rn.bf16x2 writes.
__device__ inline unsigned to_bf16_above(float v) {
    const unsigned bits = __float_as_uint(v);
    return v != v ? 0x7fff0000u : bits + 0x7fffu + (bits >> 16 & 1u);
}

// The same bits on every card.
__device__ inline unsigned to_bf16s(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return __byte_perm(to_bf16_above(low), to_bf16_above(high), 0x7632);
#endif
}
