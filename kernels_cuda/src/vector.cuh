// Eight elements at a time: how rows of half, bf16 or float are loaded, held and stored.
//
// A Pack<T> is eight elements as they lie in memory: 16 bytes of half or bf16, 32 of float. It is moved either whole,
// eight adjacent elements (one 16-byte access of half), or as two quads of four that lie apart (one 16-byte access of
// float each): either way a warp's accesses are adjacent, so every 32-byte sector is touched once.
//
// Kernels keep what they wait for packed, because a packed half row takes half the registers, and unpack it to float
// where they compute.
#pragma once

#include "bf16.cuh"

constexpr int kPack = 8;
constexpr int kQuad = 4;

template <typename T>
struct Pack;

template <>
struct __align__(16) Pack<__half> {
    unsigned words[4];
};

template <>
struct __align__(16) Pack<__nv_bfloat16> {
    unsigned words[4];
};

template <>
struct __align__(16) Pack<float> {
    unsigned words[8];
};

template <typename T>
__device__ inline void zero(Pack<T>& pack) {
    for (unsigned& word : pack.words) word = 0;
}

// Streaming: read once, so it does not evict from L1 what the block reads again. Cached: the usual. Compute capability
// 6.1 reads past L1 unless it is told otherwise.
enum class Reading { kStreaming, kCached };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define LOAD_STREAMING "ld.global"
#else
#define LOAD_STREAMING "ld.global.L1::no_allocate"
#endif

template <Reading kReading>
__device__ inline void load_words(unsigned (&to)[4], const void* p) {
    uint4 v;
    if constexpr (kReading == Reading::kStreaming) {
        asm volatile(LOAD_STREAMING ".v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
    } else {
        v = *static_cast<const uint4*>(p);
    }
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

template <Reading kReading>
__device__ inline void load_words(unsigned (&to)[2], const void* p) {
    uint2 v;
    if constexpr (kReading == Reading::kStreaming) {
        asm volatile(LOAD_STREAMING ".v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    } else {
        v = *static_cast<const uint2*>(p);
    }
    to[0] = v.x, to[1] = v.y;
}

__device__ inline void store_words(void* p, const unsigned (&from)[4]) {
    *static_cast<uint4*>(p) = make_uint4(from[0], from[1], from[2], from[3]);
}
__device__ inline void store_words(void* p, const unsigned (&from)[2]) {
    *static_cast<uint2*>(p) = make_uint2(from[0], from[1]);
}

// Half a pack, as a reference to its words.
template <typename T>
__device__ inline auto& quad(Pack<T>& pack, int which) {
    constexpr int kWords = sizeof(pack.words) / 8;
    return reinterpret_cast<unsigned (&)[kWords]>(pack.words[which * kWords]);
}
template <typename T>
__device__ inline const auto& quad(const Pack<T>& pack, int which) {
    constexpr int kWords = sizeof(pack.words) / 8;
    return reinterpret_cast<const unsigned (&)[kWords]>(pack.words[which * kWords]);
}

// Eight adjacent elements at a 16-byte boundary.
template <Reading kReading>
__device__ inline void load_pack(Pack<__half>& pack, const __half* p) {
    load_words<kReading>(pack.words, p);
}
template <Reading kReading>
__device__ inline void load_pack(Pack<__nv_bfloat16>& pack, const __nv_bfloat16* p) {
    load_words<kReading>(pack.words, p);
}
template <Reading kReading>
__device__ inline void load_pack(Pack<float>& pack, const float* p) {
    load_words<kReading>(quad(pack, 0), p);
    load_words<kReading>(quad(pack, 1), p + kQuad);
}
__device__ inline void store_pack(__half* p, const Pack<__half>& pack) {
    store_words(p, pack.words);
}
__device__ inline void store_pack(__nv_bfloat16* p, const Pack<__nv_bfloat16>& pack) {
    store_words(p, pack.words);
}
__device__ inline void store_pack(float* p, const Pack<float>& pack) {
    store_words(p, quad(pack, 0));
    store_words(p + kQuad, quad(pack, 1));
}

__device__ inline void unpack(const Pack<__half>& pack, float (&out)[kPack]) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) {
        const float2 pair = to_floats(pack.words[i]);
        out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    }
}
__device__ inline void unpack(const Pack<__nv_bfloat16>& pack, float (&out)[kPack]) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) {
        const float2 pair = two_floats<__nv_bfloat16>(pack.words[i]);
        out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    }
}
__device__ inline void unpack(const Pack<float>& pack, float (&out)[kPack]) {
#pragma unroll
    for (int i = 0; i < kPack; i++) out[i] = __uint_as_float(pack.words[i]);
}

