// sparse_routing: which blocks of keys a block of queries visits.
//
//   means    mean[b] = (sum of x[t] over the tokens t of block b) / how many there are: of queries, keys and values
//   choice   score[i, j] = <mean_q[i], mean_k[j]>. Row i visits the blocks within `near` of the diagonal, the first
//   `sinks`,
//            and the last block if it is shorter than the others, as no mean could stand for it; then its best, until
//            they are `most`; and those more than `deviations` standard deviations above the row's mean score
//
// Equal scores: the earlier block. A NaN ranks with what is visited in any case, so what is broken shows. The lists
// come out in order of the blocks, which neighbouring query blocks then read from L2 together, and as bits, for
// attention's tail. The scale of the scores is positive and would change nothing.
//
// Layout. x: [batch, token, head, d] halves, any strides, a head's d elements adjacent and 16-byte aligned. Means:
// [batch, head, block, d] halves. Lists: [batch, head, query block, width] int32, counts [batch, head, query block],
// bits [batch, head, query block, words], one for each 32 blocks and an even number of them, as attention looks at 64
// blocks at a time.
//
// Access. Means: a warp a block, 16 bytes a lane; x is read once. Choice: a block of threads per query block; keys'
// means, d * 2 bytes each, from L2. The last score that is taken is found bit by bit, from the top: 32 times it is
// counted how many scores are no smaller.

#include "half.cuh"
#include "vector.cuh"

struct BlockMeansParams {
    const __half* x;
    __half* means;
    i64 x_batch, x_token, x_head;
    int tokens, size, blocks, heads;
};

template <int kD>
__device__ inline void block_means(const BlockMeansParams& p) {
    constexpr int kUsed = kD / 8, kRows = 32 / (kUsed > 8 ? 16 : 8);  // lanes of a row; rows at a time
    constexpr int kLanes = 32 / kRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block = blockIdx.x * (blockDim.x / 32) + warp;
    if (block >= p.blocks) return;
    const int first = block * p.size, end = min(first + p.size, p.tokens);
    const __half* head = p.x + blockIdx.z * p.x_batch + blockIdx.y * p.x_head;
    const int column = lane % kLanes;
    float sum[kPack] = {};
    if (column < kUsed) {
        for (int token = first + lane / kLanes; token < end; token += kRows) {
            Pack<__half> pack;
            load_pack<Reading::kCached>(pack, head + token * p.x_token + column * kPack);
            float x[kPack];
            unpack(pack, x);
#pragma unroll
            for (int i = 0; i < kPack; i++) sum[i] += x[i];
        }
    }
#pragma unroll
    for (int apart = kLanes; apart < 32; apart *= 2) {
#pragma unroll
        for (int i = 0; i < kPack; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], apart);
    }
    if (lane >= kUsed) return;
    const float share = end > first ? 1.0f / (end - first) : 0.0f;
    Pack<__half> mean;
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) mean.words[i] = to_halves(sum[2 * i] * share, sum[2 * i + 1] * share);
    store_pack(p.means + ((i64(blockIdx.z) * p.heads + blockIdx.y) * p.blocks + block) * kD + lane * kPack, mean);
}

struct ChooseParams {
    const __half* q;  // means [batch, head, query block, d]
    const __half* k;  // [batch, key head, block, d]
    int* list;
    int* counts;
    unsigned* bits;
    int d, blocks, query_blocks, heads, heads_per_key_head;
    int width, words;  // of a row of the list, and of the bits
    int most, near, sinks;
    int always_last;  // whether the last block is shorter
    int by_deviation;
    float deviations;
    float per_query;  // key blocks to a query block: where the diagonal is
};

constexpr int kChoosers = 256;

constexpr unsigned kFirst = ~0u;  // ranks above every number

// From how it compares as a float to how it compares as an unsigned; NaN first of all.
__device__ inline unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return kFirst;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sum over a block of threads, in a fixed order.
__device__ inline float block_sum(float x) {
    __shared__ float of_warp[kChoosers / 32];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kChoosers / 32; i++) sum += of_warp[i];
    return sum;
}

// How many scores are no smaller. For all threads of a block together.
__device__ inline int count_of(const unsigned* scores, int blocks, unsigned least) {
    int count = 0;
    for (int first = 0; first < blocks; first += kChoosers) {
        const int j = first + threadIdx.x;
        count += __syncthreads_count(j < blocks && scores[j] >= least);
    }
    return count;
}

