// norm_modulate, residual_gate_norm_modulate: the normalisation between two matrix products of a transformer block.
//
//   n   = (x - mean(x)) * rsqrt(var(x) + eps)     LayerNorm; RMSNorm leaves the mean out: x * rsqrt(mean(x^2) + eps)
//   out = n * (offset + scale) + shift            offset 1: modulation; offset 0: `scale` is the norm's own weight
// and, with a residual, first
//   x   = round(x + gate * y)                     also written: it is the residual stream of the next step
//
// Layout. x and y: [batch, token, d], rows anywhere, elements of a row adjacent. out, x_new: contiguous. scale, shift and
// gate are rows of d that a batch, a run of `tokens_per_frame` tokens, or a single token shares (Wan, Wan 2.2 5B): each
// has a batch stride and a frame stride, either may be 0, so the six chunks of a [b, 6, d] tensor are read in place.
//
// Bytes per element (half): norm_modulate 2 read + 2 written = 4; with the residual 4 + 4 = 8. Modulation shared by a
// batch is read once per block and stays in L2; modulation per token adds 2 (half) or 4 (float) per operand.
//
// Access. A block owns a run of rows. Its threads hold one row at a time in registers, packed, V packs of 8 elements
// each: one read from memory serves the mean, the exact variance (second pass, around the mean) and the output. The next
// row is already on its way while this one is reduced. Modulation rows stay in registers from row to row and are loaded
// again only where the frame changes. All arithmetic is float; the output is rounded once.
//
// The new x is rounded before it is normalised, as stock does: what is normalised is then exactly the x that the next
// step reads, and the row stays packed.
//
// `norm_modulate_*_any` serves everything else: any alignment, any d, weight and modulation together, mixed types. A
// block walks its row three times, element by element; the second and third walk hit the cache.

#include "reduce.cuh"
#include "vector.cuh"

// Mirrored by NormParams in ops/norm_modulate.py. Pointers first.
struct NormParams {
    const void* x;
    const void* y;
    const void* gate;
    const void* scale;
    const void* shift;
    const void* weight;  // `any` only: the register kernels get a lone weight as `scale` with offset 0
    const void* bias;
    void* out;
    void* x_new;
    i64 x_batch, x_row;  // strides, in elements
    i64 y_batch, y_row;
    i64 gate_batch, gate_frame;
    i64 scale_batch, scale_frame;
    i64 shift_batch, shift_frame;
    i64 batches, tokens, tokens_per_frame;
    int d;
    int rows_per_block;
    float eps;
    float offset;
    int is_rms;
    // `any` only: which operands are float rather than half.
    int y_is_float, modulation_is_float, affine_is_float;
};

template <typename T>
__device__ inline const T* at(const void* base, i64 index) {
    return static_cast<const T*>(base) + index;
}

// The packs of one row that this thread owns. Beyond the row's end they are zero, which no sum notices.
template <typename T, int V>
struct Row {
    Pack<T> packs[V];

    __device__ static int column(int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kPack; }

    __device__ void load_streaming_row(const T* row, int d) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            zero(packs[v]);
            if (column(v) < d) load_streaming(packs[v], row + column(v));
        }
    }

    // An absent operand is a row of zeros.
    __device__ void load_shared_row(const T* row, int d) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            zero(packs[v]);
            if (row != nullptr && column(v) < d) load_cached(packs[v], row + column(v));
        }
    }

    __device__ void store_row(T* row, int d) const {
#pragma unroll
        for (int v = 0; v < V; v++) {
            if (column(v) < d) store(row + column(v), packs[v]);
        }
    }
};