__device__ inline void pack(const float (&in)[kPack], Pack<__half>& out) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) out.words[i] = to_halves(in[2 * i], in[2 * i + 1]);
}
__device__ inline void pack(const float (&in)[kPack], Pack<__nv_bfloat16>& out) {
#pragma unroll
    for (int i = 0; i < kPack / 2; i++) out.words[i] = to_bf16s(in[2 * i], in[2 * i + 1]);
}
__device__ inline void pack(const float (&in)[kPack], Pack<float>& out) {
#pragma unroll
    for (int i = 0; i < kPack; i++) out.words[i] = __float_as_uint(in[i]);
}

// The packs of one row of d that a thread of the block owns, V of them, the same columns for every operand of a kernel.
// kQuads: the block's rows hold floats, so a pack is two quads apart (see above). d must be a multiple of 8; every row
// starts at a 16-byte boundary. Columns beyond d do not exist: they are neither read nor written.
// thread: whose columns these are, where it is not the thread's own number.
template <int V, bool kQuads>
struct Columns {
    int d;
    int thread = int(threadIdx.x);

    __device__ int adjacent(int v) const { return (v * int(blockDim.x) + thread) * kPack; }
    __device__ int quad_at(int v, int which) const { return ((2 * v + which) * int(blockDim.x) + thread) * kQuad; }

    // Columns that do not exist become zero.
    template <Reading kReading, typename T>
    __device__ void load(Pack<T> (&row)[V], const T* from) const {
#pragma unroll
        for (int v = 0; v < V; v++) zero(row[v]);
        load_existing<kReading>(row, from);
    }

    // Columns that do not exist stay as they are: for a row after another in the same packs.
    template <Reading kReading, typename T>
    __device__ void load_existing(Pack<T> (&row)[V], const T* from) const {
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (kQuads) {
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    if (quad_at(v, q) < d) load_words<kReading>(quad(row[v], q), from + quad_at(v, q));
                }
            } else {
                if (adjacent(v) < d) load_pack<kReading>(row[v], from + adjacent(v));
            }
        }
    }

    template <typename T>
    __device__ void store(T* to, int v, const Pack<T>& pack) const {
        if constexpr (kQuads) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                if (quad_at(v, q) < d) store_words(to + quad_at(v, q), quad(pack, q));
            }
        } else {
            if (adjacent(v) < d) store_pack(to + adjacent(v), pack);
        }
    }

    // Whether element i of pack v exists.
    __device__ bool has(int v, int i) const { return (kQuads ? quad_at(v, i / kQuad) : adjacent(v)) < d; }
};

__device__ inline float to_float(__half v) {
    return __half2float(v);
}
__device__ inline float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}
__device__ inline float to_float(float v) {
    return v;
}
__device__ inline void from_float(float v, __half& out) {
    out = __float2half_rn(v);
}
__device__ inline void from_float(float v, __nv_bfloat16& out) {
    out = __ushort_as_bfloat16(static_cast<unsigned short>(to_bf16s(v, 0.0f)));
}
__device__ inline void from_float(float v, float& out) {
    out = v;
}

// One element of a tensor whose type is known only at run time: for the kernels that serve any layout. Two: the type of
// two bytes that it may have.
template <typename Two = __half>
__device__ inline float load_element(const void* base, i64 index, bool is_float) {
    return is_float ? static_cast<const float*>(base)[index] : to_float(static_cast<const Two*>(base)[index]);
}
