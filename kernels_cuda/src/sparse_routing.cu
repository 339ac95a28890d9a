// sparse_routing: which blocks of keys a block of queries visits.
//
//   means    mean[b] = (sum of x[t] over the tokens t of block b) / how many there are: of queries, keys and values
//   choice   score[i, j] = <mean_q[i], mean_k[j]>. Row i visits the blocks within `near` of the diagonal, the first
//   `sinks`,
//            and the last block if it is shorter than the others, as no mean could stand for it; then its best, until
//            they are `most`; and those more than `deviations` standard deviations above the row's mean score
//   weight   weight[i, j] = sum over the halves h of block i: share_h * n_j exp(scale <mean_q[h], mean_k[j]>) / its sum
//            over j, n_j: tokens of block j, share_h: of the block's queries. By weight a row's best are those with
//            most of it, and they go on until what is left has no more than `left`
//
// A block of queries is two tiles of a video: the weights of both are added, because the mean of both would look at
// what lies between them.
//
// Equals: the earlier block. A NaN ranks with what is visited in any case, so what is broken shows; by weight it
// is. The lists come out in order of the blocks, which neighbouring query blocks then read from L2 together, and as
// bits, for attention's tail. The scale is positive: it matters for weights alone.
//
// Layout. x: [batch, token, head, d] halves or bf16, any strides, a head's d elements adjacent and 16-byte aligned.
// Means: [batch, head, block, d] of the same type. Lists: [batch, head, query block, width] int32, counts [batch, head,
// query block], bits [batch, head, query block, words], one for each 32 blocks and an even number of them, as attention
// looks at 64 blocks at a time.
//
// Access. Means: a warp a block, 16 bytes a lane; x is read once. Choice: a block of threads per query block; keys'
// means, d * 2 bytes each, from L2. The last score that is taken is found bit by bit, from the top: 32 times it is
// counted how many scores are no smaller, and by weight what those weigh.

#include "half.cuh"
#include "vector.cuh"

struct BlockMeansParams {
    const __half* x;
    __half* means;
    i64 x_batch, x_token, x_head;
    int tokens, size, blocks, heads;
    int is_bf16;  // x and means: bf16, not half
};

