// rms_parts: the norm of an fp32 stream, as two halves that add up to it.
//
//   n   = x * rsqrt(mean(x^2) + eps) * weight
//   out = (half(n), half(n - half(n)))        n saturates at +-65504; NaN stays
//
// Layout. x: [batch, token, d] float, rows anywhere, elements of a row adjacent. out: [2, batch, token, d], contiguous:
// two parts that one product takes as twice the rows. weight: [d].
//
// Bytes per element: 4 read + 4 written.
//
// Access. A block has a row in registers, kPacks packs of 8 elements for each thread. The weight comes from L2; it is
// asked for before the sum is, and waited for behind it. `rms_parts_any` serves any d and any address, element by
// element, and walks its row twice.

#include "parts.cuh"
#include "reduce.cuh"

// Mirrored by RmsPartsParams in ops/norm/rms_parts.py. Pointers first.
struct RmsPartsParams {
    const float* x;
    const void* weight;
    __half* out;
    i64 x_batch, x_row;  // strides, in elements
    i64 rows;            // of all batches
    int tokens, d;
    float eps, inverse_d;
    int weight_is_float;  // `any` only

    __device__ const float* row(i64 index) const {
        const i64 batch = quotient(index, tokens);
        return x + batch * x_batch + (index - batch * tokens) * x_row;
    }
};

// Mirrored by PACKS and THREADS in ops/norm/rms_parts.py.
constexpr int kPacks = 2;
constexpr int kThreads = 512;

template <typename W>
__device__ void rms_rows(const RmsPartsParams& p) {
    __shared__ BlockSum<kThreads / 32>::Slots slots;
    BlockSum<kThreads / 32> block_sum(slots);
    const Columns<kPacks, true> columns{p.d};
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        Pack<float> x[kPacks];
        Pack<W> weight[kPacks];
        columns.load<Reading::kStreaming>(x, p.row(row));
        columns.load<Reading::kCached>(weight, static_cast<const W*>(p.weight));
        float squares = 0;
#pragma unroll
        for (int v = 0; v < kPacks; v++) {
            float values[kPack];
            unpack(x[v], values);
#pragma unroll
            for (int i = 0; i < kPack; i++) squares = fmaf(values[i], values[i], squares);
        }
        const float factor = rsqrtf(block_sum(squares) * p.inverse_d + p.eps);
        __half* out = p.out + row * p.d;
#pragma unroll
        for (int v = 0; v < kPacks; v++) {
            float values[kPack], by[kPack];
            unpack(x[v], values);
            unpack(weight[v], by);
#pragma unroll
            for (int i = 0; i < kPack; i++) values[i] = values[i] * factor * by[i];
            Pack<__half> value, rest;
            split(values, value, rest);
            columns.store(out, v, value);
            columns.store(out + p.rows * p.d, v, rest);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) rms_parts_f16(const __grid_constant__ RmsPartsParams p) {
    rms_rows<__half>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) rms_parts_f32(const __grid_constant__ RmsPartsParams p) {
    rms_rows<float>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) rms_parts_any(const __grid_constant__ RmsPartsParams p) {
    __shared__ BlockSum<kThreads / 32>::Slots slots;
    BlockSum<kThreads / 32> block_sum(slots);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float* x = p.row(row);
        float squares = 0;
        for (int c = threadIdx.x; c < p.d; c += blockDim.x) squares = fmaf(x[c], x[c], squares);
        const float factor = rsqrtf(block_sum(squares) * p.inverse_d + p.eps);
        __half* out = p.out + row * p.d;
        for (int c = threadIdx.x; c < p.d; c += blockDim.x) {
            split(x[c] * factor * load_element(p.weight, c, p.weight_is_float), out[c], out[p.rows * p.d + c]);
        }
    }
}