// X: type of x; M: type of scale, shift and gate. y and out are half... y has the type of out.
template <typename X, typename M, int V, bool kResidual>
__device__ void norm_rows(const NormParams& p) {
    __shared__ float slots[2][kMostWarps];
    const int d = p.d;
    const float inverse_d = 1.0f / static_cast<float>(d);
    const i64 first = static_cast<i64>(blockIdx.x) * p.rows_per_block;
    const i64 last = min(first + p.rows_per_block, p.tokens);

    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        const X* x = at<X>(p.x, batch * p.x_batch + first * p.x_row);
        const __half* y = at<__half>(p.y, batch * p.y_batch + first * p.y_row);
        __half* out = static_cast<__half*>(p.out) + (batch * p.tokens + first) * d;
        X* x_new = static_cast<X*>(p.x_new) + (batch * p.tokens + first) * d;

        i64 frame = first / p.tokens_per_frame;
        i64 left_in_frame = 0;  // of the modulation in registers: none yet
        Row<M, V> scale, shift, gate;
        Row<X, V> next;
        Row<__half, V> next_y;
        next.load_streaming_row(x, d);
        if constexpr (kResidual) next_y.load_streaming_row(y, d);

        for (i64 token = first; token < last; token++) {
            if (left_in_frame == 0) {
                frame = token / p.tokens_per_frame;
                left_in_frame = (frame + 1) * p.tokens_per_frame - token;
                if constexpr (kResidual) {
                    gate.load_shared_row(p.gate ? at<M>(p.gate, batch * p.gate_batch + frame * p.gate_frame) : nullptr, d);
                }
                scale.load_shared_row(p.scale ? at<M>(p.scale, batch * p.scale_batch + frame * p.scale_frame) : nullptr, d);
                shift.load_shared_row(p.shift ? at<M>(p.shift, batch * p.shift_batch + frame * p.shift_frame) : nullptr, d);
            }
            left_in_frame--;

            Row<X, V> row = next;
            if constexpr (kResidual) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float old[kPack], added[kPack], by[kPack];
                    unpack(row.packs[v], old);
                    unpack(next_y.packs[v], added);
                    unpack(gate.packs[v], by);
#pragma unroll
                    for (int i = 0; i < kPack; i++) old[i] = fmaf(p.gate ? by[i] : 1.0f, added[i], old[i]);
                    pack(old, row.packs[v]);
                }
                row.store_row(x_new, d);
                x_new += d;
            }
            if (token + 1 < last) {
                x += p.x_row;
                next.load_streaming_row(x, d);
                if constexpr (kResidual) {
                    y += p.y_row;
                    next_y.load_streaming_row(y, d);
                }
            }

            float mean = 0;
            if (!p.is_rms) {
                float sum = 0;
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float a[kPack];
                    unpack(row.packs[v], a);
#pragma unroll
                    for (int i = 0; i < kPack; i++) sum += a[i];
                }
                mean = block_sum(sum, slots[0]) * inverse_d;
            }
            float squares = 0;
#pragma unroll
            for (int v = 0; v < V; v++) {
                if (Row<X, V>::column(v) >= d) continue;  // the zeros there are not zero around the mean
                float a[kPack];
                unpack(row.packs[v], a);
#pragma unroll
                for (int i = 0; i < kPack; i++) squares = fmaf(a[i] - mean, a[i] - mean, squares);
            }
            const float scale_row = rsqrtf(block_sum(squares, slots[1]) * inverse_d + p.eps);

#pragma unroll
            for (int v = 0; v < V; v++) {
                float a[kPack], by[kPack], plus[kPack];
                unpack(row.packs[v], a);
                unpack(scale.packs[v], by);
                unpack(shift.packs[v], plus);
#pragma unroll
                for (int i = 0; i < kPack; i++) a[i] = fmaf((a[i] - mean) * scale_row, p.offset + by[i], plus[i]);
                Pack<__half> result;
                pack(a, result);
                if (Row<X, V>::column(v) < d) store(out + Row<X, V>::column(v), result);
            }
            out += d;
        }
    }
}

