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
// is still in the L2, and is met first. A group that fits the registers of a block is read once: 2 read, 2 written.
//
// Three launches, none of which depends on timing, so the same input gives the same bits. Each may begin while the one
// before it ends (ahead.cuh): *_apply then has asked for its first pixels before there is anything to multiply them by.
//   *_stats   each block reduces one chunk to (mean, M2), M2 = sum of (x - mean)^2. Within what a thread holds in
//   registers
//             both are taken exactly (the mean first); parts are joined by Chan's formula. No large sums of squares are
//             ever subtracted from each other. Channels-last: a part is what a column of channels has of a group
//   merge     one block per group joins its chunks in a fixed order and writes, per channel, the mean and the factor
//             rsqrt(var + eps) * weight
//   *_apply   the result
//
// Two launches, channels-last, where chunks are few: last_joined is last_apply, and each of its blocks joins the parts
// of the groups that it needs for itself, all in the same order. They are a sixth of what it reads otherwise, and in
// the L2.
//
// One launch, channels-last, for groups of up to 128 KB (`once_*`): a block per group, which keeps it in registers from
// the first look to the last. Mean, then squares of what is less the mean, then the result. The pictures of U-Nets are
// so small that launches and the wait for each other's parts were most of their time. There are no more blocks than
// groups, so of large groups the two launches may be faster: who is, `auto` finds out. By the machine code an element
// of SiLU takes 20 instructions and two special functions: the largest group of SD 1.5, 4096 pixels of ten channels,
// 6500 cycles of issue and, beside them, 5100 of the special functions, 4 us; one of 256 pixels of 40 channels a
// quarter.
//
// A picture that passes in parts takes two calls per part: *_stats and `moments`, which joins like merge but leaves the
// group's mean and variance; then, with those of all parts together, `given`, which makes coefficients of them, and
// *_apply.
//
// Access. Channels-first: a chunk is 2048 packs of 8 pixels, eight per thread, that run on over the channels of the
// group. Channels-last: a block is `lanes` packs of channels wide and walks down the pixels, eight at a time in flight;
// a thread keeps to its eight channels. `*_any`: any alignment, any size; the packs are gathered element by element.
// once_N: a thread keeps to N channels, as many as divide a group and its place (ten channels: two), and neighbours
// have those next to it, then the next pixels. A pixel's 20 bytes of ten channels touch 1.6 sectors of 32 on average,
// so the L2 is asked for 2.6 times the bytes; the groups beside it are other blocks' at the same time, so memory is
// not.

#include "activation.cuh"
#include "ahead.cuh"
#include "packs.cuh"
#include "reduce.cuh"

// Mirrored by GroupNormParams in ops/norm/group_norm.py. Pointers first.
struct GroupNormParams {
    const void* x;
    const void* weight;
    const void* bias;
    float2* parts;         // mean and M2 of each chunk: [batch, group, chunk], or channels-last [batch, chunk, column
                           // of channels, slot], a slot for each group that a column may touch
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
    int lanes, column_blocks;  // channels-last: packs of channels across a block, and blocks that cover all channels;
                               // once_*: threads across a group
    int slots, team;           // channels-last: of a column, and the threads that make a group of its channels
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
    int column;                     // among those that cover all channels
    int channel, count;             // of this thread
    int row, rows;                  // of this thread, and of the block

    __device__ Column(const GroupNormParams& p, i64 block) {
        const i64 of = quotient(block, p.column_blocks);
        const int lane = threadIdx.x % p.lanes;
        column = static_cast<int>(block - of * p.column_blocks);
        channel = (column * p.lanes + lane) * kPack;
        count = clamp_to_pack(p.channels - channel);
        row = threadIdx.x / p.lanes;
        rows = blockDim.x / p.lanes;
        batch = quotient(of, p.chunks);
        chunk = of - batch * p.chunks;
        first = chunk * p.pixels_per_chunk;
        last = min(first + p.pixels_per_chunk, p.pixels);
    }
};