// Eight elements of either type, as they lie in memory.
__device__ inline void unpack_as(const Pack<__half>& pack, float (&x)[kPack], int is_bf16) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) {
        const float2 pair = is_bf16 ? two_floats<__nv_bfloat16>(pack.words[i]) : to_floats(pack.words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

template <int kD>
__device__ inline void block_means(const BlockMeansParams& p) {
    constexpr int kUsed = kD / 8, kLanes = kUsed > 16 ? 32 : kUsed > 8 ? 16 : 8;  // of a row
    constexpr int kRows = 32 / kLanes;                                            // at a time
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
            unpack_as(pack, x, p.is_bf16);
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
    for (int i = 0; i < kPack / 2; i++) {
        const float low = sum[2 * i] * share, high = sum[2 * i + 1] * share;
        mean.words[i] = p.is_bf16 ? to_bf16s(low, high) : to_halves(low, high);
    }
    store_pack(p.means + ((i64(blockIdx.z) * p.heads + blockIdx.y) * p.blocks + block) * kD + lane * kPack, mean);
}

struct ChooseParams {
    const __half* q;  // means [batch, head, query block, d], or by weight of its halves
    const __half* k;  // [batch, key head, block, d]
    int* list;
    int* counts;
    unsigned* bits;
    int d, blocks, query_blocks, heads, heads_per_key_head;
    int width, words;  // of a row of the list, and of the bits
    int most, near, sinks;
    int always_last;  // whether the last block is shorter
    int by_deviation;
    int queries, q_means;  // tokens; means of a head
    int last_tokens;       // of the last block
    int is_bf16;           // means: bf16, not half
    float deviations;
    float per_query;   // key blocks to a query block: where the diagonal is
    float scale_log2;  // of the scores, * log2(e); positive
    float left;        // share of a row's weight that may be left
};

constexpr int kChoosers = 256, kKeyBlock = 64;

constexpr unsigned kFirst = ~0u;  // ranks above every number

// From how it compares as a float to how it compares as an unsigned; NaN first of all.
__device__ inline unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return kFirst;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Back to the float.
__device__ inline float number_of(unsigned rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
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

// The largest over a block of threads.
__device__ inline unsigned block_max(unsigned x) {
    __shared__ unsigned greatest;
    if (threadIdx.x == 0) greatest = 0;
    __syncthreads();
    atomicMax(&greatest, x);
    __syncthreads();
    return greatest;
}

// From `to`(block, score): the products of these queries' mean with all means of keys. A quarter of a warp per block: 8
// lanes of 16 bytes. All lanes make every round, for the sums between them.
template <typename F>
__device__ inline void each_score(const ChooseParams& p, const __half* q, const __half* k, F to) {
    constexpr int kAtOnce = kChoosers / 8;
    const int eighth = threadIdx.x % 8;
    for (int first = 0; first < p.blocks; first += kAtOnce) {
        const int j = first + threadIdx.x / 8;
        float score = 0;
        if (j < p.blocks) {
            for (int c = eighth * kPack; c < p.d; c += 8 * kPack) {
                Pack<__half> a, b;
                load_pack<Reading::kCached>(a, q + c);
                load_pack<Reading::kCached>(b, k + i64(j) * p.d + c);
                float x[kPack], y[kPack];
                unpack_as(a, x, p.is_bf16), unpack_as(b, y, p.is_bf16);
#pragma unroll
                for (int i = 0; i < kPack; i++) score = fmaf(x[i], y[i], score);
            }
        }
#pragma unroll
        for (int apart = 1; apart < 8; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
        if (eighth == 0 && j < p.blocks) to(j, score);
    }
}

// Ranks by weight. q: means of the head's halves of query blocks; score_of: room for a half's scores.
__device__ inline void weigh(const ChooseParams& p, const __half* q, const __half* k, unsigned* rank_of,
                             float* score_of) {
    constexpr int kHalf = 64;
    const int first = blockIdx.x * 2;
    const int queries = min(p.queries - first * kHalf, 2 * kHalf);
#pragma unroll 1
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) rank_of[j] = 0;  // the weight so far, as bits
#pragma unroll 1
    for (int half = 0; half < 2 && half * kHalf < queries; half++) {
        const float share = float(min(queries - half * kHalf, kHalf)) / queries;
        each_score(p, q + i64(first + half) * p.d, k, [&](int j, float score) { score_of[j] = score; });
        __syncthreads();
        unsigned best = 0;
#pragma unroll 1
        for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
            if (score_of[j] == score_of[j]) best = max(best, ordered(score_of[j]));
        }
        const float top = number_of(block_max(best));
        const auto beside = [&](int j) {  // a whole block with the best score as 1
            const float score = score_of[j];
            const float weight = score == top ? 1.0f : exp2f((score - top) * p.scale_log2);
            return j == p.blocks - 1 ? weight * p.last_tokens / kKeyBlock : weight;
        };
        float sum = 0;
#pragma unroll 1
        for (int j = threadIdx.x; j < p.blocks; j += kChoosers) sum += score_of[j] == score_of[j] ? beside(j) : 0.0f;
        const float part = __fdividef(share, block_sum(sum));
#pragma unroll 1
        for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
            rank_of[j] = __float_as_uint(fmaf(beside(j), part, __uint_as_float(rank_of[j])));
        }
        __syncthreads();  // before the other half's scores take their place
    }
#pragma unroll 1
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) rank_of[j] = ordered(__uint_as_float(rank_of[j]));
}

// Of ranks by weight. What is visited in any case has none.
__device__ inline float weight_of(unsigned rank) {
    return rank == kFirst ? 0.0f : number_of(rank);
}

// The weight of all blocks with a rank of at least that. For all threads of a block together.
__device__ inline float weight_from(const unsigned* ranks, int blocks, unsigned least) {
    float sum = 0;
#pragma unroll 1
    for (int j = threadIdx.x; j < blocks; j += kChoosers) sum += ranks[j] >= least ? weight_of(ranks[j]) : 0.0f;
    return block_sum(sum);
}

