// channel_rms_silu: the normalisation of the Wan VAE, over the channels of each pixel.
//
//   v   = x / max(|x|, 1e-12) * sqrt(C) * weight + bias      |x|: the length of the pixel's vector of C channels
//   out = v / (1 + exp(-v))                                  optional
//
// Layout. Channels-first: x is [batch, C, pixels], pixels adjacent, any stride between channels. Channels-last: x is
// [batch, pixels, C], channels adjacent, any stride between pixels. A pixel is one (t, h, w). out has x's layout.
//
// Bytes per element: 2 read + 2 written. Every x is read from memory once.
//
// Channels-first. The sum runs across memory rows that are megabytes apart, so a block takes a tile: all C channels of
// 8 * `lanes` adjacent pixels, held packed in registers, 12 packs (12 channels of 8 pixels) per thread. Rows of the
// tile are 16 * lanes bytes: 512 for C up to 144, never under 64 at the VAE's widths. Each thread sums the squares of
// its 12 channels for its 8 pixels; the sums meet in shared memory, and the tile is scaled and written from registers.
// 12 loads of 16 bytes per thread are in flight together: 48 KB per block of 256, two to three blocks per
// multiprocessor.
//
// Channels-last. `lanes` lanes of a warp (a power of two) hold one pixel, V packs of 8 channels each, and sum by
// shuffles: 96 = 4 lanes x 3 packs, 384 = 16 x 3, 1024 = 32 x 4. Where V is small a lane has several pixels, whose
// loads are on their way together. No loop: a block does its pixels and ends, and another starts loading. The weights
// come from L1 each time; registers are worth more to the pixels.
//
// `*_any`: any alignment, any C, any number of pixels; two walks, the second through the caches.

#include "activation.cuh"
#include "packs.cuh"
#include "reduce.cuh"

// Mirrored by ChannelRmsParams in ops/norm/channel_rms_silu.py. Pointers first.
struct ChannelRmsParams {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;
    i64 x_batch, x_step;  // strides, in elements; the step is from channel to channel, or from pixel to pixel
    i64 out_batch, out_step;
    i64 pixels;
    int blocks_per_batch;
    int channels;
    int lanes;   // channels-first: packs of pixels across a tile; channels-last: lanes that share a pixel
    float root;  // sqrt(C)
    int weight_is_float, bias_is_float;
    int silu;
};

constexpr int kMostThreads = 256;      // channels-last and `any`
constexpr int kMostTileThreads = 352;  // channels-first: whole warps
constexpr int kMostLanes = 32;
constexpr int kChannelsPerThread = 12;

// What the compiler is told about it: 384 twice leaves 80 registers, so that three blocks of 256 fit a multiprocessor.
// On Blackwell the tile does not fit 80, and two blocks are plenty for the bandwidth a multiprocessor has there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define TILE_BOUNDS __launch_bounds__(kMostTileThreads)
#else
#define TILE_BOUNDS __launch_bounds__(384, 2)
#endif

// Which part of which batch a block works on.
struct Tile {
    i64 index;
    const __half* x;
    __half* out;

    __device__ explicit Tile(const ChannelRmsParams& p) {
        const i64 batch = blockIdx.x / static_cast<unsigned>(p.blocks_per_batch);
        index = blockIdx.x % static_cast<unsigned>(p.blocks_per_batch);
        x = static_cast<const __half*>(p.x) + batch * p.x_batch;
        out = static_cast<__half*>(p.out) + batch * p.out_batch;
    }
};

// sqrt(C) / max(length, 1e-12). The comparison is written so that a NaN passes through, as it does in torch's
// clamp_min.
__device__ inline float factor(float squares, float root) {
    const float length = sqrtf(squares);
    return root / (length <= 1e-12f ? 1e-12f : length);
}

__device__ inline float finish(float x, float by, const ChannelRmsParams& p, i64 c) {
    float v = x * by * load_element(p.weight, c, p.weight_is_float);
    if (p.bias) v += load_element(p.bias, c, p.bias_is_float);
    return p.silu ? silu(v) : v;
}