// What a column of channels has of a group.
struct Share {
    int first, last;  // channels

    __device__ Share(const GroupNormParams& p, int column, int group)
        : first(max(column * p.lanes * kPack, group * p.channels_per_group)),
          last(min(min((column + 1) * p.lanes * kPack, p.channels), (group + 1) * p.channels_per_group)) {}

    __device__ int channels() const { return last - first; }
};

__device__ inline int first_group(const GroupNormParams& p, int column) {
    return column * p.lanes * kPack / p.channels_per_group;
}
__device__ inline int first_column(const GroupNormParams& p, int group) {
    return group * p.channels_per_group / (p.lanes * kPack);
}
__device__ inline int last_column(const GroupNormParams& p, int group) {
    return ((group + 1) * p.channels_per_group - 1) / (p.lanes * kPack);
}

__device__ inline i64 part_index(const GroupNormParams& p, i64 batch, i64 chunk, int column, int group) {
    return ((batch * p.chunks + chunk) * p.column_blocks + column) * p.slots + group - first_group(p, column);
}

__device__ inline int pixels_of_chunk(const GroupNormParams& p, i64 chunk) {
    return static_cast<int>(min(p.pixels_per_chunk, p.pixels - chunk * p.pixels_per_chunk));
}

// Over a team of neighbouring threads, a power of two of them. All of the team are there.
__device__ inline float team_sum(float v, int team, unsigned mask) {
    for (int offset = team / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(mask, v, offset);
    return v;
}

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
    // Row 0 has those of each channel; a team makes of them those of a group. All are over as many pixels.
    if (c.row == 0) rows[threadIdx.x].put(n, mean, m2);
    __syncthreads();
    const int member = threadIdx.x & (p.team - 1);
    const int group = first_group(p, c.column) + static_cast<int>(threadIdx.x / static_cast<unsigned>(p.team));
    if (group >= p.groups) return;
    const Share share(p, c.column, group);
    if (share.channels() <= 0) return;
    const int from = c.column * p.lanes * kPack;
    const unsigned mask = (p.team == 32 ? ~0u : (1u << p.team) - 1) << ((threadIdx.x & 31) - member);
    float sum = 0, squares = 0;
    for (int i = share.first - from + member; i < share.last - from; i += p.team)
        sum += rows[i / kPack].mean[i % kPack];
    const float middle = team_sum(sum, p.team, mask) / static_cast<float>(share.channels());
    const float pixels = rows[0].n;
    for (int i = share.first - from + member; i < share.last - from; i += p.team) {
        const float delta = rows[i / kPack].mean[i % kPack] - middle;
        squares += fmaf(delta * delta, pixels, rows[i / kPack].m2[i % kPack]);
    }
    squares = team_sum(squares, p.team, mask);
    // As part_index has it: blocks are counted as columns are.
    const i64 at = static_cast<i64>(blockIdx.x) * p.slots + group - first_group(p, c.column);
    if (member == 0) p.parts[at] = make_float2(middle, squares);
}

// The mean and the inverse deviation of each group that a column touches, joined by the block for itself.
struct Joined {
    static constexpr int kAtOnce = 4;  // parts that a thread asks for before it waits: of U-Nets all that it has
    float sum[kThreads], squares[kThreads];
    float2 group[kThreads];

