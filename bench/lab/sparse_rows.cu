// out = x w^T of few rows of x, w in compressed rows (CSR): what a token is multiplied with, where a weight has zeros.
//
// Layout. x [m, k] half. w: for each of n rows its numbers and their columns, one after the other: values half, columns
// 16 bits (k is below 65536), so a number that is there takes four bytes, and half of a dense weight has to be zero
// before there is anything to win. Rows are filled up with zeros at column 0 to multiples of eight: a lane reads eight
// values and eight columns with two accesses of 16 bytes. starts [n + 1]: where a row begins, in eights.
//
// Access. x lies in shared memory, transposed, [k, kM]: the numbers that a column meets are adjacent. A warp has a row.
// Sums are float and meet by shuffles, in fixed order.

#include "../../kernels_cuda/src/packs.cuh"
#include "../../kernels_cuda/src/reduce.cuh"

// Mirrored by SPARSE in sparse.py. Pointers first.
struct SparseParams {
    const __half* x;
    const __half* values;
    const unsigned short* columns;
    const int* starts;
    __half* out;  // [m, n]
    int m, n, k, unused;
};

constexpr int kSparseThreads = 256;  // THREADS in sparse.py

template <int kM>
struct __align__(kM * 2) Column {
    __half of_row[kM];
};

template <int kM>
__device__ inline void sparse_rows(const SparseParams& p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Column<kM>* x = reinterpret_cast<Column<kM>*>(memory);
    for (int i = threadIdx.x; i < p.k; i += kSparseThreads) {
        Column<kM> column;
#pragma unroll
        for (int m = 0; m < kM; m++) column.of_row[m] = m < p.m ? p.x[static_cast<i64>(m) * p.k + i] : __half(0);
        x[i] = column;
    }
    __syncthreads();
    const int warps = kSparseThreads / 32, lane = threadIdx.x % 32;
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < p.n; row += gridDim.x * warps) {
        float sums[kM] = {};
        const int last = p.starts[row + 1];
#pragma unroll 2
        for (int eight = p.starts[row] + lane; eight < last; eight += 32) {
            Pack<__half> values;
            unsigned columns[4];
            load_pack<Reading::kStreaming>(values, p.values + static_cast<i64>(eight) * kPack);
            load_words<Reading::kStreaming>(columns, p.columns + static_cast<i64>(eight) * kPack);
            float v[kPack];
            unpack(values, v);
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                const Column<kM> column = x[columns[i / 2] >> (i % 2 * 16) & 0xffffu];
#pragma unroll
                for (int m = 0; m < kM; m++) sums[m] = fmaf(v[i], __half2float(column.of_row[m]), sums[m]);
            }
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const float sum = warp_sum(sums[m]);
            if (lane == 0 && m < p.m) p.out[static_cast<i64>(m) * p.n + row] = __float2half_rn(sum);
        }
    }
}

#define SPARSE_ROWS(M)                                            \
    extern "C" __global__ void __launch_bounds__(kSparseThreads)  \
        sparse_rows_##M(const __grid_constant__ SparseParams p) { \
        sparse_rows<M>(p);                                        \
    }
SPARSE_ROWS(1)
SPARSE_ROWS(2)
SPARSE_ROWS(4)
SPARSE_ROWS(8)
