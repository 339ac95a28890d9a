// join_sums: what lies between two products of operands in two parts.
//
//   x   = activation(first[0] + first[1]) * (second[0] + second[1]) * scale      the second factor optional
//   out = half(x), or (half(x), half(x - half(x)))                               x saturates at +-65504; NaN stays
//
// A product of two parts, stacked as rows, leaves its sums in two parts as well, float each: reading them is where they
// are added, and no pass of its own.
//
// Layout. first, second: [2, batch, row, column] float, rows anywhere: two tensors, or two halves of one product. out:
// contiguous, [batch, row, column] or both parts of it, one behind the other.
//
// Bytes per element of x: 8 or 16 read, 2 or 4 written.
//
// Access: tiles.cuh, quads of floats, and a pack at a time: of four operands that is 128 bytes in flight for each
// thread, and a second pack would cost registers that other warps need. `scale` is a power of two, so it takes no
// digits. Exponential and reciprocal are single instructions, off by some 10^-7 of the result, where the two halves
// hold 2 * 10^-7. One kernel for each activation: with all of them in one the registers would be those of the largest.
// `join_sums_any` serves every other layout, an element at a time.

#include "eight.cuh"
#include "parts.cuh"
#include "tiles.cuh"

// Mirrored by JoinSumsParams in ops/matmul/join_sums.py. Pointers first.
struct JoinSumsParams {
    const float* first;
    const float* second;  // null: no second factor
    __half* out;
    Place first_place, second_place, out_place;
    Extent extent;
    i64 first_part, second_part, out_part;  // from one part to the other, in elements; out_part 0: one part
    float scale;
    int activation;  // `any` only
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

__device__ inline void load(const Chunk<true>& chunk, int v, Pack<float>& pack, const float* row) {
    zero(pack);
#pragma unroll
    for (int q = 0; q < 2; q++) {
        const int column = chunk.at(v, q * kQuad);
        if (column < chunk.columns.d) load_words<Reading::kStreaming>(quad(pack, q), row + chunk.start + column);
    }
}

template <Activation kKind>
__device__ void join_rows(const JoinSumsParams& p) {
    const bool multiplies = p.second != nullptr;
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const float* first = p.first + p.first_place.at(batch, row);
        const float* second = p.second + p.second_place.at(batch, row);
        __half* out = p.out + p.out_place.at(batch, row);
        const Chunk<true> chunk(p.extent);
#pragma unroll 1
        for (int v = 0; v < kTilePacks; v++) {
            Pack<float> a, a_rest, b, b_rest;
            load(chunk, v, a, first);
            load(chunk, v, a_rest, first + p.first_part);
            if (multiplies) {
                load(chunk, v, b, second);
                load(chunk, v, b_rest, second + p.second_part);
            }
            float x[kPack], more[kPack];
            unpack(a, x);
            unpack(a_rest, more);
#pragma unroll
            for (int i = 0; i < kPack; i++) x[i] = activate(x[i] + more[i], kKind);
            if (multiplies) {
                float by[kPack];
                unpack(b, by);
                unpack(b_rest, more);
#pragma unroll
                for (int i = 0; i < kPack; i++) x[i] *= by[i] + more[i];
            }
#pragma unroll
            for (float& each : x) each *= p.scale;
            Pack<__half> value, rest;
            split(x, value, rest);
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

#define JOIN_SUMS(NAME, KIND)                                        \
    extern "C" __global__ void __launch_bounds__(kTileThreads)       \
        join_sums_##NAME(const __grid_constant__ JoinSumsParams p) { \
        join_rows<KIND>(p);                                          \
    }
// Names are those of ACTIVATIONS in ops/matmul/linear_operands.py.
JOIN_SUMS(none, kIdentity)
JOIN_SUMS(gelu, kGeluErf)
JOIN_SUMS(gelu_tanh, kGeluTanh)
JOIN_SUMS(silu, kSilu)
JOIN_SUMS(relu, kRelu)
