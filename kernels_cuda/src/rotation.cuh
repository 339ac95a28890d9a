// Hadamard matrices along a row, as the ConvRot files have them: in groups of 4, 16, 64 or 256 neighbours.
//
// The matrix of 4 is  1  1  1 -1     that of 4^n has products of its entries, one factor for each digit of the two
//                     1  1 -1  1     numbers to base 4. It is its own transpose, and 2^n times its own inverse: turning
//                     1 -1  1  1     twice gives 4^n times what was there, and two rows turned alike keep their product
//                    -1  1  1  1     but for that factor.
//
// A digit after the other is turned. Of four values: s = a + b, t = c + d, u = a - b, v = c - d; s + v, s - v, t + u,
// t - u. A lane has eight neighbours and a warp 256: digit 0 lies within the lane, digit 1 in an element's third bit
// and the lane's first one, digits 2 and 3 in two bits of the lane each. For these last the four lanes are better off
// with the second and the fourth exchanged at first, which costs nothing where the row is loaded (`place`).
#pragma once

#include "vector.cuh"

struct Rotation {
    int group;  // 4, 16, 64 or 256; 0: nothing is turned

    // 1 over the root of the group.
    __device__ float root() const {
        return group == 256 ? 0.0625f : group == 64 ? 0.125f : group == 16 ? 0.25f : group == 4 ? 0.5f : 1.0f;
    }

    // Whose eight elements a thread loads.
    __device__ int place(int thread) const {
        if (group >= 64) thread ^= (thread & 2) << 1;
        if (group >= 256) thread ^= (thread & 8) << 1;
        return thread;
    }

    // All lanes of a warp together.
    __device__ void turn(float (&x)[kPack]) const {
        if (group == 0) return;
#pragma unroll
        for (int i = 0; i < kPack; i += 4) {
            const float s = x[i] + x[i + 1], u = x[i] - x[i + 1], t = x[i + 2] + x[i + 3], v = x[i + 2] - x[i + 3];
            x[i] = s + v, x[i + 1] = s - v, x[i + 2] = t + u, x[i + 3] = t - u;
        }
        if (group == 4) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = x[i] + x[i + 4], other = __shfl_xor_sync(~0u, x[i] - x[i + 4], 1);
            x[i] = sum + other, x[i + 4] = sum - other;
        }
        if (group == 16) return;
        turn_lanes<2>(x);
        if (group == 64) return;
        turn_lanes<8>(x);
    }

private:
    // The digit whose lower bit is kBit of the lane. The lanes hold a, d, c, b.
    template <int kBit>
    __device__ static void turn_lanes(float (&x)[kPack]) {
        const bool low = threadIdx.x & kBit;
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            // Lanes 0 and 3: a + b, a - b; lanes 2 and 1: c + d, c - d. Then these two by two.
            float other = __shfl_xor_sync(~0u, x[i], 3 * kBit);
            x[i] = low ? other - x[i] : x[i] + other;
            other = __shfl_xor_sync(~0u, x[i], kBit);
            x[i] = low ? other - x[i] : x[i] + other;
        }
    }
};
