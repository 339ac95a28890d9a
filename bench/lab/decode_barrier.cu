// decode_attention in one launch: the shipped code of the parts, a barrier of the grid, and the shipped code that
// joins.
//
// Behind the barrier the grid's first blocks join a head each, a thread for each of its elements, as
// decode_attention_join does; the others end. The arithmetic and its order are the same, so are the bits.

#include "../../kernels_cuda/src/decode_attention.cu"
#include "barrier.cuh"

// Mirrored by BARRIER_DECODE in barrier.py. Pointers first.
struct BarrierDecodeParams {
    unsigned* arrived;
    DecodeParams decode;
    i64 batches;  // 8 bytes, because DecodeParams ends with a gap
};

__device__ inline void join_head(const DecodeParams& p, i64 head) {
    const float2* ends = p.part_heads + head * p.parts;
    const float* sums = p.part_sums + head * p.parts * p.d + threadIdx.x;
    float top = lowest(), all = 0, joined = 0;
    for (int part = 0; part < p.parts; part++) top = fmaxf(top, ends[part].x);
    for (int part = 0; part < p.parts; part++) {
        const float2 end = ends[part];
        const float by = rescaled(end.x, top);
        all = fmaf(by, end.y, all);
        joined = fmaf(by, sums[static_cast<i64>(part) * p.d], joined);
    }
    p.out[head * p.d + threadIdx.x] = __float2half_rn(joined / all);
}

template <int kD, int kG>
__device__ inline void decode_at_once(const BarrierDecodeParams& p) {
    static_assert(kD <= kThreads);
    over_keys<kD, kG>(p.decode);
    grid_barrier(p.arrived);
    const i64 blocks = static_cast<i64>(gridDim.x) * gridDim.y * gridDim.z;
    const i64 block = blockIdx.x + gridDim.x * (blockIdx.y + static_cast<i64>(gridDim.y) * blockIdx.z);
    if (threadIdx.x >= kD) return;
    for (i64 head = block; head < p.batches * p.decode.heads; head += blocks) {
        join_head(p.decode, head);
    }
}

#define DECODE_AT_ONCE(D, G)                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads)                        \
        decode_at_once_##D##_##G(const __grid_constant__ BarrierDecodeParams p) { \
        decode_at_once<D, G>(p);                                                  \
    }
DECODE_AT_ONCE(128, 1)
DECODE_AT_ONCE(128, 2)
DECODE_AT_ONCE(128, 4)