    // f(elements, part) for this thread's parts of a group: every `team`-th chunk of each column that has some of it.
    template <typename F>
    __device__ static void each_part(const GroupNormParams& p, i64 batch, int group, int member, int team, F f) {
        const int last = static_cast<int>(p.chunks) - 1, step = p.column_blocks * p.slots;
        for (int column = first_column(p, group); column <= last_column(p, group); column++) {
            const float channels = static_cast<float>(Share(p, column, group).channels());
            const float all = channels * static_cast<float>(static_cast<int>(p.pixels_per_chunk));
            const float rest = channels * static_cast<float>(pixels_of_chunk(p, last));
            const float2* part = p.parts + part_index(p, batch, 0, column, group);
            for (int chunk = member; chunk <= last; chunk += kAtOnce * team) {
                float2 found[kAtOnce];
#pragma unroll
                for (int v = 0; v < kAtOnce; v++) {
                    const int at = chunk + v * team;
                    found[v] = at <= last ? part[at * step] : make_float2(0, 0);
                }
#pragma unroll
                for (int v = 0; v < kAtOnce; v++) {
                    const int at = chunk + v * team;
                    f(at < last ? all : at == last ? rest : 0.0f, found[v]);
                }
            }
        }
    }

    // Of the members of this thread's group, in their order.
    __device__ static float total(const float (&of)[kThreads], int own, int count, int team) {
        float v = 0;
#pragma unroll 4
        for (int member = 0; member < team; member++) v += of[member * count + own];
        return v;
    }

    __device__ void join(const GroupNormParams& p, const Column& c) {
        const int first = first_group(p, c.column);
        const int count = (min((c.column + 1) * p.lanes * kPack, p.channels) - 1) / p.channels_per_group - first + 1;
        const int team = min(static_cast<int>(blockDim.x) / count, 32);  // a block has more threads than groups
        const int member = threadIdx.x / static_cast<unsigned>(count), own = threadIdx.x - member * count;
        const int places = member < team ? team : 0;  // a member of no team has none of the parts
        const float elements = static_cast<float>(p.pixels) * static_cast<float>(p.channels_per_group);
        float mine = 0;
        if (places) {
            each_part(p, c.batch, first + own, member, team,
                      [&](float n, float2 part) { mine = fmaf(n, part.x, mine); });
        }
        sum[threadIdx.x] = mine;
        __syncthreads();
        const float mean = total(sum, own, count, team) / elements;
        mine = 0;
        if (places) {
            each_part(p, c.batch, first + own, member, team, [&](float n, float2 part) {
                const float delta = part.x - mean;
                mine += fmaf(delta * delta, n, part.y);
            });
        }
        squares[threadIdx.x] = mine;
        __syncthreads();
        const float variance = total(squares, own, count, team) / elements;
        if (member == 0) group[own] = make_float2(mean, rsqrtf(variance + p.eps));
        __syncthreads();
    }
};

// kJoins: by parts that are joined here, or by the coefficients that `merge` or `given` left.
template <bool kWhole, bool kJoins>
__device__ void last_result(const GroupNormParams& p) {
    const Column c(p, gridDim.x - 1 - blockIdx.x);  // backwards
    const i64 first = c.first + c.row, x_step = c.rows * p.x_step, out_step = c.rows * p.out_step;
    const __half* x = static_cast<const __half*>(p.x) + c.batch * p.x_batch + c.channel + first * p.x_step;
    __half* out = static_cast<__half*>(p.out) + c.batch * p.out_batch + c.channel + first * p.out_step;
    int left = static_cast<int>(c.last - first);
    Pack<__half> held[kHeldLast<kWhole>];
    ask<kWhole>(held, c, x, x_step, left);
    wait_for_last();
    const float2* of_group = nullptr;
    if constexpr (kJoins) {
        __shared__ Joined joined;
        joined.join(p, c);
        of_group = joined.group;
    }
    if (c.count == 0) return;
    float mean[kPack], factor[kPack], plus[kPack];
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        const int channel = c.channel + (i < c.count ? i : 0);
        if (kJoins) factor[i] = p.weight ? load_element(p.weight, channel, p.weight_is_float) : 1.0f;
        plus[i] = p.bias ? load_element(p.bias, channel, p.bias_is_float) : 0.0f;
    }
    if (kJoins) {
        const int before = first_group(p, c.column);
        int group = c.channel / p.channels_per_group, place = c.channel - group * p.channels_per_group;
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            const float2 by = of_group[i < c.count ? group - before : 0];
            mean[i] = by.x;
            factor[i] *= by.y;
            if (++place == p.channels_per_group) place = 0, group++;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            const float2 by = p.coefficients[c.batch * p.channels + c.channel + (i < c.count ? i : 0)];
            mean[i] = by.x;
            factor[i] = by.y;
        }
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

