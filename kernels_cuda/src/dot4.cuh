// Products of small integers without tensor cores (compute capability 6.1): one instruction multiplies the four bytes
// of a word with those of another and adds all to a 32-bit sum, as fast as a multiply-add of floats.
//
// What a fragment of C is on tensor cores (mma.cuh) is here the sums that a lane makes itself, so all that comes before
// and behind a product stays as it is: tiles in shared memory, masks, softmax, the way out. Only the operands come
// another way. A lane reads 16 bytes of k of each of its rows and columns; lanes that share a row or a column read the
// same address, which costs nothing, and the swizzle of the tiles keeps the others in different banks.
#pragma once

#include "mma.cuh"

// Steps in which a word is multiplied. Of 4-bit integers two: the even ones, then the odd ones.
template <typename Sum>
constexpr int kPartsOfDot = 1;
template <>
constexpr int kPartsOfDot<Int4Sum> = 2;

__device__ inline void dot4(int& sum, unsigned a, unsigned b, int) {
    sum = __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}
__device__ inline void dot4(Int4Sum& sum, unsigned a, unsigned b, int part) {
    const unsigned x = part == 0 ? even_numbers(a) : odd_numbers(a), y = part == 0 ? even_numbers(b) : odd_numbers(b);
    sum.units = __dp4a(static_cast<int>(x), static_cast<int>(y), sum.units);
}

// Bytes without a sign times bytes with one.
__device__ inline int dot4_unsigned(unsigned a, unsigned b, int sum) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}
