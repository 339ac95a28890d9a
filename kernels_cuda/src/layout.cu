// split_projection, concat_tokens, swap_heads: copies that put rows of 2-byte elements in another order, where a view
// does not serve.
//
// One kernel: up to four parts, each a box [a, b, c] of rows of `width` elements with any strides between its rows,
// read and written. Splitting is four parts that read side by side; joining is two that write side by side; [b, s, h,
// d] to [b, h, s, d] is one part whose inner dimensions are exchanged in what it reads.
//
// Bytes per element: 2 read + 2 written.
//
// Access. Rows are taken in the order in which they are written. A thread moves 16 bytes at a time, four of them in
// flight; neighbouring threads move neighbours of a row. Rows of 128 elements are 256 bytes, so both sides move whole
// sectors. An index becomes (a, b, c, column) by three divisions by numbers known before the launch: each is a
// multiplication. `layout_any`: any alignment, any width, any size; element by element.

#include "packs.cuh"

constexpr int kMostParts = 4;
constexpr int kThreads = 256;
constexpr int kHeld = 4;

// n / divisor for n < 2^31, as (n * multiplier) >> (31 + shift): see `divisor` in ops/boxes.py.
struct Divisor {
    i64 value;
    unsigned multiplier;
    int shift;
};

// Mirrored by Part in ops/boxes.py.
struct Part {
    i64 from_a, from_b, from_c;  // strides, in elements
    i64 to_a, to_b, to_c;
    i64 count;  // units: packs of eight elements, or single ones
    Divisor units_per_row, b, c;
};

// Mirrored by LayoutParams in ops/layout.py. Pointers first.
struct LayoutParams {
    const unsigned short* from[kMostParts];
    unsigned short* to[kMostParts];
    Part parts[kMostParts];
};

template <bool kFast>
__device__ inline i64 divide(i64 n, const Divisor& by) {
    if (!kFast) return quotient(n, by.value);
    const unsigned long long product = static_cast<unsigned long long>(static_cast<unsigned>(n)) * by.multiplier;
    return static_cast<i64>(product >> (31 + by.shift));
}

// kUnit: elements a thread moves at once.
template <int kUnit>
__device__ void copy_rows(const LayoutParams& p) {
    constexpr bool kFast = kUnit == kPack;
    const Part& part = p.parts[blockIdx.y];
    const unsigned short* from = p.from[blockIdx.y];
    unsigned short* to = p.to[blockIdx.y];
    Pack<__half> held[kHeld];
    i64 target[kHeld];
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
        const i64 index = (static_cast<i64>(blockIdx.x) * kHeld + v) * kThreads + threadIdx.x;
        if (index >= part.count) break;
        const i64 row = divide<kFast>(index, part.units_per_row),
                  column = (index - row * part.units_per_row.value) * kUnit;
        const i64 ab = divide<kFast>(row, part.c), c = row - ab * part.c.value;
        const i64 a = divide<kFast>(ab, part.b), b = ab - a * part.b.value;
        const unsigned short* source = from + a * part.from_a + b * part.from_b + c * part.from_c + column;
        target[v] = a * part.to_a + b * part.to_b + c * part.to_c + column;
        if constexpr (kUnit == kPack) {
            load_words<Reading::kStreaming>(held[v].words, source);
        } else {
            held[v].words[0] = *source;
        }
    }
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
        if ((static_cast<i64>(blockIdx.x) * kHeld + v) * kThreads + threadIdx.x >= part.count) break;
        if constexpr (kUnit == kPack) {
            store_whole(to + target[v], held[v]);
        } else {
            to[target[v]] = static_cast<unsigned short>(held[v].words[0]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) layout_packs(const __grid_constant__ LayoutParams p) {
    copy_rows<kPack>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) layout_any(const __grid_constant__ LayoutParams p) {
    copy_rows<1>(p);
}
