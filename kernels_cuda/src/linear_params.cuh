// The arguments of every kernel of linear. Mirrored by LinearParams in ops/matmul/linear.py.
#pragma once

#include "mma.cuh"

struct LinearParams {
    const __half* x;       // [batch, m, k]
    const __half* weight;  // [n, k]; of a pair: the gate's
    const __half* up;      // [n, k] of a pair, else null
    const void* bias;      // [n], or null
    const void* residual;  // [rows, n], or null
    const void* gate;      // a row of n for a batch, a frame or a token, or null
    void* out;             // [rows, n]; may be the residual
    i64 x_batch;           // strides are in elements; those of a row are adjacent
    i64 residual_batch, residual_row;
    i64 gate_batch, gate_frame;
    i64 out_batch, out_row;
    int x_row, weight_row;  // up has weight's
    int m, n, k;            // k and n are multiples of 8
    int tokens;             // of a batch of residual, gate and out: m is one of them or all of them
    int tokens_per_frame;   // that share a row of gate
    int activation;         // enum Activation
    float scale;
    int saturate;
    int bias_is_float, residual_is_float, gate_is_float, out_is_float;
};
