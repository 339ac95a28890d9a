// to_half: a weight as it is stored (bf16, fp32, fp8 e4m3fn, fp8 e5m2; fp8 also scaled) becomes fp16.
//
//   out = round(x * scale)      scale: one for the tensor, one per row, or none
//
// A finite value beyond 65504 becomes 65504 with its sign. Infinities stay infinite, NaN stays NaN. x * scale is one
// fp32 product; fp8 itself converts exactly.
//
// Layout. x: [rows, cols], elements of a row adjacent, rows anywhere; a contiguous tensor with one scale is one row.
// out: contiguous.
//
// Bytes per element: 1 + 2 (fp8), 2 + 2 (bf16), 4 + 2 (fp32).
//
// Access. A thread moves eight elements at a time: 8, 16 or 2 x 16 bytes in, 16 out, so that a warp writes 512
// consecutive bytes. Four such packs per thread are in flight together. Only a tensor with rows needs a division, one
// per pack, and that is a product with the divisor's reciprocal. Instructions are few, because on a card with much
// bandwidth they would decide: fp8 is decoded two at a time, and whether anything in a pack must be saturated is one
// question for all eight.
// `*_any`: any alignment, any number of columns, element by element.

#include "fp8.cuh"
#include "packs.cuh"

// Mirrored by ToHalfParams in ops/quant/to_half.py. Pointers first.
struct ToHalfParams {
    const void* x;
    const float* scale;
    void* out;
    i64 x_row;  // stride, in elements
    i64 rows, cols;
    i64 packs_per_row;
    i64 packs_reciprocal;  // the bits of 2^64 / packs_per_row, rounded up, for fewer than 2^32 packs; else 0
    int scale_per_row;
};

constexpr int kThreads = 256;
constexpr int kPacksPerThread = 4;

template <typename X>
__device__ inline void load_streaming(Pack<X>& pack, const X* p) {
    if constexpr (sizeof(X) == 4) {
        load_pack<Reading::kCached>(pack, p);  // two halves of every sector: the second is to find the first in L1
    } else {
        load_words<Reading::kStreaming>(pack.words, p);
    }
}

constexpr float kLargest = 65504.0f;
constexpr unsigned kInfinity = 0x7f800000u;

__device__ inline bool is_infinite(float v) {
    return fabsf(v) == __uint_as_float(kInfinity);
}

// x * scale within the range of half. A product that is infinite only because it is too large is not infinite.
__device__ inline float scaled(float x, float scale) {
    const float v = x * scale;
    return fabsf(v) > kLargest && !is_infinite(x) && !is_infinite(scale) ? copysignf(kLargest, v) : v;
}

template <typename X>
constexpr bool kExact = false;  // every value of X is a value of half
template <>
constexpr bool kExact<E4m3> = true;
template <>
constexpr bool kExact<E5m2> = true;

// scale: 1 where there is none, a factor that changes nothing.
template <typename X>
__device__ inline Pack<__half> convert(const Pack<X>& pack, float scale, bool is_scaled) {
    if constexpr (kExact<X>) {
        if (!is_scaled) return as_half(pack);
    }
    float v[kPack], largest = 0;
    unpack(pack, v);
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        v[i] *= scale;
        largest = fmaxf(largest, fabsf(v[i]));  // fmaxf passes over NaN, which needs no help
    }
    if (largest > kLargest) {
        unpack(pack, v);
#pragma unroll
        for (int i = 0; i < kPack; i++) v[i] = scaled(v[i], scale);
    }
    Pack<__half> out;
    ::pack(v, out);
    return out;
}

__device__ inline i64 row_of(const ToHalfParams& p, i64 pack) {
    if (p.rows == 1) return 0;
    return p.packs_reciprocal ? static_cast<i64>(__umul64hi(pack, p.packs_reciprocal)) : pack / p.packs_per_row;
}

template <typename X>
__device__ void to_half_packs(const ToHalfParams& p) {
    const i64 packs = p.rows * p.packs_per_row;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kPacksPerThread) + threadIdx.x;
    const X* x = static_cast<const X*>(p.x);
    __half* out = static_cast<__half*>(p.out);
    const bool is_scaled = p.scale != nullptr;
    Pack<X> held[kPacksPerThread];
    i64 row[kPacksPerThread], col[kPacksPerThread];
#pragma unroll
    for (int v = 0; v < kPacksPerThread; v++) {
        const i64 index = first + v * kThreads;
        if (index >= packs) break;
        row[v] = row_of(p, index);
        col[v] = (index - row[v] * p.packs_per_row) * kPack;
        if (col[v] + kPack <= p.cols) load_streaming(held[v], x + row[v] * p.x_row + col[v]);
    }
    float scale[kPacksPerThread];  // loaded together too, before the first is waited for
#pragma unroll
    for (int v = 0; v < kPacksPerThread; v++) {
        scale[v] = is_scaled && first + v * kThreads < packs ? p.scale[p.scale_per_row ? row[v] : 0] : 1.0f;
    }
#pragma unroll
    for (int v = 0; v < kPacksPerThread; v++) {
        if (first + v * kThreads >= packs) break;
        __half* to = out + row[v] * p.cols + col[v];
        if (col[v] + kPack <= p.cols) {
            store_whole(to, convert(held[v], scale[v], is_scaled));
        } else {  // the end of a single row
#pragma unroll 1
            for (i64 c = col[v]; c < p.cols; c++) {
                const float a = to_float(x[row[v] * p.x_row + c]);
                out[row[v] * p.cols + c] = __float2half_rn(scaled(a, scale[v]));
            }
        }
    }
}

template <typename X>
__device__ void to_half_any(const ToHalfParams& p) {
    const i64 elements = p.rows * p.cols;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kPacksPerThread) + threadIdx.x;
#pragma unroll
    for (int v = 0; v < kPacksPerThread; v++) {
        const i64 index = first + v * kThreads;
        if (index >= elements) break;
        const i64 row = p.rows == 1 ? 0 : quotient(index, p.cols);
        const float a = to_float(static_cast<const X*>(p.x)[row * p.x_row + index - row * p.cols]);
        const float b = scaled(a, p.scale ? p.scale[p.scale_per_row ? row : 0] : 1.0f);
        static_cast<__half*>(p.out)[index] = __float2half_rn(b);
    }
}

#define TO_HALF(NAME, X)                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads) to_half_##NAME(const __grid_constant__ ToHalfParams p) { \
        to_half_packs<X>(p);                                                                                        \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
        to_half_##NAME##_any(const __grid_constant__ ToHalfParams p) {                                              \
        to_half_any<X>(p);                                                                                          \
    }
TO_HALF(bf16, __nv_bfloat16)
TO_HALF(f32, float)
TO_HALF(e4m3, E4m3)
TO_HALF(e5m2, E5m2)
