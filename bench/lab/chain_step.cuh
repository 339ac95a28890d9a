// A step of a chain of small kernels, as a written token is one. A block adds up its part of the step's weights and
// mixes that with what another block of the step before it left, in integers: one step out of order shows in the
// result.
#pragma once

// Mirrored by CHAIN in chain.py. Pointers first.
struct ChainParams {
    const uint4* weights;  // of all steps, [steps, blocks, packs]
    unsigned* states;      // [2, blocks]: a step reads one half and writes the other
    int blocks, packs, step;
};

constexpr int kChainThreads = 256;  // THREADS in chain.py

// One mixing, of unsigned integers of 32 bits. Mirrored by `mixed` in chain.py.
__device__ inline unsigned mixed(unsigned before, unsigned added) {
    return before * 1664525u + 1013904223u + added;
}

__device__ inline void chain(const ChainParams& p) {
    __shared__ unsigned of_warp[kChainThreads / 32];
    const int block = blockIdx.x;
    const uint4* weights = p.weights + (static_cast<long long>(p.step) * p.blocks + block) * p.packs;
    unsigned sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < p.packs; i += kChainThreads) {
        const uint4 four = weights[i];
        sum += four.x + four.y + four.z + four.w;
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    unsigned all = 0;
    for (int warp = 0; warp < kChainThreads / 32; warp++) all += of_warp[warp];
    const unsigned* before = p.states + p.step % 2 * p.blocks;
    p.states[(p.step + 1) % 2 * p.blocks + block] = mixed(before[(block + 1) % p.blocks], all);
}