// Any layout, any d, every operand: one block per row at a time, element by element.
template <typename X, bool kResidual>
__device__ void norm_any(const NormParams& p) {
    __shared__ float slots[2][kMostWarps];
    const int d = p.d;
    for (i64 row = blockIdx.x; row < p.batches * p.tokens; row += gridDim.x) {
        const i64 batch = row / p.tokens, token = row % p.tokens, frame = token / p.tokens_per_frame;
        const i64 x_at = batch * p.x_batch + token * p.x_row, y_at = batch * p.y_batch + token * p.y_row;
        const i64 gate_at = batch * p.gate_batch + frame * p.gate_frame;
        const i64 scale_at = batch * p.scale_batch + frame * p.scale_frame;
        const i64 shift_at = batch * p.shift_batch + frame * p.shift_frame;
        X* x_new = static_cast<X*>(p.x_new) + row * d;
        __half* out = static_cast<__half*>(p.out) + row * d;
        const X* source = kResidual ? x_new : at<X>(p.x, x_at);

        float sum = 0;
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            float value = to_float(at<X>(p.x, x_at)[c]);
            if constexpr (kResidual) {
                const float by = p.gate ? load_element(p.gate, gate_at + c, p.modulation_is_float) : 1.0f;
                X rounded;
                from_float(fmaf(by, load_element(p.y, y_at + c, p.y_is_float), value), rounded);
                x_new[c] = rounded;  // each thread reads back only what it wrote itself
                value = to_float(rounded);
            }
            sum += value;
        }
        const float mean = p.is_rms ? 0.0f : block_sum(sum, slots[0]) / d;
        float squares = 0;
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            const float centred = to_float(source[c]) - mean;
            squares = fmaf(centred, centred, squares);
        }
        const float scale_row = rsqrtf(block_sum(squares, slots[1]) / d + p.eps);
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            float value = (to_float(source[c]) - mean) * scale_row;
            if (p.weight) value *= load_element(p.weight, c, p.affine_is_float);
            if (p.bias) value += load_element(p.bias, c, p.affine_is_float);
            if (p.scale) value *= 1.0f + load_element(p.scale, scale_at + c, p.modulation_is_float);
            if (p.shift) value += load_element(p.shift, shift_at + c, p.modulation_is_float);
            out[c] = __float2half_rn(value);
        }
    }
}

constexpr int kMostThreads = 256;

#define NORM_ROWS(NAME, X, M, V, RESIDUAL)                                                                              \
    extern "C" __global__ void __launch_bounds__(kMostThreads) NAME(const __grid_constant__ NormParams p) {            \
        norm_rows<X, M, V, RESIDUAL>(p);                                                                               \
    }
#define NORM_ANY(NAME, X, RESIDUAL)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kMostThreads) NAME(const __grid_constant__ NormParams p) {            \
        norm_any<X, RESIDUAL>(p);                                                                                      \
    }
// Names say the type of x, the type of the modulation, and the packs per thread.
#define NORM_FAMILY(PREFIX, RESIDUAL)                                 \
    NORM_ROWS(PREFIX##_f16_f16_2, __half, __half, 2, RESIDUAL)        \
    NORM_ROWS(PREFIX##_f16_f16_4, __half, __half, 4, RESIDUAL)        \
    NORM_ROWS(PREFIX##_f16_f32_2, __half, float, 2, RESIDUAL)         \
    NORM_ROWS(PREFIX##_f16_f32_4, __half, float, 4, RESIDUAL)         \
    NORM_ROWS(PREFIX##_f32_f16_2, float, __half, 2, RESIDUAL)         \
    NORM_ROWS(PREFIX##_f32_f16_4, float, __half, 4, RESIDUAL)         \
    NORM_ROWS(PREFIX##_f32_f32_2, float, float, 2, RESIDUAL)          \
    NORM_ROWS(PREFIX##_f32_f32_4, float, float, 4, RESIDUAL)          \
    NORM_ANY(PREFIX##_f16_any, __half, RESIDUAL)                      \
    NORM_ANY(PREFIX##_f32_any, float, RESIDUAL)

NORM_FAMILY(norm_modulate, false)
NORM_FAMILY(residual_gate_norm_modulate, true)
