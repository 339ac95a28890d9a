// Numbers of 8 bits in floating point, e4m3fn and e5m2: how they are held, eight at a time or alone, and decoded.
//
// Both convert to half exactly. Instructions are few, because on a card with much bandwidth they would decide: two are
// decoded at a time.
#pragma once

#include "vector.cuh"

struct E4m3 {
    unsigned char bits;
};
struct E5m2 {
    unsigned char bits;
};

// Two e4m3fn bytes, each in the upper half of its 16 bits, as half. Moved one place down, sign kept, the bits are a
// half whose value is 2^-8 of what they stood for, denormals included, because the biases are 15 and 7. The product
// with 2^8 is exact. The one magnitude that is NaN, 0x7F, stands as 0x3F80: adding 0x80 carries into bit 14 for it
// alone, and with that bit it is a half that is NaN, too.
__device__ inline unsigned decode_e4m3(unsigned high_bytes) {
    const unsigned magnitude = (high_bytes & 0x7f007f00u) >> 1;
    const unsigned nan = (magnitude + 0x00800080u) & 0x40004000u;
    const unsigned small = magnitude | nan | (high_bytes & 0x80008000u);
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
    return *reinterpret_cast<const unsigned*>(&value);
}

// Bytes 0 and 1, and 2 and 3, of a word, each moved to the upper half of 16 bits. An e5m2 is then a half already.
__device__ inline unsigned low_bytes(unsigned word) {
    return __byte_perm(word, 0, 0x1404);
}
__device__ inline unsigned high_bytes(unsigned word) {
    return __byte_perm(word, 0, 0x3424);
}

__device__ inline unsigned decode(unsigned bytes, E4m3) {
    return decode_e4m3(bytes);
}
__device__ inline unsigned decode(unsigned bytes, E5m2) {
    return bytes;
}

// Eight elements of each type as they lie in memory.
template <>
struct __align__(8) Pack<E4m3> {
    unsigned words[2];
};
template <>
struct __align__(8) Pack<E5m2> {
    unsigned words[2];
};

template <typename Fp8>
__device__ inline Pack<__half> as_half(const Pack<Fp8>& pack) {
    Pack<__half> out;
    out.words[0] = decode(low_bytes(pack.words[0]), Fp8{});
    out.words[1] = decode(high_bytes(pack.words[0]), Fp8{});
    out.words[2] = decode(low_bytes(pack.words[1]), Fp8{});
    out.words[3] = decode(high_bytes(pack.words[1]), Fp8{});
    return out;
}

__device__ inline void unpack(const Pack<E4m3>& pack, float (&out)[kPack]) {
    unpack(as_half(pack), out);
}
__device__ inline void unpack(const Pack<E5m2>& pack, float (&out)[kPack]) {
    unpack(as_half(pack), out);
}

template <typename Fp8>
__device__ inline float fp8_to_float(Fp8 v) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(decode(static_cast<unsigned>(v.bits) << 8, v))));
}
__device__ inline float to_float(E4m3 v) {
    return fp8_to_float(v);
}
__device__ inline float to_float(E5m2 v) {
    return fp8_to_float(v);
}
