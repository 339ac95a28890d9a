// int8_to_half: a weight of 8-bit numbers as halves, turned back if its rows were turned before they were rounded.
//
//   out = (x8 H) * scale       H: Hadamard matrices along the row, over their root (rotation.cuh), or none; scale: of
//   the
//                              row, or of all
//
// Sums of 256 such numbers are whole and fit a float, so turning them is exact: a product with the scale (with the root
// in it, a power of two) is rounded to float, and that to half. What is finite and beyond 65504 becomes +-65504.
//
// Layout. x8 [rows, k] bytes, out [rows, k] halves, both contiguous, from a multiple of 8 and of 16 bytes on; k a
// multiple of 8 and of the group. A warp's 256 elements may be of several rows; a group's are of one.
//
// Access. A thread has kAtOnce packs of eight, all loaded before the first is turned. 1 byte of each element is read
// and 2 are written, once.

#include "rotation.cuh"
#include "stores.cuh"

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;

struct Int8ToHalfParams {
    const signed char* x8;
    const float* scale;
    __half* out;
    unsigned packs, packs_per_row;
    int scale_per_row;
    int group;  // of the rotation; 0: none
};

extern "C" __global__ void __launch_bounds__(kThreads) int8_to_half(const __grid_constant__ Int8ToHalfParams p) {
    const Rotation rotation{p.group};
    const i64 first = i64(blockIdx.x) * (kThreads * kAtOnce);
    const int from = rotation.place(int(threadIdx.x));
    unsigned words[kAtOnce][2];
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        const i64 pack = first + v * kThreads + from;
        words[v][0] = words[v][1] = 0;
        if (pack < p.packs) load_words<Reading::kStreaming>(words[v], p.x8 + pack * kPack);
    }
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        float x[kPack];
#pragma unroll
        for (int i = 0; i < kPack; i++) x[i] = static_cast<signed char>(words[v][i / 4] >> (i % 4 * 8));
        rotation.turn(x);
        const i64 pack = first + v * kThreads + threadIdx.x;
        if (pack >= p.packs) continue;
        const float scale = p.scale[p.scale_per_row ? unsigned(pack) / p.packs_per_row : 0] * rotation.root();
#pragma unroll
        for (float& value : x) value = within_halves(value * scale);
        Pack<__half> halves;
        ::pack(x, halves);
        store_whole(p.out + pack * kPack, halves.words);
    }
}
