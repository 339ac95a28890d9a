// What happens to the sums before they are stored: bias, activation, gate, residual, the other half of a pair.
#pragma once

#include "gelu.cuh"
#include "linear_core.cuh"

// Eight adjacent elements of half or float.
struct Eight {
    float v[8];

    __device__ void load(const void* base, i64 index, bool is_float) {
        if (is_float) {
            const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(base) + index);
            const float4 low = from[0], high = from[1];
            v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
            v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
        } else {
            const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const __half*>(base) + index);
            const unsigned all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = floats_of(all[i]);
                v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
            }
        }
    }

    __device__ void store(void* base, i64 index, bool is_float) const {
        if (is_float) {
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(base) + index);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *reinterpret_cast<uint4*>(static_cast<__half*>(base) + index) =
                make_uint4(halves_of(v[0], v[1]), halves_of(v[2], v[3]), halves_of(v[4], v[5]), halves_of(v[6], v[7]));
        }
    }

    // The decision is one for all eight, and the same in every lane.
    __device__ void activate(int kind) {
        if (kind == kGeluErf) {
#pragma unroll
            for (float& x : v) x = gelu_erf(x);
        } else if (kind == kGeluTanh) {
#pragma unroll
            for (float& x : v) x = gelu_tanh(x);
        } else if (kind == kSilu) {
#pragma unroll
            for (float& x : v) x = times_logistic(x, x);
        } else if (kind == kRelu) {
#pragma unroll
            for (float& x : v) x = x < 0.0f ? 0.0f : x;  // NaN stays
        }
    }

    __device__ void saturate() {
#pragma unroll
        for (float& x : v) x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    }
};

// A warp's way out: 16 rows of sums at a time go through its own corner of shared memory, so that each lane comes to
// hold eight adjacent columns and a row is stored in whole 128-byte lines.
template <bool kPaired>
struct Epilogue {
    static constexpr int kPitch = kWarpTile + 8;  // floats: eight lanes of a fragment's column meet different banks
    static constexpr int kBytes = 16 * kPitch * 4;
    static constexpr int kOutColumns = kPaired ? kWarpTile / 2 : kWarpTile;
    static constexpr int kLanes = kOutColumns / 8;  // of a row
    static constexpr int kRowsAtOnce = 32 / kLanes;

    const LinearParams& p;

    // row0, column0: of the warp's tile, in the matrix of sums of this grid row.
    __device__ void run(float* corner, const Sums& sums, int row0, int column0) const {
        const int lane = threadIdx.x % 32, row = lane / kLanes, column = column0 + lane % kLanes * 8;
        const float* mine = corner + row * kPitch + lane % kLanes * 8;
        Eight bias;
        if (p.bias != nullptr && column < p.n) bias.load(p.bias, column, p.bias_is_float);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            __syncwarp();
            put(corner, sums, m);
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < 16 / kRowsAtOnce; i++) {
                const int r = row0 + m * 16 + i * kRowsAtOnce + row;
                if (r >= p.m || column >= p.n) continue;
                Eight value;
                value.load(mine + i * kRowsAtOnce * kPitch, 0, true);
                if constexpr (kPaired) {
                    Eight up;
                    up.load(mine + i * kRowsAtOnce * kPitch + kWarpTile / 2, 0, true);
                    value.activate(p.activation);
#pragma unroll
                    for (int c = 0; c < 8; c++) value.v[c] *= up.v[c] * p.scale;
                    finish(value, r, column);
                } else {
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        value.v[c] = p.bias == nullptr ? value.v[c] * p.scale : fmaf(value.v[c], p.scale, bias.v[c]);
                    }
                    value.activate(p.activation);
                    finish(value, r, column);
                }
            }
        }
    }

    __device__ void put(float* corner, const Sums& sums, int m) const {
        const int lane = threadIdx.x % 32;
        float* to = corner + lane / 4 * kPitch + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kGroups * 2; i++) {
            const float (&c)[4] = sums[i / 2][i % 2][m];
            *reinterpret_cast<float2*>(to + i * 8) = make_float2(c[0], c[1]);
            *reinterpret_cast<float2*>(to + i * 8 + 8 * kPitch) = make_float2(c[2], c[3]);
        }
    }

    // Gate and residual, and the one rounding. r: row within this grid row.
    __device__ void finish(Eight& value, int r, int column) const {
        const i64 row = i64(blockIdx.y) * p.m + r;
        const unsigned batch = row / p.tokens, token = row - i64(batch) * p.tokens;
        if (p.gate != nullptr) {
            Eight gate;
            gate.load(p.gate, batch * p.gate_batch + token / unsigned(p.tokens_per_frame) * p.gate_frame + column,
                      p.gate_is_float);
#pragma unroll
            for (int c = 0; c < 8; c++) value.v[c] *= gate.v[c];
        }
        if (p.residual != nullptr) {
            Eight residual;
            residual.load(p.residual, batch * p.residual_batch + token * p.residual_row + column, p.residual_is_float);
#pragma unroll
            for (int c = 0; c < 8; c++) value.v[c] += residual.v[c];
        }
        if (p.saturate) value.saturate();
        value.store(p.out, batch * p.out_batch + token * p.out_row + column, p.out_is_float);
    }
};