// How many blocks, with those that are visited in any case, so that the best others have weight `enough`. For all
// threads of a block together.
__device__ inline int wanted_by_weight(const unsigned* ranks, int blocks, float enough) {
    if (!(enough > 0)) return count_of(ranks, blocks, kFirst);
    unsigned last = 0;  // the largest rank from which on that much is there
#pragma unroll 1
    for (unsigned bit = 1u << 31; bit != 0; bit >>= 1) {
        if (weight_from(ranks, blocks, last | bit) >= enough) last |= bit;
    }
    if (last == 0) return blocks;  // rounding: not even all are enough
    // Of equals as many as it takes.
    const float missing = enough - weight_from(ranks, blocks, last + 1);
    const int above = count_of(ranks, blocks, last + 1), equals = count_of(ranks, blocks, last) - above;
    return above + min(max(int(ceilf(missing / weight_of(last))), 1), equals);
}

template <bool kByWeight>
__device__ inline void choose(const ChooseParams& p) {
    // [blocks] what to sort by, then the row's bits, and by weight room for scores.
    extern __shared__ unsigned rank_of[];
    unsigned* bits = rank_of + p.blocks;
    const i64 head = i64(blockIdx.z) * p.heads + blockIdx.y, row = head * p.query_blocks + blockIdx.x;
    const i64 key_heads = p.heads / p.heads_per_key_head;
    const __half* k = p.k + (blockIdx.z * key_heads + blockIdx.y / p.heads_per_key_head) * p.blocks * p.d;
    for (int i = threadIdx.x; i < p.words; i += kChoosers) bits[i] = 0;
    float sum = 0, squares = 0;
    if constexpr (kByWeight) {
        weigh(p, p.q + head * p.q_means * p.d, k, rank_of, reinterpret_cast<float*>(bits + p.words));
    } else {
        each_score(p, p.q + row * p.d, k, [&](int j, float score) {
            rank_of[j] = ordered(score);
            sum += score;
            squares = fmaf(score, score, squares);
        });
    }
    unsigned bar = kFirst;  // what a score has to exceed, as it is sorted
    if (!kByWeight && p.by_deviation) {
        const float mean = block_sum(sum) / p.blocks;
        const float variance = fmaxf(block_sum(squares) / p.blocks - mean * mean, 0.0f);
        bar = ordered(fmaf(p.deviations, sqrtf(variance), mean));
    }
    const float from = blockIdx.x * p.per_query, to = (blockIdx.x + 1) * p.per_query;
    __syncthreads();
    const float enough = kByWeight ? weight_from(rank_of, p.blocks, 0) * (1 - p.left) : 0.0f;
    float always = 0;  // the weight of what is visited in any case
    for (int j = threadIdx.x; j < p.blocks; j += kChoosers) {
        const bool beside = j + 1 + p.near > from && j - p.near < to;
        if (beside || j < p.sinks || (p.always_last && j == p.blocks - 1)) {
            if (kByWeight) always += weight_of(rank_of[j]);
            rank_of[j] = kFirst;
            atomicOr(&bits[j / 32], 1u << j % 32);
        }
    }
    __syncthreads();
    int most = min(p.most, p.blocks);
    if (kByWeight) most = max(most, wanted_by_weight(rank_of, p.blocks, enough - block_sum(always)));
    // The largest value that at least `most` scores reach: the last of them that is taken.
    unsigned last = 0;
#pragma unroll 1
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
        if (place < p.width) p.list[row * p.width + place] = j;
    }
    for (int i = threadIdx.x; i < p.words; i += kChoosers) p.bits[row * p.words + i] = bits[i];
    if (threadIdx.x == 0) {
        int total = 0;
        for (int i = 0; i < p.words; i++) total += __popc(bits[i]);
        p.counts[row] = min(total, p.width);
    }
}

extern "C" __global__ void __launch_bounds__(kChoosers) choose_blocks(const __grid_constant__ ChooseParams p) {
    choose<false>(p);
}
extern "C" __global__ void __launch_bounds__(kChoosers) choose_by_weight(const __grid_constant__ ChooseParams p) {
    choose<true>(p);
}

#define BLOCK_MEANS(D)                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) block_means_##D(const __grid_constant__ BlockMeansParams p) { \
        block_means<D>(p);                                                                                          \
    }

BLOCK_MEANS(64)
BLOCK_MEANS(96)
BLOCK_MEANS(128)
BLOCK_MEANS(256)
