// linear, linear_, linear_pair: a matrix product, and everything that is done to its result before it is stored.
//
//   linear       out = residual + gate * act(scale * (x w^T) + bias)
//   linear_pair  out = act(x w^T) * (x up^T) * scale                   SwiGLU, GeGLU, UMT5
//
// act: none, GELU (erf or tanh), SiLU, ReLU. The sums are float, and so is all that follows; the result is rounded
// once, to half or float. `scale` comes before the rounding, so a power of two keeps what half could not hold. With
// `saturate` what still does not fit becomes +-65504; a NaN stays.
//
// Layout. x is [batch, row, k], weight [n, k] as torch's Linear has it, both half with adjacent elements and rows
// anywhere at multiples of 16 bytes; k and n are multiples of 8. Both operands of x w^T have k innermost, which is what
// the fragments of A and B want, so nothing is transposed. A gate is a row of n for a batch, a frame or a token.
//
// Tiles. A block of out is rows x columns, a warp's part 64 x 64 or 96 x 64. Of shared memory a warp reads 4 KB for
// 64 x 64 x 16 and 5 KB for 96 x 64 x 16, half as much work again; 192 float sums per thread fit beside the fragments.
// 192 x 256 by eight warps asks L2 for the fewest bytes, 1 for 110 operations; 192 x 128 by four leaves two blocks on a
// multiprocessor, one of which multiplies while the other stores its results, and is the faster the shorter k is.
// `fast` has 64 x 64: 128 x 256 by eight warps, 128 x 128 by four. So has sm_75, whose tiles pass through registers on
// their way to shared memory. 64 x 128 is for few rows.
// k advances by 32, a tile of 64-byte rows, or by 64, whole lines and half the barriers, where there is shared memory
// for it. In flight are two tiles on sm_75 (48 KB for eight warps, 2 x 32 KB for two blocks of four), two to four of 32
// where a multiprocessor has 100 KB, two or three of 64 on sm_90 (linear_core.cuh: Depth). Warps of a pair hold 32
// columns of either product, because the rows of both weights alternate in the shared tile: the gate and the value it
// meets are sums of the same lane's neighbours, and neither is ever stored.
//
// Access. A tile comes by cp.async, or through registers (linear_tiles.cuh). What lies beyond k, m or n is zero and not
// read. Fragments come by ldmatrix from swizzled rows (mma.cuh), a step or two ahead of their products.
// Results leave through shared memory, 16 rows of a warp at a time: a lane then holds eight adjacent columns, so out,
// residual and gate are moved in 16-byte pieces and whole 128-byte lines. Blocks that run together stand eight tiles
// high in out, and share their operands in L2.
//
// Half sums (`fast`). GeForce cards of sm_75, sm_86 and sm_89 multiply twice as fast when they sum in half. Here at
// most 32 products are summed in half, by n = 4 instructions (m16n8k8) or n = 2 (m16n8k16), and the part is added to a
// float.
//   Error. Each instruction rounds the part so far. For independent operands the part after j instructions has j/n of
//   the whole part's variance, and over all k the roundings amount to (n + 1)/2 times the one of a half result. With
//   that one itself the error is sqrt(1 + (n + 1)/2) times that of float sums, 1.87 or 1.58, whatever k is. Range. A
//   part beyond 65504 is infinite. Added to a float sum it makes that infinite or NaN, and no later addition makes it
//   finite again; so a block looks at its sums once, at the end, and if one is not finite it multiplies again with
//   float sums. Nothing overflows unseen, outliers of any size cost time, not digits. A block whose operands are
//   infinite themselves pays too, to no avail.
//   At the other end, a part below 2^-14 is rounded to multiples of 2^-24: an absolute error of about sqrt(k) 2^-27.
// Where the tile is whole the order of the sums does not depend on the block's shape, so all cuts give the same result.

// not built for: sm_61

#include "linear_epilogue.cuh"

template <int kRowWarps, int kColumnWarps, int kBands, bool kFast, bool kPaired>
__device__ inline void linear(const LinearParams& p) {
    using Cut = Product<kRowWarps, kColumnWarps, kPaired, kBands>;
    using Out = Epilogue<kPaired, kBands>;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Cut::kStages * Cut::kStage >= Cut::kThreads / 32 * Out::kBytes);

    const Cut product{p, shared_address(memory)};
    typename Cut::Sums sums;
    product.template multiply_tiles<kFast>(sums);
    // Seldom: few steps mixed, so that it takes no more registers than what comes before it.
    if (kFast && any_lost(sums)) product.template multiply_tiles<false, kHasAsyncCopy ? 2 : 4>(sums);
    float* corner = reinterpret_cast<float*>(memory + thread_again() / 32 * Out::kBytes);
    const int2 at = product.place();
    Out{p}.run(corner, sums, at.x + Cut::warp_row(), at.y + Cut::warp_column() / (kPaired ? 2 : 1));
}

// Beside each kernel, what a block of this variant takes: threads, bytes of dynamic shared memory. The launcher reads
// it from the code that was loaded.
#define LINEAR(NAME, ROW_WARPS, COLUMN_WARPS, BANDS, FAST, PAIRED)                                              \
    extern "C" __device__ int NAME##_cut[2] = {ROW_WARPS * COLUMN_WARPS * 32,                                   \
                                               Product<ROW_WARPS, COLUMN_WARPS, PAIRED, BANDS>::kStages *       \
                                                   Product<ROW_WARPS, COLUMN_WARPS, PAIRED, BANDS>::kStage};    \
    extern "C" __global__ void __launch_bounds__(ROW_WARPS * COLUMN_WARPS * 32, 8 / (ROW_WARPS * COLUMN_WARPS)) \
        NAME(const __grid_constant__ LinearParams p) {                                                          \
        linear<ROW_WARPS, COLUMN_WARPS, BANDS, FAST, PAIRED>(p);                                                \
    }
#define LINEAR_TILE(ROWS, COLUMNS, ROW_WARPS, COLUMN_WARPS, BANDS, PRECISION, FAST)              \
    LINEAR(linear_##ROWS##x##COLUMNS##_##PRECISION, ROW_WARPS, COLUMN_WARPS, BANDS, FAST, false) \
    LINEAR(linear_pair_##ROWS##x##COLUMNS##_##PRECISION, ROW_WARPS, COLUMN_WARPS, BANDS, FAST, true)

LINEAR_TILE(192, 128, 2, 2, 6, precise, false)
LINEAR_TILE(192, 256, 2, 4, 6, precise, false)
LINEAR_TILE(128, 256, 2, 4, 4, precise, false)
LINEAR_TILE(128, 256, 2, 4, 4, fast, true)
LINEAR_TILE(128, 128, 2, 2, 4, precise, false)
LINEAR_TILE(128, 128, 2, 2, 4, fast, true)
LINEAR_TILE(64, 128, 1, 2, 4, precise, false)
LINEAR_TILE(64, 128, 1, 2, 4, fast, true)
