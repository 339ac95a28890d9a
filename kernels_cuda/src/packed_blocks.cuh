// The block types of GGUF files, read from shared memory: quants of eight elements, and their scale.
//
// Each type says how many bytes are how many elements, and has
//
//   quants(block, e, q)   elements e to e + 7 of a block, e a multiple of 8, as unsigned bytes in two words; the number
//   is
//                         the byte less kOffset
//   scale(block, e)       what those eight are multiplied by. K types: in two parts, the block's d and an integer of
//   the
//                         group; low() is then what is taken away, in two such parts
//
// Blocks of 18, 22, 34, 110 and 210 bytes start at even addresses only: words are cut out of the aligned words around
// them, which reads up to 2 bytes before and behind a block. The others start at multiples of 4 or 8.
// ops/quant/packed_blocks.py has the same types in torch, and why no rounding happens before the sum with `low`.
#pragma once

#include "vector.cuh"

using Bytes = const unsigned char*;

__device__ inline float half_at(Bytes p) {
    return __half2float(*reinterpret_cast<const __half*>(p));
}

// One word and two words at p, which is a multiple of kAlign.
template <int kAlign>
__device__ inline unsigned word_at(Bytes p) {
    if constexpr (kAlign % 4 == 0) return *reinterpret_cast<const unsigned*>(p);
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(p);
    return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}
template <int kAlign>
__device__ inline void words_at(Bytes p, unsigned (&out)[2]) {
    if constexpr (kAlign % 8 == 0) {
        const uint2 both = *reinterpret_cast<const uint2*>(p);
        out[0] = both.x, out[1] = both.y;
    } else if constexpr (kAlign % 4 == 0) {
        out[0] = reinterpret_cast<const unsigned*>(p)[0], out[1] = reinterpret_cast<const unsigned*>(p)[1];
    } else {
        const unsigned odd = static_cast<unsigned>(reinterpret_cast<size_t>(p)) & 2;
        const unsigned* around = reinterpret_cast<const unsigned*>(p - odd);
        out[0] = __funnelshift_r(around[0], around[1], odd * 8);
        out[1] = __funnelshift_r(around[1], around[2], odd * 8);
    }
}

// Nibbles, pairs of bits, single bits: of each byte the field that begins at `shift`.
__device__ inline void take(unsigned (&q)[2], int shift, unsigned mask) {
    q[0] = (q[0] >> shift) & mask, q[1] = (q[1] >> shift) & mask;
}

// Bit i of the lower four of `bits` as the bit `kTo` of byte i. Each of the four products has places of its own.
template <int kTo>
__device__ inline unsigned spread_bits(unsigned bits) {
    return ((bits & 15u) * (0x00204081u << kTo)) & (0x01010101u << kTo);
}

// Four nibbles, a byte each, through a table of 16 bytes: both halves of the table by their lower three bits, then one
// of the two by the fourth.
__device__ inline unsigned look_up(unsigned nibbles) {
    const unsigned pairs = nibbles | nibbles >> 4;
    const unsigned four = __byte_perm(pairs, 0, 0x4420) & 0xffffu;
    // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113: each with 128 added.
    const unsigned low = __byte_perm(0x3f2d1801u, 0x766a5d4fu, four & 0x7777u);
    const unsigned high = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, four & 0x7777u);
    return __byte_perm(low, high, 0x3210u | ((four >> 1) & 0x4444u));
}

// ---- blocks of 32: one d, and in some types one m ----------------------------------------------------------------

template <int kHeader>
struct Nibbles32 {
    static constexpr int kElements = 32;
    static constexpr int kBytes = kHeader + 16;

    __device__ static void nibbles(Bytes block, int e, unsigned (&q)[2]) {
        words_at<kBytes % 8 == 0 ? 8 : kBytes % 4 == 0 ? 4 : 2>(block + kHeader + (e & 8), q);
        take(q, (e & 16) >> 2, 0x0f0f0f0fu);
    }
    __device__ static __half d(Bytes block) { return *reinterpret_cast<const __half*>(block); }
    __device__ static float scale(Bytes block, int) { return __half2float(d(block)); }
};

