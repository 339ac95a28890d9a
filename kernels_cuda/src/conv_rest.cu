// conv_rest: what is left to do of a convolution whose products another library has added up.
//
//   out = residual + activation(out + bias)     in place; bias and residual optional
//
// torch adds the bias behind cuDNN's convolution in a pass of its own that reads an element at a time, then comes one
// pass for the activation and one for the residual. Here it is one pass; the sums are float, rounded once.
//
// Layout. out, residual: [pixel, n] half, dense, n a multiple of 8. bias: [n], half or float.
//
// Bytes per element: 2 read + 2 written, with a residual 4 + 2. The bias stays in L1.
//
// Access: packs of eight channels, neighbours to neighbouring threads, whatever n is: pictures of 128 channels would
// leave most of a block idle if it had a pixel. A thread loads all its packs before it computes. The one division, for
// a pack's channels, is of 32 bits, some 20 instructions for 32 bytes and more.

#include "eight.cuh"

constexpr int kThreads = 256;  // THREADS in ops/conv_torch.py
constexpr int kHeld = 4;       // packs of a thread, HELD

// Mirrored by ConvRestParams in ops/conv_torch.py. Pointers first.
struct ConvRestParams {
    __half* out;
    const void* bias;        // null: 0
    const __half* residual;  // null: 0
    unsigned packs, across;  // of eight channels: all of them, and those of a pixel
    int activation;          // enum Activation
    int bias_is_float;
};

extern "C" __global__ void __launch_bounds__(kThreads) conv_rest(const __grid_constant__ ConvRestParams p) {
    const unsigned first = blockIdx.x * (kHeld * kThreads) + threadIdx.x;
    Words sums[kHeld], kept[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const unsigned pack = first + i * kThreads;
        if (pack >= p.packs) break;
        sums[i].load(p.out, i64(pack) * 8, false);
        if (p.residual != nullptr) kept[i].load(p.residual, i64(pack) * 8, false);
    }
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const unsigned pack = first + i * kThreads;
        if (pack >= p.packs) break;
        Eight value, other;
        value.unpack(sums[i], false);
        if (p.bias != nullptr) other.load(p.bias, pack % p.across * 8, p.bias_is_float), value.add(other);
        value.activate(p.activation);
        if (p.residual != nullptr) other.unpack(kept[i], false), value.add(other);
        value.store(p.out, i64(pack) * 8, false);
    }
}