__device__ inline void add_squares(const Pack<__half>& pack, float (&sums)[kPack]) {
    float a[kPack];
    unpack(pack, a);
#pragma unroll
    for (int i = 0; i < kPack; i++) sums[i] = fmaf(a[i], a[i], sums[i]);
}

// Eight adjacent weights: the index is a multiple of eight, the address one of sixteen.
__device__ inline void load_weights(const void* base, int index, bool is_float, float (&out)[kPack]) {
    if (is_float) {
        Pack<float> pack;
        load_pack<Reading::kCached>(pack, static_cast<const float*>(base) + index);
        unpack(pack, out);
    } else {
        Pack<__half> pack;
        load_pack<Reading::kCached>(pack, static_cast<const __half*>(base) + index);
        unpack(pack, out);
    }
}

extern "C" __global__ void TILE_BOUNDS channel_rms_silu_first(const __grid_constant__ ChannelRmsParams p) {
    // Sums of squares [warp][half pack][lane][4]: neighbouring lanes write neighbouring 16 bytes. Row 0 is then reused
    // for the factors.
    __shared__ float sums[kMostTileThreads / 32 * kMostLanes * kPack];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = blockDim.x / p.lanes;
    const int width = p.lanes * kPack;
    const Tile tile(p);
    const i64 pixel = (tile.index * p.lanes + lane) * kPack;
    const bool inside = pixel < p.pixels;
    float4* const low = reinterpret_cast<float4*>(sums) + lane;
    float4* const high = low + p.lanes;
    const __half* x = tile.x + pixel + group * p.x_step;
    __half* out = tile.out + pixel + group * p.out_step;
    const i64 x_hop = groups * p.x_step, out_hop = groups * p.out_step;

    Pack<__half> packs[kChannelsPerThread];
#pragma unroll
    for (int v = 0; v < kChannelsPerThread; v++) {
        const int c = v * groups + group;
        zero(packs[v]);
        if (inside && c < p.channels) load_pack<Reading::kStreaming>(packs[v], x);
        x += x_hop;
    }
    float mine[kPack] = {};
#pragma unroll
    for (int v = 0; v < kChannelsPerThread; v++) add_squares(packs[v], mine);
    // First over the groups of a warp, by shuffles: what is left for a few threads to add is short.
    for (int offset = p.lanes; offset < 32; offset *= 2) {
#pragma unroll
        for (int i = 0; i < kPack; i++) mine[i] += __shfl_xor_sync(0xffffffffu, mine[i], offset);
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 < p.lanes) {
        low[warp * 2 * p.lanes] = make_float4(mine[0], mine[1], mine[2], mine[3]);
        high[warp * 2 * p.lanes] = make_float4(mine[4], mine[5], mine[6], mine[7]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float total = 0;
#pragma unroll 4
        for (int w = 0; w < warps; w++) total += sums[w * width + i];
        sums[i] = factor(total, p.root);  // no other thread reads this column
    }
    __syncthreads();
    const float4 a = low[0], b = high[0];
    const float by[kPack] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int v = 0; v < kChannelsPerThread; v++) {
        const int c = v * groups + group;
        if (!inside || c >= p.channels) break;
        const float weight = load_element(p.weight, c, p.weight_is_float);
        const float bias = p.bias ? load_element(p.bias, c, p.bias_is_float) : -0.0f;  // v + -0 is v, even for -0
        float value[kPack];
        forget(packs[v]);
        unpack(packs[v], value);
#pragma unroll
        for (int i = 0; i < kPack; i++) value[i] = fmaf(value[i] * by[i], weight, bias);
        if (p.silu) silu(value);
        Pack<__half> result;
        pack(value, result);
        store_whole(out, result);
        out += out_hop;
    }
}

template <int V>
struct Pixel {
    Pack<__half> packs[V];

    __device__ void load(const __half* pixel, int lane, int lanes, int channels, bool inside) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int c = (v * lanes + lane) * kPack;
            zero(packs[v]);
            if (inside && c < channels) load_pack<Reading::kStreaming>(packs[v], pixel + c);
        }
    }
};