template <bool kWhole>
__device__ void last_apply(const GroupNormParams& p) {
    last_result<kWhole, false>(p);
}

template <bool kWhole>
__device__ void last_joined(const GroupNormParams& p) {
    last_result<kWhole, true>(p);
}

// ------------------------------------------------------------------------------------ channels last, a group a block

constexpr int kOnceThreads = 1024;

// N adjacent channels of a pixel, as they lie: one of them takes half of a word.
template <int N>
struct Bit {
    unsigned words[N < 2 ? 1 : N / 2];

    __device__ void load(const __half* p) {
        if constexpr (N >= 4) {
            load_words<Reading::kStreaming>(words, p);
        } else if constexpr (N == 2) {
            words[0] = *reinterpret_cast<const unsigned*>(p);
        } else {
            words[0] = *reinterpret_cast<const unsigned short*>(p);
        }
    }

    __device__ void unpack(float (&to)[N]) const {
        if constexpr (N == 1) {
            to[0] = to_floats(words[0]).x;
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float2 pair = to_floats(words[i]);
                to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
            }
        }
    }

    __device__ static void store(__half* p, const float (&from)[N]) {
        if constexpr (N == 1) {
            *p = __float2half_rn(from[0]);
        } else {
            unsigned made[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; i++) made[i] = to_halves(from[2 * i], from[2 * i + 1]);
            if constexpr (N == 2) {
                *reinterpret_cast<unsigned*>(p) = made[0];
            } else {
                store_whole(p, made);
            }
        }
    }

    // See `forget` of packs.cuh.
    __device__ void forget() {
        const unsigned zero = gridDim.z - 1;
#pragma unroll
        for (unsigned& word : words) word ^= zero;
    }
};

