// silu, gelu, silu_mul, gelu_mul: the nonlinearity between two matrix products.
//
//   silu(x)  = x / (1 + exp(-x))
//   gelu(x)  = x * phi(x), phi the normal distribution function ("erf"), or
//              x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3) ("tanh": 0.5 (1 + tanh(u)) is this), or
//              x / (1 + exp(-1.702 x)) ("quick")
//   silu_mul = silu(gate) * up * scale       SwiGLU;  gelu_mul: GeGLU
//
// Scale. In T5's feed-forward, gate and up fit fp16 but their product reaches 10^5 and would be stored as infinity.
// Here the product exists only in float, where 65504^2 fits easily, and `scale`, a power of two, is applied before the
// one rounding: a power of two shifts the exponent, so the result has the same significant digits as without it, and no
// infinity appears wherever the scaled value fits. The next matrix product gives `scale` back. With `saturate` what
// still does not fit becomes +-65504, and a NaN stays NaN.
//
// Layout. [batch, row, column], rows anywhere: gate and up are two tensors, two halves of one projection (views), or
// alternate within a row (interleaved: g0 u0 g1 u1 ..). out is contiguous.
//
// Bytes per element of out (half, bf16): silu and gelu 2 read + 2 written; *_mul 4 + 2.
//
// Access: tiles.cuh. Eight elements per 16-byte load; interleaved gates take two loads for eight results. All
// arithmetic is float, rounded once. Exponential and reciprocal are single instructions: their error, 10^-6 at worst
// where a result matters, is far below half's 5 * 10^-4, and an H200 has only 27 instructions per element before they
// cost bandwidth.
//
// `activation_any` and, of bf16, `activation_bf16_any` serve every other layout and type, an element at a time; the
// latter also what no model without fp16 has between its products.

#include "gelu.cuh"
#include "tiles.cuh"

enum Kind { kSilu, kGeluTanh, kGeluErf, kGeluQuick };

__device__ inline float activate(Kind kind, float x) {
    switch (kind) {
        case kSilu:
            return times_logistic(x, x);
        case kGeluTanh:
            return gelu_tanh(x);
        case kGeluErf:
            return gelu_erf(x);
        default:
            return times_logistic(x, 1.702f * x);
    }
}

// Mirrored by ActivationParams in ops/elementwise/activations.py. Pointers first.
struct ActivationParams {
    const void* gate;
    const void* up;  // null: silu or gelu alone
    void* out;
    Place gate_place, up_place, out_place;
    Extent extent;
    float scale;
    int saturate;
    // `any` only
    int kind;
    int gate_is_float, up_is_float, out_is_float;
};

__device__ inline float finish(const ActivationParams& p, float activated, float up) {
    float value = activated * p.scale * up;
    if (p.saturate) value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    return value;
}

// kInputs: 1 gate only, 2 gate and up, 3 gate and up alternating. X: the type of all, of two bytes.
template <Kind kKind, int kInputs, typename X>
__device__ void activate_rows(const ActivationParams& p) {
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const X* gate = static_cast<const X*>(p.gate) + p.gate_place.at(batch, row);
        const X* up = static_cast<const X*>(p.up) + p.up_place.at(batch, row);
        X* out = static_cast<X*>(p.out) + p.out_place.at(batch, row);
        const Chunk<false> chunk(p.extent);
        Pack<X> first[kTilePacks], second[kTilePacks];
        if constexpr (kInputs == 3) {
#pragma unroll
            for (int v = 0; v < kTilePacks; v++) {
                if (chunk.at(v, 0) >= chunk.columns.d) continue;
                const X* both = gate + 2 * (chunk.start + chunk.at(v, 0));
                load_pack<Reading::kStreaming>(first[v], both);
                load_pack<Reading::kStreaming>(second[v], both + kPack);
            }
        } else {
            chunk.columns.template load<Reading::kStreaming>(first, gate + chunk.start);
            if constexpr (kInputs == 2) chunk.columns.template load<Reading::kStreaming>(second, up + chunk.start);
        }
#pragma unroll
        for (int v = 0; v < kTilePacks; v++) {
            float a[kPack], b[kPack], result[kPack];
            unpack(first[v], a);
            if (kInputs > 1) unpack(second[v], b);
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                if (kInputs == 1) {
                    result[i] = activate(kKind, a[i]);
                } else if (kInputs == 2) {
                    result[i] = finish(p, activate(kKind, a[i]), b[i]);
                } else {
                    const float g = i < kPack / 2 ? a[2 * i % kPack] : b[2 * i % kPack];
                    const float u = i < kPack / 2 ? a[2 * i % kPack + 1] : b[2 * i % kPack + 1];
                    result[i] = finish(p, activate(kKind, g), u);
                }
            }
            Pack<X> rounded;
            pack(result, rounded);
            chunk.store(out, v, rounded);
        }
    });
}

// Two: the type of operands of two bytes.
template <typename Two>
__device__ inline void activate_elements(const ActivationParams& p) {
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const i64 gate_at = p.gate_place.at(batch, row), up_at = p.up_place.at(batch, row);
        const i64 out_at = p.out_place.at(batch, row);
        float gate[kTileElements], up[kTileElements];
#pragma unroll
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            gate[i] = up[i] = 0;
            if (column >= p.extent.width) continue;
            gate[i] = load_element<Two>(p.gate, gate_at + column * p.gate_place.column, p.gate_is_float);
            if (p.up != nullptr) up[i] = load_element<Two>(p.up, up_at + column * p.up_place.column, p.up_is_float);
        }
#pragma unroll
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            if (column >= p.extent.width) continue;
            const float value = activate(static_cast<Kind>(p.kind), gate[i]);
            store_element<Two>(p.out, out_at + column * p.out_place.column, p.out_is_float,
                               p.up == nullptr ? value : finish(p, value, up[i]));
        }
    });
}

#define ACTIVATION(NAME, KIND, INPUTS, X)                                                                         \
    extern "C" __global__ void __launch_bounds__(kTileThreads) NAME(const __grid_constant__ ActivationParams p) { \
        activate_rows<KIND, INPUTS, X>(p);                                                                        \
    }
#define ACTIVATIONS(NAME, KIND)             \
    ACTIVATION(NAME, KIND, 1, __half)       \
    ACTIVATION(NAME##_mul, KIND, 2, __half) \
    ACTIVATION(NAME##_mul_interleaved, KIND, 3, __half)
#define ACTIVATION_ANY(NAME, TWO)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kTileThreads) NAME(const __grid_constant__ ActivationParams p) { \
        activate_elements<TWO>(p);                                                                                \
    }

ACTIVATIONS(silu, kSilu)
ACTIVATIONS(gelu_tanh, kGeluTanh)
ACTIVATIONS(gelu_erf, kGeluErf)
ACTIVATIONS(gelu_quick, kGeluQuick)
ACTIVATION(gelu_tanh_bf16, kGeluTanh, 1, __nv_bfloat16)
ACTIVATION(gelu_erf_bf16, kGeluErf, 1, __nv_bfloat16)
ACTIVATION(silu_mul_bf16, kSilu, 2, __nv_bfloat16)
ACTIVATION_ANY(activation_any, __half)
ACTIVATION_ANY(activation_bf16_any, __nv_bfloat16)