// N pixels per lane.
template <int V, int N>
__device__ void channels_last(const ChannelRmsParams& p) {
    const int lane = threadIdx.x % p.lanes, step = blockDim.x / p.lanes;
    const Tile tile(p);
    const i64 first = tile.index * N * step + threadIdx.x / p.lanes;

    Pixel<V> pixels[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const i64 at = first + n * step;
        pixels[n].load(tile.x + at * p.x_step, lane, p.lanes, p.channels, at < p.pixels);
    }
    float by[N];
    // Lanes past the last pixel stay for the shuffles.
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sums[kPack] = {};
#pragma unroll
        for (int v = 0; v < V; v++) add_squares(pixels[n].packs[v], sums);
        float total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        for (int offset = p.lanes / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
        by[n] = factor(total, p.root);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int c = (v * p.lanes + lane) * kPack;
        if (c >= p.channels) break;
        float weight[kPack], bias[kPack];
        load_weights(p.weight, c, p.weight_is_float, weight);
#pragma unroll
        for (int k = 0; k < kPack; k++) bias[k] = -0.0f;  // v + -0 is v, even for -0
        if (p.bias) load_weights(p.bias, c, p.bias_is_float, bias);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const i64 at = first + n * step;
            if (at >= p.pixels) break;
            float value[kPack];
            forget(pixels[n].packs[v]);
            unpack(pixels[n].packs[v], value);
#pragma unroll
            for (int k = 0; k < kPack; k++) value[k] = fmaf(value[k] * by[n], weight[k], bias[k]);
            if (p.silu) silu(value);
            Pack<__half> result;
            pack(value, result);
            store_whole(tile.out + at * p.out_step + c, result);
        }
    }
}

#define CHANNELS_LAST(V, N, BLOCKS)                                             \
    extern "C" __global__ void __launch_bounds__(kMostThreads, BLOCKS)          \
        channel_rms_silu_last_##V(const __grid_constant__ ChannelRmsParams p) { \
        channels_last<V, N>(p);                                                 \
    }
// PACKS in ops/norm/channel_rms_silu.py
CHANNELS_LAST(2, 4, 3)
CHANNELS_LAST(3, 2, 4)
CHANNELS_LAST(4, 2, 3)
CHANNELS_LAST(5, 1, 4)
CHANNELS_LAST(8, 1, 3)

// A thread per pixel: neighbouring threads read neighbouring pixels of one channel.
extern "C" __global__ void __launch_bounds__(kMostThreads)
    channel_rms_silu_first_any(const __grid_constant__ ChannelRmsParams p) {
    const Tile tile(p);
    const i64 pixel = tile.index * blockDim.x + threadIdx.x;
    if (pixel >= p.pixels) return;
    const __half* x = tile.x + pixel;
    __half* out = tile.out + pixel;
    float squares = 0;
#pragma unroll 8
    for (int c = 0; c < p.channels; c++) {
        const float a = __half2float(x[c * p.x_step]);
        squares = fmaf(a, a, squares);
    }
    const float by = factor(squares, p.root);
#pragma unroll 4
    for (int c = 0; c < p.channels; c++) {
        out[c * p.out_step] = __float2half_rn(finish(__half2float(x[c * p.x_step]), by, p, c));
    }
}

// A warp per pixel.
extern "C" __global__ void __launch_bounds__(kMostThreads)
    channel_rms_silu_last_any(const __grid_constant__ ChannelRmsParams p) {
    const Tile tile(p);
    const i64 pixel = tile.index * (blockDim.x / 32) + threadIdx.x / 32;
    if (pixel >= p.pixels) return;  // whole warps: the others keep their 32 lanes
    const __half* x = tile.x + pixel * p.x_step;
    __half* out = tile.out + pixel * p.out_step;
    float squares = 0;
    for (int c = threadIdx.x % 32; c < p.channels; c += 32) {
        const float a = __half2float(x[c]);
        squares = fmaf(a, a, squares);
    }
    const float by = factor(warp_sum(squares), p.root);
    for (int c = threadIdx.x % 32; c < p.channels; c += 32) {
        out[c] = __float2half_rn(finish(__half2float(x[c]), by, p, c));
    }
}