// N: channels of a thread. kMost: its pixels at most. Turns that no thread of the block has are left out, some at once.
template <int N, int kMost>
__device__ void once(const GroupNormParams& p) {
    constexpr int kSome = N == 8 ? 2 : 4;
    static_assert(kMost % kSome == 0, "turns are left out some at a time");
    __shared__ BlockSum<kOnceThreads / 32>::Slots slots;
    const i64 batch = quotient(blockIdx.x, p.groups), group = blockIdx.x - batch * p.groups;
    const int across = p.lanes, row = threadIdx.x / static_cast<unsigned>(across);
    const int rows = blockDim.x / static_cast<unsigned>(across), pixels = static_cast<int>(p.pixels);
    const int channel = static_cast<int>(group) * p.channels_per_group + (threadIdx.x - row * across) * N;
    const int left = row < rows ? pixels - row : 0;  // threads beyond the last row of them have none
    const __half* x = static_cast<const __half*>(p.x) + batch * p.x_batch + row * p.x_step + channel;
    const i64 step = rows * p.x_step;

    Bit<N> held[kMost];
#pragma unroll
    for (int turn = 0; turn < kMost; turn += kSome) {
        if (turn * rows >= pixels) break;
#pragma unroll
        for (int v = turn; v < turn + kSome; v++) {
#pragma unroll
            for (unsigned& word : held[v].words) word = 0;
            if (v * rows < left) held[v].load(x);
            x += step;
        }
    }
    float factor[N], plus[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        factor[i] = p.weight ? load_element(p.weight, channel + i, p.weight_is_float) : 1.0f;
        plus[i] = p.bias ? load_element(p.bias, channel + i, p.bias_is_float) : 0.0f;
    }
    BlockSum<kOnceThreads / 32> block_sum(slots);
    const float elements = static_cast<float>(pixels * p.channels_per_group);
    float sum = 0, squares = 0;
#pragma unroll
    for (int turn = 0; turn < kMost; turn += kSome) {
        if (turn * rows >= pixels) break;
#pragma unroll
        for (int v = turn; v < turn + kSome; v++) {
            float a[N];
            held[v].unpack(a);
#pragma unroll
            for (int i = 0; i < N; i++) sum += a[i];  // zero where there is none
        }
    }
    const float mean = block_sum(sum) / elements;
#pragma unroll
    for (int turn = 0; turn < kMost; turn += kSome) {
        if (turn * rows >= pixels) break;
#pragma unroll
        for (int v = turn; v < turn + kSome; v++) {
            float a[N];
            held[v].forget();
            held[v].unpack(a);
            if (v * rows < left) {
#pragma unroll
                for (int i = 0; i < N; i++) squares = fmaf(a[i] - mean, a[i] - mean, squares);
            }
        }
    }
    const float inverse = rsqrtf(block_sum(squares) / elements + p.eps);
#pragma unroll
    for (int i = 0; i < N; i++) factor[i] *= inverse;
    __half* out = static_cast<__half*>(p.out) + batch * p.out_batch + row * p.out_step + channel;
    const i64 out_step = rows * p.out_step;
#pragma unroll
    for (int turn = 0; turn < kMost; turn += kSome) {
        if (turn * rows >= pixels) break;
#pragma unroll
        for (int v = turn; v < turn + kSome; v++) {
            float a[N];
            held[v].forget();
            held[v].unpack(a);
#pragma unroll
            for (int i = 0; i < N; i++) a[i] = fmaf(a[i] - mean, factor[i], plus[i]);
            activate(a, p.activation);
            if (v * rows < left) Bit<N>::store(out, a);
            out += out_step;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- both

// The moments of this block's (batch, group), to its first thread. Each thread joins every so many parts, then halves
// join halves: a block has a power of two of threads.
__device__ inline Moments joined(const GroupNormParams& p, Moments (&moments)[kMergeThreads], i64 batch, i64 group) {
    const int column = p.is_last ? first_column(p, static_cast<int>(group)) : 0;
    const int columns = p.is_last ? last_column(p, static_cast<int>(group)) - column + 1 : 1;
    const i64 parts = p.chunks * columns;
    Moments mine{0, 0, 0};
#pragma unroll 4
    for (i64 i = threadIdx.x; i < parts; i += blockDim.x) {
        i64 index, count;
        if (p.is_last) {
            const i64 chunk = quotient(i, columns);
            const int of = column + static_cast<int>(i - chunk * columns);
            index = part_index(p, batch, chunk, of, static_cast<int>(group));
            count = static_cast<i64>(pixels_of_chunk(p, chunk)) * Share(p, of, static_cast<int>(group)).channels();
        } else {
            index = static_cast<i64>(blockIdx.x) * p.chunks + i;
            count = elements_of_chunk(p, i);
        }
        const float2 part = p.parts[index];
        mine.join(static_cast<float>(count), part.x, part.y);
    }
    moments[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
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
GROUP_NORM(last_joined, kLastBlocks)

// MOST: as many pixels as leave 64 registers enough, and as the levels of a U-Net have: 4096 pixels of ten channels,
// 1024 of 40, 1024 of 60. ONCE_HELD in ops/norm/group_norm.py has them too.
#define ONCE(N, MOST)                                                    \
    extern "C" __global__ void __launch_bounds__(kOnceThreads)           \
        group_norm_once_##N(const __grid_constant__ GroupNormParams p) { \
        once<N, MOST>(p);                                                \
    }
ONCE(1, 24)
ONCE(2, 24)
ONCE(4, 16)
ONCE(8, 6)

WAITS(group_norm_merge)
WAITS(group_norm_first_apply)
WAITS(group_norm_first_apply_any)
WAITS(group_norm_last_apply)
WAITS(group_norm_last_apply_any)
WAITS(group_norm_last_joined)
WAITS(group_norm_last_joined_any)
