// dequantise: rows of packed blocks, as GGUF files have them, become fp16; of a table also chosen rows (embeddings).
//
//   out = round(scale * quant + low)      fp32, then fp16
//
// The same bits as numpy makes of the same formula in fp32. scale * quant is exact (packed_blocks.cuh), so the sum is
// the only rounding in fp32, and whether it is fused with the product changes nothing. Quants (times the integer of
// their group: Q3_K) of 8 bits at most that nothing is added to are multiplied in half: rounded once, too.
//
// Layout. packed: rows of `blocks` blocks, contiguous, from a multiple of 16 bytes on. out: contiguous. Without `index`
// all of a tensor is one row. An index that is not in the table makes a row of NaN.
//
// Bytes per element, in + out: 0.33 (Q2_K) 0.43 (Q3_K) 0.53 (IQ4_XS) 0.56 (Q4_0, Q4_K, IQ4_NL) 0.63 (Q4_1) 0.69 (Q5_0,
// Q5_K) 0.75 (Q5_1) 0.82 (Q6_K) 1.06 (Q8_0) + 2.
//
// Access. A block of threads takes 8192 elements. Their bytes come as they lie, 16 at a time, into shared memory, all
// loads of a thread in flight together: only there can blocks of 18, 34 or 210 bytes be addressed. Then a thread makes
// eight elements at a time, four times: its place in a block stays, and so do the shifts; a warp writes 512 adjacent
// bytes. Everything is read and written once.
//
// Bound. Instructions an element, counted in the machine code: about 2 to bring it, then 5 to 10 where halves are
// multiplied and 7 to 12 where floats are. A card can issue 41 in the time that it moves the 2.56 bytes of a Q4_K (RTX
// 2060 Super: 448 GB/s, 34 x 128 lanes, 1.65 GHz) or 21 (H200: 4 TB/s, 132 x 128, 1.98 GHz), so memory decides:
// in bench/turing nothing else is busy for a third of the time. Predicted: 90 % of the bandwidth of a copy. What
// is lost is the wait between a block's loads and its stores, as far as other blocks do not fill it.

#include "packed_blocks.cuh"
#include "stores.cuh"

// Mirrored by DequantiseParams in ops/quant/dequantise.py. Pointers first.
struct DequantiseParams {
    const unsigned char* packed;
    const i64* index;  // which rows of the table; or null
    __half* out;
    i64 rows;         // of the table
    i64 blocks;       // of a row
    unsigned chunks;  // of a row
};

constexpr int kThreads = 256;
constexpr int kPacksPerThread = 4;
constexpr int kStep = kThreads * kPack;             // elements that the threads make at a time
constexpr int kElements = kPacksPerThread * kStep;  // of a chunk

template <typename Type>
struct Dequantise {
    static constexpr int kBlocks = kElements / Type::kElements;
    static constexpr int kUnits =
        (kBlocks * Type::kBytes + 15) / 16 + 1;  // of 16 bytes; one more where rows start between
    static constexpr int kUnitsPerThread = (kUnits + kThreads - 1) / kThreads;

    // `count` bytes from `from` on, to as much behind a multiple of 16 as they lie behind one. Bytes before them in a
    // unit are the table's own; bytes behind may not exist.
    __device__ static void stage(unsigned char* to, Bytes from, int count) {
        const int before = static_cast<int>(reinterpret_cast<size_t>(from) & 15);
        const int end = before + count;
        const Bytes base = from - before;
        unsigned held[kUnitsPerThread][4];
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; i++) {
            const int at = (i * kThreads + int(threadIdx.x)) * 16;
            if (at + 16 <= end) {
                load_words<Reading::kStreaming>(held[i], base + at);
            } else if (at < end) {
                const unsigned short* pairs = reinterpret_cast<const unsigned short*>(base + at);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const unsigned pair = at + 2 * j < end ? pairs[j] : 0;
                    held[i][j / 2] = j % 2 ? held[i][j / 2] | pair << 16 : pair;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; i++) {
            const int at = (i * kThreads + int(threadIdx.x)) * 16;
            if (at < end) store_words(to + at, held[i]);
        }
    }

    __device__ static void convert(Bytes block, int e, Pack<__half>& out) {
        unsigned q[2];
        Type::quants(block, e, q);
        if constexpr (Type::kInHalf) {
            __half2 v[4];
            as_halves<Type>(q, v);
            const __half2 d = __half2half2(Type::d(block));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (Type::kElements > 32) {
                    const __half group = __int2half_rn(Type::group_scale(block, e));
                    v[i] = __hmul2(__half2half2(group), v[i]);
                }
                v[i] = __hmul2(d, v[i]);
                memcpy(&out.words[i], &v[i], 4);
            }
        } else {
            float v[8];
            as_floats<Type>(q, v);
            const float scale = Type::scale(block, e);
            float low = 0;
            if constexpr (Type::kHasLow) low = Type::low(block, e);
#pragma unroll
            for (float& x : v) x = Type::kHasLow ? fmaf(scale, x, low) : scale * x;
            pack(v, out);
        }
    }

    __device__ static void run(const DequantiseParams& p) {
        __shared__ __align__(16) unsigned char staged[kUnits * 16];
        const unsigned row = blockIdx.x / p.chunks, chunk = blockIdx.x - row * p.chunks;
        const i64 first = static_cast<i64>(chunk) * kBlocks;
        const int count = static_cast<int>(min(static_cast<i64>(kBlocks), p.blocks - first));
        const i64 source = p.index ? p.index[row] : 0;
        const bool exists = source >= 0 && source < p.rows;
        const int mine = int(threadIdx.x) * kPack, left = count * Type::kElements - mine;
        __half* out = p.out + (row * p.blocks + first) * Type::kElements + mine;
        if (!exists) {
            const unsigned nan[4] = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
            for (int v = 0; v < kPacksPerThread && v * kStep < left; v++) store_whole(out + v * kStep, nan);
            return;
        }
        const Bytes from = p.packed + (source * p.blocks + first) * Type::kBytes;
        stage(staged, from, count * Type::kBytes);
        __syncthreads();
        const Bytes block = staged + (reinterpret_cast<size_t>(from) & 15) + mine / Type::kElements * Type::kBytes;
#pragma unroll
        for (int v = 0; v < kPacksPerThread; v++) {
            if (v * kStep >= left) break;
            Pack<__half> result;
            convert(block + v * (kStep / Type::kElements * Type::kBytes), mine % Type::kElements, result);
            store_whole(out + v * kStep, result.words);
        }
    }
};

#define DEQUANTISE(TYPE)                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)              \
        dequantise_##TYPE(const __grid_constant__ DequantiseParams p) { \
        Dequantise<TYPE>::run(p);                                       \
    }

DEQUANTISE(Q4_0)
DEQUANTISE(Q4_1)
DEQUANTISE(Q5_0)
DEQUANTISE(Q5_1)
DEQUANTISE(Q8_0)
DEQUANTISE(Q2_K)
DEQUANTISE(Q3_K)
DEQUANTISE(Q4_K)
DEQUANTISE(Q5_K)
DEQUANTISE(Q6_K)
DEQUANTISE(IQ4_NL)
DEQUANTISE(IQ4_XS)
