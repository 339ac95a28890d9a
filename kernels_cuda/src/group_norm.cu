// group_norm_silu, instance_norm: normalisation over all pixels of a group of channels. InstanceNorm: groups of one.
//
//   out = act((x - mean) * rsqrt(var + eps) * weight + bias)      mean and var per (batch, group); act: none, SiLU,
//   ReLU
//
// Layout. Channels-first: [batch, C, pixels], pixels adjacent, any stride between channels. Channels-last: [batch,
// pixels, C], channels adjacent, any stride between pixels. out has x's layout.
//
// Bytes per element: 2 read for the statistics, 2 read and 2 written for the result. A group may be as long as a video,
// so nothing can be normalised before all of it was seen. The last launch works backwards: what the first one read last
// is still in the L2, and is met first.
//
// Three launches, none of which depends on timing, so the same input gives the same bits. Each may begin while the one
// before it ends (ahead.cuh): *_apply then has asked for its first pixels before there is anything to multiply them by.
//   *_stats   each block reduces one chunk to (mean, M2), M2 = sum of (x - mean)^2. Within what a thread holds in
//   registers
//             both are taken exactly (the mean first); parts are joined by Chan's formula. No large sums of squares are
//             ever subtracted from each other
//   merge     one block per group joins its chunks in a fixed order and writes, per channel, the mean and the factor
//             rsqrt(var + eps) * weight
//   *_apply   the result
//
// A picture that passes in parts takes two calls per part: *_stats and `moments`, which joins like merge but leaves the
// group's mean and variance; then, with those of all parts together, `given`, which makes coefficients of them, and
// *_apply.
//
// Access. Channels-first: a chunk is 2048 packs of 8 pixels, eight per thread, that run on over the channels of the
// group. Channels-last: a block is `lanes` packs of channels wide and walks down the pixels, eight at a time in flight;
// a thread keeps to its eight channels. `*_any`: any alignment, any size; the packs are gathered element by element.

#include "activation.cuh"
#include "ahead.cuh"
#include "packs.cuh"
#include "reduce.cuh"

// Mirrored by GroupNormParams in ops/group_norm.py. Pointers first.
struct GroupNormParams {
    const void* x;
    const void* weight;
    const void* bias;
    float2* parts;         // mean and M2 of each chunk: [batch, group, chunk], or channels-last [batch, chunk, C]
    float2* coefficients;  // mean and factor: [batch, C]
    void* out;             // `moments`: floats, mean and variance, [batch, group, 2]
    const float2* given;   // mean and variance of each group, [batch, group]; for `given` alone
    i64 x_batch, x_step;   // strides, in elements; the step is from channel to channel, or from pixel to pixel
    i64 out_batch, out_step;
    i64 batches, pixels;
    i64 packs_per_plane;   // channels-first: packs of pixels in one channel
    i64 chunks;            // channels-first: per group; channels-last: per batch
    i64 pixels_per_chunk;  // channels-last
    int channels, groups, channels_per_group;
    int lanes, column_blocks;  // channels-last: packs of channels across a block, and blocks that cover all channels
    int is_last;
    float eps;
    int weight_is_float, bias_is_float;
    int activation;
};

constexpr int kThreads = 256;
constexpr int kMergeThreads = 1024;
constexpr int kHeld = 4;       // packs a thread has in flight
constexpr int kHeldFirst = 8;  // the same, for the statistics of channels-first
// The same, for channels-last, whose loops wait at each turn for all that they asked for: with four packs a
// multiprocessor asks for 49 KB at a time and has nothing under way while it computes. What is gathered element by
// element would spill.
template <bool kWhole>
constexpr int kHeldLast = kWhole ? 8 : kHeld;

// Count, mean and M2 of some numbers.
struct Moments {
    float n, mean, m2;

    // Chan et al.: the moments of both together.
    __device__ void join(float n2, float mean2, float m22) {
        if (n2 == 0) return;
        const float total = n + n2, delta = mean2 - mean, share = n2 / total;
        mean = fmaf(delta, share, mean);
        m2 += m22 + delta * delta * n * share;
        n = total;
    }
};

