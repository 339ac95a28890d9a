// decode_attention: one new token of each sequence over the keys that were kept. Text being written.
//
//   s[key]  = q . k[key] * scale                        keys 0 to *at, or all that there is room for
//   out     = sum over keys of softmax(s)[key] * v[key]
//
// Grouped heads: `group` heads of queries share a head of keys. A block has a head of keys and up to kG of its queries,
// so that each key is read once for all of them.
// More than four take another block, which finds the keys in L2.
//
// Layout. q: [batch, head, d] half. keys, values: [batch, place, key head, d] half with any strides but the last, rows
// at multiples of 16 bytes. There is room for more keys than there are; how many, the kernel reads at `at`, so a graph
// that holds the launch needs no change from token to token. out: [batch, head, d] half, contiguous.
//
// Split over keys. The grid's first dimension is the part of the keys: equal parts of those there are, whole rounds of
// a block. A part leaves the maximum of its scores, the sum of their exponentials and the weighted sum of values, as
// floats; decode_attention_join adds the parts up, in fixed order. The same input gives the same bits every time, but
// with another room for keys there may be other parts.
//
// Access. d / 8 adjacent lanes have a key: 16 bytes each, whole rows. A warp has 32 / (d / 8) keys at a time and four
// times as many on their way, of keys and of values; queries and sums stay in registers, of each lane its eight
// columns. A score is summed over the lanes of its key by shuffles. Each group of lanes keeps a maximum and sums of its
// own, which meet in shared memory when the keys are through.
//
// Bound. Bytes: 4 d for a key of a key head. Instructions of a lane for a key, with d of 128 and four queries: 33 of
// the product and 33 of the sum of values, 16 to unpack both, 8 shuffles and as many additions: about 60 of a warp for
// each key, which takes 15 clocks of a multiprocessor; its bytes take 29 on an H200 (3.9 TB/s) and 64 on an RTX 2060
// Super. Not measured yet.

#include "packs.cuh"

// Mirrored by DecodeParams in ops/attention/decode_attention.py. Pointers first.
struct DecodeParams {
    const __half* q;
    const __half* keys;
    const __half* values;
    const int* at;
    __half* out;
    float* part_sums;    // [batch, head, part, d]
    float2* part_heads;  // [batch, head, part]: maximum, in units of log2, and sum
    i64 keys_batch, keys_token, keys_head, values_batch, values_token, values_head;
    i64 q_batch, q_head;
    int heads, group, blocks_of_group, parts, d, room;
    float scale_log2;
};

constexpr int kThreads = 128;  // THREADS in ops/attention/decode_attention.py
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 4;  // keys of a group of lanes that are on their way

// The eight halves of four words.
__device__ inline void unpacked(const unsigned (&words)[4], float (&out)[kPack]) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) {
        const float2 pair = to_floats(words[i]);
        out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    }
}

// What a maximum begins at: below every finite score, and finite, because from itself -Inf gives NaN.
__device__ inline float lowest() {
    return __int_as_float(0xff7fffff);
}

// A weight that a sum gets when the maximum rises: of a sum that is empty still, none.
__device__ inline float rescaled(float before, float now) {
    return before == now ? 1.0f : exp2f(before - now);
}

template <int kD, int kG>
__device__ inline void over_keys(const DecodeParams& p) {
    constexpr int kLanes = kD / kPack, kGroups = 32 / kLanes, kRound = kGroups * kAhead;
    const float kNone = __int_as_float(0xff800000);  // -Inf
    __shared__ float sums[kWarps * kGroups][kG][kD];
    __shared__ float2 ends[kWarps * kGroups][kG];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane / kLanes, column = lane % kLanes * kPack;
    const int key_head = blockIdx.y / p.blocks_of_group, batch = blockIdx.z;
    const int first_query = blockIdx.y % p.blocks_of_group * kG;  // of the group
    const int head = key_head * p.group + first_query, heads_here = min(kG, p.group - first_query);

    const int count = min(*p.at, p.room - 1) + 1;
    const int each = (count + p.parts * kWarps * kRound - 1) / (p.parts * kWarps * kRound) * (kWarps * kRound);
    const i64 begin = static_cast<i64>(blockIdx.x) * each;
    const int first = static_cast<int>(begin < count ? begin : count), last = min(first + each, count);

    float q[kG][kPack], sum[kG][kPack], most[kG], total[kG];
#pragma unroll
    for (int g = 0; g < kG; g++) {
        const int of = head + min(g, heads_here - 1);
        unsigned words[4];
        load_words<Reading::kCached>(words, p.q + batch * p.q_batch + of * p.q_head + column);
        unpacked(words, q[g]);
#pragma unroll
        for (int i = 0; i < kPack; i++) q[g][i] *= p.scale_log2, sum[g][i] = 0;
        most[g] = lowest(), total[g] = 0;
    }

    const __half* keys = p.keys + batch * p.keys_batch + key_head * p.keys_head + column;
    const __half* values = p.values + batch * p.values_batch + key_head * p.values_head + column;
    for (int round = first + warp * kRound; round < last; round += kWarps * kRound) {
        unsigned k[kAhead][4], v[kAhead][4];
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const i64 place = min(round + a * kGroups + mine, last - 1);
            load_words<Reading::kStreaming>(k[a], keys + place * p.keys_token);
        }
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const i64 place = min(round + a * kGroups + mine, last - 1);
            load_words<Reading::kStreaming>(v[a], values + place * p.values_token);
        }
        float score[kAhead][kG];
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            float key[kPack];
            unpacked(k[a], key);
            const bool exists = round + a * kGroups + mine < last;
