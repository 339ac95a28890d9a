// More about packs of two-byte elements: at addresses that are no multiple of 16, and across barriers.
#pragma once

#include "stores.cuh"
#include "vector.cuh"

// The compiler must not keep what it unpacked before this point: two passes over a packed row would else hold the row
// as floats in between, at twice the registers, and spill. An empty asm statement stops only the front end; the
// assembler sees through it. So the bits are combined with a zero that it cannot know: grids here are flat in z.
template <typename T>
__device__ inline void forget(Pack<T>& pack) {
    const unsigned zero = gridDim.z - 1;
#pragma unroll
    for (unsigned& word : pack.words) word ^= zero;
}

template <typename T>
__device__ inline void store_whole(void* p, const Pack<T>& pack) {
    store_whole(p, pack.words);
}

// The first `count` of eight elements, at any address; the rest is zero.
__device__ inline void load_ragged(Pack<__half>& pack, const __half* p, int count) {
    const unsigned short* source = reinterpret_cast<const unsigned short*>(p);
    zero(pack);
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        if (i < count) pack.words[i / 2] |= static_cast<unsigned>(source[i]) << (i % 2 * 16);
    }
}

__device__ inline void store_ragged(__half* p, const Pack<__half>& pack, int count) {
    unsigned short* to = reinterpret_cast<unsigned short*>(p);
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        if (i < count) to[i] = static_cast<unsigned short>(pack.words[i / 2] >> (i % 2 * 16));
    }
}

// a / b of non-negative numbers: in 32 bits where they suffice, because a 64-bit division costs as much as all the rest
// of a kernel that moves memory.
__device__ inline i64 quotient(i64 a, i64 b) {
    if (((a | b) >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
    return a / b;
}
