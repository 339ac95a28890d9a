// group_norm_silu, channels-last, in one launch: the shipped code of the statistics, a barrier of the grid, and the
// shipped code that joins the parts and writes the result. All blocks are on the card at once, so there are as many
// chunks as it has room for blocks, where two launches have more.
//
// group_norm_held keeps the pixels in registers over the barrier: x is read once. Then a chunk is a turn of a block,
// kHeldLast pixels of a thread, so only a picture that all registers of the card hold together has it.

#include "../../kernels_cuda/src/group_norm.cu"
#include "barrier.cuh"

// Mirrored by BARRIER_NORM in barrier.py. Pointers first.
struct BarrierNormParams {
    unsigned* arrived;
    GroupNormParams norm;
};

extern "C" __global__ void __launch_bounds__(kThreads, kLastBlocks)
    group_norm_at_once(const __grid_constant__ BarrierNormParams p) {
    last_stats<true>(p.norm);
    grid_barrier(p.arrived);
    last_joined<true>(p.norm);
}

// The moments of a thread's pixels, all of which it holds, and those of the block's groups: last_stats with one turn.
__device__ inline void held_moments(const GroupNormParams& p, const Column& c,
                                    const Pack<__half> (&held)[kHeldLast<true>], int left) {
    __shared__ Row rows[kThreads];
    float n = 0, mean[kPack] = {}, m2[kPack] = {};
#pragma unroll
    for (int v = 0; v < kHeldLast<true>; v++) {
        float a[kPack];
        unpack(held[v], a);
        n += v * c.rows < left ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < kPack; i++) mean[i] += a[i];  // zero where there is none
    }
#pragma unroll
    for (int i = 0; i < kPack; i++) mean[i] = n > 0 ? mean[i] / n : 0.0f;
#pragma unroll
    for (int v = 0; v < kHeldLast<true>; v++) {
        float a[kPack];
        unpack(held[v], a);
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            if (v * c.rows < left) m2[i] = fmaf(a[i] - mean[i], a[i] - mean[i], m2[i]);
        }
    }
    int half = 1;
    while (half * 2 < c.rows) half *= 2;
    for (; half > 0; half /= 2) {
        if (c.row >= half && c.row < 2 * half) rows[threadIdx.x].put(n, mean, m2);
        __syncthreads();
        if (c.row < half && c.row + half < c.rows) rows[threadIdx.x + half * p.lanes].join_to(n, mean, m2);
    }
    if (c.row == 0) rows[threadIdx.x].put(n, mean, m2);
    __syncthreads();
    const int group = first_group(p, c.column) + static_cast<int>(threadIdx.x);
    const Share share(p, c.column, group);
    if (threadIdx.x >= p.slots || group >= p.groups || share.channels() <= 0) return;
    const int from = c.column * p.lanes * kPack;
    float sum = 0, squares = 0;
    for (int i = share.first - from; i < share.last - from; i++) sum += rows[i / kPack].mean[i % kPack];
    const float middle = sum / static_cast<float>(share.channels());
    for (int i = share.first - from; i < share.last - from; i++) {
        const float delta = rows[i / kPack].mean[i % kPack] - middle;
        squares += fmaf(delta * delta, rows[0].n, rows[i / kPack].m2[i % kPack]);
    }
    p.parts[static_cast<i64>(blockIdx.x) * p.slots + threadIdx.x] = make_float2(middle, squares);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    group_norm_held(const __grid_constant__ BarrierNormParams all) {
    const GroupNormParams& p = all.norm;
    const Column c(p, blockIdx.x);
    const i64 first = c.first + c.row;
    const int left = static_cast<int>(c.last - first);
    const __half* x = static_cast<const __half*>(p.x) + c.batch * p.x_batch + c.channel + first * p.x_step;
    Pack<__half> held[kHeldLast<true>];
    ask<true>(held, c, x, c.rows * p.x_step, left);
    held_moments(p, c, held, left);
    grid_barrier(all.arrived);
    __shared__ Joined joined;
    joined.join(p, c);
    if (c.count == 0) return;
    __half* out = static_cast<__half*>(p.out) + c.batch * p.out_batch + c.channel + first * p.out_step;
    float mean[kPack], factor[kPack], plus[kPack];
    const int before = first_group(p, c.column);
#pragma unroll
    for (int i = 0; i < kPack; i++) {
        const int channel = c.channel + i;
        const float2 by = joined.group[channel / p.channels_per_group - before];
        mean[i] = by.x;
        factor[i] = by.y * (p.weight ? load_element(p.weight, channel, p.weight_is_float) : 1.0f);
        plus[i] = p.bias ? load_element(p.bias, channel, p.bias_is_float) : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kHeldLast<true>; v++) {
        if (v * c.rows >= left) break;
        float a[kPack];
        unpack(held[v], a);
#pragma unroll
        for (int i = 0; i < kPack; i++) a[i] = fmaf(a[i] - mean[i], factor[i], plus[i]);
        activate(a, p.activation);
        Pack<__half> result;
        pack(a, result);
        store_part<true>(out + v * c.rows * p.out_step, result, c.count);
    }
}
