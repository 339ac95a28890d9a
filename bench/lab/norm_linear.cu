// A product whose operand was to be normed: the norm's factor of a row meets the sums on their way out.
//
//   LayerNorm   n = (x - mean) r, y = (n (1 + scale) + shift) w^T + bias
//             = r (x w'^T) + v,   w' = w (1 + scale) less each row's mean of that, v = shift w^T + bias
//
// r of a row, one over its deviation, is all that the product needs: the mean goes with the weight, because what w' has
// of a constant row is nothing. RMSNorm: r alone, and w' without that mean. The product is the shipped one with its
// epilogue (linear_core.cuh, linear_epilogue.cuh), its sums times r[row] where the shipped one has a scale for all.
//
//   row_factors_*   r [rows] float: x is read once, and 4 bytes of a row are written
//   row_largest_*   mean, r and the largest |n (1 + scale) + shift| of a row, what rounding to bytes would have to know
//   folded_weights  w' [n, k] and v [n] of w, in one pass: what folding costs where scale and shift are of a step
//
// x is multiplied as it is, before its mean is taken away: where a row's mean is many times its deviation, that many
// times the product's rounding remains.

#include "../../kernels_cuda/src/linear_epilogue.cuh"
#include "../../kernels_cuda/src/packs.cuh"
#include "../../kernels_cuda/src/reduce.cuh"

// Mirrored by NORM_LINEAR in norm_linear.py. Pointers first.
struct NormLinearParams {
    const float* row_factor;  // [rows]
    LinearParams linear;
};

struct RowFactor {
    using Sum = float;

    const float* of_rows;
    float of_row, next;

    __device__ explicit RowFactor(const NormLinearParams& p) : of_rows(p.row_factor) {}

    __device__ void of_columns(const LinearParams&, int) {}
    __device__ void ask_row(const LinearParams& p, int row) { next = of_rows[blockIdx.y * unsigned(p.m) + row]; }
    __device__ void take_row() { of_row = next; }
    __device__ float at(const LinearParams& p, int) const { return of_row * p.scale; }
    __device__ static constexpr bool beside_is_bf16() { return false; }
    __device__ static constexpr bool out_is_bf16() { return false; }
};

template <int kRowWarps, int kColumnWarps, int kBands>
struct NormProduct {
    using Cut = Product<kRowWarps, kColumnWarps, false, kBands>;
    using Out = Epilogue<false, kBands, RowFactor>;
    static constexpr int kBytes = Cut::kStages * Cut::kStage;
    static_assert(kBytes >= Cut::kThreads / 32 * Out::kBytes);

    __device__ static void run(const NormLinearParams& p) {
        extern __shared__ __align__(128) unsigned char memory[];
        const Cut product{p.linear, shared_address(memory)};
        typename Cut::Sums sums;
        product.template multiply_tiles<false>(sums);
        float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
        const int2 at = product.place();
        Out{p.linear}.run(corner, sums, at.x + Cut::warp_row(), at.y + Cut::warp_column(), RowFactor(p));
    }
};

#define NORM_LINEAR(TILE, ROW_WARPS, COLUMN_WARPS, BANDS)                                                          \
    extern "C" __device__ int norm_linear_##TILE##_cut[2] = {ROW_WARPS * COLUMN_WARPS * 32,                        \
                                                             NormProduct<ROW_WARPS, COLUMN_WARPS, BANDS>::kBytes}; \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS))    \
        norm_linear_##TILE(const __grid_constant__ NormLinearParams p) {                                           \
        NormProduct<ROW_WARPS, COLUMN_WARPS, BANDS>::run(p);                                                       \
    }
NORM_LINEAR(192x128, 2, 2, 6)
NORM_LINEAR(128x128, 2, 2, 4)

// ------------------------------------------------------------------------------------------------- statistics of rows

constexpr int kRowThreads = 128;  // ROW_THREADS in norm_linear.py
constexpr int kRowPacks = 5;      // of a thread at most: rows of up to 5120

// Mirrored by ROWS in norm_linear.py. Pointers first.
struct RowParams {
    const __half* x;      // [rows, d]
    const __half* scale;  // [d], or null; row_largest alone
    const __half* shift;
    float* factors;  // [rows]; of row_largest [rows, 4]
    int rows, d;
    float eps, inverse_d;
    int is_rms, unused;
};

