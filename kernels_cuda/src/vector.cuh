// Eight elements at a time: how rows of half or float are loaded, held, and stored.
//
// A Pack<T> is eight elements as they lie in memory: 16 bytes of half, 32 of float. Kernels keep rows packed, because a
// packed half row takes half the registers, and unpack eight elements to float where they compute.
//
// Memory access is either aligned (16-byte transactions, a warp moves 512 consecutive bytes per instruction) or element by
// element, which works at any address and for a tail of fewer than eight.
#pragma once

#include <cuda_fp16.h>

using i64 = long long;

constexpr int kPack = 8;

template <typename T>
struct Pack;

template <>
struct Pack<__half> {
    uint4 bits;
};

template <>
struct Pack<float> {
    float4 low, high;
};

// Streaming input: read once, so it does not evict from L1 what the block reads again (modulation rows).
__device__ inline uint4 load_streaming(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ inline float4 as_float4(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

__device__ inline void load_streaming(Pack<__half>& pack, const __half* p) {
    pack.bits = load_streaming(p);
}
__device__ inline void load_streaming(Pack<float>& pack, const float* p) {
    pack.low = as_float4(load_streaming(p));
    pack.high = as_float4(load_streaming(p + 4));
}

// Input that other rows or blocks read too: cached as usual.
__device__ inline void load_cached(Pack<__half>& pack, const __half* p) { pack.bits = *reinterpret_cast<const uint4*>(p); }
__device__ inline void load_cached(Pack<float>& pack, const float* p) {
    pack.low = *reinterpret_cast<const float4*>(p);
    pack.high = *reinterpret_cast<const float4*>(p + 4);
}

__device__ inline void store(__half* p, const Pack<__half>& pack) { *reinterpret_cast<uint4*>(p) = pack.bits; }
__device__ inline void store(float* p, const Pack<float>& pack) {
    *reinterpret_cast<float4*>(p) = pack.low;
    *reinterpret_cast<float4*>(p + 4) = pack.high;
}

__device__ inline void zero(Pack<__half>& pack) { pack.bits = make_uint4(0, 0, 0, 0); }
__device__ inline void zero(Pack<float>& pack) { pack.low = pack.high = make_float4(0, 0, 0, 0); }

__device__ inline void unpack(const Pack<__half>& pack, float (&out)[kPack]) {
    const unsigned words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 pair = *reinterpret_cast<const __half2*>(&words[i]);
        const float2 wide = __half22float2(pair);
        out[2 * i] = wide.x;
        out[2 * i + 1] = wide.y;
    }
}
__device__ inline void unpack(const Pack<float>& pack, float (&out)[kPack]) {
    out[0] = pack.low.x, out[1] = pack.low.y, out[2] = pack.low.z, out[3] = pack.low.w;
    out[4] = pack.high.x, out[5] = pack.high.y, out[6] = pack.high.z, out[7] = pack.high.w;
}

// Rounds to nearest even, once: everything before it was float.
__device__ inline void pack(const float (&in)[kPack], Pack<__half>& out) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        words[i] = *reinterpret_cast<const unsigned*>(&pair);
    }
    out.bits = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ inline void pack(const float (&in)[kPack], Pack<float>& out) {
    out.low = make_float4(in[0], in[1], in[2], in[3]);
    out.high = make_float4(in[4], in[5], in[6], in[7]);
}

// One element of a tensor whose type is known only at run time: for the kernels that serve any layout.
__device__ inline float load_element(const void* base, i64 index, bool is_float) {
    return is_float ? static_cast<const float*>(base)[index] : __half2float(static_cast<const __half*>(base)[index]);
}

__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(float v) { return v; }
__device__ inline void from_float(float v, __half& out) { out = __float2half_rn(v); }
__device__ inline void from_float(float v, float& out) { out = v; }
