// norm_modulate: the normalisation between two matrix products of a transformer block.
//
//   n   = (x - mean(x)) * rsqrt(var(x) + eps)     LayerNorm; RMSNorm leaves the mean out: x * rsqrt(mean(x^2) + eps)
//   out = n * (offset + scale) + shift            offset 1: modulation; offset 0: `scale` is the norm's own weight
//
// Layout. x: [batch, token, d], rows anywhere, elements of a row adjacent. out: contiguous. scale and shift are rows of
// d that a batch, a run of `tokens_per_frame` tokens, or a single token shares (Wan, Wan 2.2 5B): each has a batch
// stride and a frame stride, either may be 0, so the six chunks of a [b, 6, d] tensor are read in place.
//
// Bytes per element (half, bf16): 2 read + 2 written. Modulation shared by a batch is read once per block and comes
// from L2; modulation per token adds 2 or 4 (float) per operand.
//
// Access. A block owns a run of rows. Its threads hold one row at a time in registers, V packs of 8 elements each: one
// read from memory serves the mean, the exact variance (second pass, around the mean) and the output. The next row is
// already on its way, packed, while this one is reduced. Modulation rows stay packed in registers from row to row and
// are loaded again only where the frame changes. All arithmetic is float; the output is rounded once.
//
// `norm_modulate_*_any` serves everything else: any alignment, any d, weight and modulation together, mixed types. A
// block walks its row three times, element by element; the second and third walk hit the cache.

#include "norm_rows.cuh"

// Any layout, any d, every operand: one block per row at a time, element by element. Two: the type of operands of two
// bytes.
template <typename X, typename Two, int kWarps>
__device__ void norm_any(const NormParams& p) {
    __shared__ typename BlockSum<kWarps>::Slots slots;
    BlockSum<kWarps> block_sum(slots);
    const int d = p.d;
    const i64 rows = static_cast<i64>(p.batches) * p.tokens;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 batch = row / p.tokens, token = row % p.tokens, frame = token / p.tokens_per_frame;
        const i64 scale_at = batch * p.scale_batch + frame * p.scale_frame;
        const i64 shift_at = batch * p.shift_batch + frame * p.shift_frame;
        unsigned short* out = static_cast<unsigned short*>(p.out) + row * d;
        const X* x = at<X>(p.x, batch * p.x_batch + token * p.x_row);

        float sum = 0;
        for (int c = threadIdx.x; c < d; c += blockDim.x) sum += to_float(x[c]);
        const float mean = p.is_rms ? 0.0f : divide(block_sum(sum), p.d, p.inverse_d);
        float squares = 0;
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            const float centred = to_float(x[c]) - mean;
            squares = fmaf(centred, centred, squares);
        }
        const float factor = rsqrtf(block_sum(squares) * p.inverse_d + p.eps);
        for (int c = threadIdx.x; c < d; c += blockDim.x) {
            float value = (to_float(x[c]) - mean) * factor;
            if (p.weight) value *= load_element<Two>(p.weight, c, p.affine_is_float);
            if (p.bias) value += load_element<Two>(p.bias, c, p.affine_is_float);
            if (p.scale) value *= 1.0f + load_element<Two>(p.scale, scale_at + c, p.modulation_is_float);
            if (p.shift) value += load_element<Two>(p.shift, shift_at + c, p.modulation_is_float);
            if (kIsBf16<X> && p.out_is_bf16) {
                from_float(value, reinterpret_cast<__nv_bfloat16*>(out)[c]);
            } else {
                from_float(value, reinterpret_cast<__half*>(out)[c]);
            }
        }
    }
}

// Names say the type of x, the type of the modulation, and the packs per thread (BLOCKS in ops/norm/norm_modulate.py).
#define NORM_ROWS(NAME, X, M, V, THREADS)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ NormParams p) { \
        norm_rows<X, M, V, THREADS / 32>(p, [&](i64 row) { return ToHalves<X, V>(p, row); });          \
    }
#define NORM_ANY(NAME, X, TWO)                                                                     \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ NormParams p) { \
        norm_any<X, TWO, 8>(p);                                                                    \
    }
#define NORM_TYPES(NAME, X, M)                        \
    NORM_ROWS(norm_modulate_##NAME##_2, X, M, 2, 384) \
    NORM_ROWS(norm_modulate_##NAME##_3, X, M, 3, 256) \
    NORM_ROWS(norm_modulate_##NAME##_4, X, M, 4, 256)

NORM_TYPES(f16_f16, __half, __half)
NORM_TYPES(f16_f32, __half, float)
NORM_TYPES(f32_f16, float, __half)
NORM_TYPES(bf16_bf16, __nv_bfloat16, __nv_bfloat16)
NORM_TYPES(bf16_f32, __nv_bfloat16, float)
NORM_ANY(norm_modulate_f16_any, __half, __half)
NORM_ANY(norm_modulate_f32_any, float, __half)
NORM_ANY(norm_modulate_bf16_any, __nv_bfloat16, __nv_bfloat16)
