// norm_to_int8 and norm_to_int4: norm_modulate whose rows leave as integers, each with a scale of its own: what
// linear_int8 and linear_int4 multiply.
//
//   y = norm_modulate(x), never rounded to half; then scale and numbers of y H, as integer_rows.cuh makes them.
//
// A block has all of a row in registers when it is normalised, so the row's largest costs one more sum over the block,
// and the result is written once: 2 bytes of an element are read (4 of float) and 1 or a half is written, where
// norm_modulate and rows_to_int8 move 4 bytes more.
//
// Layout. Operands as norm_modulate has them. d is a multiple of 8 and of the rotation's group. numbers [rows, d]
// bytes, or [rows, d / 2] with two numbers in each; scales [rows] floats; both contiguous.
//
// Access. That of norm_rows.cuh, but a thread's columns are those of Rotation::place, and adjacent also where rows are
// of float: a rotation mixes eight neighbours within the thread.
#pragma once

#include "integer_rows.cuh"
#include "norm_rows.cuh"

// Mirrored by NormToIntegersParams in ops/norm/norm_to_integers.py.
struct NormToIntegersParams {
    signed char* numbers;
    float* scales;
    NormParams norm;  // whose out is null
    int group;        // of the rotation; 0: none
};

template <int kBits, int V, int kWarps>
struct ToIntegers {
    const Rotation rotation;
    const Columns<V, false> columns;
    signed char* numbers;
    float* scale;

    __device__ ToIntegers(const NormToIntegersParams& p, i64 row)
        : rotation{p.group},
          columns{p.norm.d, Rotation{p.group}.place(int(threadIdx.x))},
          numbers(p.numbers + row * p.norm.d * kBits / 8),
          scale(p.scales + row) {}

    __device__ void take(int, const float (&)[kPack]) const {}
    __device__ void end(const NormParams& p, float (&values)[V][kPack]) {
        store_as_integers<kBits, V, kWarps>(values, rotation, p.d, numbers, scale);
        numbers += i64(p.d) * kBits / 8, scale++;
    }
};

// Names say the type of x, the type of the modulation, and the packs per thread (BLOCKS in ops/norm/norm_modulate.py).
#define NORM_TO_INTEGERS(NAME, BITS, X, M, V, THREADS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ NormToIntegersParams p) { \
        using To = ToIntegers<BITS, V, THREADS / 32>;                                                            \
        norm_rows<X, M, V, THREADS / 32>(p.norm, [&](i64 row) { return To(p, row); });                           \
    }
#define NORM_TO_INTEGERS_TYPES(BITS, NAME, X, M)                         \
    NORM_TO_INTEGERS(norm_to_int##BITS##_##NAME##_2, BITS, X, M, 2, 384) \
    NORM_TO_INTEGERS(norm_to_int##BITS##_##NAME##_3, BITS, X, M, 3, 256)
#define NORMS_TO_INTEGERS(BITS)                                           \
    NORM_TO_INTEGERS_TYPES(BITS, f16_f16, __half, __half)                 \
    NORM_TO_INTEGERS_TYPES(BITS, f16_f32, __half, float)                  \
    NORM_TO_INTEGERS_TYPES(BITS, f32_f16, float, __half)                  \
    NORM_TO_INTEGERS_TYPES(BITS, bf16_bf16, __nv_bfloat16, __nv_bfloat16) \
    NORM_TO_INTEGERS_TYPES(BITS, bf16_f32, __nv_bfloat16, float)
