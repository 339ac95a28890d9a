// How elementwise kernels walk a tensor seen as [batch, row, column].
//
// Ops merge neighbouring dimensions wherever every operand allows it, so contiguous operands arrive as one long row,
// and a view of a wider buffer as rows with gaps. The grid is (chunks of a row, rows, batches), with the last two
// looped over where they exceed it: no thread ever divides. A thread owns kTilePacks packs of a chunk and loads all of
// them before it computes: with full multiprocessors that is 64 KB in flight on each for every operand.
#pragma once

#include "vector.cuh"

constexpr int kTilePacks = 2;
constexpr int kTileElements = 4;  // per thread, where an element is loaded at a time
constexpr int kTileThreads = 256;

// Mirrored by the fields `batches rows width` of a parameter struct.
struct Extent {
    i64 batches, rows, width;
};

// Where an operand lies: strides in elements, 0 where it is shared.
struct Place {
    i64 batch, row, column;

    __device__ i64 at(i64 b, i64 r) const { return b * batch + r * row; }
};

template <typename F>
__device__ inline void for_each_row(const Extent& extent, F body) {
    for (i64 batch = blockIdx.z; batch < extent.batches; batch += gridDim.z) {
        for (i64 row = blockIdx.y; row < extent.rows; row += gridDim.y) body(batch, row);
    }
}

// The first column of a thread's v-th pack.
__device__ inline i64 pack_column(int v) {
    return ((static_cast<i64>(blockIdx.x) * kTilePacks + v) * blockDim.x + threadIdx.x) * kPack;
}

// The column of a thread's i-th element, element by element.
__device__ inline i64 element_column(int i) {
    return (static_cast<i64>(blockIdx.x) * kTileElements + i) * blockDim.x + threadIdx.x;
}

// Eight elements of a broadcast operand: neighbours, or one value for all of them.
template <typename T>
__device__ inline void load_shared(Pack<T>& pack, const T* base, i64 column, i64 column_stride) {
    if (column_stride != 0) {
        load_cached(pack, base + column);
        return;
    }
    float value[kPack];
#pragma unroll
    for (int i = 0; i < kPack; i++) value[i] = to_float(*base);
    ::pack(value, pack);
}

// One 16-byte store, spelled out: between branches the compiler may make four of 4 bytes from an assignment.
__device__ inline void store_wide(void* p, unsigned x, unsigned y, unsigned z, unsigned w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ inline void store_pack(__half* p, const Pack<__half>& pack) {
    store_wide(p, pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w);
}
__device__ inline void store_pack(float* p, const Pack<float>& pack) {
    const float4 a = pack.low, b = pack.high;
    store_wide(p, __float_as_uint(a.x), __float_as_uint(a.y), __float_as_uint(a.z), __float_as_uint(a.w));
    store_wide(p + 4, __float_as_uint(b.x), __float_as_uint(b.y), __float_as_uint(b.z), __float_as_uint(b.w));
}

__device__ inline void store_element(void* base, i64 index, bool is_float, float value) {
    if (is_float) {
        static_cast<float*>(base)[index] = value;
    } else {
        static_cast<__half*>(base)[index] = __float2half_rn(value);
    }
}
