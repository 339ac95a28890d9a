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
    const float* weight_scale;  // [n], or one
    LinearParams linear;        // x and weight: two bytes to a half
    int weight_scale_step;      // 1, or 0 where there is one for all
};

// Row and column have a scale each.
template <typename SumOfOne>
struct IntegerFactor {
    using Sum = SumOfOne;

    const float* of_rows;
    const float* of_weight;
    int step;
    float of_column[8], of_row, next;

    __device__ explicit IntegerFactor(const LinearIntegerParams& p)
        : of_rows(p.x_scale), of_weight(p.weight_scale), step(p.weight_scale_step) {}

    __device__ void of_columns(const LinearParams& p, int column) {
#pragma unroll
        for (int c = 0; c < 8; c++) of_column[c] = of_weight[(column + c) * step] * p.scale;
    }
    // row: within this grid row. All rows together are fewer than 2^31.
    __device__ void ask_row(const LinearParams& p, int row) { next = of_rows[blockIdx.y * unsigned(p.m) + row]; }
    __device__ void take_row() { of_row = next; }
    __device__ float at(const LinearParams&, int c) const { return of_row * of_column[c]; }
};

template <typename Sum, int kRowWarps, int kColumnWarps, int kBands>
struct IntegerProduct {
    using Cut = Product<kRowWarps, kColumnWarps, false, kBands, Sum>;
    using Out = Epilogue<false, kBands, IntegerFactor<Sum>>;
    static constexpr int kBytes = Cut::kStages * Cut::kStage;
    static_assert(kBytes >= Cut::kThreads / 32 * Out::kBytes);

    __device__ static void run(const LinearIntegerParams& p) {
        extern __shared__ __align__(128) unsigned char memory[];
        const Cut product{p.linear, shared_address(memory)};
        typename Cut::Sums sums;
        product.template multiply_tiles<false>(sums);
        float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
        const int2 at = product.place();
        Out{p.linear}.run(corner, sums, at.x + Cut::warp_row(), at.y + Cut::warp_column(), IntegerFactor<Sum>(p));
    }
};

// Beside each kernel, what a block of this variant takes: threads, bytes of dynamic shared memory. The launcher reads
// it from the code that was loaded.
#define LINEAR_INTEGERS(NAME, SUM, ROW_WARPS, COLUMN_WARPS, BANDS)                                              \
    extern "C" __device__ int NAME##_cut[2] = {ROW_WARPS * COLUMN_WARPS * 32,                                   \
                                               IntegerProduct<SUM, ROW_WARPS, COLUMN_WARPS, BANDS>::kBytes};    \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS)) \
        NAME(const __grid_constant__ LinearIntegerParams p) {                                                   \
        IntegerProduct<SUM, ROW_WARPS, COLUMN_WARPS, BANDS>::run(p);                                            \
    }
