// What happens to the sums before they are stored: bias, activation, gate, residual, the other half of a pair.
#pragma once

#include "eight.cuh"
#include "linear_core.cuh"

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
