// A barrier of all blocks of a grid, which all have to be on the card: a cooperative launch sees to that.
#pragma once

// arrived: zero before the first launch of all, and of one launch at a time. It grows by the blocks of a grid at each
// barrier, so nobody sets it back; it may pass 2^32 where blocks are a power of two, and no bench comes so far.
//
// What any thread wrote before is seen by every thread behind: the block's writes are ordered before thread 0's fence
// by the block's barrier, and other blocks' reads behind thread 0's acquiring one by the second.
__device__ inline void grid_barrier(unsigned* arrived) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
        __threadfence();
        const unsigned before = atomicAdd(arrived, 1u), enough = before - before % blocks + blocks;
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
        } while (static_cast<int>(now - enough) < 0);
        __threadfence();
    }
    __syncthreads();
}