template <bool kWhole>
__device__ inline void load(Pack<__half>& pack, const __half* p, int count) {
    zero(pack);
    if (kWhole) {
        if (count) load_pack<Reading::kStreaming>(pack, p);
    } else {
        load_ragged(pack, p, count);
    }
}

template <bool kWhole>
__device__ inline void store_part(__half* p, const Pack<__half>& pack, int count) {
    if (kWhole) {
        store_whole(p, pack);
    } else {
        store_ragged(p, pack, count);
    }
}

__device__ inline int clamp_to_pack(i64 left) {
    return left >= kPack ? kPack : left > 0 ? static_cast<int>(left) : 0;
}

// ------------------------------------------------------------------------------------------------------ channels first

// How many elements of a group stand before one of its packs: the last pack of a plane may be short.
__device__ inline i64 elements_before(const GroupNormParams& p, i64 pack) {
    const i64 plane = quotient(pack, p.packs_per_plane);
    return plane * p.pixels + min((pack - plane * p.packs_per_plane) * kPack, p.pixels);
}

__device__ inline i64 elements_of_chunk(const GroupNormParams& p, i64 chunk) {
    const i64 packs = p.channels_per_group * p.packs_per_plane, first = chunk * kThreads * kHeldFirst;
    return elements_before(p, min(first + kThreads * kHeldFirst, packs)) - elements_before(p, first);
}

// A pack's place: its plane, and its number within. Going on to the next of a thread takes no division where planes are
// long.
struct PlanePack {
    i64 plane, at;

    __device__ PlanePack(i64 index, i64 packs_per_plane)
        : plane(quotient(index, packs_per_plane)), at(index - plane * packs_per_plane) {}

    __device__ void advance(i64 packs_per_plane) {
        at += kThreads;
        if (at < packs_per_plane) return;
        const i64 planes = packs_per_plane >= kThreads ? 1 : quotient(at, packs_per_plane);
        plane += planes, at -= planes * packs_per_plane;
    }
};

template <bool kWhole>
__device__ void first_stats(const GroupNormParams& p) {
    __shared__ BlockSum<kThreads / 32>::Slots slots;
    BlockSum<kThreads / 32> block_sum(slots);
    next_may_begin();
    const i64 of = quotient(blockIdx.x, p.chunks), chunk = blockIdx.x - of * p.chunks;
    const i64 batch = quotient(of, p.groups), group = of - batch * p.groups;
    const i64 packs = p.channels_per_group * p.packs_per_plane;
    const __half* x = static_cast<const __half*>(p.x) + batch * p.x_batch + group * p.channels_per_group * p.x_step;

    Pack<__half> held[kHeldFirst];
    int count[kHeldFirst];
    i64 index = chunk * kHeldFirst * kThreads + threadIdx.x;
    PlanePack place(index, p.packs_per_plane);
#pragma unroll
    for (int v = 0; v < kHeldFirst; v++) {
        count[v] = index < packs ? clamp_to_pack(p.pixels - place.at * kPack) : 0;
        load<kWhole>(held[v], x + place.plane * p.x_step + place.at * kPack, count[v]);
        index += kThreads;
        place.advance(p.packs_per_plane);
    }
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kHeldFirst; v++) {
        float a[kPack];
        unpack(held[v], a);
#pragma unroll
        for (int i = 0; i < kPack; i++) sum += a[i];  // zero beyond `count`
    }
    const float mean = block_sum(sum) / static_cast<float>(elements_of_chunk(p, chunk));
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kHeldFirst; v++) {
        float a[kPack];
        if (kWhole && count[v] == 0) break;
        forget(held[v]);
        unpack(held[v], a);
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            if (kWhole || i < count[v]) squares = fmaf(a[i] - mean, a[i] - mean, squares);
        }
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) p.parts[blockIdx.x] = make_float2(mean, squares);
}

