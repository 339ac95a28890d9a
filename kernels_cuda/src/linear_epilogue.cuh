// What happens to the sums before they are stored: bias, activation, gate, residual, the other half of a pair.
#pragma once

#include "eight.cuh"
#include "linear_core.cuh"

// What a sum is multiplied with: of floats the op's scale, whatever row and column it is of. What is of a row is asked
// for a row ahead, and taken when it is wanted.
struct OneFactor {
    using Sum = float;

    __device__ void of_columns(const LinearParams&, int) {}
    __device__ void ask_row(const LinearParams&, int) {}
    __device__ void take_row() {}
    __device__ float at(const LinearParams& p, int) const { return p.scale; }
    // Of a pair: what the gate's sums are multiplied with, and the others'.
    __device__ float of_gate(const LinearParams&, int) const { return 1.0f; }
    __device__ float of_up(const LinearParams& p, int) const { return p.scale; }
    // Whether what is of two bytes is bf16, not half: bias, residual and gate; out.
    __device__ static constexpr bool beside_is_bf16() { return false; }
    __device__ static constexpr bool out_is_bf16() { return false; }
};

// A warp's way out: 16 rows of sums at a time go through its own corner of shared memory, so that each lane comes to
// hold eight adjacent columns and a row is stored in whole 128-byte lines.
template <bool kPaired, int kBands = 4, typename Factor = OneFactor>
struct Epilogue {
    using Sums = SumsOf<kBands, typename Factor::Sum>;
    static constexpr int kPitch = kWarpTile + 8;  // floats: eight lanes of a fragment's column meet different banks
    static constexpr int kBytes = 16 * kPitch * 4;
    static constexpr int kOutColumns = kPaired ? kWarpTile / 2 : kWarpTile;
    static constexpr int kLanes = kOutColumns / 8;  // of a row
    static constexpr int kRowsAtOnce = 32 / kLanes;

    const LinearParams& p;

    // A row of residual, gate and out: the batch it is of, and its number there.
    struct Place {
        unsigned batch, token;
    };
    __device__ Place place(int r) const {  // r: row within this grid row. All rows together are fewer than 2^31
        const unsigned row = blockIdx.y * unsigned(p.m) + r, batch = row / unsigned(p.tokens);
        return {batch, row - batch * p.tokens};
    }
    // kRowsAtOnce rows on: a division takes as long as all the rest of a row.
    __device__ void advance(Place& at) const {
        at.token += kRowsAtOnce;
        while (at.token >= unsigned(p.tokens)) at.token -= p.tokens, at.batch++;
    }

    // row0, column0: of the warp's tile, in the matrix of sums of this grid row.
    __device__ void run(float* corner, const Sums& sums, int row0, int column0, Factor factor = {}) const {
        const int lane = lane_again(), row = lane / kLanes, column = column0 + lane % kLanes * 8;
        const float* mine = corner + row * kPitch + lane % kLanes * 8;
        const int end = column < p.n ? min(p.m, row0 + 16 * kBands) : 0;
        Eight bias;
        if (p.bias != nullptr && column < p.n) bias.load(p.bias, column, p.bias_is_float, factor.beside_is_bf16());
        if (column < p.n) factor.of_columns(p, column);
        // The residual is asked for a row ahead.
        int r = row0 + row;
        Place at = place(r);
        Words residual;
        if (r < end) load_residual(residual, at, column);
        if (r < end) factor.ask_row(p, r);
#pragma unroll
        for (int m = 0; m < kBands; m++) {
            __syncwarp();
            put(corner, sums, m);
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < 16 / kRowsAtOnce; i++, r += kRowsAtOnce) {
                const Place here = at;
                const Words added = residual;
                advance(at);
                if (r + kRowsAtOnce < end) load_residual(residual, at, column);
                factor.take_row();
                if (r + kRowsAtOnce < end) factor.ask_row(p, r + kRowsAtOnce);
                if (r >= end) continue;
                Eight value;
                value.load(mine + i * kRowsAtOnce * kPitch, 0, true);
                if constexpr (kPaired) {
                    Eight up;
                    up.load(mine + i * kRowsAtOnce * kPitch + kWarpTile / 2, 0, true);
#pragma unroll
                    for (int c = 0; c < 8; c++) value.v[c] *= factor.of_gate(p, c);
                    value.activate(p.activation);
#pragma unroll
                    for (int c = 0; c < 8; c++) value.v[c] *= up.v[c] * factor.of_up(p, c);
                } else {
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        value.v[c] = p.bias == nullptr ? value.v[c] * factor.at(p, c)
                                                       : fmaf(value.v[c], factor.at(p, c), bias.v[c]);
                    }
                    value.activate(p.activation);
                }
                finish(value, added, here, column, factor);
            }
        }
    }

    __device__ void load_residual(Words& words, Place at, int column) const {
        if (p.residual == nullptr) return;
        words.load(p.residual, at.batch * p.residual_batch + at.token * p.residual_row + column, p.residual_is_float);
    }

    __device__ void put(float* corner, const Sums& sums, int m) const {
        const int lane = lane_again();
        float* to = corner + lane / 4 * kPitch + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kGroups * 2; i++) {
            const typename Factor::Sum(&c)[4] = sums[i / 2][i % 2][m];
            *reinterpret_cast<float2*>(to + i * 8) = make_float2(float(c[0]), float(c[1]));
            *reinterpret_cast<float2*>(to + i * 8 + 8 * kPitch) = make_float2(float(c[2]), float(c[3]));
        }
    }

    // Gate and residual, and the one rounding.
    __device__ void finish(Eight& value, const Words& added, Place at, int column, const Factor& factor) const {
        if (p.gate != nullptr) {
            Eight gate;
            gate.load(p.gate, at.batch * p.gate_batch + at.token / unsigned(p.tokens_per_frame) * p.gate_frame + column,
                      p.gate_is_float, factor.beside_is_bf16());
#pragma unroll
            for (int c = 0; c < 8; c++) value.v[c] *= gate.v[c];
        }
        if (p.residual != nullptr) {
            Eight residual;
            residual.unpack(added, p.residual_is_float, factor.beside_is_bf16());
            value.add(residual);
        }
        if (p.saturate) value.saturate();
        value.store(p.out, at.batch * p.out_batch + at.token * p.out_row + column, p.out_is_float,
                    factor.out_is_bf16());
    }
};