#pragma unroll
            for (int g = 0; g < kG; g++) {
                float s = 0;
#pragma unroll
                for (int i = 0; i < kPack; i++) s = fmaf(q[g][i], key[i], s);
#pragma unroll
                for (int offset = kLanes / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(0xffffffffu, s, offset);
                score[a][g] = exists ? s : kNone;
            }
        }
#pragma unroll
        for (int g = 0; g < kG; g++) {
            float now = most[g];
#pragma unroll
            for (int a = 0; a < kAhead; a++) now = fmaxf(now, score[a][g]);
            const float by = rescaled(most[g], now);
            most[g] = now, total[g] *= by;
#pragma unroll
            for (int i = 0; i < kPack; i++) sum[g][i] *= by;
#pragma unroll
            for (int a = 0; a < kAhead; a++) score[a][g] = exp2f(score[a][g] - now), total[g] += score[a][g];
        }
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            float value[kPack];
            unpacked(v[a], value);
            const bool exists = round + a * kGroups + mine < last;
#pragma unroll
            for (int g = 0; g < kG; g++) {
                const float weight = exists ? score[a][g] : 0.0f;
#pragma unroll
                for (int i = 0; i < kPack; i++) sum[g][i] = fmaf(weight, value[i], sum[g][i]);
            }
        }
    }

    const int group = warp * kGroups + mine;
#pragma unroll
    for (int g = 0; g < kG; g++) {
#pragma unroll
        for (int i = 0; i < kPack; i++) sums[group][g][column + i] = sum[g][i];
        if (column == 0) ends[group][g] = make_float2(most[g], total[g]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads_here * kD; i += kThreads) {
        const int g = i / kD, element = i % kD;
        float top = lowest(), all = 0, joined = 0;
#pragma unroll
        for (int one = 0; one < kWarps * kGroups; one++) top = fmaxf(top, ends[one][g].x);
#pragma unroll
        for (int one = 0; one < kWarps * kGroups; one++) {
            const float by = rescaled(ends[one][g].x, top);
            all = fmaf(by, ends[one][g].y, all);
            joined = fmaf(by, sums[one][g][element], joined);
        }
        const i64 part = (static_cast<i64>(batch) * p.heads + head + g) * p.parts + blockIdx.x;
        p.part_sums[part * kD + element] = joined;
        if (element == 0) p.part_heads[part] = make_float2(top, all);
    }
}

// A block for each head, a thread for each of its elements.
extern "C" __global__ void __launch_bounds__(256) decode_attention_join(const __grid_constant__ DecodeParams p) {
    const i64 head = static_cast<i64>(blockIdx.y) * p.heads + blockIdx.x;
    const float2* ends = p.part_heads + head * p.parts;
    const float* sums = p.part_sums + head * p.parts * p.d + threadIdx.x;
    float top = lowest(), all = 0, joined = 0;
    for (int part = 0; part < p.parts; part++) top = fmaxf(top, ends[part].x);
    for (int part = 0; part < p.parts; part++) {
        const float2 end = ends[part];
        const float by = rescaled(end.x, top);
        all = fmaf(by, end.y, all);
        joined = fmaf(by, sums[static_cast<i64>(part) * p.d], joined);
    }
    p.out[head * p.d + threadIdx.x] = __float2half_rn(joined / all);
}

#define DECODE_ATTENTION(D, G)                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                   \
        decode_attention_##D##_##G(const __grid_constant__ DecodeParams p) { \
        over_keys<D, G>(p);                                                  \
    }
#define DECODE_ATTENTION_OF(D) DECODE_ATTENTION(D, 1) DECODE_ATTENTION(D, 2) DECODE_ATTENTION(D, 4)

DECODE_ATTENTION_OF(64)
DECODE_ATTENTION_OF(128)
