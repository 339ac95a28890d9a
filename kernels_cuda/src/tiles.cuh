// How elementwise kernels walk a tensor seen as [batch, row, column].
//
// Ops merge neighbouring dimensions wherever every operand allows it, so contiguous operands arrive as one long row,
// and a view of a wider buffer as rows with gaps. The grid is (chunks of a row, rows, batches), with the last two
// looped over where they exceed it: no thread ever divides. A thread owns kTilePacks packs of a chunk and loads all of
// them before it computes: with full multiprocessors that is 64 KB in flight on each for every operand.
#pragma once

#include "stores.cuh"
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

// The packs of a thread in the block's chunk of a row. Add `start` to an operand's row first.
template <bool kQuads>
struct Chunk {
    i64 start;
    Columns<kTilePacks, kQuads> columns;

    __device__ explicit Chunk(const Extent& extent)
        : start(static_cast<i64>(blockIdx.x) * (kTilePacks * kPack) * blockDim.x),
          columns{static_cast<int>(min(extent.width - start, static_cast<i64>(kTilePacks * kPack * kTileThreads)))} {}

    template <typename T>
    __device__ void store(T* row, int v, const Pack<T>& pack) const {
        T* to = row + start;
        if constexpr (kQuads || sizeof(T) == 4) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                if (at(v, q * kQuad) < columns.d) store_whole(to + at(v, q * kQuad), quad(pack, q));
            }
        } else {
            if (at(v, 0) < columns.d) store_whole(to + at(v, 0), pack.words);
        }
    }

    // The column of element i of pack v within the chunk.
    __device__ int at(int v, int i) const {
        return kQuads ? columns.quad_at(v, i / kQuad) + i % kQuad : columns.adjacent(v) + i;
    }
};

// The column of a thread's i-th element, element by element.
__device__ inline i64 element_column(int i) {
    return (static_cast<i64>(blockIdx.x) * kTileElements + i) * blockDim.x + threadIdx.x;
}

// Two: as of load_element.
template <typename Two = __half>
__device__ inline void store_element(void* base, i64 index, bool is_float, float value) {
    if (is_float) {
        static_cast<float*>(base)[index] = value;
    } else {
        from_float(value, static_cast<Two*>(base)[index]);
    }
}
