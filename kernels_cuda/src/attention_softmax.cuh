// What the attention kernels share: the exponential, the range of the weights, the queries of `fast`, the way out.
#pragma once

#include "fast.cuh"
#include "half_sums.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNever = 1e30f;  // minus the maximum of a row that has seen no key

__device__ inline float minus_infinity() {
    return __int_as_float(0xff800000);
}

// Weights are 2^(score - maximum - kShift); the maximum is stale by at most kSlack.
template <bool kFast>
struct Softmax {
    static constexpr float kShift = kFast ? 7.0f : 0.0f;
    static constexpr float kSlack = kFast ? 1.0f : 8.0f;
};

// What two weights, rounded to half, add to the sum that divides them in the end. Rounded, because the values are
// multiplied with rounded ones: where one key has all the weight, its rounding then cancels.
__device__ inline float sum_of(unsigned weights) {
    const float2 pair = to_floats(weights);
    return pair.x + pair.y;
}

// Two elements of the result. A weighted mean of finite values lies among them, so it fits; where rounded weights carry
// it a little beyond the largest half, that is what it is. Infinities and NaN stay.
__device__ inline float within_half(float mean) {
    return fabsf(mean) < 66000.0f ? fminf(fmaxf(mean, -65504.0f), 65504.0f) : mean;
}
__device__ inline unsigned mean_halves(float low, float high) {
    return to_halves(within_half(low), within_half(high));
}

// Some rows of a warp's result, from the tile where they lie to where they belong: 16 bytes a lane, rows before `end`.
// lane: found once, because code that asks for it again keeps other registers through the kernel's loop.
template <typename Tile, int kRows, int kUnits>
__device__ inline void store_rows(int lane, unsigned room, __half* head, i64 apart, int row0, int end) {
#pragma unroll
    for (int i = 0; i < kRows * kUnits / 32; i++) {
        const int at = i * 32 + lane, row = row0 + at / kUnits;
        unsigned words[4];
        load_words(words, room + Tile::offset(at / kUnits, at % kUnits));
        if (row < end) {
            *reinterpret_cast<uint4*>(head + row * apart + at % kUnits * 8) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// A row that saw no key is all zeros.
__device__ inline float inverse_sum(float sum) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
    return sum == 0 ? 0 : inverse;
}

// Scales the warp's queries by a power of two, so that the sum of magnitudes of every row is below 1/2.
template <int kM, int kSteps>
__device__ inline void shrink_queries(unsigned (&q)[kM][kSteps][4], float& scale) {
    float most = 0;
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float norm = 0;
#pragma unroll
            for (int ks = 0; ks < kSteps; ks++) {
                const float2 a = to_floats(q[m][ks][r]), b = to_floats(q[m][ks][r + 2]);
                norm += (fabsf(a.x) + fabsf(a.y)) + (fabsf(b.x) + fabsf(b.y));
            }
            norm += __shfl_xor_sync(~0u, norm, 1);
            norm += __shfl_xor_sync(~0u, norm, 2);
            if (norm < kNever) most = fmaxf(most, norm);  // a row with Inf or NaN has no finite result to protect
        }
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    // most < 2^(e + 1), so 2^-(e + 2) brings every row under 1/2.
    const int e = most > 0 ? (__float_as_int(most) >> 23) - 127 : -2;
    const float shrink = __int_as_float((127 - (e + 2)) << 23);
    scale *= __int_as_float((127 + (e + 2)) << 23);
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
        for (int ks = 0; ks < kSteps; ks++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = to_floats(q[m][ks][i]);
                q[m][ks][i] = to_halves(pair.x * shrink, pair.y * shrink);
            }
        }
    }
}
