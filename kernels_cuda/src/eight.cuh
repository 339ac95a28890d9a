// Eight adjacent elements of a row of results: how the epilogues of the matrix kernels move and finish them.
#pragma once

#include "bf16.cuh"
#include "gelu.cuh"
#include "mma.cuh"

// Mirrored by ACTIVATIONS in ops/matmul/linear_operands.py.
enum Activation { kIdentity, kGeluErf, kGeluTanh, kSilu, kRelu };

// Eight adjacent elements of two bytes or float, as they lie in memory.
struct Words {
    uint4 low, high;

    __device__ void load(const void* base, i64 index, bool is_float) {
        if (is_float) {
            const uint4* from = reinterpret_cast<const uint4*>(static_cast<const float*>(base) + index);
            low = from[0], high = from[1];
        } else {
            low = *reinterpret_cast<const uint4*>(static_cast<const __half*>(base) + index);
        }
    }
};

// The same, to compute with. is_bf16: elements of two bytes are bf16, not half.
struct Eight {
    float v[8];

    __device__ void unpack(const Words& words, bool is_float, bool is_bf16 = false) {
        const uint4 &l = words.low, &h = words.high;
        const unsigned all[8] = {l.x, l.y, l.z, l.w, h.x, h.y, h.z, h.w};
        if (is_float) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = __uint_as_float(all[i]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = is_bf16 ? two_floats<__nv_bfloat16>(all[i]) : to_floats(all[i]);
                v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
            }
        }
    }

    __device__ void load(const void* base, i64 index, bool is_float, bool is_bf16 = false) {
        Words words;
        words.load(base, index, is_float);
        unpack(words, is_float, is_bf16);
    }

    __device__ void store(void* base, i64 index, bool is_float, bool is_bf16 = false) const {
        if (is_float) {
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(base) + index);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[i] = is_bf16 ? to_bf16s(v[2 * i], v[2 * i + 1]) : to_halves(v[2 * i], v[2 * i + 1]);
            }
            *reinterpret_cast<uint4*>(static_cast<__half*>(base) + index) =
                make_uint4(words[0], words[1], words[2], words[3]);
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

    __device__ void add(const Eight& other) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += other.v[i];
    }

    __device__ void saturate() {
#pragma unroll
        for (float& x : v) x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    }
};
