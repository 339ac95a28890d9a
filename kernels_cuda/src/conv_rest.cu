// conv_rest: what is left to do of a convolution whose products another library has added up.
//
//   out = residual + activation(out + (bias + added))     in place; bias, added and residual optional
//
// torch adds the bias behind cuDNN's convolution in a pass of its own that reads an element at a time, then comes one
// pass for the activation and one for the residual. Here it is one pass; the sums are float, rounded once.
//
// `added` is a row of channels for each picture, as a U-Net adds the time: it goes to the bias, in float.
//
// Layout. out, residual: [picture, pixel, n] half, dense, n a multiple of 8. bias: [n], half or float. added: [picture,
// n] half, rows anywhere at multiples of 16 bytes. Where nothing is added all pictures are one.
//
// Bytes per element: 2 read + 2 written, with a residual 4 + 2. bias and added stay in L1.
//
// Access: packs of eight channels, neighbours to neighbouring threads, whatever n is: pictures of 128 channels would
// leave most of a block idle if it had a pixel. A thread loads all its packs before it computes. The one division, for
// a pack's channels, is of 32 bits, some 20 instructions for 32 bytes and more; which picture a block is in stands in
// the grid.

#include "eight.cuh"

constexpr int kThreads = 256;  // THREADS in ops/conv/conv_torch.py
constexpr int kHeld = 4;       // packs of a thread, HELD

// Mirrored by ConvRestParams in ops/conv/conv_torch.py. Pointers first.
struct ConvRestParams {
    __half* out;
    const void* bias;        // null: 0
    const __half* residual;  // null: 0
    const __half* added;     // null: 0
    i64 added_step;          // elements from a picture's row to the next one's
    unsigned packs, across;  // of eight channels: those of a picture, and those of a pixel
    int activation;          // enum Activation
    int bias_is_float;
};

extern "C" __global__ void __launch_bounds__(kThreads) conv_rest(const __grid_constant__ ConvRestParams p) {
    const unsigned first = blockIdx.x * (kHeld * kThreads) + threadIdx.x;
    const i64 picture = blockIdx.y, before = picture * p.packs;
    Words sums[kHeld], kept[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const unsigned pack = first + i * kThreads;
        if (pack >= p.packs) break;
        sums[i].load(p.out, (before + pack) * 8, false);
        if (p.residual != nullptr) kept[i].load(p.residual, (before + pack) * 8, false);
    }
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const unsigned pack = first + i * kThreads;
        if (pack >= p.packs) break;
        const unsigned channel = pack % p.across * 8;
        Eight value, other, time;
        value.unpack(sums[i], false);
        if (p.bias != nullptr) other.load(p.bias, channel, p.bias_is_float);
        if (p.added != nullptr) {
            time.load(p.added, picture * p.added_step + channel, false);
            if (p.bias != nullptr) time.add(other);
            value.add(time);
        } else if (p.bias != nullptr) {
            value.add(other);
        }
        value.activate(p.activation);
        if (p.residual != nullptr) other.unpack(kept[i], false), value.add(other);
        value.store(p.out, (before + pack) * 8, false);
    }
}
