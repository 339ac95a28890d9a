// gated_residual: what a transformer block adds to its stream.
//
//   out = x + gate * y          one fused multiply-add per element, as torch.addcmul computes it; without a gate x + y
//
// With `saturate` what an fp16 stream does not hold becomes +-65504; a NaN stays.
//
// Layout. x and y: [batch, token, d], rows anywhere. out: contiguous, or x itself (a thread writes what it has read).
// The gate is a row of d that a batch, a run of `tokens_per_frame` tokens, or a single token has for itself, as in
// norm_modulate.cu.
//
// Bytes per element (half, bf16): 4 read + 2 written; x in float (T5's stream): 6 read + 4 written. A gate per token
// adds 2 or 4.
//
// Access: tiles.cuh, one chunk of one row per block. x and y stream past L1, which keeps the gate for the blocks that
// follow. Without a gate there are no rows to respect, and contiguous tensors are one long row.
//
// `gated_residual_any` and, of bf16, `gated_residual_bf16_any` serve every other layout and type, an element at a time.

#include "tiles.cuh"

// Mirrored by GatedResidualParams in ops/elementwise/gated_residual.py. Pointers first.
struct GatedResidualParams {
    const void* x;
    const void* y;
    const void* gate;  // null: 1
    void* out;
    Place x_place, y_place, gate_place, out_place;  // gate_place.row: from frame to frame
    Extent extent;
    i64 tokens_per_frame;
    int x_is_float, y_is_float, gate_is_float;  // `any` only
    int saturate;

    // The usual cases need no division: one gate for all tokens, or one each. Tokens that share gates fit 32 bits.
    __device__ i64 gate_at(i64 batch, i64 token) const {
        i64 frame = 0;
        if (tokens_per_frame == 1) {
            frame = token;
        } else if (tokens_per_frame < extent.rows) {
            frame = static_cast<unsigned>(token) / static_cast<unsigned>(tokens_per_frame);
        }
        return gate_place.at(batch, frame);
    }
};

__device__ inline float kept(const GatedResidualParams& p, float value) {
    if (!p.saturate) return value;
    return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
}

// X: type of x; Y: of y; M: of the gate.
template <typename X, typename Y, typename M>
__device__ void gated_residual_rows(const GatedResidualParams& p) {
    for_each_row(p.extent, [&](i64 batch, i64 token) {
        const X* x = static_cast<const X*>(p.x) + p.x_place.at(batch, token);
        const Y* y = static_cast<const Y*>(p.y) + p.y_place.at(batch, token);
        const M* gate = static_cast<const M*>(p.gate) + p.gate_at(batch, token);
        X* out = static_cast<X*>(p.out) + p.out_place.at(batch, token);
        const Chunk<sizeof(X) == 4 || sizeof(M) == 4> chunk(p.extent);
        Pack<X> old[kTilePacks];
        Pack<Y> added[kTilePacks];
        Pack<M> by[kTilePacks];
        chunk.columns.template load<Reading::kStreaming>(old, x + chunk.start);
        chunk.columns.template load<Reading::kStreaming>(added, y + chunk.start);
        if (p.gate != nullptr) chunk.columns.template load<Reading::kCached>(by, gate + chunk.start);
#pragma unroll
        for (int v = 0; v < kTilePacks; v++) {
            float a[kPack], b[kPack], c[kPack];
            unpack(old[v], a);
            unpack(added[v], b);
            unpack(by[v], c);
#pragma unroll
            for (int i = 0; i < kPack; i++) a[i] = kept(p, fmaf(p.gate != nullptr ? c[i] : 1.0f, b[i], a[i]));
            Pack<X> result;
            pack(a, result);
            chunk.store(out, v, result);
        }
    });
}

// Two: the type of operands of two bytes.
template <typename Two>
__device__ inline void gated_residual_elements(const GatedResidualParams& p) {
    for_each_row(p.extent, [&](i64 batch, i64 token) {
        const i64 x_at = p.x_place.at(batch, token), y_at = p.y_place.at(batch, token);
        const i64 gate_at = p.gate_at(batch, token), out_at = p.out_place.at(batch, token);
        float x[kTileElements], y[kTileElements], gate[kTileElements];
#pragma unroll
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            x[i] = y[i] = 0, gate[i] = 1;
            if (column >= p.extent.width) continue;
            x[i] = load_element<Two>(p.x, x_at + column * p.x_place.column, p.x_is_float);
            y[i] = load_element<Two>(p.y, y_at + column * p.y_place.column, p.y_is_float);
            if (p.gate != nullptr)
                gate[i] = load_element<Two>(p.gate, gate_at + column * p.gate_place.column, p.gate_is_float);
        }
#pragma unroll
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            if (column >= p.extent.width) continue;
            store_element<Two>(p.out, out_at + column * p.out_place.column, p.x_is_float,
                               kept(p, fmaf(gate[i], y[i], x[i])));
        }
    });
}

#define GATED_RESIDUAL(NAME, X, Y, M)                                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads)                 \
        gated_residual_##NAME(const __grid_constant__ GatedResidualParams p) { \
        gated_residual_rows<X, Y, M>(p);                                       \
    }
#define GATED_RESIDUAL_ANY(NAME, TWO)                                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 1)              \
        gated_residual_##NAME(const __grid_constant__ GatedResidualParams p) { \
        gated_residual_elements<TWO>(p);                                       \
    }
// Names say the type of x and of the gate.
GATED_RESIDUAL(f16_f16, __half, __half, __half)
GATED_RESIDUAL(f16_f32, __half, __half, float)
GATED_RESIDUAL(f32_f16, float, __half, __half)
GATED_RESIDUAL(f32_f32, float, __half, float)
GATED_RESIDUAL(bf16_bf16, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16)
GATED_RESIDUAL(bf16_f32, __nv_bfloat16, __nv_bfloat16, float)
GATED_RESIDUAL_ANY(any, __half)
GATED_RESIDUAL_ANY(bf16_any, __nv_bfloat16)
