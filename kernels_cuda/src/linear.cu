#include "linear_epilogue.cuh"

template <int kRowWarps, int kColumnWarps, bool kFast, bool kPaired>
__device__ inline void linear(const LinearParams& p) {
    using Cut = Product<kRowWarps, kColumnWarps, kPaired>;
    using Out = Epilogue<kPaired>;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Cut::kStages * Cut::kStage >= Cut::kThreads / 32 * Out::kBytes);

    const Cut product{p, shared_address(memory)};
    Sums sums;
    product.template multiply_tiles<kFast>(sums);
    if (kFast && Cut::any_lost(sums)) product.template multiply_tiles<false>(sums);
    float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
    const int2 at = product.place();
    Out{p}.run(corner, sums, at.x + Cut::warp_row(), at.y + Cut::warp_column() / (kPaired ? 2 : 1));
}

#define LINEAR(NAME, ROW_WARPS, COLUMN_WARPS, FAST, PAIRED)                                                     \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS)) \
        NAME(const __grid_constant__ LinearParams p) {                                                          \
        linear<ROW_WARPS, COLUMN_WARPS, FAST, PAIRED>(p);                                                       \
    }
#define LINEAR_TILE(ROWS, COLUMNS, ROW_WARPS, COLUMN_WARPS)                                \
    LINEAR(linear_##ROWS##x##COLUMNS##_precise, ROW_WARPS, COLUMN_WARPS, false, false)     \
    LINEAR(linear_##ROWS##x##COLUMNS##_fast, ROW_WARPS, COLUMN_WARPS, true, false)         \
    LINEAR(linear_pair_##ROWS##x##COLUMNS##_precise, ROW_WARPS, COLUMN_WARPS, false, true) \
    LINEAR(linear_pair_##ROWS##x##COLUMNS##_fast, ROW_WARPS, COLUMN_WARPS, true, true)

LINEAR_TILE(128, 256, 2, 4)
LINEAR_TILE(128, 128, 2, 2)
LINEAR_TILE(64, 128, 1, 2)