// kPacks: of a thread.
template <bool kLargest, int kPacks>
__device__ inline void rows_of(const RowParams& p) {
    __shared__ BlockSum<kRowThreads / 32>::Slots slots;
    __shared__ float of_warp[kRowThreads / 32];
    BlockSum<kRowThreads / 32> block_sum(slots);
    const Columns<kPacks, false> columns{p.d};
    Pack<__half> next[kPacks];
    columns.template load<Reading::kStreaming>(next,
                                               p.x + static_cast<i64>(blockIdx.x) * p.d);  // there are no more blocks
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        float values[kPacks][kPack], sum = 0, squares = 0;
#pragma unroll
        for (int v = 0; v < kPacks; v++) unpack(next[v], values[v]);
        const int after = row + gridDim.x;
        if (after < p.rows)
            columns.template load_existing<Reading::kStreaming>(next, p.x + static_cast<i64>(after) * p.d);
#pragma unroll
        for (int v = 0; v < kPacks; v++) {
#pragma unroll
            for (int i = 0; i < kPack; i++) sum += values[v][i];
        }
        const float mean = p.is_rms ? 0.0f : divide(block_sum(sum), p.d, p.inverse_d);
#pragma unroll
        for (int v = 0; v < kPacks; v++) {
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                values[v][i] -= columns.has(v, i) ? mean : 0.0f;
                squares = fmaf(values[v][i], values[v][i], squares);
            }
        }
        const float factor = rsqrtf(block_sum(squares) * p.inverse_d + p.eps);
        if constexpr (!kLargest) {
            if (threadIdx.x == 0) p.factors[row] = factor;
        } else {
            Pack<__half> scale[kPacks], shift[kPacks];
            columns.template load<Reading::kCached>(scale, p.scale);
            columns.template load<Reading::kCached>(shift, p.shift);
            float largest = 0;
#pragma unroll
            for (int v = 0; v < kPacks; v++) {
                float by[kPack], plus[kPack];
                unpack(scale[v], by);
                unpack(shift[v], plus);
#pragma unroll
                for (int i = 0; i < kPack; i++) {
                    largest = fmaxf(largest, fabsf(fmaf(values[v][i] * factor, 1.0f + by[i], plus[i])));
                }
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
            }
            if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
            __syncthreads();
            if (threadIdx.x == 0) {
                for (int warp = 1; warp < kRowThreads / 32; warp++) largest = fmaxf(largest, of_warp[warp]);
                reinterpret_cast<float4*>(p.factors)[row] = make_float4(mean, factor, largest, 0);
            }
            __syncthreads();
        }
    }
}

#define ROWS(NAME, LARGEST, PACKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(kRowThreads) NAME(const __grid_constant__ RowParams p) { \
        rows_of<LARGEST, PACKS>(p);                                                                       \
    }
ROWS(row_factors_2, false, 2)
ROWS(row_factors_5, false, kRowPacks)
ROWS(row_largest_2, true, 2)
ROWS(row_largest_5, true, kRowPacks)

// ---------------------------------------------------------------------------------------------------- folding a weight

// Mirrored by FOLD in norm_linear.py. Pointers first.
struct FoldParams {
    const __half* weight;  // [n, k]
    const __half* scale;   // [k]
    const __half* shift;   // [k]
    const __half* bias;    // [n]
    __half* folded;        // [n, k]
    float* beside;         // [n]
    int rows, d;
    float inverse_d;
    int is_rms;
};

extern "C" __global__ void __launch_bounds__(kRowThreads) folded_weights(const __grid_constant__ FoldParams p) {
    __shared__ BlockSum<kRowThreads / 32>::Slots slots;
    BlockSum<kRowThreads / 32> block_sum(slots);
    const Columns<kRowPacks, false> columns{p.d};
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        Pack<__half> held[kRowPacks], scale[kRowPacks], shift[kRowPacks];
        columns.load<Reading::kCached>(scale, p.scale);  // from L1: in registers they would cost a half of the blocks
        columns.load<Reading::kCached>(shift, p.shift);
        columns.load<Reading::kStreaming>(held, p.weight + static_cast<i64>(row) * p.d);
        float values[kRowPacks][kPack], sum = 0, added = 0;
#pragma unroll
        for (int v = 0; v < kRowPacks; v++) {
            float by[kPack], plus[kPack];
            unpack(held[v], values[v]);
            unpack(scale[v], by);
            unpack(shift[v], plus);
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                added = fmaf(values[v][i], plus[i], added);
                values[v][i] *= 1.0f + by[i];
                sum += values[v][i];
            }
        }
        const float mean = p.is_rms ? 0.0f : block_sum(sum) * p.inverse_d;
        const float beside = block_sum(added) + __half2float(p.bias[row]);
        if (threadIdx.x == 0) p.beside[row] = beside;
#pragma unroll
        for (int v = 0; v < kRowPacks; v++) {
            Pack<__half> rounded;
#pragma unroll
            for (int i = 0; i < kPack; i++) values[v][i] -= mean;
            pack(values[v], rounded);
            columns.store(p.folded + static_cast<i64>(row) * p.d, v, rounded);
        }
    }
}
