// Codes of 4 or 6 bits, as files have them: eight neighbours of a row at a time, as bytes.
//
//   4 bits   byte j of a row has the codes of columns 2j (lower four bits) and 2j + 1 (upper four)
//   6 bits   so lie the lower four bits of all k columns, in k / 2 bytes; behind them, in k / 4 bytes, the upper two:
//            those of column c in byte c / 4, from bit 2 (c % 4) on
//
// A code is unsigned here. One that a file has as two's complement is the same with its highest bit turned over, and 8
// (of 6 bits: 32) is taken from either.
//
// Even and odd columns stay apart: a mask separates four codes at once, where putting neighbours in order would take an
// instruction for each. A column is looked for by a number known at compile time, so order costs nothing afterwards.
#pragma once

#include "vector.cuh"

class EightCodes {
public:
    // nibbles: four bytes, the first column in the lowest bits.
    __device__ explicit EightCodes(unsigned nibbles) : even_(nibbles & kNibbles), odd_(nibbles >> 4 & kNibbles) {}

    // The upper two bits of eight codes of 6: those of column i from bit 2 i on. Each byte of four columns is there
    // twice, for its first two columns and its last two; of the four fields in a copy two are taken, and moved to bit 4
    // of its byte.
    __device__ void add_upper(unsigned bits) {
        const unsigned twice = __byte_perm(bits, 0, 0x1100);
        even_ |= (twice & 0x00030003u) << 4 | (twice & 0x30003000u);
        odd_ |= (twice & 0x000c000cu) << 2 | (twice & 0xc000c000u) >> 2;
    }

    // The code of column i.
    __device__ unsigned operator[](int i) const { return (i % 2 ? odd_ : even_) >> i / 2 * 8 & 0xffu; }

    // The same less kZero, as a float. The bytes become the lowest bits of 2^23, whose unit is 1: one instruction, and
    // one that takes 2^23 away, where a conversion runs at a quarter of the rate. Exact.
    template <int kZero>
    __device__ float less(int i) const {
        const unsigned bits = __byte_perm(i % 2 ? odd_ : even_, 0x4b000000u, 0x7440 + i / 2);
        return __uint_as_float(bits) - (8388608.0f + kZero);
    }

private:
    static constexpr unsigned kNibbles = 0x0f0f0f0fu;

    unsigned even_, odd_;  // columns 0, 2, 4, 6 and 1, 3, 5, 7: a byte each
};

// Four whole numbers from -128 to 127 as bytes, the first the lowest.
__device__ inline unsigned four_bytes(const int (&n)[4]) {
    return __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
}