struct Q4_0 : Nibbles32<2> {
    static constexpr int kOffset = 8;
    static constexpr bool kHasLow = false, kInHalf = true;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) { nibbles(block, e, q); }
};

struct Q4_1 : Nibbles32<4> {
    static constexpr int kOffset = 0;
    static constexpr bool kHasLow = true, kInHalf = false;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) { nibbles(block, e, q); }
    __device__ static float low(Bytes block, int) { return half_at(block + 2); }
};

template <int kHeader>
struct FiveBits32 : Nibbles32<kHeader> {
    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        Nibbles32<kHeader>::nibbles(block, e, q);
        const unsigned bits = word_at<kHeader % 4 == 0 ? 4 : 2>(block + kHeader - 4) >> e;
        q[0] |= spread_bits<4>(bits), q[1] |= spread_bits<4>(bits >> 4);
    }
};

struct Q5_0 : FiveBits32<6> {
    static constexpr int kOffset = 16;
    static constexpr bool kHasLow = false, kInHalf = true;
};

struct Q5_1 : FiveBits32<8> {
    static constexpr int kOffset = 0;
    static constexpr bool kHasLow = true, kInHalf = false;

    __device__ static float low(Bytes block, int) { return half_at(block + 2); }
};

struct Q8_0 {
    static constexpr int kBytes = 34, kElements = 32, kOffset = 128;
    static constexpr bool kHasLow = false, kInHalf = true;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        words_at<2>(block + 2 + e, q);
        q[0] ^= 0x80808080u, q[1] ^= 0x80808080u;
    }
    __device__ static __half d(Bytes block) { return *reinterpret_cast<const __half*>(block); }
};

struct IQ4_NL : Nibbles32<2> {
    static constexpr int kOffset = 128;
    static constexpr bool kHasLow = false, kInHalf = true;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        nibbles(block, e, q);
        q[0] = look_up(q[0]), q[1] = look_up(q[1]);
    }
};

// ---- blocks of 256: a d for all, and integers for groups of 16 or 32 -----------------------------------------------

struct Q2_K {
    static constexpr int kBytes = 84, kElements = 256, kOffset = 0;
    static constexpr bool kHasLow = true, kInHalf = false;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        words_at<4>(block + 16 + e / 128 * 32 + e % 32, q);
        take(q, e / 32 % 4 * 2, 0x03030303u);
    }
    __device__ static float scale(Bytes block, int e) { return half_at(block + 80) * float(block[e / 16] & 15); }
    __device__ static float low(Bytes block, int e) { return -(half_at(block + 82) * float(block[e / 16] >> 4)); }
};

struct Q3_K {
    static constexpr int kBytes = 110, kElements = 256, kOffset = 4;
    static constexpr bool kHasLow = false, kInHalf = true;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        unsigned kept[2];  // a bit that is set keeps 4 from being taken away
        words_at<2>(block + e % 32, kept);
        take(kept, e / 32, 0x01010101u);
        words_at<2>(block + 32 + e / 128 * 32 + e % 32, q);
        take(q, e / 32 % 4 * 2, 0x03030303u);
        q[0] |= kept[0] << 2, q[1] |= kept[1] << 2;
    }
    __device__ static __half d(Bytes block) { return *reinterpret_cast<const __half*>(block + 108); }
    __device__ static int group_scale(Bytes block, int e) {
        const int group = e / 16;
        const int low = block[96 + group % 8] >> group / 8 * 4 & 15;
        const int high = block[104 + group % 4] >> group / 4 * 2 & 3;
        return (low | high << 4) - 32;
    }
};

// Eight scales and eight mins of 6 bits, in 12 bytes from byte 4 on.
struct SixBits {
    static constexpr int kElements = 256, kOffset = 0;
    static constexpr bool kHasLow = true, kInHalf = false;

