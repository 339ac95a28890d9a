// rows_to_int8: the rows of a matrix as 8-bit numbers, each row with a scale of its own: what linear_int8 multiplies.
//
//   x' = x H                     H: Hadamard matrices along the row, over their root (rotation.cuh); or x as it is
//   scale = max |x'| / 127       of the row
//   x8 = round(x' / scale)
//
// Turning a row of activations and all rows of a weight alike keeps their products, and makes the numbers of a row
// alike in size: the few columns far outside the others, as there are behind a GELU, would else decide the scale, and
// all others be rounded to nearly nothing.
//
// Layout. x [batch, row, k] halves, rows anywhere at multiples of 16 bytes; k is a multiple of 8 and of the rotation's
// group, and at most 32768. x8 [rows, k] bytes and scales [rows] floats, contiguous.
//
// A row that holds an Inf or a NaN has the scale NaN, and zeros. A row of zeros has the scale 1.
//
// Access. A block has a row, a thread up to four packs of eight of it, which it loads before it turns them; they stay
// in registers as floats until the row's scale is known. 2 bytes of each element are read and 1 is written, once.

#include "rotation.cuh"
#include "stores.cuh"

struct RowsToInt8Params {
    const __half* x;
    signed char* x8;
    float* scales;
    i64 x_batch, x_row;
    int k;
    int group;  // of the rotation; 0: none
};

// The block's largest, by its bits: those of NaN are above those of any number.
template <int kWarps>
__device__ inline unsigned block_max(unsigned most) {
    __shared__ unsigned of_warp[kWarps];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    most = lane < blockDim.x / 32 ? of_warp[lane] : 0;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
    return most;
}

template <int V, int kThreads>
__device__ inline void rows_to_int8(const RowsToInt8Params& p) {
    const Rotation rotation{p.group};
    const __half* row = p.x + blockIdx.y * p.x_batch + blockIdx.x * p.x_row;
    Pack<__half> packs[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int column = (v * int(blockDim.x) + rotation.place(int(threadIdx.x))) * kPack;
        zero(packs[v]);
        if (column < p.k) load_pack<Reading::kStreaming>(packs[v], row + column);
    }
    float x[V][kPack];
    unsigned most = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        unpack(packs[v], x[v]);
        rotation.turn(x[v]);
#pragma unroll
        for (int i = 0; i < kPack; i++) most = max(most, __float_as_uint(x[v][i]) & 0x7fffffffu);
    }
    most = block_max<kThreads / 32>(most);
    // What is over the root of the rotation's group goes into the scale.
    const bool finite = most < 0x7f800000u;
    const float top = most == 0 ? 127.0f / rotation.root() : __uint_as_float(most);
    const float inverse = finite ? 127.0f / top : 0.0f;
    const i64 number = i64(blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) {
        p.scales[number] = finite ? top * (rotation.root() / 127.0f) : __uint_as_float(0x7fc00000u);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int column = (v * int(blockDim.x) + int(threadIdx.x)) * kPack;
        if (column >= p.k) continue;
        unsigned words[2] = {};
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            words[i / 4] |= (unsigned(__float2int_rn(x[v][i] * inverse)) & 0xffu) << (i % 4 * 8);
        }
        store_whole(p.x8 + number * p.k + column, words);
    }
}

// V: packs of a thread.
#define ROWS_TO_INT8(V, THREADS)                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)              \
        rows_to_int8_##V(const __grid_constant__ RowsToInt8Params p) { \
        rows_to_int8<V, THREADS>(p);                                   \
    }

ROWS_TO_INT8(1, 256)
ROWS_TO_INT8(2, 512)
ROWS_TO_INT8(4, 1024)
