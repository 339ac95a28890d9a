// linear_int8, linear_int8_: the product of two matrices of 8-bit integers, and all that `linear` does to its result.
//
//   out = residual + gate * act(scale * x_scale[row] * weight_scale[column] * (x8 w8^T) + bias)
//
// The sums are 32-bit integers and exact, whatever the order: every tile gives the same bits. They become floats when
// they leave the tensor cores (rounded, where they are beyond 2^24), are multiplied with x_scale[row] * (scale *
// weight_scale[column]), and from there on this is linear.cu: its epilogue, and its one rounding.
//
// Layout. x8 [batch, row, k], w8 [n, k], adjacent bytes, rows anywhere at multiples of 16 bytes; k is a multiple of 16.
// Two bytes are moved as one half would be, so operands, shared tiles and fragments are byte for byte those of
// linear.cu (linear_core.cuh), and k and the strides of both count halves. x_scale [all rows] floats; weight_scale [n]
// floats, or one for all columns.
//
// Tiles. An instruction multiplies twice the k of one for halves: m16n8k32 from sm_80 on, two m8n8k16 on sm_75. On a
// GeForce it takes half as long as one that sums in float, and shared memory is read as often: with warps of 64 x 64
// that is half of what it can do. The tiles are those of linear.cu; where all of k passes in half the time, the way out
// weighs twice as much, so two blocks of four warps stand first.
//
// Cost. 2 m n k operations, of which an RTX 2060 Super does 114 T/s; m k + n k bytes in, once for each tile that wants
// them, from L2.

#include "linear_epilogue.cuh"

struct LinearInt8Params {
    const float* x_scale;       // [rows]
    const float* weight_scale;  // [n], or one
    LinearParams linear;        // x and weight: two bytes to a half
    int weight_scale_step;      // 1, or 0 where there is one for all
};

// Row and column have a scale each.
struct Int8Factor {
    using Sum = int;

    const float* of_rows;
    const float* of_weight;
    int step;
    float of_column[8], of_row, next;

    __device__ explicit Int8Factor(const LinearInt8Params& p)
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

template <int kRowWarps, int kColumnWarps, int kBands>
__device__ inline void linear_int8(const LinearInt8Params& p) {
    using Cut = Product<kRowWarps, kColumnWarps, false, kBands, int>;
    using Out = Epilogue<false, kBands, Int8Factor>;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Cut::kStages * Cut::kStage >= Cut::kThreads / 32 * Out::kBytes);

    const Cut product{p.linear, shared_address(memory)};
    typename Cut::Sums sums;
    product.template multiply_tiles<false>(sums);
    float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
    const int2 at = product.place();
    Out{p.linear}.run(corner, sums, at.x + Cut::warp_row(), at.y + Cut::warp_column(), Int8Factor(p));
}

// Beside each kernel, what a block of this variant takes: threads, bytes of dynamic shared memory. The launcher reads
// it from the code that was loaded.
#define LINEAR_INT8(NAME, ROW_WARPS, COLUMN_WARPS, BANDS)                                                        \
    extern "C" __device__ int NAME##_cut[2] = {ROW_WARPS * COLUMN_WARPS * 32,                                    \
                                               Product<ROW_WARPS, COLUMN_WARPS, false, BANDS, int>::kStages *    \
                                                   Product<ROW_WARPS, COLUMN_WARPS, false, BANDS, int>::kStage}; \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS))  \
        NAME(const __grid_constant__ LinearInt8Params p) {                                                       \
        linear_int8<ROW_WARPS, COLUMN_WARPS, BANDS>(p);                                                          \
    }

LINEAR_INT8(linear_int8_192x128, 2, 2, 6)
LINEAR_INT8(linear_int8_128x256, 2, 4, 4)
LINEAR_INT8(linear_int8_128x128, 2, 2, 4)
LINEAR_INT8(linear_int8_64x128, 1, 2, 4)
