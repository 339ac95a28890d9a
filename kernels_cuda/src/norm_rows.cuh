// The normalisation of rows that a block holds in registers, and its way out: what norm_modulate, norm_to_int8 and
// norm_to_int4 share. The maths, the layout and the access pattern stand at the head of norm_modulate.cu.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

// Mirrored by FIELDS in ops/norm/norm_modulate.py. Pointers first.
struct NormParams {
    const void* x;
    const void* scale;
    const void* shift;
    const void* weight;  // `any` only: the register kernels get a lone weight as `scale` with offset 0
    const void* bias;
    void* out;
    i64 x_batch, x_row;  // strides, in elements
    i64 scale_batch, scale_frame;
    i64 shift_batch, shift_frame;
    int batches, tokens, tokens_per_frame, d;
    int rows_per_block;
    int is_rms;
    float eps, offset, inverse_d;
    // `any` only: which operands are float rather than of two bytes.
    int modulation_is_float, affine_is_float;
    int out_is_bf16;  // of rows of bf16 only, whose result may be half, too; that of others is
};

template <typename T>
__device__ inline const T* at(const void* base, i64 index) {
    return static_cast<const T*>(base) + index;
}

template <typename X>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<__nv_bfloat16> = true;

// Where a row of results goes: to half, or to bf16 where rows of bf16 ask for it.
template <typename X, int V>
struct ToHalves {
    using Row = Columns<V, sizeof(X) == 4>;

    const Row columns;
    unsigned short* out;
    const bool is_bf16;

    __device__ ToHalves(const NormParams& p, i64 row)
        : columns{p.d}, out(static_cast<unsigned short*>(p.out) + row * p.d), is_bf16(kIsBf16<X> && p.out_is_bf16) {}

    __device__ void take(int v, const float (&values)[kPack]) const {
        if (is_bf16) {
            store<__nv_bfloat16>(v, values);
        } else {
            store<__half>(v, values);
        }
    }
    __device__ void end(const NormParams& p, const float (&)[V][kPack]) { out += p.d; }

private:
    template <typename T>
    __device__ void store(int v, const float (&values)[kPack]) const {
        Pack<T> rounded;
        pack(values, rounded);
        columns.store(reinterpret_cast<T*>(out), v, rounded);
    }
};

// X: type of x; M: type of scale and shift. kWarps: the most a block may have. to(row): where results go from that row
// on.
template <typename X, typename M, int V, int kWarps, typename To>
__device__ void norm_rows(const NormParams& p, To to) {
    __shared__ typename BlockSum<kWarps>::Slots slots;
    BlockSum<kWarps> block_sum(slots);
    const int first = blockIdx.x * p.rows_per_block;  // the grid ends before this exceeds p.tokens
    const int rows = min(p.rows_per_block, p.tokens - first);
    const int first_frame = static_cast<unsigned>(first) / static_cast<unsigned>(p.tokens_per_frame);
    const int first_left = p.tokens_per_frame - (first - first_frame * p.tokens_per_frame);

    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        const X* x = at<X>(p.x, batch * p.x_batch + first * p.x_row);
        auto results = to(batch * p.tokens + first);
        const auto& columns = results.columns;

        int frame = first_frame, left_in_frame = first_left;
        bool new_frame = true;
        Pack<M> scale[V], shift[V];
        for (int v = 0; v < V; v++) zero(scale[v]), zero(shift[v]);
        Pack<X> next[V];
        columns.template load<Reading::kStreaming>(next, x);

        for (int row = 0; row < rows; row++) {
            if (new_frame) {  // an absent operand is a row of zeros
                const i64 m = batch * p.scale_batch + frame * p.scale_frame;
                const i64 a = batch * p.shift_batch + frame * p.shift_frame;
                if (p.scale != nullptr) columns.template load_existing<Reading::kCached>(scale, at<M>(p.scale, m));
                if (p.shift != nullptr) columns.template load_existing<Reading::kCached>(shift, at<M>(p.shift, a));
            }

            float values[V][kPack];
#pragma unroll
            for (int v = 0; v < V; v++) unpack(next[v], values[v]);
            if (row + 1 < rows) {
                x += p.x_row;
                columns.template load_existing<Reading::kStreaming>(next, x);
            }

            if (!p.is_rms) {
                float sum = 0;
#pragma unroll
                for (int v = 0; v < V; v++) {
#pragma unroll
                    for (int i = 0; i < kPack; i++) sum += values[v][i];
                }
                const float mean = divide(block_sum(sum), p.d, p.inverse_d);
#pragma unroll
                for (int v = 0; v < V; v++) {
#pragma unroll
                    for (int i = 0; i < kPack; i++) values[v][i] -= columns.has(v, i) ? mean : 0.0f;
                }
            }
            float squares = 0;
#pragma unroll
            for (int v = 0; v < V; v++) {
#pragma unroll
                for (int i = 0; i < kPack; i++) squares = fmaf(values[v][i], values[v][i], squares);
            }
            const float factor = rsqrtf(block_sum(squares) * p.inverse_d + p.eps);

#pragma unroll
            for (int v = 0; v < V; v++) {
                float by[kPack], plus[kPack];
                unpack(scale[v], by);
                unpack(shift[v], plus);
#pragma unroll
                for (int i = 0; i < kPack; i++) {
                    values[v][i] = fmaf(values[v][i] * factor, p.offset + by[i], plus[i]);
                }
                results.take(v, values[v]);
            }
            results.end(p, values);
            new_frame = --left_in_frame == 0;
            if (new_frame) frame++, left_in_frame = p.tokens_per_frame;
        }
    }
}