template <bool kWhole>
__device__ void first_apply(const GroupNormParams& p) {
    const i64 packs = p.batches * p.channels * p.packs_per_plane;
    const i64 block = gridDim.x - 1 - blockIdx.x;  // backwards
    Pack<__half> held[kHeld];
    i64 plane[kHeld], channel[kHeld], to[kHeld];
    int count[kHeld];
    i64 index = block * kHeld * kThreads + threadIdx.x;
    PlanePack place(index, p.packs_per_plane);
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
        plane[v] = place.plane;
        const i64 at = place.at * kPack;
        const i64 batch = quotient(plane[v], p.channels);
        channel[v] = plane[v] - batch * p.channels;
        count[v] = index < packs ? clamp_to_pack(p.pixels - at) : 0;
        load<kWhole>(held[v], static_cast<const __half*>(p.x) + batch * p.x_batch + channel[v] * p.x_step + at,
                     count[v]);
        to[v] = batch * p.out_batch + channel[v] * p.out_step + at;
        index += kThreads;
        place.advance(p.packs_per_plane);
    }
    wait_for_last();
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
        if (count[v] == 0) continue;
        const float2 by = p.coefficients[plane[v]];
        const float plus = p.bias ? load_element(p.bias, channel[v], p.bias_is_float) : 0.0f;
        float a[kPack];
        unpack(held[v], a);
#pragma unroll
        for (int i = 0; i < kPack; i++) a[i] = fmaf(a[i] - by.x, by.y, plus);
        activate(a, p.activation);
        Pack<__half> result;
        pack(a, result);
        store_part<kWhole>(static_cast<__half*>(p.out) + to[v], result, count[v]);
    }
}

// ------------------------------------------------------------------------------------------------------- channels last

// The part of a tensor that a block works on: a chunk of the pixels of a batch, `lanes` packs of channels wide.
struct Column {
    i64 batch, chunk, first, last;  // pixels
    int channel, count;             // of this thread
    int row, rows;                  // of this thread, and of the block

    __device__ Column(const GroupNormParams& p, i64 block) {
        const i64 of = quotient(block, p.column_blocks);
        const int lane = threadIdx.x % p.lanes;
        channel = (static_cast<int>(block - of * p.column_blocks) * p.lanes + lane) * kPack;
        count = clamp_to_pack(p.channels - channel);
        row = threadIdx.x / p.lanes;
        rows = blockDim.x / p.lanes;
        batch = quotient(of, p.chunks);
        chunk = of - batch * p.chunks;
        first = chunk * p.pixels_per_chunk;
        last = min(first + p.pixels_per_chunk, p.pixels);
    }
};

// Moments of eight channels over the same pixels. An odd number of words: neighbours lie in different banks.
struct Row {
    float n, mean[kPack], m2[kPack];

    __device__ void put(float count, const float (&means)[kPack], const float (&squares)[kPack]) {
        n = count;
#pragma unroll
        for (int i = 0; i < kPack; i++) mean[i] = means[i], m2[i] = squares[i];
    }

    // Moments::join, with one division for the eight channels.
    __device__ void join_to(float& count, float (&means)[kPack], float (&squares)[kPack]) const {
        if (n == 0) return;
        const float total = count + n, share = n / total, weight = count * share;
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            const float delta = mean[i] - means[i];
            means[i] = fmaf(delta, share, means[i]);
            squares[i] += fmaf(delta * delta, weight, m2[i]);
        }
        count = total;
    }
};

// A turn's pixels of a thread, `step` elements apart. left: rows of the chunk from the first on; those beyond are not
// asked for.
template <bool kWhole>
__device__ inline void ask(Pack<__half> (&held)[kHeldLast<kWhole>], const Column& c, const __half* x, i64 step,
                           int left) {
#pragma unroll
    for (int v = 0; v < kHeldLast<kWhole>; v++) load<kWhole>(held[v], x + v * step, v * c.rows < left ? c.count : 0);
}

