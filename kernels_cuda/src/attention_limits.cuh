// What stands between a product and its softmax: scale, bias and masks, for the 32 x 32 scores of a warp.
//
// s[n][m] is the C tile of keys 8n and queries 16m on. Everything is in powers of two: a bias is scaled by log2(e).
// Queries and keys that do not exist read the nearest one that does, and are masked or not written.
#pragma once

#include "attention_params.cuh"
#include "attention_softmax.cuh"

constexpr int kStep = 32;  // keys of one round of scores, softmax, values

// Scale, bias and masks: everything that is not a plain product. Leaves powers of two.
__device__ inline void adjust(float (&s)[4][2][4], const AttentionParams& p, float scale, int row0, int key0,
                              int keys) {
    const int column = key0 + (lane_again() & 3) * 2;
    const int mine = row0 + (lane_again() >> 2);
    const auto row = [&](int m, int r) { return mine + m * 16 + r * 8; };
    if (p.relative == nullptr) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][m][i] *= scale;
            }
        }
    } else {
        // Along a diagonal of 8x8 tiles the distances repeat: 14 loads serve 32 scores. At the edge rows beyond the
        // last query and keys beyond the last, which are masked below, read the nearest distance there is.
        const float* relative = p.relative + blockIdx.y * p.relative_head + p.relative_zero;
        const int least = column - row(0, 0);
        const bool inside = row0 + kStep <= p.q_length && key0 + kStep <= p.k_length;
        float by[7][2];
        if (inside) {
#pragma unroll
            for (int d = 0; d < 14; d++) by[d / 2][d % 2] = (relative + least)[(d / 2 - 3) * 8 + d % 2];
        } else {
#pragma unroll
            for (int d = 0; d < 14; d++) {
                const int distance = least + (d / 2 - 3) * 8 + d % 2;
                by[d / 2][d % 2] = relative[min(max(distance, 1 - p.q_length), p.k_length - 1)];
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][m][i] = fmaf(s[n][m][i], scale, by[3 + n - 2 * m - i / 2][i % 2] * kLog2E);
                }
            }
        }
    }
    if (p.bias != nullptr) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const __half* from = p.bias + blockIdx.z * p.bias_batch + blockIdx.y * p.bias_head +
                                     min(row(m, r), p.q_length - 1) * p.bias_query;
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int key = min(column + 8 * n + i, p.k_length - 1);
                        s[n][m][2 * r + i] = fmaf(__half2float(from[key]), kLog2E, s[n][m][2 * r + i]);
                    }
                }
            }
        }
    }
    if (p.mask != nullptr) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned char* from = p.mask + blockIdx.z * p.mask_batch + blockIdx.y * p.mask_head +
                                            min(row(m, r), p.q_length - 1) * p.mask_query;
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int key = min(column + 8 * n + i, p.k_length - 1);
                        if (from[key] == 0) s[n][m][2 * r + i] = minus_infinity();
                    }
                }
            }
        }
    }
    const int shift = p.k_length - p.q_length;
    const bool right = p.window_right >= 0, left = p.window_left >= 0;
    const int first = left ? row0 + 31 + shift - p.window_left : 0;
    const int last = right ? min(keys, row0 + shift + p.window_right + 1) : keys;
    if (key0 < first || key0 + kStep > last) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int from = left ? row(m, r) + shift - p.window_left : 0;
                const int to = right ? min(keys, row(m, r) + shift + p.window_right + 1) : keys;
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int key = column + 8 * n + i;
                        if (key < from || key >= to) s[n][m][2 * r + i] = minus_infinity();
                    }
                }
            }
        }
    }
}

// Keys whose bits are set count elsewhere.
__device__ inline void hide(float (&s)[4][2][4], unsigned bits) {
    bits >>= (lane_again() & 3) * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (bits >> (8 * n + (i & 1)) & 1) s[n][m][i] = minus_infinity();
            }
        }
    }
}

// Keys from `keys` on do not exist.
__device__ inline void cut(float (&s)[4][2][4], int key0, int keys) {
    const int column = key0 + (lane_again() & 3) * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (column + 8 * n + (i & 1) >= keys) s[n][m][i] = minus_infinity();
            }
        }
    }
}
