// join_sums: what lies between two products of operands in two parts.
//
//   x   = activation(first[0] + first[1]) * (second[0] + second[1]) * scale      the second factor optional
//   out = half(x), or (half(x), half(x - half(x)))                               x saturates at +-65504; NaN stays
//
// A product of two parts, stacked as rows, leaves its sums in two parts as well, float each: reading them is where they are
// added, and no pass of its own.
//
// Layout. first, second: [2, batch, row, column] float, rows anywhere: two tensors, or two halves of one product. out:
// contiguous, [batch, row, column] or both parts of it, one behind the other.
//
// Bytes per element of x: 8 or 16 read, 2 or 4 written.
//
// Access: tiles.cuh, quads of floats. `scale` is a power of two, so it takes no digits. Exponential and reciprocal are single
// instructions, off by some 10^-7 of the result, where the two halves hold 2 * 10^-7. `join_sums_any` serves every other layout,
// an element at a time.

#include "eight.cuh"
#include "parts.cuh"
#include "tiles.cuh"

// Mirrored by JoinSumsParams in ops/join_sums.py. Pointers first.
struct JoinSumsParams {
    const float* first;
    const float* second;  // null: no second factor
    __half* out;
    Place first_place, second_place, out_place;
    Extent extent;
    i64 first_part, second_part, out_part;  // from one part to the other, in elements; out_part 0: one part
    float scale;
    int activation;
};

__device__ inline float activate(float x, int kind) {
    switch (kind) {
        case kGeluErf:
            return gelu_erf(x);
        case kGeluTanh:
            return gelu_tanh(x);
        case kSilu:
            return times_logistic(x, x);
        case kRelu:
            return x < 0.0f ? 0.0f : x;
        default:
            return x;
    }
}

extern "C" __global__ void __launch_bounds__(kTileThreads) join_sums(const __grid_constant__ JoinSumsParams p) {
    const bool multiplies = p.second != nullptr;
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const float* first = p.first + p.first_place.at(batch, row);
        const float* second = p.second + p.second_place.at(batch, row);
        __half* out = p.out + p.out_place.at(batch, row);
        const Chunk<true> chunk(p.extent);
        Pack<float> a[kTilePacks], a_rest[kTilePacks], b[kTilePacks], b_rest[kTilePacks];
        chunk.columns.load<Reading::kStreaming>(a, first + chunk.start);
        chunk.columns.load<Reading::kStreaming>(a_rest, first + p.first_part + chunk.start);
        if (multiplies) {
            chunk.columns.load<Reading::kStreaming>(b, second + chunk.start);
            chunk.columns.load<Reading::kStreaming>(b_rest, second + p.second_part + chunk.start);
        }
#pragma unroll
        for (int v = 0; v < kTilePacks; v++) {
            Eight x, more;
            unpack(a[v], x.v);
            unpack(a_rest[v], more.v);
            x.add(more);
            x.activate(p.activation);
            if (multiplies) {
                Eight by;
                unpack(b[v], by.v);
                unpack(b_rest[v], more.v);
                by.add(more);
#pragma unroll
                for (int i = 0; i < kPack; i++) x.v[i] *= by.v[i];
            }
#pragma unroll
            for (float& each : x.v) each *= p.scale;
            Pack<__half> value, rest;
            split(x.v, value, rest);
            chunk.store(out, v, value);
            if (p.out_part) chunk.store(out + p.out_part, v, rest);
        }
    });
}

extern "C" __global__ void __launch_bounds__(kTileThreads) join_sums_any(const __grid_constant__ JoinSumsParams p) {
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const i64 first_at = p.first_place.at(batch, row), second_at = p.second_place.at(batch, row);
        const i64 out_at = p.out_place.at(batch, row);
#pragma unroll
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            if (column >= p.extent.width) continue;
            const float* first = p.first + first_at + column * p.first_place.column;
            float x = activate(first[0] + first[p.first_part], p.activation);
            if (p.second != nullptr) {
                const float* second = p.second + second_at + column * p.second_place.column;
                x *= second[0] + second[p.second_part];
            }
            __half value, rest;
            split(x * p.scale, value, rest);
            __half* out = p.out + out_at + column * p.out_place.column;
            out[0] = value;
            if (p.out_part) out[p.out_part] = rest;
        }
    });
}