    __device__ static int group_scale(Bytes block, int e) {
        const int group = e / 32;
        const Bytes s = block + 4;
        return group < 4 ? s[group] & 63 : (s[group + 4] & 15) | (s[group - 4] >> 6 << 4);
    }
    __device__ static int group_min(Bytes block, int e) {
        const int group = e / 32;
        const Bytes s = block + 4;
        return group < 4 ? s[group + 4] & 63 : s[group + 4] >> 4 | (s[group] >> 6 << 4);
    }
    __device__ static float scale(Bytes block, int e) { return half_at(block) * float(group_scale(block, e)); }
    __device__ static float low(Bytes block, int e) { return -(half_at(block + 2) * float(group_min(block, e))); }
};

struct Q4_K : SixBits {
    static constexpr int kBytes = 144;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        words_at<8>(block + 16 + e / 64 * 32 + e % 32, q);
        take(q, e / 32 % 2 * 4, 0x0f0f0f0fu);
    }
};

struct Q5_K : SixBits {
    static constexpr int kBytes = 176;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        unsigned fifth[2];
        words_at<8>(block + 16 + e % 32, fifth);
        take(fifth, e / 32, 0x01010101u);
        words_at<8>(block + 48 + e / 64 * 32 + e % 32, q);
        take(q, e / 32 % 2 * 4, 0x0f0f0f0fu);
        q[0] |= fifth[0] << 4, q[1] |= fifth[1] << 4;
    }
};

struct Q6_K {
    static constexpr int kBytes = 210, kElements = 256, kOffset = 32;
    static constexpr bool kHasLow = false, kInHalf = false;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        unsigned high[2];
        words_at<2>(block + 128 + e / 128 * 32 + e % 32, high);
        take(high, e % 128 / 32 * 2, 0x03030303u);
        words_at<2>(block + e / 128 * 64 + e % 64, q);
        take(q, e % 128 / 64 * 4, 0x0f0f0f0fu);
        q[0] |= high[0] << 4, q[1] |= high[1] << 4;
    }
    __device__ static int group_scale(Bytes block, int e) { return static_cast<signed char>(block[192 + e / 16]); }
    __device__ static float scale(Bytes block, int e) { return half_at(block + 208) * float(group_scale(block, e)); }
};

struct IQ4_XS {
    static constexpr int kBytes = 136, kElements = 256, kOffset = 128;
    static constexpr bool kHasLow = false, kInHalf = false;

    __device__ static void quants(Bytes block, int e, unsigned (&q)[2]) {
        words_at<8>(block + 8 + e / 32 * 16 + (e & 8), q);
        take(q, (e & 16) >> 2, 0x0f0f0f0fu);
        q[0] = look_up(q[0]), q[1] = look_up(q[1]);
    }
    __device__ static float scale(Bytes block, int e) {
        const int group = e / 32;
        const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
        const int high = block[2 + group / 4] >> group % 4 * 2 & 3;
        return half_at(block) * float((low | high << 4) - 32);
    }
};

// ---- quants as numbers -------------------------------------------------------------------------------------------

// Bytes beside the upper byte of a half between 1024 and 2047 whose last place is one: 1024 + byte. Less 1024 and the
// offset that is the quant, exactly.
template <typename Type>
__device__ inline void as_halves(const unsigned (&q)[2], __half2 (&out)[4]) {
    const __half2 away = __float2half2_rn(-1024.0f - Type::kOffset);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned pair = __byte_perm(q[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140);
        out[i] = __hadd2(*reinterpret_cast<const __half2*>(&pair), away);
    }
}

// The same below a float of 2^23.
template <typename Type>
__device__ inline void as_floats(const unsigned (&q)[2], float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = __uint_as_float(__byte_perm(q[i / 4], 0x4b000000u, 0x7440 + i % 4)) - (8388608.0f + Type::kOffset);
    }
}