template <bool kWhole>
__device__ void last_stats(const GroupNormParams& p) {
    __shared__ Row rows[kThreads];
    const Column c(p, blockIdx.x);
    next_may_begin();
    const i64 first = c.first + c.row, step = c.rows * p.x_step;
    const __half* x = static_cast<const __half*>(p.x) + c.batch * p.x_batch + c.channel + first * p.x_step;

    float2* parts = p.parts + (c.batch * p.chunks + c.chunk) * p.channels + c.channel;
    float n = 0, mean[kPack] = {}, m2[kPack] = {};
    for (int left = static_cast<int>(c.last - first); left > 0; left -= kHeldLast<kWhole> * c.rows) {
        Pack<__half> held[kHeldLast<kWhole>];
        bool there[kHeldLast<kWhole>];
        float fresh = 0;
        ask<kWhole>(held, c, x, step, left);
        x += kHeldLast<kWhole> * step;
#pragma unroll
        for (int v = 0; v < kHeldLast<kWhole>; v++) {
            there[v] = v * c.rows < left;
            fresh += there[v] ? 1.0f : 0.0f;
        }
        const float inverse = 1.0f / fresh, share = fresh / (n + fresh), weight = n * share;
        float sum[kPack] = {};
#pragma unroll
        for (int v = 0; v < kHeldLast<kWhole>; v++) {
            float a[kPack];
            unpack(held[v], a);
#pragma unroll
            for (int i = 0; i < kPack; i++) sum[i] += a[i];
        }
#pragma unroll
        for (int i = 0; i < kPack; i++) sum[i] *= inverse;
#pragma unroll
        for (int v = 0; v < kHeldLast<kWhole>; v++) {
            float a[kPack];
            unpack(held[v], a);
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                if (there[v]) m2[i] = fmaf(a[i] - sum[i], a[i] - sum[i], m2[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < kPack; i++) {  // Moments::join, with one division for the eight channels
            const float delta = sum[i] - mean[i];
            mean[i] = fmaf(delta, share, mean[i]);
            m2[i] = fmaf(delta * delta, weight, m2[i]);
        }
        n += fresh;
    }
    // The upper half of the rows is joined to the lower one, until one is left: of narrow pictures there are many.
    int half = 1;
    while (half * 2 < c.rows) half *= 2;
    for (; half > 0; half /= 2) {
        if (c.row >= half && c.row < 2 * half) rows[threadIdx.x].put(n, mean, m2);
        __syncthreads();
        if (c.row < half && c.row + half < c.rows) rows[threadIdx.x + half * p.lanes].join_to(n, mean, m2);
    }
    if (c.row > 0) return;
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        if (i < c.count) parts[i] = make_float2(mean[i], m2[i]);
    }
}

template <bool kWhole>
__device__ void last_apply(const GroupNormParams& p) {
    const Column c(p, gridDim.x - 1 - blockIdx.x);  // backwards
    const i64 first = c.first + c.row, x_step = c.rows * p.x_step, out_step = c.rows * p.out_step;
    const __half* x = static_cast<const __half*>(p.x) + c.batch * p.x_batch + c.channel + first * p.x_step;
    __half* out = static_cast<__half*>(p.out) + c.batch * p.out_batch + c.channel + first * p.out_step;
    int left = static_cast<int>(c.last - first);
    Pack<__half> held[kHeldLast<kWhole>];
    ask<kWhole>(held, c, x, x_step, left);
    wait_for_last();
    if (c.count == 0) return;
    float mean[kPack], factor[kPack], plus[kPack];
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        const int channel = c.channel + (i < c.count ? i : 0);
        const float2 by = p.coefficients[c.batch * p.channels + channel];
        mean[i] = by.x;
        factor[i] = by.y;
        plus[i] = p.bias ? load_element(p.bias, channel, p.bias_is_float) : 0.0f;
    }
    while (left > 0) {
#pragma unroll
        for (int v = 0; v < kHeldLast<kWhole>; v++) {
            if (v * c.rows >= left) break;
            float a[kPack];
            unpack(held[v], a);
#pragma unroll
            for (int i = 0; i < kPack; i++) a[i] = fmaf(a[i] - mean[i], factor[i], plus[i]);
            activate(a, p.activation);
            Pack<__half> result;
            pack(a, result);
            store_part<kWhole>(out + v * out_step, result, c.count);
        }
        left -= kHeldLast<kWhole> * c.rows;
        x += kHeldLast<kWhole> * x_step;
        out += kHeldLast<kWhole> * out_step;
        ask<kWhole>(held, c, x, x_step, left);
    }
}

// ---------------------------------------------------------------------------------------------------------------- both