extern "C" __global__ void __launch_bounds__(kChoosers) choose_blocks(const __grid_constant__ ChooseParams p) {
    extern __shared__ unsigned rank_of[];  // [blocks] scores to sort by, then the row's bits
    unsigned* bits = rank_of + p.blocks;
    const i64 row = (i64(blockIdx.z) * p.heads + blockIdx.y) * p.query_blocks + blockIdx.x;
    const i64 key_heads = p.heads / p.heads_per_key_head;
    const __half* k = p.k + (blockIdx.z * key_heads + blockIdx.y / p.heads_per_key_head) * p.blocks * p.d;
    const __half* q = p.q + row * p.d;
    for (int i = threadIdx.x; i < p.words; i += kChoosers) bits[i] = 0;
    // A quarter of a warp per block: 8 lanes of 16 bytes. All lanes make every round, for the sums between them.
    constexpr int kAtOnce = kChoosers / 8;
    const int eighth = threadIdx.x % 8;
    float sum = 0, squares = 0;
    for (int first = 0; first < p.blocks; first += kAtOnce) {
        const int j = first + threadIdx.x / 8;
        float score = 0;
        if (j < p.blocks) {
            for (int c = eighth * kPack; c < p.d; c += 8 * kPack) {
                Pack<__half> a, b;
                load_pack<Reading::kCached>(a, q + c);
                load_pack<Reading::kCached>(b, k + i64(j) * p.d + c);
                float x[kPack], y[kPack];
                unpack(a, x), unpack(b, y);
#pragma unroll
                for (int i = 0; i < kPack; i++) score = fmaf(x[i], y[i], score);
            }
        }
#pragma unroll
        for (int apart = 1; apart < 8; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
        if (eighth == 0 && j < p.blocks) {
            rank_of[j] = ordered(score);
            sum += score;
            squares = fmaf(score, score, squares);
        }
    }
    unsigned bar = kFirst;  // what a score has to exceed, as it is sorted
    if (p.by_deviation) {
        const float mean = block_sum(sum) / p.blocks;
        const float variance = fmaxf(block_sum(squares) / p.blocks - mean * mean, 0.0f);
        bar = ordered(fmaf(p.deviations, sqrtf(variance), mean));
    }
    const float from = blockIdx.x * p.per_query, to = (blockIdx.x + 1) * p.per_query;
    __syncthreads();
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
        const bool beside = j + 1 + p.near > from && j - p.near < to;
        if (beside || j < p.sinks || (p.always_last && j == p.blocks - 1)) {
            rank_of[j] = kFirst;
            atomicOr(&bits[j / 32], 1u << j % 32);
        }
    }
    __syncthreads();
    // The largest value that at least `most` scores reach: the last of them that is taken.
    unsigned last = 0;
    const int most = min(p.most, p.blocks);
    for (unsigned bit = 1u << 31; bit != 0; bit >>= 1) {
        if (count_of(rank_of, p.blocks, last | bit) >= most) last |= bit;
    }
    const int above = last == kFirst ? 0 : count_of(rank_of, p.blocks, last + 1);
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
        const unsigned mine = rank_of[j];
        bool best = most > 0 && mine > last;
        if (most > 0 && mine == last) {  // of equals the earlier ones
            int before = above;
            for (int i = 0; i < j && before < most; i++) before += rank_of[i] == last;
            best = before < most;
        }
        if (best || mine > bar) atomicOr(&bits[j / 32], 1u << j % 32);
    }
    __syncthreads();
    // Places in the list: how many bits are set before.
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
        if (!(bits[j / 32] >> j % 32 & 1)) continue;
        int place = __popc(bits[j / 32] & ((1u << j % 32) - 1));
        for (int i = 0; i < j / 32; i++) place += __popc(bits[i]);
        p.list[row * p.width + place] = j;
    }
    for (int i = threadIdx.x; i < p.words; i += kChoosers) p.bits[row * p.words + i] = bits[i];
    if (threadIdx.x == 0) {
        int total = 0;
        for (int i = 0; i < p.words; i++) total += __popc(bits[i]);
        p.counts[row] = total;
    }
}

#define BLOCK_MEANS(D)                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) block_means_##D(const __grid_constant__ BlockMeansParams p) { \
        block_means<D>(p);                                                                                          \
    }

BLOCK_MEANS(64)
BLOCK_MEANS(96)
BLOCK_MEANS(128)
