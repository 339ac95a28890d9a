// The kernels of linear_int8 and linear_int4: the product of two matrices of integers, a scale for each row of either.
//
// Two bytes are moved as one half would be, so operands, shared tiles and fragments are byte for byte those of
// linear.cu (linear_core.cuh), and k and the strides of both count halves. What the bytes hold only the instruction
// knows (mma.cuh), and with it the type of the sums: int of bytes, Int4Sum of two numbers in each.
#pragma once

#include "linear_epilogue.cuh"

// Mirrored by LinearIntegerParams in ops/matmul/integer_product.py.
struct LinearIntegerParams {
    const float* x_scale;       // [rows]
    const float* weight_scale;  // [n], or one; of a pair: the gate's
    const float* up_scale;      // ... the other weight's, as many
    LinearParams linear;        // x and weights: two bytes to a half
    int weight_scale_step;      // 1, or 0 where there is one for all
    int beside_is_bf16;         // bias, residual and gate, those of two bytes: bf16, not half
    int out_is_bf16;            // out, if it is of two bytes
};

// Row and column have a scale each.
template <typename SumOfOne, bool kPaired>
struct IntegerFactor {
    using Sum = SumOfOne;

    const LinearIntegerParams& all;
    float of_column[8], of_row, next;

    __device__ explicit IntegerFactor(const LinearIntegerParams& p) : all(p) {}

    __device__ void of_columns(const LinearParams& p, int column) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            of_column[c] = all.weight_scale[(column + c) * all.weight_scale_step] * p.scale;
        }
    }
    // row: within this grid row. All rows together are fewer than 2^31.
    __device__ void ask_row(const LinearParams& p, int row) { next = all.x_scale[blockIdx.y * unsigned(p.m) + row]; }
    __device__ void take_row() { of_row = next; }
    __device__ float at(const LinearParams&, int c) const { return of_row * of_column[c]; }
    __device__ bool beside_is_bf16() const { return all.beside_is_bf16; }
    __device__ bool out_is_bf16() const { return all.out_is_bf16; }
};

// Of a pair, each weight's columns have their own.
template <typename SumOfOne>
struct IntegerFactor<SumOfOne, true> {
    using Sum = SumOfOne;

    const LinearIntegerParams& all;
    float gate[8], up[8], of_row, next;

    __device__ explicit IntegerFactor(const LinearIntegerParams& p) : all(p) {}

    __device__ void of_columns(const LinearParams& p, int column) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            gate[c] = all.weight_scale[(column + c) * all.weight_scale_step];
            up[c] = all.up_scale[(column + c) * all.weight_scale_step] * p.scale;
        }
    }
    __device__ void ask_row(const LinearParams& p, int row) { next = all.x_scale[blockIdx.y * unsigned(p.m) + row]; }
    __device__ void take_row() { of_row = next; }
    __device__ float of_gate(const LinearParams&, int c) const { return of_row * gate[c]; }
    __device__ float of_up(const LinearParams&, int c) const { return of_row * up[c]; }
    __device__ bool beside_is_bf16() const { return all.beside_is_bf16; }
    __device__ bool out_is_bf16() const { return all.out_is_bf16; }
};

template <typename Sum, int kRowWarps, int kColumnWarps, int kBands, bool kPaired>
struct IntegerProduct {
    using Cut = Product<kRowWarps, kColumnWarps, kPaired, kBands, Sum>;
    using Factor = IntegerFactor<Sum, kPaired>;
    using Out = Epilogue<kPaired, kBands, Factor>;
    static constexpr int kBytes = Cut::kStages * Cut::kStage;
    static_assert(kBytes >= Cut::kThreads / 32 * Out::kBytes);

    __device__ static void run(const LinearIntegerParams& p) {
        extern __shared__ __align__(128) unsigned char memory[];
        const Cut product{p.linear, shared_address(memory)};
        typename Cut::Sums sums;
        product.template multiply_tiles<false>(sums);
        float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
        const int2 at = product.place();
        const int column = at.y + Cut::warp_column() / (kPaired ? 2 : 1);
        Out{p.linear}.run(corner, sums, at.x + Cut::warp_row(), column, Factor(p));
    }
};

// Beside each kernel, what a block of this variant takes: threads, bytes of dynamic shared memory. The launcher reads
// it from the code that was loaded.
#define LINEAR_INTEGERS_KERNEL(NAME, SUM, ROW_WARPS, COLUMN_WARPS, BANDS, PAIRED)                                    \
    extern "C" __device__ int NAME##_cut[2] = {ROW_WARPS * COLUMN_WARPS * 32,                                        \
                                               IntegerProduct<SUM, ROW_WARPS, COLUMN_WARPS, BANDS, PAIRED>::kBytes}; \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS))      \
        NAME(const __grid_constant__ LinearIntegerParams p) {                                                        \
        IntegerProduct<SUM, ROW_WARPS, COLUMN_WARPS, BANDS, PAIRED>::run(p);                                         \
    }
#define LINEAR_INTEGERS(OP, TILE, SUM, ROW_WARPS, COLUMN_WARPS, BANDS)              \
    LINEAR_INTEGERS_KERNEL(OP##_##TILE, SUM, ROW_WARPS, COLUMN_WARPS, BANDS, false) \
    LINEAR_INTEGERS_KERNEL(OP##_pair_##TILE, SUM, ROW_WARPS, COLUMN_WARPS, BANDS, true)