// The moments of this block's (batch, group), to its first thread. Thread t joins parts t, t + 1024, ..., then halves
// join halves.
__device__ inline Moments joined(const GroupNormParams& p, Moments (&moments)[kMergeThreads], i64 batch, i64 group) {
    const i64 parts = p.is_last ? p.chunks * p.channels_per_group : p.chunks;
    Moments mine{0, 0, 0};
#pragma unroll 4
    for (i64 i = threadIdx.x; i < parts; i += kMergeThreads) {
        i64 index, count;
        if (p.is_last) {
            const i64 chunk = quotient(i, p.channels_per_group), channel = i - chunk * p.channels_per_group;
            index = (batch * p.chunks + chunk) * p.channels + group * p.channels_per_group + channel;
            count = min(p.pixels_per_chunk, p.pixels - chunk * p.pixels_per_chunk);
        } else {
            index = static_cast<i64>(blockIdx.x) * p.chunks + i;
            count = elements_of_chunk(p, i);
        }
        const float2 part = p.parts[index];
        mine.join(static_cast<float>(count), part.x, part.y);
    }
    moments[threadIdx.x] = mine;
    for (int half = kMergeThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const Moments other = moments[threadIdx.x + half];
            moments[threadIdx.x].join(other.n, other.mean, other.m2);
        }
    }
    __syncthreads();
    return moments[0];
}

// What *_apply takes for each channel of a group.
__device__ inline void write_coefficients(const GroupNormParams& p, i64 batch, i64 group, float mean, float variance) {
    const float inverse = rsqrtf(variance + p.eps);
    for (int i = threadIdx.x; i < p.channels_per_group; i += blockDim.x) {
        const i64 channel = group * p.channels_per_group + i;
        const float weight = p.weight ? load_element(p.weight, channel, p.weight_is_float) : 1.0f;
        p.coefficients[batch * p.channels + channel] = make_float2(mean, inverse * weight);
    }
}

// One block per (batch, group).
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    group_norm_merge(const __grid_constant__ GroupNormParams p) {
    __shared__ Moments moments[kMergeThreads];
    const i64 batch = quotient(blockIdx.x, p.groups), group = blockIdx.x - batch * p.groups;
    next_may_begin();
    wait_for_last();
    const Moments all = joined(p, moments, batch, group);
    write_coefficients(p, batch, group, all.mean, all.m2 / all.n);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    group_norm_moments(const __grid_constant__ GroupNormParams p) {
    __shared__ Moments moments[kMergeThreads];
    const i64 batch = quotient(blockIdx.x, p.groups), group = blockIdx.x - batch * p.groups;
    wait_for_last();
    const Moments all = joined(p, moments, batch, group);
    if (threadIdx.x == 0) static_cast<float2*>(p.out)[blockIdx.x] = make_float2(all.mean, all.m2 / all.n);
}

extern "C" __global__ void __launch_bounds__(kThreads) group_norm_given(const __grid_constant__ GroupNormParams p) {
    const i64 batch = quotient(blockIdx.x, p.groups), group = blockIdx.x - batch * p.groups;
    next_may_begin();
    const float2 moments = p.given[blockIdx.x];
    write_coefficients(p, batch, group, moments.x, moments.y);
}

// With three blocks in mind Blackwell's would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kLastBlocks = 2;
#else
constexpr int kLastBlocks = 3;
#endif

// BLOCKS: that many are to fit a multiprocessor.
#define GROUP_NORM(NAME, BLOCKS)                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)           \
        group_norm_##NAME(const __grid_constant__ GroupNormParams p) {       \
        NAME<true>(p);                                                       \
    }                                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)           \
        group_norm_##NAME##_any(const __grid_constant__ GroupNormParams p) { \
        NAME<false>(p);                                                      \
    }
GROUP_NORM(first_stats, 3)
GROUP_NORM(first_apply, 3)
GROUP_NORM(last_stats, kLastBlocks)
GROUP_NORM(last_apply, kLastBlocks)

WAITS(group_norm_merge)
WAITS(group_norm_first_apply)
WAITS(group_norm_first_apply_any)
WAITS(group_norm_last_apply)
WAITS(group_norm_last_apply_any)
