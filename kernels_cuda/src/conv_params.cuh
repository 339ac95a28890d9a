// The arguments of every kernel of conv. Mirrored by ConvParams in ops/conv/conv.py.
#pragma once

#include "mma.cuh"

// What stands beyond an image's edge: the pixels inside of it from the second one on, or the edge's own again and
// again.
enum Border { kReflect, kReplicate };

struct ConvParams {
    const __half* x;         // [batch, frame, row, pixel, channel], channels adjacent
    const __half* cache;     // the frames just before x, likewise, or null
    const __half* weight;    // [n, tap of time, tap, channel], dense; of an upsampling: one such for each phase
    const void* bias;        // [n], or null
    const __half* residual;  // like out, or null
    __half* out;             // [batch, frame, row, pixel, n]
    i64 x_batch, x_frame, cache_batch, cache_frame;  // strides are in elements
    i64 residual_batch, residual_frame, out_batch, out_frame;
    int x_row, x_pixel, cache_row, cache_pixel;
    int residual_row, residual_pixel, out_row, out_pixel;
    int height, width;          // of x
    int out_height, out_width;  // of out; of an upsampling: of one phase, which is x's
    int top, left;              // rows and columns of zeros before x
    int channels, n;            // channels are a multiple of 8
    int time_taps, time_step;   // taps of time; input frames from one output frame to the next
    int before, cached;         // frames that the first output frame sees before x, and how many of them are cached
    int frames;                 // of out
    int activation;             // enum Activation
    int bias_is_float;
    int border;  // enum Border, of the kernels of bordered_conv
};
