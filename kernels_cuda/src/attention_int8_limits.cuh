// What stands between a product of bytes and its softmax: bias, masks and edges, for 8 kM x 64 scores of a warp.
//
// s[g][j][m][i] is, as bits of a float, the score of query 8m + lane / 4 and key 16g + 4 (lane % 4) + 2j + i: kMagic
// and the exact sum of products. Queries and keys that do not exist read the nearest one that does, and are masked or
// not written.
#pragma once

#include "attention_int8_mma.cuh"
#include "attention_params.cuh"
#include "attention_softmax.cuh"
#include "bf16.cuh"

constexpr int kKeyTile = 64;

// Of the 16 keys of a lane, by their numbers in s: the first key, and how far each lies behind it.
__device__ inline int first_key(int key0) {
    return key0 + (lane_again() & 3) * 4;
}
__device__ inline constexpr int key_of(int i) {
    return i / 4 * 16 + i % 4;
}

template <int kM>
__device__ inline int& score_of(int (&s)[4][2][kM][2], int m, int i) {
    return s[i / 4][i / 2 % 2][m][i % 2];
}

constexpr int kMinusInfinity = 0xff800000;

// Keys from `keys` on do not exist.
template <int kM>
__device__ inline void cut(int (&s)[4][2][kM][2], int key0, int keys) {
    const int first = first_key(key0);
#pragma unroll
    for (int i = 0; i < 16; i++) {
#pragma unroll
        for (int m = 0; m < kM; m++) {
            if (first + key_of(i) >= keys) score_of(s, m, i) = kMinusInfinity;
        }
    }
}

// Keys whose bits are set count elsewhere.
template <int kM>
__device__ inline void hide(int (&s)[4][2][kM][2], unsigned low, unsigned high) {
    const int shift = (lane_again() & 3) * 4;
    low >>= shift, high >>= shift;
#pragma unroll
    for (int i = 0; i < 16; i++) {
#pragma unroll
        for (int m = 0; m < kM; m++) {
            if ((i < 8 ? low : high) >> (key_of(i) & 31) & 1) score_of(s, m, i) = kMinusInfinity;
        }
    }
}

// Everything that is not a plain product. by: from a row's exact sums to powers of two, which are left behind.
template <int kM>
__device__ inline void adjust(int (&s)[4][2][kM][2], const float (&by)[kM], const AttentionParams& p, int row0,
                              int key0, int keys) {
    const int mine = row0 + (lane_again() >> 2), first = first_key(key0);
    const auto row = [&](int m) { return mine + m * 8; };
    const auto there = [&](int m) { return min(row(m), p.q_length - 1); };
    const auto key = [&](int i) { return min(first + key_of(i), p.k_length - 1); };
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int& x = score_of(s, m, i);
            x = __float_as_int((__int_as_float(x) - kMagic) * by[m]);
        }
    }
    if (p.relative != nullptr) {
        const float* relative = p.relative + blockIdx.y * p.relative_head + p.relative_zero;
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int& x = score_of(s, m, i);
                x = __float_as_int(fmaf(relative[key(i) - there(m)], kLog2E, __int_as_float(x)));
            }
        }
    }
    if (p.bias != nullptr) {
        const __half* from = p.bias + blockIdx.z * p.bias_batch + blockIdx.y * p.bias_head;
        float bias[16];
#pragma unroll
        for (int m = 0; m < kM; m++) {
            if (m == 0 || p.bias_query != 0) {  // a bias of keys is the same for all rows
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const unsigned word = __half_as_ushort((from + there(m) * p.bias_query)[key(i)]);
                    const float2 pair = p.is_bf16 ? two_floats<__nv_bfloat16>(word) : to_floats(word);
                    bias[i] = pair.x * kLog2E;
                }
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int& x = score_of(s, m, i);
                x = __float_as_int(__int_as_float(x) + bias[i]);
            }
        }
    }
    if (p.mask != nullptr) {
        const unsigned char* from = p.mask + blockIdx.z * p.mask_batch + blockIdx.y * p.mask_head;
        unsigned seen = 0;
#pragma unroll
        for (int m = 0; m < kM; m++) {
            if (m == 0 || p.mask_query != 0) {
                seen = 0;
#pragma unroll
                for (int i = 0; i < 16; i++) seen |= unsigned((from + there(m) * p.mask_query)[key(i)] != 0) << i;
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (!(seen >> i & 1)) score_of(s, m, i) = kMinusInfinity;
            }
        }
    }
    const int shift = p.k_length - p.q_length;
    const bool right = p.window_right >= 0, left = p.window_left >= 0;
    const int begin = left ? row0 + 8 * kM - 1 + shift - p.window_left : 0;
    const int end = right ? min(keys, row0 + shift + p.window_right + 1) : keys;
    if (key0 >= begin && key0 + kKeyTile <= end) return;
#pragma unroll
    for (int m = 0; m < kM; m++) {
        const int from = left ? row(m) + shift - p.window_left : 0;
        const int to = right ? min(keys, row(m) + shift + p.window_right + 1) : keys;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int at = first + key_of(i);
            if (at < from || at >= to) score_of(s, m, i) = kMinusInfinity;
        }
    }
}
