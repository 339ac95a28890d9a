// What happens to the sums of a convolution before they are stored: bias, activation, residual.
#pragma once

#include "conv_core.cuh"
#include "eight.cuh"

// A warp's way out: an image row at a time goes through its own corner of shared memory, so that each lane comes to
// hold eight adjacent channels of a pixel.
template <class Cut>
struct ConvEpilogue {
    static constexpr int kPitch = Cut::kWarpColumns + 8;  // floats: lanes of a fragment's column meet different banks
    static constexpr int kBytes = kPatchPixels * kPitch * 4;
    static constexpr int kTall = sizeof(typename Cut::Sums) / sizeof(float[Cut::kWarpColumns / 8][4]);
    static constexpr int kLanes = Cut::kWarpColumns / 8;  // of a pixel

    const ConvParams& p;
    const i64 batch = blockIdx.y / p.frames, frame = blockIdx.y % p.frames;

    // x, y: of the warp's first pixel; column: of its first channel.
    __device__ void run(float* corner, const typename Cut::Sums& sums, int x, int y, int column) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int m = 0; m < kTall; m++) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kTall; i++) {  // registers have no index at run time
                if (i == m) put(corner, sums, i);
            }
            __syncwarp();
            if (y + m >= p.out_height) continue;
#pragma unroll 1
            for (int i = lane; i < kPatchPixels * kLanes; i += 32) {
                const int pixel = i / kLanes, c = i % kLanes * 8;
                if (x + pixel < p.out_width && column + c < p.n) {
                    finish(corner + pixel * kPitch + c, x + pixel, y + m, column + c);
                }
            }
        }
    }

    __device__ void put(float* corner, const typename Cut::Sums& sums, int m) const {
        const int lane = threadIdx.x % 32;
        float* to = corner + lane / 4 * kPitch + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Cut::kWarpColumns / 8; i++) {
            const float (&c)[4] = sums[i / 2][i % 2][m];
            *reinterpret_cast<float2*>(to + i * 8) = make_float2(c[0], c[1]);
            *reinterpret_cast<float2*>(to + i * 8 + 8 * kPitch) = make_float2(c[2], c[3]);
        }
    }

    // Eight channels of a pixel, or what is left of them where n is no multiple.
    __device__ void finish(const float* from, int x, int y, int column) const {
        if (Cut::kPhased) x = 2 * x + Cut::phase() % 2, y = 2 * y + Cut::phase() / 2;
        const i64 to = batch * p.out_batch + frame * p.out_frame + y * i64(p.out_row) + x * i64(p.out_pixel) + column;
        const i64 kept = batch * p.residual_batch + frame * p.residual_frame + y * i64(p.residual_row) +
                         x * i64(p.residual_pixel) + column;
        const int count = min(8, p.n - column);
        Eight value, other;
        value.load(from, 0, true);
        if (p.bias != nullptr) load(other, p.bias, column, p.bias_is_float, count), value.add(other);
        value.activate(p.activation);
        if (p.residual != nullptr) load(other, p.residual, kept, false, count), value.add(other);
        if (p.n % 8 == 0) {
            value.store(p.out, to, false);
        } else {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                if (c < count) p.out[to + c] = __float2half_rn(value.v[c]);
            }
        }
    }

    __device__ void load(Eight& to, const void* from, i64 index, bool is_float, int count) const {
        if (p.n % 8 == 0) {
            to.load(from, index, is_float);
            return;
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const i64 at = index + min(c, count - 1);
            to.v[c] =
                is_float ? static_cast<const float*>(from)[at] : __half2float(static_cast<const __half*>(from)[at]);
        }
    }
};
